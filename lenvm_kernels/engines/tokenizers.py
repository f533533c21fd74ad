"""Data that plugins read from tokenizers. Guidance also works without a tokenizer, so failures are logged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.guidance import Thoughts, text_breaks_of

logger = logging.getLogger(__name__)
# Loader and ``marks`` of an engine (:func:`load_with`), by the location of its tokenizer.
_engines: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[str, str] | None]]] = {}


def load_with(
    path: str, loader: Callable[[], Any], marks: Callable[[Any], tuple[str, str] | None] = lambda _: None
) -> None:
    """Make :func:`load_tokenizer` use an engine's loader for a location, which applies the engine's options.

    ``marks`` returns start and end of a thought by the engine's reasoning parser, or None without a parser.
    """
    _engines.setdefault(path, (loader, marks))


@functools.cache
def load_tokenizer(path: str) -> Any:
    """The tokenizer at a location. Loading takes seconds."""
    if path in _engines:
        return _engines[path][0]()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def load_thoughts(path: str | None) -> Thoughts | None:
    """The marks of thoughts of a tokenizer. None without one, or if it cannot be loaded."""
    if path is None:
        return None
    marks = None
    try:
        tokenizer = load_tokenizer(path)
        try:
            marks = _engines[path][1](tokenizer) if path in _engines else None
        except Exception as error:
            logger.warning("the reasoning parser has no marks of thoughts; the vocabulary is searched (%s)", error)
        return Thoughts.of(tokenizer, marks)
    except Exception as error:
        logger.info("no marks of thoughts, because the tokenizer %s cannot be loaded (%s)", path, error)
        return None


def load_text_breaks(tokenizer: str | None, vocab_size: int) -> torch.Tensor | None:
    """:func:`text_breaks_of` :func:`load_tokenizer`. None without a tokenizer, or, with a warning, if loading fails."""
    try:
        return None if tokenizer is None else text_breaks_of(load_tokenizer(tokenizer), vocab_size)
    except Exception as error:
        logger.warning("outputs may end within sentences: the tokenizer %s cannot be loaded (%s)", tokenizer, error)
        return None


def check_vocabulary(value_model: Path, value_size: int, base_size: int, base_tokenizer: str) -> None:
    """Raise ValueError unless both models have the same tokens. Vocabulary sizes may differ by padding.

    ``value_model`` is a directory with a tokenizer.
    """
    if value_size == base_size:
        return
    from transformers import AutoTokenizer

    base = load_tokenizer(base_tokenizer)
    try:
        value = AutoTokenizer.from_pretrained(value_model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"LENVM_VALUE_MODEL must have a tokenizer beside its weights if its vocabulary has {value_size} tokens and "
            f"the base model's {base_size}, got none in {value_model}"
        ) from error
    check_same_tokens("LENVM_VALUE_MODEL", base, value)


def check_same_tokens(name: str, base_tokenizer: Any, value_tokenizer: Any) -> None:
    """Raise ValueError, naming the argument or setting ``name``, unless two tokenizers have the same tokens."""
    base, value = base_tokenizer.get_vocab(), value_tokenizer.get_vocab()
    if different := [token for token in {**base, **value} if base.get(token) != value.get(token)]:
        first = min(different)
        raise ValueError(
            f"{name} must share the base model's vocabulary: {len(different)} tokens differ, {first!r} among them (ids "
            f"{base.get(first)} and {value.get(first)})"
        )
