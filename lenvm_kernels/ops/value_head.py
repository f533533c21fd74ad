"""Value head: one fp32 logit per token, ``z = w2 . silu(W1 h + b1) + b2``, in one launch and one pass over W1.

Source: section 3 of the specification; ``v_head.fc`` and ``v_head.summary`` of a LenVM checkpoint. A matmul whose
epilogue applies SiLU, multiplies with w2 and sums the columns of its tile. Only one number per row and column block of
the [M, H] activations reaches memory. The last program of a row block to finish adds these partial sums in the order
of the column blocks, without atomics on the sums.

The gather of ``token_rows`` is fused into the matmul's loads, and the scatter to ``targets`` into the last store. The
final RMSNorm is fused too: ``W1 (h inv_rms(h) w) = inv_rms(h) W1 (h w)``, so the matmul ends with one factor per row.
The sums of squares are passed in, or computed beside the matmul. The norm's weight is folded into W1, or multiplies
``h`` in the loop, where ``h w`` is rounded to the dtype of the weights like any matmul operand (LlamaRMSNorm rounds
twice). If both are passed in, the loop is a plain matmul.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    architecture,
    ceil_div,
    check_counters,
    check_norm_eps,
    fitting_stages,
    overlapping,
    with_row_stride,
)
from lenvm_kernels.ops._device import arrives_last, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.reference._common import SQUARES_GROUP, compute_dtype
from lenvm_kernels.reference.value_head import value_head as _reference

# A row's result must be bitwise identical in any batch. BLOCK_N determines the order of the sum over the columns of W1,
# and BLOCK_K the order of the sums over the columns of h, so both depend on H alone. BLOCK_M may depend on M as long as
# the same number of warps shares the columns of a tile (checked by bench.codegen). The sizes are estimates from bytes
# for an H200. Measured there with H = 1536: 8.3 us for 1 to 128 rows, 17 us for 320, 50 us for 4,096.
# - M <= 64: a multiprocessor reads about 110 GB/s, so W1 is read at full bandwidth only by some tens of programs,
#   H / BLOCK_N. At H = 1536, 64 columns give 24 programs of 0.2 MB each, 2 to 4 us; narrower blocks would gain at most
#   1 us. Splitting the sum over H would need the [M, H] activations in memory, because SiLU follows the sum.
# - M = 4096: tiles reread their operands (1 / BLOCK_M + 1 / BLOCK_N) M H^2 times from L2. This limits 64 x 64 to about
#   30 % of the tensor cores' peak, 128 x 64 to 40 %, 128 x 128 to 60 %.
# Hence 64 columns, and 128 from H = 2560 on, where 128 columns still give at least 20 programs.
BLOCK_N, BLOCK_N_WIDE = 64, 128
WIDE_FROM = 2560
# Up to about one program per multiprocessor (4 * 24 programs at H = 1536), a launch with tiles of 64 rows takes two
# thirds of the time. With tiles of 128 rows, half of the multiprocessors would be idle.
BLOCK_M, BLOCK_M_FEW = 128, 64
FEW_OUTPUTS = 256
# 128 bytes of a row at a time, i.e. whole cache lines. The number of stages (24 or 32 KB each) lets two programs share
# a multiprocessor's 227 KB, so that the epilogue of one overlaps the loop of the other. A program of few rows has a
# multiprocessor to itself, and keeps all bytes of W1 in flight that fit: 7 blocks of 8 KB, or 5 of 16 KB.
BLOCK_K_BYTES = 128
STAGES, STAGES_WIDE = 4, 3
STAGES_FEW, STAGES_FEW_WIDE = 8, 6
# Architectures on which a block can use the 128 and 144 KB of STAGES_FEW. Others have at most 99 KB.
LARGE_SHARED = ("sm_80", "sm_90", "sm_100", "sm_103")
NUM_WARPS, NUM_WARPS_FEW = 8, 4

# h w of an fp16 row can exceed 65,504, so h w / 64 is computed. The absolute error that this adds in fp16's subnormals,
# 2^-19, is at most 0.002 after normalisation, even for the smallest rows (inv_rms <= 1000 for an eps of 1e-6).
_FP16_SCALE = tl.constexpr(2.0**-6)


class HeadWeights(NamedTuple):
    """The weights, whose addresses are the same in every launch."""

    fc_weight: Any  # [H, H]
    fc_bias: Any  # [H]
    summary_weight: Any  # [H]
    summary_bias: Any  # [1]


@triton.jit
def _source_rows(token_rows_ptr, m, M, T):
    """(row of hidden, whether it exists) for outputs m. Padding and rows outside hidden do not exist."""
    if token_rows_ptr is None:
        row, is_token = m.to(tl.int64), m < M
    else:
        row = tl.load(token_rows_ptr + m, mask=m < M, other=-1).to(tl.int64)
        is_token = (row >= 0) & (row < T)
    return row, is_token


@triton.jit
def _store_logits(logits_ptr, targets_ptr, m, M, logits):
    place = m if targets_ptr is None else tl.load(targets_ptr + m, mask=m < M, other=-1)
    tl.store(logits_ptr + place, logits, mask=(m < M) & (place >= 0) & (place < M))


# Per-batch tensors may be slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["stride_square_sums_group", "M", "T"],
    do_not_specialize_on_alignment=["token_rows_ptr", "targets_ptr", "square_sums_ptr", "counters_ptr"],
)
def _value_head_kernel(
    logits_ptr,  # [M]
    partial_ptr,  # [ceil(H / BLOCK_N), M]
    counters_ptr,  # [ceil(M / BLOCK_M)], zeros
    hidden_ptr,  # [T, H]
    stride_hidden_token,
    token_rows_ptr,  # [M] or None
    targets_ptr,  # [M] or None
    norm_weight_ptr,  # [H] or None
    norm_eps,
    square_sums_ptr,  # [ceil(H / SQUARES_GROUP), T] or None
    stride_square_sums_group,
    head,  # HeadWeights
    stride_fc_weight_out,
    M,
    T,
    H: tl.constexpr,
    SQUARES_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tl.static_assert(SQUARES_GROUP % BLOCK_K == 0)
    wait_for_inputs(OVERLAPS)
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    # Column blocks vary fastest: concurrent programs share few rows of hidden and all of W1, both in L2.
    block_n, block_m = tl.program_id(0), tl.program_id(1)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row, is_token = _source_rows(token_rows_ptr, m, M, T)
    if tl.max(is_token.to(tl.int32), axis=0) == 0:  # only padding: no program of this row block increments the counter
        if block_n == 0:
            _store_logits(logits_ptr, targets_ptr, m, M, tl.zeros([BLOCK_M], tl.float32))
        return

    sum_of_squares = tl.zeros([BLOCK_M], tl.float32)
    if square_sums_ptr is not None:
        group_sums = tl.load(square_sums_ptr + row, mask=is_token, other=0.0)
    hidden_rows = hidden_ptr + row[:, None] * stride_hidden_token
    weight_rows = head.fc_weight + n[None, :].to(tl.int64) * stride_fc_weight_out
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    scale = _FP16_SCALE if norm_weight_ptr is not None and hidden_ptr.dtype.element_ty == tl.float16 else 1.0
    for start in range(0, H, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(hidden_rows + k[None, :], mask=is_token[:, None] & (k < H)[None, :], other=0.0)
        weight = tl.load(weight_rows + k[:, None], mask=(n < H)[None, :] & (k < H)[:, None], other=0.0)
        if square_sums_ptr is not None:  # prefetch the sums of the next block of columns
            sum_of_squares += group_sums
            following = start + BLOCK_K
            groups = square_sums_ptr + stride_square_sums_group.to(tl.int64) * (following // SQUARES_GROUP)
            begins_group = (following % SQUARES_GROUP == 0) & (following < H)
            group_sums = tl.load(groups + row, mask=is_token & begins_group, other=0.0)
        if norm_weight_ptr is not None:
            norm_weight = tl.load(norm_weight_ptr + k, mask=k < H, other=0.0).to(tl.float32)
            h_fp32 = h.to(tl.float32)
            if square_sums_ptr is None:
                sum_of_squares += tl.sum(h_fp32 * h_fp32, axis=1)
            h = (h_fp32 * (norm_weight * scale)[None, :]).to(h.dtype)
        acc = tl.dot(h, weight, acc, input_precision="ieee")
    if norm_weight_ptr is not None or square_sums_ptr is not None:
        acc *= (tl.rsqrt(sum_of_squares / H + norm_eps) / scale)[:, None]

    acc += tl.load(head.fc_bias + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    summary_weight = tl.load(head.summary_weight + n, mask=n < H, other=0.0).to(tl.float32)
    partial = tl.sum(acc * tl.sigmoid(acc) * summary_weight[None, :], axis=1)
    tl.store(partial_ptr + block_n * M + m, partial, mask=m < M)
    if arrives_last(counters_ptr + block_m, COLUMN_BLOCKS):
        logits = tl.zeros([BLOCK_M], tl.float32)
        for block in tl.static_range(COLUMN_BLOCKS):
            logits += tl.load(partial_ptr + block * M + m, mask=is_token, other=0.0, cache_modifier=".cg")
        logits += tl.load(head.summary_bias).to(tl.float32)
        _store_logits(logits_ptr, targets_ptr, m, M, tl.where(is_token, logits, 0.0))


def num_counters(outputs: int) -> int:
    """Maximum number of counters that :func:`value_head` needs for ``outputs`` rows: ``ceil(outputs / 64)``."""
    return ceil_div(outputs, BLOCK_M_FEW)


@operator(reference=_reference, mutates=["counters"], only_kernels=["counters"])
def _launch(
    out: Tensor,
    counters: Tensor | None,
    hidden: Tensor,
    fc_weight: Tensor,
    fc_bias: Tensor,
    summary_weight: Tensor,
    summary_bias: Tensor,
    token_rows: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    targets: Tensor | None,
    square_sums: Tensor | None,
) -> None:
    (tokens, size), outputs, device = hidden.shape, out.shape[0], hidden.device
    if outputs == 0:
        return
    is_wide, is_few = size >= WIDE_FROM, outputs <= FEW_OUTPUTS
    stages = STAGES_WIDE if is_wide else STAGES
    if is_few and architecture() in LARGE_SHARED:
        stages = STAGES_FEW_WIDE if is_wide else STAGES_FEW
    block_m, block_n = BLOCK_M_FEW if is_few else BLOCK_M, BLOCK_N_WIDE if is_wide else BLOCK_N
    column_blocks, row_blocks = ceil_div(size, block_n), ceil_div(outputs, block_m)
    partial = torch.empty(column_blocks, outputs, dtype=torch.float32, device=device)
    if counters is None:
        counters = torch.zeros(row_blocks, dtype=torch.int32, device=device)
    norm = (norm_weight, norm_eps, *with_row_stride(square_sums))
    head = (HeadWeights(fc_weight, fc_bias, summary_weight, summary_bias), fc_weight.stride(0))
    _value_head_kernel[(column_blocks, row_blocks)](
        out,
        partial,
        counters,
        *with_row_stride(hidden),
        token_rows,
        targets,
        *norm,
        *head,
        outputs,
        tokens,
        H=size,
        SQUARES_GROUP=SQUARES_GROUP,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K_BYTES // hidden.element_size(),
        num_warps=NUM_WARPS_FEW if is_few else NUM_WARPS,
        num_stages=fitting_stages(stages),
        # The compiler could fuse different products with an addition in different tiles, and so change a row's bits.
        enable_fp_fusion=False,
        **overlapping(),
    )


_SPEC = Spec("""
    hidden: float [T, H+]
    fc_weight: =hidden [H, H]
    fc_bias: =hidden|float32 [H]
    summary_weight: =hidden|float32 [1, H]
    summary_bias: =hidden|float32 [1]
    token_rows?: int [M]
    norm_weight?: =hidden|float32 [H]
    targets?: int [M]
    square_sums?: single [(H + 63) // 64, T]
    counters?: int32 [*]
""")


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
    targets: Tensor | None = None,  # int32|int64 [M]
    square_sums: Tensor | None = None,  # fp32 [ceil(H / 64), T]
    counters: Tensor | None = None,  # int32 [>= num_counters(M)]
    backend: str = "auto",
) -> Tensor:  # fp32 [M], or [T] without token_rows
    """Compute value logits ``z = w2 . silu(W1 h + b1) + b2`` of tokens; ``sigmoid(z)`` is the value, larger = longer.

    The result for a row of ``hidden`` is bitwise identical in any batch and at any index. Causes no host-device sync,
    and no recompilation for a new number of rows.

    Args:
        hidden: hidden states [T, H], fp32, bf16 or fp16 (fp64 too on the reference). Rows may be strided.
        fc_weight: W1 [H, H], stored as in ``nn.Linear`` (out, in), in the dtype of ``hidden``.
        fc_bias: b1 [H]; the dtype of ``hidden`` or fp32, also for the next two and ``norm_weight``.
        summary_weight: w2 [1, H].
        summary_bias: b2 [1].
        token_rows: int32 or int64 [M]; rows of ``hidden`` to process, repeats allowed. Rows outside ``[0, T)``, such as
            -1 for padding, are not read, and their logits are exactly 0. If ``None``, all T rows in order.
        norm_weight: [H]; weight of the RMSNorm to apply to ``hidden`` first. If ``None``, there is no norm; with
            ``square_sums``, the norm's weight ``w`` must be folded into ``fc_weight``, as ``W1 diag(w)``.
        norm_eps: epsilon of the RMSNorm, added to the mean of squares. Not used without a norm.
        targets: int32 or int64 [M]; a permutation of the outputs: ``logits[targets[m]]`` is the logit of
            ``token_rows[m]``. Targets outside ``[0, M)`` are not written, and elements without a target are arbitrary
            (0 on the reference). If ``None``, ``logits[m]``.
        square_sums: fp32 [ceil(H / 64), T]; sums of squares of ``hidden`` over 64 columns each: ``square_sums[g, t]``
            is the sum for ``hidden[t, 64 g : 64 g + 64]``. If given, a norm is applied that uses these sums, added in
            the order of the groups. Rows may be strided.
        counters: int32, at least :func:`num_counters` ``(M)``, all 0, and 0 again afterwards. Launches that may overlap
            must not share them. If ``None``, they are allocated, which takes an additional launch.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.

    Returns:
        Logits, fp32 [M] (fp32 [T] without ``token_rows``), accumulated in fp32; fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> hidden, weight = torch.ones(2, 64), torch.eye(64)
        >>> rows = torch.tensor([1, -1])
        >>> value_head(hidden, weight, torch.zeros(64), torch.ones(1, 64), torch.ones(1), token_rows=rows)
        tensor([47.7878,  0.0000])
    """
    head = (fc_weight, fc_bias, summary_weight, summary_bias)
    without_rows = {"M": hidden.shape[0]} if token_rows is None and isinstance(hidden, Tensor) else {}
    arguments = (hidden, *head, token_rows, norm_weight, targets, square_sums, counters)
    backend, sizes = _SPEC.check(backend, *arguments, sizes=without_rows)
    check_norm_eps(norm_eps)
    check_counters(counters, num_counters(sizes["M"]))
    logits = torch.empty(sizes["M"], dtype=compute_dtype(hidden), device=hidden.device)
    norm = (norm_weight, float(norm_eps))
    _launch(backend, logits, counters, hidden, *head, token_rows, *norm, targets, square_sums)
    return logits
