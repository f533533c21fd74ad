"""Time of ``draw``: the latency of the root search and of the draw, without ``[B, V]``.

The peer is the draw from rows of ``[B, V]`` that the operator replaces.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase
from bench.models import VOCAB, make_candidates
from bench.ops.reweight_scatter import MODES
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.draw import draw
from lenvm_kernels.types import ScoredCandidates

CANDIDATE_BYTES = 5 * 4  # id, probability, value logit and scored id read, guided probability written
ROW_BYTES = 120  # request, table row, drawn token and results
EVERY = ("value_logits", "predicted", "drawn", "text_breaks")


def make_call(*, B=64, K, V=256, modes=MODES, given=("value_logits", "predicted", "drawn")):
    """A call with the optional tensors ``given``; the requests use ``modes`` in turn."""
    device = torch.get_default_device()
    params = [parse_guidance(modes[row % len(modes)] | {"return_values": True}) for row in range(B)]
    table = GuidanceTable.from_params(params, [{2}] * B, device).columns
    candidates, requests = make_candidates(B, K, V, device), empty_requests(B, device)
    requests.table_rows.copy_(torch.randperm(B))
    requests.generated.copy_(torch.arange(B))
    requests.wants_length.fill_(True)
    requests.greedy.zero_()
    positions = torch.arange(B, dtype=torch.int32)
    scored = ScoredCandidates(candidates.token_ids, candidates.counts, positions, torch.zeros(B, dtype=torch.bool))
    options = dict(
        predicted=torch.randn(B, K),
        drawn=torch.full((B,), -1, dtype=torch.int32),
        text_breaks=torch.zeros(V, dtype=torch.int8),
    )
    options = {name: x for name, x in options.items() if name in given}
    value_logits = torch.randn(B, K) if "value_logits" in given else None
    return partial(draw, candidates, value_logits, table, requests, scored, **options)


def make_case(*, B, K, V):
    call = make_call(B=B, K=K, V=V)
    candidates = call.args[0]

    def dense():
        probs = torch.zeros(B, V, device=candidates.probs.device)
        probs.scatter_(1, candidates.token_ids.long(), candidates.probs)
        noise = torch.empty_like(probs)
        # As vLLM's sampler, and as torch.multinomial without its checks.
        return lambda: probs.div(noise.exponential_()).argmax(1)

    return TimedCase(call, B * (K * CANDIDATE_BYTES + ROW_BYTES), peers={"draw from [B, V]": dense})


FORMS = {f"draw K{K}": dict(K=K) for K in (8, 64)}
FORMS |= {f"draw K{K} with every option": dict(K=K, given=EVERY) for K in (8, 64)}
FORMS["draw without values"] = dict(K=64, given=["drawn"])
FORMS["draw, every size 1"] = dict(B=1, K=1, V=1, given=())

BENCHMARK = Benchmark(
    "draw",
    make_case,
    dict(B=64, K=8, V=VOCAB),
    axes=dict(B=[1, 8, 256, 512], K=[2, 64]),
    quick=[dict(B=4, V=32_000), dict(B=4, V=32_000, K=64)],
)
