"""Time ``reweight_scatter``. Floor: the rows are written once (``B * V * itemsize`` bytes), at copy bandwidth.

    python -m bench.bench_reweight_scatter [--device cpu] [--quick] [--json FILE]

Copy bandwidth counts bytes read and written, so a kernel that only writes can pass 100 %. Rows without ``[B, V]``
(scatter False) have next to no bytes: their time is the root search's latency. The dtype is that of ``[B, V]``, as a
case says, whatever ``--dtype`` is.
"""

from functools import partial

import torch

from bench._common import Case, Shape, grid, parse_args, reference_peers, run_cases
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.reference import reweight_scatter as reference
from lenvm_kernels.types import Candidates, Status

PRODUCTION = {"B": 64, "K": 8, "V": 151_936, "scatter": True, "dtype": "float32"}  # Qwen2.5's vocabulary
SHAPES = grid(
    PRODUCTION,
    {
        "scatter": [False],
        "dtype": ["bfloat16"],
        "B": [1, 8, 256, 512],
        "V": [32_000, 128_256, 262_144],
        "K": [2, 16, 64, 32],
    },
    [
        {"B": 1, "scatter": False},
        {"B": 512, "scatter": False},
        {"B": 512, "K": 64, "scatter": False},
        {"B": 512, "K": 64, "V": 262_144},
    ],
)
QUICK = grid(PRODUCTION | {"B": 4, "V": 32_000}, {"scatter": [False]})
MODES = [
    {"mode": "mul", "scale": 0.7},
    {"mode": "centered_exp", "scale": -20},
    {"mode": "length_mul", "scale": 1.5},
    {"target_length": 60},
    {"target_length": 60, "op": "soft"},
]


def make_candidates(B: int, K: int, V: int, device: str) -> Candidates:
    """Rows to guide, with as many candidates as there is room for."""
    return Candidates(
        token_ids=torch.rand(B, V, device=device).topk(K).indices.int(),
        probs=torch.softmax(3 * torch.randn(B, K, device=device), 1),
        counts=torch.full((B,), K, dtype=torch.int32, device=device),
        status=torch.full((B,), int(Status.GUIDE), dtype=torch.int8, device=device),
        lost_mass=torch.zeros(B, device=device),
    )


def make_case(device: str, shape: Shape) -> Case:
    B, K, V, scatter, dtype = shape.values()
    candidates = make_candidates(B, K, V, device)
    table = GuidanceTable.from_params([parse_guidance(MODES[row % len(MODES)]) for row in range(B)], [{2}] * B, device)
    value_logits = torch.randn(B, K, device=device)
    probs = torch.rand(B, V, device=device).to(getattr(torch, dtype)) if scatter else None
    # Of a candidate: id, probability, value logit and the result.
    moved = B * K * 4 * 4 + (probs.nbytes if scatter else 0)
    return Case(
        partial(reweight_scatter, candidates, value_logits, table, probs=probs),
        moved,
        peers=reference_peers(
            reference.reweight_scatter,
            candidates,
            value_logits,
            table,
            table_rows=None,
            generated=None,
            probs=probs,
            compiles=device == "cuda" and shape == PRODUCTION,
        ),
    )


if __name__ == "__main__":
    run_cases("reweight_scatter", SHAPES, QUICK, make_case, parse_args(__doc__))
