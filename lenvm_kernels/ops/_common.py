"""What every operator shares: choice of the backend, and checks of arguments before any launch."""

import os
from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "triton", "reference")

# Read once: Triton decides at import time whether a kernel is compiled or interpreted.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return ``"triton"`` or ``"reference"`` for a requested backend and the device of the tensors.

    ``auto`` is the Triton kernels for GPU tensors and the reference for CPU tensors.

    Raises:
        ValueError: unknown backend, or ``triton`` asked for CPU tensors without Triton's interpreter.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if backend == "triton" and device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            "backend 'triton' needs GPU tensors (or TRITON_INTERPRET=1 set before Python starts), "
            f"got tensors on {device}"
        )
    return backend


def fitting_stages(stages: int) -> int:
    """Pipeline stages of a matmul whose tiles take 24 or 32 KB: on AMD's GPUs, with 64 KB a block, no more than three
    (one of which is in registers)."""
    return min(stages, 3) if torch.version.hip else stages


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    unit_stride: bool = True,
) -> torch.Tensor:
    """Check one tensor argument; return it.

    Args:
        name: the argument's name in the public signature, for the message.
        tensor: what the caller passed.
        dtypes: accepted dtype or dtypes.
        shape: accepted size of each dimension; ``None`` accepts any size.
        device: device it has to be on (``None``: any).
        unit_stride: the last dimension has to be contiguous.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong dtype, shape, device or strides. The message says what is accepted and what came.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    wanted = f"{'|'.join(map(_dtype_name, dtypes))} {_shape_name(shape)}" + ("" if device is None else f" on {device}")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {wanted}, got {type(tensor).__name__}")
    fits = len(tensor.shape) == len(shape) and all(
        w is None or w == n for w, n in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits or (device is not None and tensor.device != device):
        raise ValueError(
            f"{name} must be {wanted}, got {_dtype_name(tensor.dtype)} {_shape_name(tensor.shape)} on {tensor.device}"
        )
    if unit_stride and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tuple(tensor.stride())}")
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_name(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"
