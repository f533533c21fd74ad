"""Sampling of the next token from a request's K guided candidates, without reading a row of ``[B, V]``.

Inverse CDF: the first column ``j`` with ``p_0 + ... + p_j > u (p_0 + ... + p_{K-1})``, where ``u`` is a uniform number
computed from the request's seed and the token's position (Philox4x32-10; Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). A thread processes one request and adds its columns sequentially. No reduction order is left
to the compiler, and no product can be fused with a sum, so the draw is bitwise identical to the reference's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.reference.sample_candidates import sample_candidates as _reference
from lenvm_kernels.reference.topk_candidates import GREEDY_TEMPERATURE
from lenvm_kernels.types import Candidates, Status

# Requests per program, one per lane of its one warp. A request is a chain of two loads and some hundred instructions,
# far below the cost of a launch, so no alternative was considered. Not measured.
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

    # Sums never decrease, so the columns not beyond the threshold come first, and their number is the drawn column. It
    # is K, clamped to the last one, if u * total was rounded up to total, as happens for subnormal and infinite sums.
    cumulative, not_beyond = tl.zeros([REQUESTS], tl.float32), tl.zeros([REQUESTS], tl.int32)
    for column in tl.static_range(K):
        cumulative += _load_prob(request_probs_ptr, column, valid)  # the compiler reuses the load above
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
    tensors = (out, candidates, guided_probs, guided_probs.stride(0), seeds, positions, temperature)
    _sample_candidates_kernel[(ceil_div(requests, TILE),)](*tensors, requests, K=columns, REQUESTS=TILE, num_warps=1)


_SPEC = Spec("""
    guided_probs: single [B, K=2**n]
    candidates: Candidates of topk_candidates (token_ids, status) contiguous
    seeds: int64 [B]
    positions: int [B]
    temperature?: float32 [B]
""")


def sample_candidates(
    candidates: Candidates,
    guided_probs: Tensor,  # [B, K]
    seeds: Tensor,  # int64 [B]
    positions: Tensor,  # int32|int64 [B]
    *,
    temperature: Tensor | None = None,  # fp32 [B]
    backend: str = "auto",
    validate: bool = True,
) -> Tensor:  # int32 [B]
    """Draw each request's next token from its guided candidates, with ``guided_probs`` as their weights.

    A draw depends only on the request's probabilities, seed and position. It is the same on CPU and GPU, in any batch,
    and when a request is rerun. Causes no host-device sync.

    The uniform number has 24 bits. A candidate's probability is therefore exact to within 2^-24 of the total, and a
    candidate with a smaller share may never be drawn.

    Args:
        candidates: result of :func:`topk_candidates`; ``B`` requests, ``K`` columns. Requests without guidance must be
            marked in ``status`` (argument ``guided`` of :func:`topk_candidates`).
        guided_probs: fp32 ``[B, K]`` (fp64 too on the reference), from :func:`reweight_scatter`; 0 in padding. They
            need not sum to 1. Rows may be strided. Negative and NaN entries count as 0.
        seeds: int64 ``[B]``; the request's seed.
        positions: int32 or int64 ``[B]``; the position of the drawn token in the request's sequence. Draws of a seed at
            different positions are independent, draws at the same position are equal.
        temperature: fp32 ``[B]``. Requests below 1e-6 take the most probable candidate, the first one of a tie. It does
            not scale ``guided_probs``, which already include it. If None, no request is greedy.
        backend: ``auto``, ``triton`` or ``reference``.
        validate: whether to check the arguments. If False, ``backend`` must be ``triton`` or ``reference``.

    Returns:
        Tokens, int32 ``[B]``; -1 for requests without a positive probability, and for requests whose status is neither
        ``GUIDE`` nor ``SINGLE``, which the caller's own sampler draws.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the value and what is accepted.

    Example:
        >>> from lenvm_kernels import topk_candidates
        >>> request = dict(top_k=torch.tensor([2], dtype=torch.int32), top_p=torch.ones(1), min_p=torch.zeros(1))
        >>> candidates = topk_candidates(torch.tensor([[0.5, 0.2, 0.3]]), **request, max_candidates=2)
        >>> seeds, guided_probs = torch.tensor([7]), torch.tensor([[0.25, 0.75]])
        >>> [sample_candidates(candidates, guided_probs, seeds, torch.tensor([i])).item() for i in range(8)]
        [2, 2, 0, 2, 2, 2, 2, 2]
    """
    if validate:
        backend, _ = _SPEC.check(backend, guided_probs, candidates, seeds, positions, temperature)
    tokens = torch.empty(guided_probs.shape[0], dtype=torch.int32, device=guided_probs.device)
    _launch(backend, tokens, candidates, guided_probs, seeds, positions, temperature)
    return tokens
