"""Candidate extraction: softmax with temperature, top-k, top-p and min-p of each request, in one pass.

``p = softmax(scores / temperature)``. Candidates are the first ``top_k`` tokens in descending order that are preceded
by at most ``top_p`` of the mass and have ``p >= min_p max(p)``. Source: section 1 of the specification; the candidate
selection of the LenVM fork of SGLang.

There are two launches. The first streams the scores once and stores the maximum and the sum of exponentials of every
tile of 128 tokens. The second launch, with one program per request, adds the sums and extracts the tokens in order: a
round rereads the tile with the largest maximum. It ends at the first token that the filters reject. No reduction order
depends on the number of requests.
"""

from collections import namedtuple
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    COLUMNS,
    ceil_div,
    next_power_of_2,
    overlapping,
    per_request,
    row_strides,
    with_row_strides,
)
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.ops.topk_candidates.filter import _exponent_scale, _filter_kernel, _load_scores, _located
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.topk_candidates import topk_candidates as _reference
from lenvm_kernels.types import Candidates, GuidanceColumns, ScoredCandidates, StepRequests

MAX_VOCAB = 1_048_576
# Tile maxima per warp of the second launch, 64 per thread. One warp needs no barriers: on sm_90, a round has 673
# instructions and no barrier with one warp, and 319 instructions and 12 barriers with four.
WARP_TILES = 2048

# Tokens per tile: four per lane of a warp in fp32, eight per lane of half a warp in 16 bits, so that both reductions
# are shuffles without a barrier. Measured on an H200 with k = 5 and an earlier second launch: 14.2 us at B 64, 99 % of
# copy bandwidth (67 % with a cold L2 cache), and 7.1 us at B 1. Other sizes of tiles and programs are not measured.
TILE = 128
# Bytes read by a program of the first launch. Half the size would double the overhead of starting programs; twice the
# size would leave more multiprocessors idle at B = 1. Must not depend on the batch, because Triton 3.6 would distribute
# a tile with a vocab_mask differently over threads.
PROGRAM_BYTES = 8192
# Alignment in scores. If the vocabulary is a multiple of it, all rows of a contiguous tensor are aligned.
ALIGNMENT = 16


# Columns of the guidance table that the second launch reads.
CandidateColumns = namedtuple(
    "CandidateColumns", "min_end_prob least_share due_length entropy_threshold ending_token_ids"
)


