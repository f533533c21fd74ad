"""Time of ``verify_drafts``. One dependent load per node.

Each request has a chain of ``D`` drafts, all of which were drawn: the longest path.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from bench.ops.begin_step import chains
from lenvm_kernels.ops.verify_drafts import verify_drafts


def make_call(*, B=64, D, index=torch.int64):
    drafts = chains(B, D, index)
    drawn = torch.cat((drafts.token_ids, drafts.token_ids[:, :1]), dim=1).int().flatten()
    return partial(verify_drafts, drawn, drafts)


def make_case(*, B, D):
    call = make_call(B=B, D=D)
    return TimedCase(call, nbytes(call.args) + 4 * B * (2 * (1 + D) + 1))


FORMS = {f"verify_drafts D{D}": dict(D=D, index=torch.int32 if D == 1 else torch.int64) for D in (1, 4, 15)}
FORMS["verify_drafts, every size 1"] = dict(B=1, D=1, index=torch.int32)

BENCHMARK = Benchmark(
    "verify_drafts", make_case, dict(B=64, D=4), axes=dict(B=[1, 8, 512], D=[1, 15]), quick=[{}, dict(B=1)]
)
