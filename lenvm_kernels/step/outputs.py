"""What a guided step gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.types import Candidates, ScoredCandidates, VerifiedTokens


@dataclass(frozen=True)
class StepOutput:
    """What a guided step computed, all on the device.

    With drafts each node of a request has a row of its own (:class:`Drafts`): ``B`` is ``B (1 + D)`` then.

    Attributes:
        candidates: of each request; ``status`` says what became of it, ``lost_mass`` what was cut off.
        value_logits: fp32 ``[B, K]``; value logits of the candidates, 0 for candidates without a score. With a
            :class:`LengthProbe` they stand for distributions (:func:`candidate_values`).
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


def lengths_after(
    next_tokens: torch.Tensor,
    table: GuidanceTable,
    table_rows: torch.Tensor,
    scored: ScoredCandidates,
    value_logits: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """fp32 ``[B]``: predicted after ``next_tokens``, found among the tokens scored; NaN where not ``wanted``."""
    b, k = value_logits.shape
    is_scored = torch.arange(k, device=value_logits.device) < scored.counts[:b, None]
    is_next = is_scored & (scored.token_ids[:b] == next_tokens[:, None])
    z = torch.where(is_next, value_logits, 0.0).sum(1)
    return lengths_of(z, next_tokens, table, table_rows, wanted & is_next.any(1))


def lengths_of(
    value_logits: torch.Tensor,
    tokens: torch.Tensor,
    table: GuidanceTable,
    table_rows: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """fp32 ``[B]`` or ``[B, N]``: predicted after ``tokens`` by their value logits; NaN where not ``wanted``.

    Nor is it where nobody asks: requests between two spans are read on without that.
    """
    rows = table_rows.view(-1, *[1] * (tokens.dim() - 1)).expand_as(tokens)
    lengths = table.remaining_lengths(rows.flatten(), value_logits.flatten(), tokens.flatten()).view(tokens.shape)
    return torch.where(wanted & table.columns.return_values[rows], lengths, math.nan)
