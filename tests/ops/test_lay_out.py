"""``lay_out``: computed tokens, plans computed by hand, and invalid lengths."""

import pytest
import torch
from torch.utils._pytree import tree_map

from lenvm_kernels.fuzz.ops._inputs import fill
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.types import DeltaTokens, RaggedLayout
from tests.helpers.cases import arguments_of, changed, i32, small_case
from tests.helpers.memory import INTEGER, MARGIN, GuardedMemory


def on(device, arguments):
    """The arguments with their tensors on the device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, arguments)


# With a history of three tokens: the length of each request, its table row, numbers of cached tokens and candidates,
# and whether it needs values; then the positions of the computed tokens.
COMPUTED = [
    ((8, 5, 7, 2, True), [7]),
    ((8, 2, 6, 1, True), [6, 7]),
    ((9, 7, 6, 1, True), [6, 7, 8]),
    ((4, 0, 4, 2, True), []),  # all are cached
    ((9, 4, 8, 0, True), []),  # waits
    ((5, 8, 3, 0, True), []),  # waits
    ((8, 1, 5, 0, True), [5, 6, 7]),  # cannot wait longer
    ((7, 9, 4, 0, True), [4, 5, 6]),
    ((8, 6, 5, 3, False), []),  # does not need values
    ((3, 3, 0, 0, False), []),
    ((1, 10, 0, 1, True), [0]),
    ((2, 11, 0, 1, True), [0, 1]),
]


@pytest.mark.parametrize("page_size", [1, 5])
def test_computed_tokens_and_their_slots(device, backend, page_size):
    """Rows have different pages, and the slot table is a slice. With pages of 5, slots of row 2 exceed 32 bits."""
    given, expected = zip(*COMPUTED, strict=True)
    lengths, rows, cached_lens, counts, needs_values = zip(*given, strict=True)
    requests = empty_requests(len(lengths), device)
    columns = dict(lengths=lengths, cached_lens=cached_lens, request_rows=rows, needs_values=needs_values)
    fill(requests, slice(None), {name: torch.tensor(x) for name, x in columns.items()})
    history = empty_history(13, 3, device)
    history.tokens.copy_(100 * torch.arange(13)[:, None] + torch.arange(3))
    history.cached_lens.fill_(-5)  # shows which rows are written
    pages = torch.randperm(12 * 17, generator=torch.Generator().manual_seed(0)).int().view(12, 17)
    pages[2] = 2**31 - 1 - pages[2]
    candidates = dict(candidate_ids=torch.full((12, 3), 7), candidate_lens=i32(*counts), slot_table=pages[:, 4:])
    options = dict(page_size=page_size, num_heads=1, num_kv_heads=1, backend=backend)
    layout = lay_out(**on(device, candidates), requests=requests, history=history, **options)
    assert layout.cached_lens.tolist() == list(cached_lens)
    assert len(layout.token_ids) == 12 * (3 + 3)
    first, left = 0, [-5] * 13
    for i, (row, positions) in enumerate(zip(rows, expected, strict=True)):
        computed = slice(first, first + len(positions))
        assert layout.q_offsets[i] == first
        assert layout.positions[computed].tolist() == positions
        assert layout.token_ids[computed].tolist() == [100 * row + p % 3 for p in positions]
        slots = [pages[row, 4 + p // page_size].item() * page_size + p % page_size for p in positions]
        assert layout.slots[computed].tolist() == slots
        first += len(positions) + counts[i]
        if positions:
            left[row] = cached_lens[i] + len(positions)
    assert history.cached_lens.tolist() == left


def test_layout_without_tokens(device, backend):
    """It has no rows, but its offsets, its plan and its counters are written. Fresh memory is not 0."""
    inputs = dict(candidate_ids=i32((), ()), candidate_lens=i32(0, 0), slot_table=i32((0,), (1,)))
    inputs["delta"] = DeltaTokens(i32(), i32(0, 0), i32(0, 0), i32(0, 1), table_rows=i32(1, 0))
    layout = GuardedMemory().call(lay_out, **on(device, inputs), num_heads=1, num_kv_heads=1, backend=backend)
    assert layout.q_offsets.tolist() == [0, 0, 0] and layout.plan.tolist() == [[0] * 8]
    assert layout.counters.tolist() == [0] * len(layout.counters)


def test_plan(device, backend):
    """Tiles of 21 tokens, of which the first two are split. The second request has more tokens than the slot table."""
    inputs = dict(
        candidate_ids=torch.zeros(4, 2, dtype=torch.int32),
        candidate_lens=i32(2, 1, 0, 1),
        slot_table=torch.zeros(10, 1100, dtype=torch.int32),
        delta=DeltaTokens(
            torch.arange(48), i32(0, 44, 0, 45), i32(44, 1, 0, 2), i32(700, 2000, 3, 0), table_rows=i32(9, 5, 4, 6)
        ),
    )
    layout = lay_out(**on(device, inputs), num_heads=6, num_kv_heads=2, backend=backend)
    first = [[0, 9, 0, 46, 44, 700, *place] for place in ([0, 0], [0, 1], [1, 0], [1, 1], [2, 0])]
    second = [[1, 5, 46, 2, 1, 1100, 0, split] for split in range(2)]
    items = [*first, *second, [3, 6, 48, 3, 2, 0, 0, 0]]
    # 56 rows of 4 requests are at most 2 + 4 tiles, with two splits each.
    assert layout.plan.tolist() == [[len(items), *[0] * 7], *items, *[[0] * 8] * (12 - len(items))]
    assert layout.cached_lens.tolist() == [700, 1100, 3, 0]
    assert layout.slots[46] == -1
    assert layout.counters.tolist() == [0] * (4 * 2 * 2)


BROKEN = {
    "delta.lens": [[7, 7, 7], [2**31 - 1] * 3, [-5, 9, 1], [-(2**31)] * 3],
    "delta.starts": [[6, 6, 6], [-1, -3, 0], [2**31 - 1] * 3, [-(2**31)] * 3],
    "delta.cached_lens": [[2**31 - 1] * 3, [-(2**31)] * 3],
    "candidate_lens": [[2**31 - 1] * 3, [-(2**31)] * 3],
}


@pytest.mark.parametrize("parents", ["none", "tree"])
@pytest.mark.parametrize(("path", "values"), [(path, values) for path, many in BROKEN.items() for values in many])
def test_invalid_lengths_access_no_other_memory(device, path, values, parents):
    """The tokens are surrounded by a value that must not appear in the result, which is completely written."""
    arguments = arguments_of(small_case("lay_out", source="delta", parents=parents), device)
    token_ids = arguments["delta"].token_ids
    surrounded = torch.nn.functional.pad(token_ids, (MARGIN, MARGIN), value=INTEGER)[MARGIN:-MARGIN]
    arguments, memory = changed(arguments, "delta.token_ids", surrounded), GuardedMemory()
    layout = memory.call(lay_out, **changed(arguments, path, i32(*values).to(device)), backend="triton")
    memory.assert_kept()
    assert len(memory.tensors) == len(RaggedLayout._fields) - (parents == "none")
    assert not any((tensor == INTEGER).any() for tensor in layout if tensor is not None)
