"""Time ``reweight_scatter``. Floor: the rows are written once (``B * V * itemsize`` bytes), at copy bandwidth.

Run it as ``python -m bench.bench_reweight_scatter``; ``--device cpu`` times the reference. Copy bandwidth counts bytes
read and written, so a kernel that only writes can pass 100 %. Rows without ``[B, V]`` have next to no bytes: their
time is the root search's latency.
"""

import itertools

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import Candidates, Status

VOCAB = 151_936  # Qwen2.5
MODES = [
    {"mode": "mul", "scale": 0.7},
    {"mode": "centered_exp", "scale": -20},
    {"mode": "length_mul", "scale": 1.5},
    {"target_length": 60},
    {"target_length": 60, "op": "soft"},
]


def make_case(rows: int, slots: int, scatter: bool, dtype: torch.dtype, device: str) -> Case:
    candidates = Candidates(
        token_ids=torch.rand(rows, VOCAB, device=device).topk(slots).indices.int(),
        probs=torch.softmax(3 * torch.randn(rows, slots, device=device), 1),
        counts=torch.full((rows,), slots, dtype=torch.int32, device=device),
        status=torch.full((rows,), int(Status.GUIDE), dtype=torch.int8, device=device),
        lost_mass=torch.zeros(rows, device=device),
    )
    params = [parse_guidance(MODES[row % len(MODES)]) for row in range(rows)]
    table = GuidanceTable.from_params(params, [{2}] * rows, device)
    value_logits = torch.randn(rows, slots, device=device)
    probs = torch.zeros(rows, VOCAB, dtype=dtype, device=device) if scatter else None
    moved = rows * slots * 4 * 4 + (rows * VOCAB * dtype.itemsize if scatter else 0)
    name = f"B={rows} K={slots} modes mixed" + (f", scatter V={VOCAB}" if scatter else "")
    return Case(name, lambda: reweight_scatter(candidates, value_logits, table, probs=probs), moved)


def main() -> None:
    args = parse_args(__doc__)
    rows = [1, 4] if args.quick else [1, 8, 64, 256, 512]
    slots = [8] if args.quick else [8, 64]
    run_cases(
        "reweight_scatter",
        [make_case(b, k, s, args.dtype, args.device) for b, k, s in itertools.product(rows, slots, [False, True])],
        args,
    )


if __name__ == "__main__":
    main()
