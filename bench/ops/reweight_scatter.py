"""Time of ``reweight_scatter``. The floor writes ``[B, V]`` once.

Bandwidth counts bytes read and written, so a kernel that only writes can exceed 100 %. Without ``[B, V]`` (scatter
False), the time is the latency of the root search.
"""

from functools import partial

import torch

from bench.harness import FLOATS, Benchmark, TimedCase, nbytes
from bench.models import VOCAB, make_candidates
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter

MODES = [{"mode": mode, "scale": scale} for mode, scale in (("mul", 0.7), ("centered_exp", -20), ("length_mul", 1.5))]
MODES += [{"target_length": 60}, {"target_length": 60, "op": "soft"}]


def make_call(*, B=64, K, V=256, dtype="float32", modes=MODES, given=()):
    """A call with the options ``given``. The requests use ``modes`` in turn; None is unguided."""
    device = torch.get_default_device()
    params = [parse_guidance(modes[row % len(modes)]) if modes else None for row in range(B)]
    table = GuidanceTable.from_params(params, [{2}] * B, device).columns
    options = dict(table_rows=torch.randperm(B), generated=torch.arange(B, dtype=torch.int32))
    if "probs" in given:
        options["probs"] = torch.rand(B, V).to(getattr(torch, dtype))
    options = {name: options[name] for name in given}
    return partial(reweight_scatter, make_candidates(B, K, V, device), torch.randn(B, K), table, **options)


def make_case(*, B, K, V, scatter, dtype):
    call = make_call(B=B, K=K, V=V, dtype=dtype, given=["probs"] if scatter else [])
    return TimedCase(call, B * K * 4 * 4 + nbytes(call.keywords))  # per candidate id, probability, logit and result


_EVERY = ("table_rows", "generated", "probs")
FORMS = {f"reweight_scatter K{K}": dict(K=K) for K in (8, 64)}
for _dtype in FLOATS:
    for _K in (8, 64):
        _form = dict(K=_K, V=VOCAB, dtype=_dtype, given=_EVERY)
        FORMS[f"reweight_scatter {_dtype} K{_K} with every option"] = _form
FORMS["reweight_scatter, every size 1"] = dict(B=1, K=1, V=1, modes=None)
FORMS["reweight_scatter of one token, every size 1"] = dict(B=1, K=1, V=1, modes=None, given=["probs"])

BENCHMARK = Benchmark(
    "reweight_scatter",
    make_case,
    dict(B=64, K=8, V=VOCAB, scatter=True, dtype="float32"),
    axes=dict(scatter=[False], dtype=["bfloat16"], B=[1, 8, 256, 512], V=[32_000, 262_144], K=[2, 64]),
    others=[dict(B=1, scatter=False), dict(B=512, scatter=False)],
    quick=[dict(B=4, V=32_000), dict(B=4, V=32_000, scatter=False)],
)
