"""Values for calls that come at any time: those that wait are computed together, and prefixes are kept."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.slot_pool import SlotPool
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

# Candidates of a query in one forward, which has as many columns as the query with the most. Not measured.
_COLUMNS = 64
_TOKEN_BYTES = 8  # in the array that tells one sequence from another


@dataclass(frozen=True)
class Query:
    """A sequence, and the candidates for its next token. Without candidates its own tokens are valued.

    Attributes:
        token_ids: the sequence; with candidates it may be empty.
        candidate_ids: each is valued as if it came right after the sequence.
        bypass_cache: compute every token, and keep none.
    """

    token_ids: Sequence[int]
    candidate_ids: Sequence[int] = ()
    bypass_cache: bool = False


@dataclass(frozen=True)
class Answer:
    """What a :class:`Query` asked for.

    Attributes:
        values: value logits of the candidates or, without any, of the tokens.
        cached_tokens: tokens of the sequence that were computed before.
    """

    values: list[float]
    cached_tokens: int


@dataclass
class Counts:
    """What an engine has done since it was made.

    Attributes:
        queries: answered.
        forwards: of the value model.
        computed_tokens: of sequences, computed and kept.
        cached_tokens: of sequences, found computed.
    """

    queries: int = 0
    forwards: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class _Row:
    """A query that is being computed, in a row of the slot table."""

    query: Query
    table_row: int
    cached_tokens: int
    computed: int  # tokens that the cache has
    values: list[float] = field(default_factory=list)  # of the first candidates

    @property
    def is_done(self) -> bool:
        return self.computed == len(self.query.token_ids) and len(self.values) == len(self.query.candidate_ids)


class ValueEngine:
    """Answers queries in a thread of its own, all that wait in one forward.

    The cache is paged. A sequence that was computed stays until its room is needed, the one that was used last for
    longest, and sequences that begin with the same tokens share the full pages of these. The value logit of every
    token is kept with its key and value, so that a sequence whose beginning is known is valued from its first token
    all the same.

    Args:
        value_model: the value model.
        max_tokens: that the cache has room for, in all sequences.
        max_len: the longest sequence with its candidate (None: ``max_tokens``).
        max_queries: that are computed together.
        max_sequences: that the cache keeps, at least ``max_queries``.
        page_size: tokens in a page.
        chunk_tokens: of sequences in one forward; longer ones take several. It bounds the memory of a forward.
        backend: of the operators.

    Raises:
        ValueError: naming the argument, what came and what is accepted.

    Example:
        >>> engine = ValueEngine(value_model)
        >>> (future,) = engine.submit([Query([11, 12, 13], candidate_ids=[21, 22])])
        >>> future.result().values  # two value logits
    """

    def __init__(
        self,
        value_model: ValueModel,
        *,
        max_tokens: int = 32_768,
        max_len: int | None = None,
        max_queries: int = 256,
        max_sequences: int = 1024,
        page_size: int = 16,
        chunk_tokens: int = 4096,
        backend: str = "auto",
    ) -> None:
        sizes = dict(max_queries=max_queries, page_size=page_size, chunk_tokens=chunk_tokens)
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_tokens < page_size:
            raise ValueError(f"max_tokens must be at least page_size = {page_size}, got {max_tokens}")
        if max_sequences < max_queries:
            raise ValueError(f"max_sequences must be at least max_queries = {max_queries}, got {max_sequences}")
        self._num_pages = max_tokens // page_size
        most = self._num_pages * page_size
        self.max_len = most if max_len is None else max_len
        if not 1 <= self.max_len <= most:
            raise ValueError(f"max_len must be in [1, {most}], what the cache has room for, got {max_len}")
        self.value_model, self.counts = value_model, Counts()
        self._max_queries, self._max_sequences, self._page_size = max_queries, max_sequences, page_size
        self._chunk_tokens, self._backend = chunk_tokens, backend
        self._cache = KVCache.of_slots(value_model, most)
        self._values = torch.zeros(most, dtype=torch.float32, device=value_model.device)  # of each slot's token
        self._empty_cache()
        self._waiting: deque[tuple[Query, Future[Answer]]] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_flush_due = False
        self._thread = threading.Thread(target=self._run, name="lenvm-values", daemon=True)
        self._thread.start()

    def submit(self, queries: Sequence[Query]) -> list[Future[Answer]]:
        """Have queries computed, together where they fit; callable from any thread.

        A forward that fails is a RuntimeError of the queries that it was for.

        Raises:
            ValueError: naming what came and what is accepted; then none of them is computed.
            RuntimeError: the engine is closed.
        """
        for query in queries:
            self._check(query)
        futures: list[Future[Answer]] = [Future() for _ in queries]
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the server is stopping")
            self._waiting.extend(zip(queries, futures, strict=True))
            self._changed.notify()
        return futures

    def flush_cache(self) -> None:
        """Forget all sequences, before the next query is computed."""
        with self._changed:
            self._is_flush_due = True

    def warm_up(self) -> None:
        """Compile what the forwards of any query need, so that none of serving does."""
        for length in self.value_model.sizes_of_every_tile(min(self._chunk_tokens, self.max_len - 1)):
            self.submit([Query([0] * length, bypass_cache=True)])[0].result()
        for columns in sorted({next_power_of_2(count) for count in range(1, _COLUMNS + 1)}):
            self.submit([Query([0], [0] * columns, bypass_cache=True)])[0].result()

    def close(self) -> None:
        """Answer what waits, then end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _check(self, query: Query) -> None:
        if not query.token_ids and not query.candidate_ids:
            raise ValueError("input_ids must have at least one token, got none")
        length = len(query.token_ids) + bool(query.candidate_ids)
        if length > self.max_len:
            with_candidate = ", a candidate included" if query.candidate_ids else ""
            raise ValueError(f"input_ids must be at most {self.max_len} tokens{with_candidate}, got {length}")
        vocab_size = self.value_model.config.vocab_size
        for name, token_ids in (("input_ids", query.token_ids), ("candidate_ids", query.candidate_ids)):
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} must be token ids in [0, {vocab_size}), got {token}")

    def _empty_cache(self) -> None:
        slots = PagedSlots(
            self._max_sequences,
            self._num_pages * self._page_size,
            page_size=self._page_size,
            num_pages=self._num_pages,
            device=self.value_model.device,
        )
        self._slots, self._pool = slots, SlotPool(slots)
        self._free = list(range(self._max_sequences))[::-1]
        self._kept: dict[bytes, int] = {}  # rows of sequences that nobody computes, by their tokens; the oldest first

    def _run(self) -> None:
        with torch.cuda.device_of(self._values), torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closing)
                    if not self._waiting:
                        return
                    batch = self._take()
                    if self._is_flush_due:
                        self._is_flush_due = False
                        self._empty_cache()
                self._answer(batch)

    def _take(self) -> list[tuple[Query, Future[Answer]]]:
        """The queries that have waited longest, as many as there are rows and pages for."""
        batch: list[tuple[Query, Future[Answer]]] = []
        pages = self._num_pages
        while self._waiting and len(batch) < self._max_queries:
            query, future = self._waiting[0]
            pages -= -(-len(query.token_ids) // self._page_size)
            if pages < 0:
                break
            self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                batch.append((query, future))
        return batch

    def _answer(self, batch: list[tuple[Query, Future[Answer]]]) -> None:
        try:
            rows = [self._admit(query) for query, _ in batch]
            while not all(row.is_done for row in rows):
                self._forward(rows)
            answers = [Answer(self._values_of(row), row.cached_tokens) for row in rows]
            for row in rows:
                self._keep(row)
        except Exception as error:  # of the device: the server goes on, without what was being computed
            self._empty_cache()
            failure = RuntimeError(f"the value model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for _, future in batch:
                future.set_exception(failure)
            return
        self.counts.queries += len(rows)
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)

    def _admit(self, query: Query) -> _Row:
        key = _key(query)
        table_row = None
        # Where a sequence grows by a token, as in decoding, its row grows: its old state is not kept beside the new.
        for known in () if query.bypass_cache else (key, key[:-_TOKEN_BYTES]):
            if table_row is None:
                table_row = self._kept.pop(known, None)
        if table_row is None:
            table_row = self._free.pop() if self._free else self._kept.pop(next(iter(self._kept)))
        cached = self._pool.admit(table_row, () if query.bypass_cache else query.token_ids)
        room = self._pool.reserve({table_row: len(query.token_ids)})
        assert not room.refused  # the pages were counted when the query was taken
        if room.reclaimed:
            self._kept = {known: row for known, row in self._kept.items() if row not in room.reclaimed}
            self._free += room.reclaimed
        # Later rows of this batch may share the pages at once: in every layer of a forward all keys and values are
        # written before any are read, and no row is computed before the rows that it follows.
        self._pool.computed(table_row, len(query.token_ids))
        self.counts.cached_tokens += cached
        return _Row(query, table_row, cached, cached)

    def _forward(self, rows: Sequence[_Row]) -> None:
        """One forward of as many tokens as it takes, in the order of the rows."""
        parts: list[tuple[_Row, Sequence[int], Sequence[int]]] = []
        room = self._chunk_tokens
        for row in rows:
            query = row.query
            delta = query.token_ids[row.computed : row.computed + room]
            room -= len(delta)
            is_whole = row.computed + len(delta) == len(query.token_ids)
            done = len(row.values)
            candidates = query.candidate_ids[done : done + _COLUMNS] if is_whole else ()
            if delta or candidates:
                parts.append((row, delta, candidates))
            if not is_whole:
                break  # what follows may need the tokens that this one still lacks
        batch, delta_rows = self._lay_out(parts)
        values = self.value_model.forward(batch, self._cache, backend=self._backend)[0]
        self._values[batch.layout.slots[delta_rows]] = values[delta_rows]
        of_rows, first = values.tolist(), 0
        for row, delta, candidates in parts:
            first += len(delta)
            row.computed += len(delta)
            row.values += of_rows[first : first + len(candidates)]
            first += len(candidates)
            self.counts.computed_tokens += len(delta)
        self.counts.forwards += 1

    def _lay_out(self, parts: Sequence[tuple[_Row, Sequence[int], Sequence[int]]]) -> tuple[RaggedBatch, torch.Tensor]:
        """A forward that values every token row, and which of them are to be kept."""
        device = self.value_model.device
        columns = max(len(candidates) for _, _, candidates in parts)
        if columns and self._backend != "reference" and device.type == "cuda":  # a kernel is compiled for each
            columns = next_power_of_2(columns)
        delta_lens = [len(delta) for _, delta, _ in parts]
        positions = [p for row, delta, _ in parts for p in range(row.computed, row.computed + len(delta))]

        def tensor(values: Sequence, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        table_rows = tensor([row.table_row for row, _, _ in parts], torch.int64)
        lens, counts = tensor(delta_lens), tensor([len(candidates) for _, _, candidates in parts])
        owners = table_rows.repeat_interleave(lens, output_size=sum(delta_lens))
        batch = RaggedBatch.build(
            tensor([token for _, delta, _ in parts for token in delta], torch.int64),
            self._slots.slots(owners, tensor(positions, torch.int64)),
            lens.cumsum(0, dtype=torch.int32) - lens,
            lens,
            tensor([[*c, *[-1] * (columns - len(c))] for _, _, c in parts]).view(len(parts), columns),
            counts,
            tensor([row.computed for row, _, _ in parts]),
            self._slots.table,
            table_rows,
            page_size=self._page_size,
            backend=self._backend,
        )
        # The head is computed of all rows instead of the candidates'. It is small beside the layers.
        every = torch.arange(len(batch.layout.token_ids), device=device)
        layout = batch.layout._replace(candidate_rows=every[None], head_rows=every, head_targets=every)
        return replace(batch, layout=layout), (layout.slots >= 0).nonzero()[:, 0]

    def _values_of(self, row: _Row) -> list[float]:
        if row.query.candidate_ids:
            return row.values
        positions = torch.arange(len(row.query.token_ids), device=self._values.device)
        return self._values[self._slots.slots(torch.full_like(positions, row.table_row), positions)].tolist()

    def _keep(self, row: _Row) -> None:
        """A row's sequence is there to be shared; if another row has the same, that one is not needed."""
        if row.query.bypass_cache:
            self._pool.release(row.table_row)
            self._free.append(row.table_row)
            return
        key = _key(row.query)
        if (other := self._kept.pop(key, None)) is not None:
            self._pool.release(other)
            self._free.append(other)
        self._kept[key] = row.table_row


def _key(query: Query) -> bytes:
    return array("q", query.token_ids).tobytes()
