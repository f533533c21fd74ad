"""The states of a ``transformers`` model that a probe reads, captured by hooks on its layers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel


class ProbeStates:
    """The states of some layers in the last forward of a model.

    The hooks on the model are removed when this object is deleted.

    Args:
        model: a causal language model of ``transformers``.
        layers: as in :class:`ProbeConfig`.
        last: keep the states of the last position only.

    Raises:
        ValueError: as :func:`layers_of`.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], *, last: bool) -> None:
        modules, count = layers_of(model), model.config.get_text_config().num_hidden_layers
        kept: list[torch.Tensor | None] = [None] * len(layers)

        def keep(place: int, x: torch.Tensor) -> None:
            kept[place] = x[:, -1] if last else x

        handles = []
        for place, layer in enumerate(layers):

            def before(module: torch.nn.Module, args: Any, kwargs: Any, place: int = place) -> None:
                keep(place, args[0] if args else kwargs["hidden_states"])

            def after(module: torch.nn.Module, args: Any, output: Any, place: int = place) -> None:
                keep(place, output[0])

            if layer == count:
                handles.append(model.get_decoder().register_forward_hook(after))
            else:
                handles.append(modules[layer].register_forward_pre_hook(before, with_kwargs=True))
        self._kept = kept
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def take(self) -> torch.Tensor:
        """The states ``[B, L H]``, or ``[B, S, L H]`` of all positions. Can be taken once per forward.

        Raises:
            RuntimeError: there was no forward since the last call.
        """
        found = [x for x in self._kept if x is not None]
        if len(found) < len(self._kept):
            raise RuntimeError("the base model has not run since its states were taken")
        self._kept[:] = [None] * len(found)
        return torch.cat(found, dim=-1)


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of a causal language model.

    Raises:
        ValueError: the model has no module list of the length ``num_hidden_layers`` of its configuration.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(f"model must have a list of its {count} layers, {type(model).__name__} has none")
    return lists[0]
