"""The guided requests, and the slots of keys and values that each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.value_model import KVCache, ValueModel


@dataclass
class Request:
    """What the host knows of a guided request."""

    row: int
    params: GuidanceParams
    eos_token_ids: set[int]
    prompt_len: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # of its tokens, those whose keys and values the value model has

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class SlotCache:
    """Keys and values of a value model, a table of the slots of each request, and those that are free."""

    def __init__(self, value_model: ValueModel, rows: int, max_len: int, num_slots: int) -> None:
        self.kv = KVCache.of_slots(value_model, num_slots)
        self.table = torch.zeros(rows, -(-max_len // 8) * 8, dtype=torch.int64, device=value_model.device)
        self.free = torch.arange(num_slots, device=value_model.device)
        self._max_len = max_len

    def place(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """Slots for new tokens of each request after its cached ones, written to the table request by request."""
        for request, count in zip(requests, counts, strict=True):
            if request.cached + count > self._max_len:
                needed = f"row {request.row} needs room for {request.cached + count} tokens and candidates"
                raise ValueError(f"{needed}, slot_table has it for {self._max_len}")
        total, first = sum(counts), 0
        if total > len(self.free):
            raise RuntimeError(f"{total} slots are needed, {len(self.free)} are free")
        slots, self.free = self.free[:total], self.free[total:]
        for request, count in zip(requests, counts, strict=True):
            self.table[request.row, request.cached : request.cached + count] = slots[first : first + count]
            first += count
        return slots

    def forget(self, request: Request, length: int) -> None:
        """Give back the slots of all but the first ``length`` tokens of a request."""
        if request.cached > length:
            self.release(self.table[request.row, length : request.cached].clone())
            request.cached = length

    def release(self, slots: Tensor) -> None:
        """Give back slots."""
        self.free = torch.cat([self.free, slots])
