"""Rotary embedding and cache write in plain PyTorch, with the roundings of ``transformers``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import compute_dtype


def rope_cache(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) * D]
    cos: Tensor,  # fp32 [T, D / 2]
    sin: Tensor,  # fp32 [T, D / 2]
    slots: Tensor,  # int32|int64 [T]
    k_cache: Tensor,  # [S, Hkv, D]
    v_cache: Tensor,  # [S, Hkv, D]
    *,
    num_heads: int,
    qk_norm_weight: Tensor | None = None,  # [Hq + Hkv, D]
    norm_eps: float = 1e-6,
    num_rows: Tensor | None = None,  # int32 [1]
) -> tuple[Tensor, Tensor, Tensor]:  # [T, Hq, D], [T, Hkv, D], [T, Hkv, D]
    """See :func:`lenvm_kernels.ops.rope_cache.rope_cache`. Rows from ``num_rows`` on are 0."""
    tokens = qkv.shape[0]
    num_slots, kv_heads, head_dim = k_cache.shape
    rows = tokens if num_rows is None else max(0, min(int(num_rows), tokens))
    heads = qkv[:rows].unflatten(1, (num_heads + 2 * kv_heads, head_dim))
    qk, v = heads.split((num_heads + kv_heads, kv_heads), dim=1)
    if qk_norm_weight is not None:
        qk = rms_norm(qk, qk_norm_weight, norm_eps)
    q, k = rotate(qk, cos[:rows, None], sin[:rows, None]).split((num_heads, kv_heads), dim=1)

    kept = torch.nonzero((slots[:rows] >= 0) & (slots[:rows] < num_slots)).squeeze(1)
    slots = slots[kept].long()
    k_cache.index_copy_(0, slots, k[kept])
    v_cache.index_copy_(0, slots, v[kept])
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, tokens - rows)) for x in (q, k, v))
    return q, k, v


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, rounded as in ``transformers``: fp32 before the product with the weight."""
    wide = x.to(compute_dtype(x))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [T, heads, D]``, first half against second, in fp32 (``cos``, ``sin`` [T, 1, D/2])."""
    first, second = x.to(compute_dtype(x)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
