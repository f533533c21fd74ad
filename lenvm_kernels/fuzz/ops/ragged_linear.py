"""``ragged_linear``: bias, norm, SwiGLU, residual and sums of squares in every combination, absent rows."""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, dtype_of
from lenvm_kernels.fuzz.ops._inputs import in_fp64, limit_rows, padded_rows, poisoned, rows_and, slice_of_longer
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.ragged_linear import ragged_linear, square_sums_shape
from lenvm_kernels.reference._common import sums_of_squares

EPS = 1e-6

OPTIONS: dict[str, list[Any]] = {
    "outputs": [1, 48, 80, 97, 200],
    "size": [1, 48, 97, 160, 400],
    "dtype": ["float32", "bfloat16", "float16"],
    "bias": [False, True, "float32"],
    "norm": [False, True],
    "swiglu": [False, True],
    "residual": [False, True],
    "square_sums": [False, True],  # only with a norm
    "square_sums_out": [False, True],
    "row_padding": [0, 16, 3],
    "rows_not_there": ["none", "0", "3", "140"],
    "broken": [False, True],
    "constants": ["shipped", "small"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, there = case.options, case.draws(device), len(case.rows)
    rows, width, size = rows_and(case, options["rows_not_there"]), options["outputs"], options["size"]
    dtype, padding, columns = dtype_of(options), options["row_padding"], width * (1 + options["swiglu"])

    def normal(name, rows, columns, scale=1.0):
        return (draws.normal(name, rows, columns) * scale).to(dtype)

    # Results are O(1). With the norm, the scale of a row must not matter.
    sizes = draws.choose("sizes", rows, 1, values=[0.0, 1e-2, 1.0, 30.0, 1e4]) if options["norm"] else 1.0
    weight_padding = padding // 3  # another stride than x
    x = normal("x", rows, size + padding, sizes)[:, :size]
    weight = normal("weight", columns, size + weight_padding, size**-0.5)[:, :size]
    arguments: dict[str, Any] = {"x": x, "weight": weight, "swiglu": options["swiglu"]}
    if options["bias"]:
        bias = normal("bias", 1, columns, 0.5)[0]
        arguments["bias"] = bias.float() if options["bias"] == "float32" else bias
    if options["norm"]:
        arguments["norm_eps"] = EPS
    if options["residual"]:
        arguments["residual"] = normal("residual", rows, width + 2 * padding)[:, :width]
    if options["norm"] and options["square_sums"]:
        others = draws.uniform("square_sums", rows, square_sums_shape(0, size)[0], low=0.5, high=2.0)
        # Not the sums of x, to detect recomputation.
        arguments["square_sums"] = padded_rows(sums_of_squares(x) * others.T.float(), padding)
    if options["broken"]:
        x.copy_(poisoned(draws, rows, x, of=0.2))
    if options["rows_not_there"] != "none":
        limit_rows(arguments, there, x=x, residual=arguments.get("residual"))
        if "square_sums" in arguments:
            arguments["square_sums"][:, there:] = float("nan")
    if options["square_sums_out"]:
        filled = torch.full(square_sums_shape(len(x), width), 0.5, device=device)
        arguments["square_sums_out"] = slice_of_longer(filled)
    return CallInputs(arguments, there)


def by_row(given: CallInputs, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.T if name == "square_sums_out" else x for name, x in tensors.items()}


def compare(given: CallInputs, result: Result) -> list[Difference]:
    actual, *sums_out = (x[: given.rows] for x in by_row(given, result).values())
    tolerance = TOLERANCE["ragged_linear"][actual.dtype]
    expected = exact(**given.arguments)[: given.rows]
    # A row with an infinity or NaN has no finite result. Whether it is infinity or NaN depends on the order of the sum.
    broken = ~given.arguments["x"][: given.rows].isfinite().all(1)[:, None]
    expected = torch.where(broken & ~actual.isfinite(), actual.double(), expected)
    # Sums of the rounded result.
    sums, of_sums = sums_of_squares(actual.double()).T, TOLERANCE["embed_tokens"][torch.float32]
    found = [beyond("the result", actual, expected, tolerance)]
    return found + [beyond("the sums of its squares", x, sums, of_sums) for x in sums_out]


def exact(**inputs) -> Tensor:
    """The reference in fp64 on the same inputs."""
    return ragged_linear(**in_fp64(inputs), backend="reference")


OPERATOR = Operator(
    function=ragged_linear,
    options=OPTIONS,
    inputs=inputs,
    writes=("square_sums_out",),
    by_row=by_row,
    compare=compare,
    row_work=lambda options: 1 + options["size"] * options["outputs"] * (1 + options["swiglu"]) / 6400,
    # Large tiles and splits at sizes that the interpreter can handle, and several tiles per program.
    constants={"small": dict(MULTIPROCESSORS=1, SPLIT_FROM=144, MAX_PROGRAMS=2, MAX_SMALL_PROGRAMS=3)},
    free={
        "bias": "float32",
        **dict.fromkeys(("x", "weight", "residual"), "apart"),
        **dict.fromkeys(("square_sums", "square_sums_out"), "float64 apart"),
    },
)
