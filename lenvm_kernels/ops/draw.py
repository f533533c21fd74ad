"""The end of a step in one launch: guided probabilities, next tokens, and predicted lengths after them.

Inverse CDF: the first column ``j`` with ``p_0 + ... + p_j > u (p_0 + ... + p_{K-1})``, where ``u`` is a uniform number
computed from the request's seed and the token's position (Philox4x32-10; Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). The columns are added in order, and ``enable_fp_fusion=False`` keeps every product separate
from a sum, so the draw from given probabilities is bitwise identical to the reference's.
"""

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, overlapping, row_strides, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.ops.reweight_scatter import MAX_STEPS, TILE, ReweightColumns
from lenvm_kernels.ops.reweight_scatter.reweight import (
    _GUIDE,
    _SINGLE,
    _load_value_logits,
    _request_max,
    _request_min,
    _request_sum,
    _reweight,
    _softplus,
)
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.draw import draw as _reference
from lenvm_kernels.types import Candidates, DrawnTokens, GuidanceColumns, ScoredCandidates, StepRequests

# Columns of the guidance table that the kernel accesses.
DrawColumns = namedtuple(  # type: ignore[misc]
    "DrawColumns", (*ReweightColumns._fields, "eos_token_ids", "seed", "return_values")
)


@triton.jit
def _drawn_column(p, p_ptr, valid, column, seed, position, K: tl.constexpr):
    """The column that each request draws with the weights ``p [REQUESTS, K]``; -1 without a positive weight.

    The program has stored the weights at ``p_ptr``: a load per column takes fewer instructions than a reduction."""
    tl.debug_barrier()
    cumulative = tl.zeros_like(p)
    for i in tl.static_range(K):
        cumulative += tl.where(column >= i, tl.load(p_ptr + i, mask=valid, other=0.0), 0.0)
    # Counter: the position; key: the seed.
    word, _, _, _ = tl.randint4x(seed, position)
    threshold = (word >> 8).to(tl.float32) * 2.0**-24 * _request_max(cumulative)
    # Sums never decrease, so the number of columns not beyond the threshold is the drawn column.
    not_beyond = _request_sum(tl.where(cumulative > threshold, 0, 1))
    return tl.minimum(not_beyond, _request_max(tl.where(p > 0, column, -1)))


@kernel(specialized="value_logits_ptr stride_value_logits_request predicted_ptr stride_predicted_request")
def _draw_kernel(
    out,  # DrawnTokens, written
    candidates,  # Candidates
    value_logits_ptr,  # [B, K] or None
    stride_value_logits_request,
    predicted_ptr,  # [B, K] or None
    stride_predicted_request,
    table,  # DrawColumns
    stride,  # its strides
    requests,  # StepRequests
    scored,  # ScoredCandidates
    drawn_ptr,  # [B] or None
    text_breaks_ptr,  # [S] or None
    sample,  # whether tokens are drawn from the candidates
    S,
    E,  # columns of ending_token_ids
    EOS,  # columns of eos_token_ids
    B,
    K: tl.constexpr,
    REQUESTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = (tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS))[:, None].to(tl.int64)
    valid, column = request < B, tl.arange(0, K)[None, :]
    inputs = (candidates, value_logits_ptr, stride_value_logits_request, table, stride)
    options = (requests.table_rows, requests.generated, text_breaks_ptr, S, E)
    table_row, token_ids, probs, counted = _reweight(request, valid, inputs, options, K, MAX_STEPS)
    tl.store(out.guided_probs + request * K + column, probs, mask=valid)
    tl.atomic_add(table.faults + table_row * stride.faults, 1, mask=valid & counted, sem="relaxed")

    seed = tl.load(table.seed + table_row * stride.seed, mask=valid, other=0)
    position = tl.load(scored.positions + request, mask=valid, other=0).to(tl.int64)
    place = _drawn_column(probs, out.guided_probs + request * K, valid, column, seed, position, K)
    greedy = tl.load(requests.greedy + request, mask=valid, other=0) != 0
    most_probable = _request_min(tl.where(probs == _request_max(probs), column, K))
    place = tl.where(greedy & (place >= 0), most_probable, place)
    status = tl.load(candidates.status + request, mask=valid, other=0)
    found = ((status == _GUIDE) | (status == _SINGLE)) & (place >= 0) & (sample != 0)
    token = _request_max(tl.where(found & (column == place), token_ids, -1))
    if drawn_ptr is not None:
        token = tl.where(found, token, tl.load(drawn_ptr + request, mask=valid, other=-1))
    tl.store(out.tokens + request, token, mask=valid)

    scored_count = tl.load(scored.counts + request, mask=valid, other=0)
    scored_id = tl.load(scored.token_ids + request * K + column, mask=valid, other=-1)
    is_token = (column < scored_count) & (scored_id == token) & valid
    predicted = (predicted_ptr, stride_predicted_request)
    z = _request_sum(_load_value_logits(*predicted, request, column, table, stride, table_row, is_token))
    nats_per_token = tl.load(table.nats_per_token + table_row * stride.nats_per_token, mask=valid, other=1.0)
    length = tl.div_rn(_softplus(z), nats_per_token)
    for i in range(EOS):
        eos = tl.load(table.eos_token_ids + table_row * stride.eos_token_ids + i, mask=valid, other=-2)
        length = tl.where(token == eos, 0.0, length)
    wants_length = tl.load(requests.wants_length + request, mask=valid, other=0) != 0
    returns = tl.load(table.return_values + table_row * stride.return_values, mask=valid, other=0) != 0
    is_wanted = wants_length & returns & (_request_max(is_token.to(tl.int32)) > 0)
    tl.store(out.remaining_lengths + request, tl.where(is_wanted, length, float("nan")), mask=valid)


