"""Cache slots of requests without a reported end: reservation, reclamation and sharing."""

from hypothesis import given
from hypothesis import strategies as st

from lenvm_kernels.engines.own_slots import OwnSlots

SIZE = 4


def test_least_recently_used_row_loses_its_slots():
    pool = OwnSlots(6, 40, page_size=SIZE, num_pages=6)
    for row in (3, 1, 4):
        assert pool.reserve({row: 8}) == ([], [])
    pool.reserve({3: 8})
    pool.admit(2, range(7))  # a row without slots is not reclaimed
    assert pool.reserve({0: 4, 5: 4}) == ([1], [])
    assert pool.reserve({0: 4, 3: 12}) == ([4], [])
    assert [len(pool.slots.pages(row)) for row in range(6)] == [1, 0, 0, 3, 0, 1]


def test_longest_rows_are_refused():
    pool = OwnSlots(6, 40, page_size=SIZE, num_pages=5)
    pool.reserve({2: 8})
    room = pool.reserve({1: 16, 5: 12, 3: 4})
    assert room == ([2], [1]) and [len(pool.slots.pages(row)) for row in (1, 2, 3, 5)] == [0, 0, 1, 3]
    # A refused row also loses its previous slots.
    assert pool.reserve({3: 20}) == ([5], [])
    assert pool.reserve({3: 24, 0: 1}) == ([], [3]) and pool.slots.free_pages == 4


def test_prefix_is_shared_from_the_first_of_several_rows():
    """Both rows were admitted in one step, before a prefix was computed."""
    pool, tokens = OwnSlots(6, 40, page_size=SIZE, num_pages=20), list(range(9))
    for row in (3, 1):
        pool.admit(row, tokens)
    pool.reserve({3: 9, 1: 9})
    pool.computed(3, 7)
    assert pool.admit(5, tokens) == 4
    for row in (3, 1):
        pool.computed(row, 9)
    assert pool.admit(5, tokens) == 8 and pool.slots.pages(5) == pool.slots.pages(3)[:2]
    for row in (3, 5):
        pool.release(row)
    pool.computed(1, 9)
    assert pool.admit(2, tokens) == 8 and pool.slots.pages(2) == pool.slots.pages(1)[:2]


ROW = st.integers(0, 5)


@given(
    num_pages=st.integers(1, 14),
    events=st.lists(st.tuples(ROW, st.integers(0, 2), st.integers(0, 30), st.lists(ROW, max_size=4)), max_size=30),
)
def test_rows_only_share_pages_of_equal_tokens(num_pages, events):
    """Requests with few different prompts are added and grow; ``memory`` stores the tokens of each slot."""
    pool = OwnSlots(6, 40, page_size=SIZE, num_pages=num_pages)
    tokens_of = {row: [] for row in range(6)}
    memory = {}  # by slot, the tokens of its keys and values

    def write(row, start, end):
        for position in range(start, end):
            page = pool.slots.pages(row)[position // SIZE]
            memory[page, position % SIZE] = tuple(tokens_of[row][: position + 1])

    lengths = {}
    for row, prompt, length, others in events:
        own = [50 + row + 10 * i for i in range(length - length // 2)]
        tokens_of[row] = [*range(prompt, prompt + length // 2), *own]
        lengths[row] = pool.admit(row, tokens_of[row])
        step = {r: max(len(tokens_of[r]), 1) for r in {row, *others} if r in lengths}
        room = pool.reserve(step)
        assert not set(room.reclaimed) & set(step) and set(room.refused) <= set(step)
        for lost in (*room.reclaimed, *room.refused):
            lengths.pop(lost, None)
            assert pool.slots.pages(lost) == []
        for r in set(step) - set(room.refused):
            write(r, lengths.get(r, 0), len(tokens_of[r]))
            lengths[r] = len(tokens_of[r])
            pool.computed(r, lengths[r])
        for r, computed in lengths.items():
            for position in range(computed):
                page = pool.slots.pages(r)[position // SIZE]
                assert memory[page, position % SIZE] == tuple(tokens_of[r][: position + 1])
        held = {page for r in range(6) for page in pool.slots.pages(r)}
        assert len(held) + pool.slots.free_pages == num_pages
