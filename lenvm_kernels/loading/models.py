"""Base model, tokenizer and value model of the commands, loaded from local files only, and batched generation."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, StoppingCriteriaList
from transformers.utils import logging

from lenvm_kernels.engines.probe_states import base_of_probe
from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.engines.transformers.processor import Guidance, LenVMLogitsProcessor, eos_token_ids
from lenvm_kernels.loading import PROBE, VALUE, model_path
from lenvm_kernels.values import LengthProbe, LenVMConfig, ValueModel
from lenvm_kernels.values.checkpoint import local_path
from lenvm_kernels.values.probe import is_probe

DEMO, DEMO_PROBE = "demo", "demo-probe"


@dataclass(frozen=True)
class Models:
    """A base model and a value model, ready to generate on one device."""

    model: PreTrainedModel
    value_model: ValueModel | LengthProbe | None
    tokenizer: PreTrainedTokenizerBase
    value_tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(
        cls,
        model: str,
        value_model: str,
        *,
        device: str,
        dtype: torch.dtype,
        gamma: float | None = None,
        names: tuple[str, str] = ("--model", "--value-model"),
    ) -> Models:
        """Load both models on a device in a dtype. Weights that the two share are loaded once.

        Args:
            model: a Hugging Face directory or cached name, a ``.gguf`` file, or ``demo`` for the packaged SmolLM2.
            value_model: as ``model``, where ``demo`` includes the shipped adapters and head; or a directory with a
                probe of the base model, ``demo-probe`` for the shipped probe, or ``none`` for no value model.
            gamma: replaces the gamma of the value model's ``lenvm_config.json``. If None, the file's is kept.
            names: names of the two models in error messages.

        Raises:
            ValueError, OSError, ImportError: a path, head, checkpoint or package is missing or does not fit.
        """
        path = locate(names[0], model)
        value_model = str(PROBE if value_model == DEMO_PROBE else local_path(value_model))
        value_path = None if is_probe(value_model) or value_model == NONE else locate(names[1], value_model)
        adapter = VALUE if value_model == DEMO else None
        quiet()
        tokenizer = load_tokenizer(names[0], path)
        base = AutoModelForCausalLM.from_pretrained(**source_of(path), dtype=dtype, use_safetensors=True)
        base = base.eval().to(device)
        if tokenizer.pad_token_id is None:  # padding is masked, so any token works
            tokenizer.pad_token_id = next(iter(eos_token_ids(base)), 0)
        values: ValueModel | LengthProbe | None = None
        value_tokenizer = tokenizer
        if is_probe(value_model):
            values = LengthProbe.from_pretrained(value_model, *base_of_probe(base), gamma=gamma)
        elif value_path == path and adapter is not None:
            values = ValueModel.from_causal_lm(base, adapter=adapter, lenvm_config=LenVMConfig.read(adapter, gamma))
        elif value_path is not None:
            value_tokenizer = load_tokenizer(names[1], value_path)
            values = ValueModel.from_pretrained(value_path, adapter=adapter, dtype=dtype, device=device, gamma=gamma)
        return cls(base, values, tokenizer, value_tokenizer)

    def encode(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64 ``[B, N]``, of the prompts' tokens, padded on the left."""
        return self.padded(tokens_of(self.tokenizer, prompts))

    def padded(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64 ``[B, N]``, of ``B`` rows of tokens, padded on the left."""
        batch = self.tokenizer.pad({"input_ids": [*map(list, rows)]}, padding_side="left", return_tensors="pt")
        return dict(batch.to(self.model.device))

    def processor(
        self, source: ValueModel | LengthProbe | None, guidance: Any, inputs: Mapping[str, torch.Tensor], **options: Any
    ) -> LenVMLogitsProcessor:
        """The processor for ``inputs`` (:meth:`encode`) with values from ``source``, and its further ``options``."""
        mask, tokenizers = inputs["attention_mask"], (self.tokenizer, self.value_tokenizer)
        return LenVMLogitsProcessor(self.model, source, guidance, mask, tokenizers=tokenizers, **options)

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an output of the base model."""
        return eos_token_ids(self.model)


def tokens_of(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each prompt, as the user's message in the tokenizer's chat template if there is one."""
    if tokenizer.chat_template is not None:
        rows = [chat_tokens(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    else:
        rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    if not all(rows):
        raise ValueError("the prompt has no tokens")
    return rows


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of messages up to the beginning of the next answer."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def load_value_model(
    name: str, *, device: str, dtype: torch.dtype, gamma: float | None
) -> tuple[ValueModel, PreTrainedTokenizerBase | None]:
    """Load only a value model, and its tokenizer if there is one; arguments and errors as in :meth:`Models.load`."""
    path, adapter = locate("VALUE", name), VALUE if name == DEMO else None
    quiet()
    values = ValueModel.from_pretrained(path, adapter=adapter, dtype=dtype, device=device, gamma=gamma)
    try:
        return values, load_tokenizer("VALUE", path)
    except ValueError:
        return values, None


def quiet() -> None:
    """Limit the output of transformers to errors."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def locate(flag: str, name: str) -> Path:
    """The Hugging Face directory or ``.gguf`` file of a model.

    Raises FileNotFoundError, naming ``flag``, if there is none, and ImportError if packages for ``.gguf`` are missing.
    """
    path = model_path() if name == DEMO else local_path(name)
    if not (path.is_file() if path.suffix == ".gguf" else (path / "config.json").is_file()):
        raise FileNotFoundError(
            f"{flag} must be a directory with config.json, a name in the Hugging Face cache, an existing .gguf file or "
            f"the word {DEMO}, got {name!r}"
        )
    if path.suffix == ".gguf":
        require_extras("gguf", "accelerate")
        return path.parent.resolve() / path.name  # resolving links of the cache would lose the file's name
    return path.resolve()


def require_extras(*packages: str, extra: str = "demo") -> None:
    """Raise ImportError with the command that installs them if packages are missing."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ImportError(f'{", ".join(missing)} must be installed: pip install "lenvm-kernels[{extra}]"')


def source_of(path: Path) -> dict[str, str]:
    """The arguments of ``from_pretrained`` that read a directory or a GGUF file."""
    if path.suffix == ".gguf":
        return dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    return dict(pretrained_model_name_or_path=str(path))


def load_tokenizer(flag: str, path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the directory of a model's weights; a ValueError names ``flag``."""
    try:
        return AutoTokenizer.from_pretrained(**source_of(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} must have a tokenizer that loads, {path} has none") from error


def sample(
    models: Models,
    value_model: ValueModel | LengthProbe | None,
    inputs: Mapping[str, torch.Tensor],
    guidance: Guidance | Sequence[Guidance],
    *,
    max_new_tokens: int | Sequence[int],
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> list[tuple[list[int], float | None]]:
    """Answer a batch of prompts. Tokens are drawn with torch's generator.

    Args:
        value_model: source of values. If None, guidance uses only end tokens.
        inputs: see :meth:`Models.encode`.
        guidance: one for all prompts, or one per prompt. None means unguided.
        max_new_tokens: limit of all answers, or one per answer.
        streamer: receives the tokens of every step.
        **options: sampling parameters and further arguments of :class:`LenVMLogitsProcessor`.

    Returns:
        For each prompt, the new tokens up to and including the first end-of-sequence token, or up to the limit; and the
        length predicted before the first of them, None without ``return_values``.
    """
    width, device = inputs["input_ids"].shape[1], inputs["input_ids"].device
    limits = [max_new_tokens] * len(inputs["input_ids"]) if isinstance(max_new_tokens, int) else max_new_tokens
    last = width + torch.tensor(limits, device=device)
    options["max_new_tokens"] = [max(1, limit) for limit in limits]  # an answer with the limit 0 has no tokens
    processor = models.processor(value_model, guidance, inputs, **options)
    sequences = models.model.generate(  # type: ignore[operator]  # from a mixin that PreTrainedModel lacks
        **inputs,
        **processor.generation_kwargs,
        # A row past its limit counts as ended, which saves computing its values.
        pad_token_id=next(iter(models.eos_token_ids), models.tokenizer.pad_token_id),
        stopping_criteria=StoppingCriteriaList([lambda ids, scores: (ids.shape[1] >= last).expand(len(ids))]),
        streamer=streamer,
    )
    new = sequences[:, width:]
    ended = torch.isin(new, torch.tensor(models.eos_token_ids, device=device)).long()
    is_answer = (ended.cumsum(1) - ended == 0) & (width + torch.arange(new.shape[1], device=device) < last[:, None])
    answers = [ids[mask].tolist() for ids, mask in zip(new, is_answer, strict=True)]
    return list(zip(answers, processor.predicted_output_lengths(sequences), strict=True))


class AnswerBar(tqdm, BaseStreamer):
    """A progress bar of ``total`` answers, ``made`` of them finished, with the tokens and tokens/s of the batch.

    Ended rows are padded with the first end-of-sequence token of ``models``. Without one, ValueError is raised.
    """

    def __init__(self, total: int, made: int, models: Models) -> None:
        if not models.eos_token_ids:
            raise ValueError("BASE must have an eos_token_id in its generation_config, got none")
        # smoothing=0, because updates within a batch count no answer and would distort a smoothed rate.
        super().__init__(total=total, initial=made, unit="answer", miniters=0, mininterval=1, smoothing=0)
        self._padding, self._tokens = models.eos_token_ids[0], 0

    def put(self, value: torch.Tensor) -> None:
        """Count the tokens ``[B]`` of a step, without ends; the prompts ``[B, N]`` of the first call are ignored."""
        if value.ndim == 1:
            self._tokens += int((value != self._padding).sum())
            rate = self._tokens / max(self.format_dict["elapsed"], 1e-9)
            self.set_postfix_str(f"{self._tokens} tokens, {rate:.1f} tokens/s", refresh=False)
            self.update(0)

    def end(self) -> None:
        """Required by the streamer interface; the bar stays open for the next batch."""
