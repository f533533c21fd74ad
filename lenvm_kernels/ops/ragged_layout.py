"""Ragged layout: the rows of one value-model forward; for each request its delta tokens, then its candidates.

Source: section 2 of the specification. The candidates of a request are at the position after its delta; in a tree, a
candidate is at the position after its parent.

One launch with one program per request. A program computes its offsets as integer sums of the lengths of all earlier
requests, which are exact in any order. It writes its own rows and columns, and a share of the padding rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import next_power_of_2, overlapping, with_row_stride
from lenvm_kernels.ops._device import wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.ragged_layout import ragged_layout as _reference
from lenvm_kernels.types import RaggedLayout

# Requests per iteration of the sum over the lengths, and tokens per iteration of the copies. Up to 1,024 requests, the
# sum is one load. A prompt of 32k tokens takes 32 iterations (about 40 us if each waits for memory, next to a prefill
# of many ms). A decode step's one token leaves most lanes idle, which costs no memory traffic. With 8 warps, a thread
# has 4 elements and at most 64 registers (without candidates 110), with 4 warps 240. Measured on an H200: 3.4 us for 64
# requests with 8 candidates. Other sizes have not been measured.
TILE = 1024
NUM_WARPS = 8


@triton.jit
def _lengths(delta_lens_ptr, candidate_lens_ptr, request, B, D, K):
    """(delta length, number of candidates) of requests as int64, clamped to 0 .. D and 0 .. K; 0 beyond B."""
    delta_len = tl.load(delta_lens_ptr + request, mask=request < B, other=0).to(tl.int64)
    candidate_len = tl.load(candidate_lens_ptr + request, mask=request < B, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(delta_len, 0), D), tl.minimum(tl.maximum(candidate_len, 0), K)


@triton.jit
def _store_rows(layout, row, token_id, position, slot, parent, mask):
    tl.store(layout.token_ids + row, token_id, mask=mask)
    tl.store(layout.positions + row, position, mask=mask)
    tl.store(layout.slots + row, slot, mask=mask)
    if layout.parents is not None:
        tl.store(layout.parents + row, parent, mask=mask)


@triton.jit
def _earlier(parent, column):
    """``parent`` where it is an earlier column than ``column``, else -1."""
    return tl.where((parent >= 0) & (parent < column), parent, -1).to(tl.int64)


# Callers pass slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["stride_candidate_ids_request", "stride_parents_request", "B", "D"],
    do_not_specialize_on_alignment=[
        "delta_ids_ptr",
        "delta_slots_ptr",
        "delta_starts_ptr",
        "delta_lens_ptr",
        "candidate_ids_ptr",
        "candidate_lens_ptr",
        "cached_lens_ptr",
        "parents_ptr",
    ],
)
def _ragged_layout_kernel(
    layout,  # RaggedLayout, written
    delta_ids_ptr,  # [D]
    delta_slots_ptr,  # [D]
    delta_starts_ptr,  # [B]
    delta_lens_ptr,  # [B]
    candidate_ids_ptr,  # [B, K]
    stride_candidate_ids_request,
    candidate_lens_ptr,  # [B]
    cached_lens_ptr,  # [B]
    parents_ptr,  # int32 [B, K] or None
    stride_parents_request,
    B,
    D,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    request = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE).to(tl.int64)
    D = D.to(tl.int64)
    T = D + B.to(tl.int64) * K

    start, end = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for first in range(0, B, TILE):
        other = first + tile
        delta_len, candidate_len = _lengths(delta_lens_ptr, candidate_lens_ptr, other, B, D, K)
        rows = delta_len + candidate_len
        end += tl.sum(rows, axis=0)
        start += tl.sum(tl.where(other < request, rows, 0), axis=0)
    tl.store(layout.q_offsets + request, start.to(tl.int32))
    tl.store(layout.q_offsets + B, end.to(tl.int32), mask=request == 0)

    delta_len, candidate_len = _lengths(delta_lens_ptr, candidate_lens_ptr, request, B, D, K)
    delta_start = tl.load(delta_starts_ptr + request).to(tl.int64)
    cached_len = tl.load(cached_lens_ptr + request).to(tl.int64)
    for first in range(0, delta_len, TILE):
        token = first + tile
        row, source = start + token, delta_start + token
        is_delta = (token < delta_len) & (row < T)
        readable = is_delta & (source >= 0) & (source < D)
        token_id = tl.load(delta_ids_ptr + source, mask=readable, other=0).to(tl.int64)
        slot = tl.load(delta_slots_ptr + source, mask=readable, other=-1).to(tl.int64)
        _store_rows(layout, row, token_id, cached_len + token, slot, -1, is_delta)

    if K > 0:
        column = tl.arange(0, COLUMNS).to(tl.int64)
        is_column, is_candidate = column < K, column < candidate_len
        candidate_row = start + delta_len + column
        is_row = is_candidate & (candidate_row < T)
        candidate_ids = candidate_ids_ptr + request * stride_candidate_ids_request
        token_id = tl.load(candidate_ids + column, mask=is_row, other=0).to(tl.int64)
        position = cached_len + delta_len + tl.zeros([COLUMNS], tl.int64)
        parent_row = tl.full([COLUMNS], -1, tl.int64)
        if parents_ptr is not None:
            parents_ptr += request * stride_parents_request
            parent = _earlier(tl.load(parents_ptr + column, mask=is_candidate, other=-1), column)
            parent_row = tl.where(parent >= 0, start + delta_len + parent, -1)
            while tl.max(parent, axis=0) >= 0:
                position += (parent >= 0).to(tl.int64)
                above = tl.load(parents_ptr + parent, mask=parent >= 0, other=-1)
                parent = _earlier(above, parent)
        _store_rows(layout, candidate_row, token_id, position, -1, parent_row.to(tl.int32), is_row)
        candidate_row = tl.where(is_candidate, candidate_row, -1)
        tl.store(layout.candidate_rows + request * K + column, candidate_row, mask=is_column)

    for first in range(end + request * TILE, T, B.to(tl.int64) * TILE):
        padding_row = first + tile
        _store_rows(layout, padding_row, 0, 0, -1, -1, padding_row < T)


@operator(reference=_reference)
def _launch(
    out: RaggedLayout,
    delta_ids: Tensor,
    delta_slots: Tensor,
    delta_starts: Tensor,
    delta_lens: Tensor,
    candidate_ids: Tensor,
    candidate_lens: Tensor,
    cached_lens: Tensor,
    candidate_parents: Tensor | None,
) -> None:
    (requests, columns), deltas = candidate_ids.shape, delta_ids.shape[0]
    delta = (delta_ids, delta_slots, delta_starts, delta_lens)
    candidates = (*with_row_stride(candidate_ids), candidate_lens, cached_lens, *with_row_stride(candidate_parents))
    sizes = dict(K=columns, COLUMNS=next_power_of_2(max(columns, 1)), TILE=TILE)
    _ragged_layout_kernel[(requests,)](
        out, *delta, *candidates, requests, deltas, **sizes, num_warps=NUM_WARPS, **overlapping()
    )


_SPEC = Spec("""
    delta_ids: int [D]
    candidate_ids: int [B+, K]
    delta_slots: int [D]
    delta_starts: int32 [B]
    delta_lens: int32 [B]
    candidate_lens: int32 [B]
    cached_lens: int32 [B]
    candidate_parents?: int32 [B, K]
