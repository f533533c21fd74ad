"""``lenvm doctor``: installed packages, version compatibility, the GPU, and whether the kernels run on it.

Accepted versions are read from this package's metadata, hooks and signatures from the adapters.
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
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import lenvm_kernels

PACKAGE = "lenvm-kernels"
VLLM_PROCESSOR = "lenvm_kernels.engines.vllm.processor"
# Engines, and group and module of the entry points that they load.
ENTRY_POINTS = (
    ("sglang", "sglang.srt.plugins", "lenvm_kernels.engines.sglang.plugin"),
    ("vllm", "vllm.logits_processors", VLLM_PROCESSOR),
    ("vllm", "vllm.general_plugins", "lenvm_kernels.engines.vllm.front_end"),
)
FORK = "lenvm_kernels.engines.sglang_fork.install()"
GPU_FILES = "/dev/nvidia[0-9]*"
TOLERANCE = 1e-4  # for fp32 results of O(1) against the reference in fp64
OK, MISSING, WRONG = "ok", "missing", "wrong"  # "missing" marks optional parts


@dataclass(frozen=True)
class Check:
    """The result of a check: one of the marks above, the finding, and a line with the accepted value or the fix."""

    name: str
    mark: str
    found: str
    hint: str = ""


def ok_without_hint(name: str, found: str, hint: str) -> Check:
    """A check that is wrong if there is a hint."""
    return Check(name, WRONG if hint else OK, found, hint)


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation: versions, engines, GPU, kernels",
        description="Check installed packages, version compatibility, whether the plugins fit the installed SGLang and "
        "vLLM, the GPU, and that the kernels run on it. The exit code is 1 if a check fails. A missing GPU or "
        "engine is not a failure.",
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
    """The checks of one of the :data:`SECTIONS`. Output and logs of checks are dropped, and errors become failed
    checks.

    The section ``sglang`` loads SGLang's plugins into this process, as SGLang does, and its hooks stay applied.
    """
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return list(SECTIONS[section]())
    except Exception as error:  # a broken installation can raise anything
        found = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return [Check(section, WRONG, found, "this section's checks stopped here")]


def check_installed() -> Iterator[Check]:
    """Check versions against this package's metadata, and the entry points of the engines."""
    from packaging.requirements import Requirement

    own, version = metadata.distribution(PACKAGE), lenvm_kernels.__version__
    hint = "" if own.version == version else f"the metadata has {own.version}: reinstall {PACKAGE}"
    yield ok_without_hint(PACKAGE, version, hint)
    python = Requirement(f"python{own.metadata['Requires-Python']}")
    yield _version_check(python, ".".join(map(str, sys.version_info[:3])))
    for requirement in map(Requirement, own.requires or ()):
        name, marker = requirement.name, requirement.marker
        if name == "sglang" and is_fork():
            yield Check(name, OK, "the LenVM fork", f"it does not load plugins: use {FORK}")
        elif name in ("sglang", "vllm"):
            yield _version_check(requirement, version_of(name), absent=MISSING)
        elif marker is None or marker.evaluate({"extra": ""}):
            yield _version_check(requirement, version_of(name))
    for engine, group, module in ENTRY_POINTS:
        points = [point for point in metadata.entry_points(group=group) if point.value.partition(":")[0] == module]
        names = ", ".join(f"{point.name} of {point.dist.name if point.dist else '?'}" for point in points) or "none"
        hint = f"{group} must have exactly one: reinstall {PACKAGE}, or uninstall another package"
        yield ok_without_hint(f"entry point of {engine} in {group}", names, "" if len(points) == 1 else hint)


def _version_check(requirement: Any, version: str | None, absent: str = WRONG) -> Check:
    name, specifier = requirement.name, requirement.specifier
    if version is None:
        return Check(name, absent, "not installed", f'pip install "{name}{specifier}"')
    is_ok = specifier.contains(version, prereleases=True)
    return ok_without_hint(name, version, "" if is_ok else f"must be {specifier}")


