"""Time of ``value_head`` for M candidates.

The peer has no gather and no norm. ``in_step`` is the call of a step: with a gather, and a norm whose factor comes from
the sums of squares that the last layer has stored. In a step the weights are cold and the hidden states warm.
"""

from functools import partial

import torch

from bench import peers
from bench.harness import FLOATS, Benchmark, TimedCase, nbytes
from bench.models import DIMENSIONS
from lenvm_kernels.ops.value_head import num_counters, value_head
from lenvm_kernels.reference._common import sums_of_squares


def make_call(*, size, M, dtype="float32", outputs=None, index=torch.int64, given=()):
    """A call with the options ``given`` for ``outputs`` of ``M`` rows. If None, for all rows."""
    random = partial(torch.randn, dtype=getattr(torch, dtype))
    weights = [random(*shape) * size**-0.5 for shape in ((size, size), (size,), (1, size), (1,))]
    hidden, outputs = random(M, size), M if outputs is None else outputs
    options = dict(
        token_rows=torch.randperm(M)[:outputs].to(index),
        targets=torch.randperm(outputs).to(index),
        square_sums=sums_of_squares(hidden),
        norm_weight=random(size),
        counters=torch.zeros(num_counters(outputs), dtype=torch.int32),
    )
    return partial(value_head, hidden, *weights, **{name: options[name] for name in given})


def make_case(*, model, M, in_step, dtype="bfloat16"):
    size, of_step = DIMENSIONS[model][0], ("token_rows", "targets", "square_sums")
    call = make_call(size=size, M=M, dtype=dtype, given=("counters", *(of_step if in_step else ())))
    options = [call.keywords.get(name) for name in of_step]
    rivals = {} if in_step else {"cuBLAS + SiLU + GEMV": partial(peers.unfused_head, *call.args)}
    return TimedCase(call, nbytes(call.args, options) + M * 4, 2 * M * size * (size + 1), peers=rivals)


_OF_STEP = ("token_rows", "targets", "counters", "square_sums")
FORMS = {
    f"value_head {dtype} M{M} H{size}{name}": dict(size=size, M=M, dtype=dtype, **form)
    for dtype in FLOATS
    for size in (1536, 3584)
    for M in (64, 512)  # either tile
    for name, form in {
        "": {},
        " with gather and norm": dict(outputs=M - 24, given=("token_rows", "norm_weight")),
        " in a step": dict(outputs=M - 24, index=torch.int32, given=_OF_STEP),
        " with every option": dict(outputs=M - 24, index=torch.int32, given=(*_OF_STEP, "norm_weight")),
    }.items()
}
FORMS["value_head, every size 1"] = dict(size=1, M=1, given=("square_sums", "counters"))

BENCHMARK = Benchmark(
    "value_head",
    make_case,
    dict(model="Qwen2.5-1.5B", M=320, in_step=False),  # B 64, k 5
    axes=dict(in_step=[True], M=[5, 40, 1280, 2560], model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"]),
    quick=[dict(model="Qwen2.5-0.5B", M=5), dict(model="Qwen2.5-0.5B", M=5, in_step=True)],
)
