"""Keys and values of the token just drawn, copied from the candidate that was computed in its place into the cache.

The last forward computed every candidate of a request against its exact prefix. The token drawn is one of them, so its
keys and values are known, in all layers, and need no forward: they only have to be moved to the token's slot. A cache
in e4m3 takes them rounded, with scales. A request whose token was no candidate at this position is left to the next
forward, and told so.

One launch. A program has one request and a tile of layers; each finds the request's candidate for itself, because a
launch that did so once would cost more than all of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import (
    E4M3,
    FLOATS,
    INT_DTYPES,
    ceil_div,
    check_cache_scales,
    check_page_size,
    check_tensor,
    next_power_of_2,
    resolve_backend,
)
from lenvm_kernels.ops._device import to_codes
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.reference.commit_winner import commit_winner as _reference

# Elements of keys, and as many of values, in a program's registers at a time: as much of a token's row as fits, then
# as many layers. It bounds the registers whatever the model's sizes are. Estimated for an H200: to keep
# 4.8 TB/s busy over some 700 ns takes 3 MB in flight. 64 rows of a model of 28 layers and 512 bytes a row are
# 1.8 MB; as 448 programs of 4 KB each they are all in flight at once, 4 programs a multiprocessor. Half the tile
# would have no more in flight and load the candidates twice as often; with twice the tile, 1 to 8 rows, whose time is
# latency alone, would have half the programs. Measured there: 2.1 us for 1 row, 2.6 for 64, 6.1 for 512.
TILE = 1024
# One warp: finding the candidate needs no shared memory and no barrier, and each lane has eight 16-byte loads
# of bf16 in flight.
NUM_WARPS = 1


class _Tensors(NamedTuple):
    committed: Any  # [B]
    k_cache: Any  # [LAYERS, S, WIDTH]
    v_cache: Any  # [LAYERS, S, WIDTH]
    k_last: Any  # [LAYERS, T, WIDTH]
    v_last: Any  # [LAYERS, T, WIDTH]
    key_scales: Any  # fp32 [LAYERS, Hkv], of a cache in e4m3, or None
    value_scales: Any  # fp32 [LAYERS, Hkv] or None
    candidate_ids: Any  # [C, K]
    candidate_rows: Any  # [C, K]
    candidate_positions: Any  # [C]
    candidate_parents: Any  # [C, K] or None


class _Strides(NamedTuple):
    k_cache_layer: int
    k_cache_slot: int
    v_cache_layer: int
    v_cache_slot: int
    k_last_layer: int
    k_last_row: int
    v_last_layer: int
    v_last_row: int
    key_scales_layer: int
    value_scales_layer: int
    candidate_ids_request: int
    candidate_rows_request: int
    candidate_parents_request: int


@triton.jit
def _copy_token(
    ptr,
    stride,
    row,
    slot,
    layer_block,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of a token row of the last forward into a slot, in some layers."""
    layer = (layer_block * BLOCK_LAYERS + tl.arange(0, BLOCK_LAYERS)).to(tl.int64)[:, None]
    k_source = ptr.k_last + layer * stride.k_last_layer + row * stride.k_last_row
    v_source = ptr.v_last + layer * stride.v_last_layer + row * stride.v_last_row
    k_target = ptr.k_cache + layer * stride.k_cache_layer + slot * stride.k_cache_slot
    v_target = ptr.v_cache + layer * stride.v_cache_layer + slot * stride.v_cache_slot
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (layer < LAYERS) & (column < WIDTH)
        # Both loads before the first store, which would wait for its own.
        k = tl.load(k_source + column, mask=inside)
        v = tl.load(v_source + column, mask=inside)
        if ptr.key_scales is not None:
            head = column // HEAD_DIM
            key_scale = tl.load(ptr.key_scales + layer * stride.key_scales_layer + head, mask=inside, other=1.0)
            value_scale = tl.load(ptr.value_scales + layer * stride.value_scales_layer + head, mask=inside, other=1.0)
            k = to_codes(k, key_scale).to(k_target.dtype.element_ty)
            v = to_codes(v, value_scale).to(v_target.dtype.element_ty)
        tl.store(k_target + column, k, mask=inside)
        tl.store(v_target + column, v, mask=inside)


