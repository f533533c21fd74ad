"""The result of a guided step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lenvm_kernels.types import Candidates, VerifiedTokens


class StepOutput(NamedTuple):
    """The result of a guided step, on the device.

    On a GPU, a later step overwrites ``candidates``, ``value_logits`` and ``probs``, which belong to its CUDA graph.
    With drafts, each node of a request has a separate row (:class:`Drafts`), and ``B`` stands for ``B (1 + D)``.

    Attributes:
        candidates: candidates of each request, with its ``status`` and ``lost_mass``.
        value_logits: fp32 ``[B, K]``; value logits of the candidates, arbitrary for candidates that are not scored. A
            :class:`LengthProbe` summarizes a distribution (:func:`candidate_values`). None with
            :class:`ConstantValues`.
        probs: fp32 ``[B, K]``; guided probabilities of the candidates.
        tokens: int32 ``[B]``; next tokens, drawn from the candidates with ``sample``, otherwise from ``drawn``. Without
            ``drawn``, -1 for requests that must be drawn with their own filters. None without both.
        remaining_lengths: fp32 ``[B]``; predicted number of tokens after ``tokens``, NaN for requests without
            ``return_values``. None if no request has it, or without ``tokens``.
        verified: the new tokens of the sequences, if ``verify`` is set; else None.
    """

    candidates: Candidates
    value_logits: torch.Tensor | None
    probs: torch.Tensor
    tokens: torch.Tensor | None
    remaining_lengths: torch.Tensor | None
    verified: VerifiedTokens | None = None


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Apply a function to a tensor, or to all tensors of a named tuple. Other values are returned unchanged."""
    if isinstance(x, torch.Tensor):
        return function(x)
    return type(x)(*(map_tensors(function, field) for field in x)) if isinstance(x, tuple) else x


def rows_of(x: Any, rows: slice) -> Any:
    """Some rows of a tensor, or of all tensors of a named tuple."""
    return map_tensors(lambda tensor: tensor[rows], x)


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate tensors, or named tuples of tensors, by rows. None if they are None."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    return None if first is None else type(first)(*map(joined, zip(*parts, strict=True)))
