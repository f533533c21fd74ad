"""Verifies draft tokens: drafts that equal the tokens drawn in their place are accepted, in one launch.

A draw depends only on the request's seed, the position and the distribution at the node. If a draft equals the token
drawn in its place, the draw at the draft's node is also valid, and so on. The text is the same as without drafts.
"""

import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, next_power_of_2, overlapping, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.verify_drafts import verify_drafts as _reference
from lenvm_kernels.types import Drafts, VerifiedTokens

REQUESTS = 8  # per program


@kernel()
def _verify_drafts_kernel(
    verified,  # VerifiedTokens, written
    drawn_ptr,  # int32 [B * (1 + D)]
    draft_ids_ptr,  # [B, D]
    stride_ids_request,
    draft_parents_ptr,  # int32 [B, D]
    stride_parents_request,
    B,
    D: tl.constexpr,
    NODES: tl.constexpr,  # a power of two > D
    REQUESTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    exists, draft = request < B, tl.arange(0, NODES)[None, :]
    mask = exists[:, None] & (draft < D)
    token_id = tl.load(draft_ids_ptr + request[:, None] * stride_ids_request + draft, mask=mask, other=-1)
    token_id = tl.maximum(token_id, -1).to(tl.int32)
    parent = tl.load(draft_parents_ptr + request[:, None] * stride_parents_request + draft, mask=mask, other=-1)
    parent = tl.where((parent >= 0) & (parent < draft), parent, -1)
    is_there = draft < tl.min(tl.where(token_id < 0, draft, NODES), axis=1)[:, None]

    node, length = tl.zeros([REQUESTS], tl.int32), tl.zeros([REQUESTS], tl.int32)
    goes_on = exists
    for i in range(D + 1):
        token = tl.load(drawn_ptr + request * (D + 1) + node, mask=goes_on, other=-1)
        goes_on = goes_on & (token >= 0)
        length += goes_on.to(tl.int32)
        tl.store(verified.tokens + request * (D + 1) + i, tl.where(goes_on, token, -1), mask=exists)
        tl.store(verified.nodes + request * (D + 1) + i, tl.where(goes_on, node, -1), mask=exists)
        is_next = is_there & (token_id == token[:, None]) & (parent == (node - 1)[:, None])
        found = tl.min(tl.where(is_next, draft, NODES), axis=1)
        goes_on = goes_on & (found < NODES)
        node = tl.where(goes_on, found + 1, 0)
    tl.store(verified.lens + request, length, mask=exists)


_SPEC = Spec("""
    drafts: Drafts
    drawn: int32 [B * (1 + D)]
""")


@operator(_SPEC, reference=_reference)
def _launch(out: VerifiedTokens, given):
    drafts, drawn = given
    rows, columns = drafts.token_ids.shape
    tensors = (out, drawn, *with_row_strides(*drafts))
    sizes = dict(D=columns, NODES=next_power_of_2(columns + 1), REQUESTS=REQUESTS)
    _verify_drafts_kernel[(ceil_div(rows, REQUESTS),)](*tensors, rows, **sizes, num_warps=1, **overlapping())


def verify_drafts(
    drawn: Tensor,  # int32 [B * (1 + D)]
    drafts: Drafts,  # [B, D]
    *,
    backend: str = "auto",
) -> VerifiedTokens:  # [B, 1 + D]
    """Follow the draws from the last token of each sequence while the drawn token is a draft.

    Args:
        drawn: int32 [B * (1 + D)]; the token drawn at each node (:class:`Drafts`), negative if none was drawn.
        drafts: drafts of all requests. Rows may be strided. If a token is listed twice below the same parent, the first
            is used.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        The :class:`VerifiedTokens`: the accepted drafts, and the token drawn after the last.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> chain = Drafts(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]], dtype=torch.int32))
        >>> verify_drafts(torch.tensor([5, 6, 8, 9], dtype=torch.int32), chain)
        VerifiedTokens(tokens=tensor([[ 5,  6,  8, -1]], dtype=torch.int32), lens=tensor([3], dtype=torch.int32), \
nodes=tensor([[ 0,  1,  2, -1]], dtype=torch.int32))
    """
    backend, sizes = _SPEC.check(backend, drafts, drawn)
    return _launch(backend, empty(VerifiedTokens, drawn.device, sizes), drafts, drawn)
