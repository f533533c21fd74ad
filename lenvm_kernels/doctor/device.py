"""The GPUs and what torch can do with them, Triton's interpreter, and a few operators against their references."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import lenvm_kernels
from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)
GPU_FILES = "/dev/nvidia[0-9]*"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
TOLERANCE = 1e-4  # of an operator's fp32 results of O(1), against the reference in fp64


def look_at_devices() -> list[Check]:
    """A check of each GPU, or of why there is none; of CUDA; and of the interpreter where it is on."""
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
        reason = first_line(error)
    if glob.glob(GPU_FILES) and visible is None:
        mend = "update the NVIDIA driver, or install a torch of its CUDA version"
        if torch.version.cuda is None:
            mend = "install a torch built for CUDA"
        return Check("GPU", WRONG, found, hint=f"this machine has one, but: {reason}; {mend}")
    return Check("GPU", MISSING, found, hint=f"operators run the PyTorch reference ({reason})")


def look_at_kernels() -> list[Check]:
    """A check of each of the :data:`OPERATORS`: compiled on a GPU; else the reference runs."""
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
        return Check(name, WRONG, first_line(error), accepted, hint)
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
