"""Fixes for Triton's interpreter (3.6 to 3.9), applied when the operators are imported in interpreter mode.

``tl.dot`` calls a BLAS library, so the last bits of a row depend on the CPU, on the other rows and on the matrix's
address. The replacement adds fp32 products to the accumulator one after the other. A GPU does the same for fp32, except
that it does not round products. This error is large enough to expose a kernel that needs higher precision, which sums
in fp64 would hide.

bf16 is stored as raw ``uint16`` bits: ``tl.dot`` multiplies the bits, casts to and from types other than fp32
reinterpret them, and fp32 -> bf16 truncates instead of rounding to nearest even. The kernels cast to fp32 before any
arithmetic, so only casts and ``tl.dot`` need a fix.

A comparison has the type of its operands. A broadcast scalar comparison becomes an integer tensor, which Triton 3.9
rejects as a mask. The fixed comparison returns ``int1``, as on a GPU.

A launch patches the ``triton.language`` functions visible to its kernel, and each call of a device function patches
them again, which takes a millisecond. The fix patches each module once, and leaves the patch in Triton's own modules.
"""

import functools
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def fp32_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Encode fp32 as bf16 bits (uint16), rounded to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def decoded(handle: interpreter.TensorHandle) -> np.ndarray:
    """The values of a tensor. bf16, stored as bits (uint16), is decoded to fp32."""
    is_bf16 = handle.dtype.scalar == tl.bfloat16
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data


def dot_in_order(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """``total + a @ b``, with products rounded and added to ``total`` one after the other in the order of K.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]``.
        total: ``[..., M, N]``, in the compute dtype.
    """
    total = total.copy()
    product = np.empty_like(total)
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0)[..., None], total.dtype)
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0)[..., None, :], total.dtype)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column, row, out=product)
        np.add(total, product, out=total)
    return total


@functools.cache  # patch only once
def repair_interpreter() -> None:
    interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast_impl = builder.cast_impl

    def repaired_cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast_impl(self, src, dst_type)
        values = decoded(src)
        if target == tl.bfloat16:
            return handle(fp32_to_bf16_bits(values), target)
        return handle(values.astype(interpreter._get_np_dtype(target)), target)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return handle(dot_in_order(decoded(a), decoded(b), d.data), d.dtype.scalar)

    builder.cast_impl, builder.create_dot = repaired_cast, dot
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, _as_int1(getattr(builder, name)))


def _as_int1(create_comparison: Callable) -> Callable:
    def compare(self, lhs, rhs):
        return interpreter.TensorHandle(create_comparison(self, lhs, rhs).data, tl.int1)

    return compare


_patched_modules: set[str] = set()


def _call_device_function(self, *args, **kwargs):
    """Replacement of ``InterpretedFunction.__call__``."""
    if self.fn.__module__ not in _patched_modules:
        interpreter._patch_lang(self.fn)
        _patched_modules.add(self.fn.__module__)
    try:
        return self.rewrite()(*args, **kwargs)
    except interpreter.InterpreterError:
        raise
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
