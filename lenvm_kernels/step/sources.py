"""The sources of a guided step's values: :class:`ModelValues`, :class:`ProbeValues` or :class:`ConstantValues`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lenvm_kernels.guidance.params import GuidanceParams, check_with_probe, check_without_values
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.step import checks
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.step.tensors import StepState
from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.values import ImageTokens, KVCache, LengthProbe, RaggedBatch, ValueModel

# Tokens past the target at which outputs end that wait for the end of a sentence, measured with Qwen2.5-Coder-1.5B and
# SmolLM2 (bench/results/nvidia-h200/real-model).
EARLY_WITH_VALUES, EARLY_WITHOUT_VALUES = 6.0, 3.0
# Expected share of a forward's rows in use, out of one delta token and K candidates per request. A request with five
# of eight candidates uses six of nine rows.
LIVE_SHARE = 2 / 3


class PromptTokens(NamedTuple):
    """Tokens to compute, as in :meth:`GuidedStep.extend`; ``ends [B]`` are the places after each request's tokens."""

    tokens: torch.Tensor
    slots: torch.Tensor
    table_rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    cached_lens: torch.Tensor


class ValueSource(ABC):
    """A source of value logits. Subclasses must implement :meth:`value_logits`; the other hooks are for stateful ones.

    Attributes:
        needs_tokens: whether the source reads tokens, which must then be passed to :meth:`extend` and steps.
        needs_states: number of columns and dtype of the base model's states that each step must be given; None if the
            source reads none.
        device: device of the source, which must be the slot table's device. If None, any.
        can_have_graphs: whether CUDA graphs can run the source.
        early: tokens past the target at which outputs end that wait for the end of a sentence.
        cache: keys and values of the tokens; None if the source caches none.
    """

    needs_tokens = False
    needs_states: tuple[int, torch.dtype] | None = None
    device: torch.device | None = None
    can_have_graphs = False
    early = EARLY_WITH_VALUES
    cache: KVCache | None = None

    def bind(self, state: StepState) -> None:
        """Connect the source with its step, whose constructor calls this. A source belongs to one step.

        Raises:
            ValueError: the source belongs to another step.
        """
        if hasattr(self, "_state"):
            raise ValueError("values must be a source of no other step: make a source for each GuidedStep")
        self._state = state

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

    def check_images(self, images: ImageTokens, tokens: int) -> None:
        """Raise unless the source reads images and ``images`` describe ``tokens`` tokens."""
        raise ValueError(checks.NO_IMAGES)

    def extend(self, prompts: PromptTokens, begins: Sequence[int], images: ImageTokens | None) -> None:  # noqa: B027
        """Compute and cache the tokens of prompts, see :meth:`GuidedStep.extend`."""

    def warm_up(self, table_row: int) -> None:  # noqa: B027
        """Compile the kernels of :meth:`extend`; ``table_row`` is the padding row."""


