"""The value model: a Hugging Face checkpoint -> one ragged forward over the delta and the candidates of every request.

A Qwen2, Qwen3 or Llama backbone with the value head of the LenVM paper (arXiv 2604.27039). Layer by layer it computes
what ``transformers`` does. The delta of a request can be 0, 1 or a whole prompt, and its candidates never enter the
cache. A forward reads nothing back to the host and its shapes follow from those of its arguments alone, so that a
decode step can be captured in a CUDA graph; its cost follows the tokens there are, because the operators of its layers
read their number on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lenvm_kernels.ops._common import FLOAT_DTYPES
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.ops.ragged_linear import Tile, choose_tile, num_splits, ragged_linear
from lenvm_kernels.ops.ragged_linear import num_counters as linear_counters
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.value_head import num_counters as value_head_counters
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.ops.value_tree_attention import num_counters as attention_counters
from lenvm_kernels.ops.value_tree_attention import plan_attention, value_tree_attention
from lenvm_kernels.value_model.cache_scales import key_and_value_bounds, scales_of
from lenvm_kernels.value_model.checkpoint import Head, ValueModelConfig, checked_tensors, read_checkpoint, with_head
from lenvm_kernels.value_model.ragged_batch import KVCache, RaggedBatch

# Counters that launches of a forward share, one launch at a time: those of a prompt of 64k tokens, or of 4,096 requests
# with 8 key/value heads. Operators that need more make their own.
_COUNTERS = 1 << 16


class _Layer(NamedTuple):
    """Weights of one decoder layer. q, k, v and gate, up are one matrix each, times the weight of the norm before."""

    qkv: torch.Tensor  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D], the same row for all query heads and for all key heads
    o: torch.Tensor  # [H, Hq * D]
    o_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 I, H]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, I]
    down_bias: torch.Tensor | None


class ValueModel:
    """A length value model ready to run: weights on one device in one dtype, and the ragged forward.

    Args:
        config: the architecture.
        tensors: weights by their names in a checkpoint (``model.layers.0.self_attn.q_proj.weight``, ...,
            ``v_head.fc.weight``; the prefix ``model.`` may be absent). ``lm_head.*`` and ``*.rotary_emb.inv_freq`` are
            ignored. Tensors that already have the dtype and device are shared, not copied, except the projections
            that are fused (q, k, v and gate, up). The weight of the norm before a fused projection is multiplied into
            it, in fp32 and rounded once.
        dtype: float32, bfloat16 or float16; default that of the embedding.
        device: default that of the embedding.

    Raises:
        ValueError: missing or unexpected tensors, a wrong shape, or an unsupported dtype, all by name.

    Example:
        >>> model = ValueModel.from_pretrained("path/to/value-model", device="cuda")
        >>> cache = KVCache.of_slots(model, 128)
        >>> i32 = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")
        >>> delta, candidates = i32([11, 12, 13]), i32([[21, 22]])  # a prompt, and two candidates for the next token
        >>> slots = i32([[7, 8, 9]])  # of the prompt's tokens
        >>> batch = RaggedBatch.build(
        ...     delta, slots[0], i32([0]), i32([3]), candidates, i32([2]), i32([0]), slots, i32([0])
        ... )
        >>> z = model.forward(batch, cache)  # fp32 [1, 2]
    """

    def __init__(
        self,
        config: ValueModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        weights = checked_tensors(config, tensors)
        embedding = weights["embed_tokens.weight"]
        self.config = config
        self.dtype = dtype or embedding.dtype
        self.device = embedding.device if device is None else torch.empty(0, device=device).device
        if self.dtype not in FLOAT_DTYPES:
            accepted = ", ".join(str(t).removeprefix("torch.") for t in FLOAT_DTYPES)
            raise ValueError(f"dtype must be one of {accepted}, got {str(self.dtype).removeprefix('torch.')}")

        def get(name: str) -> torch.Tensor:
            return weights[name].detach().to(self.device, self.dtype)

        def stacked(names: list[str]) -> torch.Tensor | None:
            """The named tensors one below the other; ``None`` where the architecture has none (biases)."""
            if names[0] not in weights:
                return None
            return get(names[0]) if len(names) == 1 else torch.cat([get(name) for name in names])

        def normed(names: list[str], norm: str) -> torch.Tensor:
            """The named matrices one below the other, to be applied to what the norm has divided by its RMS."""
            norm_weight = weights[f"{norm}.weight"].detach().to(self.device, torch.float32)
            rows = sum(weights[name].shape[0] for name in names)
            out = torch.empty(rows, config.hidden_size, dtype=self.dtype, device=self.device)
            for part, name in zip(out.split([weights[name].shape[0] for name in names]), names, strict=True):
                part.copy_(weights[name].detach().to(self.device, torch.float32) * norm_weight)
            return out

        def load_layer(layer: str) -> _Layer:
            qk_norm = None
            if config.qk_norm:
                q_norm, k_norm = (get(f"{layer}.self_attn.{x}_norm.weight") for x in "qk")
                qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
            qkv = [f"{layer}.self_attn.{x}_proj" for x in "qkv"]
            gate_up = [f"{layer}.mlp.{x}_proj" for x in ("gate", "up")]
            return _Layer(
                qkv=normed([f"{x}.weight" for x in qkv], f"{layer}.input_layernorm"),
                qkv_bias=stacked([f"{x}.bias" for x in qkv]),
                qk_norm=qk_norm,
                o=get(f"{layer}.self_attn.o_proj.weight"),
                o_bias=stacked([f"{layer}.self_attn.o_proj.bias"]),
                gate_up=normed([f"{x}.weight" for x in gate_up], f"{layer}.post_attention_layernorm"),
                gate_up_bias=stacked([f"{x}.bias" for x in gate_up]),
                down=get(f"{layer}.mlp.down_proj.weight"),
                down_bias=stacked([f"{layer}.mlp.down_proj.bias"]),
            )

        self.embedding = get("embed_tokens.weight")
        self.layers = [load_layer(f"layers.{i}") for i in range(config.num_layers)]
        # The vectors of the head are kept in fp32, which the operator takes: lengths are decided there.
        vectors = (weights[f"v_head.{x}"] for x in ("fc.bias", "summary.weight", "summary.bias"))
        fc_weight = normed(["v_head.fc.weight"], "norm")
        self.head = (fc_weight, *(x.detach().to(self.device, torch.float32) for x in vectors))
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=self.device)
        # Zeros that every launch leaves as it found them. Made here, not in a graph's capture, which may never be run.
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=self.device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        head: Head | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> ValueModel:
        """Load a value model from a Hugging Face directory, or from a GGUF file through ``transformers``.

        Args:
            path: a directory with ``config.json`` and ``model.safetensors`` or its shards and their index, or a
                ``.gguf`` file (dequantised to float32). Pickled weights are never read.
            head: the value head, when it is not with the backbone: a ``.safetensors`` file or a dictionary with
                ``v_head.fc.{weight,bias}`` and ``v_head.summary.{weight,bias}``. It wins over ``v_head.*`` in the
                backbone's files, and those over ``value_head.safetensors`` beside them.
            dtype: float32, bfloat16 or float16; default that of the checkpoint's embedding.
            device: where to put the weights.

        Raises:
            FileNotFoundError: no directory, configuration or safetensors there.
            ValueError: an unsupported architecture, or missing, unexpected or misshapen tensors, by name.
            ImportError: a GGUF file without the packages that read it.
        """
        config, tensors = read_checkpoint(path, head)
        return cls(config, tensors, dtype=dtype, device=device)

    @classmethod
    def from_causal_lm(cls, model: torch.nn.Module, head: Head) -> ValueModel:
        """Put a value head on a loaded ``transformers`` causal language model, keeping its dtype and device.

        The embedding and the unfused projections are the model's own memory; the fused ones are copies, so that later
        changes of the model's weights must not be expected to show.

        Args:
            model: a Qwen2, Qwen3 or Llama model of ``transformers``.
            head: as in :meth:`from_pretrained`.

        Raises:
            ValueError: as :meth:`from_pretrained`.
        """
        return cls(ValueModelConfig.from_hf(model.config), with_head(model.state_dict(), head))

    @torch.no_grad()
    def forward(
        self,
        batch: RaggedBatch,
        cache: KVCache,
        *,
        keep: KVCache | None = None,
        before_head: Callable[[], None] | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Value logits of all candidates; extends the cache by the delta tokens.

        Args:
            batch: the ``T`` rows, on the model's device. Its cached prefixes are read from ``cache`` through its slot
                table; the keys and values of its delta tokens are written to their slots, those of candidates are not.
            cache: keys and values of earlier forwards of this model.
            keep: keys and values of all rows of this forward are left here, each ``[num_layers, T, Hkv, D]``, the
                candidates' included (:func:`commit_winner` takes them).
            before_head: called between the layers and the head, which is the final norm and what follows it.
            backend: of the operators, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            ``z``, fp32 [B, K]: the value logit of each candidate, 0 in padding.

            Where a token id is outside the model's vocabulary (base models pad theirs further), the value is NaN, and
            any other value of the same request may be; other requests are not touched.

        Raises:
            ValueError: tensors of a wrong dtype, shape or device, from the operators.
        """
        hidden, square_sums = self._run_layers(batch, cache, keep, backend)
        if before_head is not None:
            before_head()
        layout = batch.layout
        z = self._run_head(hidden, square_sums, layout.head_rows, layout.head_targets, backend)
        return z.view(layout.candidate_rows.shape)

    def cache_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of keys and of values for a cache in e4m3, fp32 ``[num_layers, Hkv]`` each: from the weights alone
        (:mod:`lenvm_kernels.value_model.cache_scales`)."""
        bounds = [key_and_value_bounds(self.config, x.qkv, x.qkv_bias, x.qk_norm) for x in self.layers]
        keys, values = scales_of(torch.stack(bounds, dim=1))
        return keys, values

    def sizes_of_every_tile(self, most: int) -> list[int]:
        """Numbers of token rows, up to ``most``, whose forwards compile what those of any other number need."""
        layer = self.layers[0]
        weights = [(layer.qkv, False), (layer.o, False), (layer.gate_up, True), (layer.down, False)]
        shapes = [(len(w), num_splits(len(w), w.shape[1], swiglu), swiglu) for w, swiglu in weights]
        first: dict[tuple[Tile, ...], int] = {}
        for tokens in range(1, most + 1):
            first.setdefault(tuple(choose_tile(tokens, *shape, self.dtype) for shape in shapes), tokens)
        return list(first.values())

    def _zeros(self, count: int) -> torch.Tensor | None:
        """So many counters, or None if there are not as many."""
        return self._counters if count <= _COUNTERS else None

    def _run_layers(
        self, batch: RaggedBatch, cache: KVCache, keep: KVCache | None, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers, [T, H], and the sums of their squares; keys and values go to ``cache`` and ``keep``."""
        config, layout = self.config, batch.layout
        live: dict[str, Any] = dict(num_rows=layout.q_offsets[-1:], backend=backend)
        hidden, square_sums, cos, sin = embed_tokens(
            layout.token_ids,
            layout.positions,
            self.embedding,
            self._inv_freq,
            rope_scale=config.rope_scale,
            **live,
        )
        plan = plan_attention(
            batch.table_rows,
            batch.cached_lens,
            layout.q_offsets,
            batch.candidate_lens,
            total_tokens=len(hidden),
            max_len=batch.slot_table.shape[1] * batch.page_size,
            group=config.num_heads // config.num_kv_heads,
            backend=backend,
        )
        # What a layer adds to the residual stream leaves the sums of its squares for the norm that follows.
        norm: dict[str, Any] = dict(norm_eps=config.rms_norm_eps, square_sums=square_sums)
        adds: dict[str, Any] = dict(square_sums_out=square_sums)
        down_counters = linear_counters(len(hidden), config.hidden_size, config.intermediate_size)
        for i, layer in enumerate(self.layers):
            # Nested, so that what one operator leaves to the next is freed as soon as that has read it.
            hidden = ragged_linear(
                self._attend(hidden, square_sums, i, batch, plan, cos, sin, cache, keep, backend),
                layer.o,
                layer.o_bias,
                residual=hidden,
                **adds,
                **live,
            )
            hidden = ragged_linear(
                ragged_linear(hidden, layer.gate_up, layer.gate_up_bias, swiglu=True, **norm, **live),
                layer.down,
                layer.down_bias,
                residual=hidden,
                counters=self._zeros(down_counters),
                **adds,
                **live,
            )
        return hidden, square_sums

    def _attend(
        self,
        hidden: torch.Tensor,
        square_sums: torch.Tensor,
        i: int,
        batch: RaggedBatch,
        plan: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        keep: KVCache | None,
        backend: str,
    ) -> torch.Tensor:
        """Layer ``i`` up to its attention, [T, Hq * D]; keys and values go to ``cache`` and ``keep``."""
        config, layer, layout = self.config, self.layers[i], batch.layout
        norm: dict[str, Any] = dict(norm_eps=config.rms_norm_eps)
        live: dict[str, Any] = dict(num_rows=layout.q_offsets[-1:], backend=backend)
        k_cache, v_cache, scales = cache.keys[i], cache.values[i], cache.scales_of(i)
        q, k, v = rope_cache(
            ragged_linear(hidden, layer.qkv, layer.qkv_bias, square_sums=square_sums, **norm, **live),
            cos,
            sin,
            layout.slots,
            k_cache,
            v_cache,
            num_heads=config.num_heads,
            qk_norm_weight=layer.qk_norm,
            k_out=None if keep is None else keep.keys[i],
            v_out=None if keep is None else keep.values[i],
            **scales,
            **norm,
            **live,
        )
        attended = value_tree_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            batch.slot_table,
            batch.table_rows,
            batch.cached_lens,
            layout.q_offsets,
            batch.candidate_lens,
            parents=batch.parents,
            page_size=batch.page_size,
            plan=plan,
            counters=self._zeros(attention_counters(len(batch.table_rows), config.num_kv_heads)),
            **scales,
            backend=backend,
        )
        return attended.flatten(1)

    def _run_head(
        self,
        hidden: torch.Tensor,
        square_sums: torch.Tensor,
        token_rows: torch.Tensor,
        targets: torch.Tensor | None,
        backend: str,
    ) -> torch.Tensor:
        """Final norm and value head of some rows: their logits, fp32, each at its target."""
        return value_head(
            hidden,
            *self.head,
            token_rows=token_rows,
            norm_eps=self.config.rms_norm_eps,
            targets=targets,
            square_sums=square_sums,
            counters=self._zeros(value_head_counters(len(token_rows))),
            backend=backend,
        )
