"""The value model's two forwards over slots: one that extends the cache, one that scores candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines.pytorch import value_head
from bench.baselines.two_forward.cache import Request, SlotCache
from bench.baselines.two_forward.candidates import Pending
from lenvm_kernels.value_model import ValueModel


@dataclass(frozen=True)
class Batch:
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


class ValueForward:
    """A value model in plain PyTorch, whose keys and values go to the slots of a cache."""

    def __init__(self, value_model: ValueModel, cache: SlotCache) -> None:
        self.value_model, self.cache, self.device = value_model, cache, value_model.device
        self._inv_freq = torch.tensor(value_model.config.rope_inv_freq, device=self.device)
        self._head = [x.to(value_model.dtype) for x in value_model.head]

    def extend(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Extend forward: each request's tokens from what is cached up to a length."""
        pieces = [(request, length) for request, length in pieces if length > request.cached]
        if not pieces:
            return
        requests, lengths = zip(*pieces, strict=True)
        cached = [request.cached for request in requests]
        counts = [length - start for length, start in zip(lengths, cached, strict=True)]
        slots = self.cache.place(requests, counts)
        new = [token for request, length in pieces for token in request.tokens[request.cached : length]]
        starts, ends = np.array(cached), np.cumsum(counts)
        positions = np.arange(len(new)) + np.repeat(starts - ends + counts, counts)
        query, key = (torch.arange(n, device=self.device) for n in (max(counts), max(lengths)))
        query = torch.tensor(cached, device=self.device)[:, None] + query
        token_ids, positions = torch.tensor(new, device=self.device), self._send(positions)
        batch = self._batch(requests, counts, (token_ids, positions, slots), key <= query[:, :, None])
        self._values(self.hidden_states(batch))
        for request, length in pieces:
            request.cached = length

    def score(self, requests: Sequence[Request], pending: Pending) -> list[Tensor]:
        """Candidate forward: the value logits of each request's candidates."""
        prefix, counts = [request.cached for request in requests], [len(ids) for ids in pending.candidate_ids]
        slots = self.cache.place(requests, counts)
        if pending.on_device:
            token_ids = pending.ids[pending.probs > 0]
        else:
            token_ids = torch.tensor([t for ids in pending.candidate_ids for t in ids], device=self.device)
        mask, positions = tree_mask(prefix, counts)
        batch = self._batch(requests, counts, (token_ids, self._send(positions), slots), self._send(mask))
        try:
            logits = self._values(self.hidden_states(batch))
        finally:
            self.cache.release(slots)
        counts_t = torch.tensor(counts, device=self.device)
        return list(logits.split(counts_t.tolist()))  # the fork reads back from the device what the host had

    def _batch(
        self, requests: Sequence[Request], counts: Sequence[int], tokens: Sequence[Tensor], seen: Tensor
    ) -> Batch:
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
        kv_slots = self.cache.table[rows, :padded]
        return Batch(token_ids, positions, slots, kv_slots, mask, longest, places)

    def hidden_states(self, batch: Batch) -> Tensor:
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
            keys, values = self.cache.kv.keys[i], self.cache.kv.values[i]
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
        return value_head(hidden, *self._head)()

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


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
