"""Ragged linear: ``y = act(W norm(x) + b) + r`` over the first rows of x; their number is read from device memory.

The matmul of the value model's layers (projections of a Qwen2 or Llama decoder layer) with fused prologue and epilogue:

    y = inv_rms(x) * (x W^T) + b        inv_rms(x) = 1 / sqrt(mean(x^2) + eps), or 1
    y = silu(gate) * up + r             with swiglu: gate and up are the two halves of the columns of y

cuBLAS takes the number of rows from the host, so a CUDA graph captured for the maximum always computes all rows. It
also chooses tiles and splits by the number of rows, so a row's bits change with the batch. Here, launches depend only
on shapes, programs without live rows exit at once, and a row's reduction order is the same in any tile.

RMSNorm commutes with the matmul: its weight is folded into W, and its factor scales a finished row. The factor needs
the row's sum of squares: the call that stores a row also stores the sums of squares of its column groups, and the next
call adds them in order.

Long sums are split over programs, and a second launch adds the parts in order. If the last program of a tile added
them, most of the GPU would wait for a few programs: measured on an H200, it takes 2.7 times as long for 384 rows.
"""

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import architecture, ceil_div, check_int, check_number, overlapping, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.ragged_linear.device import (
    _finish,
    _first,
    _live_rows,
    _prefetch_weight,
    _sum_parts,
    _weight_row,
)
from lenvm_kernels.reference._common import SQUARES_GROUP, sums_of_squares
from lenvm_kernels.reference.ragged_linear import ragged_linear as _reference

# Unless a measurement is named, the numbers below are estimates for an H100 or H200 with 132 multiprocessors.

# A long sum over few columns is split over more programs; for few rows, at most one per multiprocessor.
# - down (N = 1536, K = 8960, 28 MB, 8 us of HBM), 5 * 24 programs. Measured on an H200 with 3, 4, 5 and 8 parts: 13.5,
#   11.2, 10.0 and 10.0 us for 6 rows, and 94, 116, 104 and 105 us for 1,536.
# - A probe's projection (N = 256, K = 10752), 28 * 4 programs: more parts, up to K / N, at which all parts of a row
#   together are as large as the row of x. Not measured.
SPLIT_FROM = 3840
MANY_SPLITS, MAX_SPLITS, MAX_SPLIT_PROGRAMS = 5, 32, 132
SPLIT_STEP = 64  # a split's columns are a multiple of this, for any dtype
# Tile of the result per program that adds parts. Measured on an H200: 384 rows take 31 us with 4, 36 us with 8, 39 us
# with 16.
ADD_ROWS, ADD_COLUMNS = 4, SQUARES_GROUP
MULTIPROCESSORS = 132
# GPUs on which all TILES use one matmul instruction. On others (sm_100, AMD), the instruction depends on the tile,
# which could change a row's bits, so the tile is chosen for a fixed number of rows.
ONE_INSTRUCTION = ("sm_8", "sm_90", "sm_12")
FIXED_ROWS = 384
NUM_WARPS_SM_100 = 4  # for narrow tiles, which spill with eight
# Maximum programs of a launch, four per multiprocessor. With more tiles, each program processes several in turn,
# because exits of thousands of programs without live rows would take longer than a small batch's work.
MAX_PROGRAMS = 528
MAX_SMALL_PROGRAMS = 2048  # for the launch that adds parts: one wave, 16 per multiprocessor
# Bytes of a row of x per block of products, whole cache lines. Blocks and splits determine the order of a row's sums.
# Both depend only on the weight, so that a row's result is bitwise identical in any batch and any tile.
BLOCK_K_BYTES = 128


