"""``catch_up``: requests with no, some and too many missing tokens, and with slots in shuffled pages."""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.ops._calls import NamedInputs, exact_operator, owners_in_table
from lenvm_kernels.fuzz.ops._inputs import fill, slice_of_longer, to_fill
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.ops.begin_step import empty_history, empty_requests

SPARE_ROWS = 2  # table rows that no request of the batch uses
LONGEST = 70  # maximum tokens of a sequence

OPTIONS: dict[str, list[Any]] = {
    "held": [1, 2, 3, 5, 16, 64],
    "max_new": [1, 1, 2, 5],
    "page_size": [1, 4, 16],
    "padding": [0, 1, 40],  # number of dummy requests
    "out": [False, True],
    "slices": [False, True],
    "constants": ["shipped", "small"],
}
CONSTANTS = {"small": {"REQUESTS": 2}}  # several programs


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, held, page_size = len(rows), options["held"], options["page_size"]
    total = count + options["padding"]
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    lengths = draws.integers("lengths", rows, low=1, high=LONGEST)
    missing = draws.choose(
        "missing", rows, values=[-9, -1, 0, 1, 1, 2, held - options["max_new"], held - 1, held, held + 1]
    )
    cached_lens = (lengths - missing).clamp(min=0)

    requests = empty_requests(total, device)
    for x in requests:
        x.zero_()
    requests.positions[count:] = -1
    requests.table_rows[count:] = count + SPARE_ROWS  # the last row, beyond the slot table
    of_requests = {
        "positions": lengths - 1,
        "table_rows": table_rows,
        "guided": draws.chance("guided", rows, of=0.6),
        "wants_length": draws.chance("wants_length", rows, of=0.3),
        "cached_lens": cached_lens,
    }
    fill(requests, slice(count), of_requests)
    history = empty_history(count + SPARE_ROWS + 1, held, device)
    history.cached_lens.fill_(3)  # exposes writes to spare rows
    history.cached_lens[table_rows] = cached_lens.int()
    history.tokens[table_rows] = draws.choose("tokens", rows, held, values=[0, 7, 151_642, 2**31 - 1]).int()
    pages = -(-LONGEST // page_size)
    slot_table = torch.zeros(count + SPARE_ROWS, pages + 3, dtype=torch.int32, device=device)[:, :pages]
    slot_table[table_rows] = draws.choose("pages", rows, pages, values=[0, 1, 17, 2**26, 2**31 - 1]).int()
    counts = torch.zeros(total, dtype=torch.int32, device=device)
    counts[:count] = draws.choose("counts", rows, values=[0, 0, 1, 5]).int()
    arguments: dict[str, Any] = dict(history=history, requests=requests, counts=counts, slot_table=slot_table)
    if options["slices"]:
        arguments["counts"] = slice_of_longer(counts)
    arguments |= dict(page_size=page_size, max_new=options["max_new"])
    if options["out"]:
        arguments["out"] = to_fill(empty_delta(total, held, device), in_slices=options["slices"])
    return NamedInputs(arguments, count)


def owners(given: NamedInputs) -> dict[str, Tensor]:
    history, table_rows = given.arguments["history"], given.arguments["requests"].table_rows[: given.rows]
    of_table = owners_in_table(table_rows, len(history.cached_lens))
    no_row = torch.full((1,), -1, device=of_table.device)
    return {"history": of_table, "history.step": no_row, "history.uncounted": no_row}


OPERATOR = exact_operator(
    catch_up,
    options=OPTIONS,
    inputs=inputs,
    writes=("history", "out"),
    owners=owners,
    row_size=lambda options: 4 * options["held"] + LONGEST,
    row_work=lambda options: 20,
    constants=CONSTANTS,
    free={"slot_table": "rows columns apart"},
    reads={
        "history": ("tokens", "told_lens", "cached_lens"),
        "requests": ("positions", "table_rows", "guided", "wants_length", "cached_lens"),
    },
)
