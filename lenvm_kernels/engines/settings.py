"""The settings of the SGLang and vLLM plugins: environment variables or a JSON file. Importable without an engine."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.guidance import GuidanceParams, Thoughts, parse_guidance, text_breaks_of
from lenvm_kernels.guidance.params import check_with_probe
from lenvm_kernels.step import StepConfig, working_bytes
from lenvm_kernels.values import LengthProbe, LenVMConfig, ValueModel
from lenvm_kernels.values.checkpoint import local_path, reads_images
from lenvm_kernels.values.probe import is_probe

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_VARIABLE = "LENVM_CONFIG"
# Capacity of a request's row in the device table.
MAX_END_TOKENS, MAX_STOP_TOKENS, MAX_SCALED_TOKENS = 64, 48, 32
# The setting for guidance without a value model.
NONE = "none"


# 0 or 1 in a variable, true or false in a file.
_SWITCH = {"0": False, "1": True, "False": False, "True": True}
_POWERS = (1, 2, 4, 8, 16, 32, 64)
# For each setting: its parser, a condition or None, and the accepted values in words.
PARSERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool] | None, str]] = {
    "value_model": (
        lambda text: None if text == NONE else local_path(text),
        lambda path: path is None or path.exists(),
        f"an existing directory or .gguf file, a name in the Hugging Face cache, or {NONE}",
    ),
    "value_head": (local_path, Path.exists, "an existing .safetensors or .bin file, or a directory or name with one"),
    "gamma": (float, lambda x: 0 < x < 1, "a number > 0 and < 1"),
    "dtype": (DTYPES.__getitem__, None, f"one of {', '.join(DTYPES)}"),
    "max_candidates": (int, _POWERS.__contains__, "a power of two up to 64"),
    "chunk_tokens": (int, lambda n: n >= 1, "an integer of at least 1"),
    "memory_share": (float, lambda x: 0 < x <= 1, "a number > 0 and <= 1"),
    "value_stride": (int, lambda n: n >= 1, "an integer of at least 1"),
    "graphs": (_SWITCH.__getitem__, None, "0 or 1"),
    "tokenizer": (str, None, "a directory or a name"),
    "predictions": (Path, None, "a file"),
    "trace": (Path, None, "a file"),
}


@dataclass(frozen=True)
class Settings:
    """The plugin's settings, which every process of the engine reads (:meth:`current`).

    Each is the environment variable of its name in capitals after ``LENVM_``, or the key of its name in the JSON file
    that ``LENVM_CONFIG`` names. Variables take precedence.

    Attributes:
        value_model: location of the value model (:meth:`ValueModel.from_pretrained`) or probe
            (:meth:`LengthProbe.from_pretrained`), which enables the plugin. None stands for ``none``: targets are met
            by the end tokens alone (:class:`GuidedStep`).
        value_head: location of the head. If None, the head is with the model.
        gamma: default of requests. If None, ``gamma`` in the value model's ``lenvm_config.json``, or 0.997.
        dtype: float32, bfloat16 or float16. If None, the base model's.
        max_candidates: candidates per row, a power of two up to 64.
        chunk_tokens: tokens of a prompt that are computed at a time.
        memory_share: share of the memory for the engine's caches that the value model's cache and steps may take. If
            None, all of it in SGLang, where the engine does not start if they need more, and 0.2 in vLLM, where they
            are given this share.
        value_stride: default of requests, in steps of the engine.
        graphs: whether the value model runs in CUDA graphs. If None, on a GPU if the engine uses CUDA graphs.
        tokenizer: location of the base model's tokenizer, for thinking budgets and forced texts. If None, the
            engine's in SGLang, otherwise the one in the value model's directory.
        predictions: file to which vLLM appends a JSON line per request with ``return_values``.
        trace: file to which every guided step appends a JSON line, for debugging: it makes a host-device sync.
    """

    value_model: Path | None
    value_head: Path | None = None
    gamma: float | None = None
    dtype: torch.dtype | None = None
    max_candidates: int = 8
    chunk_tokens: int = 4096
    memory_share: float | None = None
    value_stride: int = 1
    graphs: bool | None = None
    tokenizer: str | None = None
    predictions: Path | None = None
    trace: Path | None = None

    @staticmethod
    def are_given() -> bool:
        """Whether the plugin is on; the settings may be invalid."""
        return any(os.environ.get(name, "").strip() for name in ("LENVM_VALUE_MODEL", CONFIG_VARIABLE))

    @classmethod
    @functools.cache
    def current(cls, tokenizer: str | None = None) -> Settings:
        """The settings of this process, read from its environment once.

        Args:
            tokenizer: location of the engine's tokenizer, for settings that name none.

        Raises:
            ValueError: as :meth:`from_environment`, or the plugin is off.
        """
        settings = cls.from_environment()
        if settings is None:
            raise ValueError(f"LENVM_VALUE_MODEL or {CONFIG_VARIABLE} must be set, got neither")
        return replace(settings, tokenizer=settings.tokenizer or tokenizer)

    @classmethod
    def from_environment(cls, value_model: tuple[str, str] | None = None, max_candidates: int = 8) -> Settings | None:
        """The settings in the environment; None if nothing names a value model: the plugin is off.

        Args:
            value_model: name and text of an engine's own option, which takes precedence over ``LENVM_VALUE_MODEL``.
            max_candidates: the engine's own default.

        Raises:
            ValueError: naming the variable or the file's key, what came and what is accepted; or
                ``lenvm_config.json`` is invalid.
        """
        if value_model is None and not cls.are_given():
            return None
        config = os.environ.get(CONFIG_VARIABLE, "").strip()
        given = {"max_candidates": ("max_candidates", str(max_candidates))}
        given |= _read_file(Path(config)) if config else {}
        for name in PARSERS:
            variable = f"LENVM_{name.upper()}"
            if text := os.environ.get(variable, "").strip():
                given[name] = variable, text
        if value_model is not None:
            given["value_model"] = value_model
        if "value_model" not in given:
            raise ValueError(f"value_model must be in {config} or in LENVM_VALUE_MODEL")
        settings = cls(**{name: _parse(name, *source) for name, source in given.items()})
        if "value_head" in given and not settings.reads_tokens:
            name, text = given["value_head"]
            source = "with a probe" if settings.has_probe else "without a value model"
            raise ValueError(f"{name} must not be given {source}, got {text!r}")
        if settings.value_model is None:
            return settings
        return replace(settings, gamma=LenVMConfig.read(settings.value_model, settings.gamma).gamma)

    @cached_property
    def has_probe(self) -> bool:
        """Whether ``value_model`` is a probe, which :meth:`load_probe` loads."""
        return self.value_model is not None and is_probe(self.value_model)

    @property
    def reads_tokens(self) -> bool:
        """Whether ``value_model`` reads the tokens of sequences: it is neither ``none`` nor a probe."""
        return self.value_model is not None and not self.has_probe

    @cached_property
    def reads_images(self) -> bool:
        """Whether the value model's architecture, as stated in its directory, reads images."""
        return self.value_model is not None and reads_images(self.value_model)

    @cached_property
    def strength(self) -> float | None:
        """Default ``strength`` of requests, from the value model's ``lenvm_config.json``. If None, it has none."""
        return None if self.value_model is None else LenVMConfig.read(self.value_model).strength

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The base model's marks of thoughts. If None, its tokenizer is not known. Loading takes seconds."""
        path = self.tokenizer or (self.value_model and str(self.value_model))
        if path is None:
            return None
        try:
            return Thoughts.of(_tokenizer_at(path))
        except Exception as error:  # guidance works without it
            logger.info("the marks of thoughts are not known: the tokenizer %s cannot be loaded (%s)", path, error)
            return None

    def parse_request(self, custom_params: Mapping[str, Any]) -> GuidanceParams:
        """:func:`parse_guidance` of a request to a server, with the defaults of the settings and the value model.

        Raises:
            ValueError: naming the field, what came and what is accepted; also if the request needs a value model and
                there is none, or cannot be combined with a probe.
        """
        has_words = any(isinstance(custom_params.get(name), str) for name in ("end_message", "landing"))
        needs_thoughts = has_words or custom_params.get("thinking_budget") is not None
        params = parse_guidance(
            custom_params,
            thoughts=self.thoughts if needs_thoughts else None,
            gamma=self.gamma,
            strength=self.strength,
            has_values=self.value_model is not None,
        )
        if self.has_probe:
            check_with_probe(params)
        return params

    def load_probe(self, num_layers: int, embedding: torch.Tensor) -> LengthProbe:
        """The probe on the base model's device.

        Args:
            num_layers: layers of the base model.
            embedding: ``[V, H]``; its input embedding.

        Raises:
            ValueError: ``LENVM_DTYPE`` is not the dtype of the embedding, which the engine's states have; or as
                :meth:`LengthProbe.from_pretrained`.
        """
        assert self.value_model is not None
        if self.dtype not in (None, embedding.dtype):
            names = {dtype: name for name, dtype in DTYPES.items()}
            came = names[self.dtype]
            raise ValueError(f"LENVM_DTYPE must be absent with a probe, or {embedding.dtype} as its base, got {came}")
        return LengthProbe.from_pretrained(self.value_model, num_layers, embedding, gamma=self.gamma)

    def load_value_model(self, dtype: torch.dtype, device: torch.device | str) -> ValueModel | None:
        """The value model on a device, or None without one or with a probe; ``dtype`` is the base model's."""
        if self.value_model is None or self.has_probe:
            return None
        return ValueModel.from_pretrained(
            self.value_model, self.value_head, gamma=self.gamma, dtype=self.dtype or dtype, device=device
        )

    def working_bytes(
        self, value_model: ValueModel | None, *, requests: int, max_len: int, vocab_size: int, **of_step: int
    ) -> int:
        """Bytes that an engine's steps and prompts take (:func:`working_bytes`), which share no memory.

        ``of_step`` are ``max_delta`` and ``max_drafts``.
        """
        sizes = dict(requests=requests, max_len=max_len, vocab_size=vocab_size)
        step = working_bytes(value_model, **sizes, max_candidates=self.max_candidates, **of_step)
        return step if value_model is None else step + working_bytes(value_model, **sizes, tokens=self.chunk_tokens)

    def step_config(self, *, has_graphs: bool, **sizes: Any) -> StepConfig:
        """The configuration of a :class:`GuidedStep`, from these settings and the ``sizes`` of an engine.

        ``has_graphs`` states whether the engine itself uses CUDA graphs.
        """
        return StepConfig(
            max_candidates=self.max_candidates,
            max_eos=MAX_END_TOKENS,
            chunk_tokens=self.chunk_tokens,
            value_stride=self.value_stride,
            graphs=self.graphs if has_graphs or self.graphs is not None else False,
            **sizes,
        )


