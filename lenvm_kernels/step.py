"""The guided step: candidates, value forward, head, reweighting and the draw, for the rows of a decode batch.

A fixed sequence of launches over tensors whose shapes follow from the batch size alone: nothing is read back to the
host, nothing loops over requests, and what a row costs follows the candidates it has. The value model lives on the
slots of an engine; what it knows of a request is in a table on the device, written when the request arrives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, Mode
from lenvm_kernels.ops._common import FLOAT_DTYPES, ceil_div, check_tensor
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.ragged_linear import num_splits
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import Candidates, Status, topk_candidates
from lenvm_kernels.ops.value_tree_attention import workspace_shape
from lenvm_kernels.timing import StepRecord, StepTimer
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

_INT_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class StepOutput:
    """What a guided step computed, all on the device.

    Attributes:
        candidates: of each row; ``status`` says what became of it, ``lost_mass`` what was cut off.
        value_logits: fp32 ``[B, K]``; 0 where a candidate was not scored.
        probs: fp32 ``[B, K]``; guided probabilities of the candidates.
        tokens: int32 ``[B]``; the next tokens: with ``sample`` drawn from the candidates, else those of ``drawn``. -1
            in rows to be drawn by their own filters if that is not given; None without both.
        remaining_lengths: fp32 ``[B]``; tokens that are predicted to follow ``tokens``, NaN in rows that do not ask for
            it (``return_values``); None when no request does, or without ``tokens``.
    """

    candidates: Candidates
    value_logits: torch.Tensor
    probs: torch.Tensor
    tokens: torch.Tensor | None
    remaining_lengths: torch.Tensor | None


@dataclass(frozen=True)
class _LastStep:
    """Candidates of the last step, one of which may be the next token. Read and written on the device only."""

    cache: KVCache  # keys and values of all rows of its forward
    candidate_ids: torch.Tensor  # int32 [max rows, K]
    candidate_rows: torch.Tensor  # int64 [max rows, K], where they are in cache; -1: not computed
    positions: torch.Tensor  # int32 [max rows], of the candidates
    table_rows: torch.Tensor  # int64 [max rows], -1: none
    # int64 [R + 1], each request's row of the last step it was in. That this was the last step at all shows in
    # table_rows, which is why entries need no clearing when a request sits out a step.
    place: torch.Tensor


def working_bytes(
    value_model: ValueModel,
    *,
    rows: int,
    max_len: int,
    vocab_size: int,
    max_candidates: int = 0,
    tokens: int | None = None,
) -> int:
    """Bytes that a step takes while it runs, or a :meth:`GuidedStep.extend`, at most.

    An engine needs room for both (:class:`GuidedStep`). Each is the sum of

    - ``T (e (2 H + I + 2 (Hq + 2 Hkv) D) + 4 P H + 6 D + 64)``, with ``P <= 8`` parts of the sums over ``I``
      (:func:`ragged_linear`; 0 if there is one part);
    - ``4 X W Hq (D + 1)``, with ``X <= 16`` splits of the cached tokens of the ``W <= T`` tokens that have several
      (:func:`value_tree_attention`);
    - ``rows (V (K + 2) / 128 + 320 K + 64)`` for the candidates.

    Args:
        value_model: whose dimensions are ``H``, ``I``, ``Hq``, ``Hkv``, ``D`` with ``e`` bytes an element.
        rows: of the step, or requests of the extend.
        max_len: tokens that a row of the slot table has room for.
        vocab_size: V.
        max_candidates: K; 0 for an extend.
        tokens: T; of an extend its ``chunk_tokens``. None: ``rows (1 + K)``, as in a step.
    """
    config, k = value_model.config, max_candidates
    t = rows * (1 + k) if tokens is None else tokens
    heads = config.num_heads + 2 * config.num_kv_heads
    parts = num_splits(config.hidden_size, config.intermediate_size)
    workspace = workspace_shape(t, rows, config.num_heads // config.num_kv_heads, max_len)
    elements = 2 * config.hidden_size + config.intermediate_size + 2 * heads * config.head_dim
    token_bytes = elements * value_model.dtype.itemsize + 6 * config.head_dim + 64
    token_bytes += 4 * parts * config.hidden_size if parts > 1 else 0
    row_bytes = vocab_size * (k + 2) // 128 + 320 * k + 64
    return t * token_bytes + 4 * math.prod(workspace) * config.num_heads * (config.head_dim + 1) + rows * row_bytes


class GuidedStep:
    """Length-guided decoding of the requests of an engine.

    Requests are known by their row of the engine's slot table. An engine calls :meth:`set` when a request arrives,
    :meth:`extend` with the tokens of its prompt (all but the last), :meth:`step` whenever it is about to draw tokens,
    and :meth:`clear` when the request leaves. Rows that ask for no guidance may be in any batch; they cost nothing.

    Memory, in bytes, for a value model of ``N`` layers and dimensions ``H``, ``I``, ``Hq``, ``Hkv``, ``D`` with ``e``
    bytes an element, ``S`` slots, and ``T = rows (1 + K)`` tokens a step (``chunk_tokens`` in :meth:`extend`):

    - always: the cache, ``2 N S Hkv D e``, and with ``commit_winners`` ``2 N T Hkv D e`` for ``T`` of ``max_rows``;
    - while it runs: at most :func:`working_bytes` of a step of ``max_rows`` plus that of an :meth:`extend`. They never
      run at once, but each keeps its memory from the other: with graphs the step's stays allocated. Without, torch's
      allocator holds what both have freed, in blocks of their sizes; to give them back it waits for the device.

    Args:
        value_model: the value model.
        slot_table: int32 ``[R, pages]``; the engine's, on the value model's device: token ``p`` of the request in row
            ``r`` lives in slot ``slot_table[r, p // page_size] * page_size + p % page_size``.
        num_slots: slots there are; sizes the value model's cache.
        vocab_size: of the base model, whose scores are guided.
        max_rows: the largest batch of :meth:`step` (None: ``R``).
        max_candidates: K, candidates a row: a power of two up to 64.
        max_eos, max_scaled_tokens: end-of-sequence ids, and tokens with a temperature of their own, of a request.
        page_size: slots in a page.
        chunk_tokens: tokens of :meth:`extend` that are computed at a time; bounds its memory.
        commit_winners: keep the candidates' keys and values until the next step, and move those of the token drawn to
            its slot instead of computing them again.
        score_all: score the candidates of rows that need no values too (``SINGLE``, ``SKIP``), to look at them.
        graphs: run the value model from CUDA graphs, one for each power of two of rows (None: on a GPU). They are
            captured when first needed, which stalls that step; :meth:`warm_up` captures all of them ahead.
        backend: of the operators, see :func:`lenvm_kernels.ops._common.resolve_backend`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted; ``LENVM_TIMING`` too
            (:mod:`lenvm_kernels.timing`).

    Example:
        >>> slots = PagedSlots(rows=8, max_len=2048, device="cuda")
        >>> step = GuidedStep(value_model, slots.table, slots.num_slots, vocab_size=151_936)
        >>> step.set(3, parse_guidance({"target_length": 200}), eos_token_ids={151_645}, prompt_len=17)
    """

    def __init__(
        self,
        value_model: ValueModel,
        slot_table: torch.Tensor,
        num_slots: int,
        *,
        vocab_size: int,
        max_rows: int | None = None,
        max_candidates: int = 8,
        max_eos: int = 8,
        max_scaled_tokens: int = 32,
        page_size: int = 1,
        chunk_tokens: int = 4096,
        commit_winners: bool = True,
        score_all: bool = False,
        graphs: bool | None = None,
        backend: str = "auto",
    ) -> None:
        device = value_model.device
        check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=[None, None], device=device)
        table_rows = slot_table.shape[0]
        max_rows = table_rows if max_rows is None else max_rows
        for name, value in (("num_slots", num_slots), ("max_rows", max_rows), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_candidates not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"max_candidates must be a power of two up to 64, got {max_candidates}")
        if graphs and device.type != "cuda":
            raise ValueError(f"graphs must be None or False unless the value model is on a GPU, got it on {device}")
        self.value_model, self.slot_table, self.vocab_size = value_model, slot_table, vocab_size
        self.max_rows, self.max_candidates, self.page_size = max_rows, max_candidates, page_size
        self.chunk_tokens, self.score_all, self.backend = chunk_tokens, score_all, backend
        self.graphs = device.type == "cuda" if graphs is None else graphs
        self.cache = KVCache.of_slots(value_model, num_slots)
        self._padding_row = table_rows  # one more than the engine has: of the rows that fill a batch up to its graph's
        self.table = GuidanceTable.empty(table_rows + 1, device, max_eos=max_eos, max_scaled_tokens=max_scaled_tokens)
        # What the host knows of the rows, to leave out launches that no request needs.
        self._scaled_rows: set[int] = set()
        self._value_rows: set[int] = set()
        self._row_numbers = torch.arange(max_rows, dtype=torch.int32, device=device)

        def full(value, dtype, *shape):
            return torch.full(shape, value, dtype=dtype, device=device)

        self._last = None
        if commit_winners:
            self._last = _LastStep(
                cache=KVCache.of_slots(value_model, max_rows * (1 + max_candidates)),
                candidate_ids=full(-1, torch.int32, max_rows, max_candidates),
                candidate_rows=full(-1, torch.int64, max_rows, max_candidates),
                positions=full(0, torch.int32, max_rows),
                table_rows=full(-1, torch.int64, max_rows),
                place=full(-1, torch.int64, table_rows + 1),
            )
        self._timer = StepTimer.from_environment()
        self._timed = self._timer is not None  # what the graphs were captured for
        self._record: StepRecord | None = None  # of the step in progress, if it is timed
        # Arguments of _score for a row that does not exist, and the buffers that graphs read them from.
        self._no_row = (0, self._padding_row, 0, -1, 0, -1, 0)
        if self.graphs:
            dtypes = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32, torch.int32, torch.int32)
            shapes = [(max_rows,)] * 5 + [(max_rows, max_candidates), (max_rows,)]
            fills = zip(self._no_row, dtypes, shapes, strict=True)
            self._inputs = [full(value, dtype, *shape) for value, dtype, shape in fills]
            self._pool = torch.cuda.graph_pool_handle()
            self._captured: dict[int, tuple[list[torch.cuda.CUDAGraph], torch.Tensor]] = {}

    def set(
        self,
        row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
    ) -> None:
        """Admit a request into a row of the slot table, in the order of the device's stream.

        Arguments and errors are those of :meth:`GuidanceTable.set`. Token temperatures of ids outside the vocabulary
        are ignored.
        """
        if not 0 <= row < self._padding_row:
            raise IndexError(f"row must be in [0, {self._padding_row}), got {row}")
        if params is not None:
            known = {t: scale for t, scale in params.token_temperature_scale.items() if t < self.vocab_size}
            params = replace(params, token_temperature_scale=known)
        self.table.set(row, params, eos_token_ids, prompt_len=prompt_len, seed=seed)
        (self._scaled_rows.add if params and params.token_temperature_scale else self._scaled_rows.discard)(row)
        (self._value_rows.add if params and params.return_values else self._value_rows.discard)(row)
        if self._last is not None:
            self._last.place[row] = -1  # the candidates of the row's last request are not this one's

    def clear(self, row: int) -> None:
        """Make a row unguided when its request leaves. A row that :meth:`set` fills again need not be cleared."""
        self.set(row, None, set())

    @torch.no_grad()
    def scale_tokens(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Apply the requests' token temperatures to ``logits [B, V]``, in place and before all else that reads them."""
        if self._scaled_rows:
            scales = self.table.token_scales[rows].to(logits.dtype)
            logits.scatter_reduce_(1, self.table.scaled_token_ids[rows], scales, "prod")

    @torch.no_grad()
    def extend(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        cached_lens: torch.Tensor,
    ) -> None:
        """Compute and keep keys and values of tokens whose candidates nobody asks for: those of prompts.

        The last token of a prompt belongs to :meth:`step`. Rows that are not guided nor ask for values are left out.

        Args:
            tokens: int32 or int64 ``[D]``; tokens of all requests.
            slots: int32 or int64 ``[D]``; the slot of each.
            rows: int32 or int64 ``[B]``; the requests' rows of the slot table.
            starts: int32 ``[B]``; the first token of each request in ``tokens``.
            lens: int32 ``[B]``; how many are to be kept, 0 or more.
            cached_lens: int32 ``[B]``; tokens of each request that were kept before.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        device = self.value_model.device
        check_tensor("tokens", tokens, dtypes=_INT_DTYPES, shape=[None], device=device)
        check_tensor("slots", slots, dtypes=_INT_DTYPES, shape=tokens.shape, device=device)
        check_tensor("rows", rows, dtypes=_INT_DTYPES, shape=[None], device=device)
        for name, tensor in (("starts", starts), ("lens", lens), ("cached_lens", cached_lens)):
            check_tensor(name, tensor, dtypes=torch.int32, shape=rows.shape, device=device)
        tokens, slots, rows = tokens.long(), slots.long(), rows.long()  # kernels are compiled for one dtype
        ends = starts + torch.where(self._guided(rows)[1], lens, 0)
        nothing = torch.empty(len(rows), 0, dtype=torch.int32, device=device)
        for first in range(0, len(tokens), self.chunk_tokens):
            chunk = slice(first, min(first + self.chunk_tokens, len(tokens)))
            chunk_starts, chunk_ends = (x.clamp(chunk.start, chunk.stop) for x in (starts, ends))
            batch = RaggedBatch.build(
                tokens[chunk],
                slots[chunk],
                chunk_starts - chunk.start,
                chunk_ends - chunk_starts,
                nothing,
                torch.zeros_like(lens),
                cached_lens + chunk_starts - starts,
                self.slot_table,
                rows,
                page_size=self.page_size,
                backend=self.backend,
            )
            self.value_model.forward(batch, self.cache, backend=self.backend)

    @torch.no_grad()
    def step(
        self,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        *,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        temperature: torch.Tensor | None = None,
        is_logits: bool = False,
        vocab_mask: torch.Tensor | None = None,
        active: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        sample: bool = False,
        drawn: torch.Tensor | None = None,
    ) -> StepOutput:
        """Guide the next token of each row.

        Every row that is guided or asks for values must be in a step whenever its sequence has grown by a token, and
        its other tokens must have been through :meth:`extend` or earlier steps. Nothing is read back to the host.

        Args:
            scores: fp32, bf16 or fp16 ``[B, V]``; scores of the next token: probabilities or logits.
            tokens: int32 or int64 ``[B]``; the last token of each sequence, the one the scores follow.
            rows: int32 or int64 ``[B]``; the requests' rows of the slot table, all different.
            lengths: int32 ``[B]``; tokens of each sequence, the last one included.
            slots: int32 or int64 ``[B]``; the slot of each last token.
            top_k, top_p, min_p, temperature, is_logits, vocab_mask: as in :func:`topk_candidates`.
            active: bool ``[B]`` (None: all); rows to leave out of this and all later steps as if they had no guidance:
                those whose sequences have ended.
            probs: fp32, bf16 or fp16 ``[B, V]``; rows that are guided or have a single candidate are rewritten in place
                (:func:`reweight_scatter`). May be ``scores``.
            sample: draw tokens from the candidates. The draws of a request depend on its seed and its length only.
            drawn: int32 or int64 ``[B]``; what the rows' own filters drew: the next tokens of rows that are not drawn
                from their candidates. Such rows have no remaining length without it.

        Returns:
            :class:`StepOutput`.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        device = self.value_model.device
        check_tensor("scores", scores, dtypes=FLOAT_DTYPES, shape=[None, self.vocab_size], device=device)
        b = len(scores)
        if not 1 <= b <= self.max_rows:
            raise ValueError(f"scores must have 1 to max_rows = {self.max_rows} rows, got {b}")
        record = self._record = None if self._timer is None else self._timer.begin(b, device)
        for name, tensor in (("tokens", tokens), ("rows", rows), ("slots", slots)):
            check_tensor(name, tensor, dtypes=_INT_DTYPES, shape=[b], device=device)
        check_tensor("lengths", lengths, dtypes=torch.int32, shape=[b], device=device)
        if drawn is not None:
            check_tensor("drawn", drawn, dtypes=_INT_DTYPES, shape=[b], device=device)
        tokens, slots, rows = tokens.long(), slots.long(), rows.long()  # kernels are compiled for one dtype
        guided, needs_model = self._guided(rows)
        if active is not None:
            check_tensor("active", active, dtypes=torch.bool, shape=[b], device=device)
            guided, needs_model = guided & active, needs_model & active

        candidates = topk_candidates(
            scores,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_candidates=self.max_candidates,
            temperature=temperature,
            is_logits=is_logits,
            entropy_threshold=self.table.entropy_threshold[rows],
            guided=guided,
            vocab_mask=vocab_mask,
            backend=self.backend,
        )
        needs_values = candidates.counts > 0 if self.score_all else candidates.status == Status.GUIDE
        scored_ids, scored_lens = candidates.token_ids, torch.where(needs_values, candidates.counts, 0)
        own_tokens = -1 if drawn is None else drawn.int()
        wants_length = alone = None
        if self._value_rows and (sample or drawn is not None):
            wants_length = self.table.return_values[rows] & needs_model
            # A row whose next token is known already has that scored, and not candidates that nobody needs.
            known = (
                torch.where(candidates.status == Status.SINGLE, scored_ids[:, 0], own_tokens) if sample else own_tokens
            )
            alone = wants_length & (candidates.status != Status.GUIDE) & (known >= 0)
            scored_ids = torch.cat([torch.where(alone, known, scored_ids[:, 0])[:, None], scored_ids[:, 1:]], 1)
            scored_lens = torch.where(alone, 1, scored_lens)
        if record is not None:
            record.mark("candidates")
        score = self._replay if self.graphs else self._score
        scored = score(tokens, rows, lengths, slots, needs_model.int(), scored_ids, scored_lens)
        if record is not None:
            record.mark("head")
        value_logits = scored if alone is None else scored.masked_fill(alone[:, None], 0.0)
        guided_probs = reweight_scatter(
            candidates,
            value_logits,
            self.table,
            table_rows=rows,
            generated=self.table.generated(rows, lengths),
            probs=probs,
            backend=self.backend,
        )
        if record is not None:
            record.mark("reweight")
        next_tokens = None if drawn is None else own_tokens
        if sample:
            next_tokens = sample_candidates(
                candidates,
                guided_probs,
                self.table.seed[rows],
                lengths,
                temperature=temperature,
                backend=self.backend,
            )
            if drawn is not None:
                next_tokens = torch.where(next_tokens >= 0, next_tokens, own_tokens)
        remaining_lengths = None
        if wants_length is not None:
            remaining_lengths = self._remaining_lengths(
                rows, next_tokens, scored_ids, scored_lens, scored, wants_length
            )
        if record is not None:
            record.mark("sample")
            self._timer.end(record)
            self._record = None
        return StepOutput(candidates, value_logits, guided_probs, next_tokens, remaining_lengths)

    @torch.no_grad()
    def predict(self, tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Predict output lengths before anything is drawn: of prompts, by their last token.

        Args:
            tokens: int32 or int64 ``[B]``; the last token of each prompt.
            rows: int32 or int64 ``[B]``; the requests' rows of the slot table, all different.
            lengths: int32 ``[B]``; tokens of each prompt before that one, all of which went through :meth:`extend`.

        Returns:
            fp32 ``[B]``; tokens predicted to follow, NaN in rows that do not ask for it (``return_values``). A
            :meth:`step` from the same tokens does not compute them again.
        """
        device = self.value_model.device
        check_tensor("tokens", tokens, dtypes=_INT_DTYPES, shape=[None], device=device)
        check_tensor("rows", rows, dtypes=_INT_DTYPES, shape=tokens.shape, device=device)
        check_tensor("lengths", lengths, dtypes=torch.int32, shape=tokens.shape, device=device)
        tokens, rows, wanted = tokens.long(), rows.long(), self.table.return_values[rows]
        nothing = torch.zeros_like(lengths)
        ids = torch.full((len(tokens), self.max_candidates), -1, dtype=torch.int32, device=device)
        ids[:, 0] = tokens
        score = self._replay if self.graphs else self._score
        z = score(tokens, rows, lengths, torch.full_like(tokens, -1), nothing, ids, wanted.int())
        return self._remaining_lengths(rows, tokens, ids, wanted.int(), z, wanted)

    def _remaining_lengths(
        self,
        rows: torch.Tensor,
        next_tokens: torch.Tensor,
        token_ids: torch.Tensor,
        lens: torch.Tensor,
        value_logits: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """fp32 ``[B]``: of ``next_tokens``, found among the scored ``token_ids [B, K]``; NaN where not ``wanted``."""
        scored = torch.arange(token_ids.shape[1], device=lens.device) < lens[:, None]
        is_next = scored & (token_ids == next_tokens[:, None])
        z = torch.where(is_next, value_logits, 0.0).sum(1)
        lengths = self.table.remaining_lengths(rows, z, next_tokens)
        return torch.where(wanted & is_next.any(1), lengths, math.nan)

    def _guided(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bool ``[B]`` each: rows that are guided; and those whose tokens the value model has to see
        (:attr:`GuidanceParams.needs_value_model`)."""
        guided = self.table.mode[rows] != Mode.UNGUIDED
        return guided, guided | self.table.return_values[rows] if self._value_rows else guided

    def _score(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        delta_lens: torch.Tensor,
        candidate_ids: torch.Tensor,
        candidate_lens: torch.Tensor,
        before_head: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Value logits of the candidates, fp32 ``[B, K]``; ``delta_lens`` is 1 where the last token is to be kept."""
        last, b = self._last, len(tokens)
        if last is not None:
            place = last.place[rows]
            committed = commit_winner(
                self.cache.keys,
                self.cache.values,
                last.cache.keys,
                last.cache.values,
                last.candidate_ids,
                last.candidate_rows,
                last.positions,
                torch.where(last.table_rows[place.clamp(min=0)] == rows, place, -1),
                tokens,
                lengths - 1,
                slots,
                backend=self.backend,
            )
            delta_lens = delta_lens.masked_fill(committed, 0)
        batch = RaggedBatch.build(
            tokens,
            slots,
            self._row_numbers[:b],
            delta_lens,
            candidate_ids,
            candidate_lens,
            lengths - delta_lens,
            self.slot_table,
            rows,
            page_size=self.page_size,
            backend=self.backend,
        )
        keep = None
        if last is not None:
            t = len(batch.layout.token_ids)
            keep = KVCache(last.cache.keys[:, :t], last.cache.values[:, :t])
            last.candidate_ids[:b].copy_(candidate_ids)
            last.candidate_rows[:b].copy_(batch.layout.candidate_rows)
            last.positions[:b].copy_(lengths)
            last.table_rows.fill_(-1)
            last.table_rows[:b].copy_(rows)
            last.place.index_copy_(0, rows, self._row_numbers[:b].long())
        if before_head is None and self._record is not None:
            before_head = partial(self._record.mark, "forward")
        return self.value_model.forward(batch, self.cache, keep=keep, before_head=before_head, backend=self.backend)

    def _replay(self, *arguments: torch.Tensor) -> torch.Tensor:
        """:meth:`_score` from the graph of the next power of two of rows."""
        b = len(arguments[0])
        bucket = self._bucket(b)
        if bucket not in self._captured:
            self._capture(bucket)
        for buffer, argument, nothing in zip(self._inputs, arguments, self._no_row, strict=True):
            buffer[:b].copy_(argument)
            if b < bucket:
                buffer[b:bucket].fill_(nothing)
        (layers, *head), value_logits = self._captured[bucket]
        layers.replay()
        if self._record is not None:
            self._record.mark("forward")
        for graph in head:
            graph.replay()
        return value_logits[:b].clone()  # the graphs share their memory

    def _bucket(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self.max_rows)

    def _capture(self, bucket: int) -> None:
        inputs = [buffer[:bucket] for buffer in self._inputs]
        for buffer, nothing in zip(inputs, self._no_row, strict=True):
            buffer.fill_(nothing)
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(self.value_model.device), ExitStack() as capture:
            self._score(*inputs)  # compiles, which a capture cannot

            def next_graph() -> None:
                capture.close()
                graphs.append(torch.cuda.CUDAGraph())
                capture.enter_context(torch.cuda.graph(graphs[-1], pool=self._pool))

            next_graph()
            value_logits = self._score(*inputs, before_head=next_graph if self._timed else None)
        self._captured[bucket] = graphs, value_logits

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
        elements apart, or a multiple of 16.

        Args:
            scores_dtype, is_logits: of the scores that :meth:`step` will get.
            probs_dtype: of the ``probs`` that :meth:`step` will get.
            progress: show a bar on stderr.
        """
        device, vocab = self.value_model.device, self.vocab_size
        sizes = sorted({self._bucket(b) for b in range(1, self.max_rows + 1)})
        # A kernel is compiled anew for an argument that is absent, and for rows that are not aligned.
        yes_or_no = (False, True)
        variants = list(itertools.product({vocab, 16 * ceil_div(vocab, 16)}, {False, is_logits}, yes_or_no, yes_or_no))

        def row(value, dtype, size):
            return torch.full((size,), value, dtype=dtype, device=device)

        timer, self._timer = self._timer, None
        try:
            with tqdm(sizes[::-1], desc="warming up", unit="size", disable=not progress) as bar:
                for size in bar:  # the largest first: the graphs after it find room in its memory
                    ones, zeros = row(1.0, torch.float32, size), row(0.0, torch.float32, size)
                    integers = row(0, torch.int32, size)
                    mask = torch.zeros(size, ceil_div(vocab, 32), dtype=torch.int32, device=device)
                    for stride, has_temperature, has_mask, has_probs in variants:
                        scores, probs = (
                            torch.zeros(size, stride, dtype=dtype, device=device)[:, :vocab]
                            for dtype in (scores_dtype, probs_dtype)
                        )
                        self.step(
                            scores,
                            row(0, torch.int64, size),
                            row(self._padding_row, torch.int64, size),
                            integers,
                            row(-1, torch.int64, size),
                            top_k=integers,
                            top_p=ones,
                            min_p=zeros,
                            temperature=ones if has_temperature else None,
                            is_logits=is_logits,
                            vocab_mask=mask if has_mask else None,
                            probs=probs if has_probs else None,
                            sample=True,
                        )
        finally:
            self._timer = timer
        prompt = row(0, torch.int64, self.chunk_tokens)
        no_tokens = row(0, torch.int32, 1)
        self.extend(prompt, prompt, row(self._padding_row, torch.int64, 1), no_tokens, no_tokens, no_tokens)
