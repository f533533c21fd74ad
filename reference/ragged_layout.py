"""Ragged layout in plain PyTorch: the rows of one value-model forward, request after request.

Source: section 2 of the specification. Each request has its delta tokens, then its candidates. Candidates are at the
position after the delta, or after their parent.
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
    candidate_parents: Tensor | None = None,  # [B, K]
) -> RaggedLayout:
    """See :func:`lenvm_kernels.ops.ragged_layout.ragged_layout`."""
    (b, k), d, device = candidate_ids.shape, delta_ids.shape[0], delta_ids.device
    candidate_lens = candidate_lens.clamp(0, k)
    q_offsets = F.pad(torch.cumsum(delta_lens + candidate_lens, 0, dtype=torch.int32), (1, 0))

    # [T]: the request of each row, and the index of the token within the request.
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
    parents = None
    if candidate_parents is not None:
        parent = candidate_parents.long().where((candidate_parents >= 0) & (candidate_parents < column), -1)
        parent = parent.where(is_candidate, -1)
        depth = torch.zeros_like(parent)
        for i in range(k):  # parents come before their children
            behind = depth.gather(1, parent[:, i : i + 1].clamp(min=0))[:, 0] + 1
            depth[:, i] = torch.where(parent[:, i] >= 0, behind, 0)
        parent_rows = candidate_rows.gather(1, parent.clamp(min=0)).where(parent >= 0, -1)
        positions[candidate_rows[is_candidate]] += depth[is_candidate]
        parents = torch.full_like(row, -1)
        parents[candidate_rows[is_candidate]] = parent_rows[is_candidate].int()
    return RaggedLayout(
        token_ids=token_ids.masked_fill(is_padding, 0),
        positions=positions.masked_fill(is_padding, 0),
        slots=slots,
        q_offsets=q_offsets,
        candidate_rows=candidate_rows,
        parents=parents,
    )
