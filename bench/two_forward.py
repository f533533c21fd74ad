"""The published guided step, the baseline of speed comparisons: two forwards with host work in between.

The algorithm of the authors' fork of SGLang (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``, in-process value model)
in eager PyTorch on the weights of a :class:`ValueModel`, with its host reads. Each row has a top-k, and each guided row
a scale (``mul``). A step, in the fork's order:

1. Candidates by ``torch.topk``, then top-p and min-p.
2. Extend forward over the tokens that the value model lacks; its head is computed and dropped.
3. Candidate forward, under a mask built by numpy on the host. The candidates' slots return to the pool.
4. Value head in the model's dtype; its logits are split into one tensor per request.
5. Guidance: 20 Newton iterations without a bracket.
6. A clone of ``[B, V]``, a scatter of the guided rows, and a multinomial draw.

As in the fork, ``value_min`` is ignored, and one guided row removes the filters of all rows. Unlike in the fork, keys
and values are gathered into ``[B, L]`` for torch's attention; norms, rotary embedding and activation are PyTorch
operators; a request stays until its row is reused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers import unfused_head
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import EngineSlots, PreparedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.step.inputs import CANDIDATES_OF_MODEL
from lenvm_kernels.types import Mode
from lenvm_kernels.values import KVCache, ValueModel

NO_TOP_K, NEWTON_STEPS = 1 << 30, 20  # the fork's top_k without a limit, and iterations


@dataclass
class HostRequest:
    """The host's copy of a guided request; ``cached`` tokens have keys and values."""

    row: int
    params: GuidanceParams
    eos_token_ids: set[int]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


class HostCandidates(NamedTuple):
    """Rows with several candidates: ids on the host, and ``[rows, K]``, padded with probability 0."""

    single: list[list[int]]  # row and only token of the other guided rows
    rows: list[int]
    ids: list[list[int]]
    padded_probs: Tensor
    padded_ids: Tensor


class TwoForwardOutput(NamedTuple):
    """Result of a step: ``probs`` fp32 ``[B, V]``; ``tokens`` int32 ``[B]``, or None without a draw or a changed row.

    ``rows`` have values: candidate ids, and value logits ``[n]`` each.
    """

    probs: Tensor
    tokens: Tensor | None
    rows: list[int]
    candidate_ids: list[list[int]]
    value_logits: list[Tensor]


