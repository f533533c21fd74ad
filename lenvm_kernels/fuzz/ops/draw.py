"""``draw``: the cases of ``reweight_scatter`` with any int64 as seed, greedy requests, scored and passed tokens."""

import math
from dataclasses import replace
from typing import Any

import torch

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, differs, owners_at
from lenvm_kernels.fuzz.ops import reweight_scatter as weights
from lenvm_kernels.fuzz.ops._inputs import fill, padded_rows
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops._common import INTERPRETED
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.draw import DrawColumns, draw
from lenvm_kernels.reference.draw import draw_tokens
from lenvm_kernels.types import ScoredCandidates

OPTIONS: dict[str, list[Any]] = {
    **{name: values for name, values in weights.OPTIONS.items() if name not in ("table_rows", "generated")},
    "predicted": [False, True],
    "drawn": [False, True],
    "sample": [True, False],
    "greedy": [False, True],
    "constants": ["shipped", "large tiles"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    of_weights = replace(case, options={**options, "table_rows": "int64", "generated": True})
    arguments = weights.inputs(of_weights, device).arguments
    candidates, table, k = arguments["candidates"], arguments["table"], options["columns"]
    table_rows, generated = arguments.pop("table_rows"), arguments.pop("generated")
    arguments.pop("probs", None)
    seeds, positions = (
        draws.bits(name, rows) >> draws.choose(f"width of {name}", rows, values=[0, 31, 32, 50])
        for name in ("seeds", "positions")
    )
    wants_length = draws.chance("wants_length", rows, of=0.8)
    fill(table, table_rows, {"seed": seeds, "return_values": draws.chance("return_values", rows, of=0.8)})

    column = draws.integers("drawn column", rows, 1, low=0, high=k - 1)
    drawn = draws.choose("drawn", rows, values=[-1, -2, 0, 5]).int()
    drawn = torch.where(draws.chance("a candidate", rows, of=0.5), candidates.token_ids.gather(1, column)[:, 0], drawn)
    # A token that is scored alone is in the first column, and need not be a candidate.
    alone = draws.chance("alone", rows, of=0.3) & (drawn >= 0)
    first = torch.where(alone, drawn, candidates.token_ids[:, 0])
    all_scored = draws.chance("all are scored", rows, of=0.7)
    scored_counts = torch.where(all_scored, candidates.counts, candidates.counts // 2).masked_fill(alone, 1)

    requests = empty_requests(len(rows), device)
    of_requests = dict(table_rows=table_rows, generated=generated, wants_length=wants_length)
    of_requests["greedy"] = draws.chance("greedy", rows, of=0.3) & options["greedy"]
    fill(requests, slice(None), of_requests)
    scored = ScoredCandidates(
        token_ids=torch.cat((first[:, None], candidates.token_ids[:, 1:]), dim=1),
        counts=scored_counts.int(),
        positions=(positions & 0x7FFFFFFF).int(),
        alone=alone,
    )

    arguments |= dict(requests=requests, scored=scored, sample=options["sample"])
    if options["predicted"]:
        spread = draws.choose("spread of predicted", rows, values=[1.0, 10.0, 60.0])[:, None]
        arguments["predicted"] = padded_rows((draws.normal("predicted", rows, k) * spread).float(), options["padding"])
    if options["drawn"]:
        arguments["drawn"] = drawn
    return CallInputs(arguments, len(rows))


def compare(given: CallInputs, result: Result) -> list[Difference]:
    a, rows = given.arguments, given.arguments["requests"]
    candidates, scored = a["candidates"], a["scored"]
    shared = {name: a[name] for name in ("candidates", "value_logits", "table", "text_breaks") if name in a}
    of_weights = weights.Requests.of(rows.table_rows, **shared, generated=rows.generated)
    guided_probs, tokens, lengths, faults = result.values()
    found = weights.compare_guided(of_weights, guided_probs, rows.table_rows, faults)
    table = of_weights.table

    # The draw from given probabilities is exact.
    passed = a.get("drawn", torch.full_like(tokens, -1))
    expected = passed
    if a["sample"]:
        own = draw_tokens(candidates, guided_probs, table.seed, scored.positions, rows.greedy)
        expected = torch.where(own >= 0, own, passed)
    found.append(differs("tokens", tokens, expected))

    column = torch.arange(candidates.probs.shape[1], device=tokens.device)
    is_token = (column < scored.counts[:, None]) & (scored.token_ids == tokens[:, None])
    z = torch.where(is_token, a.get("predicted", of_weights.value_logits).double(), 0.0).sum(1)
    nats = torch.nn.functional.softplus(z).masked_fill((table.eos_token_ids == tokens[:, None]).any(1), 0.0)
    is_wanted = rows.wants_length & table.return_values & is_token.any(1)
    expected = torch.where(is_wanted, nats / table.nats_per_token.double(), math.nan)
    found.append(beyond("remaining lengths", lengths, expected, TOLERANCE["draw"][torch.float32]))
    return found


OPERATOR = Operator(
    function=draw,
    options=OPTIONS,
    inputs=inputs,
    compare=compare,
    writes=("table.faults",),
    owners=lambda given, tensors: {"faults": owners_at(given.arguments["requests"].table_rows, len(tensors["faults"]))},
    most_rows=lambda options: min(65_536, 2**26 // (40 * options["columns"])),
    row_work=lambda options: weights.row_work({**options, "constants": "shipped"}) + 6 * options["columns"],
    constants={"large tiles": {"TILE": 8192 if INTERPRETED else 128}},
    free={name: what for name, what in weights.FREE.items() if name != "probs"}
    | {
        "predicted": "float64 apart",
        "table.eos_token_ids": "columns apart",
        **dict.fromkeys(("table.seed", "table.return_values"), "strided"),
    },
    reads={
        "candidates": weights.READS,
        "table": DrawColumns._fields,
        "requests": ("table_rows", "generated", "wants_length", "greedy"),
        "scored": ("token_ids", "counts", "positions"),
    },
)