# The row stride of a batch of one is arbitrary, so ALIGNMENT determines the width of loads, and thereby which thread
# adds which numbers.
@kernel(specialized="tile_max_ptr tile_sum_ptr scores_ptr mask_ptr addresses_ptr V")
def _scan_kernel(
    tile_max_ptr,  # [B, tiles]
    tile_sum_ptr,  # [B, tiles]
    guided_ptr,  # [B] or None
    temperature_ptr,  # [B] or None
    scores_ptr,  # [B, V]
    stride_scores_request,
    mask_ptr,  # [B, ceil(V / 32)] or None
    stride_mask_request,
    addresses_ptr,  # int64 [4] or None
    V,
    IS_LOGITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # each row begins at a multiple of it
    TILE: tl.constexpr,
    PROGRAM_TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    tiles = tl.cdiv(V, TILE)
    request = tl.program_id(0).to(tl.int64)
    if guided_ptr is not None:  # noqa: SIM102 - a None pointer must not reach the load
        if not tl.load(guided_ptr + request):
            return
    nothing = -float("inf") if IS_LOGITS else 0.0  # the score of a token that cannot be a candidate
    scale, _, _ = _exponent_scale(temperature_ptr, request)
    tile = tl.program_id(1) * PROGRAM_TILES + tl.arange(0, PROGRAM_TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    scores = (scores_ptr, stride_scores_request, mask_ptr, stride_mask_request)
    scores = _located(*scores, addresses_ptr, ALIGNMENT)
    x = _load_scores(*scores, request, token, token < V, IS_LOGITS)
    # NaN and +inf propagate to the sum: a sum that is not finite marks the request as broken.
    best = tl.max(x, axis=1)
    if IS_LOGITS:
        total = tl.sum(tl.exp2((x - tl.where(best == nothing, 0.0, best)[:, None]) * scale), axis=1)
    else:
        total = tl.sum(x, axis=1)
    tl.store(tile_max_ptr + request * tiles + tile, best, mask=tile < tiles)
    tl.store(tile_sum_ptr + request * tiles + tile, total, mask=tile < tiles)


_SPEC = Spec(f"""
    scores: float [B, V=1..{MAX_VOCAB}]
    guided?: bool [B]
    vocab_mask?: int32 [B, (V + 31) // 32]
    table?: GuidanceColumns ({", ".join(CandidateColumns._fields)}) strided
    table_rows?: int [B]
    generated?: int32 [B]
    text_breaks?: int8 [S]
    last_tokens?: int [B]
    requests?: StepRequests of begin_step (positions, wants_length, due) [B]
    drawn?: int32 [B]
    step?: int64 [1]
    scored?: ScoredCandidates contiguous
""")
_TAKES: dict[str, Any] = {"table": CandidateColumns | None, "top_k": Tensor, "top_p": Tensor, "min_p": Tensor}
_TAKES |= {"temperature": Tensor | None, "addresses": Tensor | None, "max_candidates": int}
_TAKES |= dict.fromkeys(("is_logits", "is_aligned", "sample", "score_all"), bool)


@operator(_SPEC, reference=_reference, mutates=["scored", "step"], takes=_TAKES)
def _launch(out: Candidates, given):
    scores, guided, table, text_breaks = given.scores, given.guided, given.table, given.text_breaks
    temperature, addresses, is_logits = given.temperature, given.addresses, given.is_logits
    (count, vocab), columns, device = scores.shape, given.max_candidates, scores.device
    tiles = ceil_div(vocab, TILE)
    tile_max = torch.empty(count, tiles, dtype=torch.float32, device=device)
    tile_sum = torch.empty(count, tiles, dtype=torch.float32, device=device)
    inputs = (scores, scores.stride(0), *with_row_strides(given.vocab_mask), addresses, vocab)
    alignment = ALIGNMENT if (rows_are_aligned(scores) if addresses is None else given.is_aligned) else 1
    forms = dict(IS_LOGITS=is_logits, ALIGNMENT=alignment, TILE=TILE, **overlapping())
    program_tiles = max(PROGRAM_BYTES // (TILE * scores.element_size()), 1)
    _scan_kernel[(count, ceil_div(tiles, program_tiles))](
        tile_max, tile_sum, guided, temperature, *inputs, **forms, PROGRAM_TILES=program_tiles, num_warps=4
    )
    strides, ends = (None, 1) if table is None else (row_strides(table), table.ending_token_ids.shape[1])
    sentences = 0 if text_breaks is None else text_breaks.shape[0]
    _filter_kernel[(count,)](
        *(out, tile_max, tile_sum, guided, temperature, given.top_k, given.top_p, given.min_p),
        *(table, strides, given.table_rows, given.generated, text_breaks, sentences, given.last_tokens),
        *(given.scored, given.requests, given.drawn, given.step, int(given.sample)),
        *(*inputs, ends),
        **forms,
        SCORE_ALL=given.score_all,
        K=columns,
        ENDS=next_power_of_2(ends),
        TILES=next_power_of_2(tiles),
        num_warps=max(1, next_power_of_2(tiles) // WARP_TILES),
        # Otherwise a product fused with an addition across threads would give the threads different entropies.
        enable_fp_fusion=False,
    )


def rows_are_aligned(scores: Tensor) -> bool:
    """Whether each row of the scores begins at a multiple of ``ALIGNMENT`` elements from the first."""
    (count, vocab), stride = scores.shape, scores.stride(0)
    return vocab % ALIGNMENT == 0 and (count == 1 or stride % ALIGNMENT == 0)


def empty_scored(rows: int, columns: int, device: torch.device) -> ScoredCandidates:
    """Result tensors for ``scored`` of :func:`topk_candidates`, for ``rows`` requests with ``columns`` candidates."""
    return empty(ScoredCandidates, device, {"N": rows, "K": columns})


def topk_candidates(
    scores: Tensor,
    *,
    top_k: Tensor | int,
    top_p: Tensor | float,
    min_p: Tensor | float,
    max_candidates: int = 8,
    temperature: Tensor | float | None = None,
    is_logits: bool = False,
    guided: Tensor | None = None,
    vocab_mask: Tensor | None = None,
    addresses: Tensor | None = None,
    is_aligned: bool = False,
    table: GuidanceColumns | None = None,
    table_rows: Tensor | None = None,
    generated: Tensor | None = None,
    text_breaks: Tensor | None = None,
    last_tokens: Tensor | None = None,
    requests: StepRequests | None = None,
    drawn: Tensor | None = None,
    sample: bool = False,
    score_all: bool = False,
    step: Tensor | None = None,
    scored: ScoredCandidates | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> Candidates:
    """Select each request's candidate tokens by top-k, top-p and min-p, in this order, plus tokens that end the output.

    Tokens are ordered by score, ties by token id. The first token is always kept. A token with probability 0 or logit
    -inf is never a candidate. A broken request (NaN or +inf in the scores, no selectable token, or a non-finite
    temperature) becomes unguided and is marked in ``lost_mass``. Other requests are not affected.

    A request's parameters in ``table`` add to its filters:

    - A token of ``ending_token_ids`` is a candidate if and only if its probability is at least ``min_end_prob``,
      regardless of ``top_k``, ``top_p`` and ``min_p``. If all columns are in use, it replaces the least probable other
      candidate. The most probable token that does not end the output is kept if it is among the first K >= 2 tokens,
      so that the output can continue. inf disables these rules. Ids outside the vocabulary are ignored.
    - ``least_share`` is the lower bound of the request's ``min_p``.
    - Beyond ``due_length`` generated tokens, ``min_end_prob`` halves with each tenth of ``due_length``; from 1.5 times
      ``due_length`` on, it halves with each hundredth. Late requests therefore accept less probable ends.
    - A request is skipped if the entropy of its renormalised candidates is at or below ``entropy_threshold``.

    With ``scored``, the call also decides which candidates the value model scores in a step: the candidates of all
    requests with the status ``GUIDE``. A request that is not due and has no candidate that ends it gets ``NOT_DUE``
    instead. If lengths are requested without reweighting, only the next token is scored, if it is known.

    Args:
        scores: fp32, bf16 or fp16 ``[B, V]``, V up to 1,048,576; probabilities or logits. Rows may be strided.
        top_k: int32 ``[B]``, or one number for all requests; number of tokens to keep. ``<= 0`` or ``>= V`` means no
            limit. The list never exceeds ``max_candidates``.
        top_p: fp32 ``[B]`` or a number, in (0, 1]; a token is kept while the mass before it is ``<= top_p``.
        min_p: fp32 ``[B]`` or a number, in [0, 1]; a token is kept while its probability is ``>= min_p`` times the
            largest.
        max_candidates: K, columns per request, a power of two up to 64.
        temperature: fp32 ``[B]`` or a number, only with logits; default 1. Below 1e-6, a request is greedy.
        is_logits: whether ``scores`` are logits; probabilities are their softmax at the request's temperature.
        guided: bool ``[B]``. Unguided requests are not read and have empty results. If None, all are guided.
        vocab_mask: int32 ``[B, ceil(V / 32)]``, bit 1 = allowed, token ``t`` is bit ``t % 32`` of word ``t // 32`` (as
            packed by xgrammar). Applied before everything else.
        addresses: int64 ``[4]`` of :func:`begin_step`; addresses and row strides of the scores and of the mask, for
            CUDA graphs. ``scores`` and ``vocab_mask`` then only give dtype and shape. Not on the reference.
        is_aligned: with ``addresses``, whether each row begins at a multiple of 16 elements, and the first at 16 bytes.
        table: guidance parameters of ``R`` requests. If None, only the filters apply.
        table_rows: int32 or int64 ``[B]``; row of each request in the table. If None, request i has row i.
        generated: int32 ``[B]``; number of generated tokens, for ``due_length``. If None, 0.
        text_breaks: int8 ``[S]``; the :class:`TextBreak` of each token of the vocabulary (:func:`text_breaks_of`).
            ``min_end_prob`` is multiplied by 1/10,000 after the end of a sentence, by 1/10 after the end of a line, and
            by 100 elsewhere. If None, it is not scaled.
        last_tokens: int32 or int64 ``[B]``; the token before each request's scores, required with ``text_breaks``.
        requests: result of :func:`begin_step`; required with ``scored``.
        drawn: int32 ``[B]``; next tokens that are not drawn from the candidates, negative if unknown. If None, unknown.
        sample: whether a single candidate becomes the next token.
        score_all: whether to score the candidates of all requests, also without reweighting.
        step: int64 ``[1]``; :attr:`StepHistory.step`, incremented if ``scored`` has a row. If None, no history is kept.
        scored: contiguous :class:`ScoredCandidates` ``[B, K]``, written. If None, the candidates are only selected.
        backend: ``auto``, ``triton`` or ``reference``.
        validate: whether to check the arguments and convert numbers to tensors. If False, ``backend`` must be
            ``triton`` or ``reference``.

    Returns:
        :class:`Candidates`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 3.0, 1.0]])
        >>> topk_candidates(logits, top_k=3, top_p=1.0, min_p=0.0, max_candidates=4, is_logits=True).token_ids
        tensor([[ 2,  0,  1, -1]], dtype=torch.int32)
    """
    options = (table_rows, generated, text_breaks, last_tokens, requests, drawn, step, scored)
    operands = (scores, guided, vocab_mask, table, *options)
    if validate:
        if max_candidates not in COLUMNS:
            raise ValueError(f"max_candidates must be a power of two up to {COLUMNS[-1]}, got {max_candidates!r}")
        if temperature is not None and not is_logits:
            raise ValueError("temperature must be None when scores are probabilities (is_logits=False)")
        if table is None and any(x is not None for x in options):
            names = "table_rows, generated, text_breaks, last_tokens, requests, drawn, step or scored"
            raise ValueError(f"table must be given with {names}, got None")
        if (text_breaks is None) != (last_tokens is None):
            raise ValueError("text_breaks and last_tokens must be given together")
        if (requests is None) != (scored is None):
            raise ValueError("requests and scored must be given together")
        if scored is None and not (drawn is None and step is None):
            raise ValueError("scored must be given with drawn or step, got None")
        backend, sizes = _SPEC.check(backend, *operands, sizes={"K": max_candidates})
        count = sizes["B"]
        if table_rows is None and sizes.get("R", count) < count:
            came = f"{sizes['R']} (or give table_rows)"
            raise ValueError(f"table must have a row for each of the {count} requests, got {came}")
        if sizes.get("N", count) != count:
            raise ValueError(f"scored must have a row for each of the {count} requests, got {sizes['N']}")
        top_k = per_request("top_k", top_k, torch.int32, count, scores.device)
        top_p = per_request("top_p", top_p, torch.float32, count, scores.device)
        min_p = per_request("min_p", min_p, torch.float32, count, scores.device)
        if temperature is not None:
            temperature = per_request("temperature", temperature, torch.float32, count, scores.device)
    sizes = {"B": scores.shape[0], "K": max_candidates}
    candidates = empty(Candidates, scores.device, sizes, single=compute_dtype(scores))
    filters = (top_k, top_p, min_p, temperature, addresses)
    switches = (is_logits, is_aligned, sample, score_all)
    return _launch(backend, candidates, *operands, *filters, max_candidates, *switches)
