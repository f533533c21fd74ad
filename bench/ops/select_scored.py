"""Time of ``select_scored`` at decode steps. Two dependent loads.

Every request has ``K`` candidates and a drawn token, and requests lengths. One in four is guided and not due, but the
last of its ``E`` end tokens is a candidate, so that its status stays and every call does the same.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, Status

ROW_BYTES = 4 + 1 + 4 + 1 + 1 + 4  # count, status, position, two flags, drawn token


def make_call(*, B=64, K, E=8, given=()):
    """A call with the options ``given``."""
    device = torch.get_default_device()
    candidates = Candidates(
        token_ids=torch.randint(1000, (B, K), dtype=torch.int32),
        probs=torch.zeros(B, K),
        counts=torch.full((B,), K, dtype=torch.int32),
        status=(torch.arange(B) % 4).to(torch.int8),
        lost_mass=torch.zeros(B),
    )
    requests = empty_requests(B, device)
    for x in requests:
        x.fill_(1)
    requests.due.fill_(False)
    requests.table_rows.copy_(torch.randperm(B))
    eos_token_ids = torch.full((B, E), -2, dtype=torch.int32)
    eos_token_ids[requests.table_rows, -1] = candidates.token_ids[:, -1]
    drawn, out = torch.randint(1000, (B,), dtype=torch.int32), empty_scored(B, K, device)
    options = dict(drawn=drawn, sample=True, score_all=True, out=out)
    return partial(select_scored, candidates, requests, eos_token_ids, **{name: options[name] for name in given})


def make_case(*, B, K, E):
    call = make_call(B=B, K=K, E=E, given=["drawn", "sample", "out"])
    candidates, out = call.args[0], call.keywords["out"]
    guided = int((candidates.status == Status.GUIDE).sum())  # their table row and end tokens are read too
    return TimedCase(call, B * ROW_BYTES + guided * (8 + 4 * E) + nbytes(candidates.token_ids, out))


FORMS = {f"select_scored K{K}": dict(K=K) for K in (8, 64)}
FORMS |= {f"select_scored K{K} with every option": dict(K=K, given=("drawn", "sample", "score_all")) for K in (8, 64)}
FORMS["select_scored, every size 1"] = dict(B=1, K=1, E=1, given=["drawn"])

PRODUCTION = dict(B=64, K=8, E=8)
AXES = dict(B=[1, 8, 512], K=[1, 64], E=[1, 64])
BENCHMARK = Benchmark("select_scored", make_case, PRODUCTION, AXES, quick=[{}, dict(B=1)])
