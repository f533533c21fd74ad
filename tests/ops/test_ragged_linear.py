"""``ragged_linear``: the reference against torch.nn, tiles and splits, unwritten rows, and prefetches."""

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from lenvm_kernels.fuzz.ops.ragged_linear import OPERATOR, exact
from lenvm_kernels.ops import ragged_linear as ops
from lenvm_kernels.ops.ragged_linear import device, ragged_linear
from lenvm_kernels.reference._common import sums_of_squares
from tests.helpers.cases import assert_matches, i32, simple_arguments
from tests.helpers.interpreter import needs_interpreter

make_inputs = partial(simple_arguments, "ragged_linear")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The variants of a decoder layer, and all options at once. In tests that split sums, sums over 320 columns are only
# split without swiglu.
VARIANTS = {
    "qkv": {"bias": True, "norm": True},
    "o and down": {"residual": True},
    "gate_up": {"norm": True, "swiglu": True},
    "all": {"bias": True, "norm": True, "residual": True, "swiglu": True},
}


@pytest.fixture
def small_limits(monkeypatch):
    """Large tiles and splits at sizes that the interpreter can process, and several tiles per program."""
    for name, value in OPERATOR.constants["small"].items():
        monkeypatch.setattr(ops, name, value)


@pytest.mark.parametrize("num_rows", [None, -2, 0, 11, 99])
def test_reference_matches_torch_modules(num_rows):
    torch.manual_seed(0)
    tokens, size, outputs, eps = 17, 48, 80, 0.3
    rows = tokens if num_rows is None else min(max(num_rows, 0), tokens)
    x, residual = torch.randn(tokens, size), torch.randn(tokens, size)
    norm, linear = LlamaRMSNorm(size, eps), nn.Linear(size, outputs)
    mlp = LlamaMLP(LlamaConfig(hidden_size=size, intermediate_size=outputs, num_attention_heads=1))
    nn.init.uniform_(norm.weight)
    count = None if num_rows is None else i32(num_rows)
    with torch.no_grad():
        y = ragged_linear(x, linear.weight * norm.weight, linear.bias, num_rows=count, norm_eps=eps)
        torch.testing.assert_close(y[:rows], linear(norm(x))[:rows])
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)) * norm.weight
        hidden = ragged_linear(x, gate_up, num_rows=count, norm_eps=eps, swiglu=True)
        y = ragged_linear(hidden, mlp.down_proj.weight, num_rows=count, residual=residual)
        torch.testing.assert_close(y[:rows], (residual + mlp(norm(x)))[:rows])
    assert not y[rows:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_keeps_the_dtype_and_rounds_once(dtype):
    for variant in VARIANTS.values():
        inputs = make_inputs(9, outputs=48, size=64, dtype=dtype, **variant)
        y = ragged_linear(**inputs, backend="reference")
        assert y.dtype == dtype
        assert_matches(y, exact(**inputs), "ragged_linear", dtype)


# Columns, size and swiglu of a weight, and its splits. Each additional split costs a pass over the result.
SPLITS = [
    (1536, 8960, False, 5),  # down of the 1.5B, the 3B and the 7B
    (2048, 11008, False, 4),
    (3584, 18944, False, 2),
    (256, 10752, False, 28),  # projection of a probe, 28 * 4 programs
    (1, 8960, False, 28),
    (1536, 1536, False, 1),
    (32_000, 8960, False, 1),
    (1536, 8960, True, 1),
]


@pytest.mark.parametrize(("columns", "size", "swiglu", "splits"), SPLITS)
def test_only_long_sums_over_few_columns_are_split(columns, size, swiglu, splits):
    """Splits depend on the shape of the weight; no split is empty."""
    length = ops.split_len(size, splits)
    assert ops.num_splits(columns, size, swiglu) == splits
    assert (splits - 1) * length < size <= splits * length and length % ops.SPLIT_STEP == 0


# Weights of Qwen2.5-1.5B and a probe's projection: columns, size and swiglu of qkv, o, gate_up, down and projection.
WEIGHTS_OF_TILES = (
    (2048, 1536, False),
    (1536, 1536, False),
    (17_920, 1536, True),
    (1536, 8960, False),
    (256, 10752, False),
)
BF16, FP32 = torch.bfloat16, torch.float32
MMA, SM_90, TCGEN05 = ("sm_80", "sm_86", "sm_89", "sm_120"), ("sm_90", ""), ("sm_100", "sm_103", "hip")
# Architectures, dtype and rows; then rows and columns of the tile of each weight.
TILES = [
    *((names, dtype, 16, "16x64 16x64 16x128 16x64 16x64") for names, dtype in ((MMA, BF16), (SM_90, FP32))),
    (MMA, FP32, 17, "32x64 32x64 32x128 32x64 32x64"),
    (MMA, BF16, 64, "64x64 64x64 64x128 64x64 64x64"),
    (MMA, BF16, 65, "64x64 64x64 128x128 128x64 128x64"),
    (SM_90, FP32, 384, "128x64 128x64 128x128 128x128 128x128"),
    (SM_90, BF16, 1, "64x64 64x64 64x256 64x64 64x64"),
    (SM_90, BF16, 192, "64x64 64x64 64x256 128x128 128x128"),
    (SM_90, BF16, 384, "128x64 128x64 128x256 128x256 128x256"),
    (SM_90, BF16, 1536, "128x256 128x256 128x256 128x256 128x256"),
    # The matmul instruction may depend on the tile, so the tile must not depend on the rows.
    *((TCGEN05, dtype, n, "128x64 128x64 128x128 128x128 128x128") for dtype in (BF16, FP32) for n in (1, 64, 1536)),
]


@pytest.mark.parametrize(("names", "dtype", "rows", "tiles"), TILES)
def test_tile_depends_on_architecture_rows_and_weight(monkeypatch, names, dtype, rows, tiles):
    for name in names:
        monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", name)
        chosen = [
            ops.choose_tile(rows, columns, ops.num_splits(columns, size, swiglu), swiglu, dtype)
            for columns, size, swiglu in WEIGHTS_OF_TILES
        ]
        assert " ".join(f"{tile.block_m}x{tile.block_n}" for tile in chosen) == tiles, name
        warps = {4} if name == "sm_100" else {tile.num_warps for tile in (*ops.TILES, *ops.TILES_SM_90)}
        assert {tile.num_warps for tile in chosen if tile.block_n < 128} <= warps


def test_every_tile_fits_into_shared_memory():
    """sm_86, sm_89 and sm_120 have 99 KB. All stages except one are in it."""
    for tile in ops.TILES:
        assert (tile.num_stages - 1) * (tile.block_m + tile.block_n) * ops.BLOCK_K_BYTES <= 101_376


@pytest.mark.parametrize(("variant", "size"), [("qkv", 100), ("o and down", 320), ("all", 100)])
def test_rows_are_bitwise_identical_with_every_tile(device, small_limits, monkeypatch, variant, size):
    """At any place in several blocks of rows, for any number of rows and row stride, and including the sums of squares.

    The tile depends on ``expected_rows``; if None, on T. The parts of a sum over 320 columns are added in one
    order.
    """
    tokens, rows, padded = 150, 141, dict(row_padding=48, device=device, dtype=torch.bfloat16)
    inputs = make_inputs(tokens, outputs=100, size=size, **padded, **VARIANTS[variant])
    tiles = [t for t in (*ops.TILES_SM_90, *ops.TILES) if t.block_n >= 64 * (1 + inputs["swiglu"])]
    asked = []
    monkeypatch.setattr(ops, "choose_tile", lambda rows, *_: asked.append(rows) or tiles[(len(asked) - 1) % len(tiles)])

    def run(order, rows, **options):
        chosen = inputs | {name: inputs[name][order] for name in ("x", "residual") if name in inputs}
        sums = torch.zeros(2, len(chosen["x"]), device=device)
        y = ragged_linear(**chosen, num_rows=i32(rows).to(device), square_sums_out=sums, **options, backend="triton")
        return torch.cat([y.float(), sums.T], 1)[:rows]

    expected, everything = run(slice(tokens), rows), torch.arange(tokens, device=device)
    turned = torch.cat([everything[:rows].flip(0), everything[rows:]])
    numbers = (0, rows, 10**6, tokens + 1, *range(7, 3 + len(tiles)))
    for expected_rows in numbers:
        assert torch.equal(run(turned, rows, expected_rows=expected_rows).flip(0), expected)
    counts = ((9, 5), (65, 64), (128, 63), (129, 129))
    for count, there in counts:
        assert torch.equal(run(slice(count), there), expected[:there])
    assert torch.equal(run(slice(rows - 1, rows), 1), expected[-1:])
    assert asked == [tokens, *numbers, *(count for count, _ in counts), 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_and_computed_square_sums_are_bitwise_identical(device, dtype):
    """A call without ``square_sums`` computes the sums that the previous call would have stored."""
    inputs = make_inputs(150, outputs=97, size=200, dtype=dtype, device=device, **VARIANTS["all"])
    stored = torch.empty(ops.square_sums_shape(150, 97), device=device)
    y = ragged_linear(**inputs, square_sums_out=stored, backend="triton")
    assert torch.equal(stored, sums_of_squares(y))
    assert torch.equal(ragged_linear(**inputs, square_sums=sums_of_squares(inputs["x"]), backend="triton"), y)


@triton.jit
def _mark(pointers, mask):
    tl.store(pointers, tl.full(pointers.shape, 1.0, tl.float32).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _prefetching_kernel(weight_ptr, K: tl.constexpr, N: tl.constexpr, SWIGLU: tl.constexpr, SIZES: tl.constexpr):
    device._prefetch_weight(weight_ptr, K, N, SWIGLU, SIZES[0], SIZES[1], SIZES[2], SIZES[3], 64)


@needs_interpreter  # marks are stored instead of prefetches
@pytest.mark.parametrize(
    ("dtype", "size", "outputs", "swiglu", "splits", "length"),
    [(BF16, 320, 40, True, 1, 200), (BF16, 1000, 70, False, 3, 256), (FP32, 100, 70, False, 2, 1)],
)
def test_launch_prefetches_the_first_lines_of_each_row(monkeypatch, dtype, size, outputs, swiglu, splits, length):
    """Two lines of 128 bytes at a time, in each split, and none outside the weight."""
    monkeypatch.setattr(device, "prefetch", _mark)
    columns, line, split_len = outputs * (1 + swiglu), 128 // dtype.itemsize, 64 * math.ceil(size / splits / 64)
    buffer = torch.zeros(columns + 128, size + 24, dtype=dtype)
    weight = buffer[64 : 64 + columns, 8 : 8 + size]
    sizes = (size + 24, splits, split_len, length)  # row stride, splits and their length, and length of the prefetch
    _prefetching_kernel[(splits * 2 + 1,)](weight, size, outputs, swiglu, sizes)
    expected = torch.zeros(size, dtype=torch.bool)
    for start in range(0, min(size, splits * split_len), split_len):
        expected[start : start + 2 * line * math.ceil(length / 2 / line) : line] = True
    assert torch.equal(weight != 0, expected.expand(columns, size))
    assert buffer.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize(
    ("columns", "splits", "dtype", "expected"),
    [(2048, 1, torch.bfloat16, 1536), (17920, 1, torch.bfloat16, 279), (1536, 5, torch.bfloat16, 651)],
)
def test_length_of_the_prefetch(columns, splits, dtype, expected):
    """A small weight completely, 10 MB of a large weight."""
    assert ops.prefetch_len(torch.empty(columns, 8960, dtype=dtype, device="meta"), splits, 1536) == expected
