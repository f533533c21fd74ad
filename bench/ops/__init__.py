"""Benchmarks and forms of the operators, a module each."""

import importlib
import pkgutil
from types import ModuleType


def operators() -> dict[str, ModuleType]:
    """The modules by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    return {name: importlib.import_module(f"bench.ops.{name}") for name in names}
