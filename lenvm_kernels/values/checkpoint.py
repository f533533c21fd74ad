"""Reads the architecture and the tensors of a value model from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lenvm_kernels.values.low_rank import ADAPTER_CONFIG, ADAPTER_FILE, is_adapter, read_adapter

VISION_ARCHITECTURES = ("qwen2_5_vl",)
ARCHITECTURES = ("qwen2", "qwen3", "llama", *VISION_ARCHITECTURES)
# The frequencies of other types (dynamic, longrope) depend on the sequence length, which would make cached keys stale.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# File names of the head in the paper's training code, with and without safetensors.
HEAD_FILE, _ = HEAD_FILES = "value_head.safetensors", "value_head.bin"
# A repository name on Hugging Face, not a relative path to a file.
_REPOSITORY = re.compile(r"(?!.*(--|\.\.|\.(gguf|safetensors|bin|json)$))[\w.-]*\w/\w[\w.-]*", re.ASCII)

# Prefixes of tensor names, in this order: the wrapper in the paper's training code, the model below the head in
# transformers, the text part of a vision-language model.
PREFIXES = ("pretrained_model.", "model.", "language_model.")
# Prefix of the vision tower of a vision-language model, after the other prefixes.
VISION_PREFIX = "visual."

# A file with the value head, a directory or a repository with such a file, or its tensors by name.
Head = str | os.PathLike | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ValueModelConfig:
    """The architecture parameters that determine the forward.

    ``rope_inv_freq`` contains the ``head_dim / 2`` angular frequencies in radians per token, after any scaling.
    ``rope_scale`` is the factor on cosine and sine (1 except for yarn). ``qk_norm`` is the RMSNorm of queries and keys
    over ``head_dim`` (Qwen3). With ``tied_embeddings``, ``lm_head.weight`` may replace a missing embedding.

    The last four fields are set for vision-language models only. ``mrope_sections`` are the numbers of frequencies that
    rotate with a token's time, row and column; ``vision`` is the ``transformers`` configuration of the vision tower.
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
    mrope_sections: tuple[int, ...] | None = None
    image_token_id: int = -1
    video_token_id: int = -1
    vision: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def from_hf(cls, config: Any) -> ValueModelConfig:
        """Read the ``transformers`` configuration of a supported architecture.

        Raises:
            ValueError: unsupported architecture, activation, rotary embedding or attention; the message names it.
        """
        architecture = config.model_type
        if architecture not in ARCHITECTURES:
            raise ValueError(f"model_type must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
        is_tied, images = config.tie_word_embeddings, dict[str, Any]()
        if architecture in VISION_ARCHITECTURES:
            sections = tuple(config.text_config.rope_parameters.get("mrope_section", ()))
            if len(sections) != 3:
                raise ValueError(f"mrope_section must be three numbers, got {list(sections)}")
            images = dict(mrope_sections=sections, vision=config.vision_config)
            images |= dict(image_token_id=config.image_token_id, video_token_id=config.video_token_id)
            config, architecture = config.text_config, "qwen2"
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {config.hidden_act!r}")
        sliding = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
        if sliding:
            raise ValueError(f"layer_types must all be 'full_attention' (use_sliding_window off), got {sliding}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq, rope_scale = _rope_frequencies(config, head_dim)
        if images and sum(images["mrope_sections"]) != len(inv_freq):
            accepted, came = f"half of head_dim, {len(inv_freq)}", list(images["mrope_sections"])
            raise ValueError(f"mrope_section must add up to {accepted}, got {came}")
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
            # Qwen2 has biases on q, k and v but not on o, regardless of its configuration.
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture != "qwen2" and attention_bias,
            mlp_bias=architecture == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            tied_embeddings=bool(is_tied),
            **images,
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
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
            linear(f"{attention}.q_proj", heads, hidden, self.qkv_bias)
            for name in "kv":
                linear(f"{attention}.{name}_proj", kv_heads, hidden, self.qkv_bias)
            if self.qk_norm:
                shapes |= {f"{attention}.{name}_norm.weight": (self.head_dim,) for name in "qk"}
            linear(f"{attention}.o_proj", hidden, heads, self.o_bias)
            shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
            for name in ("gate", "up"):
                linear(f"{mlp}.{name}_proj", self.intermediate_size, hidden, self.mlp_bias)
            linear(f"{mlp}.down_proj", hidden, self.intermediate_size, self.mlp_bias)
        shapes["norm.weight"] = (hidden,)
        linear("v_head.fc", hidden, hidden, bias=True)
        linear("v_head.summary", 1, hidden, bias=True)
        return shapes


def local_path(name: str | os.PathLike) -> Path:
    """The path of a checkpoint on this machine.

    Args:
        name: a path, or a repository ``owner/name`` on Hugging Face if no such path exists. The repository's ``main``
            revision is read from the cache; missing files are downloaded unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        FileNotFoundError: the name looks like a repository, which does not exist.
    """
    path, text = Path(name), os.fspath(name)
    if path.exists() or not _REPOSITORY.fullmatch(text):
        return path
    try:
        return Path(huggingface_hub.snapshot_download(text))
    except OSError as error:
        raise FileNotFoundError(
            f"{text} is not an existing path, and the model is neither in the Hugging Face cache, "
            f"{constants.HF_HUB_CACHE}, nor could it be downloaded: {error}"
        ) from error


def backbone_of(path: Path) -> Path:
    """The directory of a value model's backbone: ``path``, or the base model's if ``path`` has only an adapter."""
    if (path / "config.json").is_file() or not is_adapter(path):
        return path
    file = path / ADAPTER_CONFIG
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or not ((found := local_path(base)) / "config.json").is_file():
        accepted = "a directory with config.json or a name on Hugging Face"
        raise FileNotFoundError(f"base_model_name_or_path in {file} must be {accepted}, got {base!r}")
    return found


def read_checkpoint(
    path: str | os.PathLike, head: Head | None, adapter: str | os.PathLike | None
) -> tuple[ValueModelConfig, dict[str, torch.Tensor]]:
    """The architecture and the tensors of a checkpoint; see :meth:`ValueModel.from_pretrained`."""
    path = Path(path)
    if path.suffix == ".gguf":
        config, tensors, folder = *_read_gguf(path), path.parent
    else:
        backbone = backbone_of(path)
        config, tensors, folder = _read_config(backbone), _read_shards(backbone), path
    if adapter is None and is_adapter(folder):
        adapter = folder
    if head is None and not any(name.startswith("v_head.") for name in tensors):
        head = head_beside(adapter, folder)
    return config, with_head(with_adapter(tensors, adapter), head)


def head_beside(*folders: str | os.PathLike | None) -> Path | None:
    """The file with the value head in the first of these directories that has one.

    The file is named as in :data:`HEAD_FILES`, or is the only ``.safetensors`` or ``.bin`` file with only ``v_head.*``.

    Raises:
        ValueError: a directory has several such files.
    """
    for folder in (Path(folder) for folder in folders if folder is not None):
        named = [folder / name for name in HEAD_FILES if (folder / name).is_file()]
        found = named[:1] or [file for file in sorted(folder.glob("*.*")) if _is_head(file)]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{folder} must have one file with a value head, or one called {HEAD_FILE}, got {names}")
        if found:
            return found[0]
    return None


def _is_head(file: Path) -> bool:
    try:
        names = list(_read_head(file))
        return bool(names) and all(name.startswith("v_head.") for name in names)
    except Exception:  # a file of another kind, such as a trainer's arguments
        return False


def _rope_frequencies(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Angular frequencies of a ``transformers`` configuration, and the scale of cosine and sine."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor must be 1 or absent, got {partial}")
    if kind == "default":  # not among the functions of transformers
        return tuple((1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)).tolist()), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(scale)


def reads_images(path: Path) -> bool:
    """Whether the architecture of the value model in a directory reads images."""
    file = backbone_of(path) / "config.json"
    return file.is_file() and json.loads(file.read_text()).get("model_type") in VISION_ARCHITECTURES


def _read_config(path: Path) -> ValueModelConfig:
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} must be a directory with config.json, or a .gguf file")
    # Checked before transformers, because its error message does not list the architectures accepted here.
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
            "weights are never read (convert them with transformers' save_pretrained); for GGUF, pass the .gguf file"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix != ".safetensors" or not file.is_file():
            raise FileNotFoundError(f"{file} must be an existing .safetensors file")
        tensors |= load_file(file)  # memory-mapped: ignored tensors are never read
    return tensors


