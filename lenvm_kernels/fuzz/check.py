"""Checks of cases against the fp64 reference and against the same rows in other batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.fuzz.case import Case, Difference, Operator, WrongResult, differs

LOST = "lost the device"


@functools.cache
def operators() -> dict[str, Operator]:
    """All operators under test, by name."""
    return {name: import_module(f"lenvm_kernels.fuzz.ops.{name}").OPERATOR for name in OPERATORS}


@dataclass(frozen=True)
class Failure:
    """A failed case. After the problem :data:`LOST`, the process cannot check more cases."""

    case: Case
    problem: str  # equal for failures with the same recognizable cause
    rows: tuple[int, ...]  # id of the first wrong row, or of the first row if no row is wrong
    details: str  # actual and expected result of the row

    def __str__(self) -> str:
        return f"{self.case.op}: {self.problem}\n  {self.details}\n  {self.case}"


def check(
    case: Case, function: Callable | None = None, *, device: torch.device | str = "cpu", other_batches: bool = True
) -> Failure | None:
    """Run a case and return its failure, if any.

    Args:
        function: the function under test. If None, the operator's Triton kernels.
        device: the device of the inputs.
        other_batches: whether to also compare bitwise with other batches: with more rows, and with one row.
    """
    operator, device = operators()[case.op], torch.device(device)
    function = function or functools.partial(operator.function, backend="triton")
    with operator.setting(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about broken rows in the interpreter
        try:
            for found, than in _differences(case, operator, function, device, other_batches):
                if found.wrong.any():
                    return _failure(case, f"{found.what} differs {than}", found)
        except WrongResult as error:
            return Failure(case, "wrong type, dtype, shape or memory", case.rows[:1], str(error))
        except Exception as error:  # the function under test may raise anything
            problem = LOST if _is_lost(device) else f"raised {type(error).__name__}"
            return Failure(case, problem, case.rows[:1], " ".join(str(error).split())[:300])
    return None


def _differences(case, operator, function, device, other_batches) -> Iterator[tuple[Difference, str]]:
    """Comparisons with the reference, then with other batches, each with the name of its counterpart."""
    given = operator.inputs(case, device)
    result = operator.run(given, function)
    yield from ((difference, "from the reference") for difference in operator.differences(given, result))
    if not other_batches or not case.rows:
        return
    whole = operator.outputs(given, result)
    more = torch.tensor([*case.rows, *(max(case.rows) + i for i in (1, 2, 3))])
    for than, rows in (
        ("in another order, among more rows", tuple(more[case.draws("cpu").places("order", more)].tolist())),
        ("alone", (case.rows[case.seed % len(case.rows)],)),
    ):
        other = operator.inputs(replace(case, rows=rows), device)
        outputs = operator.outputs(other, operator.run(other, function))
        common = torch.tensor(min(case.rows, rows, key=len), device=device)
        for name in (name for name in whole if name not in operator.moved):
            expected, owners = _items(case.rows, common, *whole[name])
            actual, _ = _items(rows, common, *outputs[name])
            yield differs(name, actual, expected, owners), than


def _items(rows: tuple[int, ...], common: Tensor, values: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Items of the rows with ids ``common``, sorted by id, and their owners."""
    ids = torch.tensor(rows, device=common.device)
    chosen = (owners >= 0) & torch.isin(ids[owners], common)
    order = ids[owners[chosen]].argsort(stable=True)
    return values[chosen][order], owners[chosen][order]


def _failure(case: Case, problem: str, found: Difference) -> Failure:
    wrong = int(found.wrong.nonzero()[0])
    owner = wrong if found.owners is None else int(found.owners[wrong])
    row = f"row {case.rows[owner]}" if owner >= 0 else "no row's item"
    got, expected = (x[wrong].flatten()[:8].tolist() for x in (found.actual, found.expected))
    return Failure(case, problem, case.rows[max(0, owner) :][:1], f"{row}: got {got}, expected {expected}")


def _is_lost(device: torch.device) -> bool:
    with suppress(Exception):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return False
    return True
