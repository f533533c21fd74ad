"""Candidate extraction: softmax with temperature, top-k, top-p and min-p of each row, in one pass over the vocabulary.

``p = softmax(scores / temperature)``; the first ``top_k`` tokens in descending order, of them those whose predecessors
hold at most ``top_p`` of the mass, of them those with ``p >= min_p max(p)``. Source: section 1 of the specification;
the candidate selection of the LenVM fork of SGLang.

Two launches. The first streams the scores once: a program walks a range of tiles, notes each tile's (max, sum of
exponentials) and keeps the range's K best tokens; a tile that holds nothing above the K-th best costs one compare.
The second merges what the ranges found, one program a row. Choosing the K best is exact, and the tiles' sums are added
in an order that follows from their number alone, so how many ranges a row is cut into (it depends on B) cannot change a
bit of the result.
"""

import torch
import triton
import triton.language as tl

from lenvm_kernels.ops._common import FLOAT_DTYPES, ceil_div, check_tensor, next_power_of_2, resolve_backend
from lenvm_kernels.reference.topk_candidates import GREEDY_TEMPERATURE, Candidates, Status
from lenvm_kernels.reference.topk_candidates import topk_candidates as _reference

__all__ = ["Candidates", "Status", "topk_candidates"]

MAX_CANDIDATES = 64
MAX_VOCAB = 262_144

# 1,024 tokens a tile: at B = 1 the 149 tiles of V = 151,936 give each of an H200's 132 multiprocessors one. Not
# measured yet, like the two constants below.
TILE = 1024
# Up to this many rows every tile is a range of its own, to fill the GPU; above, a row has few ranges, because each
# range inserts its first K tokens whatever they are. Two choices only, so that a new batch size compiles nothing.
FEW_ROWS = 16
RANGES_OF_MANY_ROWS = 16
# Lanes among which the second launch deals out a row's tiles. They are the threads of a warp, one lane each: the
# compiler cannot give a thread two lanes in one variant of the kernel and one in another, which would change the order
# of a sum and its last bits. `bench.codegen` compares the variants.
LANES = tl.constexpr(32)

_LOG2_E = tl.constexpr(1.4426950408889634)
_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_NO_KEY = tl.constexpr(-(2**63))
_UNGUIDED, _GUIDE = tl.constexpr(int(Status.UNGUIDED)), tl.constexpr(int(Status.GUIDE))
_SINGLE, _SKIP = tl.constexpr(int(Status.SINGLE)), tl.constexpr(int(Status.SKIP))


