"""Value sources of a guided step: :class:`ModelValues`, :class:`ProbeValues` or :class:`ConstantValues`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from lenvm_kernels.guidance.params import GuidanceParams, check_with_probe, check_without_values
from lenvm_kernels.ops._common import check_tensor
from lenvm_kernels.step.inputs import CANDIDATES, CANDIDATES_OF_MODEL
from lenvm_kernels.step.state import States, StepRows, StepState
from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.values import ImageTokens, KVCache, LengthProbe, RaggedBatch, ValueModel

# Mean number of tokens from the target to the end of the sentence, measured with Qwen2.5-Coder-1.5B and
# SmolLM2 (bench/results/nvidia-h200/real-model).
EARLY_WITH_VALUES, EARLY_WITHOUT_VALUES = 6.0, 3.0
# Expected share of a forward's rows in use, for one delta token and K candidates per request. With five of eight
# candidates, a request uses six of nine rows.
LIVE_SHARE = 2 / 3
_NO_IMAGES = "images must be None unless the value model is a vision-language model"


class ValueSource(ABC):
    """A source of value logits. Subclasses implement :meth:`value_logits`; other hooks are for stateful sources."""

    needs_tokens = False  # whether the source reads tokens, which must then be passed to extend and to steps
    needs_states: States | None = None  # of the base model, which each step then needs
    device: torch.device | None = None  # must be the slot table's device. If None, any
    candidates = CANDIDATES  # default of StepConfig.max_candidates
    early = EARLY_WITH_VALUES  # mean number of tokens from the target to the end of the sentence
    cache: KVCache | None = None  # keys and values of the tokens

    def bind(self, state: StepState) -> None:
        """Connect the source with its step. Called by the step's constructor; a source belongs to one step.

        Raises:
            ValueError: the source belongs to another step.
        """
        if hasattr(self, "_state"):
            raise ValueError("values belongs to another step; create a source for each GuidedStep")
        self._state = state

    @abstractmethod
    def value_logits(
        self, rows: StepRows, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Value logits of the candidates of a step.

        Args:
            rows: tensors of the step, padding included.
            states: states of all rows (:class:`StepBatch`), or None.

        Returns:
            fp32 ``[rows, K]``, value logits for guidance and for predicted lengths; arbitrary for candidates that are
            not scored. They are one tensor unless the source predicts a distribution. None if the value of every
            candidate is its request's target (``target_logit`` of :class:`GuidanceColumns`).
        """

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:  # noqa: B027, stateful sources only
        """Add a request in a row. Raises ValueError, naming the field, if its guidance is not supported."""

    def check_images(self, images: ImageTokens, tokens: int) -> None:
        """Raise unless the source reads images and ``images`` describe ``tokens`` tokens."""
        raise ValueError(_NO_IMAGES)

    def extend(self, prompts: DeltaTokens, begins: Sequence[int], images: ImageTokens | None) -> None:  # noqa: B027
        """Compute and cache the tokens of prompts, see :meth:`GuidedStep.extend`."""

    def warm_up(self, table_row: int) -> None:  # noqa: B027
        """Compile the kernels of :meth:`extend`; ``table_row`` is the padding row."""


class ConstantValues(ValueSource):
    """Values without a value model: every token has the request's target as its predicted length.

    All candidates of a row have the same value, except tokens that end the sequence or its span, which have the value
    0. So ``near``, ``ge_near`` and ``le_near`` keep the probability ratios of all other candidates, except tokens that
    end a sentence. Ends are suppressed far before the target, and boosted in about the last ``sqrt(2 target)`` tokens.
    """

    early = EARLY_WITHOUT_VALUES

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        check_without_values(params or GuidanceParams())

    def value_logits(self, rows: StepRows, states: torch.Tensor | None = None) -> None:
        """Return None, because the guidance table stores the values."""


