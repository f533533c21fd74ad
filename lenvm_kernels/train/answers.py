"""Answers of the base model, and the directory that stores them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenvm_kernels.evaluate.stored_answers import StoredAnswers

# The prompt's index, and the index of the answer among the prompt's answers.
Key = tuple[int, int]


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the base model.

    Attributes:
        prompt, sample: index of the prompt, and index among the prompt's answers.
        target: target length of the guidance, in tokens. None if the answer is unguided.
        guided: number of leading tokens that were sampled under guidance.
        limit: maximum number of tokens.
        ids: tokens, including the end-of-sequence token of a finished answer.
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


class AnswerStore(StoredAnswers):
    """A directory of ``lenvm collect``.

    ``plan["prompts"]`` are objects with ``text``, ``split`` and ``ids``, the tokens that the base model reads.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        super().__init__(folder, plan, SampledAnswer, "lenvm collect")
        self.prompts: list[dict[str, Any]] = plan["prompts"]

    @classmethod
    def open(cls, folder: Path) -> AnswerStore:
        """Open a directory of ``--answers`` with its own plan."""
        file = folder / "plan.json"
        if not file.is_file():
            raise ValueError(f"--answers must be directories of lenvm collect, {str(folder)!r} has no plan.json")
        return cls(folder, json.loads(file.read_text(encoding="utf-8")))

    def of_split(self, split: str) -> list[SampledAnswer]:
        """Answers to the prompts of a split, sorted by key."""
        answers = sorted(self.answers.values(), key=lambda answer: answer.key)
        return [answer for answer in answers if self.prompts[answer.prompt]["split"] == split]
