"""The nodes of requests with drafted tokens, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.reference._common import tidy_drafts
from lenvm_kernels.types import Drafts, StepRequests


def expand_drafts(
    requests: StepRequests,  # [N]
    drafts: Drafts,  # [B, D]
) -> tuple[Tensor, ...]:  # positions, table_rows, ..., due, each [N * (1 + D)]
    """See :func:`lenvm_kernels.ops.expand_drafts.expand_drafts`. Returns the fields of the nodes in order."""
    token_ids, parents = tidy_drafts(drafts, len(requests.positions))
    columns = token_ids.shape[1]
    depth = torch.zeros(len(token_ids), 1 + columns, dtype=torch.int32, device=token_ids.device)
    for j in range(columns):
        behind = depth.gather(1, parents[:, j : j + 1].long() + 1)[:, 0]
        depth[:, 1 + j] = torch.where(token_ids[:, j] >= 0, behind + 1, 0)
    is_there = torch.nn.functional.pad(token_ids >= 0, (1, 0), value=True)

    def each(of_request: Tensor) -> Tensor:
        return of_request[:, None].expand(-1, 1 + columns)

    nodes = (
        each(requests.positions) + depth,
        each(requests.table_rows),
        each(requests.guided) & is_there,
        each(requests.wants_length) & is_there,
        each(requests.entropy_threshold),
        each(requests.generated) + depth,
        each(requests.due) & is_there,
    )
    return tuple(x.flatten() for x in nodes)