@triton.jit
def _load_tree(ptr, stride, last_row, first_position, C, T, K: tl.constexpr, COLUMNS: tl.constexpr):
    """(token ids, token rows, parents) ``[COLUMNS]`` of a request's tree in the last step, if its candidates without a
    parent are at ``first_position``; -1 for what is not there or was not computed."""
    column = tl.arange(0, COLUMNS)
    # By column: triton 3.9's interpreter takes no scalar for a mask.
    last = last_row.to(tl.int64) + tl.zeros([COLUMNS], tl.int64)
    in_last_step = (last >= 0) & (last < C) & (column < K)
    ids = tl.load(ptr.candidate_ids + last * stride.candidate_ids_request + column, mask=in_last_step, other=-1)
    rows = tl.load(ptr.candidate_rows + last * stride.candidate_rows_request + column, mask=in_last_step, other=-1)
    parents = tl.full([COLUMNS], -1, tl.int32)
    if ptr.candidate_parents is not None:
        parent_ptr = ptr.candidate_parents + last * stride.candidate_parents_request + column
        parents = tl.load(parent_ptr, mask=in_last_step, other=-1)
    positions = tl.load(ptr.candidate_positions + last, mask=in_last_step, other=0)
    is_there = (positions == first_position) & (ids >= 0) & (rows >= 0) & (rows < T)
    return tl.where(is_there, ids, -1), tl.where(is_there, rows, -1), parents


