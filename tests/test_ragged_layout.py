"""Ragged layout: kernel against reference, the reference against Python lists, lengths that break the rules; trees."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.ragged_layout import inputs, make_inputs
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.types import RaggedLayout
from tests.helpers.cases import cases
from tests.helpers.drafts import i32


def assert_equal(actual, expected):
    for name, a, e in zip(RaggedLayout._fields, actual, expected, strict=True):
        if e is None:
            assert a is None, name
        else:
            assert a.dtype == e.dtype and torch.equal(a.cpu(), e.cpu()), name


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
        for j in range(min(max(candidate_lens[i].item(), 0), columns)):
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


@given(cases("ragged_layout"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    assert_equal(ragged_layout(**arguments, backend="reference"), lists(**arguments))


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
    rows = [[2, 3, 4, 5, 6], [8, 9, 10, 11, -1], [12, 13, *no * 3], no * 5]
    assert layout.candidate_rows.tolist() == rows
    assert layout.head_rows.tolist() == [*range(2, 7), *range(8, 14), *no * 9]
    assert layout.head_targets.tolist() == [*range(9), 10, 11, 9, *range(12, 20)]


def test_no_request_is_refused():
    arguments = make_inputs([2, 1], [1, 3], 3) | {"candidate_ids": torch.zeros(0, 3).int()}
    with pytest.raises(ValueError, match=r"^candidate_ids must have a row for each request, at least one, got none"):
        ragged_layout(**arguments)
