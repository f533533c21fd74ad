"""Copy of the drawn tokens' keys and values from the last forward's rows into the cache."""

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
    candidate_parents: Tensor | None,  # [C, K]
    last_rows: Tensor,  # [B]
    tokens: Tensor,  # [B] or [B, N]
    new_lens: Tensor | None,  # [B]
    positions: Tensor,  # [B]
    table_rows: Tensor,  # [B]
    slot_table: Tensor,  # [R, pages]
    page_size: int,
    *,
    key_scales: Tensor | None = None,  # [layers, Hkv]
    value_scales: Tensor | None = None,  # [layers, Hkv]
) -> Tensor:  # [B]
    """See :func:`lenvm_kernels.ops.commit_winner.commit_winner`."""
    tokens = tokens if tokens.dim() == 2 else tokens[:, None]
    new_lens = torch.ones_like(positions) if new_lens is None else new_lens
    first_positions, last_step_rows = positions + 1 - new_lens, candidate_ids.shape[0]
    in_last_step = (last_rows >= 0) & (last_rows < last_step_rows)
    # Requests that were not in the last step read one without candidates, appended to it.
    last = last_rows.where(in_last_step, last_step_rows).long()
    ids = F.pad(candidate_ids, (0, 0, 0, 1), value=-1)[last]
    rows = F.pad(candidate_rows, (0, 0, 0, 1), value=-1)[last]
    parents = torch.full_like(ids, -1)
    if candidate_parents is not None:
        parents = F.pad(candidate_parents, (0, 0, 0, 1), value=-1)[last]
    in_place = F.pad(candidate_positions, (0, 1))[last] == first_positions
    is_there = in_place[:, None] & (ids >= 0) & (rows >= 0) & (rows < k_last.shape[1])

    committed, parent = torch.zeros_like(positions), torch.full_like(positions, -1)
    for i in range(tokens.shape[1]):
        position = first_positions + i
        is_next = is_there & (ids == tokens[:, i, None]) & (parents == parent[:, None])
        commits = (committed == i) & (i < new_lens) & is_next.any(1) & (position >= 0)
        request, column = commits.nonzero()[:, 0], is_next.int().argmax(1)  # the first that is
        page = slot_table[table_rows[request].long(), (position[request] // page_size).long()].long()
        slot = page * page_size + position[request] % page_size
        fits = (page >= 0) & (slot < k_cache.shape[1])
        request, slot = request[fits], slot[fits].long()
        row = rows[request, column[request]].long()
        for cache, new, scales in ((k_cache, k_last, key_scales), (v_cache, v_last, value_scales)):
            if scales is None:
                cache[:, slot] = new[:, row]
            else:  # as bytes: not every device writes e4m3 by index
                cache.view(torch.uint8)[:, slot] = to_codes(new[:, row], scales[:, None]).view(torch.uint8)
        committed[request], parent[request] = i + 1, column[request].to(parent.dtype)
    return committed
