"""Copy of the drawn token's keys and values from the last forward's rows into the cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference._common import to_codes


def commit_winner(
    k_cache: Tensor,  # [layers, S, Hkv, D]
    v_cache: Tensor,  # [layers, S, Hkv, D]
    k_last: Tensor,  # [layers, T, Hkv, D]
    v_last: Tensor,  # [layers, T, Hkv, D]
    candidate_ids: Tensor,  # [C, K]
    candidate_rows: Tensor,  # [C, K]
    candidate_positions: Tensor,  # [C]
    last_rows: Tensor,  # [B]
    tokens: Tensor,  # [B]
    positions: Tensor,  # [B]
    slots: Tensor,  # [B]
    *,
    key_scales: Tensor | None = None,  # [layers, Hkv]
    value_scales: Tensor | None = None,  # [layers, Hkv]
) -> Tensor:  # [B]
    """See :func:`lenvm_kernels.ops.commit_winner.commit_winner`."""
    last_step_rows = candidate_ids.shape[0]
    in_last_step = (last_rows >= 0) & (last_rows < last_step_rows)
    # Rows that were not in the last step read one without candidates, appended to it.
    last = last_rows.where(in_last_step, last_step_rows).long()
    ids = F.pad(candidate_ids, (0, 0, 0, 1), value=-1)[last]
    rows = F.pad(candidate_rows, (0, 0, 0, 1), value=-1)[last]
    in_place = F.pad(candidate_positions, (0, 1))[last] == positions

    computed = (rows >= 0) & (rows < k_last.shape[1])
    matches = (ids == tokens[:, None]) & (ids >= 0) & computed & in_place[:, None]
    row = rows.where(matches, -1).amax(dim=1)
    committed = (row >= 0) & (slots >= 0) & (slots < k_cache.shape[1])
    row, slot = row[committed].long(), slots[committed].long()
    for cache, last, scales in ((k_cache, k_last, key_scales), (v_cache, v_last, value_scales)):
        if scales is None:
            cache[:, slot] = last[:, row]
        else:  # as bytes: not every device writes e4m3 by index
            cache.view(torch.uint8)[:, slot] = to_codes(last[:, row], scales[:, None]).view(torch.uint8)
    return committed
