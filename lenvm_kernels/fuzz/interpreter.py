"""Triton's interpreter, repaired: bf16, e4m3, and the time that a call of a device function takes.

The interpreter (seen on 3.6 to 3.9) keeps bf16 as raw ``uint16`` bits: ``tl.dot`` multiplies the bits, casts to and
from other types than fp32 reinterpret them, and fp32 -> bf16 truncates instead of rounding to nearest even as GPUs do.
The kernels here cast to fp32 before any arithmetic, so only casts and ``tl.dot`` need repair.

It keeps e4m3 as ``uint8`` bits, reads NaN as 480, and rounds up where it is to round to even: to half the number where
that carries into the exponent.

A launch replaces the functions that its kernel sees of ``triton.language`` by those of the interpreter. Each call of a
device function does so again, which takes a millisecond, more than most device functions do. Here it does so once for
each module: what device functions of Triton's own modules see, stays replaced from then on.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def bf16_bits_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Decode bf16 bits (uint16) into fp32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Encode fp32 as bf16 bits (uint16), rounding to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def fp32_to_e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Encode fp32 as e4m3 bits (uint8), rounding to nearest even and to 448 beyond it, as GPUs do; NaN stays NaN."""
    clamped = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


# What the interpreter keeps as bits: how to decode it into fp32, and to encode it.
_CODED: dict[tl.dtype, tuple[Callable, Callable]] = {
    tl.bfloat16: (bf16_bits_to_fp32, fp32_to_bf16_bits),
    tl.float8e4nv: (_E4M3.__getitem__, fp32_to_e4m3_bits),
}


@functools.cache  # once is enough
def repair_interpreter() -> None:
    """Make casts and ``tl.dot`` decode what is kept as bits to fp32, casts encode it rightly, and calls cheap."""
    interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast_impl, create_fp_to_fp, create_dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def repaired_cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not {source, target} & _CODED.keys():
            return cast_impl(self, src, dst_type)
        values = _CODED[source][0](src.data) if source in _CODED else src.data
        if target in _CODED:
            return handle(_CODED[target][1](values), target)
        return handle(values.astype(interpreter._get_np_dtype(target)), target)

    def repaired_fp_to_fp(self, src, dst_type, rounding_mode):  # to and from 8 bits
        if tl.float8e4nv in (src.dtype.scalar, dst_type.scalar):
            return repaired_cast(self, src, dst_type)
        return create_fp_to_fp(self, src, dst_type, rounding_mode)

    def repaired_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (handle(bf16_bits_to_fp32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = repaired_cast, repaired_fp_to_fp, repaired_dot


_patched_modules: set[str] = set()


def _call_device_function(self, *args, **kwargs):
    """In place of ``InterpretedFunction.__call__``."""
    if self.fn.__module__ not in _patched_modules:
        interpreter._patch_lang(self.fn)
        _patched_modules.add(self.fn.__module__)
    try:
        return self.rewrite()(*args, **kwargs)
    except interpreter.InterpreterError:
        raise
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
