"""What ``lenvm doctor`` looks at: packages, device, kernels, settings of the plugins, and how they fit SGLang and vLLM.

:data:`SECTIONS` names the sections, and :func:`examine` looks at one. Whatever is broken becomes a check that says so:
nothing here raises. Accepted versions come from the package's own metadata, variables and hooks from the adapter.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import importlib.util
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lenvm_kernels

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement

    from lenvm_kernels.adapters.settings import Settings

OK, MISSING, WRONG = "ok", "missing", "wrong"

PACKAGE = "lenvm-kernels"
ADAPTER = "lenvm_kernels.adapters.sglang"
FORK_ADAPTER = "lenvm_kernels.adapters.sglang_fork"
PLUGINS = "sglang.srt.plugins"  # SGLang's group of entry points, and its module that loads them
VLLM_ADAPTER = "lenvm_kernels.adapters.vllm"
# What an engine finds us by: its group of entry points, and the module that ours is in.
ENTRY_POINTS = {"SGLang plugin": (PLUGINS, ADAPTER), "vLLM processor": ("vllm.logits_processors", VLLM_ADAPTER)}
MIN_CAPABILITY = (8, 0)
GPU_FILES = "/dev/nvidia[0-9]*"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
TOLERANCE = 1e-4  # of an operator's fp32 results of O(1), against the reference in fp64


@dataclass(frozen=True)
class Check:
    """What one look found.

    Attributes:
        name: of what was looked at.
        mark: ``ok``, ``missing`` (something optional, which is no fault) or ``wrong``.
        found: a version, a number, what is there instead.
        accepted: what would be ok, if that can be said.
        hint: one line; of something wrong, what to do.
    """

    name: str
    mark: str
    found: str
    accepted: str = ""
    hint: str = ""


class _NothingToSee(Exception):
    """Ends a section; holds the check that says why."""

    def __init__(self, check: Check) -> None:
        self.check = check


def examine(section: str) -> list[Check]:
    """Look at one of the :data:`SECTIONS`.

    The section ``hooks`` loads SGLang's plugins into this process, as SGLang itself does: the hooks stay.
    """
    try:
        return SECTIONS[section]()
    except _NothingToSee as end:
        return [end.check]
    except Exception as error:  # a broken installation breaks in any way, and the other sections still tell something
        return [Check(section, WRONG, _line(error), hint="mend this first; the section ended here")]


# --- installed ---


def installed() -> list[Check]:
    """Versions against the metadata of this package, and the entry points that engines find it by."""
    try:
        own = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return [Check(PACKAGE, WRONG, "not installed", hint="pip install it: what it requires is in its metadata")]
    checks = [_own_version(own)]
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet
    except ImportError as error:
        return [*checks, Check("packaging", WRONG, _line(error), hint="pip install packaging")]

    accepted = SpecifierSet(own.metadata["Requires-Python"])
    version = ".".join(map(str, sys.version_info[:3]))
    mark = OK if accepted.contains(version) else WRONG
    checks.append(Check("python", mark, version, str(accepted), f"use Python {accepted}" if mark == WRONG else ""))

    for requirement in map(Requirement, own.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            checks.append(_version_check(requirement, optional=False))
        elif requirement.marker.evaluate({"extra": "sglang"}):
            is_fork = requirement.name == "sglang" and _is_fork()
            checks.append(_fork_check(requirement) if is_fork else _version_check(requirement, optional=True))
        elif requirement.marker.evaluate({"extra": "vllm"}):
            checks.append(_version_check(requirement, optional=True))
    return [*checks, *_two_tritons(), *map(_entry_point, ENTRY_POINTS)]


def _own_version(own: metadata.Distribution) -> Check:
    if own.version == lenvm_kernels.__version__:
        return Check(PACKAGE, OK, own.version)
    found = f"{lenvm_kernels.__version__} in {Path(lenvm_kernels.__file__).parent}"
    return Check(PACKAGE, WRONG, found, f"{own.version}, as installed", "pip install it again: its metadata is older")


def _version_check(requirement: Requirement, *, optional: bool) -> Check:
    name, accepted = requirement.name, str(requirement.specifier) or "any"
    install = f'pip install "{name}{requirement.specifier}"'
    version = _version(name)
    if version is None:
        return Check(name, MISSING if optional else WRONG, "not installed", accepted, install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, WRONG, version, accepted, install)
    return Check(name, OK, version, accepted)


def _version(name: str) -> str | None:
    """The installed version; None without one, or if an interrupted installation left no metadata."""
    for distribution in (name, f"{name}-cpu"):  # vLLM for CPUs is of another name
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pass
    return None


def _is_fork() -> bool:
    """Whether the SGLang here is the LenVM fork (``sglang.srt.lvm`` is there); found without importing it."""
    spec = importlib.util.find_spec("sglang")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(file for folder in folders for file in Path(folder, "srt", "lvm").glob("*.py"))


def _fork_check(requirement: Requirement) -> Check:
    found = f"{_version(requirement.name) or 'unknown version'}, the LenVM fork"
    hint = f"the fork has no plugins: {FORK_ADAPTER}.install() is for it"
    return Check(requirement.name, OK, found, f"{requirement.specifier}, or the fork", hint)


def _two_tritons() -> list[Check]:
    """Distributions of other names (nightly builds) install the same module: what is imported is a mixture of both."""
    names = sorted(set(metadata.packages_distributions().get("triton", ())))
    if len(names) < 2:
        return []
    found = " and ".join(f"{name} {_version(name)}" for name in names)
    hint = f"pip uninstall {' '.join(names)}, then install one of them"
    return [Check("module triton", WRONG, f"from {found}", "one distribution", hint)]


def _entry_points(name: str) -> list[metadata.EntryPoint]:
    """Those of the :data:`ENTRY_POINTS` that are ours."""
    group, module = ENTRY_POINTS[name]
    return [point for point in metadata.entry_points(group=group) if point.value.partition(":")[0] == module]


def _entry_point(name: str) -> Check:
    points, accepted = _entry_points(name), f"one in {ENTRY_POINTS[name][0]}"
    if not points:
        return Check(name, WRONG, "no entry point", accepted, "pip install it again: its metadata is older")
    if len(points) > 1:
        found = ", ".join(f"{point.name} of {point.dist and point.dist.name}" for point in points)
        hint = "pip uninstall all but one: the engine would be guided twice"
        return Check(name, WRONG, f"entry points {found}", accepted, hint)
    return Check(name, OK, f"entry point {points[0].name} = {points[0].value}")


# --- device ---


def device() -> list[Check]:
    """The GPUs and what torch can do with them, and Triton's interpreter."""
    import torch
    import triton

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    checks = [_gpu(index) for index in gpus] or [_no_gpu()]
    if gpus:
        driver = re.search(r"\b\d+\.\d[\d.]*", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
        found = f"torch {torch.__version__} for {torch.version.cuda}" + (f", driver {driver[0]}" if driver else "")
        checks.append(Check("CUDA", OK, found))
    if triton.knobs.runtime.interpret:
        if gpus:
            hint = "unset TRITON_INTERPRET: kernels are interpreted on the CPU, far slower"
            checks.append(Check("TRITON_INTERPRET", WRONG, "set", "not set beside a GPU", hint))
        else:
            checks.append(Check("TRITON_INTERPRET", OK, "set", hint='backend="triton" is Triton\'s interpreter'))
    return checks


def _gpu(index: int) -> Check:
    import torch

    capability = torch.cuda.get_device_capability(index)
    found = f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}"
    accepted = f"sm_{MIN_CAPABILITY[0]}{MIN_CAPABILITY[1]} or later"
    if capability < MIN_CAPABILITY:
        return Check(f"GPU {index}", WRONG, found, accepted, 'use a later GPU, or backend="reference" on this one')
    return Check(f"GPU {index}", OK, found, accepted)


