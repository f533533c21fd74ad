"""Cases, and descriptions of operators under test.

A description names the returned and written tensors, and the row that owns each item; the call is derived from it. Most
operators compute with integers, or in a defined order. Their comparison is derived too.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.results import (
    Difference,
    Output,
    WrongResult,
    differs,
    expect,
    memory_of,
    owners_of_rows,
    with_copies,
)

# Maximum interpreter operations per call on a CPU. A case makes three calls: about two seconds on an idle core, at
# 80 us per operation.
INTERPRETED_WORK = 8_000
# Maximum numbers in the inputs of a case on a GPU; the reference needs ten times that number in fp64, about 5 GB.
BATCH_SIZE = 2**26


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        rows: ids of the rows. A row's contents depend on its id, not on its index.
        options: a value for each of the operator's options.
    """

    op: str
    seed: int
    rows: tuple[int, ...]
    options: Mapping[str, Any]

    def draws(self, device: torch.device | str) -> Draws:
        return Draws(self.seed, device)

    def rows_and(self, others: str) -> tuple[int, ...]:
        """The rows, followed by ``others`` more rows; only the rows if ``others`` is not a number."""
        return *self.rows, *(-1 - i for i in range(int(others) if others.isdigit() else 0))

    def __str__(self) -> str:
        """A line of JSON that reproduces the case. A whole batch is written as its number of rows."""
        whole = self.rows == tuple(range(len(self.rows)))
        return json.dumps({**vars(self), "rows": len(self.rows) if whole else self.rows})

    @classmethod
    def from_line(cls, line: str, operators: Mapping[str, Operator]) -> Case:
        """Parse a line written by ``str``.

        Raises:
            ValueError: the line is not a case, or an option has an unknown value.
        """
        try:
            fields = json.loads(line)
            rows = range(fields["rows"]) if isinstance(fields["rows"], int) else map(int, fields["rows"])
            case = cls(fields["op"], int(fields["seed"]), tuple(rows), fields["options"])
            accepted = operators[case.op].options
            wrong = [name for name, values in accepted.items() if case.options[name] not in values]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a case must be a line of JSON that a failure has printed, got {line!r}") from error
        for name in wrong:
            raise ValueError(f"{name} of {case.op} must be of {accepted[name]}, got {case.options[name]!r}")
        return case


@dataclass(frozen=True)
class CallInputs:
    """Arguments by name, and the number of rows. Items of a tensor beyond that number belong to no row."""

    arguments: dict[str, Any]
    rows: int

    @property
    def table_rows(self) -> Tensor:
        """int64 ``[rows]``: the row of each request in the argument ``table``."""
        found = self.arguments.get("table_rows")
        return torch.arange(self.rows, device=self.arguments["table"].mode.device) if found is None else found.long()


Result = dict[str, Tensor]  # tensors that a call returned or wrote


