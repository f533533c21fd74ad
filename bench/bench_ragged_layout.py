"""Time ``ragged_layout`` at decode steps and for prompts. Floor: every argument read once, every result written.

    python -m bench.bench_ragged_layout [--device cpu] [--quick] [--json FILE]

Every request has ``delta`` delta tokens and K candidates. A decode step has next to no bytes: its time is one launch
and a few dependent loads. All tensors are of integers, whatever ``--dtype`` is. The reference is some forty launches.
"""

from functools import partial

import torch

from bench._common import Case, Shape, grid, parse_args, reference_peers, run_cases
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.reference import ragged_layout as reference

PRODUCTION = {"B": 64, "K": 8, "delta": 1}
SHAPES = grid(
    PRODUCTION,
    {"B": [1, 8, 256, 512], "K": [2, 64, 16, 32]},
    [{"B": 512, "K": 64}, {"B": 1, "delta": 32_768}, {"B": 1, "delta": 4096}, {"B": 64, "delta": 64}],
)
QUICK = grid(PRODUCTION, {"B": [1]})
VOCAB = 151_936  # Qwen2.5


def make_case(device: str, shape: Shape) -> Case:
    B, K, delta, _ = shape.values()
    i32 = partial(torch.full, (B,), dtype=torch.int32, device=device)
    arguments = (
        torch.randint(VOCAB, (B * delta,), device=device),
        torch.randperm(B * delta, device=device),
        torch.arange(0, B * delta, delta, dtype=torch.int32, device=device),
        i32(delta),
        torch.randint(VOCAB, (B, K), dtype=torch.int32, device=device),
        i32(K),
        i32(1000),
    )
    moved = sum(tensor.nbytes for tensor in (*arguments, *vars(ragged_layout(*arguments)).values()))
    compiles = device == "cuda" and shape.items() >= PRODUCTION.items()
    peers = reference_peers(reference.ragged_layout, *arguments, compiles=compiles)
    return Case(partial(ragged_layout, *arguments), moved, peers=peers)


if __name__ == "__main__":
    run_cases("ragged_layout", SHAPES, QUICK, make_case, parse_args(__doc__))
