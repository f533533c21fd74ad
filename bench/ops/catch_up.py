"""Time ``catch_up`` at decode steps. Floor: what is read of every argument once, every result written.

    python -m bench.ops.catch_up [--device cpu] [--quick] [--json FILE]

Every request is guided and lacks ``missing`` tokens of the ``M`` that are held, which it computes; pages of 16 slots
lie in no order. What is read of requests does not change, so that each call does the same. There are next to no bytes:
the time is one launch and three dependent loads. All is of integers, whatever ``--dtype`` is. The reference is some
forty launches, and reads back how many tokens there are: no graph can be captured of it.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests
from lenvm_kernels.reference import catch_up as reference

LENGTH = 1000  # of a sequence
# A request's position, table row, whether it is guided and wants lengths, tokens cached (read, and written once more
# into the history), and tokens scored.
BYTES = 4 + 8 + 1 + 1 + 4 + 4 + 4
TOKEN_BYTES = 4 + 4  # of a token computed: its id and its page


def make_call(
    device: str, *, B: int, M: int, R: int, missing: int = 1, length: int = LENGTH, page_size: int = 16
) -> partial:
    """A call in which each of ``B`` requests lacks so many of its ``length`` tokens."""
    requests, history = empty_requests(B, torch.device(device)), empty_history(R, M, torch.device(device))
    for x in requests:
        x.fill_(1)
    requests.positions.fill_(length - 1)
    requests.cached_lens.fill_(length - missing)
    requests.table_rows.copy_(torch.randperm(R, device=device)[:B])
    pages = -(-length // page_size)
    slot_table = torch.randperm(R * pages, dtype=torch.int32, device=device).view(R, pages)
    counts = torch.full((B,), 8, dtype=torch.int32, device=device)
    return partial(catch_up, history, requests, counts, slot_table, page_size=page_size)


def make_case(device: str, *, B: int, M: int, missing: int, R: int, dtype: str) -> Case:
    call = make_call(device, B=B, M=M, R=R, missing=missing)
    history, requests, counts, slot_table = call.args
    out = empty_delta(B, M, torch.device(device))
    of_history = (history.tokens, history.cached_lens)
    of_requests = (requests.positions, requests.table_rows, requests.guided, requests.wants_length)
    others = (requests.cached_lens, counts, slot_table, call.keywords["page_size"], 1)
    return Case(
        partial(call, out=out),
        B * (BYTES + missing * TOKEN_BYTES) + sum(x.nbytes for x in out),
        reference=partial(reference.catch_up, *of_history, *of_requests, *others, out=out),
    )


FORMS = {
    f"catch_up M{M}, pages of {page_size}": dict(B=64, M=M, R=64, length=4096, page_size=page_size)
    for M, page_size in ((1, 1), (5, 4), (16, 1), (16, 16), (64, 64))
}
FORMS["catch_up, every size 1"] = dict(B=1, M=1, R=1, length=1, page_size=1)

BENCHMARK = Benchmark(
    "catch_up",
    make_case,
    production=dict(B=64, M=16, missing=1, R=257),
    axes=dict(B=[1, 8, 256], M=[1, 4], missing=[0, 4, 16]),
    others=[dict(B=512, R=4097), dict(B=512, missing=16, R=4097)],
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
