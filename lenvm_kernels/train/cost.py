"""Estimated cost of a training on one H100."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from lenvm_kernels.loading.arguments import PROBE
from lenvm_kernels.loading.models import source_of
from lenvm_kernels.loading.prompts import TRAIN
from lenvm_kernels.train.collect import CollectionPlan
from lenvm_kernels.train.settings import Fitting

# Dense bf16 operations and bytes of memory traffic per second of an H100 SXM, and the shares that are assumed.
FLOPS, BANDWIDTH, SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 989e12, 3.35e12, 0.4, 0.6
GIB = 2**30


def estimate(
    plan: CollectionPlan, how: Fitting, rounds: int, base: Path, backbone: Path, prompts: Sequence[int]
) -> str:
    """A Markdown table with the cost of every stage, for prompts of ``prompts[i]`` tokens.

    A forward takes two operations per weight and token. Every answer counts with ``plan.max_new_tokens``.
    """
    config = AutoConfig.from_pretrained(**source_of(base)).get_text_config()
    size, backbone_size = parameters(base), parameters(backbone)
    tokens = len(prompts) * plan.samples * plan.max_new_tokens
    # Memory holds the weights, keys and values; a decode step reads keys and values of half an answer on average.
    prompt, kv = sum(prompts) / len(prompts), plan.rows * kv_bytes(config)
    memory, read = (2 * size + (prompt + length) * kv for length in (plan.max_new_tokens, plan.max_new_tokens / 2))
    step = max(read / (BANDWIDTH * SHARE_OF_BANDWIDTH), plan.rows * 2 * size / (FLOPS * SHARE_OF_FLOPS))
    collect = tokens, 2.0 * tokens * size, tokens / plan.rows * step / 3600, memory / GIB
    lines = [
        f"Every answer counts with {plan.max_new_tokens} tokens, and every expert of a mixture with all tokens. Hours "
        f"assume one H100 at {SHARE_OF_FLOPS:.0%} of its operations and {SHARE_OF_BANDWIDTH:.0%} of its bandwidth. "
        "Guidance, and activations of a value model's fit, are not counted.",
        "",
        "| stage | tokens | FLOPs | hours | GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    of_training = sum(prompt.split == TRAIN for prompt in plan.prompts) / len(plan.prompts)
    for number in range(1, rounds + 1):
        answered = number * of_training * (tokens + plan.samples * sum(prompts))
        if how.kind == PROBE:
            flops = 2 * answered * size
            memory = 2 * size + 2 * min(how.states, answered) * len(how.layers or [0]) * config.hidden_size
        else:  # a frozen weight has no gradient, and 2 bytes; a trained one has 16 with its gradient and moments
            answered *= how.epochs
            flops = answered * backbone_size * (4 if how.lora_rank else 6)
            memory = backbone_size * (2 if how.lora_rank else 16)
        fit = answered, flops, flops / (FLOPS * SHARE_OF_FLOPS) / 3600, memory / GIB
        for stage, numbers in (("collect", collect), ("fit", fit)):
            lines.append(f"| {stage}, round {number} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |")
    return "\n".join(lines)


def parameters(path: Path) -> int:
    """Number of weights of a model, counted without loading them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source_of(path)))
    return sum(parameter.numel() for parameter in model.parameters())


def kv_bytes(config: PreTrainedConfig) -> int:
    """Bytes of a token's keys and values in bf16; 0 for a model without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return 2 * 2 * config.num_hidden_layers * kv_heads * head_dim
