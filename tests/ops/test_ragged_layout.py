"""``ragged_layout``: candidates in trees, computed by hand, and invalid lengths."""

import pytest
import torch

from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.types import RaggedLayout
from tests.helpers.drafts import i32
from tests.helpers.memory import INTEGER, MARGIN, GuardedMemory

BROKEN = {
    "delta_lens": [[7, 7, 7], [2**31 - 1] * 3, [-5, 9, 1], [-(2**31)] * 3],
    "delta_starts": [[6, 6, 6], [-1, -3, 0], [2**31 - 1] * 3, [-(2**31)] * 3],
    "candidate_lens": [[2**31 - 1] * 3, [-(2**31)] * 3],
    "cached_lens": [[2**31 - 1] * 3],
}


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize(("name", "values"), [(name, values) for name, many in BROKEN.items() for values in many])
def test_invalid_lengths_access_no_other_memory(device, name, values, trees):
    inputs = {
        "delta_ids": torch.arange(1, 8),
        "delta_slots": torch.arange(11, 18),
        "delta_starts": i32(4, 0, 6),  # the fourth token belongs to no request
        "delta_lens": i32(2, 3, 1),
        "candidate_ids": torch.arange(21, 27).view(3, 2),
        "candidate_lens": i32(2, 0, 1),
        "cached_lens": i32(5, 900, 0),
    }
    inputs = {name: x.to(device) for name, x in inputs.items()}
    if trees:
        inputs["candidate_parents"] = i32([-1, 0], [7, -9], [-1, 0]).to(device)
    inputs[name] = torch.tensor(values, dtype=torch.int32, device=device)
    # Memory around the tokens holds a value that must not appear in the result.
    for tokens in ("delta_ids", "delta_slots"):
        buffer = torch.full((2 * MARGIN + 7,), INTEGER, device=device)
        inputs[tokens] = buffer[MARGIN : MARGIN + 7].copy_(inputs[tokens])
    memory = GuardedMemory()
    layout = memory.call(ragged_layout, **inputs, backend="triton")
    memory.assert_kept()
    assert len(memory.tensors) == len(RaggedLayout._fields) - (not trees)
    # Every element is written, whatever the lengths.
    assert (layout.parents is not None) == trees
    assert not any((tensor == INTEGER).any() for tensor in layout if tensor is not None)


def test_candidates_in_trees(device, backend):
    """A branching tree, a chain, two siblings, and an empty tree; columns beyond the counts are ignored."""
    layout = ragged_layout(
        i32(10, 11, 12, 13, 14).to(device),
        i32(90, 80, 70, 60, 50).to(device),
        i32(3, 0, 1, 0).to(device),
        i32(2, 1, 0, 1).to(device),
        i32([1, 2, 3, 4, 5], [6, 7, 8, 9, 15], [16, 17, 18, 19, 20], [21] * 5).to(device),
        i32(5, 4, 2, 0).to(device),
        i32(30, 7, 0, 400).to(device),
        candidate_parents=i32([-1, 0, -1, 0, 3], [-1, 0, 1, 2, 3], [-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]).to(device),
        backend=backend,
    )
    no = [-1]
    assert layout.token_ids.tolist() == [13, 14, 1, 2, 3, 4, 5, 10, 6, 7, 8, 9, 16, 17, 10, *[0] * 10]
    assert layout.positions.tolist() == [30, 31, 32, 33, 32, 33, 34, 7, 8, 9, 10, 11, 0, 0, 400, *[0] * 10]
    assert layout.parents.tolist() == [*no * 3, 2, -1, 2, 5, *no * 2, 8, 9, 10, *no * 13]
    assert layout.parents.dtype == torch.int32
    assert layout.slots.tolist() == [60, 50, *no * 5, 90, *no * 6, 90, *no * 10]
    assert layout.q_offsets.tolist() == [0, 7, 12, 14, 15]
    rows = [[2, 3, 4, 5, 6], [8, 9, 10, 11, -1], [12, 13, *no * 3], no * 5]
    assert layout.candidate_rows.tolist() == rows
