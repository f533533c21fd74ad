"""Leaves only the drawn token in the logits of a guided row, so that any sampler of an engine returns this token."""

from __future__ import annotations

import math

import torch


def leave_only(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Mask all tokens but ``tokens [N]`` in logits ``[N, V]``, in place. Rows with a negative token are unchanged."""
    is_drawn, token = tokens[:, None] >= 0, tokens[:, None].clamp(min=0).long()
    kept = logits.gather(1, token).masked_fill(is_drawn, 0.0)
    logits.masked_fill_(is_drawn, -math.inf).scatter_(1, token, kept)
