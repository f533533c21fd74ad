"""``expand_drafts``: chains, trees and absent drafts, for all requests or only the first ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case, dtype_of
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops._calls import NamedInputs, exact_operator
from lenvm_kernels.fuzz.ops._inputs import fill, results_to_fill, slice_of_longer
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, empty_nodes, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.types import Drafts, StepRequests

# Options of the drafts, for every operator that takes drafts.
DRAFTS: dict[str, list[Any]] = {
    "drafts": [1, 2, 3, 4, 5, 7, 8, 9],
    "parents": ["chain", "tree", "any"],
    "dtype": ["int32", "int64"],
    "apart": [False, True],  # strided rows of the drafts
}
OPTIONS: dict[str, list[Any]] = DRAFTS | {
    "padding": ["no out", "0", "1", "40"],  # rows of the requests beyond those with drafts
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 2}}  # several programs

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


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws = case.options, case.draws(device)
    rows = case.rows_and(options["padding"])
    requests = empty_requests(len(rows), device)
    for x in requests:
        x.fill_(1)
    columns = {
        "positions": draws.integers("positions", rows, low=-1, high=100_000),
        "table_rows": draws.integers("table_rows", rows, low=0, high=2**40),
        "guided": draws.chance("guided", rows, of=0.6),
        "wants_length": draws.chance("wants_length", rows, of=0.5),
        "entropy_threshold": draws.choose("entropy_threshold", rows, values=[float("nan"), -1.0, 0.0, 0.7]),
        "generated": draws.integers("generated", rows, low=0, high=3000),
        "due": draws.chance("due", rows, of=0.4),
    }
    fill(requests, slice(None), columns)
    arguments: dict[str, Any] = {"requests": requests, "drafts": draw_drafts(draws, case.rows, options)}
    if options["slices"]:
        arguments["requests"] = StepRequests(*map(slice_of_longer, requests))
    if options["padding"] != "no out":
        nodes = empty_nodes(requests, options["drafts"])
        fields = results_to_fill([getattr(nodes, name) for name in NODE_FIELDS], in_slices=options["slices"])
        arguments["out"] = nodes._replace(**dict(zip(NODE_FIELDS, fields, strict=True)))
    return NamedInputs(arguments, len(case.rows))


def owners(given: NamedInputs) -> dict[str, Tensor]:
    drafts, positions = given.arguments["drafts"].token_ids.shape[1], given.arguments["requests"].positions
    return dict.fromkeys(NODE_FIELDS, owners_of_nodes(len(positions), drafts, given.rows, positions.device))


OPERATOR = exact_operator(
    expand_drafts,
    options=OPTIONS,
    inputs=inputs,
    writes=("out",),
    owners=owners,
    row_size=lambda options: 20 * options["drafts"],
    row_work=lambda options: 30 + 10 * options["drafts"],
    constants=CONSTANTS,
    free={"drafts.token_ids": "int32 apart", "drafts.parents": "apart"},
    reads={"requests": NODE_FIELDS, "out": NODE_FIELDS},
)
