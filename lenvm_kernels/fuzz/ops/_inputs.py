"""Tensors as arguments: in slices, in rows that lie apart, with broken numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.draws import Draws


def padded_rows(x: Tensor, padding: int, value: float = float("nan")) -> Tensor:
    """The same ``[rows, columns]`` in rows that lie ``padding`` numbers farther apart, with ``value`` between them."""
    return torch.nn.functional.pad(x, (0, padding), value=value)[:, : x.shape[1]] if padding else x


def slice_of_longer(x: Tensor) -> Tensor:
    """The same numbers one row into a longer tensor, which goes on after them: not aligned to 16 bytes if flat."""
    return torch.cat([x[-1:], x, x[:1]])[1:-1] if len(x) else x


def poisoned(draws: Draws, rows: Any, x: Tensor, of: float) -> Tensor:
    """A number of some rows, NaN or infinite, in place of what ``x`` has there."""
    poison = draws.choose("poison", rows, values=[math.nan, math.inf, -math.inf])[:, None]
    column = draws.integers("poisoned column", rows, low=0, high=x.shape[1] - 1)[:, None]
    is_poisoned = draws.chance("poisoned", rows, of=of)[:, None]
    here = is_poisoned & (torch.arange(x.shape[1], device=x.device) == column)
    return torch.where(here, poison.to(x.dtype), x)


def fill(fields: Any, rows: Any, values: Mapping[str, Tensor], elsewhere: int | None = None) -> None:
    """Write rows of the tensors of these names. What they hold elsewhere shows who reads it."""
    for name, x in values.items():
        column = getattr(fields, name)
        if elsewhere is not None:
            column.fill_(elsewhere)
        column[rows] = x.to(column.dtype)


def results_to_fill(empty: Sequence[Tensor], *, in_slices: bool) -> list[Tensor]:
    """Numbers for an operator to write over: what it leaves out shows. In slices of longer tensors, if asked to."""
    filled = [x.copy_(torch.arange(x.numel(), device=x.device).view(x.shape) % 2) for x in empty]
    return [slice_of_longer(x) for x in filled] if in_slices else filled


def to_fill(empty: Any, *, in_slices: bool) -> Any:
    """A tuple of tensors for an operator to write over: :func:`results_to_fill` of each."""
    return empty._make(results_to_fill(empty, in_slices=in_slices))
