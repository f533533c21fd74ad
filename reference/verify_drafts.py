"""Verification of draft tokens against the drawn tokens, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.reference._common import tidy_drafts
from lenvm_kernels.types import Drafts, VerifiedTokens


def verify_drafts(drawn: Tensor, drafts: Drafts) -> VerifiedTokens:
    """See :func:`lenvm_kernels.ops.verify_drafts.verify_drafts`."""
    rows, columns = drafts.token_ids.shape
    tokens, nodes = (torch.full((rows, 1 + columns), -1, dtype=torch.int32) for _ in range(2))
    lens = torch.zeros(rows, dtype=torch.int32)
    token_ids, parents = (x.tolist() for x in tidy_drafts(drafts, rows))
    for row, draws in enumerate(drawn.view(rows, 1 + columns).tolist()):
        children = list(zip(token_ids[row], parents[row], strict=True))
        node: int | None = 0
        while node is not None and draws[node] >= 0:
            tokens[row, lens[row]], nodes[row, lens[row]] = draws[node], node
            lens[row] += 1
            next_one = (draws[node], node - 1)
            node = 1 + children.index(next_one) if next_one in children else None
    return VerifiedTokens(*(x.to(drawn.device) for x in (tokens, lens, nodes)))
