"""Packs draft tokens and the scored candidates after each of them into one tree per request, in one launch.

A candidate that is also a draft is computed once. A tree without scored candidates is empty; others have all drafts.

One program per request. Each cell (a candidate column of a node) has a place in the tree: first the computed cells, in
order, then the others, so that a single scatter also writes the padding.
"""

import torch
import triton.language as tl

from lenvm_kernels.ops._common import next_power_of_2, overlapping, with_row_strides
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.pack_drafts import pack_drafts as _reference
from lenvm_kernels.types import CandidateTrees, Drafts, ScoredCandidates


@kernel(specialized="scored_ids_ptr counts_ptr positions_ptr")
def _pack_drafts_kernel(
    trees,  # CandidateTrees, written
    scored_ids_ptr,  # int32 [N * (1 + D), K]
    counts_ptr,  # int32 [N * (1 + D)]
    positions_ptr,  # int32 [N * (1 + D)]
    draft_ids_ptr,  # [B, D]
    stride_ids_request,
    draft_parents_ptr,  # int32 [B, D]
    stride_parents_request,
    B,
    D: tl.constexpr,
    K: tl.constexpr,
    NODES: tl.constexpr,  # a power of two > D
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0).to(tl.int64)
    first_node = request * (D + 1)
    draft_ids_ptr += request * stride_ids_request
    draft_parents_ptr += request * stride_parents_request

    cell = tl.arange(0, NODES * K)
    node, is_cell = cell // K, cell < (D + 1) * K
    token_id = tl.load(scored_ids_ptr + first_node * K + cell, mask=is_cell, other=-1)
    is_scored = is_cell & (cell % K < tl.load(counts_ptr + first_node + node, mask=is_cell, other=0))

    draft = tl.arange(0, NODES)
    exists = (request < B) & (draft < D)
    draft_id = tl.maximum(tl.load(draft_ids_ptr + draft, mask=exists, other=-1), -1).to(tl.int32)
    parent = tl.load(draft_parents_ptr + draft, mask=exists, other=-1)
    parent = tl.where((parent >= 0) & (parent < draft), parent, -1)
    drafts = tl.min(tl.where(draft_id < 0, draft, D), axis=0)
    drafts = tl.where(tl.max(is_scored.to(tl.int32), axis=0) > 0, drafts, 0)

    column = tl.full([NODES * K], -1, tl.int32)
    for j in range(D):
        one = draft == j
        of_draft = tl.sum(tl.where(one, draft_id, 0), axis=0), tl.sum(tl.where(one, parent, 0), axis=0)
        is_it = is_scored & (token_id == of_draft[0]) & (node == of_draft[1] + 1) & (j < drafts)
        column = tl.where(is_it & (column < 0), j, column)
    is_new = is_scored & (column < 0)
    place = drafts + tl.cumsum(is_new.to(tl.int32), axis=0) - 1
    count = drafts + tl.sum(is_new.to(tl.int32), axis=0)
    column = tl.where(is_new, place, column)
    is_other = is_cell & ~is_new
    others = tl.sum(is_other.to(tl.int32), axis=0)
    place = tl.where(is_new, place, count + tl.cumsum(is_other.to(tl.int32), axis=0) - 1)
    draft_place = tl.where(draft < drafts, draft, count + others + draft - drafts)

    first_column = request * (D + (D + 1) * K)
    tl.store(trees.token_ids + first_column + place, tl.where(is_new, token_id, -1), mask=is_cell)
    tl.store(trees.parents + first_column + place, tl.where(is_new, node - 1, -1), mask=is_cell)
    is_draft = draft < drafts
    tl.store(trees.token_ids + first_column + draft_place, tl.where(is_draft, draft_id, -1), mask=draft < D)
    tl.store(trees.parents + first_column + draft_place, tl.where(is_draft, parent, -1), mask=draft < D)
    tl.store(trees.columns + first_node * K + cell, column.to(tl.int64), mask=is_cell)
    tl.store(trees.counts + request, count)
    tl.store(trees.positions + request, tl.load(positions_ptr + first_node))


_SPEC = Spec("""
    scored: ScoredCandidates of topk_candidates (token_ids, counts, positions) contiguous
    drafts: Drafts
""")
_OUT = Spec("out: CandidateTrees contiguous")


@operator(_SPEC, reference=_reference)
def _launch(out: CandidateTrees, given):
    scored, drafts = given
    rows, (count, width), columns = out.counts.shape[0], drafts.token_ids.shape, scored.token_ids.shape[1]
    nodes = next_power_of_2(width + 1)
    tensors = (out, scored.token_ids, scored.counts, scored.positions, *with_row_strides(*drafts))
    warps = max(1, min(8, nodes * columns // 64))
    _pack_drafts_kernel[(rows,)](*tensors, count, D=width, K=columns, NODES=nodes, num_warps=warps, **overlapping())


def tree_columns(drafts: int, candidates: int) -> int:
    """C, the columns of a tree of ``drafts`` drafts and ``candidates`` candidates per node."""
    return drafts + (1 + drafts) * candidates


def empty_trees(rows: int, drafts: int, candidates: int, device: torch.device) -> CandidateTrees:
    """Result tensors for :func:`pack_drafts`, for ``rows`` requests."""
    sizes = {"N": rows, "D": drafts, "K": candidates, "C": tree_columns(drafts, candidates)}
    return empty(CandidateTrees, device, sizes)


def pack_drafts(
    scored: ScoredCandidates,  # [N * (1 + D), K]
    drafts: Drafts,  # [B, D]
    *,
    out: CandidateTrees | None = None,  # [N, C]
    backend: str = "auto",
) -> CandidateTrees:  # [N, C]
    """Build a tree per request from its drafts and the scored candidates at its nodes.

    Args:
        scored: written by :func:`topk_candidates` for the nodes of ``N`` requests; ``K`` is a power of two up to 64.
            If a draft is listed twice below the same parent, the candidate shares the column of the first.
        drafts: drafts of the first ``B <= N`` requests. The other requests have none. Rows may be strided.
        out: contiguous result tensors to reuse. If ``None``, they are allocated.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        The :class:`CandidateTrees`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> def i32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> two_nodes = ScoredCandidates(i32([5, 8], [6, 7]), i32(2, 1), i32(9, 10), torch.tensor([False, False]))
        >>> trees = pack_drafts(two_nodes, Drafts(i32([8]), i32([-1])))
        >>> trees.token_ids, trees.parents
        (tensor([[ 8,  5,  6, -1, -1]], dtype=torch.int32), tensor([[-1, -1,  0, -1, -1]], dtype=torch.int32))
        >>> trees.counts, trees.columns
        (tensor([3], dtype=torch.int32), tensor([[ 1,  0],
                [ 2, -1]]))
    """
    backend, sizes = _SPEC.check(backend, scored, drafts)
    nodes, columns, count, width = (sizes[name] for name in ("N", "K", "B", "D"))
    rows, rest = divmod(nodes, 1 + width)
    if rest or rows < count:
        raise ValueError(
            f"scored must have 1 + {width} rows per request for at least {count} requests with drafts, got {nodes}"
        )
    if out is None:
        out = empty_trees(rows, width, columns, drafts.parents.device)
    sizes |= {"N": rows, "C": tree_columns(width, columns)}
    _OUT.check(backend, out, device=drafts.parents.device, sizes=sizes)
    return _launch(backend, out, scored, drafts)
