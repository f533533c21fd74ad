"""The tokens of one value-model forward, and the cache that it reads and extends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.types import DeltaTokens, RaggedLayout, StepRequests
from lenvm_kernels.values.checkpoint import ValueModelConfig
from lenvm_kernels.values.images import ImageTokens


class _Model(Protocol):
    """The attributes of a value model that a batch and a cache need."""

    config: ValueModelConfig
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class RaggedBatch:
    """The rows of one value-model forward: each request's delta tokens, then its candidates (spec, section 2).

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1`` of the ``T`` rows: its delta at positions
    ``cached_lens[i]`` and up, then ``candidate_lens[i]`` candidates at the position after the delta (in a tree, one
    position further per level). Rows from ``q_offsets[B]`` on are padding, which costs almost nothing.
    """

    layout: RaggedLayout  # the T rows, the work list of the attention, and counters that no other forward shares
    slot_table: torch.Tensor  # int32 [R, pages], cache page of each page of a row's tokens
    table_rows: torch.Tensor  # int32 | int64 [B], row of each request in slot_table
    candidate_lens: torch.Tensor  # int32 [B]
    page_size: int = 1  # slots per page
    expected_rows: int | None = None  # estimated number of rows in use, see ragged_linear. If None, all
    images: ImageTokens | None = None  # images among the T rows

    @classmethod
    def build(
        cls,
        model: _Model,
        candidate_ids: torch.Tensor,
        candidate_lens: torch.Tensor,
        slot_table: torch.Tensor,
        *,
        delta: DeltaTokens | None = None,
        requests: StepRequests | None = None,
        page_size: int = 1,
        expected_rows: int | None = None,
        images: ImageTokens | None = None,
        **options: Any,
    ) -> RaggedBatch:
        """Lay out a batch in ``T = D + B * K`` rows, without a host-device sync.

        Args:
            model: the value model that will compute the batch.
            candidate_ids, candidate_lens, slot_table, delta, requests, page_size: as in :func:`lay_out`. With ``K`` of
                0, the forward only extends the cache.
            expected_rows: estimated number of rows in use (:func:`ragged_linear`). If None, all.
            images: images of the tokens of ``delta``, for a value model that reads images. If None, all are text.
            **options: ``history``, ``max_new``, ``candidate_parents`` and ``backend`` of :func:`lay_out`.

        Returns:
            The batch, on the device of ``candidate_ids``. Lengths and tables are not copied.

        Raises:
            TypeError, ValueError: as :func:`lay_out`.
        """
        options |= dict(delta=delta, requests=requests, page_size=page_size)
        options |= dict(num_heads=model.config.num_heads, num_kv_heads=model.config.num_kv_heads)
        layout = lay_out(candidate_ids, candidate_lens, slot_table, **options)
        if images is not None and delta is not None:
            first_rows, is_text = layout.q_offsets[:-1], layout.slots < 0  # candidates and padding have no slot
            row = torch.arange(len(is_text), dtype=torch.int32, device=is_text.device)
            request = torch.searchsorted(layout.q_offsets[1:], row, right=True).clamp(max=len(first_rows) - 1)
            token = (row + (delta.starts - first_rows)[request]).masked_fill(is_text, 0)
            positions = torch.where(is_text, layout.positions, images.positions[:, token])
            images = ImageTokens(positions, images.rows[token].masked_fill(is_text, -1), images.embeds)
        rows_of = delta.table_rows if delta is not None else requests and requests.request_rows
        assert rows_of is not None  # lay_out checks that one of both is passed
        return cls(layout, slot_table, rows_of, candidate_lens, page_size, expected_rows, images)


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
