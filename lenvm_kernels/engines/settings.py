"""Settings of the plugins, from environment variables or a JSON file. Importable without an engine."""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from lenvm_kernels.engines.tokenizers import check_vocabulary, load_thoughts
from lenvm_kernels.guidance import GuidanceParams, Thoughts, parse_guidance
from lenvm_kernels.guidance.fields import BUDGETS, NAMESPACE, SELECTED, SELECTORS, TARGETS, read_json
from lenvm_kernels.guidance.params import check_with_probe, read_names
from lenvm_kernels.step import StepConfig, working_bytes
from lenvm_kernels.values import LengthProbe, LenVMConfig, ValueModel
from lenvm_kernels.values.checkpoint import local_path, reads_images
from lenvm_kernels.values.probe import is_probe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_VARIABLE = "LENVM_CONFIG"
# Maximum number of pending tokens per request in a guided step, excluding drafts.
MAX_DELTA = 16
# Capacity of a request's row in the device table.
MAX_END_TOKENS, MAX_STOP_TOKENS, MAX_SCALED_TOKENS = 64, 48, 32
# Fields that only concern the answer after a thought.
_OF_ANSWERS = {*TARGETS, "value_constraint", "tolerance", "strength", "soft_max_tokens"}
# Fields that depend on the tokenizer's marks, and fields that may be given as text.
_NEED_MARKS, _TEXT_FIELDS = {*BUDGETS, *TARGETS, "soft_max_tokens"}, ("end_message", "landing")
NONE = "none"  # value_model for guidance without values


class SettingText(NamedTuple):
    """Parser of a setting's text, the accepted values in words, and a condition on the parsed value."""

    parse: Callable[[str], Any]
    accepted: str
    accepts: Callable[[Any], bool] = lambda _: True

    def read(self, source: str, text: str) -> Any:
        """Parse ``text``. Raises ValueError with the source, the text and the accepted values."""
        came = repr(text)
        try:
            if self.accepts(value := self.parse(text)):
                return value
        except FileNotFoundError as error:
            came += f": {error}"
        except (ValueError, KeyError):
            pass
        raise ValueError(f"{source} must be {self.accepted}, got {came}")


_MODEL = SettingText(
    lambda text: None if text == NONE else local_path(text),
    f"an existing directory or .gguf file, a name on Hugging Face, {NONE} or off",
    lambda path: path is None or path.exists(),
)
_HEAD = SettingText(local_path, "an existing .safetensors or .bin file, or a directory or name with one", Path.exists)
_DTYPE = SettingText(DTYPES.__getitem__, f"one of {', '.join(DTYPES)}")
_POWER = SettingText(int, "a power of two up to 64", (1, 2, 4, 8, 16, 32, 64).__contains__)
_COUNT = SettingText(int, "an integer of at least 1", lambda n: n >= 1)


def _are_defaults(given: Any) -> bool:
    choices = [given.get(name, {}) for name in SELECTORS] if isinstance(given, dict) else [None]
    return all(isinstance(each, dict) and all(isinstance(x, dict) for x in each.values()) for each in choices)


_DEFAULTS = SettingText(
    json.loads, f"a JSON object of guidance parameters, and of such objects by {' or '.join(SELECTORS)}", _are_defaults
)
# 0 or 1 in a variable, true or false in a file.
_SWITCH = SettingText({"0": False, "1": True, "False": False, "True": True}.__getitem__, "0 or 1")


