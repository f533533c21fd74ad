"""Work list of :mod:`lenvm_kernels.ops.value_tree_attention`: query tiles and their splits of keys.

:func:`lenvm_kernels.lay_out` writes the plan of a forward, which all layers share. A call without a plan computes one.
"""

import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, overlapping
from lenvm_kernels.ops._device import kernel, wait_for_inputs

# Rows of a query tile: (token, head of the group) pairs. The minimum for sm_90's warp-group matmul (HGMMA).
BLOCK_M = tl.constexpr(64)
# Cached tokens per split. Short splits fill the GPU with few requests, and long splits are better for many requests.
# Splits must not depend on the batch. Measured on an H200, in us with splits of 256, 512 and 1,024: 2,048 cached tokens
# take 17, 20, 29 at B 1 and 80, 63, 50 at B 64; 8,192 take 246, 248, 180 at B 64; 512, which is split only with 256,
# take 14, 16, 16 at B 1, 21, 22, 22 at B 64 and 82, 55, 55 at B 256.
SPLIT_LEN = tl.constexpr(512)
# A remainder of at most this number of tokens does not get another split.
SPLIT_SLACK = tl.constexpr(128)
# Maximum splits of a request. Limits the workspace; a request of 8k tokens still fills 16 programs per key/value head.
MAX_SPLITS = tl.constexpr(16)
# Number of leading tiles of a request that are split. Two contain 1 delta token and 8 candidates even for groups of 8
# heads. With more, a prompt would need a workspace of its size.
SPLIT_TILES = tl.constexpr(2)
# Requests for which the planning kernel sums items at once, and items stored at once.
PLAN_BLOCK = tl.constexpr(256)
# Numbers per plan item, see load_item; 32 bytes in total.
ITEM_SIZE = tl.constexpr(8)


@triton.jit
def num_splits(cached):
    return tl.minimum(tl.maximum(tl.cdiv(cached - SPLIT_SLACK, SPLIT_LEN), 1), MAX_SPLITS)


@triton.jit
def num_items(tokens, cached, TILE_TOKENS: tl.constexpr):
    """Plan items of requests with new and cached tokens: each split of the leading tiles, and each other tile."""
    tiles = tl.cdiv(tokens, TILE_TOKENS)
    return tiles + tl.minimum(tiles, SPLIT_TILES) * (num_splits(cached) - 1)


