"""Checks of cases against the fp64 reference and against the same rows in other batches, up to a number or a time."""

from __future__ import annotations

import functools
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import count
from typing import Any

import torch
import triton
from torch import Tensor

from lenvm_kernels import __version__
from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.fuzz.case import CallInputs, Case, Operator, Result
from lenvm_kernels.fuzz.results import Difference, Output, WrongResult, differs

ROWS_ADDED = 3
LOST = "lost the device"


@functools.cache
def operators() -> dict[str, Operator]:
    """All operators under test, by name."""
    return {name: import_module(f"lenvm_kernels.fuzz.ops.{name}").OPERATOR for name in OPERATORS}


@dataclass(frozen=True)
class Failure:
    """A case that fails. After the problem :data:`LOST`, this process cannot check further cases."""

    case: Case
    problem: str  # the same for all failures with one recognizable cause
    rows: tuple[int, ...]  # ids of the wrong rows
    details: str  # actual and expected result of one wrong row

    def __str__(self) -> str:
        return f"{self.case.op}: {self.problem}\n{self.details}\n{self.case}"


def check(
    case: Case, function: Callable | None = None, *, device: torch.device | str = "cpu", other_batches: bool = True
) -> Failure | None:
    """Run a case and return its failure, if any.

    Args:
        function: the function under test. If None, the operator's Triton kernels.
        device: the device of the inputs.
        other_batches: whether to also compare bitwise with the same rows in another order among more rows, and with one
            row alone.
    """
    operator, device = operators()[case.op], torch.device(device)
    function = function or functools.partial(operator.function, backend="triton")
    with operator.setting(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about broken rows in the interpreter
        try:
            return _check(case, operator, function, device, other_batches)
        except WrongResult as error:
            return Failure(case, "wrong type, dtype, shape or memory", case.rows, str(error))
        except Exception as error:  # the function under test may raise anything
            problem = LOST if _is_lost(device) else f"raised {type(error).__name__}"
            return Failure(case, problem, case.rows, " ".join(str(error).split())[:300])


def _check(case, operator, function, device, other_batches) -> Failure | None:
    given = operator.inputs(case, device)
    result = operator.run(given, function)
    for difference in operator.differences(given, result):
        if difference.wrong.any():
            return _failure(case, f"{difference.what} differs from the reference", difference)
    if not other_batches or not case.rows:
        return None

    def outputs(given: CallInputs, result: Result) -> list[Output]:
        return [x for x in operator.outputs(given, result) if x.name not in operator.moved]

    whole = outputs(given, result)
    for what, rows in other_orders(case):
        other = operator.inputs(replace(case, rows=rows), device)
        common = torch.tensor(min(case.rows, rows, key=len), device=device)
        for expected, actual in zip(whole, outputs(other, operator.run(other, function)), strict=True):
            (wanted, owners), (got, _) = _items(case.rows, common, expected), _items(rows, common, actual)
            difference = differs(expected.name, got, wanted, owners)
            if difference.wrong.any():
                return _failure(case, f"{difference.what} differs {what}", difference)
    return None


def _is_lost(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def with_fewer_rows(failure: Failure, test: Callable[[Case], Failure | None]) -> Failure:
    """Reduce a failure to its first wrong row, or else to its wrong rows, if it still occurs there."""
    for rows in (failure.rows[:1], failure.rows):
        smaller = test(replace(failure.case, rows=rows))
        if smaller is not None and smaller.problem == failure.problem:
            return smaller
    return failure


def other_orders(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Other batches with rows of the case: a description, and the ids of their rows."""
    draws = case.draws("cpu")
    added = range(max(case.rows) + 1, max(case.rows) + 1 + ROWS_ADDED)
    rows = torch.tensor([*case.rows, *added])
    yield "in another order, beside more rows", tuple(rows[draws.places("order", rows)].tolist())
    if len(case.rows) > 1:
        yield "alone", (case.rows[int(draws.integers("alone", 1, low=0, high=len(case.rows) - 1))],)


def _items(rows: tuple[int, ...], common: Tensor, output: Output) -> tuple[Tensor, Tensor]:
    """Items of the rows with ids ``common``, sorted by id, and the index in the batch of the row that owns each."""
    ids = torch.tensor(rows, device=common.device)
    owners = torch.arange(len(rows), device=ids.device) if output.owners is None else output.owners
    chosen = (owners >= 0) & torch.isin(ids[owners], common)
    order = ids[owners[chosen]].argsort(stable=True)
    return output.values[chosen][order], owners[chosen][order]


def _failure(case: Case, problem: str, difference: Difference) -> Failure:
    wrong = difference.wrong.nonzero()[:, 0]
    owners = (wrong if difference.owners is None else difference.owners[wrong]).tolist()
    row = f"row {case.rows[owners[0]]}" if owners[0] >= 0 else "no row's item"
    got, expected = (_shown(x[wrong[0]]) for x in (difference.actual, difference.expected))
    rows = tuple(sorted({case.rows[owner] for owner in owners if owner >= 0})) or case.rows
    return Failure(case, problem, rows, f"{row}: got {got}, expected {expected}")


def _shown(x: Tensor, most: int = 8) -> str:
    numbers = [f"{n:.7g}" if isinstance(n, float) else str(n) for n in x.flatten()[:most].tolist()]
    more = f", ... {x.numel()} numbers" if x.numel() > most else ""
    return numbers[0] if x.dim() == 0 else f"[{', '.join(numbers)}{more}]"


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
