"""Allocated and freed slots: requests never share a slot, and no slot is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lenvm_kernels.paged_slots import OutOfSlots, PagedSlots

ROWS, MAX_LEN = 4, 20


@given(
    page_size=st.sampled_from([1, 3, 16]),
    num_pages=st.integers(0, 30),
    events=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-1, MAX_LEN)), max_size=40),
)
def test_no_slot_is_shared_or_lost(page_size, num_pages, events):
    slots = PagedSlots(ROWS, MAX_LEN, page_size=page_size, num_pages=num_pages)
    lengths, held = [0] * ROWS, [[] for _ in range(ROWS)]
    for row, length in events:
        if length < 0:
            slots.free(row)
            lengths[row], held[row] = 0, []
            continue
        before = slots.free_pages
        try:
            slots.extend(row, length)
        except OutOfSlots:
            assert slots.free_pages == before
            continue
        lengths[row] = max(lengths[row], length)
        position = torch.arange(lengths[row])
        now = slots.slots(torch.full_like(position, row), position).tolist()
        assert now[: len(held[row])] == held[row]  # a request's slots never change
        held[row] = now
        used = [slot for row_slots in held for slot in row_slots]
        assert len(set(used)) == len(used) and all(0 <= slot < slots.num_slots for slot in used)
        assert slots.free_pages == num_pages - sum(-(-n // page_size) for n in lengths)


def test_default_number_of_pages_lets_every_row_reach_max_len():
    slots = PagedSlots(3, 10, page_size=4)
    assert (slots.num_slots, slots.free_pages) == (36, 9) and slots.table.dtype == torch.int32
    for row in (2, 0, 1):
        slots.extend(row, 10)
    pages = slots.table.tolist()
    rows, positions = torch.tensor([2, 1, 2]), torch.tensor([9, 0, 3])
    assert slots.slots(rows, positions).tolist() == [pages[2][2] * 4 + 1, pages[1][0] * 4, pages[2][0] * 4 + 3]


def test_bad_arguments():
    for name in ("requests", "max_len", "page_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedSlots(**{"requests": 1, "max_len": 1, name: 0})
    with pytest.raises(ValueError, match="length must be at most max_len = 5, got 6"):
        PagedSlots(1, 5).extend(0, 6)
    with pytest.raises(OutOfSlots, match="5 tokens in table row 0 need 5 more pages, 4 are free"):
        PagedSlots(1, 5, num_pages=4).extend(0, 5)
