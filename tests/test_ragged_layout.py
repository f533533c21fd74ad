"""Ragged layout: kernel against reference, the reference against Python lists, lengths that break the rules; trees."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.ragged_layout import inputs, make_inputs
from lenvm_kernels.ops import ragged_layout as ops
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.types import RaggedLayout
from tests.helpers.cases import cases
from tests.helpers.drafts import BACKENDS, LARGEST, apart, i32, variants


def decode_inputs(guided, columns, device="cpu"):
    """A decode step: one token a request in the batch's order, of which the unguided requests take none."""
    requests = len(guided)
    inputs = make_inputs([int(g) for g in guided], [columns * g for g in guided], columns, device=device)
    inputs["delta_ids"] = torch.arange(1, requests + 1, device=device)
    inputs["delta_slots"] = torch.arange(1001, 1001 + requests, device=device)
    inputs["delta_starts"] = torch.arange(requests, dtype=torch.int32, device=device)
    return inputs


def assert_equal(actual, expected):
    for name, a, e in zip(RaggedLayout._fields, actual, expected, strict=True):
        if e is None:
            assert a is None, name
        else:
            assert a.dtype == e.dtype and torch.equal(a.cpu(), e.cpu()), name


def assert_kernel_equals_reference(inputs):
    assert_equal(ragged_layout(**inputs, backend="triton"), ragged_layout(**inputs, backend="reference"))


def lists(
    *,
    delta_ids,
    delta_slots,
    delta_starts,
    delta_lens,
    candidate_ids,
    candidate_lens,
    cached_lens,
    candidate_parents=None,
):
    """The layout by appending to lists."""
    requests, columns = candidate_ids.shape
    rows, parents, q_offsets, candidate_rows, head_rows, head_targets = [], [], [0], [], [], []
    for i in range(requests):
        start, length, cached = delta_starts[i].item(), delta_lens[i].item(), cached_lens[i].item()
        for j in range(length):
            rows.append((delta_ids[start + j].item(), cached + j, delta_slots[start + j].item()))
        parents += [-1] * length
        candidate_rows.append([-1] * columns)
        first = len(rows)
        for j in range(candidate_lens[i].item()):
            candidate_rows[i][j] = len(rows)
            head_rows.append(len(rows))
            head_targets.append(i * columns + j)
            parent = -1 if candidate_parents is None else candidate_parents[i, j].item()
            is_root = parent not in range(j)
            position = cached + length if is_root else rows[first + parent][1] + 1
            parents.append(-1 if is_root else first + parent)
            rows.append((candidate_ids[i, j].item(), position, -1))
        q_offsets.append(len(rows))

    head_targets += [i * columns + j for i in range(requests) for j in range(columns) if candidate_rows[i][j] < 0]
    rows += [(0, 0, -1)] * (len(delta_ids) + requests * columns - len(rows))
    parents += [-1] * (len(rows) - len(parents))
    head_rows += [-1] * (requests * columns - len(head_rows))
    i64 = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return RaggedLayout(
        token_ids=i64[:, 0],
        positions=i64[:, 1],
        slots=i64[:, 2],
        q_offsets=torch.tensor(q_offsets, dtype=torch.int32),
        candidate_rows=torch.tensor(candidate_rows, dtype=torch.int64).view(requests, columns),
        head_rows=torch.tensor(head_rows, dtype=torch.int64),
        head_targets=torch.tensor(head_targets, dtype=torch.int64),
        parents=None if candidate_parents is None else i32(*parents),
    )


@given(cases("ragged_layout", candidate_lens=["in range"]))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    assert_equal(ragged_layout(**arguments, backend="reference"), lists(**arguments))


@pytest.mark.parametrize("tile", [128, ops.TILE])
def test_hundreds_of_requests(device, monkeypatch, tile):
    monkeypatch.setattr(ops, "TILE", tile)
    lengths = torch.randint(0, 9, (2, 300), generator=torch.Generator().manual_seed(0)).tolist()
    assert_kernel_equals_reference(make_inputs(*lengths, 8, unreferenced=500, device=device))


