"""``ragged_layout``: requests of any length, with deltas in any order between unreferenced tokens; trees."""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case, Output
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops._calls import NamedInputs, NamedResult, exact_operator
from lenvm_kernels.fuzz.ops.expand_drafts import apart, draw_parents
from lenvm_kernels.ops.ragged_layout import ragged_layout

OPTIONS: dict[str, list[Any]] = {
    "columns": [0, 1, 2, 7, 8, 17],
    "longest": [1, 2, 70],
    "unreferenced": [0, 1, 40],
    "dtype": ["int64", "int32", "mixed"],
    "candidate_lens": ["in range", "any"],
    "parents": ["none", "tree", "chain", "any"],
    "constants": ["shipped", "small", "smallest"],
}
CONSTANTS = {"small": {"TILE": 16}, "smallest": {"TILE": 4}}  # several iterations of every loop


def _number(draws: Draws, name: str, rows: Tensor, *shape: int) -> Tensor:
    """Random 31-bit numbers from 1 on, distinct with high probability."""
    return draws.integers(name, rows, *shape, low=1, high=2**31 - 1)


def inputs(case: Case, device: torch.device) -> NamedInputs:
    """Deltas in any order, with unreferenced tokens before, between and after. Tokens and slots are distinct, so that
    any misplaced one is detected."""
    options, draws, count = case.options, case.draws(device), len(case.rows)
    rows, columns, spare = draws.rows(case.rows), options["columns"], options["unreferenced"]
    short = draws.chance("short", rows, of=0.5)
    longest = torch.where(short, min(2, options["longest"]), options["longest"])
    lens = draws.integers("delta_lens", rows, low=0, high=2**30) % (longest + 1)
    beyond = 0 if options["candidate_lens"] == "in range" else 2
    candidate_lens = draws.integers("candidate_lens", rows, low=-beyond, high=columns + beyond)

    # Requests in shuffled order; unreferenced tokens are treated as requests of one token.
    owners = torch.cat([rows, -1 - torch.arange(spare, device=device)])
    lengths = torch.cat([lens, torch.ones_like(owners[count:])])
    order = draws.bits("order", owners).argsort()
    starts = torch.empty_like(lengths)
    starts[order] = lengths[order].cumsum(0) - lengths[order]

    owner = torch.repeat_interleave(owners[order], lengths[order])
    token = torch.arange(len(owner), device=device) - torch.repeat_interleave(starts[order], lengths[order])
    token_keys = owner * 2**20 + token
    dtype = torch.int32 if options["dtype"] == "int32" else torch.int64
    arguments = {
        "delta_ids": _number(draws, "delta_ids", token_keys).to(dtype),
        "delta_slots": _number(draws, "delta_slots", token_keys).to(dtype),
        "delta_starts": starts[:count].int(),
        "delta_lens": lens.int(),
        "candidate_ids": _number(draws, "candidate_ids", rows, columns).to(dtype),
        "candidate_lens": candidate_lens.int(),
        "cached_lens": draws.integers("cached_lens", rows, low=0, high=100_000).int(),
    }
    if options["dtype"] == "int64":
        for name in ("delta_ids", "delta_slots", "candidate_ids"):
            arguments[name] += 2**40
    elif options["dtype"] == "mixed":
        arguments["candidate_ids"] = arguments["candidate_ids"].int()
    far = draws.chance("far", rows, of=0.2)
    arguments["cached_lens"] += torch.where(far, 2**31 - 100_200, 0).int()
    if options["parents"] != "none":  # with another row stride than the candidates
        arguments["candidate_parents"] = apart(draw_parents(draws, options["parents"], rows, columns), 2)
    return NamedInputs(arguments, count)


def owners_of_tokens(rows: Tensor, q_offsets: Tensor) -> Tensor:
    """The request of each row of a forward, -1 for padding."""
    row = torch.arange(len(rows), device=rows.device)
    owner = torch.searchsorted(q_offsets[1:].long(), row, right=True)
    return owner.masked_fill(owner >= len(q_offsets) - 1, -1)


def owners(given: NamedInputs) -> dict[str, Tensor]:
    layout = ragged_layout(**given.arguments, backend="reference")
    of_tokens = owners_of_tokens(layout.token_ids, layout.q_offsets)
    return dict.fromkeys(("token_ids", "positions", "slots", "parents"), of_tokens) | {
        "q_offsets": torch.arange(-1, given.rows, device=of_tokens.device),
    }


def outputs(given: NamedInputs, result: NamedResult) -> list[Output]:
    layout = result.tensors
    q_offsets, rows = layout["q_offsets"], layout["candidate_rows"]
    owners = owners_of_tokens(layout["token_ids"], q_offsets)
    relative = torch.where(rows < 0, -1, rows - q_offsets[:-1, None])
    found = [Output(name, layout[name], owners) for name in ("token_ids", "positions", "slots")]
    found.append(Output("candidate_rows from the request's first on", relative))
    if "parents" in layout:
        first_rows = q_offsets[owners]  # arbitrary for padding, which has no parents
        from_first = torch.where(layout["parents"] < 0, -1, layout["parents"] - first_rows)
        found.append(Output("parents from the request's first row on", from_first, owners))
    return found


OPERATOR = exact_operator(
    ragged_layout,
    options=OPTIONS,
    inputs=inputs,
    owners=owners,
    outputs=outputs,
    row_size=lambda options: options["longest"] + options["columns"],
    row_work=lambda options: 250,
    constants=CONSTANTS,
    free={
        "delta_ids": "int64",
        "delta_slots": "int64",
        "candidate_ids": "int64 apart",
        "candidate_parents": "apart",
    },
)
