"""``begin_step``: shuffled table rows, dummy requests, histories of many steps and tokens, drafts and spans."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Operator, Result, dtype_of, owners_at
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops import _inputs
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops import begin_step as ops
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.types import Filters, Mode, SpanNodes, StepRequests

OPTIONS: dict[str, list[Any]] = _inputs.DRAFTS | {
    "drafts": [0, 2, 1, 3, 4, 5, 7, 8, 9],
    "padding": ["no out", "0", "1", "40"],  # rows of the result beyond the requests
    "active": [False, True],
    "table": ["whole", "columns apart"],
    "tokens": ["one", "1", "3", "9"],  # columns of new tokens
    "held": [1, 4, 16],
    "step": ["no history", "1", "9", "8589934594"],  # the last is 2 if truncated to 32 bits
    "spans": [False, True],
    "filters": ["none", "each", "numbers"],
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
# The fields with a row per node; the others have a row per request.
NODE_FIELDS = StepRequests._fields[6:]


def _filters(draws: Draws, rows: Any, options: Mapping[str, Any]) -> Filters:
    drawn_rows = rows if options["filters"] == "each" else 1
    filters = Filters(
        draws.integers("top_k", drawn_rows, low=-1, high=50).int(),
        *(draws.choose(x, drawn_rows, values=[0.0, 0.25, 1.0]).float() for x in Filters._fields[1:]),
    )
    if options["filters"] == "each":
        return _inputs.columns_apart(filters, Filters._fields)
    return Filters(*(x.expand(len(rows)) for x in filters))


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count = len(rows)
    table_rows = draws.places("table_rows", rows, _inputs.SPARE_ROWS)
    table = GuidanceTable(count + _inputs.SPARE_ROWS, device, max_eos=1, max_scaled_tokens=1).columns
    columns = {
        "mode": draws.choose("mode", rows, values=[0, 0, *Mode]),
        "return_values": draws.chance("return_values", rows, of=0.5),
        "prompt_len": draws.integers("prompt_len", rows, low=0, high=100_000),
        "value_stride": draws.choose("value_stride", rows, values=[1, 1, 2, 3, 2**31 - 1, 0, -2]),
        "span_ended": draws.chance("span_ended", rows, of=0.4),
        "span_start_bits": draws.choose("span_start_bits", rows, values=[0, 0, 2, 2**30]),
        "answer_row": draws.choose("answer_row", rows, values=[-1, -1, 0, 2**31 - 1]),
        "faults": draws.integers("faults", rows, low=0, high=9),
    }
    _inputs.fill(table, table_rows, columns, elsewhere=3)
    if options["table"] == "columns apart":
        table = _inputs.columns_apart(table, [*columns])
    lengths = columns["prompt_len"] + draws.integers("generated", rows, low=0, high=3000)
    # Some sequences consist of new tokens only.
    lengths = torch.where(draws.chance("short", rows, of=0.1), draws.integers("few", rows, low=0, high=5), lengths)
    new = 1 if options["tokens"] == "one" else int(options["tokens"])
    tokens = draws.choose("tokens", rows, new, values=[0, 1, 151_642, 2**31 - 1, 2**33 + 5])
    per_request: dict[str, Any] = {
        "tokens": tokens[:, 0].contiguous() if options["tokens"] == "one" else tokens,
        "table_rows": table_rows,
        "lengths": lengths.int(),
    }
    if options["active"]:
        per_request["active"] = draws.chance("active", rows, of=0.7)
    if options["tokens"] != "one":
        per_request["new_lens"] = draws.integers("new_lens", rows, low=-1, high=new + 1).int()
    count_nodes = 1 + options["drafts"]
    drawn = draws.choose("drawn", rows, count_nodes, values=[-1, 0, 7, 2**31 - 1])
    per_request["drawn"] = drawn.to(dtype_of(options)).flatten()
    if options["slices"]:
        per_request = {name: _inputs.slice_of_longer(x) for name, x in per_request.items()}
    if options["spans"]:
        ended = draws.chance("node ended", rows, count_nodes, of=0.4)
        in_call = draws.chance("node in call", rows, count_nodes, of=0.2)
        generated = draws.integers("node generated", rows, count_nodes, low=0, high=3000)
        per_request["spans"] = SpanNodes(ended.flatten(), in_call.flatten(), generated.int().flatten())
    if options["drafts"]:
        per_request["drafts"] = _inputs.draw_drafts(draws, rows, options)
    if options["filters"] != "none":
        per_request["filters"] = _filters(draws, rows, options)
    arguments: dict[str, Any] = {"table": table, **per_request}
    arguments["padding_row"] = int(draws.integers("padding_row", 1, low=0, high=count + _inputs.SPARE_ROWS - 1))
    if options["step"] != "no history":
        step = int(options["step"])
        history = empty_history(count + _inputs.SPARE_ROWS, options["held"], device)
        history.step.fill_(step)
        history.uncounted.copy_(draws.integers("uncounted", 1, low=0, high=min(step, 5)))
        history.tokens[table_rows] = draws.integers("held", rows, options["held"], low=0, high=99).int()
        untold = draws.choose("untold", rows, values=[-1, 0, 1, 1, 2, 3, 9, 10])
        uncached = draws.choose("uncached", rows, values=[-1, 0, 1, 1, 2, 4, 5, 16, 17])
        history.passed_lens[table_rows] = (lengths - untold).clamp(min=0).int()
        history.cached_lens[table_rows] = (lengths - uncached).clamp(min=0).int()
        arguments["history"] = history
    if options["padding"] != "no out":
        out = empty_requests(count + int(options["padding"]), device, options["drafts"])
        arguments["out"] = _inputs.to_fill(out, in_slices=options["slices"])
    return CallInputs(arguments, count)


def owners(given: CallInputs, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    of_table = owners_at(given.table_rows, len(given.arguments["table"].faults))
    of_history = dict.fromkeys(("history.tokens", "history.passed_lens", "history.cached_lens"), of_table)
    return of_history | {name: _inputs.owners_of_nodes(given, x) for name, x in tensors.items() if name in NODE_FIELDS}


def by_row(given: CallInputs, tensors: Result) -> Result:
    """Without a history, cached lengths are arbitrary."""
    return {name: x for name, x in tensors.items() if name != "cached_lens" or "history" in given.arguments}


OPERATOR = Operator(
    function=ops.begin_step,
    options=OPTIONS,
    inputs=inputs,
    writes=("table.faults", "history", "out"),
    owners=owners,
    moved=("table_rows", "request_rows", "history.step", "history.uncounted"),
    by_row=by_row,
    constants={"small": {"NODES": 8}},  # several programs
    free={
        "tokens": "int32 columns apart",
        "table_rows": "int32",
        "drawn": "int32",
        "history.tokens": "columns",
        "drafts.token_ids": "int32 apart",
        "drafts.parents": "apart",
    }
    | {f"filters.{name}": "strided" for name in Filters._fields}
    | {f"table.{name}": "strided" for name in ops.GatheredColumns._fields},
    reads={"table": ops.GatheredColumns._fields},
)
