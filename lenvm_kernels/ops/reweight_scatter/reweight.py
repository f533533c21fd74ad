"""Device functions of :mod:`lenvm_kernels.ops.reweight_scatter`: guided probabilities of a tile of requests.

fp32 is precise enough because values are never subtracted. Values are represented as shares of a request's range, ``w =
(v - min v) / range`` and ``1 - w``, each from ``sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a))``.
Derived numbers are measured from the nearer end: exponents from the favoured end, deviations from the end near the
mean. Newton steps guarded by a bracket find the root of ``logit E[w]``, which is linear in ``lambda`` for two
candidates and nearly linear in the tails of more. Relative distances are measured from the smallest, so that no
strength underflows all weights, and equally near candidates keep the ratios of ``q``. All modes are computed for all
requests, to avoid divergence.
"""

import triton
import triton.language as tl

from lenvm_kernels.reference.reweight_scatter import LIKELY, SMALLEST_SHIFT, TARGET_MARGIN, TARGET_MARGIN_SHARE
from lenvm_kernels.types import Mode, Status, TextBreak

# Accepted error of logit E[w]: at most 1e-6 of the request's range, and within the resolution of fp32 logarithms.
_ROOT_TOLERANCE = tl.constexpr(4e-6)
# The smallest normal fp32. A smaller literal would be fp64 in Triton and promote its operands.
_SMALLEST = tl.constexpr(2.0**-126)
_BIG = tl.constexpr(2.0**127)
_EOS_Z = tl.constexpr(-(2.0**127))
_SMALLEST_SHIFT, _LIKELY = tl.constexpr(SMALLEST_SHIFT), tl.constexpr(LIKELY)
_TARGET_MARGIN, _TARGET_MARGIN_SHARE = tl.constexpr(TARGET_MARGIN), tl.constexpr(TARGET_MARGIN_SHARE)
_GUIDE, _SINGLE = tl.constexpr(int(Status.GUIDE)), tl.constexpr(int(Status.SINGLE))
_UNGUIDED, _MUL, _LINEAR = tl.constexpr(int(Mode.UNGUIDED)), tl.constexpr(int(Mode.MUL)), tl.constexpr(int(Mode.LINEAR))
_EXP, _LENGTH_MUL = tl.constexpr(int(Mode.EXP)), tl.constexpr(int(Mode.LENGTH_MUL))
_CENTERED_EXP, _VALUE_BIAS = tl.constexpr(int(Mode.CENTERED_EXP)), tl.constexpr(int(Mode.VALUE_BIAS))
_EQ, _GE, _LE = tl.constexpr(int(Mode.EQ)), tl.constexpr(int(Mode.GE)), tl.constexpr(int(Mode.LE))
_EQ_SOFT, _GE_SOFT, _LE_SOFT = (tl.constexpr(int(mode)) for mode in (Mode.EQ_SOFT, Mode.GE_SOFT, Mode.LE_SOFT))
_SENTENCE = tl.constexpr(int(TextBreak.SENTENCE))
_NEAR, _GE_NEAR, _LE_NEAR = (tl.constexpr(int(mode)) for mode in (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR))


@triton.jit
def _one_minus_exp(x):
    """``1 - exp(-x)`` for ``x >= 0`` to fp32 precision relative to the result."""
    # Taylor series to x^8 below 1/2, where the subtraction would cancel.
    series = 1 - x / 6 * (1 - x / 7 * (1 - x / 8))
    series = 1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * series)))
    return tl.where(x < 0.5, x * series, 1 - tl.exp(-x))


@triton.jit
def _twice_atanh(s):
    """``2 atanh(s) = ln((1 + s) / (1 - s))`` for ``0 <= s <= 1/3`` to fp32 precision relative to the result."""
    t = s * s
    return 2 * s * (1 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9 + t * (1.0 / 11 + t / 13))))))


@triton.jit
def _softplus(z):
    """``ln(1 + exp(z))`` to fp32 precision relative to the result."""
    y = tl.exp(-tl.abs(z))
    return tl.maximum(z, 0.0) + _twice_atanh(y / (2 + y))  # ln(1 + y)


