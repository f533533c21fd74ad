"""Directories of answers, which a run appends to, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


class StoredAnswers:
    """``answers.jsonl`` of a directory, beside ``plan.json`` with everything that determines its lines.

    ``answers`` has them by key. An incomplete last line, left by a kill, is removed from the file.

    Args:
        folder: the directory. The first answer creates it: a run that fails earlier leaves nothing behind.
        plan: serialisable as JSON.
        kind: a dataclass with a property ``key``, unique in the plan. A line holds the fields of one instance.
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
            raise ValueError(f"--output must hold plan.json beside answers.jsonl, {str(folder)!r} does not")
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
        """Append the answers whose keys are not stored yet, and return them."""
        new = [answer for answer in answers if answer.key not in self.answers]
        if new and not self._plan_file.exists():
            self._plan_file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._plan_file.with_suffix(".new")
            unfinished.write_text(json.dumps(self.plan, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, self._plan_file)  # a kill leaves a whole plan or none
        if new:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in new)
        self.answers |= {answer.key: answer for answer in new}
        return new


def check_plan(plan: Mapping[str, Any], other: Mapping[str, Any], where: Path) -> None:
    """Raise ValueError with the names of the fields in which a plan differs from one that was read from JSON."""
    plan = json.loads(json.dumps(plan))
    if different := [key for key in sorted({*plan, *other}) if plan.get(key) != other.get(key)]:
        raise ValueError(
            f"--output must be a new directory or one with the same plan, {str(where)!r} differs in "
            f"{', '.join(different)}"
        )
