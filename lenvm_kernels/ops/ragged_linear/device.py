"""Device functions of :mod:`lenvm_kernels.ops.ragged_linear`: everything except the loop over products."""

import triton
import triton.language as tl

from lenvm_kernels.ops._device import prefetch
from lenvm_kernels.reference._common import SQUARES_GROUP

GROUP, LOG2_GROUP = tl.constexpr(SQUARES_GROUP), tl.constexpr(SQUARES_GROUP.bit_length() - 1)
LINE_BYTES = tl.constexpr(128)  # L2 cache line; a thread prefetches one line


@triton.jit
def _live_rows(num_rows_ptr, T):
    return T if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), T)


@triton.jit
def _sums_of_squares(x):  # fp32 [ROWS, COLUMNS] -> fp32 [ROWS, COLUMNS / GROUP]
    """Sums of squares of each group of columns. Pairs of neighbours are added until one number is left: each addition
    has two operands, so the result does not depend on the layout or the tile."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // GROUP
    sums = x * x
    for halving in tl.static_range(LOG2_GROUP):
        sums = tl.sum(tl.reshape(sums, [ROWS, GROUPS, GROUP >> (halving + 1), 2]), axis=3)
    return tl.reshape(sums, [ROWS, GROUPS])


@triton.jit
def _inv_rms(m, rows, square_sums_ptr, stride_group, norm_eps, K: tl.constexpr):
    total = tl.zeros([m.shape[0]], tl.float32)
    for group in range(0, (K + GROUP - 1) // GROUP):
        total += tl.load(square_sums_ptr + tl.cast(group, tl.int64) * stride_group + m, m < rows, other=0.0)
    return tl.rsqrt(total / K + norm_eps)


@triton.jit
def _first(first_row, first_column, N: tl.constexpr):
    """Offset of a tile in a contiguous [*, N]. Offsets within a tile are 32-bit to save registers."""
    return tl.cast(first_row, tl.int64) * N + first_column


@triton.jit
def _weight_row(column, N: tl.constexpr, SWIGLU: tl.constexpr):
    """Row of the weight for a column. With SwiGLU, gate and up are interleaved, so that one thread has both."""
    return column // 2 + column % 2 * N if SWIGLU else column


@triton.jit
def _prefetch_weight(
    weight_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    SWIGLU: tl.constexpr,
    STRIDE_WEIGHT: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Prefetch the beginning of the weight for the program's first tile. The number of rows is not known yet, so one
    row block is assumed; with more blocks, another program uses the prefetched weights."""
    COLUMNS: tl.constexpr = 2 * N if SWIGLU else N
    LINE: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    split = tl.program_id(0) % SPLITS
    column = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = weight_ptr + _weight_row(column, N, SWIGLU).to(tl.int64)[:, None] * STRIDE_WEIGHT
    for start in range(0, PREFETCH_LEN, 2 * LINE):
        k = split * SPLIT_LEN + start + LINE * tl.arange(0, 2)
        prefetch(rows + k[None, :], (column < COLUMNS)[:, None] & (k < K)[None, :])


@triton.jit
def _finish(
    y,  # fp32 [BLOCK_M, COLUMNS]: sums
    first_row,
    first_column,
    rows,
    ptr,  # LinearTensors
    stride,  # LinearStrides
    squares,  # pointer and stride of square_sums, and of square_sums_out
    norm_eps,
    K: tl.constexpr,
    N: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Epilogue of the matmul for some columns of a tile: scale, add, round and store them."""
    square_sums_ptr, stride_square_sums_group, square_sums_out_ptr, stride_square_sums_out_group = squares
    BLOCK_M: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    OUTPUTS: tl.constexpr = COLUMNS // 2 if SWIGLU else COLUMNS
    first_output = first_column // 2 if SWIGLU else first_column
    m = first_row + tl.arange(0, BLOCK_M)
    n = first_output + tl.arange(0, OUTPUTS)
    is_output = (m < rows)[:, None] & (n < N)[None, :]
    column = first_column + tl.arange(0, COLUMNS)
    weight_row, is_column = _weight_row(column, N, SWIGLU), column < (2 * N if SWIGLU else N)
    if square_sums_ptr is not None:
        y *= _inv_rms(m, rows, square_sums_ptr, stride_square_sums_group, norm_eps, K)[:, None]
    if ptr.bias is not None:
        bias = tl.load(ptr.bias + weight_row, mask=is_column, other=0.0)
        y += bias.to(tl.float32)[None, :]
    if SWIGLU:
        gate, up = tl.split(tl.reshape(y, [BLOCK_M, OUTPUTS, 2]))
        y = gate * tl.sigmoid(gate) * up
    if ptr.residual is not None:
        residual_ptr = ptr.residual + m.to(tl.int64)[:, None] * stride.residual + n[None, :]
        y += tl.load(residual_ptr, mask=is_output, other=0.0).to(tl.float32)
    y = y.to(ptr.out.dtype.element_ty)
    out_ptr = ptr.out + _first(first_row, first_output, N)
    offsets = tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out_ptr + offsets, y, mask=is_output)
    if square_sums_out_ptr is not None:
        sums = _sums_of_squares(tl.where((n < N)[None, :], y.to(tl.float32), 0.0))
        group = first_output // GROUP + tl.arange(0, sums.shape[1])
        offset = group.to(tl.int64)[None, :] * stride_square_sums_out_group + m[:, None]
        tl.store(square_sums_out_ptr + offset, sums, mask=(m < rows)[:, None] & (group * GROUP < N)[None, :])


@triton.jit
def _sum_parts(
    partial_ptr, rows, columns, T, N: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """fp32 [ROWS, COLUMNS]: the parts of sums, added in the order of the splits.

    Four neighbours form a separate dimension, so that neighbouring threads load neighbouring blocks of 16 bytes. In the
    result's layout, a thread would load 32 bytes in two instructions, each of which would waste half of every sector.
    """
    m = tl.arange(0, ROWS)[:, None, None]
    n = 4 * tl.arange(0, COLUMNS // 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    mask = (m < rows) & (n < columns)
    y = tl.zeros([ROWS, COLUMNS // 4, 4], tl.float32)
    for part in tl.static_range(SPLITS):
        part_ptr = partial_ptr + tl.cast(T, tl.int64) * N * part
        y += tl.load(part_ptr + (m * N + n), mask=mask, other=0.0, cache_modifier=".cg")
    return tl.reshape(y, [ROWS, COLUMNS])
