"""Launch every kernel once or more on little data, for tools that watch each access: ``python -m bench.every_kernel``.

A prompt and guided steps of a value model of one layer, and a tree. On a CPU it needs TRITON_INTERPRET=1. Exits with 1
if a kernel of ``lenvm_kernels.ops`` was not launched or a result is not finite.
"""

import sys
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from bench.harness.measuring import limit_memory
from bench.kernel_calls import operators
from bench.launches import intercept_launches, kernels
from bench.models import make_config, make_model
from bench.step import Decode
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import Sampling, StepBatch
from lenvm_kernels.types import Drafts

# Narrow, but wide enough where a width decides which kernels are launched: the sums over I are split.
_WIDTHS = dict(hidden_size=64, intermediate_size=4096, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
CONFIG = make_config("Qwen3-1.7B", vocab_size=2048, **_WIDTHS)
# What the steps of such a model do not launch: a tree and a path of it, a norm of rows of which
# nobody left the sums of squares, as a layer's operators do, and drafts where logits are limited.
SMALL = (
    ("value_tree_attention", dict(heads=(4, 2, 16), B=1, L=64, branches=2, levels=4, is_tree=True)),
    ("ragged_linear", dict(outputs=9, size=64, tokens=9, given=["norm_eps"])),
    ("candidate_values", dict(B=3, K=4, vocab=50, size=24, outputs=70, bins=5, dtype="float32")),
    ("limit_span", dict(B=3, D=2, V=CONFIG.vocab_size, new=2, hard_limit=2000)),
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

    for name, sizes in SMALL:
        floats = {} if "dtype" in sizes else {"dtype": str(dtype).removeprefix("torch.")}
        call = operators()[name].make_call(device, **sizes, **floats)
        results += [x for x in tree_leaves((call(backend="triton"), call.args)) if torch.is_tensor(x)]
    if decode.step.table.columns.faults.any():
        raise ValueError(f"rows lost their guidance: {decode.step.table.columns.faults.tolist()}")
    return results


def main() -> int:
    limit_memory()
    launched, found = set(), kernels()

    def record(name: str, launch: partial) -> object:
        launched.add(name)
        return launch()

    with intercept_launches(record):
        results = run("cuda" if torch.cuda.is_available() else "cpu")
    not_finite = sum(not result.float().isfinite().all() for result in results)
    missing = sorted(set(found) - launched)
    print(
        f"{len(found) - len(missing)} of {len(found)} kernels launched; {len(results)} results, {not_finite} not finite"
    )
    if missing:
        print("not launched:", *missing)
    return int(bool(missing or not_finite))


if __name__ == "__main__":
    sys.exit(main())
