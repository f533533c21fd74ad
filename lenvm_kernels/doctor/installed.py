"""What is installed: versions against this package's own metadata, and the entry points that engines find it by."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import lenvm_kernels
from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "lenvm-kernels"
ADAPTER = "lenvm_kernels.adapters.sglang"
FORK_ADAPTER = "lenvm_kernels.adapters.sglang_fork"
PLUGINS = "sglang.srt.plugins"  # SGLang's group of entry points, and its module that loads them
VLLM_ADAPTER = "lenvm_kernels.adapters.vllm"
# What an engine finds us by: its group of entry points, and the module that ours is in.
ENTRY_POINTS = {"SGLang plugin": (PLUGINS, ADAPTER), "vLLM processor": ("vllm.logits_processors", VLLM_ADAPTER)}


def look() -> list[Check]:
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
        return [*checks, Check("packaging", WRONG, first_line(error), hint="pip install packaging")]

    accepted = SpecifierSet(own.metadata["Requires-Python"])
    version = ".".join(map(str, sys.version_info[:3]))
    mark = OK if accepted.contains(version) else WRONG
    checks.append(Check("python", mark, version, str(accepted), f"use Python {accepted}" if mark == WRONG else ""))

    for requirement in map(Requirement, own.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            checks.append(_version_check(requirement, optional=False))
        elif requirement.marker.evaluate({"extra": "sglang"}):
            forked = requirement.name == "sglang" and is_fork()
            checks.append(_fork_check(requirement) if forked else _version_check(requirement, optional=True))
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
    version = version_of(name)
    if version is None:
        return Check(name, MISSING if optional else WRONG, "not installed", accepted, install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, WRONG, version, accepted, install)
    return Check(name, OK, version, accepted)


def version_of(name: str) -> str | None:
    """The installed version; None without one, or if an interrupted installation left no metadata."""
    for distribution in (name, f"{name}-cpu"):  # vLLM for CPUs is of another name
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pass
    return None


def is_fork() -> bool:
    """Whether the SGLang here is the LenVM fork (``sglang.srt.lvm`` is there); found without importing it."""
    spec = importlib.util.find_spec("sglang")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(file for folder in folders for file in Path(folder, "srt", "lvm").glob("*.py"))


def _fork_check(requirement: Requirement) -> Check:
    found = f"{version_of(requirement.name) or 'unknown version'}, the LenVM fork"
    hint = f"the fork has no plugins: {FORK_ADAPTER}.install() is for it"
    return Check(requirement.name, OK, found, f"{requirement.specifier}, or the fork", hint)


def _two_tritons() -> list[Check]:
    """Distributions of other names (nightly builds) install the same module: what is imported is a mixture of both."""
    names = sorted(set(metadata.packages_distributions().get("triton", ())))
    if len(names) < 2:
        return []
    found = " and ".join(f"{name} {version_of(name)}" for name in names)
    hint = f"pip uninstall {' '.join(names)}, then install one of them"
    return [Check("module triton", WRONG, f"from {found}", "one distribution", hint)]


def entry_points_of(name: str) -> list[metadata.EntryPoint]:
    """Those of the :data:`ENTRY_POINTS` that are ours."""
    group, module = ENTRY_POINTS[name]
    return [point for point in metadata.entry_points(group=group) if point.value.partition(":")[0] == module]


def _entry_point(name: str) -> Check:
    points, accepted = entry_points_of(name), f"one in {ENTRY_POINTS[name][0]}"
    if not points:
        return Check(name, WRONG, "no entry point", accepted, "pip install it again: its metadata is older")
    if len(points) > 1:
        found = ", ".join(f"{point.name} of {point.dist and point.dist.name}" for point in points)
        hint = "pip uninstall all but one: the engine would be guided twice"
        return Check(name, WRONG, f"entry points {found}", accepted, hint)
    return Check(name, OK, f"entry point {points[0].name} = {points[0].value}")
