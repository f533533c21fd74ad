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
from bench.step import Decode
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.step import Sampling, StepBatch
from lenvm_kernels.types import Drafts
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
CACHED = 650  # more than 640 make attention split them
GUIDANCE = ({"value_scale": 0.7}, {"target_length": 60}, {"target_length": 60, "op": "soft", "end_token_ids": [3]})


def run(device: str) -> list[torch.Tensor]:
    """A prompt, steps, a tree, a path of it and a norm; the results that have to be finite."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter's bf16 is broken
    model, vocab = make_model(CONFIG, dtype, device), CONFIG.vocab_size
    decode = Decode(model, torch.tensor([5, 5, 3]), cached=CACHED, vocab_size=vocab, backend="triton")
    for row, guidance in enumerate(GUIDANCE):
        decode.step.add_request(row, parse_guidance(guidance), {7}, prompt_len=CACHED, seed=row)

    def int32(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lens, cached = int32([5, 3, 40]), int32([CACHED - 5, 0, 0])
    starts = lens.cumsum(0, dtype=torch.int32) - lens
    nothing = torch.empty(0, dtype=torch.int64, device=device)  # what the cache holds are tokens of these requests too
    decode.step.extend(nothing, nothing, decode.rows, 0 * lens, 0 * lens, 0 * lens + CACHED)
    row_of = decode.rows.repeat_interleave(lens)
    position = torch.arange(len(row_of), dtype=torch.int32, device=device) + (cached - starts)[row_of]
    prompt = torch.randint(vocab, (len(row_of),), device=device)
    decode.step.extend(prompt, decode.slots.slots(row_of, position), decode.rows, starts, lens, cached)

    probs = torch.softmax(decode.scores, 1)
    outputs = [decode(), decode(probs=probs)]
    results = [probs, *(x for output in outputs for x in (output.value_logits, output.probs))]

    drafted = Decode(model, torch.tensor([5, 3]), cached=CACHED, vocab_size=vocab, max_drafts=2, backend="triton")
    drafts = Drafts(drafted.tokens[:, None].repeat(1, 2), int32([[-1, 0]] * 2))
    output = drafted.step.step(
        drafted.scores.repeat_interleave(3, 0),
        StepBatch(drafted.tokens[:, None], drafted.rows, drafted.lengths, int32([1, 1])),
        Sampling(5, 1.0, 0.01, is_logits=True, sample=True),
        drafts,
        verify="same_draws",
    )
    results += [output.value_logits, output.probs]

    q, new = (torch.randn(9, heads, 16, dtype=dtype, device=device) for heads in (4, 2))
    cache = torch.randn(64, 2, 16, dtype=dtype, device=device)
    lengths = (int32([0]), int32([64]), int32([0, 9]), int32([8]))
    table, parents = int32([list(range(64))]), int32([-1, 0, 0, 1, 1, 2, 3, 4, 5])
    results.append(value_tree_attention(q, new, new, cache, cache, table, *lengths, parents=parents, backend="triton"))
    # Of that tree a path, computed in the last forward.
    nodes, moved = int32([list(range(9))]), torch.zeros_like(cache).repeat(2, 1, 1, 1, 1)
    path = (int32([0]), int32([0]), int32([[0, 1, 3]]), int32([2]), table, int32([0]))
    options = dict(new_lens=int32([3]), candidate_parents=parents[None], backend="triton")
    commit_winner(*moved, *new.repeat(2, 1, 1, 1, 1), nodes, nodes, *path, **options)
    results += moved
    scale = torch.full((2,), 2.0**-6, device=device)
    of_cache = dict(key_scales=scale, value_scales=scale)
    codes = (cache / scale[0]).to(E4M3)
    results.append(value_tree_attention(q, new, new, codes, codes, table, *lengths, **of_cache, backend="triton"))
    kept = torch.zeros(2, 64, 2, 16, dtype=E4M3, device=device)
    angles, places = torch.zeros(9, 8, device=device), torch.arange(9, device=device)
    rope_cache(
        q.repeat(1, 2, 1).flatten(1), angles.cos(), angles, places, *kept, num_heads=4, **of_cache, backend="triton"
    )
    results += kept.float()
    # Nobody left the sums of its squares, as a layer's operators do.
    results.append(ragged_linear(q.flatten(1), q.flatten(1), norm_eps=1e-6, backend="triton"))
    weight, scales = quantize_weight(q[0])
    x = torch.randn(9, 16, device=device).half()
    results.append(ragged_linear(x, weight, weight_scales=scales, backend="triton"))
    logits, tokens = torch.zeros(9, vocab, device=device), decode.tokens[:, None].repeat(1, 2)
    of_requests = (decode.step.table, tokens, decode.rows, decode.lengths)
    drafts = Drafts(tokens, int32([[-1, 0]] * 3))
    limit_span(logits, *of_requests, new_lens=int32([1, 2, 2]), drafts=drafts, backend="triton")
    results.append(logits)
    if decode.step.table.faults.any():
        raise ValueError(f"rows lost their guidance: {decode.step.table.faults.tolist()}")
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
