"""Writing what was trained: the directory that engines load, and beside it the adapters alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from lenvm_kernels.loading.models import source_of
from lenvm_kernels.training.network import MODEL_FILE, ValueNetwork
from lenvm_kernels.value_model import LenVMConfig
from lenvm_kernels.value_model.checkpoint import HEAD_FILE, read_checkpoint
from lenvm_kernels.value_model.low_rank import ADAPTER_FILE

# Of an output directory: what engines load, and the adapters without the backbone.
VALUE, ADAPTER = "value", "adapter"


def write(
    network: ValueNetwork, backbone: Path, tokenizer: PreTrainedTokenizerBase, gamma: float, output: Path
) -> Path:
    """Write ``value/``, a whole value model, and ``adapter/``, what it adds to its backbone, if it has adapters.

    Args:
        network: what was trained.
        backbone: a Hugging Face directory or a ``.gguf`` file, from which all that was not trained is taken.
        tokenizer: of the backbone.
        gamma: the discount of the values.
        output: gets both, in place of older ones.

    Returns:
        The directory of the value model.
    """
    value, adapter = output / VALUE, output / ADAPTER
    new = output / f"{VALUE}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    head = network.head.tensors()
    if network.adapters is None:
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in network.model.state_dict().items()
            if not (name == "lm_head.weight" and network.model.config.tie_word_embeddings)
        } | head
    else:
        adapter.mkdir(exist_ok=True)
        matrices = {name: tensor.to(torch.bfloat16) for name, tensor in network.adapter_tensors().items()}
        save_file(matrices, adapter / ADAPTER_FILE, {"format": "pt"})
        network.peft_config.save_pretrained(str(adapter))
        save_file(head, adapter / HEAD_FILE)
        LenVMConfig(gamma=gamma).write(adapter)
        _, merged = read_checkpoint(backbone, head, adapter)
        tied = network.model.config.tie_word_embeddings
        tensors = {n: t.contiguous() for n, t in merged.items() if not (tied and n.endswith("lm_head.weight"))}
    save_file(tensors, new / MODEL_FILE, {"format": "pt"})
    config = AutoConfig.from_pretrained(**source_of(backbone))
    config.save_pretrained(new)
    tokenizer.save_pretrained(new)
    LenVMConfig(gamma=gamma).write(new)
    shutil.rmtree(value, ignore_errors=True)
    new.rename(value)
    return value
