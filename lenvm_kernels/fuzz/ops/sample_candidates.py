"""``sample_candidates``: every status, zeros, ties, sums far from 1, any int64 as seed and position."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.ops._calls import NamedInputs, exact_operator
from lenvm_kernels.fuzz.ops._inputs import padded_rows
from lenvm_kernels.ops._common import INTERPRETED
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.types import Candidates, Status

OPTIONS: dict[str, list[Any]] = {
    "columns": [1, 2, 4, 8, 16, 32, 64],
    "probs": ["normal", "ties", "peaked"],
    "sums": ["one", "any", "broken"],
    "positions": ["int32", "int64"],
    "temperature": [False, True],
    "padding": [0, 3],
    "constants": ["shipped", "large"],
}
# The interpreter takes as long for a tile of 8,192 rows as for one of 32; a compiler would take minutes.
CONSTANTS = {"large": {"TILE": 8192 if INTERPRETED else 64}}
_SPREAD = {"normal": 1.0, "ties": 0.0, "peaked": 8.0}


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    k = options["columns"]
    p = torch.softmax(draws.normal("probs", rows, k) * _SPREAD[options["probs"]], dim=1)
    zeros = draws.choose("share of zeros", rows, values=[0.0, 0.0, 0.5, 0.95])[:, None]
    p = torch.where(draws.uniform("zeros", rows, k) < zeros, 0.0, p).float()
    factors = {"one": [1.0], "any": [1.0, 0.3, 1e-44, 1e30], "broken": [1.0, math.inf, math.nan, -1.0]}
    p = p * draws.choose("factor", rows, values=factors[options["sums"]]).float()[:, None]  # 0 * inf: NaN
    seeds, positions = (
        draws.bits(name, rows) >> draws.choose(f"width of {name}", rows, values=[0, 31, 32, 50])
        for name in ("seeds", "positions")
    )
    if options["positions"] == "int32":
        positions = (positions & 0x7FFFFFFF).int()
    status = draws.choose("status", rows, values=[int(s) for s in (Status.GUIDE, *Status)]).to(torch.int8)
    temperature = None
    if options["temperature"]:
        temperature = draws.choose("temperature", rows, values=[1.0, 0.0, 1e-7, 1e-6, math.nan]).float()
    candidates = Candidates(
        token_ids=draws.integers("token_ids", rows, k, low=0, high=2**31 - 1).int(),
        probs=draws.uniform("candidates.probs", rows, k).float(),  # not used by the draw
        counts=torch.full_like(positions, k).int(),
        status=status,
        lost_mass=torch.zeros_like(p[:, 0]),
    )
    p = padded_rows(p, options["padding"], value=1.0)
    of_rows = dict(candidates=candidates, guided_probs=p, seeds=seeds, positions=positions, temperature=temperature)
    return NamedInputs(of_rows, len(rows))


def _row_work(options: Mapping[str, Any]) -> float:
    rows = CONSTANTS["large"]["TILE"] if options["constants"] == "large" else 32  # per program
    return (250 + 16 * options["columns"]) / rows


# The order of the fp32 sums is defined, so draws are bitwise identical to the reference.
OPERATOR = exact_operator(
    sample_candidates,
    options=OPTIONS,
    inputs=inputs,
    returns=lambda given: {"tokens": (torch.int32, given.arguments["candidates"].status.shape)},
    most_rows=65_536,
    row_size=lambda options: 8 * options["columns"],
    row_work=_row_work,
    constants=CONSTANTS,
    free={"guided_probs": "float64 apart", "positions": "int32"},
    reads={"candidates": ("token_ids", "status")},
)
