"""The guided step of SGLang's requests, called by the hooks of :mod:`lenvm_kernels.engines.sglang.hooks`.

The step draws the tokens of guided requests from the logits that the engine is about to sample from, and leaves only
these tokens in their rows (:func:`leave_only`). The engine's sampler then returns them at any temperature and with any
filter. The computation is in :class:`lenvm_kernels.step.GuidedStep`. Only images and the trace make a host-device sync,
so that the overlapping scheduler stays ahead.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.engines.one_token import leave_only
from lenvm_kernels.engines.report import Metrics, StepReport, Stopwatch, trace_batch
from lenvm_kernels.engines.settings import NONE, Settings
from lenvm_kernels.engines.sglang.batch import last_tokens
from lenvm_kernels.engines.sglang.requests import end_tokens, seed_of
from lenvm_kernels.engines.tokenizers import load_text_breaks
from lenvm_kernels.step import EngineSlots, GuidedStep, PreparedStep, Sampling, StepBatch, StepOutput, value_source
from lenvm_kernels.types import VerifiedTokens
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

logger = logging.getLogger(__name__)

# Maximum number of tokens per request, without drafts, that one step computes.
MAX_DELTA = 16
# The engine's own limit of requests, if the user sets none.
MAX_REQUESTS = 4096
# In place of the tokens of a batch, on every rank: the step of the first rank has failed.
LOST = -2


class SGLangGuide:
    """The guidance of one scheduler process: with ``none``, and the part that all sources of values share.

    Args:
        settings: settings of the plugin.
        device: device of the base model.
        drafts: draft tokens per request and step.
        model: what computes values. If None, nothing does.

    Attributes:
        settings, device, drafts, model: as above.
        value_model: the ``model``, if it is a value model, else None.
        step: the guided step, set by :meth:`take_slots`.
        runner: model runner of the base model, set by :meth:`take_slots`.
        has_slots: whether :meth:`take_slots` was called.
        grown_by: with drafts, the new tokens since the last step and their number, per table row. None without.
        metrics: metrics of this process; None without ``--enable-metrics``.
        fallbacks: number of failures of steps and prompts.
        failure: why requests with guidance are rejected. If None, they are accepted.
    """

    step: GuidedStep
    runner: ModelRunner

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        drafts: int = 0,
        model: LengthProbe | ValueModel | None = None,
    ) -> None:
        self.settings, self.device, self.drafts, self.model = settings, device, drafts, model
        self.value_model = model if isinstance(model, ValueModel) else None
        self.has_slots = False
        self.grown_by: tuple[torch.Tensor, torch.Tensor] | None = None
        self.metrics: Metrics | None = None
        self.fallbacks = 0
        self.failure: str | None = None
        self._stopwatch = Stopwatch(device)
        self._reserved: torch.Tensor | None = None
        self._table_rows: set[int] = set()  # rows of requests in the guidance table
        self._ranks: GroupCoordinator | None = None  # tensor-parallel ranks, if there are several
        # The batch that the engine is sampling, its step, and the tokens that all ranks have agreed on.
        self._batch: ForwardBatch | None = None
        self._drawn: Drawn | None = None
        self._agreed: torch.Tensor | None = None

    @classmethod
    def load(
        cls, settings: Settings, runner: ModelRunner, options: Any, device: torch.device, drafts: int
    ) -> SGLangGuide:
        """The guidance of a base model that was just loaded.

        Args:
            settings, device, drafts: as in the class.
            runner: model runner of the base model.
            options: the engine's options, with its defaults.
        """
        guide = cls(settings, device, drafts)
        guide.reserve(runner, options.max_running_requests)
        return guide

    @property
    def hooks(self) -> dict[str, tuple[str, Callable]]:
        """Kind and function of further hooks, by target."""
        return {}

    # --- memory ---

    def num_bytes(self, engine: ModelConfig, requests: int, slots: int = 0) -> int:
        """Bytes that steps of ``requests`` requests take, and what is cached for the ``slots`` of the engine's pool."""
        return self.settings.working_bytes(
            self.model,
            requests=requests,
            max_len=engine.context_len,
            vocab_size=engine.vocab_size,
            max_delta=MAX_DELTA + self.drafts,
            max_drafts=self.drafts,
        )

    def reserve(self, runner: ModelRunner, max_requests: int | None) -> None:
        """Hold the memory of steps until :meth:`take_slots`, so that the engine's pool leaves room for it."""
        if self.device.type == "cuda":
            num_bytes = self.num_bytes(runner.model_config, max_requests or MAX_REQUESTS)
            self._reserved = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def take_slots(self, runner: ModelRunner) -> None:
        """Create the guided step on the slots and the slot table that the engine has just allocated."""
        pool, settings, options = runner.token_to_kv_pool, self.settings, resolved_view(runner.server_args)
        slots = pool.size + pool.page_size  # slot 0 of the engine is for padding, the last page is full
        self.runner, self._reserved = runner, None
        self.step = GuidedStep(
            value_source(self.model),
            EngineSlots(runner.req_to_token_pool.req_to_token, slots),
            settings.step_config(
                has_graphs=not cuda_graph_fully_disabled(),
                vocab_size=runner.model_config.vocab_size,
                max_requests=runner.max_running_requests,
                max_delta=MAX_DELTA + self.drafts,
                max_drafts=self.drafts,
                text_breaks=load_text_breaks(options.tokenizer_path, runner.model_config.vocab_size),
            ),
        )
        self.has_slots = True
        if self.device.type == "cuda":
            runner.forward_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(runner.forward_stream):  # only the stream of later steps can reuse the memory
                self.step.warm_up()
        if self.drafts:
            table_rows = runner.req_to_token_pool.req_to_token.shape[0]
            grown_by = torch.zeros(table_rows, 2 + self.drafts, dtype=torch.int32, device=self.device)
            self.grown_by = grown_by[:, 1:], grown_by[:, 0]
        self.join_ranks()
        parallel = get_parallel()
        if options.enable_metrics and parallel.attn_tp_rank == 0:
            self.metrics = Metrics(
                model_name=options.served_model_name, dp_rank=parallel.dp_rank or 0, tp_rank=parallel.tp_rank
            )
        logger.info(
            "LenVM: guidance is on with values of %s; %d rows, %d candidates, %.2f GiB, %s CUDA graphs",
            settings.value_model or NONE,
            self.step.max_requests,
            self.step.config.max_candidates,
            self.num_bytes(runner.model_config, self.step.max_requests, slots) / 2**30,
            "with" if self.step.config.graphs else "without",
        )

    def join_ranks(self) -> None:
        """Find the tensor-parallel ranks that draw the same tokens."""
        parallel = get_parallel()
        if parallel.attn_tp_size > 1:
            self._ranks = parallel.attn_tp_group

    def discard_read_done(self, runner: ModelRunner) -> None:
        """Before the engine overwrites its slot table: nothing, because the step does not read it."""

    # --- requests ---

    def note_request(self, req: Req) -> None:
        """After a request was created in the scheduler."""

    def admit(self, batch: ForwardBatch, reqs: list[Req], *, is_prefill: bool) -> None:
        """Write requests into the table: all requests of a prefill batch, also again after they were retracted, and
        requests of another batch that were prefilled by another server."""
        if not batch.lenvm_reqs and not self._table_rows:
            return
        with self.failing_softly(batch):
            for req in reqs:
                if req.kv.req_pool_idx is None:  # it has ended, and the overlapping scheduler still has it in the batch
                    continue
                table_row = int(req.kv.req_pool_idx)
                if not is_prefill and req.lenvm_row == table_row:
                    continue
                req.lenvm_row = table_row
                if req.lenvm_guidance is not None:
                    self._admit(req, table_row)
                elif table_row in self._table_rows:
                    self.clear(table_row)

    def _admit(self, req: Req, table_row: int) -> None:
        params, seed = req.lenvm_guidance, req.sampling_params.sampling_seed
        self.step.add_request(
            table_row,
            params,
            end_tokens(req),
            prompt_len=len(req.origin_input_ids),
            seed=seed_of(req.rid) if seed is None else seed,
            span=params.span_state(req.origin_input_ids, req.output_ids),
        )
        self._table_rows.add(table_row)
        if self.metrics is not None and self.model is not None and req.lora_id is not None:
            self.metrics.lora_requests.inc()

    def clear(self, table_row: int) -> None:
        """Make a row unguided."""
        self.step.remove_request(table_row)
        self._table_rows.discard(table_row)

    def lose(self, req: Req) -> None:
        """End the guidance of a request. Its tokens are not inserted into the radix cache, because the value model may
        not have computed them."""
        if req.lenvm_guidance is not None:
            req.lenvm_guidance, req.skip_radix_cache_insert = None, True
            if req.kv.req_pool_idx is not None:  # otherwise it has already left
                self.clear(int(req.kv.req_pool_idx))

    # --- steps ---

    @contextmanager
    def sampling(self, batch: ForwardBatch) -> Iterator[None]:
        """Active while the engine samples the tokens of ``batch``."""
        self._batch, self._drawn, self._agreed = batch, None, None
        try:
            yield
        finally:
            self._batch = None

    def leave_drawn(
        self, sampler: Sampler, logits_output: LogitsProcessorOutput, info: SamplingBatchInfo, *, copies: bool
    ) -> tuple[SamplingBatchInfo, torch.Tensor | None]:
        """Draw the tokens of guided requests, and leave only these in their rows of the logits.

        The engine's custom logit processors are applied before.

        Returns:
            The arguments of the engine's sampler, which must not apply custom logit processors again, and with
            ``copies`` the logits before tokens were masked.
        """
        batch = self._batch
        if batch is None:
            return info, None
        logits_output.next_token_logits = logits = sampler._preprocess_logits(logits_output.next_token_logits, info)
        if info.has_custom_logit_processor:
            info = copy.copy(info)
            info.has_custom_logit_processor = False
        tokens = self._draw(batch, logits, info)
        if tokens is None:
            return info, None
        unmasked = logits.clone() if copies else None
        leave_only(logits, tokens)
        return info, unmasked

    def _draw(self, batch: ForwardBatch, logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor | None:
        """int32 ``[B]``; drawn tokens, negative in rows that the engine must draw. None if no request needs a step."""
        with self.failing_softly(batch):
            rows = last_tokens(batch, len(logits))._replace(states=self.states_of(logits))
            prepared = self.step.prepare(logits, rows)
            if needs_step(batch) and not batch.lenvm_failed:
                self._drawn = self.run(batch, prepared, info, is_prompt=not batch.forward_mode.is_decode())
        if not needs_step(batch):
            return None
        self._agreed = tokens = self.agreed(self._drawn, len(logits))
        if self._drawn is not None and self.settings.trace is not None:
            trace_batch(self.settings.trace, batch, self._drawn.output._replace(tokens=tokens))
        return tokens

    def run(
        self, batch: ForwardBatch | ScheduleBatch, prepared: PreparedStep, info: SamplingBatchInfo, *, is_prompt: bool
    ) -> Drawn:
        """The guided step of a batch; ``is_prompt`` if first tokens after prompts are drawn."""
        rows, columns = prepared.batch, self.step.table.columns
        faults = columns.faults[rows.table_rows]
        wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
        temperature, prompt_lengths = info.temperatures.flatten(), None
        sampling = Sampling(info.top_ks, info.top_ps, info.min_ps, temperature, is_logits=True, sample=True)
        with self.timed():
            if wants_values and is_prompt and self.step.values.needs_tokens:
                prompt_lengths = self.step.predict(rows)
            output = self.step.step(prepared, sampling)
        if self.metrics is not None:
            self.metrics.guided_steps.inc()
        broken = columns.faults[rows.table_rows] > faults
        return Drawn(rows, output, broken, wants_values, is_prompt, prompt_lengths)

    def agreed(self, drawn: Drawn | None, rows: int) -> torch.Tensor:
        """int32 ``[rows]``; the drawn tokens of the first rank, on every rank. ``LOST`` if its step has failed."""
        tokens = None if drawn is None else drawn.output.tokens
        if tokens is None:
            tokens = torch.full((rows,), LOST, dtype=torch.int32, device=self.device)
        return tokens if self._ranks is None else self._ranks.broadcast(tokens.contiguous(), src=0)

    def report(
        self,
        batch: ForwardBatch | ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        drawn: Drawn | None,
        chosen: VerifiedTokens,
        agreed: torch.Tensor | None,
    ) -> None:
        """After the engine has chosen tokens: append a report on the step to its output, which the host reads later.

        Args:
            batch, logits_output: the engine's batch and its output.
            drawn: the step. If None, it has failed.
            chosen: the tokens ``[B, N]``, and how many of them each sequence grows by; ``nodes``, int64 ``[B, N]``, are
                rows of the step, and not negative.
            agreed: the tokens of all ranks. If None, no request needs a step.
        """
        if agreed is not None and self._ranks is not None:
            append(logits_output, LostGuidance(agreed, self))
        if drawn is None or not batch.lenvm_reqs:
            return
        (tokens, lens, nodes), rows, lengths, prompt_lengths = chosen, drawn.batch, None, drawn.prompt_lengths
        is_verified = nodes.shape[1] > 1
        with self.failing_softly(batch), self.timed():
            if self.grown_by is not None:
                grown, count = self.grown_by
                grown[rows.table_rows, : tokens.shape[1]] = tokens.int()
                count[rows.table_rows] = lens
            if drawn.wants_values and (self.step.values.needs_tokens or not is_verified):
                lengths = self.step.predict(rows._replace(tokens=tokens, lengths=rows.lengths + lens, new_lens=lens))
            elif drawn.wants_values and drawn.output.remaining_lengths is not None:
                lengths = drawn.output.remaining_lengths[nodes]
            if lengths is not None and drawn.is_prompt and prompt_lengths is None:
                prompt_lengths = 1 + lengths[:, 0]
        if batch.lenvm_reqs and (drawn.wants_values or self.metrics is not None):
            status, lost_mass = drawn.output.candidates.status[nodes], drawn.output.candidates.lost_mass[nodes]
            numbers = status, lost_mass, drawn.broken, lengths, prompt_lengths
            append(logits_output, StepReport(*numbers, self.metrics, self._stopwatch.take(), is_verified=is_verified))

    def report_sampled(self, batch: ForwardBatch, logits_output: LogitsProcessorOutput, tokens: torch.Tensor) -> None:
        """:meth:`report` after the engine has sampled ``tokens [B]``."""
        rows, ones = torch.arange(len(tokens), device=self.device), torch.ones_like(tokens, dtype=torch.int32)
        chosen = VerifiedTokens(tokens[:, None], ones, rows[:, None])
        self.report(batch, logits_output, self._drawn, chosen, self._agreed)

    def states_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The base model's states in the rows of the logits. None if the source reads none."""
        return None

    def timed(self) -> AbstractContextManager[None]:
        """Times the work that is launched inside, if there are metrics."""
        return nullcontext() if self.metrics is None else self._stopwatch.running()

    @contextmanager
    def failing_softly(self, batch: ForwardBatch | ScheduleBatch) -> Iterator[None]:
        """On an error inside, end the guidance of the batch's requests instead of the engine.

        Their next tokens would follow tokens that the value model has not computed, so guidance is off until they end.
        Tensor-parallel ranks must schedule alike, so the first rank sends :data:`LOST` instead of its tokens, and
        all end the guidance when the host reads them. A failure on another rank changes nothing: its draws are unused.
        """
        try:
            yield
        except Exception:
            if not self.fallbacks:
                logger.exception("LenVM: a step failed; its requests go on without guidance. Further ones are counted.")
            self._count_failure()
            if self._ranks is None:
                for req in batch.lenvm_reqs:
                    self.lose(req)
                batch.lenvm_reqs = []
            else:
                batch.lenvm_failed = True

    def _count_failure(self) -> None:
        self.fallbacks += 1
        if self.metrics is not None:
            self.metrics.fallbacks.inc()


class Drawn(NamedTuple):
    """A guided step of a batch.

    Attributes:
        batch, output: the batch and the result of the step.
        broken: bool ``[B]``; requests that lost guidance in the step.
        wants_values: whether any request has ``return_values``.
        is_prompt: whether the first tokens after prompts are drawn.
        prompt_lengths: fp32 ``[B]``; lengths predicted from prompts. None if not requested, or with a probe.
    """

    batch: StepBatch
    output: StepOutput
    broken: torch.Tensor
    wants_values: bool
    is_prompt: bool
    prompt_lengths: torch.Tensor | None


@dataclass(frozen=True)
class LostGuidance:
    """The engine's auxiliary output by which all ranks end the guidance of a batch whose step failed on the first."""

    tokens: torch.Tensor
    guide: SGLangGuide

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> LostGuidance:
        """See SGLang's ``DeviceAuxiliaryOutput``."""
        return replace(self, tokens=copy_tensor(self.tokens))

    def consume(self, batch: ScheduleBatch, commits: Any) -> None:
        """See SGLang's ``HostAuxiliaryOutput``."""
        if bool((self.tokens == LOST).any()):
            for req in batch.reqs:
                self.guide.lose(req)


def append(logits_output: LogitsProcessorOutput, output: Any) -> None:
    """Append an auxiliary output."""
    others = logits_output.auxiliary_device_output
    logits_output.auxiliary_device_output = append_auxiliary_output(others, output)


def needs_step(batch: ForwardBatch | ScheduleBatch) -> bool:
    """Whether any request of a batch takes part in guided steps."""
    return any(req.lenvm_guidance.needs_step for req in batch.lenvm_reqs)
