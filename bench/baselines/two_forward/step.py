"""The baseline's step: requests are admitted, then come their candidates, the forwards and the guidance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.baselines.two_forward.cache import Request, SlotCache
from bench.baselines.two_forward.candidates import candidates_of
from bench.baselines.two_forward.forward import ValueForward
from bench.baselines.two_forward.guidance import reweight_on_device, reweight_on_host
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import EngineSlots, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Mode
from lenvm_kernels.value_model import ValueModel


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


class TwoForwardStep:
    """Takes the place of a :class:`GuidedStep`: the same calls with the same tensors, of which it reads on the host.

    The value model has a pool of slots of its own and a table of them, as in the fork.

    Args:
        value_model: whose weights it runs.
        slots: of the engine: room for as many tokens is made. Slots for candidates come on top.
        config: ``max_requests`` is the largest batch, ``max_candidates`` the most that a row may come to have: room,
            not a filter. ``chunk_tokens`` are computed at a time. Nothing else is looked at.
    """

    def __init__(self, value_model: ValueModel, slots: PagedSlots | EngineSlots, config: StepConfig) -> None:
        rows, pages = slots.table.shape
        self.value_model, self.device = value_model, value_model.device
        self.max_candidates, self.chunk_tokens = config.max_candidates, config.chunk_tokens
        num_slots = slots.num_slots + (config.max_requests or rows) * config.max_candidates
        self.cache = SlotCache(value_model, rows, pages * slots.page_size + config.max_candidates, num_slots)
        self.forward = ValueForward(value_model, self.cache)
        self._requests: dict[int, Request] = {}

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
        unused. Without ``params`` the row's request leaves, and gives back its slots.

        Raises:
            IndexError: no such row.
            ValueError: guidance other than by a scale (``mul``) or to a target (``eq``).
        """
        if not 0 <= table_row < len(self.cache.table):
            raise IndexError(f"table_row must be in [0, {len(self.cache.table)}), got {table_row}")
        if params is not None and params.mode not in (Mode.UNGUIDED, Mode.MUL, Mode.EQ):
            raise ValueError(f"guidance must be mul or eq, got {params.mode.name.lower()}")
        if table_row in self._requests:
            self.retract(table_row, 0)
            del self._requests[table_row]
        if params is not None and params.mode != Mode.UNGUIDED:
            self._requests[table_row] = Request(table_row, params, eos_token_ids, prompt_len)

    def retract(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a guided request, and give back their slots."""
        request = self._requests[row]
        del request.tokens[length:]
        self.cache.forget(request, length)

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
        ids = tokens.tolist()
        batch = torch.stack([x.long() for x in (table_rows, starts, lens, cached_lens)], 1).tolist()
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
            self.forward.extend(pieces[first : first + at_a_time])

    def _check_known(self, request: Request, length: int) -> None:
        if len(request.tokens) != length:
            known = f"has {len(request.tokens)}: extend() them"
            raise ValueError(f"row {request.row} must have {length} tokens before these, {known}")

    # --- the step ---

    @torch.no_grad()
    def step(self, scores: Tensor, batch: StepBatch, sampling: Sampling) -> TwoForwardOutput:
        """Guide the next token of each row; arguments as in :meth:`GuidedStep.step`, filters as tensors.

        Raises:
            ValueError: a row whose tokens are not known, or one with more candidates than there is room for; a row
                without a top-k, or rows with a target beside others.
            RuntimeError: no free slots.
        """
        # Stands for the engine's own read of what it drew, through which the fork knows its requests' tokens.
        numbers = torch.stack([x.long() for x in (batch.table_rows, batch.tokens, batch.lengths)], 1).tolist()
        requests = [self._requests.get(row) for row, _, _ in numbers]
        for request, (row, token, length) in zip(requests, numbers, strict=True):
            if request is not None:
                if len(request.tokens) >= length:
                    self.retract(row, length - 1)
                self._check_known(request, length - 1)
                request.tokens.append(token)
        probs = scores.float()
        if sampling.is_logits:
            scaled = probs if sampling.temperature is None else probs / sampling.temperature[:, None]
            probs = torch.softmax(scaled, dim=-1)
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        pending = candidates_of(probs, requests, *filters, max_candidates=self.max_candidates)
        if not pending.rows and not pending.single:
            return TwoForwardOutput(probs, None, [], [], [])

        guided = probs.clone()
        for i, token in pending.single:
            guided[i].zero_()
            guided[i, token] = 1.0
        values = []
        if pending.rows:
            sent = [requests[i] for i in pending.rows]
            self.forward.extend([(request, len(request.tokens)) for request in sent])
            values = self.forward.score(sent, pending)
            if pending.on_device:
                reweight_on_device(guided, requests, pending, values)
            else:
                reweight_on_host(guided, requests, pending, values)
        drawn = torch.multinomial(guided, 1).view(-1).int() if sampling.sample else None
        return TwoForwardOutput(guided, drawn, pending.rows, pending.candidate_ids, values)