class Tile(NamedTuple):
    """Rows and columns of the result that a program computes at once, with its warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tiles, the largest first. For each k, a tile fetches one number per row and per column from L2, which limits most
# launches: on an H200, 128 x 256 reaches 71 % of the tensor cores' rate, 128 x 128 53 %, 128 x 64 35 %. A launch uses
# the tile with the fewest fetches per multiprocessor, and the largest of several such tiles.
#
# sm_90, 16-bit: its matmul instruction has at least 64 rows. Measured on an H200: gate_up (N = 2 * 8960) of 192
# rows takes 30 us with 64 x 256, and 44 us without that tile.
TILES_SM_90 = (
    Tile(128, 256, num_warps=8, num_stages=4),
    Tile(128, 128, num_warps=8, num_stages=6),
    Tile(128, 64, num_warps=8, num_stages=8),
    Tile(64, 256, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=4, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=8),
)
# Other GPUs, and fp32, which has no tensor cores. The instruction of sm_80 to sm_89 and sm_120 has 16 rows in every
# tile. A tile takes at most 96 KB of shared memory, because sm_86, sm_89 and sm_120 have 99 KB. With few rows, a tile
# with 128 columns takes at most 48 KB, so that two fit on a multiprocessor. Not measured.
TILES = (
    Tile(128, 128, num_warps=8, num_stages=3),
    Tile(128, 64, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=8, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=6),
    Tile(32, 128, num_warps=4, num_stages=3),
    Tile(32, 64, num_warps=4, num_stages=8),
    Tile(16, 128, num_warps=4, num_stages=3),
    Tile(16, 64, num_warps=4, num_stages=8),
)
# Up to this number of rows are in one tile, because smaller tiles would read the weight once per 16 or 32 rows.
FEW_ROWS = 64
# Bytes of the weight that a launch prefetches before the previous launch has ended: about 3 us of HBM bandwidth. More
# might delay the first loads of the matmul.
PREFETCH_BYTES = 10_000_000


# Tensors of the matmul, except slices of larger tensors. The parts are fp32 [SPLITS, T, N].
LinearTensors = namedtuple("LinearTensors", "out x weight bias residual partial")
LinearStrides = namedtuple("LinearStrides", "x residual")  # row strides


@kernel()
def _ragged_linear_kernel(
    ptr,  # LinearTensors
    stride,  # LinearStrides
    num_rows_ptr,  # int32 [1] or None
    square_sums_ptr,  # fp32 [ceil(K / GROUP), T] or None
    stride_square_sums_group,
    square_sums_out_ptr,  # fp32 [ceil(N / GROUP), T] or None
    stride_square_sums_out_group,
    norm_eps,
    T,
    K: tl.constexpr,
    N: tl.constexpr,
    SWIGLU: tl.constexpr,
    STRIDE_WEIGHT: tl.constexpr,  # row stride; a constant saves many address registers
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,  # columns of x per split, a multiple of BLOCK_K
    PREFETCH_LEN: tl.constexpr,  # columns of a split that a program prefetches while it waits
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    COLUMNS: tl.constexpr = 2 * N if SWIGLU else N
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N

    if OVERLAPS:
        _prefetch_weight(ptr.weight, K, N, SWIGLU, STRIDE_WEIGHT, SPLITS, SPLIT_LEN, PREFETCH_LEN, BLOCK_N)
    wait_for_inputs(OVERLAPS)
    rows = _live_rows(num_rows_ptr, T)
    row_blocks = tl.cdiv(rows, BLOCK_M)
    tiles = row_blocks * COLUMN_BLOCKS * SPLITS
    # Registers are scarce, so nothing is hoisted out of the loop over tiles. num_stages=1, because Triton would
    # otherwise pipeline this loop if a sum is a single block of products, which takes too much memory.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
        # Row blocks vary fastest: concurrent programs share few columns of W, so that HBM is read once.
        block_m = tile % row_blocks
        split = tile // row_blocks % SPLITS
        block_n = tile // (row_blocks * SPLITS)
        m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)

        x_rows = ptr.x + m.to(tl.int64)[:, None] * stride.x
        weight_rows = ptr.weight + _weight_row(column, N, SWIGLU).to(tl.int64)[:, None] * STRIDE_WEIGHT
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # The tiles of x must feed only the matmul. With a second use in this loop, such as their sum of squares, Triton
        # (3.6 to 3.9) allocates one buffer too few: the next copy overwrites a tile that a wgmma still reads.
        for start in range(0, SPLIT_LEN, BLOCK_K):
            k = split * SPLIT_LEN + start + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
            weight = tl.load(weight_rows + k[None, :], mask=(column < COLUMNS)[:, None] & (k < K)[None, :], other=0.0)
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")

        first_row, first_column = block_m * BLOCK_M, block_n * BLOCK_N
        squares = (square_sums_ptr, stride_square_sums_group, square_sums_out_ptr, stride_square_sums_out_group)
        if SPLITS == 1:
            _finish(acc, first_row, first_column, rows, ptr, stride, squares, norm_eps, K, N, SWIGLU)
        else:
            is_sum = (m < rows)[:, None] & (column < N)[None, :]
            part_ptr = ptr.partial + _first(split.to(tl.int64) * T + first_row, first_column, N)
            offsets = tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(part_ptr + offsets, acc, mask=is_sum)


@kernel()
def _add_parts_kernel(
    ptr,  # LinearTensors
    stride,  # LinearStrides
    num_rows_ptr,  # int32 [1] or None
    square_sums_ptr,  # fp32 [ceil(K / GROUP), T] or None
    stride_square_sums_group,
    square_sums_out_ptr,  # fp32 [ceil(N / GROUP), T] or None
    stride_square_sums_out_group,
    norm_eps,
    T,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    rows = _live_rows(num_rows_ptr, T)
    PIECES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    squares = (square_sums_ptr, stride_square_sums_group, square_sums_out_ptr, stride_square_sums_out_group)
    for piece in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * PIECES, tl.num_programs(0)):
        row, n = piece // PIECES * ROWS, piece % PIECES * COLUMNS
        y = _sum_parts(ptr.partial + _first(row, n, N), rows - row, N - n, T, N, SPLITS, ROWS, COLUMNS)
        _finish(y, row, n, rows, ptr, stride, squares, norm_eps, K, N, False)


def num_splits(columns: int, size: int, swiglu: bool = False) -> int:
    """Number of parts of sums over ``size`` products, for a weight of ``columns`` rows."""
    if swiglu or size < SPLIT_FROM:
        return 1
    programs = MAX_SPLIT_PROGRAMS // ceil_div(columns, TILES[-1].block_n)
    most = max(MANY_SPLITS, min(size // columns, MAX_SPLITS))
    return ceil_div(size, split_len(size, max(1, min(programs, most))))


def split_len(size: int, splits: int) -> int:
    """Columns of x per split."""
    return ceil_div(ceil_div(size, SPLIT_STEP), splits) * SPLIT_STEP


@functools.lru_cache(4096)  # a step without a CUDA graph calls it four times per layer
def fetching_least(
    tiles: tuple[Tile, ...], rows: int, columns: int, splits: int, swiglu: bool, multiprocessors: int
) -> Tile:
    """The tile with the fewest numbers fetched per k by the busiest multiprocessor."""

    def fetched(tile: Tile) -> int:
        count = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n) * splits
        return ceil_div(count, multiprocessors) * (tile.block_m + tile.block_n)

    def fits(tile: Tile) -> bool:
        """Whether few rows fit into the tile and into no smaller one, and its columns are whole groups of squares."""
        is_full = rows > tile.block_m // 2 or tile.block_m == tiles[-1].block_m
        is_large = tile.block_m >= min(rows, FEW_ROWS)
        return is_full and is_large and tile.block_n >= (2 if swiglu else 1) * SQUARES_GROUP

    return min(filter(fits, tiles), key=fetched)  # the first of equal tiles, i.e. the largest


def choose_tile(rows: int, columns: int, splits: int, swiglu: bool, dtype: torch.dtype) -> Tile:
    """The tile for about ``rows`` rows and a weight of ``dtype``. The result is bitwise identical with any tile."""
    name = architecture()
    if dtype.itemsize == 2 and name in ("sm_90", ""):  # without a GPU, the interpreter uses the tiles of sm_90
        return fetching_least(TILES_SM_90, rows, columns, splits, swiglu, MULTIPROCESSORS)
    if name and not name.startswith(ONE_INSTRUCTION):
        rows = FIXED_ROWS
    tile = fetching_least(TILES, rows, columns, splits, swiglu, MULTIPROCESSORS)
    is_narrow = min(tile.block_m, tile.block_n) < 128
    return tile._replace(num_warps=NUM_WARPS_SM_100) if is_narrow and name == "sm_100" else tile


def rows_of_every_tile(most: int, shapes: Sequence[tuple[int, int, bool, torch.dtype]]) -> list[int]:
    """Row counts that together compile all kernels of linear layers with up to ``most`` rows.

    Args:
        most: maximum number of rows.
        shapes: ``columns``, ``size``, ``swiglu`` and dtype of the weight for each layer.
    """
    of_layers = [(columns, num_splits(columns, size, swiglu), swiglu, dtype) for columns, size, swiglu, dtype in shapes]
    first: dict[tuple[Tile, ...], int] = {}
    for rows in range(1, most + 1):
        first.setdefault(tuple(choose_tile(rows, *layer) for layer in of_layers), rows)
    return list(first.values())


def prefetch_len(weight: Tensor, splits: int, split_len: int) -> int:
    """Columns of each split that a launch prefetches while it waits for the previous launches."""
    bytes_of_column = weight.shape[0] * splits * weight.element_size()
    return min(split_len, PREFETCH_BYTES // bytes_of_column)


def square_sums_shape(tokens: int, columns: int) -> tuple[int, int]:
    """Shape of the sums of squares of ``tokens`` rows of ``columns`` columns."""
    return ceil_div(columns, SQUARES_GROUP), tokens


_SPEC = Spec("""
    x: float [T, K+]
    weight: =x [rows+, K]
    bias?: =x|float32 [rows]
    num_rows?: int32 [1]
    square_sums?: single [(K + 63) // 64, T]
    residual?: =x [T, rows // (1 + swiglu)]
    square_sums_out?: single [(rows // (1 + swiglu) + 63) // 64, T]
""")
_OPTIONS = {"norm_eps": float | None, "swiglu": bool, "expected_rows": int | None}


@operator(_SPEC, reference=_reference, mutates=["square_sums_out"], takes=_OPTIONS)
def launch_linear(out: Tensor, given):  # out is in the dtype of x, or fp32
    x, weight, bias, num_rows, square_sums, residual, square_sums_out, norm_eps, swiglu, expected_rows = given
    (tokens, size), columns, outputs = x.shape, weight.shape[0], out.shape[1]
    splits = num_splits(columns, size, swiglu)
    tile = choose_tile(tokens if expected_rows is None else expected_rows, columns, splits, swiglu, weight.dtype)
    split_columns = split_len(size, splits)
    tiles = ceil_div(tokens, tile.block_m) * ceil_div(columns, tile.block_n) * splits

    if norm_eps is not None and square_sums is None:
        square_sums = sums_of_squares(x)
    partial = None if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    operands = (
        LinearTensors(out, x, weight, bias, residual, partial),
        LinearStrides(x.stride(0), 0 if residual is None else residual.stride(0)),
        *(num_rows, *with_row_strides(square_sums, square_sums_out), norm_eps, tokens),
    )
    # Otherwise the compiler might fuse different products and additions in different tiles.
    options = dict(K=size, N=outputs, SPLITS=splits, enable_fp_fusion=False, **overlapping())
    _ragged_linear_kernel[(min(tiles, MAX_PROGRAMS),)](
        *operands,
        SWIGLU=swiglu,
        STRIDE_WEIGHT=weight.stride(0),
        SPLIT_LEN=split_columns,
        PREFETCH_LEN=prefetch_len(weight, splits, split_columns),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K_BYTES // x.element_size(),
        num_warps=tile.num_warps,
        # AMD GPUs have 64 KB of shared memory per block.
        num_stages=min(tile.num_stages, 3) if architecture() == "hip" else tile.num_stages,
        **options,
    )
    if splits > 1:
        pieces = ceil_div(tokens, ADD_ROWS) * ceil_div(outputs, ADD_COLUMNS)
        # AMD's warps are twice as wide; with 4 of them, a thread would load 16 bits at a time.
        options |= dict(ROWS=ADD_ROWS, COLUMNS=ADD_COLUMNS, num_warps=2 if architecture() == "hip" else 4)
        _add_parts_kernel[(min(pieces, MAX_SMALL_PROGRAMS),)](*operands, **options)


def check_options(norm_eps: float | None, square_sums: Tensor | None, expected_rows: int | None) -> float | None:
    """Check options shared with :func:`value_head`, and return ``norm_eps`` as a float."""
    if norm_eps is None and square_sums is not None:
        raise ValueError("square_sums needs norm_eps, got None")
    if expected_rows is not None:
        check_int("expected_rows", expected_rows, 0)
    if norm_eps is None:
        return None
    check_number("norm_eps", norm_eps, "a positive number or None", above=0)
    return float(norm_eps)


def ragged_linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], or [2 N, K] with swiglu
    bias: Tensor | None = None,  # [N], or [2 N] with swiglu
    *,
    num_rows: Tensor | None = None,  # int32 [1]
    norm_eps: float | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,  # [T, N]
    square_sums: Tensor | None = None,  # fp32 [ceil(K / 64), T]
    square_sums_out: Tensor | None = None,  # fp32 [ceil(N / 64), T]
    expected_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:  # [T, N]
    """Linear layer over the first ``num_rows`` rows, with RMSNorm before it and SwiGLU and a residual after it.

    The number of rows is read from device memory, so that a CUDA graph captured for the maximum only computes the rows
    in use. A row's result is bitwise identical in any batch and at any index. ``expected_rows`` selects one of at most
    eight tiles, each compiled once per shape and row stride of a weight.

    Args:
        x: [T, K], fp32, bf16 or fp16 (also fp64 on the reference). Rows may be strided.
        weight: [N, K], stored as in ``nn.Linear`` (out, in), in the dtype of ``x``. With ``swiglu``, [2 N, K]: N gate
            rows, then N up rows. Rows may be strided.
        bias: [N] ([2 N] with ``swiglu``), in the dtype of ``x`` or fp32; not scaled by the norm. If ``None``, 0.
        num_rows: int32 [1]; number of rows, clamped to 0 .. T. Rows from it on are neither read nor written. If
            ``None``, all T.
        norm_eps: divide ``x`` by its root mean square first: ``W (x / sqrt(mean(x^2) + norm_eps))``. The norm's weight
            ``w`` must be folded into ``weight``, as ``W diag(w)``. If ``None``, no norm.
        swiglu: whether to return ``silu(gate) * up`` of the two halves of the columns.
        residual: [T, N], in the dtype of ``x``; added to the result before rounding. Rows may be strided. If
            ``None``, 0.
        square_sums: fp32 [ceil(K / 64), T], with ``norm_eps``; sums of squares of ``x`` over 64 columns each,
            ``square_sums[g, t] = sum(x[t, 64 g : 64 g + 64]^2)``. Rows may be strided. If ``None``, PyTorch operators
            compute bitwise identical sums for all T rows.
        square_sums_out: fp32 [ceil(N / 64), T], written; the same sums for the result as rounded. Rows may be strided.
            Columns from ``num_rows`` on are not written.
        expected_rows: approximate number of rows for which the launch is optimized; the result is bitwise identical. If
            ``None``, T.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        [T, N] in the dtype of ``x``, accumulated in fp32 (fp64 for fp64 inputs). Rows from ``num_rows`` on are
        arbitrary (0 on the reference).

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]])
        >>> there_are_two = torch.tensor([2], dtype=torch.int32)
        >>> ragged_linear(x, torch.eye(2), num_rows=there_are_two, residual=torch.ones(3, 2))
        tensor([[4., 5.],
                [2., 1.],
                [0., 0.]])
    """
    operands, swiglu = (x, weight, bias, num_rows, square_sums, residual, square_sums_out), bool(swiglu)
    backend, sizes = _SPEC.check(backend, *operands, sizes={"swiglu": int(swiglu)})
    if swiglu and sizes["rows"] % 2:
        raise ValueError(f"weight must have an even number of rows (gate and up), got shape {list(weight.shape)}")
    norm_eps = check_options(norm_eps, square_sums, expected_rows)
    out = torch.empty(sizes["T"], sizes["rows"] // (1 + swiglu), dtype=x.dtype, device=x.device)
    return launch_linear(backend, out, *operands, norm_eps, swiglu, expected_rows)
