"""``limit_span``: open and ended spans, none, prompts with their end tokens, ends of sequence that end spans, too."""

import math
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.calls import Inputs, exact_operator, owners_in_table
from lenvm_kernels.fuzz.case import Case, dtype_of, fill, slice_of_longer
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops.expand_drafts import DRAFTS, draw_drafts
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.guidance.fields import MAX_SPAN_ENDS
from lenvm_kernels.ops import limit_span as ops
from lenvm_kernels.types import GuidanceColumns

SPARE_ROWS = 3  # of the table, which no request of the batch has
NO_LIMIT = 2**31 - 1
OTHER_TOKEN = 4  # ends nothing
UNTOUCHED = 0.125

OPTIONS: dict[str, list[Any]] = DRAFTS | {
    "drafts": [0, *DRAFTS["drafts"]],  # 0: the function is given none
    "tokens": ["one", "1", "3", "9"],  # columns of the new ones
    "logits": ["float32", "bfloat16", "float16", "none"],
    "vocab": [11, 600],
    "padding": [0, 5],  # between the rows of logits
    "eos": [1, 3],  # columns of the table
    "table": ["whole", "columns apart"],
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 2}}  # several programs


def inputs(case: Case, device: torch.device) -> Inputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, vocab, width = len(rows), options["vocab"], options["drafts"]
    new = 1 if options["tokens"] == "one" else int(options["tokens"])
    # Tokens that end something, some of which are drafts, too, and some beyond the vocabulary.
    ids = [0, 3, 7, vocab - 1, vocab, vocab + 3, NO_LIMIT]
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    table, prompt_len = _table(draws, rows, table_rows, ids, options["eos"])
    # Some prompts are as long as the sequence, or longer.
    lengths = (prompt_len + draws.integers("generated", rows, low=-2, high=9)).clamp(min=1)
    is_id = draws.chance("is id", rows, new, of=0.3)
    per_request = {
        "tokens": torch.where(is_id, draws.choose("tokens", rows, new, values=ids), OTHER_TOKEN),
        "table_rows": table_rows,
        "lengths": lengths.int(),
    }
    if options["tokens"] != "one":
        per_request["new_lens"] = draws.integers("new_lens", rows, low=-1, high=new + 1).int()
    if options["slices"]:
        per_request = {name: slice_of_longer(x) for name, x in per_request.items()}
    logits = None
    if options["logits"] != "none":
        logits = draws.normal("logits", rows, 1 + width, vocab) * 4
        logits = logits.masked_fill(draws.chance("-inf", rows, 1 + width, vocab, of=0.1), -math.inf)
        logits = logits.view(count * (1 + width), vocab).to(dtype_of(options, "logits"))
        logits = torch.nn.functional.pad(logits, (0, options["padding"]), value=UNTOUCHED)
        logits = (slice_of_longer(logits) if options["slices"] else logits)[:, :vocab]
    columns = _apart(table.columns) if options["table"] == "columns apart" else table.columns
    arguments: dict[str, Any] = {"logits": logits, "table": columns, **per_request}
    if width:
        arguments["drafts"] = draw_drafts(draws, rows, options)
    return Inputs(arguments, count)


