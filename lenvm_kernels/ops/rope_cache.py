"""Rotary embedding and cache write: from the fused QKV projection to rotated queries and cached keys, in one launch.

For head ``x`` of a query or key, with first half ``a`` and second half ``b`` (values are copied):

    x = w * (x * rsqrt(mean(x^2) + eps))        only with a norm weight (Qwen3)
    a, b = a cos - b sin, b cos + a sin

Source: ``Qwen3RMSNorm`` and ``apply_rotary_pos_emb`` of transformers (RoFormer, arXiv 2104.09864). The norm rounds as
transformers does, to the dtype before and after the product with ``w``. The rotation is in fp32 and rounded once. A
program processes a token with all its heads. All loads precede all stores, so that it waits for memory once.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import check_int, check_number, next_power_of_2, overlapping
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.reference.rope_cache import rope_cache as _reference

# Elements of each half of the queries per thread: 16 bytes of bf16, the widest load. Not measured.
ELEMENTS_PER_THREAD = 8
# With more than 64 heads of 128, threads have more elements, so that a multiprocessor holds several programs.
MAX_WARPS = 16


@triton.jit
def _load_halves(ptr, mask, HALF: tl.constexpr):
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + HALF, mask=mask, other=0.0)


@triton.jit
def _store_halves(ptr, halves, mask, HALF: tl.constexpr):
    tl.store(ptr, halves[0].to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + HALF, halves[1].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale(x, inv_rms, weight):
    """``weight * (x * inv_rms)`` rounded as in the dtype of x. fp32 represents the product of two bf16 or fp16 numbers
    exactly, so rounding it equals multiplication in their dtype."""
    normed = (x.to(tl.float32) * inv_rms[:, None]).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm(halves, weights, norm_eps, HALF: tl.constexpr):
    first, second = halves[0].to(tl.float32), halves[1].to(tl.float32)
    mean_square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)  # [heads]
    inv_rms = tl.rsqrt(mean_square + norm_eps)
    return _scale(halves[0], inv_rms, weights[0]), _scale(halves[1], inv_rms, weights[1])


@triton.jit
def _rotate(halves, cos, sin):
    first, second = halves[0].to(tl.float32), halves[1].to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


RopeTensors = namedtuple("RopeTensors", "q k v k_cache v_cache qkv cos sin slots norm_weight")
RopeStrides = namedtuple(
    "RopeStrides", "k_cache_slot k_cache_head v_cache_slot v_cache_head qkv_token cos_token sin_token norm_weight_head"
)


@kernel()
def _rope_cache_kernel(
    ptr,  # RopeTensors
    stride,  # RopeStrides
    num_rows_ptr,  # int32 [1] or None
    norm_eps,
    num_slots,  # S
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    if num_rows_ptr is not None:
        num_rows = tl.load(num_rows_ptr)
    if token >= num_rows:
        return

    d = tl.arange(0, BLOCK_HALF)[None, :]
    q_head = tl.arange(0, BLOCK_Q_HEADS)[:, None]
    kv_head = tl.arange(0, BLOCK_KV_HEADS)[:, None]
    q_mask = (q_head < Q_HEADS) & (d < HALF)
    kv_mask = (kv_head < KV_HEADS) & (d < HALF)

    qkv_ptr = ptr.qkv + token * stride.qkv_token + d
    q = _load_halves(qkv_ptr + q_head * HEAD_DIM, q_mask, HALF)
    k = _load_halves(qkv_ptr + (Q_HEADS + kv_head) * HEAD_DIM, kv_mask, HALF)
    v = _load_halves(qkv_ptr + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM, kv_mask, HALF)
    cos = tl.load(ptr.cos + token * stride.cos_token + d, mask=d < HALF, other=0.0)  # [1, BLOCK_HALF]
    sin = tl.load(ptr.sin + token * stride.sin_token + d, mask=d < HALF, other=0.0)
    slot = tl.load(ptr.slots + token).to(tl.int64)

    if ptr.norm_weight is not None:
        norm_weight_ptr = ptr.norm_weight + d
        q_weight = _load_halves(norm_weight_ptr + q_head * stride.norm_weight_head, q_mask, HALF)
        k_weight = _load_halves(norm_weight_ptr + (Q_HEADS + kv_head) * stride.norm_weight_head, kv_mask, HALF)
        q = _rms_norm(q, q_weight, norm_eps, HALF)
        k = _rms_norm(k, k_weight, norm_eps, HALF)
    q = _rotate(q, cos, sin)
    k = _rotate(k, cos, sin)

    _store_halves(ptr.q + (token * Q_HEADS + q_head) * HEAD_DIM + d, q, q_mask, HALF)
    # 64-bit, because the caller's cache may have large head strides (heads-first layouts).
    kv_head = kv_head.to(tl.int64)
    new = (token * KV_HEADS + kv_head) * HEAD_DIM + d
    _store_halves(ptr.k + new, k, kv_mask, HALF)
    _store_halves(ptr.v + new, v, kv_mask, HALF)
    if (slot >= 0) & (slot < num_slots):
        k_slot_ptr = ptr.k_cache + slot * stride.k_cache_slot + kv_head * stride.k_cache_head + d
        v_slot_ptr = ptr.v_cache + slot * stride.v_cache_slot + kv_head * stride.v_cache_head + d
        _store_halves(k_slot_ptr, k, kv_mask, HALF)
        _store_halves(v_slot_ptr, v, kv_mask, HALF)


_Rotated = namedtuple("_Rotated", "q k v")

_SPEC = Spec("""
    qkv: float [T, *]
    k_cache: =qkv [S, Hkv, D]
