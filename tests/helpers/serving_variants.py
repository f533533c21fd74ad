"""Variants of kernels that serving needs and ``GuidedStep.warm_up`` does not compile.

``python -m tests.helpers.serving_variants V`` (without TRITON_INTERPRET) simulates serving with a vocabulary of V
tokens: all batch sizes, all optional arguments, the calls of adapters, and tensors that are slices of longer ones.
Launches are skipped and only record the key of Triton's kernel cache. The JSON output has the number of keys recorded
in warm-up per kernel, and, per kind of call, the kernels and batch sizes with keys not recorded in warm-up.
"""

import json
import sys
from collections import defaultdict
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget

from bench.launches import intercept_launches, targeting
from bench.models import make_config, make_model, random_probe
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, StepBatch, StepConfig, value_source
from lenvm_kernels.types import Drafts
from lenvm_kernels.values import LengthProbe
from tests.helpers.engine import PaddedStep, take_step

MAX_ROWS = 19
CHUNK_TOKENS = 64
keys: dict[str, set[str]] = defaultdict(set)


def note_key(name, launch):
    """Record the cache key of a launch instead of launching it."""
    kernel, *args = launch.args
    options = {option: value for option, value in launch.keywords.items() if option not in ("grid", "warmup")}
    *_, bind = kernel.device_caches[0]
    options["debug"] = options.get("debug", kernel.debug) or triton.knobs.runtime.debug
    options["instrumentation_mode"] = triton.knobs.compilation.instrumentation_mode
    _, specialization, options = bind(*args, **options)
    keys[name].add(f"{specialization}{options}")


def slice_of_longer(tensor):
    """The same numbers at an offset of one element in a longer tensor, which is not aligned to 16 bytes."""
    return torch.cat([tensor.new_zeros(1, *tensor.shape[1:]), tensor])[1:]


