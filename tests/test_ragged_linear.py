"""Ragged linear: kernels against the reference in fp64, the reference against torch.nn, and what no batch changes."""

import math
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from lenvm_kernels.fuzz.ops.ragged_linear import CONSTANTS, EPS, exact, make_inputs
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops import ragged_linear as ops
from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
from tests.helpers.matches import assert_matches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What a decoder layer asks for, and everything at once.
VARIANTS = {
    "plain": {},
    "qkv": {"bias": True, "norm": True},
    "o and down": {"residual": True},
    "gate_up": {"norm": True, "swiglu": True},
    "all": {"bias": True, "norm": True, "residual": True, "swiglu": True},
}
E4M3 = {f"{name}, e4m3": VARIANTS[name] | {"e4m3": True} for name in ("qkv", "o and down", "all")}


def number(rows, device):
    return torch.tensor([rows], dtype=torch.int32, device=device)


@pytest.fixture
def small_limits(monkeypatch):
    """The large tiles and the splits of large weights at sizes the interpreter can do, and several tiles a program."""
    for name, value in CONSTANTS["small"].items():
        monkeypatch.setattr(ops, name, value)


@pytest.fixture
def use_tile(monkeypatch):
    return lambda tile: monkeypatch.setattr(ops, "choose_tile", lambda *_: tile)


@pytest.mark.parametrize(
    ("outputs", "size", "variant"),
    [
        (1152, 896, "qkv"),
        (896, 896, "o and down"),
        (4864, 896, "gate_up"),
        (896, 4864, "o and down"),
    ],
)
@pytest.mark.parametrize("e4m3", [False, True])
def test_real_sizes_match_fp64_reference(device, outputs, size, variant, e4m3):
    inputs = make_inputs(5, outputs, size, torch.bfloat16, device=device, e4m3=e4m3, **VARIANTS[variant])
    y = ragged_linear(**inputs, num_rows=number(3, device), backend="triton")
    assert_matches(y[:3], exact(**inputs)[:3], "ragged_linear", torch.bfloat16)


def test_only_long_sums_over_few_columns_are_split():
    """Each split of down (0.5B, 1.5B, 3B, 7B) costs a pass over its result; the others are short, or wide enough."""
    down = [(896, 4864), (1536, 8960), (2048, 11008), (3584, 18944)]
    assert [ops.num_splits(*shape, False) for shape in down] == [5, 5, 4, 2]
    assert ops.num_splits(2048, 1536, False) == ops.num_splits(1536, 1536, False) == 1
    assert ops.num_splits(32_000, 8960, False) == ops.num_splits(1536, 8960, True) == 1


@pytest.mark.parametrize("num_rows", [None, 11])
def test_reference_matches_torch_modules(num_rows):
    torch.manual_seed(0)
    tokens, size, outputs = 17, 48, 80
    rows = tokens if num_rows is None else num_rows
    x, residual = torch.randn(tokens, size), torch.randn(tokens, size)
    norm, linear = LlamaRMSNorm(size, EPS), nn.Linear(size, outputs)
    mlp = LlamaMLP(LlamaConfig(hidden_size=size, intermediate_size=outputs, num_attention_heads=1))
    nn.init.uniform_(norm.weight)
    count = None if num_rows is None else number(num_rows, "cpu")
    with torch.no_grad():
        folded = linear.weight * norm.weight
        y = ragged_linear(x, folded, linear.bias, num_rows=count, norm_eps=EPS)
        torch.testing.assert_close(y[:rows], linear(norm(x))[:rows])
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)) * norm.weight
        hidden = ragged_linear(x, gate_up, num_rows=count, norm_eps=EPS, swiglu=True)
        y = ragged_linear(hidden, mlp.down_proj.weight, num_rows=count, residual=residual)
        torch.testing.assert_close(y[:rows], (residual + mlp(norm(x)))[:rows])
    assert not y[rows:].any()


