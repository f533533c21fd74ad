"""The GPUs and what torch can do with them, and Triton's interpreter."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line

MIN_CAPABILITY = (8, 0)
GPU_FILES = "/dev/nvidia[0-9]*"
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def look() -> list[Check]:
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
