"""Which candidates the value model scores in a step, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.types import ScoredCandidates, Status


def select_scored(
    candidate_ids: Tensor,  # int32 [B, K]
    counts: Tensor,  # int32 [B]
    status: Tensor,  # int8 [B]
    positions: Tensor,  # int32 [N]
    table_rows: Tensor,  # int64 [N]
    wants_length: Tensor,  # bool [N]
    due: Tensor,  # bool [N]
    eos_token_ids: Tensor,  # int32 [R, E]
    *,
    drawn: Tensor | None = None,  # int32 [B]
    sample: bool = False,
    score_all: bool = False,
    out: ScoredCandidates,  # [N, K]
) -> ScoredCandidates:  # [N, K]
    """See :func:`lenvm_kernels.ops.select_scored.select_scored`; candidates and requests by what is read of them."""
    b, k = candidate_ids.shape
    wants_length, lengths = wants_length[:b], positions[:b] + 1
    is_candidate = torch.arange(k, device=candidate_ids.device) < counts[:, None]
    ends = (candidate_ids[:, :, None] == eos_token_ids[table_rows[:b], None]).any(2) & is_candidate
    status[(status == Status.GUIDE) & ~due[:b] & ~ends.any(1)] = Status.NOT_DUE
    is_guide = status == Status.GUIDE
    next_tokens = torch.full_like(counts, -1) if drawn is None else drawn
    if sample:
        next_tokens = torch.where(status == Status.SINGLE, candidate_ids[:, 0], next_tokens)
    alone = wants_length & ~is_guide & (next_tokens >= 0)
    first_ids = torch.where(alone, next_tokens, candidate_ids[:, 0])
    scored_counts = counts if score_all else torch.where(is_guide, counts, 0)

    results = ScoredCandidates(
        token_ids=torch.cat((first_ids[:, None], candidate_ids[:, 1:]), dim=1),
        counts=torch.where(alone, 1, scored_counts),
        positions=lengths,
        alone=alone,
    )
    for target, values in zip(out, results, strict=True):
        target[:b] = values
        target[b:] = 0
    out.token_ids[b:] = -1
    return out