def calls(step, rows, vocab):
    """Calls of adapters and engines for a batch of ``rows``, by name."""
    one = slice_of_longer(torch.ones(rows))
    i32, i64 = (slice_of_longer(torch.zeros(rows, dtype=dtype)) for dtype in (torch.int32, torch.int64))
    numbers, active = (slice_of_longer(x) for x in (torch.arange(rows), torch.ones(rows, dtype=torch.bool)))
    prompt = slice_of_longer(torch.zeros(7 * rows, dtype=torch.int32))
    mask = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32)
    x, bf16 = torch.zeros(rows, vocab), torch.zeros(rows, vocab, dtype=torch.bfloat16)
    padded = torch.zeros(rows, -(-vocab // 16) * 16)[:, :vocab]

    needed = step.values.needs_states

    def guide(scores, *, rows=numbers, integers=i64, **options):
        options = dict(top_k=i32, top_p=one, min_p=one) | options
        if needed is not None:
            options["states"] = slice_of_longer(torch.zeros(len(scores), needed[0], dtype=needed[1]))
        return partial(take_step, step, scores, integers, rows, i32, **options)

    logits = dict(is_logits=True)
    prompts, max_drafts = StepBatch(i64, numbers, i32), step.config.max_drafts
    if needed is not None:
        return {
            "SGLang draws": guide(x, drawn=i64, sample=True),
            "vLLM": guide(x, temperature=one, active=active, **logits),
            "int32 batch": guide(x, rows=numbers.int(), integers=i32, drawn=i32, sample=True),
        }
    if max_drafts:
        nodes = 1 + max_drafts
        tokens = torch.zeros(rows, nodes, dtype=torch.int32)
        grown = StepBatch(tokens, numbers, i32, i32)
        drafts = Drafts(tokens.long()[:, 1:], torch.zeros_like(tokens)[:, 1:])  # strided, as in the engine
        many = guide(
            torch.zeros(rows * nodes, vocab), integers=tokens, new_lens=i32, drafts=drafts, sample=True, **logits
        )
        return {
            "SGLang verifies": partial(many, temperature=one),
            "drafts in int32": partial(many, drafts=Drafts(tokens[:, 1:], tokens[:, 1:])),
            "same draws": partial(many, verify="same_draws"),
            "SGLang, prompts": partial(step.predict, prompts),
            "SGLang, verified tokens": partial(step.predict, grown),
            "SGLang draws after prompts": guide(x, drawn=i64, sample=True),
            "SGLang, spans after prompts": partial(step.prepare, x, prompts),
            "SGLang, spans": partial(step.prepare, torch.zeros(rows * nodes, vocab), grown, drafts),
            "vLLM without drafts": guide(x, integers=tokens, new_lens=i32, temperature=one, active=active, **logits),
            "vLLM, spans without drafts": partial(step.prepare, x, grown),
        }
    return {
        "SGLang draws": guide(x, drawn=i64, sample=True),
        "SGLang, greedy": guide(x, drawn=i64, **logits),
        "SGLang, prompts": partial(step.predict, prompts),
        "SGLang, prefill": partial(step.extend, prompt.long(), numbers, i32, i32, i32),
        "prefill in int32": partial(step.extend, prompt, numbers.int(), i32, i32, i32),
        "transformers": guide(x, temperature=one, active=active, probs=x, **logits),
        "probabilities in place": guide(x, probs=x),
        "probabilities and a mask": guide(x, vocab_mask=mask, sample=True),
        "logits": guide(x, sample=True, **logits),
        "logits and a mask": guide(x, vocab_mask=mask, temperature=one, sample=True, **logits),
        "logits in bf16": guide(bf16, temperature=one, sample=True, **logits),
        "padded logits": guide(padded, probs=padded.clone(), **logits),
        "int32 batch": guide(x, rows=numbers.int(), integers=i32, drawn=i32, sample=True),
        "spans": partial(step.prepare, x, prompts),
        "spans in bf16": partial(step.prepare, bf16, StepBatch(i32, numbers.int(), i32)),
    }


def serve(vocab):
    """The report as an object."""
    value_model = make_model(make_config("Qwen2.5-0.5B", vocab_size=512, num_layers=2), torch.bfloat16, "cpu")
    probe = LengthProbe(*random_probe((1,), 1, 512, 600), torch.zeros(600, 512, dtype=torch.bfloat16))
    report = {}
    for name, model, step_class, options in (
        ("with graphs", value_model, PaddedStep, {}),
        ("without graphs", value_model, GuidedStep, {}),
        ("with drafts", value_model, PaddedStep, {"max_drafts": 3}),
        ("with a probe", probe, PaddedStep, {}),
    ):
        keys.clear()
        slots = EngineSlots(torch.zeros(MAX_ROWS, 1024, dtype=torch.int32), 1000)
        options |= dict(vocab_size=vocab, chunk_tokens=CHUNK_TOKENS, backend="triton")
        step = step_class(value_source(model), slots, StepConfig(**options))
        for is_logits in (False, True):
            step.warm_up(is_logits=is_logits, probs_dtype=torch.float32, progress=False)
        step.warm_up(torch.bfloat16, progress=False)
        warm = {kernel: set(found) for kernel, found in keys.items()}
        for row in range(MAX_ROWS):
            guidance = {"target_length": 100, "return_values": row % 2 == 0, "end_token_ids": [1, 2]}
            step.add_request(row, parse_guidance(guidance), {0})
        new: dict[str, dict[str, list[int]]] = {}
        for rows in range(1, MAX_ROWS + 1):
            for name_of_call, call in calls(step, rows, vocab).items():
                before = {kernel: set(found) for kernel, found in keys.items()}
                call()
                for kernel, found in keys.items():
                    if found - before.get(kernel, set()):
                        new.setdefault(name_of_call, {}).setdefault(kernel, []).append(rows)
        report[name] = {"warm": {kernel: len(found) for kernel, found in warm.items()}, "new": new}
    return report


if __name__ == "__main__":
    with targeting(GPUTarget("cuda", 90, 32)), intercept_launches(note_key):
        print(json.dumps(serve(int(sys.argv[1]))))
