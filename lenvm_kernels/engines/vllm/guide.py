"""Guidance in a vLLM worker: the value model, its cache, and the guided step of each batch.

The engine passes a logits processor the logits of a step, and keeps the tokens and lengths of requests on the device.
The value model has a separate cache (:class:`OwnSlots`). Only the trace makes a host-device sync.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.own_slots import MAX_DELTA, OwnSlots, PromptPart, log_memory, pages_for
from lenvm_kernels.engines.report import Metrics, trace_nodes
from lenvm_kernels.engines.settings import MAX_END_TOKENS, MAX_SCALED_TOKENS, Settings
from lenvm_kernels.engines.tokenizers import check_vocabulary, load_text_breaks
from lenvm_kernels.engines.vllm.filters import EngineFilters, rewrite
from lenvm_kernels.engines.vllm.layout import Layout
from lenvm_kernels.engines.vllm.options import check_one_part, check_options
from lenvm_kernels.engines.vllm.report import Predictions, StepCounter
from lenvm_kernels.engines.vllm.requests import staged_tokens
from lenvm_kernels.engines.vllm.states import BaseStates, load_probe, runner_of
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.step import GuidedStep, PreparedStep, Sampling, StepBatch, StepOutput, value_source
from lenvm_kernels.values import KVCache, ValueModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

logger = logging.getLogger(f"vllm.{__name__}")  # below the engine's logger, so that it is shown

# Default of LENVM_MEMORY_SHARE, a share of the memory that the engine leaves for caches.
MEMORY_SHARE = 0.2


@dataclass
class GuidedRequest:
    """Host state of a guided request.

    Attributes:
        params: guidance parameters.
        computed: number of prompt tokens passed to the value model.
        is_running: all tokens since the prompt are passed to the step.
        is_predicted: the output length has been predicted.
    """

    params: GuidanceParams
    computed: int = 0
    is_running: bool = False
    is_predicted: bool = False


class Guide:
    """Guidance of one worker.

    Args:
        settings: settings of the plugin.
        vllm_config: configuration of the engine.
        req_states: state that the engine keeps of its requests.

    Attributes:
        step: the guided step.
        own: slots of the value model.
        requests: the guided requests by slot.
        filters: filters of the engine, off in guided rows.
        without_room: number of requests that lost their guidance because the value model's cache was full.
        fallbacks: number of failures that ended the guidance of a batch.
        report: counts steps; None without ``PROMETHEUS_MULTIPROC_DIR``.
        predictions: writer of predicted lengths; None without ``LENVM_PREDICTIONS``.
        ranks: process group of the ranks that draw the same tokens; None if there is one.
        kept_free: memory kept from the engine's cache until the first step, uint8 ``[bytes]``; None after that.

    Raises:
        ValueError: a setting or an option of the engine; the message names it, its value and what is accepted.
        RuntimeError: the engine differs from the tested versions; the message names the difference.
    """

    def __init__(self, settings: Settings, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        signatures.check("vllm")
        check_options(vllm_config)
        _ = settings.thoughts  # loads the tokenizer before the first request
        self.settings, self.req_states, self.device = settings, req_states, req_states.device
        engine = vllm_config.model_config
        value_model = settings.load_value_model(engine.dtype, self.device)
        probe, self._states = None, None
        if settings.has_probe:
            if (ranks := vllm_config.parallel_config.pipeline_parallel_size) > 1:
                reason = "the last rank does not have the states of all layers"
                raise ValueError(f"pipeline_parallel_size must be 1 together with a probe, got {ranks}: {reason}")
            runner = runner_of(req_states)
            probe = load_probe(settings, engine, runner.get_model())
            self._states = BaseStates(runner, probe)
        elif value_model is not None:
            check_vocabulary(
                settings.value_model, value_model.config.vocab_size, engine.get_vocab_size(), engine.tokenizer
            )
        group = get_tp_group() if vllm_config.parallel_config.tensor_parallel_size > 1 else None
        is_first_rank = group is None or group.rank_in_group == 0
        self.ranks = None if group is None else group.cpu_group
        self.drafts = vllm_config.num_speculative_tokens
        rows, max_len = req_states.max_num_reqs, engine.max_model_len
        step_sizes = dict(max_delta=MAX_DELTA + self.drafts, max_drafts=self.drafts)
        working = settings.working_bytes(
            value_model, requests=rows, max_len=max_len, vocab_size=req_states.vocab_size, **step_sizes
        )
        if self.drafts:  # scores of all nodes, for batches in which requests have different numbers of drafts
            working += rows * (1 + self.drafts) * req_states.vocab_size * torch.float32.itemsize
        pages = None if value_model is None else self._num_pages(vllm_config, value_model, working)
        self.own = OwnSlots(rows, max_len, num_pages=pages, device=self.device)
        self.step = GuidedStep(
            value_source(value_model if probe is None else probe),
            self.own.slots,
            settings.step_config(
                has_graphs=not engine.enforce_eager,
                vocab_size=req_states.vocab_size,
                max_scaled_tokens=MAX_SCALED_TOKENS,
                text_breaks=load_text_breaks(engine.tokenizer, req_states.vocab_size),
                **step_sizes,
            ),
        )
        # The engine sizes its own cache by the free memory, after this and before the first step.
        self.kept_free: torch.Tensor | None = torch.empty(working, dtype=torch.uint8, device=self.device)
        self.requests: dict[int, GuidedRequest] = {}
        # temperature, top_p, min_p and top_k per slot
        self._sampling = torch.tensor([[1.0, 1.0, 0.0, 0.0]], device=self.device).repeat(rows, 1)
        self._places = torch.zeros(rows, dtype=torch.int64, device=self.device)  # scratch of Layout
        self.without_room = self.fallbacks = 0
        self.report: StepCounter | None = None
        self.predictions: Predictions | None = None
        self._begun: list[int] = []  # slots of the step's requests whose prompt ends with it
        if settings.predictions is not None and is_first_rank:
            request_ids = runner_of(req_states).req_states.index_to_req_id
            self.predictions = Predictions(settings.predictions, request_ids)
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR") and is_first_rank:  # the engine's /metrics reads this directory
            self.report = StepCounter(Metrics(model_name=str(engine.served_model_name)), self.device, rows)
            if value_model is not None:
                self.report.metrics.cache_bytes.set(KVCache.num_bytes(value_model, self.own.slots.num_slots))
        self.filters = EngineFilters(req_states.vocab_size)
        if self.device.type == "cuda":
            self.step.warm_up(sample=False)

    def _num_pages(self, vllm_config: VllmConfig, value_model: ValueModel, working: int) -> int:
        """Pages of the value model's cache, which shares its part of the memory with ``working`` bytes of a step."""
        check_one_part(self.req_states.max_num_reqs, self.drafts, self.req_states.vocab_size)
        total = vllm_config.cache_config.kv_cache_memory_bytes
        if total is None and self.device.type == "cuda":
            free, device_bytes = torch.cuda.mem_get_info(self.device)
            total = int(free - (1 - vllm_config.cache_config.gpu_memory_utilization) * device_bytes)
        share = MEMORY_SHARE if self.settings.memory_share is None else self.settings.memory_share
        room = None if total is None else share * total - working
        pages = pages_for(value_model, self.req_states.max_num_reqs, vllm_config.model_config.max_model_len, room)
        pages = self.reduce(pages, torch.distributed.ReduceOp.MIN)
        if pages < 1:
            raise ValueError(
                f"LENVM_MEMORY_SHARE must be above {working / total:.3f}: it is {share:g} of the {total / 2**30:.2f} "
                f"GiB that are left for caches, and a guided step takes {working / 2**30:.2f} GiB; "
                "lower max_num_seqs, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        log_memory(logger, self.settings.value_model, value_model, pages, working)
        return pages

    # --- requests ---

    def add_request(self, slot: int, params: SamplingParams, guidance: GuidanceParams | None) -> bool:
        """Admit a request into a slot of the engine, which does not report when requests leave. Returns whether it is
        guided."""
        if self.report is not None:
            self.report.admit(slot, guidance is not None)
        if guidance is None:
            if slot in self.requests:
                self._end([slot])
            return False
        tokens, prompt_len = staged_tokens(self.req_states, slot), int(self.req_states.prompt_len.np[slot])
        self.requests[slot] = GuidedRequest(guidance, computed=self.own.admit(slot, tokens))
        self.step.add_request(
            slot,
            guidance,
            set(sorted(params.all_stop_token_ids)[:MAX_END_TOKENS]),
            prompt_len=prompt_len,
            span=guidance.span_state(tokens[:prompt_len], tokens[prompt_len:]) if tokens else None,
        )
        sampling = [params.temperature, params.top_p, params.min_p, max(params.top_k, 0)]
        self._sampling[slot] = self.own.to_device(torch.tensor(sampling))
        return True

    def _end(self, slots: Iterable[int]) -> None:
        """End the guidance of requests."""
        for slot in slots:
            del self.requests[slot]
            if self.report is not None:
                self.report.admit(slot, False)
            self.step.remove_request(slot)
            self.own.release(slot)

    # --- a step ---

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Write the guided probabilities of a step into its logits, as ``temperature * log p``."""
        self.filters.rewritten = self.kept_free = None
        lengths = dict(zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False))
        known = {slot: length for slot, length in lengths.items() if slot in self.requests}
        guided = {slot: n for slot, n in known.items() if self.requests[slot].params.needs_step}
        if known:
            with self._failing_softly(known):
                if guided:
                    self._make_room(guided)
                if guided:
                    self._guide(logits, ctx, guided)
                else:  # token temperatures alone
                    layout = Layout.of_step(ctx, self.drafts, self._places)
                    self._prepare(logits, ctx, layout, ctx.pos[layout.first_rows].int() + 1, None)
        self._collect()
        return logits

    def _collect(self) -> None:
        """Count the steps that the device has finished. A failure ends the counting, not the guidance."""
        try:
            for kept in (self.report, self.predictions):
                if kept is not None:
                    kept.collect()
        except Exception:
            logger.exception("LenVM: steps could not be counted; neither metrics nor predicted lengths go on")
            self.report = self.predictions = None

    def _make_room(self, guided: dict[int, int]) -> None:
        """Reserve slots for the requests of a step; requests without room lose their guidance and leave ``guided``."""
        room = self.own.reserve(guided)
        for slot in room.reclaimed:
            if slot in self.requests:
                self.requests[slot].computed, self.requests[slot].is_running = 0, False
                self.step.restart_request(slot)
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
        layout = Layout.of_step(ctx, self.drafts, self._places)
        slots, row_slots = ctx.idx_mapping.long(), ctx.expanded_idx_mapping.long()
        lengths = ctx.pos[layout.first_rows].int() + 1
        faults = None if self.report is None else self.step.table.columns.faults[slots]
        with nullcontext() if self.report is None else self.report.timed():
            is_drawn = self._extend(guided, ctx, lengths)
            prepared = self._prepare(logits, ctx, layout, lengths, is_drawn)
            output = self._step(prepared, ctx)
        temperature = self._sampling[row_slots, :1]
        self.filters.rewritten = rewrite(logits, output, layout.at, temperature, ctx.expanded_idx_mapping)
        if self.report is not None and faults is not None:
            broken = self.step.table.columns.faults[slots] > faults
            self.report.note(output, layout, broken, slots, lengths, is_drawn)
        if self.settings.trace is not None:
            trace_nodes(self.settings.trace, self.req_states.all_token_ids.gpu, ctx, output, layout.at)

    def _prepare(
        self,
        logits: torch.Tensor,
        ctx: LogitsContext,
        layout: Layout,
        lengths: torch.Tensor,
        is_drawn: torch.Tensor | None,
    ) -> PreparedStep:
        """Prepare a step on the scores of all nodes, and copy the changed scores to the engine's logits."""
        slots, scores = ctx.idx_mapping.long(), layout.of_nodes(logits)
        states = None if self._states is None else layout.of_nodes(self._states.of_rows(ctx))
        tokens, new_lens = ctx.input_ids[layout.first_rows], None
        if self.drafts:  # which of these tokens are new is not known after a restart
            new_lens = lengths.clamp(max=1 + self.drafts)
            tokens = self._new_tokens(slots, lengths, new_lens)
        batch = StepBatch(tokens, slots, lengths, new_lens, is_drawn, states)
        prepared = self.step.prepare(scores, batch, layout.drafts(ctx.input_ids))
        if prepared.is_changed and scores is not logits:
            logits.copy_(scores[layout.at])
        return prepared

    def _step(self, prepared: PreparedStep, ctx: LogitsContext) -> StepOutput:
        slots = prepared.batch.table_rows
        temperature, top_p, min_p, top_k = (x.contiguous() for x in self._sampling[slots].unbind(1))
        sampling = Sampling(top_k.int(), top_p, min_p, temperature, is_logits=True)
        predicted = drawn = None
        if self._begun and self.step.values.needs_tokens:
            predicted = self._predict(prepared.batch)
        elif self._begun:  # a probe values candidates only; the most probable first token represents the prompt
            assert prepared.logits is not None
            drawn = prepared.logits.argmax(1)
        output = self.step.step(prepared, sampling, drawn=drawn)
        if drawn is not None:
            assert output.remaining_lengths is not None  # self._begun requested them
            predicted = 1 + output.remaining_lengths.view(len(slots), -1)[:, 0]
        if predicted is not None and self.predictions is not None:
            places = [ctx.idx_mapping_np.tolist().index(slot) for slot in self._begun]
            prompts = {slot: int(self.req_states.prompt_len.np[slot]) for slot in self._begun}
            self.predictions.note(prompts, predicted[self.own.to_device(np.array(places))])
        return output

    def _predict(self, batch: StepBatch) -> torch.Tensor:
        """fp32 ``[B]``; lengths predicted after the first token of each request that the step has not been passed."""
        if self.drafts:
            new_lens = (batch.lengths - self.step.told_lens(batch.table_rows)).clamp(0, 1 + self.drafts)
            tokens = self._new_tokens(batch.table_rows, batch.lengths, new_lens)
            batch = batch._replace(tokens=tokens, new_lens=new_lens)
        return self.step.predict(batch).view(len(batch.lengths), -1)[:, 0]

    def _extend(self, guided: dict[int, int], ctx: LogitsContext, lengths: torch.Tensor) -> torch.Tensor | None:
        """Compute the prompts of a step: all tokens but the last, and all tokens of chunks that a later step continues.

        Returns:
            bool ``[B]``; requests that a token is drawn for; None if one is drawn for all.
        """
        batch_slots = ctx.idx_mapping_np.tolist()
        parts, places, continues = [], [], []
        self._begun = []
        for slot, length in guided.items():
            request = self.requests[slot]
            if request.is_running:
                continue
            is_whole = length >= int(self.req_states.prefill_len.np[slot])
            # For requests with drafts that lost their slots, the host has only an upper bound of the length.
            end = max(length - is_whole, request.computed)
            parts.append(PromptPart(slot, request.computed, end))
            places.append(batch_slots.index(slot))
            continues.append(not is_whole)
            request.computed, request.is_running = end, is_whole
            if is_whole and request.params.return_values and not request.is_predicted:
                self._begun.append(slot)
                request.is_predicted = True
        if not parts:
            return None
        place, is_chunk, start = self.own.to_device(np.array([places, continues, [part.start for part in parts]]))
        if self.step.values.needs_tokens:
            self.own.extend(
                self.step,
                parts,
                lambda slots, positions: self.req_states.all_token_ids.gpu[slots, positions],
                lens=(lengths[place] - 1 + is_chunk - start).clamp(min=0).int(),
            )
        if not any(continues):
            return None
        return torch.ones(len(lengths), dtype=torch.bool, device=self.device).scatter_(0, place, is_chunk == 0)

    def _new_tokens(self, slots: torch.Tensor, lengths: torch.Tensor, new_lens: torch.Tensor) -> torch.Tensor:
        """int32 ``[B, 1 + D]``; the last ``new_lens`` tokens of each sequence, then arbitrary ones."""
        all_token_ids = self.req_states.all_token_ids.gpu
        positions = (lengths - new_lens)[:, None] + torch.arange(1 + self.drafts, device=self.device)
        return all_token_ids[slots[:, None], positions.clamp(max=all_token_ids.shape[1] - 1)]

    @contextmanager
    def _failing_softly(self, slots: Iterable[int]) -> Iterator[None]:
        """If this step fails on any rank, end the guidance of its requests on all ranks instead of the engine."""
        failed = False
        try:
            yield
        except Exception:
            failed = True
            if not self.fallbacks:
                logger.exception("LenVM: a step failed; its requests go on without guidance. Further ones are counted.")
        if not self.reduce(failed, torch.distributed.ReduceOp.MAX):
            return
        self.fallbacks += 1
        if self.report is not None:
            self.report.metrics.fallbacks.inc()
        self._end([slot for slot in slots if slot in self.requests])

    def reduce(self, number: int, operation: torch.distributed.ReduceOp.RedOpType) -> int:
        """Reduce a number over the ranks, from host to host."""
        if self.ranks is None:
            return number
        reduced = torch.tensor([number], dtype=torch.int64)
        torch.distributed.all_reduce(reduced, operation, self.ranks)
        return int(reduced)
