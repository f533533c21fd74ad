"""A file of JSON lines that a run appends to, and a run that was ended goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class GuardedLines:
    """``answers.jsonl`` of a directory, beside ``plan.json``: all that decides which lines are made.

    Args:
        folder: the directory; the first line that is added makes it, so a run that fails before leaves nothing.
        plan: goes through JSON.
        flag: what errors call the directory.

    Raises:
        ValueError: the directory is that of another plan, whose fields that differ are named, or has lines alone.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], flag: str = "--output") -> None:
        self._guard, self.file = folder / "plan.json", folder / "answers.jsonl"
        self._plan = json.loads(json.dumps(plan))
        if self._guard.exists():
            check_plan(plan, json.loads(self._guard.read_text(encoding="utf-8")), folder, flag)
        elif self.file.exists():
            raise ValueError(f"{flag} must hold plan.json beside answers.jsonl, {str(folder)!r} does not")

    def read(self, kind: type[T], of: str) -> list[T]:
        """The whole lines, each the fields of a ``kind``; what a kill has left of the last one is cut off.

        Raises:
            ValueError: a line is something else than what the command ``of`` writes; it is named.
        """
        whole, newline, rest = (self.file.read_bytes() if self.file.exists() else b"").rpartition(b"\n")
        found = []
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                found.append(kind(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.file}, line {number} must be an answer of {of}: {error}") from error
        if rest:
            self.replace(map(vars, found))
        return found

    def replace(self, lines: Iterable[Any]) -> None:
        """Put these in the place of all lines."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(map(_line, lines)), encoding="utf-8")
        os.replace(new, self.file)

    def add(self, lines: Iterable[Any]) -> None:
        """Append lines."""
        if not self._guard.exists():
            self._guard.parent.mkdir(parents=True, exist_ok=True)
            new = self._guard.with_suffix(".new")
            new.write_text(json.dumps(self._plan, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self._guard)
        with self.file.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, lines)))


def check_plan(plan: Mapping[str, Any], theirs: Mapping[str, Any], where: Path, flag: str = "--output") -> None:
    """Compare a plan with the one, read from JSON, of which there is something already.

    Raises:
        ValueError: naming the fields that differ.
    """
    ours = json.loads(json.dumps(plan))
    if different := [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]:
        raise ValueError(
            f"{flag} must be a new directory or that of the same plan, {str(where)!r} differs in {', '.join(different)}"
        )


def _line(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
