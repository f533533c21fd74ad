"""Guided probabilities of each request's candidates, and their scatter into the rows of ``[B, V]``.

From ``q = p / sum(p)`` and value logits ``z`` (``v = sigmoid(z)``, 0 for end of sequence): ``p' ~ q exp(lambda v)``
with a given ``lambda`` (``centered_exp``) or the ``lambda`` at which ``E[v]`` meets a target, ``p' ~ q exp(s z)``
(``value_bias``), ``p' ~ q exp(-s d)`` with the relative distance ``d`` of a length from the target (``near``), or
one-hot on the candidate that a hard constraint chooses. Source: section 4 of the specification;
``lvm_combined_guidance`` in the LenVM fork of SGLang.
"""

from collections import namedtuple

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, row_strides, with_row_strides
from lenvm_kernels.ops._device import kernel
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.reweight_scatter.reweight import _GUIDE, _SINGLE, _UNGUIDED, _reweight
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.reweight_scatter import reweight_scatter as _reference
from lenvm_kernels.reference.reweight_scatter import scatter_probs as _scatter_reference
from lenvm_kernels.types import Candidates, GuidanceColumns

# Candidates per program, two per lane of its warp. A program iterates until its last request has converged, and with
# 256 candidates registers spill.
TILE = 64
SLICE = 16_384  # elements of [B, V] zeroed per program of the scatter. Not measured.
# The slowest of a million requests takes 43: hard_rows(10_000, 8, seed 0 to 99) in tests/ops/test_reweight_scatter.py.
MAX_STEPS = tl.constexpr(64)


# Columns of the guidance table that the kernels access.
ReweightColumns = namedtuple(
    "ReweightColumns",
    "mode scale nats_per_token value_min target_length tolerance counts_down faults answer_length target_logit "
    "ending_token_ids",
)


@kernel(specialized="out_ptr value_logits_ptr stride_value_logits_request")
def _reweight_kernel(
    out_ptr,  # [B, K]
    candidates,  # Candidates
    value_logits_ptr,  # [B, K] or None
    stride_value_logits_request,
    table,  # ReweightColumns
    stride,  # its strides
    table_rows_ptr,  # [B] or None
    generated_ptr,  # [B] or None
    text_breaks_ptr,  # [S] or None
    S,
    E,
    B,
    K: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = (tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS))[:, None].to(tl.int64)
    valid = request < B
    inputs = (candidates, value_logits_ptr, stride_value_logits_request, table, stride)
    options = (table_rows_ptr, generated_ptr, text_breaks_ptr, S, E)
    table_row, _, result, counted = _reweight(request, valid, inputs, options, K, MAX_STEPS)
    tl.store(out_ptr + request * K + tl.arange(0, K)[None, :], result, mask=valid)
    tl.atomic_add(table.faults + table_row * stride.faults, 1, mask=valid & counted, sem="relaxed")


@kernel(specialized="dense_ptr guided_probs_ptr token_ids_ptr status_ptr mode_ptr stride_mode V")
def _scatter_kernel(
    dense_ptr,  # [B, V]
    stride_dense_request,
    guided_probs_ptr,  # [B, K]
    token_ids_ptr,  # [B, K]
    status_ptr,  # [B]
    mode_ptr,  # [R]
    stride_mode,
    table_rows_ptr,  # [B] or None
    V,
    K: tl.constexpr,
    SLICE: tl.constexpr,
):
    request, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * SLICE
    table_row = request
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + request).to(tl.int64)
    status = tl.load(status_ptr + request)
    guided = (status == _GUIDE) & (tl.load(mode_ptr + table_row * stride_mode) != _UNGUIDED)
    if guided | (status == _SINGLE):
        row_ptr, token = dense_ptr + request * stride_dense_request, start + tl.arange(0, SLICE)
        tl.store(row_ptr + token, tl.zeros([SLICE], dense_ptr.dtype.element_ty), mask=token < V)
        tl.debug_barrier()  # zeros are written before candidates
        place = request * K + tl.arange(0, K)
        candidate = tl.load(token_ids_ptr + place)
        is_here = (candidate >= start) & (candidate < start + SLICE)
        tl.store(row_ptr + candidate, tl.load(guided_probs_ptr + place), mask=is_here)


_SPEC = Spec(f"""
    candidates: Candidates of topk_candidates (token_ids, probs, status, lost_mass) contiguous single
    value_logits?: single [B, K]
    table: GuidanceColumns ({", ".join(ReweightColumns._fields)}) strided single
    table_rows?: int [B]
    generated?: int32 [B]
    text_breaks?: int8 [S]
""")
_PROBS = Spec("probs?: float [B, V]")
_SCATTERED = {"guided_probs": Tensor, "candidates": Candidates, "modes": Tensor, "table_rows": Tensor | None}


