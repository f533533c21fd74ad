"""Time of ``pack_drafts``. One launch, one round of loads and a prefix sum.

Each request has a chain of ``D`` drafts and ``K`` scored candidates at each node; the first is the draft.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from bench.ops.begin_step import chains
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts
from lenvm_kernels.ops.topk_candidates import empty_scored


def make_call(*, B=64, D, K, index=torch.int64):
    drafts, nodes = chains(B, D, index), B * (1 + D)
    scored = empty_scored(nodes, K, torch.get_default_device())
    scored.token_ids.copy_(torch.arange(1000, 1000 + nodes * K).view(nodes, K))
    scored.token_ids.view(B, 1 + D, K)[:, :D, 0] = drafts.token_ids.int()
    scored.counts.fill_(K)
    scored.positions.fill_(1000)
    return partial(pack_drafts, scored, drafts)


def make_case(*, B, D, K):
    call, out = make_call(B=B, D=D, K=K), empty_trees(B, D, K, torch.get_default_device())
    scored, drafts = call.args
    # Only the first position of each request is read.
    return TimedCase(partial(call, out=out), nbytes(scored.token_ids, scored.counts, drafts, out) + 4 * B)


FORMS = {
    "pack_drafts D1 K8": dict(D=1, K=8, index=torch.int32),
    "pack_drafts D4 K8": dict(D=4, K=8),
    "pack_drafts D15 K64": dict(D=15, K=64),
    "pack_drafts, every size 1": dict(B=1, D=1, K=1, index=torch.int32),
}

PRODUCTION = dict(B=64, D=4, K=8)
AXES = dict(B=[1, 8, 512], D=[1, 15], K=[1, 64])
BENCHMARK = Benchmark("pack_drafts", make_case, PRODUCTION, AXES, quick=[{}, dict(B=1)])
