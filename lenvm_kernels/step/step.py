"""The guided step: candidates, value forward, head, reweighting and the draw, for the requests of a decode batch.

A fixed sequence of launches over tensors whose shapes follow from the batch size alone: nothing is read back to the
host, nothing loops over requests, and what a request costs follows the candidates it has. The value model lives on the
slots of an engine; what it knows of a request is in a table on the device, written when the request arrives.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from lenvm_kernels.guidance.params import GuidanceParams
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops._common import (
    COLUMNS,
    FLOAT_DTYPES,
    FLOATS,
    INT_DTYPES,
    ceil_div,
    check_tensor,
    per_request,
    resolve_backend,
)
from lenvm_kernels.ops.expand_drafts import check_drafts, expand_drafts
from lenvm_kernels.ops.gather_requests import gather_requests_unchecked
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.reweight_scatter import reweight_scatter_unchecked
from lenvm_kernels.ops.sample_candidates import sample_candidates_unchecked
from lenvm_kernels.ops.select_scored import select_scored_unchecked
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB, topk_candidates_unchecked
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.step.graphs import bucket_of
from lenvm_kernels.step.history import History
from lenvm_kernels.step.model_values import ModelValues
from lenvm_kernels.step.rows import StepTensors
from lenvm_kernels.step.values import ConstantValues, ValueSource
from lenvm_kernels.timing import NO_RECORD, NO_TIMER, StepTimer
from lenvm_kernels.types import (
    Candidates,
    Drafts,
    Mode,
    ScoredCandidates,
    StepRequests,
    VerifiedTokens,
)
from lenvm_kernels.value_model import ImageTokens, KVCache, ValueModel


@dataclass(frozen=True)
class StepOutput:
    """What a guided step computed, all on the device.

    With drafts each node of a request has a row of its own (:class:`Drafts`): ``B`` is ``B (1 + D)`` then.

    Attributes:
        candidates: of each request; ``status`` says what became of it, ``lost_mass`` what was cut off.
        value_logits: fp32 ``[B, K]``; 0 where a candidate was not scored.
        probs: fp32 ``[B, K]``; guided probabilities of the candidates.
        tokens: int32 ``[B]``; the next tokens: with ``sample`` drawn from the candidates, else those of ``drawn``. -1
            for requests to be drawn by their own filters if that is not given; None without both.
        remaining_lengths: fp32 ``[B]``; tokens that are predicted to follow ``tokens``, NaN for requests that do not
            ask for it (``return_values``); None when no request does, or without ``tokens``.
        verified: with ``verify``, the tokens that the sequences grow by; else None.
    """

    candidates: Candidates
    value_logits: torch.Tensor
    probs: torch.Tensor
    tokens: torch.Tensor | None
    remaining_lengths: torch.Tensor | None
    verified: VerifiedTokens | None = None


class GuidedStep:
    """Length-guided decoding of the requests of an engine.

    Requests are known by their row of the engine's slot table. An engine calls :meth:`add_request` when a request
    arrives, :meth:`extend` with the tokens of its prompt (all but the last), :meth:`step` whenever it is about to draw
    tokens, and :meth:`remove_request` when the request leaves. Requests without guidance may be in any batch; they cost
    nothing.

    Memory, in bytes, for a value model of ``N`` layers and dimensions ``H``, ``I``, ``Hq``, ``Hkv``, ``D`` with ``e``
    bytes an element, ``S`` slots, and ``T = B (M + C)`` tokens a step (``chunk_tokens`` in :meth:`extend`), where ``C``
    is ``D + (1 + D) K`` with ``D`` drafts, ``K`` without:

    - always: the cache, ``2 N S Hkv D e`` (in fp8 ``2 N S Hkv D``), and with ``commit_winners`` ``2 N T Hkv D e`` for a
      step of ``max_requests``;
    - while it runs: at most :func:`working_bytes` of a step of ``max_requests`` plus that of an :meth:`extend`. They
      never run at once, but each keeps its memory from the other: with graphs the step's stays allocated. Without,
      torch's allocator holds what both have freed, in blocks of their sizes; to give them back it waits for the device.

    Args:
        value_model: the value model; None: there is none, and only ``near``, ``ge_near`` and ``le_near`` guide
            (:class:`ConstantValues`). No prompt has to be told then, and slots are not looked at.
        slot_table: int32 ``[R, pages]``; the engine's, on the device of the step: token ``p`` of the request in row
            ``r`` lives in slot ``slot_table[r, p // page_size] * page_size + p % page_size``.
        num_slots: slots there are; sizes the value model's cache.
        vocab_size: of the base model, whose scores are guided.
        max_requests: the largest batch of :meth:`step` (None: ``R``).
        max_candidates: K, candidates a request: a power of two up to 64.
        max_eos, max_scaled_tokens: end-of-sequence ids, and tokens with a temperature of their own, of a request.
        page_size: slots in a page.
        chunk_tokens: tokens of :meth:`extend` that are computed at a time; bounds its memory.
        max_delta: M, tokens of a request that a step computes at most. Requests that need no values in a step (one
            candidate, an entropy threshold, a stride) wait until as many are missing; 1: nobody waits. With drafts they
            wait as long as there is room for ``1 + max_drafts`` more.
        max_drafts: D, drafted tokens of a request that a step takes.
        value_stride: of requests that ask for none.
        commit_winners: keep the candidates' keys and values until the next step, and move those of the token drawn to
            its slot instead of computing them again.
        cache: what keys and values are kept in: None for the value model's dtype, ``"fp8"`` for e4m3 with scales that
            follow from the value model's weights: half the bytes of bf16 to hold and to read. What it costs in values
            is in ``docs/guided-step.md``. Candidates and the tokens of a forward itself are not rounded.
        score_all: score the candidates of requests that need no values too (``SINGLE``, ``SKIP``), to look at them.
        text_breaks: int8 ``[S]`` (:func:`text_breaks_of`); what ends with each token of the base model's vocabulary, so
            that outputs end where sentences do. None: not known; ends need the same probability everywhere then.
        graphs: run the value model from CUDA graphs, one for each power of two of requests (None: on a GPU). They are
            captured when first needed, which stalls that step; :meth:`warm_up` captures all of them ahead.
        backend: of the operators: ``auto``, ``triton`` or ``reference``.

    Attributes:
        table: :class:`GuidanceTable` of the requests.
        values: :class:`ValueSource`, where the values come from.
        cache: :class:`KVCache` of the value model; None without one.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted; ``LENVM_TIMING`` too
            (:mod:`lenvm_kernels.timing`).

    Example:
        >>> slots = PagedSlots(8, max_len=2048, device="cuda")
        >>> step = GuidedStep(value_model, slots.table, slots.num_slots, vocab_size=151_936)
        >>> step.add_request(3, parse_guidance({"target_length": 200}), eos_token_ids={151_645}, prompt_len=17)
    """

    def __init__(
        self,
        value_model: ValueModel | None,
        slot_table: torch.Tensor,
        num_slots: int,
        *,
        vocab_size: int,
        max_requests: int | None = None,
        max_candidates: int = 8,
        max_eos: int = 8,
        max_scaled_tokens: int = 32,
        page_size: int = 1,
        chunk_tokens: int = 4096,
        max_delta: int = 16,
        max_drafts: int = 0,
        value_stride: int = 1,
        commit_winners: bool = True,
        cache: str | None = None,
        score_all: bool = False,
        text_breaks: torch.Tensor | None = None,
        graphs: bool | None = None,
        backend: str = "auto",
    ) -> None:
        device = slot_table.device if value_model is None else value_model.device
        check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=(None, None), device=device)
        table_rows = slot_table.shape[0]
        max_requests = table_rows if max_requests is None else max_requests
        sizes = dict(num_slots=num_slots, max_requests=max_requests, chunk_tokens=chunk_tokens, max_delta=max_delta)
        for name, value in (sizes | {"value_stride": value_stride}).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= max_drafts < max_delta:
            raise ValueError(f"max_drafts must be at least 0 and less than max_delta = {max_delta}, got {max_drafts}")
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must be from 1 to {MAX_VOCAB}, got {vocab_size}")
        if max_candidates not in COLUMNS:
            raise ValueError(f"max_candidates must be a power of two up to {COLUMNS[-1]}, got {max_candidates}")
        runs_in_graphs = value_model is not None and value_model.runs_in_graphs
        can_have_graphs = device.type == "cuda" and runs_in_graphs
        if graphs and not can_have_graphs:
            where = "none" if value_model is None else f"it on {device if runs_in_graphs else 'another host'}"
            raise ValueError(f"graphs must be None or False unless the value model is on a GPU, got {where}")
        if text_breaks is not None:
            check_tensor("text_breaks", text_breaks, dtypes=torch.int8, shape=(None,), device=text_breaks.device)
            text_breaks = text_breaks.to(device)
        self.text_breaks = text_breaks
        self.value_model, self.device, self.slot_table, self.vocab_size = value_model, device, slot_table, vocab_size
        self.max_requests, self.max_candidates = max_requests, max_candidates
        self.score_all, self.backend = score_all, backend
        self.max_delta, self.max_drafts, self.value_stride = max_delta, max_drafts, value_stride
        # One row more than the engine has: of the requests that fill a batch up to its graph's size.
        self._padding_row = table_rows
        self.table = GuidanceTable(table_rows + 1, device, max_eos=max_eos, max_scaled_tokens=max_scaled_tokens)
        # What the host knows of the requests, to leave out launches that none of them needs.
        self._scaled_rows: set[int] = set()
        self._value_rows: set[int] = set()
        self._span_rows: set[int] = set()
        self._tensors = StepTensors(max_requests, max_drafts, max_candidates, device, trees=value_model is not None)
        self._history = History(table_rows + 1, max_delta, device, is_told=value_model is not None)
        self._timer = StepTimer.from_environment()
        self._has_graphs = can_have_graphs if graphs is None else graphs
        self.values: ValueSource
        self.cache: KVCache | None = None
        if value_model is None:
            self.values = ConstantValues(table_rows + 1, self._tensors, device)
        else:
            self.values = of_model = ModelValues(
                value_model,
                self._tensors,
                self._history,
                slot_table,
                num_slots,
                page_size=page_size,
                chunk_tokens=chunk_tokens,
                commit_winners=commit_winners,
                cache=cache,
                graphs=self._has_graphs,
                split=self._timer.is_on,
                backend=backend,
            )
            self.cache = of_model.cache

    def add_request(
        self,
        table_row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
        span_ended: bool = False,
    ) -> None:
        """Admit a request into a row of the slot table. The device hears of it at the next call.

        Arguments and errors are those of :meth:`GuidanceTable.add_request`. Token temperatures of ids outside the
        vocabulary are ignored. ValueError, too, without a value model and for guidance that needs one.
        """
        if not 0 <= table_row < self._padding_row:
            raise IndexError(f"table_row must be in [0, {self._padding_row}), got {table_row}")
        if params is not None:
            known = {t: scale for t, scale in params.token_temperature_scale.items() if t < self.vocab_size}
            stride = params.value_stride or self.value_stride
            params = replace(params, token_temperature_scale=known, value_stride=stride)
        self.values.add_request(table_row, params)
        self.table.add_request(
            table_row, params, eos_token_ids, prompt_len=prompt_len, seed=seed, span_ended=span_ended
        )
        asked = GuidanceParams() if params is None else params
        for rows, is_one in (
            (self._scaled_rows, asked.token_temperature_scale),
            (self._value_rows, asked.return_values),
            (self._span_rows, asked.end_token_ids),
        ):
            (rows.add if is_one else rows.discard)(table_row)
        self._history.forget(table_row)

    def remove_request(self, table_row: int) -> None:
        """Make a row unguided when its request leaves. A row that :meth:`add_request` fills again need not be."""
        self.add_request(table_row, None, set())

    def restart_request(self, table_row: int) -> None:
        """Forget what the value model has computed of a request, because its slots were taken.

        :meth:`extend` tells its tokens anew. All else that is known of it stays.
        """
        self._history.forget(table_row)

    def flush(self) -> None:
        """Send to the device what it has to know of requests that came and left, as every other call does.

        Needed before a CUDA graph of one's own that has a step in it is captured or replayed.
        """
        self.table.flush()
        self._history.flush()
        self.values.flush()

    def told_lens(self, table_rows: torch.Tensor) -> torch.Tensor:
        """int32 ``[B]``; how many tokens of each sequence :meth:`extend` and steps have been told, without a gap.

        Args:
            table_rows: int32 or int64 ``[B]``; the requests' rows of the slot table.
        """
        self.flush()
        return self._history.columns.told_lens[table_rows.long()]

    @torch.no_grad()
    def scale_tokens(self, logits: torch.Tensor, table_rows: torch.Tensor) -> None:
        """Apply the requests' token temperatures to ``logits [B, V]``, in place and before all else that reads them."""
        if self._scaled_rows:
            columns = self.table.columns
            scales = columns.token_scales[table_rows].to(logits.dtype)
            logits.scatter_reduce_(1, columns.scaled_token_ids[table_rows], scales, "prod")

    @property
    def has_spans(self) -> bool:
        """Whether any request has a span, as the host knows it."""
        return bool(self._span_rows)

    @torch.no_grad()
    def limit_spans(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        *,
        new_lens: torch.Tensor | None = None,
        drafts: Drafts | None = None,
    ) -> torch.Tensor | None:
        """Keep open spans (``end_token_ids``) from ending the sequence, and end those at their ``hard_limit``.

        In ``logits``, in place, before all else that reads them but :meth:`scale_tokens`. Arguments and errors are
        those of :meth:`step`, whose next call follows; it need not follow where nobody is guided.

        Returns:
            The ``span_ended`` of that step; None if no request has a span.
        """
        if not self.has_spans:
            return None
        return self._limit_spans(logits, tokens, table_rows, lengths, new_lens, drafts)

    def _limit_spans(
        self,
        logits: torch.Tensor | None,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        new_lens: torch.Tensor | None,
        drafts: Drafts | None,
    ) -> torch.Tensor:
        """bool, a node: the span has ended there."""
        return limit_span(
            logits,
            self.table.columns,
            (tokens[:, None] if tokens.dim() == 1 else tokens).long(),
            table_rows.long(),
            lengths,
            new_lens=new_lens,
            drafts=drafts,
            backend=self.backend,
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
        images: ImageTokens | None = None,
    ) -> None:
        """Compute and keep keys and values of tokens whose candidates nobody asks for: those of prompts.

        The last token of a prompt belongs to :meth:`step`. Requests that are not guided nor ask for values are left
        out.

        Args:
            tokens: int32 or int64 ``[D]``; tokens of all requests.
            slots: int32 or int64 ``[D]``; the slot of each.
            table_rows: int32 or int64 ``[B]``; the requests' rows of the slot table.
            starts: int32 ``[B]``; the first token of each request in ``tokens``.
            lens: int32 ``[B]``; how many are to be kept, 0 or more.
            cached_lens: int32 ``[B]``; tokens of each request that were kept before, by whoever had its slots.
            images: of the ``D`` tokens, where some prompts have images (None: all are text). Positions have to be moved
                as :func:`image_positions` does: to all other calls a token's position is its place in its sequence.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        device = self.device
        check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None,), device=device)
        check_tensor("slots", slots, dtypes=INT_DTYPES, shape=tokens.shape, device=device)
        check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(None,), device=device)
        for name, tensor in (("starts", starts), ("lens", lens), ("cached_lens", cached_lens)):
            check_tensor(name, tensor, dtypes=torch.int32, shape=table_rows.shape, device=device)
        if images is not None:
            self._check_images(images, len(tokens))
        self.flush()
        # Kernels are compiled for one dtype.
        tokens, slots, table_rows = tokens.long(), slots.long(), table_rows.long()
        table = self.table.columns
        needs_model = (table.mode[table_rows] != Mode.UNGUIDED) | table.return_values[table_rows]
        ends = starts + torch.where(needs_model, lens, 0)
        self.values.extend(tokens, slots, table_rows, starts, ends, cached_lens, images)
        self._history.extend(table_rows, torch.where(needs_model, cached_lens + lens, 0))

    def _check_images(self, images: ImageTokens, tokens: int) -> None:
        """Raise TypeError or ValueError unless these are images of so many tokens."""
        model, device = self.value_model, self.device
        if model is None or model.config.mrope_sections is None:
            raise ValueError("images must be None unless the value model is a vision-language model")
        check_tensor("images.positions", images.positions, dtypes=torch.int64, shape=(3, tokens), device=device)
        check_tensor("images.rows", images.rows, dtypes=torch.int64, shape=(tokens,), device=device)
        shape = (None, model.config.hidden_size)
        check_tensor("images.embeds", images.embeds, dtypes=model.dtype, shape=shape, device=device)

    @torch.no_grad()
    def step(
        self,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        *,
        new_lens: torch.Tensor | None = None,
        top_k: torch.Tensor | int,
        top_p: torch.Tensor | float,
        min_p: torch.Tensor | float,
        temperature: torch.Tensor | float | None = None,
        is_logits: bool = False,
        vocab_mask: torch.Tensor | None = None,
        active: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        sample: bool = False,
        drawn: torch.Tensor | None = None,
        drafts: Drafts | None = None,
        verify: str | None = None,
        span_ended: torch.Tensor | None = None,
    ) -> StepOutput:
        """Guide the next token of each request.

        A request that is guided or asks for values has to tell every token of its sequence, to :meth:`extend` or to a
        step, and at most ``max_delta`` that the value model has not computed. Where a token is missing it goes on
        without guidance, which ``table.faults`` counts, until :meth:`extend` tells its tokens anew. Nothing is read
        back to the host.

        With ``drafts`` a token is drawn at each node of a request (:class:`Drafts`), from the distribution that
        verification has to use. ``scores``, ``vocab_mask``, ``probs`` and ``drawn`` have a row a node then, those of
        request ``i`` from row ``i * (1 + D)`` on. Drafts are not tokens of a sequence: those that it takes have to be
        told to the next step.

        Args:
            scores: fp32, bf16 or fp16 ``[B, V]``; scores of the next token: probabilities or logits.
            tokens: int32 or int64 ``[B]``; the last token of each sequence, the one the scores follow; or ``[B, N]``,
                the tokens that it has grown by, from column 0 on.
            table_rows: int32 or int64 ``[B]``; the requests' rows of the slot table, all different.
            lengths: int32 ``[B]``; tokens of each sequence, the last one included. The slot table has the slots of all.
            new_lens: int32 ``[B]``; with ``tokens [B, N]``, how many of its row each sequence has grown by, 0 to N.
            top_k, top_p, min_p, temperature, is_logits, vocab_mask: as in :func:`topk_candidates`.
            active: bool ``[B]`` (None: all); requests to leave out of this and all later steps as if they had no
                guidance are False: those whose sequences have ended.
            probs: fp32, bf16 or fp16 ``[B, V]``; rows of requests that are guided or have a single candidate are
                rewritten in place (:func:`reweight_scatter`). May be ``scores``.
            sample: draw tokens from the candidates. The draws of a request depend on its seed and its length only.
            drawn: int32 or int64 ``[B]``; what the requests' own filters drew: the next tokens of those that are not
                drawn from their candidates. Such requests have no remaining length without it.
            drafts: ``[B, max_drafts]``; tokens that may come next.
            verify: ``"same_draws"``: take the drafts that were drawn in their place, and the draw after the last of
                them: the text is the same as without drafts (:func:`verify_drafts`). None: that is the caller's affair.
            span_ended: bool ``[B]``, with drafts ``[B (1 + D)]``; what :meth:`limit_spans` has returned for this step
                (None: spans are looked at here, no logits are changed).

        Returns:
            :class:`StepOutput`.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        device = self.device
        backend = resolve_backend(self.backend, scores)
        check_tensor("scores", scores, dtypes=FLOAT_DTYPES, shape=(None, self.vocab_size), device=device)
        rows, nodes = scores.shape[0], 1 if drafts is None else 1 + self.max_drafts
        b, rest = divmod(rows, nodes)
        if rest:
            raise ValueError(f"scores must have 1 + max_drafts = {nodes} rows a request, got {rows}")
        if not 1 <= b <= self.max_requests:
            raise ValueError(f"scores must be of 1 to max_requests = {self.max_requests} requests, got {b}")
        if drafts is not None:
            check_drafts(drafts, b, device)
            if drafts.token_ids.shape[1] != self.max_drafts:
                came = drafts.token_ids.shape[1]
                raise ValueError(f"drafts must have max_drafts = {self.max_drafts} columns, got {came}")
        if verify not in (None, "same_draws") or (verify and (drafts is None or not sample)):
            raise ValueError(f"verify must be None, or 'same_draws' with drafts and sample, got {verify!r}")
        record = self._timer.begin(b, device)
        is_many = new_lens is not None
        check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(b, None) if is_many else (b,), device=device)
        check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(b,), device=device)
        check_tensor("lengths", lengths, dtypes=torch.int32, shape=(b,), device=device)
        if is_many:
            check_tensor("new_lens", new_lens, dtypes=torch.int32, shape=(b,), device=device)
            if tokens.shape[1] == 0:
                raise ValueError("tokens must have at least one column, got none")
        if drawn is not None:
            check_tensor("drawn", drawn, dtypes=INT_DTYPES, shape=(rows,), device=device)
        if active is not None:
            check_tensor("active", active, dtypes=torch.bool, shape=(b,), device=device)
        if span_ended is not None:
            check_tensor("span_ended", span_ended, dtypes=torch.bool, shape=(rows,), device=device)
        if temperature is not None:
            temperature = _of_nodes("temperature", temperature, torch.float32, b, nodes, device)
        if probs is not None:
            check_tensor("probs", probs, dtypes=FLOATS[backend], shape=(rows, None), device=device)
        if temperature is not None and not is_logits:
            raise ValueError("temperature must be None when scores are probabilities (is_logits=False)")
        top_k = _of_nodes("top_k", top_k, torch.int32, b, nodes, device)
        top_p = _of_nodes("top_p", top_p, torch.float32, b, nodes, device)
        min_p = _of_nodes("min_p", min_p, torch.float32, b, nodes, device)
        if vocab_mask is not None:
            words = ceil_div(self.vocab_size, 32)
            check_tensor("vocab_mask", vocab_mask, dtypes=torch.int32, shape=(rows, words), device=device)
        self.flush()
        # Kernels are compiled for one dtype.
        tokens, table_rows = tokens.long(), table_rows.long()
        drawn = None if drawn is None else drawn.int()

        if self.has_spans and span_ended is None:
            span_ended = self._limit_spans(None, tokens, table_rows, lengths, new_lens, drafts)
        requests = self._gather(tokens, table_rows, lengths, new_lens, active, backend)
        if drafts is not None:
            all_nodes = self._tensors.rows(requests.due.shape[0], nodes).nodes
            requests = expand_drafts(requests, drafts, out=all_nodes, backend=backend)
        known = self._tensors.rows(b, nodes).nodes
        if drafts is not None and span_ended is not None:
            known.guided.logical_and_(~span_ended)
        table = self.table.columns
        candidates = topk_candidates_unchecked(
            scores,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_candidates=self.max_candidates,
            temperature=temperature,
            is_logits=is_logits,
            entropy_threshold=known.entropy_threshold,
            guided=known.guided,
            vocab_mask=vocab_mask,
            end_token_ids=table.ending_token_ids,
            min_end_prob=table.min_end_prob,
            least_share=table.least_share,
            due_length=table.due_length,
            generated=known.generated,
            text_breaks=self.text_breaks,
            last_tokens=None if self.text_breaks is None else _last_tokens(tokens, new_lens, drafts),
            table_rows=known.table_rows,
            backend=backend,
        )
        scored = self._select(candidates, requests, drawn, backend, nodes=nodes, sample=sample)
        in_graph = scored.counts.shape[0] // nodes
        trees = self._tensors.rows(in_graph, nodes).trees
        if drafts is not None and trees is not None:
            pack_drafts(scored, drafts, out=trees, backend=backend)
        record.mark("candidates")

        z = self.values.value_logits(in_graph, nodes, record)[:rows]
        record.mark("head")

        wants_length, value_logits = None, z
        if self._value_rows and (sample or drawn is not None):
            wants_length, value_logits = known.wants_length, z.masked_fill(scored.alone[:rows, None], 0.0)
        guided_probs = reweight_scatter_unchecked(
            candidates,
            value_logits,
            table,
            table_rows=known.table_rows,
            generated=known.generated,
            text_breaks=self.text_breaks,
            probs=probs,
            backend=backend,
        )
        record.mark("reweight")

        next_tokens = drawn
        if sample:
            next_tokens = sample_candidates_unchecked(
                candidates,
                guided_probs,
                known.seeds,
                scored.positions[:rows],
                temperature=temperature,
                backend=backend,
            )
            if drawn is not None:
                next_tokens = torch.where(next_tokens >= 0, next_tokens, drawn)
        remaining_lengths = None
        if wants_length is not None and next_tokens is not None:
            remaining_lengths = self._remaining_lengths(known.table_rows, next_tokens, scored, z, wants_length)
        verified = None
        if drafts is not None and verify is not None and next_tokens is not None:
            verified = verify_drafts(next_tokens, drafts, backend=backend)
        record.mark("sample")
        self._timer.end(record)
        return StepOutput(candidates, value_logits, guided_probs, next_tokens, remaining_lengths, verified)

    @torch.no_grad()
    def predict(
        self,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        *,
        new_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predict output lengths after given tokens: of prompts, by their last token, before anything is drawn.

        Nothing is told by it: the next :meth:`step` is from the same tokens, and does not compute them again. It is not
        counted as a step (``value_stride``).

        Args:
            tokens: int32 or int64 ``[B]``; the last token of each sequence; or ``[B, N]``, the last ones, from column 0
                on, up to ``1 + max_drafts``.
            table_rows: int32 or int64 ``[B]``; the requests' rows of the slot table, all different.
            lengths: int32 ``[B]``; tokens of each sequence, these included. All others were told to :meth:`extend` or
                to a step.
            new_lens: int32 ``[B]``; with ``tokens [B, N]``, how many of its row are of each sequence.

        Returns:
            fp32 of the shape of ``tokens``; tokens predicted to follow each, NaN for requests that do not ask for it
            (``return_values``).

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        device = self.device
        if self.value_model is None:
            raise ValueError("value_model must be given to predict lengths, got None")
        backend = resolve_backend(self.backend, tokens)
        is_many = new_lens is not None
        check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None, None) if is_many else (None,), device=device)
        b = tokens.shape[0]
        check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(b,), device=device)
        check_tensor("lengths", lengths, dtypes=torch.int32, shape=(b,), device=device)
        if b > self.max_requests:
            raise ValueError(f"tokens must be of at most max_requests = {self.max_requests} requests, got {b}")
        if new_lens is None:
            tokens_of_each, new_lens = tokens[:, None].long(), torch.ones_like(lengths)
        else:
            check_tensor("new_lens", new_lens, dtypes=torch.int32, shape=(b,), device=device)
            tokens_of_each = tokens.long()
        columns = tokens_of_each.shape[1]
        if not 1 <= columns <= 1 + self.max_drafts:
            raise ValueError(f"tokens must have 1 to 1 + max_drafts = {1 + self.max_drafts} columns, got {columns}")
        self.flush()
        table_rows = table_rows.long()

        # They are scored as a chain of candidates in their own places: nothing is kept but the candidates.
        nothing_new = torch.zeros_like(lengths)
        requests = self._gather(tokens_of_each, table_rows, lengths - new_lens, nothing_new, None, backend)
        self._history.columns.steps[table_rows] -= 1  # as if it had been the step before
        known = self._tensors.rows(b).requests
        # Of all that need the value model: the next step then finds what it would have to compute.
        counts = torch.where(known.wants_length | known.guided, new_lens, 0)
        in_graph, nodes = requests.due.shape[0], 1 + self.max_drafts
        rows = self._tensors.rows(in_graph, nodes)
        computed = rows.scored if rows.trees is None else rows.trees
        computed.token_ids.fill_(-1)
        computed.token_ids[:b, :columns] = tokens_of_each.int()
        computed.counts.zero_()
        computed.counts[:b] = counts
        computed.positions.copy_(requests.positions + 1)
        if rows.trees is not None:
            rows.trees.parents.copy_(torch.arange(rows.trees.parents.shape[1], device=device) - 1)
            column = torch.arange(nodes, device=device)
            rows.trees.columns.fill_(-1)
            rows.trees.columns[:, 0] = column.repeat(in_graph)
        z = self.values.value_logits(in_graph, nodes, NO_RECORD).view(in_graph, nodes, -1)[:b, :columns, 0].flatten()
        at = table_rows[:, None].expand(-1, columns).flatten()
        found = self.table.remaining_lengths(at, z, tokens_of_each.flatten()).view(b, columns)
        is_asked = known.wants_length[:, None] & (torch.arange(columns, device=device) < new_lens[:, None])
        return torch.where(is_asked, found, math.nan).view(tokens.shape)

    def warm_up(
        self,
        scores_dtype: torch.dtype = torch.float32,
        *,
        is_logits: bool = True,
        probs_dtype: torch.dtype = torch.float32,
        progress: bool = True,
    ) -> None:
        """Compile every kernel and capture every graph, so that no step of serving does.

        That holds for batches of every size and with any of the optional arguments, whose rows are ``vocab_size``
        elements apart, or a multiple of 16; ``tokens [B, N]`` are of ``1 + max_drafts`` columns.

        Args:
            scores_dtype, is_logits: of the scores that :meth:`step` will get.
            probs_dtype: of the ``probs`` that :meth:`step` will get.
            progress: show a bar on stderr.
        """
        device, vocab = self.device, self.vocab_size
        sizes = sorted({bucket_of(b, self.max_requests) for b in range(1, self.max_requests + 1)})
        # A kernel is compiled anew for an argument that is absent, and for rows that are not aligned.
        yes_or_no = (False, True)
        strides = {vocab, 16 * ceil_div(vocab, 16)}
        # Drafts of a request, and tokens that it is told.
        told = {(0, 1), (0, 1 + self.max_drafts), (self.max_drafts, 1 + self.max_drafts)}
        variants = list(itertools.product(sorted(told), strides, {False, is_logits}, yes_or_no, yes_or_no))

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        timer, self._timer = self._timer, NO_TIMER
        try:
            with tqdm(sizes[::-1], desc="warming up", unit="size", disable=not progress) as bar:
                for size in bar:  # the largest first: the graphs after it find room in its memory
                    for (drafted, width), stride, has_temperature, has_mask, has_probs in variants:
                        rows = size * (1 + drafted)
                        mask = full(0, torch.int32, rows, ceil_div(vocab, 32))
                        scores, probs = (
                            full(0, dtype, rows, stride)[:, :vocab] for dtype in (scores_dtype, probs_dtype)
                        )
                        none, lens = full(-1, torch.int32, size, drafted), full(0, torch.int32, size)
                        tokens = full(0, torch.int64, *((size, width) if width > 1 else (size,)))
                        padding, new_lens = full(self._padding_row, torch.int64, size), lens if width > 1 else None
                        drafts = Drafts(none, none) if drafted else None
                        for logits in (None, scores) if is_logits else (None,):
                            self._limit_spans(logits, tokens, padding, lens, new_lens, drafts)
                        self.step(
                            scores,
                            tokens,
                            padding,
                            lens,
                            new_lens=new_lens,
                            top_k=0,
                            top_p=1.0,
                            min_p=0.0,
                            temperature=1.0 if has_temperature else None,
                            is_logits=is_logits,
                            vocab_mask=mask if has_mask else None,
                            probs=probs if has_probs else None,
                            sample=True,
                            drafts=drafts,
                            verify="same_draws" if drafted else None,
                        )
                        if self.value_model is not None:
                            self.predict(tokens, padding, lens, new_lens=new_lens)
        finally:
            self._timer = timer
        self.values.warm_up(self._padding_row)

    def _gather(
        self,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        new_lens: torch.Tensor | None,
        active: torch.Tensor | None,
        backend: str,
    ) -> StepRequests:
        """What is known of the requests, and of as many that do not exist as their graph has more."""
        b = tokens.shape[0]
        rows = bucket_of(b, self.max_requests) if self._has_graphs else b
        return gather_requests_unchecked(
            self.table.columns,
            tokens,
            table_rows,
            lengths,
            new_lens=new_lens,
            active=self._tensors.rows(b).all_active if active is None else active,
            history=self._history.columns,
            padding_row=self._padding_row,
            out=self._tensors.rows(rows).requests,
            backend=backend,
        )

    def _select(
        self,
        candidates: Candidates,
        requests: StepRequests,
        drawn: torch.Tensor | None,
        backend: str,
        *,
        nodes: int = 1,
        sample: bool,
    ) -> ScoredCandidates:
        """What the value model computes for the requests, each of which has so many nodes."""
        return select_scored_unchecked(
            candidates,
            requests,
            self.table.columns.ending_token_ids,
            drawn=self._tensors.rows(candidates.counts.shape[0] // nodes, nodes).none_drawn if drawn is None else drawn,
            sample=sample,
            score_all=self.score_all,
            step=self._history.columns.step,
            out=self._tensors.rows(requests.due.shape[0] // nodes, nodes).scored,
            backend=backend,
        )

    def _remaining_lengths(
        self,
        table_rows: torch.Tensor,
        next_tokens: torch.Tensor,
        scored: ScoredCandidates,
        value_logits: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """fp32 ``[B]``: of ``next_tokens``, found among the tokens scored; NaN where not ``wanted``."""
        b, k = value_logits.shape
        is_scored = torch.arange(k, device=value_logits.device) < scored.counts[:b, None]
        is_next = is_scored & (scored.token_ids[:b] == next_tokens[:, None])
        z = torch.where(is_next, value_logits, 0.0).sum(1)
        lengths = self.table.remaining_lengths(table_rows, z, next_tokens)
        return torch.where(wanted & is_next.any(1), lengths, math.nan)


def _last_tokens(tokens: torch.Tensor, new_lens: torch.Tensor | None, drafts: Drafts | None) -> torch.Tensor:
    """int64 ``[B (1 + D)]``: the token before each node; -1, or 0, where nothing is known of it."""
    if new_lens is not None:
        column = new_lens.clamp(1, tokens.shape[1]).long() - 1
        tokens = tokens.gather(1, column[:, None])[:, 0]
    if drafts is None:
        return tokens
    return torch.cat([tokens[:, None], drafts.token_ids.long()], dim=1).flatten()


def _of_nodes(
    name: str, value: torch.Tensor | float, dtype: torch.dtype, requests: int, nodes: int, device: torch.device
) -> torch.Tensor:
    """What an argument says of each request, for each of its nodes."""
    of_requests = per_request(name, value, dtype, requests, device)
    return of_requests if nodes == 1 else of_requests[:, None].expand(-1, nodes).flatten()
