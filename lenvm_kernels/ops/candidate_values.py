"""Values of candidates from a base model's hidden states, in one launch."""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, next_power_of_2, overlapping, row_strides, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.reweight_scatter.reweight import (
    _GE_NEAR,
    _LE_NEAR,
    _NEAR,
    _SMALLEST,
    _one_minus_exp,
    _remaining_of_target,
)
from lenvm_kernels.reference import candidate_values as reference
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.types import GuidanceColumns

# Not measured. With 128 columns at a time, the product with W2 spills.
BLOCK_M, BLOCK_N = 16, 64
# 128 bytes of a row of W1. The left operand needs three loads, so its latency is hidden by stages.
BLOCK_K_BYTES = 128
STAGES, NUM_WARPS = 3, 4
# Maximum number of length bins: a program holds up to 16 x 64 of their logits.
MAX_BINS = 64
_SMALLEST_WIDTH, _LARGEST_NATS = tl.constexpr(reference.SMALLEST_WIDTH), tl.constexpr(reference.LARGEST_NATS)
_LARGEST_REMAINING, _BEYOND = tl.constexpr(reference.LARGEST_REMAINING), tl.constexpr(reference.BEYOND)
_SHORTEST, _LARGEST_STRENGTH = tl.constexpr(reference.SHORTEST), tl.constexpr(reference.LARGEST_STRENGTH)
# Logit of padding bins.
_NO_LOGIT = tl.constexpr(-(2.0**126))


ProbeWeights = namedtuple("ProbeWeights", "fc_weight fc_bias bins_weight bins_bias bin_edges")
# Columns of the guidance table that the kernel reads.
ProbeColumns = namedtuple("ProbeColumns", "mode scale nats_per_token target_length tolerance counts_down answer_length")


# Value logits of the reduced lengths, and of the mean values.
_Logits = namedtuple("_Logits", "value_logits mean_logits")


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _mean_decay(x):
    """The mean of ``exp(-t)`` for ``t`` from 0 to ``x``."""
    return tl.where(x > 0, tl.div_rn(_one_minus_exp(x), tl.maximum(x, _SMALLEST)), 1.0)


@triton.jit
def _log_sum_exp(x):
    largest = tl.max(x, axis=1)
    return largest + tl.log(tl.sum(tl.exp(x - largest[:, None]), axis=1))


