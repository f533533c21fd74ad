"""Time of ``catch_up`` at decode steps. One launch and three dependent loads.

Every request is guided and lacks ``missing`` of the ``M`` tokens that are held. Pages of 16 slots are in random order.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.ops.catch_up import catch_up, empty_delta

REQUEST_BYTES = 4 + 8 + 1 + 1 + 5 * 4  # position, table row, two flags, and five numbers of tokens
TOKEN_BYTES = 4 + 4  # id and page


def make_call(*, B, M, R=64, missing=1, length=1000, page_size=16):
    """A call in which each of ``B`` requests lacks ``missing`` of its ``length`` tokens."""
    device = torch.get_default_device()
    requests, history = empty_requests(B, device), empty_history(R, M, device)
    for x in requests:
        x.fill_(1)
    requests.positions.fill_(length - 1)
    requests.cached_lens.fill_(length - missing)
    requests.table_rows.copy_(torch.randperm(R)[:B])
    pages = -(-length // page_size)
    slot_table = torch.randperm(R * pages, dtype=torch.int32).view(R, pages)
    counts = torch.full((B,), 8, dtype=torch.int32)
    return partial(catch_up, history, requests, counts, slot_table, page_size=page_size)


def make_case(*, B, M, missing, R):
    call, out = make_call(B=B, M=M, R=R, missing=missing), empty_delta(B, M, torch.get_default_device())
    return TimedCase(partial(call, out=out), B * (REQUEST_BYTES + missing * TOKEN_BYTES) + nbytes(out))


FORMS = {
    f"catch_up M{M}, pages of {page_size}": dict(B=64, M=M, length=4096, page_size=page_size)
    for M, page_size in ((1, 1), (5, 4), (16, 1), (16, 16), (64, 64))
}
FORMS["catch_up, every size 1"] = dict(B=1, M=1, R=1, length=1, page_size=1)

PRODUCTION = dict(B=64, M=16, missing=1, R=257)
AXES = dict(B=[1, 8, 256], M=[4], missing=[0, 4, 16])
OTHERS = [dict(B=512, R=4097)]
BENCHMARK = Benchmark("catch_up", make_case, PRODUCTION, AXES, OTHERS, quick=[{}, dict(B=1)])
