"""The hooks of the SGLang plugin: which of them took in the SGLang that is here."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line, quiet
from lenvm_kernels.doctor.installed import ADAPTER, FORK_ADAPTER, PACKAGE, PLUGINS, entry_points_of, is_fork, version_of


def look() -> list[Check]:
    """Load the plugins as each process of SGLang does, with the plugin on, and look at every function it hooks."""
    adapter = _import_adapter()
    if isinstance(adapter, Check):
        return [adapter]
    with quiet(), _plugin_on(), _logged_errors(PLUGINS) as errors:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
    if not all(target in HookRegistry._hooks for target in adapter.HOOKS):
        return [Check("SGLang plugin", WRONG, "did not run", hint=_why_it_did_not_run(errors))]
    differs = f"this SGLang differs: use a release that {PACKAGE} accepts, or a later {PACKAGE}"
    return [
        Check(target, OK, "took")
        if target in HookRegistry._patched
        else Check(target, WRONG, first_line(errors[target]) if target in errors else "did not take", hint=differs)
        for target in adapter.HOOKS
    ]


def _why_it_did_not_run(errors: dict[str, BaseException]) -> str:
    names = [point.name for point in entry_points_of("SGLang plugin")]
    if failed := [name for name in names if name in errors]:
        return f"mend this first: {first_line(errors[failed[0]])}"
    if only := os.environ.get("SGLANG_PLUGINS"):
        return f"SGLANG_PLUGINS={only} is all that SGLang loads: add {', '.join(names)} to it, or unset it"
    return f"pip install {PACKAGE} again: SGLang found no entry point"


def _import_adapter() -> ModuleType | Check:
    """The SGLang adapter, and with it SGLang, which takes some seconds; or a check that says why there is none."""
    if is_fork():
        return Check("sglang", MISSING, "the LenVM fork", hint=f"{FORK_ADAPTER}.install() is for it")
    if version_of("sglang") is None:
        hint = 'nothing to look at without it: pip install "lenvm-kernels[sglang]"'
        return Check("sglang", MISSING, "not installed", hint=hint)
    try:
        with quiet():
            return importlib.import_module(ADAPTER)
    except Exception as error:  # missing CUDA libraries, other releases of its dependencies
        hint = 'SGLang cannot start either: mend it, or pip install "lenvm-kernels[sglang]" into a new environment'
        return Check("sglang", WRONG, f"importing SGLang failed: {first_line(error)}", hint=hint)


@contextmanager
def _plugin_on() -> Iterator[None]:
    """While ``LENVM_VALUE_MODEL`` is set: to the user's model, else to a placeholder, which nothing loads."""
    before = os.environ.get("LENVM_VALUE_MODEL")
    os.environ["LENVM_VALUE_MODEL"] = before or os.curdir
    try:
        yield
    finally:
        if before is None:
            del os.environ["LENVM_VALUE_MODEL"]
        else:
            os.environ["LENVM_VALUE_MODEL"] = before


@contextmanager
def _logged_errors(name: str) -> Iterator[dict[str, BaseException]]:
    """The exceptions that a logger and those below it log meanwhile, by the first argument of the message.

    SGLang logs why a plugin or a hook failed, and goes on; the argument is the plugin's name or the hook's target.
    """
    errors: dict[str, BaseException] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and record.args and record.exc_info and record.exc_info[1]:
                errors[str(record.args[0])] = record.exc_info[1]

    logger, handler = logging.getLogger(name), Handler(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
