"""Values of candidates from the base model's own states: a small network instead of a second model.

The hidden states of a base model contain information about the remaining length. The distribution of lengths after a
candidate is ``softmax(W2 silu(W1 silu(shift + scale * e) + b1) + b2)``, where ``scale`` and ``shift`` are projections
of the states of some layers at the token before it, and ``e`` is a projection of the candidate's input embedding. A
step costs one projection per request and a small matmul for its candidates. The network keeps no state between steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from lenvm_kernels.ops._common import FLOAT_DTYPES
from lenvm_kernels.ops.candidate_values import MAX_BINS, candidate_values
from lenvm_kernels.ops.ragged_linear import num_splits, ragged_linear, rows_of_every_tile
from lenvm_kernels.types import GuidanceColumns
from lenvm_kernels.values.checkpoint import local_path
from lenvm_kernels.values.config import LenVMConfig, read_fields

CONFIG_FILE, TENSORS_FILE = "probe_config.json", "probe.safetensors"
# Default strength. On SmolLM2 and Qwen2.5, 40 brings more answers near their targets than 10, at the same perplexity.
STRENGTH = 40.0
# An embedding is identified by the signs of this number of elements, of which this number may differ. Quantization to
# int4 flips 8 % of the signs of normal values, more with outliers. Half of another embedding's signs differ.
SIGNS, MOST_DIFFERENT = 1024, 256
# Embeddings projected at a time.
PART = 4096


@dataclass(frozen=True)
class ProbeConfig:
    """The base model of a probe, the states that the probe reads, and the bins of its lengths.

    State ``i`` in ``layers`` is the input of layer ``i`` (the residual stream), and ``num_layers`` is the input of the
    output layer, after the final norm. Bin ``i`` has the lengths from ``bin_edges[i]`` to ``bin_edges[i + 1] - 1``, in
    tokens. The last bin also has all longer lengths.
    """

    base: str  # name of the base model, used in messages only
    layers: tuple[int, ...]  # states to read, in this order
    num_layers: int
    hidden_size: int
    vocab_size: int  # the base model's embedding may have more rows
    embedding_signs: str  # see embedding_signs
    bin_edges: tuple[int, ...]  # ascending, the first at least 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not re.fullmatch(f"[0-9a-f]{{{SIGNS // 4}}}", self.embedding_signs):
            raise ValueError(f"embedding_signs must be {SIGNS // 4} hexadecimal digits, got {self.embedding_signs!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(isinstance(i, int) and 1 <= i <= self.num_layers for i in self.layers):
            raise ValueError(f"layers must be in 1 to num_layers = {self.num_layers}, got {list(self.layers)}")
        object.__setattr__(self, "bin_edges", edges := tuple(self.bin_edges))
        are_tokens = all(isinstance(x, int) and x >= 1 for x in edges)
        if not 2 <= len(edges) <= MAX_BINS + 1 or not are_tokens or list(edges) != sorted(set(edges)):
            accepted = f"2 to {MAX_BINS + 1} ascending integers of at least 1"
            raise ValueError(f"bin_edges must be {accepted}, got {list(edges)}")

    @property
    def state_size(self) -> int:
        """L H, the number of elements of the states per token."""
        return len(self.layers) * self.hidden_size

    def check_base(self, num_layers: int, embedding: torch.Tensor) -> None:
        """Raise ValueError unless the probe was trained for a base model with these layers and this input embedding.

        Quantized copies, other dtypes, and fine-tuned models with almost the same embedding are accepted.
        """
        tokens = min(len(embedding), self.vocab_size)  # the embedding may be padded
        for name, wanted, came in (
            ("layers", self.num_layers, num_layers),
            ("columns in its embedding", self.hidden_size, embedding.shape[1]),
            ("tokens", self.vocab_size, tokens),
        ):
            if wanted != came:
                raise ValueError(f"the base model must be {self.base!r} with {wanted} {name}, got one with {came}")
        found = int(embedding_signs(embedding[: self.vocab_size]), 16)
        if (found ^ int(self.embedding_signs, 16)).bit_count() > MOST_DIFFERENT:
            raise ValueError(f"the base model must be {self.base!r}, got one with another embedding")


def embedding_signs(embedding: torch.Tensor) -> str:
    """Signs of :data:`SIGNS` elements of an input embedding ``[V, H]``, as hexadecimal digits: 1 is negative."""
    places, (tokens, columns) = torch.arange(SIGNS, device=embedding.device), embedding.shape
    # A prime stride of columns, so that the elements spread over tokens and columns.
    negative = embedding[places * tokens // SIGNS, places * 7919 % columns] < 0
    return f"{int(''.join(map(str, negative.int().tolist())), 2):0{SIGNS // 4}x}"


class LengthProbe:
    """Predicts values from a base model's states.

    Args:
        config: :class:`ProbeConfig`.
        tensors: ``projection.weight [2 D, L H]`` and ``projection.bias [2 D]``, which map the states of ``L`` layers to
            ``scale`` and ``shift``; ``embedding.weight [D, H]`` and ``embedding.bias [D]``; ``fc.weight [E, D]`` and
            ``fc.bias [E]``; ``bins.weight [N, E]`` and ``bins.bias [N]``.
        embedding: the base model's input embedding ``[V, H]``, projected once. Its dtype, float32, bfloat16 or
            float16, is also the dtype of the states.
        lenvm_config: provides gamma. If None, ``LenVMConfig()``.

    Raises:
        ValueError: an unsupported dtype.
    """

    def __init__(
        self,
        config: ProbeConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        *,
        lenvm_config: LenVMConfig | None = None,
    ) -> None:
        self.config, self.lenvm_config = config, lenvm_config or LenVMConfig()
        self.dtype, self.device = embedding.dtype, embedding.device
        if self.dtype not in FLOAT_DTYPES:
            came = str(self.dtype).removeprefix("torch.")
            raise ValueError(f"embedding must be float32, bfloat16 or float16, got {came}")
        of = {name: tensor.to(self.device, self.dtype).contiguous() for name, tensor in tensors.items()}
        self._projection = of["projection.weight"], of["projection.bias"]
        self._head = tuple(of[name] for name in ("fc.weight", "fc.bias", "bins.weight", "bins.bias"))
        self._bin_edges = torch.tensor(config.bin_edges, dtype=torch.float32, device=self.device)
        weight, bias = (tensors[f"embedding.{name}"].to(self.device, torch.float32) for name in ("weight", "bias"))
        self._embedding_layer = weight, bias
        self._embedding = torch.empty(config.vocab_size, len(weight), dtype=self.dtype, device=self.device)
        self._project(embedding)

    def _project(self, embedding: torch.Tensor) -> None:
        """Project an input embedding in place, because CUDA graphs read the result at its address."""
        # In parts, because an fp32 copy of all rows may not fit into memory.
        parts = embedding.detach()[: self.config.vocab_size].split(PART)
        for part, out in zip(parts, self._embedding.split(PART), strict=True):
            out.copy_(functional.linear(part.float(), *self._embedding_layer))

    def update(self, embedding: torch.Tensor) -> None:
        """Project the base model's input embedding ``[V, H]`` again, after the model's weights have changed.

        Raises ValueError, and leaves the probe unchanged, if the base model is another one.
        """
        self.config.check_base(self.config.num_layers, embedding)
        self._project(embedding)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, num_layers: int, embedding: torch.Tensor, *, gamma: float | None = None
    ) -> LengthProbe:
        """Load a probe for a base model.

        Args:
            path: a directory with ``probe_config.json``, ``probe.safetensors`` and ``lenvm_config.json``, or
                a repository ``owner/name`` on Hugging Face.
            num_layers, embedding: layers and input embedding of the base model that the probe was trained for.
            gamma: replaces the gamma of ``lenvm_config.json``. If None, the file's is kept.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: an unsupported dtype, an invalid file, or another base model.
        """
        path = local_path(path)
        config, tensors = read_fields(ProbeConfig, path / CONFIG_FILE), load_file(path / TENSORS_FILE)
        check_tensors(config, tensors)
        config.check_base(num_layers, embedding)
        return cls(config, tensors, embedding, lenvm_config=LenVMConfig.read(path, gamma))

    def value_logits(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        table: GuidanceColumns,
        *,
        table_rows: torch.Tensor,
        generated: torch.Tensor,
        backend: str = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute value logits of candidates, for guidance and for predicted lengths.

        Args:
            states: ``[B, L H]`` in :attr:`dtype`; states of the layers at the token before the candidates.
            token_ids, table, table_rows, generated, backend: see :func:`candidate_values`, which returns the result.
        """
        weight, bias = self._projection
        scale, shift = ragged_linear(states, weight, bias, backend=backend).chunk(2, dim=1)
        operands: Any = token_ids, scale, shift, self._embedding, *self._head, self._bin_edges, table
        return candidate_values(*operands, table_rows=table_rows, generated=generated, backend=backend)

    @property
    def row_bytes(self) -> int:
        """Bytes that :meth:`value_logits` allocates per row for the projection: its result and the partial sums."""
        weight, _ = self._projection
        parts = num_splits(*weight.shape)
        return len(weight) * (weight.element_size() + (4 * parts if parts > 1 else 0))

    def rows_of_every_tile(self, most: int) -> list[int]:
        """Numbers of requests, up to ``most``, that compile every kernel variant."""
        weight, _ = self._projection
        return rows_of_every_tile(most, [(*weight.shape, False, weight.dtype)])


