"""Interception of Triton launches: record them, skip them, or compile them for another GPU."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import lenvm_kernels.ops
import lenvm_kernels.ops._common as ops_common

KINDS = (JITFunction, InterpretedFunction)


def kernels() -> dict[str, object]:
    """The kernels of all operators, by name."""
    names = [module.name for module in pkgutil.walk_packages(lenvm_kernels.ops.__path__, "lenvm_kernels.ops.")]
    modules = map(importlib.import_module, names)
    functions = [(name, value) for module in modules for name, value in vars(module).items()]
    return {name: value for name, value in functions if name.endswith("_kernel") and isinstance(value, KINDS)}


@contextmanager
def intercept_launches(handle: Callable[[str, partial], object]) -> Iterator[None]:
    """Context in which ``handle(name, launch)`` replaces all launches of kernels, compiled or interpreted.

    Args:
        handle: called with the kernel's name and a ``partial`` that launches it. ``launch.args`` are the kernel and its
            arguments (tensors, numbers, None, or tuples thereof); ``launch.keywords`` are keyword arguments, the grid
            and the options. The launch returns the result of ``handle``.
    """

    def replacement(run: Callable) -> Callable:
        def intercepted(kernel, /, *args, **keywords):
            return handle(kernel.fn.__name__, partial(run, kernel, *args, **keywords))

        return intercepted

    with ExitStack() as patches:
        for kind in KINDS:
            patches.enter_context(mock.patch.object(kind, "run", replacement(kind.run)))
        yield


@contextmanager
def kernels_on_cpu(architecture: str = "") -> Iterator[None]:
    """Context in which operators with the backend ``triton`` accept CPU tensors up to the launches of their kernels.

    Args:
        architecture: GPU of the launch configurations, see :mod:`lenvm_kernels.ops._common`.
    """
    with (
        mock.patch.object(ops_common, "INTERPRETED", True),
        mock.patch.object(ops_common, "ARCHITECTURE", architecture),
    ):
        yield


@contextmanager
def empty_is_zero(random: bool = False) -> Iterator[None]:
    """Context in which ``torch.empty`` returns zeros, because outputs of skipped kernels may be used as indices.

    With ``random``, so do ``torch.rand`` and ``torch.randn``, because their values are unused and zeros are faster."""
    with ExitStack() as patches:
        for name in ("empty", *(("rand", "randn") if random else ())):
            patches.enter_context(mock.patch.object(torch, name, torch.zeros))
        patches.enter_context(mock.patch.object(torch, "empty_like", torch.zeros_like))
        yield


@contextmanager
def without_kernels() -> Iterator[list[str]]:
    """Context in which operators on CPU tensors skip launches; yields the names of skipped kernels."""
    launches: list[str] = []
    with kernels_on_cpu(), empty_is_zero(), intercept_launches(lambda name, launch: launches.append(name)):
        yield launches


@contextmanager
def targeting(target: GPUTarget) -> Iterator[None]:
    """Context in which operators on CPU tensors act as on ``target`` up to the launches. Not with TRITON_INTERPRET."""
    driver = SimpleNamespace(  # the part of a Triton driver needed for compilation
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    triton.runtime.driver.set_active(driver)
    with kernels_on_cpu("hip" if target.backend == "hip" else f"sm_{target.arch}"), empty_is_zero():
        yield


@contextmanager
def compiling_for(target: GPUTarget, once: bool = False) -> Iterator[list[tuple[str, object]]]:
    """Context in which operators on CPU tensors only compile for ``target``; yields (name, compiled kernel) pairs.

    With ``once``, only the first launch of each kernel compiles."""
    compiled, names = [], set()

    def compile_only(name: str, launch: partial) -> object:
        if once and name in names:
            return None
        names.add(name)
        kernel = launch(warmup=True)
        compiled.append((name, kernel))
        return kernel

    with targeting(target), intercept_launches(compile_only):
        yield compiled
