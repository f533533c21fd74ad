"""What a training takes, computed before it begins: tokens, operations, hours on an H100 and memory.

Operations, and what a forward keeps for its gradient, are counted on a model without weights (device ``meta``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lenvm_kernels.loading.models import source_of
from lenvm_kernels.ops.candidate_values import MAX_BINS
from lenvm_kernels.training.network import Adapters, ValueNetwork
from lenvm_kernels.training.packs import Example, pack
from lenvm_kernels.training.trunk import OUTPUTS, SIZE

# Of an H100 (SXM): dense bf16 operations and bytes of memory a second, and the shares of them that are reckoned with.
FLOPS, BANDWIDTH, SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 989e12, 3.35e12, 0.4, 0.6
CANDIDATES = 8  # that a guided step values
GIB = 2**30


@dataclass(frozen=True)
class ModelCost:
    """Of one network.

    Attributes:
        parameters, trained: how many, the head's included.
        forward, step: operations a token of a forward, and of forward and backward.
        kept: bytes a token that a forward keeps for its gradient, in bf16.
    """

    parameters: int
    trained: int
    forward: float
    step: float
    kept: float


def model_cost(path: Path, adapters: Adapters | None, row_tokens: int, *, checkpointing: bool = False) -> ModelCost:
    """Count for a backbone or a base model, on a row of one answer; of a mixture's experts those that a token takes."""
    # Their grouped product is not counted, and a loop over those that are taken needs the weights.
    config = AutoConfig.from_pretrained(**source_of(path), experts_implementation="batched_mm")
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Fused attention keeps no matrix of all pairs of tokens.
        if storage._cdata not in weights and tensor.shape[-2:] != (row_tokens, row_tokens):
            kept[storage._cdata] = storage, storage.nbytes()
        return tensor

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        network = ValueNetwork(model, adapters, checkpointing=checkpointing).train()
    for parameter in network.model.parameters():
        parameter.data = parameter.data.bfloat16()  # as autocast computes, which has no rules for this device
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    example = Example([0], [0] * row_tokens, torch.zeros(row_tokens))
    made = pack([example], [[[0]]]).to(torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = network(made)
        forward = counter.get_total_flops()
        logits.sum().backward()
    return ModelCost(
        sum(parameter.numel() for parameter in network.parameters()),
        sum(parameter.numel() for parameter in network.trained().values()),
        forward / row_tokens,
        counter.get_total_flops() / row_tokens,
        sum(size for _, size in kept.values()) / row_tokens,
    )


def kv_bytes(path: Path) -> int:
    """Bytes of a token's keys and values, in bf16."""
    config = AutoConfig.from_pretrained(**source_of(path)).get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim


def collect_hours(
    base: ModelCost, base_kv: int, value: ModelCost | None, tokens: float, context: float, rows: int
) -> float:
    """On one H100: each step reads the weights and the keys and values of all rows once.

    Args:
        base, value: the models; None: nothing guides.
        base_kv: bytes of a token's keys and values of the base model.
        tokens: to sample.
        context: that a row has on average.
        rows: at a time.
    """
    moved = 2 * base.parameters + rows * context * base_kv
    computed = rows * base.forward
    if value is not None:
        moved += 2 * value.parameters
        computed += rows * (1 + CANDIDATES) * value.forward
    seconds = max(moved / (BANDWIDTH * SHARE_OF_BANDWIDTH), computed / (FLOPS * SHARE_OF_FLOPS))
    return tokens / rows * seconds / 3600


def hours_of(flops: float) -> float:
    """On one H100."""
    return flops / (FLOPS * SHARE_OF_FLOPS) / 3600


def fit_gib(cost: ModelCost, forward_tokens: int) -> float:
    """Frozen weights in bf16, trained ones with gradient and two moments in fp32, and what a forward keeps."""
    fixed = 2 * (cost.parameters - cost.trained) + 16 * cost.trained
    return (fixed + forward_tokens * cost.kept) / GIB


def trunk_cost(path: Path, layers: int) -> tuple[int, int]:
    """Parameters of a trunk that reads so many layers of a base model, and bytes of the states of a token in bf16."""
    hidden = AutoConfig.from_pretrained(**source_of(path)).get_text_config().hidden_size
    of_head = OUTPUTS * (SIZE + 1) + MAX_BINS * (OUTPUTS + 1)
    return 2 * SIZE * (layers * hidden + 1) + SIZE * hidden + of_head, 2 * layers * hidden


def trunk_fit_flops(base: ModelCost, parameters: int, tokens: float, states: int, epochs: int) -> float:
    """Operations of a forward of the base model over so many tokens, and of a trunk's training on states of them."""
    return tokens * base.forward + 6 * parameters * min(states, tokens) * epochs
