"""Second launch of :mod:`lenvm_kernels.ops.topk_candidates`: extracts the best tokens in order, filters them, and
chooses the candidates that the value model scores."""

import triton
import triton.language as tl

from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.reference import topk_candidates as reference
from lenvm_kernels.types import Status, TextBreak

_LOG2_E = tl.constexpr(1.4426950408889634)
_GREEDY_TEMPERATURE = tl.constexpr(reference.GREEDY_TEMPERATURE)
_HALVINGS, _MOST_HALVINGS = tl.constexpr(reference.HALVINGS), tl.constexpr(reference.MOST_HALVINGS)
_OVERDUE, _HALVINGS_OVERDUE = tl.constexpr(reference.OVERDUE), tl.constexpr(reference.HALVINGS_OVERDUE)
_AFTER_SENTENCE, _AFTER_LINE = tl.constexpr(reference.AFTER_SENTENCE), tl.constexpr(reference.AFTER_LINE)
_WITHIN = tl.constexpr(reference.WITHIN_LINE)
_LINE, _SENTENCE = tl.constexpr(int(TextBreak.LINE)), tl.constexpr(int(TextBreak.SENTENCE))
_NO_TOKEN = tl.constexpr(2**31 - 1)
_UNGUIDED, _GUIDE = tl.constexpr(int(Status.UNGUIDED)), tl.constexpr(int(Status.GUIDE))
_SINGLE, _SKIP = tl.constexpr(int(Status.SINGLE)), tl.constexpr(int(Status.SKIP))
_NOT_DUE = tl.constexpr(int(Status.NOT_DUE))


@triton.jit
def _exponent_scale(temperature_ptr, request):
    """(log2(e) / temperature, whether the request is greedy, whether the temperature is finite)"""
    temperature = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + request)
    greedy = temperature < _GREEDY_TEMPERATURE
    return _LOG2_E / tl.where(greedy, 1.0, temperature), greedy, tl.abs(temperature) < float("inf")


@triton.jit
def _located(scores_ptr, stride_scores_request, mask_ptr, stride_mask_request, addresses_ptr, ALIGNMENT):
    """The scores and the mask, with their row strides, at the addresses stored by a step, unless None.

    Rows begin at multiples of ALIGNMENT elements, which determines the width of loads.
    """
    if addresses_ptr is not None:
        scores_ptr = tl.load(addresses_ptr).to(tl.pointer_type(scores_ptr.dtype.element_ty))
        scores_ptr = tl.multiple_of(scores_ptr, ALIGNMENT)
        stride_scores_request = tl.load(addresses_ptr + 1)
        if mask_ptr is not None:
            mask_ptr = tl.load(addresses_ptr + 2).to(tl.pointer_type(tl.int32))
            stride_mask_request = tl.load(addresses_ptr + 3)
    if ALIGNMENT > 1:
        stride_scores_request = stride_scores_request // ALIGNMENT * ALIGNMENT
    return scores_ptr, stride_scores_request, mask_ptr, stride_mask_request


