"""Cases, descriptions of operators under test, and comparisons of results.

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


@dataclass(frozen=True)
class CallResult:
    """Tensors that a call returned or wrote, and the storage around written tensors, which must stay unchanged."""

    tensors: dict[str, Tensor]
    around: dict[str, Tensor]


@dataclass(frozen=True)
class Output:
    """A part of a result that must be bitwise identical for any other rows of the batch.

    Attributes:
        values: ``[items, ...]``.
        owners: int64 ``[items]``; index in the batch of the row that each item belongs to, or -1 for no row. If None,
            item i belongs to row i. The order of one row's items does not depend on the batch.
    """

    name: str
    values: Tensor
    owners: Tensor | None = None


@dataclass(frozen=True)
class Difference:
    """A comparison of a result with the expected result.

    Attributes:
        wrong: bool ``[items]``.
        actual, expected: ``[items, ...]``, for the failure message.
        owners: as in :class:`Output`.
    """

    what: str
    wrong: Tensor
    actual: Tensor
    expected: Tensor
    owners: Tensor | None = None


class WrongResult(Exception):
    """The function under test returned a wrong type, shape or dtype."""


Form = tuple[torch.dtype, Sequence[int]]  # dtype and shape of a returned tensor


@dataclass(frozen=True)
class Operator:
    """An operator under test.

    Attributes:
        function: the public function, whose modules have the same name.
        options: accepted values of each option, the simplest first. Sizes are options; the number of rows is not.
        inputs: returns the inputs of a case on a device.
        row_size: numbers per row of the inputs, which bounds batches on a GPU.
        row_work: approximate operations of Triton's interpreter per row, which bounds batches on a CPU.
        returns: dtype and shape of each returned tensor by name, in the order of the result. If None, the reference's
            forms, for a named tuple.
        writes: arguments, or fields of arguments, that are written. ``out`` is also returned.
        owners: index in the batch of the row that each item of a tensor belongs to, or -1 for no row; by tensor name,
            or by the part before its dot. By default, item i belongs to row i.
        moved: tensors that contain batch indices, which differ if the same rows are in another batch.
        unwritten: returned tensors with arbitrary contents, of which only dtype and shape are compared.
        outputs: returns the parts of a result that belong to rows. If None, all tensors that are not ``moved``.
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
    returns: Callable[[CallInputs], Mapping[str, Form]] | None = None
    writes: Sequence[str] = ()
    owners: Callable[[CallInputs], Mapping[str, Tensor]] = lambda given: {}
    moved: Collection[str] = ()
    unwritten: Callable[[CallInputs], Collection[str]] = lambda given: ()
    outputs: Callable[[CallInputs, CallResult], list[Output]] | None = None
    compare: Callable[[CallInputs, CallResult], list[Difference]] | None = None
    most_rows: int = 4096
    constants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    free: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def run(self, given: CallInputs, function: Callable) -> CallResult:
        """Call a function on copies of what it writes.

        Raises:
            WrongResult: a returned tensor has another form than in ``returns``.
        """
        arguments, written = with_copies(given.arguments, self.writes)
        returned = function(**arguments)
        if self.returns is None:
            found = {name: x for name, x in returned._asdict().items() if x is not None}
        else:
            results = returned if isinstance(returned, tuple) else (returned,)
            forms = zip(self.returns(given).items(), results, strict=True)
            found = {name: expect(name, x, dtype=dtype, shape=shape) for (name, (dtype, shape)), x in forms}
        found |= {name: x for name, x in written.items() if not name.startswith("out.")}
        for name in self.unwritten(given):
            del found[name]
        return CallResult(found, {name.removeprefix("out."): memory_of(x) for name, x in written.items()})

    def expected(self, given: CallInputs) -> CallResult:
        """Result of the reference on the same inputs."""
        return self.run(given, partial(self.function, backend="reference"))

    def _owned(self, given: CallInputs, result: CallResult) -> list[Output]:
        known = self.owners(given)
        return [
            Output(name, x, known.get(name, known.get(name.partition(".")[0], owners_of_rows(x, given.rows))))
            for name, x in result.tensors.items()
        ]

    def parts(self, given: CallInputs, result: CallResult) -> list[Output]:
        """The parts of a result that belong to rows."""
        if self.outputs is not None:
            return self.outputs(given, result)
        return [output for output in self._owned(given, result) if output.name not in self.moved]

    def differences(self, given: CallInputs, result: CallResult) -> list[Difference]:
        """Comparisons of a result with the reference's."""
        if self.compare is not None:
            return self.compare(given, result)
        expected, found = self.expected(given), []
        for output in self._owned(given, expected):
            x = output.values
            actual = expect(output.name, result.tensors.get(output.name), dtype=x.dtype, shape=x.shape)
            found.append(differs(output.name, actual, x, output.owners))
        return found + [unchanged_around(name, result.around[name], x) for name, x in expected.around.items()]

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


