"""Where guided spans have ended, and what ends them, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.reference._common import tidy_drafts

# What is taken off the logit of a token that is not to be drawn, and added to that of one that is. fp16 has both.
EXCLUDED, FORCED = 1e4, 2e4


def limit_span(
    logits: Tensor | None,  # [B * (1 + D), V]
    eos_token_ids: Tensor,  # int32 [R, E]
    span_end_token_ids: Tensor,  # int32 [R, S]
    hard_limit: Tensor,  # int32 [R]
    prompt_len: Tensor,  # int32 [R]
    allows_eos: Tensor,  # bool [R]
    span_ended: Tensor,  # bool [R]
    tokens: Tensor,  # int64 [B, N]
    new_lens: Tensor | None,  # int32 [B]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    draft_ids: Tensor | None,  # [B, D]
    draft_parents: Tensor | None,  # int32 [B, D]
) -> Tensor:  # bool [B * (1 + D)]
    """See :func:`lenvm_kernels.ops.limit_span.limit_span`; the table by the columns that are read."""
    (requests, new), device = tokens.shape, tokens.device
    ends, eos = span_end_token_ids[table_rows], eos_token_ids[table_rows]
    has_span = ends[:, 0] >= 0
    ends = ends.where((ends >= 0) & has_span[:, None], -2)

    def is_end(ids: Tensor) -> Tensor:
        return (ids[:, :, None] == ends[:, None]).any(2)

    new_lens = torch.ones_like(lengths) if new_lens is None else new_lens.clamp(0, new)
    column = torch.arange(new, device=device)
    position = (lengths - new_lens)[:, None] + column
    is_generated = (column < new_lens[:, None]) & (position >= prompt_len[table_rows, None])
    ended = (span_ended[table_rows] & has_span) | (is_generated & is_end(tokens)).any(1)
    span_ended[table_rows] |= ended

    # Of each node: whether it is there, how many drafts it has behind it, and whether the span has ended.
    is_there, depth, found = [torch.ones_like(ended)], [torch.zeros_like(lengths)], [ended]
    if draft_ids is not None and draft_parents is not None:
        token_ids, parents = tidy_drafts(draft_ids, draft_parents, requests)
        row, draft_ends = torch.arange(requests, device=device), is_end(token_ids)
        for j in range(token_ids.shape[1]):
            is_draft, parent = token_ids[:, j] >= 0, parents[:, j].long() + 1
            is_there.append(is_draft)
            depth.append(torch.where(is_draft, torch.stack(depth, 1)[row, parent] + 1, 0))
            found.append(is_draft & (draft_ends[:, j] | torch.stack(found, 1)[row, parent]))
    nodes_ended = torch.stack(found, 1)
    if logits is not None:
        vocab = logits.shape[1]
        by_node = logits.view(*nodes_ended.shape, vocab)

        def add(number: float, ids: Tensor, nodes: Tensor) -> None:
            """To the logits of a token of each request, at some of its nodes."""
            is_token = (ids >= 0) & (ids < vocab)
            index = torch.where(is_token, ids, 0).long()[:, None, None].expand(-1, nodes.shape[1], -1)
            x = by_node.gather(2, index)
            by_node.scatter_(2, index, torch.where((nodes & is_token[:, None])[:, :, None], x + number, x))

        is_open = has_span[:, None] & torch.stack(is_there, 1) & ~nodes_ended
        generated = (lengths - prompt_len[table_rows])[:, None] + torch.stack(depth, 1)
        add(FORCED, ends[:, 0], is_open & (generated >= hard_limit[table_rows, None]))
        is_excluded = ~allows_eos[table_rows, None] & ~is_end(eos)
        for ids, excluded in zip(eos.unbind(1), is_excluded.unbind(1), strict=True):
            add(-EXCLUDED, ids, is_open & excluded[:, None])
    return nodes_ended.flatten()
