"""Candidates as the fork finds them: by ``topk`` on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.baselines.two_forward.cache import Request

NO_TOP_K = 1 << 30  # the fork's top_k without a limit


@dataclass
class Pending:
    """Candidates of a batch that wait for their values."""

    rows: list[int] = field(default_factory=list)
    candidate_ids: list[list[int]] = field(default_factory=list)
    single: list[tuple[int, int]] = field(default_factory=list)  # (row, its only token)
    on_device: bool = False
    candidate_probs: list[list[float]] = field(default_factory=list)  # of guidance on the host
    # of guidance on the device
    probs: Tensor | None = None  # [rows, K], 0 pads
    ids: Tensor | None = None  # [rows, K]


def candidates_of(
    probs: Tensor,
    requests: Sequence[Request | None],
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    max_candidates: int,
) -> Pending:
    """Candidates of the guided rows of ``probs [B, V]``.

    Raises:
        ValueError: a row has more than ``max_candidates``, or no top-k; or some rows have a target, and others none.
    """
    guided = [i for i, request in enumerate(requests) if request is not None]
    pending = Pending()
    if not guided:
        return pending
    index = torch.tensor(guided, device=probs.device)
    top_k, top_p, min_p = (x.index_select(0, index) for x in (top_k.long(), top_p.float(), min_p.float()))
    unlimited = (top_k <= 0) | (top_k >= NO_TOP_K)
    if bool(unlimited.any()):
        raise ValueError("every row must have a top_k")
    without_target = {requests[i].params.target_length is None for i in guided}
    if len(without_target) > 1:
        raise ValueError("all rows must have a target, or none")
    pending.on_device = without_target == {True}
    if bool((~unlimited).any()):
        limited = ~unlimited
        _select(pending, probs, requests, index[limited], top_k[limited], top_p[limited], min_p[limited])
    for i, ids in zip(pending.rows, pending.candidate_ids, strict=True):
        if len(ids) > max_candidates:
            room = f"room is for max_candidates = {max_candidates}"
            raise ValueError(f"row {i} has {len(ids)} candidates, {room}")
    return pending


def _select(
    pending: Pending, probs: Tensor, requests: Sequence[Request | None], index: Tensor, *filters: Tensor
) -> None:
    """Candidates of rows ``index [G]`` of ``probs [B, V]``, all at once on the device."""
    top_k, top_p, min_p = filters
    top_k = top_k.clamp(max=probs.shape[1])
    most, ids = probs.index_select(0, index).topk(int(top_k.max()), dim=-1)
    place = torch.arange(most.shape[1], device=probs.device)
    p = torch.where(place < top_k[:, None], most, 0.0)
    if bool((top_p < 1).any()):
        before = p.cumsum(-1) - p
        p = torch.where(before <= top_p[:, None], p, 0.0)
    if bool((min_p > 0).any()):
        least = p.amax(-1) * min_p
        p = torch.where(p >= least[:, None], p, 0.0)
    counts = (p > 0).sum(-1)
    if bool((counts == 0).any()):
        p[:, 0] = torch.where(counts == 0, most[:, 0], p[:, 0])
        counts = (p > 0).sum(-1)

    single, batch_rows = counts == 1, index.tolist()
    thresholds = [requests[i].params.entropy_threshold for i in batch_rows]
    has_threshold = torch.zeros_like(single)
    for j, threshold in enumerate(thresholds):
        if threshold is not None:
            has_threshold[j] = True
    limits = [math.nan if threshold is None else threshold for threshold in thresholds]
    limits = torch.tensor(limits, dtype=torch.float64, device=probs.device)
    skipped = torch.zeros_like(single)
    if bool(has_threshold.any()):
        skipped = has_threshold & (_entropy(p) <= limits)
    sent = ~single & ~skipped

    if bool(single.any()):
        only = ids.gather(1, p.argmax(-1, keepdim=True))[:, 0].tolist()
        is_single = single.tolist()
        pending.single += [(i, only[j]) for j, i in enumerate(batch_rows) if is_single[j]]
    if not bool(sent.any()):
        return
    p, ids = p[sent], ids[sent]
    # Guidance on the device needs no probabilities on the host, only which there are.
    ids_host, p_host = ids.cpu(), (p > 0 if pending.on_device else p).cpu()
    p_rows, id_rows = [], []
    for j, i in enumerate(index[sent].tolist()):
        kept = p_host[j] if pending.on_device else p_host[j] > 0
        pending.rows.append(i)
        pending.candidate_ids.append(ids_host[j][kept].tolist())
        if pending.on_device:
            p_rows.append(p[j][None])
            id_rows.append(ids[j][None])
        else:
            pending.candidate_probs.append(p_host[j][kept].tolist())
    if pending.on_device:
        pending.probs, pending.ids = torch.cat(p_rows), torch.cat(id_rows)


def _entropy(p: Tensor) -> Tensor:
    """Of probabilities ``[..., K]`` with any sum, in fp64."""
    q = p.double() / p.double().sum(-1, keepdim=True).clamp(min=1e-20)
    return -(q * (q + 1e-20).log()).sum(-1)
