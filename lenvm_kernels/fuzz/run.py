"""Draw cases until their number or the time is reached, the corpus first."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from lenvm_kernels.fuzz import corpus
from lenvm_kernels.fuzz.case import Case, Operator
from lenvm_kernels.fuzz.check import DeviceError, Failure, check
from lenvm_kernels.fuzz.shrink import shrink


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        ops: the operators, which take turns; only values of their ``options`` are drawn.
        seed: case i is drawn from the seed and i alone.
        cases: to draw; None: as many as ``seconds`` allow.
        seconds: to draw for; None: as long as ``cases`` take.
        device: ``cuda`` or ``cpu``.
        function: in place of the operator's kernels; None: the kernels.
        corpus: file that failing cases are added to; None: none.
        reference_only: do not compare with the same rows in other batches.
    """

    ops: tuple[Operator, ...]
    seed: int = 0
    cases: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    function: Callable | None = None
    corpus: Path | None = None
    reference_only: bool = False


@dataclass
class Found:
    """A way in which an operator failed: the smallest case, and how often it was met."""

    failure: Failure
    rows_before: int
    replayed: bool
    times: int = 1


@dataclass
class Tally:
    """What was run of one operator."""

    cases: int = 0
    rows: int = 0
    seconds: float = 0.0
    options: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))  # cases by value
    classes: Counter = field(default_factory=Counter)  # rows
    found: dict[str, Found] = field(default_factory=dict)  # by problem


@dataclass
class Result:
    """What came of a plan."""

    plan: Plan
    tallies: dict[str, Tally]
    replayed: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    device_lost: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.device_lost) or any(tally.found for tally in self.tallies.values())


def fuzz(plan: Plan, known: Sequence[Case] = (), tell: Callable[[str], None] = lambda line: None) -> Result:
    """Carry out a plan.

    Args:
        plan: the plan.
        known: cases of the corpus, to run first.
        tell: is given a line on each new failure, as it is found.
    """
    result = Result(plan, {operator.name: Tally() for operator in plan.ops})
    known = [case for case in known if case.op in result.tallies]
    start = time.monotonic()
    try:
        for case in tuple(known):
            result.replayed += 1
            _run(result, case, tell, known, replayed=True)
        for case in _drawn(plan, start):
            _run(result, case, tell, known, replayed=False)
    except KeyboardInterrupt:
        result.interrupted = True
    except DeviceError as error:
        result.device_lost = str(error)
    result.seconds = time.monotonic() - start
    return result


def _drawn(plan: Plan, start: float) -> Iterator[Case]:
    for number in count() if plan.cases is None else range(plan.cases):
        if plan.seconds is not None and time.monotonic() - start >= plan.seconds:
            return
        operator = plan.ops[number % len(plan.ops)]
        yield operator.draw(random.Random(f"{plan.seed} {number}"), interpreted=plan.device == "cpu")


def _run(result: Result, case: Case, tell, known: list[Case], *, replayed: bool) -> None:
    plan, tally = result.plan, result.tallies[case.op]
    remember = partial(_remember, result, tell=tell, known=known, rows_before=len(case.rows), replayed=replayed)
    test = partial(check, function=plan.function, device=plan.device, other_batches=not plan.reference_only)

    def observe(operator: Operator, inputs: object) -> None:
        for name, rows in operator.classes(inputs).items():
            tally.classes[name] += int(rows.sum())

    start = time.monotonic()
    try:
        failure = test(case, observe=observe)
    except DeviceError as error:
        remember(Failure(case, "lost the device", case.rows, str(error)))
        raise
    tally.cases += 1
    tally.rows += len(case.rows)
    tally.seconds += time.monotonic() - start
    for name, value in case.options.items():
        tally.options[name][str(value)] += 1
    if failure is None:
        return
    if failure.problem in tally.found:
        tally.found[failure.problem].times += 1
        return
    if not replayed:
        options = next(operator.options for operator in plan.ops if operator.name == case.op)
        try:
            failure = shrink(failure, test, options)
        except (DeviceError, KeyboardInterrupt):
            remember(failure)
            raise
    remember(failure)


def _remember(result: Result, failure: Failure, *, tell, known: list[Case], rows_before: int, replayed: bool) -> None:
    result.tallies[failure.case.op].found[failure.problem] = Found(failure, rows_before, replayed)
    if result.plan.corpus is not None and failure.case not in known:
        corpus.append(result.plan.corpus, failure)
        known.append(failure.case)
    rows = "the corpus" if replayed else f"{len(failure.case.rows)} of {rows_before} rows"
    tell(f"FAILED {failure.case.op}: {failure.problem} ({rows})")
