"""The published way to take a guided step, as the baseline of speed comparisons: two forwards, and a host between them.

What the authors' fork of SGLang does (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``, in-process value model), in
plain eager PyTorch on the weights of a :class:`ValueModel`. A step, in the fork's order:

1. Candidates by ``torch.topk``, then top-p and min-p, with the fork's host reads (is any row so, the widest k, the
   candidate lists); a row without a top-k is copied to the host and sorted there whole.
2. Extend forward over the tokens the value model has not seen, usually one a request; its head is computed and dropped.
3. Candidate forward, under a mask that numpy builds on the host and a copy brings to the device. The candidates' slots
   are taken from the pool and given back.
4. Value head, in the model's dtype; its logits are cut into one tensor a request.
5. Guidance: a loop over requests for end-of-sequence tokens and 20 Newton iterations without a bracket, on the device;
   with a target or without a top-k anywhere in the batch, request by request on the host instead, in fp64.
6. A clone of ``[B, V]``, into which the guided rows are scattered, and a multinomial draw from it.

Where the fork differs from this package, this does what the fork does:

- A batch whose requests have several modes is all ``mul``, unless its guidance is on the host.
- On the device ``gamma`` is 0.997 and ``value_min`` does not count.
- On the host ``centered_exp`` and ``value_bias`` fail.
- The Newton iteration stops short of its target on some rows. Lengths are those of values clamped to 1 - 1e-9.
- One guided row takes away the filters of all rows: unguided ones are drawn from their whole vocabulary.
- Draws are the device generator's, not a request's own.

Where this differs from the fork:

- Attention reads keys and values that were gathered into ``[B, L]``, with ``scaled_dot_product_attention``; the fork's
  Triton kernel reads them in their slots. On long prefixes the fork moves fewer bytes.
- Projections of q, k, v and gate, up are one matrix each, as in the fork; norms, rotary embedding, activation and the
  cache write are PyTorch operators, where the fork has kernels. No side stream: the main one would wait for it.
- Probabilities come from one softmax; the fork also writes them over the logits.
- Requests leave by :meth:`TwoForwardStep.remove_request`. The fork drops those that are not in a step, and computes all
  their tokens again afterwards. Prompts may come ahead (:meth:`TwoForwardStep.extend`); in the fork the first step has
  them.
- Requests with neutral parameters are unguided (:func:`parse_guidance` makes them so).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.types import Mode
from lenvm_kernels.value_model import KVCache, ValueModel

NO_TOP_K = 1 << 30  # the fork's top_k without a limit
NEWTON_STEPS = 20
DEVICE_GAMMA = 0.997


@dataclass
class _Request:
    """What the host knows of a guided request."""

    row: int
    params: GuidanceParams
    eos_token_ids: set[int]
    prompt_len: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # of its tokens, those whose keys and values the value model has

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True)
class TwoForwardOutput:
    """What a step computed.

    Attributes:
        probs: ``[B, V]`` fp32; guided rows hold guided probabilities, the others those of the scores.
        tokens: int32 ``[B]``, drawn from ``probs``; None without ``sample``, and if no row was changed: the fork leaves
            such a batch to the engine's own sampling.
        rows: rows of the batch whose candidates have values, in the order of the two lists below.
        candidate_ids: of each such row.
        value_logits: of each such row, a tensor ``[n]``.
    """

    probs: Tensor
    tokens: Tensor | None
    rows: list[int]
    candidate_ids: list[list[int]]
    value_logits: list[Tensor]


@dataclass
class _Pending:
    """Candidates of a batch that wait for their values."""

    rows: list[int] = field(default_factory=list)
    candidate_ids: list[list[int]] = field(default_factory=list)
    single: list[tuple[int, int]] = field(default_factory=list)  # (row, its only token)
    on_device: bool = False
    candidate_probs: list[list[float]] = field(default_factory=list)  # of guidance on the host
    # of guidance on the device
    probs: Tensor | None = None  # [rows, K], 0 pads
    ids: Tensor | None = None  # [rows, K]


@dataclass(frozen=True)
class _Batch:
    """One forward of ``T`` tokens of ``B`` requests, at most ``Q`` each, over at most ``L`` keys."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], of the new keys and values
    kv_slots: Tensor  # int64 [B, L]
    mask: Tensor  # [B, 1, G Q, L], added to the scores; G query heads share a key head
    longest: int  # Q
    places: Tensor | None  # int64 [T], where in [B Q] each token is; None: T is B Q

    def pad(self, x: Tensor) -> Tensor:
        """``[T, ...]`` -> ``[B, Q, ...]``."""
        b = len(self.kv_slots)
        if self.places is not None:
            x = x.new_zeros(b * self.longest, *x.shape[1:]).index_copy_(0, self.places, x)
        return x.unflatten(0, (b, self.longest))

    def unpad(self, x: Tensor) -> Tensor:
        """``[B, Q, ...]`` -> ``[T, ...]``."""
        x = x.flatten(0, 1)
        return x if self.places is None else x[self.places]


