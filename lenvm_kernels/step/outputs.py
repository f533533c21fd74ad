"""The result of a guided step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.step.stages import StepResult
from lenvm_kernels.types import Candidates, VerifiedTokens


@dataclass(frozen=True)
class StepOutput:
    """The result of a guided step, on the device.

    On a GPU, a later step overwrites ``candidates``, ``value_logits`` and ``probs``, which belong to its CUDA graph.
    With drafts, each node of a request has a separate row (:class:`Drafts`), and ``B`` stands for ``B (1 + D)``.

    Attributes:
        candidates: candidates of each request, with its ``status`` and the probability that was cut off, ``lost_mass``.
        value_logits: fp32 ``[B, K]``; value logits of the candidates, arbitrary for candidates that are not scored. A
            :class:`LengthProbe` summarizes a distribution (:func:`candidate_values`). None with
            :class:`ConstantValues`.
        probs: fp32 ``[B, K]``; guided probabilities of the candidates.
        tokens: int32 ``[B]``; next tokens, drawn from the candidates with ``sample``, otherwise from ``drawn``. Without
            ``drawn``, -1 for requests that must be drawn with their own filters. None without both.
        remaining_lengths: fp32 ``[B]``; predicted number of tokens after ``tokens``, NaN for requests without
            ``return_values``. None if no request has it, or without ``tokens``.
        verified: the tokens that the sequences grow by, if ``verify`` is set; else None.
    """

    candidates: Candidates
    value_logits: torch.Tensor | None
    probs: torch.Tensor
    tokens: torch.Tensor | None
    remaining_lengths: torch.Tensor | None
    verified: VerifiedTokens | None = None


def first_rows(result: StepResult, requests: int, count: int, *, is_reused: bool) -> StepOutput:
    """The output of the first ``requests``, which have ``count`` nodes.

    If ``is_reused``, the next step overwrites the result, and the tensors that callers keep are copied.
    """
    rows = len(result.drawn.tokens)
    candidates, value_logits, (probs, tokens, lengths), verified = result
    if count < rows:
        candidates = Candidates(*(x[:count] for x in candidates))
        value_logits = None if value_logits is None else value_logits[:count]
        probs, tokens, lengths = probs[:count], tokens[:count], lengths[:count]
        verified = None if verified is None else VerifiedTokens(*(x[:requests] for x in verified))
    if is_reused:
        tokens, lengths = tokens.clone(), lengths.clone()
        verified = None if verified is None else VerifiedTokens(*(x.clone() for x in verified))
    return StepOutput(candidates, value_logits, probs, tokens, lengths, verified)


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """The outputs of the parts of a batch as one."""

    def join(parts: Sequence[Any]) -> Any:
        first = parts[0]
        if first is None or isinstance(first, torch.Tensor):
            return first if first is None else torch.cat(list(parts))
        return type(first)(*map(join, zip(*parts, strict=True)))

    return StepOutput(**{x.name: join([getattr(output, x.name) for output in outputs]) for x in fields(StepOutput)})


def lengths_of(
    value_logits: torch.Tensor,
    tokens: torch.Tensor,
    table: GuidanceTable,
    table_rows: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """fp32 ``[B]`` or ``[B, N]``: lengths predicted after ``tokens`` from their value logits; NaN where not ``wanted``.

    Also NaN without ``return_values``: requests between two spans are wanted as well, but only feed the value model.
    """
    rows = table_rows.view(-1, *[1] * (tokens.dim() - 1)).expand_as(tokens)
    lengths = table.remaining_lengths(rows.flatten(), value_logits.flatten(), tokens.flatten()).view(tokens.shape)
    return torch.where(wanted & table.columns.return_values[rows], lengths, math.nan)
