"""Files of prompts: one JSON object per line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN, TEST = SPLITS = ("train", "test")
# Accepted keys of the prompt and of its answer: first this package's keys, then the keys of GSM8K and MATH.
TEXTS, ANSWERS = ("prompt", "question", "problem"), ("answer", "solution")
SAY_IT = "Answer in about {words} words."


@dataclass(frozen=True)
class Prompt:
    """A user's message.

    Attributes:
        split: ``"train"`` or ``"test"``; None if the file has no splits.
        answer: the reference answer, of any JSON type; None if the file has none.
    """

    text: str
    split: str | None = None
    answer: Any = None


def read_prompts(file: Path, flag: str = "--prompts") -> list[Prompt]:
    """Read lines of ``{"prompt": "..."}``, optionally with ``"split": "train"`` or ``"test"`` and an answer.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has another form, or only some lines have a split; the message names flag, file and line.
    """
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    prompts = [_prompt(line, f"{flag} {file}, line {number}") for number, line in enumerate(lines, start=1)]
    without = [number for number, prompt in enumerate(prompts, start=1) if prompt.split is None]
    if 0 < len(without) < len(prompts):
        raise ValueError(f'{flag} {file}, line {without[0]} must have a "split" as other lines have, or none may')
    return prompts


def say(prompt: str, text: str, target: float) -> str:
    """Append a text that names the target length to a prompt.

    Args:
        prompt: the user's message.
        text: ``{tokens}`` is replaced by the target and ``{words}`` by 0.68 of it, as a multiple of 5, at least 5.
        target: tokens.

    Raises:
        ValueError: the text has another ``{``; the message names ``--say-it``.
    """
    said = text.replace("{words}", str(max(5, 5 * round(0.68 * target / 5)))).replace("{tokens}", str(round(target)))
    if other := re.search(r"{[^}]*}?", said):
        raise ValueError(f"--say-it must have no placeholders but {{words}} and {{tokens}}, got {other[0]!r}")
    return f"{prompt}\n\n{said}"


def _prompt(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except json.JSONDecodeError:
        content = None
    content = content if isinstance(content, dict) else {}
    text, answer = (next((content[n] for n in names if content.get(n) is not None), None) for names in (TEXTS, ANSWERS))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where} must be an object {{"prompt": "..."}} (or question, problem), got {line[:100]!r}')
    split = content.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f'{where} must have a "split" of {" or ".join(SPLITS)}, or none, got {split!r}')
    return Prompt(text, split, answer)
