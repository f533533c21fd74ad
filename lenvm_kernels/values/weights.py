"""The weights of a value model in the form that its operators take: fused, with norm weights multiplied in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lenvm_kernels.values.checkpoint import ValueModelConfig


class Layer(NamedTuple):
    """Weights of one decoder layer. q, k, v and gate, up are fused, with the preceding norm's weight multiplied in."""

    qkv: torch.Tensor  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D], the same row for all query heads and for all key heads
    o: torch.Tensor  # [H, Hq * D]
    o_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 I, H]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, I]
    down_bias: torch.Tensor | None


class FusedWeights:
    """Builds the weights from a checkpoint's tensors, in one dtype on one device."""

    def __init__(
        self, config: ValueModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._tensors, self._dtype, self._device = config, tensors, dtype, device

    def get(self, name: str) -> torch.Tensor:
        """A tensor, converted but not fused."""
        return self._tensors[name].detach().to(self._device, self._dtype)

    def _stacked(self, names: list[str]) -> torch.Tensor | None:
        """The named tensors concatenated by rows; None if the architecture lacks them (biases)."""
        if names[0] not in self._tensors:
            return None
        return self.get(names[0]) if len(names) == 1 else torch.cat([self.get(name) for name in names])

    def _normed(self, names: list[str], norm: str) -> torch.Tensor:
        """The named matrices concatenated by rows, times the norm's weight: their input is only divided by its RMS."""
        rows = [self._tensors[name].shape[0] for name in names]
        out = torch.empty(sum(rows), self._config.hidden_size, dtype=self._dtype, device=self._device)
        norm_weight = self._tensors[f"{norm}.weight"].detach().to(self._device, torch.float32)
        for part, name in zip(out.split(rows), names, strict=True):  # one matrix at a time in fp32, rounded once
            part.copy_(self._tensors[name].detach().to(self._device, torch.float32) * norm_weight)
        return out

    def layer(self, layer: str) -> Layer:
        """The weights of a decoder layer, from the prefix of its tensor names."""
        config, qk_norm = self._config, None
        if config.qk_norm:
            q_norm, k_norm = (self.get(f"{layer}.self_attn.{x}_norm.weight") for x in "qk")
            qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
        qkv = [f"{layer}.self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")]
        return Layer(
            qkv=self._normed([f"{x}.weight" for x in qkv], f"{layer}.input_layernorm"),
            qkv_bias=self._stacked([f"{x}.bias" for x in qkv]),
            qk_norm=qk_norm,
            o=self.get(f"{layer}.self_attn.o_proj.weight"),
            o_bias=self._stacked([f"{layer}.self_attn.o_proj.bias"]),
            gate_up=self._normed([f"{x}.weight" for x in gate_up], f"{layer}.post_attention_layernorm"),
            gate_up_bias=self._stacked([f"{x}.bias" for x in gate_up]),
            down=self.get(f"{layer}.mlp.down_proj.weight"),
            down_bias=self._stacked([f"{layer}.mlp.down_proj.bias"]),
        )

    def head(self) -> tuple[torch.Tensor, ...]:
        """The value head: its first matrix, times the final norm's weight, and its vectors.

        The vectors are kept in fp32, which the operator accepts, because the output is sensitive to their rounding.
        """
        vectors = (self._tensors[f"v_head.{x}"] for x in ("fc.bias", "summary.weight", "summary.bias"))
        fc_weight = self._normed(["v_head.fc.weight"], "norm")
        return fc_weight, *(x.detach().to(self._device, torch.float32) for x in vectors)
