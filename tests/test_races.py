"""The race checker: every planted fault is found, and nothing else is."""

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter
from tests.helpers.races import LaunchChecker, check_races

pytestmark = needs_interpreter


@triton.jit
def _histogram_kernel(bins_ptr, tokens_ptr, N, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + i, mask=i < N, other=0)
    if ATOMIC:
        tl.atomic_add(bins_ptr + token, 1, mask=i < N)
    else:
        tl.store(bins_ptr + token, tl.load(bins_ptr + token, mask=i < N) + 1, mask=i < N)


@triton.jit
def _reverse_in_place_kernel(x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    row = x_ptr + tl.program_id(0) * BLOCK
    i = tl.arange(0, BLOCK)
    x = tl.load(row + i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(row + BLOCK - 1 - i, x)


@triton.jit
def _scale_then_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    row = x_ptr + tl.program_id(0) * BLOCK
    i = tl.arange(0, BLOCK)
    tl.store(row + i, tl.full([BLOCK], 2.0, tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + tl.program_id(0), tl.load(row) + tl.load(row + BLOCK - 1))


@triton.jit
def _copy_kernel(source_ptr, stride_source_row, target_ptr, stride_target_row, COLUMNS, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(source_ptr + row * stride_source_row + i, mask=i < COLUMNS)
    tl.store(target_ptr + row * stride_target_row + i, x, mask=i < COLUMNS)


@triton.jit
def _same_place_kernel(out_ptr, BLOCK: tl.constexpr, DIFFERENT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i // 2, i if DIFFERENT else i // 2)


@triton.jit
def _last_arriver_kernel(
    x_ptr, partial_ptr, counter_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEMANTIC: tl.constexpr
):
    """Sum of all blocks: the program that arrives last adds what the others stored."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    tl.store(partial_ptr + part, tl.sum(tl.load(x_ptr + part * BLOCK + i)))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem=SEMANTIC) == parts - 1:
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + i, mask=i < parts, other=0.0)))


def conflicts(kernel, grid, *args):
    with LaunchChecker() as checker:
        kernel[grid](*args)
    assert checker.launches == {kernel.__name__: 1}
    return [conflict.removeprefix(f"{kernel.__name__}: ") for conflict in checker.conflicts]


TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def test_planted_race_between_programs():
    """Token 1 is counted by both programs: one update gets lost unless it is atomic."""
    found = conflicts(_histogram_kernel, (2,), torch.zeros(10, dtype=torch.int32), TOKENS.roll(2), 8, 4, False)
    assert any("from two programs" in conflict for conflict in found)
    assert any("store in line" in conflict and "load in line" in conflict for conflict in found)
    bins = torch.zeros(10, dtype=torch.int32)
    assert conflicts(_histogram_kernel, (2,), bins, TOKENS, 8, 4, True) == []
    assert bins.tolist() == [0, 2, 1, 1, 1, 1, 1, 0, 0, 1]


def test_atomic_update_of_what_another_program_stores():
    bins = torch.zeros(4, dtype=torch.int32)

    @triton.jit
    def kernel(bins_ptr):
        if tl.program_id(0) == 0:
            tl.store(bins_ptr + 2, 7)
        else:
            tl.atomic_add(bins_ptr + 2, 1)

    (found,) = conflicts(kernel, (2,), bins)
    assert "store in line" in found and "atomic update in line" in found and "from two programs" in found


def test_two_programs_that_store_the_same_value():
    (found,) = conflicts(_copy_kernel, (2,), torch.zeros(5), 0, torch.zeros(5), 0, 5, 8)
    assert found.startswith("store in line") and found.endswith("touch the same bytes from two programs")


@pytest.mark.parametrize(
    "kernel, first, second", [(_scale_then_sum_kernel, "store", "load"), (_reverse_in_place_kernel, "load", "store")]
)
def test_planted_access_without_a_barrier(kernel, first, second):
    arguments = [torch.zeros(12)] if kernel is _reverse_in_place_kernel else [torch.zeros(12), torch.zeros(3)]
    found = conflicts(kernel, (3,), *arguments, 4, False)
    assert found and all("with no barrier between" in conflict for conflict in found)
    assert all(conflict.startswith(f"{first} in line") and f"and {second} in" in conflict for conflict in found)
    assert conflicts(kernel, (3,), *arguments, 4, True) == []


def test_planted_store_of_different_values_to_one_place():
    assert (
        "writes different values to the same bytes" in conflicts(_same_place_kernel, (1,), torch.zeros(4), 8, True)[0]
    )
    assert conflicts(_same_place_kernel, (1,), torch.zeros(4), 8, False) == []


def test_planted_access_out_of_bounds():
    source, target = torch.arange(15.0).view(3, 5), torch.zeros(3, 5)
    assert conflicts(_copy_kernel, (3,), source, 5, target, 5, 5, 8) == []
    assert torch.equal(source, target)
    found = conflicts(_copy_kernel, (4,), source, 5, target, 5, 5, 8)  # a row that does not exist
    assert len(found) == 2
    assert "load in line" in found[0] and "is out of bounds of source_ptr, shape (3, 5)" in found[0]
    assert "store in line" in found[1] and "is out of bounds of target_ptr, shape (3, 5)" in found[1]


def test_planted_access_out_of_a_view():
    """Columns 5 to 7 belong to the storage of the view, not to it; and one tensor may end where the next begins."""
    source, storage = torch.arange(24.0).view(3, 8), torch.zeros(3, 8)
    target = storage[:, :5]
    assert conflicts(_copy_kernel, (3,), source, 8, target, 8, 5, 8) == []
    (found,) = conflicts(_copy_kernel, (3,), source, 8, target, 8, 6, 8)
    assert "is out of bounds of target_ptr, shape (3, 5)" in found
    assert not storage[:, 5:].any()
    first, second = torch.zeros(2, 1, 5)
    (found,) = conflicts(_copy_kernel, (1,), torch.zeros(1, 8), 8, first, 5, 8, 8)
    assert "is out of bounds of target_ptr, shape (1, 5)" in found
    assert conflicts(_copy_kernel, (1,), second, 5, first, 5, 5, 8) == []


def test_planted_read_of_unwritten_memory():
    def copy(columns, fill):
        with LaunchChecker() as checker:
            source, target = torch.empty(3, 8), torch.empty(3, 8)
            fill(source)
            _copy_kernel[(3,)](source, 8, target, 8, columns, 8)
            _copy_kernel[(3,)](target, 8, torch.empty(3, 8), 8, 5, 8)  # what the first launch has written
        return checker.conflicts

    assert copy(5, lambda source: source[:, :5].fill_(1.0)) == []
    assert copy(5, lambda source: torch.zeros(3, 8, out=source)) == []
    (found,) = copy(6, lambda source: source[:, :5].fill_(1.0))
    assert "reads source_ptr, which nothing has written" in found


def test_last_arriver():
    """The merge is a race unless every part is stored before a barrier, and that before an ordered atomic update."""

    def merge(barrier, semantic):
        x = torch.arange(16.0)
        out = torch.zeros(1)
        found = conflicts(
            _last_arriver_kernel, (4,), x, torch.zeros(4), torch.zeros(1, dtype=torch.int32), out, 4, barrier, semantic
        )
        assert out == x.sum()
        return found

    assert merge(True, "acq_rel") == []
    for barrier, semantic in ((True, "relaxed"), (True, "acquire"), (True, "release"), (False, "acq_rel")):
        found = merge(barrier, semantic)
        assert any("from two programs" in conflict for conflict in found), (barrier, semantic)


def test_results_that_depend_on_the_order():
    def last_program():
        out = torch.zeros(1, dtype=torch.int32)

        @triton.jit
        def kernel(out_ptr):
            tl.atomic_xchg(out_ptr, tl.program_id(0))

        kernel[(5,)](out)
        return [out]

    with pytest.raises(AssertionError, match=r"result 0 changes with the order of the programs \(reverse\)"):
        check_races(last_program)
    with pytest.raises(AssertionError, match="or with garbage in memory"):
        check_races(lambda: [torch.empty(3)])


def test_leaves_the_interpreter_as_it_was():
    with pytest.raises(ValueError, match="order must be forward, reverse or random, got 'sideways'"):
        LaunchChecker("sideways")
    with pytest.raises(RuntimeError), LaunchChecker():
        raise RuntimeError
    target = torch.zeros(2, 2)
    _copy_kernel[(2,)](torch.ones(2, 2), 2, target, 2, 2, 2)
    assert target.all()
