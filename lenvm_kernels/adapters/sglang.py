"""LenVM in unforked SGLang, as a plugin of the engine (entry point ``sglang.srt.plugins``).

It is on when ``LENVM_VALUE_MODEL`` is set (:class:`Settings`), and hooks some functions of the engine (:data:`HOOKS`):

- a request's ``custom_params`` are validated before it is scheduled, and it is given a part of the radix cache of its
  own: a prefix that the value model has not seen is never taken for one it has;
- the value model, if there is one, is loaded after the base model and gets its share of the memory; its keys and
  values live in the slots of the engine, so that the radix cache, chunked prefill, retraction and aborts need nothing
  from here;
- at every step the requests with guidance are drawn from their candidates; all others are the engine's own draws;
- a value model that reads images is given those of prompts (:mod:`lenvm_kernels.adapters.sglang_images`);
- with speculative decoding they are drawn at every node of the drafts (:mod:`lenvm_kernels.adapters.sglang_drafts`);
- what the steps did is counted (``--enable-metrics``), and requests get the lengths that they asked for
  (:mod:`lenvm_kernels.adapters.sglang_report`).

Nothing here computes: that is :class:`lenvm_kernels.step.GuidedStep`. Nothing is read back to the host, so that the
overlapping scheduler stays ahead.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.adapters.metrics import Metrics, Stopwatch
from lenvm_kernels.adapters.settings import (
    MAX_END_TOKENS,
    MAX_SCALED_TOKENS,
    MAX_STOP_TOKENS,
    Settings,
    check_vocabulary,
    has_value_model,
    load_text_breaks,
    parse_request,
    value_model_reads_images,
)
from lenvm_kernels.adapters.sglang_batch import last_tokens
from lenvm_kernels.adapters.sglang_drafts import changed_once, drafts_of, leave_only
from lenvm_kernels.adapters.sglang_images import PromptImages, image_tokens
from lenvm_kernels.adapters.sglang_report import StepReport, without_empty_keys
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.ops.pack_drafts import tree_columns
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepOutput, working_bytes
from lenvm_kernels.types import Drafts, Mode
from lenvm_kernels.value_model import ImageTokens, KVCache, ValueModel

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

logger = logging.getLogger(__name__)

RADIX_NAMESPACE = "lenvm|"
# Tokens of a request that wait at most for the value model, beside those of the drafts. Those that wait when it ends
# are in the radix cache, and the value model has not seen them: who takes a prefix from there computes as many tokens
# of its end anew.
MAX_DELTA = 16

_NO_SAMPLER = "it never reaches the sampler that guidance is in"
_NOT_TRIED = "not tried"
_FOREIGN_KEYS = "the value model has no keys and values for prompts that come from elsewhere"
_OTHER_SLOTS = "the value model lives in the slots of the engine's own pool"
SPECULATIVE_ALGORITHMS = (None, "EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
# Options of the engine: what is accepted, and why.
OPTIONS = {
    "speculative_adaptive": (False, "the step takes a fixed number of drafts"),
    "enable_multi_layer_eagle": (False, _NOT_TRIED),
    "dllm_algorithm": (None, _NO_SAMPLER),
    "pp_size": (1, "not built"),
    "attn_cp_size": (1, _NOT_TRIED),
    "enable_pdmux": (False, "prompts and draws would be computed at the same time"),
    "disaggregation_mode": ("null", "requests are guided from their prompts on"),
    "enable_hierarchical_cache": (False, _FOREIGN_KEYS),
    "enable_lmcache": (False, _FOREIGN_KEYS),
    "enable_flexkv": (False, _FOREIGN_KEYS),
    "enable_unified_cache_external_linker": (False, _FOREIGN_KEYS),
    "radix_cache_backend": (None, _FOREIGN_KEYS),
    "enable_unified_memory": (False, _OTHER_SLOTS),
    "enable_hisparse": (False, _OTHER_SLOTS),
    "enable_kv_cache_sharding": (False, _OTHER_SLOTS),
    "dcp_size": (1, _OTHER_SLOTS),
}
# Reasons that do not hold without a value model.
_OF_A_VALUE_MODEL = (_FOREIGN_KEYS, _OTHER_SLOTS)


class Guide:
    """The guidance of one scheduler process.

    Attributes:
        settings: of the plugin.
        value_model: loaded beside the base model; None without one.
        device: of the base model.
        drafts: drafted tokens of a request in a step.
        step: the guided step; there is none until the engine has its slots.
        runner: of the base model, likewise.
        has_slots: whether it has.
        metrics: of this process; None without ``--enable-metrics``.
        fallbacks: failures that ended the guidance of a batch.
    """

    step: GuidedStep
    runner: ModelRunner

    def __init__(
        self, settings: Settings, value_model: ValueModel | None, device: torch.device, drafts: int = 0
    ) -> None:
        self.settings, self.value_model, self.device, self.drafts = settings, value_model, device, drafts
        self.has_slots = False
        self.metrics: Metrics | None = None
        self.fallbacks = 0
        self._stopwatch = Stopwatch(device)
        self._table_rows: set[int] = set()  # of the engine's slot table, whose requests are in our table
        self._ranks: torch.distributed.ProcessGroup | None = None  # of tensor parallelism; None: this one only
        # The batch that the engine is drawing tokens for, whether it has been through the step, and what that did.
        self._sampling: ForwardBatch | None = None
        self._stepped = False
        self._report: StepReport | None = None
        self._span_ended: torch.Tensor | None = None
        # With speculative decoding, by table row: the tokens that a sequence has grown by since the step knew of it.
        self._grown_by: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the values come from something that reads the tokens of sequences."""
        return self.step.values.needs_tokens

    def take_slots(self, runner: ModelRunner) -> None:
        """Put the value model's cache on the slots and the slot table that the engine has just allocated."""
        pool, settings, options = runner.token_to_kv_pool, self.settings, resolved_view(runner.server_args)
        slots = pool.size + pool.page_size  # slot 0 of the engine is for padding, the last page is full
        self.runner = runner
        self.step = GuidedStep(
            self.value_model,
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
            for is_logits in (False, True):  # of sampled and of greedy batches
                self.step.warm_up(is_logits=is_logits)
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
                self.metrics.cache_bytes.set(KVCache.num_bytes(self.value_model, slots, settings.cache))

    def admit(self, batch: ForwardBatch, reqs: list[Req]) -> None:
        """Write the requests of a prefill batch into the table; a request comes again after it was retracted."""
        if not batch.lenvm_reqs and self._table_rows.isdisjoint(int(req.kv.req_pool_idx) for req in reqs):
            return
        with self._failing_softly(batch):
            for req in reqs:
                table_row, params = int(req.kv.req_pool_idx), req.lenvm_guidance
                if params is not None:
                    seed = req.sampling_params.sampling_seed
                    self.step.add_request(
                        table_row,
                        params,
                        end_tokens(req),
                        prompt_len=len(req.origin_input_ids),
                        seed=seed_of_request(req.rid) if seed is None else seed,
                        span_ended=not set(params.end_token_ids).isdisjoint(req.output_ids),  # before it was retracted
                    )
                    self._table_rows.add(table_row)
                    if req.lenvm_images is not None:
                        self._embed_images(req.lenvm_images, req.prefix_len)
                elif table_row in self._table_rows:
                    self._clear(table_row)

    def _embed_images(self, images: PromptImages, prefix_len: int) -> None:
        """Before the base model's forward, after which the engine copies the pixels to the host."""
        with self._timed():
            if mm_schedule.host_offload_event is not None:  # they may be there since the request was retracted
                mm_schedule.host_offload_event.synchronize()
            assert self.value_model is not None  # else nobody's images are read
            images.embed(self._first_computed(prefix_len), self.value_model)

    def extend(self, batch: ForwardBatch) -> None:
        """Give the value model the tokens of a prefill batch, or of a chunk of it.

        All of them: whether tokens are drawn after a chunk is the engine's affair. Not those of requests that are
        decoding in a mixed batch, which the step is told.
        """
        if not self.reads_tokens or not needs_step(batch):
            return
        with self._failing_softly(batch), self._timed():
            self._extend_ends_of_prefixes(batch)
            lens = batch.extend_seq_lens.int()
            parts: list[tuple[PromptImages | None, int, int]] = []
            if any(images is not None for images in batch.lenvm_images):  # the lengths of a padded batch are more
                of_requests = batch.lenvm_images, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
                parts = list(zip(*of_requests, strict=False))
            if any(batch.lenvm_decoding):
                lens = lens.masked_fill(self._to_device(batch.lenvm_decoding, torch.bool), 0)
            self.step.extend(
                batch.input_ids,
                batch.out_cache_loc,
                batch.req_pool_indices,
                batch.extend_start_loc.int(),
                lens,
                # Of those decoding, nothing is to be taken for cached.
                batch.extend_prefix_lens.int().masked_fill(lens == 0, 0),
                images=self._image_tokens(parts, len(batch.input_ids)),
            )
            for images, prefix_len, count in parts:
                if images is not None and prefix_len + count >= images.length:
                    images.embeds = None

    def _extend_ends_of_prefixes(self, batch: ForwardBatch) -> None:
        """The ends of prefixes out of the radix cache: who left them there may not have computed their last tokens."""
        if not batch.lenvm_prefixes:
            return
        rows, prefix_lens, ends, images = zip(*batch.lenvm_prefixes, strict=True)
        lens = [len(tokens) for tokens in ends]
        starts = [prefix_len - count for prefix_len, count in zip(prefix_lens, lens, strict=True)]
        where = [(row, first + i) for row, first, n in zip(rows, starts, lens, strict=True) for i in range(n)]
        tokens = self._to_device([token for end in ends for token in end], torch.int64)
        of_rows, positions = self._to_device(where, torch.int64).unbind(1)
        first_tokens = [sum(lens[:i]) for i in range(len(lens))]
        sizes = self._to_device([first_tokens, lens, starts], torch.int32)
        slots = self.step.slot_table[of_rows, positions]
        of_images = self._image_tokens(list(zip(images, starts, lens, strict=True)), len(tokens))
        self.step.extend(tokens, slots, self._to_device(rows, torch.int64), *sizes, images=of_images)

    def _first_computed(self, prefix_len: int) -> int:
        """Of a prefix out of the radix cache, the first token that is computed anew."""
        return max(0, prefix_len - self.step.config.max_delta + 1)

    def _image_tokens(self, parts: list[tuple[PromptImages | None, int, int]], tokens: int) -> ImageTokens | None:
        assert self.value_model is not None
        images = image_tokens(parts, tokens, self.value_model)
        if images is None:
            return None
        positions, rows = (self._to_device(x, torch.int64) for x in images[:2])
        return ImageTokens(positions, rows, images.embeds)

    def _to_device(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """Without waiting for the device."""
        tensor, device = torch.as_tensor(values, dtype=dtype), self.device
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    @contextmanager
    def sampling(self, batch: ForwardBatch) -> Iterator[None]:
        """While the engine draws the tokens of a batch."""
        self._sampling, self._stepped, self._report, self._span_ended = batch, False, None, None
        try:
            yield
        finally:
            self._sampling = None

    def change_logits(self, logits: torch.Tensor) -> None:
        """Apply token temperatures and limits of spans to the logits that the engine is about to sample from."""
        if self._sampling is not None:
            self.step.scale_tokens(logits, self._sampling.req_pool_indices[: len(logits)])
            if self.step.has_spans:
                self._span_ended = self.step.limit_spans(logits, last_tokens(self._sampling, len(logits)))

    def draw(self, probs: torch.Tensor, info: SamplingBatchInfo, drawn: torch.Tensor) -> torch.Tensor:
        """The next tokens: of guided requests from their candidates, of others those that the engine has ``drawn``."""
        output = self._step(probs, info, drawn, sample=True)
        return drawn if output is None or output.tokens is None else output.tokens.to(drawn.dtype)

    def draw_all(self, probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor | None:
        """The next tokens where the engine need draw none, because every request of the batch is guided; else None.

        Not with a value model, which may have lost a request's tokens, nor with spans, which end: the host does not
        know.
        """
        batch = self._sampling
        if batch is None or self.reads_tokens or info.sampling_mask_batch_indices is not None:
            return None
        params = [req.lenvm_guidance for req in batch.lenvm_reqs]
        if len(params) != len(probs) or any(p.mode == Mode.UNGUIDED or p.end_token_ids for p in params):
            return None
        output = self._step(probs, info, None, sample=True)
        if output is None or output.tokens is None:
            return None
        return output.tokens.clamp(min=0)  # -1 where scores are broken, and any token will do

    def report(self, logits: torch.Tensor, info: SamplingBatchInfo, drawn: torch.Tensor) -> StepReport | None:
        """What to tell the host of a batch whose next tokens have been ``drawn``.

        Greedy batches have not been through :meth:`draw`. Nothing guides them, but they may ask for values.
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
        """The guided step of the batch being sampled; None if there is nothing in it to guide, or if it failed."""
        batch, b = self._sampling, len(scores)
        if batch is None or not needs_step(batch):
            return None
        self._stepped, output = True, None
        if self.metrics is not None:
            self.metrics.guided_steps.inc()
        with self._failing_softly(batch):
            wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
            is_prompt = not batch.forward_mode.is_decode()
            sequences = last_tokens(batch, b)
            table_rows = sequences.table_rows
            faults = self.step.table.faults[table_rows] if self.metrics else None
            sampling = Sampling(info.top_ks, info.top_ps, info.min_ps, is_logits=is_logits, sample=sample)
            with self._timed():
                prompt_lengths = self.step.predict(sequences) if wants_values and is_prompt else None
                output = self.step.step(scores, sequences, sampling, drawn=drawn, span_ended=self._span_ended)
            if self.metrics is not None or wants_values:
                self._report = StepReport(
                    output.candidates.status[:, None],
                    output.candidates.lost_mass[:, None],
                    None if faults is None else self.step.table.faults[table_rows] > faults,
                    None if output.remaining_lengths is None else output.remaining_lengths[:, None],
                    prompt_lengths,
                    self.metrics,
                    self._stopwatch.take(),
                )
        if not batch.lenvm_reqs:  # it failed, perhaps on another rank
            return None
        if self.settings.trace is not None:
            _trace(self.settings.trace, batch, output)
        return output

    def note_drawn(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Keep the tokens ``[B]`` drawn after prompts: with speculative decoding the next step is told of them."""
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
        """The engine's verification of a batch's drafts, after what is drawn at the nodes of guided requests."""
        logits, info, nodes = logits_output.next_token_logits, batch.sampling_info, verify_input.draft_token_num
        table_rows, lengths = batch.req_pool_indices, batch.seq_lens.int() + 1
        output, faults, remaining = None, None, None
        wants_values = any(req.lenvm_guidance.return_values for req in batch.lenvm_reqs)
        with changed_once(logits, info, grammar_mask, nodes):
            with self._failing_softly(batch), self._timed():
                self.step.scale_tokens(logits, table_rows.repeat_interleave(nodes))
                if needs_step(batch):
                    drafts = drafts_of(verify_input)
                    faults = self.step.table.faults[table_rows] if self.metrics else None
                    output = self._draw_at_nodes(logits, info, drafts, table_rows, lengths)
            if output is not None and batch.lenvm_reqs:
                if batch.return_logprob:  # of the logits as they are
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
            if wants_values:
                with self._timed():
                    remaining = self.step.predict(StepBatch(tokens, table_rows, lengths + lens, lens))
            if self.metrics is not None:
                self.metrics.guided_steps.inc()
            if self.metrics is not None or wants_values:
                report = StepReport(
                    output.candidates.status[path],
                    output.candidates.lost_mass[path],
                    None if faults is None else self.step.table.faults[table_rows] > faults,
                    remaining,
                    None,
                    self.metrics,
                    self._stopwatch.take(),
                    is_verified=True,
                )
                others = logits_output.auxiliary_device_output
                logits_output.auxiliary_device_output = append_auxiliary_output(others, report)
        if batch.lenvm_reqs and self.settings.trace is not None:
            _trace_drafts(self.settings.trace, batch, output, verified)
        return verified

    def _draw_at_nodes(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        drafts: Drafts,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
    ) -> StepOutput:
        assert self._grown_by is not None
        tokens, new_lens = (x[table_rows] for x in self._grown_by)
        batch = StepBatch(tokens, table_rows, lengths, new_lens)
        filters = info.top_ks, info.top_ps, info.min_ps, info.temperatures.flatten()
        span_ended = self.step.limit_spans(logits, batch, drafts)
        return self.step.step(
            logits, batch, Sampling(*filters, is_logits=True, sample=True), drafts, span_ended=span_ended
        )

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.metrics is None else self._stopwatch.running()

    @contextmanager
    def _failing_softly(self, batch: ForwardBatch) -> Iterator[None]:
        """An error in here ends the guidance of the batch's requests on all of their ranks, not the engine.

        Their next tokens would follow tokens that the value model has not seen, so guidance is off until they end, and
        what they leave in the radix cache is not offered to other guided requests.
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
            if req.kv.req_pool_idx is not None:  # else it has left already
                self._clear(int(req.kv.req_pool_idx))
        batch.lenvm_reqs = []

    def _on_any_rank(self, failed: bool) -> bool:
        """Whether one of the ranks that draw the same tokens has failed: alone it would draw others.

        Asked from host to host, as the engine hands out requests: no device is waited for.
        """
        if self._ranks is None:
            return failed
        flag = torch.tensor([failed], dtype=torch.uint8, device="cpu")
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._ranks)
        return bool(flag)

    def _clear(self, table_row: int) -> None:
        self.step.remove_request(table_row)
        self._table_rows.discard(table_row)


def _trace(trace: Path, batch: ForwardBatch, output: StepOutput) -> None:
    assert output.tokens is not None  # the step was told what the engine has drawn
    columns = dict(
        rid=batch.rids,
        length=batch.seq_lens.tolist(),
        status=output.candidates.status.tolist(),
        token_ids=output.candidates.token_ids.tolist(),
        value_logits=output.value_logits.tolist(),
        probs=output.probs.tolist(),
        token=output.tokens.tolist(),
    )
    _write_trace(trace, batch.forward_mode.name, columns)


def _trace_drafts(trace: Path, batch: ScheduleBatch, output: StepOutput, verified: Any) -> None:
    """A row for each node that is on the way."""
    predict, lens, index = (x.tolist() for x in verified)
    nodes = [(i, node) for i, count in enumerate(lens) for node in index[i][:count]]
    lengths = [n + 1 + j for n, count in zip(batch.seq_lens.tolist(), lens, strict=True) for j in range(count)]
    at = [node for _, node in nodes]
    columns = dict(
        rid=[batch.reqs[i].rid for i, _ in nodes],
        length=lengths,
        status=output.candidates.status[at].tolist(),
        token_ids=output.candidates.token_ids[at].tolist(),
        value_logits=output.value_logits[at].tolist(),
        probs=output.probs[at].tolist(),
        token=[predict[node] for node in at],
    )
    _write_trace(trace, "TARGET_VERIFY", columns)


def _write_trace(trace: Path, mode: str, columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    line = json.dumps({"mode": mode, "rows": rows}) + "\n"
    with trace.open("ab", buffering=0) as file:  # one write a line: ranks write to the same file
        file.write(line.encode())


# One a process: a scheduler process has one model runner that samples.
_guide: Guide | None = None


def requested_guidance(sampling_params: SamplingParams) -> GuidanceParams | None:
    """What a request asks for, None without. A greedy request has one candidate, which no guidance moves.

    Raises:
        ValueError: naming the field of ``custom_params``, what came and what is accepted.
    """
    if sampling_params.custom_params is None:
        return None
    if not isinstance(sampling_params.custom_params, dict):
        raise ValueError(f"custom_params must be an object of named values, got {sampling_params.custom_params!r}")
    params = parse_request(sampling_params.custom_params)
    if sampling_params.top_k == 1:
        params = replace(params, mode=Mode.UNGUIDED)
    if not params.needs_step and not params.token_temperature_scale:
        return None
    if not -(2**63) <= (sampling_params.sampling_seed or 0) < 2**63:
        raise ValueError(f"sampling_seed must be an int64, got {sampling_params.sampling_seed}")
    if len(sampling_params.stop_token_ids or ()) > MAX_STOP_TOKENS:
        raise ValueError(
            f"stop_token_ids must be at most {MAX_STOP_TOKENS} together with guidance, "
            f"got {len(sampling_params.stop_token_ids)}"
        )
    if len(params.token_temperature_scale) > MAX_SCALED_TOKENS:
        raise ValueError(
            f"token_temperature_scale must be of at most {MAX_SCALED_TOKENS} tokens, "
            f"got {len(params.token_temperature_scale)}"
        )
    return params


def guidance_of(request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | Req) -> GuidanceParams | None:
    """:func:`requested_guidance` of a whole request.

    Raises:
        ValueError: also of what guidance does not go with.
    """
    params = requested_guidance(request.sampling_params)
    if params is None:
        return None
    session = getattr(request, "session", None)
    given = {"beam_width": (request.sampling_params.beam_width or 1) > 1}  # beams are not drawn
    if has_value_model():
        given |= {
            # The value model reads tokens.
            "input_embeds": getattr(request, "input_embeds", None) is not None,
            "positional_embed_overrides": request.positional_embed_overrides is not None,
            # Of those that the value model reads, the scheduler finds what it cannot (PromptImages).
            "images, videos and audio": getattr(request, "mm_inputs", None) is not None
            and not value_model_reads_images(),
            # Its requests share slots past the radix cache, and the value model has not seen those without guidance.
            "a streaming session": session is not None and session.streaming,
        }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} cannot be combined with guidance in custom_params")
    return params


def drafts_a_step(options: Any) -> int:
    """Drafted tokens of a request in a step of an engine with these options."""
    return (options.speculative_num_draft_tokens or 1) - 1 if options.speculative_algorithm else 0


def needs_step(batch: ForwardBatch | ScheduleBatch) -> bool:
    """Whether a batch takes part in guided steps."""
    return any(req.lenvm_guidance.needs_step for req in batch.lenvm_reqs)


def end_tokens(req: Req) -> set[int]:
    """The tokens at which the engine ends a request's output; their value is 0. Stop strings have no token."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:  # the engine then ignores stop tokens, too
        return set()
    ids = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    ids |= {getattr(tokenizer, "eos_token_id", None), *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return set(sorted(ids - {None})[:MAX_END_TOKENS])


def seed_of_request(rid: str) -> int:
    """A seed for a request that gave none: the same on every tensor-parallel rank."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little", signed=True)


# --- hooks: arguments are those of the hooked function, after its result (AFTER) or itself (AROUND) ---


def check_request(result: Any, *args: Any, **kwargs: Any) -> None:
    """After a request was tokenized: refuse what cannot be guided, which the servers answer with status 400."""
    guidance_of(result)


def note_guidance(_: None, req: Req, *args: Any, **kwargs: Any) -> None:
    """After a request was made in the scheduler: parse its guidance, give it its part of the radix cache."""
    req.lenvm_images = None
    try:
        req.lenvm_guidance = guidance_of(req)
    except ValueError as error:  # came past check_request: the engine loads no plugins in its further HTTP workers
        req.lenvm_guidance = req.input_embeds = None  # it is left with one token, and runs once to be answered
        req.set_finish_with_abort(str(error))  # status 400
    if has_value_model() and req.lenvm_guidance is not None and req.lenvm_guidance.needs_step:
        req.extra_key = RADIX_NAMESPACE + (req.extra_key or "")


def note_images(_: None, req: Req, *args: Any, **kwargs: Any) -> None:
    """After a request in the scheduler was given its images, before it takes a prefix from the radix cache."""
    if _guide is None or _guide.value_model is None or not (req.lenvm_guidance and req.lenvm_guidance.needs_step):
        return
    try:
        req.lenvm_images = PromptImages(req, _guide.value_model)
    except ValueError as error:
        req.lenvm_guidance = None
        req.set_finish_with_abort(str(error))  # status 400
        return
    if req.lenvm_images.moved:
        req.extra_key = f"lenvm{req.lenvm_images.moved}|" + req.extra_key.removeprefix(RADIX_NAMESPACE)


def load_value_model(_: None, runner: ModelRunner) -> None:
    """After the base model was loaded: check the engine's options, load the value model onto its device."""
    global _guide
    if runner.is_draft_worker:
        return
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"LenVM does not fit this SGLang: it could not hook {', '.join(missing)}")
    options = resolved_view(runner.server_args)  # with the engine's choices for what was not given
    if options.speculative_algorithm not in SPECULATIVE_ALGORITHMS:
        raise ValueError(
            f"speculative_algorithm must be one of {', '.join(map(str, SPECULATIVE_ALGORITHMS))} together with "
            f"LENVM_VALUE_MODEL, got {options.speculative_algorithm}: {_NOT_TRIED}"
        )
    if options.speculative_algorithm and options.enable_mixed_chunk:
        raise ValueError(f"enable_mixed_chunk must be False together with speculative decoding, got True: {_NOT_TRIED}")
    for option, (accepted, reason) in OPTIONS.items():
        is_free = reason in _OF_A_VALUE_MODEL and not has_value_model()
        if (given := getattr(options, option, accepted)) != accepted and not is_free:
            raise ValueError(f"{option} must be {accepted} together with LENVM_VALUE_MODEL, got {given}: {reason}")
    settings = Settings.from_environment()
    assert settings is not None  # else plugin() would not have hooked the engine
    device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)
    value_model = settings.load_value_model(runner.dtype, device)
    _guide = Guide(settings, value_model, device, drafts=drafts_a_step(options))
    if value_model is None:
        logger.info("LenVM: no value model; targets are met by the end tokens alone")
        return
    if runner.model_config.is_multimodal:
        value_model.vision_tower  # noqa: B018, loaded before the engine's pool takes the memory
    check_vocabulary(settings, value_model.config.vocab_size, runner.model_config.vocab_size, options.tokenizer_path)
    kept = value_model.weights or value_model.dtype
    logger.info("LenVM: value model %s in %s on %s", settings.value_model, kept, device)


def leave_room(original: Callable, configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None) -> Any:
    """Around the sizing of the engine's pool: what the guided step will take is not the pool's."""
    if _guide is None or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    model, settings, drafts = _guide.value_model, _guide.settings, _guide.drafts
    delta = MAX_DELTA + drafts

    def sized(pool_bytes: int) -> tuple[Any, int]:
        """The pool, and the bytes that the value model takes beside it."""
        pool = original(configurator, pool_bytes, cap_tokens=cap_tokens)
        requests = configurator.resolve_max_num_reqs(pool.max_total_num_tokens)
        last_step = requests * (delta + tree_columns(drafts, settings.max_candidates)) if settings.commit_winners else 0
        slots = pool.max_total_num_tokens + configurator.page_size
        engine = configurator.model_config
        sizes = dict(requests=requests, max_len=engine.context_len, vocab_size=engine.vocab_size)
        of_step = dict(max_candidates=settings.max_candidates, max_delta=delta, max_drafts=drafts)
        step = working_bytes(model, **sizes, **of_step)
        if model is None:
            return pool, step
        kept = KVCache.num_bytes(model, slots, settings.cache) + KVCache.num_bytes(model, last_step)
        # Each keeps its memory from the other, see GuidedStep.
        extend = working_bytes(model, **sizes, tokens=settings.chunk_tokens)
        return pool, kept + step + extend

    # Slots grow with the pool's bytes, and with them what the value model takes: the largest pool that leaves room is
    # found by bisection.
    fits, too_large = 0, budget_bytes
    for _ in range(24):
        middle = (fits + too_large) // 2
        has_room = middle + sized(middle)[1] <= budget_bytes
        fits, too_large = (middle, too_large) if has_room else (fits, middle)
    remedies = "raise mem_fraction_static, or lower max_running_requests, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
    if fits == 0:
        raise ValueError(
            f"LENVM_VALUE_MODEL leaves no memory for the engine's pool: {budget_bytes / 2**30:.2f} GiB are left for it "
            f"and the guided step; {remedies}"
        )
    pool, beside = sized(fits)
    share = beside / budget_bytes
    if settings.memory_share is not None and share > settings.memory_share:
        raise ValueError(
            f"LENVM_MEMORY_SHARE is {settings.memory_share:g}, but the guided step takes {share:.3f} of the "
            f"{budget_bytes / 2**30:.2f} GiB beside the weights; {remedies}"
        )
    logger.info("LenVM: guidance takes %.2f GiB, %.1f %%", beside / 2**30, 100 * share)
    return pool


def take_slots(_: None, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
    """After the engine allocated its pools."""
    if _guide is not None and not runner.is_draft_worker:
        _guide.take_slots(runner)


def admit_requests(
    batch: ForwardBatch, _: type, scheduled: ScheduleBatch, runner: ModelRunner, *args: Any, **kwargs: Any
) -> None:
    """After a batch was made ready for a model."""
    batch.lenvm_reqs, batch.lenvm_decoding, batch.lenvm_prefixes, batch.lenvm_images = [], [], [], []
    if _guide is None or not _guide.has_slots or runner.is_draft_worker:
        return
    batch.lenvm_reqs = [req for req in scheduled.reqs if req.lenvm_guidance is not None]
    if batch.forward_mode.is_extend_without_speculative():
        running = {id(req) for req in scheduled.decoding_reqs or ()}  # in a mixed batch
        batch.lenvm_decoding = [id(req) in running for req in scheduled.reqs]
        batch.lenvm_images = [req.lenvm_images for req in scheduled.reqs]
        new = [req for req in scheduled.reqs if id(req) not in running]
        for req in new:
            needs_prefix = _guide.reads_tokens and req.lenvm_guidance is not None and req.lenvm_guidance.needs_step
            if needs_prefix and req.prefix_len:
                end = req.get_fill_ids()[_guide._first_computed(req.prefix_len) : req.prefix_len]
                prefix = int(req.kv.req_pool_idx), req.prefix_len, list(end), req.lenvm_images
                batch.lenvm_prefixes.append(prefix)
        _guide.admit(batch, new)


def extend_prompts(_: Any, runner: ModelRunner, batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
    """After the base model's forward."""
    is_prompt = batch.forward_mode.is_extend_without_speculative()
    if _guide is not None and is_prompt and getattr(batch, "lenvm_reqs", None):
        _guide.extend(batch)
        _discard_read_done(runner)


def sample(original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
    """Around the drawing of a batch's tokens."""
    if _guide is None or not getattr(batch, "lenvm_reqs", None):
        return original(runner, logits_output, batch)
    with _guide.sampling(batch):
        tokens = original(runner, logits_output, batch)
        report = _guide.report(logits_output.next_token_logits, batch.sampling_info, tokens)
        _guide.note_drawn(batch, tokens)
    _discard_read_done(runner)
    logits_output.auxiliary_device_output = append_auxiliary_output(logits_output.auxiliary_device_output, report)
    return tokens


def sample_delayed(original: Callable, scheduler: Scheduler, result: Any, batch: ScheduleBatch | None) -> None:
    """Around the drawing of a batch that had to wait for the results of the one before, as grammars do.

    The engine's barrier against overwriting the slot table came before it, so it is set up again.
    """
    is_delayed = result is not None and result.delay_sample_func is not None
    reads_slots = is_delayed and batch is not None and any(req.lenvm_guidance is not None for req in batch.reqs)
    original(scheduler, result, batch)
    if reads_slots:
        scheduler._apply_war_barrier()


def _discard_read_done(runner: ModelRunner) -> None:
    """Make the scheduler wait for the value model, too, before it overwrites the slot table.

    The engine's event marks the base model's last read of the table, and the value model reads it later. Without an
    event the scheduler waits for all that its forward stream has been given by then.
    """
    if _guide is not None and _guide.reads_tokens:
        runner.shared_read_done_event = None


def change_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """After the engine's own logit processors."""
    if _guide is not None:
        _guide.change_logits(logits)


def sample_from_probs(
    original: Callable, sampler: Any, probs: torch.Tensor, info: SamplingBatchInfo, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    """Around the draw itself: guided requests get a token of their candidates, the others the one the engine draws."""
    tokens = None if _guide is None else _guide.draw_all(probs, info)
    if tokens is not None:
        return tokens, None
    tokens, capture = original(sampler, probs, info, *args, **kwargs)
    return tokens if _guide is None else _guide.draw(probs, info, tokens), capture


def verify_drafts(
    original: Callable,
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around the verification of a batch's drafts."""
    arguments = verify_input, batch, logits_output, grammar_mask, *args
    if _guide is None or batch.forward_mode.is_idle():
        return original(*arguments, **kwargs)
    batch.lenvm_reqs = [req for req in batch.reqs if req.lenvm_guidance is not None]
    if not batch.lenvm_reqs:
        return original(*arguments, **kwargs)
    _discard_read_done(_guide.runner)
    return _guide.verify(original, *arguments, **kwargs)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
HOOKS = {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": ("AFTER", check_request),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": ("AROUND", without_empty_keys),
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", note_guidance),
    "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": ("AFTER", note_images),
    f"{_RUNNER}.load_model": ("AFTER", load_value_model),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget": ("AROUND", leave_room),
    f"{_RUNNER}.alloc_memory_pool": ("AFTER", take_slots),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("AFTER", admit_requests),
    f"{_RUNNER}.forward": ("AFTER", extend_prompts),
    f"{_RUNNER}.sample": ("AROUND", sample),
    "sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed": ("AROUND", sample_delayed),
    f"{_SAMPLER}._preprocess_logits": ("AFTER", change_logits),
    f"{_SAMPLER}._sample_from_probs": ("AROUND", sample_from_probs),
    "sglang.srt.speculative.eagle_utils.eagle_sample": ("AROUND", verify_drafts),
}


def plugin() -> None:
    """The entry point: hooks the engine when a value model is set. Called in each of its processes.

    The engine only logs what a plugin raises: bad settings end its start later, when the model is loaded.
    """
    if not Settings.are_given():
        return
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, HookType[kind])
