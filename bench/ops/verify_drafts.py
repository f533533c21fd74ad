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


def make_case(device: str, *, B: int, D: int, dtype: str) -> Case:
    drafts = chains(B, D, device)
    drawn = torch.cat((drafts.token_ids, drafts.token_ids[:, :1]), dim=1).int().flatten()
    written = 4 * B * (2 * (1 + D) + 1)
    return Case(
        partial(verify_drafts, drawn, drafts),
        drawn.nbytes + sum(x.nbytes for x in drafts) + written,
        reference=partial(reference.verify_drafts, drawn, *drafts),
    )


BENCHMARK = Benchmark(
    "verify_drafts",
    make_case,
    production=dict(B=64, D=4),
    axes=dict(B=[1, 8, 256, 512], D=[1, 2, 15]),
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
