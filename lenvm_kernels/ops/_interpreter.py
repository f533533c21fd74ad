"""Triton's interpreter, repaired: matmuls, ``tl.fma``, bf16, e4m3, and the time that a call of a device function takes.

What runs kernels interpreted imports the operators, and they repair it when they are loaded.

The interpreter leaves ``tl.dot`` to numpy, and numpy to a library whose sums run in an order of their own: a row's last
bits depend on the CPU, on the other rows and on where the matrix lies in memory. Here products are added in fp32, one
after the other, to what the dot is accumulated into. So does a GPU for fp32, but for the rounding of products; the
error is of the same size, and large enough to show a kernel that needs more. Sums in fp64, rounded once, would be
closer to the truth than any GPU, and would still depend on their order where they are rounded to fp32.

``tl.fma`` rounds the product, too. Here it rounds once, as on a GPU.

The interpreter (seen on 3.6 to 3.9) keeps bf16 as raw ``uint16`` bits: ``tl.dot`` multiplies the bits, casts to and
from other types than fp32 reinterpret them, and fp32 -> bf16 truncates instead of rounding to nearest even as GPUs do.
The kernels here cast to fp32 before any arithmetic, so only casts and ``tl.dot`` need repair of that.

The interpreter gives a comparison the type of its operands. A scalar one becomes integers where it is broadcast, and
Triton 3.9 rejects a mask of integers. Here a comparison is an ``int1``, as on a GPU.

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


def decoded(handle: interpreter.TensorHandle) -> np.ndarray:
    """The numbers of a tensor, in fp32 where the interpreter keeps them as bits."""
    scalar = handle.dtype.scalar
    return _CODED[scalar][0](handle.data) if scalar in _CODED else handle.data


def dot_in_order(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """``total + a @ b``: products are rounded and added to ``total`` one after the other, from the first of K on.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]``.
        total: ``[..., M, N]``, of the dtype that is computed in.
    """
    total = total.copy()
    product = np.empty_like(total)
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0)[..., None], total.dtype)
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0)[..., None, :], total.dtype)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column, row, out=product)
        np.add(total, product, out=total)
    return total


@functools.cache  # once is enough
def repair_interpreter() -> None:
    """Make matmuls and ``fma`` round as said above, casts decode and encode what is kept as bits, and calls cheap."""
    interpreter.InterpretedFunction.__call__ = _call_device_function
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast_impl, create_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

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

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return handle(dot_in_order(decoded(a), decoded(b), d.data), d.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp = repaired_cast, repaired_fp_to_fp
    builder.create_dot, builder.create_fma = dot, _create_fma
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, _as_int1(getattr(builder, name)))


def _as_int1(create_comparison: Callable) -> Callable:
    def compare(self, lhs, rhs):
        return interpreter.TensorHandle(create_comparison(self, lhs, rhs).data, tl.int1)

    return compare


_interpreters_fma = interpreter.InterpreterBuilder.create_fma


def _create_fma(self, x, y, z):
    """In place of ``InterpreterBuilder.create_fma``."""
    if any(operand.data.dtype != np.float32 for operand in (x, y, z)):
        return _interpreters_fma(self, x, y, z)
    with np.errstate(all="ignore"):
        product, addend = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)  # the product is exact
        total = product + addend
        # What the sum lost (Knuth's two-sum). Where it lost something, an odd last bit keeps the second rounding, to
        # fp32, from taking it for a tie (Boldo and Melquiond, rounding to odd).
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        even = (np.ascontiguousarray(total).view(np.uint64) & np.uint64(1)) == 0
        adjusted = np.where(lost > 0, np.nextafter(total, np.inf), np.nextafter(total, -np.inf))
        total = np.where(np.isfinite(lost) & (lost != 0) & even, adjusted, total)
    return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


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