@triton.jit
def _value_difference(upper, lower):
    """``sigmoid(upper) - sigmoid(lower)`` without cancellation, for ``upper >= lower``."""
    return tl.sigmoid(upper) * tl.sigmoid(-lower) * _one_minus_exp(upper - lower)


@triton.jit
def _request_sum(x):
    return tl.sum(x, axis=1)[:, None]


@triton.jit
def _request_max(x):
    return tl.max(x, axis=1)[:, None]


@triton.jit
def _request_min(x):
    return tl.min(x, axis=1)[:, None]


@triton.jit
def _tilt(log_q, w, top_w, active, tilt):
    """Weights ``q exp(tilt w)`` up to a constant per request; the largest is 1."""
    # Measured from the favoured end, so that differences there are precise.
    exponent = tl.where(tilt > 0, -tilt * top_w, tilt * w)
    logit = tl.where(active, log_q + exponent, -_BIG)
    return tl.where(active, tl.exp(logit - _request_max(logit)), 0.0)


@triton.jit
def _solve_tilt(log_q, w, top_w, active, target_w, target_top_w, unsolved, MAX_STEPS: tl.constexpr):
    """The tilt at which ``p' ~ q exp(tilt w)`` has mean ``w`` equal to ``target_w``; ``[REQUESTS, 1]``.

    A request stops when it has converged, so its result does not depend on the other requests.

    Each thread evaluates the loop condition from its own copies of the sums, and the loop has barriers, so the copies
    must be bitwise identical. Fusing a product with the first addition of a cross-thread sum would break this, so
    launches set ``enable_fp_fusion=False``; `bench.codegen` checks the instructions.
    """
    target_logit = tl.log(target_w) - tl.log(target_top_w)
    tilt = target_w * 0.0
    low, high, previous = tilt - _BIG, tilt + _BIG, tilt + _BIG
    step = 0
    while (step < MAX_STEPS) & (tl.max(tl.max(unsolved.to(tl.int32), axis=1), axis=0) > 0):
        weight = _tilt(log_q, w, top_w, active, tilt)
        total, bottom_part, top_part = _request_sum(weight), _request_sum(weight * top_w), _request_sum(weight * w)
        mean, top_mean = top_part / total, bottom_part / total
        # Measured from the end near the mean, where the difference is precise. At a mean of 1 - 1e-30, the
        # rounding error of w - mean would dominate the variance.
        deviation = tl.where(mean > 0.5, top_mean - top_w, w - mean)
        variance = _request_sum(weight * deviation * deviation) / total
        error = tl.log(top_part) - tl.log(bottom_part) - target_logit  # +-inf once a part underflows
        low, high = tl.where(error < 0, tilt, low), tl.where(error < 0, high, tilt)

        # d(logit mean) / d(tilt) = variance / (mean (1 - mean)). Towards an open side, the step size is limited.
        # Between bounds, a Newton step is taken only if the last step halved the error; otherwise steps may oscillate.
        newton = tilt - error * (mean * top_mean) / variance
        reach = 8 * tl.abs(tilt) + 8
        closed = (low > -_BIG) & (high < _BIG)
        trusted = tl.where(closed, tl.abs(error) < 0.5 * previous, tl.abs(newton - tilt) < reach)
        inside = (newton > low) & (newton < high) & trusted
        previous = tl.abs(error)
        outwards = tl.where(error < 0, tilt + reach, tilt - reach)
        # Between bounds that are orders of magnitude apart, bisect the exponent.
        near, far = tl.minimum(tl.abs(low), tl.abs(high)), tl.maximum(tl.abs(low), tl.abs(high))
        geometric = tl.sqrt(tl.maximum(near, 0.125)) * tl.sqrt(far)
        middle = tl.where(far > 4 * near + 0.5, tl.where(low + high < 0, -geometric, geometric), (low + high) * 0.5)
        following = tl.where(inside, newton, tl.where(closed, middle, outwards))
        unsolved = unsolved & (tl.abs(error) > _ROOT_TOLERANCE) & (following > low) & (following < high)
        tilt = tl.where(unsolved, following, tilt)
        step += 1
    return tilt


