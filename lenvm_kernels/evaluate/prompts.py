"""Files of prompts, as ``lenvm evaluate`` and ``lenvm train`` read them: a line of JSON each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN, TEST = SPLITS = ("train", "test")
# The names of a text and of its answer: ours, then those that GSM8K and MATH have.
TEXTS, ANSWERS = ("prompt", "question", "problem"), ("answer", "solution")
SAY_IT = "Answer in about {words} words."


@dataclass(frozen=True)
class Prompt:
    """A user's message.

    Attributes:
        text: what it says.
        split: ``"train"`` or ``"test"``, what a value model's training may do with it; None if the file does not say.
        answer: what the file says is right, of any type; None if it does not say.
    """

    text: str
    split: str | None = None
    answer: Any = None


def read_prompts(file: Path, flag: str = "--prompts") -> list[Prompt]:
    """Read lines of ``{"prompt": "..."}``, which may say ``"split": "train"`` or ``"split": "test"``, and an answer.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is something else, or some lines have a split and others none; the message names the flag,
            the file and the line.
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
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    found = found if isinstance(found, dict) else {}
    prompt, answer = (next((found[n] for n in names if found.get(n) is not None), None) for names in (TEXTS, ANSWERS))
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{where} must be an object {{"prompt": "..."}} (or question, problem), got {line[:100]!r}')
    split = found.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f'{where} must have a "split" of {" or ".join(SPLITS)}, or none, got {split!r}')
    return Prompt(prompt, split, answer)
