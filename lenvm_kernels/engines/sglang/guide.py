"""The guided step of SGLang's requests, called by the hooks of :mod:`lenvm_kernels.engines.sglang.plugin`.

The computation is in :class:`lenvm_kernels.step.GuidedStep`. Only images and the trace make a host-device sync, so that
the overlapping scheduler stays ahead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.engines.report import Metrics, StepReport, Stopwatch, trace_batch, trace_drafts
from lenvm_kernels.engines.settings import MAX_END_TOKENS, Settings
from lenvm_kernels.engines.sglang.batch import last_tokens
from lenvm_kernels.engines.sglang.drafts import changed_once, drafts_of, leave_only
from lenvm_kernels.engines.sglang.images import PromptImages, image_tokens, to_device
from lenvm_kernels.engines.sglang.states import SampledStates
from lenvm_kernels.engines.tokenizers import load_text_breaks
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.step import EngineSlots, GuidedStep, PreparedStep, Sampling, StepBatch, StepOutput, value_source
from lenvm_kernels.types import Drafts, Mode
from lenvm_kernels.values import KVCache, ValueModel

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

logger = logging.getLogger(__name__)

# Maximum number of tokens per request, without drafts, that one step computes, and that may be pending after it.
MAX_DELTA = 16
MAX_WAITING = MAX_DELTA - 1


class SGLangGuide:
    """The guidance of one scheduler process.

    Attributes:
        settings: settings of the plugin.
        value_model: the value model; None without one or with a probe.
        states: states of the base model, and the probe that reads them; None without a probe.
        device: device of the base model.
        drafts: draft tokens per request and step.
        step: the guided step, set by :meth:`take_slots`.
        runner: model runner of the base model, set by :meth:`take_slots`.
        has_slots: whether :meth:`take_slots` was called.
        metrics: metrics of this process; None without ``--enable-metrics``.
        fallbacks: number of failures that ended the guidance of a batch.
    """

    step: GuidedStep
    runner: ModelRunner

    def __init__(
        self,
        settings: Settings,
        value_model: ValueModel | None,
        device: torch.device,
        drafts: int = 0,
        states: SampledStates | None = None,
    ) -> None:
        self.settings, self.value_model, self.device, self.drafts = settings, value_model, device, drafts
        self.states = states
        self.has_slots = False
        self.metrics: Metrics | None = None
        self.fallbacks = 0
        self._stopwatch = Stopwatch(device)
        self._table_rows: set[int] = set()  # rows of requests in the guidance table
        self._ranks: torch.distributed.ProcessGroup | None = None  # tensor-parallel ranks, if there are several
        # The batch that the engine is sampling, whether its step has run, its prepared step, and the step's report.
        self._sampling: ForwardBatch | None = None
        self._stepped = False
        self._report: StepReport | None = None
        self._prepared: PreparedStep | Exception | None = None
        # With speculative decoding, per table row: the new tokens since the last step, and their number.
        self._grown_by: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the value source reads tokens."""
        return self.step.values.needs_tokens

    def num_bytes(self, engine: ModelConfig, requests: int, slots: int) -> int:
        """Bytes that guidance of ``requests`` requests takes, with ``slots`` slots in the engine's pool."""
        states = 0 if self.states is None else requests * (1 + self.drafts) * self.states.row_bytes
        cache = 0 if self.value_model is None else KVCache.num_bytes(self.value_model, slots)
        return (
            states
            + cache
            + self.settings.working_bytes(
                self.value_model,
                requests=requests,
                max_len=engine.context_len,
                vocab_size=engine.vocab_size,
                max_delta=MAX_DELTA + self.drafts,
                max_drafts=self.drafts,
            )
        )

    def discard_read_done(self, runner: ModelRunner) -> None:
        """Make the scheduler also wait for the value model before it overwrites the slot table.

        The engine's event marks the base model's last read of the table, which precedes the value model's reads.
        Without an event, the scheduler waits for all work that is queued on its forward stream.
        """
        if self.reads_tokens:
            runner.shared_read_done_event = None

    def take_slots(self, runner: ModelRunner) -> None:
        """Create the guided step on the slots and the slot table that the engine has just allocated."""
        pool, settings, options = runner.token_to_kv_pool, self.settings, resolved_view(runner.server_args)
        slots = pool.size + pool.page_size  # slot 0 of the engine is for padding, the last page is full
        self.runner = runner
        self.step = GuidedStep(
            value_source(self.value_model if self.states is None else self.states.probe),
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
        if self.states is not None:  # before the engine captures its graphs
            self.states.allocate(self.step.max_requests * (1 + self.drafts))
        self.has_slots = True
        if self.device.type == "cuda":
            self.step.warm_up(is_logits=False)  # sampled batches
            self.step.warm_up(sample=bool(self.drafts))  # greedy batches, and drafts
        if self.drafts:
            table_rows = runner.req_to_token_pool.req_to_token.shape[0]
            grown_by = torch.zeros(table_rows, 2 + self.drafts, dtype=torch.int32, device=self.device)
            self._grown_by = grown_by[:, 1:], grown_by[:, 0]
        parallel = get_parallel()
        if parallel.attn_tp_size > 1:
            self._ranks = parallel.attn_tp_group.cpu_group
        if options.enable_metrics and parallel.attn_tp_rank == 0:
            self.metrics = Metrics(
                model_name=options.served_model_name, dp_rank=parallel.dp_rank or 0, tp_rank=parallel.tp_rank
            )
            if self.value_model is not None:
                self.metrics.cache_bytes.set(KVCache.num_bytes(self.value_model, slots))

    def admit(self, batch: ForwardBatch, reqs: list[Req]) -> None:
        """Write the requests of a prefill batch into the table, also again after they were retracted."""
        if not batch.lenvm_reqs and self._table_rows.isdisjoint(int(req.kv.req_pool_idx) for req in reqs):
            return
        with self._failing_softly(batch):
            for req in reqs:
                table_row, params, req.lenvm_prefilled = int(req.kv.req_pool_idx), req.lenvm_guidance, req.extend_end
                if params is not None:
                    seed = req.sampling_params.sampling_seed
                    self.step.add_request(
                        table_row,
                        params,
                        end_tokens(req),
                        prompt_len=len(req.origin_input_ids),
                        seed=seed_of_request(req.rid) if seed is None else seed,
                        span=params.span_state(req.origin_input_ids, req.output_ids),
                    )
                    self._table_rows.add(table_row)
                    if req.lenvm_images is not None:
                        self._embed_images(req.lenvm_images, req.prefix_len)
                elif table_row in self._table_rows:
                    self._clear(table_row)

    def _embed_images(self, images: PromptImages, prefix_len: int) -> None:
        """Embed images before the base model's forward, after which the engine copies the pixels to the host."""
        with self._timed():
            if mm_schedule.host_offload_event is not None:  # after a retraction, they may have been copied before
                mm_schedule.host_offload_event.synchronize()
            assert self.value_model is not None  # images are only read with a value model
            images.embed(prefix_len, self.value_model)

    def extend(self, batch: ForwardBatch) -> None:
        """Pass the tokens of a prefill batch, or of a chunk of it, to the value model.

        All tokens of a chunk are passed, because the engine decides whether a token is drawn after it. Tokens of
        requests that decode in a mixed batch are passed to the step instead.
        """
        if not self.reads_tokens or not needs_step(batch):
            return
        assert self.value_model is not None  # it reads the tokens
        with self._failing_softly(batch), self._timed():
            lens = batch.extend_seq_lens.int()
            parts: list[tuple[PromptImages | None, int, int]] = []
            if any(images is not None for images in batch.lenvm_images):  # a padded batch has more lengths
                parts = list(
                    zip(batch.lenvm_images, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False)
                )
            if any(batch.lenvm_decoding):
                lens = lens.masked_fill(to_device(torch.tensor(batch.lenvm_decoding), self.device), 0)
            self.step.extend(
                batch.input_ids,
                batch.req_pool_indices,
                batch.extend_start_loc.int(),
                lens,
                # The history of decoding requests must not change.
                batch.extend_prefix_lens.int().masked_fill(lens == 0, 0),
                begins=[0, *accumulate(batch.extend_seq_lens_cpu[: len(batch.lenvm_decoding) - 1])],
                images=image_tokens(parts, len(batch.input_ids), self.value_model),
            )
            for images, prefix_len, count in parts:
                if images is not None and prefix_len + count >= images.length:
                    images.embeds = None

    def computed_len(self, req: Req, length: int) -> int:
        """Number of a request's first tokens, at most ``length``, that the value model has certainly computed.

        These are the prefix from the radix cache, the tokens of the last prefill, and later tokens up to the end of the
        span (all, if another span may begin) except for the most recent ones, which may be pending.
        """
        params = req.lenvm_guidance
        if params is None or not params.needs_step or not self.reads_tokens:
            return length  # requests that the value model reads do not share these prefixes
        read, waiting = len(req.origin_input_ids) + len(req.output_ids), MAX_WAITING + self.drafts
        if not params.start_token_ids:  # otherwise each chunk would need a search of the prompt
            end = params.span_state(req.origin_input_ids, req.output_ids).end
            read = read if end is None else end - 1
        return min(length, max(req.lenvm_prefilled, req.kv.cache_protected_len, min(length, read) - waiting))

    @contextmanager
    def sampling(self, batch: ForwardBatch) -> Iterator[None]:
        """Active while the engine samples the tokens of ``batch``."""
        self._sampling, self._stepped, self._report, self._prepared = batch, False, None, None
        try:
            yield
        finally:
            self._sampling = None

    def change_logits(self, logits: torch.Tensor) -> None:
        """Apply token temperatures and limits of spans to the logits that the engine is about to sample from."""
        batch = self._sampling
        if batch is None:
            return
        if not needs_step(batch):  # token temperatures, which no step follows
            with self._failing_softly(batch):
                self._prepare(batch, logits, len(logits))
            return
        try:
            self._prepared = self._prepare(batch, logits, len(logits))
        except Exception as error:  # raised again in the step, so that ranks agree on failures once per step
            self._prepared = error

    def _prepare(self, batch: ForwardBatch, logits: torch.Tensor | None, requests: int) -> PreparedStep:
        return self.step.prepare(logits, last_tokens(batch, requests)._replace(states=self._states_of(requests)))

    def draw(self, probs: torch.Tensor, info: SamplingBatchInfo, drawn: torch.Tensor) -> torch.Tensor:
        """The next tokens: guided requests draw from their candidates, others keep the engine's ``drawn`` tokens."""
        output = self._step(probs, info, drawn, sample=True)
        return drawn if output is None or output.tokens is None else output.tokens.to(drawn.dtype)

    def draw_all(self, probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor | None:
        """The next tokens if the engine need not draw, because all requests of the batch are guided; else None.

        Also None if guidance may leave a draw to the engine, which the host cannot decide: with a value model that
        reads tokens (a request may miss some), with spans (which end), and if guidance may skip steps.
        """
        batch = self._sampling
        if batch is None or self.reads_tokens or info.sampling_mask_batch_indices is not None:
            return None
        params = [req.lenvm_guidance for req in batch.lenvm_reqs]
        if len(params) != len(probs) or any(self._may_leave_out(p) for p in params):
            return None
        output = self._step(probs, info, None, sample=True)
        if output is None or output.tokens is None:
            return None
        return output.tokens.clamp(min=0)  # -1 for broken scores, where any token is acceptable

    def _may_leave_out(self, params: GuidanceParams) -> bool:
        """Whether guidance may leave a request's draw to the engine."""
        leaves_out = params.entropy_threshold is not None or (params.value_stride or self.settings.value_stride) > 1
        return params.mode == Mode.UNGUIDED or bool(params.end_token_ids) or leaves_out

    def report(self, logits: torch.Tensor, info: SamplingBatchInfo, drawn: torch.Tensor) -> StepReport | None:
        """The report to the host on a batch whose next tokens have been ``drawn``.

        Greedy batches do not call :meth:`draw`. They are not guided but may request values.
        """
        if not self._stepped and info.is_all_greedy:
            self._step(logits, info, drawn, is_logits=True)
        elif not self._stepped and needs_step(self._sampling):
            with self._failing_softly(self._sampling):
                raise RuntimeError("the engine drew tokens past the sampler that guidance is in")
        return self._report

    def _step(
        self,
        scores: torch.Tensor,
        info: SamplingBatchInfo,
        drawn: torch.Tensor | None,
        *,
        is_logits: bool = False,
        sample: bool = False,
    ) -> StepOutput | None:
        """The guided step of the batch being sampled; None if no request needs it, or if it failed."""
        batch, b = self._sampling, len(scores)
        if batch is None or not needs_step(batch):
            return None
        self._stepped, output = True, None
        if self.metrics is not None:
            self.metrics.guided_steps.inc()
        with self._failing_softly(batch):
            wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
            is_prompt = not batch.forward_mode.is_decode()
            prepared = self._prepare(batch, None, b) if self._prepared is None else self._prepared
            if isinstance(prepared, Exception):
                raise prepared
            table_rows = prepared.batch.table_rows
            faults = self.step.table.columns.faults[table_rows] if self.metrics else None
            sampling = Sampling(info.top_ks, info.top_ps, info.min_ps, is_logits=is_logits, sample=sample)
            with self._timed():
                predicts = wants_values and is_prompt
                prompt_lengths = self.step.predict(prepared.batch) if predicts and self.reads_tokens else None
                output = self.step.step(prepared, sampling, scores=scores, drawn=drawn)
                if predicts and not self.reads_tokens:  # a probe has values of candidates only
                    assert output.remaining_lengths is not None  # values are requested, and a token is drawn
                    prompt_lengths = 1 + output.remaining_lengths
            if self.metrics is not None or wants_values:
                # Copies, because the next step may overwrite the candidates before the engine has fetched the report.
                self._report = StepReport(
                    output.candidates.status[:, None].clone(),
                    output.candidates.lost_mass[:, None].clone(),
                    None if faults is None else self.step.table.columns.faults[table_rows] > faults,
                    None if output.remaining_lengths is None else output.remaining_lengths[:, None],
                    prompt_lengths,
                    self.metrics,
                    self._stopwatch.take(),
                )
        if not batch.lenvm_reqs:  # it failed, perhaps on another rank
            return None
        if self.settings.trace is not None:
            trace_batch(self.settings.trace, batch, output)
        return output

    def note_drawn(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Keep the tokens ``[B]`` drawn after prompts, which speculative decoding passes to the next step."""
        if self._grown_by is not None:
            table_rows = batch.req_pool_indices[: len(tokens)]
            grown, count = self._grown_by
            grown[table_rows, 0] = tokens.int()
            count[table_rows] = 1

    def verify(
        self,
        original: Callable,
        verify_input: EagleVerifyInput,
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        grammar_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The engine's verification of a batch's drafts, after tokens are drawn at the nodes of guided requests."""
        logits, info, nodes = logits_output.next_token_logits, batch.sampling_info, verify_input.draft_token_num
        table_rows, lengths = batch.req_pool_indices, batch.seq_lens.int() + 1
        output, faults, remaining = None, None, None
        wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
        with changed_once(logits, info, grammar_mask, nodes):
            with self._failing_softly(batch), self._timed():
                prepared = self._prepare_nodes(logits, drafts_of(verify_input), table_rows, lengths)
                if needs_step(batch):
                    faults = self.step.table.columns.faults[table_rows] if self.metrics else None
                    filters = info.top_ks, info.top_ps, info.min_ps, info.temperatures.flatten()
                    output = self.step.step(prepared, Sampling(*filters, is_logits=True, sample=True))
            if output is not None and batch.lenvm_reqs:
                if batch.return_logprob:  # of the unmasked logits
                    logits_output.next_token_logits = logits.clone()
                assert output.tokens is not None
                leave_only(logits_output.next_token_logits, output.tokens)
            verified = original(verify_input, batch, logits_output, None, *args, **kwargs)
            logits_output.next_token_logits = logits
        if output is None or not batch.lenvm_reqs:
            return verified
        predict, lens, index = verified
        path = index.clamp(min=0).long()
        tokens = predict[path]
        with self._failing_softly(batch):
            assert self._grown_by is not None  # there are drafts
            grown, count = self._grown_by
            grown[table_rows, : tokens.shape[1]] = tokens
            count[table_rows] = lens
            if wants_values and not self.reads_tokens:
                remaining = None if output.remaining_lengths is None else output.remaining_lengths[path]
            elif wants_values:
                with self._timed():
                    remaining = self.step.predict(StepBatch(tokens, table_rows, lengths + lens, lens))
            if self.metrics is not None:
                self.metrics.guided_steps.inc()
            if self.metrics is not None or wants_values:
                report = StepReport(
                    output.candidates.status[path],
                    output.candidates.lost_mass[path],
                    None if faults is None else self.step.table.columns.faults[table_rows] > faults,
                    remaining,
                    None,
                    self.metrics,
                    self._stopwatch.take(),
                    is_verified=True,
                )
                others = logits_output.auxiliary_device_output
                logits_output.auxiliary_device_output = append_auxiliary_output(others, report)
        if batch.lenvm_reqs and self.settings.trace is not None:
            trace_drafts(self.settings.trace, batch, output, verified)
        return verified

    def _prepare_nodes(
        self, logits: torch.Tensor, drafts: Drafts, table_rows: torch.Tensor, lengths: torch.Tensor
    ) -> PreparedStep:
        assert self._grown_by is not None
        tokens, new_lens = (x[table_rows] for x in self._grown_by)
        batch = StepBatch(tokens, table_rows, lengths, new_lens, states=self._states_of(len(logits)))
        return self.step.prepare(logits, batch, drafts)

    def _states_of(self, rows: int) -> torch.Tensor | None:
        """The states of the base model's last forward; None without a probe."""
        return None if self.states is None else self.states.of(rows)

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.metrics is None else self._stopwatch.running()

    @contextmanager
    def _failing_softly(self, batch: ForwardBatch) -> Iterator[None]:
        """On an error inside, end the guidance of the batch's requests on all of their ranks instead of the engine.

        Their next tokens would follow tokens that the value model has not computed, so guidance is off until they end,
        and their tokens are not inserted into the radix cache.
        """
        failed = False
        try:
            yield
        except Exception:
            failed = True
            if not self.fallbacks:
                logger.exception("LenVM: a step failed; its requests go on without guidance. Further ones are counted.")
        if not self._on_any_rank(failed):
            return
        self.fallbacks += 1
        self._report = None
        if self.metrics is not None:
            self.metrics.fallbacks.inc()
        for req in batch.lenvm_reqs:
            req.lenvm_guidance, req.skip_radix_cache_insert = None, True
            if req.kv.req_pool_idx is not None:  # otherwise it has already left
                self._clear(int(req.kv.req_pool_idx))
        batch.lenvm_reqs = []

    def _on_any_rank(self, failed: bool) -> bool:
        """Whether any rank that draws the same tokens has failed: it would otherwise draw different tokens.

        Reduced from host to host, as the engine distributes requests, without a host-device sync.
        """
        if self._ranks is None:
            return failed
        flag = torch.tensor([failed], dtype=torch.uint8, device="cpu")
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._ranks)
        return bool(flag)

    def _clear(self, table_row: int) -> None:
        self.step.remove_request(table_row)
        self._table_rows.discard(table_row)


def needs_step(batch: ForwardBatch | ScheduleBatch) -> bool:
    """Whether any request of a batch takes part in guided steps."""
    return any(req.lenvm_guidance.needs_step for req in batch.lenvm_reqs)


def end_tokens(req: Req) -> set[int]:
    """The tokens at which the engine ends a request's output; their value is 0. Stop strings have no token."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:  # the engine then also ignores stop tokens
        return set()
    ids = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    ids |= {getattr(tokenizer, "eos_token_id", None), *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return set(sorted(ids - {None})[:MAX_END_TOKENS])


def seed_of_request(rid: str) -> int:
    """The seed of a request without one, the same on every tensor-parallel rank."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little", signed=True)
