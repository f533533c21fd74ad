"""One case: call the function, compare with the fp64 reference, and with the same rows in other batches."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.fuzz.case import Case, Difference, Operator, Output, WrongResult, differs

ROWS_ADDED = 3


@functools.cache
def operators() -> dict[str, Operator]:
    """All operators under test, by name."""
    return {name: import_module(f"lenvm_kernels.fuzz.ops.{name}").OPERATOR for name in OPERATORS}


class DeviceError(Exception):
    """The device refuses everything after a fault in a kernel: this process can check nothing more."""


@dataclass(frozen=True)
class Failure:
    """What is wrong with a case.

    Attributes:
        case: the case.
        problem: what was found, the same for all failures that have the same cause as far as can be told.
        rows: ids of the rows that are wrong.
        details: a line for a row that is wrong: what it is, and what was expected.
    """

    case: Case
    problem: str
    rows: tuple[int, ...]
    details: str

    def __str__(self) -> str:
        return "\n".join([f"{self.case.op}: {self.problem}", self.details, json.dumps(self.case.to_json())])


def check(
    case: Case,
    function: Callable | None = None,
    *,
    device: torch.device | str = "cpu",
    other_batches: bool = True,
    observe: Callable[[Operator, object], None] | None = None,
) -> Failure | None:
    """Run a case.

    Args:
        case: the case.
        function: what to test; None: the operator's Triton kernels.
        device: where.
        other_batches: also compare, bit by bit, with the same rows in another order beside more rows, and with one row
            alone.
        observe: is given the operator and its inputs.

    Returns:
        What is wrong; None if nothing is.

    Raises:
        DeviceError: the device is lost.
    """
    operator, device = operators()[case.op], torch.device(device)
    function = function or functools.partial(operator.function, backend="triton")
    with operator.setting(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy, of broken rows in the interpreter
        return _check(case, operator, function, device, other_batches, observe)


def _check(case, operator, function, device, other_batches, observe) -> Failure | None:
    given = operator.inputs(case, device)
    if observe is not None:
        observe(operator, given)
    try:
        result = operator.run(given, function)
        for difference in operator.compare(given, result):
            if difference.wrong.any():
                return _failure(case, f"{difference.what} differs from the reference", difference, by_place=True)
        if not other_batches or not case.rows:
            return None
        whole = operator.outputs(given, result)
        for what, rows in other_orders(case):
            other = operator.inputs(replace(case, rows=rows), device)
            for expected, actual in zip(whole, operator.outputs(other, operator.run(other, function)), strict=True):
                difference = _in_both(case, rows, expected, actual)
                if difference.wrong.any():
                    return _failure(case, f"{difference.what} differs {what}", difference, by_place=False)
    except WrongResult as error:
        return Failure(case, "wrong type, dtype or shape", case.rows, str(error))
    except Exception as error:  # whatever somebody else's function raises
        if device.type == "cuda":
            _require(device)
        message = " ".join(str(error).split())[:300]
        return Failure(case, f"raised {type(error).__name__}", case.rows, message)
    return None


def _require(device: torch.device) -> None:
    """Raise DeviceError if the device refuses to go on."""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise DeviceError(" ".join(str(error).split())[:300]) from error


def other_orders(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Batches that hold rows of the case: what they are, and the ids of their rows."""
    draws = case.draws("cpu")
    added = range(max(case.rows) + 1, max(case.rows) + 1 + ROWS_ADDED)
    rows = torch.tensor([*case.rows, *added])
    yield "in another order, beside more rows", tuple(rows[draws.places("order", rows)].tolist())
    if len(case.rows) > 1:
        yield "alone", (case.rows[int(draws.integers("alone", 1, low=0, high=len(case.rows) - 1))],)


def _items(rows: tuple[int, ...], output: Output) -> tuple[Tensor, Tensor]:
    """(ids of the rows that items belong to, ascending; the items in that order), without the items of no row."""
    ids = torch.tensor(rows, device=output.values.device)
    owners = torch.arange(len(rows), device=ids.device) if output.owners is None else output.owners
    owned = owners >= 0
    item_ids, order = ids[owners[owned]].sort(stable=True)
    return item_ids, output.values[owned][order]


def _in_both(case: Case, rows: tuple[int, ...], expected: Output, actual: Output) -> Difference:
    """The items of the rows that both batches hold; owners are row ids."""
    (expected_ids, expected_items), (actual_ids, actual_items) = _items(case.rows, expected), _items(rows, actual)
    common_expected, common_actual = torch.isin(expected_ids, actual_ids), torch.isin(actual_ids, expected_ids)
    ids = expected_ids[common_expected]
    difference = differs(expected.name, actual_items[common_actual], expected_items[common_expected])
    return Difference(difference.what, difference.wrong, difference.actual, difference.expected, ids)


def _failure(case: Case, problem: str, difference: Difference, *, by_place: bool) -> Failure:
    """``by_place``: owners are places in the batch (-1: no row's), else row ids."""
    wrong = difference.wrong.nonzero()[:, 0]
    owners = (wrong if difference.owners is None else difference.owners[wrong]).tolist()
    ids = [case.rows[owner] for owner in owners if owner >= 0] if by_place else owners
    who = f"row {ids[0]}" if owners[0] >= 0 else "of no row"
    first = wrong[0]
    details = f"{who}: got {_shown(difference.actual[first])}, expected {_shown(difference.expected[first])}"
    return Failure(case, problem, tuple(sorted(set(ids))) or case.rows, details)


def _shown(x: Tensor, most: int = 8) -> str:
    numbers = x.flatten().tolist()
    texts = [f"{n:.7g}" if isinstance(n, float) else str(n) for n in numbers[:most]]
    more = f", ... {len(numbers)} numbers" if len(numbers) > most else ""
    return texts[0] if x.dim() == 0 else f"[{', '.join(texts)}{more}]"
