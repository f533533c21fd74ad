"""Choice of the candidates that the value model scores in a step, in one launch.

The candidates of requests that are reweighted are scored. A request with a ``value_stride`` is reweighted at the steps
at which it is due, and whenever one of its candidates would end it, because there the longest and the shortest output
part. If predicted lengths are requested without reweighting, only the next token is scored, provided it is known.

Rows beyond the requests have nothing to score, so that a CUDA graph captured for a larger batch can run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.select_scored import select_scored as _reference
from lenvm_kernels.types import Candidates, ScoredCandidates, Status, StepRequests

# Requests per program: one per thread of a warp.
REQUESTS = 32

_GUIDE, _SINGLE = tl.constexpr(int(Status.GUIDE)), tl.constexpr(int(Status.SINGLE))
_NOT_DUE = tl.constexpr(int(Status.NOT_DUE))


# Callers pass a slice, whose alignment must not trigger a recompilation.
@triton.jit(do_not_specialize=["sample", "stride_eos_row", "B", "N"], do_not_specialize_on_alignment=["drawn_ptr"])
def _select_scored_kernel(
    scored,  # ScoredCandidates, written
    candidate_ids_ptr,  # [B, K]
    counts_ptr,  # [B]
    status_ptr,  # [B], written
    positions_ptr,  # [N]
    table_rows_ptr,  # [N]
    wants_length_ptr,  # [N]
    due_ptr,  # [N]
    eos_token_ids_ptr,  # [R, E]
    stride_eos_row,
    drawn_ptr,  # int32 [B] or None
    step_ptr,  # int64 [1] or None, written
    sample,  # whether the candidates are drawn from
    B,
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    SCORE_ALL: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    column = tl.arange(0, K)[None, :]
    place = request[:, None].to(tl.int64) * K + column
    status = tl.load(status_ptr + request, mask=exists, other=0)
    count = tl.load(counts_ptr + request, mask=exists, other=0)
    token_ids = tl.load(candidate_ids_ptr + place, mask=exists[:, None], other=-1)

    wants_length = tl.load(wants_length_ptr + request, mask=exists, other=False)
    position = tl.load(positions_ptr + request, mask=exists, other=-1)
    due = tl.load(due_ptr + request, mask=exists, other=True)

    waits = (status == _GUIDE) & (due == 0)
    if tl.max(waits.to(tl.int32), axis=0) > 0:
        table_row = tl.load(table_rows_ptr + request, mask=waits, other=0)
        is_candidate = column < count[:, None]
        for i in range(E):
            eos = tl.load(eos_token_ids_ptr + table_row * stride_eos_row + i, mask=waits, other=-2)
            is_end = (token_ids == eos[:, None]) & is_candidate
            waits = waits & (tl.max(is_end.to(tl.int32), axis=1) == 0)
        tl.debug_barrier()  # all reads precede the overwrite
        tl.store(status_ptr + request, tl.full([REQUESTS], _NOT_DUE, tl.int8), mask=waits)
        status = tl.where(waits, _NOT_DUE, status)

    is_guide = status == _GUIDE
    scored_count = tl.where(is_guide | SCORE_ALL, count, 0)
    next_token = tl.full([REQUESTS], -1, tl.int32)
    if drawn_ptr is not None:
        next_token = tl.load(drawn_ptr + request, mask=exists, other=-1)
    first_id = tl.load(candidate_ids_ptr + request.to(tl.int64) * K, mask=exists, other=-1)
    next_token = tl.where((status == _SINGLE) & (sample != 0), first_id, next_token)
    alone = wants_length & (is_guide == 0) & (next_token >= 0)
    token_ids = tl.where(alone[:, None] & (column == 0), next_token[:, None], token_ids)

    tl.store(scored.token_ids + place, token_ids, mask=is_row[:, None])
    tl.store(scored.counts + request, tl.where(alone, 1, scored_count), mask=is_row)
    tl.store(scored.positions + request, position + 1, mask=is_row)
    tl.store(scored.alone + request, alone, mask=is_row)
    if step_ptr is not None:
        tl.atomic_add(step_ptr, 1, mask=tl.program_id(0) == 0, sem="relaxed")


@operator(reference=_reference, mutates=["candidates.status", "step"])
def _launch(
    out: ScoredCandidates,
    candidates: Candidates,
    requests: StepRequests,
    eos_token_ids: Tensor,
    drawn: Tensor | None,
    sample: bool,
    score_all: bool,
    step: Tensor | None,
) -> None:
    rows, columns = out.token_ids.shape
    if rows == 0:
        return
    listed = (candidates.token_ids, candidates.counts, candidates.status)
    state = (requests.positions, requests.table_rows, requests.wants_length, requests.due)
    ends = (eos_token_ids, eos_token_ids.stride(0))
    sizes = dict(K=columns, E=eos_token_ids.shape[1], SCORE_ALL=score_all, REQUESTS=REQUESTS)
    count = candidates.token_ids.shape[0]
    _select_scored_kernel[(ceil_div(rows, REQUESTS),)](
        out, *listed, *state, *ends, drawn, step, int(sample), count, rows, **sizes, num_warps=1
    )


def empty_scored(rows: int, columns: int, device: torch.device) -> ScoredCandidates:
    """Result tensors for :func:`select_scored`."""
    return empty(ScoredCandidates, device, {"N": rows, "K": columns})


_SPEC = Spec("""
    candidates: Candidates of topk_candidates (token_ids, counts, status) contiguous
    requests: StepRequests of begin_step (due, wants_length, positions, table_rows) [N]
    eos_token_ids: int32 [R, E]
    drawn?: int32 [B]
    step?: int64 [1]
