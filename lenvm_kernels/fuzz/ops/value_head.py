"""``value_head``: hidden states in any row order with padding, with and without the final RMSNorm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.fuzz.case import Case, Difference, Operator, Output, beyond, dtype_of, expect
from lenvm_kernels.fuzz.ops._calls import NamedInputs
from lenvm_kernels.fuzz.ops._inputs import poisoned
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.reference._common import sums_of_squares

EPS = 1e-6
SPARE_ROWS = 2  # unreferenced rows of hidden

# Use the tiles for a large H at any H, and those for many rows at any number of rows.
CONSTANTS = {"wide tiles": {"WIDE_FROM": 0}, "tiles of many rows": {"FEW_OUTPUTS": 0}}

OPTIONS: dict[str, list[Any]] = {
    "size": [64, 80, 96, 100, 576],
    "dtype": ["float32", "bfloat16", "float16"],
    "norm": [False, True, "folded"],  # folded: its weight is folded into the matmul's
    "norm_eps": [EPS, 0.1],
    "square_sums": [False, True],
    "targets": [False, True],
    "fp32_vectors": [False, True],
    "row_padding": [0, 16, 3],
    "token_rows": ["none", "int32", "int64"],
    "broken": [False, True],
    "constants": ["shipped", *CONSTANTS],
}


def inputs(case: Case, device: torch.device) -> NamedInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    size, padding, dtype = options["size"], options["row_padding"], dtype_of(options)
    vector_dtype = torch.float32 if options["fp32_vectors"] else dtype

    def normal(name, rows, columns, scale=1.0, dtype=dtype):
        return (draws.normal(name, rows, columns) * scale).to(dtype)

    hidden = normal("hidden", rows, size + padding)[:, :size]
    # Scaled so that logits are O(1).
    arguments: dict[str, Any] = {
        "hidden": hidden,
        "fc_weight": normal("fc_weight", size, size + padding // 3, size**-0.5)[:, :size],
        "fc_bias": normal("fc_bias", 1, size, 0.1, vector_dtype)[0],
        "summary_weight": normal("summary_weight", 1, size, 2 * size**-0.5, vector_dtype),
        "summary_bias": normal("summary_bias", 1, 1, dtype=vector_dtype)[0],
    }
    if options["norm"] is True:
        arguments["norm_weight"] = 1 + normal("norm_weight", 1, size, 0.5, vector_dtype)[0]
    if options["broken"]:
        hidden.copy_(poisoned(draws, rows, hidden, of=0.2))
    if options["token_rows"] != "none":
        places = draws.places("token_rows", rows, SPARE_ROWS)
        wider = torch.full((len(rows) + SPARE_ROWS, hidden.stride(0)), float("nan"), dtype=hidden.dtype, device=device)
        arguments["hidden"] = wider[:, :size]
        arguments["hidden"][places] = hidden
        nowhere = draws.choose("nowhere", rows, values=[-1, -7, len(wider), 2**31 - 1])
        places = torch.where(draws.chance("is padding", rows, of=0.2), nowhere, places)
        arguments["token_rows"] = places.to(getattr(torch, options["token_rows"]))
    # Passed only with a norm, so that a kernel without norm (examples/fuzz_own_kernel.py) needs no such parameters.
    if options["norm"] == "folded" or (options["norm"] and options["square_sums"]):
        sums = square_sums_of(arguments["hidden"])
        arguments["square_sums"] = F.pad(sums, (0, padding), value=float("nan"))[:, : sums.shape[1]]
    if options["norm"]:
        arguments["norm_eps"] = options["norm_eps"]
    if options["norm"] and options["targets"]:
        integers = torch.int64 if options["token_rows"] == "int32" else torch.int32
        arguments["targets"] = draws.places("targets", rows).to(integers)
    return NamedInputs(arguments, len(rows))


def square_sums_of(hidden: Tensor) -> Tensor:
    """The argument ``square_sums``, as another operator computes it."""
    return sums_of_squares(hidden.double()).float()


def run(given: NamedInputs, function) -> Tensor:
    """The logits in the order of the rows, for any targets."""
    arguments = given.arguments
    rows = arguments.get("token_rows", arguments["hidden"][:, 0])
    logits = expect("logits", function(**arguments), dtype=torch.float32, shape=rows.shape)
    return logits[arguments["targets"].long()] if "targets" in arguments else logits


def outputs(given: NamedInputs, logits: Tensor) -> list[Output]:
    return [Output("logits", logits)]


def compare(given: NamedInputs, logits: Tensor) -> list[Difference]:
    """Compare with the reference. With a norm, operands may be rounded as in the kernel, or not at all."""
    arguments = {name: x for name, x in given.arguments.items() if name != "targets"}
    tolerance = TOLERANCE["value_head"][arguments["hidden"].dtype]
    difference = beyond("logits", logits, exact(**arguments), tolerance)
    if "norm_weight" in arguments:
        doubles = {name: x.double() for name, x in arguments.items() if torch.is_tensor(x) and x.is_floating_point()}
        plain = value_head(**arguments | doubles, backend="reference")
        unrounded = beyond("logits", logits, plain, tolerance)
        difference = replace(difference, wrong=difference.wrong & unrounded.wrong)
    return [difference]


def exact(
    hidden, *, norm_weight=None, norm_eps=EPS, square_sums=None, token_rows=None, targets=None, **weights
) -> Tensor:
    """The reference in fp64 on the same inputs."""
    exact_hidden = hidden.double() if norm_weight is None else weighted_as_rounded(hidden, norm_weight)
    if norm_weight is not None or square_sums is not None:
        sums = hidden.double().square().sum(1) if square_sums is None else square_sums.double().sum(0)
        exact_hidden = exact_hidden * torch.rsqrt(sums / hidden.shape[1] + norm_eps)[:, None]
    weights = {name: w.double() for name, w in weights.items()}
    return value_head(exact_hidden, token_rows=token_rows, targets=targets, backend="reference", **weights)


def weighted_as_rounded(hidden: Tensor, norm_weight: Tensor) -> Tensor:
    """h * w in fp64, rounded to the dtype of h as in the kernel (fp16: h * w / 64).

    The rounding of a matmul's operand is not an error of the kernel. With the rounding in the expected values, the
    tolerance only needs to cover fp32 sums.
    """
    scale = 1 / 64 if hidden.dtype == torch.float16 else 1.0
    return (hidden.float() * (norm_weight.float() * scale)).to(hidden.dtype).double() / scale


def _row_work(options: Mapping[str, Any]) -> float:
    return 40 * -(-options["size"] // 32) * -(-options["size"] // 64) / 128 + 1


OPERATOR = Operator(
    function=value_head,
    options=OPTIONS,
    inputs=inputs,
    run=run,
    outputs=outputs,
    compare=compare,
    most_rows=16_384,
    row_size=lambda options: options["size"],
    row_work=_row_work,
    constants=CONSTANTS,
    free={
        "hidden": "apart",
        "fc_weight": "apart",
        **dict.fromkeys(("fc_bias", "summary_bias", "norm_weight"), "bfloat16"),
        "summary_weight": "bfloat16 apart",
        "token_rows": "int32",
        "targets": "int64",
        "square_sums": "float64 apart",
        "counters": "rows",
    },
)
