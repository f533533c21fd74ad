"""Ragged linear: ``y = act(W norm(x) + b) + r`` over as many of the rows of x as a number in device memory says.

The matmul of the value model's layers (the projections of a Qwen2 or Llama decoder layer), with what stands around it:

    y = inv_rms(x) * (x W^T) + b        inv_rms(x) = 1 / sqrt(mean(x^2) + eps), or 1
    y = silu(gate) * up + r             with swiglu: gate and up are the two halves of the columns of y

Why not cuBLAS: it takes the number of rows from the host, so a CUDA graph captured for the most rows always computes
them all; and it picks tiles and splits by the number of rows, so a row's bits change with the batch. Here the launches
depend on shapes only, programs without live rows end at once, and a row's sums run in the same order in any batch. For
the first reason norm, SwiGLU and residual are in it, too: torch's would compute the padding.

RMSNorm commutes with the matmul: its weight is folded into W, and its factor scales a finished row. So x itself is the
matmul's operand, not rounded again. Launches: the factors (with a norm), the matmul, the sum of its parts (if split).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    FLOATS,
    architecture,
    ceil_div,
    check_tensor,
    fitting_stages,
    resolve_backend,
)
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference.ragged_linear import ragged_linear as _reference

# Tile and splits depend on the weight's shape, never on the rows: the same row must give the same bits in any batch.
# All numbers below are estimates for an H200 (132 multiprocessors, at most 110 GB/s each; 4.8 TB/s; 990 Tflop/s in
# bf16) and are not measured yet.
# - Many rows: tiles reread their operands from L2. 128 x 64 stops at about 40 % of the tensor cores' rate, 128 x 128 at
#   60 %. 64 rows a tile would stop at 30 and 40 %, and save only work that few rows leave in the shadow of memory: for
#   64 rows of gate_up (N = 2 * 8960) 7 us of tensor cores beside 12 us of HBM.
# - Few rows: a program reads its columns of W at 110 GB/s, 64 of K = 1536 in 1.8 us. qkv (N = 2048) has 32 such
#   programs, o (1536) has 24: 4 us with 64 rows of x, of which the weights' 5 MB need 1 us. 128 columns would be 6 us.
# So 64 columns, and 128 from N = 4096 on, where they still make 32 programs.
BLOCK_M = 128
BLOCK_N, BLOCK_N_WIDE = 64, 128
WIDE_FROM = 4096
# 128 bytes of a row at a time, whole cache lines. As many stages (24 or 32 KB each) as let two programs share a
# multiprocessor's 227 KB, one computing while the other starts, stores or waits; the registers allow two as well.
BLOCK_K_BYTES = 128
STAGES, STAGES_WIDE = 4, 3
# Eight warps; four for the narrow tiles on sm_100, where eight get 80 registers each and spill.
NUM_WARPS = 8
NUM_WARPS_SM_100 = 4
# A long sum over few columns (down: N = 1536, K = 8960, 28 MB, 6 us of HBM) would take 24 programs 21 us. It is split
# over more programs, at most one a multiprocessor and block of rows: 7 * 12 programs need about 7 us, and the launch
# that adds the 7 parts 2 us. More splits would gain little there and cost most where rows are many: each writes and
# reads 8 N bytes a row. Below three splits' length that launch costs what the splits save.
SPLIT_K = 1280
SPLIT_FROM = 3 * SPLIT_K
MAX_SPLIT_PROGRAMS = 132
# Programs of a launch, four a multiprocessor. With more tiles each takes several in turn; with a program for every tile
# that could be live, ending the thousands that are not would take longer than a small batch's work.
MAX_PROGRAMS = 528
# The two small launches move some KB a program: 4 rows by 1024 columns, and 4 rows by 256 columns of every part. Both
# are over in one wave of programs, of which a multiprocessor holds 16.
NORM_ROWS, NORM_BLOCK_K = 4, 1024
SUM_ROWS, SUM_BLOCK_N = 4, 256
MAX_SMALL_PROGRAMS = 2048


@triton.jit
def _live_rows(num_rows_ptr, T):
    return T if num_rows_ptr is None else tl.minimum(tl.load(num_rows_ptr), T)


# num_rows may be one element of a tensor of offsets: its alignment then changes with the batch.
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _inv_rms_kernel(
    inv_rms_ptr,  # fp32 [T]
    x_ptr,  # [T, K]
    stride_x_row,
    num_rows_ptr,  # int32 [1] or None
    norm_eps,
    T,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = _live_rows(num_rows_ptr, T)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        m = block * ROWS + tl.arange(0, ROWS)
        x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x_row
        sum_of_squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            sum_of_squares += tl.sum(x * x, axis=1)
        tl.store(inv_rms_ptr + m, tl.rsqrt(sum_of_squares / K + norm_eps), mask=m < rows)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _ragged_linear_kernel(
    out_ptr,  # [T, N], or the parts of the sums: fp32 [SPLITS, T, N]
    x_ptr,  # [T, K]
    stride_x_row,
    weight_ptr,  # [COLUMNS, K]
    stride_weight_out,
    bias_ptr,  # [COLUMNS] or None
    inv_rms_ptr,  # fp32 [T] or None
    residual_ptr,  # [T, N] or None
    stride_residual_row,
    num_rows_ptr,  # int32 [1] or None
    T,
    K: tl.constexpr,
    N: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,  # columns of x in a split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    COLUMNS: tl.constexpr = 2 * N if SWIGLU else N
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    OUT_BLOCK_N: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N

    rows = _live_rows(num_rows_ptr, T)
    row_blocks = tl.cdiv(rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), row_blocks * COLUMN_BLOCKS * SPLITS, tl.num_programs(0)):
        # Row blocks vary fastest: the programs that run together share few columns of W, so that HBM is read once.
        block_n = tile // row_blocks % COLUMN_BLOCKS
        split = tile // (row_blocks * COLUMN_BLOCKS)
        m = tile % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # With SwiGLU gate and up of a column stand side by side, where one thread holds both.
        weight_row = column // 2 + column % 2 * N if SWIGLU else column

        x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x_row
        weight_rows = weight_ptr + weight_row.to(tl.int64)[None, :] * stride_weight_out
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # The tiles of x feed the matmul and nothing else. A second use in this loop, such as their sum of squares,
        # makes Triton (3.6 to 3.9) keep one buffer too few for a wgmma that still reads while the next copy is written.
        for start in range(0, SPLIT_LEN, BLOCK_K):
            k = split * SPLIT_LEN + start + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
            weight = tl.load(weight_rows + k[:, None], mask=(column < COLUMNS)[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")

        if inv_rms_ptr is not None:
            acc *= tl.load(inv_rms_ptr + m, mask=m < rows, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + weight_row, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if SWIGLU:
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, OUT_BLOCK_N, 2]))
            y = gate * tl.sigmoid(gate) * up
        else:
            y = acc
        n = block_n * OUT_BLOCK_N + tl.arange(0, OUT_BLOCK_N)
        is_output = (m < rows)[:, None] & (n < N)[None, :]
        row = m.to(tl.int64)[:, None]
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * stride_residual_row + n[None, :], mask=is_output, other=0.0)
            y += residual.to(tl.float32)
        out_row = split.to(tl.int64) * T + row
        tl.store(out_ptr + out_row * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _sum_splits_kernel(
    out_ptr,  # [T, N]
    partial_ptr,  # fp32 [SPLITS, T, N]
    bias_ptr,  # [N] or None
    inv_rms_ptr,  # fp32 [T] or None
    residual_ptr,  # [T, N] or None
    stride_residual_row,
    num_rows_ptr,  # int32 [1] or None
    T,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = _live_rows(num_rows_ptr, T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        m = block * ROWS + tl.arange(0, ROWS)
        is_output = (m < rows)[:, None] & (n < N)[None, :]
        row = m.to(tl.int64)[:, None]
        y = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for split in tl.static_range(SPLITS):
            y += tl.load(partial_ptr + (tl.cast(T, tl.int64) * split + row) * N + n[None, :], mask=is_output, other=0.0)
        if inv_rms_ptr is not None:
            y *= tl.load(inv_rms_ptr + m, mask=m < rows, other=0.0)[:, None]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * stride_residual_row + n[None, :], mask=is_output, other=0.0)
            y += residual.to(tl.float32)
        tl.store(out_ptr + row * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=is_output)


def num_splits(columns: int, size: int, swiglu: bool = False) -> int:
    """Parts that the sums of ``columns`` columns over ``size`` products are split into: fp32 [parts, T, columns]."""
    if swiglu or size < SPLIT_FROM:
        return 1
    return max(1, min(size // SPLIT_K, MAX_SPLIT_PROGRAMS // ceil_div(columns, BLOCK_N_WIDE)))


def _run_reference(out, x, weight, bias, num_rows, norm_eps, swiglu, residual) -> None:
    out.copy_(_reference(x, weight, bias, num_rows=num_rows, norm_eps=norm_eps, swiglu=swiglu, residual=residual))


@operator(mutates=["out"], reference=_run_reference)
def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_rows: Tensor | None,
    norm_eps: float | None,
    swiglu: bool,
    residual: Tensor | None,
) -> None:
    (tokens, size), columns, outputs = x.shape, weight.shape[0], out.shape[1]
    if tokens == 0:
        return
    splits = num_splits(columns, size, swiglu)
    is_wide = splits > 1 or columns >= WIDE_FROM
    block_n, stages = (BLOCK_N_WIDE, STAGES_WIDE) if is_wide else (BLOCK_N, STAGES)
    block_k = BLOCK_K_BYTES // x.element_size()
    tiles = ceil_div(tokens, BLOCK_M) * ceil_div(columns, block_n) * splits
    residual_stride = 0 if residual is None else residual.stride(0)

    inv_rms = None
    if norm_eps is not None:
        inv_rms = torch.empty(tokens, dtype=torch.float32, device=x.device)
    matmul_out, epilogue = out, (bias, inv_rms, residual)
    if splits > 1:
        matmul_out = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
        epilogue = (None, None, None)

    if norm_eps is not None:
        _inv_rms_kernel[(min(ceil_div(tokens, NORM_ROWS), MAX_SMALL_PROGRAMS),)](
            inv_rms,
            x,
            x.stride(0),
            num_rows,
            norm_eps,
            tokens,
            K=size,
            ROWS=NORM_ROWS,
            BLOCK_K=NORM_BLOCK_K,
        )
    _ragged_linear_kernel[(min(tiles, MAX_PROGRAMS),)](
        matmul_out,
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        *epilogue,
        residual_stride,
        num_rows,
        tokens,
        K=size,
        N=outputs,
        SWIGLU=swiglu,
        SPLITS=splits,
        SPLIT_LEN=ceil_div(ceil_div(size, block_k), splits) * block_k,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=NUM_WARPS_SM_100 if architecture() == "sm_100" and not is_wide else NUM_WARPS,
        num_stages=fitting_stages(stages),
    )
    if splits > 1:
        column_blocks = ceil_div(outputs, SUM_BLOCK_N)
        row_blocks = min(ceil_div(tokens, SUM_ROWS), ceil_div(MAX_SMALL_PROGRAMS, column_blocks))
        _sum_splits_kernel[(column_blocks, row_blocks)](
            out,
            matmul_out,
            bias,
            inv_rms,
            residual,
            residual_stride,
            num_rows,
            tokens,
            N=outputs,
            SPLITS=splits,
            ROWS=SUM_ROWS,
            BLOCK_N=SUM_BLOCK_N,
        )


def ragged_linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], or [2 N, K] with swiglu
    bias: Tensor | None = None,  # [N], or [2 N] with swiglu
    *,
    num_rows: Tensor | None = None,  # int32 [1]
    norm_eps: float | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,  # [T, N]
    backend: str = "auto",
) -> Tensor:  # [T, N]
    """Linear layer over the first ``num_rows`` rows, with RMSNorm before it and SwiGLU and a residual after it.

    It exists beside cuBLAS because the number of rows is read from device memory, so that a CUDA graph captured for the
    most rows costs only the rows there are; and because the same row gives the same bits whatever else is in the batch
    and wherever it stands. Nothing is read back to the host, and no new number of rows compiles anything.

    Args:
        x: rows [T, K], fp32, bf16 or fp16 (fp64 too on the reference). Rows may be strided.
        weight: [N, K] as ``nn.Linear`` keeps it (out, in), the dtype of ``x``. With ``swiglu`` [2 N, K]: N gate rows,
            then N up rows. Rows may be strided.
        bias: [N] ([2 N] with ``swiglu``), the dtype of ``x`` (``None``: 0). Not scaled by the norm.
        num_rows: int32 [1] on the device of ``x``, how many rows there are (``None``: all T). Rows from it on are
            neither read nor written. More than T counts as T, less than 0 as 0.
        norm_eps: divide ``x`` by its root mean square first: ``W (x / sqrt(mean(x^2) + norm_eps))``. The norm's own
            weight ``w`` has to be in ``weight`` already, as ``W diag(w)`` (``None``: no norm).
        swiglu: ``silu(gate) * up`` of the two halves of the columns.
        residual: [T, N], the dtype of ``x``, added to the result before it is rounded, once (``None``: 0). Rows may be
            strided.
        backend: ``auto`` (Triton for GPU tensors, else the reference), ``triton`` or ``reference``.

    Returns:
        [T, N] in the dtype of ``x``, accumulated in fp32 (fp64 from fp64 inputs). Rows from ``num_rows`` on are
        arbitrary (0 on the reference).

    Raises:
        TypeError, ValueError: an argument is not as above. Checked before any launch.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]])
        >>> there_are_two = torch.tensor([2], dtype=torch.int32)
        >>> ragged_linear(x, torch.eye(2), num_rows=there_are_two, residual=torch.ones(3, 2))
        tensor([[4., 5.],
                [2., 1.],
                [0., 0.]])
    """
    backend = resolve_backend(backend, x)
    check_tensor("x", x, dtypes=FLOATS[backend], shape=(None, None))
    dtype, device, (tokens, size) = x.dtype, x.device, x.shape
    if size == 0:
        raise ValueError(f"x must have at least one column, got shape {list(x.shape)}")
    check_tensor("weight", weight, dtypes=dtype, shape=(None, size), device=device)
    columns = weight.shape[0]
    if columns == 0 or (swiglu and columns % 2):
        wanted = "an even number of rows, gate and up," if swiglu else "at least one row,"
        raise ValueError(f"weight must have {wanted} got shape {list(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, dtypes=dtype, shape=(columns,), device=device)
    if num_rows is not None:
        check_tensor("num_rows", num_rows, dtypes=torch.int32, shape=(1,), device=device)
    if norm_eps is not None and (not isinstance(norm_eps, (int, float)) or not 0 < norm_eps < math.inf):
        raise ValueError(f"norm_eps must be a positive number or None, got {norm_eps!r}")
    outputs = columns // 2 if swiglu else columns
    if residual is not None:
        check_tensor("residual", residual, dtypes=dtype, shape=(tokens, outputs), device=device)

    out = torch.empty(tokens, outputs, dtype=dtype, device=device)
    norm_eps = None if norm_eps is None else float(norm_eps)
    _launch(backend, out, x, weight, bias, num_rows, norm_eps, bool(swiglu), residual)
    return out