""")


def ragged_layout(
    delta_ids: Tensor,  # int32|int64 [D]
    delta_slots: Tensor,  # int32|int64 [D]
    delta_starts: Tensor,  # int32 [B]
    delta_lens: Tensor,  # int32 [B]
    candidate_ids: Tensor,  # int32|int64 [B, K]
    candidate_lens: Tensor,  # int32 [B]
    cached_lens: Tensor,  # int32 [B]
    *,
    candidate_parents: Tensor | None = None,  # int32 [B, K]
    backend: str = "auto",
) -> RaggedLayout:
    """Lay out the tokens of one value-model forward in ``T = D + B * K`` rows, on the device.

    Causes no host-device sync, and no recompilation for a new number of requests or tokens. Lengths are not checked,
    because that would need a host-device sync. If they violate a condition below, the layout is meaningless, but the
    kernel neither reads nor writes outside its tensors.

    Args:
        delta_ids: int32 or int64 [D]; the delta tokens of all requests. Unreferenced tokens are ignored.
        delta_slots: int32 or int64 [D]; the cache slot for the key and value of each delta token.
        delta_starts: int32 [B]; index in ``delta_ids`` of each request's first delta token.
        delta_lens: int32 [B]; number of delta tokens of each request, 0 or more, at most ``D`` in total.
        candidate_ids: int32 or int64 [B, K]; the candidates of each request from column 0 on. Rows may be strided;
            ``K`` may be 0.
        candidate_lens: int32 [B]; number of candidates of each request, clamped to 0 .. ``K``.
        cached_lens: int32 [B]; cached tokens of each request, which is the position of its first delta token.
        candidate_parents: int32 [B, K]; the earlier column of each candidate's parent. For any other value (-1), the
            candidate follows the delta. If ``None``, all candidates do. Rows may be strided.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.

    Returns:
        The :class:`RaggedLayout`, on the device of ``delta_ids``.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> import torch
        >>> def i32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> layout = ragged_layout(  # two requests at a decode step, of whose three candidate columns one is padding
        ...     i32(7, 8), i32(70, 80), i32(0, 1), i32(1, 1), i32((1, 2), (3, -1)), i32(2, 1), i32(5, 9)
        ... )
        >>> layout.token_ids
        tensor([7, 1, 2, 8, 3, 0])
        >>> layout.positions
        tensor([ 5,  6,  6,  9, 10,  0])
        >>> layout.slots
        tensor([70, -1, -1, 80, -1, -1])
        >>> layout.candidate_rows
        tensor([[ 1,  2],
                [ 4, -1]])
    """
    delta = (delta_slots, delta_starts, delta_lens)
    lens = (candidate_lens, cached_lens, candidate_parents)
    backend, sizes = _SPEC.check(backend, delta_ids, candidate_ids, *delta, *lens)
    sizes["T"] = sizes["D"] + sizes["B"] * sizes["K"]
    without = ("parents",) if candidate_parents is None else ()
    layout = empty(RaggedLayout, delta_ids.device, sizes, without)
    _launch(backend, layout, delta_ids, *delta, candidate_ids, *lens)
    return layout
