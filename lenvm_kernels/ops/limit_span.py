"""Tracking of each request's guided span, e.g. its reasoning, and changes of logits that end it, in one launch.

Tokens are forced and excluded by large finite additions to their logits. A grammar-masked token therefore stays masked,
and the only token that a grammar allows stays selectable.
"""

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, next_power_of_2, row_strides, with_row_strides
from lenvm_kernels.ops._device import kernel
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference import limit_span as reference
from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES, CountFrom, Drafts, GuidanceColumns, SpanNodes, TextBreak

# Requests per program. The registers of one warp store the states of all their nodes, and spill with 8 requests.
REQUESTS = 4

_EXCLUDED, _FORCED = tl.constexpr(reference.EXCLUDED), tl.constexpr(reference.FORCED)
_MISSING_BYTES, _ADDED_BYTES = tl.constexpr(MISSING_BYTES), tl.constexpr(ADDED_BYTES)
_CHARACTER_TOKENS, _GUESSED_UNITS = tl.constexpr(reference.CHARACTER_TOKENS), tl.constexpr(reference.GUESSED_UNITS)
_WORD_TOKENS, _SENTENCE_TOKENS = tl.constexpr(reference.WORD_TOKENS), tl.constexpr(reference.SENTENCE_TOKENS)
_LINE, _SENTENCE = tl.constexpr(int(TextBreak.LINE)), tl.constexpr(int(TextBreak.SENTENCE))
_SPANS, _OUTPUT = tl.constexpr(int(CountFrom.SPANS)), tl.constexpr(int(CountFrom.OUTPUT))


# The columns of a guidance table that the kernel accesses; lists come first, written columns last.
SpanColumns = namedtuple(
    "SpanColumns",
    "eos_token_ids span_end_token_ids span_token_ids closing_token_ids span_first_bits span_end_bits span_start_bits "
    "span_call_bits hard_limit hard_limit_grace count_from allows_eos unit target_units prompt_len span_ended "
    "span_seen span_match closing_from span_used missing_bytes units in_call",
)
LISTS, WRITTEN = SpanColumns._fields[:4], SpanColumns._fields[-9:]


# Span state of requests.
NodeSpan = namedtuple("NodeSpan", "ended begin match closing_from used missing_bytes units in_call")
# Parameters of the span state's transitions: patterns are int32 [REQUESTS, PATTERNS], padded with -2. closing_last is
# the index of the last closing token.
_Rules = namedtuple(
    "_Rules",
    "patterns first_bits end_bits start_bits call_bits hard_limit grace count_from unit closing_ptr closing_last "
    "text_breaks_ptr W",
)


@triton.jit
def _of(column_ptr, stride, table_row, exists):
    return tl.load(column_ptr + table_row * stride, mask=exists, other=0)


@triton.jit
def _after(
    span,  # NodeSpan
    token,
    place,  # length of the sequence with the token
    is_passed,
    is_new,  # False: the token was read before, and only counts as the end of a line
    rules,  # _Rules
):
    """The span state after a token."""
    column = tl.arange(0, rules.patterns.shape[1])[None, :]
    is_pattern = (rules.patterns == token[:, None]) & (rules.patterns >= 0)
    match = ((span.match << 1) | rules.first_bits) & tl.sum(tl.where(is_pattern, 1 << column, 0), axis=1)
    index = place - 1 - span.closing_from
    is_within = is_new & (span.closing_from >= 0) & (index >= 0) & (index < rules.closing_last)
    forced = tl.load(rules.closing_ptr + index, mask=is_within, other=-2)
    # An end inside a closing does not end the span.
    closes_on = is_within & (forced == token)
    ends = is_new & (span.ended == 0) & ((match & rules.end_bits) != 0) & (closes_on == 0)
    begins = is_new & span.ended & ((match & rules.start_bits) != 0)
    ended = (span.ended | ends) & (begins == 0)
    calls = is_new & ((match & rules.call_bits) != 0) & (closes_on == 0)
    in_call = (span.in_call | calls) & (begins == 0)
    begin = tl.where(begins, place - tl.where(rules.count_from == _SPANS, span.used, 0), span.begin)
    begin = tl.where(rules.count_from == _OUTPUT, span.begin, tl.where(ends, place, begin))
    used = tl.where(ends, place - span.begin, span.used)
    closing_from = tl.where(begins, -1, span.closing_from)
    over = place - begin - rules.hard_limit
    is_due, missing, units = over >= rules.grace, span.missing_bytes, span.units
    if rules.text_breaks_ptr is not None:
        is_known = is_passed & (token >= 0) & (token < rules.W)
        text_break = tl.load(rules.text_breaks_ptr + token, mask=is_known, other=0).to(tl.int32)
        is_due = is_due | ((text_break & _LINE) != 0)
        added = (text_break >> _ADDED_BYTES) & 3
        left = tl.where(added > 0, tl.maximum(missing - added, 0), (text_break >> _MISSING_BYTES) & 3)
        missing = tl.where(is_new, left, missing)
        units += (is_new & ((text_break & rules.unit) != 0)).to(tl.int32)
    units = tl.where((begin != span.begin) & is_new, 0, units)
    is_due = is_due & ((missing == 0) | (over >= rules.grace + _CHARACTER_TOKENS))
    closes = is_passed & (ended == 0) & (closing_from < 0) & (over >= 0) & is_due
    match = tl.where(is_new, match, span.match)
    return NodeSpan(ended, begin, match, tl.where(closes, place, closing_from), used, missing, units, in_call)


