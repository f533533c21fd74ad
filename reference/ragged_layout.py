"""Ragged layout in plain PyTorch: the rows of one value-model forward, request after request.

Source: section 2 of the specification: for each request its delta tokens, then its candidates, which all sit at the
position after the delta.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.types import RaggedLayout


def ragged_layout(
    delta_ids: Tensor,  # [D]
    delta_slots: Tensor,  # [D]
    delta_starts: Tensor,  # [B]
    delta_lens: Tensor,  # [B]
    candidate_ids: Tensor,  # [B, K]
    candidate_lens: Tensor,  # [B]
    cached_lens: Tensor,  # [B]
) -> RaggedLayout:
    """See :func:`lenvm_kernels.ops.ragged_layout.ragged_layout`."""
    (b, k), d, device = candidate_ids.shape, delta_ids.shape[0], delta_ids.device
    candidate_lens = candidate_lens.clamp(0, k)
    q_offsets = F.pad(torch.cumsum(delta_lens + candidate_lens, 0, dtype=torch.int32), (1, 0))

    # [T]: which request a row belongs to, and which of its tokens it is.
    row = torch.arange(d + b * k, dtype=torch.int32, device=device)
    request = torch.searchsorted(q_offsets[1:], row, right=True)
    is_padding = request == b
    request = request.clamp(max=b - 1)
    token = row - q_offsets[request]
    delta_len = delta_lens[request]
    is_delta = (token < delta_len) & ~is_padding
    source = torch.where(is_delta, delta_starts[request] + token, d + request * k + token - delta_len)
    token_ids = torch.cat((delta_ids.long(), candidate_ids.long().flatten()))[source.masked_fill(is_padding, 0)]
    positions = (cached_lens[request] + torch.minimum(token, delta_len)).long()
    slots = F.pad(delta_slots.long(), (0, 1), value=-1)[source.masked_fill(~is_delta, d)]

    column = torch.arange(k, dtype=torch.int32, device=device)
    is_candidate = column < candidate_lens[:, None]  # [B, K]
    candidate_rows = ((q_offsets[:-1] + delta_lens)[:, None] + column).masked_fill(~is_candidate, -1).long()
    order = is_candidate.flatten().int().sort(descending=True, stable=True).indices
    return RaggedLayout(
        token_ids=token_ids.masked_fill(is_padding, 0),
        positions=positions.masked_fill(is_padding, 0),
        slots=slots,
        q_offsets=q_offsets,
        candidate_rows=candidate_rows,
        head_rows=candidate_rows.flatten()[order],
        head_targets=order,
    )
