"""Ragged layout in plain PyTorch: the rows of one value-model forward, request after request.

Source: section 2 of the specification: for each request its delta tokens, then its candidates, which all sit at the
position after the delta.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RaggedLayout:
    """The ``T = D + B * K`` rows of one value-model forward and where each request's candidates are among them.

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1``. Those from ``q_offsets[B]`` on are padding.

    Attributes:
        token_ids: int64 ``[T]``; 0 in padding.
        positions: int64 ``[T]``; position in the request's sequence, 0 in padding.
        slots: int64 ``[T]``; cache slot that keeps the key and value of a delta token, -1 for every other row.
        q_offsets: int32 ``[B+1]``; first row of each request, then the number of rows in use.
        candidate_rows: int64 ``[B, K]``; row of each candidate, -1 in padding columns.
        head_rows: int64 ``[B*K]``; the rows of all candidates in the order of the requests, then -1.
        head_slots: int64 ``[B, K]``; a permutation of ``0 .. B*K - 1`` with
            ``head_rows[head_slots] == candidate_rows``: padding columns have, in order, the places after the last
            candidate. What the value head makes of ``head_rows`` is a ``[B, K]`` by one gather, ``logits[head_slots]``.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    q_offsets: Tensor
    candidate_rows: Tensor
    head_rows: Tensor
    head_slots: Tensor


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
        head_slots=order.argsort().view(b, k),
    )
