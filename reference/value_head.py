"""Value head in plain PyTorch: one logit per token, optionally after a row gather and the model's final RMSNorm.

``z = w2 . silu(W1 h + b1) + b2`` (LenVM, arXiv 2604.27039; weights ``v_head.fc`` and ``v_head.summary``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import compute_dtype


def value_head(
    hidden: Tensor,  # [T, H]
    fc_weight: Tensor,  # [H, H], as nn.Linear: [out, in]
    fc_bias: Tensor,  # [H]
    summary_weight: Tensor,  # [1, H]
    summary_bias: Tensor,  # [1]
    *,
    token_rows: Tensor | None = None,  # [M]
    norm_weight: Tensor | None = None,  # [H]
    norm_eps: float = 1e-6,
    targets: Tensor | None = None,  # [M]
    square_sums: Tensor | None = None,  # [ceil(H / 64), T]
) -> Tensor:  # [M], or [T] without token_rows
    """See :func:`lenvm_kernels.ops.value_head.value_head`."""
    weights = (fc_weight, fc_bias, summary_weight, summary_bias)
    norm_weights = () if norm_weight is None else (norm_weight,)
    dtype = compute_dtype(hidden, *weights, *norm_weights)
    fc_weight, fc_bias, summary_weight, summary_bias = (w.to(dtype) for w in weights)

    if token_rows is None:
        h = hidden.to(dtype)
    else:
        is_token = (token_rows >= 0) & (token_rows < hidden.shape[0])
        # Padding reads a row of zeros appended to hidden, which also covers a hidden without rows.
        rows = torch.where(is_token, token_rows, hidden.shape[0])
        h = F.pad(hidden, (0, 0, 0, 1))[rows].to(dtype)
        square_sums = None if square_sums is None else F.pad(square_sums, (0, 1))[:, rows]
    if square_sums is not None:
        h = h * torch.rsqrt(square_sums.to(dtype).sum(0)[:, None] / hidden.shape[1] + norm_eps)
    elif norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm_eps)
    if norm_weight is not None:
        h = h * norm_weight.to(dtype)
    logits = F.linear(F.silu(F.linear(h, fc_weight, fc_bias)), summary_weight, summary_bias).squeeze(-1)
    if token_rows is not None:
        logits = torch.where(is_token, logits, 0.0)
    if targets is None:
        return logits
    outputs = len(logits)
    places = torch.where((targets >= 0) & (targets < outputs), targets, outputs)
    return logits.new_zeros(outputs + 1).scatter(0, places.long(), logits)[:outputs]
