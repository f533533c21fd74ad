"""Gathers the inputs of a step per request and draft from the tables and the batch, in one launch.

An engine's tensors have different addresses in every step, and its batches have any number of requests. The kernel
copies all inputs of a step per request to tensors at fixed addresses, and fills the remaining rows with dummy requests.
A CUDA graph captured for a larger batch can therefore run all later launches of the step. Scores and the vocabulary
mask are too large to copy, so their addresses are stored.

The kernel also appends the new tokens to each request's history. The value model can catch up with a request while the
history has all tokens that it has not computed. If a token is missing, the request loses its guidance, which ``faults``
counts, until its tokens are passed again as a prompt.
"""

from collections import namedtuple

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, check_int, next_power_of_2, row_strides, with_row_strides
from lenvm_kernels.ops._device import kernel
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec, empty
from lenvm_kernels.reference.begin_step import begin_step as _reference
from lenvm_kernels.reference.topk_candidates import GREEDY_TEMPERATURE
from lenvm_kernels.types import Drafts, Filters, GuidanceColumns, Mode, SpanNodes, StepHistory, StepRequests

NODES = 32  # per program: one per thread of a warp

_UNGUIDED = tl.constexpr(int(Mode.UNGUIDED))
_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)


# The columns of a guidance table that the kernel accesses. It writes the last column.
GatheredColumns = namedtuple(
    "GatheredColumns", "mode return_values prompt_len value_stride span_ended span_start_bits answer_row faults"
)


