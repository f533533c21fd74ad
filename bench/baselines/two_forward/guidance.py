"""Guided probabilities as the fork has them: of all rows on the device, or row by row on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.baselines.two_forward.cache import Request
from bench.baselines.two_forward.candidates import Pending
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.types import Mode

NEWTON_STEPS = 20
DEVICE_GAMMA = 0.997


def reweight_on_device(
    guided: Tensor, requests: Sequence[Request | None], pending: Pending, logits: Sequence[Tensor]
) -> None:
    """Write the guided rows of ``guided [B, V]``, all at once; ``logits`` are those of each row's candidates."""
    p, ids = pending.probs, pending.ids
    valid = p > 0
    z = torch.zeros_like(p)
    for j, row in enumerate(logits):
        z[j, : len(row)] = row
    sent = [requests[i] for i in pending.rows]
    scale = torch.tensor([request.params.scale for request in sent], device=guided.device)
    modes = {request.params.mode for request in sent}
    v = torch.where(valid, z.sigmoid(), 0.0)
    for j, request in enumerate(sent):
        if request.eos_token_ids:
            eos = torch.tensor(list(request.eos_token_ids), device=guided.device)
            ends = torch.isin(ids[j], eos) & valid[j]
            if bool(ends.any()):
                v[j] = v[j].masked_fill(ends, 0.0)
    q = reweighted(p, z, v, valid, modes.pop() if len(modes) == 1 else Mode.MUL, scale)
    rows = torch.tensor(pending.rows, device=guided.device)
    guided.index_fill_(0, rows, 0.0)
    # A padded slot names a token of the row's top k that a filter dropped, whose 0 may be written.
    guided[rows[:, None].expand_as(ids), ids] = q


def reweight_on_host(
    guided: Tensor, requests: Sequence[Request | None], pending: Pending, logits: Sequence[Tensor]
) -> None:
    """Write the guided rows of ``guided [B, V]``, row by row in fp64."""
    logits = [row.to("cpu", non_blocking=True) for row in logits]
    if guided.device.type == "cuda":
        torch.cuda.current_stream(guided.device).synchronize()
    logits = [row.float().tolist() for row in logits]
    for i, ids, p, z in zip(pending.rows, pending.candidate_ids, pending.candidate_probs, logits, strict=True):
        request = requests[i]
        v = torch.tensor(z, dtype=torch.float64).sigmoid().tolist()
        for j, token in enumerate(ids):
            if token in request.eos_token_ids:
                v[j] = 0.0
        q = torch.tensor(row_reweighted(p, v, request.params, request.generated), device=guided.device)
        q = q.clamp(min=0.0)
        total = q.sum()
        if bool(total <= 0):
            raise RuntimeError(f"the guided probabilities of row {i} have no sum")
        guided[i].zero_()
        guided[i, torch.tensor(ids, device=guided.device)] = q / total


def reweighted(p: Tensor, z: Tensor, v: Tensor, valid: Tensor, mode: Mode, scale: Tensor) -> Tensor:
    """Guided probabilities of all rows in fp32, ``[B, K]``, as the fork has them on the device.

    Args:
        p, z, v: ``[B, K]``: probabilities, of which 0 pads; value logits; their sigmoids, 0 at the end of an output.
        valid: bool ``[B, K]``; not padding.
        mode, scale: of all rows, and ``[B]``.
    """
    scale = scale[:, None]
    q = p / p.sum(-1, keepdim=True).clamp(min=1e-20)

    def powers(exponent: Tensor) -> Tensor:
        return (exponent - exponent.amax(-1, keepdim=True)).exp()

    def normalised(w: Tensor) -> Tensor:
        w = w.masked_fill(~valid, 0.0)
        return w / w.sum(-1, keepdim=True).clamp(min=1e-20)

    if mode in (Mode.CENTERED_EXP, Mode.VALUE_BIAS):
        exponent = (v if mode == Mode.CENTERED_EXP else z) * scale
        return normalised(q * powers(exponent.masked_fill(~valid, -1e9)))

    low = v.masked_fill(~valid, 1e9).amin(-1, keepdim=True)
    high = v.masked_fill(~valid, -1e9).amax(-1, keepdim=True)
    spread = (high - low).clamp(min=1e-8)
    mean = (q * v).sum(-1, keepdim=True)
    if mode == Mode.EXP:
        place = ((mean - low) / spread).clamp(0.0, 1.0)
        target = low + (1.0 - (1.0 - place) ** scale) * spread
    elif mode == Mode.LINEAR:
        target = torch.where(scale >= 1.0, mean + (scale - 1.0) * (high - mean), mean - (1.0 - scale) * (mean - low))
    elif mode == Mode.LENGTH_MUL:
        log_gamma = math.log(DEVICE_GAMMA)
        length = torch.log1p(-mean.clamp(1e-15, 1.0 - 1e-15)) / log_gamma
        target = 1.0 - (scale * length * log_gamma).exp()
    else:
        target = mean * scale
    margin = (spread * 1e-6).clamp(min=1e-12)
    target = torch.maximum(torch.minimum(target, high - margin), low + margin)
    moves = (spread > 1e-8) & ((target - mean).abs() > 1e-8)

    log_q = q.clamp(min=1e-20).log().masked_fill(~valid, -1e9)
    above = (v - low).masked_fill(~valid, 0.0)
    tilt = torch.zeros_like(mean)
    for _ in range(NEWTON_STEPS):
        w = normalised(powers(log_q + above * tilt))
        tilted = (w * v).sum(-1, keepdim=True)
        variance = ((w * v * v).sum(-1, keepdim=True) - tilted * tilted).clamp(min=1e-16)
        tilt = (tilt - (tilted - target) / variance).clamp(-100.0, 100.0)
    return torch.where(moves, normalised(powers(log_q + above * tilt)), q)


