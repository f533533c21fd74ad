"""Cases, descriptions of operators under test, and comparisons of their results.

A description names the returned and written tensors, and the row that owns each item; the call is derived from it. Most
operators compute with integers or in a defined order, so their comparison is derived as well.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lenvm_kernels.fuzz.draws import Draws

# Maximum interpreter operations per call on a CPU. A case makes three calls: about two seconds on an idle core, at
# 80 us per operation.
INTERPRETED_WORK = 8_000
Result = dict[str, Tensor]  # tensors that a call returned or wrote


@dataclass(frozen=True)
class Case:
    """One call of an operator. The contents of a row depend on its id, not on its index."""

    op: str
    seed: int
    rows: tuple[int, ...]  # ids
    options: Mapping[str, Any]  # a value for each of the operator's options

    def draws(self, device: torch.device | str) -> Draws:
        return Draws(self.seed, device)

    def __str__(self) -> str:
        """A line of JSON that reproduces the case. A complete batch is written as its number of rows."""
        whole = self.rows == tuple(range(len(self.rows)))
        return json.dumps({**vars(self), "rows": len(self.rows) if whole else self.rows})

    @classmethod
    def from_line(cls, line: str, operators: Mapping[str, Operator]) -> Case:
        """Parse a line written by ``str``; raises ValueError for an invalid line or an unknown value of an option."""
        try:
            fields = json.loads(line)
            rows = range(fields["rows"]) if isinstance(fields["rows"], int) else map(int, fields["rows"])
            case = cls(fields["op"], int(fields["seed"]), tuple(rows), fields["options"])
            wrong = [(name, x) for name, x in operators[case.op].options.items() if case.options[name] not in x]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a case must be a line of JSON printed by a failure, got {line!r}") from error
        for name, accepted in wrong:
            raise ValueError(f"{name} of {case.op} must be one of {accepted}, got {case.options[name]!r}")
        return case


@dataclass(frozen=True)
class CallInputs:
    """Arguments by name, and the number of rows. Items of a tensor from this number on belong to no row."""

    arguments: dict[str, Any]
    rows: int

    @property
    def table_rows(self) -> Tensor:
        """int64 ``[rows]``: the row of each request in the argument ``table``."""
        found = self.arguments.get("table_rows")
        return torch.arange(self.rows, device=self.arguments["table"].mode.device) if found is None else found.long()


class Difference(NamedTuple):
    """A comparison of a result with the expected result."""

    what: str
    wrong: Tensor  # bool [items]
    actual: Tensor  # [items, ...], as is ``expected``
    expected: Tensor
    owners: Tensor | None = None  # int64 [items]: batch index of each item's row, or -1. If None, item i has row i.


class WrongResult(Exception):
    """The function under test returned a wrong type, shape or dtype, or wrote memory outside its results."""


def differs(what: str, actual: Tensor, expected: Tensor, owners: Tensor | None = None) -> Difference:
    """Find items that are not equal; NaN equals NaN."""
    wrong = (actual != expected) & ~((actual != actual) & (expected != expected))
    return Difference(what, wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong, actual, expected, owners)


def beyond(
    what: str, actual: Tensor, expected: Tensor, tolerance: tuple[float, float | Tensor], owners: Tensor | None = None
) -> Difference:
    """Find items outside the relative and absolute tolerance; NaN equals NaN, and infinities equal only themselves."""
    relative, absolute = tolerance
    actual, expected = actual.double(), expected.double()
    is_near = expected.isfinite() & ((actual - expected).abs() <= absolute + relative * expected.abs())
    return differs(what, torch.where(is_near, expected, actual), expected, owners)._replace(actual=actual)


def with_copies(arguments: Mapping[str, Any], writes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments with copies of written tensors, and the copies by name (``argument`` or ``argument.field``)."""
    arguments, copies = dict(arguments), {}
    for path in writes:
        argument, _, field = path.partition(".")
        x = arguments.get(argument)
        if isinstance(x, Tensor):
            arguments[argument] = copies[argument] = deepcopy(x)
        elif x is not None:
            fields = {name: deepcopy(getattr(x, name)) for name in ([field] if field else x._fields)}
            arguments[argument] = x._replace(**fields)
            copies |= fields if field else {f"{argument}.{name}": y for name, y in fields.items()}
    return arguments, copies


def owners_at(places: Tensor, size: int) -> Tensor:
    """Owners of ``size`` items: the item at ``places[i]`` belongs to row i, all others to no row."""
    owners = torch.full((size,), -1, device=places.device)
    owners[places] = torch.arange(len(places), device=owners.device)
    return owners


