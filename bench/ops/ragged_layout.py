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


def make_call(
    device: str, *, B: int, K: int, delta: int = 1, index: torch.dtype = torch.int64, is_tree: bool = False
) -> partial:
    """A call with ``index`` numbers as tokens and slots. ``is_tree``: each candidate's parent is the one before it."""
    i32 = partial(torch.full, (B,), dtype=torch.int32, device=device)
    arguments = (
        torch.randint(VOCAB, (B * delta,), dtype=index, device=device),
        torch.randperm(B * delta, dtype=index, device=device),
        torch.arange(0, B * delta, delta, dtype=torch.int32, device=device),
        i32(delta),
        torch.randint(VOCAB, (B, K), dtype=torch.int32, device=device),
        i32(K),
        i32(1000),
    )
    parents = (torch.arange(K, dtype=torch.int32, device=device) - 1).repeat(B, 1)
    return partial(ragged_layout, *arguments, **(dict(candidate_parents=parents) if is_tree else {}))


def make_case(device: str, *, B: int, K: int, delta: int, dtype: str) -> Case:
    call = make_call(device, B=B, K=K, delta=delta)
    layout = [x for x in call() if x is not None]  # there are no trees
    moved = sum(tensor.nbytes for tensor in (*call.args, *layout))
    return Case(call, moved, reference=partial(reference.ragged_layout, *call.args))


FORMS = {
    f"ragged_layout {index} K{K}": dict(B=64, K=K, index=index)
    for index in (torch.int32, torch.int64)
    for K in (0, 8, 64)
}
# The latter of four drafts, and eight candidates at each node.
FORMS |= {f"ragged_layout torch.int64 K{K}, trees": dict(B=64, K=K, is_tree=True) for K in (8, 44)}
FORMS["ragged_layout, every size 1"] = dict(B=1, K=1, index=torch.int32)
FORMS["ragged_layout of trees, every size 1"] = FORMS["ragged_layout, every size 1"] | dict(is_tree=True)

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
