"""Expansion of requests with draft tokens into one request per node, in one launch.

A token is drawn at each node: after the last token of the sequence, and after each draft. A node has the parameters of
its request, except for the position and the number of generated tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, next_power_of_2, with_row_stride
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import FIELD_FORMS, Spec
from lenvm_kernels.reference.expand_drafts import expand_drafts as _reference
from lenvm_kernels.types import Drafts, StepRequests

# Requests per program. With four drafts each, a thread of the one warp has two nodes.
REQUESTS = 8


class DraftNodes(NamedTuple):
    """The per-node fields of :class:`StepRequests`."""

    positions: Tensor
    table_rows: Tensor
    guided: Tensor
    wants_length: Tensor
    entropy_threshold: Tensor
    generated: Tensor
    due: Tensor


NODE_FIELDS = {name: FIELD_FORMS[StepRequests][name][0] for name in DraftNodes._fields}


# Callers pass slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["stride_ids_request", "stride_parents_request", "B", "N"],
    do_not_specialize_on_alignment=["draft_ids_ptr", "draft_parents_ptr"],
)
def _expand_drafts_kernel(
    nodes,  # DraftNodes, written
    requests,  # DraftNodes
    draft_ids_ptr,  # [B, D]
    stride_ids_request,
    draft_parents_ptr,  # int32 [B, D]
    stride_parents_request,
    B,
    N,
    D: tl.constexpr,
    NODES: tl.constexpr,  # a power of two > D
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    position = tl.load(requests.positions + request, mask=is_row, other=-1)
    table_row = tl.load(requests.table_rows + request, mask=is_row, other=0)
    guided = tl.load(requests.guided + request, mask=is_row, other=False)
    wants_length = tl.load(requests.wants_length + request, mask=is_row, other=False)
    entropy_threshold = tl.load(requests.entropy_threshold + request, mask=is_row, other=float("nan"))
    generated = tl.load(requests.generated + request, mask=is_row, other=0)
    due = tl.load(requests.due + request, mask=is_row, other=False)

    # Number of drafts on the path to each node.
    node = tl.arange(0, NODES)[None, :]
    depth = tl.zeros([REQUESTS, NODES], tl.int32)
    is_draft, count = exists, tl.zeros([REQUESTS], tl.int32)
    for j in range(D):
        token = tl.load(draft_ids_ptr + request.to(tl.int64) * stride_ids_request + j, mask=is_draft, other=-1)
        parent = tl.load(draft_parents_ptr + request.to(tl.int64) * stride_parents_request + j, mask=is_draft, other=-1)
        is_draft = is_draft & (token >= 0)
        count += is_draft.to(tl.int32)
        of_parent = tl.where((node == (parent + 1)[:, None]) & (node <= j), depth, 0)
        depth = tl.where((node == j + 1) & is_draft[:, None], tl.sum(of_parent, axis=1)[:, None] + 1, depth)

    is_there = node <= count[:, None]
    row, mask = request[:, None].to(tl.int64) * (D + 1) + node, is_row[:, None] & (node <= D)
    tl.store(nodes.positions + row, position[:, None] + depth, mask=mask)
    tl.store(nodes.table_rows + row, table_row[:, None], mask=mask)
    tl.store(nodes.guided + row, guided[:, None] & is_there, mask=mask)
    tl.store(nodes.wants_length + row, wants_length[:, None] & is_there, mask=mask)
    tl.store(nodes.entropy_threshold + row, entropy_threshold[:, None], mask=mask)
    tl.store(nodes.generated + row, generated[:, None] + depth, mask=mask)
    tl.store(nodes.due + row, due[:, None] & is_there, mask=mask)


@operator(reference=_reference)
def _launch(out: DraftNodes, requests: DraftNodes, drafts: Drafts) -> None:
    (count, columns), rows = drafts.token_ids.shape, requests.positions.shape[0]
    if rows == 0:
        return
    trees = (*with_row_stride(drafts.token_ids), *with_row_stride(drafts.parents))
    sizes = dict(D=columns, NODES=next_power_of_2(columns + 1), REQUESTS=REQUESTS)
    _expand_drafts_kernel[(ceil_div(rows, REQUESTS),)](out, requests, *trees, count, rows, **sizes, num_warps=1)


def empty_nodes(requests: StepRequests, drafts: int) -> StepRequests:
    """Result tensors for :func:`expand_drafts`."""
    rows, device = requests.positions.shape[0] * (1 + drafts), requests.positions.device
    return requests._replace(**{name: torch.empty(rows, dtype=d, device=device) for name, d in NODE_FIELDS.items()})


_DRAFTS = Spec("drafts: Drafts")
_SPEC = Spec(f"""
    drafts: Drafts
    requests: StepRequests of gather_requests ({", ".join(NODE_FIELDS)})
""")
_OUT = Spec(f"out: StepRequests ({', '.join(NODE_FIELDS)}) [N * (1 + D)]")


def check_drafts(drafts: Drafts, requests: int, device: torch.device) -> None:
    """Raise TypeError or ValueError, naming the field, unless ``drafts`` are valid for ``requests`` requests."""
    _DRAFTS.check("auto", drafts, device=device, sizes={"B": requests})


def expand_drafts(
    requests: StepRequests,  # [N]
    drafts: Drafts,  # [B, D]
    *,
    out: StepRequests | None = None,  # [N * (1 + D)]
    backend: str = "auto",
) -> StepRequests:  # [N * (1 + D)]
    """Make one request of each node: one after the last token of each sequence, and one after each draft.

    Causes no host-device sync, and no recompilation for a new number of requests.

    Args:
        requests: result of :func:`gather_requests`.
        drafts: drafts of the first ``B <= N`` requests. The other requests have none. Rows may be strided.
        out: contiguous result tensors to reuse. If ``None``, they are allocated.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.

    Returns:
        The :class:`StepRequests`, with the nodes of request ``i`` from row ``i * (1 + D)`` on. ``positions`` and
        ``generated`` include the drafts on the path to the node. The node of a missing draft equals node 0, except that
        ``guided``, ``due`` and ``wants_length`` are False. ``cached_lens`` is per sequence and is passed through.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, gather_requests, parse_guidance
        >>> table = GuidanceTable.from_params([parse_guidance({"target_length": 60})], [{0}], "cpu").columns
        >>> requests = gather_requests(table, *torch.tensor([[11], [0]]), torch.tensor([4], dtype=torch.int32))
        >>> chain_and_branch = Drafts(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, -1]], dtype=torch.int32))
        >>> expand_drafts(requests, chain_and_branch).positions
        tensor([3, 4, 5, 4], dtype=torch.int32)
    """
    backend, sizes = _SPEC.check(backend, drafts, requests)
    count, rows = sizes["B"], sizes["N"]
    if rows < count:
        raise ValueError(f"requests must have a row for each of the {count} requests with drafts, got {rows}")
    if out is None:
        out = empty_nodes(requests, sizes["D"])
    _OUT.check(backend, out, device=drafts.token_ids.device, sizes=sizes)
    written, read = (DraftNodes(*(getattr(x, name) for name in NODE_FIELDS)) for x in (out, requests))
    _launch(backend, written, read, drafts)
    return out
