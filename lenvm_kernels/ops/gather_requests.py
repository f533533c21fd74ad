"""What a step has to know of each of its requests, out of the tables, in one launch.

One program a few requests. Their number may be less than the rows written: the rest is filled with requests that do not
exist, so that a CUDA graph captured for more of them can run. Torch's operators for this would be some twenty launches.

A request's place in the step before is what its history says, if that is of the step before (:class:`StepHistory`).
The history then says its place in this step. A program touches the history of its own requests only, which is why
nothing has to be kept apart from the step before.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, check_fields, check_tensor, resolve_backend, row_stride
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference.gather_requests import gather_requests as _reference
from lenvm_kernels.types import GuidanceColumns, Mode, StepHistory, StepRequests

# Requests a program: a warp's threads, one each.
REQUESTS = 32

_UNGUIDED = tl.constexpr(int(Mode.UNGUIDED))


class _Table(NamedTuple):
    """The columns of a guidance table that are read here."""

    mode: Any  # int32 [R]
    return_values: Any  # bool [R]
    entropy_threshold: Any  # fp32 [R]
    prompt_len: Any  # int32 [R]
    seed: Any  # int64 [R]


# Of the columns above.
_TABLE_DTYPES = (torch.int32, torch.bool, torch.float32, torch.int32, torch.int64)
# Of the fields of StepRequests, in their order.
_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int64,
    torch.int64,
    torch.int64,
    torch.bool,
    torch.bool,
    torch.float32,
    torch.int32,
    torch.int64,
)


# The inputs are a caller's, and may be slices: nothing is compiled anew where their alignment changes. (Triton heeds
# that for pointers of their own only, not for those in a tuple.)
@triton.jit(
    do_not_specialize=["B", "N", "padding_row"],
    do_not_specialize_on_alignment=["tokens_ptr", "table_rows_ptr", "lengths_ptr", "slots_ptr", "active_ptr"],
)
def _gather_requests_kernel(
    requests,  # StepRequests, written
    table,  # _Table
    stride,  # its strides
    history,  # StepHistory, read and written, or None
    tokens_ptr,  # int64 [B]
    table_rows_ptr,  # int64 [B]
    lengths_ptr,  # int32 [B]
    slots_ptr,  # int64 [B]
    active_ptr,  # bool [B] or None
    B,
    N,
    padding_row,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    # All loads come before the first store: a store waits for what it stores, and the loads after it with it.
    table_row = tl.load(table_rows_ptr + request, mask=exists, other=0)
    token = tl.load(tokens_ptr + request, mask=exists, other=0)
    length = tl.load(lengths_ptr + request, mask=exists, other=0)
    slot = tl.load(slots_ptr + request, mask=exists, other=-1)
    active = exists
    if active_ptr is not None:
        active = exists & tl.load(active_ptr + request, mask=exists, other=False)
    mode = tl.load(table.mode + table_row * stride.mode, mask=exists, other=_UNGUIDED)
    wants_length = tl.load(table.return_values + table_row * stride.return_values, mask=exists, other=False)
    threshold_ptr = table.entropy_threshold + table_row * stride.entropy_threshold
    entropy_threshold = tl.load(threshold_ptr, mask=exists, other=float("nan"))
    prompt_len = tl.load(table.prompt_len + table_row * stride.prompt_len, mask=exists, other=0)
    seed = tl.load(table.seed + table_row * stride.seed, mask=exists, other=0)
    if history is not None:
        step = tl.load(history.step)
        last_step = tl.load(history.steps + table_row, mask=exists, other=-1)
        last_place = tl.load(history.places + table_row, mask=exists, other=-1)
        tl.debug_barrier()  # what was read is read before it is overwritten
        place = tl.where(last_step == step - 1, last_place, -1)
        tl.store(requests.places + request, place, mask=is_row)
        tl.store(history.places + table_row, request.to(tl.int64), mask=exists)
        tl.store(history.steps + table_row, step, mask=exists)

    tl.store(requests.tokens + request, token, mask=is_row)
    tl.store(requests.positions + request, length - 1, mask=is_row)
    tl.store(requests.slots + request, slot, mask=is_row)
    tl.store(requests.table_rows + request, tl.where(exists, table_row, padding_row), mask=is_row)
    tl.store(requests.guided + request, active & (mode != _UNGUIDED), mask=is_row)
    tl.store(requests.wants_length + request, active & wants_length, mask=is_row)
    tl.store(requests.entropy_threshold + request, entropy_threshold, mask=is_row)
    tl.store(requests.generated + request, length - prompt_len, mask=is_row)
    tl.store(requests.seeds + request, seed, mask=is_row)


def _run_reference(*operands) -> None:
    out, inputs, columns = StepRequests(*operands[:10]), operands[10:14], operands[14:19]
    places, steps, step, active, padding_row = operands[19:]
    history = None if places is None else StepHistory(places, steps, step)
    _reference(*columns, *inputs, active=active, history=history, padding_row=padding_row, out=out)


@operator(mutates=[*StepRequests._fields, "history_places", "history_steps"], reference=_run_reference)
def _launch(
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    table_rows: Tensor,
    places: Tensor,
    guided: Tensor,
    wants_length: Tensor,
    entropy_threshold: Tensor,
    generated: Tensor,
    seeds: Tensor,
    last_tokens: Tensor,
    request_rows: Tensor,
    lengths: Tensor,
    last_slots: Tensor,
    table_mode: Tensor,  # a schema cannot have a `mode`
    return_values: Tensor,
    table_entropy_threshold: Tensor,
    prompt_len: Tensor,
    seed: Tensor,
    history_places: Tensor | None,
    history_steps: Tensor | None,
    history_step: Tensor | None,
    active: Tensor | None,
    padding_row: int,
) -> None:
    rows = tokens.shape[0]
    if rows == 0:
        return
    table = _Table(table_mode, return_values, table_entropy_threshold, prompt_len, seed)
    known = (tokens, positions, slots, table_rows, places, guided, wants_length, entropy_threshold, generated, seeds)
    history: Any = (history_places, history_steps, history_step)
    _gather_requests_kernel[(ceil_div(rows, REQUESTS),)](
        StepRequests(*known),
        table,
        _Table(*map(row_stride, table)),
        None if history_places is None else StepHistory(*history),
        last_tokens,
        request_rows,
        lengths,
        last_slots,
        active,
        last_tokens.shape[0],
        rows,
        padding_row,
        REQUESTS=REQUESTS,
        num_warps=1,
    )


def _columns_read(table: GuidanceColumns) -> _Table:
    return _Table(table.mode, table.return_values, table.entropy_threshold, table.prompt_len, table.seed)


def empty_requests(rows: int, device: torch.device) -> StepRequests:
    """Result tensors for :func:`gather_requests`."""
    return StepRequests(*(torch.empty(rows, dtype=dtype, device=device) for dtype in _DTYPES))


def gather_requests(
    table: GuidanceColumns,
    tokens: Tensor,  # int64 [B]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    slots: Tensor,  # int64 [B]
    *,
    active: Tensor | None = None,  # bool [B]
    history: StepHistory | None = None,
    padding_row: int = 0,
    out: StepRequests | None = None,  # [N]
    backend: str = "auto",
) -> StepRequests:  # [N]
    """Look up what a step has to know of its requests.

    Nothing is read back to the host, and no new number of requests compiles anything.

    Args:
        table: of ``R`` requests; a :class:`GuidanceTable` or its columns.
        tokens: int64 [B]; the last token of each sequence.
        table_rows: int64 [B]; each request's row of the table, all different.
        lengths: int32 [B]; tokens of each sequence, the last one included.
        slots: int64 [B]; the cache slot of each last token.
        active: bool [B] (``None``: all); requests to treat as if they had asked for nothing are False.
        history: of the table's rows. It is brought up to date, but for ``step``, which :func:`select_scored` counts.
            ``None``: ``places`` is left untouched.
        padding_row: table row of the requests that do not exist.
        out: result tensors to reuse, contiguous, of ``N >= B`` rows; ``None`` allocates ``B``.
        backend: ``auto`` (Triton for GPU tensors, else the reference), ``triton`` or ``reference``.

    Returns:
        The :class:`StepRequests`.

    Raises:
        TypeError, ValueError: an argument is not as above. Checked before any launch, except the contents of
            ``table_rows``: that would need the host.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> table = GuidanceTable(4, "cpu")
        >>> table.add_request(2, parse_guidance({"target_length": 60}), eos_token_ids={0}, prompt_len=7, seed=5)
        >>> tokens, rows, slots = torch.tensor([[11, 12], [0, 2], [30, 40]])
        >>> requests = gather_requests(table, tokens, rows, torch.tensor([4, 9], dtype=torch.int32), slots)
        >>> requests.guided, requests.generated
        (tensor([False,  True]), tensor([4, 2], dtype=torch.int32))
    """
    backend = resolve_backend(backend, tokens)
    device = check_tensor("tokens", tokens, dtypes=torch.int64, shape=(None,)).device
    count = tokens.shape[0]
    check_tensor("table_rows", table_rows, dtypes=torch.int64, shape=(count,), device=device)
    check_tensor("lengths", lengths, dtypes=torch.int32, shape=(count,), device=device)
    check_tensor("slots", slots, dtypes=torch.int64, shape=(count,), device=device)
    if active is not None:
        check_tensor("active", active, dtypes=torch.bool, shape=(count,), device=device)
    table = getattr(table, "columns", table)
    if not isinstance(table, GuidanceColumns):
        raise TypeError(f"table must be a GuidanceTable, got {type(table).__name__}")
    check_tensor("table.mode", table.mode, dtypes=torch.int32, shape=(None,), device=device, unit_stride=False)
    table_size = table.mode.shape[0]
    check_fields("table", _Table._fields, _columns_read(table), _TABLE_DTYPES, table_size, device, unit_stride=False)
    if history is not None:
        if not isinstance(history, StepHistory):
            raise TypeError(f"history must be a StepHistory, got {type(history).__name__}")
        check_tensor("history.places", history.places, dtypes=torch.int64, shape=(table_size,), device=device)
        check_tensor("history.steps", history.steps, dtypes=torch.int64, shape=(table_size,), device=device)
        check_tensor("history.step", history.step, dtypes=torch.int64, shape=(1,), device=device)
    if isinstance(padding_row, bool) or not isinstance(padding_row, int):
        raise TypeError(f"padding_row must be an int, got {type(padding_row).__name__}")
    if not 0 <= padding_row < table_size:
        raise ValueError(f"padding_row must be in [0, {table_size}), got {padding_row}")
    if out is None:
        out = empty_requests(count, device)
    if not isinstance(out, StepRequests):
        raise TypeError(f"out must be StepRequests, got {type(out).__name__}")
    check_tensor("out.tokens", out.tokens, dtypes=torch.int64, shape=(None,), device=device)
    rows = out.tokens.shape[0]
    if rows < count:
        raise ValueError(f"out must have a row for each of the {count} requests, got {rows}")
    check_fields("out", StepRequests._fields, out, _DTYPES, rows, device)

    return gather_requests_unchecked(
        table,
        tokens,
        table_rows,
        lengths,
        slots,
        active=active,
        history=history,
        padding_row=padding_row,
        out=out,
        backend=backend,
    )


def gather_requests_unchecked(
    table: GuidanceColumns,
    tokens: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    slots: Tensor,
    *,
    active: Tensor | None,
    history: StepHistory | None,
    padding_row: int,
    out: StepRequests,
    backend: str,
) -> StepRequests:
    """:func:`gather_requests` for a caller who knows that the arguments are right, and has resolved the backend."""
    places, steps, step = (None, None, None) if history is None else history
    inputs = (tokens, table_rows, lengths, slots)
    _launch(backend, *out, *inputs, *_columns_read(table), places, steps, step, active, padding_row)
    return out
