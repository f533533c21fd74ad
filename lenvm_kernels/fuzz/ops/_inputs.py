"""Tensor arguments as slices, with strided rows, and with broken numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.draws import Draws


def padded_rows(x: Tensor, padding: int, value: float = float("nan")) -> Tensor:
    """The same ``[rows, columns]`` with a row stride larger by ``padding``, and ``value`` between the rows."""
    return torch.nn.functional.pad(x, (0, padding), value=value)[:, : x.shape[1]] if padding else x


def slice_of_longer(x: Tensor) -> Tensor:
    """The same values as a slice of a tensor with one more row on each side: not aligned to 16 bytes if 1-D."""
    return torch.cat([x[-1:], x, x[:1]])[1:-1] if len(x) else x


def poisoned(draws: Draws, rows: Any, x: Tensor, of: float) -> Tensor:
    """``x`` with one number of some rows replaced by NaN or infinity."""
    poison = draws.choose("poison", rows, values=[math.nan, math.inf, -math.inf])[:, None]
    column = draws.integers("poisoned column", rows, low=0, high=x.shape[1] - 1)[:, None]
    is_poisoned = draws.chance("poisoned", rows, of=of)[:, None]
    here = is_poisoned & (torch.arange(x.shape[1], device=x.device) == column)
    return torch.where(here, poison.to(x.dtype), x)


def fill(fields: Any, rows: Any, values: Mapping[str, Tensor], elsewhere: int | None = None) -> None:
    """Write ``rows`` of the named tensors. ``elsewhere`` is a value for all other rows that exposes reads of them."""
    for name, x in values.items():
        column = getattr(fields, name)
        if elsewhere is not None:
            column.fill_(elsewhere)
        column[rows] = x.to(column.dtype)


def results_to_fill(empty: Sequence[Tensor], *, in_slices: bool) -> list[Tensor]:
    """Fill result tensors with numbers that expose elements an operator does not write, optionally as slices."""
    filled = [x.copy_(torch.arange(x.numel(), device=x.device).view(x.shape) % 2) for x in empty]
    return [slice_of_longer(x) for x in filled] if in_slices else filled


def to_fill(empty: Any, *, in_slices: bool) -> Any:
    """:func:`results_to_fill` for a named tuple of tensors."""
    return empty._make(results_to_fill(empty, in_slices=in_slices))
