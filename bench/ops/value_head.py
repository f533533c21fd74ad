"""Time of ``value_head`` for M candidates.

The peer has no gather and no norm. ``in_step`` is the call in a step: with a gather, and a norm with the sums of
squares stored by the last layer. In a step, the weights are cold and the hidden states warm.
"""

from functools import partial

import torch

from bench import peers
from bench.harness import FLOATS, Benchmark, TimedCase, nbytes
from bench.models import DIMENSIONS
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.reference._common import sums_of_squares

_OF_STEP = ("token_rows", "num_rows", "norm_eps", "square_sums")


def make_call(*, size, M, dtype="float32", index=torch.int64, given=()):
    """A call with the options ``given`` for ``M`` rows."""
    random = partial(torch.randn, dtype=getattr(torch, dtype))
    weights = [random(*shape) * size**-0.5 for shape in ((size, size), (size,), (1, size), (1,))]
    hidden = random(M, size)
    options = dict(
        token_rows=torch.randperm(M).to(index),
        num_rows=torch.tensor([M], dtype=torch.int32),
        norm_eps=1e-6,
        square_sums=sums_of_squares(hidden),
    )
    return partial(value_head, hidden, *weights, **{name: options[name] for name in given})


def make_case(*, model, M, in_step, dtype="bfloat16"):
    size = DIMENSIONS[model][0]
    call = make_call(size=size, M=M, dtype=dtype, given=_OF_STEP if in_step else ())
    options = [call.keywords.get(name) for name in ("token_rows", "square_sums")]
    rivals = {} if in_step else {"cuBLAS + SiLU + GEMV": partial(peers.unfused_head, *call.args)}
    return TimedCase(call, nbytes(call.args, options) + M * 4, 2 * M * size * (size + 1), peers=rivals)


FORMS = {
    f"value_head {dtype} M512 H{size}{name}": dict(size=size, M=512, dtype=dtype, **form)
    for dtype in FLOATS
    for size in (1536, 3584, 4096)  # sums over 4,096 columns are split
    for name, form in {"": {}, " in a step": dict(index=torch.int32, given=_OF_STEP)}.items()
}
FORMS["value_head, every size 1"] = dict(size=1, M=1, given=("norm_eps", "square_sums"))

BENCHMARK = Benchmark(
    "value_head",
    make_case,
    dict(model="Qwen2.5-1.5B", M=320, in_step=False),  # B 64, k 5
    axes=dict(in_step=[True], M=[5, 40, 1280, 2560], model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"]),
    quick=[dict(model="Qwen2.5-0.5B", M=5), dict(model="Qwen2.5-0.5B", M=5, in_step=True)],
)