@dataclass(frozen=True)
class Settings:
    """The plugin's settings, read in each process of the engine (:meth:`current`).

    A setting is the environment variable ``LENVM_`` with its name in capitals, or the key with its name in the JSON
    file ``LENVM_CONFIG``. Variables take precedence.
    """

    value_model: Annotated[Path | None, _MODEL] = None
    """Location of the value model (:meth:`ValueModel.from_pretrained`) or probe (:meth:`LengthProbe.from_pretrained`).
    None stands for ``none``, the default: targets are met by end tokens only (:class:`GuidedStep`)."""
    value_head: Annotated[Path | None, _HEAD] = None
    """Location of the head. If None, the head is in the model's directory."""
    gamma: Annotated[float | None, SettingText(float, "a number > 0 and < 1", lambda x: 0 < x < 1)] = None
    """Default of requests. If None, ``gamma`` in the value model's ``lenvm_config.json``, or 0.997."""
    dtype: Annotated[torch.dtype | None, _DTYPE] = None
    """Data type of the value model. If None, the base model's."""
    max_candidates: Annotated[int | None, _POWER] = None
    """Candidates per row. If None, 8 with a value model and 64 without."""
    chunk_tokens: Annotated[int, _COUNT] = 4096
    """Maximum number of prompt tokens in one forward of the value model."""
    memory_share: Annotated[float | None, SettingText(float, "a number > 0 and <= 1", lambda x: 0 < x <= 1)] = None
    """Share of the memory for the engine's caches that the value model's cache and steps take. In SGLang a limit above
    which the server does not start, without a limit if None; in vLLM their share, 0.2 if None."""
    value_stride: Annotated[int, _COUNT] = 1
    """Default of requests, in steps of the engine."""
    graphs: Annotated[bool | None, _SWITCH] = None
    """Whether guided steps run from CUDA graphs. If None, on a GPU if the engine uses CUDA graphs."""
    defaults: Annotated[Mapping[str, Any], _DEFAULTS] = field(default_factory=dict)
    """Parameters for requests without any. Objects under ``reasoning_effort`` and ``verbosity`` have further parameters
    for each value of these fields of chat requests."""
    tokenizer: Annotated[str | None, SettingText(str, "a directory or a name")] = None
    """Location of the base model's tokenizer, for thinking budgets and forced texts. If None, the engine's in SGLang
    and vLLM, otherwise the one in the value model's directory."""
    predictions: Annotated[Path | None, SettingText(Path, "a file")] = None
    """File to which vLLM appends a JSON line per request with ``return_values``."""
    trace: Annotated[Path | None, SettingText(Path, "a file")] = None
    """File to which each guided step appends a JSON line, for debugging, because it makes a host-device sync."""

    @classmethod
    @functools.cache
    def current(cls, tokenizer: str | None = None) -> Settings:
        """The settings of this process, read once. ``tokenizer`` is the default of that setting."""
        settings = cls.from_environment()
        return replace(settings, tokenizer=settings.tokenizer or tokenizer)

    @classmethod
    def from_environment(cls, value_model: tuple[str, str] | None = None) -> Settings:
        """The settings in the environment.

        Args:
            value_model: name and text of an engine's own option, which takes precedence over ``LENVM_VALUE_MODEL``.

        Raises:
            ValueError: invalid setting; the message names the variable or key, the value and the accepted values. Also
                if ``lenvm_config.json`` is invalid.
        """
        given = _given_texts() | ({} if value_model is None else {"value_model": value_model})
        settings = cls(**{name: _TEXTS[name].read(*source) for name, source in given.items()})
        if "value_head" in given and not settings.reads_tokens:
            name, text = given["value_head"]
            source = "with a probe" if settings.has_probe else "without a value model"
            raise ValueError(f"{name} must not be given {source}, got {text!r}")
        if (path := settings.value_model) is not None:
            settings = replace(settings, gamma=LenVMConfig.read(path, settings.gamma).gamma)
        choices = [{name: value} for name in SELECTORS for value in settings.defaults.get(name, ())]
        for selected in [{}, *choices] if settings.defaults else ():
            try:
                settings._parse(settings.defaults_of(selected), Thoughts.unknown(), max_tokens=2**20)
            except ValueError as error:
                raise ValueError(f"{given['defaults'][0]} has invalid parameters: {error}") from error
        return settings

    @cached_property
    def has_probe(self) -> bool:
        """Whether ``value_model`` is a probe."""
        return self.value_model is not None and is_probe(self.value_model)

    @property
    def reads_tokens(self) -> bool:
        """Whether values are computed from tokens: ``value_model`` is neither ``none`` nor a probe."""
        return self.value_model is not None and not self.has_probe

    @cached_property
    def reads_images(self) -> bool:
        """Whether the value model reads images, by the architecture in its directory."""
        return self.value_model is not None and reads_images(self.value_model)

    @cached_property
    def strength(self) -> float | None:
        """Default ``strength`` in the value model's ``lenvm_config.json``, or None."""
        return None if self.value_model is None else LenVMConfig.read(self.value_model).strength

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The base model's marks of thoughts, or None without a tokenizer. Loading takes seconds."""
        return load_thoughts(self.tokenizer or (None if self.value_model is None else str(self.value_model)))

    def stop_tokens(self, texts: Sequence[str] | str | None) -> set[int]:
        """The stop strings of a request that are single tokens. Longer stop strings are ignored."""
        texts = [texts] if isinstance(texts, str) else texts or []
        encoded = [self.thoughts.encode(text) for text in texts] if self.thoughts and self.thoughts.encode else []
        return {tokens[0] for tokens in encoded if len(tokens) == 1}

    @property
    def has_choices(self) -> bool:
        """Whether the defaults depend on fields of chat requests."""
        return not self.defaults.keys().isdisjoint(SELECTORS)

    def defaults_of(self, selected: Mapping[str, str]) -> dict[str, Any]:
        """The parameters for requests without any, by values of :data:`SELECTORS`."""
        fields = {name: value for name, value in self.defaults.items() if name not in SELECTORS}
        for name, value in selected.items():
            fields |= self.defaults.get(name, {}).get(str(value), {})
        return fields

    @staticmethod
    def is_asked(custom_params: Mapping[str, Any] | None) -> bool:
        """Whether a request has guidance parameters. An empty :data:`NAMESPACE` disables the defaults.

        Raises ValueError for an invalid parameter name.
        """
        given = custom_params or {}
        return NAMESPACE in given or bool(read_names(given, others="shared"))

    def parse_request(
        self,
        custom_params: Mapping[str, Any] | None,
        stop_token_ids: Collection[int] = (),
        *,
        max_tokens: int | None = None,
        has_schema: bool = False,
        engine_budget: float | None = None,
    ) -> GuidanceParams:
        """:func:`parse_guidance` for a request to a server, with the defaults of settings and value model.

        Parameters of other components are ignored (:func:`read_names`).

        Args:
            custom_params: parameters of the request, or None.
            stop_token_ids: tokens that end its output.
            max_tokens: limit of new tokens, or None.
            has_schema: whether a grammar or schema restricts the output; a target is then an upper limit by default.
            engine_budget: limit that the engine itself applies to a thought, or None. It is also a ``thinking_budget``
                if the other parameters only concern the answer.

        Raises:
            ValueError: invalid parameters; the message names the field, the value and the accepted values. Also if the
                value model or probe does not support the request, or it has more tokens than a row of the device table.
                A request without parameters is unguided instead.
        """
        custom_params = custom_params or {}
        is_asked = self.is_asked(custom_params)
        selected = read_json(custom_params.get(SELECTED, {}))
        if not isinstance(selected, Mapping) or not {*SELECTORS} >= selected.keys():
            raise ValueError(f"{SELECTED} must be an object of {' and '.join(SELECTORS)}, got {selected!r}")
        defaults = self.defaults_of(selected)
        given = read_names(custom_params, others="shared") if is_asked else read_names(defaults)
        needs_tokenizer = given.keys() & _NEED_MARKS or any(isinstance(given.get(name), str) for name in _TEXT_FIELDS)
        thoughts = self.thoughts if needs_tokenizer or engine_budget is not None else None
        is_off = is_asked and not given
        if engine_budget is not None and thoughts and thoughts.ends and given.keys() <= _OF_ANSWERS and not is_off:
            given["thinking_budget"] = engine_budget
        try:
            params = self._parse(given, thoughts, max_tokens, constraint="le_near" if has_schema else "near")
            needs_row = params.needs_step or params.token_temperature_scale
            for name, tokens, most in (
                ("stop_token_ids", stop_token_ids, MAX_STOP_TOKENS),
                ("token_temperature_scale", params.token_temperature_scale, MAX_SCALED_TOKENS),
            ):
                if needs_row and (count := len(tokens)) > most:
                    raise ValueError(f"{name} must have at most {most} tokens together with guidance, got {count}")
        except ValueError:
            if is_asked:
                raise
            return GuidanceParams()
        return params

    def _parse(
        self, given: Mapping[str, Any], thoughts: Thoughts | None, max_tokens: int | None, constraint: str = "near"
    ) -> GuidanceParams:
        """:func:`parse_guidance` with the defaults of the value model."""
        params = parse_guidance(
            given,
            gamma=self.gamma,
            strength=self.strength,
            thoughts=thoughts,
            constraint=constraint,
            has_values=self.value_model is not None,
            max_tokens=max_tokens,
        )
        if self.has_probe:
            check_with_probe(params)
        return params

    def load_probe(self, num_layers: int, embedding: torch.Tensor) -> LengthProbe:
        """The probe for a base model with ``num_layers`` and input ``embedding [V, H]``, on the embedding's device.

        Raises:
            ValueError: ``LENVM_DTYPE`` differs from the embedding's dtype; or as :meth:`LengthProbe.from_pretrained`.
        """
        assert self.value_model is not None
        if self.dtype not in (None, embedding.dtype):
            came = str(self.dtype).removeprefix("torch.")
            raise ValueError(f"LENVM_DTYPE must be absent with a probe, or {embedding.dtype} as its base, got {came}")
        return LengthProbe.from_pretrained(self.value_model, num_layers, embedding, gamma=self.gamma)

    def load_value_model(
        self, dtype: torch.dtype, device: torch.device | str, vocab_size: int, tokenizer: str
    ) -> ValueModel:
        """Load the value model onto a device, if :attr:`reads_tokens`. The other arguments are the base model's.

        Raises ValueError as :func:`check_vocabulary`.
        """
        assert self.value_model is not None
        options: dict[str, Any] = dict(gamma=self.gamma, dtype=self.dtype or dtype, device=device)
        model = ValueModel.from_pretrained(self.value_model, self.value_head, **options)
        check_vocabulary(self.value_model, model.config.vocab_size, vocab_size, tokenizer)
        return model

    def working_bytes(
        self, values: ValueModel | LengthProbe | None, *, max_delta: int, max_drafts: int = 0, **sizes: int
    ) -> int:
        """Bytes of working memory for steps and prompts (:func:`working_bytes`, with its ``sizes``)."""
        of_step: dict[str, Any] = dict(max_delta=max_delta, max_drafts=max_drafts, max_candidates=self.max_candidates)
        prompts = working_bytes(values, **sizes, tokens=self.chunk_tokens) if isinstance(values, ValueModel) else 0
        return working_bytes(values, **sizes, **of_step) + prompts

    def step_config(self, *, has_graphs: bool, **sizes: Any) -> StepConfig:
        """Configuration of a :class:`GuidedStep`; ``has_graphs`` is whether the engine uses CUDA graphs."""
        own = {name: getattr(self, name) for name in ("max_candidates", "chunk_tokens", "value_stride")}
        graphs = self.graphs if has_graphs or self.graphs is not None else False
        return StepConfig(max_eos=MAX_END_TOKENS, graphs=graphs, **own, **sizes)


_HINTS = get_type_hints(Settings, include_extras=True)
_TEXTS: dict[str, SettingText] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}


def _given_texts() -> dict[str, tuple[str, str]]:
    """The source and the text of each setting in the environment and in the file ``LENVM_CONFIG``."""
    config = os.environ.get(CONFIG_VARIABLE, "").strip()
    given = _read_file(Path(config)) if config else {}
    for name in _TEXTS:
        variable = f"LENVM_{name.upper()}"
        if text := os.environ.get(variable, "").strip():
            given[name] = variable, text
    return given


def _read_file(path: Path) -> dict[str, tuple[str, str]]:
    """The source and the text of each setting in a JSON file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON file, got {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG_VARIABLE} must be a JSON object of settings, got {type(content).__name__} in {path}")
    for name in content:
        if name not in _TEXTS:
            close = difflib.get_close_matches(name, _TEXTS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted are {', '.join(_TEXTS)}"
            raise ValueError(f"{name} in {path} is not a setting; {hint}")
    return {
        name: (f"{name} in {path}", json.dumps(value) if isinstance(value, dict) else str(value))
        for name, value in content.items()
        if value is not None
    }
