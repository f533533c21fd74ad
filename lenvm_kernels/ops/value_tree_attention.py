"""Value-tree attention: every delta token and every candidate of every request, in one ragged launch.

Request ``i`` brings ``d`` delta tokens and then ``n`` candidates, after ``C`` cached tokens. Its token ``j`` attends to
all cached tokens, to the new tokens ``t <= j`` with ``t < d``, and to itself:

    out[j] = sum_t softmax_t(sm_scale * q[j] . k[t]) v[t]

The mask follows from ``C``, ``d`` and ``n`` and is never built (tree attention of LenVM, arXiv 2604.27039). Where each
candidate names its parent, the sum has the candidate's ancestors too: a tree of drafts, as speculative decoding scores.

A query tile packs neighbouring tokens of one request with all query heads that share a key/value head, so that cached
keys and values are read once per key/value head and tile. The cached prefix is split over programs and merged in a
fixed order, as in flash-decoding. Splits, tiles and block sizes follow from a row's own request and from its place in
it, never from the batch: the same request gives the same bits in any batch.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    FLOATS,
    INT_DTYPES,
    architecture,
    ceil_div,
    check_tensor,
    next_power_of_2,
    resolve_backend,
)
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference import value_tree_attention as reference

# Rows of a query tile: (token, head of the group) pairs. The least for which sm_90 uses its warp-group matmul (HGMMA).
BLOCK_M = tl.constexpr(64)
# Cached tokens a split handles at least: enough to amortise a program's start and its part of the merge.
SPLIT_LEN = tl.constexpr(512)
# Splits a request has at most. Bounds the workspace; one request of 8k tokens still fills 16 programs a key/value head.
MAX_SPLITS = tl.constexpr(16)
# Only the first tiles of a request are split: two hold delta 1 and 8 candidates even for groups of 8 heads. Requests
# with more tokens have more tiles to run side by side, and would need a workspace as large as a prompt.
SPLIT_TILES = tl.constexpr(2)
# Requests examined at once when a program looks for its work: one pass up to this batch size.
SEARCH_BLOCK = tl.constexpr(256)
# Programs of a launch. The slot table allows far more splits than most requests have, and a launch sized for all of
# them would spend longer on programs without work than on attention. This is about four times what 132 processors hold.
MAX_PROGRAMS = 1024

MAX_HEAD_DIM = 256
# Offsets within a query tile are 32-bit.
MAX_STRIDE = (2**31 - 1) // BLOCK_M.value


@triton.jit
def _num_splits(cached):
    return tl.minimum(tl.maximum(tl.cdiv(cached, SPLIT_LEN), 1), MAX_SPLITS)


@triton.jit
def _count_items(request, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS: tl.constexpr):
    """Work items of some requests: one for each split of their first SPLIT_TILES tiles, one for each other tile."""
    exists = request < num_requests
    start = tl.load(q_offsets_ptr + request, mask=exists, other=0)
    end = tl.load(q_offsets_ptr + request + 1, mask=exists, other=0)
    splits = _num_splits(tl.load(cached_lens_ptr + request, mask=exists, other=0))
    tiles = tl.cdiv(end - start, TOKENS)
    return tiles + tl.minimum(tiles, SPLIT_TILES) * (splits - 1)


@triton.jit
def _count_all_items(q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS: tl.constexpr):
    items = 0
    for first_request in range(0, num_requests, SEARCH_BLOCK):
        request = first_request + tl.arange(0, SEARCH_BLOCK)
        items += tl.sum(_count_items(request, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS))
    return items


@triton.jit
def _find_item(item, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS: tl.constexpr):
    """The request of a work item, and the item's number in it. Items are numbered request after request."""
    items = 0
    found = 0
    first_item = 0
    for first_request in range(0, num_requests, SEARCH_BLOCK):
        request = first_request + tl.arange(0, SEARCH_BLOCK)
        end_item = items + tl.cumsum(_count_items(request, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS))
        is_before = (request < num_requests) & (end_item <= item)
        found += tl.sum(is_before.to(tl.int32))
        first_item = tl.maximum(first_item, tl.max(tl.where(is_before, end_item, 0)))
        items = tl.max(end_item)
    return found, item - first_item


