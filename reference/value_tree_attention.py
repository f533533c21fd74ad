"""Value-tree attention in plain PyTorch: dense scores and an explicit mask, one request after the other."""

import torch

from lenvm_kernels.reference._common import compute_dtype


def value_tree_attention(
    q: torch.Tensor,  # [T, Hq, D]
    k_new: torch.Tensor,  # [T, Hkv, D]
    v_new: torch.Tensor,  # [T, Hkv, D]
    k_cache: torch.Tensor,  # [S, Hkv, D]
    v_cache: torch.Tensor,  # [S, Hkv, D]
    slot_table: torch.Tensor,  # int32 [R, max pages]
    table_rows: torch.Tensor,  # int32|int64 [B]
    cached_lens: torch.Tensor,  # int32 [B]
    q_offsets: torch.Tensor,  # int32 [B + 1]
    candidate_lens: torch.Tensor,  # int32 [B]
    *,
    parents: torch.Tensor | None,  # int32 [T]
    page_size: int,
    sm_scale: float,
    out: torch.Tensor,  # [T, Hq, D], as q
) -> None:
    """See :func:`lenvm_kernels.ops.value_tree_attention.value_tree_attention`."""
    dtype = compute_dtype(q, k_new, v_new)
    kv_heads = k_new.shape[1]
    offsets, max_len = q_offsets.tolist(), slot_table.shape[1] * page_size
    cached_lens = cached_lens.clamp(max=max_len)
    requests = zip(table_rows.tolist(), cached_lens.tolist(), candidate_lens.tolist(), strict=True)

    for (table_row, cached, candidates), start, end in zip(requests, offsets, offsets[1:], strict=False):
        if start == end:
            continue  # padding of the batch; its table row may not exist
        position = torch.arange(cached, device=q.device)
        slots = slot_table[table_row, position // page_size].long() * page_size + position % page_size
        keys = torch.cat([k_cache[slots].to(dtype), k_new[start:end].to(dtype)])  # [cached + tokens, Hkv, D]
        values = torch.cat([v_cache[slots].to(dtype), v_new[start:end].to(dtype)])
        queries = q[start:end].to(dtype).unflatten(1, (kv_heads, -1))  # [tokens, Hkv, Hq / Hkv, D]

        new_parents = [] if parents is None else [parent - start for parent in parents[start:end].tolist()]
        delta = end - start - candidates
        allowed = tree_mask(cached, delta, candidates, new_parents, q.device)  # [tokens, cached + tokens]
        scores = torch.einsum("jhgd,thd->hgjt", queries, keys) * sm_scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hgjt,thd->jhgd", weights, values).flatten(1, 2).to(q.dtype)


def tree_mask(cached: int, delta: int, candidates: int, parents: list[int], device: torch.device) -> torch.Tensor:
    """Mask of the cached and new tokens to which each new token attends: bool [new, cached + new].

    ``parents`` is the index of each new token's parent among the new tokens, or empty if no candidate has a parent."""
    row = torch.arange(delta + candidates, device=device)[:, None]
    column = row.T
    new = ((column < delta) & (column <= row)) | (column == row)
    for child, parent in enumerate(parents):
        if delta <= parent < child:  # an earlier candidate, so the child is also one
            new[child] |= new[parent]
    return torch.cat([new.new_ones(delta + candidates, cached), new], dim=1)
