"""``select_scored``: requests of every status, due or not, with and without a known next token."""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.ops._calls import NamedInputs, exact_operator
from lenvm_kernels.fuzz.ops._inputs import fill, slice_of_longer, to_fill
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, Status

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
SPARE_ROWS = 2  # table rows that no request of the batch uses


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, columns = len(rows), options["columns"]
    total = len(case.rows_and(options["padding"]))

    counts = draws.integers("counts", rows, low=0, high=columns)
    is_candidate = torch.arange(columns, device=device) < counts[:, None]
    candidates = Candidates(
        token_ids=torch.where(is_candidate, draws.integers("token_ids", rows, columns, low=0, high=9), -1).int(),
        probs=torch.zeros(count, columns, device=device),
        counts=counts.int(),
        status=draws.choose("status", rows, values=[int(status) for status in Status]).to(torch.int8),
        lost_mass=torch.zeros(count, device=device),
    )
    requests = empty_requests(total, device)
    for x in requests:
        x.fill_(1)  # exposes reads of dummy requests
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    of_requests = {
        "positions": draws.integers("positions", rows, low=0, high=100_000),
        "table_rows": table_rows,
        "wants_length": draws.chance("wants_length", rows, of=0.5),
        "due": draws.chance("due", rows, of=0.4),
    }
    fill(requests, slice(count), of_requests)
    # A slice of a wider tensor, so that rows are strided.
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
        out = empty_scored(total, columns, device)
        arguments["out"] = to_fill(out, in_slices=options["slices"])
    return NamedInputs(arguments, count)


def owners(given: NamedInputs) -> dict[str, Tensor]:
    return {"step": torch.full((1,), -1, device=given.arguments["candidates"].counts.device)}


OPERATOR = exact_operator(
    select_scored,
    options=OPTIONS,
    inputs=inputs,
    writes=("candidates.status", "step", "out"),
    owners=owners,
    row_size=lambda options: 2 * options["columns"] + 20,
    row_work=lambda options: 20,
    constants=CONSTANTS,
    free={"eos_token_ids": "rows columns apart"},
    reads={
        "candidates": ("token_ids", "counts", "status"),
        "requests": ("positions", "table_rows", "wants_length", "due"),
    },
)
