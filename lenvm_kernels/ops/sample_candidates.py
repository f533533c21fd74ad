"""Draw of the next token among a request's guided candidates: K probabilities decide, no row of ``[B, V]`` is read.

Inverse CDF: the first column ``j`` with ``p_0 + ... + p_j > u (p_0 + ... + p_{K-1})``, where ``u`` is a uniform number
of the request's seed and the token's position (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). A thread has one request and adds its columns one by one: no reduction, so no order to choose, and no
product beside a sum that a compiler could fuse with it. The draw is that of the reference, to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import COLUMNS, INT_DTYPES, SINGLES, ceil_div, check_tensor, resolve_backend
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference.sample_candidates import sample_candidates as _reference
from lenvm_kernels.reference.topk_candidates import GREEDY_TEMPERATURE
from lenvm_kernels.types import Candidates, Status

# Requests a program, one a lane of its one warp. A request is a chain of two loads and some hundred instructions, far
# below what a launch costs, so nothing else was weighed. Not measured yet.
TILE = 32

_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_GUIDE, _SINGLE = tl.constexpr(int(Status.GUIDE)), tl.constexpr(int(Status.SINGLE))


@triton.jit
def _load_prob(request_probs_ptr, column, valid):
    p = tl.load(request_probs_ptr + column, mask=valid, other=0.0)
    return tl.where(p > 0, p, 0.0)  # NaN compares false


@triton.jit(
    do_not_specialize=["B"],  # a new batch size compiles nothing
    do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr", "temperature_ptr"],
)
def _sample_candidates_kernel(
    out_ptr,  # [B]
    candidates,  # Candidates
    guided_probs_ptr,  # [B, K]
    stride_guided_probs_request,
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    temperature_ptr,  # [B] or None
    B,
    K: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS).to(tl.int64)
    valid = request < B
    request_probs_ptr = guided_probs_ptr + request * stride_guided_probs_request

    total, largest = tl.zeros([REQUESTS], tl.float32), tl.zeros([REQUESTS], tl.float32)
    most_probable, last = tl.full([REQUESTS], -1, tl.int32), tl.full([REQUESTS], -1, tl.int32)
    for column in tl.static_range(K):
        p = _load_prob(request_probs_ptr, column, valid)
        total += p
        most_probable = tl.where(p > largest, column, most_probable)
        largest = tl.maximum(largest, p)
        last = tl.where(p > 0, column, last)

    # Counter: the position; key: the seed.
    seed = tl.load(seeds_ptr + request, mask=valid, other=0)
    position = tl.load(positions_ptr + request, mask=valid, other=0).to(tl.int64)
    word, _, _, _ = tl.randint4x(seed, position)
    u = (word >> 8).to(tl.float32) * 2.0**-24
    threshold = u * total

    # Sums never fall, so the columns not beyond the threshold come first, and their number is the column looked for. It
    # is K, hence the last one, where u * total was rounded up to total: only subnormal and infinite sums are.
    cumulative, not_beyond = tl.zeros([REQUESTS], tl.float32), tl.zeros([REQUESTS], tl.int32)
    for column in tl.static_range(K):
        cumulative += _load_prob(request_probs_ptr, column, valid)  # loaded above: no second load is compiled
        not_beyond += tl.where(cumulative > threshold, 0, 1)
    drawn = tl.minimum(not_beyond, last)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + request, mask=valid, other=1.0)
        drawn = tl.where(temperature < _GREEDY_TEMPERATURE, most_probable, drawn)

    status = tl.load(candidates.status + request, mask=valid, other=0)
    found = valid & ((status == _GUIDE) | (status == _SINGLE)) & (drawn >= 0)
    token = tl.load(candidates.token_ids + request * K + drawn, mask=found, other=-1)
    tl.store(out_ptr + request, token, mask=valid)


@operator(reference=_reference)
def _launch(
    out: Tensor,
    candidates: Candidates,
    guided_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
) -> None:
    requests, columns = guided_probs.shape
    if requests == 0:
        return
    _sample_candidates_kernel[(ceil_div(requests, TILE),)](
        out,
        candidates,
        guided_probs,
        guided_probs.stride(0),
        seeds,
        positions,
        temperature,
        requests,
        K=columns,
        REQUESTS=TILE,
        num_warps=1,
    )


def sample_candidates(
    candidates: Candidates,
    guided_probs: Tensor,  # [B, K]
    seeds: Tensor,  # int64 [B]
    positions: Tensor,  # int32|int64 [B]
    *,
    temperature: Tensor | None = None,  # fp32 [B]
    backend: str = "auto",
) -> Tensor:  # int32 [B]
    """Draw each request's next token from its guided candidates, with ``guided_probs`` as their weights.

    A draw depends on the request's probabilities, seed and position only: the same on CPU and GPU, alone and in any
    batch, and again when a request is run again. Nothing is read back to the host.

    The uniform number has 24 bits: a candidate's chance is its share of the request's total to within 2^-24, and one
    whose share is smaller than that may never be drawn.

    Args:
        candidates: of :func:`topk_candidates`; ``B`` requests, ``K`` columns. Requests without guidance have to be so
            by ``status`` (its argument ``guided``).
        guided_probs: fp32 ``[B, K]`` (fp64 too on the reference) of :func:`reweight_scatter`; 0 in padding. They need
            not sum to 1. Requests may be strided. What is negative or NaN counts as 0.
        seeds: int64 ``[B]``; the request's seed.
        positions: int32 or int64 ``[B]``; the position that the token drawn will have in the request's sequence. A
            seed's draws at different positions are independent, those at the same position are equal.
        temperature: fp32 ``[B]`` (None: no request is greedy). Requests below 1e-6 take the most probable candidate, of
            equal ones the first. It changes no probability: ``guided_probs`` have it in them.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        Tokens, int32 ``[B]``; -1 for requests of other status than ``GUIDE`` and ``SINGLE``, which the caller's own
        sampler draws, and for requests without any positive probability.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.

    Example:
        >>> from lenvm_kernels import topk_candidates
        >>> request = dict(top_k=torch.tensor([2], dtype=torch.int32), top_p=torch.ones(1), min_p=torch.zeros(1))
        >>> candidates = topk_candidates(torch.tensor([[0.5, 0.2, 0.3]]), **request, max_candidates=2)
        >>> seeds, guided_probs = torch.tensor([7]), torch.tensor([[0.25, 0.75]])
        >>> [sample_candidates(candidates, guided_probs, seeds, torch.tensor([i])).item() for i in range(8)]
        [2, 2, 0, 2, 2, 2, 2, 2]
    """
    backend = resolve_backend(backend, "guided_probs", guided_probs)
    check_tensor("guided_probs", guided_probs, dtypes=SINGLES[backend], shape=(None, None))
    (requests, columns), device = guided_probs.shape, guided_probs.device
    if not isinstance(candidates, Candidates):
        raise TypeError(f"candidates must be the Candidates of topk_candidates, got {type(candidates).__name__}")
    if columns not in COLUMNS:
        raise ValueError(f"guided_probs must have a power of two up to {COLUMNS[-1]} columns, got {columns}")
    token_ids, status = candidates.token_ids, candidates.status
    check_tensor("candidates.token_ids", token_ids, dtypes=torch.int32, shape=(requests, columns), device=device)
    if not token_ids.is_contiguous():
        raise ValueError(f"candidates.token_ids must be contiguous, got strides {tuple(token_ids.stride())}")
    check_tensor("candidates.status", status, dtypes=torch.int8, shape=(requests,), device=device)
    check_tensor("seeds", seeds, dtypes=torch.int64, shape=(requests,), device=device)
    check_tensor("positions", positions, dtypes=INT_DTYPES, shape=(requests,), device=device)
    if temperature is not None:
        check_tensor("temperature", temperature, dtypes=torch.float32, shape=(requests,), device=device)

    return sample_candidates_unchecked(
        candidates, guided_probs, seeds, positions, temperature=temperature, backend=backend
    )


def sample_candidates_unchecked(
    candidates: Candidates,
    guided_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None,
    backend: str,
) -> Tensor:
    """:func:`sample_candidates` for a caller who knows that the arguments are right, and has resolved the backend."""
    tokens = torch.empty(guided_probs.shape[0], dtype=torch.int32, device=guided_probs.device)
    _launch(backend, tokens, candidates, guided_probs, seeds, positions, temperature)
    return tokens
