"""Probe inputs from a ``transformers`` model, captured by hooks on its layers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel


class ProbeStates:
    """The states of ``layers`` (:class:`ProbeConfig`) in the last forward of a causal language model.

    If ``last``, only the last position is kept. The hooks are removed when this object is deleted.

    Raises:
        ValueError: the model has no module list of ``num_hidden_layers`` modules.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], *, last: bool) -> None:
        decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
        lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
        if not lists:
            raise ValueError(f"model must have a list of its {count} layers, {type(model).__name__} has none")
        self._layers = layers
        self._kept = kept = dict[int, torch.Tensor]()

        def keep(layer: int, x: torch.Tensor) -> None:
            kept[layer] = x[:, -1] if last else x

        def before(layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            keep(layer, args[0] if args else kwargs["hidden_states"])

        handles = [
            decoder.register_forward_hook(lambda module, args, output: keep(count, output[0]))
            if layer == count
            else lists[0][layer].register_forward_pre_hook(partial(before, layer), with_kwargs=True)
            for layer in layers
        ]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def take(self) -> torch.Tensor:
        """The states ``[B, L H]``, or ``[B, S, L H]`` of all positions. Raises RuntimeError if already taken."""
        if not self._kept:
            raise RuntimeError("the base model has not run since its states were taken")
        return torch.cat([self._kept.pop(layer) for layer in self._layers], dim=-1)


def base_of_probe(model: PreTrainedModel) -> tuple[int, torch.Tensor]:
    """A base model's layer count and input embedding ``[V, H]``, for :meth:`LengthProbe.from_pretrained`."""
    embedding: Any = model.get_input_embeddings()
    return model.config.get_text_config().num_hidden_layers, embedding.weight.detach()