def _no_gpu() -> Check:
    """No GPU is no fault, unless there is one that torch does not reach."""
    import torch

    found = f"none; torch {torch.__version__}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found += f", CUDA_VISIBLE_DEVICES={visible!r}"
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = _line(error)
    if glob.glob(GPU_FILES) and visible is None:
        mend = "update the NVIDIA driver, or install a torch of its CUDA version"
        if torch.version.cuda is None:
            mend = "install a torch built for CUDA"
        return Check("GPU", WRONG, found, hint=f"this machine has one, but: {reason}; {mend}")
    return Check("GPU", MISSING, found, hint=f"operators run the PyTorch reference ({reason})")


# --- kernels ---


def kernels() -> list[Check]:
    """A few operators on tiny inputs against their references in fp64: compiled on a GPU; else the reference runs."""
    import torch

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=where).item()  # or the first operator's time would hold the start of CUDA
    return [_compare(name, operator, where) for name, operator in OPERATORS.items()]


def _compare(
    name: str, operator: Callable[[torch.device, torch.dtype, str], torch.Tensor], where: torch.device
) -> Check:
    import torch

    accepted = f"within {TOLERANCE:g} of the fp64 reference"
    start = time.perf_counter()
    try:
        results = operator(where, torch.float32, "auto").cpu()
    except Exception as error:
        hint = "Triton needs a C compiler (gcc) and Python's headers (python3-dev) to compile; else report this"
        return Check(name, WRONG, _line(error), accepted, hint)
    milliseconds = 1e3 * (time.perf_counter() - start)
    difference = (results.double() - operator(torch.device("cpu"), torch.float64, "reference")).abs().max().item()
    runs = "kernel, first call" if where.type == "cuda" else "no GPU: reference,"
    found = f"{runs} {milliseconds:.0f} ms, off by {difference:.1g}"
    if not difference <= TOLERANCE:  # NaN compares false
        return Check(name, WRONG, found, accepted, 'report this; until then backend="reference" computes it')
    return Check(name, OK, found, accepted)