def as_e4m3(number):
    """The nearest number of e4m3, ties to the even one: 3 bits after the leading one, none below 2^-9."""
    if number == 0:
        return 0.0
    ulp = 2.0 ** max(math.frexp(abs(number))[1] - 4, -9)
    return round(number / ulp) * ulp


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_quantized_rows_by_hand(dtype):
    rows = [[448.0, 1.0, 1.0625, 1.1875, -300.0], [0.0] * 5, [-7.0, 3.4, 0.001, -0.0001, 0.5], [1e-3, 0, 0, 0, -2e-3]]
    weight = torch.tensor(rows, dtype=dtype)
    quantized, scales = quantize_weight(weight)
    assert quantized.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    # Between 1 and 1.125 the even one is 1, between 1.125 and 1.25 it is 1.25; 300 is between 288 and 320.
    assert quantized[0].tolist() == [448, 1, 1, 1.25, -288]
    assert quantized[1].tolist() == [0] * 5 and scales[:2].tolist() == [1, 1]
    for row in (2, 3):
        values = weight[row].float().tolist()
        scale = float(np.float32(max(map(abs, values))) / np.float32(448))
        assert scales[row] == scale
        assert quantized[row].tolist() == [as_e4m3(float(np.float32(value) / np.float32(scale))) for value in values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_weights_are_near(dtype):
    """Of rows of all sizes there are, within half a step of e4m3. Nothing is beyond its largest number, 448."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-45, 38, 400)[:, None]
    weight = (torch.randn(400, 300, generator=generator).clamp(-3, 3) * sizes).to(dtype)
    weight = weight[weight.isfinite().all(1)]
    assert len(weight) > (30 if dtype == torch.float16 else 390)
    quantized, scales = quantize_weight(weight)
    exact, scales = weight.double(), scales.double()[:, None]
    assert (scales > 0).all()
    error = (exact - scales * quantized.double()).abs()
    assert (error <= (1 + 1e-6) * torch.maximum(exact.abs() / 16, scales / 1024)).all()
    is_whole = exact.abs().amax(1) > 1e-35
    assert (quantized.double().abs().amax(1)[is_whole] == 448).all() and is_whole.sum() > 30


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_broken_weight_breaks_its_column(device, broken, backend):
    weight = torch.ones(5, 40, device=device)
    weight[3, 20] = broken
    weight, scales = quantize_weight(weight)
    assert scales.isnan().tolist() == [False, False, False, True, False]  # no number that looks as if it were right
    y = ragged_linear(torch.ones(2, 40, device=device).half(), weight, weight_scales=scales, backend=backend)
    assert y[:, 3].isnan().all() and (y[:, [0, 1, 2, 4]] == 40).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_e4m3(device, dtype):
    """The kernel's products are those of the very numbers, the smallest ones too."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = codes[~codes.float().isnan()].view(127, 2)
    y = ragged_linear(
        torch.eye(2, dtype=dtype, device=device),
        weight,
        weight_scales=torch.ones(127, device=device),
        backend="triton",
    )
    assert torch.equal(y.T, weight.to(dtype))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("variant", E4M3)
@pytest.mark.parametrize("size", [96, 320])
def test_a_scale_belongs_to_a_row_of_the_weight(device, small_limits, backend, variant, size):
    """The same as the weight that is meant, spelt out in fp64."""
    inputs = make_inputs(9, 80, size, torch.float16, device=device, row_padding=3, **E4M3[variant])
    y = ragged_linear(**inputs, backend=backend)
    scales = inputs.pop("weight_scales")
    assert scales.max() > 1.5 * scales.min()
    inputs["weight"] = inputs["weight"].double() * scales.double()[:, None]
    assert_matches(y, exact(**inputs), "ragged_linear", torch.float16)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_rows", [None, 2])
def test_reference_keeps_the_dtype_and_rounds_once(dtype, num_rows):
    inputs = make_inputs(3, 48, 64, dtype, **VARIANTS["all"])
    count = None if num_rows is None else number(num_rows, "cpu")
    y = ragged_linear(**inputs, num_rows=count)
    assert y.dtype == dtype
    doubles = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    tolerance = (1e-12, 1e-12) if dtype == torch.float64 else TOLERANCE["ragged_linear"][dtype]
    expected = ragged_linear(**doubles, num_rows=count)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance[0], atol=tolerance[1])


def test_tiles_follow_from_rows_and_weight(monkeypatch):
    """Of a step of Qwen2.5-1.5B with five candidates a request, six rows each."""
    layers = {"qkv": (2048, 1536, False), "o": (1536, 1536, False), "gate_up": (17_920, 1536, True)}
    layers["down"] = (1536, 8960, False)

    def tiles(requests, dtype=torch.bfloat16):
        found = []
        for columns, size, swiglu in layers.values():
            tile = ops.choose_tile(6 * requests, columns, ops.num_splits(columns, size, swiglu), swiglu, dtype)
            found.append((tile.block_m, tile.block_n))
        return found

    monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", "sm_90")
    e4m3, small = torch.float8_e4m3fn, (64, 64)
    assert tiles(1) == tiles(8) == [small, small, (64, 128), small]
    assert tiles(16) == [small, small, (128, 256), (128, 64)]
    assert tiles(64) == [(128, 64), (128, 64), (128, 256), (128, 256)]
    assert tiles(128) == [(128, 128), (128, 128), (128, 256), (128, 256)]
    assert tiles(256) == tiles(4096) == [(128, 256)] * 4
    assert tiles(1, e4m3) == [(32, 64), (32, 64), (32, 256), (32, 64)]
    assert tiles(8, e4m3) == [(32, 64), (32, 64), (64, 128), small]
    assert tiles(64, e4m3) == [(64, 128), (64, 128), (128, 256), (128, 256)]
    assert tiles(256, e4m3) == tiles(4096, e4m3) == [(128, 256)] * 4
    for_fp32 = [(128, 64), (128, 64), (128, 128), (128, 128)]
    assert tiles(1, torch.float32) == tiles(256, torch.float32) == for_fp32
    for elsewhere in ("sm_80", "sm_100", "hip"):
        monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", elsewhere)
        assert tiles(1) == tiles(256) == for_fp32
        assert tiles(1, e4m3) == tiles(256, e4m3) == [(64, 128)] * 4


