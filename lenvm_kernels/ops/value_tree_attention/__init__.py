"""Value-tree attention for the delta tokens and candidates of all requests, in one ragged launch.

Request ``i`` has ``d`` delta tokens and then ``n`` candidates, after ``C`` cached tokens. Its token ``j`` attends to
all cached tokens, to the new tokens ``t <= j`` with ``t < d``, and to itself:

    out[j] = sum_t softmax_t(sm_scale * q[j] . k[t]) v[t]

The mask follows from ``C``, ``d`` and ``n`` and is never materialized (tree attention of LenVM, arXiv 2604.27039). If
candidates have parents, the sum also includes a candidate's ancestors, as in trees of speculative decoding.

A query tile packs neighbouring tokens of a request with all query heads that share a key/value head. The cached prefix
is split over programs, as in flash-decoding; the last program to finish merges the splits, in order. Splits, tiles and
block sizes depend on the request and the row's place in it, not on the batch, so a request's result is bitwise
identical in any batch. The plan lists the work: an item is one split of one tile.
"""

import math
from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import architecture, check_int, check_number, next_power_of_2, overlapping
from lenvm_kernels.ops._device import arrives_last, kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.value_tree_attention.plan import (
    BLOCK_M,
    MAX_SPLITS,
    SPLIT_TILES,
    load_item,
    make_plan,
    num_counters,
    num_splits,
    plan_shape,
    workspace_shape,
)
from lenvm_kernels.reference.value_tree_attention import value_tree_attention as _reference

# Maximum programs of a launch, about four times the capacity of 132 multiprocessors. The slot table allows far more
# splits than most requests have, and a launch sized for all of them would mostly start idle programs.
MAX_PROGRAMS = 1024
MAX_HEAD_DIM = 256
# Offsets within a query tile are 32-bit.
MAX_STRIDE = (2**31 - 1) // BLOCK_M.value
# Columns of the results that are merged at once. With 64, D 128 spills up to 120 bytes on sm_80. Measured on an H200
# (B 64, 2,048 cached tokens), the attention takes 63 us with 32 or 64, and 84 us with 128, which spills there as well.
MERGE_COLUMNS = tl.constexpr(32)


# Partial results are fp32 [max splits, Hkv, W, Hq / Hkv, D]; their sums [max splits, Hkv, W, Hq / Hkv] to base 2.
AttentionTensors = namedtuple(
    "AttentionTensors", "out q k_new v_new k_cache v_cache slot_table parents plan partial_out partial_lse"
)
# Strides of the tensors' first two dimensions.
AttentionStrides = namedtuple(
    "AttentionStrides",
    "out_token out_head q_token q_head k_new_token k_new_head v_new_token v_new_head k_cache_slot k_cache_head "
    "v_cache_slot v_cache_head table_row",
)


