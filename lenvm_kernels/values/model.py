"""The value model: one ragged forward over the delta and the candidates of every request.

The value model is a Qwen2, Qwen3, Llama or Qwen2.5-VL backbone with the value head of the LenVM paper (arXiv
2604.27039). Its layers compute the same as in ``transformers``. A forward makes no host-device sync and its shapes
depend only on the shapes of its arguments, so that a decode step can be captured in a CUDA graph. Its cost is
proportional to the number of tokens in use, which the operators read on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from lenvm_kernels.ops._common import FLOAT_DTYPES
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.ops.ragged_linear import ragged_linear, rows_of_every_tile
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.profiling import profiler_range
from lenvm_kernels.types import EmbeddedTokens
from lenvm_kernels.values import checkpoint
from lenvm_kernels.values.checkpoint import Head, ValueModelConfig, local_path
from lenvm_kernels.values.config import DISCOUNTED_RETURN, LenVMConfig
from lenvm_kernels.values.images import check_pixels, embedding_with_images, load_vision_tower
from lenvm_kernels.values.ragged_batch import KVCache, RaggedBatch


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
        """The named matrices concatenated by rows, times the norm's weight, to divide only the input by its RMS."""
        rows = [self._tensors[name].shape[0] for name in names]
        out = torch.empty(sum(rows), self._config.hidden_size, dtype=self._dtype, device=self._device)
        norm_weight = self._tensors[f"{norm}.weight"].detach().to(self._device, torch.float32)
        for part, name in zip(out.split(rows), names, strict=True):  # one matrix at a time in fp32, to save memory
            part.copy_(self._tensors[name].detach().to(self._device, torch.float32) * norm_weight)
        return out

    def layer(self, layer: str) -> Layer:
        """The weights of the decoder layer with this prefix of tensor names."""
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

        The vectors are kept in fp32, because the output is sensitive to their rounding.
        """
        vectors = (self._tensors[f"v_head.{x}"] for x in ("fc.bias", "summary.weight", "summary.bias"))
        fc_weight = self._normed(["v_head.fc.weight"], "norm")
        return fc_weight, *(x.detach().to(self._device, torch.float32) for x in vectors)


class ValueModel:
    """A length value model ready to run: weights on one device in one dtype, and the ragged forward.

    Args:
        config: the architecture.
        tensors: weights by name in a checkpoint (``model.layers.0.self_attn.q_proj.weight``, ...,
            ``v_head.fc.weight``; the prefix ``model.`` may be absent or ``model.language_model.``, and
            ``pretrained_model.`` may precede it). ``lm_head.*`` and ``*.rotary_emb.inv_freq`` are ignored. The tensors
            of a vision tower, ``visual.*``, are stored unchanged until the tower is used. Tensors that already have
            the dtype and device are shared, not copied, except the projections that are fused (q, k, v and gate, up).
            The weight of the norm before a fused projection is multiplied into it, in fp32 and rounded once.
        dtype: float32, bfloat16 or float16. If None, the embedding's.
        device: device of the weights. If None, the embedding's.
        lenvm_config: target form and gamma of the head. If None, ``LenVMConfig()``.

    Raises:
        ValueError: missing or unexpected tensors, a wrong shape, or an unsupported dtype; the message names them.
    """

    def __init__(
        self,
        config: ValueModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        lenvm_config: LenVMConfig | None = None,
    ) -> None:
        self._vision_tensors = checkpoint.vision_tensors(tensors)
        tensors = checkpoint.checked_tensors(config, tensors)
        embedding = tensors["embed_tokens.weight"]
        self.config, self.lenvm_config = config, lenvm_config or LenVMConfig()
        self.dtype = dtype or embedding.dtype
        self.device = embedding.device if device is None else torch.empty(0, device=device).device
        if self.dtype not in FLOAT_DTYPES:
            accepted = ", ".join(str(t).removeprefix("torch.") for t in FLOAT_DTYPES)
            raise ValueError(f"dtype must be one of {accepted}, got {str(self.dtype).removeprefix('torch.')}")

        fused = FusedWeights(config, tensors, self.dtype, self.device)
        self.embedding = fused.get("embed_tokens.weight")
        self.layers = [fused.layer(f"layers.{i}") for i in range(config.num_layers)]
        self.head = fused.head()
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=self.device)
        if config.mrope_sections is not None:  # index of the position that each frequency uses
            sections = torch.tensor(config.mrope_sections)
            self._rope_axis = torch.arange(3).repeat_interleave(sections).to(self.device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        head: Head | None = None,
        *,
        adapter: str | os.PathLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        gamma: float | None = None,
    ) -> ValueModel:
        """Load a value model from a Hugging Face directory or cache, or from a GGUF file through ``transformers``.

        Args:
            path: a directory with ``config.json`` and ``model.safetensors`` or its shards and their index, a ``.gguf``
                file (dequantised to float32), or ``owner/name`` on Hugging Face (:func:`local_path`). If a directory
                only has an adapter, the backbone is its ``base_model_name_or_path``.
            head: the value head, if it is stored separately from the backbone: a ``.safetensors`` or ``.bin`` file, a
                directory or ``owner/name`` with one, or a dictionary with ``v_head.fc.{weight,bias}`` and
                ``v_head.summary.{weight,bias}``. It takes precedence over ``v_head.*`` in the backbone's files, which
                take precedence over a file in the directory of the adapter or the backbone.
            adapter: a directory or ``owner/name`` with a low-rank adapter of the backbone (:func:`read_adapter`), which
                is merged into the weights; ``lenvm_config.json`` is read from its directory. If None, the adapter in
                the directory of ``path``, if there is one.
            dtype: float32, bfloat16 or float16. If None, the dtype of the checkpoint's embedding.
            device: device of the weights.
            gamma: replaces the gamma of ``lenvm_config.json``. If None, the file's is kept.

        Raises:
            FileNotFoundError: no directory, configuration, safetensors file or cached model of this name.
            ValueError: an unsupported architecture or adapter, missing, unexpected or misshapen tensors, or an invalid
                ``gamma`` or ``lenvm_config.json``; the message names them.
            ImportError: the packages that read a GGUF file are not installed.
        """
        path, adapter = local_path(path), None if adapter is None else local_path(adapter)
        lenvm_config = LenVMConfig.read(path if adapter is None else adapter, gamma)
        config, tensors = checkpoint.read_checkpoint(path, head, adapter)
        return cls(config, tensors, dtype=dtype, device=device, lenvm_config=lenvm_config)

    @classmethod
    def from_causal_lm(
        cls,
        model: torch.nn.Module,
        head: Head | None = None,
        *,
        adapter: str | os.PathLike | None = None,
        lenvm_config: LenVMConfig | None = None,
    ) -> ValueModel:
        """Put a value head on a loaded ``transformers`` causal language model, keeping its dtype and device.

        Unfused weights share the model's memory, so the effect of later changes to the model's weights is undefined.

        Args:
            model: a Qwen2, Qwen3, Llama or Qwen2.5-VL model of ``transformers``.
            head, adapter: as in :meth:`from_pretrained`. The adapter does not change ``model`` itself.
            lenvm_config: as in :class:`ValueModel`.

        Raises:
            FileNotFoundError, ValueError: as :meth:`from_pretrained`.
        """
        adapter = None if adapter is None else local_path(adapter)
        tensors = checkpoint.with_adapter(model.state_dict(), adapter)
        tensors = checkpoint.with_head(tensors, head or checkpoint.head_beside(adapter))
        return cls(ValueModelConfig.from_hf(model.config), tensors, lenvm_config=lenvm_config)

    @cached_property
    def vision_tower(self) -> torch.nn.Module | None:
        """The module of ``transformers`` that embeds images, loaded on first access; None if there is none.

        Raises:
            ValueError: missing or unexpected tensors, which the message names.
        """
        if self.config.vision is None or not self._vision_tensors:
            return None
        tower = load_vision_tower(self.config.vision, self._vision_tensors, self.dtype, self.device)
        self._vision_tensors = {}
        return tower

    @torch.no_grad()
    def embed_images(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens of images, in order, ``[N, H]``. Makes a host-device sync to read the grid.

        Args:
            pixel_values: floating-point ``[patches, elements]``, from the processor of ``transformers``.
            image_grid_thw: int64 ``[images, 3]``; patches of each image in time, rows and columns.

        Raises:
            ValueError: the vision tower is missing or invalid, or ``pixel_values`` has a wrong shape.
        """
        if self.vision_tower is None:
            raise ValueError("value_model must be a vision-language model with a vision tower, visual.*, for images")
        check_pixels(self.vision_tower, pixel_values, image_grid_thw)
        pixels, grid = pixel_values.to(self.device, self.dtype), image_grid_thw.to(self.device)
        return self.vision_tower(pixels, grid_thw=grid).pooler_output

    @torch.no_grad()
    def forward(self, batch: RaggedBatch, cache: KVCache, *, backend: str = "auto") -> torch.Tensor:
        """Value logits of all candidates; extends the cache by the delta tokens.

        Args:
            batch: the ``T`` rows, on the model's device.
            cache: keys and values of earlier forwards of this model; only delta tokens are added.
            backend: backend of the operators, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            ``z``, fp32 [B, K]: the value logit of each candidate, 0 in padding. Outputs of a head with another target
            form are converted with the model's gamma (:meth:`LenVMConfig.value_logits`). A token id outside the
            vocabulary (base models may have a larger one) gives NaN, and only its request's values are arbitrary.

        Raises:
            ValueError: a tensor has a wrong dtype, shape or device.
        """
        layout = batch.layout
        live: dict[str, Any] = dict(num_rows=layout.q_offsets[-1:], expected_rows=batch.expected_rows, backend=backend)
        with profiler_range("layers"):
            hidden, square_sums = self._run_layers(batch, cache, live)
        with profiler_range("head"):
            live |= dict(norm_eps=self.config.rms_norm_eps, square_sums=square_sums)
            z = value_head(hidden, *self.head, token_rows=layout.candidate_rows.flatten(), **live)
        z = z.view(layout.candidate_rows.shape)
        if self.lenvm_config.target_form == DISCOUNTED_RETURN:
            return z
        return self.lenvm_config.value_logits(z).masked_fill(layout.candidate_rows < 0, 0.0)

    def sizes_of_every_tile(self, most: int) -> list[int]:
        """Numbers of token rows, up to ``most``. Forwards with these rows in use compile all variants."""
        layer = self.layers[0]
        weights = [(w, False) for w in (layer.qkv, layer.o, layer.down, self.head[0])] + [(layer.gate_up, True)]
        return rows_of_every_tile(most, [(*w.shape, swiglu, w.dtype) for w, swiglu in weights])

    def _run_layers(
        self, batch: RaggedBatch, cache: KVCache, live: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of all layers, [T, H], and its sums of squares; writes keys and values to ``cache``."""
        hidden, square_sums, *rotation = self._embed(batch, live["num_rows"], live["backend"])
        # Each operator that adds to the residual stream also writes the sums of squares for the next norm.
        norm: dict[str, Any] = dict(norm_eps=self.config.rms_norm_eps, square_sums=square_sums)
        add: Callable[..., torch.Tensor] = partial(ragged_linear, square_sums_out=square_sums, **live)
        for i, layer in enumerate(self.layers):
            # Each intermediate result is freed as soon as the next operator has read it.
            attended = self._attend(i, EmbeddedTokens(hidden, square_sums, *rotation), batch, cache, live)
            hidden = add(attended, layer.o, layer.o_bias, residual=hidden)
            del attended
            gated = ragged_linear(hidden, layer.gate_up, layer.gate_up_bias, swiglu=True, **norm, **live)
            hidden = add(gated, layer.down, layer.down_bias, residual=hidden)
            del gated
        return hidden, square_sums

    def _embed(self, batch: RaggedBatch, num_rows: torch.Tensor, backend: str) -> EmbeddedTokens:
        """The inputs of the first layer."""
        layout, images, config = batch.layout, batch.images, self.config
        token_ids, embedding = layout.token_ids, self.embedding
        if images is not None and len(images.embeds):
            token_ids, embedding = embedding_with_images(token_ids, embedding, images)
        options: dict[str, Any] = dict(rope_scale=config.rope_scale, num_rows=num_rows, backend=backend)
        embedded = embed_tokens(token_ids, layout.positions, embedding, self._inv_freq, **options)
        if images is None:
            return embedded
        # Tokens at unmoved positions stay bitwise identical to a batch without images.
        is_moved = (images.positions != layout.positions).any(dim=0)[:, None]
        angles = images.positions[self._rope_axis].T.contiguous() * self._inv_freq
        return embedded._replace(
            cos=torch.where(is_moved, angles.cos() * config.rope_scale, embedded.cos),
            sin=torch.where(is_moved, angles.sin() * config.rope_scale, embedded.sin),
        )

    def _attend(
        self, i: int, x: EmbeddedTokens, batch: RaggedBatch, cache: KVCache, live: dict[str, Any]
    ) -> torch.Tensor:
        """The attention output of layer ``i``, [T, Hq * D]; writes keys and values to ``cache``."""
        config, layer, layout, backend = self.config, self.layers[i], batch.layout, live["backend"]
        options: dict[str, Any] = dict(num_rows=live["num_rows"], norm_eps=config.rms_norm_eps, backend=backend)
        expected: dict[str, Any] = dict(square_sums=x.square_sums, expected_rows=live["expected_rows"])
        caches = (cache.keys[i], cache.values[i])
        q, k, v = rope_cache(
            ragged_linear(x.hidden, layer.qkv, layer.qkv_bias, **expected, **options),
            *(x.cos, x.sin, layout.slots, *caches),
            num_heads=config.num_heads,
            qk_norm_weight=layer.qk_norm,
            **options,
        )
        rows = (batch.slot_table, batch.table_rows, layout.cached_lens, layout.q_offsets, batch.candidate_lens)
        work: dict[str, Any] = dict(plan=layout.plan, counters=layout.counters, page_size=batch.page_size)
        return value_tree_attention(q, k, v, *caches, *rows, parents=layout.parents, **work, backend=backend).flatten(1)