def test_every_tile_holds_whole_groups():
    for tile in (*ops.TILES, *ops.TILES_E4M3, ops.TILE, ops.TILE_WIDE, ops.TILE_SWIGLU, ops.TILE_E4M3):
        assert tile.block_n % ops.SUM_COLUMNS == tile.block_m % min(ops.SUM_ROWS, tile.block_m) == 0
        assert ops.num_counters(tile.block_m, tile.block_n, 8960) >= 1
        assert ops.num_counters(tile.block_m + 1, tile.block_n, 8960) >= 2
        assert ops.num_counters(tile.block_m, tile.block_n + 1, 8960) >= 2
    for dtype in (*DTYPES, torch.float8_e4m3fn):
        assert ops.choose_tile(1, 2, 1, True, dtype).block_n >= 2 * ops.SQUARES_GROUP


@pytest.mark.parametrize(
    ("variant", "size", "dtype"),
    [  # whole sums, and parts of sums
        ("all", 160, torch.bfloat16),
        ("gate_up", 160, torch.float16),
        ("qkv", 320, torch.bfloat16),
        ("o and down", 160, torch.bfloat16),
        ("o and down", 320, torch.float16),
        ("all, e4m3", 160, torch.bfloat16),
        ("qkv, e4m3", 320, torch.bfloat16),
        ("o and down, e4m3", 420, torch.float16),
    ],
)
def test_no_tile_changes_a_bit(device, small_limits, use_tile, dtype, size, variant):
    """Of a row, in any place, with others or alone; of the sums of its squares neither."""
    tokens = 150
    inputs = make_inputs(tokens, 200, size, dtype, device=device, **(VARIANTS | E4M3)[variant])
    residual = inputs.pop("residual", None)
    x = inputs.pop("x")

    def run(rows):
        square_sums = torch.zeros(4, len(rows), device=device)
        added = None if residual is None else residual[rows]
        y = ragged_linear(x[rows], **inputs, residual=added, square_sums_out=square_sums, backend="triton")
        return torch.cat([y.float(), square_sums.T], 1)

    tiles = ops.TILES_E4M3 if "weight_scales" in inputs else ops.TILES
    tiles = [tile for tile in tiles if tile.block_n >= 64 * (1 + inputs["swiglu"])]
    use_tile(tiles[0])
    everything = torch.arange(tokens, device=device)
    expected = run(everything)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(device)
    for tile in tiles:
        use_tile(tile)
        assert torch.equal(run(order), expected[order])
        assert torch.equal(run(everything[141:142]), expected[141:142])


@pytest.mark.bits
@pytest.mark.parametrize("variant", ["o and down", "all, e4m3"])
def test_expected_rows_choose_the_tile_and_no_bit(device, small_limits, monkeypatch, variant):
    """However many rows there are. Where nobody says what to expect, it is all T of them."""
    tokens, count = 70, 37
    inputs = make_inputs(tokens, 100, 160, torch.bfloat16, device=device, **(VARIANTS | E4M3)[variant])
    tiles = ops.TILES_E4M3 if "weight_scales" in inputs else ops.TILES
    tiles = [tile for tile in tiles if tile.block_n >= 64 * (1 + inputs["swiglu"])]
    asked = []

    def another_tile(rows, *weight):
        """Each call takes another one: the tiles of a weight so small are all alike."""
        asked.append(rows)
        return tiles[len(asked) % len(tiles)]

    monkeypatch.setattr(ops, "choose_tile", another_tile)
    arguments = inputs | {"num_rows": number(count, device), "backend": "triton"}
    expected = ragged_linear(**arguments)[:count]
    for rows in (0, count, 10**6):
        assert torch.equal(ragged_linear(**arguments, expected_rows=rows)[:count], expected)
    assert asked == [tokens, 0, count, 10**6]


