"""The values of a value model that lives on the slots of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.ops.pack_drafts import tree_columns
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.step.history import History
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.step.rows import StepTensors
from lenvm_kernels.step.values import ValueSource
from lenvm_kernels.step.winners import Winners
from lenvm_kernels.timing import StepRecord
from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.value_model import ImageTokens, KVCache, RaggedBatch, ValueModel

# Of the rows of a step in which every request computes one token and all candidates that there is room for. A request
# with five candidates of eight has six of nine.
LIVE_SHARE = 2 / 3


class ModelValues(ValueSource):
    """A value model's: one forward a step, of the tokens that it has not seen and of the candidates.

    Args:
        value_model: the value model.
        tensors: of the step.
        history: of the step.
        slots, config: as in :class:`GuidedStep`; ``graphs`` is set.
        split: marks of time are wanted between the layers and the head.

    Attributes:
        cache: :class:`KVCache` of the value model.
    """

    needs_tokens = True

    def __init__(
        self,
        value_model: ValueModel,
        tensors: StepTensors,
        history: History,
        slots: SlotTable,
        config: StepConfig,
        *,
        split: bool,
    ) -> None:
        self._model, self._tensors, self._history, self._slot_table = value_model, tensors, history, slots.table
        self._page_size, self._chunk_tokens, self._backend = slots.page_size, config.chunk_tokens, config.backend
        self.cache = KVCache.of_slots(value_model, slots.num_slots, config.cache)
        max_requests, nodes = tensors.requests.tokens.shape
        max_delta, device = history.columns.tokens.shape[1], value_model.device
        self._delta = empty_delta(max_requests, max_delta, device)
        self._delta_starts = torch.arange(max_requests, dtype=torch.int32, device=device) * max_delta
        self._winners = None
        if config.commit_winners:
            columns = tree_columns(nodes - 1, tensors.scored.token_ids.shape[1])
            self._winners = Winners(value_model, max_requests, columns, max_delta, trees=nodes > 1)
        self._graphs = Graphs(self._score, device, split=split) if config.graphs else None

    def value_logits(
        self, requests: int, nodes: int, record: StepRecord, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`; from a graph if there are graphs."""
        if self._graphs is not None:
            z = self._graphs.replay(requests, nodes, record).clone()  # the graphs share their memory
        else:
            z = self._score(requests, nodes, before_head=partial(record.mark, "forward"))
        return z, z

    def _score(self, requests: int, nodes: int, before_head: Callable[[], None] | None = None) -> torch.Tensor:
        rows = self._tensors.rows(requests, nodes)
        known, scored, trees = rows.requests, rows.scored, rows.trees
        computed = scored if trees is None else trees
        options: dict[str, Any] = dict(page_size=self._page_size, backend=self._backend)
        history, counts, committed = self._history.columns, computed.counts, None
        if self._winners is not None:
            committed = self._winners.commit(self.cache, known, self._slot_table, **options)
        out = DeltaTokens(*(x[:requests] for x in self._delta))
        delta = catch_up(history, known, counts, self._slot_table, committed=committed, out=out, **options)
        batch = RaggedBatch.build(
            delta.token_ids.flatten(),
            delta.slots.flatten(),
            self._delta_starts[:requests],
            delta.lens,
            computed.token_ids,
            counts,
            delta.cached_lens,
            self._slot_table,
            known.table_rows,
            candidate_parents=None if trees is None else trees.parents,
            expected_rows=math.ceil(LIVE_SHARE * requests * (1 + computed.token_ids.shape[1])),
            **options,
        )
        keep = None if self._winners is None else self._winners.keep(computed, batch.layout.candidate_rows)
        z = self._model.forward(batch, self.cache, keep=keep, before_head=before_head, backend=self._backend)
        if trees is None:
            return z
        columns = trees.columns.view(requests, -1)
        return z.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0.0).view(requests * nodes, -1)

    def extend(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        table_rows: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        cached_lens: torch.Tensor,
        begins: Sequence[int],
        images: ImageTokens | None,
    ) -> None:
        """See :class:`ValueSource`; at most ``chunk_tokens`` at a time."""
        no_candidates = torch.empty(len(table_rows), 0, dtype=torch.int32, device=tokens.device)
        for chunk in chunks_of(len(tokens), begins, self._chunk_tokens):
            chunk_starts, chunk_ends = (x.clamp(chunk.start, chunk.stop) for x in (starts, ends))
            batch = RaggedBatch.build(
                tokens[chunk],
                slots[chunk],
                chunk_starts - chunk.start,
                chunk_ends - chunk_starts,
                no_candidates,
                torch.zeros_like(starts),
                cached_lens + chunk_starts - starts,
                self._slot_table,
                table_rows,
                page_size=self._page_size,
                images=None if images is None else images.of_tokens(chunk),
                backend=self._backend,
            )
            self._model.forward(batch, self.cache, backend=self._backend)

    def warm_up(self, table_row: int) -> None:
        """See :class:`ValueSource`."""
        none = torch.zeros(1, dtype=torch.int32, device=self._model.device)
        prompt = torch.zeros(self._chunk_tokens, dtype=torch.int64, device=self._model.device)
        for length in self._model.sizes_of_every_tile(self._chunk_tokens):
            chunk = prompt[:length]
            self.extend(chunk, chunk, torch.full_like(prompt[:1], table_row), none, none, none, [0], None)


def chunks_of(tokens: int, begins: Sequence[int], most: int) -> Iterator[slice]:
    """All tokens in slices: whole requests, and of one that is longer than a slice parts that its own length decides.

    Args:
        tokens: of all requests.
        begins: ascending; where they begin. What comes before the first is nobody's.
        most: tokens of a slice.
    """
    ends = [end for begin, after in pairwise([*begins, tokens]) for end in (*range(begin + most, after, most), after)]
    first = last = begins[0] if begins else tokens
    for end in ends:
        if end - first > most:
            yield slice(first, last)
            first = last
        last = end
    if last > first:
        yield slice(first, last)
