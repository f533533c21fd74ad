"""``value_head``: hidden states in any row order with padding, with and without the final RMSNorm."""

import math
from typing import Any

import torch

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, dtype_of
from lenvm_kernels.fuzz.ops._inputs import in_fp64, padded_rows, poisoned
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.reference._common import sums_of_squares

EPS = 1e-6
SPARE_ROWS = 2  # unreferenced rows of hidden

OPTIONS: dict[str, list[Any]] = {
    "size": [64, 80, 96, 100, 576],
    "dtype": ["float32", "bfloat16", "float16"],
    "norm": [False, True],
    "norm_eps": [EPS, 0.1],
    "square_sums": [False, True],  # square_sums and rows_not_there only with a norm
    "fp32_vectors": [False, True],
    "row_padding": [0, 16, 3],
    "token_rows": ["none", "int32", "int64"],
    "rows_not_there": ["none", "0", "3"],
    "broken": [False, True],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    size, padding, dtype = options["size"], options["row_padding"], dtype_of(options)
    vector_dtype = torch.float32 if options["fp32_vectors"] else dtype

    def normal(name, rows, columns, scale=1.0, dtype=dtype):
        return (draws.normal(name, rows, columns) * scale).to(dtype)

    hidden = normal("hidden", rows, size + padding)
    # Scaled so that logits are O(1).
    arguments: dict[str, Any] = {
        "fc_weight": normal("fc_weight", size, size + padding // 3, size**-0.5)[:, :size],
        "fc_bias": normal("fc_bias", 1, size, 0.1, vector_dtype)[0],
        "summary_weight": normal("summary_weight", 1, size, 2 * size**-0.5, vector_dtype),
        "summary_bias": normal("summary_bias", 1, 1, dtype=vector_dtype)[0],
    }
    if options["broken"]:
        hidden[:, :size] = poisoned(draws, rows, hidden[:, :size], of=0.2)
    if options["token_rows"] != "none":
        places = draws.places("token_rows", rows, SPARE_ROWS)
        hidden = hidden.new_full((len(rows) + SPARE_ROWS, size + padding), math.nan).index_copy(0, places, hidden)
        nowhere = draws.choose("nowhere", rows, values=[-1, -7, len(hidden), 2**31 - 1])
        places = torch.where(draws.chance("is padding", rows, of=0.2), nowhere, places)
        arguments["token_rows"] = places.to(getattr(torch, options["token_rows"]))
    # Passed only with a norm, so that a kernel without norm (examples/fuzz_own_kernel.py) needs no such parameters.
    if options["norm"] and options["rows_not_there"] != "none":
        arguments["num_rows"] = torch.tensor([len(hidden)], dtype=torch.int32, device=device)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, int(options["rows_not_there"])), value=math.nan)
    hidden = arguments["hidden"] = hidden[:, :size]
    if options["norm"]:
        arguments["norm_eps"] = options["norm_eps"]
    if options["norm"] and options["square_sums"]:
        arguments["square_sums"] = padded_rows(sums_of_squares(hidden.double()).float(), padding)
    return CallInputs(arguments, len(rows))


def compare(given: CallInputs, result: Result) -> list[Difference]:
    tolerance, rows = TOLERANCE["value_head"][given.arguments["hidden"].dtype], given.rows
    expected = value_head(**in_fp64(given.arguments), backend="reference")
    return [beyond("logits", result["logits"][:rows], expected[:rows], tolerance)]


OPERATOR = Operator(
    function=value_head,
    options=OPTIONS,
    inputs=inputs,
    returns=("logits",),
    compare=compare,
    row_work=lambda options: 1 + options["size"] ** 2 / 6400,
    free={
        "hidden": "apart",
        "fc_weight": "apart",
        **dict.fromkeys(("fc_bias", "summary_bias"), "bfloat16"),
        "summary_weight": "bfloat16 apart",
        "token_rows": "int32 rows",
        "square_sums": "float64 apart",
    },
)
