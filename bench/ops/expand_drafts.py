"""Time ``expand_drafts``. Floor: every argument read once, every result written.

    python -m bench.ops.expand_drafts [--device cpu] [--quick] [--json FILE]

Each request has a chain of ``D`` drafts. There are next to no bytes: the time is one launch and one round of loads. All
is of integers but the thresholds, whatever ``--dtype`` is. The reference is some forty launches.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, empty_nodes, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.reference import expand_drafts as reference
from lenvm_kernels.types import Drafts

ROW_BYTES = sum(dtype.itemsize for dtype in NODE_FIELDS.values())  # of a request, read, and of a node, written


def chains(B: int, D: int, device: str, index: torch.dtype = torch.int64) -> Drafts:
    """A chain of so many drafts for each request, whose tokens are ``index`` numbers."""
    parents = torch.arange(D, dtype=torch.int32, device=device).expand(B, -1) - 1
    return Drafts(torch.randint(1000, (B, D), dtype=index, device=device), parents.contiguous())


def make_call(device: str, *, B: int, D: int, index: torch.dtype = torch.int64) -> partial:
    """A call with such chains."""
    requests = empty_requests(B, torch.device(device))
    for x in requests:
        x.fill_(1)
    return partial(expand_drafts, requests, chains(B, D, device, index))


def make_case(device: str, *, B: int, D: int, dtype: str) -> Case:
    call = make_call(device, B=B, D=D)
    requests, drafts = call.args
    known = (getattr(requests, name) for name in NODE_FIELDS)
    return Case(
        partial(call, out=empty_nodes(requests, D)),
        B * ROW_BYTES + B * (1 + D) * ROW_BYTES + sum(x.nbytes for x in drafts),
        reference=partial(reference.expand_drafts, *known, *drafts),
    )


FORMS = {
    "expand_drafts D1": dict(B=64, D=1, index=torch.int32),
    "expand_drafts D4": dict(B=64, D=4),
    "expand_drafts D15": dict(B=64, D=15),
    "expand_drafts, every size 1": dict(B=1, D=1, index=torch.int32),
}

BENCHMARK = Benchmark(
    "expand_drafts",
    make_case,
    production=dict(B=64, D=4),
    axes=dict(B=[1, 8, 256, 512], D=[1, 2, 15]),
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
