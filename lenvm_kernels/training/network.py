"""What is trained: a backbone with or without low-rank adapters, and a value head on its last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lenvm_kernels.loading.models import source_of
from lenvm_kernels.training.packs import Pack
from lenvm_kernels.value_model.checkpoint import HEAD_FILE
from lenvm_kernels.value_model.low_rank import ADAPTER_FILE

# Of a whole value model.
MODEL_FILE = "model.safetensors"
# What PEFT puts before the names of the model that it wraps.
PEFT = "base_model.model."
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ValueHead(torch.nn.Module):
    """The head, on states that are standardised first; :meth:`tensors` are those of one that takes raw states.

    Its last layer begins at 0 with a bias: the first values are all the mean value.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(size, size)
        self.summary = torch.nn.Linear(size, 1)
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    @torch.no_grad()
    def standardise(self, states: torch.Tensor, mean_value: float) -> None:
        """Take mean and spread of states ``[N, H]``, and begin with a mean value."""
        self.mean.copy_(states.float().mean(0))
        self.std.copy_(states.float().std(0).clamp(min=1e-6))
        self.summary.weight.zero_()
        self.summary.bias.fill_(torch.logit(torch.tensor(mean_value)))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Value logits fp32 ``[N]`` of states ``[N, H]``."""
        x = functional.silu(self.fc((states.float() - self.mean) / self.std))
        return self.summary(x).squeeze(-1)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of a checkpoint, fp32."""
        weight = self.fc.weight / self.std
        found = {
            "fc.weight": weight,
            "fc.bias": self.fc.bias - weight @ self.mean,
            "summary.weight": self.summary.weight,
            "summary.bias": self.summary.bias,
        }
        return {f"v_head.{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from the tensors of a checkpoint, with the standardisation as it is."""
        weight = tensors["v_head.fc.weight"].to(self.mean)
        self.fc.weight.copy_(weight * self.std)
        self.fc.bias.copy_(tensors["v_head.fc.bias"].to(self.mean) + weight @ self.mean)
        self.summary.weight.copy_(tensors["v_head.summary.weight"])
        self.summary.bias.copy_(tensors["v_head.summary.bias"])


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA, arXiv 2106.09685): their rank, and the lowest layer that has some."""

    rank: int
    first_layer: int = 0

    def config(self, num_layers: int) -> LoraConfig:
        """As PEFT has it. What an adapter adds counts once (``lora_alpha`` is the rank)."""
        layers = list(range(self.first_layer, num_layers))
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,
            target_modules=list(ADAPTED),
            layers_to_transform=layers,
            layers_pattern="layers",
            bias="none",
        )


class ValueNetwork(torch.nn.Module):
    """Backbone and head.

    Args:
        model: the backbone's language model, changed in place.
        adapters: None: all weights of the backbone are trained.
        autocast: what the backbone's matrix products compute in, if not in the dtype of its weights.
        checkpointing: keep of a layer its input alone, and compute the rest again for the gradient.
    """

    def __init__(
        self,
        model: Any,
        adapters: Adapters | None,
        *,
        autocast: torch.dtype | None = None,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.adapters, self._autocast = model, adapters, autocast
        if adapters is None:
            if not model.config.tie_word_embeddings:
                model.get_output_embeddings().requires_grad_(False)
        else:
            model.requires_grad_(False)
            self.peft_config = adapters.config(model.config.num_hidden_layers)
            inject_adapter_in_model(self.peft_config, model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.2x on
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.head = ValueHead(model.config.get_text_config().hidden_size)

    @classmethod
    def load(
        cls, backbone: Path, adapters: Adapters | None, dtype: torch.dtype, *, checkpointing: bool
    ) -> ValueNetwork:
        """Of a Hugging Face directory or a ``.gguf`` file.

        Args:
            backbone: where it is.
            adapters: as of the class.
            dtype: float32 or bfloat16, of weights that are not trained and of what is computed; weights that are
                trained are fp32.
            checkpointing: as of the class.
        """
        model = AutoModelForCausalLM.from_pretrained(
            **source_of(backbone),
            dtype=torch.float32 if adapters is None else dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
        )
        autocast = None if dtype == torch.float32 else dtype
        return cls(model, adapters, autocast=autocast, checkpointing=checkpointing)

    def states(self, pack: Pack) -> torch.Tensor:
        """The hidden states ``[T, H]`` after which there are values to predict."""
        autocast = None if self._autocast is None else torch.autocast(pack.ids.device.type, self._autocast)
        # What PEFT casts to the adapters' dtype, autocast would only cast back.
        with autocast or nullcontext(), disable_input_dtype_casting(self.model, active=autocast is not None):
            hidden = self.model.base_model(
                input_ids=pack.ids, attention_mask=pack.mask(), position_ids=pack.positions, use_cache=False
            ).last_hidden_state
        return hidden.flatten(0, 1)[pack.states]

    def forward(self, pack: Pack) -> torch.Tensor:
        """Value logits fp32 ``[T]``."""
        return self.head(self.states(pack))

    def trained(self) -> dict[str, torch.Tensor]:
        """What training changes, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The adapters' matrices as PEFT names them in a file."""
        found = get_peft_model_state_dict(self.model)
        return {f"{PEFT}{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    def take(self, folder: Path) -> None:
        """Go on from the adapters and the head of a directory, or from the head in a whole value model.

        Raises:
            ValueError: they do not fit.
        """
        if self.adapters is not None:
            tensors = {name.removeprefix(PEFT): tensor for name, tensor in load_file(folder / ADAPTER_FILE).items()}
            own = get_peft_model_state_dict(self.model)
            shapes = [{name: tensor.shape for name, tensor in of.items()} for of in (tensors, own)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"--initial must hold adapters of the same layers and rank, {str(folder)!r} has others"
                )
            set_peft_model_state_dict(self.model, tensors)
        file = folder / HEAD_FILE
        with safe_open(file if file.exists() else folder / MODEL_FILE, "pt") as tensors:
            self.head.take({name: tensors.get_tensor(name) for name in tensors.keys() if "v_head." in name})  # noqa: SIM118
