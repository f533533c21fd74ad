"""Value head in plain PyTorch: one logit per token, after the model's final RMSNorm and a row gather."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.ragged_linear import ragged_linear


def value_head(
    hidden: Tensor,  # [T, H]
    fc_weight: Tensor,  # [H, H], as nn.Linear: [out, in]
    fc_bias: Tensor,  # [H]
    summary_weight: Tensor,  # [1, H]
    summary_bias: Tensor,  # [1]
    *,
    token_rows: Tensor | None = None,  # [M]
    num_rows: Tensor | None = None,  # int32 [1]
    norm_eps: float | None = None,
    square_sums: Tensor | None = None,  # [ceil(H / 64), T]
) -> Tensor:  # [M], or [T] without token_rows
    """See :func:`lenvm_kernels.ops.value_head.value_head`."""
    tensors = (hidden, fc_weight, fc_bias, summary_weight, summary_bias)
    dtype = compute_dtype(*tensors)
    h, fc_weight, fc_bias, summary_weight, summary_bias = (x.to(dtype) for x in tensors)
    y = ragged_linear(h, fc_weight, fc_bias, num_rows=num_rows, norm_eps=norm_eps, square_sums=square_sums)
    logits = F.linear(F.silu(y), summary_weight, summary_bias).squeeze(-1)
    tokens = hidden.shape[0]
    if token_rows is None:
        token_rows = torch.arange(tokens, device=hidden.device)
    is_token = (token_rows >= 0) & (token_rows < (tokens if num_rows is None else num_rows.clamp(max=tokens)))
    # Padding reads a zero appended to the logits, which also works without rows in hidden.
    return F.pad(logits, (0, 1))[torch.where(is_token, token_rows, tokens)]