""")
_REST = Spec("""
    qkv: float [T, (Hq + 2 * Hkv) * D]
    v_cache: =qkv [S, Hkv, D]
    cos: float32 [T, D // 2]
    sin: float32 [T, D // 2]
    slots: int [T]
    qk_norm_weight?: =qkv [Hq + Hkv, D]
    num_rows?: int32 [1]
""")
_NUMBERS = {"num_heads": int, "norm_eps": float}


@operator(_SPEC, _REST, reference=_reference, mutates=["k_cache", "v_cache"], takes=_NUMBERS)
def _launch(out: _Rotated, given):
    qkv, k_cache, v_cache, cos, sin, slots, qk_norm_weight, num_rows, num_heads, norm_eps = given
    tokens, (num_slots, kv_heads, head_dim) = qkv.shape[0], k_cache.shape
    block_q_heads, block_half = next_power_of_2(num_heads), next_power_of_2(head_dim // 2)
    warps = block_q_heads * block_half // (32 * ELEMENTS_PER_THREAD)
    by_slot = (*k_cache.stride()[:2], *v_cache.stride()[:2])
    by_row = (qkv.stride(0), cos.stride(0), sin.stride(0), 0 if qk_norm_weight is None else qk_norm_weight.stride(0))
    _rope_cache_kernel[(tokens,)](
        RopeTensors(*out, k_cache, v_cache, qkv, cos, sin, slots, qk_norm_weight),
        RopeStrides._make((*by_slot, *by_row)),
        *(num_rows, norm_eps, num_slots),
        Q_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_Q_HEADS=block_q_heads,
        BLOCK_KV_HEADS=next_power_of_2(kv_heads),
        BLOCK_HALF=block_half,
        num_warps=min(max(warps, 1), MAX_WARPS),
        **overlapping(),
    )


def rope_cache(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) * D]
    cos: Tensor,  # fp32 [T, D / 2]
    sin: Tensor,  # fp32 [T, D / 2]
    slots: Tensor,  # int32|int64 [T]
    k_cache: Tensor,  # [S, Hkv, D]
    v_cache: Tensor,  # [S, Hkv, D]
    *,
    num_heads: int,  # Hq
    qk_norm_weight: Tensor | None = None,  # [Hq + Hkv, D]
    norm_eps: float = 1e-6,
    num_rows: Tensor | None = None,  # int32 [1]
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # [T, Hq, D], [T, Hkv, D], [T, Hkv, D]
    """Split a layer's fused projection into rotated queries, rotated keys and values, and cache keys and values.

    If ``qk_norm_weight`` is given, each query and key head is RMS-normalized first (Qwen3). The rotary embedding pairs
    the first half of a head with the second. A token's result is bitwise identical in any batch and at any row.

    Args:
        qkv: each token's query heads, then key heads, then value heads; fp32, bf16 or fp16 (also fp64 on the
            reference). Rows may be strided.
        cos, sin: fp32; cosine and sine of each token's angle ``position * inv_freq``, scaled if the model does so.
        slots: cache slot of each token's key and value. Tokens with a slot outside ``[0, S)`` are not cached
            (candidates, padding). All slots must be different.
        k_cache, v_cache: the layer's cache in the dtype of ``qkv``, written in place. Only D must be contiguous.
            Their shape determines ``Hkv`` and ``D`` (even).
        num_heads: number of query heads.
        qk_norm_weight: in the dtype of ``qkv``; RMSNorm weights over D for each query head, then each key head. If
            ``None``, no norm. A row may be expanded to all heads.
        norm_eps: epsilon of the RMSNorm, added to the mean of squares.
        num_rows: number of rows in use. If ``None`` or more than T, all rows. The remaining rows are neither
            read nor written.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        Queries, keys and values of all tokens, cached or not, contiguous and in the dtype of ``qkv``. Rows from
        ``num_rows`` on are arbitrary.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> qkv = torch.arange(8.0).view(1, 8)                # one token: 2 query, 1 key, 1 value head of 2
        >>> cos, sin = torch.zeros(1, 1), torch.ones(1, 1)    # a quarter turn
        >>> k_cache, v_cache = torch.zeros(2, 3, 1, 2)        # 3 slots
        >>> q, k, v = rope_cache(qkv, cos, sin, torch.tensor([2]), k_cache, v_cache, num_heads=2)
        >>> q
        tensor([[[-1.,  0.],
                 [-3.,  2.]]])
        >>> k_cache[2], v_cache[2]
        (tensor([[-5.,  4.]]), tensor([[6., 7.]]))
    """
    backend, sizes = _SPEC.check(backend, qkv, k_cache)
    kv_heads, head_dim = sizes["Hkv"], sizes["D"]
    if kv_heads == 0 or head_dim == 0 or head_dim % 2:
        raise ValueError(
            f"k_cache must have at least one head and an even last dimension, got shape {list(k_cache.shape)}"
        )
    check_int("num_heads", num_heads, 1)
    sizes["Hq"] = num_heads
    rest = (v_cache, cos, sin, slots, qk_norm_weight, num_rows)
    _REST.check(backend, qkv, *rest, sizes=sizes)
    check_number("norm_eps", norm_eps, "a positive number", above=0)
    heads, dtype, tokens = (num_heads, kv_heads, kv_heads), qkv.dtype, qkv.shape[0]
    out = _Rotated(*(torch.empty(tokens, n, head_dim, dtype=dtype, device=qkv.device) for n in heads))
    return tuple(_launch(backend, out, qkv, k_cache, *rest, num_heads, float(norm_eps)))