# --- comparisons -----------------------------------------------------------------------------------------------------


def expect(name: str, tensor: Any, *, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Check a result's type, dtype and shape, and return it.

    Raises:
        WrongResult: the check failed; the message has the expected and the actual form.
    """
    if not isinstance(tensor, Tensor):
        raise WrongResult(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        forms = (dtype, shape), (tensor.dtype, tensor.shape)
        wanted, got = (f"{str(d).removeprefix('torch.')} {list(s)}" for d, s in forms)
        raise WrongResult(f"{name} must be {wanted}, got {got}")
    return tensor


def _any_of_item(wrong: Tensor) -> Tensor:
    return wrong.flatten(1).any(dim=1) if wrong.dim() > 1 else wrong


def differs(what: str, actual: Tensor, expected: Tensor, owners: Tensor | None = None) -> Difference:
    """Find items that are not equal; NaN equals NaN."""
    wrong = actual != expected
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    return Difference(what, _any_of_item(wrong), actual, expected, owners)


Tolerance = tuple[float, float | Tensor]  # relative, absolute


def beyond(
    what: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, owners: Tensor | None = None
) -> Difference:
    """Find items outside the tolerance; NaN equals NaN, and an infinity equals only itself."""
    relative, absolute = tolerance
    actual, expected = actual.double(), expected.double()
    near = (actual - expected).abs() <= absolute + relative * expected.abs()
    near = torch.where(expected.isfinite(), near, (actual == expected) | (actual.isnan() & expected.isnan()))
    return Difference(what, _any_of_item(~near), actual, expected, owners)


def dtype_of(options: Mapping[str, Any], name: str = "dtype") -> torch.dtype:
    return getattr(torch, options[name])


def whole_memory(x: Tensor) -> Tensor:
    """The whole storage of a view, flat."""
    return x.new_empty(0).set_(x.untyped_storage())


def copy_in_place(x: Tensor) -> Tensor:
    """A copy of a view and its whole storage, with the same strides."""
    return torch.as_strided(whole_memory(x).clone(), x.shape, x.stride(), x.storage_offset())


# --- written tensors and their owners ------------------------------------------------------------------------------


def with_copies(arguments: Mapping[str, Any], writes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments with copies of all that are written, and these copies by name (of the field, for a field)."""
    arguments, written = dict(arguments), {}
    for path in writes:
        argument, _, field = path.partition(".")
        x = arguments.get(argument)
        if x is None:
            continue
        if field:
            written[field] = copy_in_place(getattr(x, field))
            arguments[argument] = x._replace(**{field: written[field]})
        elif isinstance(x, Tensor):
            arguments[argument] = written[argument] = copy_in_place(x)
        else:
            arguments[argument] = x._make(map(copy_in_place, x))
            written |= {f"{argument}.{name}": y for name, y in arguments[argument]._asdict().items()}
    return arguments, written


def memory_of(x: Tensor) -> Tensor:
    """The whole storage of a tensor. Bytes for bool, because the storage may contain other values than bools."""
    return whole_memory(x).view(torch.uint8) if x.dtype == torch.bool else whole_memory(x)


def memory_with(x: Tensor, values: Tensor) -> Tensor:
    """The result of :func:`memory_of` for a tensor after ``values`` have been written to it."""
    copy = copy_in_place(x)
    return memory_of(copy.copy_(values))


def unchanged_around(name: str, memory: Tensor, expected: Tensor) -> Difference:
    return differs(f"memory around {name}", memory, expected, no_row(memory))


def no_row(x: Tensor) -> Tensor:
    """Owners for items that belong to no row."""
    return torch.full((len(x),), -1, device=x.device)


def owners_of_rows(x: Tensor, rows: int) -> Tensor:
    """Owners where item i belongs to row i, and items from ``rows`` on belong to no row."""
    return torch.arange(len(x), device=x.device).masked_fill(torch.arange(len(x), device=x.device) >= rows, -1)


def owners_in_table(table_rows: Tensor, size: int) -> Tensor:
    """Owners of the ``size`` rows of a table: the batch row that uses the table row, or -1."""
    owners = torch.full((size,), -1, device=table_rows.device)
    owners[table_rows] = torch.arange(len(table_rows), device=owners.device)
    return owners
