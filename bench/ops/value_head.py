"""Value head: time against the floor, and beside cuBLAS + SiLU + a matrix-vector product.

    python -m bench.ops.value_head [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

M candidates of a value model. The peers have no gather and no norm: both are left out, but for the cases ``in_step``,
which are what a step calls: the norm's factor comes from sums of squares that the last layer has left. In a step the
weights are cold and the hidden states, which the model has just written, are warm.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case, peer
from bench.models import DIMENSIONS
from lenvm_kernels.ops.value_head import num_counters, value_head
from lenvm_kernels.reference import value_head as reference
from lenvm_kernels.reference._common import sums_of_squares


def make_case(device: str, *, model: str, M: int, in_step: bool, dtype: str) -> Case:
    size = DIMENSIONS[model][0]
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    weights = [random(*dimensions) * size**-0.5 for dimensions in ((size, size), (size,), (1, size), (1,))]
    hidden, options, peers = random(M, size), {}, {}
    if in_step:
        options = dict(
            token_rows=torch.randperm(M, device=device),
            targets=torch.randperm(M, device=device),
            square_sums=sums_of_squares(hidden),
        )
    else:
        peers = {"cuBLAS + SiLU + GEMV": peer("pytorch", "value_head", hidden, *weights)}
    tensors = (hidden, *weights, *options.values())
    counters = torch.zeros(num_counters(M), dtype=torch.int32, device=device)
    return Case(
        partial(value_head, hidden, *weights, **options, counters=counters),
        sum(tensor.nbytes for tensor in tensors) + M * 4,
        2 * M * size * (size + 1),
        peers=peers,
        reference=None if in_step else partial(reference.value_head, hidden, *weights),
        expected=lambda: reference.value_head(hidden.double(), *weights, **options),
    )


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
