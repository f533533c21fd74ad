"""Per-request inputs of a step, gathered from the tables in one launch.

The output may have more rows than there are requests. The extra rows are filled with dummy requests, so that a CUDA
graph captured for a larger batch can run. PyTorch operators would need about twenty launches.

The kernel also appends the new tokens to each request's history. A program reads and writes the history of its
requests only, so the previous state needs no copy.

The value model can catch up with a request as long as the history holds all tokens that it has not computed. If one is
missing, the request loses its guidance, and ``faults`` counts the step, until its tokens are passed again as a prompt.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, row_strides, select_columns
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.gather_requests import gather_requests as _reference
from lenvm_kernels.types import GuidanceColumns, Mode, StepHistory, StepRequests

# Requests per program: one per thread of a warp.
REQUESTS = 32

_UNGUIDED = tl.constexpr(int(Mode.UNGUIDED))


class GatheredColumns(NamedTuple):
    """The columns of a guidance table that the kernel accesses."""

    mode: Tensor
    return_values: Tensor
    entropy_threshold: Tensor
    prompt_len: Tensor
    seed: Tensor
    value_stride: Tensor
    span_ended: Tensor
    span_start_bits: Tensor
    faults: Tensor  # written


# Callers pass slices, whose alignment must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["stride_tokens_request", "B", "N", "padding_row"],
    do_not_specialize_on_alignment=["tokens_ptr", "new_lens_ptr", "table_rows_ptr", "lengths_ptr", "active_ptr"],
)
def _gather_requests_kernel(
    requests,  # StepRequests, written
    table,  # GatheredColumns
    stride,  # its strides
    history,  # StepHistory, read and written, or None
    tokens_ptr,  # int64 [B, NEW]
    stride_tokens_request,
    new_lens_ptr,  # int32 [B] or None
    table_rows_ptr,  # int64 [B]
    lengths_ptr,  # int32 [B]
    active_ptr,  # bool [B] or None
    B,
    N,
    padding_row,
    NEW: tl.constexpr,
    HELD: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    # All loads precede the first store: a store waits for its operand, and delays the loads after it.
    table_row = tl.load(table_rows_ptr + request, mask=exists, other=0)
    new_len = tl.full([REQUESTS], 1, tl.int32)
    if new_lens_ptr is not None:
        new_len = tl.minimum(tl.maximum(tl.load(new_lens_ptr + request, mask=exists, other=0), 0), NEW)
    length = tl.load(lengths_ptr + request, mask=exists, other=0)
    active = exists
    if active_ptr is not None:
        active = exists & tl.load(active_ptr + request, mask=exists, other=False)
    mode = tl.load(table.mode + table_row * stride.mode, mask=exists, other=_UNGUIDED)
    wants_length = tl.load(table.return_values + table_row * stride.return_values, mask=exists, other=False)
    threshold_ptr = table.entropy_threshold + table_row * stride.entropy_threshold
    entropy_threshold = tl.load(threshold_ptr, mask=exists, other=float("nan"))
    prompt_len = tl.load(table.prompt_len + table_row * stride.prompt_len, mask=exists, other=0)
    seed = tl.load(table.seed + table_row * stride.seed, mask=exists, other=0)
    value_stride = tl.load(table.value_stride + table_row * stride.value_stride, mask=exists, other=1)
    span_ended = tl.load(table.span_ended + table_row * stride.span_ended, mask=exists, other=False)
    start_bits = tl.load(table.span_start_bits + table_row * stride.span_start_bits, mask=exists, other=0)
    has_mode = mode != _UNGUIDED
    guided, due = active & has_mode & (span_ended == 0), exists
    wants_length = active & (wants_length | (has_mode & (start_bits != 0) & span_ended))
    if history is not None:
        new_ptr = tokens_ptr + request.to(tl.int64) * stride_tokens_request
        token = tl.load(new_ptr, mask=exists & (new_len > 0), other=0)
        counted = tl.load(history.step) - tl.load(history.uncounted)
        told_len = tl.load(history.told_lens + table_row, mask=exists, other=0)
        cached_len = tl.load(history.cached_lens + table_row, mask=exists, other=0)
        tl.debug_barrier()  # all reads precede the overwrites
        due = exists & (counted % tl.maximum(value_stride, 1) == 0)
        first_new = length - new_len
        is_gap = told_len < first_new
        is_lost = (guided | wants_length) & (is_gap | (length - cached_len > HELD))
        guided, wants_length = guided & ~is_lost, wants_length & ~is_lost
        tl.atomic_add(table.faults + table_row * stride.faults, 1, mask=is_lost, sem="relaxed")
        tl.store(history.told_lens + table_row, tl.maximum(told_len, length), mask=exists & ~is_gap)
        tl.store(requests.cached_lens + request, cached_len, mask=is_row)
        # The first token was loaded above; each later load waits for the stores before it.
        for i in range(NEW):
            position = first_new + i
            is_held = exists & (i < new_len) & (i >= new_len - HELD) & (position >= 0)  # each column is written once
            held_ptr = history.tokens + table_row * HELD + position % HELD
            tl.store(held_ptr, token.to(tl.int32), mask=is_held)
            token = tl.load(new_ptr + i + 1, mask=exists & (i + 1 < new_len), other=0)

    tl.store(requests.positions + request, length - 1, mask=is_row)
    tl.store(requests.table_rows + request, tl.where(exists, table_row, padding_row), mask=is_row)
    tl.store(requests.guided + request, guided, mask=is_row)
    tl.store(requests.wants_length + request, wants_length, mask=is_row)
    tl.store(requests.entropy_threshold + request, entropy_threshold, mask=is_row)
    tl.store(requests.generated + request, length - prompt_len, mask=is_row)
    tl.store(requests.seeds + request, seed, mask=is_row)
    tl.store(requests.due + request, due, mask=is_row)


_WRITTEN = ["table.faults", *(f"history.{name}" for name in StepHistory._fields)]


@operator(reference=_reference, mutates=_WRITTEN)
def _launch(
    out: StepRequests,
    table: GatheredColumns,
    tokens: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    new_lens: Tensor | None,
    active: Tensor | None,
    history: StepHistory | None,
    padding_row: int,
) -> None:
    rows = out.positions.shape[0]
    if rows == 0:
        return
    new = 1 if tokens.dim() == 1 else tokens.shape[1]
    held = 1 if history is None else history.tokens.shape[1]
    state = (out, table, row_strides(table), history)
    batch = (tokens, tokens.stride(0), new_lens, table_rows, lengths, active, tokens.shape[0])
    _gather_requests_kernel[(ceil_div(rows, REQUESTS),)](
        *state, *batch, rows, padding_row, NEW=new, HELD=held, REQUESTS=REQUESTS, num_warps=1
    )


def empty_requests(rows: int, device: torch.device) -> StepRequests:
    """Result tensors for :func:`gather_requests`."""
    return empty(StepRequests, device, {"N": rows})


def empty_history(table_rows: int, max_delta: int, device: torch.device) -> StepHistory:
    """An empty history for :func:`gather_requests`.

    Args:
        table_rows: R, rows of the table.
        max_delta: M, tokens held per sequence.
        device: device of the tensors.
    """
    history = empty(StepHistory, device, {"R": table_rows, "M": max_delta})
    for x in history:
        x.zero_()
    history.step.fill_(1)
    return history


def check_history(history: StepHistory) -> None:
    """Raise ValueError unless ``history.tokens`` is contiguous and has a column."""
    if not history.tokens.is_contiguous() or history.tokens.shape[1] == 0:
        came = f"{list(history.tokens.shape)} with strides {history.tokens.stride()}"
        raise ValueError(f"history.tokens must be contiguous and have a column, got {came}")


_TEXT = f"""
    tokens: int64 [B, NEW+]
    table_rows: int64 [B]
    lengths: int32 [B]
    new_lens?: int32 [B]
    active?: bool [B]
    table: GuidanceColumns ({", ".join(GatheredColumns._fields)}) strided
    history?: StepHistory
    out?: StepRequests contiguous
