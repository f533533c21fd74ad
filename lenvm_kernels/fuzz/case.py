"""Cases, descriptions of operators under test, and comparisons of results."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


@dataclass(frozen=True)
class Operator:
    """An operator under test.

    Attributes:
        function: the public function, whose modules have the same name.
        options: accepted values of each option, the simplest first. Sizes are options; the number of rows is not.
        inputs: returns the inputs of a case on a device.
        run: calls a function on inputs without changing them, and returns its whole result.
        outputs: returns the parts of a result that belong to rows.
        compare: compares a result with the fp64 reference's.
        row_size: numbers per row of the inputs, which bounds batches on a GPU.
        row_work: approximate operations of Triton's interpreter per row, which bounds batches on a CPU.
        most_rows: maximum rows of a batch.
        constants: settings of the operator's tuning constants, by the value of the option ``constants``.
        free: other accepted forms of a tensor argument or field: ``rows`` or ``columns``, any size of the first or last
            dimension; ``apart``, strided rows; ``strided``, strided elements; names of other dtypes, of which only the
            reference accepts ``float64``.
        reads: fields of named-tuple arguments that are read or written, if not all are.
    """

    function: Callable
    options: Mapping[str, Sequence]
    inputs: Callable[[Case, torch.device], Any]
    run: Callable[[Any, Callable], Any]
    outputs: Callable[[Any, Any], list[Output]]
    compare: Callable[[Any, Any], list[Difference]]
    row_size: Callable[[Mapping[str, Any]], int]
    row_work: Callable[[Mapping[str, Any]], float]
    most_rows: int = 4096
    constants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    free: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.__name__

    def expected(self, given: Any) -> Any:
        """Result of the reference on the same inputs."""
        return self.run(given, partial(self.function, backend="reference"))

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

    @contextmanager
    def setting(self, case: Case) -> Iterator[None]:
        """Context with the tuning constants of the case."""
        with ExitStack() as patches:
            for name, value in self.constants.get(case.options.get("constants", ""), {}).items():
                patches.enter_context(mock.patch.object(sys.modules[self.function.__module__], name, value))
            yield


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
