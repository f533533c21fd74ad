"""fp32 arithmetic in Triton's interpreter with errors as large as a GPU's.

The interpreter computes with numpy, which rounds fp32 better than compiled kernels. ``pytest --rounding-seed N`` (or
:func:`gpu_rounding`) gives these operations an error within the bounds documented for CUDA. The table lists the
instructions in the PTX that Triton 3.7 generates for sm_90:

    x / y      div.full.f32       2 ulp
    exp(x)     ex2.approx.f32     2 ulp, of 2 to the power of x * log2(e) rounded to fp32
    exp2(x)    ex2.approx.ftz     2 ulp; subnormal operands and results are 0
    log, log2  polynomials        1 ulp
    sqrt       sqrt.approx.ftz    1 ulp; subnormal operands are 0
    rsqrt      rsqrt.approx.ftz   2 ulp; subnormal operands are 0
    sum        another order: up to 8 elements per thread sequentially, then the threads' sums in pairs
    cumsum     the same, but the threads' sums sequentially
    dot        2^-23 of the sum of the magnitudes: tensor cores truncate where they align products

Sums, differences, products, ``div_rn`` and ``sqrt_rn`` are correctly rounded on a GPU and are not changed.
Errors are a fixed function of the seed and the operands, so equal rows stay bitwise identical.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from lenvm_kernels.ops._interpreter import decoded, dot_in_order

ELEMENTS_PER_THREAD = 8
# Method of the interpreter's builder: (value in fp64, error in ulp, whether subnormal operands are 0)
ELEMENTWISE = {
    "create_fdiv": (np.divide, 2, False),
    "create_exp": (lambda x: np.exp2((x.astype(np.float32) * np.float32(np.log2(np.e))).astype(np.float64)), 2, False),
    "create_exp2": (np.exp2, 2, True),
    "create_log": (np.log, 1, False),
    "create_log2": (np.log2, 1, False),
    "create_sqrt": (np.sqrt, 1, True),
    "create_rsqrt": (lambda x: 1 / np.sqrt(x), 2, True),
}
Method = Callable  # a method of the interpreter


def _flush(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers by zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _noise(seed: int, name: str, *operands: np.ndarray) -> np.ndarray:
    """Numbers in [-1, 1), an elementwise fixed function of the arguments (a 64-bit hash)."""
    state = np.uint64(int.from_bytes(name.encode()[-8:], "little"))
    with np.errstate(over="ignore"):
        for word in (np.uint64(seed), *(np.asarray(x, np.float32).view(np.uint32).astype(np.uint64) for x in operands)):
            state = (state ^ word) * np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            state = state ^ (state >> np.uint64(29))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1


def _elementwise(seed: int, name: str, original: Method) -> Method:
    value_of, ulps, flush_operands = ELEMENTWISE[name]

    def compute(self, *handles):
        if any(x.data.dtype != np.float32 for x in handles):
            return original(self, *handles)
        operands = np.broadcast_arrays(*(_flush(x.data) if flush_operands else x.data for x in handles))
        value = value_of(*(x.astype(np.float64) for x in operands))
        error = (ulps - 0.5) * np.spacing(np.abs(value.astype(np.float32))).astype(np.float64)
        error = np.minimum(error, np.abs(value))  # a GPU never returns the opposite sign
        inexact = np.isfinite(error) & (value != 0) & (value != 1)  # a GPU returns 0 and 1 exactly
        result = (value + np.where(inexact, error * _noise(seed, name, *operands), 0)).astype(np.float32)
        return interpreter.TensorHandle(_flush(result) if name == "create_exp2" else result, handles[0].dtype.scalar)

    return compute


def _dot(seed: int, name: str, original: Method) -> Method:
    def compute(self, a, b, d, *options):
        result = original(self, a, b, d, *options)
        if result.data.dtype != np.float32:
            return result
        magnitude = dot_in_order(np.abs(decoded(a)), np.abs(decoded(b)), np.abs(d.data))
        error = 2.0**-23 * magnitude * _noise(seed, name, result.data, magnitude)
        noisy = (result.data + np.where(np.isfinite(error), error, 0)).astype(np.float32)
        return interpreter.TensorHandle(noisy, result.dtype)

    return compute


def _running_sums(x: np.ndarray) -> np.ndarray:
    """Running sums of each thread ``[..., threads, elements]`` over the last axis, with a power of two as size."""
    return np.add.accumulate(x.reshape(*x.shape[:-1], -1, min(x.shape[-1], ELEMENTS_PER_THREAD)), axis=-1)


def _sum(seed: int, name: str, original: Method) -> Method:
    def compute(self, input):
        values = input.handle.data
        if values.dtype != np.float32:
            return original(self, input)
        x = values.reshape(-1) if self.axis is None else np.moveaxis(values, self.axis, -1)
        x = _running_sums(x[..., np.random.default_rng((seed, x.shape[-1])).permutation(x.shape[-1])])[..., -1]
        while x.shape[-1] > 1:
            x = x[..., 0::2] + x[..., 1::2]
        axes = tuple(range(values.ndim)) if self.axis is None else self.axis
        return self.to_tensor(np.expand_dims(x[..., 0], axes) if self.keep_dims else x[..., 0], input.dtype)

    return compute


def _cumsum(seed: int, name: str, original: Method) -> Method:
    def compute(self, input):
        values = input.handle.data
        if values.dtype != np.float32:
            return original(self, input)
        x = np.moveaxis(values, self.axis, -1)
        threads = _running_sums(x)
        threads[..., 1:, :] += np.add.accumulate(threads[..., -1], axis=-1)[..., :-1, None]
        return [self.to_tensor(np.moveaxis(threads.reshape(x.shape), -1, self.axis), input.dtype)]

    return compute


@contextmanager
def gpu_rounding(seed: int) -> Iterator[None]:
    """Give the interpreter's fp32 arithmetic the errors above, which depend on ``seed >= 0``."""
    replaced = [(interpreter.InterpreterBuilder, name, _elementwise) for name in ELEMENTWISE]
    replaced += [(interpreter.InterpreterBuilder, "create_dot", _dot)]
    replaced += [(interpreter.ReduceOps, "sum", _sum), (interpreter.ScanOps, "cumsum", _cumsum)]
    with ExitStack() as patches:
        for owner, name, noisy in replaced:
            method = noisy(seed, name, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, np.errstate(all="ignore")(method)))
        yield
