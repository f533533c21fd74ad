"""Directories of answers. A run appends to them, so that it can be resumed after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


class StoredAnswers:
    """``answers.jsonl`` of a directory, with everything that determines its lines in ``plan.json``.

    ``answers`` has them by key. An incomplete last line, left by an interruption, is removed from the file.

    Args:
        folder: the directory, created with the first answer, so that a run that fails earlier leaves no files.
        plan: serialisable as JSON.
        kind: a dataclass with a property ``key``, unique in the plan. A line has the fields of one instance.
        command: the command that writes the lines, for error messages.

    Raises:
        ValueError: the directory has another plan, lines without a plan, or a line without the fields of ``kind``.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], kind: type, command: str) -> None:
        self.plan, self.answers = plan, dict[Any, Any]()
        self._plan_file, self._file = folder / "plan.json", folder / "answers.jsonl"
        if self._plan_file.exists():
            check_plan(plan, json.loads(self._plan_file.read_text(encoding="utf-8")), folder)
        elif self._file.exists():
            raise ValueError(f"--output must have plan.json next to answers.jsonl, {str(folder)!r} does not")
        content = self._file.read_bytes() if self._file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                answer = kind(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._file}, line {number} must be an answer of {command}: {error}") from error
            self.answers[answer.key] = answer
        if len(complete) < len(content):
            os.truncate(self._file, len(complete))

    def add(self, answers: Sequence[Any]) -> list[Any]:
        """Append the answers with new keys, and return them."""
        new = [answer for answer in answers if answer.key not in self.answers]
        if new and not self._plan_file.exists():
            self._plan_file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._plan_file.with_suffix(".new")
            unfinished.write_text(json.dumps(self.plan, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, self._plan_file)  # atomic, so an interruption leaves no partial plan
        if new:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in new)
        self.answers |= {answer.key: answer for answer in new}
        return new


def check_plan(plan: Mapping[str, Any], other: Mapping[str, Any], where: Path) -> None:
    """Raise ValueError, naming the fields, if a plan differs from one read from JSON."""
    plan = json.loads(json.dumps(plan))
    if different := [key for key in sorted({*plan, *other}) if plan.get(key) != other.get(key)]:
        raise ValueError(
            f"--output must be a new directory or one with the same plan, {str(where)!r} differs in "
            f"{', '.join(different)}"
        )
