"""Time ``reweight_scatter``. Floor: the rows are written once (``B * V * itemsize`` bytes), at copy bandwidth.

    python -m bench.ops.reweight_scatter [--device cpu] [--quick] [--json FILE]

Copy bandwidth counts bytes read and written, so a kernel that only writes can pass 100 %. Rows without ``[B, V]``
(scatter False) have next to no bytes: their time is the root search's latency. The dtype is that of ``[B, V]``, as a
case says, whatever ``--dtype`` is.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.models import VOCAB, make_candidates
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.reference import reweight_scatter as reference

MODES = [
    {"mode": "mul", "scale": 0.7},
    {"mode": "centered_exp", "scale": -20},
    {"mode": "length_mul", "scale": 1.5},
    {"target_length": 60},
    {"target_length": 60, "op": "soft"},
]


def make_case(device: str, *, B: int, K: int, V: int, scatter: bool, dtype: str) -> Case:
    table = GuidanceTable.from_params([parse_guidance(MODES[row % len(MODES)]) for row in range(B)], [{2}] * B, device)
    arguments = (make_candidates(B, K, V, device), torch.randn(B, K, device=device), table)
    probs = torch.rand(B, V, device=device).to(getattr(torch, dtype)) if scatter else None
    return Case(
        partial(reweight_scatter, *arguments, probs=probs),
        # Of a candidate: id, probability, value logit and the result.
        B * K * 4 * 4 + (probs.nbytes if scatter else 0),
        reference=partial(
            reference.reweight_scatter, *arguments, table_rows=None, generated=None, text_breaks=None, probs=probs
        ),
    )


BENCHMARK = Benchmark(
    "reweight_scatter",
    make_case,
    production=dict(B=64, K=8, V=VOCAB, scatter=True, dtype="float32"),
    axes=dict(scatter=[False], dtype=["bfloat16"], B=[1, 8, 256, 512], V=[32_000, 128_256, 262_144], K=[2, 16, 64, 32]),
    others=[
        dict(B=1, scatter=False),
        dict(B=512, scatter=False),
        dict(B=512, K=64, scatter=False),
        dict(B=512, K=64, V=262_144),
    ],
    quick=(dict(B=4, V=32_000), dict(scatter=False)),
)

if __name__ == "__main__":
    BENCHMARK.main()