@triton.jit
def _relative_distance(length, least, most, mode):
    """``ln(least / length)`` below, ``ln(length / most)`` above; 0 between and on a side without constraint."""
    is_below, is_above = (mode != _LE_NEAR) & (length < least), (mode != _GE_NEAR) & (length > most)
    ratio = tl.div_rn(tl.where(is_below, least, length), tl.where(is_below, length, most))
    return tl.where(is_below | is_above, tl.log(tl.minimum(ratio, _BIG)), 0.0)


@triton.jit
def _remaining_of_target(target, tolerance, counts_down, generated):
    """Remaining tokens of a target, and their minimum and maximum within its tolerance."""
    taken_off = tl.where(counts_down, generated, 0.0)
    remaining = tl.maximum(target - taken_off, 0.0)
    least, most = tl.maximum(target - tolerance - taken_off, 0.0), tl.maximum(target + tolerance - taken_off, 0.0)
    return remaining, least, most


@triton.jit
def _load_value_logits(value_logits_ptr, stride_request, request, column, table, stride, table_row, mask):
    """The value logits of candidates. Without a tensor, all candidates have the value of the request's target."""
    if value_logits_ptr is None:
        return tl.load(table.target_logit + table_row * stride.target_logit + 0 * column, mask=mask, other=0.0)
    else:
        return tl.load(value_logits_ptr + request * stride_request + column, mask=mask, other=0.0)


