"""Ragged linear in plain PyTorch. ``num_rows`` is read on the host."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import compute_dtype, sums_of_squares


def ragged_linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], or [2 N, K] with swiglu
    bias: Tensor | None = None,  # [N], or [2 N] with swiglu
    *,
    num_rows: Tensor | None = None,  # int32 [1]
    norm_eps: float | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,  # [T, N]
    square_sums: Tensor | None = None,  # fp32 [ceil(K / 64), T]
    square_sums_out: Tensor | None = None,  # fp32 [ceil(N / 64), T]
) -> Tensor:  # [T, N]
    """See :func:`lenvm_kernels.ops.ragged_linear.ragged_linear`."""
    rows = x.shape[0] if num_rows is None else max(0, min(int(num_rows), x.shape[0]))
    dtype = compute_dtype(x)

    h = x[:rows].to(dtype)
    if norm_eps is not None:
        squares = h.square().sum(-1) if square_sums is None else square_sums[:, :rows].to(dtype).sum(0)
        h = h * torch.rsqrt(squares / x.shape[1] + norm_eps)[:, None]
    y = F.linear(h, weight.to(dtype), None if bias is None else bias.to(dtype))
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual[:rows]
    out = x.new_zeros(x.shape[0], y.shape[1])
    out[:rows] = y
    if square_sums_out is not None:
        square_sums_out[:, :rows] = sums_of_squares(out[:rows])
    return out
