"""A file of JSON lines that a run appends to, and a run that was ended goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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
            theirs = json.loads(self._guard.read_text(encoding="utf-8"))
            different = [key for key in sorted({*self._plan, *theirs}) if self._plan.get(key) != theirs.get(key)]
            if different:
                raise ValueError(
                    f"{flag} must be a new directory or that of the same plan, {str(folder)!r} differs in "
                    f"{', '.join(different)}"
                )
        elif self.file.exists():
            raise ValueError(f"{flag} must hold plan.json beside answers.jsonl, {str(folder)!r} does not")

    def read(self) -> list[Any]:
        """The whole lines; what a kill has left of the last one is cut off.

        Raises:
            ValueError: a line is no JSON; it is named.
        """
        whole, newline, rest = (self.file.read_bytes() if self.file.exists() else b"").rpartition(b"\n")
        found = []
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self.file}, line {number} must be JSON: {error}") from error
        if rest:
            self.replace(found)
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


def _line(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
