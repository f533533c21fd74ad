"""``gather_requests``: table rows in no order, requests that do not exist, histories of many steps and tokens."""

import math
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
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops import gather_requests as ops
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.types import Mode, StepHistory, StepRequests

SPARE_ROWS = 3  # of the table, which no request of the batch has

OPTIONS: dict[str, list[Any]] = {
    "padding": ["no out", "0", "1", "40"],  # rows of the result beyond the requests
    "active": [False, True],
    "table": ["whole", "columns apart"],
    "tokens": ["one", "1", "3", "9"],  # columns of the new ones
    "held": [1, 4, 16],
    "width": [1, 2, 5],  # new tokens that the result has room for
    "step": ["no history", "1", "9", "8589934594"],  # the last is 2 to whoever keeps 32 bits
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 4}}  # several programs


def _strided(x: Tensor, more: int) -> Tensor:
    """The same numbers ``1 + more`` apart, with ones between."""
    return torch.cat([x[:, None], torch.ones_like(x)[:, None].expand(-1, more)], dim=1)[:, 0]


@dataclass(frozen=True)
class Inputs:
    arguments: dict[str, Any]
    is_active: Tensor  # also where the function is not told


def inputs(case: Case, device: torch.device) -> Inputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count = len(rows)
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    table = GuidanceTable(count + SPARE_ROWS, device, max_eos=1, max_scaled_tokens=1)
    columns = {
        "mode": draws.choose("mode", rows, values=[0, 0, *Mode]),
        "return_values": draws.chance("return_values", rows, of=0.5),
        "entropy_threshold": draws.choose("entropy_threshold", rows, values=[math.nan, -1.0, 0.0, 0.7]),
        "prompt_len": draws.integers("prompt_len", rows, low=0, high=100_000),
        "seed": draws.bits("seed", rows),
        "value_stride": draws.choose("value_stride", rows, values=[1, 1, 2, 3, 2**31 - 1, 0, -2]),
        "span_ended": draws.chance("span_ended", rows, of=0.2),
        "faults": draws.integers("faults", rows, low=0, high=9),
    }
    for name, values in columns.items():
        column = getattr(table, name)
        column.fill_(3)  # the spare rows': what reads them shows
        column[table_rows] = values.to(column.dtype)

    parameters = table.columns
    if options["table"] == "columns apart":  # each with a stride of its own
        parameters = parameters._replace(**{name: _strided(getattr(table, name), i) for i, name in enumerate(columns)})
    lengths = columns["prompt_len"] + draws.integers("generated", rows, low=0, high=3000)
    # Some sequences are as short as what is new in them.
    lengths = torch.where(draws.chance("short", rows, of=0.1), draws.integers("few", rows, low=0, high=5), lengths)
    is_active = draws.chance("active", rows, of=0.7)
    new = 1 if options["tokens"] == "one" else int(options["tokens"])
    tokens = draws.choose("tokens", rows, new, values=[0, 1, 151_642, 2**31 - 1, 2**33 + 5])
    per_request = {
        "tokens": tokens[:, 0].contiguous() if options["tokens"] == "one" else tokens,
        "table_rows": table_rows,
        "lengths": lengths.int(),
    }
    if options["active"]:
        per_request["active"] = is_active
    if options["tokens"] != "one":
        per_request["new_lens"] = draws.integers("new_lens", rows, low=-1, high=new + 1).int()
    if options["slices"]:
        per_request = {name: slice_of_longer(x) for name, x in per_request.items()}
    arguments: dict[str, Any] = {"table": parameters, **per_request}
    arguments["padding_row"] = int(draws.integers("padding_row", 1, low=0, high=count + SPARE_ROWS - 1))
    if options["step"] != "no history":
        step = int(options["step"])
        last_steps = draws.choose("last_step", rows, values=[step - 1, step - 1, step - 2, step, -1, step + 2**32 - 1])
        history = empty_history(count + SPARE_ROWS, options["held"], device)
        history.places.fill_(5)
        history.steps.fill_(step - 1)
        history.step.fill_(step)
        history.places[table_rows] = draws.integers("last_place", rows, low=0, high=10_000)
        history.steps[table_rows] = last_steps
        history.tokens[table_rows] = draws.integers("held", rows, options["held"], low=0, high=99).int()
        untold = draws.choose("untold", rows, values=[-1, 0, 1, 1, 2, 3, 9, 10])
        uncached = draws.choose("uncached", rows, values=[-1, 0, 1, 1, 2, 4, 5, 16, 17])
        history.told_lens[table_rows] = (lengths - untold).clamp(min=0).int()
        history.cached_lens[table_rows] = (lengths - uncached).clamp(min=0).int()
        arguments["history"] = history
    if options["padding"] != "no out":
        out = empty_requests(count + int(options["padding"]), device, options["width"])
        arguments["out"] = StepRequests(*results_to_fill(out, in_slices=options["slices"]))
    return Inputs(arguments, is_active if options["active"] else torch.ones_like(is_active))


