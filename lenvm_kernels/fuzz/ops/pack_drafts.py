"""``pack_drafts``: candidates at all, some or no nodes, with and without equal drafts, and with equal siblings."""

from typing import Any

import torch

from lenvm_kernels.fuzz.case import CallInputs, Case, Operator
from lenvm_kernels.fuzz.ops import _inputs
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts
from lenvm_kernels.types import ScoredCandidates

OPTIONS: dict[str, list[Any]] = _inputs.DRAFTS | {
    "columns": [1, 2, 4, 8],
    "padding": ["no out", "0", "1", "5"],  # requests beyond the requests with drafts
    "slices": [False, True],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws = case.options, case.draws(device)
    rows, columns, nodes = _inputs.rows_and(case, options["padding"]), options["columns"], 1 + options["drafts"]
    count = len(case.rows)
    drafts = _inputs.draw_drafts(draws, case.rows, options)

    # Tokens at a constant step through the vocabulary, so that the candidates of a node are different.
    vocabulary = torch.tensor(_inputs.VOCABULARY, dtype=torch.int32, device=device)
    first, step = (draws.integers(x, rows, nodes, low=1, high=len(vocabulary) - 1) for x in ("first", "step"))
    place = first[..., None] + step[..., None] * torch.arange(columns, device=device)
    token_ids = vocabulary[place % len(vocabulary)]
    counts = draws.integers("counts", rows, nodes, low=0, high=columns)
    counts = torch.where(draws.chance("not scored", rows, nodes, of=0.3), 0, counts)
    counts = torch.where(draws.chance("nothing scored", rows, of=0.2)[:, None], 0, counts)
    # No candidates are scored at absent nodes.
    counts[:count, 1:] *= (drafts.token_ids >= 0).cumprod(dim=1)
    counts[count:, 1:] = 0
    positions = draws.integers("positions", rows, nodes, low=0, high=100_000)
    alone = draws.chance("alone", rows, nodes, of=0.5)
    flat = [token_ids.flatten(0, 1), counts.flatten().int(), positions.flatten().int(), alone.flatten()]
    if options["slices"]:
        flat = [_inputs.slice_of_longer(x) for x in flat]
    arguments: dict[str, Any] = {"scored": ScoredCandidates(*flat), "drafts": drafts}
    if options["padding"] != "no out":
        out = empty_trees(len(rows), options["drafts"], columns, device)
        arguments["out"] = _inputs.to_fill(out, in_slices=options["slices"])
    return CallInputs(arguments, count)


OPERATOR = Operator(
    function=pack_drafts,
    options=OPTIONS,
    inputs=inputs,
    writes=("out",),
    owners=lambda given, trees: {"columns": _inputs.owners_of_nodes(given, trees["columns"])},
    free={"drafts.token_ids": "int32 apart", "drafts.parents": "apart"},
    reads={"scored": ("token_ids", "counts", "table_rows", "positions")},
)