@functools.cache
def _tokenizer_at(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _parse(name: str, where: str, text: str) -> Any:
    parse, accepts, accepted = PARSERS[name]
    came = repr(text)
    try:
        value = parse(text)
        if accepts is None or accepts(value):
            return value
    except FileNotFoundError as error:
        came += f": {error}"
    except (ValueError, KeyError):
        pass
    raise ValueError(f"{where} must be {accepted}, got {came}")


def _read_file(path: Path) -> dict[str, tuple[str, str]]:
    """The source and the text of each setting in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON file, got {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON object of settings, got {type(content).__name__} in {path}")
    for name in content:
        if name not in PARSERS:
            close = difflib.get_close_matches(name, PARSERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted are {', '.join(PARSERS)}"
            raise ValueError(f"{name} in {path} is not a setting; {hint}")
    return {name: (f"{name} in {path}", str(value)) for name, value in content.items() if value is not None}


def load_text_breaks(tokenizer: str | None, vocab_size: int) -> torch.Tensor | None:
    """:func:`text_breaks_of` the base model's tokenizer; None, with a warning, if it cannot be loaded.

    Args:
        tokenizer: location of the tokenizer. If None, the engine has none.
        vocab_size: size of the base model's vocabulary.
    """
    if tokenizer is None:
        return None
    try:
        return text_breaks_of(_tokenizer_at(tokenizer), vocab_size)
    except Exception as error:  # guidance works without it
        logger.warning("outputs may end within sentences: the tokenizer %s cannot be loaded (%s)", tokenizer, error)
        return None


def check_vocabulary(settings: Settings, value_size: int, base_size: int, base_tokenizer: str) -> None:
    """Raise ValueError unless both models have the same tokens; their embeddings may be padded differently.

    Args:
        settings: settings that name the value model.
        value_size, base_size: sizes of the models' vocabularies.
        base_tokenizer: location of the base model's tokenizer.
    """
    if value_size == base_size:
        return
    from transformers import AutoTokenizer

    base, value = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (base_tokenizer, settings.value_model))
    if base != value:
        raise ValueError(
            f"LENVM_VALUE_MODEL must share the base model's vocabulary: sizes are {base_size} and {value_size}, and "
            "the tokenizers differ"
        )
