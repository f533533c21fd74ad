"""A linear layer that is trained on standardized inputs and stored for raw ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class StandardizedLinear(nn.Linear):
    """A linear layer on inputs standardized by a sample ``x [N, K]`` of them, with dropout."""

    mean: Tensor
    std: Tensor

    def __init__(self, x: Tensor, outputs: int, dropout: float = 0.0) -> None:
        super().__init__(x.shape[1], outputs)
        self.dropout = dropout
        self.register_buffer("mean", x.float().mean(0))
        self.register_buffer("std", x.float().std(0, correction=0).clamp(min=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout((x.float() - self.mean) / self.std, self.dropout, self.training))

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the same layer on raw inputs, fp32."""
        weight = self.weight / self.std
        return weight, self.bias - weight @ self.mean
