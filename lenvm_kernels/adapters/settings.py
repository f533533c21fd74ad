"""The settings of the plugins of SGLang and vLLM: environment variables, or a JSON file. Importable without either."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.guidance import GuidanceParams, Thoughts, parse_guidance, text_breaks_of
from lenvm_kernels.guidance.params import check_with_trunk
from lenvm_kernels.step import StepConfig, working_bytes
from lenvm_kernels.value_model import LenVMConfig, Trunk, ValueModel
from lenvm_kernels.value_model.checkpoint import local_path
from lenvm_kernels.value_model.trunk import is_trunk

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_VARIABLE = "LENVM_CONFIG"
# Room of a request in the device table.
MAX_END_TOKENS, MAX_STOP_TOKENS, MAX_SCALED_TOKENS = 64, 48, 32


def _accepting(parse: Callable[[str], Any], accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    """A parser that raises ValueError for what it does not accept."""

    def checked(text: str) -> Any:
        value = parse(text)
        if not accepts(value):
            raise ValueError
        return value

    return checked


# 0 or 1 as a variable, true or false in a file.
_switch = {"0": False, "1": True, "False": False, "True": True}.__getitem__
_existing = _accepting(local_path, Path.exists)
# The word in the place of a value model where there is none.
NONE = "none"
# How each setting is read from text, and what it accepts.
PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "value_model": (
        lambda text: None if text == NONE else _existing(text),
        f"an existing directory or .gguf file, a name in the Hugging Face cache, or {NONE}",
    ),
    "value_head": (_existing, "an existing .safetensors or .bin file, or a directory or name with one"),
    "gamma": (_accepting(float, lambda x: 0 < x < 1), "a number > 0 and < 1"),
    "dtype": (DTYPES.__getitem__, f"one of {', '.join(DTYPES)}"),
    "max_candidates": (_accepting(int, (1, 2, 4, 8, 16, 32, 64).__contains__), "a power of two up to 64"),
    "chunk_tokens": (_accepting(int, lambda n: n >= 1), "an integer of at least 1"),
    "memory_share": (_accepting(float, lambda x: 0 < x <= 1), "a number > 0 and <= 1"),
    "value_stride": (_accepting(int, lambda n: n >= 1), "an integer of at least 1"),
    "graphs": (_switch, "0 or 1"),
    "tokenizer": (str, "a directory or a name"),
    "predictions": (Path, "a file"),
    "trace": (Path, "a file"),
}


@dataclass(frozen=True)
class Settings:
    """The plugin's settings. Every process of the engine reads the same ones.

    Each is the environment variable of its name in capitals after ``LENVM_``, or stands under its name in the JSON file
    that ``LENVM_CONFIG`` names. Variables take precedence.

    Attributes:
        value_model: where it is (:meth:`ValueModel.from_pretrained`), or where a trunk is
            (:meth:`Trunk.from_pretrained`); ``none``, which is None here: targets are met by the end tokens alone
            (:class:`GuidedStep`). Turns the plugin on.
        value_head: where the head is, if it is not with the model.
        gamma: the value model's, of requests that name none (None: that of ``lenvm_config.json`` in its directory;
            without one, it is not known).
        dtype: float32, bfloat16 or float16 (None: the base model's).
        max_candidates: candidates a row, a power of two up to 64.
        chunk_tokens: tokens of a prompt computed at a time.
        memory_share: of the memory that the engine has for its caches, for the value model's cache and its steps. In
            SGLang they take what they need, and the engine does not start if that is more (None: all). In vLLM it is
            what they get (None: 0.2).
        value_stride: of requests that ask for none: they are guided at every n-th step of the engine.
        graphs: 1 or 0: CUDA graphs of the value model (None: on a GPU, if the engine has its own).
        tokenizer: where the base model's tokenizer is, for a ``thinking_budget`` without ``end_token_ids`` and an
            ``end_message`` or a ``landing`` in words (None: in SGLang the engine's own, else that in the value model's
            directory).
        predictions: a file of vLLM's that gets a JSON line for each request with ``return_values``.
        trace: a file that gets a JSON line a guided step, to look for faults with: the engine waits for the device to
            write it.
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
        """Whether the plugin is to be on; the settings may be wrong."""
        return any(os.environ.get(name, "").strip() for name in ("LENVM_VALUE_MODEL", CONFIG_VARIABLE))

    @classmethod
    def from_environment(cls, value_model: tuple[str, str] | None = None, max_candidates: int = 8) -> Settings | None:
        """The settings; None when nothing names a value model: the plugin is off.

        Args:
            value_model: an engine's own option for it, and what that says. It goes before ``LENVM_VALUE_MODEL``.
            max_candidates: what stands where nothing is said.

        Raises:
            ValueError: naming the variable or the file's key, what came and what is accepted; or a broken
                ``lenvm_config.json``.
        """
        if value_model is None and not cls.are_given():
            return None
        config = os.environ.get(CONFIG_VARIABLE, "").strip()
        given = {"max_candidates": ("max_candidates", str(max_candidates))}
        given |= _read_file(Path(config)) if config else {}
        for name in PARSERS:
            text = os.environ.get(f"LENVM_{name.upper()}", "").strip()
            if text:
                given[name] = f"LENVM_{name.upper()}", text
        if value_model is not None:
            given["value_model"] = value_model
        if "value_model" not in given:
            raise ValueError(f"value_model must be in {config} or in LENVM_VALUE_MODEL")
        settings = cls(**{name: _parse(name, *source) for name, source in given.items()})
        if settings.value_model is None or settings.has_trunk:
            source = "without a value model" if settings.value_model is None else "with a trunk"
            if "value_head" in given:
                name, text = given["value_head"]
                raise ValueError(f"{name} must not be given {source}, got {text!r}")
        if settings.value_model is None:
            return settings
        return replace(settings, gamma=LenVMConfig.read(settings.value_model, settings.gamma).gamma)

    @property
    def has_trunk(self) -> bool:
        """Whether ``value_model`` is a trunk, which :meth:`load_trunk` loads."""
        return self.value_model is not None and is_trunk(self.value_model)

    def load_trunk(self, num_layers: int, embedding: torch.Tensor) -> Trunk:
        """The trunk, for a base model with so many layers and this input embedding ``[V, H]``, on its device.

        Raises:
            ValueError: ``LENVM_DTYPE`` is not that of the embedding, in which an engine has its states; or as
                :meth:`Trunk.from_pretrained`.
        """
        assert self.value_model is not None
        if self.dtype not in (None, embedding.dtype):
            names = {dtype: name for name, dtype in DTYPES.items()}
            came = names[self.dtype]
            raise ValueError(f"LENVM_DTYPE must be absent with a trunk, or {embedding.dtype} as its base, got {came}")
        return Trunk.from_pretrained(self.value_model, num_layers, embedding, gamma=self.gamma)

    def load_value_model(self, dtype: torch.dtype, device: torch.device | str) -> ValueModel | None:
        """The value model on a device, None without one or with a trunk; ``dtype`` is the base model's."""
        if self.value_model is None or self.has_trunk:
            return None
        return ValueModel.from_pretrained(
            self.value_model,
            self.value_head,
            gamma=self.gamma,
            dtype=self.dtype or dtype,
            device=device,
        )

    def working_bytes(
        self, value_model: ValueModel | None, *, requests: int, max_len: int, vocab_size: int, **of_step: int
    ) -> int:
        """Bytes of an engine's steps and of its prompts (:func:`working_bytes`): each keeps its own from the other.

        ``of_step`` are ``max_delta`` and ``max_drafts``.
        """
        sizes = dict(requests=requests, max_len=max_len, vocab_size=vocab_size)
        step = working_bytes(value_model, **sizes, max_candidates=self.max_candidates, **of_step)
        if value_model is None:  # nobody computes prompts
            return step
        return step + working_bytes(value_model, **sizes, tokens=self.chunk_tokens)

    def step_config(self, *, has_graphs: bool, **sizes: Any) -> StepConfig:
        """What these settings and the ``sizes`` of an engine make of a :class:`GuidedStep`.

        ``has_graphs`` says whether the engine has CUDA graphs of its own.
        """
        return StepConfig(
            max_candidates=self.max_candidates,
            max_eos=MAX_END_TOKENS,
            chunk_tokens=self.chunk_tokens,
            value_stride=self.value_stride,
            graphs=self.graphs if has_graphs or self.graphs is not None else False,
            **sizes,
        )


def parse_request(custom_params: Mapping[str, Any]) -> GuidanceParams:
    """:func:`parse_guidance` of a request to a server, with what its settings and the value model's directory say.

    Raises:
        ValueError: naming the field, what came and what is accepted; also what a value model or a trunk that is
            there, or not, cannot give.
    """
    has_words = any(isinstance(custom_params.get(name), str) for name in ("end_message", "landing"))
    thoughts = default_thoughts() if has_words or custom_params.get("thinking_budget") is not None else None
    defaults: dict[str, Any] = dict(gamma=default_gamma(), strength=default_strength(), has_values=has_value_model())
    params = parse_guidance(custom_params, thoughts=thoughts, **defaults)
    if has_trunk():
        check_with_trunk(params)
    return params


@functools.cache
def has_value_model() -> bool:
    """Whether the settings name a value model or a trunk, and not ``none``."""
    settings = Settings.from_environment()
    return settings is None or settings.value_model is not None


@functools.cache
def has_trunk() -> bool:
    """Whether the settings name a trunk."""
    settings = Settings.from_environment()
    return settings is not None and settings.has_trunk


@functools.cache
def writes_predictions() -> bool:
    """Whether the settings name a file for predicted lengths."""
    settings = Settings.from_environment()
    return settings is not None and settings.predictions is not None


def value_model_reads_tokens() -> bool:
    """Whether the settings name a value model that reads the tokens of sequences: not ``none``, and no trunk."""
    return has_value_model() and not has_trunk()


@functools.cache
def _tokenizer_at(path: str) -> Any:
    """Of ``transformers``, loaded once: that takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


# Of the engine that this process belongs to, where it says.
_engine_tokenizer: str | None = None


def use_tokenizer(path: str | None) -> None:
    """The engine's tokenizer is here: requests are parsed with it."""
    global _engine_tokenizer
    _engine_tokenizer = path


@functools.cache
def default_thoughts() -> Thoughts | None:
    """What the base model's tokenizer says of thoughts; None where there is none."""
    settings = Settings.from_environment()
    beside = None if settings is None or settings.value_model is None else str(settings.value_model)
    path = (settings and settings.tokenizer) or _engine_tokenizer or beside
    if path is None:
        return None
    try:
        return Thoughts.of(_tokenizer_at(path))
    except Exception as error:  # guidance works without it
        logger.info("no tokenizer says what a thought is: that of %s cannot be loaded (%s)", path, error)
        return None


@functools.cache
def default_gamma() -> float | None:
    """``gamma`` of requests that name none; None: it is not known. Looked up once a process, as requests come often."""
    settings = Settings.from_environment()
    return None if settings is None else settings.gamma


@functools.cache
def default_strength() -> float | None:
    """``strength`` of requests that name none, as the file beside the value model has it; None: it has none."""
    settings = Settings.from_environment()
    path = None if settings is None else settings.value_model
    return None if path is None else LenVMConfig.read(path).strength


@functools.cache
def value_model_reads_images() -> bool:
    """Whether the value model is of an architecture that can, as its directory says."""
    from lenvm_kernels.value_model.checkpoint import reads_images

    settings = Settings.from_environment()
    path = None if settings is None else settings.value_model
    return path is not None and reads_images(path)


def _parse(name: str, where: str, text: str) -> Any:
    parse, accepted = PARSERS[name]
    try:
        return parse(text)
    except (ValueError, KeyError, FileNotFoundError) as error:
        where_else = f": {error}" if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"{where} must be {accepted}, got {text!r}{where_else}") from error