@triton.jit
def _reweight(request, valid, inputs, options, K: tl.constexpr, MAX_STEPS: tl.constexpr):
    """(table row, token ids, guided probabilities, whether the request is a fault) of a tile of ``[REQUESTS, 1]``
    requests. Results of invalid requests are not stored. ``MAX_STEPS`` limits the root search."""
    candidates, value_logits_ptr, stride_value_logits_request, table, stride = inputs
    table_rows_ptr, generated_ptr, text_breaks_ptr, S, E = options
    table_row = request
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + request, mask=valid, other=0).to(tl.int64)
    mode = tl.load(table.mode + table_row * stride.mode, mask=valid, other=_UNGUIDED)
    scale = tl.load(table.scale + table_row * stride.scale, mask=valid, other=1.0)
    nats_per_token = tl.load(table.nats_per_token + table_row * stride.nats_per_token, mask=valid, other=1.0)
    value_min = tl.load(table.value_min + table_row * stride.value_min, mask=valid, other=0.0)
    target = tl.load(table.target_length + table_row * stride.target_length, mask=valid, other=0.0)
    tolerance = tl.load(table.tolerance + table_row * stride.tolerance, mask=valid, other=0.0)
    counts_down, generated = mode < 0, target * 0
    if generated_ptr is not None:
        counts_down = tl.load(table.counts_down + table_row * stride.counts_down, mask=valid, other=0) != 0
        generated = tl.load(generated_ptr + request, mask=valid, other=0).to(tl.float32)
    remaining, least, most = _remaining_of_target(target, tolerance, counts_down, generated)
    status = tl.load(candidates.status + request, mask=valid, other=0)
    guided = (status == _GUIDE) & (mode != _UNGUIDED)

    column = tl.arange(0, K)[None, :]
    token = tl.load(candidates.token_ids + request * K + column, mask=valid, other=-1)
    p = tl.load(candidates.probs + request * K + column, mask=valid, other=0.0)
    active = p > 0
    total = tl.maximum(_request_sum(p), _SMALLEST)  # 0 for a request without candidates
    q = tl.div_rn(p, total)  # correctly rounded, so that a single candidate has exactly 1
    log_q = tl.where(active, tl.log(tl.where(active, p, 1.0)) - tl.log(total), 0.0)

    eos = token < -1
    ends_ptr = table.ending_token_ids + table_row * stride.ending_token_ids
    for i in range(E):
        eos = eos | (token == tl.load(ends_ptr + i, mask=valid, other=-2))
    logits = (value_logits_ptr, stride_value_logits_request)
    z = _load_value_logits(*logits, request, column, table, stride, table_row, valid & active)
    finite = tl.abs(z) <= 3.4028234e38  # NaN compares false
    unusable = active & (finite == 0) & ((eos == 0) | (mode == _VALUE_BIAS))
    faulty = guided & (_request_max(unusable.to(tl.int32)) > 0)
    broken = tl.load(candidates.lost_mass + request, mask=valid, other=0.0)
    counted = faulty | (broken != broken)
    raw_z = tl.where(finite, tl.minimum(tl.maximum(z, 0.5 * _EOS_Z), 0.5 * _BIG), 0.0)
    # The remaining length without the answer.
    answer = tl.load(table.answer_length + table_row * stride.answer_length, mask=valid, other=0.0)
    answer_nats = answer * nats_per_token
    span_nats = _softplus(raw_z) - answer_nats
    span_z = tl.where(span_nats > 0, span_nats + tl.log(_one_minus_exp(tl.maximum(span_nats, _SMALLEST))), _EOS_Z)
    z = tl.where(eos, _EOS_Z, tl.where(answer_nats > 0, tl.maximum(span_z, _EOS_Z), raw_z))
    z_min, z_max = _request_min(tl.where(active, z, _BIG)), _request_max(tl.where(active, z, -_BIG))

    # Values as shares of the request's range: w in [0, 1], from the bottom and from the top.
    span = _value_difference(z_max, z_min)
    spread = active & (span > 0)
    safe_span = tl.where(span > 0, span, 1.0)
    w = tl.where(spread, tl.div_rn(_value_difference(tl.maximum(z, z_min), z_min), safe_span), 0.0)
    top_w = tl.where(spread, tl.div_rn(_value_difference(z_max, tl.minimum(z, z_max)), safe_span), 0.0)
    expected_w, expected_top_w = _request_sum(q * w), _request_sum(q * top_w)
    expected_value = tl.sigmoid(z_min) + expected_w * span

    # The target of the tilting modes, as a share of the range from either end.
    nats = remaining * nats_per_token  # -ln(1 - target value)
    # -ln(1 - E[v]), computed from the end near E[v].
    small = tl.minimum(expected_value, 0.5)
    current_nats = tl.where(
        expected_value < 0.5, _twice_atanh(small / (2 - small)), -tl.log(tl.sigmoid(-z_max) + expected_top_w * span)
    )
    target_nats = tl.where(mode == _LENGTH_MUL, scale * current_nats, nats)
    target_z = target_nats + tl.log(_one_minus_exp(tl.maximum(target_nats, 0.0)))
    target_z = tl.where(target_nats > 0, tl.maximum(tl.minimum(target_z, _BIG), _EOS_Z), _EOS_Z)
    inside = tl.minimum(tl.maximum(target_z, z_min), z_max)
    target_w = _value_difference(inside, z_min) / safe_span
    target_top_w = _value_difference(z_max, inside) / safe_span
    mul_shift = (scale - 1) * (expected_value / safe_span)
    linear_shift = (scale - 1) * tl.where(scale >= 1, expected_top_w, expected_w)
    shift = tl.where(mode == _MUL, mul_shift, linear_shift)
    shifts = (mode == _MUL) | (mode == _LINEAR)
    target_w = tl.where(shifts, expected_w + shift, target_w)
    target_top_w = tl.where(shifts, expected_top_w - shift, target_top_w)
    exp_nats = tl.maximum(scale, 0.0) * -tl.log(tl.maximum(expected_top_w, _SMALLEST))
    target_w = tl.where(mode == _EXP, _one_minus_exp(exp_nats), target_w)
    target_top_w = tl.where(mode == _EXP, tl.exp(-exp_nats), target_top_w)
    target_w = tl.minimum(tl.maximum(target_w, 0.0), 1.0)
    target_top_w = tl.minimum(tl.maximum(target_top_w, 0.0), 1.0)
    unmoved = (span < _SMALLEST_SHIFT) | (tl.abs(target_w - expected_w) * span <= _SMALLEST_SHIFT)
    below_range, above_range = target_z <= z_min, target_z >= z_max
    is_short_enough = above_range | ((below_range == 0) & (expected_w <= target_w))
    is_long_enough = below_range | ((above_range == 0) & (expected_w >= target_w))
    reached = ((mode == _LE_SOFT) & is_short_enough) | ((mode == _GE_SOFT) & is_long_enough)
    margin = tl.maximum(1 / tl.maximum(span, _SMALLEST_SHIFT) * _TARGET_MARGIN, _TARGET_MARGIN_SHARE)
    at_bottom, at_top = target_w < margin, target_top_w < margin
    target_w = tl.where(at_bottom, margin, tl.where(at_top, 1 - margin, target_w))
    target_top_w = tl.where(at_bottom, 1 - margin, tl.where(at_top, margin, target_top_w))

    is_soft = (mode >= _EQ_SOFT) & (mode <= _LE_SOFT)
    tilts_to_target = (mode <= _LENGTH_MUL) | is_soft
    edge = is_soft & (below_range | above_range)
    unguided = (mode == _MUL) & (scale <= 0)
    guided = guided & (faulty == 0) & (unguided == 0) & (reached == 0) & (expected_value >= value_min)
    unsolved = guided & tilts_to_target & (unmoved == 0) & (edge == 0)
    tilt = _solve_tilt(log_q, w, top_w, active, target_w, target_top_w, unsolved, MAX_STEPS)
    tilt = tl.where(mode == _CENTERED_EXP, scale * span, tilt)

    weight = _tilt(log_q, w, top_w, active, tilt)
    # Measured from the favoured logit as in _tilt, to avoid the rounding error of products of large numbers.
    largest_z, smallest_z = _request_max(tl.where(active, raw_z, -_BIG)), _request_min(tl.where(active, raw_z, _BIG))
    favoured = tl.where(scale > 0, largest_z, smallest_z)

    # Relative distances |ln((l + 2) / (r + 2))|, with lengths in nats, which do not overflow for any gamma. The least
    # and most tokens are clamped to the range of the candidates. This shifts all distances equally, and keeps the
    # distances from an unreachable target small and precise. Quotients are clamped to 2**127.
    candidate_nats, two_tokens = _softplus(z), 2 * nats_per_token
    length = candidate_nats + two_tokens
    earliest = length  # alternative length of a candidate that may end the output
    if text_breaks_ptr is not None:
        ended = tl.load(text_breaks_ptr + token, mask=valid & (token >= 0) & (token < S), other=0)
        may_end = ((ended & _SENTENCE) != 0) & (eos == 0) & (p >= _request_max(p) * _LIKELY)
        earliest = tl.where(may_end, nats_per_token + two_tokens, length)
    shortest = _request_min(tl.where(active, tl.minimum(length, earliest), _BIG))
    longest = _request_max(tl.where(active, tl.maximum(length, earliest), -_BIG))
    least = tl.maximum(tl.minimum(least * nats_per_token + two_tokens, longest), shortest)
    most = tl.maximum(tl.minimum(most * nats_per_token + two_tokens, longest), shortest)
    distance = _relative_distance(length, least, most, mode)
    if text_breaks_ptr is not None:
        distance = tl.minimum(distance, _relative_distance(earliest, least, most, mode))
    distance = tl.where(active, distance - _request_min(tl.where(active, distance, _BIG)), 0.0)
    is_near = (mode >= _NEAR) & (mode <= _LE_NEAR)
    equally_near = is_near & (scale * _request_max(distance) == 0)

    direct = tl.where(is_near, -distance, raw_z - favoured)
    direct_logit = tl.where(active, log_q + scale * direct, -_BIG)
    direct_weight = tl.where(active, tl.exp(direct_logit - _request_max(direct_logit)), 0.0)
    weight = tl.where((mode == _VALUE_BIAS) | is_near, direct_weight, weight)
    result = tl.div_rn(weight, tl.maximum(_request_sum(weight), _SMALLEST))
    result = tl.where((tilts_to_target & unmoved) | equally_near, q, result)

    # Hard constraints choose the candidate with the lowest cost, then the most probable, then the first.
    cost = tl.where(mode == _EQ, tl.abs(candidate_nats - nats), z)
    largest = ((mode == _GE) & (remaining > 0)) | (is_soft & above_range)
    cost = tl.where(active, tl.where(largest, -z, cost), _BIG)
    tied = active & (cost == _request_min(cost))
    likely = tl.where(tied, q, -1.0)
    first = _request_min(tl.where(likely == _request_max(likely), column, K))
    chosen = tl.where(column == first, 1.0, 0.0)
    result = tl.where((mode == _EQ) | (mode == _GE) | (mode == _LE) | edge, chosen, result)
    return table_row, token, tl.where(guided, result, q), counted