@pytest.mark.bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["qkv", "o and down", "gate_up"])
def test_a_row_has_the_same_bits_in_every_batch(device, dtype, variant):
    check_bits_of_rows(make_inputs(172, 97, 160, dtype, device=device, **VARIANTS[variant]))


@pytest.mark.bits
@pytest.mark.parametrize("variant", ["all", "o and down", *E4M3])
def test_a_row_has_the_same_bits_in_every_batch_of_a_large_weight(device, small_limits, variant):
    check_bits_of_rows(make_inputs(172, 144, 320, torch.bfloat16, device=device, **(VARIANTS | E4M3)[variant]))


@pytest.mark.bits
@pytest.mark.parametrize("variant", E4M3)
def test_a_row_has_the_same_bits_in_every_batch_of_a_weight_in_8_bits(device, variant):
    check_bits_of_rows(make_inputs(172, 97, 160, torch.float16, device=device, **E4M3[variant]))


def check_bits_of_rows(inputs):
    x, residual = inputs.pop("x"), inputs.pop("residual", None)
    tokens, device = x.shape[0], x.device

    def run(rows, num_rows=None):
        count = None if num_rows is None else number(num_rows, device)
        part = None if residual is None else residual[rows]
        return ragged_linear(x[rows], **inputs, residual=part, num_rows=count, backend="triton")

    y = run(slice(None))
    for fewer in (1, 64, 129):
        assert torch.equal(run(slice(None), num_rows=fewer)[:fewer], y[:fewer])
        assert torch.equal(run(slice(0, fewer)), y[:fewer])
    for alone in (63, tokens - 1):
        assert torch.equal(run(slice(alone, alone + 1)), y[alone : alone + 1])
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(device)
    order = torch.cat([order, order[:7], order[:7]])
    assert torch.equal(run(order, num_rows=tokens + 10)[: tokens + 10], y[order][: tokens + 10])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of the broken row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_harms_no_other(device, dtype, variant, broken):
    inputs = make_inputs(70, 48, 96, dtype, device=device, **VARIANTS[variant])
    healthy = ragged_linear(**inputs, backend="triton")
    inputs["x"][3, 40] = broken
    y = ragged_linear(**inputs, backend="triton")
    assert not y[3].isfinite().any()
    y[3] = healthy[3]
    assert torch.equal(y, healthy)


@pytest.fixture
def guarded(monkeypatch):
    """Every tensor the launcher makes becomes the middle of a larger one; returns a list of the larger ones."""
    buffers = []

    def guarded_empty(*shape, dtype, device):
        tensor = torch.full((shape[0] + 2, *shape[1:]), 77.0, dtype=dtype, device=device)
        buffers.append(tensor)
        return tensor[1:-1]

    monkeypatch.setattr(ops.torch, "empty", guarded_empty)
    return buffers


@pytest.mark.parametrize("variant", ["all", "o and down", "all, e4m3", "o and down, e4m3"])
@pytest.mark.parametrize("num_rows", [-5, 0, 1, 128, 129, 170, 171, 2**31 - 1])
def test_rows_that_do_not_exist_are_neither_read_nor_written(device, small_limits, guarded, variant, num_rows):
    tokens, dtype = 170, torch.float16 if variant in E4M3 else torch.float32
    rows = max(0, min(num_rows, tokens))
    inputs = make_inputs(tokens, 48, 320, dtype, device=device, **(VARIANTS | E4M3)[variant])
    healthy = exact(**inputs)
    inputs["x"][rows:] = float("nan")
    if "residual" in inputs:
        inputs["residual"][rows:] = float("nan")
    guarded.clear()
    y = ragged_linear(**inputs, num_rows=number(num_rows, device), backend="triton")
    assert_matches(y[:rows], healthy[:rows], "ragged_linear", dtype)
    assert (y[rows:] == 77).all()
    out, *workspace = guarded
    assert len(workspace) == 1  # the sums of squares, or the parts of the sums
    for buffer in (out, *workspace):
        assert (buffer[[0, -1]] == 77).all()
    assert (workspace[0][1:-1, rows:] == 77).all()
    reference = ragged_linear(**inputs, num_rows=number(num_rows, device), backend="reference")
    assert_matches(reference[:rows], healthy[:rows], "ragged_linear", dtype)
    assert not reference[rows:].any()


def added_in_pairs(y):
    """fp32 [groups of 64 columns, rows]: the sums of squares that a call leaves, neighbours added first."""
    sums = nn.functional.pad(y.float().square(), (0, -y.shape[1] % ops.SQUARES_GROUP))
    sums = sums.unflatten(1, (-1, ops.SQUARES_GROUP))
    while sums.shape[2] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0].T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 320])  # whole sums, and parts of sums
