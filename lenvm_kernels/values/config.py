"""``lenvm_config.json`` beside a value model: training settings that its tensors do not determine."""

from __future__ import annotations

import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from lenvm_kernels.guidance.fields import DEFAULT_GAMMA, FIELDS
from lenvm_kernels.values.checkpoint import local_path

CONFIG_FILE = "lenvm_config.json"
T = TypeVar("T")


@dataclass(frozen=True)
class LenVMConfig:
    """Settings of a value model.

    Attributes:
        gamma: discount that the value head was trained with, > 0 and < 1. If None, it is not known, and
            :data:`DEFAULT_GAMMA` is used.
        strength: default ``strength`` of requests, >= 0. If None, the default of :func:`parse_guidance`.

    Raises:
        ValueError: naming the field, what came and what is accepted.
    """

    gamma: float | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "strength"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, FIELDS[name].parse(given))

    @classmethod
    def read(cls, path: str | os.PathLike, gamma: float | None = None) -> LenVMConfig:
        """The configuration in the directory of the value model at ``path``. If there is no file, the defaults.

        Args:
            path: a directory, ``owner/name`` in the Hugging Face cache, or a ``.gguf`` file in the directory.
            gamma: replaces the file's. If None, the file's is kept.

        Raises:
            ValueError: naming the file and the field, what came and what is accepted.
        """
        path = local_path(path)
        file = (path.parent if path.suffix == ".gguf" else path) / CONFIG_FILE
        config = read_fields(cls, file) if file.is_file() else cls()
        return config if gamma is None else replace(config, gamma=gamma)

    def write(self, folder: str | os.PathLike) -> None:
        """Write the configuration to the directory of a value model, replacing an existing file."""
        content = {name: value for name, value in asdict(self).items() if value is not None}
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def lengths(self, value_logits: torch.Tensor) -> torch.Tensor:
        """Lengths in tokens that value logits stand for, of their shape: ``softplus(z) / -ln(gamma)``."""
        return F.softplus(value_logits) / -math.log(DEFAULT_GAMMA if self.gamma is None else self.gamma)


def read_fields(kind: type[T], file: Path) -> T:
    """The dataclass ``kind`` with the fields in a JSON file.

    Raises:
        ValueError: naming the file and the field, what came and what is accepted.
    """
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold a JSON object of fields, got {type(given).__name__}")
    accepted = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name in given:
        if name not in accepted:
            raise ValueError(f"{name} in {file} is not a field; accepted are {', '.join(accepted)}")
    if missing := [name for name, is_needed in accepted.items() if is_needed and name not in given]:
        raise ValueError(f"{file} must have the fields {', '.join(missing)}")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
