"""``pack_drafts``: candidates that are drafts and others, of all nodes, some or none, beside equal siblings."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import (
    Case,
    Difference,
    Operator,
    Output,
    copy_in_place,
    differs,
    expect,
    results_to_fill,
    slice_of_longer,
    whole_memory,
)
from lenvm_kernels.fuzz.ops.expand_drafts import DRAFTS, VOCABULARY, draw_drafts, owners_of_nodes, with_padding
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts
from lenvm_kernels.types import CandidateTrees, ScoredCandidates

OPTIONS: dict[str, list[Any]] = DRAFTS | {
    "columns": [1, 2, 4, 8],
    "padding": ["no out", "0", "1", "5"],  # requests beyond those with drafts
    "slices": [False, True],
}


@dataclass(frozen=True)
class Inputs:
    arguments: dict[str, Any]


def inputs(case: Case, device: torch.device) -> Inputs:
    options, draws = case.options, case.draws(device)
    rows, columns, nodes = with_padding(draws, case.rows, options["padding"]), options["columns"], 1 + options["drafts"]
    count = len(case.rows)
    drafts = draw_drafts(draws, case.rows, options)

    # Every so many tokens of the vocabulary, from any of them on: no two candidates of a node are equal.
    first, step = (draws.integers(name, rows, nodes, low=1, high=len(VOCABULARY) - 1) for name in ("first", "step"))
    place = first[..., None] + step[..., None] * torch.arange(columns, device=device)
    token_ids = torch.tensor(VOCABULARY, dtype=torch.int32, device=device)[place % len(VOCABULARY)]
    counts = draws.integers("counts", rows, nodes, low=0, high=columns)
    counts = torch.where(draws.chance("not scored", rows, nodes, of=0.3), 0, counts)
    counts = torch.where(draws.chance("nothing scored", rows, of=0.2)[:, None], 0, counts)
    # At nodes that are not there nothing is scored.
    counts[:count, 1:] *= (drafts.token_ids >= 0).cumprod(dim=1)
    counts[count:, 1:] = 0
    positions = draws.integers("positions", rows, nodes, low=0, high=100_000)
    alone = draws.chance("alone", rows, nodes, of=0.5)
    flat = [token_ids.flatten(0, 1), counts.flatten().int(), positions.flatten().int(), alone.flatten()]
    if options["slices"]:
        flat = [slice_of_longer(x) for x in flat]
    arguments: dict[str, Any] = {"scored": ScoredCandidates(*flat), "drafts": drafts}
    if options["padding"] != "no out":
        out = empty_trees(len(rows), options["drafts"], columns, device)
        arguments["out"] = CandidateTrees(*results_to_fill(out, in_slices=options["slices"]))
    return Inputs(arguments)


@dataclass(frozen=True)
class Result:
    trees: CandidateTrees
    around: list[Tensor]  # all that holds ``out``, which is to be left alone around it


def run(given: Inputs, function) -> Result:
    arguments, around = dict(given.arguments), []
    if "out" in arguments:
        arguments["out"] = out = CandidateTrees(*map(copy_in_place, arguments["out"]))
        around = [whole_memory(x) for x in out]
    trees = function(**arguments)
    (nodes, columns), drafts = arguments["scored"].token_ids.shape, arguments["drafts"].token_ids.shape[1]
    for name, wanted in empty_trees(nodes // (1 + drafts), drafts, columns, torch.device("cpu"))._asdict().items():
        expect(name, getattr(trees, name, None), dtype=wanted.dtype, shape=wanted.shape)
    return Result(trees, around)


def _owners(given: Inputs) -> dict[str, Tensor]:
    """The row that each item of each field belongs to."""
    count, drafts = given.arguments["drafts"].token_ids.shape
    counts = given.arguments["scored"].counts
    of_nodes = owners_of_nodes(len(counts) // (1 + drafts), drafts, count, counts.device)
    return dict.fromkeys(CandidateTrees._fields, of_nodes[:: 1 + drafts]) | {"columns": of_nodes}


def outputs(given: Inputs, result: Result) -> list[Output]:
    owners = _owners(given)
    return [Output(name, x, owners[name]) for name, x in result.trees._asdict().items()]


def compare(given: Inputs, result: Result) -> list[Difference]:
    expected = run(given, _reference)
    owners = _owners(given)
    found = [
        differs(name, getattr(result.trees, name), wanted, owners[name])
        for name, wanted in expected.trees._asdict().items()
    ]
    for name, memory, wanted in zip(CandidateTrees._fields, result.around, expected.around, strict=False):
        found.append(differs(f"memory around {name}", memory, wanted, torch.full_like(memory, -1, dtype=torch.int64)))
    return found


def _reference(**arguments) -> CandidateTrees:
    return pack_drafts(**arguments, backend="reference")


def classes(given: Inputs) -> dict[str, Tensor]:
    token_ids = given.arguments["drafts"].token_ids
    count = len(token_ids)
    trees = run(given, _reference).trees
    is_there = (token_ids >= 0).int().cumprod(dim=1).bool()
    columns = trees.columns.view(len(trees.counts), -1)[:count]
    return {
        "nothing scored": trees.counts[:count] == 0,
        "no drafts": ~is_there.any(dim=1),
        "a candidate is a draft": ((columns >= 0) & (columns < is_there.sum(dim=1)[:, None])).any(dim=1),
    }


OPERATOR = Operator(
    name="pack_drafts",
    function=pack_drafts,
    options=OPTIONS,
    inputs=inputs,
    run=run,
    outputs=outputs,
    compare=compare,
    most_rows=4096,
    row_size=lambda options: 4 * (1 + options["drafts"]) * (1 + options["columns"]),
    row_work=lambda options: 60 + 15 * options["drafts"],
    classes=classes,
    free={"drafts.token_ids": "int32 apart", "drafts.parents": "apart"},
    reads={"scored": ("token_ids", "counts", "table_rows", "positions")},
)
