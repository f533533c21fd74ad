"""Choice of the tokens that the value model computes and caches in a step, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.types import DeltaTokens, StepHistory, StepRequests


def catch_up(
    history: StepHistory,  # R table rows
    requests: StepRequests,  # [N]
    counts: Tensor,  # int32 [N]
    slot_table: Tensor,  # int32 [R, pages]
    page_size: int,
    max_new: int,
    *,
    out: DeltaTokens,  # [N, M]
) -> DeltaTokens:  # [N, M]
    """See :func:`lenvm_kernels.ops.catch_up.catch_up`."""
    held, cached_lens, table_rows = history.tokens, requests.cached_lens, requests.table_rows
    most, lengths = held.shape[1], requests.positions + 1
    missing = (lengths - cached_lens).clamp(min=0)
    computes = (requests.guided | requests.wants_length) & ((counts > 0) | (missing > most - max_new))
    lens = torch.where(computes, missing.clamp(max=most), 0)

    column = torch.arange(most, device=held.device)
    token_positions = cached_lens[:, None] + column  # [N, M]
    request, at = (column < lens[:, None]).nonzero(as_tuple=True)
    row, position = table_rows[request], token_positions[request, at]
    out.token_ids.zero_()
    out.token_ids[request, at] = held[row, position % most].long()
    out.slots.fill_(-1)
    out.slots[request, at] = slot_table[row, position // page_size].long() * page_size + position % page_size
    out.lens.copy_(lens)
    out.cached_lens.copy_(torch.minimum(cached_lens, lengths))
    exists = requests.positions >= 0
    history.cached_lens[table_rows[exists]] = (cached_lens + lens)[exists]
    return out