@kernel(specialized="addresses_ptr")
def _begin_step_kernel(
    requests,  # StepRequests, written
    table,  # GatheredColumns
    stride,  # its strides
    history,  # StepHistory, read and written, or None
    tokens_ptr,  # int32 or int64 [B, NEW]
    stride_tokens_request,
    new_lens_ptr,  # int32 [B] or None
    table_rows_ptr,  # int32 or int64 [B]
    lengths_ptr,  # int32 [B]
    active_ptr,  # bool [B] or None
    draft_ids_ptr,  # int32 or int64 [B, D] or None
    stride_ids_request,
    draft_parents_ptr,  # int32 [B, D] or None
    stride_parents_request,
    span_ended_ptr,  # bool [B * (1 + D)] or None
    in_call_ptr,  # bool [B * (1 + D)] or None
    span_generated_ptr,  # int32 [B * (1 + D)] or None
    drawn_ptr,  # int32 or int64 [B * (1 + D)] or None
    top_k_ptr,  # int32 [B]
    stride_top_k,
    top_p_ptr,  # fp32 [B]
    stride_top_p,
    min_p_ptr,  # fp32 [B]
    stride_min_p,
    temperature_ptr,  # fp32 [B]
    stride_temperature,
    addresses_ptr,  # int64 [4] or None, written
    # Numbers, because the types of pointers would cause kernel variants.
    scores_address: tl.int64,
    stride_scores_row,
    mask_address: tl.int64,
    stride_mask_row,
    B,
    N,
    padding_row,
    NEW: tl.constexpr,
    HELD: tl.constexpr,
    D: tl.constexpr,  # 0 without drafts
    NODES: tl.constexpr,  # a power of two > D
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    exists, is_row = request < B, request < N
    # All loads of the requests precede the first store, because a store waits for its operand and delays later loads.
    table_row = tl.load(table_rows_ptr + request, mask=exists, other=0).to(tl.int64)
    new_len = tl.full([REQUESTS], 1, tl.int32)
    if new_lens_ptr is not None:
        new_len = tl.minimum(tl.maximum(tl.load(new_lens_ptr + request, mask=exists, other=0), 0), NEW)
    length = tl.load(lengths_ptr + request, mask=exists, other=0)
    active = exists
    if active_ptr is not None:
        active = exists & tl.load(active_ptr + request, mask=exists, other=False)
    mode = tl.load(table.mode + table_row * stride.mode, mask=exists, other=_UNGUIDED)
    returns_values = tl.load(table.return_values + table_row * stride.return_values, mask=exists, other=False)
    prompt_len = tl.load(table.prompt_len + table_row * stride.prompt_len, mask=exists, other=0)
    value_stride = tl.load(table.value_stride + table_row * stride.value_stride, mask=exists, other=1)
    span_ended = tl.load(table.span_ended + table_row * stride.span_ended, mask=exists, other=False)
    start_bits = tl.load(table.span_start_bits + table_row * stride.span_start_bits, mask=exists, other=0)
    answer_row = tl.load(table.answer_row + table_row * stride.answer_row, mask=exists, other=-1)
    new_ptr = tokens_ptr + request * stride_tokens_request
    last_token = tl.load(new_ptr + tl.maximum(new_len, 1) - 1, mask=exists, other=-1).to(tl.int32)
    top_k = tl.load(top_k_ptr + request * stride_top_k, mask=exists, other=0)
    top_p = tl.load(top_p_ptr + request * stride_top_p, mask=exists, other=1.0)
    min_p = tl.load(min_p_ptr + request * stride_min_p, mask=exists, other=0.0)
    temperature = tl.load(temperature_ptr + request * stride_temperature, mask=exists, other=1.0)
    # Guidance chooses among all candidates, even if sampling is greedy.
    greedy = exists & ((top_k == 1) | (temperature < _GREEDY_TEMPERATURE))
    top_k, top_p = tl.where(greedy, 0, top_k), tl.where(greedy, 1.0, top_p)
    min_p, temperature = tl.where(greedy, 0.0, min_p), tl.where(greedy, 1.0, temperature)
    has_mode = mode != _UNGUIDED
    may_begin = has_mode & (start_bits != 0)
    has_answer = has_mode & (answer_row >= 0)
    guided, due = active & has_mode & ((span_ended == 0) | has_answer), exists
    # Between two spans, the history must stay complete for the next span.
    wants_length = active & ((returns_values != 0) | (may_begin & (span_ended != 0)))
    if history is not None:
        token = tl.load(new_ptr, mask=exists & (new_len > 0), other=0).to(tl.int32)
        counted = tl.load(history.step) - tl.load(history.uncounted)
        passed_len = tl.load(history.passed_lens + table_row, mask=exists, other=0)
        cached_len = tl.load(history.cached_lens + table_row, mask=exists, other=0)
        tl.debug_barrier()  # all reads precede the overwrites
        due = exists & (counted % tl.maximum(value_stride, 1) == 0)
        first_new = length - new_len
        is_gap = passed_len < first_new
        is_lost = (guided | wants_length) & (is_gap | (length - cached_len > HELD))
        guided, wants_length = guided & ~is_lost, wants_length & ~is_lost
        tl.atomic_add(table.faults + table_row * stride.faults, 1, mask=is_lost, sem="relaxed")
        tl.store(history.passed_lens + table_row, tl.maximum(passed_len, length), mask=exists & ~is_gap)
        tl.store(requests.cached_lens + request, cached_len, mask=is_row)
        # The first token was loaded above, because each later load waits for earlier stores.
        for i in range(NEW):
            position = first_new + i
            is_held = exists & (i < new_len) & (i >= new_len - HELD) & (position >= 0)  # each column is written once
            tl.store(history.tokens + table_row * HELD + position % HELD, token, mask=is_held)
            token = tl.load(new_ptr + i + 1, mask=exists & (i + 1 < new_len), other=0).to(tl.int32)

    # Number of drafts on the path to each node, and the token before the node.
    node = tl.arange(0, NODES)[None, :]
    depth = tl.zeros([REQUESTS, NODES], tl.int32)
    before = tl.where(node == 0, last_token[:, None], -1)
    is_draft, count = exists, tl.zeros([REQUESTS], tl.int32)
    if draft_ids_ptr is not None:
        for j in range(D):
            draft = tl.load(draft_ids_ptr + request * stride_ids_request + j, mask=is_draft, other=-1)
            parent = tl.load(draft_parents_ptr + request * stride_parents_request + j, mask=is_draft, other=-1)
            is_draft = is_draft & (draft >= 0)
            count += is_draft.to(tl.int32)
            draft = tl.where(is_draft, draft, -1).to(tl.int32)
            parent = tl.where(is_draft & (parent >= 0) & (parent < j), parent, -1)
            of_parent = tl.where(node == (parent + 1)[:, None], depth, 0)
            is_node = (node == j + 1) & is_draft[:, None]
            depth = tl.where(is_node, tl.sum(of_parent, axis=1)[:, None] + 1, depth)
            before = tl.where(is_node, draft[:, None], before)
            tl.store(requests.draft_ids + request * D + j, draft, mask=is_row)
            tl.store(requests.draft_parents + request * D + j, parent, mask=is_row)

    is_there = node <= count[:, None]
    row, mask = request[:, None] * (D + 1) + node, is_row[:, None] & (node <= D)
    is_node = exists[:, None] & (node <= D)
    guided, wants_length = guided[:, None] & is_there, wants_length[:, None] & is_there
    generated, is_open = (length - prompt_len)[:, None] + depth, (span_ended == 0)[:, None] | (depth < 0)
    if span_ended_ptr is not None:
        # A draft may begin the next span; the nodes after it are guided.
        is_open = tl.load(span_ended_ptr + row, mask=is_node, other=False) == 0
        in_call = tl.load(in_call_ptr + row, mask=is_node, other=False)
        has_target = is_open | (has_answer[:, None] & (in_call == 0))
        guided = (guided | (may_begin[:, None] & wants_length)) & has_target
        generated = tl.load(span_generated_ptr + row, mask=is_node, other=0)
    drawn = tl.full([REQUESTS, NODES], -1, tl.int32)
    if drawn_ptr is not None:
        drawn = tl.load(drawn_ptr + row, mask=is_node, other=-1).to(tl.int32)
    table_row = tl.where(exists, table_row, padding_row)
    node_row = tl.where(is_open | (has_answer == 0)[:, None], table_row[:, None], answer_row[:, None])
    needs_values = tl.max(tl.where(node == 0, (guided | wants_length).to(tl.int32), 0), axis=1) > 0
    tl.store(requests.lengths + request, length, mask=is_row)
    tl.store(requests.request_rows + request, table_row, mask=is_row)
    tl.store(requests.needs_values + request, needs_values, mask=is_row)
    tl.store(requests.positions + row, (length - 1)[:, None] + depth, mask=mask)
    tl.store(requests.table_rows + row, node_row, mask=mask)
    tl.store(requests.guided + row, guided, mask=mask)
    tl.store(requests.wants_length + row, wants_length, mask=mask)
    tl.store(requests.generated + row, generated, mask=mask)
    tl.store(requests.due + row, due[:, None] & is_there, mask=mask)
    tl.store(requests.last_tokens + row, before, mask=mask)
    tl.store(requests.drawn + row, drawn, mask=mask)
    tl.store(requests.top_k + row, top_k[:, None], mask=mask)
    tl.store(requests.top_p + row, top_p[:, None], mask=mask)
    tl.store(requests.min_p + row, min_p[:, None], mask=mask)
    tl.store(requests.temperature + row, temperature[:, None], mask=mask)
    tl.store(requests.greedy + row, greedy[:, None], mask=mask)
    if addresses_ptr is not None:
        is_first = tl.program_id(0) == 0
        tl.store(addresses_ptr, scores_address, mask=is_first)
        tl.store(addresses_ptr + 1, stride_scores_row, mask=is_first)
        tl.store(addresses_ptr + 2, mask_address, mask=is_first)
        tl.store(addresses_ptr + 3, stride_mask_row, mask=is_first)


_SPEC = Spec(f"""
    tokens: int [B, NEW+]
    table_rows: int [B]
    lengths: int32 [B]
    new_lens?: int32 [B]
    active?: bool [B]
    table: GuidanceColumns ({", ".join(GatheredColumns._fields)}) strided
    history?: StepHistory contiguous
    drafts?: Drafts
    spans?: SpanNodes of limit_span
    drawn?: int [B * (1 + D)]
    filters: Filters strided
    addresses?: int64 [4]
    scores?: float [B * (1 + D), V]
    vocab_mask?: int32 [B * (1 + D), (V + 31) // 32]
    out?: StepRequests contiguous
""")
_WRITTEN = ["table.faults", "addresses", *(f"history.{name}" for name in StepHistory._fields)]


@operator(_SPEC, reference=_reference, mutates=_WRITTEN, takes={"table": GatheredColumns, "padding_row": int})
def _launch(out: StepRequests, given):
    (rows, columns), tokens, history = out.draft_ids.shape, given.tokens, given.history
    nodes = next_power_of_2(1 + columns)
    tile_requests = max(1, NODES // nodes)
    _begin_step_kernel[(ceil_div(rows, tile_requests),)](
        *(out, given.table, row_strides(given.table), history),
        *(tokens, tokens.stride(0), given.new_lens, given.table_rows, given.lengths, given.active),
        *with_row_strides(*(given.drafts or (None, None))),
        *(*(given.spans or (None, None, None)), given.drawn),
        *with_row_strides(*given.filters),
        *(given.addresses, *address_and_stride(given.scores), *address_and_stride(given.vocab_mask)),
        *(tokens.shape[0], rows, given.padding_row),
        NEW=tokens.shape[1],
        HELD=1 if history is None else history.tokens.shape[1],
        D=columns,
        NODES=nodes,
        REQUESTS=tile_requests,
        num_warps=1,
    )


def address_and_stride(x: Tensor | None) -> tuple[int, int]:
    """Address and row stride, in elements; zeros for None."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def empty_requests(rows: int, device: torch.device, drafts: int = 0) -> StepRequests:
    """Result tensors for :func:`begin_step`, for ``rows`` requests with ``drafts`` drafts each."""
    return empty(StepRequests, device, {"N": rows, "D": drafts})


def empty_history(table_rows: int, max_delta: int, device: torch.device) -> StepHistory:
    """An empty history for :func:`begin_step` with R (``table_rows``) rows of M (``max_delta``) tokens."""
    history = empty(StepHistory, device, {"R": table_rows, "M": max_delta})
    for x in history:
        x.zero_()
    history.step.fill_(1)
    return history


def begin_step(
    table: GuidanceColumns,  # R requests
    tokens: Tensor,  # int32|int64 [B] or [B, N]
    table_rows: Tensor,  # int32|int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None = None,  # int32 [B]
    active: Tensor | None = None,  # bool [B]
    history: StepHistory | None = None,
    drafts: Drafts | None = None,  # [B, D]
    spans: SpanNodes | None = None,  # [B * (1 + D)]
    drawn: Tensor | None = None,  # int32|int64 [B * (1 + D)]
    filters: Filters | None = None,  # [B]
    addresses: Tensor | None = None,  # int64 [4]
    scores: Tensor | None = None,  # [B * (1 + D), V]
    vocab_mask: Tensor | None = None,  # int32 [B * (1 + D), ceil(V / 32)]
    padding_row: int = 0,
    out: StepRequests | None = None,  # [N * (1 + D)]
    backend: str = "auto",
    validate: bool = True,
) -> StepRequests:  # [N * (1 + D)]
    """Gather the inputs of a step per node, and update the history.

    Args:
        table: the columns of a :class:`GuidanceTable` of ``R`` requests. ``faults`` is incremented for each request
            that needs values and lacks a token in its history that the value model has not computed.
        tokens: int32 or int64 ``[B]``; the last token of each sequence. Or ``[B, N]``; the new tokens of each sequence,
            from column 0 on. Rows may be strided.
        table_rows: int32 or int64 ``[B]``; each request's row of the table, all different.
        lengths: int32 ``[B]``; tokens of each sequence, including the new ones.
        new_lens: int32 ``[B]``; number of new tokens in each row of ``tokens``, 0 to N. If ``None``, 1; required for
            ``[B, N]``.
        active: bool ``[B]``; requests with False are treated as unguided. If ``None``, all are active.
        history: history of the table's rows (:func:`empty_history`), updated in place except for ``step``, which
            :func:`topk_candidates` updates, and ``cached_lens``, which :func:`lay_out` updates. If ``None``,
            ``cached_lens`` is not changed and all requests are due.
        drafts: ``[B, D]``; drafts of the requests. Rows may be strided. If ``None``, each request has one node.
        spans: result of :func:`limit_span` for the same requests and drafts. Required if a request has a ``unit`` or
            drafts, which may end or begin a span.
        drawn: int32 or int64 ``[B * (1 + D)]``; tokens drawn by the caller's own sampler. If ``None``, -1.
        filters: the sampling filters of each request. If ``None``, no filters and temperature 1. A request with
            ``top_k`` 1 or a temperature below 1e-6 is greedy: its filters are disabled, at temperature 1, so that
            guidance has candidates to choose from.
        addresses: int64 ``[4]``; set to the address and the row stride, in elements, of ``scores`` and
            ``vocab_mask``; zeros for an argument that is ``None``.
        scores, vocab_mask: as in :func:`topk_candidates`, for ``addresses``. Their elements are not read.
        padding_row: table row of dummy requests.
        out: contiguous result tensors to reuse, for ``N >= B`` requests. If ``None``, they are allocated for ``B``.
        backend: ``auto``, ``triton`` or ``reference``.
        validate: whether to check the arguments. If False, ``backend`` must be ``triton`` or ``reference``.

    Returns:
        The :class:`StepRequests`.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> from lenvm_kernels import GuidanceTable, parse_guidance
        >>> table = GuidanceTable(4, "cpu")
        >>> table.add_request(2, parse_guidance({"target_length": 60}), eos_token_ids={0}, prompt_len=7)
        >>> tokens, rows = torch.tensor([[11, 12], [0, 2]])
        >>> requests = begin_step(table.columns, tokens, rows, torch.tensor([4, 9], dtype=torch.int32))
        >>> requests.guided, requests.generated
        (tensor([False,  True]), tensor([4, 2], dtype=torch.int32))
        >>> chain_and_branch = Drafts(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, -1]], dtype=torch.int32))
        >>> one = tokens[1:], rows[1:], torch.tensor([9], dtype=torch.int32)
        >>> begin_step(table.columns, *one, drafts=chain_and_branch).positions
        tensor([ 8,  9, 10,  9], dtype=torch.int32)
    """
    if filters is None:
        top_k, ones = torch.zeros_like(lengths), torch.ones_like(lengths, dtype=torch.float32)
        filters = Filters(top_k, ones, torch.zeros_like(ones), ones)
    is_many = not isinstance(tokens, Tensor) or tokens.dim() != 1
    tokens = tokens if is_many else tokens[:, None]
    batch = (tokens, table_rows, lengths, new_lens, active, table, history)
    operands = (*batch, drafts, spans, drawn, filters, addresses, scores, vocab_mask)
    if validate:
        backend, sizes = _SPEC.check(backend, *operands, out, sizes={"D": 0} if drafts is None else {})
        if is_many and new_lens is None:
            raise ValueError("new_lens must be given with tokens [B, N], got None")
        if addresses is None and (scores is not None or vocab_mask is not None):
            raise ValueError("addresses must be given with scores or vocab_mask, got None")
        check_int("padding_row", padding_row, 0, sizes["R"] - 1)
        if sizes.get("N", sizes["B"]) < sizes["B"]:
            raise ValueError(f"out must have a row for each of the {sizes['B']} requests, got {sizes['N']}")
    if out is None:
        out = empty_requests(tokens.shape[0], tokens.device, 0 if drafts is None else drafts.token_ids.shape[1])
    return _launch(backend, out, *operands, padding_row)
