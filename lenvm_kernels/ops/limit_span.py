"""Where the guided span of each request has ended, and what ends it, in one launch.

A request may have tokens that end its guided span: a thought, which an answer follows. Until one of them is drawn the
model's own end of sequence is left out, and from a hard limit on the first of them is forced. Both are additions to
single logits, so large that no other token is drawn: one that a grammar has forbidden stays forbidden, and one that is
all that it allows stays possible.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    FLOATS,
    ceil_div,
    check_fields,
    check_tensor,
    next_power_of_2,
    resolve_backend,
    row_stride,
)
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops.expand_drafts import check_drafts
from lenvm_kernels.reference.limit_span import EXCLUDED, FORCED
from lenvm_kernels.reference.limit_span import limit_span as _reference
from lenvm_kernels.types import Drafts, GuidanceColumns

# Requests a program. With four drafts each a warp's threads have two nodes.
REQUESTS = 8

_EXCLUDED, _FORCED = tl.constexpr(EXCLUDED), tl.constexpr(FORCED)


class _Table(NamedTuple):
    """The columns of a guidance table that are read here."""

    eos_token_ids: Any  # int32 [R, E]
    span_end_token_ids: Any  # int32 [R, S]
    hard_limit: Any  # int32 [R]
    prompt_len: Any  # int32 [R]
    allows_eos: Any  # bool [R]
    span_ended: Any  # bool [R], written


# Of the columns above that are no lists.
_TABLE_DTYPES = (torch.int32, torch.int32, torch.bool, torch.bool)


# The inputs are a caller's, and may be slices: nothing is compiled anew where their alignment changes. (Triton heeds
# that for pointers of their own only, not for those in a tuple.)
@triton.jit(
    do_not_specialize=[
        "stride_logits_row",
        "stride_tokens_request",
        "stride_ids_request",
        "stride_parents_request",
        "B",
        "V",
    ],
    do_not_specialize_on_alignment=[
        "logits_ptr",
        "tokens_ptr",
        "new_lens_ptr",
        "table_rows_ptr",
        "lengths_ptr",
        "draft_ids_ptr",
        "draft_parents_ptr",
    ],
)
def _limit_span_kernel(
    ended_ptr,  # bool [B * (1 + D)], written
    logits_ptr,  # [B * (1 + D), V], changed, or None
    stride_logits_row,
    table,  # _Table
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
    B,
    V,
    NEW: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    EOS: tl.constexpr,  # a power of two >= E
    SPAN_ENDS: tl.constexpr,  # a power of two >= S
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
    prompt_len = tl.load(table.prompt_len + table_row * stride.prompt_len, mask=exists, other=0)
    hard_limit = tl.load(table.hard_limit + table_row * stride.hard_limit, mask=exists, other=0)
    allows_eos = tl.load(table.allows_eos + table_row * stride.allows_eos, mask=exists, other=False)
    column = tl.arange(0, SPAN_ENDS)[None, :]
    ends_ptr = table.span_end_token_ids + (table_row * stride.span_end_token_ids)[:, None] + column
    ends = tl.load(ends_ptr, mask=exists[:, None] & (column < S), other=-2)
    forced_id = tl.sum(tl.where(column == 0, ends, 0), axis=1)
    has_span = forced_id >= 0
    ended = tl.load(table.span_ended + table_row * stride.span_ended, mask=has_span, other=False)
    tl.debug_barrier()  # what was read is read before it is written, here and below

    # Tokens that are not there are -1, which ends nothing.
    ends = tl.where((ends >= 0) & has_span[:, None], ends, -2)
    for i in range(NEW):
        is_new = has_span & (i < new_len) & (length - new_len + i >= prompt_len)
        token = tl.load(tokens_ptr + request * stride_tokens_request + i, mask=is_new, other=-1)
        ended = ended | (tl.max((ends == token[:, None]).to(tl.int32), axis=1) > 0)
    tl.store(table.span_ended + table_row * stride.span_ended, ended, mask=has_span)

    # Of each node: how many drafts it has behind it, and whether one of them or an earlier token ends the span.
    node = tl.arange(0, NODES)[None, :]
    depth, node_ended = tl.zeros([REQUESTS, NODES], tl.int32), (node == 0) & ended[:, None]
    is_draft, count = has_span, tl.zeros([REQUESTS], tl.int32)
    if draft_ids_ptr is not None:
        for j in range(D):
            token = tl.load(draft_ids_ptr + request * stride_ids_request + j, mask=is_draft, other=-1)
            parent = tl.load(draft_parents_ptr + request * stride_parents_request + j, mask=is_draft, other=-1)
            is_draft = is_draft & (token >= 0)
            count += is_draft.to(tl.int32)
            is_end = tl.max((ends == token[:, None]).to(tl.int32), axis=1) > 0
            parent = tl.where((parent >= 0) & (parent < j), parent, -1)
            is_parent = node == (parent + 1)[:, None]
            behind = tl.sum(tl.where(is_parent, depth, 0), axis=1)
            parent_ended = tl.max(tl.where(is_parent, node_ended.to(tl.int32), 0), axis=1) > 0
            is_node = (node == j + 1) & is_draft[:, None]
            depth = tl.where(is_node, behind[:, None] + 1, depth)
            node_ended = tl.where(is_node, (parent_ended | is_end)[:, None], node_ended)

    row = request[:, None] * (D + 1) + node
    tl.store(ended_ptr + row, node_ended, mask=exists[:, None] & (node <= D))
    if logits_ptr is not None:
        is_open = has_span[:, None] & (node <= count[:, None]) & (node_ended == 0)
        is_forced = is_open & ((length - prompt_len)[:, None] + depth >= hard_limit[:, None])
        forced_ptr = logits_ptr + row * stride_logits_row + forced_id[:, None]
        is_raised = is_forced & (forced_id < V)[:, None]
        x = tl.load(forced_ptr, mask=is_raised, other=0.0)
        tl.debug_barrier()
        tl.store(forced_ptr, (x.to(tl.float32) + _FORCED).to(x.dtype), mask=is_raised)

        column = tl.arange(0, EOS)[None, :]
        eos_ptr = table.eos_token_ids + (table_row * stride.eos_token_ids)[:, None] + column
        eos = tl.load(eos_ptr, mask=(has_span & (allows_eos == 0))[:, None] & (column < E), other=-2)
        is_excluded = (eos >= 0) & (eos < V)
        for i in range(SPAN_ENDS):
            end = tl.sum(tl.where(tl.arange(0, SPAN_ENDS)[None, :] == i, ends, 0), axis=1)
            is_excluded = is_excluded & (eos != end[:, None])
        for j in tl.static_range(D + 1):  # unrolled: a node is a load and a store
            is_lowered = is_excluded & (tl.sum(tl.where(node == j, is_open.to(tl.int32), 0), axis=1) > 0)[:, None]
            excluded_ptr = logits_ptr + (request[:, None] * (D + 1) + j) * stride_logits_row + eos
            y = tl.load(excluded_ptr, mask=is_lowered, other=0.0)
            tl.debug_barrier()
            tl.store(excluded_ptr, (y.to(tl.float32) - _EXCLUDED).to(y.dtype), mask=is_lowered)


def _run_reference(ended, logits, *operands) -> None:
    ended.copy_(_reference(logits, *operands))


@operator(mutates=["ended", "logits", "span_ended"], reference=_run_reference)
def _launch(
    ended: Tensor,
    logits: Tensor | None,
    eos_token_ids: Tensor,
    span_end_token_ids: Tensor,
    hard_limit: Tensor,
    prompt_len: Tensor,
    allows_eos: Tensor,
    span_ended: Tensor,
    tokens: Tensor,
    new_lens: Tensor | None,
    table_rows: Tensor,
    lengths: Tensor,
    draft_ids: Tensor | None,
    draft_parents: Tensor | None,
) -> None:
    requests, new = tokens.shape
    if requests == 0:
        return
    table = _Table(eos_token_ids, span_end_token_ids, hard_limit, prompt_len, allows_eos, span_ended)
    drafts = 0 if draft_ids is None else draft_ids.shape[1]
    _limit_span_kernel[(ceil_div(requests, REQUESTS),)](
        ended,
        logits,
        0 if logits is None else logits.stride(0),
        table,
        _Table(*map(row_stride, table)),
        tokens,
        tokens.stride(0),
        new_lens,
        table_rows,
        lengths,
        draft_ids,
        0 if draft_ids is None else draft_ids.stride(0),
        draft_parents,
        0 if draft_parents is None else draft_parents.stride(0),
        requests,
        0 if logits is None else logits.shape[1],
        NEW=new,
        E=eos_token_ids.shape[1],
        S=span_end_token_ids.shape[1],
        EOS=next_power_of_2(eos_token_ids.shape[1]),
        SPAN_ENDS=next_power_of_2(span_end_token_ids.shape[1]),
        D=drafts,
        NODES=next_power_of_2(drafts + 1),
        REQUESTS=REQUESTS,
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
    backend: str = "auto",
) -> Tensor:  # bool [B * (1 + D)]
    """Say where guided spans have ended; before that, keep the model from ending the sequence, and end long spans.

    A request has a span if it has ``span_end_token_ids``. The span ends with the first of these among the tokens it has
    generated, which ``span_ended`` of the table keeps. While it is open

    - its ``eos_token_ids`` are excluded, unless it ``allows_eos`` or they end the span, too: their logits are lowered
      by so much that any other token is drawn in their place;
    - once ``hard_limit`` tokens are generated its first end token is raised in the same way.

    Requests without a span are left as they are. Called again for the same step it changes nothing that is drawn.
    Nothing is read back to the host, and no new number of requests compiles anything.

    Args:
        logits: fp32, bf16 or fp16 ``[B * (1 + D), V]``, last dimension contiguous, changed in place: of the next tokens
            at each node (:class:`Drafts`), without drafts of each request. ``None``: they were changed before, and only
            the ends are wanted.
        table: the requests' parameters, ``R`` requests; ``span_ended`` is written.
        tokens: int64 ``[B, N]``; the tokens that each sequence has grown by, from column 0 on.
        table_rows: int64 ``[B]``; each request's row of the table, all different.
        lengths: int32 ``[B]``; tokens of each sequence, these included.
        new_lens: int32 ``[B]``; how many of ``tokens`` are of each sequence (None: 1).
        drafts: of the requests; None: nobody has any.
        backend: ``auto`` (Triton for GPU tensors, else the reference), ``triton`` or ``reference``.

    Returns:
        bool ``[B * (1 + D)]``; True at nodes that come after the end of a span: nothing is to be guided there.

    Raises:
        TypeError, ValueError: an argument is not as above. Checked before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> params = parse_guidance({"target_length": 5, "end_token_ids": [2], "hard_limit": 9})
        >>> table = GuidanceTable.from_params([params], [{0}], "cpu")
        >>> logits = torch.zeros(1, 4)
        >>> limit_span(logits, table, torch.tensor([[3]]), torch.tensor([0]), torch.tensor([4], dtype=torch.int32))
        tensor([False])
        >>> logits  # the sequence cannot end
        tensor([[-10000.,      0.,      0.,      0.]])
    """
    backend = resolve_backend(backend, "tokens", tokens)
    check_tensor("tokens", tokens, dtypes=torch.int64, shape=(None, None))
    (requests, new), device = tokens.shape, tokens.device
    if new == 0:
        raise ValueError("tokens must have at least one column, got none")
    if drafts is not None:
        check_drafts(drafts, requests, device)
    nodes = 1 if drafts is None else 1 + drafts.token_ids.shape[1]
    if logits is not None:
        check_tensor("logits", logits, dtypes=FLOATS[backend], shape=(requests * nodes, None), device=device)
    table = getattr(table, "columns", table)
    if not isinstance(table, GuidanceColumns):
        raise TypeError(f"table must be a GuidanceTable, got {type(table).__name__}")
    columns = _Table._make(getattr(table, name) for name in _Table._fields)
    eos, ends = columns[:2]
    size = check_tensor("table.eos_token_ids", eos, dtypes=torch.int32, shape=(None, None), device=device).shape[0]
    check_tensor("table.span_end_token_ids", ends, dtypes=torch.int32, shape=(size, None), device=device)
    if ends.shape[1] == 0:
        raise ValueError("table.span_end_token_ids must have at least one column, got none")
    check_fields("table", _Table._fields[2:], columns[2:], _TABLE_DTYPES, size, device, unit_stride=False)
    check_tensor("table_rows", table_rows, dtypes=torch.int64, shape=(requests,), device=device)
    check_tensor("lengths", lengths, dtypes=torch.int32, shape=(requests,), device=device)
    if new_lens is not None:
        check_tensor("new_lens", new_lens, dtypes=torch.int32, shape=(requests,), device=device)
    elif new != 1:
        raise ValueError(f"new_lens must be given with tokens of several columns, got {new} columns")
    ended = torch.empty(requests * nodes, dtype=torch.bool, device=device)
    _launch(backend, ended, logits, *columns, tokens, new_lens, table_rows, lengths, *(drafts or (None, None)))
    return ended
