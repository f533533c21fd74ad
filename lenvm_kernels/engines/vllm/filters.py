"""Excludes the rows that guidance has rewritten from vLLM's own filters, which it applies after the processors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from vllm.v1.worker.gpu.sample.states import SamplingStates

from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Status


class Rewritten(NamedTuple):
    """The rows that a step has rewritten.

    Attributes:
        of_rows: a tensor of the engine, which identifies the step.
        rows: bool ``[rows]``; whether the row was rewritten.
        token_ids: int64 ``[rows, K]``; candidates of the rewritten rows, arbitrary tokens in others.
    """

    of_rows: torch.Tensor
    rows: torch.Tensor
    token_ids: torch.Tensor


def rewrite(
    logits: torch.Tensor, output: StepOutput, at: torch.Tensor, temperature: torch.Tensor, of_rows: torch.Tensor
) -> Rewritten:
    """Mask all tokens but the candidates in guided rows, and set the logits that give their guided probabilities.

    Args:
        logits: fp32 ``[rows, V]``; changed in place.
        output: result of the step.
        at: int64 ``[rows]``; row of each in ``output``.
        temperature: fp32 ``[rows, 1]``; the engine divides logits by it.
        of_rows: see :class:`Rewritten`.
    """
    status, token_ids = output.candidates.status[at], output.candidates.token_ids[at].long()
    rows = (status == Status.GUIDE) | (status == Status.SINGLE)
    # Columns without a candidate repeat the first one.
    is_listed = token_ids >= 0
    token_ids = torch.where(is_listed, token_ids, token_ids[:, :1]).clamp(min=0)
    probs = torch.where(is_listed, output.probs[at], output.probs[at][:, :1])
    before = logits.gather(1, token_ids)
    logits.masked_fill_(rows[:, None], -torch.inf)
    logits.scatter_(1, token_ids, torch.where(rows[:, None], temperature * probs.log(), before))
    return Rewritten(of_rows, rows, token_ids)


class EngineFilters:
    """Disables the engine's top-k, top-p and min-p in guided rows, where they would remove less probable candidates.

    Wraps the methods of the engine that apply them.

    Args:
        vocab_size: size of the vocabulary, a top-k that has no effect.

    Attributes:
        rewritten: rows that the filters must not change. If None, there are none.
    """

    def __init__(self, vocab_size: int) -> None:
        self.rewritten: Rewritten | None = None
        top_k_top_p: Callable = SamplingStates.get_top_k_top_p
        min_p: Callable = SamplingStates.apply_min_p

        @wraps(top_k_top_p)
        def get_top_k_top_p(states: SamplingStates, of_rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # vLLM 0.33 also returns whether a row may have only a top-p.
            top_k, top_p, *others = top_k_top_p(states, of_rows, *args, **kwargs)
            if (rewritten := self._rewritten_of(of_rows)) is not None:
                top_k = None if top_k is None else top_k.masked_fill(rewritten.rows, vocab_size)
                top_p = None if top_p is None else top_p.masked_fill(rewritten.rows, 1.0)
            return top_k, top_p, *others

        @wraps(min_p)
        def apply_min_p(
            states: SamplingStates, logits: torch.Tensor, of_rows: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            if (rewritten := self._rewritten_of(of_rows)) is None:
                return min_p(states, logits, of_rows, *args, **kwargs)
            before = logits.gather(1, rewritten.token_ids)
            min_p(states, logits, of_rows, *args, **kwargs)
            after = logits.gather(1, rewritten.token_ids)
            logits.scatter_(1, rewritten.token_ids, torch.where(rewritten.rows[:, None], before, after))

        SamplingStates.get_top_k_top_p, SamplingStates.apply_min_p = get_top_k_top_p, apply_min_p

    def _rewritten_of(self, of_rows: torch.Tensor) -> Rewritten | None:
        """The rewritten rows of the step that ``of_rows`` identifies."""
        return self.rewritten if self.rewritten is not None and self.rewritten.of_rows is of_rows else None
