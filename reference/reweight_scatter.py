"""Guided probabilities of each row's candidates, and their scatter into the rows of ``[B, V]``, in plain PyTorch.

All computations are in fp64, regardless of the inputs' dtype.
"""

import torch

from lenvm_kernels.reference._common import breaks_of, compute_dtype
from lenvm_kernels.types import Candidates, GuidanceColumns, Mode, Status, TextBreak

# A row is unchanged if its values, or its target and its expected value, differ by less.
SMALLEST_SHIFT = 1e-8
# Minimum probability, relative to the best candidate's, of a sentence end after which the output is expected to end.
LIKELY = 0.02
# Distance of targets from the ends of [min v, max v]: absolute, and as a share of the range.
TARGET_MARGIN, TARGET_MARGIN_SHARE = 1e-12, 1e-6


def reweight_scatter(
    candidates: Candidates,
    value_logits: torch.Tensor | None,  # [B, K]
    table: GuidanceColumns,
    *,
    table_rows: torch.Tensor | None,  # [B]
    generated: torch.Tensor | None,  # [B]
    text_breaks: torch.Tensor | None,  # [S]
) -> torch.Tensor:
    """See :func:`lenvm_kernels.ops.reweight_scatter.reweight_scatter`."""
    if table_rows is None:
        table_rows = torch.arange(len(candidates.probs), device=candidates.probs.device)
    table_rows = table_rows.long()

    def column(name):
        return getattr(table, name)[table_rows].double()[:, None]  # [B, 1]

    mode = table.mode[table_rows][:, None]
    guided = (candidates.status == Status.GUIDE)[:, None] & (mode != Mode.UNGUIDED)
    p = candidates.probs.double()
    active = p > 0
    q = torch.where(active, p / p.sum(dim=1, keepdim=True), 0.0)

    eos = (candidates.token_ids[:, :, None] == table.ending_token_ids[table_rows][:, None, :]).any(dim=2)
    z = (target_logits(candidates, table, table_rows) if value_logits is None else value_logits).double()
    needs_value = active & (~eos | (mode == Mode.VALUE_BIAS))
    faulty = guided & (needs_value & ~z.isfinite()).any(dim=1, keepdim=True)
    table.faults.index_add_(0, table_rows, (faulty[:, 0] | candidates.broken).int())
    z = torch.where(z.isfinite(), z, 0.0)
    # The remaining length without the answer.
    answer_nats = column("answer_length") * column("nats_per_token")
    span_z = torch.where(answer_nats > 0, value_logit(torch.nn.functional.softplus(z) - answer_nats), z)
    raw_z, z = z, torch.where(eos, -torch.inf, span_z)
    z_min = torch.where(active, z, torch.inf).amin(dim=1, keepdim=True)
    z_max = torch.where(active, z, -torch.inf).amax(dim=1, keepdim=True)

    # Values as shares of the row's range: w in [0, 1], from the bottom and from the top.
    span = value_difference(z_max, z_min)
    w = torch.where(active & (span > 0), value_difference(z, z_min) / span, 0.0)
    top_w = torch.where(active & (span > 0), value_difference(z_max, z) / span, 0.0)
    expected_w, expected_top_w = ((q * x).sum(dim=1, keepdim=True) for x in (w, top_w))
    expected_value = torch.sigmoid(z_min) + expected_w * span

    # The target of the tilting modes, as a share of the range.
    scale = column("scale")
    counts_down = table.counts_down[table_rows][:, None] & (generated is not None)
    taken_off = 0.0 if generated is None else torch.where(counts_down, generated.double()[:, None], 0.0)
    remaining, least, most = remaining_of_target(column("target_length"), column("tolerance"), taken_off)
    nats = remaining * column("nats_per_token")  # -ln(1 - target value)
    current_nats = -torch.log(torch.sigmoid(-z_max) + expected_top_w * span)
    target_z = value_logit(torch.where(mode == Mode.LENGTH_MUL, scale * current_nats, nats))
    inside = target_z.clamp(z_min, z_max)
    target_w = torch.where(span > 0, value_difference(inside, z_min) / span, 0.0)
    target_w = torch.where(mode == Mode.MUL, expected_w + (scale - 1) * expected_value / span, target_w)
    towards = torch.where(scale >= 1, expected_top_w, expected_w)
    target_w = torch.where(mode == Mode.LINEAR, expected_w + (scale - 1) * towards, target_w)
    target_w = torch.where(mode == Mode.EXP, 1 - expected_top_w ** scale.clamp(min=0), target_w)
    target_w = target_w.nan_to_num(0.0).clamp(0, 1)
    unmoved = (span < SMALLEST_SHIFT) | ((target_w - expected_w).abs() * span <= SMALLEST_SHIFT)
    below_range, above_range = target_z <= z_min, target_z >= z_max
    is_short_enough = above_range | (~below_range & (expected_w <= target_w))
    is_long_enough = below_range | (~above_range & (expected_w >= target_w))
    reached = ((mode == Mode.LE_SOFT) & is_short_enough) | ((mode == Mode.GE_SOFT) & is_long_enough)
    margin = (TARGET_MARGIN / span.clamp(min=SMALLEST_SHIFT)).clamp(min=TARGET_MARGIN_SHARE)
    tilt = scale * span  # of CENTERED_EXP
    is_soft = (mode >= Mode.EQ_SOFT) & (mode <= Mode.LE_SOFT)
    tilts_to_target = guided & ((mode <= Mode.LENGTH_MUL) | is_soft)
    if tilts_to_target.any():
        tilt = torch.where(tilts_to_target, solve_tilt(q, w, top_w, target_w.clamp(margin, 1 - margin)), tilt)

    exponent = torch.where(mode == Mode.VALUE_BIAS, scale * raw_z, tilted(w, top_w, tilt))
    lengths = torch.nn.functional.softplus(z)
    is_near = (mode >= Mode.NEAR) & (mode <= Mode.LE_NEAR)
    of_target = least, most, column("nats_per_token"), mode
    farther = relative_distance(lengths, *of_target)
    if text_breaks is not None:
        ends_sentence = ((breaks_of(candidates.token_ids, text_breaks) & TextBreak.SENTENCE) != 0) & ~eos
        ends_sentence &= p >= LIKELY * p.amax(dim=1, keepdim=True)
        one_more = relative_distance(column("nats_per_token"), *of_target)
        farther = torch.where(ends_sentence, torch.minimum(farther, one_more), farther)
    farther = torch.where(active, farther - torch.where(active, farther, torch.inf).amin(dim=1, keepdim=True), 0.0)
    exponent = torch.where(is_near, -scale * farther, exponent)
    result = torch.softmax(torch.where(active, q.log() + exponent, -torch.inf), dim=1).nan_to_num(0.0)
    equally_near = is_near & (exponent == 0).all(dim=1, keepdim=True)
    result = torch.where((tilts_to_target & unmoved) | equally_near, q, result)

    # Hard constraints choose the candidate with the lowest cost, then the most probable, then the first.
    cost = torch.where(mode == Mode.EQ, (lengths - nats).abs(), z)
    largest = ((mode == Mode.GE) & (remaining > 0)) | (is_soft & above_range)
    cost = torch.where(active, torch.where(largest, -z, cost), torch.inf)
    tied = active & (cost == cost.amin(dim=1, keepdim=True))
    index = torch.where(tied, q, -1.0).argmax(dim=1)  # argmax returns the first maximum
    chosen = torch.nn.functional.one_hot(index, cost.shape[1]).double()
    edge = is_soft & (below_range | above_range)
    result = torch.where((mode == Mode.EQ) | (mode == Mode.GE) | (mode == Mode.LE) | edge, chosen, result)

    result = torch.where(((mode == Mode.MUL) & (scale <= 0)) | reached, q, result)
    result = torch.where(guided & ~faulty & (expected_value >= column("value_min")), result, q)
    return result.to(compute_dtype(candidates.probs, value_logits))


