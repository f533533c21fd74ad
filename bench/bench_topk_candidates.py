"""Time ``topk_candidates``. Floor: the scores are read once (``B * V * itemsize`` bytes), at copy bandwidth.

Run it as ``python -m bench.bench_topk_candidates``; ``--device cpu`` times the reference. On a GPU the 39 MB of
B = 64 in fp32 stay in the L2 cache between replays, so every case also runs over copies that together exceed it (cold).
"""

import itertools

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.topk_candidates import topk_candidates

VOCAB = 151_936  # Qwen2.5
COLD_BYTES = 256 * 2**20  # well above 60 MB of L2 (H200)


def make_case(rows: int, slots: int, cold: bool, dtype: torch.dtype, device: str) -> Case:
    size = rows * VOCAB * dtype.itemsize
    copies = -(-COLD_BYTES // size) if cold else 1
    scores = [torch.randn(rows, VOCAB, device=device).to(dtype) for _ in range(copies)]
    arguments = dict(
        top_k=torch.full((rows,), slots, dtype=torch.int32, device=device),
        top_p=torch.full((rows,), 0.95, device=device),
        min_p=torch.full((rows,), 0.01, device=device),
        temperature=torch.ones(rows, device=device),
    )

    def run():
        for one in scores:
            topk_candidates(one, **arguments, max_candidates=slots, is_logits=True)

    return Case(f"B={rows} V={VOCAB} K={slots}{f' cold, {copies} calls' if cold else ''}", run, copies * size)


def main() -> None:
    args = parse_args(__doc__)
    rows = [1, 4] if args.quick else [1, 8, 64, 256, 512]
    slots = [8] if args.quick else [8, 64]
    cold = [False, True] if args.device == "cuda" else [False]
    run_cases(
        "topk_candidates",
        [make_case(b, k, c, args.dtype, args.device) for b, k, c in itertools.product(rows, slots, cold)],
        args,
    )


if __name__ == "__main__":
    main()
