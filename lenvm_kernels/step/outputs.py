"""The result of a guided step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.types import Candidates, VerifiedTokens


@dataclass(frozen=True)
class StepOutput:
    """The result of a guided step, on the device.

    With drafts, each node of a request has a separate row (:class:`Drafts`), and ``B`` stands for ``B (1 + D)``.

    Attributes:
        candidates: candidates of each request, with its ``status`` and the probability that was cut off, ``lost_mass``.
        value_logits: fp32 ``[B, K]``; value logits of the candidates, arbitrary for candidates that are not scored.
            With a :class:`LengthProbe`, each summarizes a distribution (:func:`candidate_values`). None with
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