@dataclass(frozen=True)
class Result:
    requests: StepRequests
    history: StepHistory | None
    faults: Tensor
    around: list[Tensor]  # all that holds ``out``, which is to be left alone around it


def run(given: Inputs, function) -> Result:
    arguments, around = dict(given.arguments), []
    history, out = arguments.get("history"), arguments.get("out")
    faults = copy_in_place(arguments["table"].faults)
    arguments["table"] = arguments["table"]._replace(faults=faults)
    if history is not None:
        arguments["history"] = history = StepHistory(*map(copy_in_place, history))
    if out is not None:
        arguments["out"] = out = StepRequests(*map(copy_in_place, out))
        around = [whole_memory(x) for x in out]
    requests = function(**arguments)
    rows, width = (len(arguments["tokens"]), 1) if out is None else out.tokens.shape
    for name, wanted in empty_requests(rows, torch.device("cpu"), width)._asdict().items():
        expect(name, getattr(requests, name, None), dtype=wanted.dtype, shape=wanted.shape)
    return Result(requests, history, faults, around)


def _fields(given: Inputs) -> list[str]:
    """Those that are written."""
    of_history = ("places", "cached_lens")
    return [name for name in StepRequests._fields if name not in of_history or "history" in given.arguments]


def outputs(given: Inputs, result: Result) -> list[Output]:
    count = len(given.arguments["tokens"])  # the table's rows differ in other batches
    faults = Output("faults", result.faults[given.arguments["table_rows"]])
    names = [name for name in _fields(given) if name != "table_rows"]
    return [faults, *(Output(name, getattr(result.requests, name)[:count]) for name in names)]


def compare(given: Inputs, result: Result) -> list[Difference]:
    expected = run(given, _reference)
    owners = torch.arange(len(result.requests.tokens), device=result.requests.tokens.device)
    owners[len(given.arguments["tokens"]) :] = -1
    found = [
        differs(name, getattr(result.requests, name), getattr(expected.requests, name), owners)
        for name in _fields(given)
    ]
    for name, memory, wanted in zip(StepRequests._fields, result.around, expected.around, strict=False):
        found.append(differs(f"memory around {name}", memory, wanted, torch.full_like(memory, -1, dtype=torch.int64)))
    owners = torch.full((len(expected.faults),), -1, device=expected.faults.device)
    owners[given.arguments["table_rows"]] = torch.arange(len(given.is_active), device=owners.device)
    found.append(differs("faults", result.faults, expected.faults, owners))
    if expected.history is not None:
        for name, wanted in expected.history._asdict().items():
            found.append(
                differs(f"history.{name}", getattr(result.history, name), wanted, None if name == "step" else owners)
            )
    return found


def _reference(**arguments) -> StepRequests:
    return gather_requests(**arguments, backend="reference")


def classes(given: Inputs) -> dict[str, Tensor]:
    table, rows = given.arguments["table"], given.arguments["table_rows"]
    is_guided = (table.mode[rows] != Mode.UNGUIDED) & ~table.span_ended[rows]
    found = {"guided": is_guided, "asks for lengths": table.return_values[rows], "not active": ~given.is_active}
    history = given.arguments.get("history")
    if history is None:
        return found
    lost = run(given, _reference).faults[rows] > table.faults[rows]
    return found | {"was there": history.steps[rows] == history.step - 1, "lacks a token": lost}


OPERATOR = Operator(
    name="gather_requests",
    function=gather_requests,
    options=OPTIONS,
    inputs=inputs,
    run=run,
    outputs=outputs,
    compare=compare,
    most_rows=4096,
    row_size=lambda options: 30,
    row_work=lambda options: 20,
    classes=classes,
    constants=CONSTANTS,
    free={
        "tokens": "columns apart",
        "history.tokens": "columns",
        "out.tokens": "columns",
    }
    | {f"table.{name}": "strided" for name in ops._Table._fields},
    reads={"table": ops._Table._fields},
)