@pytest.mark.parametrize("variant", [*VARIANTS, "all, e4m3", "o and down, e4m3"])
def test_square_sums_of_the_result(device, small_limits, dtype, size, variant):
    """In rows and columns that are there, and as the next call would add them up itself, to the bit."""
    if variant in E4M3 and dtype == torch.float32:
        pytest.skip("the kernels take no fp32 beside e4m3")
    tokens, rows, outputs = 150, 133, 200
    inputs = make_inputs(tokens, outputs, size, dtype, device=device, **(VARIANTS | E4M3)[variant])
    around = torch.full((6, tokens + 7), 77.0, device=device)
    square_sums = around[1:5, :tokens]
    y = ragged_linear(**inputs, num_rows=number(rows, device), square_sums_out=square_sums, backend="triton")
    assert torch.equal(square_sums[:, :rows], added_in_pairs(y[:rows]))
    around[1:5, :rows] = 77
    assert (around == 77).all()
    reference = torch.full_like(square_sums, 77)
    ragged_linear(**inputs, num_rows=number(rows, device), square_sums_out=reference, backend="reference")
    torch.testing.assert_close(reference[:, :rows], added_in_pairs(y[:rows]), rtol=0.1, atol=0.01)
    assert (reference[:, rows:] == 77).all()


@pytest.mark.parametrize("variant", ["qkv", "gate_up", "all"])
def test_given_square_sums_are_as_good_as_none(device, variant):
    """The same bits, whoever adds the squares; wherever they lie, and whatever lies beside them."""
    tokens, rows = 150, 133
    inputs = make_inputs(tokens, 97, 200, torch.bfloat16, device=device, **VARIANTS[variant])
    count = number(rows, device)
    around = torch.full((6, tokens + 7), float("nan"), device=device)
    square_sums = around[1:5, :tokens]
    square_sums[:, :rows] = added_in_pairs(inputs["x"])[:, :rows]
    y = ragged_linear(**inputs, num_rows=count, square_sums=square_sums, backend="triton")
    assert torch.equal(y[:rows], ragged_linear(**inputs, num_rows=count, backend="triton")[:rows])
    reference = ragged_linear(**inputs, num_rows=count, square_sums=square_sums, backend="reference")
    assert_matches(reference[:rows], exact(**inputs)[:rows], "ragged_linear", torch.bfloat16)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_square_sums_replace_those_of_x(device, backend):
    """Eight groups, which the kernel adds in order: in another the 1 of the first would not be lost beside 2^30."""
    x = torch.eye(3, 512, device=device)
    square_sums = torch.zeros(8, 3, device=device)
    square_sums[:, 1] = 64
    square_sums[:, 2] = torch.tensor([1.0, 2**30, 0, 0, -(2.0**30), 0, 511, 1])
    y = ragged_linear(x, torch.eye(3, 512, device=device), norm_eps=4, square_sums=square_sums, backend=backend)
    compared = 3 if backend == "triton" else 2
    expected = torch.diag(torch.tensor([0.5, 5**-0.5, 5**-0.5], device=device))
    torch.testing.assert_close(y[:compared], expected[:compared])


