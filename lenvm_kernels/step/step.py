"""The guided step: candidates, value forward, head, reweighting and draw, for the requests of a decode batch.

A step is a fixed sequence of kernel launches over tensors whose shapes depend only on the batch size. It makes no
host-device sync and does not loop over requests, and a request's cost is proportional to its number of candidates. The
value model's cache uses the engine's slots. A request's parameters are written to a device table when it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from lenvm_kernels.guidance.params import GuidanceParams
from lenvm_kernels.guidance.spans import SpanState
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops._common import resolve_backend
from lenvm_kernels.ops.expand_drafts import expand_drafts
from lenvm_kernels.ops.gather_requests import gather_requests
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.select_scored import select_scored
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.profiling import profiler_range
from lenvm_kernels.step import checks
from lenvm_kernels.step.graphs import bucket_of
from lenvm_kernels.step.history import History
from lenvm_kernels.step.inputs import Sampling, SlotTable, StepBatch, StepConfig
from lenvm_kernels.step.outputs import StepOutput, lengths_after, lengths_of
from lenvm_kernels.step.sources import ConstantValues, ModelValues, ProbeValues, ValueSource
from lenvm_kernels.step.tensors import StepRows, StepTensors, apply_spans
from lenvm_kernels.step.warm_up import calls_of_every_kind
from lenvm_kernels.types import Candidates, Drafts, Mode, SpanNodes, StepRequests
from lenvm_kernels.values import ImageTokens, KVCache, LengthProbe, ValueModel

# Tokens past the target at which outputs end that wait for the end of a sentence, measured with Qwen2.5-Coder-1.5B and
# SmolLM2 (bench/results/nvidia-h200/real-model).
EARLY_WITH_VALUES, EARLY_WITHOUT_VALUES = 6.0, 3.0


class GuidedStep:
    """Length-guided decoding of the requests of an engine.

    A request is identified by its row of the engine's slot table. An engine calls :meth:`add_request` when a request
    arrives, :meth:`extend` with the tokens of its prompt (all but the last), :meth:`step` whenever it is about to draw
    tokens, and :meth:`remove_request` when the request leaves. A batch may contain requests without guidance, at no
    cost.

    :func:`working_bytes` documents the memory of a step and of its cache.

    The stages of a step are :func:`torch.profiler.record_function` ranges: ``lenvm.candidates``, ``lenvm.values`` (with
    ``lenvm.layers`` and ``lenvm.head`` inside, unless a CUDA graph is replayed), ``lenvm.reweight`` and
    ``lenvm.sample``.

    Args:
        value_model: the value model, or a :class:`LengthProbe`, which computes values from the base model's states of
            each step. If None, only ``near``, ``ge_near`` and ``le_near`` guide (:class:`ConstantValues`). With a probe
            or without values :meth:`extend` is not needed, and slots are ignored.
        slots: the slots of tokens: :class:`PagedSlots`, or :class:`EngineSlots` for an engine that assigns its own.
        config: :class:`StepConfig`.

    Attributes:
        config: the configuration, with ``max_requests`` and ``graphs`` resolved.
        table: :class:`GuidanceTable` of the requests.
        values: :class:`ValueSource` of the step.
        cache: :class:`KVCache` of the value model; None without one.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.

    Example:
        >>> slots = PagedSlots(8, max_len=2048, device="cuda")
        >>> step = GuidedStep(value_model, slots, StepConfig(vocab_size=151_936))
        >>> step.add_request(3, parse_guidance({"target_length": 200}), eos_token_ids={151_645}, prompt_len=17)
    """

    def __init__(self, value_model: ValueModel | LengthProbe | None, slots: SlotTable, config: StepConfig) -> None:
        probe, value_model = (value_model, None) if isinstance(value_model, LengthProbe) else (None, value_model)
        self.config = config = checks.completed(config, value_model, slots)
        if probe is not None and probe.device != slots.table.device:
            raise ValueError(f"value_model must be on {slots.table.device} as the slots, got one on {probe.device}")
        device, table_rows = slots.table.device, slots.table.shape[0]
        self.max_requests = config.max_requests or table_rows
        self.value_model, self.device, self.slot_table = value_model, device, slots.table
        # An extra row, for the dummy requests that pad a batch to its graph's size.
        self._padding_row = table_rows
        early = EARLY_WITH_VALUES if probe is not None or value_model is not None else EARLY_WITHOUT_VALUES
        self.table = GuidanceTable(
            table_rows + 1,
            device,
            max_eos=config.max_eos,
            max_scaled_tokens=config.max_scaled_tokens,
            early=0.0 if config.text_breaks is None else early,
        )
        # Kept on the host to skip launches that no request needs.
        self._scaled_rows, self._value_rows, self._span_rows = set[int](), set[int](), set[int]()
        sizes = self.max_requests, config.max_drafts, config.max_candidates
        self._tensors = StepTensors(*sizes, device, trees=value_model is not None)
        self._history = History(table_rows + 1, config.max_delta, device, reads_tokens=value_model is not None)
        self.values: ValueSource
        self.cache: KVCache | None = None
        if probe is not None:
            self.values = ProbeValues(probe, self._tensors, self.table, config)
        elif value_model is None:
            self.values = ConstantValues(table_rows + 1, self._tensors, device)
        else:
            self.values = source = ModelValues(value_model, self._tensors, self._history, slots, config)
            self.cache = source.cache

    def add_request(
        self,
        table_row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
        span: SpanState | None = None,
    ) -> None:
        """Admit a request into a row of the slot table. The row is copied to the device at the next call.

        Arguments and errors are those of :meth:`GuidanceTable.add_request`. Token temperatures of ids outside the
        vocabulary are ignored. Also raises ValueError for guidance that the value source does not support.
        """
        if not 0 <= table_row < self._padding_row:
            raise IndexError(f"table_row must be in [0, {self._padding_row}), got {table_row}")
        if params is not None:
            known = {t: scale for t, scale in params.token_temperature_scale.items() if t < self.config.vocab_size}
            stride = params.value_stride or self.config.value_stride
            params = replace(params, token_temperature_scale=known, value_stride=stride)
        self.values.add_request(table_row, params)
        self.table.add_request(table_row, params, eos_token_ids, prompt_len=prompt_len, seed=seed, span=span)
        for rows in (self._scaled_rows, self._value_rows, self._span_rows):
            rows.discard(table_row)
        if params is not None:
            if params.token_temperature_scale:
                self._scaled_rows.add(table_row)
            if params.return_values:
                self._value_rows.add(table_row)
            if params.has_span:
                self._span_rows.add(table_row)
        self._history.forget(table_row)

    def remove_request(self, table_row: int) -> None:
        """Make a row unguided when its request leaves. Not needed before :meth:`add_request` refills the row."""
        self.add_request(table_row, None, set())

    def restart_request(self, table_row: int) -> None:
        """Discard a request's history because its slots were reassigned; its guidance is kept.

        Its tokens must be passed to :meth:`extend` again.
        """
        self._history.forget(table_row)

    def flush(self) -> None:
        """Copy the state of added and removed requests to the device, as steps do.

        Required before capturing or replaying a CUDA graph that contains a step.
        """
        self.table.flush()
        self._history.flush()
        self.values.flush()

    def told_lens(self, table_rows: torch.Tensor) -> torch.Tensor:
        """int32 ``[B]``; number of tokens of each sequence that were passed to :meth:`extend` and steps without a gap.

        Args:
            table_rows: int32 or int64 ``[B]``; row of each request in the slot table.
        """
        self.flush()
        return self._history.columns.told_lens[table_rows.long()]

    @torch.no_grad()
    def scale_tokens(self, logits: torch.Tensor, table_rows: torch.Tensor) -> None:
        """Apply token temperatures to ``logits [B, V]`` in place. Must precede everything else that reads them."""
        if self._scaled_rows:
            columns = self.table.columns
            scales = columns.token_scales[table_rows].to(logits.dtype)
            logits.scatter_reduce_(1, columns.scaled_token_ids[table_rows], scales, "prod")

    @property
    def has_spans(self) -> bool:
        """Whether any request has a span. Read from host state."""
        return bool(self._span_rows)

    @torch.no_grad()
    def limit_spans(self, logits: torch.Tensor, batch: StepBatch, drafts: Drafts | None = None) -> SpanNodes | None:
        """Mask the end of sequence in open spans (``end_token_ids``), force their ends at ``hard_limit``, and land.

        Changes ``logits`` in place and must precede everything that reads them except :meth:`scale_tokens`. Arguments
        and errors are those of the :meth:`step` that must follow unless no request is guided.

        Returns:
            The ``spans`` argument of that step; None if no request has a span.
        """
        if not self.has_spans:
            return None
        checks.check_kinds(batch)
        batch = batch.checked(None, self.device)
        if drafts is not None:
            checks.check_drafts(drafts, len(batch.tokens), self.device)
        return self._limit_spans(logits, batch, checks.of_one_dtype(drafts))

    def _limit_spans(self, logits: torch.Tensor | None, batch: StepBatch, drafts: Drafts | None) -> SpanNodes:
        return limit_span(
            logits,
            self.table.columns,
            batch.tokens[:, None] if batch.tokens.dim() == 1 else batch.tokens,
            batch.table_rows,
            batch.lengths,
            new_lens=batch.new_lens,
            drafts=drafts,
            text_breaks=self.config.text_breaks,
            backend=self.config.backend,
        )

    @torch.no_grad()
    def extend(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        table_rows: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        cached_lens: torch.Tensor,
        *,
        begins: Sequence[int] | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        """Compute and cache keys and values of tokens whose candidates are not needed, such as those of prompts.

        The last token of a prompt is passed to :meth:`step`. Requests without guidance and ``return_values`` are
        skipped.

        Args:
            tokens: int32 or int64 ``[D]``; tokens of all requests.
            slots: int32 or int64 ``[D]``; slot of each token.
            table_rows: int32 or int64 ``[B]``; row of each request in the slot table.
            starts: int32 ``[B]``; the first token of each request in ``tokens``.
            lens: int32 ``[B]``; number of tokens per request to compute, 0 or more.
            cached_lens: int32 ``[B]``; tokens of each request that are already cached, also by other requests.
            begins: index of each request's first token in ``tokens``, ascending, on the host. A request computed in
                parts is then split at multiples of ``chunk_tokens`` from its own start, so that its keys and values are
                bitwise identical in any batch. If None, ``tokens`` is split at multiples of ``chunk_tokens``.
            images: images of the ``D`` tokens. If None, all are text. Positions must be shifted as
                :func:`image_positions` does, because all other calls take the index in the sequence as the position.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        checks.check_prompts(tokens, slots, table_rows, starts, lens, cached_lens, self.device)
        begins = checks.check_begins(begins, len(tokens))
        if images is not None:
            checks.check_images(images, len(tokens), self.value_model)
        self.flush()
        # Kernels are compiled for one dtype.
        tokens, slots, table_rows = tokens.long(), slots.long(), table_rows.long()
        table = self.table.columns
        needs_model = (table.mode[table_rows] != Mode.UNGUIDED) | table.return_values[table_rows]
        ends = starts + torch.where(needs_model, lens, 0)
        self.values.extend(tokens, slots, table_rows, starts, ends, cached_lens, begins, images)
        self._history.extend(table_rows, torch.where(needs_model, cached_lens + lens, 0))

    @torch.no_grad()
    def step(
        self,
        scores: torch.Tensor,
        batch: StepBatch,
        sampling: Sampling,
        drafts: Drafts | None = None,
        *,
        probs: torch.Tensor | None = None,
        drawn: torch.Tensor | None = None,
        verify: str | None = None,
        spans: SpanNodes | None = None,
    ) -> StepOutput:
        """Guide the next token of each request.

        A request that is guided or requests values must pass every token of its sequence, to :meth:`extend` or to a
        step, and at most ``max_delta`` tokens may be pending. If a token is missing, the request continues without
        guidance, which ``table.columns.faults`` counts, until :meth:`extend` passes its tokens again. The step makes no
        host-device sync.

        With ``drafts``, a token is drawn at each node of a request (:class:`Drafts`), from the distribution that
        verification must use. ``scores``, ``sampling.vocab_mask``, ``probs`` and ``drawn`` then have one row per node;
        request ``i`` starts at row ``i * (1 + D)``. Drafts are not yet part of a sequence: accepted drafts must be
        passed to the next step as its tokens.

        Args:
            scores: fp32, bf16 or fp16 ``[B, V]``; scores of the next token: probabilities or logits.
            batch: the requests (:class:`StepBatch`).
            sampling: how their next tokens are drawn (:class:`Sampling`). Can be reused while the filters stay the
                same.
            drafts: ``[B, max_drafts]``; tokens that may come next.
            probs: fp32, bf16 or fp16 ``[B, V]``; rows of requests that are guided or have a single candidate are
                rewritten in place (:func:`reweight_scatter`). May be ``scores``.
            drawn: int32 or int64 ``[B]``; tokens drawn with the requests' own filters, for requests that are not drawn
                from their candidates. Without it, such requests have no remaining length.
            verify: ``"same_draws"`` accepts the drafts that equal the tokens drawn in their place, and the draw after
                the last of them: the text is the same as without drafts (:func:`verify_drafts`). If None, the caller
                verifies the drafts.
            spans: result of :meth:`limit_spans` for this step. If None, it is computed here without changing logits.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        config, device = self.config, self.device
        checks.check_kinds(batch, sampling)
        backend = resolve_backend(config.backend, "scores", scores)
        b = checks.num_requests(scores, drafts, config, self.max_requests, device)
        rows, nodes = scores.shape[0], scores.shape[0] // b
        drafts = checks.of_one_dtype(drafts)
        if verify not in (None, "same_draws") or (verify and (drafts is None or not sampling.sample)):
            raise ValueError(f"verify must be None, or 'same_draws' with drafts and sample, got {verify!r}")
        batch = batch.checked(b, device)
        checks.check_states(batch.states, rows, device, self.values.needs_states)
        filters = sampling.of_nodes(b, nodes, config.vocab_size, device)
        checks.check_step(rows, device, probs=probs, drawn=drawn, spans=spans, backend=backend)
        drawn = None if drawn is None else drawn.int()
        self.flush()

        with profiler_range("candidates"):
            candidates, known, padded = self._take_candidates(
                scores, batch, sampling, filters, drafts, drawn, spans, backend
            )
        scored = padded.scored
        with profiler_range("values"):
            z, predicted = self.values.value_logits(padded.requests.due.shape[0], nodes, batch.states)
        z, predicted = z[:rows], predicted[:rows]

        wants_lengths = bool(self._value_rows) and (sampling.sample or drawn is not None)
        value_logits = z.masked_fill(scored.alone[:rows, None], 0.0) if wants_lengths else z
        with profiler_range("reweight"):
            guided_probs = reweight_scatter(
                candidates,
                value_logits,
                self.table.columns,
                table_rows=known.table_rows,
                generated=known.generated,
                text_breaks=config.text_breaks,
                probs=probs,
                backend=backend,
                validate=False,
            )
        with profiler_range("sample"):
            next_tokens = drawn
            if sampling.sample:
                next_tokens = sample_candidates(
                    candidates,
                    guided_probs,
                    known.seeds,
                    scored.positions[:rows],
                    temperature=filters[3],
                    backend=backend,
                    validate=False,
                )
                if drawn is not None:
                    next_tokens = torch.where(next_tokens >= 0, next_tokens, drawn)
            remaining_lengths = verified = None
            if next_tokens is not None and wants_lengths:
                of_next = scored, predicted, known.wants_length
                remaining_lengths = lengths_after(next_tokens, self.table, known.table_rows, *of_next)
            if next_tokens is not None and drafts is not None and verify is not None:
                verified = verify_drafts(next_tokens, drafts, backend=backend)
        return StepOutput(candidates, value_logits, guided_probs, next_tokens, remaining_lengths, verified)

    def _take_candidates(
        self,
        scores: torch.Tensor,
        batch: StepBatch,
        sampling: Sampling,
        filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        drafts: Drafts | None,
        drawn: torch.Tensor | None,
        spans: SpanNodes | None,
        backend: str,
    ) -> tuple[Candidates, StepRequests, StepRows]:
        """The candidates of all nodes, the state of the nodes, and the tensors that the value source reads.

        The tensors have a row per request of the graph, the batch and the state a row per request of the batch.
        """
        config, table, b = self.config, self.table.columns, batch.tokens.shape[0]
        nodes = scores.shape[0] // b
        if self.has_spans and spans is None:
            spans = self._limit_spans(None, batch, drafts)
        requests = self._gather(batch, backend)
        padded = self._tensors.rows(requests.due.shape[0], nodes)
        if drafts is not None:
            requests = expand_drafts(requests, drafts, out=padded.nodes, backend=backend)
        of_batch = self._tensors.rows(b, nodes)
        known = of_batch.nodes
        if drafts is not None and spans is not None:
            apply_spans(known, spans, table)
        top_k, top_p, min_p, temperature = filters
        candidates = topk_candidates(
            scores,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_candidates=config.max_candidates,
            temperature=temperature,
            is_logits=sampling.is_logits,
            entropy_threshold=known.entropy_threshold,
            guided=known.guided,
            vocab_mask=sampling.vocab_mask,
            end_token_ids=table.ending_token_ids,
            min_end_prob=table.min_end_prob,
            least_share=table.least_share,
            due_length=table.due_length,
            generated=known.generated,
            text_breaks=config.text_breaks,
            last_tokens=None if config.text_breaks is None else batch.last_tokens(drafts),
            table_rows=known.table_rows,
            backend=backend,
            validate=False,
        )
        select_scored(
            candidates,
            requests,
            table.ending_token_ids,
            drawn=of_batch.none_drawn if drawn is None else drawn,
            sample=sampling.sample,
            score_all=config.score_all,
            step=self._history.columns.step,
            out=padded.scored,
            backend=backend,
            validate=False,
        )
        if not batch.counts:
            self._history.columns.uncounted.add_(1)
        if drafts is not None and padded.trees is not None:
            pack_drafts(padded.scored, drafts, out=padded.trees, backend=backend)
        return candidates, known, padded

    @torch.no_grad()
    def predict(self, batch: StepBatch) -> torch.Tensor:
        """Predict output lengths after the given tokens, e.g. after the last token of a prompt, before any draw.

        The state of the requests does not change: the same tokens must be passed to the next :meth:`step` again, and
        ``value_stride`` does not count this call.

        Args:
            batch: the requests (:class:`StepBatch`). ``tokens`` are the last tokens of each sequence, up to
                ``1 + max_drafts``; all others must have been passed to :meth:`extend` or to a step. ``new_lens`` is the
                number of valid tokens in each row. ``active`` is ignored.

        Returns:
            fp32 of the shape of ``tokens``; number of tokens predicted to follow each token, NaN for requests without
            ``return_values``.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        config, device = self.config, self.device
        if self.value_model is None:
            raise ValueError("value_model must read tokens to predict lengths before any is drawn, got none that does")
        checks.check_kinds(batch)
        batch, backend = batch.checked(None, device), resolve_backend(config.backend, "batch.tokens", batch.tokens)
        checks.check_predict(batch.tokens, config, self.max_requests)
        table_rows, lengths, (tokens, new_lens) = batch.table_rows, batch.lengths, batch.grown_by()
        (b, columns), nodes = tokens.shape, 1 + config.max_drafts
        self.flush()

        # The sequence ends before the tokens, which are scored as candidates at their own positions.
        requests = self._gather(StepBatch(tokens, table_rows, lengths - new_lens, torch.zeros_like(lengths)), backend)
        known = self._tensors.rows(b).requests
        padded = requests.due.shape[0]
        self._tensors.rows(padded, nodes).score_chains(tokens, torch.where(known.wants_length, new_lens, 0))
        with profiler_range("values"):
            z, _ = self.values.value_logits(padded, nodes)
        z = z.view(padded, nodes, -1)[:b, :columns, 0]
        is_known = torch.arange(columns, device=device) < new_lens[:, None]
        found = lengths_of(z, tokens, self.table, table_rows, known.wants_length[:, None] & is_known)
        return found.view(batch.tokens.shape)

    def warm_up(
        self,
        scores_dtype: torch.dtype = torch.float32,
        *,
        is_logits: bool = True,
        probs_dtype: torch.dtype = torch.float32,
        progress: bool = True,
    ) -> None:
        """Compile every kernel and capture every graph, so that no later step has to.

        Covers batches of every size and any optional arguments, if the row stride of scores and probs is ``vocab_size``
        or a multiple of 16 elements, and ``tokens [B, N]`` have ``1 + max_drafts`` columns.

        Args:
            scores_dtype, is_logits: dtype of the scores passed to :meth:`step`, and whether they are logits.
            probs_dtype: dtype of the ``probs`` passed to :meth:`step`.
            progress: show a progress bar on stderr.
        """
        sizes = sorted({bucket_of(b, self.max_requests) for b in range(1, self.max_requests + 1)})
        with tqdm(sizes[::-1], desc="warming up", unit="size", disable=not progress) as bar:
            for size in bar:  # largest first: the later graphs reuse its memory
                rows = torch.full((size,), self._padding_row, dtype=torch.int64, device=self.device)
                for call in calls_of_every_kind(
                    self.config, rows, scores_dtype, probs_dtype, self.values.needs_states, is_logits=is_logits
                ):
                    for logits in (None, call["scores"]) if is_logits else (None,):
                        self._limit_spans(logits, call["batch"], call["drafts"])
                    self.step(**call)
                    if self.value_model is not None:
                        self.predict(call["batch"])
        self.values.warm_up(self._padding_row)

    def _gather(self, batch: StepBatch, backend: str) -> StepRequests:
        """The state of the requests, padded to the number of requests of their graph."""
        b = batch.tokens.shape[0]
        rows = bucket_of(b, self.max_requests) if self.config.graphs else b
        return gather_requests(
            self.table.columns,
            batch.tokens,
            batch.table_rows,
            batch.lengths,
            new_lens=batch.new_lens,
            active=self._tensors.rows(b).all_active if batch.active is None else batch.active,
            history=self._history.columns,
            padding_row=self._padding_row,
            out=self._tensors.rows(rows).requests,
            backend=backend,
            validate=False,
        )