def _read_file(path: Path) -> dict[str, tuple[str, str]]:
    """Where each setting of a JSON file stands, and its text."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON file, got {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON object of settings, got {type(content).__name__} in {path}")
    given = {}
    for name, value in content.items():
        if name not in PARSERS:
            close = difflib.get_close_matches(name, PARSERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted are {', '.join(PARSERS)}"
            raise ValueError(f"{name} in {path} is not a setting; {hint}")
        if value is not None:
            given[name] = f"{name} in {path}", str(value)
    return given


def load_text_breaks(tokenizer: str | None, vocab_size: int) -> torch.Tensor | None:
    """:func:`text_breaks_of` the base model's tokenizer; None, with a warning, where that cannot be loaded or read.

    Args:
        tokenizer: where it is; None: the engine has none.
        vocab_size: of the base model.
    """
    if tokenizer is None:
        return None
    try:
        return text_breaks_of(_tokenizer_at(tokenizer), vocab_size)
    except Exception as error:  # guidance works without it
        logger.warning("outputs may end within sentences: the tokenizer %s cannot be loaded (%s)", tokenizer, error)
        return None


def check_vocabulary(settings: Settings, value_size: int, base_size: int, base_tokenizer: str) -> None:
    """Raise ValueError unless both models have the same tokens; embeddings may be padded differently.

    Args:
        settings: which name the value model.
        value_size, base_size: of the models' vocabularies.
        base_tokenizer: where the base model's tokenizer is.
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
