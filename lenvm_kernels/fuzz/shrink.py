"""Make a failing case small: first its rows, then its sizes and options."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.check import Failure

# A failure that is still large after so long says enough.
SECONDS = 60.0


def shrink(failure: Failure, test: Callable[[Case], Failure | None], options: Mapping[str, Sequence]) -> Failure:
    """The smallest case found in :data:`SECONDS` that fails in the same way.

    Args:
        failure: of a case that fails.
        test: what is wrong with a case.
        options: the values that each option may have, the simplest first.
    """
    search = _Search(failure, test, options, time.monotonic() + SECONDS)
    before = None
    while before != search.found.case:
        before = search.found.case
        search.fewer_rows()
        search.simpler_options()
    return search.found


class _Search:
    def __init__(self, failure, test, options, deadline):
        self.found, self.test, self.options, self.deadline = failure, test, options, deadline

    def fails(self, **changes: Any) -> bool:
        """Take the changed case if it fails in the same way."""
        if time.monotonic() > self.deadline:
            return False
        failure = self.test(replace(self.found.case, **changes))
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
        for name, values in self.options.items():
            present = self.found.case.options[name]
            for value in values[: values.index(present)]:
                if self.fails(options={**self.found.case.options, name: value}):
                    break
