"""Guided probabilities as the fork has them: tilted by a scale on the device, or to a target row by row on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.baselines.two_forward.cache import Request
from bench.baselines.two_forward.candidates import Pending
from lenvm_kernels.guidance import GuidanceParams

NEWTON_STEPS = 20


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
    v = torch.where(valid, z.sigmoid(), 0.0)
    for j, request in enumerate(sent):
        if request.eos_token_ids:
            eos = torch.tensor(list(request.eos_token_ids), device=guided.device)
            ends = torch.isin(ids[j], eos) & valid[j]
            if bool(ends.any()):
                v[j] = v[j].masked_fill(ends, 0.0)
    q = reweighted(p, v, valid, scale)
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
        q = torch.tensor(nearest(p, v, request.params, request.generated), device=guided.device)
        q = q.clamp(min=0.0)
        total = q.sum()
        if bool(total <= 0):
            raise RuntimeError(f"the guided probabilities of row {i} have no sum")
        guided[i].zero_()
        guided[i, torch.tensor(ids, device=guided.device)] = q / total


def reweighted(p: Tensor, v: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    """Guided probabilities of all rows in fp32, ``[B, K]``, as the fork has them on the device.

    Args:
        p, v: ``[B, K]``: probabilities, of which 0 pads; values, 0 at the end of an output.
        valid: bool ``[B, K]``; not padding.
        scale: ``[B]``, of the expected values.
    """
    scale = scale[:, None]
    q = p / p.sum(-1, keepdim=True).clamp(min=1e-20)

    def powers(exponent: Tensor) -> Tensor:
        return (exponent - exponent.amax(-1, keepdim=True)).exp()

    def normalised(w: Tensor) -> Tensor:
        w = w.masked_fill(~valid, 0.0)
        return w / w.sum(-1, keepdim=True).clamp(min=1e-20)

    low = v.masked_fill(~valid, 1e9).amin(-1, keepdim=True)
    high = v.masked_fill(~valid, -1e9).amax(-1, keepdim=True)
    spread = (high - low).clamp(min=1e-8)
    mean = (q * v).sum(-1, keepdim=True)
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


def nearest(probs: list[float], values: list[float], params: GuidanceParams, generated: int) -> list[float]:
    """Guided probabilities of a row with a target in fp64, as the fork has them on the host: all for one candidate."""
    length = max(params.target_length - generated, 0.0) if params.counts_down else params.target_length
    log_gamma = math.log(params.gamma)
    target = 1.0 - math.exp(length * log_gamma)

    def length_of(value: float) -> float:
        return math.log(1.0 - min(max(value, 1e-9), 1.0 - 1e-9)) / log_gamma

    costs = [abs(length_of(value) - length_of(target)) for value in values]
    chosen = min(range(len(costs)), key=lambda i: (costs[i], -probs[i]))
    return [float(i == chosen) for i in range(len(costs))]
