"""Values of candidates from a base model's own states: time against the floor.

    python -m bench.ops.candidate_values [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

B requests of K candidates. In a step the table and the weights are cold, and the rows that the projection of the states
has just written are warm.
"""

from collections.abc import Sequence
from functools import partial

import torch

from bench.harness.cases import FLOATS, Benchmark, Case
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.candidate_values import candidate_values, num_counters
from lenvm_kernels.reference import candidate_values as reference

# Of the demo's trunk.
SIZE, OUTPUTS, BINS = 128, 128, 33


def make_call(
    device: str,
    *,
    B: int,
    K: int,
    vocab: int,
    dtype: str,
    size: int = SIZE,
    outputs: int = OUTPUTS,
    bins: int = BINS,
    index: torch.dtype = torch.int32,
    given: Sequence[str] = (),
) -> partial:
    """A call for ``B`` requests of ``K`` candidates each; ``scale`` and ``shift`` are halves of the same rows."""
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    scale, shift = random(B, 2 * size).split(size, dim=1)
    options = dict(counters=torch.zeros(num_counters(B, K), dtype=torch.int32, device=device))
    return partial(
        candidate_values,
        torch.randint(vocab, (B, K), device=device, dtype=index),
        scale,
        shift,
        random(vocab, size),
        random(outputs, size) * size**-0.5,
        random(outputs),
        random(bins, outputs) * outputs**-0.5,
        random(bins),
        torch.arange(1, bins + 2, dtype=torch.float32, device=device) ** 2,
        table=GuidanceTable.from_params([parse_guidance({"target_length": 80})] * B, [{0}] * B, device).columns,
        table_rows=torch.arange(B, dtype=index, device=device),
        generated=torch.full((B,), 30, dtype=torch.int32, device=device),
        **{name: options[name] for name in given},
    )


def make_case(device: str, *, B: int, K: int, vocab: int, dtype: str) -> Case:
    call = make_call(device, B=B, K=K, vocab=vocab, dtype=dtype, given=["counters"])
    token_ids, scale, _, embedding, *weights = call.args
    of_rows = {name: x for name, x in call.keywords.items() if name != "counters"}
    weight_bytes = sum(weight.nbytes for weight in weights)
    return Case(
        call,
        token_ids.nbytes
        + 2 * B * SIZE * scale.element_size()
        + weight_bytes
        # A row of the table a token, and two logits a candidate.
        + token_ids.unique().numel() * SIZE * embedding.element_size()
        + 2 * B * K * 4,
        2 * B * K * OUTPUTS * (SIZE + BINS),
        reference=partial(reference.candidate_values, *call.args, **of_rows),
    )


FORMS = {
    f"candidate_values {dtype} K{K}{name}": dict(B=64, K=K, vocab=1000, dtype=FLOATS[dtype], **form)
    for dtype in FLOATS
    for K in (8, 32)
    for name, form in {
        "": {},
        " with counters, int64": dict(index=torch.int64, given=("counters",)),
    }.items()
}
FORMS["candidate_values, every size 1"] = dict(B=1, K=1, size=1, outputs=1, bins=1, vocab=1, dtype="float32")

BENCHMARK = Benchmark(
    "candidate_values",
    make_case,
    production=dict(B=64, K=8, vocab=151_936),
    axes=dict(B=[1, 8, 256], K=[4, 32], vocab=[49_152]),
    others=[dict(B=1, K=1)],
    quick=(dict(B=1, vocab=49_152), dict(B=8)),
)

if __name__ == "__main__":
    BENCHMARK.main()
