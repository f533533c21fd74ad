"""The guided step: candidates, value forward, head, reweighting and draw, for the requests of a decode batch.

A step is a fixed sequence of kernel launches on tensors with shapes that depend only on the batch size. It makes no
host-device sync and does not loop over requests; the cost of a request is proportional to its number of candidates. The
value model's cache uses the engine's slots. A request's parameters are written to a device table on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from lenvm_kernels.guidance.params import GuidanceParams
from lenvm_kernels.guidance.spans import SpanState
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops._common import FLOAT_DTYPES, FLOATS, INT_DTYPES, ceil_div, check_tensor, resolve_backend
from lenvm_kernels.ops.reweight_scatter import scatter_probs
from lenvm_kernels.ops.topk_candidates import rows_are_aligned
from lenvm_kernels.profiling import profiler_range
from lenvm_kernels.step import stages
from lenvm_kernels.step.inputs import MAX_ROWS, PreparedStep, Sampling, SlotTable, StepBatch, StepConfig, check_class
from lenvm_kernels.step.outputs import StepOutput, joined, map_tensors, rows_of
from lenvm_kernels.step.sources import ValueSource
from lenvm_kernels.step.stages import StepCall
from lenvm_kernels.step.state import Graphs, History, StepRows, StepState, StepTensors, bucket_of
from lenvm_kernels.types import DeltaTokens, Drafts, Filters, Mode
from lenvm_kernels.values import ImageTokens

NO_FILTERS = Sampling(top_k=0, top_p=1.0, min_p=0.0)


class GuidedStep:
    """Length-guided decoding of the requests of an engine.

    A request is identified by its row in the engine's slot table. An engine calls :meth:`add_request` when a request
    arrives, :meth:`extend` with the tokens of its prompt (except the last), :meth:`prepare` and :meth:`step` before it
    draws tokens, and :meth:`remove_request` when the request leaves. A batch may contain unguided requests, at no cost.

    :func:`working_bytes` documents the memory of a step and its cache.

    The stages of a step are :func:`torch.profiler.record_function` ranges: ``lenvm.begin``, and unless a CUDA graph is
    replayed, ``lenvm.candidates``, ``lenvm.values`` (with ``lenvm.layers`` and ``lenvm.head`` inside) and
    ``lenvm.draw``.

    Args:
        values: the value source: :class:`ModelValues` of a value model; :class:`ProbeValues` of a probe, which reads
            the base model's states in each step; or :class:`ConstantValues`, with which only ``near``,
            ``ge_near`` and ``le_near`` guide. Only a value model needs :meth:`extend` and slots.
        slots: the slots of tokens: :class:`PagedSlots`, or :class:`EngineSlots` if the engine assigns them.
        config: :class:`StepConfig`.

    Attributes:
        config: the configuration, with its defaults resolved.
        table: :class:`GuidanceTable` of the requests.
        values: the :class:`ValueSource`.
        text_breaks: ``config.text_breaks`` on the host, empty if it is None.
        graphs_class: runs the launches of a step if ``config.graphs``.

    Raises:
        TypeError, ValueError: invalid argument of the class or of a method; the message names it, the value and the
            accepted values.

    Example:
        >>> slots = PagedSlots(8, max_len=2048, device="cuda")
        >>> step = GuidedStep(ModelValues(value_model), slots, StepConfig(vocab_size=151_936))
        >>> step.add_request(3, parse_guidance({"target_length": 200}), eos_token_ids={151_645}, prompt_len=17)
    """

    graphs_class = Graphs

    def __init__(self, values: ValueSource, slots: SlotTable, config: StepConfig) -> None:
        if not isinstance(values, ValueSource):
            accepted = "a ValueSource: ModelValues(value_model), ProbeValues(probe) or ConstantValues()"
            raise TypeError(f"values must be {accepted}, got {type(values).__name__}")
        if not isinstance(config, StepConfig):
            raise TypeError(f"config must be a StepConfig, got {type(config).__name__}")
        if not isinstance(slots, SlotTable):
            raise TypeError(f"slots must be PagedSlots or EngineSlots, got {type(slots).__name__}")
        self.values, self.device = values, values.device or slots.table.device
        check_tensor("slots.table", slots.table, dtypes=torch.int32, shape=(None, None), device=self.device)
        if slots.num_slots < 1:
            raise ValueError(f"slots.num_slots must be at least 1, got {slots.num_slots}")
        config = replace(config, backend=resolve_backend(config.backend, "slots.table", slots.table))
        self.text_breaks = () if config.text_breaks is None else config.text_breaks.tolist()
        has_graphs = self.graphs_class.supports(self.device)
        self.config = config = config.completed(slots, self.device, values.candidates, has_graphs=has_graphs)
        table_rows = slots.table.shape[0]
        self.max_requests = config.max_requests or table_rows
        # One row per request, one for the dummy requests of a padded batch, then the rows of answers after spans.
        self.table = GuidanceTable(
            2 * table_rows + 1,
            self.device,
            max_eos=config.max_eos,
            max_scaled_tokens=config.max_scaled_tokens,
            early=0.0 if config.text_breaks is None else values.early,
        )
        # Kept on the host to skip launches that no request needs.
        self._scaled_rows, self._value_rows, self._span_rows, self._answer_rows = (set[int]() for _ in range(4))
        self._max_rows = min(self.max_requests, MAX_ROWS)
        trees, states = values.needs_tokens, values.needs_states
        tensors = StepTensors(self._max_rows, config, self.device, trees=trees, states=states)
        history = History(table_rows + 1, config.max_delta, self.device, reads_tokens=values.needs_tokens)
        self._state = StepState(config, slots, self.table, tensors, history)
        self._graphs = self.graphs_class(self.device) if config.graphs else None
        self._numbers: dict[Any, torch.Tensor] = {}
        values.bind(self._state)

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
        """Add a request in a row of the slot table. The row is copied to the device at the next call.

        For arguments and errors, see :meth:`GuidanceTable.add_request`. End tokens outside int32, and token
        temperatures of ids outside the vocabulary, are ignored. Also raises ValueError for guidance that the value
        source does not support.
        """
        if not 0 <= table_row < self._state.padding_row:
            raise IndexError(f"table_row must be in [0, {self._state.padding_row}), got {table_row}")
        eos_token_ids = {token for token in eos_token_ids if 0 <= token < 2**31}
        params = self._fitted(params)
        self.values.add_request(table_row, params)
        answer = None if params is None else params.answer
        row = None if answer is None else self._state.answer_row(table_row)
        self.table.add_request(
            table_row, params, eos_token_ids, prompt_len=prompt_len, seed=seed, span=span, answer_row=row
        )
        if answer is not None or table_row in self._answer_rows:
            self.table.add_request(self._state.answer_row(table_row), answer, eos_token_ids, seed=seed)
        params = params or GuidanceParams()
        for rows, is_member in (
            (self._scaled_rows, params.token_temperature_scale),
            (self._value_rows, params.return_values),
            (self._span_rows, params.has_span),
            (self._answer_rows, params.answer is not None),
        ):
            rows.discard(table_row)
            if is_member:
                rows.add(table_row)
        self._state.history.forget(table_row)

    def _fitted(self, params: GuidanceParams | None) -> GuidanceParams | None:
        """Parameters, also of the answer after a thought, with tokens of the vocabulary and the default stride."""
        if params is None:
            return None
        known = {t: scale for t, scale in params.token_temperature_scale.items() if t < self.config.vocab_size}
        stride = params.value_stride or self.config.value_stride
        return replace(params, token_temperature_scale=known, value_stride=stride, answer=self._fitted(params.answer))

    def remove_request(self, table_row: int) -> None:
        """Make a row unguided when its request leaves. Not needed if :meth:`add_request` reuses the row."""
        self.add_request(table_row, None, set())

    def restart_request(self, table_row: int) -> None:
        """Discard a request's history because its slots were reassigned; its guidance is kept.

        All its tokens must be passed to :meth:`extend` again.
        """
        self._state.history.forget(table_row)

    def flush(self) -> None:
        """Copy the state of added and removed requests to the device, as steps do.

        Required before capturing or replaying a CUDA graph that contains a step.
        """
        self.table.flush()
        self._state.history.flush()

    @property
    def faults(self) -> torch.Tensor:
        """int32 ``[R]``; number of steps in which the request in each table row lost its guidance."""
        faults, rows = self.table.columns.faults, self._state.padding_row
        return faults[:rows] + faults[rows + 1 :] if self._answer_rows else faults[:rows]

    def passed_lens(self, table_rows: torch.Tensor) -> torch.Tensor:
        """int32 ``[B]``; number of tokens of each sequence that were passed to :meth:`extend` and steps without a gap.

        Args:
            table_rows: int32 or int64 ``[B]``; row of each request in the slot table.
        """
        self.flush()
        return self._state.history.columns.passed_lens[table_rows.long()]

    @torch.no_grad()
    def extend(
        self,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        cached_lens: torch.Tensor,
        *,
        begins: Sequence[int] | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        """Compute and cache keys and values of tokens without candidates, such as prompts.

        The last token of a prompt is passed to :meth:`step`. Requests without guidance and ``return_values`` are
        skipped.

        Args:
            tokens: int32 or int64 ``[D]``; tokens of all requests.
            table_rows: int32 or int64 ``[B]``; row of each request in the slot table, with slots for its tokens.
            starts: int32 ``[B]``; index of each request's first token in ``tokens``.
            lens: int32 ``[B]``; number of tokens per request to compute, 0 or more.
            cached_lens: int32 ``[B]``; number of tokens of each request that are cached, also by other requests.
            begins: index of each request's first token in ``tokens``, ascending, on the host. A request computed in
                parts is then split at multiples of ``chunk_tokens`` from its own start, so that its keys and values are
                bitwise identical in any batch. If None, ``tokens`` is split at multiples of ``chunk_tokens``.
            images: images of the ``D`` tokens. If None, all are text. Positions must be shifted as in
                :func:`image_positions`, because all other calls use the index in the sequence as the position.
        """
        check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None,), device=self.device)
        check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(None,), device=self.device)
        for name, tensor in (("starts", starts), ("lens", lens), ("cached_lens", cached_lens)):
            check_tensor(name, tensor, dtypes=torch.int32, shape=table_rows.shape, device=self.device)
        begins = [0] if begins is None else [int(begin) for begin in begins]
        if begins != sorted(begins) or not all(0 <= begin <= len(tokens) for begin in begins):
            accepted = f"ascending indices from 0 to the number of tokens, {len(tokens)}"
            raise ValueError(f"begins must be {accepted}, got {begins}")
        if images is not None:
            self.values.check_images(images, len(tokens))
        self.flush()
        # Kernels are compiled for one dtype.
        tokens, table_rows = tokens.long(), table_rows.long()
        table = self.table.columns
        needs_model = (table.mode[table_rows] != Mode.UNGUIDED) | table.return_values[table_rows]
        prompts = DeltaTokens(tokens, starts, torch.where(needs_model, lens, 0), cached_lens, table_rows)
        self.values.extend(prompts, begins, images)
        self._state.history.extend(table_rows, torch.where(needs_model, cached_lens + lens, 0))

    @torch.no_grad()
    def prepare(self, logits: torch.Tensor | None, batch: StepBatch, drafts: Drafts | None = None) -> PreparedStep:
        """Apply token temperatures and limits of spans to a batch's logits, before anything else reads the logits.

        Open spans prevent the end of the sequence (``allow_eos``), end at their ``hard_limit``, and land. A
        :meth:`step` must follow, unless no request of the batch is guided or has a span.

        With ``drafts``, a token is drawn at each node of a request (:class:`Drafts`), from the distribution that
        verification must use. ``logits`` and the arguments of :meth:`step` then have one row per node; request ``i``
        starts at row ``i * (1 + D)``. Drafts are not part of a sequence yet: accepted drafts must be passed to the next
        step as its tokens.

        Args:
            logits: fp32, bf16 or fp16 ``[B, V]``; logits of the next token, changed in place. If None, spans are
                tracked without changing logits.
            batch: the requests (:class:`StepBatch`).
            drafts: ``[B, max_drafts]``; draft tokens.
        """
        config, device = self.config, self.device
        check_class("batch", batch, StepBatch)
        batch = batch.checked(self.max_requests, device)
        requests, nodes, is_changed = batch.tokens.shape[0], 1, False
        if drafts is not None:
            drafts, nodes = config.checked_drafts(drafts, requests, device), 1 + config.max_drafts
        if logits is not None:
            check_tensor("logits", logits, dtypes=FLOAT_DTYPES, shape=(requests * nodes, None), device=device)
            is_changed = bool(self._scaled_rows or self._span_rows)
            if self._scaled_rows:
                rows = batch.table_rows if drafts is None else batch.table_rows.repeat_interleave(nodes)
                stages.scale_tokens(self._state, logits, rows)
        spans = stages.limit_spans(self._state, logits, batch, drafts) if self._span_rows else None
        return PreparedStep(logits, batch, drafts, spans, is_changed)

    @torch.no_grad()
    def step(
        self,
        prepared: PreparedStep,
        sampling: Sampling,
        *,
        scores: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        drawn: torch.Tensor | None = None,
        verify: str | None = None,
    ) -> StepOutput:
        """Guide the next token of each request of a batch from :meth:`prepare`. The step makes no host-device sync.

        Every token of a request that is guided or requests values must be passed to :meth:`extend` or to a step, and at
        most ``max_delta`` tokens may be pending. If a token is missing, the request continues unguided, which
        :attr:`faults` counts, until :meth:`extend` passes its tokens again.

        On a GPU all launches after the first are replayed from a CUDA graph (``StepConfig.graphs``), unless the caller
        captures a graph. A graph depends on the number of requests (rounded up to a power of two) and drafts, on the
        dtype, width and alignment of the scores, and on whether ``sampling.is_logits``, ``sampling.sample``,
        ``vocab_mask`` and ``verify`` are set. A caller that captures the step in its own graph must capture it again if
        one of these changes, or if the first request with a span or with token temperatures arrives.

        Args:
            prepared: the batch.
            sampling: sampling parameters (:class:`Sampling`). Can be reused while the filters stay the same.
            scores: fp32, bf16 or fp16 ``[B, V]``; scores computed from the logits, such as probabilities. If None, the
                logits that were passed to :meth:`prepare`. Columns from ``vocab_size`` on are ignored; tokens without a
                column are no candidates.
            probs: fp32, bf16 or fp16 ``[B, V]``; rows of requests that are guided or have a single candidate are
                rewritten in place (:func:`reweight_scatter`). May be ``scores``.
            drawn: int32 or int64 ``[B]``; tokens drawn with the requests' own filters, for requests that are not drawn
                from their candidates. If None, such requests have no remaining length.
            verify: ``"same_draws"`` accepts drafts that equal the tokens drawn in their place, and the draw after the
                last of them, so that the text is the same as without drafts (:func:`verify_drafts`). If None, the
                caller verifies the drafts.
        """
        config, device = self.config, self.device
        check_class("prepared", prepared, PreparedStep)
        check_class("sampling", sampling, Sampling)
        if scores is None and (scores := prepared.logits) is None:
            raise ValueError("scores must be given unless logits were passed to prepare, got neither")
        batch, drafts = prepared.batch, prepared.drafts
        if verify not in (None, "same_draws") or (verify and (drafts is None or not sampling.sample)):
            raise ValueError(f"verify must be None, or 'same_draws' with drafts and sample, got {verify!r}")
        requests, nodes = batch.tokens.shape[0], 1 if drafts is None else 1 + config.max_drafts
        count = requests * nodes
        scores = config.checked_scores(scores, count, device)
        mask = sampling.checked_mask(scores)
        if drawn is not None:
            drawn = check_tensor("drawn", drawn, dtypes=INT_DTYPES, shape=(count,), device=device).long()
        if probs is not None:
            check_tensor("probs", probs, dtypes=FLOATS[config.backend], shape=(count, None), device=device)
        batch.check_states(count, self.values.needs_states)
        filters = sampling.filters(requests, device, self._numbers)
        self.flush()
        is_aligned = rows_are_aligned(scores) and scores.data_ptr() % 16 == 0
        options = sampling.is_logits, sampling.sample, verify is not None, is_aligned
        call = StepCall(scores, mask, drawn, probs, *options)
        if requests <= MAX_ROWS:
            return self._launch(prepared, call, filters)
        outputs = []
        for first in range(0, requests, MAX_ROWS):
            own = slice(first, min(first + MAX_ROWS, requests))
            of_nodes = slice(own.start * nodes, own.stop * nodes)
            part = rows_of(batch._replace(states=None), own)._replace(
                states=rows_of(batch.states, of_nodes), counts=batch.counts and own.stop == requests
            )
            prepared_part = prepared._replace(
                batch=part, drafts=rows_of(drafts, own), spans=rows_of(prepared.spans, of_nodes)
            )
            output = self._launch(prepared_part, rows_of(call, of_nodes), rows_of(filters, own))
            outputs.append(map_tensors(torch.clone, output))  # the next part overwrites the output
        return joined(outputs)

    def _launch(self, prepared: PreparedStep, call: StepCall, filters: Filters) -> StepOutput:
        """A step of at most ``MAX_ROWS`` requests, with checked arguments."""
        batch, state, count = prepared.batch, self._state, len(call.scores)
        requests = len(batch.lengths)
        graphs, rows = self._rows_for(requests, count // requests)
        with profiler_range("begin"):
            stages.begin(state, rows, prepared, filters, call)
        if graphs is None:
            output = stages.guide(state, rows, self.values, call, batch.states)
        else:
            if rows.states is not None and batch.states is not None:
                rows.states[:count].copy_(batch.states)
            at_addresses = call.at_addresses(state.tensors.addresses, len(rows.requests.positions))
            guide = partial(stages.guide, state, rows, self.values, at_addresses, rows.states)
            output = graphs.run((rows.sizes, call.key), guide)
            if count < len(output.probs):
                verified = rows_of(output.verified, slice(requests))
                output = rows_of(output._replace(verified=None), slice(count))._replace(verified=verified)
        if not self._value_rows:
            output = output._replace(remaining_lengths=None)
        if graphs is not None:  # a later step overwrites the result, and callers keep these fields
            names = "tokens", "remaining_lengths", "verified"
            output = output._replace(**{name: map_tensors(torch.clone, getattr(output, name)) for name in names})
        if call.probs is not None:
            of_batch = state.table.columns.mode, rows.requests.table_rows[:count]
            scatter_probs(state.config.backend, call.probs, output.probs, output.candidates, *of_batch)
        has_tokens = call.sample or call.drawn is not None
        return output if has_tokens else output._replace(tokens=None, remaining_lengths=None)

    def _rows_for(self, requests: int, nodes: int) -> tuple[Graphs | None, StepRows]:
        """The graphs, None if the batch is launched eagerly, and the tensors of its rows, padded for a graph."""
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        graphs = None if is_captured else self._graphs
        size = requests if graphs is None else bucket_of(requests, self._max_rows)
        return graphs, self._state.tensors.rows(size, nodes)

    @torch.no_grad()
    def predict(self, batch: StepBatch) -> torch.Tensor:
        """Predict output lengths after the given tokens, e.g. after the last token of a prompt, before a draw.

        The state of the requests does not change: the tokens must also be passed to the next :meth:`step`, and
        ``value_stride`` does not count this call.

        Args:
            batch: the requests (:class:`StepBatch`). ``tokens`` are the last tokens of each sequence, at most
                ``1 + max_drafts``; all others must have been passed to :meth:`extend` or to a step. ``new_lens`` is the
                number of valid tokens in each row. ``active`` is ignored. With a probe, ``tokens`` has one token per
                sequence, and ``states [B, L H]`` are the states at the token before it.

        Returns:
            fp32 of the shape of ``tokens``; predicted number of tokens after each token, NaN for requests without
            ``return_values``.
        """
        config, device = self.config, self.device
        has_states = self.values.needs_states is not None
        if not self.values.needs_tokens and not has_states:
            came = type(self.values).__name__
            raise ValueError(f"values must be ModelValues or ProbeValues to predict lengths, got {came}")
        check_class("batch", batch, StepBatch)
        batch = batch.checked(self.max_requests, device)
        nodes = 1 if has_states else 1 + config.max_drafts
        tokens, table_rows, lengths, new_lens = batch[:4]
        if new_lens is None:
            tokens, new_lens = tokens[:, None], torch.ones_like(lengths)
        b, columns = tokens.shape
        if columns > nodes:
            accepted = "1 column" if nodes == 1 else f"1 to 1 + max_drafts = {nodes} columns"
            raise ValueError(f"batch.tokens must have {accepted}, got {columns}")
        batch.check_states(b, self.values.needs_states)
        if b > MAX_ROWS:
            parts = [slice(first, first + MAX_ROWS) for first in range(0, b, MAX_ROWS)]
            return torch.cat([self.predict(rows_of(batch, part)) for part in parts])
        self.flush()

        # The sequence ends before the tokens, which are scored as candidates at their own positions.
        before = StepBatch(tokens, table_rows, lengths - new_lens, torch.zeros_like(lengths))
        graphs, rows = self._rows_for(b, nodes)
        no_drafts = None if nodes == 1 else Drafts(*(x[:b] for x in self._state.tensors.no_drafts))
        filters = NO_FILTERS.filters(b, device, self._numbers)
        stages.begin(self._state, rows, PreparedStep(None, before, no_drafts, None, False), filters, None)
        wants_length = rows.requests.wants_length.view(-1, nodes)[:b, 0]
        rows.score_chains(tokens, torch.where(wants_length, new_lens, 0))
        states = batch.states
        if graphs is not None and rows.states is not None and states is not None:
            rows.states[:b].copy_(states)
            states = rows.states
        compute = partial(self.values.value_logits, rows, states)
        with profiler_range("values"):
            values = compute() if graphs is None else graphs.run((rows.sizes, "values"), compute)
        assert values is not None  # only ConstantValues returns None
        z = values[1].view(-1, nodes, values[1].shape[1])[:b, :columns, 0]
        # Requests between two spans also have wants_length, but only to feed the value model.
        wants_length = wants_length & self.table.columns.return_values[table_rows]
        is_wanted = wants_length[:, None] & (torch.arange(columns, device=device) < new_lens[:, None])
        found = self.table.remaining_lengths(table_rows, z, tokens)
        return found.masked_fill(~is_wanted, math.nan).view(batch.tokens.shape)

    @torch.no_grad()
    def warm_up(
        self,
        scores_dtype: torch.dtype = torch.float32,
        *,
        is_logits: bool = True,
        sample: bool = True,
        probs_dtype: torch.dtype | None = None,
        progress: bool = True,
    ) -> None:
        """Compile all kernels and capture the graphs of all batch sizes in advance.

        Covers steps with and without drafts, if ``tokens [B, N]`` have ``1 + max_drafts`` columns. The kernels of steps
        with a ``vocab_mask`` are compiled, but their graphs are captured on first use. No ``[B, V]`` is allocated,
        because all dummy requests share one row of scores.

        Args:
            scores_dtype, is_logits: dtype of the scores passed to :meth:`step`, and whether they are logits.
            sample: :attr:`Sampling.sample` of the steps.
            probs_dtype: dtype of the ``probs`` passed to :meth:`step`. If None, none are passed.
            progress: whether to show a progress bar on stderr.
        """
        sizes = sorted({bucket_of(b, self._max_rows) for b in range(1, self._max_rows + 1)})
        temperature = 1.0 if is_logits else None
        sampling = Sampling(0, 1.0, 0.0, temperature=temperature, is_logits=is_logits, sample=sample)
        # Largest first, so that smaller graphs reuse its memory.
        for size in tqdm(sizes[::-1], desc="warming up", unit="size", disable=not progress):
            self._warm_up_size(size, sampling, scores_dtype, probs_dtype, is_last=size == sizes[0])
        self.values.warm_up(self._state.padding_row)

    def _warm_up_size(
        self,
        size: int,
        sampling: Sampling,
        scores_dtype: torch.dtype,
        probs_dtype: torch.dtype | None,
        is_last: bool,
    ) -> None:
        """Steps of dummy requests: without drafts, with one and with several new tokens, and with drafts.

        The requests are unguided, so the scores are not read.
        """
        config, device, states = self.config, self.device, self.values.needs_states
        table_rows = torch.full((size,), self._state.padding_row, dtype=torch.int64, device=device)
        lens = torch.zeros(size, dtype=torch.int32, device=device)

        def zeros(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            # One row in memory, because the scores of a large batch would take gigabytes that an engine has reserved.
            return torch.zeros(1, width, dtype=dtype, device=device).expand(count, -1)

        most = 1 + config.max_drafts
        for nodes, width in sorted({(1, 1), (1, most), (most, most)}):
            count = size * nodes
            scores = zeros(count, config.vocab_size, scores_dtype)
            tokens = torch.zeros((size, width) if width > 1 else (size,), dtype=torch.int64, device=device)
            row_states = None if states is None else zeros(count, *states).contiguous()
            batch = StepBatch(tokens, table_rows, lens, lens if width > 1 else None, states=row_states)
            none = torch.full((size, nodes - 1), -1, dtype=torch.int32, device=device)
            drafts = None if nodes == 1 else Drafts(none.long(), none)
            prepared, probs, masks = [self.prepare(None, batch, drafts)], None, list[torch.Tensor | None]([None])
            if is_last:
                spans = stages.limit_spans(self._state, None, batch, drafts)
                prepared.append(prepared[0]._replace(spans=spans))
                masks.append(zeros(count, ceil_div(config.vocab_size, 32), torch.int32))
                if sampling.is_logits:
                    stages.limit_spans(self._state, scores.contiguous(), batch, drafts)
                if probs_dtype is not None:
                    probs = torch.zeros(scores.shape, dtype=probs_dtype, device=device)
            for mask in masks:
                for each in prepared:
                    self.step(each, sampling._replace(vocab_mask=mask), scores=scores, probs=probs)
                    if drafts is not None and sampling.sample:
                        self.step(each, sampling._replace(vocab_mask=mask), scores=scores, verify="same_draws")
            # With a probe, a prediction has one token per request.
            if self.values.needs_tokens or (states is not None and nodes == width == 1):
                self.predict(batch)
