"""``lay_out``: passed deltas in any order, deltas from a history, trees, and lengths beyond the slot table."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Operator, owners_at
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops._inputs import SPARE_ROWS, apart, draw_parents, fill, slice_of_longer
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.types import DeltaTokens

BEYOND = 9  # tokens by which a sequence may exceed the slot table

OPTIONS: dict[str, list[Any]] = {
    "source": ["delta", "history"],
    "columns": [0, 1, 2, 7, 8, 17],
    "longest": [2, 1, 70],  # maximum tokens of a delta that is passed
    "held": [1, 2, 3, 5, 16, 64],
    "max_new": [1, 1, 2, 5],
    "spare": [0, 1, 40],  # number of tokens without a request, or of dummy requests
    "table_len": [70, 2000],  # the longer table has several splits
    "page_size": [1, 4, 16],
    "dtype": ["int64", "int32", "mixed"],
    "candidate_lens": ["in range", "any"],
    "parents": ["none", "tree", "chain", "any"],
    "group": [1, 3, 64],
    "kv_heads": [1, 2],
    "slices": [False, True],
    "constants": ["shipped", "small", "smallest"],
}


def _number(draws: Draws, name: str, rows: Tensor, *shape: int) -> Tensor:
    """Random 31-bit numbers from 1 on, distinct with high probability."""
    return draws.integers(name, rows, *shape, low=1, high=2**31 - 1)


def inputs(case: Case, device: torch.device) -> CallInputs:
    """Token ids are distinct, so that misplaced tokens are detected."""
    options, draws, count = case.options, case.draws(device), len(case.rows)
    rows, columns = draws.rows(case.rows), options["columns"]
    beyond = 0 if options["candidate_lens"] == "in range" else 2
    is_step = options["source"] == "history"
    dummies = options["spare"] if is_step else 0

    def with_dummies(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(dummies, *x.shape[1:])])

    candidate_ids = _number(draws, "candidate_ids", rows, columns) + (2**40 if options["dtype"] == "int64" else 0)
    candidate_lens = draws.integers("candidate_lens", rows, low=-beyond, high=columns + beyond)
    arguments: dict[str, Any] = {
        "candidate_ids": with_dummies(candidate_ids).to(torch.int64 if options["dtype"] == "int64" else torch.int32),
        "candidate_lens": with_dummies(candidate_lens.int()),
    }
    if options["parents"] != "none":  # with another row stride than the candidates
        parents = with_dummies(draw_parents(draws, options["parents"], rows, columns))
        arguments["candidate_parents"] = apart(parents, 2)

    page_size, table_rows = options["page_size"], draws.places("table_rows", rows, SPARE_ROWS)
    pages = -(-options["table_len"] // page_size)
    slot_table = torch.zeros(count + SPARE_ROWS, pages + 3, dtype=torch.int32, device=device)[:, :pages]
    slot_table[table_rows] = draws.choose("pages", rows, pages, values=[0, 1, 17, 2**26, 2**31 - 1]).int()
    arguments["slot_table"] = slot_table
    if is_step:
        arguments |= _step(draws, rows, table_rows, pages * page_size, options)
    else:
        arguments["delta"] = _delta(draws, rows, table_rows, pages * page_size, options)
    if options["slices"]:
        arguments["candidate_lens"] = slice_of_longer(arguments["candidate_lens"])
    heads = options["kv_heads"]
    arguments |= dict(page_size=page_size, num_heads=options["group"] * heads, num_kv_heads=heads)
    return CallInputs(arguments, count)


def _delta(draws: Draws, rows: Tensor, table_rows: Tensor, table_len: int, options: Mapping[str, Any]) -> DeltaTokens:
    """Deltas of requests in shuffled order, with other tokens before, between and after."""
    count = len(rows)
    short = draws.chance("short", rows, of=0.5)
    longest = torch.where(short, min(2, options["longest"]), options["longest"])
    lens = draws.integers("delta_lens", rows, low=0, high=2**30) % (longest + 1)
    owners = torch.cat([rows, -1 - torch.arange(options["spare"], device=rows.device)])
    lengths = torch.cat([lens, torch.ones_like(owners[count:])])
    order = draws.bits("order", owners).argsort()
    starts = torch.empty_like(lengths)
    starts[order] = lengths[order].cumsum(0) - lengths[order]

    owner = torch.repeat_interleave(owners[order], lengths[order])
    token = torch.arange(len(owner), device=rows.device) - torch.repeat_interleave(starts[order], lengths[order])
    token_ids = _number(draws, "delta_ids", owner * 2**20 + token) + (2**40 if options["dtype"] == "int64" else 0)
    cached_lens = draws.integers("cached_lens", rows, low=0, high=table_len + BEYOND)
    far = draws.chance("far", rows, of=0.1)
    cached_lens = torch.where(far, 2**31 - 1 - cached_lens, cached_lens)
    index = torch.int32 if options["dtype"] == "int32" else torch.int64
    table_rows = table_rows.to(index)
    return DeltaTokens(token_ids.to(index), starts[:count].int(), lens.int(), cached_lens.int(), table_rows)


def _step(draws: Draws, rows: Tensor, table_rows: Tensor, table_len: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Decoding requests with no, some and too many missing tokens, and dummy requests behind them."""
    count, held, max_new = len(rows), options["held"], options["max_new"]
    lengths = draws.integers("lengths", rows, low=1, high=table_len + BEYOND)
    missing = draws.choose("missing", rows, values=[-9, -1, 0, 1, 1, 2, held - max_new, held - 1, held, held + 1])
    cached_lens = (lengths - missing).clamp(min=0)

    requests = empty_requests(count + options["spare"], rows.device)
    for x in requests:
        x.zero_()
    requests.request_rows[count:] = count + SPARE_ROWS  # the last row, beyond the slot table
    of_requests = {
        "lengths": lengths,
        "request_rows": table_rows,
        "needs_values": draws.chance("needs_values", rows, of=0.7),
        "cached_lens": cached_lens,
    }
    fill(requests, slice(count), of_requests)
    history = empty_history(count + SPARE_ROWS + 1, held, rows.device)
    history.cached_lens.fill_(3)  # exposes writes to spare rows
    history.cached_lens[table_rows] = cached_lens.int()
    history.tokens[table_rows] = _number(draws, "tokens", rows, held).int()
    return dict(requests=requests, history=history, max_new=max_new)