class ProbeValues(ValueSource):
    """Values from a probe on the base model's states."""

    def __init__(self, probe: LengthProbe) -> None:
        self.probe, self.device = probe, probe.device
        self.needs_states: States = (probe.config.state_size, probe.dtype)

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        if params is not None:
            check_with_probe(params)

    def value_logits(self, rows: StepRows, states: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        assert states is not None
        table, backend = self._state.table.columns, self._state.config.backend
        of_rows = dict(table_rows=rows.requests.table_rows, generated=rows.requests.generated)
        return self.probe.value_logits(states, rows.scored.token_ids, table, **of_rows, backend=backend)

    def warm_up(self, table_row: int) -> None:
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
    """Values from a value model on the engine's slots: one forward per step over uncached tokens and candidates."""

    needs_tokens = True
    candidates = CANDIDATES_OF_MODEL

    def __init__(self, value_model: ValueModel) -> None:
        self.value_model, self.device = value_model, value_model.device

    def bind(self, state: StepState) -> None:
        super().bind(state)
        self.cache: KVCache = KVCache.of_slots(self.value_model, state.slots.num_slots)

    def value_logits(self, rows: StepRows, states: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        state, trees, (requests, nodes) = self._state, rows.trees, rows.sizes
        computed = rows.scored if trees is None else trees
        z = self._forward(
            computed.token_ids,
            computed.counts,
            requests=rows.requests,
            history=state.history.columns,
            max_new=1 + state.config.max_drafts,
            candidate_parents=None if trees is None else trees.parents,
            expected_rows=math.ceil(LIVE_SHARE * requests * (1 + computed.token_ids.shape[1])),
        )
        if trees is not None:
            columns = trees.columns.view(requests, -1)
            z = z.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0.0).view(requests * nodes, -1)
        return z, z

    def _forward(self, candidate_ids: torch.Tensor, candidate_lens: torch.Tensor, **options: Any) -> torch.Tensor:
        """A forward on the slots of the step, with further ``options`` of :meth:`RaggedBatch.build`."""
        slots, backend = self._state.slots, self._state.config.backend
        options |= dict(page_size=slots.page_size, backend=backend)
        batch = RaggedBatch.build(self.value_model, candidate_ids, candidate_lens, slots.table, **options)
        return self.value_model.forward(batch, self.cache, backend=backend)

    def check_images(self, images: ImageTokens, tokens: int) -> None:
        config, dtype, device = self.value_model.config, self.value_model.dtype, self.device
        if config.mrope_sections is None:
            raise ValueError(_NO_IMAGES)
        check_tensor("images.positions", images.positions, dtypes=torch.int64, shape=(3, tokens), device=device)
        check_tensor("images.rows", images.rows, dtypes=torch.int64, shape=(tokens,), device=device)
        check_tensor("images.embeds", images.embeds, dtypes=dtype, shape=(None, config.hidden_size), device=device)

    def extend(self, prompts: DeltaTokens, begins: Sequence[int], images: ImageTokens | None) -> None:
        """See :class:`ValueSource`. Computes at most ``chunk_tokens`` at a time."""
        tokens, starts, lens, cached_lens, table_rows = prompts
        ends, no_lens = starts + lens, torch.zeros_like(starts)
        no_candidates = torch.empty(len(table_rows), 0, dtype=torch.int32, device=tokens.device)
        for chunk in chunks_of(len(tokens), begins, self._state.config.chunk_tokens):
            chunk_starts, chunk_ends = (x.clamp(chunk.start, chunk.stop) for x in (starts, ends))
            delta = DeltaTokens(
                tokens[chunk],
                starts=chunk_starts - chunk.start,
                lens=chunk_ends - chunk_starts,
                cached_lens=cached_lens + chunk_starts - starts,
                table_rows=table_rows,
            )
            images_of_chunk = None if images is None else images.of_tokens(chunk)
            self._forward(no_candidates, no_lens, delta=delta, images=images_of_chunk)

    def warm_up(self, table_row: int) -> None:
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        prompt = torch.zeros(self._state.config.chunk_tokens, dtype=torch.int64, device=self.device)
        for length in self.value_model.sizes_of_every_tile(len(prompt)):
            delta = DeltaTokens(prompt[:length], none, none, none, torch.full_like(prompt[:1], table_row))
            self.extend(delta, [0], None)


def value_source(model: ValueModel | LengthProbe | None) -> ValueSource:
    """The value source of a model; :class:`ConstantValues` if it is None."""
    if model is None:
        return ConstantValues()
    return ProbeValues(model) if isinstance(model, LengthProbe) else ModelValues(model)


def chunks_of(tokens: int, begins: Sequence[int], most: int) -> Iterator[slice]:
    """Split the tokens of requests, which begin at the ascending ``begins``, into slices of at most ``most`` tokens.

    A slice has whole requests; a longer request is split at multiples of ``most``. Tokens before ``begins[0]`` are
    skipped.
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
