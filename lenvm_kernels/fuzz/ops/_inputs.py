"""Tensor arguments as slices, with strides and with broken numbers; drafts as chains, as trees and absent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, dtype_of
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.types import Drafts

SPARE_ROWS = 3  # table rows that no row of the batch uses


def rows_and(case: Case, others: str) -> tuple[int, ...]:
    """The rows of a case, followed by ``others`` more rows if ``others`` is a number."""
    return *case.rows, *(-1 - i for i in range(int(others) if others.isdigit() else 0))


def in_fp64(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their floating-point tensors in fp64."""
    return {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in arguments.items()}


def padded_rows(x: Tensor, padding: int, value: float = float("nan")) -> Tensor:
    """The numbers ``[rows, columns]`` with a row stride larger by ``padding``, and ``value`` between the rows."""
    return torch.nn.functional.pad(x, (0, padding), value=value)[:, : x.shape[1]] if padding else x


def slice_of_longer(x: Tensor) -> Tensor:
    """The numbers as a slice of a tensor with one more row on each side; not aligned to 16 bytes if 1-D."""
    return torch.cat([x[-1:], x, x[:1]])[1:-1] if len(x) else x


def limit_rows(arguments: dict[str, Any], rows: int, **tensors: Tensor | None) -> None:
    """Pass the number of rows on the device. Other rows of the tensors become NaN."""
    given = [x for x in tensors.values() if x is not None]
    arguments["num_rows"] = torch.tensor([rows], dtype=torch.int32, device=given[0].device)
    for x in given:
        x[rows:] = math.nan


def poisoned(draws: Draws, rows: Any, x: Tensor, of: float) -> Tensor:
    """``x`` with one number of some rows replaced by NaN or infinity."""
    poison = draws.choose("poison", rows, values=[math.nan, math.inf, -math.inf])[:, None]
    column = draws.integers("poisoned column", rows, low=0, high=x.shape[1] - 1)[:, None]
    is_poisoned = draws.chance("poisoned", rows, of=of)[:, None]
    here = is_poisoned & (torch.arange(x.shape[1], device=x.device) == column)
    return torch.where(here, poison.to(x.dtype), x)


def fill(fields: Any, rows: Any, values: Mapping[str, Tensor], elsewhere: int | None = None) -> None:
    """Write ``rows`` of the named tensors. ``elsewhere`` is written to all other rows, to expose reads of them."""
    for name, x in values.items():
        column = getattr(fields, name)
        if elsewhere is not None:
            column.fill_(elsewhere)
        column[rows] = x.to(column.dtype)


def to_fill(empty: Any, *, in_slices: bool) -> Any:
    """Result tensors filled with numbers that expose elements not written by an operator, optionally as slices."""
    filled = [x.copy_(torch.arange(x.numel(), device=x.device).view(x.shape) % 2) for x in empty]
    return empty._make([slice_of_longer(x) for x in filled] if in_slices else filled)


def apart(x: Tensor, more: int) -> Tensor:
    """The same numbers in a larger tensor, with strided rows."""
    return torch.nn.functional.pad(x, (1, more, 1, 1), value=2)[1:-1, 1:-more]


def columns_apart(table: Any, names: Sequence[str]) -> Any:
    """The named columns of a table, each in separate memory with another stride. Rows of a list stay contiguous."""
    return table._replace(**{name: strided(getattr(table, name), i) for i, name in enumerate(names)})


def strided(x: Tensor, more: int) -> Tensor:
    """The same numbers with stride ``1 + more``, or with rows ``more`` elements farther apart, and ones between."""
    return padded_rows(x, more, 1) if x.dim() == 2 else padded_rows(x[:, None], more, 1)[:, 0]


DRAFTS: dict[str, list[Any]] = {
    "drafts": [1, 2, 3, 4, 5, 7, 8, 9],
    "parents": ["chain", "tree", "any"],
    "dtype": ["int32", "int64"],
    "apart": [False, True],  # strided rows of the drafts
}
# A prime number of tokens, so that any constant step gives different candidates. The first are also drafts.
VOCABULARY = [0, 7, 3, 151_642, 2**31 - 1, 11, 5, 1, 2, 64, 8]
DRAFTED = 5
NO_PARENTS = [-1, -2, -(2**31), 2**31 - 1]


def draw_parents(draws: Draws, kind: str, rows, columns: int) -> Tensor:
    """int32 ``[rows, columns]``: parents in roots, a chain or a tree, or any numbers, including invalid columns."""
    column = torch.arange(columns, device=draws.device)
    if kind == "roots":
        return torch.full((len(rows), columns), -1, dtype=torch.int32, device=draws.device)
    if kind == "chain":
        return (column - 1).int().expand(len(rows), -1).contiguous()
    parents = draws.integers("parents", rows, columns, low=0, high=2**30) % (column + 1) - 1
    if kind == "any":
        others = draws.choose("no parents", rows, columns, values=NO_PARENTS)
        others = torch.where(draws.chance("later", rows, columns, of=0.5), parents.abs() + column, others)
        parents = torch.where(draws.chance("is no parent", rows, columns, of=0.4), others, parents)
    return parents.int()


def draw_drafts(draws: Draws, rows, options: Mapping[str, Any]) -> Drafts:
    """Drafts from few tokens, so that siblings may be equal. Some have ignored ids after the first absent draft."""
    columns = options["drafts"]
    column = torch.arange(columns, device=draws.device)
    lens = draws.integers("drafts", rows, low=0, high=columns)
    lens = torch.where(draws.chance("all drafts", rows, of=0.5), columns, lens)[:, None]
    some_after = draws.chance("some after", rows, of=0.5)[:, None]
    is_absent = torch.where(some_after, column == lens, column >= lens)
    wide = -(2**32) + 5 if options["dtype"] == "int64" else -2  # its low 32 bits are a valid token
    absent = draws.choose("absent", rows, columns, values=[-1, -1, wide, -(2**31)])
    token_ids = draws.choose("draft_ids", rows, columns, values=VOCABULARY[:DRAFTED])
    token_ids = torch.where(is_absent, absent, token_ids).to(dtype_of(options))
    parents = draw_parents(draws, options["parents"], rows, columns)
    return Drafts(apart(token_ids, 2), apart(parents, 1)) if options["apart"] else Drafts(token_ids, parents)


def owners_of_nodes(given: CallInputs, x: Tensor) -> Tensor:
    """Owners of items per node: the request, or -1 for requests beyond the batch."""
    drafts = given.arguments.get("drafts")
    owner = torch.arange(len(x), device=x.device) // (1 if drafts is None else 1 + drafts.token_ids.shape[1])
    return owner.masked_fill(owner >= given.rows, -1)