@triton.jit
def _standing_for(bin_logits, bin_edges_ptr, of_table, N: tl.constexpr, BLOCK_BINS: tl.constexpr):
    """(value logits, value logits of the mean) of candidates, given ``[BLOCK_M, BLOCK_BINS]`` logits of lengths."""
    table, stride, table_row, generated = of_table
    n = tl.arange(0, BLOCK_BINS)
    log_probs = bin_logits - _log_sum_exp(bin_logits)[:, None]
    # Padding bins get the edges of the last bin, to avoid infinities.
    first = tl.load(bin_edges_ptr + tl.minimum(n, N - 1))
    behind = tl.load(bin_edges_ptr + tl.minimum(n, N - 1) + 1)
    mode = tl.load(table.mode + table_row * stride.mode)
    nats_per_token = tl.load(table.nats_per_token + table_row * stride.nats_per_token)
    target = tl.load(table.target_length + table_row * stride.target_length)
    tolerance = tl.load(table.tolerance + table_row * stride.tolerance)
    counts_down = tl.load(table.counts_down + table_row * stride.counts_down) != 0
    strength = tl.load(table.scale + table_row * stride.scale)
    answer = tl.load(table.answer_length + table_row * stride.answer_length)
    of_bins = nats_per_token[:, None] * ((first + behind - 1) * 0.5)[None, :]
    mean_value = tl.sum(tl.exp(log_probs) * _one_minus_exp(of_bins), axis=1)
    # As ln(v / (1 - v)), to be precise for values near 0 and near 1.
    mean_logits = tl.log(mean_value) - _log_sum_exp(log_probs - of_bins)

    _, least, most = _remaining_of_target(target, tolerance, counts_down, generated)
    least, most = tl.minimum(least, _LARGEST_REMAINING), tl.minimum(most, _LARGEST_REMAINING)
    strength = tl.minimum(strength, _LARGEST_STRENGTH)
    lowest = tl.where(mode == _LE_NEAR, -_BEYOND, tl.log(least + 2))[:, None]
    highest = tl.where(mode == _GE_NEAR, _BEYOND, tl.log(most + 2))[:, None]
    # A whole number of tokens is the middle of an interval.
    start = tl.log(tl.maximum(first[None, :] - 0.5 - answer[:, None], 0.0) + 2)
    end = tl.log(tl.maximum(behind[None, :] - 0.5 - answer[:, None], 0.0) + 2)
    width = end - start
    divisor = tl.maximum(width, _SMALLEST_WIDTH)
    below = tl.div_rn(tl.maximum(tl.minimum(end, lowest) - start, 0.0), divisor)
    above = tl.div_rn(tl.maximum(end - tl.maximum(start, highest), 0.0), divisor)
    inside = tl.div_rn(tl.maximum(tl.minimum(end, highest) - tl.maximum(start, lowest), 0.0), divisor)
    nearest = tl.maximum(lowest - end, 0.0) + tl.maximum(start - highest, 0.0)
    steps = strength[:, None] * width
    mean = inside + below * _mean_decay(steps * below) + above * _mean_decay(steps * above)
    mean = tl.where(width < _SMALLEST_WIDTH, 1.0, mean)
    closeness = _log_sum_exp(log_probs + tl.log(mean) - strength[:, None] * nearest)
    is_near = (mode >= _NEAR) & (mode <= _LE_NEAR) & (strength > 0)
    distance = tl.div_rn(-closeness, tl.where(is_near, strength, 1.0))
    distance = tl.where(mode == _GE_NEAR, -distance, distance)
    nearest_aim = tl.where(mode == _GE_NEAR, least, most)
    # NaN must propagate: reweight_scatter counts it as a fault.
    length = tl.maximum((nearest_aim + 2) * tl.exp(distance) - 2, _SHORTEST, propagate_nan=tl.PropagateNan.ALL)
    nats = tl.minimum((length + answer) * nats_per_token, _LARGEST_NATS, propagate_nan=tl.PropagateNan.ALL)
    near_logits = nats + tl.log(_one_minus_exp(nats))
    return tl.where(is_near, near_logits, mean_logits), mean_logits


