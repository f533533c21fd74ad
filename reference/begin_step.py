"""Inputs of a step per request and draft, in plain PyTorch."""

import torch
from torch import Tensor

from lenvm_kernels.reference._common import tidy_drafts
from lenvm_kernels.reference.topk_candidates import GREEDY_TEMPERATURE
from lenvm_kernels.types import Drafts, Filters, GuidanceColumns, Mode, SpanNodes, StepHistory, StepRequests


def begin_step(
    table: GuidanceColumns,  # R requests; columns that are not read may be missing
    tokens: Tensor,  # int32|int64 [B, N]
    table_rows: Tensor,  # int32|int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None,  # int32 [B]
    active: Tensor | None,  # bool [B]
    history: StepHistory | None,
    drafts: Drafts | None,  # [B, D]
    spans: SpanNodes | None,  # [B * (1 + D)]
    drawn: Tensor | None,  # int32|int64 [B * (1 + D)]
    filters: Filters,  # [B]
    addresses: Tensor | None,  # int64 [4]
    scores: Tensor | None,  # [B * (1 + D), V]
    vocab_mask: Tensor | None,  # int32 [B * (1 + D), ceil(V / 32)]
    padding_row: int,
    out: StepRequests,  # [N * (1 + D)]
) -> None:
    """See :func:`lenvm_kernels.ops.begin_step.begin_step`."""
    count, device = tokens.shape[0], tokens.device
    table_rows = table_rows.long()
    new_lens = torch.ones_like(lengths) if new_lens is None else new_lens.clamp(0, tokens.shape[1])
    active = torch.ones(count, dtype=torch.bool, device=device) if active is None else active

    has_mode, ended = table.mode[table_rows] != Mode.UNGUIDED, table.span_ended[table_rows]
    may_begin = has_mode & (table.span_start_bits[table_rows] != 0)
    answer_rows = table.answer_row[table_rows].long()
    has_answer = has_mode & (answer_rows >= 0)
    guided = active & has_mode & (~ended | has_answer)
    # Between two spans, the history must stay complete for the next span.
    wants_length = active & (table.return_values[table_rows] | (may_begin & ended))
    due = torch.ones_like(active)
    if history is not None:
        passed_lens, cached_lens = history.passed_lens[table_rows], history.cached_lens[table_rows]
        held = history.tokens
        is_gap = passed_lens < lengths - new_lens
        lost = (guided | wants_length) & (is_gap | (lengths - cached_lens > held.shape[1]))
        table.faults[table_rows] += lost.int()
        guided, wants_length = guided & ~lost, wants_length & ~lost
        due = (history.step - history.uncounted) % table.value_stride[table_rows].clamp(min=1) == 0
        history.passed_lens[table_rows] = torch.where(is_gap, passed_lens, torch.maximum(passed_lens, lengths))
        out.cached_lens[:count], out.cached_lens[count:] = cached_lens, 0
        for i in range(tokens.shape[1]):
            position = lengths - new_lens + i
            known = (i < new_lens) & (position >= 0)
            held[table_rows[known], position[known] % held.shape[1]] = tokens[known, i].int()

    rows, columns = out.draft_ids.shape
    no_drafts = torch.empty(count, 0, dtype=torch.int32, device=device)
    draft_ids, parents = tidy_drafts(Drafts(no_drafts, no_drafts) if drafts is None else drafts, rows)
    out.draft_ids.copy_(draft_ids)
    out.draft_parents.copy_(parents)
    depth = torch.zeros(count, 1 + columns, dtype=torch.int32, device=device)
    for j in range(columns):
        behind = depth.gather(1, parents[:count, j : j + 1].long() + 1)[:, 0]
        depth[:, 1 + j] = torch.where(draft_ids[:count, j] >= 0, behind + 1, 0)
    last_tokens = tokens.gather(1, new_lens.clamp(min=1)[:, None].long() - 1).int()
    is_there = torch.nn.functional.pad(draft_ids[:count] >= 0, (1, 0), value=True)
    guided, wants_length = guided[:, None] & is_there, wants_length[:, None] & is_there
    generated, ended = (lengths - table.prompt_len[table_rows])[:, None] + depth, ended[:, None].expand(depth.shape)
    if spans is not None:
        # A draft may begin the next span; the nodes after it are guided.
        ended, generated = spans.ended.view(depth.shape), spans.generated.view(depth.shape)
        has_target = ~ended | (has_answer[:, None] & ~spans.in_call.view(depth.shape))
        guided = (guided | (may_begin[:, None] & wants_length)) & has_target
    node_rows = torch.where(ended & has_answer[:, None], answer_rows[:, None], table_rows[:, None])

    def write(target: Tensor, values: Tensor, padding: float) -> None:
        target[: count * (1 + columns)] = values.expand(-1, 1 + columns).flatten()
        target[count * (1 + columns) :] = padding

    per_request = (out.lengths, lengths, 0), (out.request_rows, table_rows, padding_row)
    for target, values, filler in (*per_request, (out.needs_values, (guided | wants_length)[:, 0], 0)):
        target[:count], target[count:] = values, filler
    write(out.positions, lengths[:, None] - 1 + depth, -1)
    write(out.table_rows, node_rows, padding_row)
    write(out.guided, guided, False)
    write(out.wants_length, wants_length, False)
    write(out.generated, generated, 0)
    write(out.due, due[:, None] & is_there, False)
    write(out.last_tokens, torch.cat([last_tokens, draft_ids[:count]], dim=1), -1)
    write(out.drawn, torch.full_like(depth, -1) if drawn is None else drawn.int().view(depth.shape), -1)
    greedy = ((filters.top_k == 1) | (filters.temperature < GREEDY_TEMPERATURE))[:, None]
    write(out.greedy, greedy, False)
    for name, nothing in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("temperature", 1.0)):
        write(getattr(out, name), torch.where(greedy, nothing, getattr(filters, name)[:, None]), nothing)
    if addresses is not None:
        for i, x in ((0, scores), (2, vocab_mask)):
            addresses[i], addresses[i + 1] = (0, 0) if x is None else (x.data_ptr(), x.stride(0))
