"""Operations on tensors that the plugins of several engines share."""

from __future__ import annotations

import math

import numpy as np
import torch


def leave_only(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Mask all tokens but ``tokens [N]`` in logits ``[N, V]``, in place, so that any sampler of an engine returns them.

    Rows with a negative token are unchanged.
    """
    is_drawn, token = tokens[:, None] >= 0, tokens[:, None].clamp(min=0).long()
    kept = logits.gather(1, token).masked_fill(is_drawn, 0.0)
    logits.masked_fill_(is_drawn, -math.inf).scatter_(1, token, kept)


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without a host-device sync."""
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
