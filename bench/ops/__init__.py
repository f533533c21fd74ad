"""Benchmarks and forms of the operators, a module each."""

import pkgutil

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
