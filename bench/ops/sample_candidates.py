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


def make_call(
    device: str, *, B: int, K: int, V: int = 256, index: torch.dtype = torch.int32, has_temperature: bool = True
) -> partial:
    """A call with ``index`` numbers as positions."""
    candidates = make_candidates(B, K, V, device)
    of_requests = (torch.arange(B, device=device), torch.arange(B, dtype=index, device=device))
    options = dict(temperature=torch.ones(B, device=device)) if has_temperature else {}
    return partial(sample_candidates, candidates, candidates.probs, *of_requests, **options)


def make_case(device: str, *, B: int, K: int, V: int, dtype: str) -> Case:
    call = make_call(device, B=B, K=K, V=V)
    candidates = call.args[0]

    def dense():
        probs = torch.zeros(B, V, device=device).scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(probs)
        # As vLLM's sampler, and as torch.multinomial without its checks.
        return lambda: probs.div(noise.exponential_()).argmax(1)

    return Case(
        call,
        # Of a row: its probabilities, seed, position, temperature and status; the token drawn, read and written.
        B * (K * 4 + 8 + 4 + 4 + 1 + 4 + 4),
        peers={"draw from [B, V]": dense},
        reference=partial(reference.sample_candidates, *call.args, **call.keywords),
    )


FORMS = {
    f"sample_candidates K{K}{name}": dict(B=64, K=K, **form)
    for K in (8, 64)
    for name, form in {"": dict(index=torch.int64, has_temperature=False), " with temperature": {}}.items()
}
FORMS["sample_candidates, every size 1"] = dict(B=1, K=1, V=1, has_temperature=False)

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