def row_reweighted(probs: list[float], values: list[float], params: GuidanceParams, generated: int) -> list[float]:
    """Guided probabilities of one row in fp64, as the fork has them on the host: values are 0 at the end of an output.

    Raises:
        RuntimeError: ``centered_exp`` or ``value_bias``, which the fork has only on the device.
    """
    if params.target_length is not None:
        return _constrained(probs, values, params, generated)
    if params.mode in (Mode.CENTERED_EXP, Mode.VALUE_BIAS):
        why = "beside a target or a row without a top-k: the fork fails on it"
        raise RuntimeError(f"value_mode {params.mode.name.lower()} {why}")
    q, v = (torch.tensor(x, dtype=torch.float64) for x in (probs, values))
    q = q / q.sum()
    mean, low, high, scale = (q * v).sum().item(), min(values), max(values), params.scale
    if params.value_min is not None and mean < params.value_min:
        return q.tolist()
    if params.mode == Mode.EXP:
        place = min(max((mean - low) / (high - low), 0.0), 1.0) if high - low >= 1e-8 else 0.0
        target = low + (1.0 - (1.0 - place) ** max(scale, 0.0)) * (high - low)
    elif params.mode == Mode.LINEAR:
        target = mean + (scale - 1.0) * (high - mean) if scale >= 1.0 else mean - (1.0 - scale) * (mean - low)
    elif params.mode == Mode.LENGTH_MUL:
        log_gamma = math.log(params.gamma)
        length = math.log1p(-min(max(mean, 1e-15), 1.0 - 1e-15)) / log_gamma
        target = 1.0 - math.exp(scale * length * log_gamma)
    else:
        target = mean * scale
    target = min(max(target, low), high)
    if high - low < 1e-8 or abs(target - mean) < 1e-8:
        return q.tolist()
    return _tilted(q, v, mean, target)


def _constrained(probs: list[float], values: list[float], params: GuidanceParams, generated: int) -> list[float]:
    """Guided probabilities of a row with a target."""
    length = max(params.target_length - generated, 0.0) if params.counts_down else params.target_length
    log_gamma = math.log(params.gamma)
    target = 1.0 - math.exp(length * log_gamma)
    low, high = min(values), max(values)
    if params.mode == Mode.EQ:

        def length_of(value: float) -> float:
            return math.log(1.0 - min(max(value, 1e-9), 1.0 - 1e-9)) / log_gamma

        costs = [abs(length_of(value) - length_of(target)) for value in values]
    elif params.mode == Mode.LE or (params.mode == Mode.GE and abs(target) <= 1e-12):
        costs = values
    elif params.mode == Mode.GE:
        costs = [-value for value in values]
    elif low < target < high:
        q, v = (torch.tensor(x, dtype=torch.float64) for x in (probs, values))
        q = q / q.sum()
        return _tilted(q, v, (q * v).sum().item(), target)
    else:
        costs = values if target <= low else [-value for value in values]
    chosen = min(range(len(costs)), key=lambda i: (costs[i], -probs[i]))
    return [float(i == chosen) for i in range(len(costs))]


def _tilted(q: Tensor, v: Tensor, mean: float, target: float) -> list[float]:
    """``q exp(tilt v)`` whose mean of ``v`` is the target, by bracketing and then 20 steps of Newton or bisection."""
    low, high = v.min().item(), v.max().item()
    tolerance, margin = max(1e-10, (high - low) * 1e-6), max(1e-12, (high - low) * 1e-6)
    target = min(max(target, low + margin), high - margin)
    log_q, above = q.log(), v - v.min()

    def weights(tilt: float) -> Tensor:
        exponent = log_q + above * tilt
        w = (exponent - exponent.max()).exp()
        return w / w.sum()

    def moments(tilt: float) -> tuple[float, float]:
        w = weights(tilt)
        first = (w * v).sum()
        return first.item(), ((w * v * v).sum() - first * first).clamp(min=0.0).item()

    lower, upper = (0.0, 1.0) if target > mean else (-1.0, 0.0)
    while target > mean and moments(upper)[0] < target and upper < 1e5:
        upper *= 2.0
    while target <= mean and moments(lower)[0] > target and lower > -1e5:
        lower *= 2.0
    tilt = 0.0
    for _ in range(NEWTON_STEPS):
        tilted, variance = moments(tilt)
        if abs(tilted - target) <= tolerance:
            break
        lower, upper = (tilt, upper) if tilted < target else (lower, tilt)
        newton = tilt - (tilted - target) / variance if variance > 1e-16 else math.inf
        tilt = newton if lower < newton < upper else (lower + upper) / 2.0
    return weights(tilt).tolist()