@triton.jit
def store_items(
    plan_ptr, first_item, most_items, request, table_row, first_row, tokens, delta, cached, TILE_TOKENS: tl.constexpr
):
    """Store the items of a request: all splits of the first tile, all splits of the second, then the other tiles."""
    splits = num_splits(cached)
    split_items = tl.minimum(tl.cdiv(tokens, TILE_TOKENS), SPLIT_TILES) * splits
    items = num_items(tokens, cached, TILE_TOKENS)
    for first in range(0, items, PLAN_BLOCK):
        item = first + tl.arange(0, PLAN_BLOCK)
        is_split = item < split_items
        tile = tl.where(is_split, item // splits, item - split_items + SPLIT_TILES)
        split = tl.where(is_split, item % splits, 0)
        is_item = (item < items) & (first_item + item < most_items)
        item_ptr = plan_ptr + (first_item + item + 1) * ITEM_SIZE
        fields = (request, table_row, first_row, tokens, delta, cached, tile, split)
        for i in tl.static_range(ITEM_SIZE):
            tl.store(item_ptr + i, fields[i], mask=is_item)


@triton.jit
def load_item(plan_ptr, item):
    """Request, its slot table row, its first row of ``q``, its numbers of new, delta and cached tokens, tile, split."""
    item_ptr = plan_ptr + (item + 1) * ITEM_SIZE
    request, table_row, first_row = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    tokens, delta, cached = tl.load(item_ptr + 3), tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    return request, table_row, first_row, tokens, delta, cached, tl.load(item_ptr + 6), tl.load(item_ptr + 7)


@triton.jit
def _new_and_cached(request, q_offsets_ptr, cached_lens_ptr, num_requests, max_len):
    """(new tokens, cached tokens) of requests, 0 beyond the last one; at most the capacity of the slot table."""
    exists = request < num_requests
    start = tl.load(q_offsets_ptr + request, mask=exists, other=0)
    end = tl.load(q_offsets_ptr + request + 1, mask=exists, other=0)
    return end - start, tl.minimum(tl.load(cached_lens_ptr + request, mask=exists, other=0), max_len)


@kernel(specialized="plan_ptr")
def _plan_attention_kernel(
    plan_ptr,  # int32 [1 + most_items, ITEM_SIZE]
    table_rows_ptr,  # int32|int64 [B]
    cached_lens_ptr,  # int32 [B]
    q_offsets_ptr,  # int32 [B + 1]
    candidate_lens_ptr,  # int32 [B]
    num_requests,
    most_items,
    max_len,
    TILE_TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0)
    block = tl.arange(0, PLAN_BLOCK)
    first_item, end_item = 0, 0
    for first_request in range(0, num_requests, PLAN_BLOCK):
        other = first_request + block
        tokens, cached = _new_and_cached(other, q_offsets_ptr, cached_lens_ptr, num_requests, max_len)
        items = num_items(tokens, cached, TILE_TOKENS)
        end_item += tl.sum(items)
        first_item += tl.sum(tl.where(other < request, items, 0))
    tl.store(plan_ptr, tl.minimum(end_item, most_items), mask=request == 0)

    table_row = tl.load(table_rows_ptr + request).to(tl.int32)
    first_row = tl.load(q_offsets_ptr + request)
    tokens, cached = _new_and_cached(request, q_offsets_ptr, cached_lens_ptr, num_requests, max_len)
    delta = tokens - tl.load(candidate_lens_ptr + request)
    store_items(plan_ptr, first_item, most_items, request, table_row, first_row, tokens, delta, cached, TILE_TOKENS)


def most_splits(max_len: int) -> int:
    """Maximum splits of a request with up to ``max_len`` cached tokens."""
    return min(MAX_SPLITS.value, max(1, ceil_div(max_len - SPLIT_SLACK.value, SPLIT_LEN.value)))


def workspace_shape(total_tokens: int, num_requests: int, group: int, max_len: int) -> tuple[int, int]:
    """(splits, tokens W) of the partial results, fp32 ``[splits, Hkv, W, group, D + 1]``. W is 0 for a single split.

    ``group`` is ``Hq / Hkv``; ``max_len`` is the capacity in tokens of a row of the slot table."""
    splits = most_splits(max_len)
    split_tokens = SPLIT_TILES.value * (BLOCK_M.value // group)
    return splits, min(total_tokens, num_requests * split_tokens) if splits > 1 else 0


def plan_shape(total_tokens: int, num_requests: int, group: int, max_len: int) -> tuple[int, int]:
    """Shape of the int32 plan: one header row, and one row per possible item."""
    tiles = min(total_tokens, total_tokens // (BLOCK_M.value // group) + num_requests) if num_requests else 0
    split_tiles = min(tiles, SPLIT_TILES.value * num_requests)
    return 1 + tiles + split_tiles * (most_splits(max_len) - 1), ITEM_SIZE.value


def num_counters(num_requests: int, kv_heads: int) -> int:
    """Minimum size of ``counters`` of :func:`value_tree_attention`."""
    return num_requests * SPLIT_TILES.value * kv_heads


def make_plan(
    table_rows: Tensor,  # int32|int64 [B]
    cached_lens: Tensor,  # int32 [B]
    q_offsets: Tensor,  # int32 [B + 1]
    candidate_lens: Tensor,  # int32 [B]
    *,
    total_tokens: int,
    group: int,
    max_len: int,
) -> Tensor:  # int32 [1 + items, 8]
    """The plan of a call of :func:`value_tree_attention`; B is at least 1. Rows beyond the items are arbitrary."""
    requests = len(table_rows)
    plan = q_offsets.new_empty(plan_shape(total_tokens, requests, group, max_len))
    arguments = (plan, table_rows, cached_lens, q_offsets, candidate_lens, requests, len(plan) - 1, max_len)
    _plan_attention_kernel[(requests,)](*arguments, TILE_TOKENS=BLOCK_M.value // group, **overlapping())
    return plan
