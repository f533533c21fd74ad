"""Time ``pack_drafts``. Floor: every argument read once, every result written.

    python -m bench.ops.pack_drafts [--device cpu] [--quick] [--json FILE]

Each request has a chain of ``D`` drafts, and ``K`` candidates that are scored at each of its nodes, of which the first
is the draft there. There are next to no bytes: the time is one launch, one round of loads and a prefix sum. All is of
integers, whatever ``--dtype`` is. The reference is Python.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.ops.expand_drafts import chains
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts
from lenvm_kernels.ops.select_scored import empty_scored
from lenvm_kernels.reference import pack_drafts as reference


def make_call(device: str, *, B: int, D: int, K: int, index: torch.dtype = torch.int64) -> partial:
    """A call with chains of drafts, whose tokens are ``index`` numbers."""
    drafts, nodes = chains(B, D, device, index), B * (1 + D)
    scored = empty_scored(nodes, K, torch.device(device))
    scored.token_ids.copy_(torch.arange(1000, 1000 + nodes * K, device=device).view(nodes, K))
    scored.token_ids.view(B, 1 + D, K)[:, :D, 0] = drafts.token_ids.int()
    scored.counts.fill_(K)
    scored.positions.fill_(1000)
    return partial(pack_drafts, scored, drafts)


def make_case(device: str, *, B: int, D: int, K: int, dtype: str) -> Case:
    call = make_call(device, B=B, D=D, K=K)
    (scored, drafts), out = call.args, empty_trees(B, D, K, torch.device(device))
    moved = scored.token_ids.nbytes + scored.counts.nbytes + 4 * B  # of the positions a request's first
    return Case(
        partial(call, out=out),
        moved + sum(x.nbytes for x in (*drafts, *out)),
        reference=partial(reference.pack_drafts, scored, *drafts),
    )


FORMS = {
    "pack_drafts D1 K8": dict(B=64, D=1, K=8, index=torch.int32),
    "pack_drafts D4 K8": dict(B=64, D=4, K=8),
    "pack_drafts D15 K64": dict(B=64, D=15, K=64),
    "pack_drafts, every size 1": dict(B=1, D=1, K=1, index=torch.int32),
}

BENCHMARK = Benchmark(
    "pack_drafts",
    make_case,
    production=dict(B=64, D=4, K=8),
    axes=dict(B=[1, 8, 256, 512], D=[1, 15], K=[1, 64]),
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
