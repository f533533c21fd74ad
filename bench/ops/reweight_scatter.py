"""Time ``reweight_scatter``. Floor: the rows are written once (``B * V * itemsize`` bytes), at copy bandwidth.

    python -m bench.ops.reweight_scatter [--device cpu] [--quick] [--json FILE]

Copy bandwidth counts bytes read and written, so a kernel that only writes can pass 100 %. Rows without ``[B, V]``
(scatter False) have next to no bytes: their time is the root search's latency. The dtype is that of ``[B, V]``, as a
case says, whatever ``--dtype`` is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.harness.cases import FLOATS, Benchmark, Case
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


def make_call(
    device: str, *, B: int, K: int, V: int = 256, dtype: str = "float32", modes: Any = MODES, given: Sequence[str] = ()
) -> partial:
    """A call whose requests have the ``modes`` by turns (None: no guidance), and some of the options."""
    params = [parse_guidance(modes[row % len(modes)]) if modes else None for row in range(B)]
    table = GuidanceTable.from_params(params, [{2}] * B, device).columns
    arguments = (make_candidates(B, K, V, device), torch.randn(B, K, device=device), table)
    options = dict(
        table_rows=torch.randperm(B, device=device), generated=torch.arange(B, dtype=torch.int32, device=device)
    )
    if "probs" in given:
        options["probs"] = torch.rand(B, V, device=device).to(getattr(torch, dtype))
    return partial(reweight_scatter, *arguments, **{name: options[name] for name in given})


def make_case(device: str, *, B: int, K: int, V: int, scatter: bool, dtype: str) -> Case:
    call = make_call(device, B=B, K=K, V=V, dtype=dtype, given=["probs"] if scatter else [])
    options = dict(table_rows=None, generated=None, text_breaks=None, probs=None) | call.keywords
    return Case(
        call,
        # Of a candidate: id, probability, value logit and the result.
        B * K * 4 * 4 + (options["probs"].nbytes if scatter else 0),
        reference=partial(reference.reweight_scatter, *call.args, **options),
    )


FORMS: dict[str, dict[str, Any]] = {}
for _K in (8, 64):
    FORMS[f"reweight_scatter K{_K}"] = dict(B=64, K=_K)
    for _label, _dtype in FLOATS.items():
        _given = ("table_rows", "generated", "probs")
        FORMS[f"reweight_scatter {_label} K{_K} with every option"] = dict(
            B=64, K=_K, V=VOCAB, dtype=_dtype, given=_given
        )
FORMS["reweight_scatter, every size 1"] = dict(B=1, K=1, V=1, modes=None)
FORMS["reweight_scatter of one token, every size 1"] = dict(B=1, K=1, V=1, modes=None, given=["probs"])

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
