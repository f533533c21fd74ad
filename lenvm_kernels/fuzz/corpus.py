"""The file of failing cases: a JSON object a line, a case and what was wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

from lenvm_kernels.fuzz.case import Case, CaseError
from lenvm_kernels.fuzz.check import Failure, operators


def read(path: Path) -> list[Case]:
    """The cases of a corpus; none if there is no such file.

    Raises:
        CaseError: a line is no case of this version; the message names the line.
    """
    if not path.exists():
        return []
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            cases.append(Case.from_json(json.loads(line), operators()))
        except (CaseError, json.JSONDecodeError) as error:
            raise CaseError(f"line {number} of {path} {error}") from error
    return cases


def append(path: Path, failure: Failure) -> None:
    """Add a failing case."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(failure.case.to_json() | {"problem": failure.problem}) + "\n")