def scatter_probs(
    guided_probs: torch.Tensor,  # [B, K]
    candidates: Candidates,
    modes: torch.Tensor,  # [R]
    table_rows: torch.Tensor | None,  # [B]
    out: torch.Tensor,  # [B, V]
) -> None:
    """See :func:`lenvm_kernels.ops.reweight_scatter.scatter_probs`."""
    mode = modes[: len(out)] if table_rows is None else modes[table_rows.long()]
    guided = (candidates.status == Status.GUIDE) & (mode != Mode.UNGUIDED)
    written = (guided | (candidates.status == Status.SINGLE)).nonzero()[:, 0]
    dense = torch.zeros(len(written), out.shape[1], dtype=out.dtype, device=out.device)
    ids = candidates.token_ids.clamp(min=0).long()[written]
    out[written] = dense.scatter_add_(1, ids, guided_probs[written].to(out.dtype))  # padding adds 0


def target_logits(candidates: Candidates, table: GuidanceColumns, table_rows: torch.Tensor) -> torch.Tensor:
    """fp32 ``[B, K]``: the value logits of candidates without a value model."""
    return table.target_logit[table_rows.long()][:, None].expand_as(candidates.probs)


def remaining_of_target(
    target: torch.Tensor, tolerance: torch.Tensor, taken_off: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Remaining tokens of a target, and their minimum and maximum within its tolerance."""
    remaining, least, most = ((x - taken_off).clamp(min=0) for x in (target, target - tolerance, target + tolerance))
    return remaining, least, most


def value_difference(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """``sigmoid(upper) - sigmoid(lower)`` without cancellation, for ``upper >= lower``, -inf included."""
    gap = torch.where(upper == lower, 0.0, upper - lower)  # -inf - -inf
    return torch.sigmoid(upper) * torch.sigmoid(-lower) * -torch.expm1(-gap)


def value_logit(nats: torch.Tensor) -> torch.Tensor:
    """The logit of the value ``1 - exp(-nats)``; -inf for ``nats <= 0``."""
    return torch.where(nats > 0, nats + torch.log(-torch.expm1(-nats)), -torch.inf)


def relative_distance(
    lengths: torch.Tensor, least: torch.Tensor, most: torch.Tensor, nats_per_token: torch.Tensor, mode: torch.Tensor
) -> torch.Tensor:
    """``|ln((l + 2) / (r + 2))|`` of lengths ``l`` in nats and the nearer ``r`` of ``least`` and ``most`` in tokens.

    It is 0 between the two, and on a side without constraint.
    """
    in_nats = lengths, least * nats_per_token, most * nats_per_token
    at, least, most = (torch.log(x + 2 * nats_per_token) for x in in_nats)
    below = torch.where(mode == Mode.LE_NEAR, 0.0, (least - at).clamp(min=0))
    return below + torch.where(mode == Mode.GE_NEAR, 0.0, (at - most).clamp(min=0))


def tilted(w: torch.Tensor, top_w: torch.Tensor, tilt: torch.Tensor) -> torch.Tensor:
    """``tilt * w`` up to a constant per row, at most 0, so that differences at the favoured end are precise."""
    return torch.where(tilt > 0, -tilt * top_w, tilt * w)


def solve_tilt(q: torch.Tensor, w: torch.Tensor, top_w: torch.Tensor, target_w: torch.Tensor) -> torch.Tensor:
    """The ``tilt`` for which ``p' ~ q exp(tilt w)`` has mean ``w`` equal to ``target_w``; ``[B, 1]``.

    The mean grows with the tilt, so bisection cannot fail. It bisects asinh(tilt), so that the number of steps to full
    precision is the same for tilts of 1 and 1e12 (q of 1e-30 with values that differ by 1e-10 of the range).
    """
    low = torch.full_like(target_w, -28.0)
    high = -low
    for _ in range(60):
        middle = (low + high) / 2
        logits = q.log() + tilted(w, top_w, torch.sinh(middle))
        mean = (torch.softmax(logits, dim=1) * w).sum(dim=1, keepdim=True)
        low, high = torch.where(mean < target_w, middle, low), torch.where(mean < target_w, high, middle)
    return torch.sinh((low + high) / 2)
