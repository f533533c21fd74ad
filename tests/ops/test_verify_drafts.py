"""``verify_drafts``: accepted paths of drafts, and the tokens added to sequences."""

import pytest
import torch

from lenvm_kernels.ops.verify_drafts import verify_drafts
from tests.helpers.cases import LARGEST, i32, make_drafts

# Draws at the nodes, the drafts and their parents; then the tokens and their nodes.
PATHS = [
    ([5, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [5, 6, 7, 9], [0, 1, 2, 3]),  # all drafts were drawn
    ([4, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [4], [0]),  # the first draft was not drawn
    ([5, -1, 7, 9], [5, 6, 7], [-1, 0, 1], [5], [0]),  # no draw after the first draft
    ([-2, 6, 7, 9], [-2, 6, 7], [-1, 0, 1], [], []),
    ([7, 1, 2, 6], [5, 6, 7], [-1, -1, -1], [7, 6], [0, 3]),  # siblings
    ([7, 9, 5, 6], [7, 7, 9], [-1, -1, 0], [7, 9, 6], [0, 1, 3]),  # the first of two equal drafts
    ([7, 1, 9, 6], [7, 7, 9], [-1, -1, 1], [7, 1], [0, 1]),  # children of the second are not reached
    ([5, 6, 7, 9], [5, -1, 7], [-1, 0, 1], [5, 6], [0, 1]),  # an absent draft, and a draft after it
    ([6, 9, 7, 8], [5, 6, 7], [-1, 2, 1], [6, 7, 8], [0, 2, 3]),  # a later node is not a parent
    ([LARGEST, 0, 7, 8], [LARGEST, 0, 7], [-2, 0, 1], [LARGEST, 0, 7, 8], [0, 1, 2, 3]),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("turn", range(3))
def test_accepted_path_of_drafts(device, backend, dtype, turn):
    """Requests in any order, several per program."""
    order = torch.arange(len(PATHS)).roll(7 * turn).tolist()
    drawn, token_ids, parents, tokens, nodes = zip(*(PATHS[i] for i in order), strict=True)
    drafts = make_drafts(token_ids, parents, dtype=dtype, device=device)
    verified = verify_drafts(i32(*drawn).flatten().to(device), drafts, backend=backend)
    assert verified.lens.tolist() == [len(x) for x in tokens]
    assert verified.tokens.tolist() == [x + [-1] * (4 - len(x)) for x in tokens]
    assert verified.nodes.tolist() == [x + [-1] * (4 - len(x)) for x in nodes]
