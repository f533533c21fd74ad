"""Value head: time against the floor, and beside cuBLAS + SiLU + a matrix-vector product.

    python -m bench.ops.value_head [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

M candidates of a value model. The peers have no gather and no norm: both are left out, but for the cases ``in_step``,
which are what a step calls: the norm's factor comes from sums of squares that the last layer has left. In a step the
weights are cold and the hidden states, which the model has just written, are warm.
"""

from collections.abc import Sequence
from functools import partial

import torch

from bench.harness.cases import FLOATS, Benchmark, Case, peer
from bench.models import DIMENSIONS
from lenvm_kernels.ops.value_head import num_counters, value_head
from lenvm_kernels.reference import value_head as reference
from lenvm_kernels.reference._common import sums_of_squares


def make_call(
    device: str,
    *,
    size: int,
    M: int,
    dtype: str,
    outputs: int | None = None,
    index: torch.dtype = torch.int64,
    given: Sequence[str] = (),
) -> partial:
    """A call for ``outputs`` of ``M`` rows (None: all), with some of the options."""
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    weights = [random(*dimensions) * size**-0.5 for dimensions in ((size, size), (size,), (1, size), (1,))]
    hidden, outputs = random(M, size), M if outputs is None else outputs
    options = dict(
        token_rows=torch.randperm(M, device=device)[:outputs].to(index),
        targets=torch.randperm(outputs, device=device).to(index),
        square_sums=sums_of_squares(hidden),
        norm_weight=random(size),
        counters=torch.zeros(num_counters(outputs), dtype=torch.int32, device=device),
    )
    return partial(value_head, hidden, *weights, **{name: options[name] for name in given})


def make_case(device: str, *, model: str, M: int, in_step: bool, dtype: str) -> Case:
    size, of_step = DIMENSIONS[model][0], ["token_rows", "targets", "square_sums"]
    call = make_call(device, size=size, M=M, dtype=dtype, given=["counters", *(of_step if in_step else [])])
    hidden, *weights = call.args
    options = {name: call.keywords[name] for name in of_step if in_step}
    return Case(
        call,
        sum(tensor.nbytes for tensor in (*call.args, *options.values())) + M * 4,
        2 * M * size * (size + 1),
        peers={} if in_step else {"cuBLAS + SiLU + GEMV": peer("pytorch", "value_head", *call.args)},
        reference=None if in_step else partial(reference.value_head, *call.args),
        expected=lambda: reference.value_head(hidden.double(), *weights, **options),
    )


_OF_MODEL = ("token_rows", "targets", "counters", "square_sums")
FORMS = {
    f"value_head {dtype} M{M} H{size}{name}": dict(size=size, M=M, dtype=FLOATS[dtype], **form)
    for dtype in FLOATS
    for size in (1536, 3584)
    for M in (64, 512)  # either tile
    for name, form in {
        "": {},
        " with gather and norm": dict(outputs=M - 24, given=("token_rows", "norm_weight")),
        " with gather, scatter and sums of squares": dict(outputs=M - 24, index=torch.int32, given=_OF_MODEL),
        " with every option": dict(outputs=M - 24, index=torch.int32, given=(*_OF_MODEL, "norm_weight")),
    }.items()
}
FORMS["value_head, every size 1"] = dict(size=1, M=1, dtype="float32", given=("square_sums", "counters"))

BENCHMARK = Benchmark(
    "value_head",
    make_case,
    production=dict(model="Qwen2.5-1.5B", M=320, in_step=False),  # B 64, k 5
    axes=dict(
        in_step=[True],
        M=[5, 40, 1280, 2560],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"],  # Qwen3-1.7B is as wide as the 3B
    ),
    others=[dict(M=1), dict(M=128), dict(M=4096), *(dict(model="Qwen2.5-3B", M=M) for M in (5, 2560))],
    quick=(dict(model="Qwen2.5-0.5B", M=5), dict(in_step=True)),
)

if __name__ == "__main__":
    BENCHMARK.main()
