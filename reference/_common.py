"""Functions shared by the references."""

import torch
import torch.nn.functional as F

from lenvm_kernels.types import Drafts, TextBreak

# Number of columns per sum of squares.
SQUARES_GROUP = 64


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Compute dtype of a reference: fp64 if any input is fp64, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def sums_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares of each group of columns of ``x [T, H]``: ``[ceil(H / 64), T]``, fp32 (fp64 for fp64 inputs).

    Neighbours are added until one number is left, so that the order does not depend on a library."""
    sums = F.pad(x.to(compute_dtype(x)).square(), (0, -x.shape[1] % SQUARES_GROUP)).unflatten(1, (-1, SQUARES_GROUP))
    while sums.shape[2] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0].T.contiguous()


def breaks_of(tokens: torch.Tensor, text_breaks: torch.Tensor) -> torch.Tensor:
    """The :class:`TextBreak` of each token, int64 in the shape of ``tokens``; ``NONE`` outside ``text_breaks``."""
    is_known = (tokens >= 0) & (tokens < len(text_breaks))
    found = text_breaks[torch.where(is_known, tokens, 0).long()].long()
    return torch.where(is_known, found, int(TextBreak.NONE))


def tidy_drafts(drafts: Drafts, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and parents of ``drafts``, padded to ``rows`` requests. Both are -1 from the first missing draft on;
    parents that are not an earlier column are -1."""
    token_ids, parents = drafts
    is_there = (token_ids >= 0).int().cumprod(1).bool()
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    token_ids = token_ids.int().where(is_there, -1)
    parents = parents.where(is_there & (parents >= 0) & (parents < column), -1)
    more = (0, 0, 0, rows - len(token_ids))
    return F.pad(token_ids, more, value=-1), F.pad(parents, more, value=-1)
