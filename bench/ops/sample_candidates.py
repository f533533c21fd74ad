"""Time ``sample_candidates``: a few hundred bytes a row, so what shows is a launch and the latency of its chain.

    python -m bench.ops.sample_candidates [--device cpu] [--quick] [--json FILE]

Probabilities are fp32 whatever ``--dtype`` is. Beside it stands what it replaces: a draw from rows of ``[B, V]``.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.models import VOCAB, make_candidates
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.reference import sample_candidates as reference


def make_case(device: str, *, B: int, K: int, V: int, dtype: str) -> Case:
    candidates = make_candidates(B, K, V, device)
    seeds, positions = torch.arange(B, device=device), torch.arange(B, dtype=torch.int32, device=device)
    arguments = (candidates, candidates.probs, seeds, positions)
    temperature = torch.ones(B, device=device)

    def dense():
        probs = torch.zeros(B, V, device=device).scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(probs)
        # As vLLM's sampler, and as torch.multinomial without its checks.
        return lambda: probs.div(noise.exponential_()).argmax(1)

    return Case(
        partial(sample_candidates, *arguments, temperature=temperature),
        # Of a row: its probabilities, seed, position, temperature and status; the token drawn, read and written.
        B * (K * 4 + 8 + 4 + 4 + 1 + 4 + 4),
        peers={"draw from [B, V]": dense},
        reference=partial(reference.sample_candidates, *arguments, temperature=temperature),
    )


BENCHMARK = Benchmark(
    "sample_candidates",
    make_case,
    production=dict(B=64, K=8, V=VOCAB, dtype="float32"),  # V: of the draw from [B, V]
    axes=dict(B=[1, 8, 256, 512], K=[2, 16, 64, 32]),
    others=[dict(B=512, K=64)],
    quick=(dict(B=4, V=32_000), dict(K=64)),
)

if __name__ == "__main__":
    BENCHMARK.main()
