"""What the references share."""

import torch


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype a reference computes in: fp64 when any input is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
