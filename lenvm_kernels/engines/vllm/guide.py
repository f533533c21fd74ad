"""Guidance in a vLLM worker, without a value model or with a probe: the guided step of each batch.

The engine passes the logits of a step to a logits processor, and stores tokens and lengths of requests on the device.
The step draws the next tokens of guided rows, and each of these rows keeps one finite logit, so all later stages of the
engine (filters, samplers, verification of drafts) return the drawn token. Only the trace makes a host-device sync. The
code for value models is in :mod:`lenvm_kernels.engines.vllm.model_guide`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.report import Metrics, trace_nodes
from lenvm_kernels.engines.settings import MAX_END_TOKENS, MAX_SCALED_TOKENS, Settings
from lenvm_kernels.engines.tensors import guided_logits, leave_only, to_device, warm_up
from lenvm_kernels.engines.tokenizers import load_text_breaks
from lenvm_kernels.engines.vllm.report import Report
from lenvm_kernels.engines.vllm.states import BaseStates, Part, after_reload, calling_runner, load_probe
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.step import EngineSlots, GuidedStep, PreparedStep, ProbeValues, Sampling, StepBatch, value_source
from lenvm_kernels.step.inputs import SlotTable
from lenvm_kernels.values import LengthProbe, ValueModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

logger = logging.getLogger(f"vllm.{__name__}")  # a child of the engine's logger, so that messages are shown

# Maximum size of a copy of scores. With drafts, scores are copied, because requests differ in their number of rows.
PART_BYTES = 2**28


class Guide:
    """The guidance of a worker, from the settings, the engine's configuration and its request states.

    Attributes:
        step: the guided step.
        fallbacks: number of failures that ended the guidance of requests on this rank.
        report: counts steps with ``PROMETHEUS_MULTIPROC_DIR``, and writes predicted lengths with ``LENVM_PREDICTIONS``,
            on the first tensor-parallel rank.
        kept_free: memory reserved until the first guided request, uint8 ``[bytes]``; None afterwards.

    Raises:
        ValueError: invalid setting or option of the engine; the message names it, the value and the accepted values.
        RuntimeError: the engine differs from the tested versions; the message names the difference.
    """

    max_delta = 1  # pending tokens per request, excluding drafts; without a value model, only for spans

    def __init__(self, settings: Settings, config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        signatures.check("vllm")
        self.settings, self.config, self.req_states, self.device = settings, config, req_states, req_states.device
        self.rows, self.drafts = req_states.max_num_reqs, config.num_speculative_tokens
        max_delta = self.max_delta + self.drafts
        self._sizes = dict(vocab_size=req_states.vocab_size, max_drafts=self.drafts, max_delta=max_delta)
        self._group = get_tp_group() if config.parallel_config.tensor_parallel_size > 1 else None
        self._states: BaseStates | None = None
        self.fallbacks = 0
        # Per slot, on the host: whether the request has guidance, takes part in steps, has lost its guidance, needs a
        # predicted length, and needs guided log-probabilities.
        self._flags = np.zeros((5, self.rows), dtype=bool)
        self._is_known, self._needs_step, self._is_lost, self._wants_length, self._wants_logprobs = self._flags
        self._replace_logprobs()
        self._node_bytes = (1 + self.drafts) * req_states.vocab_size * torch.float32.itemsize  # scores of a request
        self._part = max(1, PART_BYTES // self._node_bytes)
        # Requests without a seed draw the same on all tensor-parallel ranks, but not in other data-parallel engines.
        self._seeds = random.Random(f"{config.model_config.seed} {config.parallel_config.data_parallel_rank}")
        self._prompt: tuple[int, Sequence[int]] = -1, ()
        self._keep_prompts()
        is_first_rank = self._group is None or self._group.rank_in_group == 0
        self.report = self._new_report() if is_first_rank else Report(self.device)
        source, slots, name = self._load()
        self._build_step(source, slots, progress=is_first_rank)
        # The engine then sizes its cache by the free memory, before the first guided request.
        working = self._working_bytes(source)
        self.kept_free: torch.Tensor | None = torch.empty(working, dtype=torch.uint8, device=self.device)
        if is_first_rank:
            gib, graphs = working / 2**30, "with" if self.step.config.graphs else "without"
            text = "LenVM: guidance by %s; %d requests, %d candidates each; steps take %.2f GiB, %s CUDA graphs"
            logger.info(text, name, self.rows, self.step.config.max_candidates, gib, graphs)

    def _load(self) -> tuple[ValueModel | LengthProbe | None, SlotTable, str]:
        """The value model, probe or None, its slots, and a description."""
        no_slots = EngineSlots(torch.zeros(self.rows, 1, dtype=torch.int32, device=self.device), 1)
        has_probe, sleeps = self.settings.has_probe, self.config.model_config.enable_sleep_mode
        name = f"the probe {self.settings.value_model}" if has_probe else "end tokens alone, without a value model"
        if not has_probe and not sleeps:
            return None, no_slots, name
        runner = calling_runner()
        probe = load_probe(self.settings, runner) if has_probe else None
        if probe is not None:
            self._states = BaseStates(runner, probe)

        def reload() -> None:
            probe = load_probe(self.settings, runner) if has_probe else None
            if sleeps:  # sleeping also discards the step's tensors, and no request is running
                self._build_step(probe, no_slots)
            elif probe is not None:
                assert isinstance(self.step.values, ProbeValues)
                self.step.values.probe = probe

        after_reload(runner, reload)
        return probe, no_slots, name

    def _working_bytes(self, source: ValueModel | LengthProbe | None) -> int:
        """Bytes of working memory for steps."""
        sizes = self._sizes | dict(requests=self.rows, max_len=self.config.model_config.max_model_len)
        copies = min(self.rows, self._part) * self._node_bytes if self.drafts else 0
        return self.settings.working_bytes(source, **sizes) + copies

    def _build_step(self, source: ValueModel | LengthProbe | None, slots: SlotTable, *, progress: bool = False) -> None:
        """Create the step and other device tensors, also after sleep mode has discarded them."""
        self._row_numbers = torch.arange(self.rows, device=self.device)
        # Per slot, top_k and the bits of temperature, top_p and min_p, so that one launch gathers all.
        self._sampling = torch.zeros(self.rows, 4, dtype=torch.int32, device=self.device)
        config = self.settings.step_config(
            has_graphs=not self.config.model_config.enforce_eager,
            max_scaled_tokens=MAX_SCALED_TOKENS,
            text_breaks=load_text_breaks(self.config.model_config.tokenizer, self.req_states.vocab_size),
            **self._sizes,
        )
        self.step = GuidedStep(value_source(source), slots, config)
        if self.device.type == "cuda":
            self.step.warm_up(progress=progress)
            warm_up(self.device)

    def _new_report(self) -> Report:
        """The report of the first rank."""
        file, metrics = self.settings.predictions, None
        request_ids = {} if file is None else calling_runner().req_states.index_to_req_id
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # the engine's /metrics reads this directory
            metrics = Metrics(model_name=str(self.config.model_config.served_model_name))
        return Report(self.device, metrics, file, request_ids)

    def _keep_prompts(self) -> None:
        """Store the tokens of the request being added, which the engine does not pass to processors."""
        tokens = self.req_states.all_token_ids
        stage_write = tokens.stage_write

        def keeping(index: int, start: int, x: Sequence[int]) -> None:
            self._prompt = index, x
            stage_write(index, start, x)

        tokens.stage_write = keeping

    def _replace_logprobs(self) -> None:
        """Make the engine compute log-probabilities of requests with ``guided_logprobs`` from the guided rows."""
        self._guided_rows = list[tuple[torch.Tensor, ...]]()
        for module in (sampler, rejection_sampler):
            compute_topk_scores = module.compute_topk_scores

            def guided(logits: torch.Tensor, *args: Any, compute: Callable = compute_topk_scores, **kwargs: Any) -> Any:
                for rows, token_ids, probs in self._guided_rows:
                    logits = guided_logits(logits, rows, token_ids, probs)
                self._guided_rows.clear()
                return compute(logits, *args, **kwargs)

            module.compute_topk_scores = guided

    # --- requests ---

    def add_request(self, slot: int, params: SamplingParams, guidance: GuidanceParams | None) -> bool:
        """Admit a request into a slot of the engine. Returns whether it is guided."""
        if self._is_known[slot]:  # the engine does not report when requests leave
            self._remove(slot)
        if guidance is None:
            return False
        self.kept_free = None
        self._is_known[slot], self._needs_step[slot] = True, guidance.needs_step
        self._wants_length[slot] = guidance.return_values and self.report.file is not None
        self._wants_logprobs[slot] = guidance.guided_logprobs and params.num_logprobs is not None
        index, tokens = self._prompt
        if index != slot:
            raise RuntimeError(f"vLLM must pass the tokens of the request in slot {slot}, got tokens for slot {index}")
        prompt_len = int(self.req_states.prompt_len.np[slot])
        self._admit(slot, tokens)
        # ``all_stop_token_ids`` has the end of sequence even with ``ignore_eos``.
        ends = (params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
        self.step.add_request(
            slot,
            guidance,
            set(sorted({*ends, *self.settings.stop_tokens(params.stop)})[:MAX_END_TOKENS]),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            span=guidance.span_state(tokens[:prompt_len], tokens[prompt_len:], self.step.text_breaks),
        )
        numbers = torch.tensor([params.temperature, params.top_p, params.min_p]).view(torch.int32)
        top_k = torch.tensor([params.top_k]).clamp(0, 2**31 - 1).int()
        self._sampling[slot] = to_device(torch.cat([top_k, numbers]), self.device)
        return True

    def _admit(self, slot: int, tokens: Sequence[int]) -> None:
        """Prepare the value source for a request with these tokens."""

    def _remove(self, slot: int) -> None:
        """Remove the request of a slot."""
        self._flags[:, slot] = False
        self.step.remove_request(slot)

    def _lose(self, slots: Sequence[int] | np.ndarray) -> None:
        """End the guidance of requests, except for spans and token temperatures, which all ranks apply."""
        self._is_lost[slots] = True

    def count_failure(self, what: str) -> None:
        """Count the exception that is being handled. Only the first one is logged."""
        if not self.fallbacks:
            logger.exception("LenVM: %s. Further failures are only counted.", what)
        self.fallbacks += 1
        if self.report.metrics is not None:
            self.report.metrics.fallbacks.inc()

    # --- a step ---

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Draw the next tokens of guided rows, and mask all other tokens in these rows."""
        self._guided_rows.clear()
        places, has_drafts = np.flatnonzero(self._is_known[ctx.idx_mapping_np]), len(ctx.pos) > len(ctx.idx_mapping_np)
        size = self._part if has_drafts else self.rows
        # vLLM may verify drafts in parts, in views of the step's rows.
        is_last = ctx.pos.storage_offset() + len(ctx.pos) == ctx.pos.untyped_storage().nbytes() // ctx.pos.itemsize
        for first in range(0, len(places), size):
            if has_drafts:
                part = Part.of(ctx, places[first : first + size], 1 + self.drafts)
            else:
                part = Part.whole(ctx, self._row_numbers[: len(ctx.pos)])
            self._guide(logits, part, is_last and first + size >= len(places))
        try:
            self.report.collect()
        except Exception:
            logger.exception("LenVM: steps could not be counted; metrics and predicted lengths stop")
            self.report = Report(self.device)
            self._wants_length[:] = False
        return logits

    def _guide(self, logits: torch.Tensor, part: Part, is_last: bool) -> None:
        """Guide some requests of a batch. Strides count the last part of a step.

        If this fails on a rank, the requests lose guidance on it. All ranks use the tokens of the first rank.
        """
        slots, tokens = part.host_slots, None
        try:
            tokens = self._draw(logits, part, is_last)
        except Exception:
            self.count_failure("a step failed; its requests lost guidance")
            self._lose(slots[self._is_known[slots]])
        if not self._needs_step[slots].any():
            return
        if tokens is None:
            tokens = torch.full((len(logits),), -1, dtype=torch.int32, device=self.device)
        if self._group is not None:
            self._group.broadcast(tokens)
        leave_only(logits, tokens)

    def _draw(self, logits: torch.Tensor, part: Part, is_last: bool) -> torch.Tensor | None:
        """Drawn tokens, int32 ``[rows]``, -1 in rows drawn by the engine; None if the engine draws all rows."""
        ctx, slots, scores = part.ctx, part.slots, part.by_node(logits)
        lengths = part.last(ctx.pos).int() + 1
        tokens, new_lens = part.last(ctx.input_ids), None
        if self.drafts:  # after a restart, any of these may be new
            new_lens = lengths.clamp(max=1 + self.drafts)
            tokens = self.new_tokens(slots, lengths, new_lens)
        states = None if self._states is None else part.by_node(self._states.of_rows(ctx))
        batch = StepBatch(tokens, slots, lengths, new_lens, states=states, counts=is_last)
        prepared = self.step.prepare(scores, batch, part.drafts(ctx.input_ids))
        if prepared.is_changed and scores is not logits:
            logits.copy_(part.by_row(scores, logits))
        if not (self._needs_step & ~self._is_lost)[part.host_slots].any():
            return None
        with self.report.stopwatch.running():
            self._read_prompts(part, lengths)
            # The engine discards draws after unfinished prompts.
            is_whole, is_lost = self._is_whole(part), self._is_lost[part.host_slots]
            active = to_device(is_whole & ~is_lost, self.device) if is_lost.any() or not is_whole.all() else None
            prepared = prepared._replace(batch=batch._replace(active=active))
            sampling_bits = self._sampling[slots]
            temperature, top_p, min_p = sampling_bits[:, 1:].view(torch.float32).unbind(1)
            sampling = Sampling(sampling_bits[:, 0], top_p, min_p, temperature, is_logits=True, sample=True)
            self._predict_begun(prepared, part)
            counts = self.report.metrics is not None
            faults = self.step.faults[slots] if counts else None
            verify = "same_draws" if counts and prepared.drafts is not None else None
            output = self.step.step(prepared, sampling, verify=verify)
        assert output.tokens is not None
        if faults is not None:
            is_drawn = to_device(is_whole, self.device)
            self.report.note(output, prepared.drafts, self.step.faults[slots] > faults, is_drawn)
        if self.settings.trace is not None:
            trace_nodes(self.settings.trace, self.req_states.all_token_ids.gpu, ctx, output, part.at)
        drawn, wants_logprobs = part.by_row(output.tokens, -1), self._wants_logprobs[part.host_slots]
        if wants_logprobs.any():
            is_wanted = to_device(wants_logprobs.repeat(part.rows.shape[1]), self.device)
            rows, token_ids = part.by_row(is_wanted, False) & (drawn >= 0), part.by_row(output.candidates.token_ids, 0)
            self._guided_rows.append((rows, token_ids, part.by_row(output.probs, 0)))
        return drawn

    def _read_prompts(self, part: Part, lengths: torch.Tensor) -> None:
        """Pass the prompts of a step to a value model; ``lengths [B]`` are lengths of the sequences."""

    def _predict_begun(self, prepared: PreparedStep, part: Part) -> None:
        """Predict the output lengths of requests if their prompt ends in this step."""
        begun = np.flatnonzero(self._wants_length[part.host_slots] & self._is_whole(part))
        if not len(begun):
            return
        slots = part.host_slots[begun]
        self._wants_length[slots] = False
        lengths = self._predict(prepared)[to_device(begun, self.device)]
        self.report.note_predicted({int(slot): int(self.req_states.prompt_len.np[slot]) for slot in slots}, lengths)

    def _is_whole(self, part: Part) -> np.ndarray:
        """bool ``[B]``; False if a later step continues the request's prompt."""
        return part.ctx.seq_lens_upper_bound_np[part.places] >= self.req_states.prefill_len.np[part.host_slots]

    def _predict(self, prepared: PreparedStep) -> torch.Tensor:
        """Predicted output lengths, fp32 ``[B]``. A probe predicts from the most probable first token."""
        batch, logits = prepared.batch, prepared.logits
        assert logits is not None and batch.states is not None
        nodes, lengths = len(logits) // len(batch.lengths), batch.lengths + 1
        first, states = logits[::nodes].argmax(1), batch.states[::nodes]
        return 1 + self.step.predict(StepBatch(first, batch.table_rows, lengths, states=states))

    def new_tokens(self, slots: torch.Tensor, lengths: torch.Tensor, new_lens: torch.Tensor) -> torch.Tensor:
        """The last ``new_lens`` tokens of each sequence, int32 ``[B, 1 + D]``, with arbitrary padding."""
        all_token_ids = self.req_states.all_token_ids.gpu
        positions = (lengths - new_lens)[:, None] + torch.arange(1 + self.drafts, device=self.device)
        return all_token_ids[slots[:, None], positions.clamp(max=all_token_ids.shape[1] - 1)]
