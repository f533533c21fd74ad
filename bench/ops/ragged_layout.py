"""Time ``ragged_layout`` at decode steps and for prompts. Floor: every argument read once, every result written.

    python -m bench.ops.ragged_layout [--device cpu] [--quick] [--json FILE]

Every request has ``delta`` delta tokens and K candidates. A decode step has next to no bytes: its time is one launch
and a few dependent loads. All tensors are of integers, whatever ``--dtype`` is. The reference is some forty launches.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.models import VOCAB
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.reference import ragged_layout as reference


def make_case(device: str, *, B: int, K: int, delta: int, dtype: str) -> Case:
    i32 = partial(torch.full, (B,), dtype=torch.int32, device=device)
    arguments = (
        torch.randint(VOCAB, (B * delta,), device=device),
        torch.randperm(B * delta, device=device),
        torch.arange(0, B * delta, delta, dtype=torch.int32, device=device),
        i32(delta),
        torch.randint(VOCAB, (B, K), dtype=torch.int32, device=device),
        i32(K),
        i32(1000),
    )
    layout = [x for x in ragged_layout(*arguments) if x is not None]  # there are no trees
    moved = sum(tensor.nbytes for tensor in (*arguments, *layout))
    ours, theirs = (partial(function, *arguments) for function in (ragged_layout, reference.ragged_layout))
    return Case(ours, moved, reference=theirs)


BENCHMARK = Benchmark(
    "ragged_layout",
    make_case,
    production=dict(B=64, K=8, delta=1),
    axes=dict(B=[1, 8, 256, 512], K=[2, 64, 16, 32]),
    others=[dict(B=512, K=64), dict(B=1, delta=32_768), dict(B=1, delta=4096), dict(B=64, delta=64)],
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