class ConstantValues(ValueSource):
    """Values without a value model: every token is predicted to be followed by the request's target length.

    All candidates of a row have the same value, except those that end the sequence or its span, whose value is 0. So
    ``near``, ``ge_near`` and ``le_near`` keep the probability ratios of all other candidates, except those that end a
    sentence. Ends are suppressed far before the target, and boosted in about the last ``sqrt(2 target)`` tokens.
    """

    early = EARLY_WITHOUT_VALUES

    def bind(self, state: StepState) -> None:
        """See :class:`ValueSource`."""
        super().bind(state)
        size = len(state.table), state.config.max_candidates
        self._row_values = torch.zeros(size, dtype=torch.float32, device=state.slots.table.device)
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
        values = self._row_values
        staged = (staged.pin_memory() if values.is_cuda else staged).to(values.device, non_blocking=True)
        values[staged[0].long()] = staged[1, :, None].float()
        self._staged.clear()

    def value_logits(
        self, requests: int, nodes: int, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        z = self._row_values[self._state.tensors.rows(requests, nodes).nodes.table_rows]
        return z, z


class ProbeValues(ValueSource):
    """Values from a probe, which reads the base model's states in each step.

    Args:
        probe: the probe.
    """

    def __init__(self, probe: LengthProbe) -> None:
        self.probe, self.device = probe, probe.device
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
        rows = self._state.tensors.rows(requests, nodes)
        return self.probe.value_logits(
            states,
            rows.scored.token_ids,
            self._state.table.columns,
            table_rows=rows.nodes.table_rows,
            generated=rows.nodes.generated,
            backend=self._state.config.backend,
        )

    def warm_up(self, table_row: int) -> None:
        """See :class:`ValueSource`."""
        scored = self._state.tensors.scored.token_ids
        (size, dtype), device = self.needs_states, scored.device
        for rows in self.probe.rows_of_every_tile(len(scored)):
            self.probe.value_logits(
                torch.zeros(rows, size, dtype=dtype, device=device),
                torch.full_like(scored[:rows], -1),
                self._state.table.columns,
                table_rows=torch.full((rows,), table_row, dtype=torch.int64, device=device),
                generated=torch.zeros(rows, dtype=torch.int32, device=device),
                backend=self._state.config.backend,
            )


class ModelValues(ValueSource):
    """A value model on an engine's slots: one forward per step, over tokens not yet cached and the candidates.

    Args:
        value_model: the value model.

    Attributes:
        graphs_class: runs the forward if the step has graphs.
    """

    needs_tokens = True
    graphs_class = Graphs

    def __init__(self, value_model: ValueModel) -> None:
        self.value_model, self.device = value_model, value_model.device
        self.can_have_graphs = value_model.device.type == "cuda"

    def bind(self, state: StepState) -> None:
        """See :class:`ValueSource`."""
        super().bind(state)
        config, device = state.config, self.value_model.device
        self.cache: KVCache = KVCache.of_slots(self.value_model, state.slots.num_slots)
        max_requests = len(state.tensors.requests.positions)
        self._delta = empty_delta(max_requests, config.max_delta, device)
        self._delta_starts = torch.arange(max_requests, dtype=torch.int32, device=device) * config.max_delta
        self._graphs = self.graphs_class(self._score, device) if config.graphs else None

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
        state = self._state
        rows = state.tensors.rows(requests, nodes)
        trees = rows.trees
        computed = rows.scored if trees is None else trees
        options: dict[str, Any] = dict(page_size=state.slots.page_size, backend=state.config.backend)
        delta = catch_up(
            state.history.columns,
            rows.requests,
            computed.counts,
            state.slots.table,
            max_new=1 + state.config.max_drafts,
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
            state.slots.table,
            rows.requests.table_rows,
            candidate_parents=None if trees is None else trees.parents,
            expected_rows=math.ceil(LIVE_SHARE * requests * (1 + computed.token_ids.shape[1])),
            **options,
        )
        z = self.value_model.forward(batch, self.cache, backend=state.config.backend)
        if trees is None:
            return z
        columns = trees.columns.view(requests, -1)
        return z.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0.0).view(requests * nodes, -1)

    def check_images(self, images: ImageTokens, tokens: int) -> None:
        """See :class:`ValueSource`."""
        checks.check_images(images, tokens, self.value_model)

    def extend(self, prompts: PromptTokens, begins: Sequence[int], images: ImageTokens | None) -> None:
        """See :class:`ValueSource`; at most ``chunk_tokens`` at a time."""
        tokens, slots, table_rows, starts, ends, cached_lens = prompts
        config, slot_table = self._state.config, self._state.slots
        no_candidates = torch.empty(len(table_rows), 0, dtype=torch.int32, device=tokens.device)
        for chunk in chunks_of(len(tokens), begins, config.chunk_tokens):
            chunk_starts, chunk_ends = (x.clamp(chunk.start, chunk.stop) for x in (starts, ends))
            batch = RaggedBatch.build(
                tokens[chunk],
                slots[chunk],
                chunk_starts - chunk.start,
                chunk_ends - chunk_starts,
                no_candidates,
                torch.zeros_like(starts),
                cached_lens + chunk_starts - starts,
                slot_table.table,
                table_rows,
                page_size=slot_table.page_size,
                images=None if images is None else images.of_tokens(chunk),
                backend=config.backend,
            )
            self.value_model.forward(batch, self.cache, backend=config.backend)

    def warm_up(self, table_row: int) -> None:
        """See :class:`ValueSource`."""
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        prompt = torch.zeros(self._state.config.chunk_tokens, dtype=torch.int64, device=self.device)
        for length in self.value_model.sizes_of_every_tile(len(prompt)):
            chunk = prompt[:length]
            self.extend(PromptTokens(chunk, chunk, torch.full_like(prompt[:1], table_row), none, none, none), [0], None)


def value_source(model: ValueModel | LengthProbe | None) -> ValueSource:
    """The source of values of a model that a user has passed; :class:`ConstantValues` without one."""
    if model is None:
        return ConstantValues()
    return ProbeValues(model) if isinstance(model, LengthProbe) else ModelValues(model)


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
