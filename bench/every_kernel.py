"""Launch every kernel once or more on little data, for tools that watch each access: ``python -m bench.every_kernel``.

A prompt and guided steps of a value model of one layer, and a tree. On a CPU it needs TRITON_INTERPRET=1. Exits with 1
if a kernel of ``lenvm_kernels.ops`` was not launched or a result is not finite.
"""

import sys
from functools import partial

import torch

from bench.harness.measuring import limit_memory
from bench.launches import intercept_launches, kernels
from bench.models import make_model
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.value_model import ValueModelConfig

# Narrow, but wide enough where a width decides which kernels are launched: the sums over I are split.
CONFIG = ValueModelConfig(
    hidden_size=64,
    intermediate_size=4096,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=2048,
    rms_norm_eps=1e-6,
    rope_inv_freq=tuple(1e6 ** (-i / 8) for i in range(8)),
    qkv_bias=False,
    qk_norm=True,
)
PROMPTS = (600, 3, 40)  # of the first, most are in the cache already; more than 512 make attention split them
CACHED = (595, 0, 0)
STEPS = 2
GUIDANCE = ({"value_scale": 0.7}, {"target_length": 60}, {"target_length": 60, "op": "soft"})


def run(device: str) -> list[torch.Tensor]:
    """A prompt, steps and a tree; the results that have to be finite."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter's bf16 is broken
    rows, room = len(PROMPTS), max(PROMPTS) + STEPS + 1
    slots = PagedSlots(rows, room, device=device)
    model = make_model(CONFIG, dtype, device)
    step = GuidedStep(model, slots.table, slots.num_slots, vocab_size=CONFIG.vocab_size, graphs=False, backend="triton")

    def int32(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for row, guidance in enumerate(GUIDANCE):
        slots.extend(row, room)
        step.set(row, parse_guidance(guidance), {7}, prompt_len=PROMPTS[row], seed=row)
    lengths, cached, row_numbers = int32(PROMPTS), int32(CACHED), int32(range(rows))
    step.cache.keys.normal_()
    step.cache.values.normal_()
    lens = lengths - cached
    starts = lens.cumsum(0, dtype=torch.int32) - lens
    row_of = row_numbers.repeat_interleave(lens)
    position = torch.arange(len(row_of), dtype=torch.int32, device=device) + (cached - starts)[row_of]
    prompt = torch.randint(CONFIG.vocab_size, (len(row_of),), device=device)
    step.extend(prompt, slots.slots(row_of, position), row_numbers, starts, lens, cached)

    results, tokens = [], int32([1] * rows)
    filters = dict(
        top_k=int32([5] * rows), top_p=torch.ones(rows, device=device), min_p=torch.zeros(rows, device=device)
    )
    for number in range(STEPS):
        lengths = lengths + 1
        scores = torch.randn(rows, CONFIG.vocab_size, device=device)
        probs = torch.softmax(scores, 1) if number == STEPS - 1 else None
        output = step.step(
            scores,
            tokens,
            row_numbers,
            lengths,
            slots.slots(row_numbers, lengths - 1),
            **filters,
            is_logits=True,
            probs=probs,
            sample=True,
        )
        tokens = output.tokens
        results += [output.value_logits, output.probs, *([] if probs is None else [probs])]

    q, new = (torch.randn(9, heads, 16, dtype=dtype, device=device) for heads in (4, 2))
    cache = torch.randn(64, 2, 16, dtype=dtype, device=device)
    lengths = (int32([0]), int32([64]), int32([0, 9]), int32([8]))
    table, parents = int32([list(range(64))]), int32([-1, 0, 0, 1, 1, 2, 3, 4, 5])
    results.append(value_tree_attention(q, new, new, cache, cache, table, *lengths, parents=parents, backend="triton"))
    if step.table.faults.any():
        raise ValueError(f"rows lost their guidance: {step.table.faults.tolist()}")
    return results


def main() -> int:
    limit_memory()
    launched, found = set(), kernels()

    def record(name: str, launch: partial) -> object:
        launched.add(name)
        return launch()

    with intercept_launches(record):
        results = run("cuda" if torch.cuda.is_available() else "cpu")
    not_finite = sum(not result.isfinite().all() for result in results)
    missing = sorted(set(found) - launched)
    print(
        f"{len(found) - len(missing)} of {len(found)} kernels launched; {len(results)} results, {not_finite} not finite"
    )
    if missing:
        print("not launched:", *missing)
    return int(bool(missing or not_finite))


if __name__ == "__main__":
    sys.exit(main())
