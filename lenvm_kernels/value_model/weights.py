"""The weights of a value model as its operators take them: fused, times those of norms, and in 8 bits if so asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.ragged_linear import quantize_weight
from lenvm_kernels.value_model.checkpoint import ValueModelConfig

# Of the layers' matrices: the dtype of the model, or e4m3.
WEIGHTS = (None, "fp8")


class Layer(NamedTuple):
    """Weights of one decoder layer. q, k, v and gate, up are one matrix each, times the weight of the norm before.

    A matrix in 8 bits has scales, fp32, one a row."""

    qkv: torch.Tensor  # [(Hq + 2 Hkv) * D, H]
    qkv_scales: torch.Tensor | None
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D], the same row for all query heads and for all key heads
    o: torch.Tensor  # [H, Hq * D]
    o_scales: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 I, H]
    gate_up_scales: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, I]
    down_scales: torch.Tensor | None
    down_bias: torch.Tensor | None


class FusedWeights:
    """Makes weights of a checkpoint's tensors, in one dtype on one device. ``weights`` as in :class:`ValueModel`."""

    def __init__(
        self,
        config: ValueModelConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        weights: str | None,
    ) -> None:
        self._config, self._tensors, self._weights = config, tensors, weights
        self._dtype, self._device = dtype, device

    def get(self, name: str) -> torch.Tensor:
        """A tensor as it is."""
        return self._tensors[name].detach().to(self._device, self._dtype)

    def _stacked(self, names: list[str]) -> torch.Tensor | None:
        """The named tensors one below the other; ``None`` where the architecture has none (biases)."""
        if names[0] not in self._tensors:
            return None
        return self.get(names[0]) if len(names) == 1 else torch.cat([self.get(name) for name in names])

    def _folded(self, name: str, norm: str | None) -> torch.Tensor:
        """The named matrix in fp32, to be applied to what the norm before it, if any, has divided by its RMS."""
        weight = self._tensors[name].detach().to(self._device, torch.float32)
        return weight if norm is None else weight * self._tensors[f"{norm}.weight"].detach().to(weight)

    def _normed(self, names: list[str], norm: str) -> torch.Tensor:
        """The named matrices one below the other, folded and rounded once."""
        rows = [self._tensors[name].shape[0] for name in names]
        out = torch.empty(sum(rows), self._config.hidden_size, dtype=self._dtype, device=self._device)
        for part, name in zip(out.split(rows), names, strict=True):
            part.copy_(self._folded(name, norm))
        return out

    def _matrix(self, names: list[str], norm: str | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The named matrices one below the other, folded, and the scales of their rows if they are in 8 bits."""
        if self._weights is None:
            return self.get(names[0]) if norm is None else self._normed(names, norm), None
        rows = [self._tensors[name].shape[0] for name in names]
        out = torch.empty(sum(rows), self._tensors[names[0]].shape[1], dtype=E4M3, device=self._device)
        scales = torch.empty(sum(rows), dtype=torch.float32, device=self._device)
        # One after the other: each is fp32 for a while.
        for part, part_scales, name in zip(out.split(rows), scales.split(rows), names, strict=True):
            quantized, of_rows = quantize_weight(self._folded(name, norm))
            part.copy_(quantized)
            part_scales.copy_(of_rows)
        return out, scales

    def layer(self, layer: str) -> Layer:
        """Those of a decoder layer, by what the names of its tensors begin with."""
        config, qk_norm = self._config, None
        if config.qk_norm:
            q_norm, k_norm = (self.get(f"{layer}.self_attn.{x}_norm.weight") for x in "qk")
            qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
        qkv = [f"{layer}.self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")]
        qkv_weight, qkv_scales = self._matrix([f"{x}.weight" for x in qkv], f"{layer}.input_layernorm")
        o_weight, o_scales = self._matrix([f"{layer}.self_attn.o_proj.weight"])
        norm = f"{layer}.post_attention_layernorm"
        gate_up_weight, gate_up_scales = self._matrix([f"{x}.weight" for x in gate_up], norm)
        down_weight, down_scales = self._matrix([f"{layer}.mlp.down_proj.weight"])
        return Layer(
            qkv=qkv_weight,
            qkv_scales=qkv_scales,
            qkv_bias=self._stacked([f"{x}.bias" for x in qkv]),
            qk_norm=qk_norm,
            o=o_weight,
            o_scales=o_scales,
            o_bias=self._stacked([f"{layer}.self_attn.o_proj.bias"]),
            gate_up=gate_up_weight,
            gate_up_scales=gate_up_scales,
            gate_up_bias=self._stacked([f"{x}.bias" for x in gate_up]),
            down=down_weight,
            down_scales=down_scales,
            down_bias=self._stacked([f"{layer}.mlp.down_proj.bias"]),
        )

    def head(self) -> tuple[torch.Tensor, ...]:
        """The value head: its first matrix, times the final norm's weight, and its vectors.

        The vectors are kept in fp32, which the operator takes: lengths are decided there.
        """
        vectors = (self._tensors[f"v_head.{x}"] for x in ("fc.bias", "summary.weight", "summary.bias"))
        fc_weight = self._normed(["v_head.fc.weight"], "norm")
        return fc_weight, *(x.detach().to(self._device, torch.float32) for x in vectors)
