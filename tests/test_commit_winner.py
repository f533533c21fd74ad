"""``commit_winner``: what is moved, bit by bit, why nothing is, and that no other byte of the cache changes."""

import pytest
import torch

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops.commit_winner import as_integers, make_pool
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.rope_cache import rope_cache
from tests.helpers.cases import simple_arguments
from tests.helpers.drafts import apart, i32

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHES, LAST = ("k_cache", "v_cache"), ("k_last", "v_last")


def make_pools(layers, slots, last_tokens, heads, head_dim, dtype, *, interleaved=False):
    """[cache, last]: keys and values ``[2, layers, tokens, heads, head_dim]``; interleaved, a token's lie together."""
    sizes = {"cache": slots, "last": last_tokens}
    draws = Draws(0)
    return [
        make_pool(draws, name, tokens, layers, heads, head_dim, dtype, interleaved=interleaved)
        for name, tokens in sizes.items()
    ]


def commit(pools, rows, *, backend, device="cpu"):
    """(committed, the pool of the cache afterwards as integers); the pools given stay as they are."""
    cache, last = (pool.to(device, copy=True) for pool in pools)
    assert cache.stride() == pools[0].stride()
    rows = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in rows.items()}
    committed = commit_winner(*cache, *last, **rows, backend=backend)
    assert committed.dtype == torch.int32 and torch.equal(as_integers(last.cpu()), as_integers(pools[1]))
    return committed.cpu(), as_integers(cache.cpu())


def moved(pools, moves):
    """The cache as integers, with the token rows of the last forward moved to slots: pairs of slot and row."""
    expected, last = as_integers(pools[0]).clone(), as_integers(pools[1])
    for slot, row in moves:
        expected[:, :, slot] = last[:, :, row]
    return expected


def assert_moves(rows, moves, *, device, backend, slots=7, tokens=8, dtype=torch.float32, committed=None):
    """So many tokens commit, of one request where nothing is said, and the cache changes by ``moves`` only."""
    pools = make_pools(2, slots, tokens, 2, 4, dtype)
    found, cache = commit(pools, rows, backend=backend, device=device)
    assert found.tolist() == ([len(moves)] if committed is None else committed)
    assert torch.equal(cache, moved(pools, moves))


def slots_with(value, row=2, page=9):
    """Of three requests' twelve pages, in no order. That of row 2 and position 9 is 3."""
    table = ((torch.arange(3)[:, None] + 2 * torch.arange(12) + 3) % 5).int()
    table[row, page] = value
    return table


