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
    """The attributes of a value model that a cache needs."""

    config: ValueModelConfig
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class RaggedBatch:
    """The rows of one value-model forward: each request's delta tokens, then its candidates (spec, section 2).

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1`` of the ``T``: its delta at positions
    ``cached_lens[i]`` and up, then ``candidate_lens[i]`` candidates at the position after the delta (in a tree, one
    position further per level). Rows from ``q_offsets[B]`` on are padding, which keeps ``T`` fixed while the lengths
    vary, at almost no cost.
    """

    layout: RaggedLayout  # token ids, positions, slots and q_offsets of the T rows, and where the candidates are
    slot_table: torch.Tensor  # int32 [R, pages], page of the cache that holds each page of a row's tokens
    table_rows: torch.Tensor  # int32 | int64 [B], row of each request in slot_table
    cached_lens: torch.Tensor  # int32 [B], tokens of the request already in the cache
    candidate_lens: torch.Tensor  # int32 [B]
    page_size: int = 1  # slots per page
    expected_rows: int | None = None  # estimated number of rows in use, see ragged_linear. If None, all
    images: ImageTokens | None = None  # images among the T rows

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
        """Lay out a batch in ``T = D + B * K`` rows, without a host-device sync.

        Args:
            delta_ids: int32 or int64 [D], delta tokens of all requests. Tokens of no request are ignored.
            delta_slots: int32 or int64 [D], slot of each delta token's key and value, which must be its slot in the
                slot table.
            delta_starts: int32 [B], the first delta token of each request in ``delta_ids``.
            delta_lens: int32 [B], delta tokens of each request, 0 or more, at most ``D`` in total.
            candidate_ids: int32 or int64 [B, K], the candidates of each request from column 0 on. ``K`` may be 0: the
                forward then only extends the cache.
            candidate_lens: int32 [B], candidates of each request, 0 to ``K``.
            cached_lens: int32 [B], tokens of each request already in the cache.
            slot_table: int32 [R, pages]. Token ``p`` of table row ``r`` is stored in slot
                ``slot_table[r, p // page_size] * page_size + p % page_size``.
            table_rows: int32 or int64 [B], the row of ``slot_table`` of each request.
            candidate_parents: int32 [B, K], column of each candidate's parent among the request's candidates, which
                must be an earlier one; with any other number (-1), it follows the delta. If None, all follow the delta.
            page_size: slots per page.
            expected_rows: estimated number of rows in use (:func:`ragged_linear`). If None, all.
            images: images of the D delta tokens, for a value model that reads images. If None, all tokens are text.
            backend: backend of the layout, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            The batch, on the device of ``delta_ids``. It references lengths and tables without copying them.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device. Values are not checked, which
                would need a host-device sync.
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
            # Laying out token indices gives the index of each row's delta token.
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

    A slot table assigns the slots to requests: the engine's table, or
    :class:`lenvm_kernels.paged_slots.PagedSlots`.
    """

    keys: torch.Tensor  # [num_layers, S, Hkv, D] in the model's dtype
    values: torch.Tensor  # as keys

    @classmethod
    def of_slots(cls, model: _Model, num_slots: int) -> KVCache:
        """A cache of ``num_slots`` slots for the keys and values of ``model``, see :meth:`num_bytes`."""
        shape = _slot_shape(model, num_slots)
        return cls(*(torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)))

    @staticmethod
    def num_bytes(model: _Model, num_slots: int) -> int:
        """Bytes of a cache of ``num_slots`` slots: ``2 N S Hkv D e``."""
        return 2 * math.prod(_slot_shape(model, num_slots)) * model.dtype.itemsize


def _slot_shape(model: _Model, num_slots: int) -> tuple[int, int, int, int]:
    config = model.config
    return config.num_layers, num_slots, config.num_kv_heads, config.head_dim
