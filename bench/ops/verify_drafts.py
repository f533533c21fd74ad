"""Time ``verify_drafts``. Floor: every argument read once, every result written.

    python -m bench.ops.verify_drafts [--device cpu] [--quick] [--json FILE]

Each request has a chain of ``D`` drafts, all of which were drawn: the longest way. There are next to no bytes: the time
is one launch, and as many dependent loads as there are nodes. All is of integers, whatever ``--dtype`` is. The
reference is Python.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.ops.expand_drafts import chains
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.reference import verify_drafts as reference


def make_call(device: str, *, B: int, D: int, index: torch.dtype = torch.int64) -> partial:
    """A call with chains of drafts, whose tokens are ``index`` numbers."""
    drafts = chains(B, D, device, index)
    drawn = torch.cat((drafts.token_ids, drafts.token_ids[:, :1]), dim=1).int().flatten()
    return partial(verify_drafts, drawn, drafts)


def make_case(device: str, *, B: int, D: int, dtype: str) -> Case:
    call = make_call(device, B=B, D=D)
    drawn, drafts = call.args
    written = 4 * B * (2 * (1 + D) + 1)
    return Case(
        call,
        drawn.nbytes + sum(x.nbytes for x in drafts) + written,
        reference=partial(reference.verify_drafts, drawn, *drafts),
    )


FORMS = {
    "verify_drafts D1": dict(B=64, D=1, index=torch.int32),
    "verify_drafts D4": dict(B=64, D=4),
    "verify_drafts D15": dict(B=64, D=15),
    "verify_drafts, every size 1": dict(B=1, D=1, index=torch.int32),
}

BENCHMARK = Benchmark(
    "verify_drafts",
    make_case,
    production=dict(B=64, D=4),
    axes=dict(B=[1, 8, 256, 512], D=[1, 2, 15]),
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
