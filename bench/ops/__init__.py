"""Benchmarks and forms of the operators, one module each."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

from bench.launches import empty_is_zero


def operators() -> dict[str, ModuleType]:
    """The modules by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    return {name: importlib.import_module(f"bench.ops.{name}") for name in names}


def operator_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls (name, function) of each operator with all dtypes, options and kinds of sizes, and with all sizes 1.

    Random numbers are zeros, because compilation depends on dtypes, sizes and alignments only.
    """

    def call(module: ModuleType, form: dict[str, object]) -> None:
        with empty_is_zero(random=True):
            made = module.make_call(**form)
        made(backend="triton")

    for module in operators().values():
        for name, form in module.FORMS.items():
            yield name, partial(call, module, form)
