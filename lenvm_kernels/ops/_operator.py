"""Dispatches an operator's public function to its kernels or its reference."""

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lenvm_kernels.ops._common import INTERPRETED
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.types import GuidanceColumns

if INTERPRETED:
    from lenvm_kernels.ops._interpreter import repair_interpreter

    repair_interpreter()

Launch = Callable[..., Any]


class _Argument(NamedTuple):
    """An argument of a launch, and the corresponding arguments of the operator's schema."""

    name: str
    schema: dict[str, Any]  # names and types
    kind: Any  # the named tuple; None for a single value


def operator(
    *specs: Spec,
    reference: Callable[..., Any],
    mutates: Sequence[str] = (),
    takes: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[[Launch], Launch]:
    """Turn a function that launches kernels into an operator.

    The function takes its output, with an annotated type, and a named tuple of operands: first the operands of
    ``specs`` (tensors, named tuples of tensors, ``None`` for optional operands), then the operands of ``takes``. The
    decorated function takes the backend, ``triton`` or ``reference``, the output, and the operands one by one in the
    same order, and returns the output. It

    - reduces a :class:`GuidanceColumns` to the columns of the named tuple in ``takes``;
    - launches nothing if the output has no elements, as for an empty batch;
    - makes the GPU of the output current, because Triton launches on the current GPU;
    - is ``torch.ops.lenvm.<name>`` when operators are recorded instead of executed: ``torch.compile``,
      ``torch.export``, ``make_fx``. The schema has one argument for each field of a named tuple. Other calls bypass the
      dispatcher.

    Args:
        specs: declarations of the operands.
        reference: function of the reference backend. It takes operands by name; operands that are not among its
            parameters only matter to kernels. Its return values are copied into the output, unless it has a parameter
            ``out`` and writes the output itself.
        mutates: operands that are also written: ``"name"``, or ``"name.field"`` for one field of a named tuple.
        takes: types of operands that are not in ``specs``, such as numbers, and narrower types of others.
        name: name of the operator. If None, the name of the function's module.
    """
    declared = {label: kind for spec in specs for label, kind in spec.types.items() if label != "out"}
    declared |= takes or {}
    operands_type = namedtuple("Operands", declared)  # type: ignore[misc]
    of_reference = inspect.signature(reference).parameters

    def decorate(launch: Launch) -> Launch:
        kinds = {"out": get_type_hints(launch)["out"]} | declared
        arguments = [_argument(label, kind) for label, kind in kinds.items()]
        # Positions of the arguments that are columns of a guidance table.
        tables = [i for i, x in enumerate(arguments) if x.kind and {*x.kind._fields} < {*GuidanceColumns._fields}]

        def run_reference(out: Any, operands: Any) -> None:
            given = {label: value for label, value in operands._asdict().items() if label in of_reference}
            if "out" in of_reference:
                reference(**given, out=out)
                return
            results = reference(**given)
            pairs = [(out, results)] if isinstance(out, Tensor) else zip(out, results, strict=True)
            for written, result in pairs:
                written.copy_(result)

        def execute(backend: str, out: Any, *values: Any) -> None:
            outs, operands = (out,) if isinstance(out, Tensor) else out, operands_type._make(values)
            if backend == "reference":
                run_reference(out, operands)
            elif any(x is not None and x.numel() > 0 for x in outs):
                with torch.cuda.device_of(outs[0]):
                    launch(out, operands)

        def execute_flat(backend: str, *flat: Any) -> None:
            execute(backend, *_nested(arguments, flat))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        schema = {"backend": str} | {label: x for argument in arguments for label, x in argument.schema.items()}
        parameters = [inspect.Parameter(label, kind, annotation=x) for label, x in schema.items()]
        execute_flat.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        names = {argument.name: [*argument.schema] for argument in arguments}
        names |= {label: [label.replace(".", "_")] for label in mutates if "." in label}
        library_op = torch.library.custom_op(
            f"lenvm::{name or launch.__module__.rpartition('.')[2]}",
            execute_flat,
            mutates_args=[label for part in (arguments[0].name, *mutates) for label in names[part]],
        )
        library_op.register_fake(lambda *backend_and_operands: None)

        @functools.wraps(launch)
        def call(backend: str, out: Any, *operands: Any) -> Any:
            values = [out, *operands]
            for i in tables:
                if values[i] is not None:
                    values[i] = arguments[i].kind._make([getattr(values[i], x) for x in arguments[i].kind._fields])
            # Tracing, or running without data (FakeTensor).
            if (
                is_dynamo_compiling()
                or type(out if isinstance(out, Tensor) else out[0]) is not Tensor
                or (is_in_torch_dispatch_mode() and get_proxy_mode() is not None)
            ):
                library_op(backend, *_flat(arguments, values))
            else:
                execute(backend, *values)
            return out

        return call

    return decorate


def _argument(name: str, kind: Any) -> _Argument:
    is_optional = type(None) in get_args(kind)
    for candidate in (kind, *get_args(kind)):
        if hasattr(candidate, "_fields"):
            hints = dict.fromkeys(candidate._fields, Tensor) | get_type_hints(candidate)
            fields = {f"{name}_{field}": x | None if is_optional else x for field, x in hints.items()}
            return _Argument(name, fields, candidate)
    return _Argument(name, {name: kind}, None)


def _flat(arguments: Sequence[_Argument], values: Sequence[Any]) -> list[Any]:
    """Convert the arguments of a launch to arguments of the schema."""
    flat: list[Any] = []
    for argument, value in zip(arguments, values, strict=True):
        if argument.kind is None:
            flat.append(value)
        else:
            flat.extend([None] * len(argument.schema) if value is None else value)
    return flat


def _nested(arguments: Sequence[_Argument], flat: Sequence[Any]) -> Iterator[Any]:
    """Convert the arguments of the schema to arguments of a launch."""
    rest = iter(flat)
    for argument in arguments:
        values = [next(rest) for _ in argument.schema]
        if argument.kind is None:
            yield values[0]
        else:
            yield None if all(x is None for x in values) else argument.kind._make(values)
