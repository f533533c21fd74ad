"""The nodes of requests with drafted tokens, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.reference._common import tidy_drafts


def expand_drafts(
    positions: Tensor,  # int32 [N]
    table_rows: Tensor,  # int64 [N]
    guided: Tensor,  # bool [N]
    wants_length: Tensor,  # bool [N]
    entropy_threshold: Tensor,  # fp32 [N]
    generated: Tensor,  # int32 [N]
    seeds: Tensor,  # int64 [N]
    due: Tensor,  # bool [N]
    draft_ids: Tensor,  # int32|int64 [B, D]
    draft_parents: Tensor,  # int32 [B, D]
) -> tuple[Tensor, ...]:  # each [N * (1 + D)]
    """See :func:`lenvm_kernels.ops.expand_drafts.expand_drafts`; requests and nodes by their fields."""
    token_ids, parents = tidy_drafts(draft_ids, draft_parents, len(positions))
    drafts = token_ids.shape[1]
    depth = torch.zeros(len(positions), 1 + drafts, dtype=torch.int32, device=positions.device)
    for j in range(drafts):
        behind = depth.gather(1, parents[:, j : j + 1].long() + 1)[:, 0]
        depth[:, 1 + j] = torch.where(token_ids[:, j] >= 0, behind + 1, 0)
    is_there = torch.nn.functional.pad(token_ids >= 0, (1, 0), value=True)

    def each(of_request: Tensor) -> Tensor:
        return of_request[:, None].expand(-1, 1 + drafts)

    nodes = (
        each(positions) + depth,
        each(table_rows),
        each(guided) & is_there,
        each(wants_length) & is_there,
        each(entropy_threshold),
        each(generated) + depth,
        each(seeds),
        each(due) & is_there,
    )
    return tuple(x.flatten() for x in nodes)
