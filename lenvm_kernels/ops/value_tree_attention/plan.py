"""Work list of :mod:`lenvm_kernels.ops.value_tree_attention`: query tiles, and the splits of keys for each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, check_int, overlapping
from lenvm_kernels.ops._device import wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.reference import value_tree_attention as reference

# Rows of a query tile: (token, head of the group) pairs. The minimum for sm_90's warp-group matmul (HGMMA).
BLOCK_M = tl.constexpr(64)
# Cached tokens per split. Short splits are better for few requests, because they fill the GPU, and long splits for
# many: the partial results of a split are 18 KB, written and read, next to 512 bytes of keys and values per cached
# token (2 key/value heads of 128, 6 new tokens). Splits must not depend on the batch. Measured on an H200, in us with
# splits of 256, 512 and 1,024: 2,048 cached tokens take 17, 20, 29 at B 1 and 80, 63, 50 at B 64; 8,192 take 246, 248,
# 180 at B 64; 512, which only 256 splits, take 14, 16, 16 at B 1, 21, 22, 22 at B 64 and 82, 55, 55 at B 256.
SPLIT_LEN = tl.constexpr(512)
# A remainder of at most this many tokens does not get another split: reading that many keys takes as long as a merge.
SPLIT_SLACK = tl.constexpr(128)
# Maximum splits of a request. Bounds the workspace; a request of 8k tokens still fills 16 programs per key/value head.
MAX_SPLITS = tl.constexpr(16)
# Number of leading tiles of a request that are split. Two hold 1 delta token and 8 candidates even for groups of 8
# heads. Requests with more tokens have more tiles to run in parallel, and would need a workspace as large as a prompt.
SPLIT_TILES = tl.constexpr(2)
# Requests whose items are summed at once, and items written at once, by the planning kernel.
PLAN_BLOCK = tl.constexpr(256)
# Numbers per plan item, see _load_item; 32 bytes.
ITEM_SIZE = tl.constexpr(8)


@triton.jit
def _num_splits(cached):
    return tl.minimum(tl.maximum(tl.cdiv(cached - SPLIT_SLACK, SPLIT_LEN), 1), MAX_SPLITS)


@triton.jit
def _count_items(request, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS: tl.constexpr):
    """(tiles, splits, items) of requests: one item per split of the leading tiles, and one for each other tile."""
    exists = request < num_requests
    start = tl.load(q_offsets_ptr + request, mask=exists, other=0)
    end = tl.load(q_offsets_ptr + request + 1, mask=exists, other=0)
    splits = _num_splits(tl.load(cached_lens_ptr + request, mask=exists, other=0))
    tiles = tl.cdiv(end - start, TOKENS)
    return tiles, splits, tiles + tl.minimum(tiles, SPLIT_TILES) * (splits - 1)


# Callers pass slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["num_requests", "most_items"],
    do_not_specialize_on_alignment=["table_rows_ptr", "cached_lens_ptr", "q_offsets_ptr", "candidate_lens_ptr"],
)
def _plan_attention_kernel(
    plan_ptr,  # int32 [1 + most_items, ITEM_SIZE]
    table_rows_ptr,  # int32|int64 [B]
    cached_lens_ptr,  # int32 [B]
    q_offsets_ptr,  # int32 [B + 1]
    candidate_lens_ptr,  # int32 [B]
    num_requests,
    most_items,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0)
    block = tl.arange(0, PLAN_BLOCK)
    first_item, num_items = 0, 0
    for first_request in range(0, num_requests, PLAN_BLOCK):
        other = first_request + block
        _, _, items = _count_items(other, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS)
        num_items += tl.sum(items)
        first_item += tl.sum(tl.where(other < request, items, 0))

    tl.store(plan_ptr, tl.minimum(num_items, most_items), mask=request == 0)

    table_row = tl.load(table_rows_ptr + request).to(tl.int32)
    first_row = tl.load(q_offsets_ptr + request)
    tokens = tl.load(q_offsets_ptr + request + 1) - first_row
    delta = tokens - tl.load(candidate_lens_ptr + request)
    cached = tl.load(cached_lens_ptr + request)
    tiles, splits, items = _count_items(request, q_offsets_ptr, cached_lens_ptr, num_requests, TOKENS)
    # All splits of the first tile, then of the second, ..., then the tiles that are not split.
    split_items = tl.minimum(tiles, SPLIT_TILES) * splits
    for first in range(0, items, PLAN_BLOCK):
        item = first + block
        is_split = item < split_items
        tile = tl.where(is_split, item // splits, item - split_items + SPLIT_TILES)
        split = tl.where(is_split, item % splits, 0)
        is_item = (item < items) & (first_item + item < most_items)
        item_ptr = plan_ptr + (first_item + item + 1) * ITEM_SIZE
        tl.store(item_ptr, request, mask=is_item)
        tl.store(item_ptr + 1, table_row, mask=is_item)
        tl.store(item_ptr + 2, first_row, mask=is_item)
        tl.store(item_ptr + 3, tokens, mask=is_item)
        tl.store(item_ptr + 4, delta, mask=is_item)
        tl.store(item_ptr + 5, cached, mask=is_item)
        tl.store(item_ptr + 6, tile, mask=is_item)
        tl.store(item_ptr + 7, split, mask=is_item)


@triton.jit
def _load_item(plan_ptr, item):
    """Request, its slot table row, its first row of ``q``, its numbers of new, delta and cached tokens, tile, split."""
    item_ptr = plan_ptr + (item + 1) * ITEM_SIZE
    request, table_row, first_row = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    tokens, delta, cached = tl.load(item_ptr + 3), tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    return request, table_row, first_row, tokens, delta, cached, tl.load(item_ptr + 6), tl.load(item_ptr + 7)


def _most_splits(max_len: int) -> int:
    """Maximum splits of a request with up to ``max_len`` cached tokens."""
    return min(MAX_SPLITS.value, max(1, ceil_div(max_len - SPLIT_SLACK.value, SPLIT_LEN.value)))


def workspace_shape(total_tokens: int, num_requests: int, group: int, max_len: int) -> tuple[int, int]:
    """(splits, tokens W) of the partial results, fp32 ``[splits, Hkv, W, group, D + 1]``. W is 0 for a single split.

    ``group`` is ``Hq / Hkv``; ``max_len`` is the number of tokens that a row of the slot table can hold."""
    splits = _most_splits(max_len)
    split_tokens = SPLIT_TILES.value * (BLOCK_M.value // group)
    return splits, min(total_tokens, num_requests * split_tokens) if splits > 1 else 0


def plan_shape(total_tokens: int, num_requests: int, group: int, max_len: int) -> tuple[int, int]:
    """Shape of the int32 plan of :func:`plan_attention`: one header row, and one row per possible item."""
    tiles = min(total_tokens, total_tokens // (BLOCK_M.value // group) + num_requests) if num_requests else 0
    split_tiles = min(tiles, SPLIT_TILES.value * num_requests)
    return 1 + tiles + split_tiles * (_most_splits(max_len) - 1), ITEM_SIZE.value


def num_counters(num_requests: int, kv_heads: int) -> int:
    """Minimum size of ``counters`` of :func:`value_tree_attention`."""
    return num_requests * SPLIT_TILES.value * kv_heads


def _plan_reference(
    table_rows: Tensor, cached_lens: Tensor, q_offsets: Tensor, candidate_lens: Tensor, group: int, *, out: Tensor
) -> None:
    sizes = dict(tile_tokens=BLOCK_M.value // group, split_tiles=SPLIT_TILES.value, num_splits=_most_splits)
    plan = reference.plan_attention(table_rows, cached_lens, q_offsets, candidate_lens, **sizes)
    out.zero_()[: len(plan)] = plan


@operator(name="plan_attention", reference=_plan_reference)
def _launch_plan(
    plan: Tensor,
    table_rows: Tensor,
    cached_lens: Tensor,
    q_offsets: Tensor,
    candidate_lens: Tensor,
    group: int,
) -> None:
    if len(table_rows) == 0:
        plan.zero_()
        return
    _plan_attention_kernel[(len(table_rows),)](
        plan,
        table_rows,
        cached_lens,
        q_offsets,
        candidate_lens,
        len(table_rows),
        len(plan) - 1,
        TOKENS=BLOCK_M.value // group,
        **overlapping(),
    )


_SPEC = Spec("""
    table_rows: int [B]
    cached_lens: int32 [B]
    q_offsets: int32 [B + 1]
    candidate_lens: int32 [B]
