"""Choice of the candidates that the value model scores in a step, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.types import Candidates, ScoredCandidates, Status, StepRequests


def select_scored(
    candidates: Candidates,  # [B, K]
    requests: StepRequests,  # [N]
    eos_token_ids: Tensor,  # int32 [R, E]
    *,
    drawn: Tensor | None = None,  # int32 [B]
    sample: bool = False,
    score_all: bool = False,
    step: Tensor | None = None,  # int64 [1]
) -> ScoredCandidates:  # [N, K]
    """See :func:`lenvm_kernels.ops.select_scored.select_scored`."""
    candidate_ids, counts, status = candidates.token_ids, candidates.counts, candidates.status
    (b, k), rows = candidate_ids.shape, len(requests.due)
    wants_length, lengths = requests.wants_length[:b], requests.positions[:b] + 1
    is_candidate = torch.arange(k, device=candidate_ids.device) < counts[:, None]
    ends = (candidate_ids[:, :, None] == eos_token_ids[requests.table_rows[:b], None]).any(2) & is_candidate
    status[(status == Status.GUIDE) & ~requests.due[:b] & ~ends.any(1)] = Status.NOT_DUE
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
    if step is not None and rows > 0:
        step += 1
    padding = dict.fromkeys(ScoredCandidates._fields, 0) | {"token_ids": -1}
    return ScoredCandidates(
        *(torch.cat((x, x.new_full((rows - b, *x.shape[1:]), padding[name]))) for name, x in results._asdict().items())
    )