def _table(draws: Draws, rows, table_rows: Tensor, ids: list[int], eos: int) -> tuple[GuidanceTable, Tensor]:
    """A table, and the prompt lengths of its requests."""
    device = draws.device

    def listed(tokens: Tensor, lens: Tensor) -> Tensor:
        return torch.where(torch.arange(tokens.shape[1], device=device) < lens[:, None], tokens, -2)

    # Those of a request are different ones.
    order = draws.uniform("eos", rows, len(ids)).argsort(dim=1)[:, :eos]
    columns = {
        "eos_token_ids": listed(
            torch.tensor(ids, device=device)[order], draws.integers("eos ids", rows, low=0, high=eos)
        ),
        "span_end_token_ids": listed(
            draws.choose("ends", rows, MAX_SPAN_ENDS, values=ids),
            draws.choose("ends of a span", rows, values=[0, 1, 1, 2, MAX_SPAN_ENDS]),
        ),
        "hard_limit": draws.choose("hard_limit", rows, values=[1, 3, 6, 9, NO_LIMIT, NO_LIMIT]),
        "prompt_len": draws.integers("prompt_len", rows, low=0, high=20),
        "allows_eos": draws.chance("allows_eos", rows, of=0.3),
        "span_ended": draws.chance("span_ended", rows, of=0.2),
    }
    table = GuidanceTable(len(table_rows) + SPARE_ROWS, device, max_eos=eos)
    fill(table, table_rows, columns, elsewhere=3)
    spare = torch.ones(len(table), dtype=torch.bool, device=device)
    spare[table_rows] = False
    table.span_ended[spare] = torch.arange(SPARE_ROWS, device=device) % 2 == 0  # what writes them shows
    return table, columns["prompt_len"]


def _apart(table: GuidanceColumns) -> GuidanceColumns:
    """The columns that are read, each in memory of its own and with a stride of its own."""
    read = {}
    for i, name in enumerate(("hard_limit", "prompt_len", "allows_eos", "span_ended")):
        column = getattr(table, name)[:, None]
        read[name] = torch.cat([column, *[torch.ones_like(column)] * i], dim=1)[:, 0]
    for name in ("eos_token_ids", "span_end_token_ids"):
        column = getattr(table, name)
        read[name] = torch.nn.functional.pad(column, (0, 1), value=3)[:, : column.shape[1]]
    return table._replace(**read)


def owners(given: Inputs) -> dict[str, Tensor]:
    table, table_rows, drafts = (given.arguments.get(name) for name in ("table", "table_rows", "drafts"))
    assert table is not None and table_rows is not None
    of_nodes = torch.arange(given.rows, device=table_rows.device)
    of_nodes = of_nodes.repeat_interleave(1 + (0 if drafts is None else drafts.token_ids.shape[1]))
    return {
        "ended": of_nodes,
        "logits": of_nodes,
        "span_ended": owners_in_table(table_rows, len(table.span_ended)),
    }


def classes(given: Inputs) -> dict[str, Tensor]:
    table, table_rows = given.arguments["table"], given.arguments["table_rows"]
    has_span = table.span_end_token_ids[table_rows, 0] >= 0
    result = OPERATOR.expected(given).tensors
    ended = result["span_ended"][table_rows]
    was_ended = table.span_ended[table_rows]
    found = {"no span": ~has_span, "open span": has_span & ~ended, "span ends": has_span & ended & ~was_ended}
    if "logits" in result:
        changed = (result["logits"] - given.arguments["logits"]).nan_to_num(0.0).view(len(table_rows), -1)
        found |= {"end forced": (changed > 1).any(1), "end of sequence excluded": (changed < -1).any(1)}
    return found


OPERATOR = exact_operator(
    ops.limit_span,
    options=OPTIONS,
    inputs=inputs,
    returns=lambda given: {"ended": (torch.bool, owners(given)["ended"].shape)},
    writes=("table.span_ended", "logits"),
    owners=owners,
    row_size=lambda options: (1 + options["drafts"]) * (options["vocab"] + options["padding"]),
    row_work=lambda options: 60 + 15 * options["drafts"],
    classes=classes,
    constants=CONSTANTS,
    free={
        "logits": "float32 bfloat16 float16 float64 columns apart",
        "tokens": "columns apart",
        "drafts.token_ids": "int32 apart",
        "drafts.parents": "apart",
        "table.eos_token_ids": "columns apart",
        "table.span_end_token_ids": "columns apart",
    }
    | {f"table.{name}": "strided" for name in ops._Table._fields[2:]},
    reads={"table": ops._Table._fields},
)