@dataclass(frozen=True)
class Operator:
    """An operator under test.

    Attributes:
        function: the public function, whose modules have the same name.
        options: accepted values of each option, the simplest first. Sizes are options; the number of rows is not.
        inputs: returns the inputs of a case on a device.
        row_size: numbers per row of the inputs, which bounds batches on a GPU.
        row_work: approximate operations of Triton's interpreter per row, which bounds batches on a CPU.
        returns: names of the returned tensors, in the order of the result.
        writes: arguments, or fields of arguments, that are written. ``out`` is also returned.
        owners: from inputs and result tensors, the index in the batch of the row that each item of a tensor belongs
            to, or -1 for no row; by tensor name, or by the part before its dot. By default, item i belongs to row i.
        moved: tensors that contain batch indices, which differ if the same rows are in another batch.
        by_row: changes result tensors to ones with the items first, and without batch indices.
        unwritten: returned tensors with arbitrary contents, which are not compared.
        compare: compares a result with the fp64 reference's. If None, both must be bitwise identical.
        most_rows: maximum rows of a batch.
        constants: settings of the operator's tuning constants, by the value of the option ``constants``.
        free: other accepted forms of a tensor argument or field: ``rows`` or ``columns``, any size of the first or last
            dimension; ``apart``, strided rows; ``strided``, strided elements; names of other dtypes, of which only the
            reference accepts ``float64``.
        reads: fields of named-tuple arguments that are read or written, if not all are.
    """

    function: Callable
    options: Mapping[str, Sequence]
    inputs: Callable[[Case, torch.device], CallInputs]
    row_size: Callable[[Mapping[str, Any]], int]
    row_work: Callable[[Mapping[str, Any]], float]
    returns: Sequence[str] = ("the result",)
    writes: Sequence[str] = ()
    owners: Callable[[CallInputs, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda given, tensors: {}
    moved: Collection[str] = ()
    by_row: Callable[[CallInputs, dict[str, Tensor]], dict[str, Tensor]] = lambda given, tensors: tensors
    unwritten: Callable[[CallInputs], Collection[str]] = lambda given: ()
    compare: Callable[[CallInputs, Result], list[Difference]] | None = None
    most_rows: int = 4096
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    free: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def run(self, given: CallInputs, function: Callable) -> Result:
        """Call a function on copies of what it writes.

        Raises:
            WrongResult: memory around a written tensor has changed.
        """
        (arguments, written), (_, kept) = (with_copies(given.arguments, self.writes) for _ in range(2))
        returned = function(**arguments)
        results = returned if isinstance(returned, tuple) else (returned,)
        for name, x in written.items():
            kept[name].copy_(x)
            if not torch.equal(memory_of(x), memory_of(kept[name])):
                raise WrongResult(f"memory around {name} must stay unchanged")
        found = {name: x for name, x in zip(self.returns, results, strict=True) if x is not None}
        found |= {name: x for name, x in written.items() if not name.startswith("out.")}
        return {name: x for name, x in found.items() if name not in self.unwritten(given)}

    def expected(self, given: CallInputs) -> Result:
        """Result of the reference on the same inputs."""
        return self.run(given, partial(self.function, backend="reference"))

    def outputs(self, given: CallInputs, result: Result) -> list[Output]:
        """The tensors of a result with the owners of their items."""
        known = self.owners(given, result)
        return [
            Output(name, x, known.get(name, known.get(name.partition(".")[0], owners_of_rows(x, given.rows))))
            for name, x in self.by_row(given, result).items()
        ]

    def differences(self, given: CallInputs, result: Result) -> list[Difference]:
        """Comparisons of a result with the reference's.

        Raises:
            WrongResult: a tensor has another form than the reference's.
        """
        expected = self.expected(given)
        for name, x in expected.items():
            expect(name, result.get(name), dtype=x.dtype, shape=x.shape)
        if self.compare is not None:
            return self.compare(given, result)
        return [differs(x.name, result[x.name], expected[x.name], x.owners) for x in self.outputs(given, expected)]

    def draw(self, rng: random.Random, *, interpreted: bool) -> Case:
        """Draw a case with random options. The logarithm of the number of rows is uniformly distributed.

        In the interpreter, options with which one row exceeds ``INTERPRETED_WORK`` are drawn again, up to 100 times.
        """
        for _ in range(100):
            options = {name: rng.choice(values) for name, values in self.options.items()}
            if not interpreted or self.row_work(options) <= INTERPRETED_WORK:
                break
        limit = INTERPRETED_WORK / self.row_work(options) if interpreted else BATCH_SIZE / self.row_size(options)
        most = min(self.most_rows, max(1, int(limit)))
        rows = min(most, int(2 ** rng.uniform(0, math.log2(most + 1))))
        return Case(self.name, rng.getrandbits(32), tuple(range(rows)), options)

    def setting(self, case: Case) -> AbstractContextManager:
        """Context with the tuning constants of the case."""
        values = self.constants.get(case.options.get("constants", ""))
        return mock.patch.multiple(sys.modules[self.function.__module__], **values) if values else nullcontext()


def dtype_of(options: Mapping[str, Any], name: str = "dtype") -> torch.dtype:
    return getattr(torch, options[name])
