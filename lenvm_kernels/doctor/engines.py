"""The settings of the plugins as engines read them, and whether the SGLang and the vLLM that are here can be guided."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line, quiet
from lenvm_kernels.doctor.installed import (
    ADAPTER,
    FORK_ADAPTER,
    PACKAGE,
    PLUGINS,
    VLLM_ADAPTER,
    entry_points_of,
    is_fork,
    version_of,
)

if TYPE_CHECKING:
    from lenvm_kernels.adapters.settings import Settings


DIFFERS = f"this engine differs: use a release that {PACKAGE} accepts, or a later {PACKAGE}"


def look_at_settings() -> list[Check]:
    """A check of each wrong variable, of the settings, and of the value model."""
    from lenvm_kernels import timing
    from lenvm_kernels.adapters.settings import CONFIG_VARIABLE, Settings
    from lenvm_kernels.ops._common import PDL_VARIABLE

    # The step reads LENVM_TIMING itself and the operators LENVM_PDL, so that they are no fields of the settings.
    known = {CONFIG_VARIABLE, timing.VARIABLE, PDL_VARIABLE}
    known |= {f"LENVM_{field.name.upper()}" for field in fields(Settings)}
    given = sorted(name for name in os.environ if name.startswith("LENVM_"))
    checks = [_unknown_variable(name, known) for name in given if name not in known]
    try:
        found = Settings.from_environment()
    except ValueError as error:
        return [*checks, Check("settings", WRONG, "refused", hint=first_line(error))]
    if found is None:
        return [*checks, Check("settings", MISSING, "the plugin is off", hint="LENVM_VALUE_MODEL turns it on")]
    values = ", ".join(f"{field.name}={getattr(found, field.name)}" for field in fields(found))
    checks.append(Check("settings", OK, values))
    if found.value_model is not None:
        checks += [*_gamma(found, found.value_model), _value_model(found, found.value_model)]
    return checks


def _unknown_variable(name: str, known: set[str]) -> Check:
    ends = [variable.removeprefix("LENVM_") for variable in sorted(known)]  # the prefix makes any two look alike
    close = difflib.get_close_matches(name.removeprefix("LENVM_"), ends, n=1)
    hint = f"did you mean LENVM_{close[0]}?" if close else f"unset it; there are {', '.join(sorted(known))}"
    return Check(name, WRONG, "not a variable of the plugin", hint=hint)


def _gamma(settings: Settings, path: Path) -> list[Check]:
    """A warning where nothing says the gamma that the value model was trained with."""
    from lenvm_kernels.guidance.fields import DEFAULT_GAMMA
    from lenvm_kernels.value_model.lenvm_config import CONFIG_FILE, DISCOUNTED_RETURN, LenVMConfig

    trained_with_gamma = LenVMConfig.read(path).target_form == DISCOUNTED_RETURN
    if settings.gamma is not None or not trained_with_gamma:
        return []
    hint = f"set LENVM_GAMMA, or gamma in {CONFIG_FILE} beside the model: with a wrong one all lengths are wrong"
    return [Check("gamma", MISSING, f"not set; requests that name none get {DEFAULT_GAMMA}", hint=hint)]


def _value_model(settings: Settings, path: Path) -> Check:
    """Whether the value model's files fit together. On the meta device the weights of safetensors are never read."""
    if settings.has_trunk:
        return _trunk(path)
    try:
        from lenvm_kernels.value_model import ValueModel

        with quiet():
            model = ValueModel.from_pretrained(path, settings.value_head, dtype=settings.dtype, device="meta")
    except Exception as error:  # its files may be anything
        return Check("value model", WRONG, f"{path} does not load", hint=first_line(error))
    config = model.config
    sizes = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    return Check("value model", OK, f"{sizes}, {str(model.dtype).removeprefix('torch.')}, with its head")


def _trunk(path: Path) -> Check:
    """Whether a trunk's files fit together. Whether the base model is its own shows when the engine starts."""
    try:
        from lenvm_kernels.value_model.trunk import read_trunk

        config, tensors = read_trunk(path)
    except Exception as error:  # its files may be anything
        return Check("trunk", WRONG, f"{path} does not load", hint=first_line(error))
    layers = ", ".join(map(str, config.layers))
    parameters = sum(tensor.numel() for tensor in tensors.values())
    what = f"of {config.base}, reads layers {layers} of {config.num_layers}, {parameters / 1e6:.1f}M parameters"
    return Check("trunk", OK, what)


def look_at_hooks() -> list[Check]:
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
    hooks = [
        Check(target, OK, "took")
        if target in HookRegistry._patched
        else Check(target, WRONG, first_line(errors[target]) if target in errors else "did not take", hint=DIFFERS)
        for target in adapter.HOOKS
    ]
    return [*hooks, *_signatures("sglang")]


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


def _signatures(engine: str) -> list[Check]:
    """Whether what the plugins use of an engine is as it was where they were tried."""
    from lenvm_kernels.adapters import engine_signatures

    wrong = engine_signatures.differences(engine)
    if wrong:
        return [Check(target.split(":")[1], WRONG, what, hint=DIFFERS) for target, what in wrong.items()]
    used = len(engine_signatures.USED[engine])
    return [Check("signatures", OK, f"{used} as in {', '.join(engine_signatures.recorded(engine))}")]


def look_at_vllm() -> list[Check]:
    """Whether this vLLM runs logits processors of its second model runner, and has what ours wraps."""
    if version_of("vllm") is None:
        hint = 'nothing to look at without it: pip install "lenvm-kernels[vllm]"'
        return [Check("vllm", MISSING, "not installed", hint=hint)]
    try:
        with quiet():
            from vllm.triton_utils import HAS_TRITON

            importlib.import_module(VLLM_ADAPTER)
    except Exception as error:
        hint = 'vLLM cannot start either: mend it, or pip install "lenvm-kernels[vllm]" into a new environment'
        return [Check("vllm", WRONG, f"importing vLLM failed: {first_line(error)}", hint=hint)]
    checks = _signatures("vllm")
    name, given = "VLLM_USE_V2_MODEL_RUNNER", os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if given == "1" or (given is None and HAS_TRITON):
        return [*checks, Check("model runner", OK, "the second")]
    hint = f"set {name}=1: only the second model runner can be guided"
    return [*checks, Check("model runner", WRONG, "the first", "the second", hint)]
