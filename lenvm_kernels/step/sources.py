"""The sources of a guided step's values: a value model, a probe, or none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from lenvm_kernels.guidance.params import GuidanceParams, check_with_probe, check_without_values
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops.candidate_values import num_counters
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.step.history import History
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.step.tensors import StepTensors
from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.values import ImageTokens, KVCache, LengthProbe, RaggedBatch, ValueModel

# Expected share of a forward's rows in use, out of one delta token and K candidates per request. A request with five
# of eight candidates uses six of nine rows.
LIVE_SHARE = 2 / 3


class ValueSource(ABC):
    """A source of value logits. Subclasses must implement :meth:`value_logits`; the other hooks are for stateful ones.

    Attributes:
        needs_tokens: whether the source reads tokens, which must then be passed to :meth:`extend` and steps.
        needs_states: number of columns and dtype of the base model's states that each step must be given; None if the
            source reads none.
    """

    needs_tokens = False
    needs_states: tuple[int, torch.dtype] | None = None

    @abstractmethod
    def value_logits(
        self, requests: int, nodes: int, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Value logits of the candidates of a step.

        Args:
            requests: rows of the step's tensors (:class:`StepTensors`), padding included.
            nodes: per request.
            states: the batch's states (:class:`StepBatch`).

        Returns:
            fp32 ``[requests * nodes, K]``, the logits that guide and those that predict lengths; arbitrary where a
            candidate is not scored. Both are the same tensor unless the source predicts a distribution.
        """

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:  # noqa: B027, stateful sources only
        """Admit a request to a row. Raises ValueError, naming the field, for guidance that the source cannot give."""

    def flush(self) -> None:  # noqa: B027
        """Copy to the device the state that :meth:`add_request` has staged."""

    def extend(  # noqa: B027
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
        """Compute and cache the tokens ``starts`` to ``ends`` of prompts, see :meth:`GuidedStep.extend`."""

    def warm_up(self, table_row: int) -> None:  # noqa: B027
        """Compile the kernels of :meth:`extend`; ``table_row`` is the padding row."""


class ConstantValues(ValueSource):
    """Values without a value model: every token is predicted to be followed by the request's target length.

    All candidates of a row have the same value, except those that end the sequence or its span, whose value is 0. So
    ``near``, ``ge_near`` and ``le_near`` keep the probability ratios of all other candidates, except those that end a
    sentence. Ends are suppressed far before the target, and boosted in about the last ``sqrt(2 target)`` tokens.

    Args:
        table_rows: R, rows of the guidance table.
        tensors: tensors of the step.
        device: device of the values.
    """

    def __init__(self, table_rows: int, tensors: StepTensors, device: torch.device) -> None:
        self._tensors = tensors
        columns = tensors.scored.token_ids.shape[1]
        self._of_rows = torch.zeros(table_rows, columns, dtype=torch.float32, device=device)
        self._staged: dict[int, float] = {}

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        """See :class:`ValueSource`."""
        params = params or GuidanceParams()
        check_without_values(params)
        # At least one token: a value of 0 marks an end.
        length = max(1.0, (params.target_length or 0.0) + params.answer_length)
        nats = -math.log(params.gamma) * length
        self._staged[table_row] = nats + math.log(-math.expm1(-nats))

    def flush(self) -> None:
        """See :class:`ValueSource`."""
        if not self._staged:
            return
        staged = torch.tensor([[*self._staged], [*self._staged.values()]], dtype=torch.float64)
        staged = (staged.pin_memory() if self._of_rows.is_cuda else staged).to(self._of_rows.device, non_blocking=True)
        self._of_rows[staged[0].long()] = staged[1, :, None].float()
        self._staged.clear()

    def value_logits(
        self, requests: int, nodes: int, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        z = self._of_rows[self._tensors.rows(requests, nodes).nodes.table_rows]
        return z, z


class ProbeValues(ValueSource):
    """Values from a probe, which reads the base model's states in each step.

    Args:
        probe: the probe.
        tensors: tensors of the step.
        table: guidance of the requests.
        config: configuration of the step.
    """

    def __init__(self, probe: LengthProbe, tensors: StepTensors, table: GuidanceTable, config: StepConfig) -> None:
        self._probe, self._tensors, self._table = probe, tensors, table
        rows, columns = tensors.scored.token_ids.shape
        self._options: dict[str, Any] = dict(
            counters=torch.zeros(num_counters(rows, columns), dtype=torch.int32, device=probe.device),
            backend=config.backend,
        )
        self.needs_states: tuple[int, torch.dtype] = (probe.config.state_size, probe.dtype)

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        """See :class:`ValueSource`."""
        if params is not None:
            check_with_probe(params)

    def value_logits(
        self, requests: int, nodes: int, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        assert states is not None
        rows = self._tensors.rows(requests, nodes)
        return self._probe.value_logits(
            states,
            rows.scored.token_ids,
            self._table.columns,
            table_rows=rows.nodes.table_rows,
            generated=rows.nodes.generated,
            **self._options,
        )

    def warm_up(self, table_row: int) -> None:
        """See :class:`ValueSource`."""
        scored, known = self._tensors.scored.token_ids, self._tensors.rows(1).nodes
        (size, dtype), device = self.needs_states, scored.device
        for rows in self._probe.rows_of_every_tile(len(scored)):
            self._probe.value_logits(
                torch.zeros(rows, size, dtype=dtype, device=device),
                torch.full_like(scored[:rows], -1),
                self._table.columns,
                table_rows=torch.full((rows,), table_row, dtype=known.table_rows.dtype, device=device),
                generated=torch.zeros(rows, dtype=known.generated.dtype, device=device),
                **self._options,
            )


class ModelValues(ValueSource):
    """A value model on an engine's slots: one forward per step, over tokens not yet cached and the candidates.

    Args:
        value_model: the value model.
        tensors: tensors of the step.
        history: history of the step.
        slots, config: as in :class:`GuidedStep`; ``config.graphs`` must be set.

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
    ) -> None:
        self._model, self._tensors, self._history, self._slot_table = value_model, tensors, history, slots.table
        self._page_size, self._chunk_tokens, self._backend = slots.page_size, config.chunk_tokens, config.backend
        self.cache = KVCache.of_slots(value_model, slots.num_slots)
        max_requests, max_delta = len(tensors.requests.positions), config.max_delta
        self._max_new = 1 + config.max_drafts
        self._delta = empty_delta(max_requests, max_delta, value_model.device)
        self._delta_starts = torch.arange(max_requests, dtype=torch.int32, device=value_model.device) * max_delta
        self._graphs = Graphs(self._score, value_model.device) if config.graphs else None

    def value_logits(
        self, requests: int, nodes: int, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        if self._graphs is not None:
            z = self._graphs.replay(requests, nodes).clone()  # the next replay overwrites it
            return z, z
        z = self._score(requests, nodes)
        return z, z

    def _score(self, requests: int, nodes: int) -> torch.Tensor:
        rows = self._tensors.rows(requests, nodes)
        trees = rows.trees
        computed = rows.scored if trees is None else trees
        options: dict[str, Any] = dict(page_size=self._page_size, backend=self._backend)
        delta = catch_up(
            self._history.columns,
            rows.requests,
            computed.counts,
            self._slot_table,
            max_new=self._max_new,
            out=DeltaTokens(*(x[:requests] for x in self._delta)),
            **options,
        )
        batch = RaggedBatch.build(
            delta.token_ids.flatten(),
            delta.slots.flatten(),
            self._delta_starts[:requests],
            delta.lens,
            computed.token_ids,
            computed.counts,
            delta.cached_lens,
            self._slot_table,
            rows.requests.table_rows,
            candidate_parents=None if trees is None else trees.parents,
            expected_rows=math.ceil(LIVE_SHARE * requests * (1 + computed.token_ids.shape[1])),
            **options,
        )
        z = self._model.forward(batch, self.cache, backend=self._backend)
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
    """Cut all tokens into slices of whole requests. A request longer than a slice is cut at multiples of ``most``.

    Args:
        tokens: number of tokens of all requests.
        begins: ascending; the first token of each request. Tokens before ``begins[0]`` are in no slice.
        most: tokens per slice.
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