@dataclass(frozen=True)
class Operator:
    """An operator under test."""

    function: Callable  # the public function, named as its modules
    # Accepted values of each option, the simplest first. Sizes are options; the number of rows is not.
    options: Mapping[str, Sequence]
    inputs: Callable[[Case, torch.device], CallInputs]  # the inputs of a case on a device
    # Approximate operations of Triton's interpreter per row, which limits batches on a CPU.
    row_work: Callable[[Mapping[str, Any]], float] = lambda options: 150
    # Maximum rows of a batch on a GPU. The inputs should have no more than 2**26 numbers; the reference needs ten times
    # that number in fp64, about 5 GB.
    most_rows: Callable[[Mapping[str, Any]], int] = lambda options: 8192
    returns: Sequence[str] = ("the result",)  # names of the returned tensors, if the result is no named tuple
    writes: Sequence[str] = ()  # arguments, or fields of arguments, that are written. ``out`` is also returned
    # From inputs and result tensors, the batch index of the row to which each item of a tensor belongs, or -1. By
    # default, item i belongs to row i, and a row of the table to the row that uses it.
    owners: Callable[[CallInputs, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda given, tensors: {}
    # Tensors that differ if the same rows are in another batch, because they contain batch indices or belong to no row.
    moved: Collection[str] = ()
    # Converts result tensors to tensors with the items first and without batch indices. Omitted tensors are not
    # compared.
    by_row: Callable[[CallInputs, Result], Result] = lambda given, tensors: tensors
    # Compares a result with the fp64 reference. If None, both must be bitwise identical.
    compare: Callable[[CallInputs, Result], list[Difference]] | None = None
    # Settings of the operator's tuning constants, by the value of the option ``constants``.
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Other accepted forms of a tensor argument or field: ``rows`` or ``columns``, any size of the first or last
    # dimension; ``apart``, strided rows; ``strided``, strided elements; names of other dtypes (``float64`` is only
    # accepted by the reference).
    free: Mapping[str, str] = field(default_factory=dict)
    # The fields of named-tuple arguments that are read or written, unless all are.
    reads: Mapping[str, Collection[str]] = field(default_factory=dict)

    def run(self, given: CallInputs, function: Callable) -> Result:
        """Call a function on copies of the tensors that it writes.

        Raises:
            WrongResult: memory around a written tensor has changed.
        """
        (arguments, written), (_, before) = (with_copies(given.arguments, self.writes) for _ in range(2))
        returned = function(**arguments)
        results = returned if isinstance(returned, tuple) else (returned,)
        for name, x in written.items():
            before[name].copy_(x)
            storages = (y.new_empty(0).set_(y.untyped_storage()).view(torch.uint8) for y in (x, before[name]))
            if not torch.equal(*storages):
                raise WrongResult(f"memory around {name} must stay unchanged")
        names = getattr(returned, "_fields", self.returns)
        found = {name: x for name, x in zip(names, results, strict=True) if x is not None}
        return found | {name: x for name, x in written.items() if not name.startswith("out.")}

    def outputs(self, given: CallInputs, result: Result) -> dict[str, tuple[Tensor, Tensor]]:
        """The parts of a result by name, each with the owners of its items."""
        of_table = {path.removeprefix("table.") for path in self.writes if path.startswith("table.")}
        owners = {name: owners_at(given.table_rows, len(result[name])) for name in of_table}
        owners |= self.owners(given, result)
        rows, parts = torch.arange(given.rows), self.by_row(given, result).items()
        return {name: (x, owners.get(name, owners_at(rows[: len(x)].to(x.device), len(x)))) for name, x in parts}

    def differences(self, given: CallInputs, result: Result) -> list[Difference]:
        """Compare a result with the reference.

        Raises:
            WrongResult: the type, dtype or shape of a tensor differs from the reference.
        """
        expected = self.run(given, partial(self.function, backend="reference"))
        for name, x in expected.items():
            wanted, got = (
                f"{y.dtype} {list(y.shape)}".removeprefix("torch.") if isinstance(y, Tensor) else type(y).__name__
                for y in (x, result.get(name))
            )
            if got != wanted:
                raise WrongResult(f"{name} must be {wanted}, got {got}")
        if self.compare is not None:
            return self.compare(given, result)
        parts = self.outputs(given, expected)
        return [differs(name, result[name], expected[name], owners) for name, (_, owners) in parts.items()]

    def draw(self, rng: random.Random, *, interpreted: bool) -> Case:
        """Draw a case with random options. The logarithm of the number of rows is uniformly distributed.

        In the interpreter, options are drawn again, up to 100 times, while one row exceeds ``INTERPRETED_WORK``.
        """
        for _ in range(100):
            options = {name: rng.choice(values) for name, values in self.options.items()}
            most = int(INTERPRETED_WORK / self.row_work(options)) if interpreted else self.most_rows(options)
            if most:
                break
        rows = int(2 ** rng.uniform(0, math.log2(max(1, most) + 1)))
        return Case(self.function.__name__, rng.getrandbits(32), tuple(range(rows)), options)

    def setting(self, case: Case) -> AbstractContextManager:
        """Context with the tuning constants of the case."""
        values = self.constants.get(case.options.get("constants", ""))
        return mock.patch.multiple(sys.modules[self.function.__module__], **values) if values else nullcontext()


def dtype_of(options: Mapping[str, Any], name: str = "dtype") -> torch.dtype:
    return getattr(torch, options[name])