def _read_head(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix not in (".safetensors", ".bin") or not file.is_file():
        raise FileNotFoundError(f"{file} must be an existing .safetensors or .bin file")
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # from pickle or torch, or the file holds no dictionary
        raise ValueError(f"{file} must be a dictionary of tensors by name: {error}") from error


def _read_gguf(path: Path) -> tuple[ValueModelConfig, dict[str, torch.Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be an existing .gguf file")
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except ImportError as error:
        raise ImportError(f'reading {path} needs more packages: pip install "lenvm-kernels[demo]"') from error
    return ValueModelConfig.from_hf(model.config), model.state_dict()


def with_head(tensors: Mapping[str, torch.Tensor], head: Head | None) -> dict[str, torch.Tensor]:
    """The backbone's tensors, with ``head`` in place of the stored head. If None, they are unchanged."""
    if head is None:
        return dict(tensors)
    if not isinstance(head, Mapping):
        path = local_path(head)
        head = _read_head((head_beside(path) or path / HEAD_FILE) if path.is_dir() else path)
    if foreign := [name for name in head if not name.startswith("v_head.")]:
        raise ValueError(f"head must hold only v_head.* tensors, got {_few(foreign)}")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("v_head.")} | dict(head)


def with_adapter(tensors: Mapping[str, torch.Tensor], adapter: str | os.PathLike | None) -> dict[str, torch.Tensor]:
    """The tensors with a low-rank adapter merged in fp32 and rounded once.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_adapter`, or the backbone lacks a matrix or its shape differs.
    """
    merged = dict(tensors)
    if adapter is None:
        return merged
    added, replaced = read_adapter(adapter)
    names = {_without_prefixes(name): name for name in merged}
    for name, update in added.items():
        matrix = merged.get(names.get(_without_prefixes(name), ""))
        if matrix is None or matrix.shape != update.shape:
            got, file = "none" if matrix is None else f"one {list(matrix.shape)}", Path(adapter) / ADAPTER_FILE
            raise ValueError(f"{file} adds {list(update.shape)} to {name}, but the backbone has {got}")
        merged[names[_without_prefixes(name)]] = (matrix.float() + update.to(matrix.device)).to(matrix.dtype)
    return merged | {names.get(_without_prefixes(name), name): tensor for name, tensor in replaced.items()}


def checked_tensors(config: ValueModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that the architecture needs, checked, by name without :data:`PREFIXES`."""
    shapes = config.tensor_shapes()
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if (short := _without_prefixes(name)) in named:
            raise ValueError(f"the checkpoint must have each tensor once, got {name} and another {short}")
        named[short] = tensor
    if config.tied_embeddings and "embed_tokens.weight" not in named and "lm_head.weight" in named:
        named["embed_tokens.weight"] = named["lm_head.weight"]  # tied weights are saved under either name
    missing = [name if name.startswith("v_head.") else f"model.{name}" for name in shapes if name not in named]
    unexpected = [
        name
        for name in tensors
        if (short := _without_prefixes(name)) not in shapes
        and not short.startswith("lm_head.")
        and not (config.vision is not None and short.startswith(VISION_PREFIX))
        and not short.endswith("rotary_emb.inv_freq")
    ]
    if missing or unexpected:
        parts = [f"missing {_few(missing)}"] * bool(missing) + [f"unexpected {_few(unexpected)}"] * bool(unexpected)
        if any(name.startswith("v_head.") for name in missing):
            parts.append(f"the value head must be in the checkpoint, in a file such as {HEAD_FILE}, or passed as head=")
        raise ValueError(f"the tensors do not fit the architecture: {'; '.join(parts)}")
    for name, shape in shapes.items():
        tensor = named[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            came = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ValueError(f"{name} must be floating-point {list(shape)}, got {came}")
    return {name: named[name] for name in shapes}


def vision_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's vision tower, by name in the tower."""
    short = {_without_prefixes(name): tensor for name, tensor in tensors.items()}
    return {n.removeprefix(VISION_PREFIX): tensor for n, tensor in short.items() if n.startswith(VISION_PREFIX)}


def _without_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _few(names: list[str], limit: int = 5) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