@kernel(
    specialized="logits_ptr mean_logits_ptr scale_ptr stride_scale_row shift_ptr stride_shift_row "
    "embedding_ptr stride_embedding_token stride_fc_weight_out stride_bins_weight_bin"
)
def _candidate_values_kernel(
    logits_ptr,  # [B, K]
    mean_logits_ptr,  # [B, K]
    token_ids_ptr,  # [B, K]
    stride_token_ids_row,
    scale_ptr,  # [B, D]
    stride_scale_row,
    shift_ptr,  # [B, D]
    stride_shift_row,
    embedding_ptr,  # [V, D]
    stride_embedding_token,
    head,  # ProbeWeights
    stride_fc_weight_out,
    stride_bins_weight_bin,
    table,  # ProbeColumns
    stride,  # its strides
    table_rows_ptr,  # [B]
    generated_ptr,  # [B]
    B,
    V,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, row = m < B * K, (m // K).to(tl.int64)
    token = tl.load(token_ids_ptr + row * stride_token_ids_row + m % K, mask=inside, other=-1).to(tl.int64)
    is_candidate = (token >= 0) & (token < V)
    if tl.max(is_candidate.to(tl.int32), axis=0) == 0:
        nothing = tl.zeros([BLOCK_M], tl.float32)
        tl.store(logits_ptr + m, nothing, mask=inside)
        tl.store(mean_logits_ptr + m, nothing, mask=inside)
        return

    scales = scale_ptr + row[:, None] * stride_scale_row
    shifts = shift_ptr + row[:, None] * stride_shift_row
    embeddings = embedding_ptr + token[:, None] * stride_embedding_token
    of_bin = tl.arange(0, BLOCK_BINS)
    bins_rows = head.bins_weight + of_bin[None, :].to(tl.int64) * stride_bins_weight_bin
    bin_logits = tl.zeros([BLOCK_M, BLOCK_BINS], tl.float32)
    for first in tl.range(0, E, BLOCK_N, num_stages=1):
        n = first + tl.arange(0, BLOCK_N)
        weight_rows = head.fc_weight + n[None, :].to(tl.int64) * stride_fc_weight_out
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_read = is_candidate[:, None] & (k < D)[None, :]
            e = tl.load(embeddings + k[None, :], mask=is_read, other=0.0).to(tl.float32)
            scale = tl.load(scales + k[None, :], mask=is_read, other=0.0).to(tl.float32)
            shift = tl.load(shifts + k[None, :], mask=is_read, other=0.0).to(tl.float32)
            weight = tl.load(weight_rows + k[:, None], mask=(n < E)[None, :] & (k < D)[:, None], other=0.0)
            x = _silu(shift + scale * e)
            acc = tl.dot(x.to(weight.dtype), weight, acc, input_precision="ieee")
        acc += tl.load(head.fc_bias + n, mask=n < E, other=0.0).to(tl.float32)[None, :]
        bins_weight = tl.load(bins_rows + n[:, None], mask=(of_bin < N)[None, :] & (n < E)[:, None], other=0.0)
        # In fp32, because rounding of products would be visible in these short sums.
        bin_logits = tl.dot(_silu(acc), bins_weight.to(tl.float32), bin_logits, input_precision="ieee")

    bin_logits += tl.load(head.bins_bias + of_bin, mask=of_bin < N, other=0.0).to(tl.float32)[None, :]
    bin_logits = tl.where((of_bin < N)[None, :], bin_logits, _NO_LOGIT)
    row = tl.where(inside, row, 0)
    table_row = tl.load(table_rows_ptr + row).to(tl.int64)
    generated = tl.load(generated_ptr + row).to(tl.float32)
    of_table = table, stride, table_row, generated
    logits, mean_logits = _standing_for(bin_logits, head.bin_edges, of_table, N, BLOCK_BINS)
    tl.store(logits_ptr + m, tl.where(is_candidate, logits, 0.0), mask=inside)
    tl.store(mean_logits_ptr + m, tl.where(is_candidate, mean_logits, 0.0), mask=inside)


_SPEC = Spec(f"""
    token_ids: int [B, K]
    embedding: float [V, D+]
    scale: =embedding|float32 [B, D]
    shift: =embedding|float32 [B, D]
    fc_weight: =embedding [E+, D]
    fc_bias: =embedding|float32 [E]
    bins_weight: =embedding [N=1..{MAX_BINS}, E]
    bins_bias: =embedding|float32 [N]
    bin_edges: single [N + 1]
    table: GuidanceColumns ({", ".join(ProbeColumns._fields)}) strided single
    table_rows: int [B]
    generated: int32 [B]
""")


@operator(_SPEC, reference=reference.candidate_values, takes={"table": ProbeColumns})
def _launch(out: _Logits, given):
    weights = ProbeWeights._make(getattr(given, name) for name in ProbeWeights._fields)
    (rows, columns), (outputs, size), bins = given.token_ids.shape, weights.fc_weight.shape, len(weights.bins_weight)
    _candidate_values_kernel[(ceil_div(rows * columns, BLOCK_M),)](
        *(*out, *with_row_strides(given.token_ids, given.scale, given.shift, given.embedding)),
        *(weights, weights.fc_weight.stride(0), weights.bins_weight.stride(0)),
        *(given.table, row_strides(given.table), given.table_rows, given.generated),
        *(rows, given.embedding.shape[0]),
        K=columns,
        D=size,
        E=outputs,
        N=bins,
        BLOCK_M=BLOCK_M,
        BLOCK_N=min(BLOCK_N, max(16, next_power_of_2(outputs))),
        BLOCK_BINS=max(16, next_power_of_2(bins)),
        BLOCK_K=BLOCK_K_BYTES // weights.fc_weight.element_size(),
        num_warps=NUM_WARPS,
        num_stages=STAGES,
        enable_fp_fusion=False,
        **overlapping(),
    )


def candidate_values(
    token_ids: Tensor,  # int32|int64 [B, K]
    scale: Tensor,  # [B, D]
    shift: Tensor,  # [B, D]
    embedding: Tensor,  # [V, D]
    fc_weight: Tensor,  # [E, D]
    fc_bias: Tensor,  # [E]
    bins_weight: Tensor,  # [N, E]
    bins_bias: Tensor,  # [N]
    bin_edges: Tensor,  # fp32 [N + 1]
    table: GuidanceColumns,  # R requests
    *,
    table_rows: Tensor,  # int32|int64 [B]
    generated: Tensor,  # int32 [B]
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fp32 [B, K] twice
    """Compute value logits of candidates from the distribution of the remaining length predicted by a small network.

    The network predicts the probabilities of ``N`` bins of lengths, ``softmax(W2 silu(W1 silu(shift + scale * e) + b1)
    + b2)``. ``e`` is the candidate's row of ``embedding``; ``scale`` and ``shift`` are per request (feature-wise linear
    modulation, arXiv 1709.07871). Two value logits are computed from a distribution:

    * the logit of the mean value, ``E[1 - gamma^L]``, which predicts lengths;
    * the logit of the length ``l`` that has the same effect under the request's rule as the distribution. For the near
      constraints, ``l`` is as far from the remaining ``r`` tokens as the average length, ``exp(-S d(l)) = E[exp(-S
      d(L))]`` with ``d(l) = |ln((l + 2) / (r + 2))|`` and the request's strength ``S``; for ``near``, ``l`` is at least
      ``r``. For all other modes, and for a strength of 0, it equals the first logit.

    Within a bin, ``ln(L + 2)`` is uniform for the distance; for the mean, each length is the middle of the bin. A
    candidate's result is bitwise identical in any batch.

    Args:
        token_ids: int32 or int64 [B, K]; candidates. The logits of ids outside ``[0, V)``, such as -1, are exactly 0.
            Rows may be strided.
        scale, shift: [B, D], in the dtype of ``embedding`` or fp32; modulation per request, projections of its hidden
            state. Rows may be strided.
        embedding: [V, D], fp32, bf16 or fp16 (also fp64 on the reference); one row per token. Rows may be strided.
        fc_weight: W1 [E, D], stored as in ``nn.Linear`` (out, in), in the dtype of ``embedding``. The left operand is
            rounded to this dtype. Rows may be strided; the same applies to ``bins_weight``.
        fc_bias: b1 [E]; in the dtype of ``embedding`` or fp32, as ``bins_bias``.
        bins_weight: W2 [N, E], for 1 to 64 bins; the dtype of ``embedding``. Its products are fp32.
        bins_bias: b2 [N].
        bin_edges: fp32 [N + 1], tokens, ascending and at least 1. Bin ``i`` has the lengths from ``bin_edges[i]`` up
            to, but not including, ``bin_edges[i + 1]``.
        table: guidance parameters of ``R`` requests, as for :func:`reweight_scatter`.
        table_rows: int32 or int64 [B]; each request's row of the table.
        generated: int32 [B]; tokens generated so far.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        ``(value_logits, mean_logits)``, fp32 [B, K]: the logits for guidance and for predicted lengths.
        Accumulated in fp32; fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> params = parse_guidance({"target_length": 9, "gamma": 0.9})
        >>> table = GuidanceTable.from_params([params], [{2}], "cpu").columns
        >>> of_rows = dict(table_rows=torch.tensor([0]), generated=torch.tensor([3], dtype=torch.int32))
        >>> tokens = torch.tensor([[0, 1]]), torch.ones(1, 2), torch.zeros(1, 2), 8 * torch.eye(2)
        >>> head = torch.eye(2), torch.zeros(2), torch.eye(2), torch.zeros(2), torch.tensor([1.0, 2.0, 20.0])
        >>> _, mean_logits = candidate_values(*tokens, *head, table, **of_rows)
        >>> mean_logits.sigmoid()  # token 0 is followed by the end, token 1 by more tokens
        tensor([[0.1002, 0.6690]])
    """
    operands = (token_ids, embedding, scale, shift, fc_weight, fc_bias, bins_weight, bins_bias, bin_edges, table)
    backend, _ = _SPEC.check(backend, *operands, table_rows, generated)
    logits = torch.empty(2, *token_ids.shape, dtype=compute_dtype(embedding), device=token_ids.device)
    out = _launch(backend, _Logits(*logits.unbind(0)), *operands, table_rows, generated)
    return out.value_logits, out.mean_logits
