"""Time of ``expand_drafts``. One launch and one round of loads.

Each request has a chain of ``D`` drafts.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, empty_nodes, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.types import Drafts

ROW_BYTES = sum(dtype.itemsize for dtype in NODE_FIELDS.values())  # per request, read, and per node, written


def chains(B, D, index=torch.int64):
    """A chain of ``D`` drafts per request, with token ids of dtype ``index``."""
    parents = torch.arange(D, dtype=torch.int32).expand(B, -1) - 1
    return Drafts(torch.randint(1000, (B, D), dtype=index), parents.contiguous())


def make_call(*, B=64, D, index=torch.int64):
    requests = empty_requests(B, torch.get_default_device())
    for x in requests:
        x.fill_(1)
    return partial(expand_drafts, requests, chains(B, D, index))


def make_case(*, B, D):
    call = make_call(B=B, D=D)
    out = empty_nodes(call.args[0], D)
    return TimedCase(partial(call, out=out), B * ROW_BYTES * (2 + D) + nbytes(call.args[1]))


FORMS = {f"expand_drafts D{D}": dict(D=D, index=torch.int32 if D == 1 else torch.int64) for D in (1, 4, 15)}
FORMS["expand_drafts, every size 1"] = dict(B=1, D=1, index=torch.int32)

BENCHMARK = Benchmark(
    "expand_drafts", make_case, dict(B=64, D=4), axes=dict(B=[1, 8, 512], D=[1, 15]), quick=[{}, dict(B=1)]
)
