"""Reads low-rank adapters of a backbone (LoRA, arXiv 2106.09685) from the files that PEFT writes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
# Prefix of tensor names in PEFT's files.
_PREFIX = "base_model.model."
# Fields that change the meaning of the matrices, with their accepted values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    # Initializations that do not change the backbone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change its weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    # aLoRA applies the matrices only after certain tokens.
    "alora_invocation_tokens": (None,),
}


def is_adapter(folder: str | os.PathLike) -> bool:
    """Whether a directory has an adapter, with or without a model's weights."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter(folder: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read ``adapter_config.json`` and ``adapter_model.safetensors`` of a directory.

    Returns:
        Two dictionaries by tensor name in the adapted model: the changes ``scale * B A`` of the matrices, fp32, of the
        matrices' shapes; and the tensors that were trained in full (biases, ``modules_to_save``).
        ``scale`` is ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with ``use_rslora``; ``r`` is a matrix's rank.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a method other than LoRA, a variant that does not just add ``B A``, or tensors that are not pairs
            of ``lora_A [r, in]`` and ``lora_B [out, r]``; the message names the field or the tensor.
    """
    file, tensors_file = Path(folder) / ADAPTER_CONFIG, Path(folder) / ADAPTER_FILE
    for needed in (file, tensors_file):
        if not needed.is_file():
            raise FileNotFoundError(f"an adapter must have {ADAPTER_CONFIG} and {ADAPTER_FILE}, {needed} is missing")
    config = json.loads(file.read_text(encoding="utf-8"))
    for field, accepted in _PLAIN.items():
        if config.get(field) not in accepted:
            names = " or ".join(repr(value) for value in accepted if value is not None) or "absent"
            raise ValueError(f"{field} in {file} must be {names}, got {config.get(field)!r}")
    alpha, rslora = config.get("lora_alpha"), bool(config.get("use_rslora"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ValueError(f"lora_alpha in {file} must be a number, got {alpha!r}")

    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(tensors_file).items()}
    added, replaced = {}, {}
    for name, tensor in tensors.items():
        module, _, part = name.partition(".lora_")
        if not part:
            replaced[name] = tensor
            continue
        missing = torch.empty(())
        a, b = (tensors.get(f"{module}.lora_{x}.weight", missing) for x in "AB")
        if part not in ("A.weight", "B.weight") or a.dim() != 2 or b.dim() != 2 or b.shape[1] != len(a):
            raise ValueError(
                f"{name} in {tensors_file} must form a pair lora_A.weight [r, in] and lora_B.weight [out, r], got "
                f"{list(a.shape) or 'none'} and {list(b.shape) or 'none'}"
            )
        if part == "A.weight":
            scale = alpha / (math.sqrt(len(a)) if rslora else len(a))
            added[f"{module}.weight"] = scale * (b.float() @ a.float())
    return added, replaced
