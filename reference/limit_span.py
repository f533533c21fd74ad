"""Begin and end of guided spans, and the logits that end them, in plain PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor

from lenvm_kernels.reference._common import breaks_of, tidy_drafts
from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES, CountFrom, Drafts, GuidanceColumns, SpanNodes, TextBreak

# A forced end waits at most this number of tokens for the end of a character, which has at most four bytes.
CHARACTER_TOKENS = 4
# Subtracted from the logit of an excluded token, and added to the logit of a forced one. Both are exact in fp16.
EXCLUDED, FORCED = 1e4, 2e4
# Expected tokens per unit before the text has any, and the number of units as which this guess is weighted.
WORD_TOKENS, SENTENCE_TOKENS, GUESSED_UNITS = 1.35, 24.0, 4.0


class _Span(NamedTuple):
    """Span state of requests, ``[B]`` each, see :class:`GuidanceColumns`."""

    ended: Tensor
    begin: Tensor
    match: Tensor
    closing_from: Tensor
    used: Tensor
    missing_bytes: Tensor
    units: Tensor
    in_call: Tensor


def limit_span(
    logits: Tensor | None,  # [B * (1 + D), V]
    table: GuidanceColumns,  # R requests
    tokens: Tensor,  # int64 [B, N]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None,  # int32 [B]
    drafts: Drafts | None,  # [B, D]
    text_breaks: Tensor | None,  # int8 [W]
) -> SpanNodes:  # [B * (1 + D)]
    """See :func:`lenvm_kernels.ops.limit_span.limit_span`. Also writes columns of the table."""
    (requests, new), device = tokens.shape, tokens.device
    eos, ends = table.eos_token_ids[table_rows], table.span_end_token_ids[table_rows]
    patterns, first_bits = table.span_token_ids[table_rows], table.span_first_bits[table_rows]
    bits_of_kinds = table.span_end_bits, table.span_start_bits, table.span_call_bits
    end_bits, start_bits, call_bits = (column[table_rows] for column in bits_of_kinds)
    limit, grace = table.hard_limit[table_rows], table.hard_limit_grace[table_rows]
    count_from, closing_ids = table.count_from[table_rows], table.closing_token_ids[table_rows]
    last = (closing_ids >= 0).sum(1) - 1
    lands = (ends[:, 0] < 0) & (table.closing_token_ids[table_rows, 0] >= 0)
    unit, target_units = table.unit[table_rows], table.target_units[table_rows]
    has_span = (first_bits != 0) | lands | (unit != 0)
    bits = 1 << torch.arange(patterns.shape[1], dtype=torch.int32, device=device)

    def after(span: _Span, token: Tensor, place: Tensor, is_passed: Tensor, is_new: Tensor) -> _Span:
        """State after the token that ends at length ``place``. If not ``is_new``, only a line break has an effect."""
        is_pattern = (patterns == token[:, None]) & (patterns >= 0)
        match = ((span.match << 1) | first_bits) & torch.where(is_pattern, bits, 0).sum(1, dtype=torch.int32)
        index = place - 1 - span.closing_from
        within = (span.closing_from >= 0) & (index >= 0) & (index < last)
        # An end inside a closing does not end the span.
        closes_on = within & (closing_ids.gather(1, index.where(within, 0).long()[:, None])[:, 0] == token)
        ends_now = ~span.ended & ((match & end_bits) != 0) & ~closes_on
        begins_now = span.ended & ((match & start_bits) != 0)
        begin = torch.where(begins_now, place - torch.where(count_from == CountFrom.SPANS, span.used, 0), span.begin)
        text_break, missing = torch.zeros_like(token, dtype=torch.int32), span.missing_bytes
        if text_breaks is not None:
            text_break = breaks_of(token, text_breaks).int()
            added = text_break >> ADDED_BYTES & 3
            missing = torch.where(added > 0, (missing - added).clamp(min=0), text_break >> MISSING_BYTES & 3)
        begin = torch.where(count_from == CountFrom.OUTPUT, span.begin, torch.where(ends_now, place, begin))
        begun = _Span(
            (span.ended | ends_now) & ~begins_now,
            begin,
            match,
            torch.where(begins_now, -1, span.closing_from),
            torch.where(ends_now, place - span.begin, span.used),
            missing,
            torch.where(begin == span.begin, span.units + ((text_break & unit) != 0), 0),
            (span.in_call | (((match & call_bits) != 0) & ~closes_on)) & ~begins_now,
        )
        span = _Span(*(torch.where(is_new, *pair) for pair in zip(begun, span, strict=True)))
        over = place - span.begin - limit
        is_due = (over >= grace) | ((text_break & TextBreak.LINE) != 0)
        is_due &= (span.missing_bytes == 0) | (over >= grace + CHARACTER_TOKENS)
        closes = is_passed & ~span.ended & (span.closing_from < 0) & (over >= 0) & is_due
        return span._replace(closing_from=torch.where(closes, place, span.closing_from))

    # The fields of a _Span.
    columns = (
        *(table.span_ended, table.prompt_len, table.span_match, table.closing_from),
        *(table.span_used, table.missing_bytes, table.units, table.in_call),
    )
    span = _Span(*(column[table_rows] for column in columns))
    seen = table.span_seen[table_rows]
    new_lens = torch.ones_like(lengths) if new_lens is None else new_lens.clamp(0, new)
    for i in range(new):
        place = lengths - new_lens + i + 1
        is_passed = has_span & (i < new_lens) & (place > 0)
        span = after(span, tokens[:, i], place, is_passed, is_passed & (place > seen))
    for column, now in zip((*columns, table.span_seen), (*span, torch.maximum(seen, lengths)), strict=True):
        column[table_rows] = torch.where(has_span, now, column[table_rows])

    # Per node: whether it exists, the number of drafts before it, and its span state.
    is_there, depth, found = [torch.ones_like(has_span)], [torch.zeros_like(lengths)], [span]
    if drafts is not None:
        token_ids, parents = tidy_drafts(drafts, requests)
        row = torch.arange(requests, device=device)
        for j in range(token_ids.shape[1]):
            is_draft, parent = token_ids[:, j] >= 0, parents[:, j].long() + 1
            is_there.append(is_draft)
            depth.append(torch.where(is_draft, torch.stack(depth, 1)[row, parent] + 1, 0))
            behind = _Span(*(torch.stack(x, 1)[row, parent] for x in zip(*found, strict=True)))
            reads = has_span & is_draft
            found.append(after(behind, token_ids[:, j], lengths + depth[-1], reads, reads))
    exists = torch.stack(is_there, 1)
    ended, begin, _, closing, _, _, units, in_call = (torch.stack(x, 1) for x in zip(*found, strict=True))
    uses, places = exists & has_span[:, None], lengths[:, None] + torch.stack(depth, 1)
    ended, in_call = ended & uses, in_call & uses
    if logits is not None:
        vocab = logits.shape[1]
        by_node = logits.view(*ended.shape, vocab)

        def add(number: float, ids: Tensor, nodes: Tensor) -> None:
            """Add ``number`` to the logits of tokens ``ids [B, 1 + D]`` at the selected nodes."""
            is_token = (ids >= 0) & (ids < vocab)
            index = torch.where(is_token, ids, 0).long()[:, :, None]
            x = by_node.gather(2, index)
            by_node.scatter_(2, index, torch.where((nodes & is_token)[:, :, None], x + number, x))

        is_open = uses & ~ended
        index = places - closing
        forced = closing_ids.gather(1, index.clamp(min=0).minimum(last[:, None]).clamp(min=0).long())
        add(FORCED, forced, is_open & (closing >= 0) & (~lands[:, None] | (index <= last[:, None])))
        ends_span = ((eos[:, :, None] == ends[:, None]) & (ends >= 0)[:, None]).any(2)
        is_excluded = ~table.allows_eos[table_rows, None] & ~ends_span
        for ids, excluded in zip(eos.unbind(1), is_excluded.unbind(1), strict=True):
            add(-EXCLUDED, ids[:, None].expand_as(ended), is_open & excluded[:, None])
    generated = places - begin
    # In the answer, convert units to tokens: the rest of the target is the expected tokens of the missing units.
    unit_tokens = torch.where(unit == TextBreak.SENTENCE, SENTENCE_TOKENS, WORD_TOKENS)[:, None]
    tokens_per_unit = (generated + GUESSED_UNITS * unit_tokens) / (units + GUESSED_UNITS)
    of_units = target_units[:, None] * unit_tokens - (target_units[:, None] - units) * tokens_per_unit
    counts_units = (unit != 0)[:, None] & (ended == (ends[:, :1] >= 0))
    of_units = of_units.clamp(-1e9, 1e9).add(0.5).floor().int()
    generated = torch.where(exists, torch.where(counts_units, of_units, generated), 0)
    return SpanNodes(ended.flatten(), in_call.flatten(), generated.flatten())
