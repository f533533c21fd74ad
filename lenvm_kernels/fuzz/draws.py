"""Random numbers per row: the contents of a row depend only on the seed and the row's id.

A row is the same in any batch and any order, on a CPU and on a GPU. A failing batch can therefore be reduced to one
row, and rows can be compared between batches.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), as signed int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)  # shifts and factors


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of int64."""
    for shift, factor in _ROUNDS:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # int64 shifts keep the sign; products wrap
    return x


class Draws:
    """Random numbers of one seed, by name and row. They are the same on all devices."""

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        self.seed, self.device = seed, torch.device(device)

    def rows(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """int64 ids of rows on the device. An int ``rows`` means the ids 0 .. ``rows`` - 1."""
        return torch.as_tensor(range(rows) if isinstance(rows, int) else rows, dtype=torch.int64, device=self.device)

    def bits(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int) -> Tensor:
        """int64 ``[rows, *shape]``: 64 random bits each."""
        key = int.from_bytes(hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest(), "big") - 2**63
        start = _mix(self.rows(rows) * _GAMMA + key)
        column = torch.arange(1, math.prod(shape) + 1, device=self.device) * _GAMMA
        return _mix(start[:, None] + column).view(len(start), *shape)

    def uniform(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int, low=0.0, high=1.0) -> Tensor:
        """fp64 in [low, high)."""
        share = ((self.bits(name, rows, *shape) >> 11) & (2**53 - 1)).double() * 2.0**-53
        return low + (high - low) * share

    def normal(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int) -> Tensor:
        """fp64 with mean 0 and variance 1, between -3 and 3: the sum of three uniform numbers, exact on all devices."""
        bits = self.bits(name, rows, *shape)
        part = 2**21 - 1
        return ((bits & part) + ((bits >> 21) & part) + ((bits >> 42) & part)).double() * 2.0**-20 - 3

    def integers(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int, low: int, high: int) -> Tensor:
        """int64 in [low, high], inclusive."""
        return low + ((self.bits(name, rows, *shape) >> 16) & (2**47 - 1)) % (high - low + 1)

    def choose(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int, values: Sequence) -> Tensor:
        """Random elements of ``values``; fp64, int64 or bool like the values."""
        dtype = torch.float64 if any(isinstance(value, float) for value in values) else None
        table = torch.tensor(values, dtype=dtype, device=self.device)
        return table[self.integers(name, rows, *shape, low=0, high=len(values) - 1)]

    def chance(self, name: str, rows: int | Sequence[int] | Tensor, *shape: int, of: float) -> Tensor:
        """bool, True with probability ``of``."""
        return self.uniform(name, rows, *shape) < of

    def places(self, name: str, rows: int | Sequence[int] | Tensor, spare: int = 0) -> Tensor:
        """int64 ``[rows]``: different places in shuffled order, out of ``len(rows) + spare``."""
        rows = self.rows(rows)
        keys = self.bits(name, torch.cat([rows, -1 - torch.arange(spare, device=self.device)]))
        return keys.argsort().argsort()[: len(rows)]