def candidates_of(probs: Tensor, requests: Sequence[HostRequest | None], sampling: Sampling) -> HostCandidates:
    """Candidates of the guided rows of ``probs [B, V]``, at least one."""
    index = torch.tensor([i for i, request in enumerate(requests) if request is not None], device=probs.device)
    top_k, top_p, min_p = (x.index_select(0, index) for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    assert not bool(((top_k <= 0) | (top_k >= NO_TOP_K)).any()), "every row must have a top_k"  # also read by the fork
    top_k = top_k.clamp(max=probs.shape[1])
    most, ids = probs.index_select(0, index).topk(int(top_k.max()), dim=-1)
    p = torch.where(torch.arange(most.shape[1], device=probs.device) < top_k[:, None], most, 0.0)
    if bool((top_p < 1).any()):
        p = torch.where(p.cumsum(-1) - p <= top_p[:, None], p, 0.0)
    if bool((min_p > 0).any()):
        p = torch.where(p >= (p.amax(-1) * min_p)[:, None], p, 0.0)
    if bool((none := (p > 0).sum(-1) == 0).any()):
        p[:, 0] = torch.where(none, most[:, 0], p[:, 0])
    single, only = (p > 0).sum(-1) == 1, []
    if bool(single.any()):
        only = torch.stack([index, ids.gather(1, p.argmax(-1, keepdim=True))[:, 0]], 1)[single].tolist()
    p, ids, rows = p[~single], ids[~single], index[~single].tolist()
    ids_of = [x[is_candidate].tolist() for x, is_candidate in zip(ids.cpu(), (p > 0).cpu(), strict=True)]
    return HostCandidates(only, rows, ids_of, p, ids)


def reweighted(p: Tensor, v: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    """The fork's guided probabilities of all rows, fp32 ``[B, K]``: the expected value is scaled by ``scale [B]``.

    ``p``, ``v`` are ``[B, K]`` probabilities and values; ``valid`` is False in padding.
    """
    q = p / p.sum(-1, keepdim=True).clamp(min=1e-20)
    low, high = v.masked_fill(~valid, 1e9).amin(-1, True), v.masked_fill(~valid, -1e9).amax(-1, True)
    spread = (high - low).clamp(min=1e-8)
    mean = (q * v).sum(-1, keepdim=True)
    margin = (spread * 1e-6).clamp(min=1e-12)
    target = torch.maximum(torch.minimum(mean * scale[:, None], high - margin), low + margin)
    moves = (spread > 1e-8) & ((target - mean).abs() > 1e-8)
    log_q = q.clamp(min=1e-20).log().masked_fill(~valid, -1e9)
    above, tilt = (v - low).masked_fill(~valid, 0.0), torch.zeros_like(mean)

    def tilted() -> Tensor:
        exponent = log_q + above * tilt
        w = (exponent - exponent.amax(-1, keepdim=True)).exp().masked_fill(~valid, 0.0)
        return w / w.sum(-1, keepdim=True).clamp(min=1e-20)

    for _ in range(NEWTON_STEPS):
        w = tilted()
        expected = (w * v).sum(-1, keepdim=True)
        variance = ((w * v * v).sum(-1, keepdim=True) - expected * expected).clamp(min=1e-16)
        tilt = (tilt - (expected - target) / variance).clamp(-100.0, 100.0)
    return torch.where(moves, tilted(), q)


class TwoForwardStep:
    """Has the methods of :class:`GuidedStep` used in benchmarks; reads their tensors on the host.

    Args:
        value_model: the value model.
        slots: the engine's slots. The value model has a separate pool for this number of tokens, and for candidates.
        config: only ``max_requests``, ``max_candidates`` (a limit per row, not a filter) and ``chunk_tokens`` are used.

    Attributes:
        requests: guided requests by row.
        kv, table, free: keys and values, slots of each row, and unused slots.
    """

    def __init__(self, value_model: ValueModel, slots: PagedSlots | EngineSlots, config: StepConfig) -> None:
        rows, pages = slots.table.shape
        config = replace(config, max_candidates=config.max_candidates or CANDIDATES_OF_MODEL)
        self.value_model, self.device, self.config = value_model, value_model.device, config
        num_slots = slots.num_slots + (config.max_requests or rows) * config.max_candidates
        max_len = pages * slots.page_size + config.max_candidates
        self.kv = KVCache.of_slots(value_model, num_slots)
        self.table = torch.zeros(rows, -(-max_len // 8) * 8, dtype=torch.int64, device=self.device)
        self.free = torch.arange(num_slots, device=self.device)
        self.requests: dict[int, HostRequest] = {}
        self._inv_freq = torch.tensor(value_model.config.rope_inv_freq, device=self.device)
        self._head = [x.to(value_model.dtype) for x in value_model.head]

    def add_request(self, table_row, params, eos_token_ids, *, prompt_len=0, seed=0) -> None:
        """Add a request, unguided or guided with a scale (``mul``). If ``params`` is None, remove the row's request."""
        if table_row in self.requests:
            self._append(table_row, 0, [])
            del self.requests[table_row]
        if params is not None and params.mode != Mode.UNGUIDED:
            self.requests[table_row] = HostRequest(table_row, params, eos_token_ids)

    def _append(self, row: int, length: int, tokens: list[int]) -> HostRequest:
        """Replace the tokens of a request after the first ``length``, and release the replaced slots."""
        request = self.requests[row]
        assert len(request.tokens) >= length, "extend() must be called first"
        request.tokens[length:] = tokens
        if request.cached > length:
            self.free = torch.cat([self.free, self.table[row, length : request.cached]])
            request.cached = length
        return request

    @torch.no_grad()
    def extend(self, tokens, table_rows, starts, lens, cached_lens) -> None:
        """Compute and keep keys and values of prompts; arguments as in :meth:`GuidedStep.extend`."""
        ids, chunk = tokens.tolist(), self.config.chunk_tokens
        batch = torch.stack([x.long() for x in (table_rows, starts, lens, cached_lens)], 1).tolist()
        for row, start, length, cached in batch:
            if row in self.requests and length:
                request = self._append(row, cached, ids[start : start + length])
                for end in range(cached + chunk, cached + length + chunk, chunk):
                    self._extend([(request, min(end, cached + length))])

    def prepare(self, logits: Tensor | None, batch: StepBatch, drafts: None = None) -> PreparedStep:
        """As :meth:`GuidedStep.prepare`, without token temperatures, spans and drafts."""
        return PreparedStep(logits, batch, drafts, None, is_changed=False)

    @torch.no_grad()
    def step(self, prepared: PreparedStep, sampling: Sampling, *, scores: Tensor | None = None) -> TwoForwardOutput:
        """Guide the next token of each row; arguments as in :meth:`GuidedStep.step`, filters as tensors."""
        batch, scores = prepared.batch, prepared.logits if scores is None else scores
        # The engine's read of the drawn tokens, which the fork uses.
        numbers = torch.stack([x.long() for x in (batch.table_rows, batch.tokens, batch.lengths)], 1).tolist()
        requests = [
            self._append(row, length - 1, [token]) if row in self.requests else None for row, token, length in numbers
        ]
        probs = scores.float()
        if sampling.is_logits:
            probs = torch.softmax(probs if sampling.temperature is None else probs / sampling.temperature[:, None], -1)
        found = candidates_of(probs, requests, sampling) if any(requests) else None
        if found is None or not (found.rows or found.single):
            return TwoForwardOutput(probs, None, [], [], [])
        guided, logits = probs.clone(), []
        for i, token in found.single:
            guided[i].zero_()
            guided[i, token] = 1.0
        if found.rows:
            sent = [requests[i] for i in found.rows]
            self._extend([(request, len(request.tokens)) for request in sent])
            logits = self._score(sent, found)
            self._guide(guided, sent, found, logits)
        drawn = torch.multinomial(guided, 1).view(-1).int() if sampling.sample else None
        return TwoForwardOutput(guided, drawn, found.rows, found.ids, logits)

    def _guide(self, guided, sent, found, logits) -> None:
        p, ids = found.padded_probs, found.padded_ids
        valid, v = p > 0, torch.zeros_like(p)
        for j, (request, row) in enumerate(zip(sent, logits, strict=True)):
            v[j, : len(row)] = row.float().sigmoid()
            if request.eos_token_ids:
                ends = torch.isin(ids[j], torch.tensor(list(request.eos_token_ids), device=self.device)) & valid[j]
                if bool(ends.any()):
                    v[j] = v[j].masked_fill(ends, 0.0)
        scale = torch.tensor([request.params.scale for request in sent], device=self.device)
        rows = torch.tensor(found.rows, device=self.device)
        guided.index_fill_(0, rows, 0.0)
        guided[rows[:, None].expand_as(ids), ids] = reweighted(p, v, valid, scale)

    # --- the two forwards ---

    def _extend(self, pieces: Sequence[tuple[HostRequest, int]]) -> None:
        """Extend forward: the uncached tokens of each request, up to a length."""
        pieces = [(request, length) for request, length in pieces if length > request.cached]
        if not pieces:
            return
        cached = [request.cached for request, _ in pieces]
        counts = [length - request.cached for request, length in pieces]
        new = [token for request, length in pieces for token in request.tokens[request.cached : length]]
        query, key = (torch.arange(n, device=self.device) for n in (max(counts), max(length for _, length in pieces)))
        seen = key <= (torch.tensor(cached, device=self.device)[:, None] + query)[:, :, None]
        positions = np.concatenate([np.arange(request.cached, length) for request, length in pieces])
        requests = [request for request, _ in pieces]
        self._forward(requests, counts, torch.tensor(new, device=self.device), positions, seen)
        for request, length in pieces:
            request.cached = length

    def _score(self, requests: Sequence[HostRequest], found: HostCandidates) -> list[Tensor]:
        """Candidate forward: value logits of each request's candidates, which attend to the cached prefix and
        themselves.

        The mask is built per candidate on the host, as in the fork.
        """
        prefixes, counts = [request.cached for request in requests], [len(ids) for ids in found.ids]
        keys = max(n + m for n, m in zip(prefixes, counts, strict=True))
        mask = np.zeros((len(requests), max(counts), keys), dtype=np.bool_)
        for rows, prefix, count in zip(mask, prefixes, counts, strict=True):
            rows[:count, :prefix] = True
            for j in range(count):
                rows[j, prefix + j] = True
        token_ids, seen = found.padded_ids[found.padded_probs > 0], torch.from_numpy(mask).to(self.device)
        positions = np.repeat(np.array(prefixes, dtype=np.int64), counts)
        logits, slots = self._forward(requests, counts, token_ids, positions, seen)
        self.free = torch.cat([self.free, slots])
        return list(logits.split(torch.tensor(counts, device=self.device).tolist()))  # a host read, as in the fork

    def _forward(self, requests, counts, token_ids, positions, seen) -> tuple[Tensor, Tensor]:
        """Value logits ``[T]`` of ``counts`` new tokens per request under ``seen``, bool ``[B, Q, L]``; their slots."""
        slots, self.free = self.free[: sum(counts)], self.free[sum(counts) :]
        for request, part in zip(requests, slots.split(counts), strict=True):
            self.table[request.row, request.cached : request.cached + len(part)] = part
        model, config, (b, longest, attended) = self.value_model, self.value_model.config, seen.shape
        # The attention kernels require mask rows at multiples of 8 elements. Query heads that share a key head become
        # its queries, so that all attention kernels apply.
        padded, kv_heads = -(-attended // 8) * 8, config.num_kv_heads
        mask = torch.full((b, longest, padded), -math.inf, dtype=model.dtype, device=self.device)
        mask[:, :, :attended].masked_fill_(seen, 0.0)
        mask = mask.repeat(1, config.num_heads // kv_heads, 1)[:, None]
        kv_slots = self.table[torch.tensor([request.row for request in requests], device=self.device), :padded]
        places = np.concatenate([i * longest + np.arange(n) for i, n in enumerate(counts)])  # of the tokens in [B Q]
        positions, places = (torch.from_numpy(x).to(self.device, non_blocking=True) for x in (positions, places))

        width, eps = (config.hidden_size,), config.rms_norm_eps
        hidden = F.embedding(token_ids.clamp(0, config.vocab_size - 1), model.embedding)
        angles = positions[:, None].float() * self._inv_freq  # [T, D/2]
        cos, sin = (x[:, None] * config.rope_scale for x in (angles.cos(), angles.sin()))
        for layer, keys, values in zip(model.layers, self.kv.keys, self.kv.values, strict=True):
            qkv = F.linear(F.rms_norm(hidden, width, eps=eps), layer.qkv, layer.qkv_bias)
            qk, v = qkv.view(len(hidden), -1, config.head_dim).split([config.num_heads + kv_heads, kv_heads], 1)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, qk.shape[-1:], eps=eps) * layer.qk_norm
            first, second = qk.float().chunk(2, -1)
            qk = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(v.dtype)
            q, keys[slots] = qk.split([config.num_heads, kv_heads], 1)
            values[slots] = v
            q = q.new_zeros(b * longest, *q.shape[1:]).index_copy_(0, places, q)
            q = q.view(b, longest, kv_heads, -1, config.head_dim).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
            cached = (x[kv_slots].transpose(1, 2) for x in (keys, values))
            out = F.scaled_dot_product_attention(q.flatten(2, 3), *cached, attn_mask=mask).view(q.shape)
            out = out.permute(0, 3, 1, 2, 4).flatten(0, 1)[places].flatten(1)
            hidden = hidden + F.linear(out, layer.o, layer.o_bias)
            gate, up = F.linear(F.rms_norm(hidden, width, eps=eps), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        # The weight of the final norm is in the first matrix of the head.
        return unfused_head(F.rms_norm(hidden, width, eps=eps), *self._head)(), slots
