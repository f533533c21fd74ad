"""Functions shared by all operators: backend selection, launch options and argument checks."""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64)
# Dtypes that each backend accepts for floating-point tensors, and for tensors that the kernels require in fp32.
FLOATS = {"triton": FLOAT_DTYPES, "reference": (*FLOAT_DTYPES, torch.float64)}
SINGLES = {"triton": (torch.float32,), "reference": (torch.float32, torch.float64)}
BACKENDS = ("auto", "triton", "reference")
# Accepted values of K, the candidates per request.
MAX_CANDIDATES = 64
COLUMNS = (1, 2, 4, 8, 16, 32, MAX_CANDIDATES)

# Read once: Triton decides at import time whether a kernel is compiled or interpreted.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def resolve_backend(backend: str, name: str, tensor: object) -> str:
    """Return ``"triton"`` or ``"reference"`` for a requested backend and an operator's first argument.

    Raises:
        ValueError: unknown backend, or ``triton`` requested for CPU tensors without Triton's interpreter.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda
    if backend == "auto":
        return "triton" if on_gpu else "reference"
    if backend == "triton" and isinstance(tensor, Tensor) and not (on_gpu or INTERPRETED):
        raise ValueError(
            f"{name} must be on a GPU for backend 'triton' (or TRITON_INTERPRET=1 set before Python starts), "
            f"got {tensor.device}"
        )
    return backend


# Triton's versions also work in kernels, but are twenty times as slow on the host.
def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least ``x`` and at least 1."""
    return 1 << (max(x, 1) - 1).bit_length()


def with_row_strides(*tensors: Tensor | None) -> list[Any]:
    """Each tensor followed by its row stride (0 for None), as kernels take them."""
    return [x for tensor in tensors for x in (tensor, 0 if tensor is None else tensor.stride(0))]


def row_strides(columns: Any) -> Any:
    """The row strides of a named tuple's tensors, as a tuple of the same type, so that kernels use the same names."""
    return type(columns)(*(x.stride(0) for x in columns))


# Set by bench.codegen to compile for a GPU that is not present.
ARCHITECTURE = ""


@torch.compiler.assume_constant_result  # torch.compile does not trace cached functions
def architecture() -> str:
    """Architecture for launch configurations: ``hip`` for AMD GPUs, e.g. ``sm_90`` for NVIDIA, empty without a GPU."""
    return ARCHITECTURE or _architecture_at_hand()


@functools.cache
def _architecture_at_hand() -> str:
    if torch.version.hip:
        return "hip"
    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


# LENVM_PDL=0 disables programmatic dependent launch.
_PDL_IS_OFF = os.environ.get("LENVM_PDL", "1") == "0"


def overlapping() -> dict[str, bool]:
    """Launch options of kernels that begin with ``wait_for_inputs``: programmatic dependent launch, from sm_90 on.

    On an H200, a step in a CUDA graph takes 1,835 us with it and 1,950 us without for one request, and 3,536 us and
    3,557 us for 64."""
    name = architecture()
    on = not _PDL_IS_OFF and name.startswith("sm_") and int(name[3:]) >= 90
    return {"OVERLAPS": True, "launch_pdl": True} if on else {"OVERLAPS": False}


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    unit_stride: bool = True,
) -> Tensor:
    """Check a tensor argument and return it. ``None`` accepts any size of a dimension, or any device.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong dtype, shape, device or strides; the message has the accepted and the actual values.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {_wanted(dtypes, shape, device)}, got {type(tensor).__name__}")
    fits = tensor.dim() == len(shape) and all(n in (None, size) for size, n in zip(tensor.shape, shape, strict=True))
    is_dtype = tensor.dtype is dtypes or (type(dtypes) is tuple and tensor.dtype in dtypes)
    if not (is_dtype and fits and (device is None or tensor.device == device)):
        raise ValueError(
            f"{name} must be {_wanted(dtypes, shape, device)}, got {_dtype_name(tensor.dtype)} "
            f"{_shape_name(tensor.shape)} on {tensor.device}"
        )
    if unit_stride and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tuple(tensor.stride())}")
    return tensor


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``value`` is an int from ``least`` to ``most``."""
    wanted = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_number(name: str, value: object, accepted: str = "a finite number", above: float = -math.inf) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number larger than ``above``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def per_request(name: str, value: Tensor | float, dtype: torch.dtype, requests: int, device: torch.device) -> Tensor:
    """The contiguous ``[requests]`` tensor of an argument that is a tensor, or a number for all requests.

    Raises TypeError or ValueError for other arguments."""
    if isinstance(value, Tensor):
        # A column of a GuidanceTable is strided.
        return check_tensor(name, value, dtypes=dtype, shape=(requests,), device=device, unit_stride=False).contiguous()
    kinds = (int, float) if dtype.is_floating_point else int
    if isinstance(value, bool) or not isinstance(value, kinds):
        number = "a number" if dtype.is_floating_point else "an integer"
        raise TypeError(
            f"{name} must be {number} or a tensor {_wanted(dtype, (requests,), device)}, got {type(value).__name__}"
        )
    if not dtype.is_floating_point and not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} must be an int32, got {value}")
    return torch.full((requests,), value, dtype=dtype, device=device)


def _wanted(
    dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None], device: torch.device | None
) -> str:
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    return f"{'|'.join(map(_dtype_name, dtypes))} {_shape_name(shape)}" + ("" if device is None else f" on {device}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_name(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"
