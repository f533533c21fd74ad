"""Time of ``candidate_values``.

B requests with K candidates each. In a step the table and the weights are cold, and the states' projections are warm.
"""

from functools import partial

import torch

from bench.harness import FLOATS, Benchmark, TimedCase, nbytes
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.candidate_values import candidate_values


def make_call(*, B, K, vocab=1000, dtype="float32", size=128, outputs=128, bins=33, index=torch.int32):
    """A call with the sizes of the demo's probe; ``scale`` and ``shift`` are halves of the same rows."""
    random, device = partial(torch.randn, dtype=getattr(torch, dtype)), torch.get_default_device()
    return partial(
        candidate_values,
        torch.randint(vocab, (B, K), dtype=index),
        *random(B, 2 * size).split(size, dim=1),
        random(vocab, size),
        random(outputs, size) * size**-0.5,
        random(outputs),
        random(bins, outputs) * outputs**-0.5,
        random(bins),
        torch.arange(1, bins + 2, dtype=torch.float32) ** 2,
        table=GuidanceTable.from_params([parse_guidance({"target_length": 80})] * B, [{0}] * B, device).columns,
        table_rows=torch.arange(B, dtype=index),
        generated=torch.full((B,), 30, dtype=torch.int32),
    )


def make_case(*, B, K, vocab, dtype="bfloat16"):
    call = make_call(B=B, K=K, vocab=vocab, dtype=dtype)
    token_ids, scale, shift, embedding, *weights = call.args
    rows = token_ids.unique().numel() * embedding[0].nbytes
    operations = 2 * B * K * (weights[0].numel() + weights[2].numel())
    return TimedCase(call, nbytes(token_ids, scale, shift, weights) + rows + 2 * B * K * 4, operations)


FORMS = {
    f"candidate_values {dtype} K{K} {index}": dict(B=64, K=K, dtype=dtype, index=index)
    for dtype in FLOATS
    for K in (8, 32)
    for index in (torch.int32, torch.int64)
}
FORMS["candidate_values, every size 1"] = dict(B=1, K=1, vocab=1, size=1, outputs=1, bins=1)

PRODUCTION = dict(B=64, K=8, vocab=151_936)
AXES = dict(B=[1, 8, 256], K=[4, 32], vocab=[49_152])
BENCHMARK = Benchmark("candidate_values", make_case, PRODUCTION, AXES, quick=[dict(B=1, vocab=49_152), dict(B=8)])
