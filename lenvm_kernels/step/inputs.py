"""Inputs of a guided step: :class:`StepConfig` once, :class:`StepBatch` and :class:`Sampling` for each batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lenvm_kernels.ops._common import COLUMNS, FLOAT_DTYPES, INT_DTYPES, ceil_div, check_tensor, per_request
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.types import Drafts, Filters, SpanNodes

# Maximum requests that a step computes at once. Engines admit thousands, and reserve memory for the largest batch.
MAX_ROWS = 512
# Default number of candidates per request, with and without a value model.
CANDIDATES_OF_MODEL, CANDIDATES = 8, 64
FILTER_DTYPES = dict(top_k=torch.int32, top_p=torch.float32, min_p=torch.float32, temperature=torch.float32)
MAX_NUMBERS = 64
_DRAFTS = Spec("drafts: Drafts")


def check_class(name: str, value: object, accepted: type) -> None:
    """Raise TypeError unless ``value`` is an instance of the named tuple ``accepted``."""
    if value.__class__ is not accepted:  # faster than isinstance
        raise TypeError(f"{name} must be {accepted.__name__}, got {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Sizes and options of a :class:`GuidedStep`, fixed for its lifetime.

    Attributes:
        vocab_size: vocabulary size of the base model.
        max_requests: size of the largest batch. If None, the number of rows of the slot table. More
            than 512 requests are computed in parts.
        max_candidates: K, candidates per request: a power of two up to 64. If None, 8 with a value model, which
            computes each of them, and 64 without.
        max_eos, max_scaled_tokens: maximum end-of-sequence ids, and tokens with a separate temperature, per request.
        chunk_tokens: tokens that :meth:`GuidedStep.extend` computes at a time; limits its memory.
        max_delta: M, maximum tokens per request that a step computes. A request that needs no values in a step (a
            single candidate, an entropy threshold, a stride) defers its tokens until M are pending; with 1, nothing is
            deferred. With drafts, tokens are deferred while there is room for ``1 + max_drafts`` more.
        max_drafts: D, draft tokens per request.
        value_stride: default for requests without one.
        score_all: also score the candidates of requests that need no values (``SINGLE``, ``SKIP``), for inspection.
        text_breaks: int8 ``[S]`` (:func:`text_breaks_of`); text breaks of the base model's vocabulary, with which
            outputs prefer to end after sentences, and words and sentences are counted. If None, ends need the same
            probability everywhere, and targets in words or sentences are not counted.
        graphs: run steps from CUDA graphs, one per power of two of requests. If None, True on a GPU. A graph is
            captured on first use, which stalls that step; :meth:`GuidedStep.warm_up` captures all in advance.
        backend: backend of the operators: ``auto``, ``triton`` or ``reference``.

    Raises:
        ValueError: invalid value; the message names the field, the value and the accepted values.
    """

    vocab_size: int
    max_requests: int | None = None
    max_candidates: int | None = None
    max_eos: int = 8
    max_scaled_tokens: int = 32
    chunk_tokens: int = 4096
    max_delta: int = 16
    max_drafts: int = 0
    value_stride: int = 1
    score_all: bool = False
    text_breaks: torch.Tensor | None = None
    graphs: bool | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_requests", "chunk_tokens", "max_delta", "value_stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.max_drafts < self.max_delta:
            accepted = f"at least 0 and less than max_delta = {self.max_delta}"
            raise ValueError(f"max_drafts must be {accepted}, got {self.max_drafts}")
        if not 1 <= self.vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must be from 1 to {MAX_VOCAB}, got {self.vocab_size}")
        if self.max_candidates not in (None, *COLUMNS):
            raise ValueError(f"max_candidates must be a power of two up to {COLUMNS[-1]}, got {self.max_candidates}")
        if self.text_breaks is not None:
            check_tensor("text_breaks", self.text_breaks, dtypes=torch.int8, shape=(None,))

    def completed(self, slots: SlotTable, device: torch.device, candidates: int, *, has_graphs: bool) -> StepConfig:
        """The configuration with its defaults resolved, and its tensors on the step's ``device``.

        ``candidates`` and ``has_graphs`` are the defaults of ``max_candidates`` and ``graphs``.
        """
        can_have_graphs = has_graphs and self.backend != "reference"
        if self.graphs and not can_have_graphs:
            raise ValueError("graphs must be None or False unless kernels run on a GPU, got True")
        return replace(
            self,
            max_requests=self.max_requests or slots.table.shape[0],
            max_candidates=self.max_candidates or candidates,
            text_breaks=None if self.text_breaks is None else self.text_breaks.to(device),
            graphs=can_have_graphs if self.graphs is None else self.graphs,
        )

    def checked_drafts(self, drafts: Drafts, requests: int, device: torch.device) -> Drafts:
        """The checked drafts, with token ids as int64, because kernels are compiled for one dtype."""
        _DRAFTS.check("auto", drafts, device=device, sizes={"B": requests})
        if (columns := drafts.token_ids.shape[1]) != self.max_drafts:
            raise ValueError(f"drafts must have max_drafts = {self.max_drafts} columns, got {columns}")
        return drafts._replace(token_ids=drafts.token_ids.long())

    def checked_scores(self, scores: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
        """The checked scores, without padding columns beyond the vocabulary.

        Fewer columns are accepted, because the output layers of some models lack special tokens of prompts.
        """
        check_tensor("scores", scores, dtypes=FLOAT_DTYPES, shape=(rows, None), device=device)
        if scores.shape[1] == 0:
            raise ValueError("scores must have at least one column, got none")
        return scores[:, : self.vocab_size] if scores.shape[1] > self.vocab_size else scores


class EngineSlots(NamedTuple):
    """The slots that an engine has assigned to its requests.

    Attributes:
        table: int32 ``[R, pages]``; the slot table, on the step's device. Token ``p`` of the request in row ``r``
            is stored in slot ``table[r, p // page_size] * page_size + p % page_size``.
        num_slots: number of slots; sizes the value model's cache.
        page_size: slots per page.
    """

    table: torch.Tensor
    num_slots: int
    page_size: int = 1


SlotTable = PagedSlots | EngineSlots


class StepBatch(NamedTuple):
    """The sequences of ``B`` requests before their next tokens are drawn.

    Attributes:
        tokens: int32 or int64 ``[B]``; the last token of each sequence, which the scores follow; or ``[B, N]``, the
            new tokens of each sequence, from column 0 on.
        table_rows: int32 or int64 ``[B]``; row of each request in the slot table, all different.
        lengths: int32 ``[B]``; tokens of each sequence, including the last one. The slot table has slots for all.
        new_lens: int32 ``[B]``; number of new tokens per sequence, 0 to N, for ``tokens [B, N]``.
        active: bool ``[B]``; False for requests with ended sequences, which are unguided in this and all later steps.
            If None, all are active.
        states: hidden states of the base model after the last token, in the dtype of the :class:`LengthProbe`:
            ``[B, L H]``, or ``[B (1 + D), L H]`` with drafts; the ``L`` layers that the probe reads are concatenated.
            None without a probe.
        counts: whether ``value_stride`` counts this step. Set to False for prefill-only steps.
    """

    tokens: torch.Tensor
    table_rows: torch.Tensor
    lengths: torch.Tensor
    new_lens: torch.Tensor | None = None
    active: torch.Tensor | None = None
    states: torch.Tensor | None = None
    counts: bool = True

    def checked(self, max_requests: int, device: torch.device) -> StepBatch:
        """The checked batch, with token ids and rows as int64, because kernels are compiled for one dtype."""
        is_many = self.new_lens is not None
        shape = (None, None) if is_many else (None,)
        check_tensor("batch.tokens", self.tokens, dtypes=INT_DTYPES, shape=shape, device=device)
        b = self.tokens.shape[0]
        if not 1 <= b <= max_requests:
            raise ValueError(f"batch.tokens must have 1 to max_requests = {max_requests} requests, got {b}")
        check_tensor("batch.table_rows", self.table_rows, dtypes=INT_DTYPES, shape=(b,), device=device)
        check_tensor("batch.lengths", self.lengths, dtypes=torch.int32, shape=(b,), device=device)
        if is_many:
            check_tensor("batch.new_lens", self.new_lens, dtypes=torch.int32, shape=(b,), device=device)
            if self.tokens.shape[1] == 0:
                raise ValueError("batch.tokens must have at least one column, got none")
        if self.active is not None:
            check_tensor("batch.active", self.active, dtypes=torch.bool, shape=(b,), device=device)
        if self.tokens.dtype is torch.int64 and self.table_rows.dtype is torch.int64:
            return self
        return self._replace(tokens=self.tokens.long(), table_rows=self.table_rows.long())

    def check_states(self, rows: int, needed: tuple[int, torch.dtype] | None) -> None:
        """Raise unless ``states`` have the form in :attr:`ValueSource.needs_states`."""
        if needed is not None:
            shape, device = (rows, needed[0]), self.lengths.device
            check_tensor("batch.states", self.states, dtypes=needed[1], shape=shape, device=device)
        elif self.states is not None:
            raise ValueError("batch.states must be None without a probe, got a tensor")


class PreparedStep(NamedTuple):
    """A batch that :meth:`GuidedStep.prepare` has checked, for :meth:`GuidedStep.step`.

    Attributes:
        logits: the logits, changed in place; None if none were passed.
        batch: the requests.
        drafts: drafts of the requests, if any.
        spans: state of the spans at each node. None if no request has a span.
        is_changed: whether logits may have changed; known without a host-device sync.
    """

    logits: torch.Tensor | None
    batch: StepBatch
    drafts: Drafts | None
    spans: SpanNodes | None
    is_changed: bool


class Sampling(NamedTuple):
    """Sampling parameters of a step.

    Attributes:
        top_k, top_p, min_p, temperature, is_logits, vocab_mask: as in :func:`topk_candidates`. With drafts,
            ``vocab_mask`` has one row per node; the others are per request.
        sample: whether to draw tokens from the candidates. Random numbers depend only on a request's seed and length.
    """

    top_k: torch.Tensor | int
    top_p: torch.Tensor | float
    min_p: torch.Tensor | float
    temperature: torch.Tensor | float | None = None
    is_logits: bool = False
    vocab_mask: torch.Tensor | None = None
    sample: bool = False

    def checked_mask(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The checked ``vocab_mask`` for the columns of the scores."""
        mask, words = self.vocab_mask, ceil_div(scores.shape[1], 32)
        if mask is None:
            return None
        check_tensor("sampling.vocab_mask", mask, dtypes=torch.int32, shape=(len(scores), None), device=scores.device)
        if mask.shape[1] < words:
            raise ValueError(f"sampling.vocab_mask must have at least {words} columns, got {mask.shape[1]}")
        return mask[:, :words]

    def filters(self, requests: int, device: torch.device, numbers: dict[Any, torch.Tensor]) -> Filters:
        """The filters as tensors ``[requests]``. ``numbers`` caches a tensor per number."""
        if self.temperature is not None and not self.is_logits:
            raise ValueError("sampling.temperature must be None when scores are probabilities (is_logits=False)")
        if len(numbers) > MAX_NUMBERS:
            numbers.clear()
        fields = []
        for name, dtype in FILTER_DTYPES.items():
            value = getattr(self, name)
            if name == "temperature" and value is None:
                value = 1.0
            if isinstance(value, torch.Tensor):
                check_tensor(
                    f"sampling.{name}", value, dtypes=dtype, shape=(requests,), device=device, unit_stride=False
                )
                fields.append(value)
                continue
            key = name, type(value), value if isinstance(value, (int, float)) else None
            if key not in numbers:
                numbers[key] = per_request(f"sampling.{name}", value, dtype, 1, device)
            fields.append(numbers[key].expand(requests))
        return Filters(*fields)