# One row of this step that commits: token 23, third candidate of row 1 of the last step, in row 6 of its forward.
ROW = dict(
    candidate_ids=i32([23, 17, 5, -1], [5, 17, 23, -1]),
    candidate_rows=i32([0, 1, 2, -1], [4, 5, 6, -1]),
    candidate_positions=i32(8, 9),
    last_rows=i32(1),
    tokens=i32(23),
    positions=i32(9),
    slot_table=slots_with(3),
    table_rows=i32(2),
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_drawn_candidate_is_moved_in_every_layer(device, dtype, interleaved, backend):
    if dtype == torch.float64 and backend == "triton":
        pytest.skip("the kernels move no fp64")
    pools = make_pools(10, 5, 8, 2, 64, dtype, interleaved=interleaved)
    committed, cache = commit(pools, ROW, backend=backend, device=device)
    assert committed.tolist() == [1]
    assert torch.equal(cache, moved(pools, [(3, 6)]))


@pytest.mark.parametrize(
    "changed",
    [
        dict(tokens=i32(24)),
        dict(tokens=i32(-1)),  # as the padding
        dict(tokens=torch.tensor([2**32 + 23])),
        dict(positions=i32(8)),
        dict(candidate_positions=i32(9, 10)),
        dict(candidate_rows=i32([0, 1, 2, -1], [4, 5, -1, -1])),
        dict(candidate_rows=i32([0, 1, 2, -1], [4, 5, 8, -1])),
        dict(candidate_rows=torch.tensor([[0, 1, 2, -1], [4, 5, 2**32 + 6, -1]])),
        dict(last_rows=i32(-1)),
        dict(last_rows=i32(0)),  # lists the token at another position
        dict(last_rows=i32(2)),
        dict(last_rows=torch.tensor([2**32 + 1])),
        dict(slot_table=slots_with(-1)),
        dict(slot_table=slots_with(5)),
        dict(slot_table=slots_with(2**31 - 1)),
        dict(page_size=4, slot_table=slots_with(-1, page=2)),
        dict(page_size=4, slot_table=slots_with(1, page=2)),  # slot 5
        dict(page_size=4, slot_table=slots_with(2**30, page=2)),  # slot 2**32 + 1
        dict(page_size=3, slot_table=slots_with(2**31 - 1, page=3)),
        dict(candidate_parents=i32([-1] * 4, [-1, -1, 0, -1])),
        dict(candidate_parents=i32([-1] * 4, [-1, -1, 2, -1])),  # of itself
        dict(candidate_parents=i32([-1] * 4, [-1, -1, 4, -1])),
        dict(candidate_parents=i32([-1] * 4, [-1, -1, -2, -1])),
        dict(tokens=i32([23, 5]), new_lens=i32(0)),
        dict(tokens=i32([23, 5]), new_lens=i32(0), positions=i32(8)),
        dict(tokens=i32([23, 5]), new_lens=i32(-1), positions=i32(7)),
        dict(tokens=i32([23, 5]), new_lens=i32(2)),  # the second is at position 9
        dict(tokens=i32([5, 23]), new_lens=i32(2)),
    ],
    ids=", ".join,
)
def test_nothing_is_moved_otherwise(device, changed, backend):
    assert_moves(ROW | changed, [], slots=5, backend=backend, device=device)


def test_rows_outside_the_last_step_are_not_read(device, backend):
    """The candidates lie between others in memory that would match."""
    memory = dict(
        candidate_ids=i32(*[[23, 5]] * 3), candidate_rows=i32(*[[6, 5]] * 3), candidate_positions=i32(9, 9, 9)
    )
    step = {name: x.to(device)[1:2] for name, x in memory.items()}
    drawn = dict(last_rows=i32(-1, 0, 1), tokens=i32(23, 23, 23), positions=i32(9, 9, 9))
    slots = dict(slot_table=i32([4] * 9 + [2], [4] * 9 + [1], [4] * 9 + [0]), table_rows=i32(2, 0, 1))
    rows = step | drawn | slots
    assert_moves(rows, [(2, 6)], committed=[0, 1, 0], slots=5, backend=backend, device=device)


# A tree: below 23 are 5 and 7, below that 5 are 5 and 9, below that 5 are 23 and 7. 41 has nobody below it. Tokens -1
# pad, whatever else is said of them.
TREE_IDS = i32(5, 23, 7, 5, 7, 41, 23, 9, -1, -1, -1)
TREE_PARENTS = i32(3, 0, 0, 6, 6, -1, -1, 3, -1, 0, 6)
TREE_ROWS = i32(2, 9, 4, 11, 0, 7, 5, 1, -1, 3, 6)
# The tokens drawn, how many of them are new, and the token rows of those that commit.
PATHS = [
    ([23, 5, 5, 7], 4, [5, 11, 2, 4]),
    ([23, 5, 5, 23], 4, [5, 11, 2, 9]),
    ([23, 5, 5, 7], 6, [5, 11, 2, 4]),  # more are new than are told
    ([23, 5, 9, 7], 3, [5, 11, 1]),
    ([23, 5, 5, -1], 4, [5, 11, 2]),
    ([23, 5, 5, 7], 2, [5, 11]),  # the other tokens are nobody's
    ([23, 7, 5, 5], 4, [5, 0]),  # nobody is below 7
    ([23, 9, 7, 5], 4, [5]),  # 9 is below 5 only
    ([23, 99, 5, 5], 4, [5]),  # the chain is broken, though 5 is below 23
    ([23, 41, 5, 5], 4, [5]),
    ([41, 23, 5, 5], 4, [7]),
    ([23, 5, 5, 7], 1, [5]),
    ([5, 5, 7, 23], 4, []),  # 5 is below others only
    ([99, 23, 5, 5], 4, []),
    ([-1, 23, 5, 5], 4, []),
    ([23, 5, 5, 7], 0, []),
    ([23, 5, 5, 7], -2, []),
]


def relabelled(order):
    """The tree with its columns in another order: (ids, parents, rows)."""
    places = torch.full((len(order) + 1,), -1)  # the last one is that of nobody
    places[order] = torch.arange(len(order))
    return TREE_IDS[order], places[TREE_PARENTS[order].long()].int(), TREE_ROWS[order]


@pytest.mark.parametrize(
    "page_size, dtypes, sizes",
    [
        (1, [torch.int32] * 4, (1, 1, 4)),
        (2, [torch.int64] * 4, (5, 2, 200)),  # several programs a request
        (3, [torch.int32, torch.int64, torch.int32, torch.int64], (2, 3, 5)),
        (5, [torch.int64, torch.int32, torch.int64, torch.int32], (3, 1, 8)),
    ],
)
def test_several_tokens_commit_down_a_tree(device, page_size, dtypes, sizes, backend):
    """Two requests of the step before had the tree, with its columns in different orders; nothing else is in order.

    ``dtypes`` are those of candidates' rows, rows of the last step, tokens and rows of the slot table."""
    rng, b, k = torch.Generator().manual_seed(page_size), len(PATHS), len(TREE_IDS)
    pages = -(-12 // page_size)
    pools = make_pools(sizes[0], (b + 2) * pages * page_size, 24, *sizes[1:], torch.float32, interleaved=page_size > 2)
    ids, parents, rows = i32(*[[23] * k] * 4), i32(*[[-1] * k] * 4), i32(*[[8] * k] * 4)
    for last_row, first_row in ((3, 0), (1, 12)):
        ids[last_row], parents[last_row], rows[last_row] = relabelled(torch.randperm(k, generator=rng))
        rows[last_row] += torch.where(rows[last_row] >= 0, first_row, 0)
    slot_table = torch.randperm((b + 2) * pages, generator=rng).int().view(b + 2, pages)
    tokens, new_lens, wanted = zip(*PATHS, strict=True)
    turn = torch.arange(b) % 3 == 1  # of the second tree
    first = torch.where(turn, 4, 6).int()
    table_rows = torch.randperm(b + 2, generator=rng)[:b]
    arguments = dict(
        candidate_ids=apart(ids.to(device), 3, 23),
        candidate_rows=apart(rows.to(device, dtypes[0]), 2, 8),
        candidate_parents=apart(parents.to(device), 4, -1),
        candidate_positions=i32(3, 4, 5, 6),
        last_rows=torch.where(turn, 1, 3).to(dtypes[1]),
        tokens=apart(torch.tensor(tokens, dtype=dtypes[2], device=device), 3, 23),
        new_lens=i32(*new_lens),
        positions=first + i32(*new_lens) - 1,
        slot_table=apart(slot_table.to(device), 5, 0),
        table_rows=table_rows.to(dtypes[3]),
        page_size=page_size,
    )
    committed, cache = commit(pools, arguments, backend=backend, device=device)
    assert committed.tolist() == [len(path) for path in wanted]
    moves = []
    for i, path in enumerate(wanted):
        for position, row in enumerate(path, start=first[i].item()):
            page = slot_table[table_rows[i], position // page_size].item()
            moves.append((page * page_size + position % page_size, row + 12 * turn[i].item()))
    assert len({slot for slot, _ in moves}) == len(moves) == 27
    assert torch.equal(cache, moved(pools, moves))


def path_of(tokens, *, ids, rows, parents, first=3, slots=(4, 1, 0, 2, 3, 6, 5)):
    """Arguments of one request whose tokens are all new, the first of them at position ``first``, and its tree."""
    return dict(
        candidate_ids=i32(ids),
        candidate_rows=i32(rows),
        candidate_positions=i32(first),
        candidate_parents=None if parents is None else i32(parents),
        last_rows=i32(0),
        tokens=i32(tokens),
        new_lens=i32(len(tokens)),
        positions=i32(first + len(tokens) - 1),
        slot_table=i32(slots),
        table_rows=i32(0),
    )


@pytest.mark.parametrize(
    "rows, wanted",
    [
        ([3, 7, 1, 6, 2, 5], [3, 7, 5]),  # columns 0, 1 and 5
        ([3, -1, 1, 6, 2, 5], [3, 1, 2]),  # columns 0, 2 and 4
        ([3, 8, 1, 6, -1, 5], [3, 1]),
        ([3, 7, 1, 6, 2, 8], [3, 7]),  # the other 6 is below another 3
        ([-1, 7, 1, 6, 2, 5], [6]),  # column 3, without anyone below it
        ([8, 7, 1, -1, 2, 5], []),
    ],
)
def test_of_a_token_listed_twice_below_its_parent_the_first_counts(device, rows, wanted, backend):
    """And what is below the second does not, unless the first was not computed."""
    tree = path_of([8, 3, 6], ids=[8, 3, 3, 8, 6, 6], parents=[-1, 0, 0, -1, 2, 1], rows=rows)
    moves = list(zip([2, 3, 6], wanted, strict=False))
    assert_moves(tree, moves, dtype=torch.bfloat16, backend=backend, device=device)


@pytest.mark.parametrize("parents", [None, [-1, -1, -1]])
def test_without_parents_one_token_commits_at_most(device, parents, backend):
    for tokens, moves in (([6, 6, 3], [(2, 4)]), ([3, 8], [(2, 7)]), ([5, 3], [])):
        arguments = path_of(tokens, ids=[8, 3, 6], rows=[1, 7, 4], parents=parents)
        assert_moves(arguments, moves, dtype=torch.float16, backend=backend, device=device)


def test_parents_that_are_no_column_are_nobody(device, backend):
    """Nor is a candidate below itself, or two below each other. The tokens before them commit."""
    tree = dict(ids=[9, 4, 5, 6, 7, 8, 2], parents=[6, 7, -2, 3, 5, 4, -1], rows=[2, 0, 1, 6, 3, 5, 7])
    for tokens, moves in (
        ([2, 9], [(2, 7), (3, 2)]),
        ([2, 4], [(2, 7)]),
        ([2, 5], [(2, 7)]),
        ([2, 6], [(2, 7)]),
        ([2, 7, 8], [(2, 7)]),
        ([5, 4], []),
        ([4, 5], []),
        ([6, 6], []),
        ([7, 8], []),
    ):
        assert_moves(path_of(tokens, **tree), moves, backend=backend, device=device)


CHAIN = dict(ids=[7, 23, 9, 5], parents=[3, -1, 0, 1], rows=[4, 0, 6, 2])  # 23, 5, 7, 9


@pytest.mark.parametrize(
    "pages, slots",
    [
        ([5, 2, 0, 4], [5, 0, 1, 8]),
        ([5, 2, 5, 4], [5, 10]),  # the last page has one slot only
        ([0, 5, 2, 4], []),
        ([5, -1, 0, 4], []),
        ([5, 2, -1, 4], [5]),  # though the page after it is one
        ([5, 2, 3, -1], [5, 6, 7]),
        ([5, 2, 0, 6], [5, 0, 1]),
        ([5, 2, 0, 2**30], [5, 0, 1]),  # -2**31 to whoever keeps 32 bits
        ([5, 2, 2**31 - 1, 4], [5]),  # and -2
        ([5, -(2**31), 0, 4], []),  # and 1
    ],
)
def test_a_slot_outside_the_cache_ends_the_walk(device, pages, slots, backend):
    """Positions 3 to 6 in pages of two, of a cache of 11 slots."""
    arguments = path_of([23, 5, 7, 9], **CHAIN, slots=pages) | dict(page_size=2)
    assert_moves(arguments, list(zip(slots, [0, 2, 4, 6], strict=False)), slots=11, backend=backend, device=device)


@pytest.mark.parametrize("first, count", [(0, 4), (-1, 0), (-3, 0), (-4, 0)])
def test_a_sequence_begins_at_position_0(device, first, count, backend):
    """More tokens may be said to be new than the sequence has: nothing commits. The memory around has slots too."""
    arguments = path_of([23, 5, 7, 9], **CHAIN, first=first, slots=[8, 5, 3, 10])
    arguments["slot_table"] = apart(arguments["slot_table"].to(device), 6, 2)
    assert_moves(arguments, [(8, 0), (5, 2), (3, 4), (10, 6)][:count], slots=11, backend=backend, device=device)


def test_requests_that_do_not_exist_commit_nothing(device, backend):
    """Their row need not be in the slot table, nor need one of other requests that commit nothing."""
    drawn = dict(
        last_rows=i32(-1, 1, 1, 1),
        tokens=i32([0], [23], [99], [23]),
        new_lens=i32(0, 1, 1, 0),
        positions=i32(-1, 9, 9, 8),
        table_rows=i32(3, 2, 10**6, -1),
    )
    assert_moves(ROW | drawn, [(3, 6)], committed=[0, 1, 0, 0], slots=5, backend=backend, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tokens_keep_their_codes(device, dtype, backend):
    """In a cache in e4m3, with scales by layer and head, in layers that are apart."""
    cache, last = torch.full((2, 3, 7, 2, 4), -7.0).to(E4M3), torch.arange(-48.0, 48).view(3, 8, 1, 4)
    last = torch.stack([last, 4 * last]).expand(2, 3, 8, 2, 4).contiguous().to(dtype)
    # Keys and values become between -48 and 48 in every layer and head.
    scales = torch.tensor([[1.0, 2.0], [0.5, 1.0], [2.0, 0.25]])
    last *= scales[:, None, :, None].to(dtype)
    arguments = path_of([23, 5, 7, 9], **CHAIN)
    arguments |= dict(key_scales=apart(scales.to(device), 3, 16.0), value_scales=apart(4 * scales.to(device), 1, 16.0))
    committed, found = commit((cache, last), arguments, backend=backend, device=device)
    codes = (last[0] / scales[:, None, :, None].to(dtype)).float().to(E4M3)
    assert committed.tolist() == [4]
    assert torch.equal(found, moved((cache, codes.expand(2, -1, -1, -1, -1)), [(2, 0), (3, 2), (6, 4), (5, 6)]))


@pytest.mark.parametrize("empty", ["step", "last step", "last forward"])
def test_nothing_to_move(device, backend, empty):
    of_step = ["last_rows", "tokens", "positions", "slot_table", "table_rows"]
    names = {"step": of_step, "last step": list(ROW)[:3], "last forward": []}[empty]
    rows, committed = ROW | {name: ROW[name][:0] for name in names}, [] if empty == "step" else [0]
    tokens = 0 if empty == "last forward" else 8
    assert_moves(rows, [], committed=committed, slots=5, tokens=tokens, backend=backend, device=device)


@pytest.mark.parametrize("far_dim", ["layers", "slots and rows"])
def test_offsets_past_32_bits(device, far_dim):
    """Strides of 2**30, so that index 2 is 2**31 away. Pages that nothing touches take no memory on a CPU."""
    far = 2**30
    memory = torch.empty(2 * far + 512, dtype=torch.float16, device=device)
    strides = (far, 8, 8, 1) if far_dim == "layers" else (8, far, 8, 1)
    spread = [memory.as_strided((3, 3, 1, 8), strides, 128 * i) for i in range(4)]
    k_cache, v_cache, k_last, v_last = spread
    for value, x in enumerate(spread):
        x.fill_(value)
    rows = dict(ROW, candidate_rows=i32([0, 1, 2, -1], [0, 1, 2, -1]), slot_table=slots_with(2))
    assert commit_winner(*spread, **{name: x.to(device) for name, x in rows.items()}, backend="triton").item()
    assert (k_cache[:, 2] == 2).all() and (v_cache[:, 2] == 3).all()
    assert (k_cache[:, :2] == 0).all() and (v_cache[:, :2] == 1).all() and (k_last == 2).all() and (v_last == 3).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_winner_leaves_the_codes_that_its_own_forward_would(device, dtype, backend):
    """A token committed from its candidate, or computed as a delta by rope_cache: the cache is the same to the bit."""
    sizes = dict(heads=[4, 3], head_dim=24, dtype=dtype, e4m3=True, norm=True)
    forward = simple_arguments("rope_cache", 8, device=device, **sizes)
    forward["slots"] = torch.tensor([5, -1, 2, 0, -1, 7, 4, 1], device=device)
    forward["value_scales"] = forward["key_scales"].flip(0)
    _, k, v = rope_cache(**forward, backend=backend)
    scales = {name: forward[name].expand(2, 3).contiguous() for name in ("key_scales", "value_scales")}
    kept = (forward["slots"] >= 0).nonzero()[:, 0]
    caches = [torch.full((2, 8, 3, 24), -7.0, device=device).to(E4M3) for _ in range(2)]
    places = torch.arange(len(kept), dtype=torch.int32, device=device)
    candidates = (places[:, None].contiguous(), kept[:, None].contiguous(), places)
    drawn = [places.flip(0).contiguous()] * 3  # rows of the last step, tokens and positions
    slots = (forward["slots"][kept].int()[None], torch.zeros_like(places))
    of_forward = (k.expand(2, *k.shape), v.expand(2, *v.shape))
    committed = commit_winner(*caches, *of_forward, *candidates, *drawn, *slots, **scales, backend=backend)
    assert committed.tolist() == [1] * len(kept)
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        expected = as_integers(forward[name][:8]).expand(2, -1, -1, -1)
        assert torch.equal(as_integers(cache), expected)


SCALES = dict(key_scales=torch.zeros(2, 2), value_scales=torch.zeros(2, 2))
CODES = {name: torch.zeros(2, 5, 2, 4).to(E4M3) for name in CACHES} | SCALES
NO_TOKENS = {"tokens": torch.ones(1, 0, dtype=torch.int64), "new_lens": i32(0)}
PAGE_SIZE = "page_size must be an int of at least 1, got"
ERRORS = [
    (ValueError, "k_cache must have at least one layer, head and col", {"k_cache": torch.zeros(0, 5, 2, 4)}),
    (ValueError, "candidate_ids must have at least one column, got none", {"candidate_ids": i32([], [])}),
    (ValueError, r"new_lens must say how many of the tokens \[B, N\] are new", {"tokens": i32([23, 5])}),
    (ValueError, "tokens must have at least one column, got none", NO_TOKENS),
    (ValueError, r"tokens must be int32\|int64 \[\*\] on cpu, got int32 \[1, 1, 1\]", {"tokens": i32([[23]])}),
    *((ValueError, f"{PAGE_SIZE} {value!r}", {"page_size": value}) for value in (0, -4, 2.0, True, "4")),
    *((ValueError, f"{name} must be None unless k_cache is float8", {name: x}) for name, x in SCALES.items()),
    *((TypeError, rf"{x} must be a tensor float32 \[2, 2\] .*, got None", CODES | {x: None}) for x in SCALES),
    (ValueError, "k_last must be float32.*, got float8_e4m3fn", CODES | {"k_last": torch.zeros(2, 8, 2, 4).to(E4M3)}),
]


@pytest.mark.parametrize(("error", "message", "changed"), ERRORS)
def test_bad_arguments_are_named(error, message, changed):
    cache, last = make_pools(2, 5, 8, 2, 4, torch.float32)
    arguments = dict(zip((*CACHES, *LAST), (*cache, *last), strict=True)) | ROW
    with pytest.raises(error, match=f"^{message}"):
        commit_winner(**arguments | changed)
