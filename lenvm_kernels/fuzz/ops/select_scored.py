"""``select_scored``: requests of every status, due and not, with and without a next token that is known."""

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
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, ScoredCandidates, Status

OPTIONS: dict[str, list[Any]] = {
    "columns": [1, 2, 4, 8, 16, 32, 64],
    "eos": [1, 3, 8],
    "padding": ["no out", "0", "1", "40"],  # rows of the result beyond the requests
    "drawn": [False, True],
    "sample": [False, True],
    "score_all": [False, True],
    "step": ["none", "1", "4294967295"],
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 4}}  # several programs
SPARE_ROWS = 2  # of the table, which no request of the batch has


@dataclass(frozen=True)
class Inputs:
    arguments: dict[str, Any]


def inputs(case: Case, device: torch.device) -> Inputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, columns = len(rows), options["columns"]
    padding = 0 if options["padding"] == "no out" else int(options["padding"])

    counts = draws.integers("counts", rows, low=0, high=columns)
    is_candidate = torch.arange(columns, device=device) < counts[:, None]
    candidates = Candidates(
        token_ids=torch.where(is_candidate, draws.integers("token_ids", rows, columns, low=0, high=9), -1).int(),
        probs=torch.zeros(count, columns, device=device),
        counts=counts.int(),
        status=draws.choose("status", rows, values=[int(status) for status in Status]).to(torch.int8),
        lost_mass=torch.zeros(count, device=device),
    )
    requests = empty_requests(count + padding, device)
    for x in requests:
        x.fill_(1)  # in the rows of requests that do not exist nobody is to look
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    for name, values in (
        ("positions", draws.integers("positions", rows, low=0, high=100_000)),
        ("table_rows", table_rows),
        ("wants_length", draws.chance("wants_length", rows, of=0.5)),
        ("due", draws.chance("due", rows, of=0.4)),
    ):
        getattr(requests, name)[:count] = values
    # With more room than there is, so that its rows are apart by more than their ids.
    room = torch.zeros(count + SPARE_ROWS, options["eos"] + 2, dtype=torch.int32, device=device)
    eos_token_ids = room[:, : options["eos"]]
    eos_token_ids[table_rows] = draws.choose("eos", rows, options["eos"], values=[-2, -2, -1, *range(40)]).int()
    arguments: dict[str, Any] = {"candidates": candidates, "requests": requests, "eos_token_ids": eos_token_ids}
    if options["drawn"]:
        drawn = draws.choose("drawn", rows, values=[-1, -1, -2, 0, 3, 2**31 - 1]).int()
        arguments["drawn"] = slice_of_longer(drawn) if options["slices"] else drawn
    arguments |= {name: options[name] for name in ("sample", "score_all")}
    if options["step"] != "none":
        arguments["step"] = torch.tensor([int(options["step"])], device=device)
    if options["padding"] != "no out":
        out = empty_scored(count + padding, columns, device)
        arguments["out"] = ScoredCandidates(*results_to_fill(out, in_slices=options["slices"]))
    return Inputs(arguments)


@dataclass(frozen=True)
class Result:
    scored: ScoredCandidates
    status: Tensor
    step: Tensor | None
    around: list[Tensor]  # all that holds ``out``, which is to be left alone around it


def run(given: Inputs, function) -> Result:
    arguments, around = dict(given.arguments), []
    step, out = arguments.get("step"), arguments.get("out")
    status = arguments["candidates"].status.clone()
    arguments["candidates"] = arguments["candidates"]._replace(status=status)
    if step is not None:
        arguments["step"] = step = step.clone()
    if out is not None:
        arguments["out"] = out = ScoredCandidates(*map(copy_in_place, out))
        around = [whole_memory(x) for x in out]
    scored = function(**arguments)
    rows, columns = len(arguments["requests"].tokens), arguments["candidates"].token_ids.shape[1]
    for name, wanted in empty_scored(rows, columns, torch.device("cpu"))._asdict().items():
        expect(name, getattr(scored, name, None), dtype=wanted.dtype, shape=wanted.shape)
    return Result(scored, status, step, around)


def outputs(given: Inputs, result: Result) -> list[Output]:
    count = len(given.arguments["candidates"].counts)
    return [Output(name, x[:count]) for name, x in (result.scored._asdict() | {"status": result.status}).items()]


def compare(given: Inputs, result: Result) -> list[Difference]:
    expected = run(given, _reference)
    owners = torch.arange(len(result.scored.counts), device=result.scored.counts.device)
    owners[len(given.arguments["candidates"].counts) :] = -1
    found = [
        differs(name, getattr(result.scored, name), wanted, owners)
        for name, wanted in expected.scored._asdict().items()
    ]
    found.append(differs("status", result.status, expected.status))
    for name, memory, wanted in zip(ScoredCandidates._fields, result.around, expected.around, strict=False):
        found.append(differs(f"memory around {name}", memory, wanted, torch.full_like(memory, -1, dtype=torch.int64)))
    if expected.step is not None and result.step is not None:
        found.append(differs("step", result.step, expected.step, torch.full_like(expected.step, -1)))
    return found


def _reference(**arguments) -> ScoredCandidates:
    return select_scored(**arguments, backend="reference")


def classes(given: Inputs) -> dict[str, Tensor]:
    count = len(given.arguments["candidates"].counts)
    result = run(given, _reference)
    is_guide, is_due = given.arguments["candidates"].status == Status.GUIDE, given.arguments["requests"].due[:count]
    return {
        "scored": result.scored.counts[:count] > 0,
        "alone": result.scored.alone[:count],
        "not due": result.status == Status.NOT_DUE,
        "might end": is_guide & ~is_due & (result.status == Status.GUIDE),
    }


OPERATOR = Operator(
    name="select_scored",
    function=select_scored,
    options=OPTIONS,
    inputs=inputs,
    run=run,
    outputs=outputs,
    compare=compare,
    most_rows=4096,
    row_size=lambda options: 2 * options["columns"] + 20,
    row_work=lambda options: 20,
    classes=classes,
    constants=CONSTANTS,
    free={"eos_token_ids": "rows columns apart"},
    reads={
        "candidates": ("token_ids", "counts", "status"),
        "requests": ("positions", "table_rows", "wants_length", "due"),
    },
)
