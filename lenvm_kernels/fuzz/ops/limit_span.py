"""``limit_span``: spans that begin, end or are ended by one or more tokens; no spans; EOS tokens that end spans."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Operator, dtype_of
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops import _inputs
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.guidance.fields import MAX_SPAN_ENDS
from lenvm_kernels.guidance.spans import MAX_CLOSING_TOKENS, MAX_SPAN_TOKENS, SpanPatterns, TokenSequences
from lenvm_kernels.ops import limit_span as ops
from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES, CountFrom, GuidanceColumns, TextBreak

NO_LIMIT = 2**31 - 1
OTHER_TOKEN = 4  # can only end a line
UNTOUCHED = 0.125
PAUSES = 2  # the last of the spans, which end in a pause

OPTIONS: dict[str, list[Any]] = _inputs.DRAFTS | {
    "drafts": [0, *_inputs.DRAFTS["drafts"]],  # 0: None is passed
    "tokens": ["one", "1", "3", "9"],  # columns of new tokens
    "logits": ["float32", "bfloat16", "float16", "none"],
    "vocab": [11, 600],
    "padding": [0, 5],  # between the rows of logits
    "eos": [1, 3],  # columns of the table
    "table": ["whole", "columns apart"],
    "text_breaks": [None, 4, 700],
    "slices": [False, True],
    "constants": ["shipped", "small"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, vocab, width = len(rows), options["vocab"], options["drafts"]
    new = 1 if options["tokens"] == "one" else int(options["tokens"])
    # Tokens that end spans or sequences. Some are also drafts, and some are outside the vocabulary.
    ids = [0, 3, 7, vocab - 1, vocab, vocab + 3, NO_LIMIT]
    table_rows = draws.places("table_rows", rows, _inputs.SPARE_ROWS)
    table = _table(draws, rows, table_rows, vocab, ids, options["eos"])
    # Some prompts are at least as long as the sequence.
    lengths = (table.prompt_len[table_rows] + draws.integers("generated", rows, low=-2, high=9)).clamp(min=1)
    is_id = draws.chance("is id", rows, new, of=0.6)
    per_request = {
        "tokens": torch.where(is_id, draws.choose("tokens", rows, new, values=ids), OTHER_TOKEN),
        "table_rows": table_rows,
        "lengths": lengths.int(),
    }
    if options["tokens"] != "one":
        per_request["new_lens"] = draws.integers("new_lens", rows, low=-1, high=new + 1).int()
    if options["slices"]:
        per_request = {name: _inputs.slice_of_longer(x) for name, x in per_request.items()}
    logits = None
    if options["logits"] != "none":
        logits = draws.normal("logits", rows, 1 + width, vocab) * 4
        logits = logits.masked_fill(draws.chance("-inf", rows, 1 + width, vocab, of=0.1), -math.inf)
        logits = logits.view(count * (1 + width), vocab).to(dtype_of(options, "logits"))
        logits = torch.nn.functional.pad(logits, (0, options["padding"]), value=UNTOUCHED)
        logits = (_inputs.slice_of_longer(logits) if options["slices"] else logits)[:, :vocab]
    if options["table"] == "columns apart":
        table = _inputs.columns_apart(table, ops.SpanColumns._fields)
    arguments: dict[str, Any] = {"logits": logits, "table": table, **per_request}
    if width:
        arguments["drafts"] = _inputs.draw_drafts(draws, rows, options)
    if options["text_breaks"]:
        ends = draws.choose("text_breaks", options["text_breaks"], values=[0, 0, 1, 2, 3, 66])
        missing, added = (draws.choose(f"{x} bytes", options["text_breaks"], values=[0, 0, 1, 3]) for x in "ab")
        breaks = ends | missing << MISSING_BYTES | added << ADDED_BYTES
        arguments["text_breaks"] = breaks.to(torch.int8)
    return CallInputs(arguments, count)


def _padded(lists: Sequence[Sequence[int]], size: int, device: torch.device) -> Tensor:
    return torch.tensor([[*ids, *[-2] * (size - len(ids))] for ids in lists], device=device)


def _table(draws: Draws, rows, table_rows: Tensor, vocab: int, ids: list[int], eos: int) -> GuidanceColumns:
    """A table of requests with sequences of any length, including some shorter than their prompts."""
    device, last = draws.device, vocab - 1
    # End and start sequences of requests: none, one or several, with one or several tokens. The last ends are pauses.
    spans: list[tuple[TokenSequences, TokenSequences]] = [
        ((), ()),
        (((3,),), ()),
        (((last,), (7,)), ()),
        (((3, 7),), ()),
        (((7,),), ((3,),)),
        (((3, 3), (0,)), ((7, 3),)),
        (((3, 7, 3), (vocab + 3,), (0,), (vocab,)), ((7,), (last, 3))),
        (((NO_LIMIT,), (0,)), ((vocab + 3,), (3, 0, 3))),
        (((3,),), ((7,),)),
        (((7, 3),), ((3, 7), (0,))),
    ]
    patterns = [SpanPatterns.of(*span) for span in spans]
    firsts = [[end[0] for end in ends] for ends, _ in spans[:-PAUSES]] + [[]] * PAUSES
    kind = draws.integers("span", rows, low=0, high=len(spans) - 1)
    closing = draws.choose("closing", rows, values=range(4))
    # All different within a request.
    order = draws.uniform("eos", rows, len(ids)).argsort(dim=1)[:, :eos]
    is_eos = torch.arange(eos, device=device) < draws.integers("eos ids", rows, low=0, high=eos)[:, None]
    columns = {
        "eos_token_ids": torch.where(is_eos, torch.tensor(ids, device=device)[order], -2),
        "span_end_token_ids": _padded(firsts, MAX_SPAN_ENDS, device)[kind],
        "span_token_ids": _padded([x.token_ids for x in patterns], MAX_SPAN_TOKENS, device)[kind],
        "closing_token_ids": _padded([[], [3], [5, vocab, 3, 7], [0, 3]], MAX_CLOSING_TOKENS, device)[closing],
        **{
            f"span_{name}": torch.tensor([getattr(x, name) for x in patterns], device=device)[kind]
            for name in ("first_bits", "end_bits", "start_bits")
        },
        "span_call_bits": draws.choose("call bits", rows, values=[0, 0, 1, 2, 4]),
        "hard_limit": draws.choose("hard_limit", rows, values=[1, 3, 6, 9, NO_LIMIT, NO_LIMIT]),
        "hard_limit_grace": draws.choose("grace", rows, values=[0, 0, 1, 3, 9]),
        "allows_eos": draws.chance("allows_eos", rows, of=0.3),
        "prompt_len": draws.integers("prompt_len", rows, low=0, high=20),
        "span_ended": draws.chance("span_ended", rows, of=0.3),
        "span_seen": draws.integers("span_seen", rows, low=0, high=25),
        "span_match": draws.integers("span_match", rows, low=0, high=63),
        "closing_from": draws.choose("closing_from", rows, values=[-1, -1, -1, 0, 5, 12]),
        "count_from": draws.choose("count_from", rows, values=[int(each) for each in CountFrom]),
        "span_used": draws.integers("span_used", rows, low=0, high=9),
        "missing_bytes": draws.integers("missing_bytes", rows, low=0, high=3),
        "unit": draws.choose("unit", rows, values=[0, 0, TextBreak.SENTENCE, TextBreak.WORD]),
        "target_units": draws.integers("target_units", rows, low=0, high=40),
        "units": draws.integers("units", rows, low=0, high=30),
        "in_call": draws.chance("in_call", rows, of=0.2),
    }
    table = GuidanceTable(len(table_rows) + _inputs.SPARE_ROWS, device, max_eos=eos).columns
    _inputs.fill(table, table_rows, columns, elsewhere=3)
    spare = torch.ones(len(table.mode), dtype=torch.bool, device=device)
    spare[table_rows] = False
    table.span_ended[spare] = torch.arange(_inputs.SPARE_ROWS, device=device) % 2 == 0  # exposes writes to spare rows
    return table


OPERATOR = Operator(
    function=ops.limit_span,
    options=OPTIONS,
    inputs=inputs,
    writes=(*(f"table.{name}" for name in ops.WRITTEN), "logits"),
    owners=lambda given, tensors: {
        name: _inputs.owners_of_nodes(given, x) for name, x in tensors.items() if name not in ops.WRITTEN
    },
    constants={"small": {"REQUESTS": 2}},  # several programs
    free={
        "logits": "float32 bfloat16 float16 float64 columns apart",
        "tokens": "columns apart",
        "drafts.token_ids": "int32 apart",
        "drafts.parents": "apart",
        "text_breaks": "rows",
    }
    | {f"table.{name}": "columns apart" if name in ops.LISTS else "strided" for name in ops.SpanColumns._fields},
    reads={"table": ops.SpanColumns._fields},
)
