"""Draw and check cases up to a number or a time limit, and report the failures."""

from __future__ import annotations

import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
import triton

from lenvm_kernels import __version__
from lenvm_kernels.fuzz.case import Case, Operator
from lenvm_kernels.fuzz.check import LOST, Failure, with_fewer_rows


@dataclass
class Tally:
    """Counts for the cases of one operator; one failure and the number of failed cases per problem."""

    cases: int = 0
    rows: int = 0
    seconds: float = 0.0
    failures: dict[str, Failure] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)


def drawn(
    operators: Sequence[Operator], *, seed: int, cases: int | None, seconds: float | None, interpreted: bool
) -> Iterator[Case]:
    """Draw cases of the operators in turn, up to ``cases`` or ``seconds``. Case i depends only on the seed and i."""
    end = None if seconds is None else time.monotonic() + seconds
    for number in count() if cases is None else range(cases):
        if end is not None and time.monotonic() >= end:
            return
        yield operators[number % len(operators)].draw(random.Random(f"{seed} {number}"), interpreted=interpreted)


def fuzz(cases: Iterable[Case], test: Callable[[Case], Failure | None], tallies: dict[str, Tally]) -> None:
    """Check cases with ``test``, which returns the failure of a case, if any; new problems are printed to stderr.

    ``tallies`` gets the tally of each operator, which is complete if the run is interrupted.
    """
    for case in cases:
        tally, start = tallies.setdefault(case.op, Tally()), time.monotonic()
        failure = test(case)
        tally.cases, tally.rows = tally.cases + 1, tally.rows + len(case.rows)
        tally.seconds += time.monotonic() - start
        if failure is None:
            continue
        tally.times[failure.problem] = tally.times.get(failure.problem, 0) + 1
        if failure.problem not in tally.failures:
            print(f"FAILED {case.op}: {failure.problem}", file=sys.stderr, flush=True)
            tally.failures[failure.problem] = failure
            if failure.problem == LOST:
                return
            tally.failures[failure.problem] = with_fewer_rows(failure, test)


def text(tallies: dict[str, Tally]) -> Iterator[str]:
    """Lines of the report: cases and rows of each operator, and failures."""
    yield f"{'operator':22} {'cases':>7} {'rows':>9} {'seconds':>8} {'failures':>8}"
    for name, tally in tallies.items():
        yield f"{name:22} {tally.cases:>7} {tally.rows:>9} {tally.seconds:>8.1f} {len(tally.failures):>8}"
    for name, tally in tallies.items():
        for problem, failure in tally.failures.items():
            yield f"\nFAILED {name}: {problem} ({tally.times[problem]} of {tally.cases} cases)"
            yield f"  {failure.details}"
            yield f"  {failure.case}"


def as_json(tallies: dict[str, Tally], device: str) -> dict[str, Any]:
    """The numbers of :func:`text`, with versions and the device."""
    return {
        "ok": not any(tally.failures for tally in tallies.values()),
        "lenvm_kernels": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "operators": {name: asdict(tally) for name, tally in tallies.items()},
    }