"""
_SPEC, _SPEC_OF_ONE_TOKEN = Spec(_TEXT), Spec(_TEXT.replace("[B, NEW+]", "[B]"))


def gather_requests(
    table: GuidanceColumns,
    tokens: Tensor,  # int64 [B] or [B, N]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None = None,  # int32 [B]
    active: Tensor | None = None,  # bool [B]
    history: StepHistory | None = None,
    padding_row: int = 0,
    out: StepRequests | None = None,  # [N]
    backend: str = "auto",
    validate: bool = True,
) -> StepRequests:  # [N]
    """Gather the per-request inputs of a step, and update the history.

    Causes no host-device sync, and no recompilation for a new number of requests.

    Args:
        table: the columns of a :class:`GuidanceTable` of ``R`` requests. ``faults`` is incremented for each request
            that needs values and whose history lacks a token that the value model has not computed.
        tokens: int64 [B]; the last token of each sequence. Or [B, N]; the new tokens of each sequence, from column 0
            on. Rows may be strided.
        table_rows: int64 [B]; each request's row of the table, all different.
        lengths: int32 [B]; tokens of each sequence, including the new ones.
        new_lens: int32 [B]; number of new tokens in each row of ``tokens``, 0 to N. If ``None``, 1; required for
            [B, N].
        active: bool [B]; requests that are False are treated as unguided. If ``None``, all are active.
        history: history of the table's rows (:func:`empty_history`), updated in place except for ``step``, which
            :func:`select_scored` updates, and ``cached_lens``, which :func:`lay_out` updates. If ``None``,
            ``cached_lens`` is left untouched and all requests are due.
        padding_row: table row of dummy requests.
        out: contiguous result tensors to reuse, of ``N >= B`` rows (:func:`empty_requests`). If ``None``, ``B`` rows.
        backend: ``auto`` (Triton for GPU tensors, the reference for CPU tensors), ``triton`` or ``reference``.
        validate: whether to check the arguments. If False, ``backend`` must be ``triton`` or ``reference``.

    Returns:
        The :class:`StepRequests`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch. The contents of
            ``table_rows`` are not checked: that would need a host-device sync.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> table = GuidanceTable(4, "cpu")
        >>> table.add_request(2, parse_guidance({"target_length": 60}), eos_token_ids={0}, prompt_len=7, seed=5)
        >>> tokens, rows = torch.tensor([[11, 12], [0, 2]])
        >>> requests = gather_requests(table.columns, tokens, rows, torch.tensor([4, 9], dtype=torch.int32))
        >>> requests.guided, requests.generated
        (tensor([False,  True]), tensor([4, 2], dtype=torch.int32))
    """
    if validate:
        is_many = isinstance(tokens, Tensor) and tokens.dim() == 2
        spec = _SPEC if is_many else _SPEC_OF_ONE_TOKEN
        backend, sizes = spec.check(backend, tokens, table_rows, lengths, new_lens, active, table, history, out)
        if is_many and new_lens is None:
            raise ValueError("new_lens must say how many of the tokens [B, N] are new, got None")
        if history is not None:
            check_history(history)
        if isinstance(padding_row, bool) or not isinstance(padding_row, int):
            raise TypeError(f"padding_row must be an int, got {type(padding_row).__name__}")
        if not 0 <= padding_row < sizes["R"]:
            raise ValueError(f"padding_row must be in [0, {sizes['R']}), got {padding_row}")
        if sizes.get("N", sizes["B"]) < sizes["B"]:
            raise ValueError(f"out must have a row for each of the {sizes['B']} requests, got {sizes['N']}")
    if out is None:
        out = empty_requests(tokens.shape[0], tokens.device)
    columns = select_columns(GatheredColumns, table)
    _launch(backend, out, columns, tokens, table_rows, lengths, new_lens, active, history, padding_row)
    return out
