"""Answers that a value model is trained on, and the directory that keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lenvm_kernels.evaluate.resumable_lines import ResumableLines

# Answer of a prompt: the prompt's index, and which of its answers.
Key = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """One answer of the base model.

    Attributes:
        prompt: the prompt's index.
        sample: which of the prompt's answers.
        target: tokens that guidance aimed at; None: it was not guided.
        guided: how many of its first tokens guidance chose; the base model alone chose the others.
        limit: tokens at which it would have been cut.
        ids: its tokens, the end-of-sequence token last if it finished.
        finished: whether it ended by itself.
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
    """The directory of one plan: ``plan.json``, and a line of ``answers.jsonl`` for each answer.

    Args:
        folder: the directory; the first answer makes it.
        plan: all that decides which answers are made. Its ``prompts`` are objects with ``text``, ``split`` and ``ids``,
            the tokens that the model reads.
        flag: what errors call the directory.

    Attributes:
        plan, prompts: as given.
        answers: by prompt and sample.

    Raises:
        ValueError: the directory is that of another plan, or a line is no answer.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], flag: str = "--output") -> None:
        self._lines = ResumableLines(folder, plan, flag)
        self.plan = plan
        self.prompts: list[dict[str, Any]] = plan["prompts"]
        self.answers: dict[Key, Answer] = {a.key: a for a in self._lines.read(Answer, "lenvm collect")}

    @classmethod
    def open(cls, folder: Path, flag: str) -> AnswerStore:
        """The answers of a directory, whatever its plan.

        Raises:
            ValueError: it has none.
        """
        file = folder / "plan.json"
        if not file.is_file():
            raise ValueError(
                f"{flag} must be directories that lenvm collect has written, {str(folder)!r} has no plan.json"
            )
        store = cls(folder, json.loads(file.read_text(encoding="utf-8")), flag)
        if not store.answers:
            raise ValueError(f"{flag} must hold answers, {str(folder)!r} has none")
        return store

    def of_split(self, split: str) -> list[Answer]:
        """The answers to the prompts of a split, in the order of their keys."""
        return [answer for _, answer in sorted(self.answers.items()) if self.prompts[answer.prompt]["split"] == split]

    def add(self, answers: list[Answer]) -> None:
        """Append those that are not there yet; they count once all of their lines are written."""
        new = [answer for answer in answers if answer.key not in self.answers]
        if new:
            self._lines.add(map(asdict, new))
            self.answers |= {answer.key: answer for answer in new}
