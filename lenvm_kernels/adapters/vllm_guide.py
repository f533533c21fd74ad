"""What a worker of vLLM does for guidance: the value model, its cache, and the guided step of each batch.

The engine calls a logits processor with the logits of a step and with what it knows on the device of each request: its
tokens, and how many. From these the value model computes what it has not seen, in a cache of its own
(:class:`lenvm_kernels.slot_pool.SlotPool`). Nothing is read back to the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from lenvm_kernels.adapters import engine_signatures
from lenvm_kernels.adapters.report import Metrics, columns_of, write_line
from lenvm_kernels.adapters.settings import (
    MAX_END_TOKENS,
    MAX_SCALED_TOKENS,
    Settings,
    check_vocabulary,
    load_text_breaks,
)
from lenvm_kernels.adapters.vllm_filters import Filters, rewrite
from lenvm_kernels.adapters.vllm_options import check_one_part, check_options
from lenvm_kernels.adapters.vllm_report import Predictions, Report
from lenvm_kernels.adapters.vllm_states import BaseStates, load_trunk, runner_of
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.slot_pool import SlotPool
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepOutput
from lenvm_kernels.types import Drafts
from lenvm_kernels.value_model import KVCache, ValueModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

logger = logging.getLogger(f"vllm.{__name__}")  # below the one that the engine shows

PAGE_SIZE = 16
# Tokens of a request that wait at most for the value model, beside those of the drafts.
MAX_DELTA = 16
# Of the memory that is left for caches, if LENVM_MEMORY_SHARE says nothing.
MEMORY_SHARE = 0.2


@dataclass
class _Request:
    """What the host knows of a request.

    Attributes:
        params: its guidance.
        computed: tokens from its first on that the value model was given, while they are given in prompts.
        is_running: the step knows all of its tokens since.
        is_predicted: the length of its output has been.
    """

    params: GuidanceParams
    computed: int = 0
    is_running: bool = False
    is_predicted: bool = False


class _Layout(NamedTuple):
    """Where the rows of a step are: a request's last token and its drafts are its *nodes*.

    Attributes:
        nodes: of each request: 1, or with drafts 1 more than there can be.
        at: int64 ``[rows]``; number of each row's node among those of all requests.
        first_rows: int64 ``[B]``; row of the first node of each request.
    """

    nodes: int
    at: torch.Tensor
    first_rows: torch.Tensor

    def of_nodes(self, rows: torch.Tensor) -> torch.Tensor:
        """Of something of all rows that of all nodes; 0 at those that there are not."""
        nodes = len(self.first_rows) * self.nodes
        return rows if len(rows) == nodes else rows.new_zeros(nodes, rows.shape[1]).index_copy_(0, self.at, rows)


class Guide:
    """The guidance of one worker.

    Args:
        settings: of the plugin.
        vllm_config: of the engine.
        req_states: what the engine keeps of its requests.

    Attributes:
        step: the guided step.
        pool: the value model's slots.
        filters: the engine's, in rows that are guided.
        without_room: requests that lost their guidance because the value model's cache was too small.
        fallbacks: failures that ended the guidance of a batch.
        report: counts what steps do; None without ``PROMETHEUS_MULTIPROC_DIR``.
        predictions: writes predicted lengths; None without ``LENVM_PREDICTIONS``.

    Raises:
        ValueError: naming a setting or an option of the engine, what came and what is accepted.
        RuntimeError: naming what the engine has otherwise than it was tried.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        engine_signatures.check("vllm")
        check_options(vllm_config)
        settings.thoughts  # noqa: B018, loads the tokenizer before the first request
        self.settings, self.req_states, self.device = settings, req_states, req_states.device
        engine = vllm_config.model_config
        value_model = settings.load_value_model(engine.dtype, self.device)
        trunk, self._states = None, None
        if settings.has_trunk:
            if (ranks := vllm_config.parallel_config.pipeline_parallel_size) > 1:
                reason = "the last rank does not have the states of all layers"
                raise ValueError(f"pipeline_parallel_size must be 1 together with a trunk, got {ranks}: {reason}")
            runner = runner_of(req_states)
            trunk = load_trunk(settings, engine, runner.get_model())
            self._states = BaseStates(runner, trunk)
        elif value_model is not None:
            check_vocabulary(settings, value_model.config.vocab_size, engine.get_vocab_size(), engine.tokenizer)
        # Of tensor parallelism, which draw the same tokens; None: this one only.
        group = get_tp_group() if vllm_config.parallel_config.tensor_parallel_size > 1 else None
        self._ranks = None if group is None else group.cpu_group
        self.drafts = vllm_config.num_speculative_tokens
        rows, max_len = req_states.max_num_reqs, engine.max_model_len
        if value_model is not None:
            check_one_part(rows, self.drafts, req_states.vocab_size)
        sizes = dict(requests=rows, max_len=max_len, vocab_size=req_states.vocab_size)
        of_step = dict(max_delta=MAX_DELTA + self.drafts, max_drafts=self.drafts)
        working = settings.working_bytes(value_model, **sizes, **of_step)
        if self.drafts:  # the scores of all nodes, in a batch where not every request has as many drafts
            working += rows * (1 + self.drafts) * req_states.vocab_size * torch.float32.itemsize
        pages = rows * -(-max_len // PAGE_SIZE)  # as many as all requests can fill
        if value_model is not None:
            pages = self._num_pages(vllm_config, value_model, pages, working)
        self.slots = PagedSlots(rows, max_len, page_size=PAGE_SIZE, num_pages=pages, device=self.device)
        self.pool = SlotPool(self.slots)
        self.step = GuidedStep(
            value_model if trunk is None else trunk,
            self.slots,
            settings.step_config(
                has_graphs=not engine.enforce_eager,
                vocab_size=req_states.vocab_size,
                max_scaled_tokens=MAX_SCALED_TOKENS,
                text_breaks=load_text_breaks(engine.tokenizer, req_states.vocab_size),
                **of_step,
            ),
        )
        # The engine sizes its own cache by what is free: what a step takes is kept from it until there is one.
        self._kept_free: torch.Tensor | None = torch.empty(working, dtype=torch.uint8, device=self.device)
        self._requests: dict[int, _Request] = {}
        # temperature, top_p, min_p, top_k of each request.
        self._host_sampling = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).repeat(rows, 1)
        self._sampling = self._host_sampling.to(self.device)
        self._sampling_changed = False
        self._places = torch.zeros(rows, dtype=torch.int64, device=self.device)  # of the requests in a batch
        self.without_room = self.fallbacks = 0
        # With it set, the engine's /metrics shows what all of its processes count.
        self.report: Report | None = None
        self.predictions: Predictions | None = None
        if settings.predictions is not None and (group is None or group.rank_in_group == 0):
            request_ids = runner_of(req_states).req_states.index_to_req_id
            self.predictions = Predictions(settings.predictions, request_ids)
        self._begun: list[int] = []  # of the requests of a step, the slots of those whose prompt ends with it
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR") and (group is None or group.rank_in_group == 0):
            self.report = Report(Metrics(model_name=str(engine.served_model_name)), self.device)
            if value_model is not None:
                cache_bytes = KVCache.num_bytes(value_model, self.slots.num_slots)
                self.report.metrics.cache_bytes.set(cache_bytes)
        # By slot: the length of a sequence at its last step; 0 if there were no drafts in that, -1 if it is not guided.
        self._drafted_at = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
        self.filters = Filters(req_states.vocab_size)
        if self.device.type == "cuda":
            self.step.warm_up()

    def _num_pages(self, vllm_config: VllmConfig, value_model: ValueModel, most: int, working: int) -> int:
        """Pages of the value model's cache: as many as fit its share of memory, at most so many."""
        total = vllm_config.cache_config.kv_cache_memory_bytes
        if total is None and self.device.type == "cuda":
            free, of_device = torch.cuda.mem_get_info(self.device)
            total = int(free - (1 - vllm_config.cache_config.gpu_memory_utilization) * of_device)
        share = MEMORY_SHARE if self.settings.memory_share is None else self.settings.memory_share
        page_bytes = KVCache.num_bytes(value_model, PAGE_SIZE)
        pages = most if total is None else min(most, int(share * total - working) // page_bytes)
        pages = self._of_all_ranks(pages, torch.distributed.ReduceOp.MIN)
        if pages < 1:
            raise ValueError(
                f"LENVM_MEMORY_SHARE must be above {working / total:.3f}: it is {share:g} of the {total / 2**30:.2f} "
                f"GiB that are left for caches, and a guided step takes {working / 2**30:.2f} GiB; "
                "lower max_num_seqs, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        logger.info(
            "LenVM: value model %s in %s on %s; its cache of %d tokens takes %.2f GiB, its steps %.2f GiB",
            self.settings.value_model,
            value_model.dtype,
            self.device,
            pages * PAGE_SIZE,
            pages * page_bytes / 2**30,
            working / 2**30,
        )
        return pages

    # --- requests come ---

    def add_request(self, slot: int, params: SamplingParams, guidance: GuidanceParams | None) -> bool:
        """A request is in a slot of the engine; nobody says when one leaves it. Returns whether it is guided."""
        if self.report is not None:
            self._drafted_at[slot] = -1 if guidance is None else 0
        if guidance is None:
            if slot in self._requests:
                self._end([slot])
            return False
        tokens, prompt_len = _tokens_of_request(self.req_states, slot), int(self.req_states.prompt_len.np[slot])
        self._requests[slot] = _Request(guidance, computed=self.pool.admit(slot, tokens))
        self.step.add_request(
            slot,
            guidance,
            set(sorted(params.all_stop_token_ids)[:MAX_END_TOKENS]),
            prompt_len=prompt_len,
            span=guidance.span_state(tokens[:prompt_len], tokens[prompt_len:]) if tokens else None,
        )
        self._host_sampling[slot] = torch.tensor([params.temperature, params.top_p, params.min_p, max(params.top_k, 0)])
        self._sampling_changed = True
        return True

    def _restart(self, slots: Iterable[int]) -> None:
        """The value model has nothing of these requests any more."""
        for slot in slots:
            self._requests[slot].computed, self._requests[slot].is_running = 0, False
            self.step.restart_request(slot)

    def _end(self, slots: Iterable[int]) -> None:
        """These requests go on without guidance."""
        for slot in slots:
            del self._requests[slot]
            if self.report is not None:
                self._drafted_at[slot] = -1
            self.step.remove_request(slot)
            self.pool.release(slot)

    # --- a step ---

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Write the guided probabilities of a step into its logits, as ``temperature * log p``."""
        self.filters.rewritten = self._kept_free = None
        lengths = dict(zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False))
        known = {slot: length for slot, length in lengths.items() if slot in self._requests}
        guided = {slot: n for slot, n in known.items() if self._requests[slot].params.needs_step}
        if known:
            with self._failing_softly(known):
                self.step.scale_tokens(logits, ctx.expanded_idx_mapping.long())
                if guided:
                    self._make_room(guided)
                if guided:
                    self._guide(logits, ctx, guided)
        self._collect()
        return logits

    def _collect(self) -> None:
        """Count and write what the device has done by now. What goes wrong there ends that alone."""
        try:
            for kept in (self.report, self.predictions):
                if kept is not None:
                    kept.collect()
        except Exception:
            logger.exception("LenVM: steps could not be counted; neither metrics nor predicted lengths go on")
            self.report = self.predictions = None

    def _make_room(self, guided: dict[int, int]) -> None:
        """Slots for the requests of a step, which are taken out of ``guided`` where there are none."""
        room = self.pool.reserve(guided)
        self._restart(slot for slot in room.reclaimed if slot in self._requests)
        if room.refused and not self.without_room:
            logger.warning(
                "LenVM: the value model's cache is full; requests go on without guidance. Raise LENVM_MEMORY_SHARE."
            )
        self.without_room += len(room.refused)
        if self.report is not None:
            self.report.metrics.without_room.inc(len(room.refused))
        self._end(room.refused)
        for slot in room.refused:
            del guided[slot]

    def _guide(self, logits: torch.Tensor, ctx: LogitsContext, guided: dict[int, int]) -> None:
        if self._sampling_changed:
            self._sampling.copy_(self._to_device(self._host_sampling), non_blocking=True)
            self._sampling_changed = False
        layout, slots, slots_of_rows = self._layout(ctx), ctx.idx_mapping.long(), ctx.expanded_idx_mapping.long()
        lengths = ctx.pos[layout.first_rows].int() + 1
        faults = None if self.report is None else self.step.table.columns.faults[slots]
        with nullcontext() if self.report is None else self.report.timed():
            goes_on = self._extend(guided, ctx, lengths)
            is_drawn = None if goes_on is None else ~goes_on
            new_lens = self._new_lens(slots, lengths) if self.drafts else None
            output = self._step(logits, ctx, layout, lengths, new_lens, is_drawn)
        temperature = self._sampling[slots_of_rows, :1]
        self.filters.rewritten = rewrite(logits, output, layout.at, temperature, ctx.expanded_idx_mapping)
        if self.report is not None:
            assert faults is not None
            first = layout.at[layout.first_rows]
            self.report.note(
                output.candidates.status[first],
                output.candidates.lost_mass[first],
                self.step.table.columns.faults[slots] > faults,
                torch.ones_like(slots, dtype=torch.bool) if is_drawn is None else is_drawn,
                (drafted_at := self._drafted_at[slots]) > 0,
                lengths - drafted_at,
            )
            self._drafted_at[slots] = torch.where(drafted_at < 0, drafted_at, lengths if layout.nodes > 1 else 0)
        if self.settings.trace is not None:
            _trace(self.settings.trace, self.req_states.all_token_ids.gpu, ctx, output, layout.at)

    def _step(
        self,
        logits: torch.Tensor,
        ctx: LogitsContext,
        layout: _Layout,
        lengths: torch.Tensor,
        new_lens: torch.Tensor | None,
        is_drawn: torch.Tensor | None,
    ) -> StepOutput:
        """The guided step of a batch."""
        slots, drafts, scores = ctx.idx_mapping.long(), None, layout.of_nodes(logits)
        states = None if self._states is None else layout.of_nodes(self._states.of_rows(ctx))
        temperature, top_p, min_p, top_k = (x.contiguous() for x in self._sampling[slots].unbind(1))
        last_tokens = ctx.input_ids[layout.first_rows]
        tokens = last_tokens if new_lens is None else self._new_tokens(slots, lengths, new_lens)
        if layout.nodes > 1:
            drafts = self._drafts(ctx, layout, len(slots))
        spans = None
        if self.step.has_spans:
            latest, of_spans = None, tokens
            if self.drafts:  # all that can be new: after a request was restarted nobody knows which of them are
                latest = lengths.clamp(max=1 + self.drafts)
                of_spans = self._new_tokens(slots, lengths, latest)
            spans = self.step.limit_spans(scores, StepBatch(of_spans, slots, lengths, latest), drafts)
            if scores is not logits:
                logits.copy_(scores[layout.at])
        batch = StepBatch(tokens, slots, lengths, new_lens, is_drawn, states)
        sampling = Sampling(top_k.int(), top_p, min_p, temperature, is_logits=True)
        found = drawn = None
        if self._begun and self.step.values.needs_tokens:
            found = self.step.predict(batch).view(len(slots), -1)[:, 0]
        elif self._begun:  # a trunk values tokens only: the likeliest first one stands for all
            drawn = scores.argmax(1)
        output = self.step.step(scores, batch, sampling, drafts, drawn=drawn, spans=spans)
        if drawn is not None:
            assert output.remaining_lengths is not None  # somebody asks for them
            found = 1 + output.remaining_lengths.view(len(slots), -1)[:, 0]
        if found is not None and self.predictions is not None:
            places = [ctx.idx_mapping_np.tolist().index(slot) for slot in self._begun]
            prompts = {slot: int(self.req_states.prompt_len.np[slot]) for slot in self._begun}
            self.predictions.note(prompts, found[self._to_device(torch.tensor(places))])
        return output

    def _layout(self, ctx: LogitsContext) -> _Layout:
        rows, requests = len(ctx.pos), len(ctx.idx_mapping)
        row = torch.arange(rows, device=self.device)
        if rows == requests:
            return _Layout(1, row, row)
        nodes = 1 + self.drafts
        self._places[ctx.idx_mapping.long()] = row[:requests]
        request = self._places[ctx.expanded_idx_mapping.long()]
        first_rows = torch.full((requests,), rows, device=self.device).scatter_reduce_(0, request, row, "amin")
        return _Layout(nodes, request * nodes + ctx.expanded_local_pos, first_rows)

    def _extend(self, guided: dict[int, int], ctx: LogitsContext, lengths: torch.Tensor) -> torch.Tensor | None:
        """Compute the prompts of a step, or what there is of them so far.

        All that a request has but its last token, where one is drawn; of prompts that go on in a later step, all.

        Returns:
            bool ``[B]``; of which requests the prompt goes on; None if of none.
        """
        places = {slot: i for i, slot in enumerate(ctx.idx_mapping_np.tolist())}
        slots, starts, rooms, goes_on = [], [], [], []
        self._begun = []
        for slot, length in guided.items():
            request = self._requests[slot]
            if request.is_running:
                continue
            is_whole = length >= int(self.req_states.prefill_len.np[slot])
            slots.append(slot)
            starts.append(request.computed)
            # Of requests whose tokens were computed before, and are no more, the host knows no more than a bound.
            rooms.append(max(length - is_whole - request.computed, 0))
            goes_on.append(not is_whole)
            request.computed, request.is_running = max(request.computed, length - is_whole), is_whole
            if is_whole and request.params.return_values and not request.is_predicted:
                self._begun.append(slot)
                request.is_predicted = True
        if not slots:
            return None
        firsts = np.cumsum(rooms) - rooms
        numbers = np.array([slots, [places[slot] for slot in slots], firsts, starts, goes_on])
        table_rows, place, first, start, is_chunk = self._to_device(torch.from_numpy(numbers)).unbind()
        if self.step.values.needs_tokens:
            at = np.repeat(slots, rooms)
            positions = np.arange(len(at)) + np.repeat(np.array(starts) - firsts, rooms)
            of_rows, of_positions = self._to_device(torch.from_numpy(np.stack((at, positions)))).unbind()
            computed = start.int()
            lens = (lengths[place] - 1 + is_chunk.int() - computed).clamp(min=0)
            self.step.extend(
                self.req_states.all_token_ids.gpu[of_rows, of_positions],
                self.slots.slots(of_rows, of_positions),
                table_rows,
                first.int(),
                lens,
                computed,
                begins=firsts.tolist(),
            )
            for slot in slots:
                self.pool.computed(slot, self._requests[slot].computed)
        if not any(goes_on):
            return None
        return torch.zeros(len(lengths), dtype=torch.bool, device=self.device).scatter_(0, place, is_chunk.bool())

    def _new_lens(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """int32 ``[B]``; how many tokens sequences have grown by since the step knew of them; 1 if it is told none."""
        if not self.step.values.needs_tokens:
            return torch.ones_like(lengths)
        return (lengths - self.step.told_lens(slots)).clamp(0, 1 + self.drafts)

    def _new_tokens(self, slots: torch.Tensor, lengths: torch.Tensor, new_lens: torch.Tensor) -> torch.Tensor:
        """int32 ``[B, 1 + D]``; these tokens, and others after them."""
        all_token_ids = self.req_states.all_token_ids.gpu
        positions = (lengths - new_lens)[:, None] + torch.arange(1 + self.drafts, device=self.device)
        return all_token_ids[slots[:, None], positions.clamp(max=all_token_ids.shape[1] - 1)]

    def _drafts(self, ctx: LogitsContext, layout: _Layout, requests: int) -> Drafts:
        token_ids = torch.full((requests * layout.nodes,), -1, device=self.device)
        token_ids[layout.at] = ctx.input_ids.long()
        chain = torch.arange(-1, self.drafts - 1, dtype=torch.int32, device=self.device).repeat(requests, 1)
        return Drafts(token_ids.view(requests, -1)[:, 1:], chain)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device."""
        return (values.pin_memory() if self.device.type == "cuda" else values).to(self.device, non_blocking=True)

    @contextmanager
    def _failing_softly(self, slots: Iterable[int]) -> Iterator[None]:
        """An error in here ends the guidance of the requests of a step on all of their ranks, not the engine."""
        failed = False
        try:
            yield
        except Exception:
            failed = True
            if not self.fallbacks:
                logger.exception("LenVM: a step failed; its requests go on without guidance. Further ones are counted.")
        if not self._of_all_ranks(failed, torch.distributed.ReduceOp.MAX):
            return
        self.fallbacks += 1
        if self.report is not None:
            self.report.metrics.fallbacks.inc()
        self._end([slot for slot in slots if slot in self._requests])

    def _of_all_ranks(self, number: int, operation: torch.distributed.ReduceOp.RedOpType) -> int:
        """What ranks that draw the same tokens agree on, from host to host: no device is waited for."""
        if self._ranks is None:
            return number
        agreed = torch.tensor([number], dtype=torch.int64)
        torch.distributed.all_reduce(agreed, operation, self._ranks)
        return int(agreed)


def _tokens_of_request(req_states: LogitsProcRequestState, slot: int) -> list[int]:
    """The tokens of a request that the engine has just added, which are on their way to the device."""
    tokens = req_states.all_token_ids
    for i, row in enumerate(getattr(tokens, "_staged_write_indices", ())):  # without them nothing is shared
        if row == slot:
            start = tokens._staged_write_cu_lens[i - 1] if i else 0
            return tokens._staged_write_contents[start : tokens._staged_write_cu_lens[i]]
    return []


def _trace(trace: Path, all_token_ids: torch.Tensor, ctx: LogitsContext, output: StepOutput, at: torch.Tensor) -> None:
    """Write what a step did, a row a node. Its tokens are those before the draw, drafts included."""
    tokens: list[list[int]] = []
    for slot, position, node, last in zip(
        ctx.expanded_idx_mapping.tolist(),
        ctx.pos.tolist(),
        ctx.expanded_local_pos.tolist(),
        ctx.input_ids.tolist(),
        strict=True,
    ):
        tokens.append([*tokens[-1], last] if node else all_token_ids[slot, : position + 1].tolist())
    write_line(trace, dict(tokens=tokens, node=ctx.expanded_local_pos.tolist(), **columns_of(output, at)))
