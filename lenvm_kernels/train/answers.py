"""Answers of the base model, and the directory that stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lenvm_kernels.evaluate.resumable_lines import ResumableLines

# The prompt's index, and the index of the answer among the prompt's answers.
Key = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """One answer of the base model.

    Attributes:
        prompt: index of the prompt.
        sample: index among the prompt's answers.
        target: target length of the guidance, in tokens. None if the answer is unguided.
        guided: number of leading tokens that were sampled under guidance.
        limit: maximum number of tokens.
        ids: tokens, including the end-of-sequence token of a finished answer.
        finished: whether the answer ended with an end-of-sequence token.
    """

    prompt: int
    sample: int
    target: int | None
    guided: int
    limit: int
    ids: list[int]
    finished: bool

    @property
    def key(self) -> Key:
        return self.prompt, self.sample


class AnswerStore:
    """A directory with ``plan.json`` and ``answers.jsonl``, one line per answer.

    Args:
        folder: the directory, created with the first answer.
        plan: every setting that affects the answers. ``plan["prompts"]`` are objects with ``text``, ``split`` and
            ``ids``, the tokens that the base model reads.

    Raises:
        ValueError: the directory holds answers of another plan, or a line that is not an answer.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._lines = ResumableLines(folder, plan)
        self.plan = plan
        self.prompts: list[dict[str, Any]] = plan["prompts"]
        self.answers: dict[Key, Answer] = {a.key: a for a in self._lines.read(Answer, "lenvm collect")}

    @classmethod
    def open(cls, folder: Path) -> AnswerStore:
        """Open a directory of ``--answers`` with its own plan."""
        file = folder / "plan.json"
        if not file.is_file():
            raise ValueError(f"--answers must be directories of lenvm collect, {str(folder)!r} has no plan.json")
        return cls(folder, json.loads(file.read_text(encoding="utf-8")))

    def of_split(self, split: str) -> list[Answer]:
        """Answers to the prompts of a split, sorted by key."""
        return [answer for _, answer in sorted(self.answers.items()) if self.prompts[answer.prompt]["split"] == split]

    def add(self, answers: Iterable[Answer]) -> list[Answer]:
        """Append the answers whose keys are not stored yet, and return them."""
        new = [answer for answer in answers if answer.key not in self.answers]
        if new:
            self._lines.add(map(asdict, new))
            self.answers |= {answer.key: answer for answer in new}
        return new