""")


def plan_attention(
    table_rows: Tensor,  # int32|int64 [B]
    cached_lens: Tensor,  # int32 [B]
    q_offsets: Tensor,  # int32 [B + 1]
    candidate_lens: Tensor,  # int32 [B]
    *,
    total_tokens: int,
    max_len: int,
    group: int,
    backend: str = "auto",
) -> Tensor:  # int32 [1 + items, 8]
    """Compute the work list of :func:`value_tree_attention`, which all layers of a step share.

    Args:
        table_rows, cached_lens, q_offsets, candidate_lens: as in :func:`value_tree_attention`.
        total_tokens: number of rows of ``q``.
        max_len: tokens that a row of the slot table can hold, ``max pages * page_size``.
        group: query heads that share a key/value head, 1 to 64.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        int32 of shape ``plan_shape(total_tokens, B, group, max_len)``. The first element is the number of items. Items
        are in the rows from the second on. An item is one split of one query tile: request, table row, first row of
        ``q``, new tokens, delta tokens, cached tokens, tile, split. All other elements are arbitrary.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, the value and what is accepted.

    Example:
        >>> row, cached, offsets, candidates = (torch.tensor(x, dtype=torch.int32) for x in ([4], [700], [0, 3], [2]))
        >>> plan_attention(row, cached, offsets, candidates, total_tokens=3, max_len=1024, group=2)
        tensor([[  2,   0,   0,   0,   0,   0,   0,   0],
                [  0,   4,   0,   3,   1, 700,   0,   0],
                [  0,   4,   0,   3,   1, 700,   0,   1]], dtype=torch.int32)
    """
    backend, sizes = _SPEC.check(backend, table_rows, cached_lens, q_offsets, candidate_lens)
    check_int("total_tokens", total_tokens, 0, 2**31 - 1)
    check_int("max_len", max_len, 0, 2**31 - 1)
    check_int("group", group, 1, BLOCK_M.value)
    shape = plan_shape(total_tokens, sizes["B"], group, max_len)
    plan = torch.empty(shape, dtype=torch.int32, device=table_rows.device)
    _launch_plan(backend, plan, table_rows, cached_lens, q_offsets, candidate_lens, group)
    return plan
