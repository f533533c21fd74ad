"""Time of ``ragged_linear``, the projections of a layer.

``room`` times the live rows, as in a graph with rows for all possible candidates of a step: 1.5 if five of eight slots
are filled, 4 in a batch of few candidates. The peers receive the live rows: "(cuBLAS, bare)" computes only the matmul,
"cuBLAS and operators" also norm, SwiGLU and residual.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from bench.harness import Benchmark, TimedCase, nbytes
from bench.models import DIMENSIONS
from lenvm_kernels.ops.ragged_linear import ragged_linear, square_sums_shape
from lenvm_kernels.reference._common import sums_of_squares

EPS = 1e-6


def shape_of(layer, model):
    """Sizes and options of a layer. The stored sums of squares of a residual stream are inputs of the next norm."""
    hidden, intermediate, _, heads, kv_heads, head_dim, _ = DIMENSIONS[model]
    bias = ["bias"] if model.startswith("Qwen2") else []
    return {
        "qkv": dict(outputs=(heads + 2 * kv_heads) * head_dim, size=hidden, given=[*bias, "norm_eps", "square_sums"]),
        "o": dict(outputs=hidden, size=heads * head_dim, given=["residual", "square_sums_out"]),
        "gate_up": dict(outputs=intermediate, size=hidden, swiglu=True, given=["norm_eps", "square_sums"]),
        "down": dict(outputs=hidden, size=intermediate, given=["residual", "square_sums_out"]),
    }[layer]


def make_call(*, outputs, size, tokens, dtype="float32", live=None, swiglu=False, given=()):
    """A call with ``tokens`` rows, of which ``live`` are live, and the options ``given``."""
    columns, random = outputs * (1 + swiglu), partial(torch.randn, dtype=getattr(torch, dtype))
    x = random(tokens, size)
    options = dict(
        bias=random(columns),
        norm_eps=EPS,
        square_sums=sums_of_squares(x),
        residual=random(tokens, outputs),
        square_sums_out=torch.empty(square_sums_shape(tokens, outputs)),
        num_rows=torch.tensor([live], dtype=torch.int32) if live is not None else None,
        expected_rows=live,
    )
    given = {name: options[name] for name in given}
    return partial(ragged_linear, x, random(columns, size) * size**-0.5, swiglu=swiglu, **given)


def make_case(*, model, layer, rows, room, dtype="bfloat16"):
    shape = shape_of(layer, model)
    shape["given"] += ["num_rows", "expected_rows"]
    call = make_call(**shape, tokens=int(rows * room), live=rows, dtype=dtype)
    x, weight = call.args[0][:rows], call.args[1]
    bias, residual, eps = (call.keywords.get(name) for name in ("bias", "residual", "norm_eps"))
    residual = None if residual is None else residual[:rows]

    def unfused():
        y = F.linear(F.rms_norm(x, x.shape[1:], eps=EPS) if eps else x, weight, bias)
        if call.keywords["swiglu"]:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if residual is None else y + residual

    rivals = {"(cuBLAS, bare)": lambda: lambda: F.linear(x, weight, bias), "cuBLAS and operators": lambda: unfused}
    moved = nbytes(x, weight, bias, residual) + rows * shape["outputs"] * x.itemsize
    return TimedCase(call, moved, 2 * rows * weight.numel(), peers=rivals)


def _forms():
    """Each layer, and one with all options; all 16-bit tiles, by the number of rows."""
    layers = {layer: shape_of(layer, "Qwen2.5-1.5B") for layer in ("qkv", "o", "gate_up", "down")}
    every = ["bias", "norm_eps", "square_sums", "residual", "square_sums_out"]
    layers["everything"] = layers["gate_up"] | dict(given=every)
    rows_of = {"float32": [9, 384], "float16": [384], "bfloat16": [9, 72, 144, 288, 576, 1152, 2304]}
    for dtype, rows in [(dtype, rows) for dtype, counts in rows_of.items() for rows in counts]:
        for layer, shape in layers.items():
            given = [*shape["given"], "num_rows", "expected_rows"]
            form = shape | dict(tokens=rows, live=math.ceil(2 / 3 * rows), dtype=dtype, given=given)
            yield f"ragged_linear {dtype} {layer}, {rows} rows", form
    one = dict(outputs=1, size=1, tokens=1, live=1, given=["norm_eps", "residual", "num_rows", "bias"])
    yield "ragged_linear, every size 1", one
    yield "ragged_linear with swiglu, every size 1", one | dict(swiglu=True)
    yield "ragged_linear of one column, every size 1", dict(outputs=1, size=8960, tokens=1)


FORMS = dict(_forms())

BENCHMARK = Benchmark(
    "ragged_linear",
    make_case,
    dict(model="Qwen2.5-1.5B", layer="gate_up", rows=384, room=1.5),  # B 64: a last token and k 5
    axes=dict(
        layer=["down", "qkv", "o"],
        rows=[6, 48, 320, 1280, 3072],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        room=[1, 4],
    ),
    others=[*(dict(layer=layer, rows=rows) for layer in ("down", "qkv", "o") for rows in (6, 48, 1280))],
    quick=[dict(model="Qwen2.5-0.5B", layer=layer, rows=6) for layer in ("o", "qkv")],
)