_SPEC = Spec(f"""
    candidates: Candidates of topk_candidates (token_ids, probs, status, lost_mass) contiguous single
    value_logits?: single [B, K]
    table: GuidanceColumns ({", ".join(DrawColumns._fields)}) strided single
    requests: StepRequests of begin_step (table_rows, generated, wants_length, greedy) [B]
    scored: ScoredCandidates of topk_candidates (token_ids, counts, positions) contiguous
    predicted?: single [B, K]
    drawn?: int32 [B]
    text_breaks?: int8 [S]
""")


@operator(_SPEC, reference=_reference, mutates=["table.faults"], takes={"table": DrawColumns, "sample": bool})
def _launch(out: DrawnTokens, given):
    (rows, columns), table, text_breaks = out.guided_probs.shape, given.table, given.text_breaks
    tile_requests = max(1, TILE // columns)
    _draw_kernel[(ceil_div(rows, tile_requests),)](
        *(out, given.candidates, *with_row_strides(given.value_logits, given.predicted)),
        *(table, row_strides(table), given.requests, given.scored, given.drawn, text_breaks, int(given.sample)),
        0 if text_breaks is None else text_breaks.shape[0],
        *(table.ending_token_ids.shape[1], table.eos_token_ids.shape[1], rows),
        K=columns,
        REQUESTS=tile_requests,
        num_warps=1,
        enable_fp_fusion=False,
        **overlapping(),
    )


def draw(
    candidates: Candidates,  # [B, K]
    value_logits: Tensor | None,  # [B, K]
    table: GuidanceColumns,
    requests: StepRequests,  # [B]
    scored: ScoredCandidates,  # [B, K]
    *,
    predicted: Tensor | None = None,  # [B, K]
    sample: bool = True,
    drawn: Tensor | None = None,  # int32 [B]
    text_breaks: Tensor | None = None,  # int8 [S]
    backend: str = "auto",
    validate: bool = True,
) -> DrawnTokens:  # [B, K], [B]
    """Reweight the candidates, draw each request's next token, and predict the output's length after it.

    The probabilities are computed as in :func:`reweight_scatter`. A draw depends only on the request's probabilities,
    its seed (``table.seed``) and the token's position (``scored.positions``). It is identical on CPU and GPU, in any
    batch, and in a rerun. The uniform number has 24 bits: a candidate's probability is exact to 2^-24 of the total, and
    a candidate with a smaller share may never be drawn.

    The predicted length after a token is ``-softplus(z) / ln(gamma)`` with its value logit ``z``, and 0 after an end of
    sequence.

    Args:
        candidates: result of :func:`topk_candidates`; ``B`` requests, ``K`` columns. ``status`` must mark requests
            without guidance (argument ``guided`` of :func:`topk_candidates`).
        value_logits: fp32 ``[B, K]``, as in :func:`reweight_scatter`; arbitrary for candidates that are not scored.
        table: guidance parameters of ``R`` requests.
        requests: result of :func:`begin_step`. A greedy request takes the first of the most probable candidates.
        scored: ``scored`` of :func:`topk_candidates`. Lengths are only predicted after scored tokens.
        predicted: fp32 ``[B, K]``; value logits for predicted lengths. If None, ``value_logits``.
        sample: whether requests of status ``GUIDE`` and ``SINGLE`` are drawn from their candidates.
        drawn: int32 ``[B]``; next tokens of requests that are not drawn from their candidates. If None, -1.
        text_breaks: int8 ``[S]``, as in :func:`reweight_scatter`.
        backend: ``auto``, ``triton`` or ``reference``.
        validate: whether to check the arguments. If False, ``backend`` must be ``triton`` or ``reference``.

    Returns:
        The :class:`DrawnTokens`. A request without a positive probability is not drawn from its candidates.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> from lenvm_kernels import GuidanceTable, begin_step, empty_scored, parse_guidance, topk_candidates
        >>> guidance = parse_guidance({"target_length": 9, "op": "le", "return_values": True})
        >>> table = GuidanceTable.from_params([guidance], [{2}], "cpu").columns
        >>> requests = begin_step(table, *torch.tensor([[11], [0]]), torch.tensor([4], dtype=torch.int32))
        >>> scored = empty_scored(1, 2, torch.device("cpu"))
        >>> options = dict(top_k=2, top_p=1.0, min_p=0.0, table=table, requests=requests, scored=scored)
        >>> candidates = topk_candidates(torch.tensor([[0.5, 0.2, 0.3]]), max_candidates=2, **options)
        >>> draw(candidates, torch.zeros(1, 2), table, requests, scored)  # token 2 ends the output: the shortest
        DrawnTokens(guided_probs=tensor([[0., 1.]]), tokens=tensor([2], dtype=torch.int32), \
remaining_lengths=tensor([0.]))
    """
    operands = (candidates, value_logits, table, requests, scored)
    if validate:
        backend, sizes = _SPEC.check(backend, *operands, predicted, drawn, text_breaks)
        if sizes["N"] != sizes["B"]:
            raise ValueError(f"scored must have a row for each of the {sizes['B']} requests, got {sizes['N']}")
    (rows, columns), dtype = candidates.probs.shape, compute_dtype(candidates.probs, value_logits)
    out = empty(DrawnTokens, candidates.probs.device, {"B": rows, "K": columns}, single=dtype)
    predicted = value_logits if predicted is None else predicted
    return _launch(backend, out, *operands, predicted, drawn, text_breaks, sample)
