"""Parts of results, their owners, and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """A part of a result that must be bitwise identical for any other rows of the batch.

    Attributes:
        values: ``[items, ...]``.
        owners: int64 ``[items]``; index in the batch of the row that each item belongs to, or -1 for no row. If None,
            item i belongs to row i. The order of one row's items does not depend on the batch.
    """

    name: str
    values: Tensor
    owners: Tensor | None = None


@dataclass(frozen=True)
class Difference:
    """A comparison of a result with the expected result.

    Attributes:
        wrong: bool ``[items]``.
        actual, expected: ``[items, ...]``, for the failure message.
        owners: as in :class:`Output`.
    """

    what: str
    wrong: Tensor
    actual: Tensor
    expected: Tensor
    owners: Tensor | None = None


class WrongResult(Exception):
    """The function under test returned a wrong type, shape or dtype, or wrote memory that is not its own."""


def expect(name: str, tensor: Any, *, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Check a result's type, dtype and shape, and return it.

    Raises:
        WrongResult: the check failed; the message has the expected and the actual form.
    """
    if not isinstance(tensor, Tensor):
        raise WrongResult(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        forms = (dtype, shape), (tensor.dtype, tensor.shape)
        wanted, got = (f"{str(d).removeprefix('torch.')} {list(s)}" for d, s in forms)
        raise WrongResult(f"{name} must be {wanted}, got {got}")
    return tensor


def _any_of_item(wrong: Tensor) -> Tensor:
    return wrong.flatten(1).any(dim=1) if wrong.dim() > 1 else wrong


def differs(what: str, actual: Tensor, expected: Tensor, owners: Tensor | None = None) -> Difference:
    """Find items that are not equal; NaN equals NaN."""
    wrong = actual != expected
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    return Difference(what, _any_of_item(wrong), actual, expected, owners)


Tolerance = tuple[float, float | Tensor]  # relative, absolute


def beyond(
    what: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, owners: Tensor | None = None
) -> Difference:
    """Find items outside the tolerance; NaN equals NaN, and an infinity equals only itself."""
    relative, absolute = tolerance
    actual, expected = actual.double(), expected.double()
    near = (actual - expected).abs() <= absolute + relative * expected.abs()
    near = torch.where(expected.isfinite(), near, (actual == expected) | (actual.isnan() & expected.isnan()))
    return Difference(what, _any_of_item(~near), actual, expected, owners)


def whole_memory(x: Tensor) -> Tensor:
    """The whole storage of a view, flat."""
    return x.new_empty(0).set_(x.untyped_storage())


def copy_in_place(x: Tensor) -> Tensor:
    """A copy of a view and its whole storage, with the same strides."""
    return torch.as_strided(whole_memory(x).clone(), x.shape, x.stride(), x.storage_offset())


def with_copies(arguments: Mapping[str, Any], writes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments with copies of all that are written, and these copies by name (of the field, for a field)."""
    arguments, copies = dict(arguments), {}
    for path in writes:
        argument, _, field = path.partition(".")
        x = arguments.get(argument)
        if isinstance(x, Tensor):
            arguments[argument] = copies[argument] = copy_in_place(x)
        elif x is not None:
            fields = {name: copy_in_place(getattr(x, name)) for name in ([field] if field else x._fields)}
            arguments[argument] = x._replace(**fields)
            copies |= fields if field else {f"{argument}.{name}": y for name, y in fields.items()}
    return arguments, copies


def memory_of(x: Tensor) -> Tensor:
    """The bytes of the whole storage of a tensor."""
    return whole_memory(x).view(torch.uint8)


def no_row(x: Tensor) -> Tensor:
    """Owners for items that belong to no row."""
    return torch.full((len(x),), -1, device=x.device)


def owners_of_rows(x: Tensor, rows: int) -> Tensor:
    """Owners where item i belongs to row i, and items from ``rows`` on belong to no row."""
    return torch.arange(len(x), device=x.device).masked_fill(torch.arange(len(x), device=x.device) >= rows, -1)


def owners_in_table(table_rows: Tensor, size: int) -> Tensor:
    """Owners of the ``size`` rows of a table: the batch row that uses the table row, or -1."""
    owners = torch.full((size,), -1, device=table_rows.device)
    owners[table_rows] = torch.arange(len(table_rows), device=owners.device)
    return owners
