"""Layout of one value-model forward in plain PyTorch: token rows, request after request, and the attention plan."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.types import DeltaTokens, RaggedLayout, StepHistory, StepRequests


def lay_out(
    candidate_ids: Tensor,  # [B, K]
    candidate_lens: Tensor,  # [B]
    slot_table: Tensor,  # [R, pages]
    delta: DeltaTokens | None,  # [B]
    requests: StepRequests | None,  # [B]
    history: StepHistory | None,  # [R]
    candidate_parents: Tensor | None,  # [B, K]
    page_size: int,
    max_new: int,
    group: int,
    *,
    tile_rows: int,
    split_tiles: int,
    num_splits: Callable[[int], int],
    out: RaggedLayout,
) -> None:
    """See :func:`lenvm_kernels.ops.lay_out.lay_out`. A query tile has ``tile_rows`` pairs of a token and one of the
    ``group`` heads. ``num_splits`` of a number of cached tokens splits the first ``split_tiles`` tiles of a request."""
    (b, k), device, max_len = candidate_ids.shape, candidate_ids.device, slot_table.shape[1] * page_size
    candidate_lens = candidate_lens.clamp(0, k)
    if delta is not None:
        cached_lens, delta_lens, table_rows = delta.cached_lens.clamp(0, max_len), delta.lens, delta.table_rows.long()
    else:
        assert requests is not None and history is not None
        held, table_rows, lengths = history.tokens.shape[1], requests.request_rows, requests.lengths
        missing = (lengths - requests.cached_lens).clamp(min=0)
        computes = requests.needs_values & ((candidate_lens > 0) | (missing > held - max_new))
        delta_lens = torch.where(computes, missing.clamp(max=held), 0)
        cached_lens = torch.minimum(requests.cached_lens, lengths).clamp(0, max_len)
        grows = delta_lens > 0
        history.cached_lens[table_rows[grows]] = (cached_lens + delta_lens)[grows]
    out.cached_lens.copy_(cached_lens)
    out.q_offsets.copy_(F.pad(torch.cumsum(delta_lens + candidate_lens, 0), (1, 0)))

    # The request of each row, and the index of the token within the request.
    row = torch.arange(len(out.token_ids), device=device)
    request = torch.searchsorted(out.q_offsets[1:].long(), row, right=True)
    is_padding = request == b
    request = request.clamp(max=b - 1)
    token = row - out.q_offsets[request]
    position = cached_lens[request].long() + torch.minimum(token, delta_lens[request])
    out.positions.copy_(position.masked_fill(is_padding, 0))

    is_delta = (token < delta_lens[request]) & ~is_padding
    request, token, position, table_row = (x[is_delta] for x in (request, token, position, table_rows[request]))
    out.token_ids.zero_()
    if delta is not None:
        out.token_ids[is_delta] = delta.token_ids[delta.starts[request] + token].long()
    elif history is not None:
        out.token_ids[is_delta] = history.tokens[table_row, position % held].long()
    has_slot = position < max_len
    page, slots = slot_table[table_row[has_slot], position[has_slot] // page_size].long(), torch.full_like(position, -1)
    slots[has_slot] = page * page_size + position[has_slot] % page_size
    out.slots.fill_(-1)
    out.slots[is_delta] = slots

    column = torch.arange(k, dtype=torch.int32, device=device)
    is_candidate = column < candidate_lens[:, None]  # [B, K]
    first_candidates = out.q_offsets[:-1] + delta_lens
    candidate_rows = (first_candidates[:, None] + column).masked_fill(~is_candidate, -1).long()
    out.token_ids[candidate_rows[is_candidate]] = candidate_ids[is_candidate].long()
    out.candidate_rows.copy_(candidate_rows)
    if candidate_parents is not None and out.parents is not None:
        parent = candidate_parents.long().where((candidate_parents >= 0) & (candidate_parents < column), -1)
        parent = parent.where(is_candidate, -1)
        depth = torch.zeros_like(parent)
        for i in range(k):  # parents come before their children
            behind = depth.gather(1, parent[:, i : i + 1].clamp(min=0))[:, 0] + 1
            depth[:, i] = torch.where(parent[:, i] >= 0, behind, 0)
        parent_rows = candidate_rows.gather(1, parent.clamp(min=0)).where(parent >= 0, -1)
        out.positions[candidate_rows[is_candidate]] += depth[is_candidate]
        out.parents.fill_(-1)
        out.parents[candidate_rows[is_candidate]] = parent_rows[is_candidate].int()

    sizes = (tile_rows // group, split_tiles, num_splits)
    plan = attention_plan(table_rows, cached_lens, out.q_offsets, candidate_lens, *sizes)
    out.plan.zero_()
    out.plan[: len(plan)] = plan
    out.counters.zero_()


def attention_plan(
    table_rows: Tensor,  # [B]
    cached_lens: Tensor,  # [B]
    q_offsets: Tensor,  # [B + 1]
    candidate_lens: Tensor,  # [B]
    tile_tokens: int,
    split_tiles: int,
    num_splits: Callable[[int], int],
) -> Tensor:  # int32 [1 + items, 8]
    """The header and the items of the plan of a :class:`RaggedLayout`, with ``tile_tokens`` tokens per tile."""
    items = []
    requests = zip(table_rows.tolist(), cached_lens.tolist(), candidate_lens.tolist(), strict=True)
    for request, ((table_row, cached, candidates), (start, end)) in enumerate(
        zip(requests, pairwise(q_offsets.tolist()), strict=True)
    ):
        for tile in range(-(-(end - start) // tile_tokens)):
            for split in range(num_splits(cached) if tile < split_tiles else 1):
                items.append([request, table_row, start, end - start, end - start - candidates, cached, tile, split])
    return torch.tensor([[len(items), *[0] * 7], *items], dtype=torch.int32, device=q_offsets.device)
