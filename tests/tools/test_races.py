"""The race checker finds exactly the planted faults. ``make races`` covers launches without faults."""

import re

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.cases import i32
from tests.helpers.interpreter import needs_interpreter
from tests.helpers.races import LaunchChecker, check_races

pytestmark = needs_interpreter


@triton.jit
def _copy_kernel(source_ptr, stride_source_row, target_ptr, stride_target_row, COLUMNS, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(source_ptr + row * stride_source_row + i, mask=i < COLUMNS)
    tl.store(target_ptr + row * stride_target_row + i, x, mask=i < COLUMNS)


@triton.jit
def _same_place_kernel(out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i // 2, i)


@triton.jit
def _last_arriver_kernel(
    x_ptr, partial_ptr, counter_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEMANTIC: tl.constexpr
):
    """Sum of all blocks: the program that arrives last adds the others' stored sums."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    tl.store(partial_ptr + part, tl.sum(tl.load(x_ptr + part * BLOCK + i)))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem=SEMANTIC) == parts - 1:
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + i, mask=i < parts, other=0.0)))


def copied(target, rows=3, columns=5, source=None):
    """Arguments that copy the first ``columns`` of ``rows`` rows of 8 numbers to ``target``."""
    source = torch.ones(3, 8) if source is None else source
    return _copy_kernel, (rows,), source, source.stride(0), target, target.stride(0), columns, 8


def merged(barrier, semantic):
    return _last_arriver_kernel, (4,), torch.ones(16), torch.zeros(4), i32(0), torch.zeros(1), 4, barrier, semantic


WHOLE = torch.zeros(3, 8)
VIEW, FIRST = WHOLE[:, :5], torch.zeros(2, 1, 5)[0]  # followed by memory outside the tensor
TWO, NO_BARRIER = "touch the same bytes from two programs", "touch the same bytes with no barrier between"
OUTSIDE = "the store is out of bounds of target_ptr, shape"
DIFFERENT = "the store writes different values to the same bytes"
# By name: a launch, and its conflicts without line numbers.
LAUNCHES = {
    "copy of rows to themselves": (copied(WHOLE, source=WHOLE), [f"load and store {NO_BARRIER}"]),
    "one value stored twice": (copied(torch.zeros(5).expand(3, 5)), [f"store and store {TWO}"]),
    "different values in one place": ((_same_place_kernel, (1,), torch.zeros(4), 8), [DIFFERENT]),
    "row that does not exist": (
        copied(torch.zeros(3, 5), rows=4),
        ["the load is out of bounds of source_ptr, shape (3, 8)", f"{OUTSIDE} (3, 5)"],
    ),
    "columns beside a view": (copied(VIEW, columns=6), [f"{OUTSIDE} (3, 5)"]),
    "columns of the next tensor": (copied(FIRST, rows=1, columns=8), [f"{OUTSIDE} (1, 5)"]),
    "parts merged without a barrier": (
        merged(False, "acq_rel"),
        [f"store and load {TWO}", f"store and load {NO_BARRIER}"],
    ),
    **{f"parts merged by {x}": (merged(True, x), [f"store and load {TWO}"]) for x in ("relaxed", "acquire", "release")},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_conflicts_of_a_launch(name):
    (kernel, grid, *arguments), expected = LAUNCHES[name]
    with LaunchChecker() as checker:
        kernel[grid](*arguments)
    assert checker.launches == {kernel.__name__: 1}
    found = {re.sub(r" in line \d+", "", conflict) for conflict in checker.conflicts}
    assert found == {f"{kernel.__name__}: {conflict}" for conflict in expected}
    assert not WHOLE[:, 5:].any()  # out-of-bounds accesses are skipped


@triton.jit
def _last_program_kernel(out_ptr):
    tl.atomic_xchg(out_ptr, tl.program_id(0))


def test_results_that_depend_on_order_or_garbage_are_found():
    def last_program():
        out = i32(0)
        _last_program_kernel[(5,)](out)
        return [out]

    with pytest.raises(AssertionError, match=r"result 0 changes with the order of the programs \(reverse\)"):
        check_races(last_program)
    with pytest.raises(AssertionError, match="or with garbage in memory"):
        check_races(lambda: [torch.empty(3)])
