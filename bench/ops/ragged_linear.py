"""Ragged linear: time against the floor, and beside cuBLAS on exactly the live rows.

    python -m bench.ops.ragged_linear [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

The projections of a layer. There is room for more rows than are live, as in a graph captured for every candidate a step
can have: 1.5 times as many where five of eight slots are filled, 4 times in a batch of few candidates. The peers are
told the number of rows: "(cuBLAS, bare)" computes the matmul alone, "cuBLAS and operators" norm, SwiGLU, residual too.
Their weights are in 16 bits also where ours are in 8 (``weights fp8``).
"""

import torch
import torch.nn.functional as F

from bench.harness.cases import Benchmark, Case
from bench.models import DIMENSIONS
from lenvm_kernels.ops.ragged_linear import (
    SQUARES_GROUP,
    num_counters,
    quantize_weight,
    ragged_linear,
    square_sums_shape,
)
from lenvm_kernels.reference import ragged_linear as reference

EPS = 1e-6


def make_case(device: str, *, model: str, layer: str, rows: int, room: float, weights: str, dtype: str) -> Case:
    hidden, intermediate, _, heads, kv_heads, head_dim, _ = DIMENSIONS[model]
    # Columns of the result, columns of x, and what goes with the matmul.
    outputs, size, norm, swiglu, has_residual = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden, True, False, False),
        "o": (hidden, heads * head_dim, False, False, True),
        "gate_up": (intermediate, hidden, True, True, False),
        "down": (hidden, intermediate, False, False, True),
    }[layer]
    columns, tokens = outputs * (1 + swiglu), int(rows * room)
    random = {"dtype": getattr(torch, dtype), "device": device}
    weight = torch.randn(columns, size, **random) * size**-0.5
    x = torch.randn(tokens, size, **random)
    bias = torch.randn(columns, **random) if layer == "qkv" and model.startswith("Qwen2") else None
    residual = torch.randn(tokens, outputs, **random) if has_residual else None
    num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
    options = {"norm_eps": EPS if norm else None, "swiglu": swiglu}
    live = {"residual": None if residual is None else residual[:rows], "bias": bias}
    # As in a layer: who stores the residual stream leaves the sums of its squares, which a norm then takes.
    extra = {"counters": torch.zeros(num_counters(tokens, columns, size, swiglu), dtype=torch.int32, device=device)}
    if norm:
        squares = F.pad(x.float().square(), (0, -size % SQUARES_GROUP)).unflatten(1, (-1, SQUARES_GROUP))
        extra["square_sums"] = squares.sum(2).T.contiguous()
    if has_residual:
        extra["square_sums_out"] = torch.empty(square_sums_shape(tokens, outputs), device=device)

    kept = weight
    if weights == "fp8":
        kept, extra["weight_scales"] = quantize_weight(weight)

    def run() -> torch.Tensor:
        return ragged_linear(
            x, kept, bias, num_rows=num_rows, expected_rows=rows, residual=residual, **options, **extra
        )[:rows]

    def expected() -> torch.Tensor:
        doubled = {name: tensor if tensor is None else tensor.double() for name, tensor in live.items()}
        scales = {name: extra[name] for name in extra if name == "weight_scales"}
        matrix = kept if scales else weight.double()
        return reference.ragged_linear(x[:rows].double(), matrix, **doubled, **scales, **options)

    def bare() -> tuple[torch.Tensor]:  # no tensor, as it is not the result to compare
        return (F.linear(x[:rows], weight, bias),)

    def unfused() -> torch.Tensor:
        y = F.linear(F.rms_norm(x[:rows], (size,), eps=EPS) if norm else x[:rows], weight, bias)
        if swiglu:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if residual is None else y + residual[:rows]

    moved = sum(tensor.nbytes for tensor in (x[:rows], kept, *live.values()) if tensor is not None)
    return Case(
        run,
        moved + rows * outputs * x.itemsize,
        2 * rows * columns * size,
        peers={"(cuBLAS, bare)": lambda: bare, "cuBLAS and operators": lambda: unfused},
        expected=expected,
    )


BENCHMARK = Benchmark(
    "ragged_linear",
    make_case,
    production=dict(
        model="Qwen2.5-1.5B", layer="gate_up", rows=384, room=1.5, weights="dtype"
    ),  # B 64: a last token and k 5
    axes=dict(
        layer=["down", "qkv", "o"],
        rows=[6, 48, 1536, 3072],
        weights=["fp8"],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        room=[1, 4],
    ),
    others=[
        *(dict(layer="down", rows=rows) for rows in (6, 48, 3072)),
        *(dict(weights="fp8", layer=layer, rows=48) for layer in ("gate_up", "down", "qkv", "o")),
        *(dict(weights="fp8", layer=layer) for layer in ("down", "qkv", "o")),
        dict(weights="fp8", rows=3072),
        dict(layer="qkv", rows=6),
        dict(layer="o", rows=6),
        dict(model="Qwen2.5-0.5B", layer="down"),
        dict(model="Qwen2.5-3B", layer="down"),
    ],
    quick=(dict(model="Qwen2.5-0.5B", layer="o", rows=6), dict(layer="qkv")),
)

if __name__ == "__main__":
    BENCHMARK.main()
