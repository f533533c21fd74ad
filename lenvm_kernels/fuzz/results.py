"""Parts of results, their owners, and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Output(NamedTuple):
    """A part of a result that must be bitwise identical for any other rows of the batch."""

    name: str
    values: Tensor  # [items, ...]
    owners: Tensor | None = (
        None  # int64 [items]: batch index of the row of each item, -1: no row. None: item i is row i's.
    )


class Difference(NamedTuple):
    """A comparison of a result with the expected result."""

    what: str
    wrong: Tensor  # bool [items]
    actual: Tensor  # [items, ...], as is ``expected``
    expected: Tensor
    owners: Tensor | None = None  # as in :class:`Output`


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
        wanted, got = (
            f"{d} {list(s)}".removeprefix("torch.") for d, s in ((dtype, shape), (tensor.dtype, tensor.shape))
        )
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


def copy_in_place(x: Tensor) -> Tensor:
    """A copy of a view and its whole storage, with the same strides."""
    storage = x.new_empty(0).set_(x.untyped_storage())
    return torch.as_strided(storage.clone(), x.shape, x.stride(), x.storage_offset())


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
    return x.new_empty(0).set_(x.untyped_storage()).view(torch.uint8)


def no_row(x: Tensor) -> Tensor:
    """Owners for items that belong to no row."""
    return torch.full((len(x),), -1, device=x.device)


def owners_of_rows(x: Tensor, rows: int) -> Tensor:
    """Owners where item i belongs to row i, and items from ``rows`` on belong to no row."""
    items = torch.arange(len(x), device=x.device)
    return items.masked_fill(items >= rows, -1)


def owners_in_table(table_rows: Tensor, size: int) -> Tensor:
    """Owners of the ``size`` rows of a table: the batch row that uses the table row, or -1."""
    owners = torch.full((size,), -1, device=table_rows.device)
    owners[table_rows] = torch.arange(len(table_rows), device=owners.device)
    return owners
