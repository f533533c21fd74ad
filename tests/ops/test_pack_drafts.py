"""``pack_drafts``: trees computed by hand."""

import torch

from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.types import ScoredCandidates
from tests.helpers.cases import LARGEST, i32, make_drafts


def test_drafts_come_before_candidates(device, backend):
    """A tree with equal siblings, a chain that ends, a request without scored candidates, and a request without drafts.

    Some candidates equal drafts of other nodes, and some columns beyond the counts contain drafts.
    """
    drafts = make_drafts(
        [[6, 4, 6, 0], [9, 8, -1, 8], [5, 5, 5, 5]], [[-1, 0, -1, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]], device=device
    )
    token_ids = [
        *([6, 7], [4, 6], [0, 9], [6, 4], [1, 2]),  # 6 at the root; 4, then 6 below the first 6; below 4: 0, 9
        *([8, 3], [9, 8], [1, 9], [7, 7], [7, 7]),
        *([5, 1], [5, 2], [5, 3], [5, 4], [5, 6]),
        *([5, LARGEST], [9, 9], [9, 9], [9, 9], [9, 9]),
    ]
    counts = [*(2, 2, 1, 2, 2), *(2, 1, 2, 0, 0), *(0, 0, 0, 0, 0), *(2, 0, 0, 0, 0)]
    positions = [50 - i for i in range(20)]
    scored = ScoredCandidates(i32(*token_ids), i32(*counts), i32(*positions), torch.zeros(20, dtype=torch.bool))
    trees = pack_drafts(scored._make(x.to(device) for x in scored), drafts, backend=backend)

    no = [-1]
    assert trees.token_ids.tolist() == [
        [6, 4, 6, 0, 7, 6, 6, 4, 1, 2, *no * 4],
        [9, 8, 3, 9, 1, 9, *no * 8],
        no * 14,
        [5, LARGEST, *no * 12],
    ]
    assert trees.parents.tolist() == [
        [-1, 0, -1, 1, -1, 0, 2, 2, 3, 3, *no * 4],
        [-1, -1, -1, 0, 1, 1, *no * 8],
        no * 14,
        no * 14,
    ]
    assert trees.counts.tolist() == [10, 6, 0, 2]
    assert trees.positions.tolist() == [50, 45, 40, 35]
    assert trees.columns.view(4, 10).tolist() == [
        [0, 4, 1, 5, 3, -1, 6, 7, 8, 9],
        [1, 2, 3, -1, 4, 5, *no * 4],
        no * 10,
        [0, 1, *no * 8],
    ]
