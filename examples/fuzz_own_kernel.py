"""A custom Triton kernel for an operator, tested with ``lenvm fuzz``. In this directory:

    lenvm fuzz --against fuzz_own_kernel:value_head

Without a GPU, the kernel runs in Triton's interpreter. The kernel is correct and bitwise identical in any batch, but
slow: it reads W1 once per token.
"""

import torch
import triton
import triton.language as tl

BLOCK_N = 32


@triton.jit
def _value_head_kernel(
    out_ptr,  # [M]
    hidden_ptr,  # [T, H]
    stride_hidden_row,
    fc_weight_ptr,  # [H, H]
    stride_fc_weight_row,
    fc_bias_ptr,  # [H]
    summary_weight_ptr,  # [H]
    summary_bias_ptr,  # [1]
    token_rows_ptr,  # [M]
    T,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per token, so sums do not depend on other tokens."""
    token_row = tl.load(token_rows_ptr + tl.program_id(0)).to(tl.int64)
    is_token = (token_row >= 0) & (token_row < T)
    column, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    h = tl.load(hidden_ptr + token_row * stride_hidden_row + column, mask=is_token & (column < H), other=0.0)
    h = h.to(tl.float32)
    z = tl.load(summary_bias_ptr).to(tl.float32)
    for first in range(0, H, BLOCK_N):
        row = first + n
        pointers = fc_weight_ptr + row[:, None].to(tl.int64) * stride_fc_weight_row + column[None, :]
        w1 = tl.load(pointers, mask=(row < H)[:, None] & (column < H)[None, :], other=0.0).to(tl.float32)
        x = tl.sum(w1 * h[None, :], axis=1) + tl.load(fc_bias_ptr + row, mask=row < H, other=0.0).to(tl.float32)
        w2 = tl.load(summary_weight_ptr + row, mask=row < H, other=0.0).to(tl.float32)
        z += tl.sum(w2 * x / (1 + tl.exp(-x)), axis=0)
    tl.store(out_ptr + tl.program_id(0), tl.where(is_token, z, 0.0))


def value_head(hidden, fc_weight, fc_bias, summary_weight, summary_bias, *, token_rows=None):
    """``w2 . silu(W1 h + b1) + b2`` of :func:`lenvm_kernels.value_head`, without its RMSNorm."""
    tokens, size = hidden.shape
    if token_rows is None:
        token_rows = torch.arange(tokens, device=hidden.device)
    out = torch.empty(len(token_rows), device=hidden.device)
    _value_head_kernel[(len(token_rows),)](
        out,
        hidden,
        hidden.stride(0),
        fc_weight,
        fc_weight.stride(0),
        fc_bias,
        summary_weight,
        summary_bias,
        token_rows,
        tokens,
        size,
        BLOCK_N=BLOCK_N,
        BLOCK_H=triton.next_power_of_2(size),
    )
    return out


value_head.options = {"norm": [False]}  # lenvm fuzz draws no other values of this option
