"""What guided steps did, a JSON line a step in the file of ``LENVM_TRACE``. Importable without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lenvm_kernels.step import StepOutput


def columns_of(output: StepOutput, at: Any = slice(None)) -> dict[str, list[Any]]:
    """What a step did in these of its rows, a list a column."""
    return dict(
        status=output.candidates.status[at].tolist(),
        token_ids=output.candidates.token_ids[at].tolist(),
        value_logits=output.value_logits[at].tolist(),
        probs=output.probs[at].tolist(),
    )


def write_line(file: Path, columns: dict[str, list[Any]], **of_step: Any) -> None:
    """Append the line of a step: what is said of it, and its ``columns`` row by row."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    line = json.dumps(of_step | {"rows": rows}) + "\n"
    with file.open("ab", buffering=0) as trace:  # one write a line: ranks write to the same file
        trace.write(line.encode())