@triton.jit
def _mark(pointers, mask):
    tl.store(pointers, tl.full(pointers.shape, 1.0, tl.float32).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _asking_kernel(
    weight_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    SWIGLU: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    ops._prefetch_weight(weight_ptr, K, N, SWIGLU, STRIDE, SPLITS, SPLIT_LEN, PREFETCH_LEN, BLOCK_N)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter marks what a GPU prefetches")
@pytest.mark.parametrize(
    ("dtype", "size", "outputs", "swiglu", "splits", "length"),
    [
        (torch.bfloat16, 500, 75, False, 1, 448),
        (torch.bfloat16, 320, 40, True, 1, 200),
        (torch.bfloat16, 1000, 70, False, 3, 256),
        (torch.float32, 100, 70, False, 2, 64),
        (torch.float16, 256, 64, False, 1, 1),
    ],
)
def test_a_launch_asks_for_the_first_lines_of_each_row(monkeypatch, dtype, size, outputs, swiglu, splits, length):
    """Two lines of 128 bytes at a time, of each split; of nothing beside the weight."""
    monkeypatch.setattr(ops, "prefetch", _mark)
    columns, line, split_len = outputs * (1 + swiglu), 128 // dtype.itemsize, 64 * math.ceil(size / splits / 64)
    buffer = torch.zeros(columns + 128, size + 24, dtype=dtype)
    weight = buffer[64 : 64 + columns, 8 : 8 + size]
    _asking_kernel[(splits * 2 + 1,)](weight, size, outputs, swiglu, size + 24, splits, split_len, length, 64)
    expected = torch.zeros(size, dtype=torch.bool)
    for start in range(0, min(size, splits * split_len), split_len):
        expected[start : start + 2 * line * math.ceil(length / 2 / line) : line] = True
    assert torch.equal(weight != 0, expected.expand(columns, size))
    assert buffer.count_nonzero() == weight.count_nonzero()


def test_a_launch_asks_for_what_comes_in_three_microseconds():
    """All of small weights; as many columns of large ones as make 10 MB, in all splits together."""
    for columns, splits, itemsize, expected in (
        (2048, 1, 2, 1536),
        (1536, 1, 2, 1536),
        (17920, 1, 2, 279),
        (17920, 1, 1, 558),
        (1536, 5, 2, 651),
        (1536, 5, 1, 1302),
    ):
        weight = torch.empty(columns, 8960, dtype={1: torch.float8_e4m3fn, 2: torch.bfloat16}[itemsize], device="meta")
        assert ops.prefetch_len(weight, splits, 1536) == expected


@pytest.mark.parametrize("variant", [*VARIANTS, "o and down, e4m3"])
def test_counters_are_zero_again(device, small_limits, variant):
    """Given ones give the same bits as none; more than are needed are left alone."""
    dtype = torch.float16 if variant in E4M3 else torch.float32
    inputs = make_inputs(300, 200, 320, dtype, device=device, **(VARIANTS | E4M3)[variant])
    swiglu = inputs["swiglu"]
    needed = ops.num_counters(300, 200, 320, swiglu)
    assert (needed > 0) == (not swiglu)
    assert ops.num_counters(70, 200, 320, swiglu) <= needed
    counters = torch.full((needed + 3,), 5, dtype=torch.int32, device=device)
    counters[:needed] = 0
    for rows in (300, 0, 129, 7):
        count = number(rows, device)
        y = ragged_linear(**inputs, num_rows=count, counters=counters, backend="triton")
        assert counters.tolist() == [0] * needed + [5] * 3
        assert torch.equal(y[:rows], ragged_linear(**inputs, num_rows=count, backend="triton")[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [3e4, 1e-2, 0.0])
def test_norm_of_extreme_rows(device, dtype, magnitude):
    inputs = make_inputs(9, 48, 96, dtype, device=device, **VARIANTS["qkv"])
    x = inputs["x"].float()
    inputs["x"] = (x / x.abs().amax(-1, keepdim=True) * magnitude).to(dtype)
    assert_matches(ragged_linear(**inputs, backend="triton"), exact(**inputs), "ragged_linear", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_gates(device, dtype):
    inputs = make_inputs(9, 48, 96, dtype, device=device, bias=True, swiglu=True)
    inputs["bias"][:48:2] = -6e4  # exp(6e4) overflows: silu is 0
    inputs["bias"][1:48:8] = 3e4  # silu is the identity
    inputs["weight"][48:] *= 0.1  # keeps 3e4 * up within fp16
    assert_matches(ragged_linear(**inputs, backend="triton"), exact(**inputs), "ragged_linear", dtype)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_rows(device, backend):
    inputs = make_inputs(0, 48, 64, torch.float32, device=device, **VARIANTS["all"])
    assert ragged_linear(**inputs, num_rows=number(3, device), backend=backend).shape == (0, 48)
    assert ragged_linear(**inputs, backend=backend).shape == (0, 48)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("paddings", [(0, 7, 3), (16, 3, 0), (5, 0, 9)])
@pytest.mark.parametrize("split", [False, True])
def test_rows_are_apart_by_different_amounts(device, small_limits, backend, swiglu, paddings, split):
    """x, weight and residual have strides of their own; all rows and the bias are followed by NaN."""
    tokens, outputs, size = 9, 20, 200 if split else 40
    inputs = make_inputs(tokens, outputs, size, torch.float32, device=device, **VARIANTS["all"] | {"swiglu": swiglu})
    assert (ops.num_splits(20, size, swiglu) > 1) == (split and not swiglu)
    x, weight, bias, residual = (inputs[name].double() for name in ("x", "weight", "bias", "residual"))
    y = (x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)) @ weight.T + bias
    expected = (nn.functional.silu(y[:, :outputs]) * y[:, outputs:] if swiglu else y) + residual
    for name, padding in zip(("x", "weight", "residual", "bias"), (*paddings, 2), strict=True):
        columns = inputs[name].shape[-1]
        inputs[name] = nn.functional.pad(inputs[name], (0, padding), value=float("nan"))[..., :columns]
    assert_matches(ragged_linear(**inputs, backend=backend), expected, "ragged_linear", torch.float32)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1])
def test_eps_is_added_to_the_mean_of_squares(device, backend, eps):
    inputs = make_inputs(2, 16, 32, torch.float32, device=device)
    inputs["x"] = torch.where(torch.arange(32) % 3 == 0, -1.0, 1.0).to(device).repeat(2, 1)
    inputs["x"] *= torch.tensor([[2e-2], [1e-3]], device=device)
    y = ragged_linear(**inputs, norm_eps=eps, backend=backend)
    inputs["x"] = inputs["x"] / (torch.tensor([[4e-4], [1e-6]], device=device) + eps).sqrt()
    assert_matches(y, exact(**inputs), "ragged_linear", torch.float32)


@pytest.mark.parametrize(("far_rows", "e4m3"), [("x", False), ("weight", False), ("weight", True), ("residual", False)])
def test_offsets_past_32_bits(device, far_rows, e4m3):
    """Rows 2**30 numbers apart, so that row 2 is 2**31 away. Pages that nothing touches take no memory on a CPU."""
    far = 2**30
    inputs = make_inputs(3, 3, 3, torch.float16, device=device, norm=True, residual=True, e4m3=e4m3)
    expected = exact(**inputs)
    spread = torch.empty(2 * far + 3, dtype=inputs[far_rows].dtype, device=device).as_strided((3, 3), (far, 1))
    inputs[far_rows] = spread.copy_(inputs[far_rows])
    assert_matches(ragged_linear(**inputs, backend="triton"), expected, "ragged_linear", torch.float16)


ERRORS = [
    *(
        ("expected_rows", value, ValueError, f"expected_rows must be an int of at least 0 or None, got {value!r}")
        for value in (-1, 2.0, True, "9")
    ),
    ("x", torch.zeros(3, 64, dtype=torch.int32), ValueError, "x must be float32.*, got int32"),
    ("x", torch.zeros(3, 2, 64), ValueError, r"x must be .* \[\*, \*\], got float32 \[3, 2, 64\]"),
    ("x", torch.zeros(64, 3).t(), ValueError, "x must be contiguous in its last dimension"),
    ("x", torch.zeros(3, 0), ValueError, "x must have at least one column"),
    ("x", torch.zeros(3, 80), ValueError, r"weight must be float32 \[\*, 80\] on cpu, got .* \[96, 64\]"),
    ("weight", None, TypeError, r"weight must be a tensor float32 \[\*, 64\] on cpu, got NoneType"),
    ("weight", torch.zeros(96, 64).bfloat16(), ValueError, "weight must be float32 .*, got bfloat16"),
    ("weight", torch.zeros(96, 64, device="meta"), ValueError, "weight must be .* on cpu, got .* on meta"),
    ("weight", torch.zeros(96, 128)[:, ::2], ValueError, "weight must be contiguous in its last dimension"),
    ("weight", torch.zeros(97, 64), ValueError, r"weight must have an even number of rows.* \[97, 64\]"),
    ("weight", torch.zeros(0, 64), ValueError, r"weight must have an even number of rows.* \[0, 64\]"),
    ("weight", torch.zeros(96, 64).to(torch.float8_e4m3fn), ValueError, "weight_scales must be those of .*, got None"),
    ("weight_scales", torch.ones(96), ValueError, r"weight must be float8_e4m3fn \[\*, 64\] on cpu, got float32"),
    ("bias", torch.zeros(48), ValueError, r"bias must be float32 \[96\] on cpu, got float32 \[48\]"),
    ("bias", torch.zeros(96).half(), ValueError, "bias must be float32 .*, got float16"),
    ("num_rows", 3, TypeError, r"num_rows must be a tensor int32 \[1\] on cpu, got int"),
    ("num_rows", torch.tensor([3]), ValueError, r"num_rows must be int32 \[1\] on cpu, got int64 \[1\] on cpu"),
    ("num_rows", number(3, "cpu")[0], ValueError, r"num_rows must be int32 \[1\] on cpu, got int32 \[\]"),
    ("num_rows", number(3, "meta"), ValueError, r"num_rows must be int32 \[1\] on cpu, got int32 \[1\] on meta"),
    ("norm_eps", 0.0, ValueError, "norm_eps must be a positive number or None, got 0.0"),
    ("norm_eps", float("inf"), ValueError, "norm_eps must be a positive number or None, got inf"),
    ("norm_eps", float("nan"), ValueError, "norm_eps must be a positive number or None, got nan"),
    ("norm_eps", "1e-6", ValueError, "norm_eps must be a positive number or None, got '1e-6'"),
    ("residual", torch.zeros(3, 96), ValueError, r"residual must be float32 \[3, 48\] on cpu, got float32 \[3, 96\]"),
    ("residual", torch.zeros(48, 3).t(), ValueError, "residual must be contiguous in its last dimension"),
    ("square_sums", torch.zeros(3, 1), ValueError, r"square_sums must be .* \[1, 3\] on cpu, got float32 \[3, 1\]"),
    ("square_sums", torch.zeros(1, 3).half(), ValueError, "square_sums must be float32.*, got float16"),
    ("square_sums", torch.zeros(1, 6)[:, ::2], ValueError, "square_sums must be contiguous in its last dimension"),
    ("square_sums_out", torch.zeros(2, 3), ValueError, r"square_sums_out must be .* \[1, 3\] on cpu, got .* \[2, 3\]"),
    ("square_sums_out", torch.zeros(1, 3, device="meta"), ValueError, "square_sums_out must be .* on cpu, got .* meta"),
    ("counters", torch.zeros(9), ValueError, r"counters must be int32 \[\*\] on cpu, got float32 \[9\]"),
    ("counters", torch.zeros(9, 1, dtype=torch.int32), ValueError, r"counters must be int32 \[\*\] on cpu, got int32"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), ERRORS)
def test_errors_name_the_argument(name, value, error, message):
    arguments = {**make_inputs(3, 48, 64, torch.float32, **VARIANTS["all"]), "backend": "reference"} | {name: value}
    with pytest.raises(error, match=message):
        ragged_linear(**arguments)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ([1.0], TypeError, r"weight_scales must be a tensor float32\|float64 \[96\] on cpu, got list"),
        (torch.ones(48), ValueError, r"weight_scales must be float32\|float64 \[96\] on cpu, got float32 \[48\]"),
        (torch.ones(96).half(), ValueError, "weight_scales must be float32.*, got float16"),
        (torch.ones(96, device="meta"), ValueError, "weight_scales must be .* on cpu, got .* on meta"),
        (torch.ones(192)[::2], ValueError, "weight_scales must be contiguous"),
    ],
)
def test_errors_name_the_scales(scales, error, message):
    inputs = make_inputs(3, 48, 64, torch.float16, **E4M3["all, e4m3"]) | {"weight_scales": scales}
    with pytest.raises(error, match=message):
        ragged_linear(**inputs, backend="reference")


