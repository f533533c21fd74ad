"""``gather_requests``: shuffled table rows, dummy requests, histories of many steps and tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.ops._calls import NamedInputs, exact_operator, owners_in_table
from lenvm_kernels.fuzz.ops._inputs import fill, slice_of_longer, to_fill
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops import gather_requests as ops
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests
from lenvm_kernels.types import Mode

SPARE_ROWS = 3  # table rows that no request of the batch uses

OPTIONS: dict[str, list[Any]] = {
    "padding": ["no out", "0", "1", "40"],  # rows of the result beyond the requests
    "active": [False, True],
    "table": ["whole", "columns apart"],
    "tokens": ["one", "1", "3", "9"],  # columns of new tokens
    "held": [1, 4, 16],
    "step": ["no history", "1", "9", "8589934594"],  # the last one is 2 if truncated to 32 bits
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 4}}  # several programs


def _strided(x: Tensor, more: int) -> Tensor:
    """The same numbers with stride ``1 + more``, and ones between."""
    return torch.cat([x[:, None], torch.ones_like(x)[:, None].expand(-1, more)], dim=1)[:, 0]


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count = len(rows)
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    table = GuidanceTable(count + SPARE_ROWS, device, max_eos=1, max_scaled_tokens=1).columns
    columns = {
        "mode": draws.choose("mode", rows, values=[0, 0, *Mode]),
        "return_values": draws.chance("return_values", rows, of=0.5),
        "entropy_threshold": draws.choose("entropy_threshold", rows, values=[math.nan, -1.0, 0.0, 0.7]),
        "prompt_len": draws.integers("prompt_len", rows, low=0, high=100_000),
        "value_stride": draws.choose("value_stride", rows, values=[1, 1, 2, 3, 2**31 - 1, 0, -2]),
        "span_ended": draws.chance("span_ended", rows, of=0.4),
        "span_start_bits": draws.choose("span_start_bits", rows, values=[0, 0, 2, 2**30]),
        "faults": draws.integers("faults", rows, low=0, high=9),
    }
    fill(table, table_rows, columns, elsewhere=3)
    if options["table"] == "columns apart":  # each with a different stride
        table = table._replace(**{name: _strided(getattr(table, name), i) for i, name in enumerate(columns)})
    lengths = columns["prompt_len"] + draws.integers("generated", rows, low=0, high=3000)
    # Some sequences are no longer than their new tokens.
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
    arguments: dict[str, Any] = {"table": table, **per_request}
    arguments["padding_row"] = int(draws.integers("padding_row", 1, low=0, high=count + SPARE_ROWS - 1))
    if options["step"] != "no history":
        step = int(options["step"])
        history = empty_history(count + SPARE_ROWS, options["held"], device)
        history.step.fill_(step)
        history.uncounted.copy_(draws.integers("uncounted", 1, low=0, high=min(step, 5)))
        history.tokens[table_rows] = draws.integers("held", rows, options["held"], low=0, high=99).int()
        untold = draws.choose("untold", rows, values=[-1, 0, 1, 1, 2, 3, 9, 10])
        uncached = draws.choose("uncached", rows, values=[-1, 0, 1, 1, 2, 4, 5, 16, 17])
        history.told_lens[table_rows] = (lengths - untold).clamp(min=0).int()
        history.cached_lens[table_rows] = (lengths - uncached).clamp(min=0).int()
        arguments["history"] = history
    if options["padding"] != "no out":
        out = empty_requests(count + int(options["padding"]), device)
        arguments["out"] = to_fill(out, in_slices=options["slices"])
    return NamedInputs(arguments, count)


def owners(given: NamedInputs) -> dict[str, Tensor]:
    table, table_rows = given.arguments["table"], given.arguments["table_rows"]
    of_table = owners_in_table(table_rows, len(table.faults))
    no_row = torch.full((1,), -1, device=of_table.device)
    return {"faults": of_table, "history": of_table, "history.step": no_row, "history.uncounted": no_row}


OPERATOR = exact_operator(
    ops.gather_requests,
    options=OPTIONS,
    inputs=inputs,
    writes=("table.faults", "history", "out"),
    owners=owners,
    moved=("table_rows",),
    unwritten=lambda given: () if "history" in given.arguments else ("cached_lens",),
    row_size=lambda options: 30,
    row_work=lambda options: 20,
    constants=CONSTANTS,
    free={
        "tokens": "columns apart",
        "history.tokens": "columns",
    }
    | {f"table.{name}": "strided" for name in ops.GatheredColumns._fields},
    reads={"table": ops.GatheredColumns._fields},
)
