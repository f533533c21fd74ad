"""The prompts of the study on a server, as token ids: those of a JSONL file, or the demo's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lenvm_kernels.loading import held_out_prompts


def read_prompts(file: Path, tokenizer: Callable[[], Any]) -> list[list[int]]:
    """The token ids of the prompts of a JSONL file; for its fields see :mod:`bench.study.serve`.

    Args:
        file: one JSON object a line; empty lines are passed over.
        tokenizer: gives the tokenizer of the base model when called, and is called only if a prompt needs it.

    Raises:
        ValueError: naming the line, what came and what is accepted; or there is no prompt in the file.
        OSError: the file cannot be read.
    """
    prompts, loaded = [], None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8: {error}") from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"line {number} of {file}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} must be JSON, got {text[:80]!r}: {error}") from error
        fields = ("prompt", "messages", "input_ids")
        given = [name for name in fields if name in line] if isinstance(line, dict) else []
        if len(given) != 1:
            raise ValueError(f"{where} must be an object with one of {', '.join(fields)}, got {text[:80]}")
        (name,) = given
        if name == "input_ids":
            prompts.append(_checked_ids(line[name], where))
            continue
        loaded = loaded or tokenizer()
        messages = [{"role": "user", "content": line[name]}] if name == "prompt" else line[name]
        prompts.append(chat_ids(loaded, _checked_messages(messages, name, where), where))
    if not prompts:
        raise ValueError(f"{file} must hold at least one prompt, got none")
    return prompts


def demo_prompts(tokenizer: Callable[[], Any]) -> list[list[int]]:
    """The token ids of the held-out prompts of the demo, likewise."""
    loaded = tokenizer()
    return [chat_ids(loaded, [{"role": "user", "content": text}], "--prompts") for text in held_out_prompts()]


def chat_ids(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> list[int]:
    """The token ids of a chat that the model is to go on with.

    Raises:
        ValueError: the tokenizer has no chat template, or its template does not take the messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{where} must have input_ids: the tokenizer of the base model has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # whatever the template raises
        raise ValueError(f"{where} must fit the chat template of the base model: {error}") from error


def _checked_ids(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"input_ids in {where} must be a list of at least one token id, got {str(ids)[:80]}")
    return ids


def _checked_messages(messages: Any, name: str, where: str) -> list[dict[str, Any]]:
    is_chat = isinstance(messages, list) and bool(messages)
    if not is_chat or not all(isinstance(x, dict) and isinstance(x.get("content"), str) for x in messages):
        accepted = "a text" if name == "prompt" else "a list of at least one {role, content}"
        got = messages[0]["content"] if name == "prompt" else messages
        raise ValueError(f"{name} in {where} must be {accepted}, got {str(got)[:80]}")
    return messages
