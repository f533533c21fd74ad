"""Time of ``ragged_layout``. At decode steps a few dependent loads.

Every request has ``delta`` delta tokens and K candidates.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from bench.models import VOCAB
from lenvm_kernels.ops.ragged_layout import ragged_layout


def make_call(*, B=64, K, delta=1, index=torch.int64, is_tree=False):
    """A call with token ids and slots of dtype ``index``. ``is_tree``: the parent of a candidate is the one before."""
    full = partial(torch.full, (B,), dtype=torch.int32)
    arguments = (
        torch.randint(VOCAB, (B * delta,), dtype=index),
        torch.randperm(B * delta, dtype=index),
        torch.arange(0, B * delta, delta, dtype=torch.int32),
        full(delta),
        torch.randint(VOCAB, (B, K), dtype=torch.int32),
        full(K),
        full(1000),
    )
    parents = (torch.arange(K, dtype=torch.int32) - 1).repeat(B, 1)
    return partial(ragged_layout, *arguments, **(dict(candidate_parents=parents) if is_tree else {}))


def make_case(*, B, K, delta):
    call = make_call(B=B, K=K, delta=delta)
    return TimedCase(call, nbytes(call.args, call()))


FORMS = {f"ragged_layout {i} K{K}": dict(K=K, index=i) for i in (torch.int32, torch.int64) for K in (0, 8, 64)}
FORMS |= {f"ragged_layout of trees K{K}": dict(K=K, is_tree=True) for K in (8, 44)}  # 44: 4 drafts, 8 candidates each
FORMS["ragged_layout, every size 1"] = dict(B=1, K=1, index=torch.int32)
FORMS["ragged_layout of trees, every size 1"] = dict(B=1, K=1, index=torch.int32, is_tree=True)

PRODUCTION = dict(B=64, K=8, delta=1)
AXES = dict(B=[1, 8, 512], K=[2, 64])
OTHERS = [dict(B=1, delta=32_768), dict(B=1, delta=4096), dict(B=64, delta=64)]
BENCHMARK = Benchmark("ragged_layout", make_case, PRODUCTION, AXES, OTHERS, quick=[{}, dict(B=1)])
