"""Guidance in SGLang with ``none``, and the code shared by all sources of values.

Just before the engine's sampler, a guided step (:class:`lenvm_kernels.step.GuidedStep`) draws the tokens of guided
requests and masks all other tokens in their rows of the logits (:func:`leave_only`). The sampler then returns the drawn
tokens at any temperature and with any filter. Only images and the trace make a host-device sync, so the overlapping
scheduler stays ahead.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.environ import envs
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.engines.report import OUTCOME, EndMetrics, Metrics, StepReport, Stopwatch, not_finite, trace_batch
from lenvm_kernels.engines.settings import MAX_DELTA, MAX_END_TOKENS, NONE, Settings
from lenvm_kernels.engines.tensors import guided_logits, last_tokens, leave_only, to_device, warm_up
from lenvm_kernels.engines.tokenizers import load_text_breaks
from lenvm_kernels.step import EngineSlots, GuidedStep, PreparedStep, Sampling, StepBatch, StepOutput, value_source
from lenvm_kernels.types import Drafts, VerifiedTokens
from lenvm_kernels.values import LengthProbe, ValueModel

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    Batch: TypeAlias = ForwardBatch | ScheduleBatch

logger = logging.getLogger(__name__)

# Kind and function of each hook, by target. The function takes the target's result (AFTER) or the target (AROUND), then
# the target's arguments.
Hooks = dict[str, tuple[str, Callable]]
# Accepted values of options of the engine, and the reason.
EngineOptions = dict[str, tuple[tuple[Any, ...], str]]
NOT_TRIED = "not tried"
# The engine's default limit of requests.
MAX_REQUESTS = 4096
# Sent to all ranks instead of tokens if the step of the first rank has failed.
LOST = -2
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"


class SGLangGuide:
    """The guidance of a scheduler process, in which one model runner samples.

    Attributes:
        settings: settings of the plugin.
        device: device of the base model.
        drafts: draft tokens per request and step.
        model: probe or value model. If None, there are no values.
        step: the guided step, set by :meth:`take_slots`.
        runner: model runner of the base model, set by :meth:`take_slots`.
        ranks: tensor-parallel ranks that draw the same tokens, or None if there is only one.
        grown_by: new tokens since the last step and their number, per table row. None without drafts.
        metrics, ends: metrics of this process; None without ``--enable-metrics``.
        stopwatch: times steps and prompts for the metrics.
        fallbacks: number of failed steps and prompts.
        failure: reason for rejecting requests with guidance. If None, they are accepted.
        node_bytes: bytes per node of a request, in addition to the step.
    """

    step: GuidedStep
    runner: ModelRunner
    node_bytes = 0

    def __init__(
        self, settings: Settings, device: torch.device, drafts: int = 0, model: LengthProbe | ValueModel | None = None
    ) -> None:
        self.settings, self.device, self.drafts, self.model = settings, device, drafts, model
        self.ranks: GroupCoordinator | None = None
        self.grown_by: tuple[torch.Tensor, torch.Tensor] | None = None
        self.metrics: Metrics | None = None
        self.ends: EndMetrics | None = None
        self.fallbacks = 0
        self.failure: str | None = None
        self._sizes = dict(max_delta=MAX_DELTA + drafts, max_drafts=drafts)
        self.stopwatch = Stopwatch(device, is_on=False)
        self._reserved: torch.Tensor | None = None
        self._table_rows: set[int] = set()  # rows of requests in the guidance table
        self._rows = self._ones = torch.empty(0)  # numbers of a batch's rows, and 1 token each
        self._batch: ForwardBatch | None = None  # being sampled by the engine
        self._drawn: Drawn | None = None  # the last step; None if it failed or was not needed
        self._agreed: torch.Tensor | None = None  # int32 [rows]; its tokens on all ranks, None if it was not needed

    @property
    def hooks(self) -> Hooks:
        """Hooks of this process."""
        return {
            f"{_RUNNER}.alloc_memory_pool": ("AFTER", self.take_slots),
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("AFTER", self.admit_requests),
            f"{_RUNNER}.sample": ("AROUND", self.sample),
            "sglang.srt.layers.sampler.Sampler.forward": ("AROUND", self.draw),
            f"{_STREAMER}._GenerationStreamAccumulator.to_payload": ("BEFORE", self.add_outcomes),
        }

    # --- memory ---

    def num_bytes(self, engine: ModelConfig, requests: int, slots: int = 0) -> int:
        """Bytes for steps of ``requests`` requests and for the cache with the ``slots`` of the engine's pool."""
        sizes = dict(requests=requests, max_len=engine.context_len, vocab_size=engine.vocab_size, **self._sizes)
        nodes = requests * (1 + self.drafts)
        return self.settings.working_bytes(self.model, **sizes) + nodes * self.node_bytes + self.cache_bytes(slots)

    def cache_bytes(self, slots: int) -> int:
        """Bytes of the value model's cache with the ``slots`` of the engine's pool."""
        return 0

    def reserve(self, runner: ModelRunner, max_requests: int | None) -> None:
        """Allocate the memory of steps until :meth:`take_slots`, so that the engine's pool leaves room for it."""
        if self.device.type == "cuda":
            num_bytes = self.num_bytes(runner.model_config, max_requests or MAX_REQUESTS)
            self._reserved = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def take_slots(self, _: Any, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        """After the engine has allocated its pools: create the guided step on its slots and slot table."""
        if runner.is_draft_worker:
            return
        pool, settings, options = runner.token_to_kv_pool, self.settings, resolved_view(runner.server_args)
        slots = pool.size + pool.page_size  # slot 0 of the engine is for padding, the last page is full
        slot_table, engine = runner.req_to_token_pool.req_to_token, runner.model_config
        self.runner, self._reserved = runner, None
        config = settings.step_config(
            has_graphs=not cuda_graph_fully_disabled(),
            vocab_size=engine.vocab_size,
            max_requests=runner.max_running_requests,
            text_breaks=load_text_breaks(options.tokenizer_path, engine.vocab_size),
            **self._sizes,
        )
        self.step = GuidedStep(value_source(self.model), EngineSlots(slot_table, slots), config)
        if self.device.type == "cuda":
            runner.forward_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(runner.forward_stream):  # only the stream of later steps can reuse the memory
                self.step.warm_up()
                warm_up(self.device)
        if self.drafts:
            grown_by = torch.zeros(len(slot_table), 2 + self.drafts, dtype=torch.int32, device=self.device)
            self.grown_by = grown_by[:, 1:], grown_by[:, 0]
        parallel = get_parallel()
        if parallel.attn_tp_size > 1:
            self.ranks = parallel.attn_tp_group
        if options.enable_metrics and parallel.attn_tp_rank == 0:
            labels = dict(model_name=options.served_model_name, dp_rank=parallel.dp_rank or 0, tp_rank=parallel.tp_rank)
            self.metrics, self.ends = Metrics(**labels), EndMetrics(**labels) if parallel.pp_rank == 0 else None
            self.metrics.cache_bytes.set(self.cache_bytes(slots))
            self.stopwatch.is_on = True
        rows, candidates = self.step.max_requests, self.step.config.max_candidates
        gib, graphs = self.num_bytes(engine, rows, slots) / 2**30, "with" if self.step.config.graphs else "without"
        text = "LenVM: guidance is on with values of %s; %d rows, %d candidates, %.2f GiB, %s CUDA graphs"
        logger.info(text, settings.value_model or NONE, rows, candidates, gib, graphs)

    def discard_read_done(self) -> None:
        """Make the scheduler wait for the step before it overwrites its slot table, which only a value model reads."""

    # --- requests ---

    def note_request(self, req: Req) -> None:
        """Called after a request was created in the scheduler."""

    def note_batch(self, batch: Batch, reqs: Sequence[Req]) -> None:
        """Store the requests of a batch of the engine in the batch."""
        batch.lenvm_all = list(reqs)
        batch.lenvm_reqs = [req for req in reqs if req.lenvm_guidance is not None]
        batch.lenvm_failed = False

    def admit_requests(
        self, batch: ForwardBatch, _: type, scheduled: ScheduleBatch, runner: ModelRunner, *args: Any, **kwargs: Any
    ) -> None:
        """After a batch was prepared for a model: admit its requests."""
        if runner.is_draft_worker:
            return
        reqs, is_prefill = scheduled.reqs, batch.forward_mode.is_extend_without_speculative()
        decoding = {id(req) for req in scheduled.decoding_reqs or () if is_prefill}  # in a mixed batch
        self.note_batch(batch, reqs)
        batch.lenvm_decoding = [id(req) in decoding for req in reqs]
        self.admit(batch, [req for req in reqs if id(req) not in decoding], is_prefill=is_prefill)

    def admit(self, batch: ForwardBatch, reqs: list[Req], *, is_prefill: bool) -> None:
        """Write requests into the table: all requests of a prefill batch, also after a retraction, and in other batches
        requests that were prefilled by another server."""
        if not batch.lenvm_reqs and not self._table_rows:
            return
        with self.failing_softly(batch):
            for req in reqs:
                if req.kv.req_pool_idx is None:  # has ended, but is still in the overlapping batch
                    continue
                table_row = int(req.kv.req_pool_idx)
                if not is_prefill and req.lenvm_row == table_row:
                    continue
                req.lenvm_row = table_row
                if req.lenvm_guidance is not None:
                    self._admit(req, table_row)
                elif table_row in self._table_rows:
                    self._clear(table_row)

    def _admit(self, req: Req, table_row: int) -> None:
        params, seed = req.lenvm_guidance, req.sampling_params.sampling_seed
        req.lenvm_broken_before = req.lenvm_broken  # the table counts from 0
        self.step.add_request(
            table_row,
            params,
            end_tokens(req, self.settings.stop_tokens(req.sampling_params.stop_strs)),
            prompt_len=len(req.origin_input_ids),
            seed=seed_of(req.rid) if seed is None else seed,
            span=params.span_state(req.origin_input_ids, req.output_ids, self.step.text_breaks),
        )
        self._table_rows.add(table_row)
        if self.metrics is not None and self.model is not None and req.lora_id is not None:
            self.metrics.lora_requests.inc()

    def _clear(self, table_row: int) -> None:
        self.step.remove_request(table_row)
        self._table_rows.discard(table_row)

    def lose(self, reqs: Sequence[Req]) -> None:
        """End the guidance of requests. The value model may not have computed all their tokens, so that these are not
        inserted into the radix cache."""
        for req in reqs:
            if req.lenvm_guidance is not None:
                req.lenvm_lost, req.lenvm_guidance = req.lenvm_guidance, None
                if self.settings.reads_tokens:
                    req.skip_radix_cache_insert = True
                if req.kv.req_pool_idx is not None:  # None after it has left
                    self._clear(int(req.kv.req_pool_idx))

    def add_outcomes(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        """Before outputs are sent: add lists with the guidance outcome of requests that have ended."""
        try:
            outcomes = [[*self._outcome(req)] if req.finished() else [] for req in outputs.output_reqs]
        except Exception:  # a report must not end the engine
            logger.exception("LenVM: responses lack the outcome of their guidance")
            return
        if any(outcomes):
            outputs.customized_info[OUTCOME] = outcomes

    def _outcome(self, req: Req) -> Iterator[dict[str, Any]]:
        if (params := req.lenvm_guidance or req.lenvm_lost) is None:
            return
        lost, output = not_finite(req.lenvm_broken), req.output_ids_through_stop
        if outcome := params.outcome(req.origin_input_ids, output, end_tokens(req), self.step.text_breaks):
            if self.ends is not None:
                self.ends.count(outcome, req.finished_reason.to_json()["type"])
            yield outcome | {"lost": lost if req.lenvm_lost is None else "a guided step failed"}

    # --- steps ---

    def sample(self, original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
        """Around the sampling of a batch, in which the engine calls :meth:`draw`."""
        if not getattr(batch, "lenvm_reqs", None):  # e.g. a batch for graph capture
            return original(runner, logits_output, batch)
        self._batch, self._drawn, self._agreed = batch, None, None
        try:
            tokens = original(runner, logits_output, batch)
        finally:
            self._batch = None
        if len(self._rows) < len(tokens):
            self._rows = torch.arange(len(tokens), device=self.device)
            self._ones = torch.ones_like(self._rows, dtype=torch.int32)
        lens, rows = self._ones[: len(tokens)], self._rows[: len(tokens)]
        self.report(batch, logits_output, VerifiedTokens(tokens[:, None], lens, rows[:, None]))
        self.discard_read_done()
        return tokens

    def draw(
        self,
        original: Callable,
        sampler: Sampler,
        logits_output: LogitsProcessorOutput,
        info: SamplingBatchInfo,
        return_logprob: bool,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Around the engine's sampler, after penalties, biases and grammars: draw the tokens of guided requests.

        Returned log-probabilities are computed from the unmasked logits.
        """
        if (batch := self._batch) is None:
            return original(sampler, logits_output, info, return_logprob, *args, **kwargs)
        logits_output.next_token_logits = logits = sampler._preprocess_logits(logits_output.next_token_logits, info)
        rows = last_tokens(batch, len(logits))
        unmasked = self.leave_drawn(batch, logits, rows, info, copies=return_logprob)
        if unmasked is not None:
            kwargs.setdefault("logprob_logits", unmasked)
        if info.has_custom_logit_processor:  # already applied above
            info = copy.copy(info)
            info.has_custom_logit_processor = False
        return original(sampler, logits_output, info, return_logprob, *args, **kwargs)

    def leave_drawn(
        self,
        batch: Batch,
        logits: torch.Tensor,
        rows: StepBatch,
        info: SamplingBatchInfo,
        drafts: Drafts | None = None,
        *,
        copies: bool,
    ) -> torch.Tensor | None:
        """Draw the tokens of guided requests, and mask all other tokens in their rows of the logits, in place.

        Args:
            batch, info: the engine's batch and its sampling parameters.
            logits: ``[B, V]``, or ``[B (1 + D), V]`` with drafts.
            rows, drafts: inputs of the step.
            copies: whether to return a copy of the unmasked logits, if any request needs a step.
        """
        self._drawn = self._agreed = None
        with self.failing_softly(batch):
            prepared = self.step.prepare(logits, rows._replace(states=self.states_of(logits)), drafts)
            if needs_step(batch) and not batch.lenvm_failed:
                is_prompt = drafts is None and not batch.forward_mode.is_decode()
                self._drawn = self._run(batch, prepared, info, is_prompt=is_prompt)
        if not needs_step(batch):
            return None
        if self._drawn is None or (tokens := self._drawn.output.tokens) is None:
            tokens = torch.full((len(logits),), LOST, dtype=torch.int32, device=self.device)
        if self.ranks is not None:
            tokens = self.ranks.broadcast(tokens.contiguous(), src=0)
        self._agreed, unmasked = tokens, self._unmasked(batch, logits, tokens, info) if copies else None
        leave_only(logits, tokens)
        return unmasked

    def _unmasked(
        self, batch: Batch, logits: torch.Tensor, tokens: torch.Tensor, info: SamplingBatchInfo
    ) -> torch.Tensor:
        """A copy of the logits for log-probabilities, which are guided in requests with ``guided_logprobs``."""
        guidance = [req.lenvm_guidance for req in batch.lenvm_all]
        is_wanted = [params is not None and params.guided_logprobs for params in guidance]
        if self._drawn is None or not any(is_wanted):
            return logits.clone()
        nodes, output = len(logits) // len(is_wanted), self._drawn.output
        rows = to_device(np.repeat(is_wanted, nodes), self.device) & (tokens >= 0)
        is_divided = not (info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get())
        temperature = info.temperatures.repeat_interleave(nodes, 0) if is_divided else 1.0
        return guided_logits(logits, rows, output.candidates.token_ids, output.probs, temperature)

    def states_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The base model's states in the rows of the logits. None without a probe."""
        return None

    def _run(self, batch: Batch, prepared: PreparedStep, info: SamplingBatchInfo, *, is_prompt: bool) -> Drawn:
        """The guided step of a batch. ``is_prompt`` is True if it draws the first tokens after prompts."""
        rows = prepared.batch
        wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
        temperature, prompt_lengths = info.temperatures.flatten(), None
        sampling = Sampling(info.top_ks, info.top_ps, info.min_ps, temperature, is_logits=True, sample=True)
        with self.stopwatch.running():
            if wants_values and is_prompt and self.step.values.needs_tokens:
                prompt_lengths = self.step.predict(rows)[:, None]
            output = self.step.step(prepared, sampling)
        if self.metrics is not None:
            self.metrics.guided_steps.inc()
        return Drawn(rows, output, wants_values, prompt_lengths)

    def report(self, batch: Batch, logits_output: LogitsProcessorOutput, chosen: VerifiedTokens) -> None:
        """After the engine has chosen tokens: append a report to its output, which the host reads later.

        ``nodes`` of the chosen tokens ``[B, N]`` are rows of the step, int64 and not negative.
        """
        drawn, agreed = self._drawn, self._agreed
        if agreed is not None and self.ranks is not None:
            append(logits_output, LostGuidance(agreed, self))
        if drawn is None or agreed is None or not batch.lenvm_reqs:
            return
        (tokens, lens, nodes), rows, output = chosen, drawn.batch, drawn.output
        is_verified, lengths, prompt_lengths = nodes.shape[1] > 1, None, drawn.prompt_lengths
        with self.failing_softly(batch), self.stopwatch.running():
            if self.grown_by is not None:
                grown, count = self.grown_by
                grown[rows.table_rows, : tokens.shape[1]] = tokens.int()
                count[rows.table_rows] = lens
            if drawn.wants_values and (self.step.values.needs_tokens or not is_verified):
                lengths = self.step.predict(rows._replace(tokens=tokens, lengths=rows.lengths + lens, new_lens=lens))
            elif drawn.wants_values and output.remaining_lengths is not None:
                lengths = output.remaining_lengths[nodes]
            if lengths is not None and not self.step.values.needs_tokens:  # only read after a prompt
                prompt_lengths = 1 + lengths[:, :1]
        if batch.lenvm_reqs:
            faults, candidates = self.step.faults[rows.table_rows], output.candidates
            status = lost_mass = None
            if self.metrics is not None:
                status, lost_mass = candidates.status[nodes], candidates.lost_mass[nodes]
            numbers = status, lost_mass, faults, lengths, prompt_lengths
            append(logits_output, StepReport(*numbers, self.metrics, self.stopwatch.take()))
        if self.settings.trace is not None:
            trace_batch(self.settings.trace, batch, rows.lengths, output, agreed, chosen)

    @contextmanager
    def failing_softly(self, batch: Batch) -> Iterator[None]:
        """On an error inside, end the guidance of the batch's requests instead of the engine.

        The value model has not computed some of their tokens, so guidance is off until they end. Tensor-parallel ranks
        must schedule identically, so the first rank sends :data:`LOST` instead of tokens, and all ranks end the
        guidance when the host reads it. A failure on another rank has no effect, because its draws are not used.
        """
        try:
            yield
        except Exception:
            if not self.fallbacks:
                logger.exception("LenVM: a step failed; its requests lost guidance. Further failures are only counted.")
            self.count_failure()
            if self.ranks is None:
                self.lose(batch.lenvm_reqs)
                batch.lenvm_reqs = []
            else:
                batch.lenvm_failed = True

    def count_failure(self) -> None:
        """Count a failed step or prompt."""
        self.fallbacks += 1
        if self.metrics is not None:
            self.metrics.fallbacks.inc()


class Drawn(NamedTuple):
    """A guided step of a batch."""

    batch: StepBatch
    output: StepOutput
    wants_values: bool  # whether any request has return_values
    prompt_lengths: torch.Tensor | None  # fp32 [B, 1]; None if not requested, or with a probe


@dataclass(frozen=True)
class LostGuidance:
    """Auxiliary output that makes all ranks end the guidance of a batch if its step failed on the first rank."""

    tokens: torch.Tensor
    guide: SGLangGuide

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> LostGuidance:
        """See SGLang's ``DeviceAuxiliaryOutput``."""
        return replace(self, tokens=copy_tensor(self.tokens))

    def consume(self, batch: ScheduleBatch, commits: Any) -> None:
        """See SGLang's ``HostAuxiliaryOutput``."""
        if bool((self.tokens == LOST).any()):
            self.guide.lose(batch.reqs)


def append(logits_output: LogitsProcessorOutput, output: Any) -> None:
    """Append an auxiliary output. A pipeline stage cannot pass it on, and the engine would crash."""
    if get_parallel().pp_size == 1:
        others = logits_output.auxiliary_device_output
        logits_output.auxiliary_device_output = append_auxiliary_output(others, output)


def needs_step(batch: Batch) -> bool:
    """Whether any request of a batch takes part in guided steps."""
    return any(req.lenvm_guidance.needs_step for req in batch.lenvm_reqs)


def check_options(options: Any, accepted_values: EngineOptions, feature: str) -> None:
    """Raise ValueError unless ``feature`` can be combined with the engine's options."""
    for option, (accepted, reason) in accepted_values.items():
        if (given := getattr(options, option)) not in accepted:
            texts = ", ".join(map(str, accepted))
            one_of = "one of " * (len(accepted) > 1)
            raise ValueError(f"{option} must be {one_of}{texts} together with {feature}, got {given}: {reason}")


def seed_of(text: str) -> int:
    """A non-negative seed that only depends on a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def end_tokens(req: Req, stops: Set[int] = frozenset()) -> set[int]:
    """Tokens with value 0: the tokens at which the engine ends a request's output, and ``stops`` of stop strings."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:  # also disables stop tokens
        return set(stops)
    ids = {*stops, *(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    ids |= {getattr(tokenizer, "eos_token_id", None), *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return set(sorted(ids - {None})[:MAX_END_TOKENS])