class TwoForwardStep:
    """Takes the place of a :class:`GuidedStep`: the same calls with the same tensors, of which it reads on the host.

    The value model has a pool of slots of its own and a table of them, as in the fork.

    Args:
        value_model: whose weights it runs.
        slot_table: ``[R, pages]``; the engine's, of which only the shape is used.
        num_slots: slots for the tokens of all requests. The candidates' ``max_requests * max_candidates`` come on top.
        vocab_size: V.
        max_requests: the largest batch (None: R).
        max_candidates: the most candidates that a row may come to have: room, not a filter.
        page_size: tokens of a page of ``slot_table``.
        chunk_tokens: tokens of :meth:`extend` that are computed at a time.
    """

    def __init__(
        self,
        value_model: ValueModel,
        slot_table: Tensor,
        num_slots: int,
        *,
        vocab_size: int,
        max_requests: int | None = None,
        max_candidates: int = 8,
        page_size: int = 1,
        chunk_tokens: int = 4096,
    ) -> None:
        rows, pages = slot_table.shape
        self.value_model, self.device, self.vocab_size = value_model, value_model.device, vocab_size
        self.max_candidates, self.chunk_tokens = max_candidates, chunk_tokens
        num_slots += (rows if max_requests is None else max_requests) * max_candidates
        self.cache = KVCache.of_slots(value_model, num_slots)
        self._max_len = pages * page_size + max_candidates
        self.slot_table = torch.zeros(rows, -(-self._max_len // 8) * 8, dtype=torch.int64, device=self.device)
        self._free = torch.arange(num_slots, device=value_model.device)
        self._requests: dict[int, _Request] = {}
        self._inv_freq = torch.tensor(value_model.config.rope_inv_freq, device=value_model.device)
        self._head = [x.to(value_model.dtype) for x in value_model.head]

    # --- requests ---

    def add_request(
        self,
        table_row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
    ) -> None:
        """Admit a request into a row of the slot table; arguments as in :meth:`GuidedStep.add_request`, ``seed``
        unused."""
        if not 0 <= table_row < len(self.slot_table):
            raise IndexError(f"table_row must be in [0, {len(self.slot_table)}), got {table_row}")
        if table_row in self._requests:
            self.retract(table_row, 0)
            del self._requests[table_row]
        if params is not None and params.mode != Mode.UNGUIDED:
            self._requests[table_row] = _Request(table_row, params, eos_token_ids, prompt_len)

    def remove_request(self, table_row: int) -> None:
        """Give back the slots of a request that leaves."""
        self.add_request(table_row, None, set())

    def retract(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a guided request, and give back their slots."""
        request = self._requests[row]
        del request.tokens[length:]
        if request.cached > length:
            self._release(self.slot_table[row, length : request.cached].clone())
            request.cached = length

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        slots: Tensor | None,
        table_rows: Tensor,
        starts: Tensor,
        lens: Tensor,
        cached_lens: Tensor,
    ) -> None:
        """Compute and keep keys and values of prompts; arguments as in :meth:`GuidedStep.extend`, ``slots`` unused."""
        ids, batch = (
            tokens.tolist(),
            torch.stack([x.long() for x in (table_rows, starts, lens, cached_lens)], 1).tolist(),
        )
        pieces = []
        for row, start, length, cached in batch:
            if row not in self._requests or length == 0:
                continue
            self.retract(row, cached)
            request = self._requests[row]
            self._check_known(request, cached)
            request.tokens += ids[start : start + length]
            ends = range(cached + self.chunk_tokens, cached + length + self.chunk_tokens, self.chunk_tokens)
            pieces += [(request, min(end, cached + length)) for end in ends]
        # The pieces of one request come one after the other, as each is as long as a chunk.
        at_a_time = max(1, self.chunk_tokens // max(lens.tolist(), default=1))
        for first in range(0, len(pieces), at_a_time):
            self._extend(pieces[first : first + at_a_time])

    def _check_known(self, request: _Request, length: int) -> None:
        if len(request.tokens) != length:
            known = f"has {len(request.tokens)}: extend() them"
            raise ValueError(f"row {request.row} must have {length} tokens before these, {known}")

    # --- the step ---

    @torch.no_grad()
    def step(
        self,
        scores: Tensor,
        tokens: Tensor,
        table_rows: Tensor,
        lengths: Tensor,
        *,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        temperature: Tensor | None = None,
        is_logits: bool = False,
        sample: bool = False,
    ) -> TwoForwardOutput:
        """Guide the next token of each row; arguments as in :meth:`GuidedStep.step`.

        Raises:
            ValueError: a row whose tokens are not known, or one with more candidates than there is room for.
            RuntimeError: what the fork fails on (see above), or no free slots.
        """
        # Stands for the engine's own read of what it drew, through which the fork knows its requests' tokens.
        numbers = torch.stack([x.long() for x in (table_rows, tokens, lengths)], 1).tolist()
        requests = [self._requests.get(row) for row, _, _ in numbers]
        for request, (row, token, length) in zip(requests, numbers, strict=True):
            if request is not None:
                if len(request.tokens) >= length:
                    self.retract(row, length - 1)
                self._check_known(request, length - 1)
                request.tokens.append(token)
        if is_logits:
            scores = scores.float() if temperature is None else scores.float() / temperature[:, None]
            probs = torch.softmax(scores, dim=-1)
        else:
            probs = scores.float()
        pending = self._candidates(probs, requests, top_k, top_p, min_p)
        if not pending.rows and not pending.single:
            return TwoForwardOutput(probs, None, [], [], [])

        guided = probs.clone()
        for i, token in pending.single:
            guided[i].zero_()
            guided[i, token] = 1.0
        values = []
        if pending.rows:
            sent = [requests[i] for i in pending.rows]
            self._extend([(request, len(request.tokens)) for request in sent])
            values = self._score(sent, pending)
            if pending.on_device:
                self._reweight_on_device(guided, requests, pending, values)
            else:
                self._reweight_on_host(guided, requests, pending, values)
        drawn = torch.multinomial(guided, 1).view(-1).int() if sample else None
        return TwoForwardOutput(guided, drawn, pending.rows, pending.candidate_ids, values)

    def _candidates(
        self, probs: Tensor, requests: Sequence[_Request | None], top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> _Pending:
        """Candidates of the guided rows of ``probs [B, V]``."""
        guided = [i for i, request in enumerate(requests) if request is not None]
        pending = _Pending()
        if not guided:
            return pending
        index = torch.tensor(guided, device=self.device)
        top_k, top_p, min_p = (x.index_select(0, index) for x in (top_k.long(), top_p.float(), min_p.float()))
        unlimited = (top_k <= 0) | (top_k >= NO_TOP_K)
        any_unlimited = bool(unlimited.any())
        pending.on_device = not any_unlimited and all(requests[i].params.target_length is None for i in guided)
        if bool((~unlimited).any()):
            limited = ~unlimited
            self._select(pending, probs, requests, index[limited], top_k[limited], top_p[limited], min_p[limited])
        if any_unlimited:
            filters = (x[unlimited].tolist() for x in (index, top_p, min_p))
            for i, row_top_p, row_min_p in zip(*filters, strict=True):
                self._sort_on_host(pending, probs[i], i, requests[i], row_top_p, row_min_p)
        for i, ids in zip(pending.rows, pending.candidate_ids, strict=True):
            if len(ids) > self.max_candidates:
                room = f"room is for max_candidates = {self.max_candidates}"
                raise ValueError(f"row {i} has {len(ids)} candidates, {room}")
        return pending

    def _select(
        self, pending: _Pending, probs: Tensor, requests: Sequence[_Request | None], index: Tensor, *filters: Tensor
    ) -> None:
        """Candidates of rows with a top-k, all at once on the device: rows ``index [G]`` of ``probs [B, V]``."""
        top_k, top_p, min_p = filters
        top_k = top_k.clamp(max=self.vocab_size)
        most, ids = probs.index_select(0, index).topk(int(top_k.max()), dim=-1)
        place = torch.arange(most.shape[1], device=self.device)
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
        limits = torch.tensor(limits, dtype=torch.float64, device=self.device)
        skipped = torch.zeros_like(single)
        if bool(has_threshold.any()):
            q = p.double() / p.double().sum(-1, keepdim=True).clamp(min=1e-20)
            skipped = has_threshold & (-(q * (q + 1e-20).log()).sum(-1) <= limits)
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

    def _sort_on_host(
        self, pending: _Pending, probs: Tensor, i: int, request: _Request, top_p: float, min_p: float
    ) -> None:
        """Candidates of a row without a top-k; ``probs [V]``."""
        row = probs.cpu()
        p, ids = row.sort(descending=True)
        if top_p < 1:
            before = p.cumsum(-1) - p
            p[before > top_p] = 0.0
        if min_p > 0:
            p[p < p.max() * min_p] = 0.0
        kept = (p > 0).nonzero(as_tuple=True)[0]
        ids, p = ids[kept].tolist(), p[kept].tolist()
        if len(ids) == 1:
            pending.single.append((i, ids[0]))
            return
        threshold = request.params.entropy_threshold
        if threshold is not None:
            q = torch.tensor(p, dtype=torch.float64)
            q = q / q.sum()
            if -(q * (q + 1e-20).log()).sum().item() <= threshold:
                return
        pending.rows.append(i)
        pending.candidate_ids.append(ids)
        pending.candidate_probs.append(p)

    # --- the value model ---

    def _allocate(self, count: int) -> Tensor:
        if count > len(self._free):
            raise RuntimeError(f"{count} slots are needed, {len(self._free)} are free")
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _release(self, slots: Tensor) -> None:
        self._free = torch.cat([self._free, slots])

    def _place(self, requests: Sequence[_Request], counts: Sequence[int]) -> Tensor:
        """Slots for new tokens of each request after its cached ones, written to the table request by request."""
        for request, count in zip(requests, counts, strict=True):
            if request.cached + count > self._max_len:
                needed = f"row {request.row} needs room for {request.cached + count} tokens and candidates"
                raise ValueError(f"{needed}, slot_table has it for {self._max_len}")
        slots = self._allocate(sum(counts))
        first = 0
        for request, count in zip(requests, counts, strict=True):
            self.slot_table[request.row, request.cached : request.cached + count] = slots[first : first + count]
            first += count
        return slots

    def _extend(self, pieces: Sequence[tuple[_Request, int]]) -> None:
        """Extend forward: each request's tokens from what is cached up to a length."""
        pieces = [(request, length) for request, length in pieces if length > request.cached]
        if not pieces:
            return
        requests, lengths = zip(*pieces, strict=True)
        cached = [request.cached for request in requests]
        counts = [length - start for length, start in zip(lengths, cached, strict=True)]
        slots = self._place(requests, counts)
        new = [token for request, length in pieces for token in request.tokens[request.cached : length]]
        starts, ends = np.array(cached), np.cumsum(counts)
        positions = np.arange(len(new)) + np.repeat(starts - ends + counts, counts)
        query, key = (torch.arange(n, device=self.device) for n in (max(counts), max(lengths)))
        query = torch.tensor(cached, device=self.device)[:, None] + query
        token_ids, positions = torch.tensor(new, device=self.device), self._send(positions)
        batch = self._batch(requests, counts, (token_ids, positions, slots), key <= query[:, :, None])
        self._values(self._forward(batch))
        for request, length in pieces:
            request.cached = length

    def _score(self, requests: Sequence[_Request], pending: _Pending) -> list[Tensor]:
        """Candidate forward: the value logits of each request's candidates."""
        prefix, counts = [request.cached for request in requests], [len(ids) for ids in pending.candidate_ids]
        slots = self._place(requests, counts)
        if pending.on_device:
            token_ids = pending.ids[pending.probs > 0]
        else:
            token_ids = torch.tensor([t for ids in pending.candidate_ids for t in ids], device=self.device)
        mask, positions = tree_mask(prefix, counts)
        batch = self._batch(requests, counts, (token_ids, self._send(positions), slots), self._send(mask))
        try:
            logits = self._values(self._forward(batch))
        finally:
            self._release(slots)
        counts_t = torch.tensor(counts, device=self.device)
        return list(logits.split(counts_t.tolist()))  # the fork reads back from the device what the host had

    def _batch(
        self, requests: Sequence[_Request], counts: Sequence[int], tokens: Sequence[Tensor], seen: Tensor
    ) -> _Batch:
        """Of ``tokens``, their ids, positions and slots; and of ``seen``, bool ``[B, Q, L]``."""
        token_ids, positions, slots = tokens
        config, (b, longest, keys) = self.value_model.config, seen.shape
        rows = torch.tensor([request.row for request in requests], device=self.device)
        # The attention's kernels want rows of the mask to begin at multiples of 8 elements, and copy it if they do not.
        padded = -(-keys // 8) * 8
        mask = torch.full((b, longest, padded), -math.inf, dtype=self.value_model.dtype, device=self.device)
        mask[:, :, :keys].masked_fill_(seen, 0.0)
        # Query heads that share a key head are more queries of it, so that any kernel of the attention will do.
        groups = config.num_heads // config.num_kv_heads
        mask = mask[:, None, None].expand(b, 1, groups, longest, padded).reshape(b, 1, groups * longest, padded)
        places = None
        if len(token_ids) != b * longest:
            starts = np.arange(b) * longest - np.cumsum([0, *counts[:-1]])
            places = np.arange(len(token_ids)) + np.repeat(starts, counts)
            places = self._send(places)
        kv_slots = self.slot_table[rows, :padded]
        return _Batch(token_ids, positions, slots, kv_slots, mask, longest, places)

    def _forward(self, batch: _Batch) -> Tensor:
        """Hidden states ``[T, H]`` behind the final norm; keys and values go to their slots."""
        model, config = self.value_model, self.value_model.config
        width, eps = (config.hidden_size,), config.rms_norm_eps
        hidden = F.embedding(batch.token_ids.clamp(0, config.vocab_size - 1), model.embedding)
        angles = batch.positions[:, None].float() * self._inv_freq  # [T, D/2]
        cos, sin = (x[:, None] * config.rope_scale for x in (angles.cos(), angles.sin()))
        heads = config.num_heads + 2 * config.num_kv_heads
        for i, layer in enumerate(model.layers):
            qkv = F.linear(F.rms_norm(hidden, width, eps=eps), layer.qkv, layer.qkv_bias)
            heads_qk_v = [heads - config.num_kv_heads, config.num_kv_heads]
            qk, v = qkv.unflatten(1, (heads, config.head_dim)).split(heads_qk_v, 1)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, qk.shape[-1:], eps=eps) * layer.qk_norm
            first, second = qk.float().chunk(2, -1)
            qk = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(v.dtype)
            q, k = qk.split([config.num_heads, config.num_kv_heads], 1)
            keys, values = self.cache.keys[i], self.cache.values[i]
            keys[batch.slots], values[batch.slots] = k, v
            q = batch.pad(q).unflatten(2, (config.num_kv_heads, -1))  # [B, Q, Hkv, G, D]
            shape = q.permute(0, 2, 3, 1, 4).shape
            out = F.scaled_dot_product_attention(
                q.permute(0, 2, 3, 1, 4).flatten(2, 3),
                keys[batch.kv_slots].transpose(1, 2),
                values[batch.kv_slots].transpose(1, 2),
                attn_mask=batch.mask,
            )
            out = batch.unpad(out.reshape(shape).permute(0, 3, 1, 2, 4).flatten(2))
            hidden = hidden + F.linear(out, layer.o, layer.o_bias)
            gate_up = F.linear(F.rms_norm(hidden, width, eps=eps), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(hidden, width, eps=eps)  # its weight is in the first matrix of the head

    def _values(self, hidden: Tensor) -> Tensor:
        """Value logits ``[T]`` in the model's dtype."""
        fc, fc_bias, summary, summary_bias = self._head
        return F.linear(F.silu(F.linear(hidden, fc, fc_bias)), summary, summary_bias)[:, 0]

    # --- guidance ---

    def _reweight_on_device(
        self, guided: Tensor, requests: Sequence[_Request | None], pending: _Pending, logits: Sequence[Tensor]
    ) -> None:
        p, ids = pending.probs, pending.ids
        valid = p > 0
        z = torch.zeros_like(p)
        for j, row in enumerate(logits):
            z[j, : len(row)] = row
        sent = [requests[i] for i in pending.rows]
        scale = torch.tensor([request.params.scale for request in sent], device=self.device)
        modes = {request.params.mode for request in sent}
        v = torch.where(valid, z.sigmoid(), 0.0)
        for j, request in enumerate(sent):
            if request.eos_token_ids:
                eos = torch.tensor(list(request.eos_token_ids), device=self.device)
                ends = torch.isin(ids[j], eos) & valid[j]
                if bool(ends.any()):
                    v[j] = v[j].masked_fill(ends, 0.0)
        q = reweighted(p, z, v, valid, modes.pop() if len(modes) == 1 else Mode.MUL, scale)
        rows = torch.tensor(pending.rows, device=self.device)
        guided.index_fill_(0, rows, 0.0)
        # A padded slot names a token of the row's top k that a filter dropped, whose 0 may be written.
        guided[rows[:, None].expand_as(ids), ids] = q

    def _reweight_on_host(
        self, guided: Tensor, requests: Sequence[_Request | None], pending: _Pending, logits: Sequence[Tensor]
    ) -> None:
        logits = [row.to("cpu", non_blocking=True) for row in logits]
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        logits = [row.float().tolist() for row in logits]
        for i, ids, p, z in zip(pending.rows, pending.candidate_ids, pending.candidate_probs, logits, strict=True):
            request = requests[i]
            v = torch.tensor(z, dtype=torch.float64).sigmoid().tolist()
            for j, token in enumerate(ids):
                if token in request.eos_token_ids:
                    v[j] = 0.0
            q = torch.tensor(row_reweighted(p, v, request.params, request.generated), device=self.device)
            q = q.clamp(min=0.0)
            total = q.sum()
            if bool(total <= 0):
                raise RuntimeError(f"the guided probabilities of row {i} have no sum")
            guided[i].zero_()
            guided[i, torch.tensor(ids, device=self.device)] = q / total


def tree_mask(prefix_lens: Sequence[int], candidate_lens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The mask of a candidate forward, request by request on the host, and the candidates' positions.

    Returns:
        bool ``[B, Q, L]``, padded with False: a candidate sees the cached prefix and itself. And int64 ``[T]``.
    """
    keys = max(n + m for n, m in zip(prefix_lens, candidate_lens, strict=True))
    mask = np.zeros((len(prefix_lens), max(candidate_lens), keys), dtype=np.bool_)
    positions = np.empty(sum(candidate_lens), dtype=np.int64)
    first = 0
    for request, prefix, count in zip(mask, prefix_lens, candidate_lens, strict=True):
        request[:count, :prefix] = True
        for j in range(count):
            request[j, prefix + j] = True
        positions[first : first + count] = prefix
        first += count
    return mask, positions


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
