"""``candidate_values``: candidates and padding, strided rows, sizes that are not multiples of a block, all modes of
guidance."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, dtype_of
from lenvm_kernels.fuzz.ops._inputs import SPARE_ROWS, fill, padded_rows, poisoned
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops import candidate_values as ops
from lenvm_kernels.ops.candidate_values import candidate_values
from lenvm_kernels.reference.candidate_values import standing_for
from lenvm_kernels.types import Mode

NEAR = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)
FP32_MAX = torch.finfo(torch.float32).max
FLOATS = ("scale", "nats_per_token", "target_length", "tolerance", "answer_length")  # columns of the table
NAMES = ("value logits", "logits of the mean")

OPTIONS: dict[str, list[Any]] = {
    "size": [64, 96, 100, 512],
    "outputs": [64, 1, 100, 256],
    "bins": [29, 1, 16, 64],
    "columns": [8, 1, 5, 32],
    "vocab": [50, 1],
    "dtype": ["float32", "bfloat16", "float16"],
    "fp32_vectors": [False, True],
    "row_padding": [0, 16, 3],
    "index": ["int32", "int64"],
    "broken": [False, True],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    names = ("size", "outputs", "bins", "columns", "vocab", "row_padding")
    size, outputs, bins, columns, vocab, row_padding = (options[name] for name in names)
    dtype, index = dtype_of(options), getattr(torch, options["index"])
    vector_dtype = torch.float32 if options["fp32_vectors"] else dtype

    def normal(name, rows, columns, scale=1.0, dtype=dtype):
        return padded_rows((draws.normal(name, rows, columns) * scale).to(dtype), row_padding)

    def pick(name, *values):
        return draws.choose(name, rows, values=values)

    # Increasingly wide bins, some of a single token.
    widths = 1 + (draws.uniform("widths", 1, bins)[0] * 1.2 ** torch.arange(bins, device=device)).floor()
    table_rows = draws.places("table_rows", rows, SPARE_ROWS)
    table = GuidanceTable(len(rows) + SPARE_ROWS, device).columns
    of_rows = {
        "mode": pick("mode", *map(int, [*NEAR, *NEAR, *Mode])),
        "scale": pick("strength", 0.0, 0.5, 3.0, 10.0, 100.0, 1e4, FP32_MAX),
        "nats_per_token": -pick("gamma", 0.9, 0.985, 0.997, 0.99999).log(),
        "target_length": pick("target_length", 0.0, 0.01, 1.0, 30.0, 500.0, 1e6, FP32_MAX),
        "tolerance": pick("tolerance", 0.0, 0.0, 0.5, 20.0, 1e5),
        "counts_down": pick("counts_down", False, True),
        "answer_length": pick("answer_length", 0.0, 0.0, 1.0, 10.0, 300.0),
    }
    fill(table, table_rows, of_rows, elsewhere=7)
    # Some rows have only padding; most have padding from some column on.
    token_ids = draws.integers("token_ids", rows, columns, low=0, high=vocab - 1)
    padding = draws.choose("padding", rows, columns, values=[-1, -7, vocab, 2**31 - 1])
    first = draws.integers("candidates", rows, 1, low=0, high=columns)
    token_ids = torch.where(torch.arange(columns, device=device) < first, token_ids, padding)
    # Scaled so that logits are O(1).
    arguments: dict[str, Any] = {
        "token_ids": padded_rows(token_ids.to(index), row_padding, 0),
        "scale": normal("scale", rows, size, dtype=vector_dtype),
        "shift": normal("shift", rows, size, dtype=vector_dtype),
        "embedding": normal("embedding", vocab, size),
        "fc_weight": normal("fc_weight", outputs, size, 2 * size**-0.5),
        "fc_bias": draws.normal("fc_bias", 1, outputs)[0].to(vector_dtype),
        "bins_weight": normal("bins_weight", bins, outputs, 2 * outputs**-0.5),
        "bins_bias": draws.normal("bins_bias", 1, bins)[0].to(vector_dtype),
        "bin_edges": F.pad(widths.cumsum(0), (1, 0)).float() + draws.integers("first edge", 1, low=1, high=3),
        "table": table,
        "table_rows": table_rows.to(index),
        "generated": pick("generated", 0, 10, 30, 45, 10_000).int(),
    }
    if options["broken"]:
        for name in ("scale", "shift"):
            arguments[name].copy_(poisoned(draws, rows, arguments[name], of=0.1))
    return CallInputs(arguments, len(rows))


def compare(given: CallInputs, result: Result) -> list[Difference]:
    tolerance = TOLERANCE["candidate_values"][given.arguments["embedding"].dtype]
    expected = exact(**given.arguments)
    return [beyond(name, result[name], x, tolerance) for name, x in zip(NAMES, expected, strict=True)]


def exact(
    token_ids, scale, shift, embedding, fc_weight, fc_bias, bins_weight, bins_bias, bin_edges, table, **of_rows
) -> tuple[Tensor, Tensor]:
    """The reference in fp64 on the same inputs, with the matmul's operand rounded as in the kernel."""
    is_candidate = (token_ids >= 0) & (token_ids < len(embedding))
    e = embedding[token_ids.where(is_candidate, 0).long()].double()
    x = F.silu(shift.double()[:, None] + scale.double()[:, None] * e).to(embedding.dtype).double()
    hidden = F.silu(F.linear(x, fc_weight.double(), fc_bias.double()))
    log_probs = F.linear(hidden, bins_weight.double(), bins_bias.double()).log_softmax(-1)
    logits, mean_logits = standing_for(log_probs, bin_edges, table, **of_rows)
    return logits.where(is_candidate, 0.0), mean_logits.where(is_candidate, 0.0)


OPERATOR = Operator(
    function=candidate_values,
    options=OPTIONS,
    inputs=inputs,
    returns=NAMES,
    compare=compare,
    row_work=lambda options: (1 + options["outputs"] / 64) * options["columns"] / 16 * (options["size"] + 70) + 1,
    free={
        **dict.fromkeys(("scale", "shift"), "bfloat16 apart"),
        "embedding": "rows apart",
        **dict.fromkeys(("fc_weight", "bins_weight"), "apart"),
        "token_ids": "int32 columns apart",
        "bin_edges": "float64",
        **{f"table.{name}": "strided" for name in ("mode", "counts_down")},
        **{f"table.{name}": "float64 strided" for name in FLOATS},
        "table_rows": "int32",
        **dict.fromkeys(("fc_bias", "bins_bias"), "bfloat16"),
    },
    reads={"table": ops.ProbeColumns._fields},
)