@triton.jit
def _load_scores(scores_ptr, stride_scores_request, mask_ptr, stride_mask_request, request, token, is_there, IS_LOGITS):
    """fp32 scores of a request's tokens. Masked and missing tokens get the score of a non-candidate."""
    nothing = -float("inf") if IS_LOGITS else 0.0
    x = tl.load(scores_ptr + request * stride_scores_request + token, mask=is_there, other=nothing).to(tl.float32)
    if not IS_LOGITS:
        x = tl.where(x < 0, 0.0, x)  # tl.maximum would drop a NaN
    if mask_ptr is not None:
        word = tl.load(mask_ptr + request * stride_mask_request + token // 32, mask=is_there, other=0)
        x = tl.where((word >> (token % 32)) & 1 == 1, x, nothing)
    return x


@triton.jit
def _load_tile(scores, request, tile, V, IS_LOGITS, TILE: tl.constexpr):
    """fp32 [TILE]: the scores of a request's tokens in a tile. The tile may be past the vocabulary."""
    token = tile * TILE + tl.arange(0, TILE)
    return _load_scores(*scores, request, token, token < V, IS_LOGITS)


@triton.jit
def _store_scored(
    scored, requests, drawn_ptr, sample, request, tokens, count, status, K: tl.constexpr, SCORE_ALL: tl.constexpr
):
    """Store the tokens of a request that the value model scores: the candidates, or only the next token."""
    column = tl.arange(0, K)
    is_guide = status == _GUIDE
    next_token = tl.full([], -1, tl.int32)
    if drawn_ptr is not None:
        next_token = tl.load(drawn_ptr + request)
    only_token = tl.max(tokens, axis=0)  # the single candidate, because padding is -1
    next_token = tl.where((status == _SINGLE) & (sample != 0), only_token, next_token)
    alone = tl.load(requests.wants_length + request) & (is_guide == 0) & (next_token >= 0)
    scored_count = tl.where(alone, 1, tl.where(is_guide | SCORE_ALL, count, 0))
    tl.store(scored.token_ids + request * K + column, tl.where((column == 0) & alone, next_token, tokens))
    tl.store(scored.counts + request, scored_count)
    tl.store(scored.positions + request, tl.load(requests.positions + request) + 1)
    tl.store(scored.alone + request, alone)


@kernel(specialized="tile_max_ptr tile_sum_ptr text_breaks_ptr S step_ptr scores_ptr mask_ptr addresses_ptr V E")
def _filter_kernel(
    candidates,  # Candidates, written
    tile_max_ptr,  # [B, tiles]
    tile_sum_ptr,  # [B, tiles]
    guided_ptr,  # [B] or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    table,  # CandidateColumns or None
    stride,  # its strides
    table_rows_ptr,  # [B] or None
    generated_ptr,  # [B] or None
    text_breaks_ptr,  # [S] or None
    S,
    last_tokens_ptr,  # [B] or None
    scored,  # ScoredCandidates, written, or None
    requests,  # StepRequests or None
    drawn_ptr,  # int32 [B] or None
    step_ptr,  # int64 [1] or None, written
    sample,  # whether tokens are drawn from the candidates
    scores_ptr,  # [B, V]
    stride_scores_request,
    mask_ptr,  # [B, ceil(V / 32)] or None
    stride_mask_request,
    addresses_ptr,  # int64 [4] or None
    V,
    E,
    SCORE_ALL: tl.constexpr,
    IS_LOGITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # elements of the scores
    K: tl.constexpr,
    ENDS: tl.constexpr,  # a power of two >= E
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # a power of two >= tiles
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, K)
    no_tokens = tl.full([K], -1, tl.int32)
    if step_ptr is not None:
        tl.atomic_add(step_ptr, 1, mask=request == 0, sem="relaxed")
    if guided_ptr is not None:  # noqa: SIM102 - a None pointer must not reach the load
        if not tl.load(guided_ptr + request):
            tl.store(candidates.token_ids + request * K + column, no_tokens)
            tl.store(candidates.probs + request * K + column, tl.zeros([K], tl.float32))
            tl.store(candidates.counts + request, 0)
            tl.store(candidates.status + request, _UNGUIDED)
            tl.store(candidates.lost_mass + request, 0.0)
            if scored is not None:
                status = tl.full([], _UNGUIDED, tl.int32)
                _store_scored(scored, requests, drawn_ptr, sample, request, no_tokens, 0, status, K, SCORE_ALL)
            return
    nothing = -float("inf") if IS_LOGITS else 0.0
    scale, greedy, usable = _exponent_scale(temperature_ptr, request)
    tiles = tl.cdiv(V, TILE)
    tile = tl.arange(0, TILES)
    tile_max = tl.load(tile_max_ptr + request * tiles + tile, mask=tile < tiles, other=nothing)
    tile_sum = tl.load(tile_sum_ptr + request * tiles + tile, mask=tile < tiles, other=0.0)
    best = tl.max(tile_max, axis=0)
    if IS_LOGITS:
        tile_sum = tl.where(tile_max == nothing, tile_sum, tile_sum * tl.exp2((tile_max - best) * scale))
    total = tl.sum(tile_sum, axis=0)
    usable = usable & (total < float("inf")) & (best > nothing)  # NaN compares false
    # The tile of the next token, and its scores. ``tile_max`` then has the best scores left in the other tiles.
    scores = _located(scores_ptr, stride_scores_request, mask_ptr, stride_mask_request, addresses_ptr, ALIGNMENT)
    best_tile = tl.min(tl.where(tile_max == best, tile, TILES), axis=0)
    x = _load_tile(scores, request, best_tile, V, IS_LOGITS, TILE)
    tile_max = tl.where(tile == best_tile, nothing, tile_max)

    top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    limit = tl.where((top_k <= 0) | (top_k >= V), V, top_k)
    limit = tl.where(greedy, 1, limit)
    sought = limit  # number of tokens to extract
    first = 1 / total if IS_LOGITS else best  # probability of the best token
    room = K  # columns for tokens that do not end the output
    is_alone = True  # whether all tokens taken so far end the output
    if table is not None:
        table_row = request
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + request).to(tl.int64)
        least = tl.load(table.min_end_prob + table_row * stride.min_end_prob)
        has_ends = least < float("inf")
        sought = tl.where(has_ends, V, limit)
        min_p = tl.maximum(min_p, tl.load(table.least_share + table_row * stride.least_share))
        slot = tl.arange(0, ENDS)
        end = tl.load(table.ending_token_ids + table_row * stride.ending_token_ids + slot, mask=slot < E, other=-1)
        is_token = (end >= 0) & (end < V)
        # End tokens that are candidates regardless of the filters. They take at most all columns except one.
        end_score = _load_scores(*scores, request, end, is_token, IS_LOGITS)
        end_p = tl.exp2((end_score - best) * scale) / total if IS_LOGITS else end_score
        if text_breaks_ptr is not None:
            last = tl.load(last_tokens_ptr + request).to(tl.int64)
            ended = tl.load(text_breaks_ptr + last, mask=(last >= 0) & (last < S), other=0)
            after_line = tl.where((ended & _LINE) != 0, _AFTER_LINE, _WITHIN)
            least *= tl.where((ended & _SENTENCE) != 0, _AFTER_SENTENCE, after_line)
        if generated_ptr is not None:
            due_length = tl.maximum(tl.load(table.due_length + table_row * stride.due_length), 1.0)
            late = tl.maximum(tl.load(generated_ptr + request).to(tl.float32) / due_length - 1, 0.0)
            halvings = tl.minimum(late, _OVERDUE) * _HALVINGS + tl.maximum(late - _OVERDUE, 0.0) * _HALVINGS_OVERDUE
            least *= tl.exp2(-tl.minimum(halvings, _MOST_HALVINGS))
        least = tl.where(usable, least, float("nan"))  # a broken request has no candidates
        ends = is_token & (end_score > nothing) & (end_p >= least)
        again = ends[None, :] & (end[None, :] == end[:, None]) & (slot[None, :] < slot[:, None])
        ends = ends & (tl.max(again.to(tl.int32), axis=1) == 0)
        is_ahead = (end_score[None, :] == end_score[:, None]) & (end[None, :] < end[:, None])
        is_ahead = ends[None, :] & (is_ahead | (end_score[None, :] > end_score[:, None]))
        ends = ends & (tl.sum(is_ahead.to(tl.int32), axis=1) < K - 1)
        room = K - tl.sum(ends.to(tl.int32), axis=0)
    tokens, probs = tl.full([K], -1, tl.int32), tl.zeros([K], tl.float32)
    count, mass = 0, 0.0
    removed = 0.0  # probability of ends that pass the filters but not min_end_prob
    # The extra round after K checks whether the next token would have been kept, i.e. whether K truncates the list.
    cut_by_columns = False
    most = tl.minimum(sought, K + 1)
    score, last_score, token = best, best, -1
    k = 0
    while k < most:
        # The best of the other tiles is read ahead: the token after this one is in it or in the same tile.
        other_max = tl.max(tile_max, axis=0)
        other_tile = tl.min(tl.where(tile_max == other_max, tile, TILES), axis=0)
        other_x = _load_tile(scores, request, other_tile, V, IS_LOGITS, TILE)
        # Tokens of the tile that follow the last one in the order of candidates, and the first of them.
        token_id = best_tile * TILE + tl.arange(0, TILE)
        follows = (x < last_score) | ((x == last_score) & (token_id > token))
        token = tl.min(tl.where(follows & (x == score), token_id, _NO_TOKEN), axis=0)
        best_max = tl.max(tl.where(follows & (token_id != token), x, nothing), axis=0)
        p = tl.exp2((score - best) * scale) / total if IS_LOGITS else score
        keep = (k < limit) & (score > nothing) & (mass + removed <= top_p) & (p >= min_p * first)
        keep = usable & (keep | (k == 0))
        goes_on = keep  # the filters reject every token after the first rejected one
        if k < K:
            taken = keep
            if table is not None:
                is_this = is_token & (end == token)
                is_end = tl.max((is_this & ends).to(tl.int32), axis=0) > 0
                ends_output = tl.max(is_this.to(tl.int32), axis=0) > 0
                is_improbable = has_ends & ends_output & (p < least)
                removed += tl.where(keep & is_improbable, p, 0.0)
                keep = keep & (is_improbable == 0)
                keep = keep | (usable & has_ends & is_alone & (ends_output == 0) & (score > nothing))
                taken = is_end | (keep & (room > 0))
                is_alone = is_alone & ((taken == 0) | ends_output)
                goes_on = goes_on | (usable & has_ends & is_alone & (score > nothing))
                ends = ends & (is_this == 0)
                room -= (taken & (is_end == 0)).to(tl.int32)
                cut_by_columns = cut_by_columns | (keep & (taken == 0))
            place = tl.where(taken, count, K)
            tokens = tl.where(column == place, token, tokens)
            probs = tl.where(column == place, p, probs)
            count += taken.to(tl.int32)
            mass += tl.where(taken, p, 0.0)
        else:
            cut_by_columns = cut_by_columns | keep
        k = tl.where(goes_on, k + 1, most)
        stays = (best_max > other_max) | ((best_max == other_max) & (best_tile < other_tile))
        tile_max = tl.where(tile == tl.where(stays, -1, best_tile), best_max, tile_max)
        tile_max = tl.where(tile == tl.where(stays, -1, other_tile), nothing, tile_max)
        best_tile, x = tl.where(stays, best_tile, other_tile), tl.where(stays, x, other_x)
        last_score, score = score, tl.maximum(best_max, other_max)
    if table is not None:
        for _ in range(E):
            score = tl.max(tl.where(ends, end_score, nothing), axis=0)
            token = tl.min(tl.where(ends & (end_score == score), end, _NO_TOKEN), axis=0)
            ends = ends & (end != token)
            taken = token != _NO_TOKEN
            p = tl.exp2((score - best) * scale) / total if IS_LOGITS else score
            place = tl.where(taken, count, K)
            tokens = tl.where(column == place, token, tokens)
            probs = tl.where(column == place, p, probs)
            count += taken.to(tl.int32)
            mass += tl.where(taken, p, 0.0)

    status = tl.where(count > 0, _GUIDE, _UNGUIDED)
    if table is not None:
        share = tl.where(probs > 0, probs / mass, 1.0)  # 1 contributes nothing
        entropy = -tl.sum(share * tl.log(share), axis=0)
        threshold = tl.load(table.entropy_threshold + table_row * stride.entropy_threshold)
        status = tl.where((count > 1) & (entropy <= threshold), _SKIP, status)
    status = tl.where(count == 1, _SINGLE, status)
    if scored is not None:
        is_end = tl.max(((tokens[:, None] == end[None, :]) & is_token[None, :]).to(tl.int32), axis=1)
        is_left_out = (tl.load(requests.due + request) == 0) & (tl.max(is_end, axis=0) == 0)
        status = tl.where((status == _GUIDE) & is_left_out, _NOT_DUE, status)
        _store_scored(scored, requests, drawn_ptr, sample, request, tokens, count, status, K, SCORE_ALL)
    lost_mass = tl.where(cut_by_columns, (1.0 if IS_LOGITS else total) - mass, 0.0)
    tl.store(candidates.token_ids + request * K + column, tokens)
    tl.store(candidates.probs + request * K + column, probs)
    tl.store(candidates.counts + request, count)
    tl.store(candidates.status + request, status)
    tl.store(candidates.lost_mass + request, tl.where(usable, lost_mass, float("nan")))
