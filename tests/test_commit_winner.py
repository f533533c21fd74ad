"""``commit_winner``: what is moved, bit by bit, why nothing is, and that no other byte of the cache changes."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops.commit_winner import as_integers, make_pool
from lenvm_kernels.fuzz.ops.rope_cache import make_inputs
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.rope_cache import rope_cache
from tests.helpers.cases import assert_right, cases

BACKENDS = ["triton", "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHES, LAST = ("k_cache", "v_cache"), ("k_last", "v_last")


def make_pools(layers, slots, last_tokens, heads, head_dim, dtype, *, interleaved=False, seed=0):
    """[cache, last]: keys and values ``[2, layers, tokens, heads, head_dim]``; interleaved, a token's lie together."""
    sizes = {"cache": slots, "last": last_tokens}
    draws = Draws(seed)
    return [
        make_pool(draws, name, tokens, layers, heads, head_dim, dtype, interleaved=interleaved)
        for name, tokens in sizes.items()
    ]


def commit(pools, rows, *, backend, device="cpu"):
    """(committed, the pool of the cache afterwards as integers); the pools given stay as they are."""
    cache, last = (pool.to(device, copy=True) for pool in pools)
    assert cache.stride() == pools[0].stride()
    rows = {name: tensor.to(device) for name, tensor in rows.items()}
    committed = commit_winner(*cache, *last, **rows, backend=backend)
    assert committed.dtype == torch.bool and torch.equal(as_integers(last.cpu()), as_integers(pools[1]))
    return committed.cpu(), as_integers(cache.cpu())


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@given(cases("commit_winner"))
def test_triton_does_what_the_reference_does(device, case):
    assert_right(case, device)


