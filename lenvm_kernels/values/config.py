"""``lenvm_config.json`` of a value model: training settings that the tensors do not determine.

The target forms follow the paper's training code, LlamaFactory-LenVM in eric-ai-lab/Length-Value-Model. The
``discounted_return`` is the paper's value; the other two forms predict a length or its logarithm.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from lenvm_kernels.guidance.fields import DEFAULT_GAMMA
from lenvm_kernels.values.checkpoint import local_path

CONFIG_FILE = "lenvm_config.json"
DISCOUNTED_RETURN, LENGTH, LOG_LENGTH = TARGET_FORMS = ("discounted_return", "length", "log_length")
SOFTPLUS, SIGMOID = ACTIVATIONS = ("softplus", "sigmoid")
# Keeps the logarithm finite when fp32 rounds a length to 0.
_LEAST_NATS = 1e-37
T = TypeVar("T")


@dataclass(frozen=True)
class LenVMConfig:
    """Converts the output ``x`` of a value head into a length ``l`` in tokens.

    | ``target_form`` | length |
    | --- | --- |
    | ``discounted_return`` | ``l = softplus(x) / -ln(gamma)`` |
    | ``length`` | ``l = length_normalizer * softplus(x)``, or with ``sigmoid``, by ``length_activation`` |
    | ``log_length`` | ``l = exp(x)``; identical to the training's ``expm1(softplus(x))`` |

    Attributes:
        gamma: the discount, > 0 and < 1. If None, :data:`DEFAULT_GAMMA`. The other two forms only use it to convert
            lengths to values, so any discount is correct for them.
        target_form: the quantity that the value head predicts.
        length_normalizer: tokens per unit of the form ``length``, > 0.
        length_activation: activation of ``x`` in the form ``length``.
        strength: default ``strength`` of requests, >= 0. If None, the default of :func:`parse_guidance`.

    Raises:
        ValueError: invalid value; the message names the field, the value and the accepted values.
    """

    gamma: float | None = None
    target_form: str = DISCOUNTED_RETURN
    length_normalizer: float = 1.0
    length_activation: str = SOFTPLUS
    strength: float | None = None

    def __post_init__(self) -> None:
        for name, is_accepted, accepted in (
            ("gamma", self.gamma is None or (_is_number(self.gamma) and 0 < self.gamma < 1), "a number > 0 and < 1"),
            ("strength", self.strength is None or _is_finite(self.strength), "a finite number >= 0"),
            ("target_form", self.target_form in TARGET_FORMS, f"one of {', '.join(TARGET_FORMS)}"),
            ("length_normalizer", _is_finite(self.length_normalizer) and self.length_normalizer, "a finite number > 0"),
            ("length_activation", self.length_activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
        ):
            if not is_accepted:
                raise ValueError(f"{name} must be {accepted}, got {getattr(self, name)!r}")
        if self.target_form != LENGTH:
            for name, default in (("length_normalizer", 1.0), ("length_activation", SOFTPLUS)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name} must be {default} or absent unless target_form is {LENGTH}, got "
                        f"{getattr(self, name)!r} with {self.target_form}"
                    )

    @classmethod
    def read(cls, path: str | os.PathLike, gamma: float | None = None) -> LenVMConfig:
        """Read the configuration in the directory of the value model at ``path``. Without a file, the defaults.

        Args:
            path: a directory, ``owner/name`` on Hugging Face, or a ``.gguf`` file in the directory.
            gamma: replaces the file's gamma. If None, the file's is kept.

        Raises:
            ValueError: invalid value; the message names the file, the field, the value and the accepted values.
        """
        path = local_path(path)
        file = (path.parent if path.suffix == ".gguf" else path) / CONFIG_FILE
        config = read_fields(cls, file) if file.is_file() else cls()
        return config if gamma is None else replace(config, gamma=gamma)

    def write(self, folder: str | os.PathLike) -> None:
        """Write the configuration to the directory of a value model, and replace an existing file."""
        always = {"gamma", "target_form"}
        content = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != f.default or f.name in always}
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @property
    def nats_per_token(self) -> float:
        """``-ln(gamma)``."""
        return -math.log(DEFAULT_GAMMA if self.gamma is None else self.gamma)

    def lengths(self, value_logits: torch.Tensor) -> torch.Tensor:
        """Convert value logits to lengths in tokens, of the same shape: ``softplus(z) / -ln(gamma)``."""
        return F.softplus(value_logits) / self.nats_per_token

    def value_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Convert the outputs of a value head to value logits ``z`` under ``gamma``.

        ``sigmoid(z) = 1 - gamma^l``, so ``z = ln(expm1(-l ln(gamma)))``, in a form that is precise for long and short
        lengths. Outputs of ``discounted_return`` already are value logits.
        """
        if self.target_form == DISCOUNTED_RETURN:
            return outputs
        if self.target_form == LOG_LENGTH:
            lengths = outputs.exp()
        else:
            activation = F.softplus if self.length_activation == SOFTPLUS else torch.sigmoid
            lengths = self.length_normalizer * activation(outputs)
        nats = (self.nats_per_token * lengths).clamp(min=_LEAST_NATS)
        return nats + torch.log(-torch.expm1(-nats))


def read_fields(kind: type[T], file: Path) -> T:
    """Read the fields of the dataclass ``kind`` from a JSON file.

    Raises:
        ValueError: invalid file or field; the message names both.
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


def _is_finite(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