@triton.jit
def _find_workspace_row(workspace_row, q_offsets_ptr, num_requests, SPLIT_TOKENS: tl.constexpr):
    """The request of a workspace row. Request ``i`` owns rows from ``min(q_offsets[i], i * SPLIT_TOKENS)`` on: room for
    the ``min(tokens, SPLIT_TOKENS)`` that can be split, in no more rows than there are tokens."""
    found = 0
    for first_request in range(0, num_requests, SEARCH_BLOCK):
        request = first_request + tl.arange(0, SEARCH_BLOCK)
        exists = request < num_requests
        first_row = tl.minimum(tl.load(q_offsets_ptr + request, mask=exists, other=0), request * SPLIT_TOKENS)
        found += tl.sum((exists & (first_row <= workspace_row)).to(tl.int32))
    return found - 1


@triton.jit
def _attend(q, k, v, visible, scale_log2, running_max, running_sum, acc):
    """One step of the online softmax: ``k`` and ``v`` [BLOCK_N, BLOCK_D], ``visible`` [1 | BLOCK_M, BLOCK_N].

    Every row sees a key in the first block it meets (a cached token, or delta token 0) or starts from its own, so its
    maximum is finite from then on and no difference of infinities can arise."""
    scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(running_max - new_max)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_max, running_sum, acc


@triton.jit
def _parent_row(row, parents_ptr, first_candidate_row):
    """Rows of the parents of candidates, -1 for none; row -1 has none either. Whatever the pointer says, a parent is an
    earlier candidate of the same request: every walk ends, and none leaves its request."""
    parent = tl.load(parents_ptr + row, mask=row >= 0, other=-1)
    return tl.where((parent >= first_candidate_row) & (parent < row), parent, -1)


class _Tensors(NamedTuple):
    """What both kernels read and write, but for the rows of the slot table."""

    out: Any  # [T, Hq, D]
    q: Any  # [T, Hq, D]
    k_new: Any  # [T, Hkv, D]
    v_new: Any  # [T, Hkv, D]
    k_cache: Any  # [S, Hkv, D]
    v_cache: Any  # [S, Hkv, D]
    slot_table: Any  # int32 [R, max pages]
    cached_lens: Any  # int32 [B]
    q_offsets: Any  # int32 [B + 1]
    candidate_lens: Any  # int32 [B]
    parents: Any  # int32 [T], or None
    partial_out: Any  # fp32 [max_splits, Hkv, W, Hq / Hkv, D]
    partial_lse: Any  # fp32 [max_splits, Hkv, W, Hq / Hkv], base 2


class _Strides(NamedTuple):
    """Of the tensors' first two dimensions."""

    out_token: int
    out_head: int
    q_token: int
    q_head: int
    k_new_token: int
    k_new_head: int
    v_new_token: int
    v_new_head: int
    k_cache_slot: int
    k_cache_head: int
    v_cache_slot: int
    v_cache_head: int
    table_row: int


