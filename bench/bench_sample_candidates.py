"""Time ``sample_candidates``: a few hundred bytes a row, so what shows is a launch and the latency of its chain.

    python -m bench.bench_sample_candidates [--device cpu] [--quick] [--json FILE]

Probabilities are fp32 whatever ``--dtype`` is. Beside it stands what it replaces: a draw from rows of ``[B, V]``.
"""

from functools import partial

import torch

from bench._common import Case, Shape, grid, parse_args, reference_peers, run_cases
from bench.bench_reweight_scatter import make_candidates
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.reference import sample_candidates as reference

PRODUCTION = {"B": 64, "K": 8, "V": 151_936, "dtype": "float32"}  # V: of the draw from [B, V], Qwen2.5's
SHAPES = grid(PRODUCTION, {"B": [1, 8, 256, 512], "K": [2, 16, 64, 32]}, [{"B": 512, "K": 64}])
QUICK = grid(PRODUCTION | {"B": 4, "V": 32_000}, {"K": [64]})


def make_case(device: str, shape: Shape) -> Case:
    B, K, V, _ = shape.values()
    candidates = make_candidates(B, K, V, device)
    seeds, positions = torch.arange(B, device=device), torch.arange(B, dtype=torch.int32, device=device)
    arguments = (candidates, candidates.probs, seeds, positions)
    temperature = torch.ones(B, device=device)

    def dense():
        probs = torch.zeros(B, V, device=device).scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(probs)
        # As vLLM's sampler, and as torch.multinomial without its checks.
        return lambda: probs.div(noise.exponential_()).argmax(1)

    compiles = device == "cuda" and shape == PRODUCTION
    return Case(
        partial(sample_candidates, *arguments, temperature=temperature),
        # Of a row: its probabilities, seed, position, temperature and status; the token drawn, read and written.
        B * (K * 4 + 8 + 4 + 4 + 1 + 4 + 4),
        peers={
            "draw from [B, V]": dense,
            **reference_peers(reference.sample_candidates, *arguments, temperature=temperature, compiles=compiles),
        },
    )


if __name__ == "__main__":
    run_cases("sample_candidates", SHAPES, QUICK, make_case, parse_args(__doc__))
