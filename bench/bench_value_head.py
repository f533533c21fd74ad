"""Value head: time against the floor, and beside cuBLAS + SiLU + a matrix-vector product.

    python -m bench.bench_value_head [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

M candidates of a value model. The peers have no gather and no norm: both are left out, but for one case. In a step the
weights are cold and the hidden states, which the model has just written, are warm.
"""

from functools import partial

import torch

from bench._common import Case, Shape, grid, parse_args, peer, reference_peers, run_cases
from bench._models import DIMENSIONS
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.reference import value_head as reference

PRODUCTION = {"model": "Qwen2.5-1.5B", "M": 320, "norm_and_gather": False}  # B 64, k 5
SHAPES = grid(
    PRODUCTION,
    {
        "norm_and_gather": [True],
        "M": [5, 40, 1280, 2560],
        "model": ["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"],  # Qwen3-1.7B is as wide as the 3B
    },
    [{"M": 1}, {"M": 128}, {"M": 4096}, {"model": "Qwen2.5-3B", "M": 5}, {"model": "Qwen2.5-3B", "M": 2560}],
)
QUICK = grid(PRODUCTION | {"model": "Qwen2.5-0.5B", "M": 5}, {"norm_and_gather": [True]})


def make_case(device: str, shape: Shape) -> Case:
    model, M, norm_and_gather, dtype = shape.values()
    size = DIMENSIONS[model][0]
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    weights = [random(*dimensions) * size**-0.5 for dimensions in ((size, size), (size,), (1, size), (1,))]
    hidden, options, peers = random(M, size), {}, {}
    if norm_and_gather:
        options = dict(token_rows=torch.randperm(M, device=device), norm_weight=random(size))
    else:
        compiles = device == "cuda" and shape.items() >= PRODUCTION.items()
        peers = {
            "cuBLAS + SiLU + GEMV": peer("pytorch", "value_head", hidden, *weights),
            **reference_peers(reference.value_head, hidden, *weights, compiles=compiles),
        }
    tensors = (hidden, *weights, *options.values())
    return Case(
        partial(value_head, hidden, *weights, **options),
        sum(tensor.nbytes for tensor in tensors) + M * 4,
        2 * M * size * (size + 1),
        peers=peers,
        expected=lambda: reference.value_head(hidden.double(), *weights, **options),
    )


if __name__ == "__main__":
    run_cases("value_head", SHAPES, QUICK, make_case, parse_args(__doc__))
