"""Device functions of :mod:`lenvm_kernels.ops.value_tree_attention`, and its launch configuration."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lenvm_kernels.ops._common import architecture, next_power_of_2
from lenvm_kernels.ops.value_tree_attention.plan import BLOCK_M, MAX_SPLITS

# Columns of the results that are merged at once. With 64, D 128 spills up to 120 bytes on sm_80. Measured on an H200
# (B 64, 2,048 cached tokens), the attention takes 63 us with 32 or 64, and 84 us with 128, which spills there as well.
MERGE_COLUMNS = tl.constexpr(32)


class AttentionTensors(NamedTuple):
    """Tensors that the attention reads and writes."""

    out: Any  # [T, Hq, D]
    q: Any  # [T, Hq, D]
    k_new: Any  # [T, Hkv, D]
    v_new: Any  # [T, Hkv, D]
    k_cache: Any  # [S, Hkv, D]
    v_cache: Any  # [S, Hkv, D]
    slot_table: Any  # int32 [R, max pages]
    parents: Any  # int32 [T], or None
    plan: Any  # int32 [1 + most items, ITEM_SIZE]
    partial_out: Any  # fp32 [max splits, Hkv, W, Hq / Hkv, D]
    partial_lse: Any  # fp32 [max splits, Hkv, W, Hq / Hkv], base 2


class AttentionStrides(NamedTuple):
    """Strides of the tensors' first two dimensions."""

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


@triton.jit
def _load_pages(pages_ptr, block, cached_blocks, cached, first_row, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N]: pages of a block of cached keys, or rows of a block of new keys, which follow the cached blocks."""
    is_new = block >= cached_blocks
    key = (block - tl.where(is_new, cached_blocks, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(pages_ptr + key // PAGE_SIZE, mask=(key < cached) & (block < cached_blocks), other=first_row + key)


@triton.jit
def _attend(q, k, v, visible, scale_log2, running_max, running_sum, acc):
    """One step of the online softmax: ``k`` and ``v`` [BLOCK_N, BLOCK_D], ``visible`` [1 | BLOCK_M, BLOCK_N].

    Every row starts from its own key or sees a key in its first block (a cached token, or delta token 0), so its
    maximum is finite from then on, and no difference of infinities can arise."""
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
    is an earlier candidate of the same request, so that every walk terminates within its request."""
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

    Loads bypass L1, which may not contain the writes of other programs."""
    m = tl.arange(0, BLOCK_M)
    s = tl.arange(0, MAX_SPLITS)[None, :]
    lse = tl.load(
        partial_lse_ptr + m[:, None] + s * stride_split,
        mask=is_row[:, None] & (s < splits),
        other=float("-inf"),
        cache_modifier=".cg",
    )  # [BLOCK_M, MAX_SPLITS]
    top = tl.where(is_row, tl.max(lse, axis=1), 0.0)
    factor = 1.0 / tl.where(is_row, tl.sum(tl.exp2(lse - top[:, None]), axis=1), 1.0)
    COLUMNS: tl.constexpr = min(BLOCK_D, MERGE_COLUMNS)
    for first_column in range(0, BLOCK_D, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        is_column = (column < HEAD_DIM)[None, :]
        offset = (m * HEAD_DIM)[:, None] + column[None, :]
        acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        # Loads of four splits are in flight at once. Software pipelining would copy them through shared memory and
        # wait. Measured on an H200 (B 64, 2,048 cached tokens), the attention takes 110 us with it and 63 us without.
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


def _launch_config(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes, warps and pipeline stages. In bf16 and fp16, only D 256 spills on the GPUs of :mod:`bench.codegen`.
    On sm_90, shared memory and registers hold two programs per multiprocessor up to D 128, each with 32 KB of keys and
    values in flight while it waits for the next block, more than the 20 KB that 4.8 TB/s require. Measured on an H200
    (D 128, B 64, 2,048 cached tokens), 8 warps take 88 us instead of 63. On other GPUs, a block of 64 keys at D 128, or
    more stages, would spill or exceed the shared memory. fp32 spills at most a few bytes.

    Raises:
        RuntimeError: an AMD GPU with a Triton version that needs an environment variable for it."""
    if architecture() == "hip" and triton.__version__.startswith("3.6.") and triton.knobs.amd.use_buffer_ops:
        raise RuntimeError(
            "value_tree_attention: Triton 3.6 fails to compile it for AMD's GPUs with buffer operations; set "
            "AMDGCN_USE_BUFFER_OPS=0, or take Triton 3.7"
        )
    block_d = max(16, next_power_of_2(head_dim))
    if dtype == torch.float32:  # full fp32 has no tensor cores: operands are in registers, more for wider heads
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