def test_triton_takes_e4m3_where_it_can(device, monkeypatch):
    inputs = make_inputs(3, 48, 64, torch.float32, device=device, e4m3=True)
    with pytest.raises(
        ValueError, match="weight_scales: the kernels multiply e4m3 by bfloat16 or float16, got float32"
    ):
        ragged_linear(**inputs, backend="triton")
    inputs["x"] = inputs["x"].half()
    for gpu in ("sm_80", "sm_86"):
        monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", gpu)
        with pytest.raises(ValueError, match=f"weight_scales: the kernels take e4m3 on GPUs from sm_89 on, got {gpu}"):
            ragged_linear(**inputs, backend="triton")
        assert ragged_linear(**inputs, backend="reference").isfinite().all()


def test_a_weight_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"weight must have at least one row, got shape \[0, 64\]"):
        ragged_linear(torch.zeros(3, 64), torch.zeros(0, 64))


def test_square_sums_without_a_norm_are_refused():
    with pytest.raises(ValueError, match="square_sums are those of the norm: norm_eps must be given too"):
        ragged_linear(torch.zeros(3, 64), torch.zeros(2, 64), square_sums=torch.zeros(1, 3))


def test_too_few_counters_are_refused():
    x, weight = torch.zeros(300, 4864), torch.zeros(200, 4864)
    needed = ops.num_counters(300, 200, 4864)
    with pytest.raises(ValueError, match=rf"counters must be int32 \[at least {needed}\], got int32 \[{needed - 1}\]"):
        ragged_linear(x, weight, counters=torch.zeros(needed - 1, dtype=torch.int32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_follows_the_number_of_rows(device):
    inputs = make_inputs(300, 1536, 8960, torch.bfloat16, device=device, residual=True)
    num_rows = number(300, device)
    ragged_linear(**inputs, num_rows=num_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ragged_linear(**inputs, num_rows=num_rows)
    for rows in (300, 7, 129):
        inputs["x"].normal_()
        num_rows.fill_(rows)
        y.fill_(77)
        graph.replay()
        assert torch.equal(y[:rows], ragged_linear(**inputs)[:rows])
        assert (y[rows:] == 77).all()
