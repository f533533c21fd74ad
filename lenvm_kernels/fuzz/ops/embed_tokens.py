"""``embed_tokens``: widths that are not multiples of a group or block, absent tokens, ids outside the vocabulary."""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, differs, dtype_of
from lenvm_kernels.fuzz.ops._inputs import padded_rows, poisoned, rows_and, slice_of_longer
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.embed_tokens import embed_tokens

OPTIONS: dict[str, list[Any]] = {
    "size": [64, 1, 63, 130, 576, 1030, 2112],
    "half": [1, 3, 32, 48, 64],
    "vocab": [50, 1],
    "dtype": ["float32", "bfloat16", "float16"],
    "rows_not_there": ["none", "0", "2"],
    "row_padding": [0, 16, 3],
    "rope_scale": [1.0, 1.25],
    "longest": [100_000, 30],
    "slices": [False, True],
    "broken": [False, True],
    "constants": ["shipped", "small"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, there = case.options, case.draws(device), len(case.rows)
    rows, vocab, half = rows_and(case, options["rows_not_there"]), options["vocab"], options["half"]
    magnitude = draws.choose("magnitude", vocab, 1, values=[0.02, 1.0, 30.0])
    embedding = (draws.normal("embedding", vocab, options["size"]) * magnitude).to(dtype_of(options))
    arguments: dict[str, Any] = {
        "token_ids": draws.integers("token_ids", rows, low=0, high=vocab - 1),
        "positions": draws.integers("positions", rows, low=0, high=options["longest"]),
        "embedding": padded_rows(embedding, options["row_padding"]),
        "inv_freq": 1e6 ** -(torch.arange(half, device=device) / half),
    }
    if options["broken"]:
        outside = draws.choose("outside", rows, values=[-1, vocab, -(2**40), 2**32, 2**62])
        arguments["token_ids"] = torch.where(draws.chance("unknown", rows, of=0.2), outside, arguments["token_ids"])
        arguments["embedding"].copy_(poisoned(draws, vocab, arguments["embedding"], of=0.1))
    if options["rows_not_there"] != "none":
        arguments["num_rows"] = torch.tensor([there], dtype=torch.int32, device=device)
        arguments["token_ids"][there:] = 2**62
    if options["slices"]:
        for name in arguments.keys() - {"embedding"}:
            arguments[name] = slice_of_longer(arguments[name])
    return CallInputs(arguments | {"rope_scale": options["rope_scale"]}, there)


def by_row(given: CallInputs, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"square_sums": tensors["square_sums"].T}


def compare(given: CallInputs, result: Result) -> list[Difference]:
    """Compare with the reference in fp64, except for the angles, which are defined in fp32."""
    arguments, rows = given.arguments, given.rows
    dtype = arguments["embedding"].dtype
    embedded = embed_tokens(**arguments | {"embedding": arguments["embedding"].double()}, backend="reference")
    angles = (arguments["positions"][:, None].float() * arguments["inv_freq"]).double()
    expected = {"square_sums": embedded.square_sums.T}
    expected |= {name: x * arguments["rope_scale"] for name, x in (("cos", angles.cos()), ("sin", angles.sin()))}
    found = by_row(given, result)
    return [
        differs("hidden", found["hidden"][:rows], embedded.hidden[:rows].to(dtype)),
        *(beyond(name, found[name][:rows], x[:rows], TOLERANCE["embed_tokens"][dtype]) for name, x in expected.items()),
    ]


OPERATOR = Operator(
    function=embed_tokens,
    options=OPTIONS,
    inputs=inputs,
    by_row=by_row,
    compare=compare,
    row_work=lambda options: 60 + options["size"] / 6 * (options["constants"] == "small"),
    constants={"small": {"MAX_BLOCK_H": 128}},  # several blocks
    free={"embedding": "float32 bfloat16 float16 float64 rows columns apart", "inv_freq": "rows"},
)