""")
_OUT = Spec("out: ScoredCandidates contiguous")


def select_scored(
    candidates: Candidates,  # [B, K]
    requests: StepRequests,  # [N]
    eos_token_ids: Tensor,  # int32 [R, E]
    *,
    drawn: Tensor | None = None,  # int32 [B]
    sample: bool = False,
    score_all: bool = False,
    step: Tensor | None = None,  # int64 [1]
    out: ScoredCandidates | None = None,  # [N, K]
    backend: str = "auto",
    validate: bool = True,
) -> ScoredCandidates:  # [N, K]
    """Decide which candidates the value model scores in a step.

    Causes no host-device sync, and no recompilation for a new number of requests.

    Args:
        candidates: result of :func:`topk_candidates`; ``K`` is a power of two up to 64. ``status`` is changed from
            ``GUIDE`` to ``NOT_DUE`` for requests that are not due and that no candidate ends.
        requests: result of :func:`begin_step`, with ``N >= B`` rows.
        eos_token_ids: int32 [R, E]; the tokens that end each request, by row of the guidance table.
        drawn: int32 [B]; next tokens that are not drawn from the candidates, negative if unknown. If ``None``, unknown.
        sample: whether the next token of a request with a single candidate is that candidate.
        score_all: score all candidates, also those that are not reweighted.
        step: int64 [1]; :attr:`StepHistory.step`, incremented if there is a row. If ``None``, no history is kept.
        out: contiguous result tensors to reuse, of ``N`` rows. If ``None``, they are allocated.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.
        validate: whether to check the arguments. If False, ``backend`` must be ``triton`` or ``reference``.

    Returns:
        The :class:`ScoredCandidates`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, begin_step, parse_guidance, topk_candidates
        >>> guidance = [parse_guidance({"target_length": 60}), parse_guidance({"return_values": True})]
        >>> table = GuidanceTable.from_params(guidance, [{0}, {0}], "cpu").columns
        >>> tokens, rows = torch.tensor([[11, 12], [0, 1]])
        >>> requests = begin_step(table, tokens, rows, torch.tensor([4, 9], dtype=torch.int32))
        >>> probs = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]])
        >>> filters = dict(top_k=2, top_p=1.0, min_p=0.0, max_candidates=2, guided=requests.guided)
        >>> drawn = torch.tensor([-1, 2], dtype=torch.int32)
        >>> scored = select_scored(topk_candidates(probs, **filters), requests, table.eos_token_ids, drawn=drawn)
        >>> scored.token_ids
        tensor([[ 0,  2],
                [ 2, -1]], dtype=torch.int32)
        >>> scored.counts, scored.alone
        (tensor([2, 1], dtype=torch.int32), tensor([False,  True]))
    """
    if validate:
        backend, sizes = _SPEC.check(backend, candidates, requests, eos_token_ids, drawn, step)
        if sizes["N"] < sizes["B"]:
            raise ValueError(f"requests must have a row for each of the {sizes['B']} requests, got {sizes['N']}")
    if out is None:
        out = empty_scored(requests.due.shape[0], candidates.token_ids.shape[1], requests.due.device)
    if validate:
        _OUT.check(backend, out, device=candidates.token_ids.device, sizes=sizes)
    _launch(backend, out, candidates, requests, eos_token_ids, drawn, sample, score_all, step)
    return out