@triton.jit(
    do_not_specialize=["num_requests", "workspace_rows"],
    do_not_specialize_on_alignment=["table_rows_ptr"],  # an engine's, which may be a slice
)
def _value_tree_attention_kernel(
    ptr,  # _Tensors
    stride,  # _Strides
    table_rows_ptr,  # int32|int64 [B]
    num_requests,
    workspace_rows,  # W
    scale_log2,  # sm_scale * log2(e): the softmax runs on exp2
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    k_new_ptr = ptr.k_new + kv_head.to(tl.int64) * stride.k_new_head
    v_new_ptr = ptr.v_new + kv_head.to(tl.int64) * stride.v_new_head
    k_cache_ptr = ptr.k_cache + kv_head.to(tl.int64) * stride.k_cache_head
    v_cache_ptr = ptr.v_cache + kv_head.to(tl.int64) * stride.v_cache_head
    first_head = (kv_head * GROUP).to(tl.int64)

    # Most programs take one item or none. Nothing is worth keeping from one item to the next: registers are scarce.
    num_items = _count_all_items(ptr.q_offsets, ptr.cached_lens, num_requests, TOKENS)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        request, item_of_request = _find_item(item, ptr.q_offsets, ptr.cached_lens, num_requests, TOKENS)
        first_row = tl.load(ptr.q_offsets + request)
        tokens = tl.load(ptr.q_offsets + request + 1) - first_row
        delta = tokens - tl.load(ptr.candidate_lens + request)
        cached = tl.load(ptr.cached_lens + request)

        # Items of a request: all splits of its first tile, of its second, ..., then the tiles that are not split.
        splits = _num_splits(cached)
        split_items = tl.minimum(tl.cdiv(tokens, TOKENS), SPLIT_TILES) * splits
        is_split = item_of_request < split_items
        tile = tl.where(is_split, item_of_request // splits, item_of_request - split_items + SPLIT_TILES)
        split = tl.where(is_split, item_of_request % splits, 0)
        splits = tl.where(is_split, splits, 1)

        # The tile's rows. Offsets within a tile are 32-bit, which spares registers; the tile's own offset is 64-bit.
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        is_dim = d < HEAD_DIM
        tile_token = m // GROUP  # [BLOCK_M]
        tile_head = m % GROUP  # [BLOCK_M]
        first_token = tile * TOKENS
        token = first_token + tile_token  # [BLOCK_M]
        row = first_row + token
        is_row = m < tl.minimum(tokens - first_token, TOKENS) * GROUP
        tile_row = (first_row + first_token).to(tl.int64)
        q_tile_ptr = ptr.q + tile_row * stride.q_token + first_head * stride.q_head
        q = tl.load(
            q_tile_ptr + (tile_token * stride.q_token + tile_head * stride.q_head)[:, None] + d[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )

        # A candidate's own key and value open its softmax, outside of the matmuls: its bits then cannot depend on the
        # candidates beside it, and no key block is spent on the diagonal. The last split does this and the delta.
        is_last_split = split == splits - 1
        is_self = token >= tl.where(is_last_split, delta, tokens + BLOCK_M)  # [BLOCK_M]
        self_mask = (is_self & is_row)[:, None] & is_dim[None, :]
        k_self = tl.load(
            k_new_ptr + (row.to(tl.int64) * stride.k_new_token)[:, None] + d[None, :],
            mask=self_mask,
            other=0.0,
        )
        v_self = tl.load(
            v_new_ptr + (row.to(tl.int64) * stride.v_new_token)[:, None] + d[None, :],
            mask=self_mask,
            other=0.0,
        )
        self_score = tl.sum(q.to(tl.float32) * k_self.to(tl.float32), axis=1) * scale_log2
        running_max = tl.where(is_self, self_score, float("-inf"))  # [BLOCK_M]
        running_sum = tl.where(is_self, 1.0, 0.0)  # [BLOCK_M]
        acc = v_self.to(tl.float32)  # [BLOCK_M, BLOCK_D]

        # Ancestors follow one by one, outside of the matmuls for the same reason. The rows of the tile climb together;
        # those without a further ancestor wait, to the bit as they are. Delta tokens wait with a finite maximum (0):
        # no difference of infinities can arise.
        if ptr.parents is not None:
            first_candidate_row = first_row + delta
            ancestor = _parent_row(tl.where(is_self & is_row, row, -1), ptr.parents, first_candidate_row)  # [BLOCK_M]
            running_max = self_score
            while tl.max(ancestor, axis=0) >= 0:
                is_ancestor = ancestor >= 0
                ancestor_mask = is_ancestor[:, None] & is_dim[None, :]
                k = tl.load(
                    k_new_ptr + (ancestor.to(tl.int64) * stride.k_new_token)[:, None] + d[None, :],
                    mask=ancestor_mask,
                    other=0.0,
                )
                v = tl.load(
                    v_new_ptr + (ancestor.to(tl.int64) * stride.v_new_token)[:, None] + d[None, :],
                    mask=ancestor_mask,
                    other=0.0,
                )
                score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
                score = tl.where(is_ancestor, score, float("-inf"))
                new_max = tl.maximum(running_max, score)
                weight = tl.exp2(score - new_max)
                decay = tl.exp2(running_max - new_max)
                running_max = new_max
                running_sum = running_sum * decay + weight
                acc = tl.where(is_ancestor[:, None], acc * decay[:, None] + weight[:, None] * v.to(tl.float32), acc)
                ancestor = _parent_row(ancestor, ptr.parents, first_candidate_row)
            running_max = tl.where(is_self, running_max, float("-inf"))

        # Cached tokens of this split. Whole blocks, so that every split but the last reads no partial one.
        split_len = tl.cdiv(tl.cdiv(cached, splits), BLOCK_N) * BLOCK_N
        end_key = tl.minimum((split + 1) * split_len, cached)
        pages_ptr = ptr.slot_table + tl.load(table_rows_ptr + request).to(tl.int64) * stride.table_row
        for first_key in range(split * split_len, end_key, BLOCK_N):
            key = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            is_key = key < end_key
            page = tl.load(pages_ptr + key // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
            slot = page * PAGE_SIZE + key % PAGE_SIZE
            kv_mask = is_key[:, None] & is_dim[None, :]
            k = tl.load(k_cache_ptr + (slot * stride.k_cache_slot)[:, None] + d[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_cache_ptr + (slot * stride.v_cache_slot)[:, None] + d[None, :], mask=kv_mask, other=0.0)
            running_max, running_sum, acc = _attend(q, k, v, is_key[None, :], scale_log2, running_max, running_sum, acc)

        # Delta tokens, up to the last that the tile's last row may see.
        end_key = tl.where(is_last_split, tl.minimum(delta, first_token + TOKENS), 0)
        row_end_key = tl.minimum(delta, token + 1)  # [BLOCK_M]
        for first_key in range(0, end_key, BLOCK_N):
            key = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            kv_mask = (key < end_key)[:, None] & is_dim[None, :]
            new_row = (first_row + key).to(tl.int64)
            k = tl.load(k_new_ptr + (new_row * stride.k_new_token)[:, None] + d[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_new_ptr + (new_row * stride.v_new_token)[:, None] + d[None, :], mask=kv_mask, other=0.0)
            running_max, running_sum, acc = _attend(
                q, k, v, key[None, :] < row_end_key[:, None], scale_log2, running_max, running_sum, acc
            )

        acc = acc / running_sum[:, None]
        store_mask = is_row[:, None] & is_dim[None, :]
        if splits == 1:
            out_tile_ptr = ptr.out + tile_row * stride.out_token + first_head * stride.out_head
            out_offset = tile_token * stride.out_token + tile_head * stride.out_head
            out = acc.to(ptr.out.dtype.element_ty)
            tl.store(out_tile_ptr + out_offset[:, None] + d[None, :], out, mask=store_mask)
        else:
            workspace_row = tl.minimum(first_row, request * (SPLIT_TILES * TOKENS)) + first_token
            first_partial = (
                (split * tl.num_programs(1) + kv_head).to(tl.int64) * workspace_rows + workspace_row
            ) * GROUP
            partial_tile_ptr = ptr.partial_out + first_partial * HEAD_DIM
            tl.store(partial_tile_ptr + (m * HEAD_DIM)[:, None] + d[None, :], acc, mask=store_mask)
            tl.store(ptr.partial_lse + first_partial + m, running_max + tl.log2(running_sum), mask=is_row)


@triton.jit(do_not_specialize=["num_requests", "workspace_rows"])
def _merge_splits_kernel(
    ptr,  # _Tensors
    stride,  # _Strides
    num_requests,
    workspace_rows,  # W
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    workspace_row = tl.program_id(0)
    head = tl.program_id(1)
    q_heads = tl.num_programs(1)

    request = _find_workspace_row(workspace_row, ptr.q_offsets, num_requests, SPLIT_TOKENS)
    first_row = tl.load(ptr.q_offsets + request)
    tokens = tl.load(ptr.q_offsets + request + 1) - first_row
    token = workspace_row - tl.minimum(first_row, request * SPLIT_TOKENS)
    splits = _num_splits(tl.load(ptr.cached_lens + request))
    if (token >= tl.minimum(tokens, SPLIT_TOKENS)) | (splits == 1):
        return

    # Always MAX_SPLITS wide: the order of the sum must not depend on the width of the slot table.
    s = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, BLOCK_D)
    is_split = s < splits
    kv_head = head // GROUP
    partial = (
        s.to(tl.int64) * (q_heads * workspace_rows) + (kv_head * workspace_rows + workspace_row) * GROUP + head % GROUP
    )
    lse = tl.load(ptr.partial_lse + partial, mask=is_split, other=float("-inf"))  # [MAX_SPLITS]
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    partial_out = tl.load(
        ptr.partial_out + (partial * HEAD_DIM)[:, None] + d[None, :],
        mask=is_split[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [MAX_SPLITS, BLOCK_D]
    out = tl.sum(partial_out * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    out_row = ptr.out + (first_row + token).to(tl.int64) * stride.out_token + head.to(tl.int64) * stride.out_head
    tl.store(out_row + d, out.to(ptr.out.dtype.element_ty), mask=d < HEAD_DIM)


def _launch_config(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks, warps and pipeline depth. In bf16 and fp16 nothing spills on the GPUs of :mod:`bench.codegen`: at D 128 a
    block of 64 keys would, on sm_80 and sm_100, and would ask a gfx942 for more than its 64 KB; sm_100 spills with a
    third stage, too. On sm_90 shared memory and registers hold two programs a processor up to D 128, each with 32 KB
    of keys and values on their way: about what 4.8 TB/s need. fp32 and D 256 with parents spill at most a few bytes."""
    block_d = max(16, next_power_of_2(head_dim))
    if dtype == torch.float32:  # no tensor cores in full fp32: operands live in registers, more so the wider the head
        return dict(BLOCK_D=block_d, BLOCK_N=16, num_warps=max(8, block_d // 8), num_stages=2)
    return dict(
        BLOCK_D=block_d,
        BLOCK_N=64 if block_d <= 64 else 32,
        num_warps=4 if block_d <= 128 else 8,
        num_stages=2 if architecture() == "sm_100" else 3,
    )


def workspace_shape(total_tokens: int, num_requests: int, group: int, max_len: int) -> tuple[int, int]:
    """(splits, tokens W) of the partial results, fp32 ``[splits, Hkv, W, group, D + 1]``; W is 0 where one split does.

    ``group`` is ``Hq / Hkv``, ``max_len`` the tokens that the slot table has room for in a row."""
    splits = min(MAX_SPLITS.value, max(1, ceil_div(max_len, SPLIT_LEN.value)))
    split_tokens = SPLIT_TILES.value * (BLOCK_M.value // group)
    return splits, min(total_tokens, num_requests * split_tokens) if splits > 1 else 0


def _run_reference(out, *operands) -> None:
    *tensors, parents, page_size, sm_scale = operands
    reference.value_tree_attention(*tensors, parents=parents, page_size=page_size, sm_scale=sm_scale, out=out)


@operator(mutates=["out"], reference=_run_reference)
def _launch(
    out: Tensor,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    table_rows: Tensor,
    cached_lens: Tensor,
    q_offsets: Tensor,
    candidate_lens: Tensor,
    parents: Tensor | None,
    page_size: int,
    sm_scale: float,
) -> None:
    """Attend, then merge the splits. Grids and workspace follow from tensor shapes alone."""
    total_tokens, q_heads, head_dim = q.shape
    kv_heads, num_requests = k_new.shape[1], table_rows.shape[0]
    if total_tokens == 0 or num_requests == 0:
        return
    group = q_heads // kv_heads
    tile_tokens = BLOCK_M.value // group
    split_tokens = SPLIT_TILES.value * tile_tokens
    max_splits, workspace_rows = workspace_shape(total_tokens, num_requests, group, slot_table.shape[1] * page_size)
    max_items = (total_tokens // tile_tokens + num_requests) * max_splits
    partial_out = q.new_empty(max_splits, kv_heads, workspace_rows, group, head_dim, dtype=torch.float32)
    partial_lse = q.new_empty(max_splits, kv_heads, workspace_rows, group, dtype=torch.float32)
    config = _launch_config(head_dim, q.dtype)
    strided = (out, q, k_new, v_new, k_cache, v_cache)
    tensors = _Tensors(*strided, slot_table, cached_lens, q_offsets, candidate_lens, parents, partial_out, partial_lse)
    strides = _Strides._make((*(s for x in strided for s in x.stride()[:2]), slot_table.stride(0)))

    _value_tree_attention_kernel[(min(max_items, max(1, MAX_PROGRAMS // kv_heads)), kv_heads)](
        tensors,
        strides,
        table_rows,
        num_requests,
        workspace_rows,
        sm_scale * math.log2(math.e),
        PAGE_SIZE=page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        **config,
    )
    if max_splits > 1:
        _merge_splits_kernel[(workspace_rows, q_heads)](
            tensors,
            strides,
            num_requests,
            workspace_rows,
            GROUP=group,
            HEAD_DIM=head_dim,
            SPLIT_TOKENS=split_tokens,
            BLOCK_D=config["BLOCK_D"],
            num_warps=4,
        )


def value_tree_attention(
    q: Tensor,  # [T, Hq, D]
    k_new: Tensor,  # [T, Hkv, D]
    v_new: Tensor,  # [T, Hkv, D]
    k_cache: Tensor,  # [S, Hkv, D]
    v_cache: Tensor,  # [S, Hkv, D]
    slot_table: Tensor,  # int32 [R, max pages]
    table_rows: Tensor,  # int32|int64 [B]
    cached_lens: Tensor,  # int32 [B]
    q_offsets: Tensor,  # int32 [B + 1]
    candidate_lens: Tensor,  # int32 [B]
    *,
    parents: Tensor | None = None,  # int32 [T]
    page_size: int = 1,
    sm_scale: float | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # [T, Hq, D], as q
    """Attention of delta tokens and candidates over a cached prefix and themselves, for all requests at once.

    The new tokens of request ``i`` are rows ``q_offsets[i]`` to ``q_offsets[i + 1] - 1`` of ``q``, ``k_new`` and
    ``v_new``: first the delta tokens (any number, a whole prompt included), then ``candidate_lens[i]`` candidates, all
    at the position after the last delta token. A delta token attends to the cached tokens and causally to the delta
    tokens; a candidate attends to the cached tokens, all delta tokens and itself.

    With ``parents`` the candidates are a tree of any shape, as in speculative decoding: a candidate attends to its
    ancestors too, and is at the position after its parent. The time grows with the depth of the tree.

    Cached token ``t`` of request ``i`` is in slot ``slot_table[table_rows[i], t // page_size] * page_size + t %
    page_size``. Slots and table entries past ``cached_lens[i]`` are never read. Nothing is written to the cache.

    Nothing synchronises with the host, and launch and workspace sizes depend on tensor shapes only (CUDA graphs can
    capture it). A request's result does not depend, to the bit, on the other requests of the batch, nor a candidate's
    on the candidates that are not its ancestors.

    Args:
        q: queries, fp32, bf16 or fp16 (fp64 too with the reference).
        k_new, v_new: keys and values of the new tokens, same dtype. ``Hq`` is a multiple of ``Hkv``.
        k_cache, v_cache: keys and values of cached tokens by slot, same dtype.
        slot_table: a row of pages for each request slot of the engine; with ``page_size=1`` a row of slots.
        table_rows: the row of ``slot_table`` that belongs to each request.
        cached_lens: cached tokens of each request (0 is allowed), at most ``max pages * page_size``.
        q_offsets: first new row of each request, starting at 0, and their end. Rows of ``out`` from ``q_offsets[B]``
            on (padding of a captured graph) are left untouched.
        candidate_lens: candidates among the new tokens of each request.
        parents: row of ``q`` of each candidate's parent; ``None``: no candidate has one. A value that is not the row of
            an earlier candidate of the same request (-1, say) makes a candidate that follows the delta directly. Values
            of delta tokens and of padding are ignored.
        page_size: slots in a page.
        sm_scale: factor on the scores; ``None`` is ``1 / sqrt(D)``.
        out: result tensor to reuse; ``None`` allocates one (whose rows from ``q_offsets[B]`` on are arbitrary).
        backend: ``auto``, ``triton`` (``D`` up to 256, up to 64 query heads per key/value head, strides of ``q`` and
            ``out`` below 2**25) or ``reference``.

    Returns:
        ``out``, ``[T, Hq, D]`` in the dtype of ``q``.

    Raises:
        ValueError, TypeError: an argument is malformed; the message names it, what is accepted, and what came. Contents
            of ``slot_table`` and of the lengths are not checked: that would need a host synchronisation.

    Example:
        >>> cache = torch.randn(8, 1, 16)                              # 8 slots, 1 key/value head of 16
        >>> q, new = torch.randn(3, 2, 16), torch.randn(3, 1, 16)      # 1 delta token, then 2 candidates
        >>> table = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32)    # 3 cached tokens, in slots 5, 2 and 7
        >>> row, cached, offsets, candidates = (torch.tensor(x, dtype=torch.int32) for x in ([0], [3], [0, 3], [2]))
        >>> value_tree_attention(q, new, new, cache, cache, table, row, cached, offsets, candidates).shape
        torch.Size([3, 2, 16])

        The second candidate as a child of the first, which is row 1:

        >>> parents = torch.tensor([-1, -1, 1], dtype=torch.int32)
        >>> lens = (table, row, cached, offsets, candidates)
        >>> value_tree_attention(q, new, new, cache, cache, *lens, parents=parents).shape
        torch.Size([3, 2, 16])
    """
    backend = resolve_backend(backend, q)
    check_tensor("q", q, dtypes=FLOATS[backend], shape=(None, None, None))
    total_tokens, q_heads, head_dim = q.shape
    device = q.device

    check_tensor("k_new", k_new, dtypes=q.dtype, shape=(total_tokens, None, head_dim), device=device)
    kv_heads = k_new.shape[1]
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"q must have a multiple of the heads of k_new, got {q_heads} query and {kv_heads} key/value heads"
        )
    check_tensor("v_new", v_new, dtypes=q.dtype, shape=(total_tokens, kv_heads, head_dim), device=device)
    check_tensor("k_cache", k_cache, dtypes=q.dtype, shape=(None, kv_heads, head_dim), device=device)
    check_tensor("v_cache", v_cache, dtypes=q.dtype, shape=(k_cache.shape[0], kv_heads, head_dim), device=device)
    check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=(None, None), device=device)
    check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(None,), device=device)
    num_requests = table_rows.shape[0]
    check_tensor("cached_lens", cached_lens, dtypes=torch.int32, shape=(num_requests,), device=device)
    check_tensor("q_offsets", q_offsets, dtypes=torch.int32, shape=(num_requests + 1,), device=device)
    check_tensor("candidate_lens", candidate_lens, dtypes=torch.int32, shape=(num_requests,), device=device)
    if parents is not None:
        check_tensor("parents", parents, dtypes=torch.int32, shape=(total_tokens,), device=device)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
    check_tensor("out", out, dtypes=q.dtype, shape=q.shape, device=device)

    if isinstance(page_size, bool) or not isinstance(page_size, int):
        raise TypeError(f"page_size must be an int of at least 1, got {type(page_size).__name__}")
    if page_size < 1:
        raise ValueError(f"page_size must be an int of at least 1, got {page_size}")
    if head_dim < 1:
        raise ValueError(f"q must have a last dimension of at least 1, got {head_dim}")
    if sm_scale is None:
        sm_scale = head_dim**-0.5
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
        raise TypeError(f"sm_scale must be a finite number or None, got {type(sm_scale).__name__}")
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale must be a finite number or None, got {sm_scale}")
    if backend == "triton" and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"q must have a last dimension of 1 to {MAX_HEAD_DIM} for backend 'triton', got {head_dim}")
    if backend == "triton" and q_heads // kv_heads > BLOCK_M.value:
        raise ValueError(
            f"q must have at most {BLOCK_M.value} heads per head of k_new for backend 'triton', "
            f"got {q_heads // kv_heads}"
        )
    for name, x in (("q", q), ("out", out)):
        if backend == "triton" and max(x.stride()) > MAX_STRIDE:
            raise ValueError(f"{name} must have strides up to {MAX_STRIDE} for backend 'triton', got {x.stride()}")

    requests = (slot_table, table_rows, cached_lens, q_offsets, candidate_lens)
    options = (parents, page_size, float(sm_scale))
    _launch(backend, out, q, k_new, v_new, k_cache, v_cache, *requests, *options)
    return out
