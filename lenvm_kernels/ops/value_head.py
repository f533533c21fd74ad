"""Value head: one fp32 logit a token, ``z = w2 . silu(W1 h + b1) + b2``, in one pass over W1.

Source: section 3 of the specification; ``v_head.fc`` and ``v_head.summary`` of a LenVM checkpoint. Two launches. The
first is a matmul whose epilogue applies SiLU, multiplies with w2 and sums the columns of its tile, so that of the
[M, H] activations only one number a row and column block reaches memory. The second adds these in the order of the
column blocks, without atomics.

The gather of ``token_rows`` is in the matmul's loads. So is the final RMSNorm: ``W1 (h inv_rms(h) w) = inv_rms(h) W1
(h w)``, so the loop multiplies with ``w`` as it goes, sums the squares beside it, and one factor a row ends it. ``h w``
is rounded to the dtype of the weights, as any matmul's operand is (LlamaRMSNorm rounds twice on this way).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    FLOATS,
    INT_DTYPES,
    ceil_div,
    check_tensor,
    fitting_stages,
    next_power_of_2,
    resolve_backend,
)
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.value_head import value_head as _reference

# The tile may depend on H but not on M: the same row must give the same bits in any batch, and one compiled kernel has
# to serve every batch. What decides it, for an H200 (estimated from bytes, not measured yet):
# - M <= 64: a multiprocessor draws about 110 GB/s, so W1 is read at full rate only if H / BLOCK_N, the number of
#   programs, is some tens. At H = 1536 64 columns give 24 programs of 0.2 MB each: 2 to 4 us, about what the two
#   launches cost anyhow, so narrower blocks would gain 1 us at most. Splitting the sum over H instead would need the
#   [M, H] activations in memory, because SiLU follows the sum.
# - M = 4096: tiles reread their operands (1 / BLOCK_M + 1 / BLOCK_N) M H^2 times from L2. 64 x 64 stops at about 30 %
#   of the tensor cores' rate, 128 x 64 at 40 %, 128 x 128 at 60 %.
# So 128 x 64, and from H = 2560 on, where 128 columns still leave 20 programs and more, 128 x 128.
BLOCK_M = 128
BLOCK_N, BLOCK_N_WIDE = 64, 128
WIDE_FROM = 2560
# 128 bytes of a row at a time, whole cache lines. The stages (24 or 32 KB each) are as many as let two programs
# share a multiprocessor's 227 KB, so that the epilogue of one overlaps the loop of the other. (So do the registers:
# 64 and 128 a thread, with the norm 122 and 171 in triton 3.6; only the last keeps a multiprocessor to itself, and
# forcing it to 128 spills.)
BLOCK_K_BYTES = 128
STAGES, STAGES_WIDE = 4, 3
NUM_WARPS = 8
# Rows a program of the second launch: 32 * 4 bytes are a cache line.
REDUCE_ROWS = 32

# h w of a fp16 row can exceed 65,504, so it is formed as h w / 64. The absolute error this adds in fp16's subnormals,
# 2^-19, is at most 0.002 after the normalisation even of the smallest rows (inv_rms <= 1000 for an eps of 1e-6).
_FP16_SCALE = tl.constexpr(2.0**-6)


@triton.jit
def _source_rows(token_rows_ptr, m, M, T):
    """(row of hidden, there is one) of the outputs m; padding and what lies outside hidden have none."""
    if token_rows_ptr is None:
        row, is_token = m.to(tl.int64), m < M
    else:
        row = tl.load(token_rows_ptr + m, mask=m < M, other=-1).to(tl.int64)
        is_token = (row >= 0) & (row < T)
    return row, is_token


@triton.jit(do_not_specialize=["M", "T"])
def _partial_logits_kernel(
    partial_ptr,  # [ceil(H / BLOCK_N), M]
    hidden_ptr,  # [T, H]
    stride_hidden_token,
    token_rows_ptr,  # [M] or None
    norm_weight_ptr,  # [H] or None
    norm_eps,
    fc_weight_ptr,  # [H, H]
    stride_fc_weight_out,
    fc_bias_ptr,  # [H]
    summary_weight_ptr,  # [H]
    M,
    T,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Column blocks vary fastest: the programs that run together share few rows of hidden and all of W1, both in L2.
    block_n, block_m = tl.program_id(0), tl.program_id(1)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row, is_token = _source_rows(token_rows_ptr, m, M, T)
    if tl.max(is_token.to(tl.int32), axis=0) == 0:
        return  # only padding, whose partial logits are never read

    hidden_rows = hidden_ptr + row[:, None] * stride_hidden_token
    weight_rows = fc_weight_ptr + n[None, :].to(tl.int64) * stride_fc_weight_out
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum_of_squares = tl.zeros([BLOCK_M], tl.float32)
    scale = _FP16_SCALE if hidden_ptr.dtype.element_ty == tl.float16 else 1.0
    for start in range(0, H, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(hidden_rows + k[None, :], mask=is_token[:, None] & (k < H)[None, :], other=0.0)
        weight = tl.load(weight_rows + k[:, None], mask=(n < H)[None, :] & (k < H)[:, None], other=0.0)
        if norm_weight_ptr is not None:
            norm_weight = tl.load(norm_weight_ptr + k, mask=k < H, other=0.0).to(tl.float32)
            h_fp32 = h.to(tl.float32)
            sum_of_squares += tl.sum(h_fp32 * h_fp32, axis=1)
            h = (h_fp32 * (norm_weight * scale)[None, :]).to(h.dtype)
        acc = tl.dot(h, weight, acc, input_precision="ieee")
    if norm_weight_ptr is not None:
        acc *= (tl.rsqrt(sum_of_squares / H + norm_eps) / scale)[:, None]

    acc += tl.load(fc_bias_ptr + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    summary_weight = tl.load(summary_weight_ptr + n, mask=n < H, other=0.0).to(tl.float32)
    partial = tl.sum(acc * tl.sigmoid(acc) * summary_weight[None, :], axis=1)
    tl.store(partial_ptr + block_n * M + m, partial, mask=m < M)


@triton.jit(do_not_specialize=["M", "T"])
def _sum_partials_kernel(
    logits_ptr,  # [M]
    partial_ptr,  # [COLUMN_BLOCKS, M]
    token_rows_ptr,  # [M] or None
    summary_bias_ptr,  # [1]
    M,
    T,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two >= COLUMN_BLOCKS
    ROWS: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    _, is_token = _source_rows(token_rows_ptr, m, M, T)
    written = (block < COLUMN_BLOCKS)[:, None] & is_token[None, :]
    partial = tl.load(partial_ptr + block[:, None] * M + m[None, :], mask=written, other=0.0)
    logits = tl.sum(partial, axis=0) + tl.load(summary_bias_ptr).to(tl.float32)
    tl.store(logits_ptr + m, tl.where(is_token, logits, 0.0), mask=m < M)


def _run_reference(logits, *operands) -> None:
    *inputs, token_rows, norm_weight, norm_eps = operands
    logits.copy_(_reference(*inputs, token_rows=token_rows, norm_weight=norm_weight, norm_eps=norm_eps))


@operator(mutates=["logits"], reference=_run_reference)
def _launch(
    logits: Tensor,
    hidden: Tensor,
    fc_weight: Tensor,
    fc_bias: Tensor,
    summary_weight: Tensor,
    summary_bias: Tensor,
    token_rows: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    (tokens, size), outputs = hidden.shape, logits.shape[0]
    if outputs == 0:
        return
    block_n, stages = (BLOCK_N_WIDE, STAGES_WIDE) if size >= WIDE_FROM else (BLOCK_N, STAGES)
    column_blocks = ceil_div(size, block_n)
    partial = torch.empty(column_blocks, outputs, dtype=torch.float32, device=hidden.device)
    _partial_logits_kernel[(column_blocks, ceil_div(outputs, BLOCK_M))](
        partial,
        hidden,
        hidden.stride(0),
        token_rows,
        norm_weight,
        norm_eps,
        fc_weight,
        fc_weight.stride(0),
        fc_bias,
        summary_weight,
        outputs,
        tokens,
        H=size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K_BYTES // hidden.element_size(),
        num_warps=NUM_WARPS,
        num_stages=fitting_stages(stages),
    )
    _sum_partials_kernel[(ceil_div(outputs, REDUCE_ROWS),)](
        logits,
        partial,
        token_rows,
        summary_bias,
        outputs,
        tokens,
        COLUMN_BLOCKS=column_blocks,
        BLOCKS=next_power_of_2(column_blocks),
        ROWS=REDUCE_ROWS,
    )


def value_head(
    hidden: Tensor,  # [T, H]
    fc_weight: Tensor,  # [H, H]
    fc_bias: Tensor,  # [H]
    summary_weight: Tensor,  # [1, H]
    summary_bias: Tensor,  # [1]
    *,
    token_rows: Tensor | None = None,  # int32|int64 [M]
    norm_weight: Tensor | None = None,  # [H]
    norm_eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:  # fp32 [M], or [T] without token_rows
    """Value logits ``z = w2 . silu(W1 h + b1) + b2`` of tokens; ``sigmoid(z)`` is the value, larger = longer.

    The same row of ``hidden`` gives the same bits whatever else is in the batch and wherever it stands. Nothing is
    read back to the host, and no new number of rows compiles anything.

    Args:
        hidden: hidden states [T, H], fp32, bf16 or fp16 (fp64 too on the reference). Rows may be strided.
        fc_weight: W1 [H, H] as ``nn.Linear`` keeps it (out, in); the dtype of ``hidden``.
        fc_bias: b1 [H]; the dtype of ``hidden`` or fp32, like the three below.
        summary_weight: w2 [1, H].
        summary_bias: b2 [1].
        token_rows: int32 or int64 [M], the rows of ``hidden`` to take, repeats allowed (``None``: all T, in order).
            -1 is padding: its logit is exactly 0. So is that of any row outside ``[0, T)``, which is never read.
        norm_weight: weight [H] of the RMSNorm to apply to ``hidden`` first (``None``: it is already normalised).
        norm_eps: epsilon of that RMSNorm, added to the mean of squares.
        backend: ``auto`` (Triton for GPU tensors, else the reference), ``triton`` or ``reference``.

    Returns:
        Logits, fp32 [M] (fp32 [T] without ``token_rows``), accumulated in fp32; fp64 from fp64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as above. Checked before any launch.

    Example:
        >>> import torch
        >>> hidden, weight = torch.ones(2, 64), torch.eye(64)
        >>> rows = torch.tensor([1, -1])
        >>> value_head(hidden, weight, torch.zeros(64), torch.ones(1, 64), torch.ones(1), token_rows=rows)
        tensor([47.7878,  0.0000])
    """
    backend = resolve_backend(backend, hidden)
    check_tensor("hidden", hidden, dtypes=FLOATS[backend], shape=(None, None))
    dtype, device, (tokens, size) = hidden.dtype, hidden.device, hidden.shape
    if size == 0:
        raise ValueError(f"hidden must have at least one column, got shape {list(hidden.shape)}")
    vector_dtypes = (dtype,) if dtype in (torch.float32, torch.float64) else (dtype, torch.float32)
    check_tensor("fc_weight", fc_weight, dtypes=dtype, shape=(size, size), device=device)
    check_tensor("fc_bias", fc_bias, dtypes=vector_dtypes, shape=(size,), device=device)
    check_tensor("summary_weight", summary_weight, dtypes=vector_dtypes, shape=(1, size), device=device)
    check_tensor("summary_bias", summary_bias, dtypes=vector_dtypes, shape=(1,), device=device)
    if token_rows is not None:
        check_tensor("token_rows", token_rows, dtypes=INT_DTYPES, shape=(None,), device=device)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, dtypes=vector_dtypes, shape=(size,), device=device)
    if not isinstance(norm_eps, (int, float)) or not 0 < norm_eps < math.inf:
        raise ValueError(f"norm_eps must be a positive number, got {norm_eps!r}")

    outputs = tokens if token_rows is None else token_rows.shape[0]
    logits = torch.empty(outputs, dtype=compute_dtype(hidden), device=device)
    head = (fc_weight, fc_bias, summary_weight, summary_bias)
    _launch(backend, logits, hidden, *head, token_rows, norm_weight, float(norm_eps))
    return logits
