"""A JSONL file that a run appends to, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class ResumableLines:
    """``answers.jsonl`` of a directory, beside ``plan.json`` with everything that determines its lines.

    Args:
        folder: the directory. The first added line creates it: a run that fails earlier leaves nothing behind.
        plan: serialisable as JSON.
        flag: name of the directory in error messages.

    Raises:
        ValueError: the directory has another plan (the message names the fields that differ), or lines without a plan.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], flag: str = "--output") -> None:
        self._plan_file, self.file = folder / "plan.json", folder / "answers.jsonl"
        self._plan = plan
        if self._plan_file.exists():
            check_plan(plan, json.loads(self._plan_file.read_text(encoding="utf-8")), folder, flag)
        elif self.file.exists():
            raise ValueError(f"{flag} must hold plan.json beside answers.jsonl, {str(folder)!r} does not")

    def read(self, kind: type[T], command: str) -> list[T]:
        """The complete lines, as instances of ``kind``. An incomplete last line, left by a kill, is removed.

        Raises:
            ValueError: a line does not have the fields of ``kind``; the message names it and ``command``.
        """
        complete, newline, rest = (self.file.read_bytes() if self.file.exists() else b"").rpartition(b"\n")
        lines = []
        for number, line in enumerate(complete.split(b"\n") if newline else [], start=1):
            try:
                lines.append(kind(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.file}, line {number} must be an answer of {command}: {error}") from error
        if rest:
            self.replace(map(vars, lines))
        return lines

    def replace(self, lines: Iterable[Any]) -> None:
        """Replace all lines."""
        _write(self.file, "".join(map(_line, lines)))

    def add(self, lines: Iterable[Any]) -> None:
        """Append lines."""
        if not self._plan_file.exists():
            self._plan_file.parent.mkdir(parents=True, exist_ok=True)
            _write(self._plan_file, json.dumps(self._plan, indent=1) + "\n")
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, lines)))


def check_plan(plan: Mapping[str, Any], other: Mapping[str, Any], where: Path, flag: str = "--output") -> None:
    """Compare a plan with one that was read from JSON.

    Raises:
        ValueError: the plans differ; the message names the fields.
    """
    plan = json.loads(json.dumps(plan))
    if different := [key for key in sorted({*plan, *other}) if plan.get(key) != other.get(key)]:
        raise ValueError(
            f"{flag} must be a new directory or that of the same plan, {str(where)!r} differs in {', '.join(different)}"
        )


def _write(file: Path, text: str) -> None:
    """Write a file atomically: a kill leaves the old or the new content."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def _line(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
