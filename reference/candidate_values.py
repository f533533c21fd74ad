"""Values of candidates from a base model's hidden states, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.reweight_scatter import remaining_of_target
from lenvm_kernels.types import GuidanceColumns, Mode

# Larger than any ln(l + 2): the bound on a side without constraint.
BEYOND = 1e3
# A narrower bin, because the answer's length covers it, is treated as a point.
SMALLEST_WIDTH = 1e-6
# Bounds of the remaining tokens of a target, and of nats: fp32 overflows beyond them.
LARGEST_REMAINING, LARGEST_NATS = 2.0**100, 2.0**120
# Smallest length in tokens. Shorter lengths are rounding errors, and 0 is the length of a token that ends the output.
SHORTEST = 2.0**-6
# A larger strength would overflow without changing results.
LARGEST_STRENGTH = 1e6


def candidate_values(
    token_ids: Tensor,  # [B, K]
    scale: Tensor,  # [B, D]
    shift: Tensor,  # [B, D]
    embedding: Tensor,  # [V, D]
    fc_weight: Tensor,  # [E, D], as nn.Linear: [out, in]
    fc_bias: Tensor,  # [E]
    bins_weight: Tensor,  # [N, E]
    bins_bias: Tensor,  # [N]
    bin_edges: Tensor,  # [N + 1]
    table: GuidanceColumns,
    *,
    table_rows: Tensor,  # [B]
    generated: Tensor,  # [B]
) -> tuple[Tensor, Tensor]:  # [B, K] twice
    """See :func:`lenvm_kernels.ops.candidate_values.candidate_values`."""
    weights = (fc_weight, fc_bias, bins_weight, bins_bias)
    dtype = compute_dtype(scale, shift, embedding, *weights)
    fc_weight, fc_bias, bins_weight, bins_bias = (w.to(dtype) for w in weights)
    is_candidate = (token_ids >= 0) & (token_ids < len(embedding))
    e = embedding[token_ids.where(is_candidate, 0).long()].to(dtype)  # padding reads row 0 and is masked below
    x = F.silu(shift.to(dtype)[:, None] + scale.to(dtype)[:, None] * e)
    hidden = F.silu(F.linear(x, fc_weight, fc_bias))
    log_probs = F.log_softmax(F.linear(hidden, bins_weight, bins_bias), dim=-1)
    logits, mean_logits = standing_for(log_probs, bin_edges, table, table_rows=table_rows, generated=generated)
    return logits.where(is_candidate, 0.0), mean_logits.where(is_candidate, 0.0)


def standing_for(
    log_probs: Tensor,  # [B, K, N]
    bin_edges: Tensor,  # [N + 1]
    table: GuidanceColumns,
    *,
    table_rows: Tensor,  # [B]
    generated: Tensor,  # [B]
) -> tuple[Tensor, Tensor]:  # [B, K] twice
    """Two value logits per distribution of lengths: of the length with the same effect under the request's rule as the
    distribution, and of the mean value."""
    dtype = log_probs.dtype

    def column(name: str) -> Tensor:
        return getattr(table, name)[table_rows.long()][:, None]  # [B, 1]

    mode, nats_per_token = column("mode"), column("nats_per_token").to(dtype)
    edges = bin_edges.to(dtype)
    middles = (edges[:-1] + edges[1:] - 1) / 2
    of_bins = nats_per_token[..., None] * middles
    mean_value = (log_probs.exp() * -torch.expm1(-of_bins)).sum(-1)
    # As ln(v / (1 - v)), to be precise for values near 0 and near 1.
    mean_logits = mean_value.log() - torch.logsumexp(log_probs - of_bins, dim=-1)

    target, tolerance = column("target_length").to(dtype), column("tolerance").to(dtype)
    taken_off = torch.where(column("counts_down"), generated.to(dtype)[:, None], 0.0)
    _, least, most = remaining_of_target(target, tolerance, taken_off)
    least, most = least.clamp(max=LARGEST_REMAINING), most.clamp(max=LARGEST_REMAINING)
    strength = column("scale").to(dtype).clamp(max=LARGEST_STRENGTH)
    answer = column("answer_length").to(dtype)
    # Edges of the bins in ln(l + 2). A whole number of tokens is the middle of an interval.
    at = ((edges - 0.5 - answer).clamp(min=0) + 2).log()  # [B, N + 1]
    lowest = torch.where(mode == Mode.LE_NEAR, -BEYOND, (least + 2).log())
    highest = torch.where(mode == Mode.GE_NEAR, BEYOND, (most + 2).log())
    log_weights = log_mean_closeness(at[:, :-1], at[:, 1:], strength, lowest, highest)
    is_near = (mode >= Mode.NEAR) & (mode <= Mode.LE_NEAR) & (strength > 0)
    distance = -torch.logsumexp(log_probs + log_weights[:, None], dim=-1) / torch.where(is_near, strength, 1.0)
    is_ge = mode == Mode.GE_NEAR
    length = (torch.where(is_ge, least, most) + 2) * torch.where(is_ge, -distance, distance).exp() - 2
    nats = ((length.clamp(min=SHORTEST) + answer) * nats_per_token).clamp(max=LARGEST_NATS)
    near_logits = nats + torch.log(-torch.expm1(-nats))
    return torch.where(is_near, near_logits, mean_logits), mean_logits


def log_mean_closeness(start: Tensor, end: Tensor, strength: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """``ln`` of the mean of ``exp(-S d)`` from ``start`` to ``end`` (``[B, N]``); ``d`` is the distance from
    the interval ``lowest`` to ``highest`` (``[B, 1]``)."""
    width = end - start
    parts = end.minimum(lowest) - start, end - start.maximum(highest), end.minimum(highest) - start.maximum(lowest)
    below, above, inside = (part.clamp(min=0) / width.clamp(min=SMALLEST_WIDTH) for part in parts)  # shares
    nearest = (lowest - end).clamp(min=0) + (start - highest).clamp(min=0)
    mean = inside + sum(share * mean_decay(strength * width * share) for share in (below, above))
    return torch.where(width < SMALLEST_WIDTH, 1.0, mean).log() - strength * nearest


def mean_decay(x: Tensor) -> Tensor:
    """The mean of ``exp(-t)`` for ``t`` from 0 to ``x``."""
    return torch.where(x > 0, -torch.expm1(-x) / x.clamp(min=torch.finfo(x.dtype).tiny), 1.0)
