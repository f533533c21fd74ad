"""Choice of the tokens that the value model computes and caches in a step, in one launch.

The value model does not need to process every token when it is drawn. A request that needs no values in a step waits.
Its missing tokens are computed at the next step that needs values, or before its history would overflow. The decision
depends on the request alone, so that its values are the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, next_power_of_2
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.ops.gather_requests import check_history
from lenvm_kernels.reference.catch_up import catch_up as _reference
from lenvm_kernels.types import DeltaTokens, StepHistory, StepRequests

# Requests per program. With 16 tokens each, a thread of the one warp has two tokens.
REQUESTS = 4


# Callers pass slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["N", "stride_slot_table_row"],
    do_not_specialize_on_alignment=["counts_ptr", "slot_table_ptr"],
)
def _catch_up_kernel(
    delta,  # DeltaTokens, written
    requests,  # StepRequests
    held_ptr,  # int32 [R, M], of the history
    cached_lens_ptr,  # int32 [R], of the history, written
    counts_ptr,  # int32 [N]
    slot_table_ptr,  # int32 [R, pages]
    stride_slot_table_row,
    N,
    M: tl.constexpr,
    MAX_NEW: tl.constexpr,  # W
    COLUMNS: tl.constexpr,  # a power of two >= M
    PAGE_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    is_row = request < N
    table_row = tl.load(requests.table_rows + request, mask=is_row, other=0)
    position = tl.load(requests.positions + request, mask=is_row, other=-1)
    cached_len = tl.load(requests.cached_lens + request, mask=is_row, other=0)
    guided = tl.load(requests.guided + request, mask=is_row, other=False)
    wants_length = tl.load(requests.wants_length + request, mask=is_row, other=False)
    count = tl.load(counts_ptr + request, mask=is_row, other=0)
    length = position + 1
    missing = tl.maximum(length - cached_len, 0)
    computes = (guided | wants_length) & ((count > 0) | (missing > M - MAX_NEW))
    delta_len = tl.where(computes, tl.minimum(missing, M), 0)

    column = tl.arange(0, COLUMNS)[None, :]
    is_delta, is_column = column < delta_len[:, None], is_row[:, None] & (column < M)
    token_position = cached_len[:, None] + column
    held = held_ptr + table_row[:, None] * M + token_position % M
    token_id = tl.load(held, mask=is_delta, other=0).to(tl.int64)
    page_ptr = slot_table_ptr + table_row[:, None] * stride_slot_table_row + token_position // PAGE_SIZE
    page = tl.load(page_ptr, mask=is_delta, other=0).to(tl.int64)
    slot = tl.where(is_delta, page * PAGE_SIZE + token_position % PAGE_SIZE, -1)

    place = request[:, None].to(tl.int64) * M + column
    tl.store(delta.token_ids + place, token_id, mask=is_column)
    tl.store(delta.slots + place, slot, mask=is_column)
    tl.store(delta.lens + request, delta_len, mask=is_row)
    tl.store(delta.cached_lens + request, tl.minimum(cached_len, length), mask=is_row)
    tl.store(cached_lens_ptr + table_row, cached_len + delta_len, mask=is_row & (position >= 0))


@operator(reference=_reference, mutates=["history.cached_lens"])
def _launch(
    out: DeltaTokens,
    history: StepHistory,
    requests: StepRequests,
    counts: Tensor,
    slot_table: Tensor,
    page_size: int,
    max_new: int,
) -> None:
    rows, columns = out.token_ids.shape
    if rows == 0:
        return
    tensors = (out, requests, history.tokens, history.cached_lens, counts, slot_table, slot_table.stride(0))
    sizes = dict(M=columns, COLUMNS=next_power_of_2(columns), REQUESTS=REQUESTS)
    _catch_up_kernel[(ceil_div(rows, REQUESTS),)](
        *tensors, rows, **sizes, MAX_NEW=max_new, PAGE_SIZE=page_size, num_warps=1
    )


def empty_delta(rows: int, max_delta: int, device: torch.device) -> DeltaTokens:
    """Result tensors for :func:`catch_up`."""
    return empty(DeltaTokens, device, {"N": rows, "M": max_delta})


_SPEC = Spec("""
    counts: int32 [N]
    requests: StepRequests of gather_requests (positions, table_rows, guided, wants_length, cached_lens)
    history: StepHistory (tokens, told_lens, cached_lens)
    slot_table: int32 [*, *]
    out?: DeltaTokens contiguous
""")


def catch_up(
    history: StepHistory,  # [R]
    requests: StepRequests,  # [N]
    counts: Tensor,  # int32 [N]
    slot_table: Tensor,  # int32 [R, pages]
    *,
    page_size: int = 1,
    max_new: int = 1,  # W
    out: DeltaTokens | None = None,  # [N, M]
    backend: str = "auto",
) -> DeltaTokens:  # [N, M]
    """Decide which tokens the value model computes and caches in a step.

    Causes no host-device sync, and no recompilation for a new number of requests.

    Args:
        history: history passed to :func:`gather_requests`, which holds the last M tokens of each sequence.
            ``cached_lens`` is updated in place.
        requests: result of :func:`gather_requests` for the same history.
        counts: int32 [N]; number of scored tokens (:func:`topk_candidates`). A request with 0 waits, unless the history
            has no room for ``max_new`` tokens beyond the missing ones.
        slot_table: int32 [R, pages]; token ``p`` of table row ``r`` lives in slot
            ``slot_table[r, p // page_size] * page_size + p % page_size``. Rows may be strided.
        page_size: slots per page.
        max_new: maximum number of tokens that a sequence grows by in a step.
        out: contiguous result tensors to reuse. If ``None``, they are allocated.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.

    Returns:
        The :class:`DeltaTokens`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, empty_history, gather_requests, parse_guidance
        >>> table = GuidanceTable.from_params([parse_guidance({"target_length": 60})], [{0}], "cpu").columns
        >>> history, slot_table = empty_history(1, 4, "cpu"), torch.tensor([[7, 5, 6, 4]], dtype=torch.int32)
        >>> for token, length, scored in ((11, 1, 0), (12, 2, 0), (13, 3, 2)):
        ...     lengths, counts = torch.tensor([[length], [scored]], dtype=torch.int32)
        ...     one = torch.tensor([token]), torch.tensor([0]), lengths
        ...     delta = catch_up(history, gather_requests(table, *one, history=history), counts, slot_table)
        ...     print(delta.lens.item(), delta.token_ids.tolist(), delta.slots.tolist())
        0 [[0, 0, 0, 0]] [[-1, -1, -1, -1]]
        0 [[0, 0, 0, 0]] [[-1, -1, -1, -1]]
        3 [[11, 12, 13, 0]] [[7, 5, 6, -1]]
    """
    backend, sizes = _SPEC.check(backend, counts, requests, history, slot_table, out)
    check_history(history)
    if slot_table.shape[0] < sizes["R"] - 1:  # the last row may be the one of dummy requests
        raise ValueError(f"slot_table must have at least {sizes['R'] - 1} rows, got {slot_table.shape[0]}")
    for name, value in (("page_size", page_size), ("max_new", max_new)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if out is None:
        out = empty_delta(sizes["N"], sizes["M"], counts.device)
    _launch(backend, out, history, requests, counts, slot_table, page_size, max_new)
    return out