def owners_of_tokens(rows: Tensor, q_offsets: Tensor) -> Tensor:
    """The request of each row of a forward, -1 for padding."""
    row = torch.arange(len(rows), device=rows.device)
    owner = torch.searchsorted(q_offsets[1:].long(), row, right=True)
    return owner.masked_fill(owner >= len(q_offsets) - 1, -1)


def owners(given: CallInputs, layout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    q_offsets = layout["q_offsets"]
    of_tokens = owners_of_tokens(layout["token_ids"], q_offsets)
    found = dict.fromkeys(("token_ids", "positions", "slots", "parents"), of_tokens)
    if "history" in given.arguments:
        of_history = owners_at(given.arguments["requests"].request_rows[: given.rows], len(layout["history.tokens"]))
        found |= dict.fromkeys(("history.tokens", "history.passed_lens", "history.cached_lens"), of_history)
    return found


def by_row(given: CallInputs, layout: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of candidates and parents from the request's first row on."""
    q_offsets, rows = layout["q_offsets"], layout["candidate_rows"]
    found = layout | {"candidate_rows": torch.where(rows < 0, -1, rows - q_offsets[:-1, None])}
    if "parents" in layout:
        first_rows = q_offsets[owners_of_tokens(layout["token_ids"], q_offsets)]  # arbitrary for padding
        found["parents"] = torch.where(layout["parents"] < 0, -1, layout["parents"] - first_rows)
    return found


OPERATOR = Operator(
    function=lay_out,
    options=OPTIONS,
    inputs=inputs,
    writes=("history",),
    owners=owners,
    moved=("q_offsets", "plan", "counters", "history.step", "history.uncounted"),
    by_row=by_row,
    row_work=lambda options: 300,
    constants={"small": {"TILE": 16}, "smallest": {"TILE": 4}},  # several iterations of every loop
    free={
        "candidate_ids": "int64 apart",
        "delta.token_ids": "int64 rows",
        "delta.table_rows": "int64",
        "candidate_parents": "apart",
        "slot_table": "rows columns apart",
        "history.tokens": "columns",
    },
    reads={
        "history": ("tokens", "cached_lens"),
        "requests": ("lengths", "request_rows", "needs_values", "cached_lens"),
    },
)