# The tokens are a caller's, and may be slices: no kernel is compiled anew where their alignment changes. (Triton heeds
# that for pointers of their own only, not for those in a tuple.)
@triton.jit(
    do_not_specialize=["stride_tokens_request", "stride_slot_table_row", "S", "T", "C"],
    do_not_specialize_on_alignment=[
        "last_rows_ptr",
        "tokens_ptr",
        "new_lens_ptr",
        "positions_ptr",
        "table_rows_ptr",
        "slot_table_ptr",
    ],
)
def _commit_winner_kernel(
    ptr,  # _Tensors
    stride,  # _Strides
    last_rows_ptr,  # [B]
    tokens_ptr,  # [B, NEW]
    stride_tokens_request,
    new_lens_ptr,  # int32 [B] or None
    positions_ptr,  # [B]
    table_rows_ptr,  # [B]
    slot_table_ptr,  # int32 [R, pages]
    stride_slot_table_row,
    S,
    T,
    C,
    NEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,  # Hkv * D
    HEAD_DIM: tl.constexpr,  # D
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    BLOCK_LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, layer_block = tl.program_id(0), tl.program_id(1)
    new_len = 1 if new_lens_ptr is None else tl.load(new_lens_ptr + request)
    first_position = tl.load(positions_ptr + request) + 1 - new_len
    last_row = tl.load(last_rows_ptr + request)
    ids, rows, parents = _load_tree(ptr, stride, last_row, first_position, C, T, K, COLUMNS)
    pages_ptr = slot_table_ptr + tl.load(table_rows_ptr + request).to(tl.int64) * stride_slot_table_row
    column = tl.arange(0, COLUMNS)

    # From the root of the tree down, as long as the next token is a child of the one before.
    parent, committed = -1, 0
    for i in range(NEW):
        token, position = tl.load(tokens_ptr + request.to(tl.int64) * stride_tokens_request + i), first_position + i
        is_next = (ids == token) & (ids >= 0) & (parents == parent)
        found = tl.min(tl.where(is_next, column, COLUMNS), axis=0)
        commits = (committed == i) & (i < new_len) & (found < COLUMNS) & (position >= 0)
        page = tl.load(pages_ptr + position // PAGE_SIZE, mask=commits, other=-1).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        commits = commits & (page >= 0) & (slot < S)
        if commits:
            row = tl.sum(tl.where(column == found, rows, 0).to(tl.int64), axis=0)
            _copy_token(ptr, stride, row, slot, layer_block, LAYERS, WIDTH, HEAD_DIM, BLOCK_LAYERS, BLOCK)
            parent, committed = found, i + 1
    if layer_block == 0:
        tl.store(ptr.committed + request, committed)


def _run_reference(committed, *operands) -> None:
    *tensors, key_scales, value_scales = operands
    committed.copy_(_reference(*tensors, key_scales=key_scales, value_scales=value_scales))


@operator(mutates=["committed", "k_cache", "v_cache"], reference=_run_reference)
def _launch(
    committed: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_last: Tensor,
    v_last: Tensor,
    candidate_ids: Tensor,
    candidate_rows: Tensor,
    candidate_positions: Tensor,
    candidate_parents: Tensor | None,
    last_rows: Tensor,
    tokens: Tensor,
    new_lens: Tensor | None,
    positions: Tensor,
    table_rows: Tensor,
    slot_table: Tensor,
    page_size: int,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    layers, cache_slots, heads, head_dim = k_cache.shape
    requests, width = tokens.shape[0], heads * head_dim
    if requests == 0:
        return
    block = min(next_power_of_2(width), TILE)
    block_layers = min(next_power_of_2(layers), TILE // block)
    keys_and_values = (k_cache, v_cache, k_last, v_last)
    by_layer = (*k_cache.stride()[:2], *v_cache.stride()[:2], *k_last.stride()[:2], *v_last.stride()[:2])
    scales = (key_scales, value_scales)
    by_layer_of_scales = (0 if x is None else x.stride(0) for x in scales)
    trees = (candidate_ids, candidate_rows, candidate_parents)
    by_request = (0 if x is None else x.stride(0) for x in trees)
    _commit_winner_kernel[(requests, ceil_div(layers, block_layers))](
        _Tensors(
            committed,
            *keys_and_values,
            *scales,
            candidate_ids,
            candidate_rows,
            candidate_positions,
            candidate_parents,
        ),
        _Strides._make((*by_layer, *by_layer_of_scales, *by_request)),
        last_rows,
        tokens,
        tokens.stride(0),
        new_lens,
        positions,
        table_rows,
        slot_table,
        slot_table.stride(0),
        cache_slots,
        k_last.shape[1],
        candidate_ids.shape[0],
        NEW=1 if tokens.dim() == 1 else tokens.shape[1],
        PAGE_SIZE=page_size,
        LAYERS=layers,
        WIDTH=width,
        HEAD_DIM=head_dim,
        K=candidate_ids.shape[1],
        COLUMNS=next_power_of_2(candidate_ids.shape[1]),
        BLOCK_LAYERS=block_layers,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )


def commit_winner(
    k_cache: Tensor,  # [layers, S, Hkv, D]
    v_cache: Tensor,  # [layers, S, Hkv, D]
    k_last: Tensor,  # [layers, T, Hkv, D]
    v_last: Tensor,  # [layers, T, Hkv, D]
    candidate_ids: Tensor,  # int32 [C, K]
    candidate_rows: Tensor,  # int32|int64 [C, K]
    candidate_positions: Tensor,  # int32 [C]
    last_rows: Tensor,  # int32|int64 [B]
    tokens: Tensor,  # int32|int64 [B] or [B, N]
    positions: Tensor,  # int32 [B]
    slot_table: Tensor,  # int32 [R, pages]
    table_rows: Tensor,  # int32|int64 [B]
    *,
    new_lens: Tensor | None = None,  # int32 [B]
    candidate_parents: Tensor | None = None,  # int32 [C, K]
    page_size: int = 1,
    key_scales: Tensor | None = None,  # fp32 [layers, Hkv]
    value_scales: Tensor | None = None,  # fp32 [layers, Hkv]
    backend: str = "auto",
) -> Tensor:  # int32 [B]
    """Move the drawn tokens' keys and values from the last forward, where they were candidates, into the cache.

    Request ``i`` commits its token if that was one of its candidates in the last step (place ``last_rows[i]``), was
    computed there, and at the position it now has. Then ``k_cache[:, slot] = k_last[:, r]``, where ``r`` is the
    candidate's token row, likewise the values, bit by bit; a cache in e4m3 keeps them as :func:`rope_cache` does. Where
    it has several new tokens and its candidates were a tree, each further token commits if it was a child of the one
    before. Any other token writes nothing. Nothing is read back to the host.

    Args:
        k_cache: keys by slot ``[layers, S, Hkv, D]``, fp32, bf16, fp16 (fp64 too on the reference) or float8_e4m3fn,
            written in place. Like the three below it may be strided over layers and slots.
        v_cache: values by slot; dtype and shape of ``k_cache``.
        k_last: keys of the last forward's rows ``[layers, T, Hkv, D]``; the dtype of ``k_cache``, or any other of the
            first if that is float8_e4m3fn.
        v_last: values of the last forward's rows; dtype and shape of ``k_last``.
        candidate_ids: int32 ``[C, K]``; the candidates of the last step's C requests. Negative ids pad.
        candidate_rows: int32 or int64 ``[C, K]``; each candidate's token row of ``k_last``. One outside ``[0, T)`` was
            not computed and never matches. Should a token be listed twice below the same parent, the first counts.
        candidate_positions: int32 ``[C]``; the position in each request's sequence of its candidates without a parent.
        last_rows: int32 or int64 ``[B]``; each request's place among the C of the last step. Outside ``[0, C)``, as is
            -1, it had none, or one that must not be used.
        tokens: int32 or int64 ``[B]``; the token drawn; or ``[B, N]``, several, from column 0 on. Rows may be strided.
        positions: int32 ``[B]``; the position of the last of them in its sequence.
        slot_table: int32 ``[R, pages]``, with a page for each of the tokens; token ``p`` of table row ``r`` belongs in
            slot ``slot_table[r, p // page_size] * page_size + p % page_size``, which no other request has. Rows may be
            strided. A token whose slot is outside ``[0, S)`` does not commit.
        table_rows: int32 or int64 ``[B]``; each request's row of it.
        new_lens: int32 ``[B]``; new tokens of each request, of which its row of ``tokens`` has the first N (``None``:
            one).
        candidate_parents: int32 ``[C, K]``; the column of each candidate's parent, -1 for none (``None``: nobody has
            one).
        page_size: slots in a page.
        key_scales, value_scales: fp32 ``[layers, Hkv]``, of a cache in float8_e4m3fn, else ``None``; see
            :func:`rope_cache`.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        int32 ``[B]``; how many of its tokens each request has committed, from the first on.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.

    Example:
        >>> def i32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> k_cache, v_cache = torch.zeros(2, 1, 4, 1, 1)
        >>> k_last, v_last = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2, 1, 1)
        >>> candidates = dict(candidate_ids=i32([17, 23]), candidate_rows=i32([0, 1]), candidate_positions=i32(9))
        >>> slots = dict(slot_table=i32(*[[0] * 9 + [2]]).view(1, 10), table_rows=i32(0))
        >>> drawn = dict(last_rows=i32(0), tokens=i32(23), positions=i32(9))
        >>> commit_winner(k_cache, v_cache, k_last, v_last, **candidates, **drawn, **slots)
        tensor([1], dtype=torch.int32)
        >>> k_cache.flatten(), v_cache.flatten()
        (tensor([0., 0., 2., 0.]), tensor([0., 0., 4., 0.]))
    """
    backend = resolve_backend(backend, "k_cache", k_cache)
    check_tensor("k_cache", k_cache, dtypes=(*FLOATS[backend], E4M3), shape=(None, None, None, None))
    (layers, _, heads, head_dim), device = k_cache.shape, k_cache.device
    if not layers * heads * head_dim:
        raise ValueError(f"k_cache must have at least one layer, head and column, got shape {list(k_cache.shape)}")
    check_tensor("v_cache", v_cache, dtypes=k_cache.dtype, shape=k_cache.shape, device=device)
    check_cache_scales(k_cache.dtype, key_scales, value_scales, (layers, heads), device, backend)
    dtypes = FLOATS[backend] if k_cache.dtype == E4M3 else k_cache.dtype
    check_tensor("k_last", k_last, dtypes=dtypes, shape=(layers, None, heads, head_dim), device=device)
    check_tensor("v_last", v_last, dtypes=k_last.dtype, shape=k_last.shape, device=device)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("k_last", k_last), ("v_last", v_last)):
        if heads > 1 and tensor.stride(2) != head_dim:
            raise ValueError(f"{name} must be contiguous in its last two dimensions, got strides {tensor.stride()}")
    check_tensor("candidate_ids", candidate_ids, dtypes=torch.int32, shape=(None, None), device=device)
    if candidate_ids.shape[1] == 0:
        raise ValueError("candidate_ids must have at least one column, got none")
    check_tensor("candidate_rows", candidate_rows, dtypes=INT_DTYPES, shape=candidate_ids.shape, device=device)
    check_tensor(
        "candidate_positions", candidate_positions, dtypes=torch.int32, shape=candidate_ids.shape[:1], device=device
    )
    if candidate_parents is not None:
        shape = candidate_ids.shape
        check_tensor("candidate_parents", candidate_parents, dtypes=torch.int32, shape=shape, device=device)
    is_many = isinstance(tokens, Tensor) and tokens.dim() == 2
    if is_many and new_lens is None:
        raise ValueError("new_lens must say how many of the tokens [B, N] are new, got None")
    check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None, None) if is_many else (None,), device=device)
    requests = tokens.shape[:1]
    if is_many and tokens.shape[1] == 0:
        raise ValueError("tokens must have at least one column, got none")
    if new_lens is not None:
        check_tensor("new_lens", new_lens, dtypes=torch.int32, shape=requests, device=device)
    check_tensor("last_rows", last_rows, dtypes=INT_DTYPES, shape=requests, device=device)
    check_tensor("positions", positions, dtypes=torch.int32, shape=requests, device=device)
    check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=(None, None), device=device)
    check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=requests, device=device)
    check_page_size(page_size)

    committed = torch.empty(requests, dtype=torch.int32, device=device)
    operands: list[Any] = [committed, k_cache, v_cache, k_last, v_last]
    operands += [candidate_ids, candidate_rows, candidate_positions, candidate_parents]
    operands += [last_rows, tokens, new_lens, positions, table_rows, slot_table, page_size, key_scales, value_scales]
    _launch(backend, *operands)
    return committed
