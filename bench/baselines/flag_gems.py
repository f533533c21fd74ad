"""FlagGems' top-k (Triton)."""

import torch

from bench.baselines import Run, load, require_cuda


def topk_candidates(scores: torch.Tensor, top_k: int) -> Run:
    """``flag_gems.ops.topk``; ``run`` returns (scores ``[B, top_k]``, token ids int64 ``[B, top_k]``).

    Only the selection: no softmax, no top-p or min-p, and equal scores in any order.

    Args:
        scores: ``[B, V]``, contiguous.
        top_k: candidates of every row.

    Raises:
        Absent: FlagGems does not import, or no GPU.
    """
    require_cuda(scores)
    topk = load("flag_gems.ops.topk").topk
    return lambda: topk(scores, top_k)
