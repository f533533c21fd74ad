"""Time of ``sample_candidates``. A launch and a chain of loads.

The peer is the draw from rows of ``[B, V]``, which the operator replaces.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase
from bench.models import VOCAB, make_candidates
from lenvm_kernels.ops.sample_candidates import sample_candidates

ROW_BYTES = 8 + 4 + 4 + 1 + 4 + 4  # seed, position, temperature, status, and the drawn token read and written


def make_call(*, B=64, K, V=256, index=torch.int32, has_temperature=True):
    """A call with positions of dtype ``index``."""
    candidates = make_candidates(B, K, V, torch.get_default_device())
    options = dict(temperature=torch.ones(B)) if has_temperature else {}
    requests = torch.arange(B), torch.arange(B, dtype=index)
    return partial(sample_candidates, candidates, candidates.probs, *requests, **options)


def make_case(*, B, K, V):
    call = make_call(B=B, K=K, V=V)
    candidates = call.args[0]

    def dense():
        probs = torch.zeros(B, V, device=candidates.probs.device)
        probs.scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(probs)
        # As vLLM's sampler, and as torch.multinomial without its checks.
        return lambda: probs.div(noise.exponential_()).argmax(1)

    return TimedCase(call, B * (K * 4 + ROW_BYTES), peers={"draw from [B, V]": dense})


FORMS = {f"sample_candidates K{K} with temperature": dict(K=K) for K in (8, 64)}
FORMS |= {f"sample_candidates K{K}": dict(K=K, index=torch.int64, has_temperature=False) for K in (8, 64)}
FORMS["sample_candidates, every size 1"] = dict(B=1, K=1, V=1, has_temperature=False)

BENCHMARK = Benchmark(
    "sample_candidates",
    make_case,
    dict(B=64, K=8, V=VOCAB),
    axes=dict(B=[1, 8, 256, 512], K=[2, 64]),
    quick=[dict(B=4, V=32_000), dict(B=4, V=32_000, K=64)],
)