# One row of this step that commits: token 23, third candidate of row 1 of the last step, in row 6 of its forward.
ROW = dict(
    candidate_ids=i32([23, 17, 5, -1], [5, 17, 23, -1]),
    candidate_rows=i32([0, 1, 2, -1], [4, 5, 6, -1]),
    candidate_positions=i32(8, 9),
    last_rows=i32(1),
    tokens=i32(23),
    positions=i32(9),
    slots=i32(3),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_drawn_candidate_is_moved_in_every_layer(device, dtype, interleaved, backend):
    pools = make_pools(10, 5, 8, 2, 64, dtype, interleaved=interleaved)
    committed, cache = commit(pools, ROW, backend=backend, device=device)
    expected, last = map(as_integers, pools)
    expected[:, :, 3] = last[:, :, 6]
    assert committed.tolist() == [True]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", BACKENDS)
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
        dict(slots=i32(-1)),
        dict(slots=i32(5)),
        dict(slots=torch.tensor([2**32 + 3])),
    ],
    ids=lambda changed: " ".join(f"{name} {tensor.tolist()}" for name, tensor in changed.items()),
)
def test_nothing_is_moved_otherwise(device, changed, backend):
    pools = make_pools(3, 5, 8, 2, 16, torch.float32)
    committed, cache = commit(pools, ROW | changed, backend=backend, device=device)
    assert committed.tolist() == [False]
    assert torch.equal(cache, as_integers(pools[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_outside_the_last_step_are_not_read(device, backend):
    """The candidates lie between others in memory that would match."""
    pools = make_pools(2, 5, 8, 2, 4, torch.float32)
    memory = dict(
        candidate_ids=i32(*[[23, 5]] * 3), candidate_rows=i32(*[[6, 5]] * 3), candidate_positions=i32(9, 9, 9)
    )
    step = {name: x.to(device)[1:2] for name, x in memory.items()}
    drawn = dict(last_rows=i32(-1, 0, 1), tokens=i32(23, 23, 23), positions=i32(9, 9, 9), slots=i32(0, 1, 2))
    committed, _ = commit(pools, step | drawn, backend=backend, device=device)
    assert committed.tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_token_listed_twice_the_higher_row_counts(device, backend):
    pools = make_pools(2, 5, 8, 1, 16, torch.float32)
    twice = ROW | dict(candidate_ids=i32([5] * 4, [23, 23, 23, 23]), candidate_rows=i32([0] * 4, [2, 7, -1, 8]))
    _, cache = commit(pools, twice, backend=backend, device=device)
    assert torch.equal(cache[:, :, 3], as_integers(pools[1])[:, :, 7])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_see_each_other(device, backend):
    """All rows at once, or one after the other in any order: the same bytes."""
    rows, slots = 12, 4
    rng = torch.Generator().manual_seed(2)
    pools = make_pools(4, 20, rows * slots, 2, 16, torch.bfloat16)
    step = dict(
        candidate_ids=torch.arange(rows * slots, dtype=torch.int32).view(rows, slots),
        candidate_rows=torch.randperm(rows * slots, generator=rng).view(rows, slots),
        candidate_positions=torch.arange(rows, dtype=torch.int32),
    )
    last = torch.randperm(rows, generator=rng)
    drawn = dict(
        last_rows=last,
        tokens=last * slots + torch.randint(0, slots + 2, (rows,), generator=rng),  # some of the next row
        positions=last.int(),
        slots=torch.randperm(20, generator=rng)[:rows],
    )
    committed, whole = commit(pools, step | drawn, backend=backend, device=device)
    assert committed.any() and not committed.all()
    for i in torch.randperm(rows, generator=rng).tolist():
        one, cache = commit(pools, step | {k: v[[i]] for k, v in drawn.items()}, backend=backend, device=device)
        assert one[0] == committed[i]
        pools[0] = cache.view(pools[0].dtype)
    assert torch.equal(as_integers(pools[0]), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ["step", "last step", "last forward"])
def test_nothing_to_move(device, backend, empty):
    pools = make_pools(2, 5, 0 if empty == "last forward" else 8, 2, 4, torch.float32)
    rows = dict(ROW)
    for name in {"step": list(ROW)[3:], "last step": list(ROW)[:3], "last forward": []}[empty]:
        rows[name] = rows[name][:0]
    committed, cache = commit(pools, rows, backend=backend, device=device)
    assert committed.tolist() == ([] if empty == "step" else [False])
    assert torch.equal(cache, as_integers(pools[0]))


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
    rows = dict(ROW, candidate_rows=i32([0, 1, 2, -1], [0, 1, 2, -1]), slots=i32(2))
    assert commit_winner(*spread, **{name: x.to(device) for name, x in rows.items()}, backend="triton").item()
    assert (k_cache[:, 2] == 2).all() and (v_cache[:, 2] == 3).all()
    assert (k_cache[:, :2] == 0).all() and (v_cache[:, :2] == 1).all() and (k_last == 2).all() and (v_last == 3).all()


def test_reference_takes_fp64():
    pools = make_pools(2, 5, 8, 2, 4, torch.float64)
    _, cache = commit(pools, ROW, backend="reference")
    assert torch.equal(cache[:, :, 3], as_integers(pools[1])[:, :, 6])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(device):
    pools = [pool.to(device) for pool in make_pools(28, 5, 8, 2, 128, torch.bfloat16)]
    rows = {name: tensor.to(device) for name, tensor in ROW.items()}
    commit_winner(*pools[0], *pools[1], **rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        committed = commit_winner(*pools[0], *pools[1], **rows)
    rows["slots"].fill_(4)
    graph.replay()
    assert committed.item()
    assert torch.equal(as_integers(pools[0])[:, :, 4], as_integers(pools[1])[:, :, 6])


def in_layout(x, layout):
    """The values of ``x [layers, tokens, heads, head_dim]`` with other strides, among zeros."""
    layers, tokens, heads, head_dim = x.shape
    y = {
        0: lambda: x.new_zeros(layers, tokens + 2, heads, head_dim)[:, 1:-1],
        1: lambda: x.new_zeros(tokens, layers, heads, head_dim).transpose(0, 1),
        2: lambda: x.new_zeros(layers, tokens, heads + 1, head_dim)[:, :, 1:],
        3: lambda: x.new_zeros(tokens + 1, layers, heads + 2, head_dim).transpose(0, 1)[:, 1:, :heads],
    }[layout]()
    return y.copy_(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(4))
def test_every_tensor_has_strides_of_its_own(device, turn, backend):
    """Keys and values, of the cache and of the last forward, ids and rows of candidates: no two laid out alike.

    Rows, slots and rows of the last step are in no order, and token 0 is one of those drawn."""
    cache, last = make_pools(5, 7, 9, 2, 24, torch.float32, seed=turn)
    operands = [in_layout(x.to(device), (turn + i) % 4) for i, x in enumerate((*cache, *last))]
    assert len({x.stride() for x in operands}) == 4
    ids, rows = i32([5, 0, 6, -1], [0, 7, -1, -1], [9, 4, 0, 8]), i32([1, 2, 3, -1], [4, 0, -1, -1], [5, 6, 7, 8])
    wider_ids, wider_rows = torch.zeros(3, 6, dtype=torch.int32), torch.zeros(3, 11, dtype=torch.int64)
    wider_ids[:, 2:], wider_rows[:, 3:7] = ids, rows
    step = dict(
        candidate_ids=wider_ids.to(device)[:, 2:],
        candidate_rows=wider_rows.to(device)[:, 3:7],
        candidate_positions=i32(11, 13, 12).to(device),
    )
    drawn = dict(last_rows=i32(2, 0, 1), tokens=i32(0, 6, 7), positions=i32(12, 11, 13), slots=i32(3, 6, 0))
    committed = commit_winner(*operands, **step, **{k: x.to(device) for k, x in drawn.items()}, backend=backend)
    assert committed.tolist() == [True] * 3
    for x, before, source in zip(operands[:2], cache, last, strict=True):
        expected = as_integers(before)
        expected[:, [3, 6, 0]] = as_integers(source)[:, [7, 3, 0]]
        assert torch.equal(as_integers(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_64_candidates(device, backend):
    pools = make_pools(2, 5, 70, 1, 8, torch.bfloat16)
    step = dict(
        candidate_ids=torch.arange(63, -1, -1, dtype=torch.int32)[None],
        candidate_rows=torch.arange(5, 69)[None],
        candidate_positions=i32(9),
    )
    for token in (0, 63):
        drawn = dict(last_rows=i32(0), tokens=i32(token), positions=i32(9), slots=i32(1))
        committed, cache = commit(pools, step | drawn, backend=backend, device=device)
        assert committed.item() and torch.equal(cache[:, :, 1], as_integers(pools[1])[:, :, 5 + 63 - token])


def good_arguments():
    cache, last = make_pools(2, 5, 8, 2, 4, torch.float32)
    return dict(zip((*CACHES, *LAST), (*cache, *last), strict=True)) | ROW


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("k_cache", None, TypeError, "k_cache must be a tensor float32.*, got NoneType"),
        ("k_cache", zeros(2, 5, 8), ValueError, r"k_cache must be .* \[\*, \*, \*, \*\], got float32 \[2, 5, 8\]"),
        ("k_cache", zeros(2, 5, 2, 4).int(), ValueError, "k_cache must be float32.*, got int32"),
        ("k_cache", zeros(0, 5, 2, 4), ValueError, "k_cache must have at least one layer, head and column"),
        ("k_cache", zeros(2, 5, 4, 2).transpose(2, 3), ValueError, "k_cache must be contiguous in its last dimension"),
        ("k_cache", zeros(2, 2, 5, 4).transpose(1, 2), ValueError, "k_cache must be contiguous in its last two dim"),
        (
            "v_last",
            zeros(2, 2, 8, 4).transpose(1, 2),
            ValueError,
            "v_last must be contiguous in its last two dimensions",
        ),
        ("v_cache", zeros(2, 2, 5, 4).transpose(1, 2), ValueError, "v_cache must be contiguous in its last two dim"),
        ("k_last", zeros(2, 2, 8, 4).transpose(1, 2), ValueError, "k_last must be contiguous in its last two dim"),
        ("v_cache", zeros(2, 5, 2, 4).half(), ValueError, "v_cache must be float32 .*, got float16"),
        ("v_last", zeros(2, 8, 2, 4).half(), ValueError, "v_last must be float32 .*, got float16"),
        ("k_last", zeros(2, 8, 2, 4).to(E4M3), ValueError, "k_last must be float32 .*, got float8_e4m3fn"),
        ("key_scales", zeros(2, 2), ValueError, "key_scales must be None unless k_cache is float8_e4m3fn, .* float32"),
        ("value_scales", zeros(2, 2), ValueError, "value_scales must be None unless k_cache is float8_e4m3fn"),
        ("v_cache", zeros(2, 6, 2, 4), ValueError, r"v_cache must be float32 \[2, 5, 2, 4\] on cpu, got .* \[2, 6"),
        ("k_last", zeros(3, 8, 2, 4), ValueError, r"k_last must be float32 \[2, \*, 2, 4\] on cpu, got .* \[3, 8"),
        ("k_last", zeros(2, 8, 2, 4).half(), ValueError, r"k_last must be float32 .*, got float16"),
        ("v_last", zeros(2, 7, 2, 4), ValueError, r"v_last must be float32 \[2, 8, 2, 4\] on cpu, got .* \[2, 7"),
        ("candidate_ids", zeros(2, 4).long(), ValueError, r"candidate_ids must be int32 \[\*, \*\] on cpu, got int64"),
        (
            "candidate_ids",
            zeros(2, 3).int(),
            ValueError,
            "candidate_ids must have a power of two up to 64 columns, got 3",
        ),
        ("candidate_ids", zeros(2, 128).int(), ValueError, "candidate_ids must have a power of two .*, got 128"),
        ("candidate_ids", zeros(2, 0).int(), ValueError, "candidate_ids must have a power of two .*, got 0"),
        ("candidate_rows", zeros(2, 2).int(), ValueError, r"candidate_rows must be int32\|int64 \[2, 4\] on cpu, got"),
        ("candidate_rows", zeros(4, 2).int().T, ValueError, "candidate_rows must be contiguous in its last dimension"),
        ("candidate_positions", i32(1), ValueError, r"candidate_positions must be int32 \[2\] on cpu, got int32 \[1\]"),
        ("last_rows", i32(1, 2), ValueError, r"last_rows must be int32\|int64 \[1\] on cpu, got int32 \[2\]"),
        ("tokens", zeros(1), ValueError, r"tokens must be int32\|int64 \[\*\] on cpu, got float32"),
        ("last_rows", zeros(1), ValueError, r"last_rows must be int32\|int64 \[1\] on cpu, got float32"),
        ("candidate_rows", zeros(2, 4), ValueError, r"candidate_rows must be int32\|int64 \[2, 4\] .*, got float32"),
        ("candidate_positions", zeros(2).long(), ValueError, r"candidate_positions must be int32 \[2\] .*, got int64"),
        ("positions", i32(9, 9), ValueError, r"positions must be int32 \[1\] on cpu, got int32 \[2\]"),
        ("slots", zeros(1), ValueError, r"slots must be int32\|int64 \[1\] on cpu, got float32"),
        ("slots", i32(3, 3), ValueError, r"slots must be int32\|int64 \[1\] on cpu, got int32 \[2\]"),
        ("positions", zeros(1).long(), ValueError, r"positions must be int32 \[1\] on cpu, got int64"),
        ("slots", [3], TypeError, r"slots must be a tensor int32\|int64 \[1\] on cpu, got list"),
        ("backend", "gpu", ValueError, "backend must be one of"),
    ],
)
def test_bad_arguments_are_named(name, value, error, message):
    with pytest.raises(error, match=message):
        commit_winner(**{**good_arguments(), name: value})


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("key_scales", None, TypeError, r"key_scales must be a tensor float32 \[2, 3\] on cpu, got NoneType"),
        ("value_scales", zeros(3, 2), ValueError, r"value_scales must be float32 \[2, 3\] on cpu, got .* \[3, 2\]"),
        ("key_scales", zeros(2, 3).half(), ValueError, "key_scales must be float32 .*, got float16"),
        ("k_last", zeros(2, 8, 3, 4).to(E4M3), ValueError, r"k_last must be float32\|bfloat16\|.*, got float8_e4m3fn"),
        ("v_last", zeros(2, 8, 3, 4).half(), ValueError, "v_last must be float32 .*, got float16"),
    ],
)
def test_bad_scales_are_named(name, value, error, message):
    cache, last = zeros(2, 5, 3, 4).to(E4M3), zeros(2, 8, 3, 4)
    arguments = dict(k_cache=cache, v_cache=cache.clone(), k_last=last, v_last=last.clone(), **ROW)
    scales = dict(key_scales=zeros(2, 3), value_scales=zeros(2, 3))
    with pytest.raises(error, match=message):
        commit_winner(**{**arguments, **scales, name: value})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_winner_leaves_the_codes_that_its_own_forward_would(device, dtype, backend):
    """A token committed from its candidate, or computed as a delta by rope_cache: the cache is the same to the bit."""
    forward = make_inputs(8, 4, 3, 24, dtype, e4m3=True, norm=True, device=device, num_slots=8)
    forward["slots"] = torch.tensor([5, -1, 2, 0, -1, 7, 4, 1], device=device)
    forward["value_scales"] = forward["key_scales"].flip(0)
    _, k, v = rope_cache(**forward, backend=backend)
    scales = {name: forward[name].expand(2, 3).contiguous() for name in ("key_scales", "value_scales")}
    kept = (forward["slots"] >= 0).nonzero()[:, 0]
    caches = [torch.full((2, 8, 3, 24), -7.0, device=device).to(E4M3) for _ in range(2)]
    count = len(kept)
    places = torch.arange(count, dtype=torch.int32, device=device)
    committed = commit_winner(
        *caches,
        k.expand(2, *k.shape),
        v.expand(2, *v.shape),
        places[:, None].contiguous(),
        kept[:, None].contiguous(),
        places,
        places.flip(0).contiguous(),
        places.flip(0).contiguous(),
        places.flip(0).contiguous(),
        forward["slots"][kept].flip(0).contiguous(),
        **scales,
        backend=backend,
    )
    assert committed.all()
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        expected = as_integers(forward[name]).expand(2, -1, -1, -1)
        assert torch.equal(as_integers(cache), expected)


def test_triton_refuses_fp64(device):
    pools = make_pools(2, 5, 8, 2, 4, torch.float64)
    with pytest.raises(ValueError, match=r"k_cache must be float32\|bfloat16\|float16\|float8.*, got float64"):
        commit(pools, ROW, backend="triton", device=device)