def check_tensors(config: ProbeConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, naming the tensor, unless the tensors have the names and shapes of a probe's."""
    outputs, size = tensors["fc.weight"].shape if "fc.weight" in tensors else (0, 0)
    shapes = {
        "projection": (2 * size, config.state_size),
        "embedding": (size, config.hidden_size),
        "fc": (outputs, size),
        "bins": (len(config.bin_edges) - 1, outputs),
    }
    wanted: dict[str, tuple[int, ...]] = {f"{part}.weight": shape for part, shape in shapes.items()}
    wanted |= {f"{part}.bias": shape[:1] for part, shape in shapes.items()}
    if tensors.keys() != wanted.keys():
        raise ValueError(f"tensors must be {', '.join(wanted)}, got {', '.join(sorted(tensors))}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensors[name].shape)}")


def is_probe(path: str | Path) -> bool:
    """Whether a directory has a probe."""
    return (Path(path) / CONFIG_FILE).is_file()


def write_probe(config: ProbeConfig, tensors: Mapping[str, torch.Tensor], gamma: float, folder: Path) -> None:
    """Write a probe in fp16 to a directory for :meth:`LengthProbe.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    check_tensors(config, tensors)
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(config)) + "\n", encoding="utf-8")
    LenVMConfig(gamma, strength=STRENGTH).write(folder)
