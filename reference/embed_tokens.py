"""Token embeddings with their sums of squares, and cosine and sine of the rotary angles, in plain PyTorch."""

import math

import torch
from torch import Tensor

from lenvm_kernels.reference._common import sums_of_squares
from lenvm_kernels.types import EmbeddedTokens


def embed_tokens(
    token_ids: Tensor,  # int64 [T]
    positions: Tensor,  # int64 [T]
    embedding: Tensor,  # [vocabulary, H]
    inv_freq: Tensor,  # fp32 [D / 2]
    *,
    rope_scale: float = 1.0,
    num_rows: Tensor | None = None,  # int32 [1]
) -> EmbeddedTokens:
    """See :func:`lenvm_kernels.ops.embed_tokens.embed_tokens`. Rows from ``num_rows`` on are 0."""
    tokens = token_ids.shape[0]
    rows = tokens if num_rows is None else max(0, min(int(num_rows), tokens))
    known_ids = token_ids[:rows].clamp(0, embedding.shape[0] - 1)
    hidden = embedding.new_zeros(tokens, embedding.shape[1])
    hidden[:rows] = embedding[known_ids].masked_fill((known_ids != token_ids[:rows])[:, None], math.nan)
    angles = torch.where(torch.arange(tokens, device=positions.device) < rows, positions, 0).float()[:, None] * inv_freq
    return EmbeddedTokens(hidden, sums_of_squares(hidden), angles.cos() * rope_scale, angles.sin() * rope_scale)
