"""Time ``select_scored`` at decode steps. Floor: every argument read once, every result written.

    python -m bench.ops.select_scored [--device cpu] [--quick] [--json FILE]

Every request has ``K`` candidates and a token drawn, and wants its lengths: where its candidates are not scored, that
token is. One in four is to be guided, and not due, but the last of its ``E`` end tokens is its last candidate: its
status stays, so that each call does the same. There are next to no bytes: the time is one launch and two dependent
loads. All is of integers, whatever ``--dtype`` is. The reference is some forty launches.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.harness.cases import Benchmark, Case
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.reference import select_scored as reference
from lenvm_kernels.types import Candidates, Status

# A request's count, status, position, whether it wants lengths and is due, and the token drawn.
BYTES = 4 + 1 + 4 + 1 + 1 + 4


def make_call(device: str, *, B: int, K: int, E: int = 8, given: Sequence[str] = ()) -> partial:
    """A call with some of the options."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    candidates = Candidates(
        token_ids=torch.randint(1000, (B, K), dtype=torch.int32, device=device),
        probs=full(0, torch.float32, B, K),
        counts=full(K, torch.int32, B),
        status=(torch.arange(B, device=device) % 4).to(torch.int8),
        lost_mass=full(0, torch.float32, B),
    )
    requests = empty_requests(B, torch.device(device))
    for x in requests:
        x.fill_(1)
    requests.due.fill_(False)
    requests.table_rows.copy_(torch.randperm(B, device=device))
    eos_token_ids = full(-2, torch.int32, B, E)
    eos_token_ids[requests.table_rows, -1] = candidates.token_ids[:, -1]
    options: dict[str, Any] = dict(
        drawn=torch.randint(1000, (B,), dtype=torch.int32, device=device),
        sample=True,
        score_all=True,
        step=full(1, torch.int64, 1),
        out=empty_scored(B, K, torch.device(device)),
    )
    return partial(select_scored, candidates, requests, eos_token_ids, **{name: options[name] for name in given})


def make_case(device: str, *, B: int, K: int, E: int, dtype: str) -> Case:
    call = make_call(device, B=B, K=K, E=E, given=["drawn", "sample", "step", "out"])
    (candidates, requests, eos_token_ids), options = call.args, dict(call.keywords)
    del options["step"]
    guides = int((candidates.status == Status.GUIDE).sum())  # of these the table row and its end tokens are read too
    written = sum(x.nbytes for x in options["out"])
    of_candidates = (candidates.token_ids, candidates.counts, candidates.status)
    of_requests = (requests.positions, requests.table_rows, requests.wants_length, requests.due)
    return Case(
        call,
        B * BYTES + guides * (8 + 4 * E) + candidates.token_ids.nbytes + written,
        reference=partial(reference.select_scored, *of_candidates, *of_requests, eos_token_ids, **options),
    )


FORMS = {
    f"select_scored K{K}{name}": dict(B=64, K=K, given=given)
    for K in (8, 64)
    for name, given in {"": (), " with every option": ("drawn", "sample", "score_all", "step")}.items()
}
FORMS["select_scored, every size 1"] = dict(B=1, K=1, E=1, given=["drawn", "step"])

BENCHMARK = Benchmark(
    "select_scored",
    make_case,
    production=dict(B=64, K=8, E=8),
    axes=dict(B=[1, 8, 256, 512], K=[1, 2, 64], E=[1, 64]),
    others=[dict(B=512, K=64)],
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
