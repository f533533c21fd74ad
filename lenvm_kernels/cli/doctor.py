"""``lenvm doctor``: installed packages, version compatibility, the GPU, and whether the kernels run on it.

Every fault becomes a :class:`Check`, and no section raises. Accepted versions come from the metadata of this package,
hooks and signatures from the adapters. Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import lenvm_kernels

PACKAGE = "lenvm-kernels"
SGLANG, VLLM = "lenvm_kernels.engines.sglang.plugin", "lenvm_kernels.engines.vllm.processor"
VLLM_FRONT_END = "lenvm_kernels.engines.vllm.front_end"
# Group and module of the entry points that each engine loads.
ENTRY_POINTS = {
    "sglang": (("sglang.srt.plugins", SGLANG),),
    "vllm": (("vllm.logits_processors", VLLM), ("vllm.general_plugins", VLLM_FRONT_END)),
}
FORK = "lenvm_kernels.engines.sglang_fork.install()"
MIN_CAPABILITY = (8, 0)
GPU_FILES = "/dev/nvidia[0-9]*"
TOLERANCE = 1e-4  # for fp32 results of O(1) against the reference in fp64
OK, MISSING, WRONG = "ok", "missing", "wrong"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        mark: ``ok``, ``missing`` (something optional) or ``wrong``.
        found: a version, a device, or the fault.
        hint: one line: the accepted values, or what to do.
    """

    name: str
    mark: str
    found: str
    hint: str = ""


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation: versions, engines, GPU, kernels",
        description="Check installed packages, version compatibility, whether the plugins fit the installed SGLang and "
        "vLLM, the GPU, and that the kernels run on it. The exit code is 1 if something is wrong. A missing GPU or "
        "engine is not wrong.",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: one line per check)")


def run_command(args: argparse.Namespace) -> int:
    """Print the checks of every section and return the exit code."""
    sections = {}
    for section in SECTIONS:
        checks = sections[section] = examine(section)
        if not args.json:
            print(section, flush=True)
            for check in checks:
                print(f"  {check.mark:7}  {check.name}: {check.found}" + (f"  ({check.hint})" if check.hint else ""))
    wrong = sum(check.mark == WRONG for checks in sections.values() for check in checks)
    if args.json:
        as_json = {section: [asdict(check) for check in checks] for section, checks in sections.items()}
        print(json.dumps({"ok": not wrong, **as_json}, indent=1))
    else:
        print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return int(wrong > 0)


def examine(section: str) -> list[Check]:
    """The checks of one of the :data:`SECTIONS`. Output and logs of a check are dropped.

    The section ``sglang`` loads SGLang's plugins into this process, as SGLang does: the hooks stay.
    """
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return SECTIONS[section]()
    except Exception as error:  # a broken installation can raise anything
        found = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return [Check(section, WRONG, found, "the checks of this section ended here")]


def check_installed() -> list[Check]:
    """Versions against the metadata of this package, and the entry points of the engines."""
    from packaging.requirements import Requirement

    own = metadata.distribution(PACKAGE)
    same = own.version == lenvm_kernels.__version__
    hint = "" if same else f"the metadata has {own.version}: pip install {PACKAGE} again"
    checks = [Check(PACKAGE, OK if same else WRONG, lenvm_kernels.__version__, hint)]
    python = Requirement(f"python{own.metadata['Requires-Python']}")
    checks.append(_version_check(python, ".".join(map(str, sys.version_info[:3]))))
    for requirement in map(Requirement, own.requires or ()):
        engine = next(
            (e for e in ENTRY_POINTS if requirement.marker and requirement.marker.evaluate({"extra": e})), None
        )
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            checks.append(_version_check(requirement, version_of(requirement.name)))
        elif engine == "sglang" and is_fork():
            checks.append(Check(engine, OK, "the LenVM fork", f"it has no plugins: use {FORK}"))
        elif engine is not None:
            checks.append(_version_check(requirement, version_of(engine), absent=MISSING))
    for engine, group, module in ((engine, *point) for engine, points in ENTRY_POINTS.items() for point in points):
        points = [point for point in metadata.entry_points(group=group) if point.value.partition(":")[0] == module]
        names = ", ".join(f"{point.name} of {point.dist.name if point.dist else '?'}" for point in points) or "none"
        hint = (
            "" if len(points) == 1 else f"exactly one must be in {group}: pip install {PACKAGE} again, or uninstall one"
        )
        checks.append(Check(f"entry point of {engine} in {group}", WRONG if hint else OK, names, hint))
    return checks


def _version_check(requirement: Any, version: str | None, absent: str = WRONG) -> Check:
    name, specifier = requirement.name, requirement.specifier
    if version is None:
        return Check(name, absent, "not installed", f'pip install "{name}{specifier}"')
    if not specifier.contains(version, prereleases=True):
        return Check(name, WRONG, version, f"must be {specifier}")
    return Check(name, OK, version)


