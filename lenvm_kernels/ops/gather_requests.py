"""What a step has to know of each of its requests, out of the tables, in one launch.

One program a few requests. Their number may be less than the rows written: the rest is filled with requests that do not
exist, so that a CUDA graph captured for more of them can run. Torch's operators for this would be some twenty launches.

A request's place in the step before is what its history says, if that is of the step before (:class:`StepHistory`).
The history then says its place in this step, and holds the tokens that are new. A program touches the history of its
own requests only, which is why nothing has to be kept apart from the step before.

The value model can catch up with a request as long as all tokens that it has not seen are among those held. Where one
is missing the request loses its guidance, which is counted, until a prompt tells its tokens anew.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, check_fields, check_tensor, resolve_backend, row_stride
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference.gather_requests import gather_requests as _reference
from lenvm_kernels.types import GUIDANCE_COLUMNS, GuidanceColumns, Mode, StepHistory, StepRequests

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
    value_stride: Any  # int32 [R]
    span_ended: Any  # bool [R]
    span_start_bits: Any  # int32 [R]
    faults: Any  # int32 [R], written


# Of the fields of StepRequests, in their order.
_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int32,
    torch.int64,
    torch.int64,
    torch.bool,
    torch.bool,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.int32,
)


# The inputs are a caller's, and may be slices: nothing is compiled anew where their alignment changes. (Triton heeds
# that for pointers of their own only, not for those in a tuple.)
@triton.jit(
    do_not_specialize=["stride_tokens_request", "B", "N", "padding_row"],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "new_lens_ptr",
        "table_rows_ptr",
        "lengths_ptr",
        "active_ptr",
    ],
)
def _gather_requests_kernel(
    requests,  # StepRequests, written
    table,  # _Table
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
    WIDTH: tl.constexpr,  # W
    COLUMNS: tl.constexpr,  # the larger of the two
    HELD: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    # All loads come before the first store: a store waits for what it stores, and the loads after it with it.
    table_row = tl.load(table_rows_ptr + request, mask=exists, other=0)
    new_len = tl.full([REQUESTS], 1, tl.int32)
    if new_lens_ptr is not None:
        new_len = tl.minimum(tl.maximum(tl.load(new_lens_ptr + request, mask=exists, other=0), 0), NEW)
    new_ptr = tokens_ptr + request.to(tl.int64) * stride_tokens_request
    token = tl.load(new_ptr, mask=exists & (new_len > 0), other=0)
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
        step = tl.load(history.step)
        counted = step - tl.load(history.uncounted)
        last_step = tl.load(history.steps + table_row, mask=exists, other=-1)
        last_place = tl.load(history.places + table_row, mask=exists, other=-1)
        told_len = tl.load(history.told_lens + table_row, mask=exists, other=0)
        cached_len = tl.load(history.cached_lens + table_row, mask=exists, other=0)
        tl.debug_barrier()  # what was read is read before it is overwritten
        due = exists & (counted % tl.maximum(value_stride, 1) == 0)
        first_new = length - new_len
        is_gap = told_len < first_new
        is_lost = (guided | wants_length) & (is_gap | (length - cached_len > HELD))
        guided, wants_length = guided & ~is_lost, wants_length & ~is_lost
        tl.atomic_add(table.faults + table_row * stride.faults, 1, mask=is_lost, sem="relaxed")
        tl.store(history.told_lens + table_row, tl.maximum(told_len, length), mask=exists & ~is_gap)
        tl.store(requests.cached_lens + request, cached_len, mask=is_row)
        place = tl.where(last_step == step - 1, last_place, -1)
        tl.store(requests.places + request, place, mask=is_row)
        tl.store(history.places + table_row, request.to(tl.int64), mask=exists)
        tl.store(history.steps + table_row, step, mask=exists)

    # The first token was loaded above; of several each waits for the stores before it.
    for i in range(COLUMNS):
        tl.store(requests.tokens + request.to(tl.int64) * WIDTH + i, token, mask=is_row & (i < WIDTH))
        if history is not None:
            position = length - new_len + i
            is_held = exists & (i < new_len) & (i >= new_len - HELD) & (position >= 0)  # each column is written once
            held_ptr = history.tokens + table_row * HELD + position % HELD
            tl.store(held_ptr, token.to(tl.int32), mask=is_held)
        token = tl.load(new_ptr + i + 1, mask=exists & (i + 1 < new_len), other=0)
    tl.store(requests.new_lens + request, tl.where(exists, new_len, 0), mask=is_row)
    tl.store(requests.positions + request, length - 1, mask=is_row)
    tl.store(requests.table_rows + request, tl.where(exists, table_row, padding_row), mask=is_row)
    tl.store(requests.guided + request, guided, mask=is_row)
    tl.store(requests.wants_length + request, wants_length, mask=is_row)
    tl.store(requests.entropy_threshold + request, entropy_threshold, mask=is_row)
    tl.store(requests.generated + request, length - prompt_len, mask=is_row)
    tl.store(requests.seeds + request, seed, mask=is_row)
    tl.store(requests.due + request, due, mask=is_row)


def _run_reference(*operands) -> None:
    out, inputs, columns = StepRequests(*operands[:12]), operands[12:15], operands[15:24]
    *of_history, new_lens, active, padding_row = operands[24:]
    history = None if of_history[0] is None else StepHistory(*of_history)
    options = dict(new_lens=new_lens, active=active, history=history, padding_row=padding_row)
    _reference(*columns, *inputs, **options, out=out)


_MUTATES = [*StepRequests._fields, "faults", *(f"history_{name}" for name in StepHistory._fields)]


@operator(mutates=_MUTATES, reference=_run_reference)
def _launch(
    tokens: Tensor,
    new_lens: Tensor,
    positions: Tensor,
    table_rows: Tensor,
    places: Tensor,
    guided: Tensor,
    wants_length: Tensor,
    entropy_threshold: Tensor,
    generated: Tensor,
    seeds: Tensor,
    due: Tensor,
    cached_lens: Tensor,
    last_tokens: Tensor,
    request_rows: Tensor,
    lengths: Tensor,
    table_mode: Tensor,  # a schema cannot have a `mode`
    return_values: Tensor,
    table_entropy_threshold: Tensor,
    prompt_len: Tensor,
    seed: Tensor,
    value_stride: Tensor,
    span_ended: Tensor,
    span_start_bits: Tensor,
    faults: Tensor,
    history_places: Tensor | None,
    history_steps: Tensor | None,
    history_step: Tensor | None,
    history_uncounted: Tensor | None,
    history_tokens: Tensor | None,
    history_told_lens: Tensor | None,
    history_cached_lens: Tensor | None,
    grown_by: Tensor | None,
    active: Tensor | None,
    padding_row: int,
) -> None:
    rows = tokens.shape[0]
    if rows == 0:
        return
    new = 1 if last_tokens.dim() == 1 else last_tokens.shape[1]
    of_span = prompt_len, seed, value_stride, span_ended, span_start_bits
    table = _Table(table_mode, return_values, table_entropy_threshold, *of_span, faults)
    known = (tokens, new_lens, positions, table_rows, places, guided, wants_length, entropy_threshold, generated)
    of_steps = history_places, history_steps, history_step, history_uncounted
    history: Any = (*of_steps, history_tokens, history_told_lens, history_cached_lens)
    _gather_requests_kernel[(ceil_div(rows, REQUESTS),)](
        StepRequests(*known, seeds, due, cached_lens),
        table,
        _Table(*map(row_stride, table)),
        None if history_places is None else StepHistory(*history),
        last_tokens,
        last_tokens.stride(0),
        grown_by,
        request_rows,
        lengths,
        active,
        last_tokens.shape[0],
        rows,
        padding_row,
        NEW=new,
        WIDTH=tokens.shape[1],
        COLUMNS=max(new, tokens.shape[1]),
        HELD=1 if history_tokens is None else history_tokens.shape[1],
        REQUESTS=REQUESTS,
        num_warps=1,
    )


def _columns_read(table: GuidanceColumns) -> _Table:
    return _Table._make(getattr(table, name) for name in _Table._fields)


def empty_requests(rows: int, device: torch.device, width: int = 1) -> StepRequests:
    """Result tensors for :func:`gather_requests`, with room for ``width`` new tokens of each request."""
    shapes = ((rows, width), *((rows,) for _ in _DTYPES[1:]))
    return StepRequests(*map(lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device), shapes, _DTYPES))


def empty_history(table_rows: int, max_delta: int, device: torch.device) -> StepHistory:
    """A history for :func:`gather_requests`, of ``R`` table rows in which nobody was yet.

    Args:
        table_rows: R.
        max_delta: M, tokens that it holds of each sequence.
        device: where it lies.
    """

    def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return StepHistory(
        places=full(-1, table_rows, dtype=torch.int64),
        steps=full(-1, table_rows, dtype=torch.int64),
        step=full(1, 1, dtype=torch.int64),
        uncounted=full(0, 1, dtype=torch.int64),
        tokens=full(0, table_rows, max_delta),
        told_lens=full(0, table_rows),
        cached_lens=full(0, table_rows),
    )


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
) -> StepRequests:  # [N]
    """Look up what a step has to know of its requests.

    Nothing is read back to the host, and no new number of requests compiles anything.

    Args:
        table: the columns of a :class:`GuidanceTable` of ``R`` requests. ``faults`` counts the requests that are
            guided or ask for lengths, and of which the history lacks a token that the value model has not seen.
        tokens: int64 [B]; the last token of each sequence; or [B, N], the tokens that it has grown by, from column 0
            on. Rows may be strided.
        table_rows: int64 [B]; each request's row of the table, all different.
        lengths: int32 [B]; tokens of each sequence, the last one included.
        new_lens: int32 [B], how many of its row of ``tokens`` each sequence has grown by, 0 to N (``None``: one of
            one column).
        active: bool [B] (``None``: all); requests to treat as if they had asked for nothing are False.
        history: of the table's rows (:func:`empty_history`). It is brought up to date, but for ``step``, which
            :func:`select_scored` counts, and ``cached_lens``, which :func:`catch_up` does. ``None``: ``places`` and
            ``cached_lens`` are left untouched, and all are due.
        padding_row: table row of the requests that do not exist.
        out: result tensors to reuse, contiguous, of ``N >= B`` rows (:func:`empty_requests`); ``None`` allocates ``B``
            with room for one token each.
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
        >>> tokens, rows = torch.tensor([[11, 12], [0, 2]])
        >>> requests = gather_requests(table.columns, tokens, rows, torch.tensor([4, 9], dtype=torch.int32))
        >>> requests.guided, requests.generated
        (tensor([False,  True]), tensor([4, 2], dtype=torch.int32))
    """
    backend = resolve_backend(backend, "tokens", tokens)
    is_many = isinstance(tokens, Tensor) and tokens.dim() == 2
    device = check_tensor("tokens", tokens, dtypes=torch.int64, shape=(None, None) if is_many else (None,)).device
    count = tokens.shape[0]
    if is_many and tokens.shape[1] == 0:
        raise ValueError("tokens must have at least one column, got none")
    if is_many and new_lens is None:
        raise ValueError("new_lens must say how many of the tokens [B, N] are new, got None")
    if new_lens is not None:
        check_tensor("new_lens", new_lens, dtypes=torch.int32, shape=(count,), device=device)
    check_tensor("table_rows", table_rows, dtypes=torch.int64, shape=(count,), device=device)
    check_tensor("lengths", lengths, dtypes=torch.int32, shape=(count,), device=device)
    if active is not None:
        check_tensor("active", active, dtypes=torch.bool, shape=(count,), device=device)
    if not isinstance(table, GuidanceColumns):
        raise TypeError(f"table must be GuidanceColumns, got {type(table).__name__}")
    check_tensor("table.mode", table.mode, dtypes=torch.int32, shape=(None,), device=device, unit_stride=False)
    table_size = table.mode.shape[0]
    dtypes = [GUIDANCE_COLUMNS[name].dtype for name in _Table._fields]
    check_fields("table", _Table._fields, _columns_read(table), dtypes, table_size, device, unit_stride=False)
    if history is not None:
        if not isinstance(history, StepHistory):
            raise TypeError(f"history must be a StepHistory, got {type(history).__name__}")
        check_tensor("history.places", history.places, dtypes=torch.int64, shape=(table_size,), device=device)
        check_tensor("history.steps", history.steps, dtypes=torch.int64, shape=(table_size,), device=device)
        for name in ("step", "uncounted"):
            check_tensor(f"history.{name}", getattr(history, name), dtypes=torch.int64, shape=(1,), device=device)
        check_history(history, table_size, device)
    if isinstance(padding_row, bool) or not isinstance(padding_row, int):
        raise TypeError(f"padding_row must be an int, got {type(padding_row).__name__}")
    if not 0 <= padding_row < table_size:
        raise ValueError(f"padding_row must be in [0, {table_size}), got {padding_row}")
    if out is None:
        out = empty_requests(count, device)
    if not isinstance(out, StepRequests):
        raise TypeError(f"out must be StepRequests, got {type(out).__name__}")
    check_tensor("out.tokens", out.tokens, dtypes=torch.int64, shape=(None, None), device=device)
    rows = out.tokens.shape[0]
    if rows < count:
        raise ValueError(f"out must have a row for each of the {count} requests, got {rows}")
    if not out.tokens.is_contiguous():
        raise ValueError(f"out.tokens must be contiguous, got strides {tuple(out.tokens.stride())}")
    check_fields("out", StepRequests._fields[1:], out[1:], _DTYPES[1:], rows, device)

    return gather_requests_unchecked(
        table,
        tokens,
        table_rows,
        lengths,
        new_lens=new_lens,
        active=active,
        history=history,
        padding_row=padding_row,
        out=out,
        backend=backend,
    )


def check_history(history: StepHistory, table_rows: int, device: torch.device) -> None:
    """Check what a history holds of each sequence.

    Raises:
        TypeError, ValueError: naming the field, what came and what is accepted.
    """
    shape = (table_rows, None)
    check_tensor("history.tokens", history.tokens, dtypes=torch.int32, shape=shape, device=device)
    if not history.tokens.is_contiguous() or history.tokens.shape[1] == 0:
        came = f"{list(history.tokens.shape)} with strides {history.tokens.stride()}"
        raise ValueError(f"history.tokens must be contiguous and have a column, got {came}")
    for name in ("told_lens", "cached_lens"):
        lens = getattr(history, name)
        check_tensor(f"history.{name}", lens, dtypes=torch.int32, shape=(table_rows,), device=device)


def gather_requests_unchecked(
    table: GuidanceColumns,
    tokens: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    *,
    new_lens: Tensor | None,
    active: Tensor | None,
    history: StepHistory | None,
    padding_row: int,
    out: StepRequests,
    backend: str,
) -> StepRequests:
    """:func:`gather_requests` for a caller who knows that the arguments are right, and has resolved the backend."""
    of_history = (None,) * len(StepHistory._fields) if history is None else history
    operands: list[Any] = [*out, tokens, table_rows, lengths, *_columns_read(table), *of_history]
    operands += [new_lens, active, padding_row]
    _launch(backend, *operands)
    return out
