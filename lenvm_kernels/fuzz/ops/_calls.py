"""Calls with named arguments, and all tensors that they return or write.

A description lists the returned and written tensors, and the row that owns each item; the call is derived from it. Most
operators compute with integers, or in a defined order. Their comparison is derived too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Difference, Operator, Output, copy_in_place, differs, expect, whole_memory

Form = tuple[torch.dtype, Sequence[int]]  # dtype and shape of a returned tensor


@dataclass(frozen=True)
class NamedInputs:
    """Arguments by name, and the number of rows. Items of a tensor beyond that number belong to no row."""

    arguments: dict[str, Any]
    rows: int


@dataclass(frozen=True)
class NamedResult:
    """Tensors that a call returned or wrote, and the storage around written tensors, which must stay unchanged."""

    tensors: dict[str, Tensor]
    around: dict[str, Tensor]


def named_operator(
    function: Callable,
    *,
    returns: Callable[[NamedInputs], Mapping[str, Form]] | None = None,
    compare: Callable[[Any, NamedResult], list[Difference]] | None = None,
    writes: Sequence[str] = (),
    owners: Callable[[NamedInputs], Mapping[str, Tensor]] = lambda given: {},
    moved: Collection[str] = (),
    unwritten: Callable[[NamedInputs], Collection[str]] = lambda given: (),
    outputs: Callable[[Any, NamedResult], list[Output]] | None = None,
    **described: Any,
) -> Operator:
    """Describe an operator whose results have names.

    Args:
        function: the public function.
        returns: dtype and shape of each returned tensor by name: fields of a named tuple, items of a tuple, or the only
            tensor. If None, the reference's forms, for a named tuple.
        compare: as in :class:`Operator`. If None, the result must be bitwise identical to the reference's.
        writes: arguments, or fields of arguments, that are written. ``out`` is also returned.
        owners: index in the batch of the row that each item of a tensor belongs to, or -1 for no row; by tensor name,
            or by the part before its dot. By default, item i belongs to row i.
        moved: tensors that contain batch indices, which differ if the same rows are in another batch.
        unwritten: returned tensors with arbitrary contents, of which only dtype and shape are compared.
        outputs: as in :class:`Operator`. If None, all tensors that are not ``moved``.
        described: other attributes of :class:`Operator`.
    """

    def run(given: NamedInputs, function: Callable) -> NamedResult:
        arguments, written = with_copies(given.arguments, writes)
        returned = function(**arguments)
        wanted = {} if returns is None else returns(given)
        found = returned._asdict() if returns is None else {}
        found = {name: x for name, x in found.items() if x is not None}
        items = dict(zip(wanted, returned, strict=False)) if type(returned) is tuple else {}
        for name, (dtype, shape) in wanted.items():
            x = returned if len(wanted) == 1 else items.get(name, getattr(returned, name, None))
            found[name] = expect(name, x, dtype=dtype, shape=shape)
        found |= {name: x for name, x in written.items() if not name.startswith("out.")}
        for name in unwritten(given):
            del found[name]
        return NamedResult(found, {name.removeprefix("out."): memory_of(x) for name, x in written.items()})

    def owners_of(given: NamedInputs, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = owners(given)
        return {
            name: known.get(name, known.get(name.partition(".")[0], owners_of_rows(x, given.rows)))
            for name, x in tensors.items()
        }

    def all_tensors(given: NamedInputs, result: NamedResult) -> list[Output]:
        owned = owners_of(given, result.tensors)
        return [Output(name, x, owned[name]) for name, x in result.tensors.items() if name not in moved]

    def compare_bits(given: NamedInputs, result: NamedResult) -> list[Difference]:
        expected = operator.expected(given)
        owned = owners_of(given, expected.tensors)
        found = []
        for name, x in expected.tensors.items():
            actual = expect(name, result.tensors.get(name), dtype=x.dtype, shape=x.shape)
            found.append(differs(name, actual, x, owned[name]))
        return found + [unchanged_around(name, result.around[name], x) for name, x in expected.around.items()]

    operator = Operator(
        function=function, run=run, outputs=outputs or all_tensors, compare=compare or compare_bits, **described
    )
    return operator


def exact_operator(function: Callable, **described: Any) -> Operator:
    """Describe an operator that is bitwise identical to its reference; see :func:`named_operator`."""
    return named_operator(function, **described)


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