@triton.jit
def _generated(tokens, units, target_units, unit):
    """Convert units to tokens, so that the rest of the target is the expected number of tokens of the missing units."""
    unit_tokens = tl.where(unit == _SENTENCE, _SENTENCE_TOKENS, _WORD_TOKENS)
    tokens_per_unit = tl.div_rn(tokens + _GUESSED_UNITS * unit_tokens, units + _GUESSED_UNITS)
    generated = target_units * unit_tokens - (target_units - units) * tokens_per_unit
    return tl.floor(tl.minimum(tl.maximum(generated, -1e9), 1e9) + 0.5).to(tl.int32)


@kernel(specialized="ended_ptr in_call_ptr generated_ptr")
def _limit_span_kernel(
    ended_ptr,  # bool [B * (1 + D)], written
    in_call_ptr,  # bool [B * (1 + D)], written
    generated_ptr,  # int32 [B * (1 + D)], written
    logits_ptr,  # [B * (1 + D), V], changed, or None
    stride_logits_row,
    table,  # SpanColumns
    stride,  # its strides
    tokens_ptr,  # int64 [B, NEW]
    stride_tokens_request,
    new_lens_ptr,  # int32 [B] or None
    table_rows_ptr,  # int64 [B]
    lengths_ptr,  # int32 [B]
    draft_ids_ptr,  # [B, D] or None
    stride_ids_request,
    draft_parents_ptr,  # int32 [B, D] or None
    stride_parents_request,
    text_breaks_ptr,  # int8 [W] or None
    B,
    V,
    W,
    NEW: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    EOS: tl.constexpr,  # a power of two >= E, and so on
    SPAN_ENDS: tl.constexpr,
    PATTERNS: tl.constexpr,
    CLOSING: tl.constexpr,
    D: tl.constexpr,  # 0 without drafts
    NODES: tl.constexpr,  # a power of two > D
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    exists = request < B
    table_row = tl.load(table_rows_ptr + request, mask=exists, other=0)
    length = tl.load(lengths_ptr + request, mask=exists, other=0)
    new_len = tl.full([REQUESTS], 1, tl.int32)
    if new_lens_ptr is not None:
        new_len = tl.minimum(tl.maximum(tl.load(new_lens_ptr + request, mask=exists, other=0), 0), NEW)
    column = tl.arange(0, SPAN_ENDS)[None, :]
    ends_ptr = table.span_end_token_ids + (table_row * stride.span_end_token_ids)[:, None] + column
    ends = tl.load(ends_ptr, mask=exists[:, None] & (column < S), other=-2)
    first_end = tl.sum(tl.where(column == 0, ends, 0), axis=1)
    closing_ptr = table.closing_token_ids + table_row * stride.closing_token_ids
    lands = (first_end < 0) & (tl.load(closing_ptr, mask=exists, other=-2) >= 0)
    first_bits = _of(table.span_first_bits, stride.span_first_bits, table_row, exists)
    unit = _of(table.unit, stride.unit, table_row, exists)
    has_span = (first_bits != 0) | lands | (unit != 0)
    column = tl.arange(0, PATTERNS)[None, :]
    patterns_ptr = table.span_token_ids + (table_row * stride.span_token_ids)[:, None] + column
    patterns = tl.load(patterns_ptr, mask=has_span[:, None] & (column < P), other=-2)
    start_bits = _of(table.span_start_bits, stride.span_start_bits, table_row, has_span)
    end_bits = _of(table.span_end_bits, stride.span_end_bits, table_row, has_span)
    call_bits = _of(table.span_call_bits, stride.span_call_bits, table_row, has_span)
    count_from = _of(table.count_from, stride.count_from, table_row, has_span)
    hard_limit = _of(table.hard_limit, stride.hard_limit, table_row, has_span)
    grace = _of(table.hard_limit_grace, stride.hard_limit_grace, table_row, has_span)
    allows_eos = _of(table.allows_eos, stride.allows_eos, table_row, has_span)
    begin = _of(table.prompt_len, stride.prompt_len, table_row, exists)
    ended = _of(table.span_ended, stride.span_ended, table_row, has_span)
    seen = _of(table.span_seen, stride.span_seen, table_row, has_span)
    match = _of(table.span_match, stride.span_match, table_row, has_span)
    closing_from = _of(table.closing_from, stride.closing_from, table_row, has_span)
    used = _of(table.span_used, stride.span_used, table_row, has_span)
    missing = _of(table.missing_bytes, stride.missing_bytes, table_row, has_span)
    units = _of(table.units, stride.units, table_row, has_span)
    in_call = _of(table.in_call, stride.in_call, table_row, has_span)
    target_units = _of(table.target_units, stride.target_units, table_row, has_span)
    column = tl.arange(0, CLOSING)[None, :]
    closing = tl.load(closing_ptr[:, None] + column, mask=has_span[:, None] & (column < C), other=-2)
    last = tl.sum((closing >= 0).to(tl.int32), axis=1) - 1
    tl.debug_barrier()  # reads precede the overwrites, here and below

    rules = _Rules(
        *(patterns, first_bits, end_bits, start_bits, call_bits, hard_limit, grace, count_from, unit),
        *(closing_ptr, last, text_breaks_ptr, W),
    )
    span = NodeSpan(ended != 0, begin, match, closing_from, used, missing, units, in_call != 0)
    for i in range(NEW):
        place = length - new_len + i + 1
        is_passed = has_span & (i < new_len) & (place > 0)
        token = tl.load(tokens_ptr + request * stride_tokens_request + i, mask=is_passed, other=-1)
        span = _after(span, token, place, is_passed, is_passed & (place > seen), rules)
    tl.store(table.prompt_len + table_row * stride.prompt_len, span.begin, mask=has_span)
    tl.store(table.span_ended + table_row * stride.span_ended, span.ended, mask=has_span)
    tl.store(table.span_seen + table_row * stride.span_seen, tl.maximum(seen, length), mask=has_span)
    tl.store(table.span_match + table_row * stride.span_match, span.match, mask=has_span)
    tl.store(table.closing_from + table_row * stride.closing_from, span.closing_from, mask=has_span)
    tl.store(table.span_used + table_row * stride.span_used, span.used, mask=has_span)
    tl.store(table.missing_bytes + table_row * stride.missing_bytes, span.missing_bytes, mask=has_span)
    tl.store(table.units + table_row * stride.units, span.units, mask=has_span)
    tl.store(table.in_call + table_row * stride.in_call, span.in_call, mask=has_span)

    # Per node: number of drafts on the path to it, and its span state.
    node = tl.arange(0, NODES)[None, :]
    depth = tl.zeros([REQUESTS, NODES], tl.int32)
    nodes = NodeSpan(*[tl.where(node == 0, root[:, None], 0).to(root.dtype) for root in span])
    is_draft, count = exists, tl.zeros([REQUESTS], tl.int32)
    if draft_ids_ptr is not None:
        for j in range(D):
            token = tl.load(draft_ids_ptr + request * stride_ids_request + j, mask=is_draft, other=-1)
            parent = tl.load(draft_parents_ptr + request * stride_parents_request + j, mask=is_draft, other=-1)
            is_draft = is_draft & (token >= 0)
            count += is_draft.to(tl.int32)
            parent = tl.where((parent >= 0) & (parent < j), parent, -1)
            is_parent = node == (parent + 1)[:, None]
            behind = NodeSpan(*[tl.sum(tl.where(is_parent, x, 0), axis=1).to(x.dtype) for x in nodes])
            new_depth = tl.sum(tl.where(is_parent, depth, 0), axis=1) + 1
            reads = is_draft & has_span
            behind = _after(behind, token.to(tl.int64), length + new_depth, reads, reads, rules)
            is_node = (node == j + 1) & is_draft[:, None]
            depth = tl.where(is_node, new_depth[:, None], depth)
            nodes = NodeSpan(*[tl.where(is_node, behind[k][:, None], nodes[k]) for k in (0, 1, 2, 3, 4, 5, 6, 7)])

    row = request[:, None] * (D + 1) + node
    is_row = exists[:, None] & (node <= D)
    is_node = node <= count[:, None]
    node_ended = nodes.ended & has_span[:, None]
    tokens = length[:, None] + depth - nodes.begin
    counts_units = (unit != 0)[:, None] & (node_ended == (first_end >= 0)[:, None])  # in the answer
    of_units = _generated(tokens.to(tl.float32), nodes.units.to(tl.float32), target_units[:, None], unit[:, None])
    generated = tl.where(is_node, tl.where(counts_units, of_units, tokens), 0)
    tl.store(ended_ptr + row, node_ended, mask=is_row)
    tl.store(in_call_ptr + row, nodes.in_call & has_span[:, None], mask=is_row)
    tl.store(generated_ptr + row, generated, mask=is_row)
    if logits_ptr is not None:
        is_open = has_span[:, None] & is_node & (node_ended == 0)
        # The forced token is at this distance from the closing's start, or its last token.
        last = last[:, None]
        index = length[:, None] + depth - nodes.closing_from
        is_forced = is_open & (nodes.closing_from >= 0) & ((lands[:, None] == 0) | (index <= last))
        index = tl.maximum(tl.minimum(index, last), 0)
        forced_id = tl.load(closing_ptr[:, None] + index, mask=is_forced, other=-2)
        forced_ptr = logits_ptr + row * stride_logits_row + forced_id
        is_raised = is_forced & (forced_id >= 0) & (forced_id < V)
        x = tl.load(forced_ptr, mask=is_raised, other=0.0)
        tl.debug_barrier()
        tl.store(forced_ptr, (x.to(tl.float32) + _FORCED).to(x.dtype), mask=is_raised)
        tl.debug_barrier()  # a closing token may be an end-of-sequence token

        column = tl.arange(0, EOS)[None, :]
        eos_ptr = table.eos_token_ids + (table_row * stride.eos_token_ids)[:, None] + column
        eos = tl.load(eos_ptr, mask=(has_span & (allows_eos == 0))[:, None] & (column < E), other=-2)
        is_excluded = (eos >= 0) & (eos < V)
        for i in range(SPAN_ENDS):
            end = tl.sum(tl.where(tl.arange(0, SPAN_ENDS)[None, :] == i, ends, 0), axis=1)
            is_excluded = is_excluded & (eos != end[:, None])
        for j in tl.static_range(D + 1):  # unrolled, because a node takes only a load and a store
            is_lowered = is_excluded & (tl.sum(tl.where(node == j, is_open.to(tl.int32), 0), axis=1) > 0)[:, None]
            excluded_ptr = logits_ptr + (request[:, None] * (D + 1) + j) * stride_logits_row + eos
            y = tl.load(excluded_ptr, mask=is_lowered, other=0.0)
            tl.debug_barrier()
            tl.store(excluded_ptr, (y.to(tl.float32) - _EXCLUDED).to(y.dtype), mask=is_lowered)


_SPEC = Spec(f"""
    tokens: int64 [B, NEW+]
    drafts?: Drafts
    logits?: float [B * (1 + D), V]
    table: GuidanceColumns ({", ".join(SpanColumns._fields)}) strided
    table_rows: int64 [B]
    lengths: int32 [B]
    new_lens?: int32 [B]
    text_breaks?: int8 [W]
""")
_MUTATED = ["logits", *(f"table.{name}" for name in WRITTEN)]


@operator(_SPEC, reference=reference.limit_span, mutates=_MUTATED, takes={"table": SpanColumns})
def _launch(out: SpanNodes, given):
    (requests, new), table, text_breaks = given.tokens.shape, given.table, given.text_breaks
    columns = 0 if given.drafts is None else given.drafts.token_ids.shape[1]
    eos, ends, patterns, closing = (getattr(table, name).shape[1] for name in LISTS)
    _limit_span_kernel[(ceil_div(requests, REQUESTS),)](
        *(*out, *with_row_strides(given.logits), table, row_strides(table)),
        *(*with_row_strides(given.tokens), given.new_lens, given.table_rows, given.lengths),
        *(*with_row_strides(*(given.drafts or (None, None))), text_breaks, requests),
        0 if given.logits is None else given.logits.shape[1],
        0 if text_breaks is None else text_breaks.shape[0],
        **dict(NEW=new, E=eos, S=ends, P=patterns, C=closing, D=columns, REQUESTS=REQUESTS),
        EOS=next_power_of_2(eos),
        SPAN_ENDS=next_power_of_2(ends),
        PATTERNS=next_power_of_2(patterns),
        CLOSING=next_power_of_2(closing),
        NODES=next_power_of_2(columns + 1),
        num_warps=1,
    )


def limit_span(
    logits: Tensor | None,  # fp32|bf16|fp16 [B * (1 + D), V]
    table: GuidanceColumns,  # R requests
    tokens: Tensor,  # int64 [B, N]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None = None,  # int32 [B]
    drafts: Drafts | None = None,  # [B, D]
    text_breaks: Tensor | None = None,  # int8 [W]
    backend: str = "auto",
) -> SpanNodes:
    """Update the state of guided spans, prevent the end of sequences with an open span, and end long spans.

    A request has a span if it has an end or start sequence, a landing or a ``unit``. An open span ends after the last
    token of one of its end sequences, and a new one begins after the last token of a start sequence
    (``span_token_ids``). The table stores the state and the number of tokens read (``span_seen``), so that passing
    tokens again has no effect.
    While a span is open:

    - The request's ``eos_token_ids`` are excluded unless ``allows_eos`` is set or they also end the span. Their logits
      are lowered so far that any other token is drawn instead.
    - If it has ``hard_limit`` tokens, and a token has ended a line or ``hard_limit_grace`` more were generated, the
      ``closing_token_ids`` are raised in the same way, one per step; the last one is repeated. They begin after a whole
      character (at most four tokens later), and an end within them does not end the span.

    ``count_from`` is the place from which a span counts tokens (:class:`CountFrom`). With a ``unit``, the answer counts
    words or sentences (:class:`TextBreak`): the generated tokens are then the target's expected tokens minus the
    expected tokens of the missing units, at the text's own number of tokens per unit. The answer follows the span if
    the request has ``span_end_token_ids``; otherwise it is the open span.

    A request with ``closing_token_ids`` but without ``span_end_token_ids`` has a landing in each span. From
    ``hard_limit`` on, its ``closing_token_ids`` are raised as above, each once. The sequence then continues, and may
    end.

    Other requests are unchanged. A second call in a step does not change the drawn tokens.

    Args:
        logits: fp32, bf16 or fp16 ``[B * (1 + D), V]``; logits of the next token at each node (:class:`Drafts`).
            Changed in place; rows may be strided. If ``None``, only the state is updated and returned.
        table: parameters of ``R`` requests; ``prompt_len``, ``span_ended``, ``span_seen``, ``span_match``,
            ``closing_from``, ``span_used``, ``missing_bytes``, ``units`` and ``in_call`` are written.
        tokens: int64 ``[B, N]``; the new tokens of each sequence, from column 0 on.
        table_rows: int64 ``[B]``; each request's row of the table, all different.
        lengths: int32 ``[B]``; tokens of each sequence, including the new ones.
        new_lens: int32 ``[B]``; number of new tokens of each sequence. If ``None``, 1.
        drafts: drafts of the requests. If ``None``, no request has drafts.
        text_breaks: int8 ``[W]``; the :class:`TextBreak` of each token. If ``None``, no token ends a line.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        The :class:`SpanNodes`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> params = parse_guidance({"target_length": 5, "end_token_ids": [2], "hard_limit": 9})
        >>> table = GuidanceTable.from_params([params], [{0}], "cpu").columns
        >>> logits = torch.zeros(1, 4)
        >>> limit_span(logits, table, torch.tensor([[3]]), torch.tensor([0]), torch.tensor([4], dtype=torch.int32))
        SpanNodes(ended=tensor([False]), in_call=tensor([False]), generated=tensor([4], dtype=torch.int32))
        >>> logits  # the sequence cannot end
        tensor([[-10000.,      0.,      0.,      0.]])
    """
    operands = (tokens, drafts, logits, table, table_rows, lengths, new_lens, text_breaks)
    backend, sizes = _SPEC.check(backend, *operands, sizes={"D": 0} if drafts is None else {})
    for name in LISTS:
        if getattr(table, name).shape[1] == 0:
            raise ValueError(f"table.{name} must have at least one column, got none")
    if new_lens is None and sizes["NEW"] != 1:
        raise ValueError(f"new_lens must be given with tokens of several columns, got {sizes['NEW']} columns")
    return _launch(backend, empty(SpanNodes, tokens.device, sizes), *operands)