@triton.jit
def _load_rows(ptr, row, stride, d, mask):
    return tl.load(ptr + (row.to(tl.int64) * stride)[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_pages(pages_ptr, block, cached_blocks, cached, first_row, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N]: pages of a block of cached keys, or rows of a block of new keys after the cached blocks."""
    is_new = block >= cached_blocks
    key = (block - tl.where(is_new, cached_blocks, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(pages_ptr + key // PAGE_SIZE, mask=(key < cached) & (block < cached_blocks), other=first_row + key)


@triton.jit
def _attend(q, k, v, visible, scale_log2, running_max, running_sum, acc):
    """One step of the online softmax: ``k`` and ``v`` [BLOCK_N, BLOCK_D], ``visible`` [1 | BLOCK_M, BLOCK_N].

    Each row starts from its own key or from a visible key in its first block (a cached token, or delta token 0), so its
    maximum is finite from then on, and differences of infinities cannot occur."""
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
    """Rows of the parents of candidates, -1 for no parent; row -1 has none. For any contents of ``parents``, a parent
    is an earlier candidate of the same request, so that each walk terminates within its request."""
    parent = tl.load(parents_ptr + row, mask=row >= 0, other=-1)
    return tl.where((parent >= first_candidate_row) & (parent < row), parent, -1)


@triton.jit
def _load_partial(split, splits, out_ptr, lse_ptr, stride_split, offset, is_row, is_column, HEAD_DIM: tl.constexpr):
    """lse and result of a split; -inf and 0 if the split does not exist."""
    there = is_row & (split < splits)
    lse_ptr += split * stride_split
    lse = tl.load(lse_ptr + tl.arange(0, is_row.shape[0]), mask=there, other=float("-inf"), cache_modifier=".cg")
    out_ptr += split * (stride_split * HEAD_DIM)
    return lse, tl.load(out_ptr + offset, mask=there[:, None] & is_column, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_splits(
    out_ptr,  # [BLOCK_M]
    partial_out_ptr,
    partial_lse_ptr,
    stride_split,
    splits,
    is_row,  # [BLOCK_M]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the results of a tile's splits in order: ``out = sum_s softmax_s(lse_s) partial_out_s``.

    Loads bypass L1, because it may lack the writes of other programs."""
    m = tl.arange(0, BLOCK_M)
    s = tl.arange(0, MAX_SPLITS)[None, :]
    is_split = is_row[:, None] & (s < splits)  # [BLOCK_M, MAX_SPLITS]
    lse_ptr = partial_lse_ptr + m[:, None] + s * stride_split
    lse = tl.load(lse_ptr, mask=is_split, other=float("-inf"), cache_modifier=".cg")
    top = tl.where(is_row, tl.max(lse, axis=1), 0.0)
    factor = 1.0 / tl.where(is_row, tl.sum(tl.exp2(lse - top[:, None]), axis=1), 1.0)
    COLUMNS: tl.constexpr = min(BLOCK_D, MERGE_COLUMNS)
    for first_column in range(0, BLOCK_D, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        is_column = (column < HEAD_DIM)[None, :]
        offset = (m * HEAD_DIM)[:, None] + column[None, :]
        acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        # Loads of four splits are in flight at once. Software pipelining would copy them through shared memory and
        # wait: measured on an H200 (B 64, 2,048 cached tokens), the attention takes 110 us with it and 63 us without.
        where = (splits, partial_out_ptr, partial_lse_ptr, stride_split, offset, is_row, is_column)
        for split in tl.range(0, splits, 4, num_stages=1):
            lse_a, x_a = _load_partial(split, *where, HEAD_DIM)
            lse_b, x_b = _load_partial(split + 1, *where, HEAD_DIM)
            lse_c, x_c = _load_partial(split + 2, *where, HEAD_DIM)
            lse_d, x_d = _load_partial(split + 3, *where, HEAD_DIM)
            acc += x_a * tl.exp2(lse_a - top)[:, None]
            acc += x_b * tl.exp2(lse_b - top)[:, None]
            acc += x_c * tl.exp2(lse_c - top)[:, None]
            acc += x_d * tl.exp2(lse_d - top)[:, None]
        acc *= factor[:, None]
        tl.store(out_ptr[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


@kernel()
def _value_tree_attention_kernel(
    ptr,  # AttentionTensors
    stride,  # AttentionStrides
    counters_ptr,  # int32 [B, SPLIT_TILES, Hkv]
    workspace_rows,  # W
    scale_log2,  # sm_scale * log2(e): the softmax runs on exp2
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    wait_for_inputs(OVERLAPS)
    kv_head = tl.program_id(0)
    k_new_ptr = ptr.k_new + kv_head.to(tl.int64) * stride.k_new_head
    v_new_ptr = ptr.v_new + kv_head.to(tl.int64) * stride.v_new_head
    k_cache_ptr = ptr.k_cache + kv_head.to(tl.int64) * stride.k_cache_head
    v_cache_ptr = ptr.v_cache + kv_head.to(tl.int64) * stride.v_cache_head
    first_head = (kv_head * GROUP).to(tl.int64)

    # Most programs process at most one item. Registers are scarce, so nothing is hoisted out of the loop over items.
    num_items = tl.load(ptr.plan)
    for item in tl.range(tl.program_id(1), num_items, tl.num_programs(1), disable_licm=True):
        request, table_row, first_row, tokens, delta, cached, tile, split = load_item(ptr.plan, item)
        splits = tl.where(tile < SPLIT_TILES, num_splits(cached), 1)

        # Key blocks: first the split's cached tokens; then, in the last split, the delta tokens up to the last one
        # visible to the tile's last row.
        first_token = tile * TOKENS
        is_last_split = split == splits - 1
        cached_blocks = tl.cdiv(cached, BLOCK_N)
        delta_end = tl.minimum(delta, first_token + TOKENS)
        first_block = split * cached_blocks // splits
        end_block = (split + 1) * cached_blocks // splits
        end_block += tl.where(is_last_split, tl.cdiv(delta_end, BLOCK_N), 0)
        # Page numbers are loaded one block ahead, so that loads of keys and values do not wait for them.
        pages_ptr = ptr.slot_table + table_row.to(tl.int64) * stride.table_row
        page = _load_pages(pages_ptr, first_block, cached_blocks, cached, first_row, PAGE_SIZE, BLOCK_N)

        # Rows of the tile. Offsets within a tile are 32-bit to save registers; the tile's own offset is 64-bit.
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        is_dim = d < HEAD_DIM
        tile_token = m // GROUP  # [BLOCK_M]
        tile_head = m % GROUP  # [BLOCK_M]
        token = first_token + tile_token  # [BLOCK_M]
        row = first_row + token
        is_row = m < tl.minimum(tokens - first_token, TOKENS) * GROUP
        tile_mask = is_row[:, None] & is_dim[None, :]
        tile_row = (first_row + first_token).to(tl.int64)
        q_tile_ptr = ptr.q + tile_row * stride.q_token + first_head * stride.q_head
        q_ptr = q_tile_ptr + (tile_token * stride.q_token + tile_head * stride.q_head)[:, None] + d[None, :]
        q = tl.load(q_ptr, mask=tile_mask, other=0.0)

        # A candidate's own key and value initialize its softmax, in the last split, like delta. Its score is one
        # element of a matmul with the tile's keys, which neighbouring candidates cannot change. The branch frees the
        # shared memory of these keys for the stages of the loop over key blocks.
        is_self = token >= tl.where(is_last_split, delta, tokens + BLOCK_M)  # [BLOCK_M]
        self_token = tl.arange(0, BLOCK_TOKENS)
        end_token = tl.where(is_last_split, tl.minimum(tokens - first_token, TOKENS), 0)
        k_mask = ((self_token >= delta - first_token) & (self_token < end_token))[:, None] & is_dim[None, :]
        k_self = _load_rows(k_new_ptr, first_row + first_token + self_token, stride.k_new_token, d, k_mask)
        v_self = _load_rows(v_new_ptr, row, stride.v_new_token, d, (is_self & is_row)[:, None] & is_dim[None, :])
        self_score = tl.zeros([BLOCK_M], tl.float32)
        if is_last_split:
            scores = tl.dot(q, k_self.T, input_precision="ieee")  # [BLOCK_M, BLOCK_TOKENS]
            is_own = tile_token[:, None] == self_token[None, :]
            self_score = tl.sum(tl.where(is_own, scores, 0.0), axis=1) * scale_log2
        running_max = tl.where(is_self, self_score, float("-inf"))  # [BLOCK_M]
        running_sum = tl.where(is_self, 1.0, 0.0)  # [BLOCK_M]
        acc = v_self.to(tl.float32)  # [BLOCK_M, BLOCK_D]

        # Ancestors are added one by one, outside of the matmuls, because they differ between rows. The rows of the tile
        # ascend together; rows without another ancestor stay bitwise unchanged. Delta tokens have a finite maximum (0)
        # here, so that differences of infinities cannot occur.
        if ptr.parents is not None:
            first_candidate_row = first_row + delta
            ancestor = _parent_row(tl.where(is_self & is_row, row, -1), ptr.parents, first_candidate_row)  # [BLOCK_M]
            running_max = self_score
            while tl.max(ancestor, axis=0) >= 0:
                is_ancestor = ancestor >= 0
                ancestor_mask = is_ancestor[:, None] & is_dim[None, :]
                k = _load_rows(k_new_ptr, ancestor, stride.k_new_token, d, ancestor_mask)
                v = _load_rows(v_new_ptr, ancestor, stride.v_new_token, d, ancestor_mask)
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

        row_delta_end = tl.minimum(delta_end, token + 1)  # [BLOCK_M]
        for block in range(first_block, end_block):
            next_page = _load_pages(pages_ptr, block + 1, cached_blocks, cached, first_row, PAGE_SIZE, BLOCK_N)
            is_new = block >= cached_blocks
            key = (block - tl.where(is_new, cached_blocks, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            # Row of a new token, or cache slot.
            source = page.to(tl.int64) * tl.where(is_new, 1, PAGE_SIZE) + tl.where(is_new, 0, key % PAGE_SIZE)
            k_ptr = tl.where(is_new, k_new_ptr, k_cache_ptr)
            v_ptr = tl.where(is_new, v_new_ptr, v_cache_ptr)
            k_ptr += source * tl.where(is_new, stride.k_new_token, stride.k_cache_slot)
            v_ptr += source * tl.where(is_new, stride.v_new_token, stride.v_cache_slot)
            kv_mask = (key < tl.where(is_new, delta_end, cached))[:, None] & is_dim[None, :]
            k = tl.load(k_ptr[:, None] + d[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_ptr[:, None] + d[None, :], mask=kv_mask, other=0.0)
            visible = key[None, :] < tl.where(is_new, row_delta_end, cached)[:, None]
            running_max, running_sum, acc = _attend(q, k, v, visible, scale_log2, running_max, running_sum, acc)
            page = next_page

        acc *= (1.0 / running_sum)[:, None]
        out_ptr = ptr.out + tile_row * stride.out_token + first_head * stride.out_head
        out_ptr += tile_token * stride.out_token + tile_head * stride.out_head  # [BLOCK_M]
        if splits == 1:
            tl.store(out_ptr[:, None] + d[None, :], acc.to(ptr.out.dtype.element_ty), mask=tile_mask)
        else:
            # Request ``i`` owns workspace rows from ``min(q_offsets[i], i * SPLIT_TILES * TOKENS)`` on: enough for its
            # tokens that can be split, and in total at most one row per token.
            workspace_row = tl.minimum(first_row, request * (SPLIT_TILES * TOKENS)) + first_token
            first_partial = (kv_head.to(tl.int64) * workspace_rows + workspace_row) * GROUP
            stride_split = tl.num_programs(0).to(tl.int64) * workspace_rows * GROUP
            partial = first_partial + split * stride_split
            partial_ptr = ptr.partial_out + partial * HEAD_DIM
            tl.store(partial_ptr + (m * HEAD_DIM)[:, None] + d[None, :], acc, mask=tile_mask)
            tl.store(ptr.partial_lse + partial + m, running_max + tl.log2(running_sum), mask=is_row)
            counter = (request * SPLIT_TILES + tile) * tl.num_programs(0) + kv_head
            if arrives_last(counters_ptr + counter, splits):
                partials = (ptr.partial_out + first_partial * HEAD_DIM, ptr.partial_lse + first_partial)
                _merge_splits(out_ptr, *partials, stride_split, splits, is_row, HEAD_DIM, BLOCK_D)


def _launch_config(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes, warps and pipeline stages. In bf16 and fp16, only D 256 spills on the GPUs of :mod:`bench.codegen`.
    On sm_90, a multiprocessor can run two programs up to D 128. Measured on an H200 (D 128, B 64, 2,048 cached tokens),
    8 warps take 88 us instead of 63 us. On other GPUs, a block of 64 keys at D 128, or more stages, would spill or
    exceed the shared memory.

    Raises:
        RuntimeError: an AMD GPU with a Triton version that needs an environment variable for it."""
    if architecture() == "hip" and triton.__version__.startswith("3.6.") and triton.knobs.amd.use_buffer_ops:
        raise RuntimeError(
            "value_tree_attention: Triton 3.6 cannot compile it for AMD GPUs with buffer operations; set "
            "AMDGCN_USE_BUFFER_OPS=0, or install Triton 3.7"
        )
    block_d = max(16, next_power_of_2(head_dim))
    if dtype == torch.float32:  # full fp32 has no tensor cores; operands are in registers, more for wider heads
        warps = max(8, block_d // 8)
        return dict(BLOCK_D=block_d, BLOCK_N=16, num_warps=warps, num_stages=2)
    on_sm_90 = architecture() in ("sm_90", "")  # "" is the interpreter
    stages = 4 if on_sm_90 and block_d <= 64 else 3
    stages = 2 if architecture() == "sm_100" else stages
    return dict(
        BLOCK_D=block_d,
        BLOCK_N=64 if block_d <= 64 or (on_sm_90 and block_d == 128) else 32,
        num_warps=4 if block_d <= 128 else 8,
        num_stages=stages,
    )


_SPEC = Spec("""
    q: float [T, Hq, D]
    k_new: =q [T, Hkv, D]
    v_new: =q [T, Hkv, D]
    k_cache: =q [S, Hkv, D]
    v_cache: =q [S, Hkv, D]
    slot_table: int32 [R, pages]
    table_rows: int [B]
    cached_lens: int32 [B]
    q_offsets: int32 [B + 1]
    candidate_lens: int32 [B]
    parents?: int32 [T]
    out?: =q [T, Hq, D]
    counters?: int32 [*]
""")
_PLAN = Spec("plan?: int32 [items, size]")


@operator(_SPEC, _PLAN, reference=_reference, mutates=["counters"], takes={"page_size": int, "sm_scale": float})
def _launch(out: Tensor, given):
    q, k_new, slot_table, plan = given.q, given.k_new, given.slot_table, given.plan
    total_tokens, q_heads, head_dim = q.shape
    kv_heads, num_requests = k_new.shape[1], given.table_rows.shape[0]
    if num_requests == 0:
        return
    group = q_heads // kv_heads
    max_len = slot_table.shape[1] * given.page_size
    if plan is None:
        lens = (given.table_rows, given.cached_lens, given.q_offsets, given.candidate_lens)
        plan = make_plan(*lens, total_tokens=total_tokens, group=group, max_len=max_len)
    max_splits, workspace_rows = workspace_shape(total_tokens, num_requests, group, max_len)
    partial_out = q.new_empty(max_splits, kv_heads, workspace_rows, group, head_dim, dtype=torch.float32)
    partial_lse = q.new_empty(max_splits, kv_heads, workspace_rows, group, dtype=torch.float32)
    by_head = (out, q, k_new, given.v_new, given.k_cache, given.v_cache)
    strides = [n for x in by_head for n in x.stride()[:2]]

    _value_tree_attention_kernel[(kv_heads, min(plan.shape[0] - 1, max(1, MAX_PROGRAMS // kv_heads)))](
        AttentionTensors(*by_head, slot_table, given.parents, plan, partial_out, partial_lse),
        AttentionStrides._make((*strides, slot_table.stride(0))),
        *(given.counters, workspace_rows, given.sm_scale * math.log2(math.e)),
        PAGE_SIZE=given.page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=max(16, next_power_of_2(BLOCK_M.value // group)),
        **_launch_config(head_dim, q.dtype),
        **overlapping(),
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
    plan: Tensor | None = None,  # int32, of a RaggedLayout
    counters: Tensor | None = None,  # int32 [num_counters or more]
    backend: str = "auto",
) -> Tensor:  # [T, Hq, D], as q
    """Compute attention of delta tokens and candidates over a cached prefix and themselves, for all requests at once.

    The new tokens of request ``i`` are rows ``q_offsets[i]`` to ``q_offsets[i + 1] - 1`` of ``q``, ``k_new`` and
    ``v_new``: first the delta tokens (any number, up to a whole prompt), then ``candidate_lens[i]`` candidates. A delta
    token attends to the cached tokens and causally to the delta tokens; a candidate attends to the cached tokens, all
    delta tokens and itself. With ``parents``, the candidates form a tree of any shape, and a candidate also attends to
    its ancestors. The time grows with the depth of the tree.

    Cached token ``t`` of request ``i`` is in slot ``slot_table[table_rows[i], t // page_size] * page_size + t %
    page_size``. Slots and table entries past ``cached_lens[i]`` are never read. The cache is not written.

    Launch and workspace sizes depend only on tensor shapes, so CUDA graphs can capture the call. A request's result is
    bitwise independent of other requests in the batch, and a candidate's result of all candidates except its ancestors.

    Args:
        q: queries, fp32, bf16 or fp16 (also fp64 on the reference).
        k_new, v_new: keys and values of the new tokens, in the dtype of ``q``. ``Hq`` is a multiple of ``Hkv``.
        k_cache, v_cache: keys and values of cached tokens by slot, in the dtype of ``q``.
        slot_table: a row of pages per request; with ``page_size=1``, a row of slots.
        table_rows: row of each request in ``slot_table``.
        cached_lens: number of cached tokens of each request, clamped to 0 .. ``max pages * page_size``.
        q_offsets: first new row of each request, starting at 0, then the number of rows in use. Rows of ``out`` from
            ``q_offsets[B]`` on (padding of a captured graph) are not written.
        candidate_lens: number of candidates among the new tokens of each request.
        parents: row of ``q`` of each candidate's parent. A candidate with any other entry than an earlier candidate of
            the same request (e.g. -1) follows the delta. Entries of delta tokens and padding are ignored. If ``None``,
            no candidate has a parent.
        page_size: slots per page.
        sm_scale: factor on the scores. If ``None``, ``1 / sqrt(D)``.
        out: result tensor to reuse. If ``None``, it is allocated, and rows from ``q_offsets[B]`` on are arbitrary.
        plan: plan of the :class:`RaggedLayout` of the same requests (:func:`lay_out`), which all layers share. If
            ``None``, it is computed. The kernel reads the requests' rows and lengths only from the plan.
        counters: at least ``num_counters(B, Hkv)`` zeros, which are zeros again afterwards. Launches that may overlap
            must not share them. If ``None``, they are allocated.
        backend: ``auto``, ``triton`` (``D`` up to 256, up to 64 query heads per key/value head, strides of ``q`` and
            ``out`` below 2**25) or ``reference``.

    Returns:
        ``out``, ``[T, Hq, D]`` in the dtype of ``q``.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> cache = torch.randn(8, 1, 16)                              # 8 slots, 1 key/value head of 16
        >>> q, new = torch.randn(3, 2, 16), torch.randn(3, 1, 16)      # 1 delta token, then 2 candidates
        >>> table = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32)    # 3 cached tokens, in slots 5, 2 and 7
        >>> row, cached, offsets, candidates = (torch.tensor(x, dtype=torch.int32) for x in ([0], [3], [0, 3], [2]))
        >>> value_tree_attention(q, new, new, cache, cache, table, row, cached, offsets, candidates).shape
        torch.Size([3, 2, 16])
        >>> # The second candidate as a child of the first, which is row 1.
        >>> parents = torch.tensor([-1, -1, 1], dtype=torch.int32)
        >>> lens = (table, row, cached, offsets, candidates)
        >>> value_tree_attention(q, new, new, cache, cache, *lens, parents=parents).shape
        torch.Size([3, 2, 16])
    """
    operands = (q, k_new, v_new, k_cache, v_cache, slot_table, table_rows, cached_lens, q_offsets, candidate_lens)
    backend, sizes = _SPEC.check(backend, *operands, parents, out, counters)
    total_tokens, q_heads, kv_heads, head_dim = (sizes[name] for name in ("T", "Hq", "Hkv", "D"))
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"q must have a multiple of the heads of k_new, got {q_heads} query and {kv_heads} key/value heads"
        )
    group, device = q_heads // kv_heads, q.device
    least = num_counters(sizes["B"], kv_heads)
    if counters is None:
        counters = torch.zeros(least, dtype=torch.int32, device=device)
    if counters.shape[0] < least:
        raise ValueError(f"counters must be int32 [{least} or more], got int32 [{counters.shape[0]}]")
    check_int("page_size", page_size, 1)
    if head_dim < 1:
        raise ValueError(f"q must have a last dimension of at least 1, got {head_dim}")
    if sm_scale is None:
        sm_scale = head_dim**-0.5
    check_number("sm_scale", sm_scale, "a finite number or None")
    if backend == "triton" and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"q must have a last dimension of 1 to {MAX_HEAD_DIM} for backend 'triton', got {head_dim}")
    if backend == "triton" and group > (most := BLOCK_M.value):
        raise ValueError(f"q must have at most {most} heads per head of k_new for backend 'triton', got {group}")
    if plan is not None:
        items, size = plan_shape(total_tokens, sizes["B"], group, sizes["pages"] * page_size)
        _PLAN.check(backend, plan, device=device, sizes={"items": items, "size": size})
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
    for name, x in (("q", q), ("out", out)):
        if backend == "triton" and max(x.stride()) > MAX_STRIDE:
            raise ValueError(f"{name} must have strides up to {MAX_STRIDE} for backend 'triton', got {x.stride()}")
    return _launch(backend, out, *operands, parents, counters, plan, page_size, float(sm_scale))
