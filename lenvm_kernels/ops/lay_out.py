"""Layout of a value-model forward: the delta tokens and candidates of each request, and the attention plan.

Source: section 2 of the specification. The candidates of a request are at the position after its delta; in a tree, a
candidate is at the position after its parent.

One launch with one program per request. A program computes its offsets as integer sums over the lengths of earlier
requests. It writes its own rows, columns and plan items, and a share of the padding.
"""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import check_int, next_power_of_2, overlapping, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.ops.value_tree_attention.plan import (
    BLOCK_M,
    ITEM_SIZE,
    SPLIT_TILES,
    most_splits,
    num_counters,
    num_items,
    plan_shape,
    store_items,
)
from lenvm_kernels.reference.lay_out import lay_out as _lay_out
from lenvm_kernels.types import DeltaTokens, RaggedLayout, StepHistory, StepRequests

# Requests per iteration of the sums over the lengths, and tokens per iteration of the copies. Measured on an H200
# without the choice of deltas and the plan: 3.4 us for 64 requests with 8 candidates. Other sizes are not measured.
TILE = 1024
NUM_WARPS = 8


@triton.jit
def _lengths(requests, lens, request, B, D, max_len, HELD: tl.constexpr, MAX_NEW: tl.constexpr, K: tl.constexpr):
    """(cached tokens, delta tokens, candidates) of requests as int64; 0 beyond B.

    Lengths are clamped to the slot table, to D and to K, so that a broken length harms no other request."""
    lens_ptr, cached_lens_ptr, candidate_lens_ptr = lens
    exists = request < B
    cached = tl.load(cached_lens_ptr + request, mask=exists, other=0).to(tl.int64)
    candidates = tl.load(candidate_lens_ptr + request, mask=exists, other=0).to(tl.int64)
    candidates = tl.minimum(tl.maximum(candidates, 0), K)
    if requests is None:
        delta = tl.load(lens_ptr + request, mask=exists, other=0).to(tl.int64)
        delta = tl.minimum(tl.maximum(delta, 0), D)
    else:
        length = tl.load(requests.lengths + request, mask=exists, other=0).to(tl.int64)
        needs_values = tl.load(requests.needs_values + request, mask=exists, other=False)
        missing = tl.maximum(length - cached, 0)
        computes = (needs_values != 0) & ((candidates > 0) | (missing > HELD - MAX_NEW))
        delta = tl.where(computes, tl.minimum(missing, HELD), 0)
        cached = tl.minimum(cached, length)
    return tl.minimum(tl.maximum(cached, 0), max_len), delta, candidates


@triton.jit
def _store_rows(layout, row, token_id, position, slot, parent, mask):
    tl.store(layout.token_ids + row, token_id, mask=mask)
    tl.store(layout.positions + row, position, mask=mask)
    tl.store(layout.slots + row, slot, mask=mask)
    if layout.parents is not None:
        tl.store(layout.parents + row, parent, mask=mask)


@triton.jit
def _earlier(parent, column):
    """``parent`` where it is an earlier column than ``column``, else -1."""
    return tl.where((parent >= 0) & (parent < column), parent, -1).to(tl.int64)


