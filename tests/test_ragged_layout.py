"""Ragged layout: kernel against reference, the reference against Python lists, and lengths that break the rules."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.ragged_layout import inputs, make_inputs
from lenvm_kernels.ops import ragged_layout as ops
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.types import RaggedLayout
from tests.helpers.cases import assert_right, cases


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
        assert a.dtype == e.dtype and torch.equal(a, e), name


def assert_kernel_equals_reference(inputs):
    assert_equal(ragged_layout(**inputs, backend="triton"), ragged_layout(**inputs, backend="reference"))


def lists(delta_ids, delta_slots, delta_starts, delta_lens, candidate_ids, candidate_lens, cached_lens):
    """The layout by appending to lists."""
    requests, columns = candidate_ids.shape
    rows, q_offsets, candidate_rows, head_rows, head_targets = [], [0], [], [], []
    for i in range(requests):
        start, length, cached = delta_starts[i].item(), delta_lens[i].item(), cached_lens[i].item()
        for j in range(length):
            rows.append((delta_ids[start + j].item(), cached + j, delta_slots[start + j].item()))
        candidate_rows.append([-1] * columns)
        for j in range(candidate_lens[i].item()):
            candidate_rows[i][j] = len(rows)
            head_rows.append(len(rows))
            head_targets.append(i * columns + j)
            rows.append((candidate_ids[i, j].item(), cached + length, -1))
        q_offsets.append(len(rows))

    head_targets += [i * columns + j for i in range(requests) for j in range(columns) if candidate_rows[i][j] < 0]
    rows += [(0, 0, -1)] * (len(delta_ids) + requests * columns - len(rows))
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
    )


@given(cases("ragged_layout", candidate_lens=["in range"]))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    assert_equal(ragged_layout(**arguments, backend="reference"), lists(**arguments))


@given(cases("ragged_layout"))
def test_kernel_matches_reference(device, case):
    assert_right(case, device)


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
    assert_equal(RaggedLayout(*(x.cpu() for x in layout)), lists(**inputs))
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
    assert_equal(RaggedLayout(*(x.cpu() for x in layout)), lists(**inputs))


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


@pytest.mark.parametrize(("name", "values"), [(name, values) for name, many in BROKEN.items() for values in many])
def test_broken_lengths_touch_nothing_else(device, monkeypatch, name, values):
    inputs = make_inputs([2, 3, 1], [2, 0, 1], 2, unreferenced=1, device=device)
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

    assert len(buffers) == len(RaggedLayout._fields)
    for buffer, size in buffers:
        assert (buffer[:margin] == guard).all() and (buffer[margin + size :] == guard).all()
    # Every element is written, whatever the lengths.
    assert not any((tensor == guard).any() for tensor in layout)
    assert sorted(layout.head_targets.tolist()) == list(range(6))
    assert torch.equal(layout.candidate_rows.flatten()[layout.head_targets], layout.head_rows)


GOOD = make_inputs([2, 1], [1, 3], 3)
ERRORS = [
    ("delta_ids", [1, 2, 3], TypeError, r"delta_ids must be a tensor int32\|int64 \[\*\], got list"),
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
    ("backend", "cuda", ValueError, "backend must be one of auto, triton, reference, got 'cuda'"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), ERRORS)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=message):
        ragged_layout(**{**GOOD, "backend": "reference"} | {name: value})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(device):
    inputs = make_inputs([3, 0, 5], [1, 4, 2], 4, unreferenced=6, device=device)
    ragged_layout(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout = ragged_layout(**inputs)
    inputs["delta_lens"].copy_(torch.tensor([2, 1, 0]))
    inputs["candidate_lens"].copy_(torch.tensor([4, 0, 3]))
    graph.replay()
    assert_equal(layout, ragged_layout(**inputs, backend="reference"))