@pytest.mark.parametrize(
    ("delta_lens", "candidate_lens", "columns", "unreferenced"),
    [
        ([5000], [5], 8, 0),
        ([1, 3000, 0, 2048, 1], [8, 3, 8, 0, 1], 8, 2500),
        ([ops.TILE], [64], 64, 0),
        ([4], [0], 0, 0),
        ([0], [3], 3, 0),  # D = 0
        ([0], [0], 0, 0),  # T = 0
        ([0, 0, 0], [0, 0, 0], 5, 0),  # nothing but padding
        ([0, 0], [0, 0], 0, 5),
    ],
)
def test_edges(device, delta_lens, candidate_lens, columns, unreferenced):
    assert_kernel_equals_reference(
        make_inputs(delta_lens, candidate_lens, columns, unreferenced=unreferenced, device=device)
    )


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_decode_step_ignores_the_tokens_of_unguided_requests(device, backend):
    inputs = decode_inputs([False, True, False, True], 2, device)
    layout = ragged_layout(**inputs, backend=backend)
    assert_equal(layout, lists(**inputs))
    assert layout.slots.tolist() == [1002, -1, -1, 1004, *[-1] * 8]
    assert layout.head_rows.tolist() == [1, 2, 4, 5, *[-1] * 4]
    assert layout.head_targets.tolist() == [2, 3, 6, 7, 0, 1, 4, 5]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_logits_of_head_rows_become_a_table_by_one_scatter(device, backend):
    layout = ragged_layout(**make_inputs([2, 0, 1], [1, 3, 0], 3, device=device), backend=backend)
    logits = torch.where(layout.head_rows < 0, 0.0, layout.head_rows + 0.5)
    expected = torch.where(layout.candidate_rows < 0, 0.0, layout.candidate_rows + 0.5)
    found = torch.full_like(logits, -1).index_copy_(0, layout.head_targets, logits)
    assert torch.equal(found.view(expected.shape), expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_slices_of_longer_tensors(device, backend):
    inputs = make_inputs([2, 3], [4, 1], 4, device=device)
    sliced = {}
    for name, tensor in inputs.items():
        sliced[name] = torch.full([n + 3 for n in tensor.shape], -9, dtype=tensor.dtype, device=device)
        sliced[name] = sliced[name][tuple(slice(1, n + 1) for n in tensor.shape)].copy_(tensor)
    assert_equal(ragged_layout(**sliced, backend=backend), ragged_layout(**inputs, backend=backend))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_numbers_past_32_bits(device, backend):
    """Ids and slots are int64 as they come, of either dtype beside the other, and the largest positions do not wrap."""
    inputs = make_inputs([2, 1], [1, 2], 2, dtype=torch.int64, device=device)
    inputs["delta_slots"] += 2**40
    inputs["delta_ids"] += 2**41
    inputs["candidate_ids"] = inputs["candidate_ids"].int()
    inputs["cached_lens"] += 2**31 - 100_100
    layout = ragged_layout(**inputs, backend=backend)
    assert_equal(layout, lists(**inputs))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_candidate_lens_are_clamped(device, backend):
    inputs = make_inputs([1, 0, 2], [3, 0, 3], 3, device=device)
    layout = ragged_layout(**inputs, backend=backend)
    inputs["candidate_lens"] = torch.tensor([4, -1, 2**31 - 1], dtype=torch.int32, device=device)
    assert_equal(ragged_layout(**inputs, backend=backend), layout)


BROKEN = {
    "delta_lens": [[7, 7, 7], [2**31 - 1] * 3, [-5, 9, 1], [-(2**31)] * 3],
    "delta_starts": [[6, 6, 6], [-1, -3, 0], [2**31 - 1] * 3, [-(2**31)] * 3],
    "candidate_lens": [[2**31 - 1] * 3, [-(2**31)] * 3],
    "cached_lens": [[2**31 - 1] * 3],
}


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize(("name", "values"), [(name, values) for name, many in BROKEN.items() for values in many])
def test_broken_lengths_touch_nothing_else(device, monkeypatch, name, values, trees):
    inputs = make_inputs([2, 3, 1], [2, 0, 1], 2, unreferenced=1, device=device)
    if trees:
        inputs["candidate_parents"] = i32([-1, 0], [7, -9], [-1, 0]).to(device)
    inputs[name] = torch.tensor(values, dtype=torch.int32, device=device)
    guard, margin, buffers, empty = -77, 2048, [], torch.empty

    def guarded_empty(shape, *, dtype, device):
        size = torch.Size(shape).numel()
        buffer = empty(size + 2 * margin, dtype=dtype, device=device).fill_(guard)
        buffers.append((buffer, size))
        return buffer[margin : margin + size].view(shape)

    # On both sides of what may be read: values that must not come back.
    for tokens in ("delta_ids", "delta_slots"):
        buffer = torch.full((2 * margin + 7,), guard, device=device)
        inputs[tokens] = buffer[margin : margin + 7].copy_(inputs[tokens])
    monkeypatch.setattr(torch, "empty", guarded_empty)
    layout = ragged_layout(**inputs, backend="triton")
    monkeypatch.undo()

    assert len(buffers) == len(RaggedLayout._fields) - (not trees)
    for buffer, size in buffers:
        assert (buffer[:margin] == guard).all() and (buffer[margin + size :] == guard).all()
    # Every element is written, whatever the lengths.
    assert (layout.parents is not None) == trees
    assert not any((tensor == guard).any() for tensor in layout if tensor is not None)
    assert sorted(layout.head_targets.tolist()) == list(range(6))
    assert torch.equal(layout.candidate_rows.flatten()[layout.head_targets], layout.head_rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_candidates_in_trees(device, backend):
    """A branching one, a chain, one whose last column does not count, and one that is empty."""
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parent", [-1, -2, -(2**31), 3, 4, 5, 99, LARGEST])
def test_what_is_no_earlier_candidate_is_no_parent(device, backend, parent):
    """Of the fourth candidate: itself, later ones and none. What follows it counts from there."""
    inputs = make_inputs([1, 2], [6, 3], 6, device=device)
    inputs["candidate_parents"] = i32([-1, 0, 1, parent, 3, 4], [-1, 0, -1, 2, 3, 4]).to(device)
    layout = ragged_layout(**inputs, backend=backend)
    assert layout.parents.tolist()[:12] == [-1, -1, 1, 2, -1, 4, 5, -1, -1, -1, 9, -1]
    assert (layout.positions - layout.positions[0]).tolist()[:7] == [0, 1, 2, 3, 1, 2, 3]
    assert_equal(layout, lists(**inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 5, 17, 64])
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
def test_trees_of_every_depth(device, backend, columns, kind):
    """In rows that are apart, but not as far as those of the candidates."""
    inputs = make_inputs(
        [1, 0, 2], [columns, columns // 2, max(columns - 1, 0)], columns, unreferenced=3, device=device
    )
    column, generator = torch.arange(columns), torch.Generator().manual_seed(columns)
    parents = {
        "chain": (column - 1).expand(3, -1),
        "star": torch.where(column > 0, 0, -1).expand(3, -1),
        "random": torch.randint(0, 2**30, (3, columns), generator=generator) % (column + 1) - 1,
    }
    inputs["candidate_ids"] = apart(inputs["candidate_ids"], 5)
    inputs["candidate_parents"] = apart(parents[kind].int().to(device), 2)
    assert_equal(ragged_layout(**inputs, backend=backend), lists(**inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [4, 16, ops.TILE])
def test_trees_of_many_requests(device, monkeypatch, backend, tile):
    monkeypatch.setattr(ops, "TILE", tile)
    lens = torch.randint(0, 6, (2, 23), generator=torch.Generator().manual_seed(1))
    inputs = make_inputs(*lens.tolist(), 6, unreferenced=9, device=device)
    parents = torch.randint(0, 2**30, (23, 6), generator=torch.Generator().manual_seed(2)) % (torch.arange(6) + 2) - 1
    inputs["candidate_parents"] = parents.int().to(device)
    assert_equal(ragged_layout(**inputs, backend=backend), lists(**inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_without_parents_are_as_candidates(device, backend):
    """Whatever stands beside and beyond the columns that count."""
    inputs = make_inputs([2, 0, 1], [1, 3, 0], 3, unreferenced=1, device=device)
    expected = ragged_layout(**inputs, backend=backend)
    assert expected.parents is None
    parents = i32([-1, 0, 1], [-1, -1, -1], [0, 0, 0]).to(device)
    found = ragged_layout(**inputs, candidate_parents=parents, backend=backend)
    assert_equal(found._replace(parents=None), expected)
    assert found.parents.tolist() == [-1] * len(found.token_ids)


def test_no_number_of_requests_compiles_anything():
    assert variants("ragged_layout") == {"_ragged_layout_kernel": 1}


GOOD = make_inputs([2, 1], [1, 3], 3)
ERRORS = [
    ("delta_ids", torch.zeros(3), ValueError, r"delta_ids must be int32\|int64 \[\*\], got float32 \[3\] on cpu"),
    ("delta_ids", torch.zeros(1, 3).int(), ValueError, r"delta_ids must be .*, got int32 \[1, 3\]"),
    ("delta_ids", torch.zeros(6).int()[::2], ValueError, "delta_ids must be contiguous in its last dimension"),
    ("delta_slots", torch.zeros(2).int(), ValueError, r"delta_slots must be .* \[3\] on cpu, got int32 \[2\]"),
    ("delta_slots", None, TypeError, "delta_slots must be a tensor .*, got NoneType"),
    ("delta_starts", torch.zeros(2).long(), ValueError, r"delta_starts must be int32 \[2\] on cpu, got int64 \[2\]"),
    ("delta_starts", torch.zeros(3).int(), ValueError, r"delta_starts must be int32 \[2\] on cpu, got int32 \[3\]"),
    ("delta_lens", torch.zeros(2).long(), ValueError, r"delta_lens must be int32 \[2\] on cpu, got int64 \[2\]"),
    ("delta_lens", GOOD["delta_lens"].to("meta"), ValueError, "delta_lens must be .* on cpu, got .* on meta"),
    ("candidate_ids", torch.zeros(2).int(), ValueError, r"candidate_ids must be .* \[\*, \*\] on cpu, got int32 \[2\]"),
    ("candidate_ids", torch.zeros(3, 2).int().t(), ValueError, "candidate_ids must be contiguous in its last"),
    ("candidate_ids", torch.zeros(0, 3).int(), ValueError, "candidate_ids must have a row for each request"),
    ("candidate_lens", torch.zeros(2, 1).int(), ValueError, r"candidate_lens must be int32 \[2\] .*, got .* \[2, 1\]"),
    ("cached_lens", torch.zeros(2), ValueError, r"cached_lens must be int32 \[2\] on cpu, got float32 \[2\]"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), ERRORS)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=message):
        ragged_layout(**{**GOOD, "backend": "reference"} | {name: value})