@operator(reference=_scatter_reference, takes=_SCATTERED, name="scatter_probs")
def scatter_probs(out: Tensor, given):
    """Write guided probabilities into the rows of ``out``, see :func:`reweight_scatter`. Arguments are not checked."""
    guided_probs, candidates, modes, table_rows = given
    (requests, vocab), columns = out.shape, guided_probs.shape[1]
    tensors = (*with_row_strides(out), guided_probs, candidates.token_ids, candidates.status, *with_row_strides(modes))
    grid, sizes = (requests, ceil_div(vocab, SLICE)), dict(K=columns, SLICE=SLICE)
    _scatter_kernel[grid](*tensors, table_rows, vocab, **sizes, num_warps=4)


@operator(_SPEC, reference=_reference, mutates=["table.faults"], takes={"table": ReweightColumns})
def _launch(out: Tensor, given):
    candidates, value_logits, table, table_rows, generated, text_breaks = given
    requests, columns = out.shape
    tile_requests = max(1, TILE // columns)
    inputs = (candidates, *with_row_strides(value_logits), table, row_strides(table))
    sentences = 0 if text_breaks is None else text_breaks.shape[0]
    options = (table_rows, generated, text_breaks, sentences, table.ending_token_ids.shape[1])
    _reweight_kernel[(ceil_div(requests, tile_requests),)](
        out, *inputs, *options, requests, K=columns, REQUESTS=tile_requests, num_warps=1, enable_fp_fusion=False
    )


def reweight_scatter(
    candidates: Candidates,
    value_logits: Tensor | None,
    table: GuidanceColumns,
    *,
    table_rows: Tensor | None = None,
    generated: Tensor | None = None,
    text_breaks: Tensor | None = None,
    probs: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute the candidates' guided probabilities; with ``probs``, also write them into the rows of ``[B, V]``.

    Each request has its own mode, scale, target and end-of-sequence tokens. The scale of ``near``, ``ge_near`` and
    ``le_near`` is their strength, at least 0. A request with status ``SINGLE`` returns its only candidate. Requests
    that are unguided or skipped, by status or by mode, return ``q`` and leave ``probs`` unchanged. A guided request
    with a non-finite value logit returns ``q``. It increments ``table.faults``, as does a request with broken scores. A
    request with an expected value below ``value_min`` also returns ``q``, but is not counted.

    Args:
        candidates: result of :func:`topk_candidates`; ``B`` requests, ``K`` columns.
        value_logits: fp32 ``[B, K]``; raw value logits, ``v = sigmoid(z)``. Ignored in padding and for end-of-sequence
            candidates, which have the value 0 in all modes except ``value_bias``. If None, ``table.target_logit`` is
            the value logit of every candidate.
        table: guidance parameters of ``R`` requests.
        table_rows: int32 or int64 ``[B]``; row of each request in the table. If None, request i has row i.
        generated: int32 ``[B]``; tokens generated so far, for targets that are totals. If None, 0.
        text_breaks: int8 ``[S]``; the :class:`TextBreak` of each token of the vocabulary (:func:`text_breaks_of`). For
            the near constraints, a token that ends a sentence and has at least 1/50 of the largest probability uses its
            predicted length or a length of one more token, whichever is nearer, because the output can end after it. If
            None, no token ends a sentence.
        probs: fp32, bf16 or fp16 ``[B, V]``, last dimension contiguous. The rows of guided and ``SINGLE`` requests are
            overwritten with the candidates' guided probabilities, 0 elsewhere.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        fp32 ``[B, K]``, 0 in padding.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance, topk_candidates
        >>> request = dict(top_k=torch.tensor([2], dtype=torch.int32), top_p=torch.ones(1), min_p=torch.zeros(1))
        >>> candidates = topk_candidates(torch.tensor([[0.5, 0.2, 0.3]]), **request, max_candidates=2)
        >>> table = GuidanceTable.from_params([parse_guidance({"target_length": 9, "op": "le"})], [{2}], "cpu").columns
        >>> reweight_scatter(candidates, torch.zeros(1, 2), table)  # token 2 ends the output, the shortest choice
        tensor([[0., 1.]])
    """
    operands = (candidates, value_logits, table, table_rows, generated, text_breaks)
    backend, sizes = _SPEC.check(backend, *operands)
    _PROBS.check(backend, probs, device=candidates.probs.device, sizes=sizes)
    requests, rows = sizes["B"], sizes["R"]
    if table_rows is None and rows < requests:
        raise ValueError(f"table must have a row for each of the {requests} requests, got {rows} (or give table_rows)")
    out = torch.empty_like(candidates.probs, dtype=compute_dtype(candidates.probs, value_logits))
    _launch(backend, out, *operands)
    if probs is not None:
        scatter_probs(backend, probs, out, candidates, table.mode, table_rows)
    return out