def _random(where: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A source of normal numbers: the same ones on each device and in each dtype."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(where, dtype)


def _topk_candidates(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The candidates' probabilities at their tokens: float [2, 1000]."""
    import torch

    logits, one = _random(where, dtype)(2, 1000), torch.ones(2, device=where)
    top_k = torch.full((2,), 8, dtype=torch.int32, device=where)
    chosen = lenvm_kernels.topk_candidates(
        logits, top_k=top_k, top_p=one, min_p=0 * one, temperature=one, is_logits=True, backend=backend
    )
    return torch.zeros_like(logits).scatter(1, chosen.token_ids.long(), chosen.probs.to(dtype))


def _value_tree_attention(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """One token and eight candidates after 20 cached tokens: [9, 4, 64]."""
    import torch

    normal = _random(where, dtype)
    q, k, v, (k_cache, v_cache) = normal(9, 4, 64), normal(9, 2, 64), normal(9, 2, 64), normal(2, 32, 2, 64)
    slots, row, cached, offsets, candidates = (
        torch.tensor(numbers, dtype=torch.int32, device=where)
        for numbers in ([list(range(31, 11, -1))], [0], [20], [0, 9], [8])
    )
    return lenvm_kernels.value_tree_attention(
        q, k, v, k_cache, v_cache, slots, row, cached, offsets, candidates, backend=backend
    )


def _value_head(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """Value logits of eight tokens: [8]."""
    normal = _random(where, dtype)
    weights = normal(64, 64) / 8, normal(64), normal(1, 64) / 8, normal(1)
    return lenvm_kernels.value_head(normal(8, 64), *weights, backend=backend)


OPERATORS = {
    "topk_candidates": _topk_candidates,
    "value_tree_attention": _value_tree_attention,
    "value_head": _value_head,
}


# --- the plugins ---


def settings() -> list[Check]:
    """The plugin's settings as its processes would read them, misspelt variables, and whether the value model loads."""
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
        return [*checks, Check("settings", WRONG, "refused", hint=_line(error))]
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
    try:
        from lenvm_kernels.value_model import ValueModel

        with _quiet():
            options: dict[str, Any] = dict(dtype=settings.dtype, device="meta", weights=settings.weights)
            model = ValueModel.from_pretrained(path, settings.value_head, **options)
    except Exception as error:  # its files may be anything
        return Check("value model", WRONG, f"{path} does not load", hint=_line(error))
    config = model.config
    sizes = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    return Check("value model", OK, f"{sizes}, {str(model.dtype).removeprefix('torch.')}, with its head")


def hooks() -> list[Check]:
    """Load the plugins as each process of SGLang does, with the plugin on, and look at every function it hooks."""
    adapter = _import_adapter()
    with _quiet(), _plugin_on(), _logged_errors(PLUGINS) as errors:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
    if not all(target in HookRegistry._hooks for target in adapter.HOOKS):
        return [Check("SGLang plugin", WRONG, "did not run", hint=_why_it_did_not_run(errors))]
    differs = f"this SGLang differs: use a release that {PACKAGE} accepts, or a later {PACKAGE}"
    return [
        Check(target, OK, "took")
        if target in HookRegistry._patched
        else Check(target, WRONG, _line(errors[target]) if target in errors else "did not take", hint=differs)
        for target in adapter.HOOKS
    ]


def _why_it_did_not_run(errors: dict[str, BaseException]) -> str:
    names = [point.name for point in _entry_points("SGLang plugin")]
    if failed := [name for name in names if name in errors]:
        return f"mend this first: {_line(errors[failed[0]])}"
    if only := os.environ.get("SGLANG_PLUGINS"):
        return f"SGLANG_PLUGINS={only} is all that SGLang loads: add {', '.join(names)} to it, or unset it"
    return f"pip install {PACKAGE} again: SGLang found no entry point"


def _import_adapter() -> ModuleType:
    """The SGLang adapter, and with it SGLang, which takes some seconds.

    Raises:
        _NothingToSee: there is no SGLang, it is the fork, or importing fails.
    """
    if _is_fork():
        raise _NothingToSee(Check("sglang", MISSING, "the LenVM fork", hint=f"{FORK_ADAPTER}.install() is for it"))
    if _version("sglang") is None:
        hint = 'nothing to look at without it: pip install "lenvm-kernels[sglang]"'
        raise _NothingToSee(Check("sglang", MISSING, "not installed", hint=hint))
    try:
        with _quiet():
            return importlib.import_module(ADAPTER)
    except Exception as error:  # missing CUDA libraries, other releases of its dependencies
        hint = 'SGLang cannot start either: mend it, or pip install "lenvm-kernels[sglang]" into a new environment'
        raise _NothingToSee(Check("sglang", WRONG, f"importing SGLang failed: {_line(error)}", hint=hint)) from error


def vllm() -> list[Check]:
    """Whether this vLLM runs logits processors of its second model runner, and has what ours wraps."""
    if _version("vllm") is None:
        hint = 'nothing to look at without it: pip install "lenvm-kernels[vllm]"'
        return [Check("vllm", MISSING, "not installed", hint=hint)]
    try:
        with _quiet():
            from vllm.triton_utils import HAS_TRITON
            from vllm.v1.worker.gpu.sample.states import SamplingStates

            importlib.import_module(VLLM_ADAPTER)
    except Exception as error:
        hint = 'vLLM cannot start either: mend it, or pip install "lenvm-kernels[vllm]" into a new environment'
        return [Check("vllm", WRONG, f"importing vLLM failed: {_line(error)}", hint=hint)]
    differs = f"this vLLM differs: use a release that {PACKAGE} accepts, or a later {PACKAGE}"
    checks = [
        Check(f"SamplingStates.{name}", OK, "is there")
        if callable(getattr(SamplingStates, name, None))
        else Check(f"SamplingStates.{name}", WRONG, "is not there", hint=differs)
        for name in ("get_top_k_top_p", "apply_min_p")
    ]
    name, given = "VLLM_USE_V2_MODEL_RUNNER", os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if given == "1" or (given is None and HAS_TRITON):
        return [*checks, Check("model runner", OK, "the second")]
    hint = f"set {name}=1: only the second model runner can be guided"
    return [*checks, Check("model runner", WRONG, "the first", "the second", hint)]


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what is printed, warned and logged to the terminal."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _line(error: BaseException) -> str:
    """The first line of an error, with its type where the text says too little."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"


SECTIONS: dict[str, Callable[[], list[Check]]] = {
    "installed": installed,
    "device": device,
    "kernels": kernels,
    "settings": settings,
    "hooks": hooks,
    "vllm": vllm,
}