def version_of(name: str) -> str | None:
    """The installed version of a distribution, or of its build for CPUs; None if there is none."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pass
    return None


def is_fork() -> bool:
    """Whether the installed SGLang is the LenVM fork, which has ``sglang.srt.lvm``. Nothing is imported."""
    spec = importlib.util.find_spec("sglang")
    return any(Path(folder, "srt", "lvm").is_dir() for folder in (spec and spec.submodule_search_locations) or ())


def check_sglang() -> list[Check]:
    """Load the plugins as SGLang does, with the default settings, and check the hooks and signatures of this one."""
    if version_of("sglang") is None or is_fork():
        return [Check("sglang", MISSING, "not installed" if not is_fork() else "the LenVM fork")]
    hooks = importlib.import_module("lenvm_kernels.engines.sglang.hooks").HOOKS
    others = {name: value for name, value in os.environ.items() if not name.startswith("LENVM_")}
    with mock.patch.dict(os.environ, others, clear=True):  # with a variable, a failure would end this process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
    if not all(target in HookRegistry._hooks for target in hooks):
        only = os.environ.get("SGLANG_PLUGINS")
        hint = f"SGLANG_PLUGINS={only} excludes it" if only else "SGLang's log has the reason"
        return [Check("plugin", WRONG, "did not run", hint), *_signatures("sglang")]
    lost = [target for target in hooks if target not in HookRegistry._patched]
    return [*(Check(target, WRONG, "hook not applied") for target in lost), *_signatures("sglang")]


def check_vllm() -> list[Check]:
    """Check that vLLM's second model runner is enabled, and the signatures that the processor uses."""
    if version_of("vllm") is None:
        return [Check("vllm", MISSING, "not installed")]
    from vllm.triton_utils import HAS_TRITON

    importlib.import_module(VLLM)
    is_second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1" if HAS_TRITON else "0") == "1"
    runner = Check("model runner", OK, "the second")
    if not is_second:
        runner = Check("model runner", WRONG, "the first", "set VLLM_USE_V2_MODEL_RUNNER=1: guidance needs the second")
    return [runner, *_signatures("vllm")]


def _signatures(engine: str) -> list[Check]:
    from lenvm_kernels.engines import signatures

    tried = ", ".join(signatures.recorded(engine))
    differences = signatures.differences(engine)
    if not differences:
        return [Check("signatures", OK, f"{len(signatures.USED[engine])} as in {tried}")]
    return [Check(target.split(":")[1], WRONG, what, f"tested: {tried}") for target, what in differences.items()]


def check_device() -> list[Check]:
    """The GPUs, or why there is none, and Triton's interpreter."""
    import torch
    import triton

    checks = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}, CUDA {torch.version.cuda}"
        is_ok = capability >= MIN_CAPABILITY
        hint = "" if is_ok else 'must be sm_80 or later; backend="reference" runs on this one'
        checks.append(Check(f"GPU {index}", OK if is_ok else WRONG, found, hint))
    interpreted = triton.knobs.runtime.interpret
    if checks and interpreted:
        checks.append(Check("TRITON_INTERPRET", WRONG, "set", "unset it: kernels are interpreted on the CPU"))
    if not checks:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        unreachable = bool(glob.glob(GPU_FILES)) and not hidden
        hint = "this machine has one: install a torch that fits its driver" if unreachable else "the reference is used"
        checks.append(Check("GPU", WRONG if unreachable else MISSING, f"none; torch {torch.__version__}", hint))
    return checks


def check_kernel() -> list[Check]:
    """Run ``value_head``, a kernel on a GPU and the reference without one, against the fp64 reference."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 64), (64, 64), (64,), (1, 64), (1,)
    inputs = [torch.randn(shape, generator=generator) / max(1, shape[-1] ** 0.5) for shape in shapes]
    logits = lenvm_kernels.value_head(*(x.to(device) for x in inputs)).cpu().double()
    expected = lenvm_kernels.value_head(*(x.double() for x in inputs), backend="reference")
    error = (logits - expected).abs().max().item()
    found = f"{'kernel' if device == 'cuda' else 'no GPU: reference'}, off by {error:.1g}"
    is_ok = error <= TOLERANCE  # False for NaN
    return [Check("value_head", OK if is_ok else WRONG, found, "" if is_ok else f"must be within {TOLERANCE:g}")]


SECTIONS: dict[str, Callable[[], list[Check]]] = {
    "installed": check_installed,
    "sglang": check_sglang,
    "vllm": check_vllm,
    "device": check_device,
    "kernel": check_kernel,
}
