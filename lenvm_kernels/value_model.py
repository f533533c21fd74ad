"""The value model: a Hugging Face checkpoint -> one ragged forward over the delta and the candidates of every request.

A Qwen2, Qwen3 or Llama backbone with the value head of the LenVM paper (arXiv 2604.27039). Layer by layer it computes
what ``transformers`` does. The delta of a request can be 0, 1 or a whole prompt, and its candidates never enter the
cache. A forward reads nothing back to the host and its shapes follow from those of its arguments alone, so that a
decode step can be captured in a CUDA graph; its cost follows the tokens there are, because the operators of its layers
read their number on the device.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lenvm_kernels.ops._common import FLOAT_DTYPES, check_tensor
from lenvm_kernels.ops.ragged_layout import RaggedLayout, ragged_layout
from lenvm_kernels.ops.ragged_linear import ragged_linear
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.ops.value_tree_attention import value_tree_attention

ARCHITECTURES = ("qwen2", "qwen3", "llama")
# The frequencies of the others (dynamic, longrope) change with a sequence's length, which would make cached keys stale.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
HEAD_FILE = "value_head.safetensors"

_INT_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ValueModelConfig:
    """The facts of an architecture that the forward depends on.

    ``rope_inv_freq`` holds the ``head_dim / 2`` angular frequencies in radians per token with any scaling applied, and
    ``rope_scale`` the factor on cosine and sine (1 except for yarn). ``qk_norm`` is the RMSNorm of queries and keys
    over ``head_dim`` (Qwen3). ``tied_embeddings`` only says that ``lm_head.weight`` may stand in for the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_inv_freq: tuple[float, ...] = field(repr=False)
    rope_scale: float = 1.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: Any) -> "ValueModelConfig":
        """Read the ``transformers`` configuration of a supported architecture (any release from 4.57 on).

        Raises:
            ValueError: an architecture, activation, kind of rotary embedding or attention that is not supported; the
                message names the field and what it accepts.
        """
        architecture = config.model_type
        if architecture not in ARCHITECTURES:
            raise ValueError(f"model_type must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {config.hidden_act!r}")
        sliding = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
        if sliding:
            raise ValueError(f"layer_types must all be 'full_attention' (use_sliding_window off), got {sliding}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq, rope_scale = _rope_frequencies(config, head_dim)
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_inv_freq=inv_freq,
            rope_scale=rope_scale,
            # Qwen2 has biases on q, k and v and none on o, whatever its configuration says.
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture != "qwen2" and attention_bias,
            mlp_bias=architecture == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            tied_embeddings=bool(config.tie_word_embeddings),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor the model needs, by its name in a checkpoint without the prefix ``model.``."""
        hidden, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for i in range(self.num_layers):
            layer = f"layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            linear(f"{layer}.self_attn.q_proj", heads, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.k_proj", kv_heads, hidden, self.qkv_bias)
            linear(f"{layer}.self_attn.v_proj", kv_heads, hidden, self.qkv_bias)
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            linear(f"{layer}.self_attn.o_proj", hidden, heads, self.o_bias)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            linear(f"{layer}.mlp.gate_proj", self.intermediate_size, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.up_proj", self.intermediate_size, hidden, self.mlp_bias)
            linear(f"{layer}.mlp.down_proj", hidden, self.intermediate_size, self.mlp_bias)
        shapes["norm.weight"] = (hidden,)
        linear("v_head.fc", hidden, hidden, bias=True)
        linear("v_head.summary", 1, hidden, bias=True)
        return shapes


@dataclass(frozen=True)
class RaggedBatch:
    """One value-model forward: for each of ``B`` requests its delta tokens, then its candidates (spec, section 2).

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1`` of the ``T``: its delta at positions
    ``cached_lens[i]`` and up, then ``candidate_lens[i]`` candidates which sit at the position after the delta (in a
    tree of several levels, one further a level). Rows from ``q_offsets[B]`` on are padding: they let ``T`` stay fixed
    while the lengths vary, and cost next to nothing.
    """

    layout: RaggedLayout  # token ids, positions, slots and q_offsets of the T rows, and where the candidates are
    slot_table: torch.Tensor  # int32 [R, pages], page of the cache that holds each page of a row's tokens
    table_rows: torch.Tensor  # int32 | int64 [B], row of each request in slot_table
    cached_lens: torch.Tensor  # int32 [B], tokens of the request already in the cache
    candidate_lens: torch.Tensor  # int32 [B]
    parents: torch.Tensor | None = None  # int32 [T], row of a candidate's parent candidate, -1: it follows the delta
    page_size: int = 1  # slots in a page

    @classmethod
    def build(
        cls,
        delta_ids: torch.Tensor,
        delta_slots: torch.Tensor,
        delta_starts: torch.Tensor,
        delta_lens: torch.Tensor,
        candidate_ids: torch.Tensor,
        candidate_lens: torch.Tensor,
        cached_lens: torch.Tensor,
        slot_table: torch.Tensor,
        table_rows: torch.Tensor,
        *,
        candidate_parents: torch.Tensor | None = None,
        page_size: int = 1,
        backend: str = "auto",
    ) -> "RaggedBatch":
        """Lay a batch out in ``T = D + B * K`` rows without reading anything back to the host.

        Args:
            delta_ids: int32 or int64 [D], delta tokens of all requests. Those no request refers to are ignored.
            delta_slots: int32 or int64 [D], the slot that each delta token's key and value will live in; where the slot
                table places the token.
            delta_starts: int32 [B], the first delta token of each request in ``delta_ids``.
            delta_lens: int32 [B], delta tokens of each request, 0 or more, ``D`` at most in all.
            candidate_ids: int32 or int64 [B, K], the candidates of each request from column 0 on. ``K`` may be 0: the
                forward then only extends the cache.
            candidate_lens: int32 [B], candidates of each request, 0 to ``K``.
            cached_lens: int32 [B], tokens of each request already in the cache.
            slot_table: int32 [R, pages]. Token ``p`` of table row ``r`` lives in slot
                ``slot_table[r, p // page_size] * page_size + p % page_size``.
            table_rows: int32 or int64 [B], the row of ``slot_table`` of each request.
            candidate_parents: int32 [B, K], the column of each candidate's parent among the request's candidates, which
                has to be an earlier one; anything else (-1): the candidate follows the delta. None: all do.
            page_size: slots in a page.
            backend: of the layout, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            The batch, on the device of ``delta_ids``. Lengths and tables are held, not copied.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device. Values are not checked, that
                would need the host.
        """
        layout = ragged_layout(
            delta_ids,
            delta_slots,
            delta_starts,
            delta_lens,
            candidate_ids,
            candidate_lens,
            cached_lens,
            backend=backend,
        )
        device, (b, k) = delta_ids.device, candidate_ids.shape
        check_tensor("slot_table", slot_table, dtypes=torch.int32, shape=[None, None], device=device)
        check_tensor("table_rows", table_rows, dtypes=_INT_DTYPES, shape=[b], device=device)
        parents = None
        if candidate_parents is not None:
            check_tensor("candidate_parents", candidate_parents, dtypes=torch.int32, shape=[b, k], device=device)
            layout, parents = _grow_trees(layout, candidate_parents)
        return cls(layout, slot_table, table_rows, cached_lens, candidate_lens, parents, page_size)


def _grow_trees(layout: RaggedLayout, candidate_parents: torch.Tensor) -> tuple[RaggedLayout, torch.Tensor]:
    """The layout with each candidate as many positions further as it has ancestors, and the row of its parent [T]."""
    rows, k = layout.token_ids.shape[0], candidate_parents.shape[1]
    column = torch.arange(k, device=candidate_parents.device)
    parent = candidate_parents.long().masked_fill((candidate_parents < 0) | (candidate_parents >= column), -1)
    depth, ancestor = (parent >= 0).long(), parent
    for _ in range(max(k - 1, 0).bit_length()):  # each round doubles how far up the ancestor is
        has_one, above = ancestor >= 0, ancestor.clamp(min=0)
        depth = depth + depth.gather(1, above).masked_fill(~has_one, 0)
        ancestor = ancestor.gather(1, above).masked_fill(~has_one, -1)
    parent_rows = layout.candidate_rows.gather(1, parent.clamp(min=0)).masked_fill(parent < 0, -1)
    target = layout.candidate_rows.masked_fill(layout.candidate_rows < 0, rows).flatten()  # padding: a row past the end

    def spread(values: torch.Tensor, otherwise: int) -> torch.Tensor:
        return values.new_full((rows + 1,), otherwise).index_copy(0, target, values.flatten())[:rows]

    deeper = replace(layout, positions=layout.positions + spread(depth, 0))
    return deeper, spread(parent_rows, -1).int()


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the value model, each ``[num_layers, S, Hkv, D]`` in the model's dtype and on its device.

    Which slots belong to a request is the business of a slot table: the engine's, or that of
    :class:`lenvm_kernels.paged_slots.PagedSlots`.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of_slots(cls, model: "ValueModel", num_slots: int) -> "KVCache":
        """A cache of ``num_slots`` slots; it takes :meth:`num_bytes`."""
        config = model.config
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        return cls(keys, values)

    @staticmethod
    def num_bytes(model: "ValueModel", num_slots: int) -> int:
        """Bytes of a cache of ``num_slots`` slots: ``2 N S Hkv D e``."""
        config = model.config
        return 2 * config.num_layers * num_slots * config.num_kv_heads * config.head_dim * model.dtype.itemsize


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
        weights = _checked_tensors(config, tensors)
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
        self.norm = get("norm.weight")
        # The vectors of the head are kept in fp32, which the operator takes: lengths are decided there.
        vectors = (weights[f"v_head.{x}"] for x in ("fc.bias", "summary.weight", "summary.bias"))
        self.head = (get("v_head.fc.weight"), *(x.detach().to(self.device, torch.float32) for x in vectors))
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=self.device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        head: str | os.PathLike | Mapping[str, torch.Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> "ValueModel":
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
        path = Path(path)
        if path.suffix == ".gguf":
            config, tensors, folder = *_read_gguf(path), path.parent
        else:
            config, tensors, folder = _read_config(path), _read_shards(path), path
        if head is None and not any(name.startswith("v_head.") for name in tensors) and (folder / HEAD_FILE).is_file():
            head = folder / HEAD_FILE
        return cls(config, _with_head(tensors, head), dtype=dtype, device=device)

    @classmethod
    def from_causal_lm(
        cls, model: torch.nn.Module, head: str | os.PathLike | Mapping[str, torch.Tensor]
    ) -> "ValueModel":
        """Put a value head on a loaded ``transformers`` causal language model, keeping its dtype and device.

        The embedding and the unfused projections are the model's own memory; the fused ones are copies, so that later
        changes of the model's weights must not be expected to show.

        Args:
            model: a Qwen2, Qwen3 or Llama model of ``transformers``.
            head: as in :meth:`from_pretrained`.

        Raises:
            ValueError: as :meth:`from_pretrained`.
        """
        return cls(ValueModelConfig.from_hf(model.config), _with_head(model.state_dict(), head))

    @torch.no_grad()
    def forward(
        self,
        batch: RaggedBatch,
        cache: KVCache,
        *,
        keep: KVCache | None = None,
        delta_values: bool = False,
        before_head: Callable[[], None] | None = None,
        backend: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Value logits of all candidates; extends the cache by the delta tokens.

        Args:
            batch: the ``T`` rows, on the model's device. Its cached prefixes are read from ``cache`` through its slot
                table; the keys and values of its delta tokens are written to their slots, those of candidates are not.
            cache: keys and values of earlier forwards of this model.
            keep: keys and values of all rows of this forward are left here, each ``[num_layers, T, Hkv, D]``, the
                candidates' included (:func:`commit_winner` takes them).
            delta_values: also return the logits of the rows.
            before_head: called between the layers and the head, which is the final norm and what follows it.
            backend: of the operators, see :func:`lenvm_kernels.ops._common.resolve_backend`.

        Returns:
            ``z``, fp32 [B, K]: the value logit of each candidate, 0 in padding. With ``delta_values`` the pair of it
            and fp32 [T], the logit of every row: delta token ``j`` of request ``i`` at ``q_offsets[i] + j``, the
            candidates after them, 0 in the padding rows.

            Where a token id is outside the model's vocabulary (base models pad theirs further), the value is NaN, and
            any other value of the same request may be; other requests are not touched.

        Raises:
            ValueError: tensors of a wrong dtype, shape or device, from the operators.
        """
        config, layout = self.config, batch.layout
        num_rows = layout.q_offsets[-1:]
        norm = dict(norm_eps=config.rms_norm_eps)
        live = dict(num_rows=num_rows, backend=backend)
        known_ids = layout.token_ids.clamp(0, config.vocab_size - 1)
        hidden = F.embedding(known_ids, self.embedding)
        hidden = hidden.masked_fill_((known_ids != layout.token_ids)[:, None], float("nan"))  # [T, H]
        angles = layout.positions[:, None].float() * self._inv_freq  # [T, D/2]
        cos, sin = angles.cos() * config.rope_scale, angles.sin() * config.rope_scale

        for i, layer in enumerate(self.layers):
            # Nested, so that what one operator leaves to the next is freed as soon as that has read it.
            hidden = ragged_linear(
                self._attend(hidden, i, batch, cos, sin, cache, keep, backend),
                layer.o,
                layer.o_bias,
                residual=hidden,
                **live,
            )
            hidden = ragged_linear(
                ragged_linear(hidden, layer.gate_up, layer.gate_up_bias, swiglu=True, **norm, **live),
                layer.down,
                layer.down_bias,
                residual=hidden,
                **live,
            )

        if before_head is not None:
            before_head()
        head = dict(norm_weight=self.norm, **norm, backend=backend)
        if not delta_values:
            return value_head(hidden, *self.head, token_rows=layout.head_rows, **head)[layout.head_slots]
        row = torch.arange(len(hidden), device=self.device)
        z = value_head(hidden, *self.head, token_rows=torch.where(row < num_rows, row, -1), **head)
        padding = layout.candidate_rows < 0
        return z[layout.candidate_rows.masked_fill(padding, 0)].masked_fill(padding, 0.0), z

    def _attend(
        self,
        hidden: torch.Tensor,
        i: int,
        batch: RaggedBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        keep: KVCache | None,
        backend: str,
    ) -> torch.Tensor:
        """Layer ``i`` up to its attention, [T, Hq * D]; keys and values go to ``cache`` and ``keep``."""
        config, layer, layout = self.config, self.layers[i], batch.layout
        norm = dict(norm_eps=config.rms_norm_eps)
        live = dict(num_rows=layout.q_offsets[-1:], backend=backend)
        k_cache, v_cache = cache.keys[i], cache.values[i]
        q, k, v = rope_cache(
            ragged_linear(hidden, layer.qkv, layer.qkv_bias, **norm, **live),
            cos,
            sin,
            layout.slots,
            k_cache,
            v_cache,
            num_heads=config.num_heads,
            qk_norm_weight=layer.qk_norm,
            k_out=None if keep is None else keep.keys[i],
            v_out=None if keep is None else keep.values[i],
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
            backend=backend,
        )
        return attended.flatten(1)


def _rope_frequencies(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Angular frequencies of a ``transformers`` configuration, and the factor on cosine and sine.

    transformers 5 keeps everything in ``rope_parameters``, 4.57 in ``rope_theta`` and ``rope_scaling``.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor must be 1 or absent, got {partial}")
    if kind == "default":  # transformers 5 no longer lists it among the functions
        theta = rope.get("rope_theta") or config.rope_theta
        return tuple((1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).tolist()), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(scale)


def _read_config(path: Path) -> ValueModelConfig:
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} must be a directory with config.json, or a .gguf file")
    # Checked before transformers sees it, whose own message does not say what this package accepts.
    architecture = json.loads(file.read_text()).get("model_type")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"model_type in {file} must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    return ValueModelConfig.from_hf(AutoConfig.from_pretrained(path, trust_remote_code=False))


def _read_shards(path: Path) -> dict[str, torch.Tensor]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    elif single.is_file():
        files = [single]
    else:
        found = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise FileNotFoundError(
            f"{path} must hold {single.name} or {index.name}, found {', '.join(found) or 'no weights'}; pickled "
            "weights are never read (convert them with transformers' save_pretrained), a .gguf file is passed itself"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read_safetensors(file))
    return tensors


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors" or not file.is_file():
        raise FileNotFoundError(f"{file} must be an existing .safetensors file")
    with safe_open(file, framework="pt") as tensors:  # mapped, not read: what is ignored costs nothing
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, safe_open has no iterator


def _read_gguf(path: Path) -> tuple[ValueModelConfig, dict[str, torch.Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be an existing .gguf file")
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except ImportError as error:
        raise ImportError(f'reading {path} needs more packages: pip install "lenvm-kernels[demo]"') from error
    return ValueModelConfig.from_hf(model.config), model.state_dict()


def _with_head(
    tensors: Mapping[str, torch.Tensor], head: str | os.PathLike | Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The backbone's tensors with the given head in place of their own, if one is given."""
    if head is None:
        return dict(tensors)
    head = head if isinstance(head, Mapping) else _read_safetensors(Path(head))
    if foreign := [name for name in head if not name.startswith("v_head.")]:
        raise ValueError(f"head must hold only v_head.* tensors, got {_few(foreign)}")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("v_head.")} | dict(head)


def _checked_tensors(config: ValueModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exactly the tensors the architecture needs, by their names without the prefix ``model.``."""
    shapes = config.tensor_shapes()
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if config.tied_embeddings and "embed_tokens.weight" not in named and "lm_head.weight" in named:
        named["embed_tokens.weight"] = named["lm_head.weight"]  # tied weights are saved once, under either name
    missing = [name if name.startswith("v_head.") else f"model.{name}" for name in shapes if name not in named]
    unexpected = [
        name
        for name in tensors
        if name.removeprefix("model.") not in shapes
        and not name.startswith("lm_head.")
        and not name.endswith("rotary_emb.inv_freq")
    ]
    if missing or unexpected:
        parts = [f"missing {_few(missing)}"] * bool(missing) + [f"unexpected {_few(unexpected)}"] * bool(unexpected)
        if any(name.startswith("v_head.") for name in missing):
            parts.append(f"a value head is in the checkpoint, in {HEAD_FILE} beside it, or given as head=")
        raise ValueError(f"the tensors do not fit the architecture: {'; '.join(parts)}")
    for name, shape in shapes.items():
        tensor = named[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating-point {list(shape)}, got {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}"
            )
    return {name: named[name] for name in shapes}


def _few(names: list[str], limit: int = 5) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
