"""Make a failing case small: first its rows, then its sizes and options."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lenvm_kernels.fuzz.check import Failure, check, operators

# A failure that is still large after so long says enough.
SECONDS = 60.0


def shrink(
    failure: Failure, function: Callable | None, device: torch.device | str, seconds: float = SECONDS
) -> Failure:
    """The smallest case found that fails in the same way.

    Args:
        failure: of a case that fails.
        function, device: as in :func:`check`.
        seconds: to look for at most.
    """
    search = _Search(failure, function, device, time.monotonic() + seconds)
    before = None
    while before != search.found.case:
        before = search.found.case
        search.fewer_rows()
        search.simpler_options()
    return search.found


class _Search:
    def __init__(self, failure: Failure, function: Callable | None, device: torch.device | str, deadline: float):
        self.found, self.function, self.device, self.deadline = failure, function, device, deadline

    def fails(self, **changes: Any) -> bool:
        """Take the changed case if it fails in the same way."""
        if time.monotonic() > self.deadline:
            return False
        failure = check(replace(self.found.case, **changes), self.function, device=self.device)
        if failure is None or failure.problem != self.found.problem:
            return False
        self.found = failure
        return True

    def fewer_rows(self) -> None:
        """Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002), which
        begins with the rows that are wrong."""
        if len(self.found.case.rows) > 1 and not self.fails(rows=self.found.rows[:1]):
            self.fails(rows=self.found.rows)
        parts = 2
        while len(self.found.case.rows) > 1:
            rows = self.found.case.rows
            size = -(-len(rows) // parts)
            if any(self.fails(rows=rows[:start] + rows[start + size :]) for start in range(0, len(rows), size)):
                parts = max(parts - 1, 2)
            elif size == 1:
                break
            else:
                parts = min(2 * parts, len(rows))

    def simpler_options(self) -> None:
        """For each option the simplest value with which the case still fails."""
        for name, values in operators()[self.found.case.op].options.items():
            present = self.found.case.options[name]
            for value in values[: values.index(present)]:
                if self.fails(options={**self.found.case.options, name: value}):
                    break