# A key holds a score and its token in one int64 that sorts as candidates do: score first, then the lower token id.
@triton.jit
def _encode_key(score, token):
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _key_score(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_token(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _exponent_scale(temperature_ptr, row):
    """(log2(e) / temperature, row is greedy, temperature is finite)"""
    temperature = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    greedy = temperature < _GREEDY_TEMPERATURE
    return _LOG2_E / tl.where(greedy, 1.0, temperature), greedy, tl.abs(temperature) < float("inf")


@triton.jit(
    do_not_specialize_on_alignment=["temperature_ptr", "guided_ptr"],
)
def _scan_kernel(
    scores_ptr,  # [B, V]
    stride_scores_row,
    temperature_ptr,  # [B] or None
    guided_ptr,  # [B] or None
    mask_ptr,  # [B, ceil(V / 32)] or None
    stride_mask_row,
    tile_max_ptr,  # [B, tiles]
    tile_sum_ptr,  # [B, tiles]
    range_keys_ptr,  # [B, RANGES, K]
    range_next_ptr,  # [B, RANGES]: best score of the range that is not among its K keys
    V,
    IS_LOGITS: tl.constexpr,
    K: tl.constexpr,
    RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if guided_ptr is not None:  # noqa: SIM102 - a None pointer must not reach the load
        if not tl.load(guided_ptr + row):
            return
    nothing = -float("inf") if IS_LOGITS else 0.0  # the score of a token that cannot be a candidate
    scale, _, _ = _exponent_scale(temperature_ptr, row)
    tiles = tl.cdiv(V, BLOCK)
    tiles_per_range = tl.cdiv(tiles, RANGES)
    first_tile = segment * tiles_per_range

    keys = _NO_KEY + tl.arange(0, K).to(tl.int64)  # distinct, so that an insertion replaces one
    kth_key, kth_score, next_score = tl.min(keys, axis=0), nothing, nothing
    for tile in range(first_tile, min(first_tile + tiles_per_range, tiles)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + row * stride_scores_row + token, mask=token < V, other=nothing).to(tl.float32)
        if not IS_LOGITS:
            x = tl.where(x < 0, 0.0, x)  # tl.maximum would drop a NaN
        if mask_ptr is not None:
            word = tl.load(mask_ptr + row * stride_mask_row + token // 32, mask=token < V, other=0)
            x = tl.where((word >> (token % 32)) & 1 == 1, x, nothing)

        # NaN and +inf reach the sum: a sum that is not finite marks the row as broken.
        best = tl.max(x, axis=0)
        if IS_LOGITS:
            total = tl.sum(tl.exp2((x - tl.where(best == nothing, 0.0, best)) * scale), axis=0)
        else:
            total = tl.sum(x, axis=0)
        tl.store(tile_max_ptr + row * tiles + tile, best)
        tl.store(tile_sum_ptr + row * tiles + tile, total)

        if best > kth_score:  # not >=: of equal scores the earlier token stays
            tile_keys = tl.where(x > nothing, _encode_key(x, token), _NO_KEY)
            best_key = tl.max(tile_keys, axis=0)
            while best_key > kth_key:
                keys = tl.where(keys == kth_key, best_key, keys)
                if _key_token(kth_key) < V:
                    next_score = tl.maximum(next_score, _key_score(kth_key))
                kth_key = tl.min(keys, axis=0)
                tile_keys = tl.where(tile_keys == best_key, _NO_KEY, tile_keys)
                best_key = tl.max(tile_keys, axis=0)
            if best_key != _NO_KEY:
                next_score = tl.maximum(next_score, _key_score(best_key))
            if _key_token(kth_key) < V:
                kth_score = _key_score(kth_key)
        else:
            next_score = tl.maximum(next_score, best)

    tl.store(range_keys_ptr + (row * RANGES + segment) * K + tl.arange(0, K), keys)
    tl.store(range_next_ptr + row * RANGES + segment, next_score)


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "guided_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "entropy_threshold_ptr",
    ],
)
def _filter_kernel(
    temperature_ptr,  # [B] or None
    guided_ptr,  # [B] or None
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    entropy_threshold_ptr,  # [B] or None
    tile_max_ptr,  # [B, tiles]
    tile_sum_ptr,  # [B, tiles]
    range_keys_ptr,  # [B, RANGES, K]
    range_next_ptr,  # [B, RANGES]
    token_ids_ptr,  # [B, K]
    probs_ptr,  # [B, K]
    counts_ptr,  # [B]
    status_ptr,  # [B]
    lost_mass_ptr,  # [B]
    V,
    IS_LOGITS: tl.constexpr,
    K: tl.constexpr,
    RANGES: tl.constexpr,
    TILES: tl.constexpr,  # a multiple of LANES >= tiles
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K)
    if guided_ptr is not None:  # noqa: SIM102 - a None pointer must not reach the load
        if not tl.load(guided_ptr + row):
            tl.store(token_ids_ptr + row * K + slot, tl.full([K], -1, tl.int32))
            tl.store(probs_ptr + row * K + slot, tl.zeros([K], tl.float32))
            tl.store(counts_ptr + row, 0)
            tl.store(status_ptr + row, _UNGUIDED)
            tl.store(lost_mass_ptr + row, 0.0)
            return
    nothing = -float("inf") if IS_LOGITS else 0.0
    scale, greedy, usable = _exponent_scale(temperature_ptr, row)
    tiles = tl.cdiv(V, BLOCK)
    # Unrolled, so that all loads are on their way at once.
    lane = tl.arange(0, LANES)
    lane_max, lane_sum = tl.full([LANES], nothing, tl.float32), tl.zeros([LANES], tl.float32)
    for first in tl.static_range(0, TILES, LANES):
        tile = first + lane
        lane_max = tl.maximum(lane_max, tl.load(tile_max_ptr + row * tiles + tile, mask=tile < tiles, other=nothing))
    best = tl.max(lane_max, axis=0)
    for first in tl.static_range(0, TILES, LANES):
        tile = first + lane
        tile_sum = tl.load(tile_sum_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        if IS_LOGITS:
            tile_max = tl.load(tile_max_ptr + row * tiles + tile, mask=tile < tiles, other=nothing)
            tile_sum = tl.where(tile_max == nothing, tile_sum, tile_sum * tl.exp2((tile_max - best) * scale))
        lane_sum += tile_sum
    total = tl.sum(lane_sum, axis=0)
    usable = usable & (total < float("inf")) & (best > nothing)  # NaN compares false

    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    limit = tl.where((top_k <= 0) | (top_k >= V), V, top_k)
    limit = tl.where(greedy, 1, limit)
    keys = tl.load(range_keys_ptr + row * RANGES * K + tl.arange(0, RANGES * K))
    next_score = tl.max(tl.load(range_next_ptr + row * RANGES + tl.arange(0, RANGES)), axis=0)

    first = 1 / total if IS_LOGITS else best  # probability of the best token
    tokens, probs = tl.full([K], -1, tl.int32), tl.zeros([K], tl.float32)
    count, mass = 0, 0.0
    # One round more than K: would the next token have been kept, had there been a slot for it?
    cut_by_slots = False
    for k in range(K + 1):
        key = tl.max(keys, axis=0)
        keys = tl.where(keys == key, _NO_KEY, keys)
        found = _key_token(key) < V
        score = tl.where(found, _key_score(key), nothing)
        if k == K:
            score = tl.maximum(score, next_score)
        p = tl.exp2((score - best) * scale) / total if IS_LOGITS else score
        keep = (k < limit) & (score > nothing) & (mass <= top_p) & (p >= min_p * first)
        keep = usable & (keep | (k == 0))
        if k < K:
            place = tl.where(keep, k, K)
            tokens = tl.where(slot == place, _key_token(key), tokens)
            probs = tl.where(slot == place, p, probs)
            count += keep.to(tl.int32)
            mass += tl.where(keep, p, 0.0)
        else:
            cut_by_slots = keep

    status = tl.where(count > 0, _GUIDE, _UNGUIDED)
    if entropy_threshold_ptr is not None:
        share = tl.where(probs > 0, probs / mass, 1.0)  # 1 contributes nothing
        entropy = -tl.sum(share * tl.log(share), axis=0)
        status = tl.where((count > 1) & (entropy <= tl.load(entropy_threshold_ptr + row)), _SKIP, status)
    status = tl.where(count == 1, _SINGLE, status)
    lost_mass = tl.where(cut_by_slots, (1.0 if IS_LOGITS else total) - mass, 0.0)
    tl.store(token_ids_ptr + row * K + slot, tokens)
    tl.store(probs_ptr + row * K + slot, probs)
    tl.store(counts_ptr + row, count)
    tl.store(status_ptr + row, status)
    tl.store(lost_mass_ptr + row, tl.where(usable, lost_mass, float("nan")))


def topk_candidates(
    scores: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    max_candidates: int = 8,
    temperature: torch.Tensor | None = None,
    is_logits: bool = False,
    entropy_threshold: torch.Tensor | None = None,
    guided: torch.Tensor | None = None,
    vocab_mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> Candidates:
    """Choose each row's candidate tokens: top-k, of them top-p, of them min-p.

    Tokens are ordered by score, equal scores by token id. The first one always stays. A token of probability 0 or
    logit -inf is never a candidate. A broken row (NaN or +inf among its scores, no token to choose, or a temperature
    that is not finite) becomes unguided and is marked in ``lost_mass``; it changes no other row.

    Args:
        scores: fp32, bf16 or fp16 ``[B, V]``, V up to 262,144, last dimension contiguous: probabilities, or logits.
        top_k: int32 ``[B]``; the first ``top_k`` tokens. ``<= 0`` or ``>= V`` is no limit; then, and whenever it
            exceeds ``max_candidates``, the list ends at ``max_candidates``.
        top_p: fp32 ``[B]`` in (0, 1]; a token stays while the mass before it is ``<= top_p``.
        min_p: fp32 ``[B]`` in [0, 1]; a token stays while its probability is ``>= min_p`` times the largest.
        max_candidates: K, slots a row: a power of two up to 64.
        temperature: fp32 ``[B]``, only with logits (None: 1). Below 1e-6 the row is greedy: one candidate.
        is_logits: ``scores`` are logits, and the probabilities their softmax at the row's temperature.
        entropy_threshold: fp32 ``[B]`` in nats, NaN for none: a row whose renormalised candidates' entropy is at or
            below it is skipped.
        guided: bool ``[B]`` (None: all). Rows not guided are not read and come back empty.
        vocab_mask: int32 ``[B, ceil(V / 32)]``, bit 1 = allowed, token ``t`` is bit ``t % 32`` of word ``t // 32`` (as
            xgrammar packs it); applied before everything else.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        :class:`Candidates`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 3.0, 1.0]])
        >>> row = dict(top_k=torch.tensor([3], dtype=torch.int32), top_p=torch.ones(1), min_p=torch.zeros(1))
        >>> topk_candidates(logits, **row, max_candidates=4, is_logits=True).token_ids
        tensor([[ 2,  0,  1, -1]], dtype=torch.int32)
    """
    scores_dtypes = (*FLOAT_DTYPES, torch.float64) if backend == "reference" else FLOAT_DTYPES
    check_tensor("scores", scores, dtypes=scores_dtypes, shape=[None, None])
    device = scores.device
    rows, vocab = scores.shape
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"scores must have between 1 and {MAX_VOCAB} columns, got {vocab}")
    if max_candidates not in (1, 2, 4, 8, 16, 32, MAX_CANDIDATES):
        raise ValueError(f"max_candidates must be a power of two up to {MAX_CANDIDATES}, got {max_candidates!r}")
    check_tensor("top_k", top_k, dtypes=torch.int32, shape=[rows], device=device)
    for name, value in (
        ("top_p", top_p),
        ("min_p", min_p),
        ("temperature", temperature),
        ("entropy_threshold", entropy_threshold),
    ):
        if value is not None or name in ("top_p", "min_p"):
            check_tensor(name, value, dtypes=torch.float32, shape=[rows], device=device)
    if temperature is not None and not is_logits:
        raise ValueError("temperature must be None when scores are probabilities (is_logits=False)")
    if guided is not None:
        check_tensor("guided", guided, dtypes=torch.bool, shape=[rows], device=device)
    if vocab_mask is not None:
        check_tensor("vocab_mask", vocab_mask, dtypes=torch.int32, shape=[rows, -(-vocab // 32)], device=device)

    if resolve_backend(backend, device) == "reference":
        return _reference(
            scores,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_candidates=max_candidates,
            temperature=temperature,
            is_logits=is_logits,
            entropy_threshold=entropy_threshold,
            guided=guided,
            vocab_mask=vocab_mask,
        )
    return _launch(
        scores, top_k, top_p, min_p, max_candidates, temperature, is_logits, entropy_threshold, guided, vocab_mask
    )


def _launch(
    scores, top_k, top_p, min_p, max_candidates, temperature, is_logits, entropy_threshold, guided, vocab_mask
) -> Candidates:
    (rows, vocab), device = scores.shape, scores.device
    found = Candidates(
        token_ids=torch.empty(rows, max_candidates, dtype=torch.int32, device=device),
        probs=torch.empty(rows, max_candidates, dtype=torch.float32, device=device),
        counts=torch.empty(rows, dtype=torch.int32, device=device),
        status=torch.empty(rows, dtype=torch.int8, device=device),
        lost_mass=torch.empty(rows, dtype=torch.float32, device=device),
    )
    if rows == 0:
        return found
    tiles = ceil_div(vocab, TILE)
    ranges = next_power_of_2(tiles)
    # What the number of rows must not decide, follows from the larger number of ranges: warps divide sums among them.
    filter_warps = 4 if ranges * max_candidates <= 2048 else 8
    ranges = ranges if rows <= FEW_ROWS else min(ranges, RANGES_OF_MANY_ROWS)
    # An allocation each: where the second half of one would begin depends on the rows, and a kernel is compiled anew
    # for pointers that are not aligned.
    tile_max = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    tile_sum = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    range_keys = torch.empty(rows, ranges, max_candidates, dtype=torch.int64, device=device)
    range_next = torch.empty(rows, ranges, dtype=torch.float32, device=device)
    sizes = dict(IS_LOGITS=is_logits, K=max_candidates, RANGES=ranges, BLOCK=TILE)
    with torch.cuda.device_of(scores):
        _scan_kernel[(rows, ranges)](
            scores,
            scores.stride(0),
            temperature,
            guided,
            vocab_mask,
            0 if vocab_mask is None else vocab_mask.stride(0),
            tile_max,
            tile_sum,
            range_keys,
            range_next,
            vocab,
            **sizes,
            num_warps=4,
        )
        _filter_kernel[(rows,)](
            temperature,
            guided,
            top_k,
            top_p,
            min_p,
            entropy_threshold,
            tile_max,
            tile_sum,
            range_keys,
            range_next,
            found.token_ids,
            found.probs,
            found.counts,
            found.status,
            found.lost_mass,
            vocab,
            **sizes,
            TILES=ceil_div(tiles, LANES.value) * LANES.value,
            num_warps=filter_warps,
            # A product fused with an addition across threads would leave them with different entropies.
            enable_fp_fusion=False,
        )
    return found
