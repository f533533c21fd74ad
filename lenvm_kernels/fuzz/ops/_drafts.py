"""Drafts for every operator that takes drafts: chains, trees and absent drafts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import dtype_of
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.types import Drafts

DRAFTS: dict[str, list[Any]] = {
    "drafts": [1, 2, 3, 4, 5, 7, 8, 9],
    "parents": ["chain", "tree", "any"],
    "dtype": ["int32", "int64"],
    "apart": [False, True],  # strided rows of the drafts
}
# A prime number of tokens, so that any constant step gives a node different candidates. The first are also drafts.
VOCABULARY = [0, 7, 3, 151_642, 2**31 - 1, 11, 5, 1, 2, 64, 8]
DRAFTED = 5
NO_PARENTS = [-1, -2, -(2**31), 2**31 - 1]


def draw_parents(draws: Draws, kind: str, rows, columns: int) -> Tensor:
    """int32 ``[rows, columns]``: parents of a chain, of a tree, or mixed with numbers that are no earlier column."""
    column = torch.arange(columns, device=draws.device)
    if kind == "chain":
        return (column - 1).int().expand(len(rows), -1).contiguous()
    parents = draws.integers("parents", rows, columns, low=0, high=2**30) % (column + 1) - 1
    if kind == "any":
        others = draws.choose("no parents", rows, columns, values=NO_PARENTS)
        others = torch.where(draws.chance("later", rows, columns, of=0.5), parents.abs() + column, others)
        parents = torch.where(draws.chance("is no parent", rows, columns, of=0.4), others, parents)
    return parents.int()


def draw_drafts(draws: Draws, rows, options: Mapping[str, Any]) -> Drafts:
    """Drafts from few tokens, so that siblings may be equal. Some have ignored ids after the first absent one."""
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


def apart(x: Tensor, more: int) -> Tensor:
    """The same numbers in a larger tensor, with strided rows."""
    return torch.nn.functional.pad(x, (1, more, 1, 1), value=2)[1:-1, 1:-more]


def owners_of_nodes(requests: int, drafts: int, count: int, device: torch.device) -> Tensor:
    """The row that each node belongs to; -1 for requests beyond the first ``count``."""
    owners = torch.arange(requests, device=device)
    owners[count:] = -1
    return owners.repeat_interleave(1 + drafts)