def version_of(name: str) -> str | None:
    """The installed version of a distribution, or of its CPU build; None without both."""
    for distribution in (name, f"{name}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def is_fork() -> bool:
    """Whether the installed SGLang is the LenVM fork, which has ``sglang.srt.lvm``. SGLang is not imported."""
    spec = importlib.util.find_spec("sglang")
    return any(Path(folder, "srt", "lvm").is_dir() for folder in (spec and spec.submodule_search_locations) or ())


def check_sglang() -> Iterator[Check]:
    """Load the plugins as SGLang does, with default settings, and check this package's hooks and signatures."""
    if is_fork() or version_of("sglang") is None:
        yield Check("sglang", MISSING, "the LenVM fork" if is_fork() else "not installed")
        return
    hooks = importlib.import_module("lenvm_kernels.engines.sglang.hooks").HOOKS
    others = {name: value for name, value in os.environ.items() if not name.startswith("LENVM_")}
    with mock.patch.dict(os.environ, others, clear=True):  # with LENVM_ variables, a failure would end this process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
    if all(target in HookRegistry._hooks for target in hooks):
        lost = [target for target in hooks if target not in HookRegistry._patched]
        yield from (Check(target, WRONG, "hook not applied") for target in lost)
    else:
        only = os.environ.get("SGLANG_PLUGINS")
        hint = f"SGLANG_PLUGINS={only} excludes it" if only else "SGLang's log has the reason"
        yield Check("plugin", WRONG, "did not run", hint)
    yield from _signatures("sglang")


def check_vllm() -> Iterator[Check]:
    """Check that vLLM's second model runner is enabled, and the signatures that the processor uses."""
    if version_of("vllm") is None:
        yield Check("vllm", MISSING, "not installed")
        return
    from vllm.triton_utils import HAS_TRITON

    importlib.import_module(VLLM_PROCESSOR)
    is_second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1" if HAS_TRITON else "0") == "1"
    hint = "" if is_second else "set VLLM_USE_V2_MODEL_RUNNER=1: guidance needs the second model runner"
    yield ok_without_hint("model runner", "the second" if is_second else "the first", hint)
    yield from _signatures("vllm")


def _signatures(engine: str) -> Iterator[Check]:
    from lenvm_kernels.engines import signatures

    tried = ", ".join(signatures.recorded(engine))
    differences = signatures.differences(engine)
    if not differences:
        yield Check("signatures", OK, f"{len(signatures.USED[engine])} as in {tried}")
    for target, what in differences.items():
        yield Check(target.split(":")[1], WRONG, what, f"tested: {tried}")


def check_device() -> Iterator[Check]:
    """Check the GPUs and Triton's interpreter."""
    import torch
    import triton

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, CUDA {torch.version.cuda}"
        hint = "" if major >= 8 else 'must be sm_80 or later; backend="reference" runs on this one'
        yield ok_without_hint(f"GPU {index}", found, hint)
    if count and triton.knobs.runtime.interpret:
        yield Check("TRITON_INTERPRET", WRONG, "set", "unset it: kernels are interpreted on the CPU")
    if not count:
        unreachable = bool(glob.glob(GPU_FILES)) and "CUDA_VISIBLE_DEVICES" not in os.environ
        hint = "install a torch that fits the GPU's driver" if unreachable else "the reference is used"
        yield Check("GPU", WRONG if unreachable else MISSING, f"none; torch {torch.__version__}", hint)


def check_kernel() -> Iterator[Check]:
    """Compare ``value_head``, on a GPU the kernel and otherwise the reference, with the fp64 reference."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 64), (64, 64), (64,), (1, 64), (1,)
    inputs = [torch.randn(shape, generator=generator) / max(1, shape[-1] ** 0.5) for shape in shapes]
    logits = lenvm_kernels.value_head(*(x.to(device) for x in inputs)).cpu().double()
    expected = lenvm_kernels.value_head(*(x.double() for x in inputs), backend="reference")
    error = (logits - expected).abs().max().item()
    is_ok = error <= TOLERANCE  # False for NaN
    found = f"{'kernel' if device == 'cuda' else 'no GPU: reference'}, off by {error:.1g}"
    yield ok_without_hint("value_head", found, "" if is_ok else f"must be within {TOLERANCE:g}")


CHECKS = (check_installed, check_sglang, check_vllm, check_device, check_kernel)
SECTIONS: dict[str, Callable[[], Iterator[Check]]] = {check.__name__.removeprefix("check_"): check for check in CHECKS}
