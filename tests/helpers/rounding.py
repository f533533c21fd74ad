"""fp32 arithmetic in Triton's interpreter with errors as large as a GPU's.

The interpreter computes with numpy, which rounds fp32 better than compiled kernels do. ``pytest --rounding-seed N`` (or
:func:`gpu_rounding`) gives these operations an error within the bounds that CUDA documents. Their instructions are
those of the PTX that Triton 3.7 generates for sm_90:

    x / y      div.full.f32       2 ulp
    exp(x)     ex2.approx.f32     2 ulp, of 2 to the power of x * log2(e) rounded to fp32
    exp2(x)    ex2.approx.ftz     2 ulp; subnormal operands and results are 0
    log, log2  polynomials        1 ulp
    sqrt       sqrt.approx.ftz    1 ulp; subnormal operands are 0
    rsqrt      rsqrt.approx.ftz   2 ulp; subnormal operands are 0
    sum        another order: up to 8 elements per thread sequentially, then the threads' sums in pairs
    cumsum     the same, but the threads' sums sequentially
    dot        2^-23 of the sum of the magnitudes: tensor cores truncate where they align products

Sums, differences, products, ``fma``, ``div_rn`` and ``sqrt_rn`` are correctly rounded on a GPU and are not changed.
Errors are a fixed function of the seed and the operands, so equal rows stay bitwise identical.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from lenvm_kernels.ops._interpreter import decoded, dot_in_order

_SMALLEST_NORMAL = np.float32(2.0**-126)
_ELEMENTS_PER_THREAD = 8


def _flush(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers by zeros of the same sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp2((x * np.float32(np.log2(np.e))).astype(np.float64))


def _exact(function: Callable) -> Callable:
    return lambda *operands: function(*(x.astype(np.float64) for x in operands))


# Builder method: (value in fp64, error in ulp, whether subnormal operands are 0, whether subnormal results are 0)
_ELEMENTWISE = {
    "create_fdiv": (_exact(np.divide), 2, False, False),
    "create_exp": (_exp, 2, False, False),
    "create_exp2": (_exact(np.exp2), 2, True, True),
    "create_log": (_exact(np.log), 1, False, False),
    "create_log2": (_exact(np.log2), 1, False, False),
    "create_sqrt": (_exact(np.sqrt), 1, True, False),
    "create_rsqrt": (_exact(lambda x: 1 / np.sqrt(x)), 2, True, False),
}


def _noise(seed: int, name: str, *operands: np.ndarray) -> np.ndarray:
    """Numbers in [-1, 1), an elementwise fixed function of the arguments (a 64-bit hash)."""
    state = np.uint64(int.from_bytes(name.encode()[-8:], "little"))
    with np.errstate(over="ignore"):
        for word in (np.uint64(seed), *(np.asarray(x, np.float32).view(np.uint32).astype(np.uint64) for x in operands)):
            state = (state ^ word) * np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            state = state ^ (state >> np.uint64(29))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1


def _elementwise(seed: int, name: str) -> Callable:
    value_of, ulps, flush_operands, flush_result = _ELEMENTWISE[name]
    numpy_version = getattr(interpreter.InterpreterBuilder, name)

    def compute(self, *handles):
        if any(x.data.dtype != np.float32 for x in handles):
            return numpy_version(self, *handles)
        operands = np.broadcast_arrays(*(_flush(x.data) if flush_operands else x.data for x in handles))
        with np.errstate(all="ignore"):
            value = value_of(*operands)
            error = (ulps - 0.5) * np.spacing(np.abs(value.astype(np.float32))).astype(np.float64)
            error = np.minimum(error, np.abs(value))  # a GPU never returns the opposite sign
            inexact = np.isfinite(error) & (value != 0) & (value != 1)  # a GPU returns 0 and 1 exactly
            result = (value + np.where(inexact, error * _noise(seed, name, *operands), 0)).astype(np.float32)
        return interpreter.TensorHandle(_flush(result) if flush_result else result, handles[0].dtype.scalar)

    return compute


def _dot(seed: int) -> Callable:
    numpy_version = interpreter.InterpreterBuilder.create_dot

    def compute(self, a, b, d, *options):
        result = numpy_version(self, a, b, d, *options)
        if result.data.dtype != np.float32:
            return result
        with np.errstate(all="ignore"):
            magnitude = dot_in_order(np.abs(decoded(a)), np.abs(decoded(b)), np.abs(d.data))
            error = 2.0**-23 * magnitude * _noise(seed, "dot", result.data, magnitude)
            noisy = (result.data + np.where(np.isfinite(error), error, 0)).astype(np.float32)
        return interpreter.TensorHandle(noisy, result.dtype)

    return compute


def _sum(seed: int) -> Callable:
    numpy_version = interpreter.ReduceOps.sum

    def compute(self, input):
        values = input.handle.data
        if values.dtype != np.float32:
            return numpy_version(self, input)
        axis = 0 if self.axis is None else self.axis
        x = np.moveaxis(values.reshape(-1) if self.axis is None else values, axis, -1)
        n = x.shape[-1]
        x = x[..., np.random.default_rng((seed, n)).permutation(n)]
        with np.errstate(all="ignore"):
            x = x.reshape(*x.shape[:-1], -1, min(n, _ELEMENTS_PER_THREAD))  # n is a power of two
            x = np.add.accumulate(x, axis=-1)[..., -1]
            while x.shape[-1] > 1:
                x = x[..., 0::2] + x[..., 1::2]
        total = x[..., 0]
        if self.keep_dims:
            total = total.reshape((1,) * values.ndim) if self.axis is None else np.expand_dims(total, axis)
        return self.to_tensor(total, input.dtype)

    return compute


def _cumsum() -> Callable:
    numpy_version = interpreter.ScanOps.cumsum

    def compute(self, input):
        values = input.handle.data
        if values.dtype != np.float32:
            return numpy_version(self, input)
        x = np.moveaxis(values, self.axis, -1)
        with np.errstate(all="ignore"):
            threads = np.add.accumulate(x.reshape(*x.shape[:-1], -1, min(x.shape[-1], _ELEMENTS_PER_THREAD)), axis=-1)
            before = np.add.accumulate(threads[..., -1], axis=-1)[..., :-1, None]
            threads[..., 1:, :] += before
        return [self.to_tensor(np.moveaxis(threads.reshape(x.shape), -1, self.axis), input.dtype)]

    return compute


@contextmanager
def gpu_rounding(seed: int) -> Iterator[None]:
    """Give the interpreter's fp32 arithmetic the errors above, which depend on ``seed``.

    Raises:
        ValueError: ``seed`` is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    replaced = [(interpreter.InterpreterBuilder, name, _elementwise(seed, name)) for name in _ELEMENTWISE]
    replaced.append((interpreter.InterpreterBuilder, "create_dot", _dot(seed)))
    replaced.append((interpreter.ReduceOps, "sum", _sum(seed)))
    replaced.append((interpreter.ScanOps, "cumsum", _cumsum()))
    with ExitStack() as patches:
        for patched in replaced:
            patches.enter_context(mock.patch.object(*patched))
        yield