@kernel(specialized="history_lens_ptr")
def _lay_out_kernel(
    layout,  # RaggedLayout, written
    requests,  # StepRequests, or None if the delta is passed
    history_lens_ptr,  # int32 [R], written; None if the delta is passed
    token_ids_ptr,  # [D] of the delta, or [R, HELD] of the history
    starts_ptr,  # int32 [B] of the delta, or None
    lens_ptr,  # int32 [B] of the delta, or None
    cached_lens_ptr,  # int32 [B]
    table_rows_ptr,  # int32|int64 [B]
    candidate_ids_ptr,  # [B, K]
    stride_candidate_ids_request,
    candidate_lens_ptr,  # int32 [B]
    parents_ptr,  # int32 [B, K] or None
    stride_parents_request,
    slot_table_ptr,  # int32 [R, pages]
    stride_slot_table_row,
    pages,
    B,
    D,
    most_items,
    num_counters,
    HELD: tl.constexpr,  # tokens per request in the history
    MAX_NEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # tokens of a query tile
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE).to(tl.int64)
    D = D.to(tl.int64)
    T = D + B.to(tl.int64) * K
    max_len = pages.to(tl.int64) * PAGE_SIZE
    lens = (lens_ptr, cached_lens_ptr, candidate_lens_ptr)

    # Rows and plan items of earlier requests, and in total.
    first_row, end_row = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    first_item, end_item = first_row, first_row
    for first in range(0, B, TILE):
        other = first + tile
        cached, delta, candidates = _lengths(requests, lens, other, B, D, max_len, HELD, MAX_NEW, K)
        rows = delta + candidates
        items = num_items(rows.to(tl.int32), cached.to(tl.int32), TILE_TOKENS)
        is_earlier = other < request
        first_row += tl.sum(tl.where(is_earlier, rows, 0), axis=0)
        end_row += tl.sum(rows, axis=0)
        first_item += tl.sum(tl.where(is_earlier, items, 0), axis=0)
        end_item += tl.sum(items, axis=0)

    cached, delta, candidates = _lengths(requests, lens, request, B, D, max_len, HELD, MAX_NEW, K)
    table_row = tl.load(table_rows_ptr + request).to(tl.int64)
    tl.store(layout.q_offsets + request, first_row.to(tl.int32))
    tl.store(layout.q_offsets + B, end_row.to(tl.int32), mask=request == 0)
    tl.store(layout.cached_lens + request, cached.to(tl.int32))
    if history_lens_ptr is not None:
        tl.store(history_lens_ptr + table_row, (cached + delta).to(tl.int32), mask=delta > 0)

    pages_ptr = slot_table_ptr + table_row * stride_slot_table_row
    for first in range(0, delta, TILE):
        token = first + tile
        row, position = first_row + token, cached + token
        is_delta = (token < delta) & (row < T)
        if requests is None:
            source = tl.load(starts_ptr + request).to(tl.int64) + token
            is_readable = is_delta & (source >= 0) & (source < D)
        else:
            source = table_row * HELD + position % HELD
            is_readable = is_delta
        token_id = tl.load(token_ids_ptr + source, mask=is_readable, other=0).to(tl.int64)
        has_slot = is_readable & (position < max_len)
        page = tl.load(pages_ptr + position // PAGE_SIZE, mask=has_slot, other=0).to(tl.int64)
        slot = tl.where(has_slot, page * PAGE_SIZE + position % PAGE_SIZE, -1)
        _store_rows(layout, row, token_id, position, slot, -1, is_delta)

    if K > 0:
        column = tl.arange(0, COLUMNS).to(tl.int64)
        is_column, is_candidate = column < K, column < candidates
        first_candidate = first_row + delta
        candidate_row = first_candidate + column
        is_row = is_candidate & (candidate_row < T)
        candidate_ids = candidate_ids_ptr + request * stride_candidate_ids_request
        token_id = tl.load(candidate_ids + column, mask=is_row, other=0).to(tl.int64)
        position = cached + delta + tl.zeros([COLUMNS], tl.int64)
        parent_row = tl.full([COLUMNS], -1, tl.int64)
        if parents_ptr is not None:
            parents_ptr += request * stride_parents_request
            parent = _earlier(tl.load(parents_ptr + column, mask=is_candidate, other=-1), column)
            parent_row = tl.where(parent >= 0, first_candidate + parent, -1)
            while tl.max(parent, axis=0) >= 0:
                position += (parent >= 0).to(tl.int64)
                above = tl.load(parents_ptr + parent, mask=parent >= 0, other=-1)
                parent = _earlier(above, parent)
        _store_rows(layout, candidate_row, token_id, position, -1, parent_row.to(tl.int32), is_row)

        candidate_row = tl.where(is_candidate, candidate_row, -1)
        tl.store(layout.candidate_rows + request * K + column, candidate_row, mask=is_column)

    rows, cached_tokens = (delta + candidates).to(tl.int32), cached.to(tl.int32)  # divided in 32 bits
    of_request = (request, table_row, first_row, rows, delta, cached_tokens)
    store_items(layout.plan, first_item, most_items, *of_request, TILE_TOKENS)

    # Each program fills a share of the padding.
    share, stride = request * TILE, B.to(tl.int64) * TILE
    for first in range(end_row + share, T, stride):
        padding_row = first + tile
        _store_rows(layout, padding_row, 0, 0, -1, -1, padding_row < T)
    for first in range(share, num_counters, stride):
        tl.store(layout.counters + first + tile, 0, mask=first + tile < num_counters)
    plan_end = (1 + most_items).to(tl.int64) * ITEM_SIZE
    for first in range((1 + end_item) * ITEM_SIZE + share, plan_end, stride):
        tl.store(layout.plan + first + tile, 0, mask=first + tile < plan_end)
    header = tl.arange(0, ITEM_SIZE)
    tl.store(layout.plan + header, tl.where(header == 0, tl.minimum(end_item, most_items), 0), mask=request == 0)


_SPEC = Spec("""
    candidate_ids: int [B+, K]
    candidate_lens: int32 [B]
    slot_table: int32 [*, pages]
    delta?: DeltaTokens
    candidate_parents?: int32 [B, K]
    requests?: StepRequests of begin_step (lengths, request_rows, needs_values, cached_lens) [B]
    history?: StepHistory (tokens, cached_lens) contiguous
""")
_reference = partial(_lay_out, tile_rows=BLOCK_M.value, split_tiles=SPLIT_TILES.value, num_splits=most_splits)
_NUMBERS = {"page_size": int, "max_new": int, "group": int}


@operator(_SPEC, reference=_reference, mutates=["history.cached_lens"], takes=_NUMBERS)
def _launch(out: RaggedLayout, given):
    (rows, columns), held = given.candidate_ids.shape, 1
    delta, requests, history = given.delta, given.requests, given.history
    if delta is not None:
        tokens = (None, *delta)
    else:
        tokens = (history.cached_lens, history.tokens, None, None, requests.cached_lens, requests.request_rows)
        held = history.tokens.shape[1]
    _lay_out_kernel[(rows,)](
        *(out, requests, *tokens),
        *(*with_row_strides(given.candidate_ids), given.candidate_lens),
        *(*with_row_strides(given.candidate_parents, given.slot_table), given.slot_table.shape[1]),
        *(rows, len(out.token_ids) - rows * columns, len(out.plan) - 1, len(out.counters)),
        HELD=held,
        MAX_NEW=given.max_new,
        PAGE_SIZE=given.page_size,
        TILE_TOKENS=BLOCK_M.value // given.group,
        K=columns,
        COLUMNS=next_power_of_2(columns),
        TILE=TILE,
        num_warps=NUM_WARPS,
        **overlapping(),
    )


def lay_out(
    candidate_ids: Tensor,  # int32|int64 [B, K]
    candidate_lens: Tensor,  # int32 [B]
    slot_table: Tensor,  # int32 [R, pages]
    *,
    num_heads: int,
    num_kv_heads: int,
    delta: DeltaTokens | None = None,  # [B]
    requests: StepRequests | None = None,  # [B]
    history: StepHistory | None = None,  # [R]
    max_new: int = 1,  # W
    candidate_parents: Tensor | None = None,  # int32 [B, K]
    page_size: int = 1,
    backend: str = "auto",
) -> RaggedLayout:
    """Lay out the tokens of one value-model forward in ``T = D + B * K`` rows, and plan its attention, on the device.

    The delta tokens are either passed as ``delta``, e.g. prompts, or chosen from the ``history`` of ``requests``; then
    ``D`` is ``B * M``, and ``history.cached_lens`` is updated in place. A request that needs no values in a step waits
    until it needs values, or its history would overflow. The choice depends only on the request, so that its values
    are the same in any batch.

    Tokens beyond the slot table have no slot and are not cached. If lengths violate a condition below, the layout is
    meaningless, but the kernel neither reads nor writes outside its tensors.

    Args:
        candidate_ids: int32 or int64 [B, K]; the candidates of each request from column 0 on. Rows may be strided;
            ``K`` may be 0.
        candidate_lens: int32 [B]; number of candidates of each request, clamped to 0 .. ``K``. A request of ``history``
            without candidates waits if its history has room for ``max_new`` tokens beyond the missing ones.
        slot_table: int32 [R, pages]; token ``p`` of table row ``r`` is in slot
            ``slot_table[r, p // page_size] * page_size + p % page_size``. Rows may be strided.
        num_heads: query heads of the value model.
        num_kv_heads: key/value heads. ``num_heads`` is up to 64 times this number.
        delta: the delta tokens. If ``None``, ``requests`` and ``history`` must be passed.
        requests: result of :func:`begin_step` for ``history``.
        history: history of the requests, with the last M tokens of each sequence.
        max_new: maximum number of new tokens per step of a sequence of ``history``.
        candidate_parents: int32 [B, K]; the earlier column of each candidate's parent. For any other value (-1), the
            candidate follows the delta. If ``None``, all candidates do. Rows may be strided.
        page_size: slots per page.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        The :class:`RaggedLayout`, on the device of ``candidate_ids``.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> def i32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> delta = DeltaTokens(i32(7, 8), i32(0, 1), lens=i32(1, 1), cached_lens=i32(5, 9), table_rows=i32(1, 0))
        >>> candidates, counts = i32((1, 2), (3, -1)), i32(2, 1)  # two requests; one column is padding
        >>> slot_table = i32(range(10, 20), range(70, 80))
        >>> layout = lay_out(candidates, counts, slot_table, num_heads=2, num_kv_heads=1, delta=delta)
        >>> layout.token_ids
        tensor([7, 1, 2, 8, 3, 0])
        >>> layout.slots
        tensor([75, -1, -1, 19, -1, -1])
        >>> layout.candidate_rows
        tensor([[ 1,  2],
                [ 4, -1]])
    """
    operands = (candidate_ids, candidate_lens, slot_table, delta, candidate_parents, requests, history)
    backend, sizes = _SPEC.check(backend, *operands)
    if (delta is None) == (requests is None) or (requests is None) != (history is None):
        given = [name for name, x in (("delta", delta), ("requests", requests), ("history", history)) if x is not None]
        raise ValueError(f"delta must be passed, or requests and history, got {' and '.join(given) or 'neither'}")
    if history is not None:
        if slot_table.shape[0] < sizes["R"] - 1:  # the last history row may belong to dummy requests
            raise ValueError(f"slot_table must have at least {sizes['R'] - 1} rows, got {slot_table.shape[0]}")
        sizes["D"] = sizes["B"] * sizes["M"]
    heads = (("num_heads", num_heads), ("num_kv_heads", num_kv_heads))
    for name, value in (*heads, ("page_size", page_size), ("max_new", max_new)):
        check_int(name, value, 1)
    group = num_heads // num_kv_heads
    if num_heads % num_kv_heads or group > BLOCK_M.value:
        accepted = f"a multiple of num_kv_heads, {num_kv_heads}, up to {BLOCK_M.value} times this number"
        raise ValueError(f"num_heads must be {accepted}, got {num_heads}")
    sizes["T"] = sizes["D"] + sizes["B"] * sizes["K"]
    sizes["P"] = plan_shape(sizes["T"], sizes["B"], group, sizes["pages"] * page_size)[0]
    sizes["C"] = num_counters(sizes["B"], num_kv_heads)
    without = ("parents",) if candidate_parents is None else ()
    layout = empty(RaggedLayout, candidate_ids.device, sizes, without)
    return _launch(backend, layout, *operands, page_size, max_new, group)
