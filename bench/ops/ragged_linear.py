"""Ragged linear: time against the floor, and beside cuBLAS on exactly the live rows.

    python -m bench.ops.ragged_linear [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

The projections of a layer. There is room for more rows than are live, as in a graph captured for every candidate a step
can have: 1.5 times as many where five of eight slots are filled, 4 times in a batch of few candidates. The peers are
told the number of rows: "(cuBLAS, bare)" computes the matmul alone, "cuBLAS and operators" norm, SwiGLU, residual too.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.cases import FLOATS, Benchmark, Case
from bench.models import DIMENSIONS
from lenvm_kernels.ops.ragged_linear import ragged_linear, square_sums_shape
from lenvm_kernels.reference import ragged_linear as reference
from lenvm_kernels.reference._common import sums_of_squares

EPS = 1e-6


def shape_of(layer: str, model: str) -> dict[str, Any]:
    """The matmul of a layer, and what goes with it. Who stores the residual stream leaves the sums of its squares,
    which a norm then takes."""
    hidden, intermediate, _, heads, kv_heads, head_dim, _ = DIMENSIONS[model]
    bias = ["bias"] if model.startswith("Qwen2") else []
    return {
        "qkv": dict(outputs=(heads + 2 * kv_heads) * head_dim, size=hidden, given=[*bias, "norm_eps", "square_sums"]),
        "o": dict(outputs=hidden, size=heads * head_dim, given=["residual", "square_sums_out"]),
        "gate_up": dict(outputs=intermediate, size=hidden, swiglu=True, given=["norm_eps", "square_sums"]),
        "down": dict(outputs=hidden, size=intermediate, given=["residual", "square_sums_out"]),
    }[layer]


def make_call(
    device: str,
    *,
    outputs: int,
    size: int,
    tokens: int,
    dtype: str,
    live: int | None = None,
    swiglu: bool = False,
    given: Sequence[str] = (),
) -> partial:
    """A call with room for so many ``tokens``, of which ``live`` are there, and some of the options."""
    columns = outputs * (1 + swiglu)
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    x, weight = random(tokens, size), random(columns, size) * size**-0.5
    options: dict[str, Any] = dict(
        bias=random(columns),
        norm_eps=EPS,
        square_sums=sums_of_squares(x),
        residual=random(tokens, outputs),
        square_sums_out=torch.empty(square_sums_shape(tokens, outputs), device=device),
        num_rows=torch.tensor([live], dtype=torch.int32, device=device) if live is not None else None,
        expected_rows=live,
    )
    options = {name: options[name] for name in given} | dict(swiglu=swiglu)
    return partial(ragged_linear, x, weight, **options)


def call_of(device: str, *, model: str, layer: str, rows: int, room: float, dtype: str) -> partial:
    """The call of a layer of a model."""
    shape = shape_of(layer, model)
    shape["given"] += ["num_rows", "expected_rows"]
    return make_call(device, **shape, tokens=int(rows * room), live=rows, dtype=dtype)


def make_case(device: str, *, model: str, layer: str, rows: int, room: float, dtype: str) -> Case:
    call = call_of(device, model=model, layer=layer, rows=rows, room=room, dtype=dtype)
    x, weight = call.args[0][:rows], call.args[1]
    options = {name: call.keywords.get(name) for name in ("norm_eps", "swiglu")}
    swiglu = options["swiglu"]
    bias, residual = call.keywords.get("bias"), call.keywords.get("residual")
    live = {"residual": None if residual is None else residual[:rows], "bias": bias}

    def expected() -> torch.Tensor:
        doubled = {name: tensor if tensor is None else tensor.double() for name, tensor in live.items()}
        return reference.ragged_linear(x.double(), weight.double(), **doubled, **options)

    def bare() -> tuple[torch.Tensor]:  # no tensor, as it is not the result to compare
        return (F.linear(x, weight, bias),)

    def unfused() -> torch.Tensor:
        y = F.linear(F.rms_norm(x, x.shape[1:], eps=EPS) if options["norm_eps"] else x, weight, bias)
        if swiglu:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if residual is None else y + live["residual"]

    moved = sum(tensor.nbytes for tensor in (x, weight, *live.values()) if tensor is not None)
    outputs = len(weight) // (1 + swiglu)
    return Case(
        lambda: call()[:rows],
        moved + rows * outputs * x.itemsize,
        2 * rows * weight.numel(),
        peers={"(cuBLAS, bare)": lambda: bare, "cuBLAS and operators": lambda: unfused},
        expected=expected,
    )


def _forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each layer, and of one with everything. Every tile of 16-bit numbers, by the rows there is room for."""
    layers = {layer: shape_of(layer, "Qwen2.5-1.5B") for layer in ("qkv", "o", "gate_up", "down")}
    layers["qkv alone"] = layers["qkv"] | dict(given=["bias", "norm_eps"])
    every = ["bias", "norm_eps", "square_sums", "residual", "square_sums_out"]
    layers["everything"] = layers["gate_up"] | dict(given=every)
    for dtype, rows in (("fp32", 384), ("fp16", 384), *(("bf16", rows) for rows in (9, 72, 144, 288, 576, 1152, 2304))):
        for layer, shape in layers.items():
            given = [*shape["given"], "num_rows", "expected_rows"]
            form = shape | dict(tokens=rows, live=math.ceil(2 / 3 * rows), dtype=FLOATS[dtype], given=given)
            yield f"ragged_linear {dtype} {layer}, {rows} rows", form
    one = dict(outputs=1, size=1, tokens=1, live=1, dtype="float32", given=["norm_eps", "residual", "num_rows"])
    column = dict(outputs=1, size=8960, tokens=1, dtype="float32")
    yield "ragged_linear, every size 1", one | dict(given=[*one["given"], "bias"])
    yield "ragged_linear with swiglu, every size 1", one | dict(swiglu=True, given=[*one["given"], "bias"])
    yield "ragged_linear of one column, every size 1", column


FORMS = dict(_forms())

BENCHMARK = Benchmark(
    "ragged_linear",
    make_case,
    production=dict(model="Qwen2.5-1.5B", layer="gate_up", rows=384, room=1.5),  # B 64: a last token and k 5
    axes=dict(
        layer=["down", "qkv", "o"],
        rows=[6, 48, 1536, 3072],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        room=[1, 4],
    ),
    others=[
        *(dict(layer="down", rows=rows) for rows in (6, 48, 3072)),
        dict(layer="qkv", rows=6),
        dict(layer="o", rows=6),
        dict(model="Qwen2.5-0.5B", layer="down"),
        dict(model="Qwen2.5-3B", layer="down"),
    ],
    quick=(dict(model="Qwen2.5-0.5B", layer="o", rows=6), dict(layer="qkv")),
)

if __name__ == "__main__":
    BENCHMARK.main()
