"""Estimated cost of a training on one H100, from models without weights (device ``meta``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lenvm_kernels.cli_arguments import TRUNK
from lenvm_kernels.demo.models import source_of
from lenvm_kernels.evaluate.prompts import TRAIN
from lenvm_kernels.training.collect import Plan
from lenvm_kernels.training.settings import Fitting

# Dense bf16 operations and bytes of memory traffic per second of an H100 SXM, and the shares that are assumed.
FLOPS, BANDWIDTH, SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 989e12, 3.35e12, 0.4, 0.6
CONTEXT = 512  # tokens that operations are counted on
GIB = 2**30


@dataclass(frozen=True)
class ModelCost:
    """Cost of one model.

    Attributes:
        parameters: number of weights.
        hidden: width of the hidden states.
        forward: operations per token of a forward.
        kv: bytes of a token's keys and values in bf16.
    """

    parameters: int
    hidden: int
    forward: float
    kv: int


def model_cost(path: Path) -> ModelCost:
    """Count weights and operations; in a mixture of experts, operations of the routed experts only."""
    # FlopCounterMode does not count grouped products, and a loop over the routed experts needs the weights.
    config = AutoConfig.from_pretrained(**source_of(path), experts_implementation="batched_mm")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids, mask = torch.zeros(1, CONTEXT, dtype=torch.int64), torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool)
        model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    config = config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv = 2 * 2 * config.num_hidden_layers * kv_heads * (getattr(config, "head_dim", None) or hidden // heads)
    return ModelCost(sum(p.numel() for p in model.parameters()), hidden, counter.get_total_flops() / CONTEXT, kv)


def estimate(plan: Plan, how: Fitting, rounds: int, base: Path, backbone: Path, prompts: Sequence[int]) -> str:
    """A Markdown table with the cost of every stage.

    Args:
        plan: the plan of the answers. Every answer counts with ``max_new_tokens``, and guidance is not counted.
        how: the settings of the fits.
        rounds: number of rounds.
        base: the base model.
        backbone: the backbone of a value model.
        prompts: number of tokens of every prompt.

    Raises:
        ValueError: transformers cannot run the base model without weights.
    """
    try:
        model, value = model_cost(base), model_cost(backbone)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of any model in transformers
        raise ValueError(f"BASE must be a model that --dry-run can run without weights, got {base}: {error}") from error
    tokens = len(prompts) * plan.samples * plan.max_new_tokens
    context = sum(prompts) / len(prompts) + plan.max_new_tokens / 2
    moved = 2 * model.parameters + plan.rows * context * model.kv  # bytes of a decode step
    step = max(moved / (BANDWIDTH * SHARE_OF_BANDWIDTH), plan.rows * model.forward / (FLOPS * SHARE_OF_FLOPS))
    collect = tokens, tokens * model.forward, tokens / plan.rows * step / 3600, moved / GIB
    lines = [
        f"Every answer counts with {plan.max_new_tokens} tokens. Hours assume one H100 at {SHARE_OF_FLOPS:.0%} of its "
        f"operations and {SHARE_OF_BANDWIDTH:.0%} of its bandwidth. Guidance, and activations of a value model's fit, "
        "are not counted.",
        "",
        "| stage | tokens | FLOPs | hours | GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    of_training = sum(prompt.split == TRAIN for prompt in plan.prompts) / len(plan.prompts)
    for number in range(1, rounds + 1):
        answered = number * of_training * (tokens + plan.samples * sum(prompts))
        if how.kind == TRUNK:
            flops, states = answered * model.forward, min(how.states, answered)
            memory = 2 * model.parameters + 2 * states * len(how.layers or [0]) * model.hidden
        else:  # frozen weights have no gradient, and two bytes instead of weight, gradient and two moments in fp32
            flops = how.epochs * answered * value.forward * (2 if how.lora_rank else 3)
            memory = value.parameters * (2 if how.lora_rank else 16)
            answered *= how.epochs
        fit = answered, flops, flops / (FLOPS * SHARE_OF_FLOPS) / 3600, memory / GIB
        for stage, numbers in (("collect", collect), ("fit", fit)):
            lines.append(f"| {stage}, round {number} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |")
    return "\n".join(lines)
