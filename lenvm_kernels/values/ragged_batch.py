"""The tokens of one value-model forward, and the cache that it reads and extends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from lenvm_kernels.ops._common import INT_DTYPES, check_tensor
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.types import RaggedLayout
from lenvm_kernels.values.checkpoint import ValueModelConfig
from lenvm_kernels.values.images import ImageTokens


class _Model(Protocol):
    """What a cache has to know of a value model."""

    config: ValueModelConfig
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class RaggedBatch:
    """One value-model forward: for each of ``B`` requests its delta tokens, then its candidates (spec, section 2).

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1`` of the ``T``: its delta at positions
    ``cached_lens[i]`` and up, then ``candidate_lens[i]`` candidates which sit at the position after the delta (in a
    tree of several levels, one further a level). Rows from ``q_offsets[B]`` on are padding: they let ``T`` stay fixed
    while the lengths vary, and cost next to nothing.
    """

    layout: RaggedLayout  # token ids, positions, slots and q_offsets of the T rows, and where the candidates are
    slot_table: torch.Tensor  # int32 [R, pages], page of the cache that holds each page of a row's tokens
    table_rows: torch.Tensor  # int32 | int64 [B], row of each request in slot_table
    cached_lens: torch.Tensor  # int32 [B], tokens of the request already in the cache
    candidate_lens: torch.Tensor  # int32 [B]
    page_size: int = 1  # slots in a page
    expected_rows: int | None = None  # about how many rows are in use, see ragged_linear; None: all
    images: ImageTokens | None = None  # of the T rows

    @classmethod
    def build(
        cls,
        delta_ids: torch.Tensor,
        delta_slots: torch.Tensor,
        delta_starts: torch.Tensor,
        delta_lens: torch.Tensor,
        candidate_ids: torch.Tensor,
        candidate_lens: torch.Tensor,
        cached_lens: torch.Tensor,
        slot_table: torch.Tensor,
        table_rows: torch.Tensor,
        *,
        candidate_parents: torch.Tensor | None = None,
        page_size: int = 1,
        expected_rows: int | None = None,
        images: ImageTokens | None = None,
        backend: str = "auto",
    ) -> RaggedBatch:
        """Lay a batch out in ``T = D + B * K`` rows without reading anything back to the host.

        Args:
            delta_ids: int32 or int64 [D], delta tokens of all requests. Those no request refers to are ignored.
            delta_slots: int32 or int64 [D], the slot that each delta token's key and value will live in; where the slot
                table places the token.
            delta_starts: int32 [B], the first delta token of each request in ``delta_ids``.
            delta_lens: int32 [B], delta tokens of each request, 0 or more, ``D`` at most in all.
            candidate_ids: int32 or int64 [B, K], the candidates of each request from column 0 on. ``K`` may be 0: the
                forward then only extends the cache.
            candidate_lens: int32 [B], candidates of each request, 0 to ``K``.
            cached_lens: int32 [B], tokens of each request already in the cache.
            slot_table: int32 [R, pages]. Token ``p`` of table row ``r`` lives in slot
                ``slot_table[r, p // page_size] * page_size + p % page_size``.
            table_rows: int32 or int64 [B], the row of ``slot_table`` of each request.
            candidate_parents: int32 [B, K], the column of each candidate's parent among the request's candidates, which
                has to be an earlier one; anything else (-1): the candidate follows the delta. None: all do.
            page_size: slots in a page.
            expected_rows: about how many of the rows are in use (:func:`ragged_linear`); None: all.
            images: of the D delta tokens, for a value model that reads images; None: all are text at their places.
            backend: of the layout, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            The batch, on the device of ``delta_ids``. Lengths and tables are held, not copied.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device. Values are not checked, that
                would need the host.
        """
        layout = ragged_layout(
            delta_ids,
            delta_slots,
            delta_starts,
            delta_lens,
            candidate_ids,
            candidate_lens,
            cached_lens,
            candidate_parents=candidate_parents,
            backend=backend,
        )
        device, b = delta_ids.device, candidate_ids.shape[0]
        if images is not None:
            # The layout of the tokens' numbers says which of them each row is.
            numbers, no_ids = torch.arange(len(delta_ids), device=device), torch.full_like(candidate_ids, -1)
            lens = delta_lens, no_ids, candidate_lens, cached_lens
            token = ragged_layout(numbers, delta_slots, delta_starts, *lens, backend=backend).token_ids
            positions = torch.where(token < 0, layout.positions, images.positions[:, token])
            rows = torch.where(token < 0, -1, images.rows[token])
            images = ImageTokens(positions, rows, images.embeds)
        check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=(None, None), device=device)
        check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(b,), device=device)
        return cls(layout, slot_table, table_rows, cached_lens, candidate_lens, page_size, expected_rows, images)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the value model by slot, on its device.

    Which slots belong to a request is the business of a slot table: the engine's, or that of
    :class:`lenvm_kernels.paged_slots.PagedSlots`.
    """

    keys: torch.Tensor  # [num_layers, S, Hkv, D] in the model's dtype
    values: torch.Tensor  # as keys

    @classmethod
    def of_slots(cls, model: _Model, num_slots: int) -> KVCache:
        """A cache of ``num_slots`` slots for the keys and values of ``model``; it takes :meth:`num_bytes`."""
        shape = _slot_shape(model, num_slots)
        return cls(*(torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)))

    @staticmethod
    def num_bytes(model: _Model, num_slots: int) -> int:
        """Bytes of a cache of ``num_slots`` slots: ``2 N S Hkv D e``."""
        return 2 * math.prod(_slot_shape(model, num_slots)) * model.dtype.itemsize


def _slot_shape(model: _Model, num_slots: int) -> tuple[int, int, int, int]:
    config = model.config
    return config.num_layers, num_slots, config.num_kv_heads, config.head_dim
