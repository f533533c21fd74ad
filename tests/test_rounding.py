"""The interpreter with a GPU's rounding errors: as large as they should be, and no larger."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter
from tests.helpers.rounding import gpu_rounding

pytestmark = needs_interpreter
SIZE = 4096


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OPERATION: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OPERATION == "div":
        result = x / y
    elif OPERATION == "exp":
        result = tl.exp(x)
    elif OPERATION == "exp2":
        result = tl.exp2(x)
    elif OPERATION == "log":
        result = tl.log(y)
    elif OPERATION == "log2":
        result = tl.log2(y)
    elif OPERATION == "sqrt":
        result = tl.sqrt(y)
    elif OPERATION == "rsqrt":
        result = tl.rsqrt(y)
    elif OPERATION == "div_rn":
        result = tl.div_rn(x, y)
    elif OPERATION == "sqrt_rn":
        result = tl.sqrt_rn(y)
    elif OPERATION == "fma":
        result = tl.fma(x, y, -(x * y))
    elif OPERATION == "polynomial":
        result = x * y + x - y
    tl.store(out_ptr + i, result)


@triton.jit
def _sums_kernel(x_ptr, sum_ptr, cumsum_ptr, dot_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(sum_ptr + tl.arange(0, ROWS), tl.sum(x, axis=1))
    tl.store(cumsum_ptr + offsets, tl.cumsum(x, axis=1))
    square = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(dot_ptr + square, tl.dot(x, x.T, input_precision="ieee"))


def operands():
    """``x`` of either sign up to 80 and ``y`` over many powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(SIZE, generator=generator) - 0.5) * 160
    y = torch.rand(SIZE, generator=generator) * torch.exp2(torch.randint(-50, 50, (SIZE,), generator=generator))
    return x, y


def elementwise(operation, x, y):
    out = torch.empty_like(x)
    _elementwise_kernel[(1,)](x, y, out, x.numel(), operation)
    return out.numpy()


EXACT = {
    "div": lambda x, y: x / y,
    "exp": lambda x, y: np.exp(x),
    "exp2": lambda x, y: np.exp2(x),
    "log": lambda x, y: np.log(y),
    "log2": lambda x, y: np.log2(y),
    "sqrt": lambda x, y: np.sqrt(y),
    "rsqrt": lambda x, y: 1 / np.sqrt(y),
}
ULPS = {"div": 2, "exp": 2, "exp2": 2, "log": 1, "log2": 1, "sqrt": 1, "rsqrt": 2}


@pytest.mark.parametrize("operation", EXACT)
def test_errors_are_as_large_as_documented(operation):
    x, y = operands()
    exact = EXACT[operation](x.double().numpy(), y.double().numpy())
    with gpu_rounding(0):
        actual = elementwise(operation, x, y)
    errors = np.abs(actual - exact) / np.spacing(np.abs(actual))
    largest = ULPS[operation]
    if operation == "exp":  # log2(e) is rounded, and its product with x (up to 80) by half an ulp of 2^6.8
        error_of_exponent = 2.0**-18 + 80 * abs(np.float32(np.log2(np.e)) - np.log2(np.e))
        largest += np.log(2) * error_of_exponent / 2.0**-24
    assert 0.7 * ULPS[operation] < errors.max() <= largest * (1 + 1e-6)
    assert abs(np.mean(np.sign(actual - exact))) < 0.1  # neither direction is favoured


@pytest.mark.parametrize("operation", EXACT)
def test_seeds_give_other_errors_and_one_seed_the_same(operation):
    x, y = operands()
    results = []
    for seed in (0, 0, 1):
        with gpu_rounding(seed):
            results.append(elementwise(operation, x, y))
    assert np.array_equal(results[0], results[1])
    assert (results[0] != results[2]).mean() > 0.2


@pytest.mark.parametrize("operation", ["div_rn", "sqrt_rn", "fma", "polynomial"])
def test_what_a_gpu_rounds_correctly_stays_exact(operation):
    x, y = operands()
    expected = elementwise(operation, x, y)
    with gpu_rounding(0):
        assert np.array_equal(elementwise(operation, x, y), expected)


def test_fma_rounds_once():
    """``x y - round(x y)`` is what the product's rounding lost: never 0 in all places, and exact."""
    x, y = operands()
    lost = x.double() * y.double() - (x * y).double()
    assert np.array_equal(elementwise("fma", x, y), lost.float().numpy())
    assert lost.count_nonzero() > SIZE / 2


def test_special_values():
    x = torch.tensor([0.0, 0.0, torch.inf, -torch.inf, torch.nan, -140.0, 1.0, 1.0])
    y = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 2.0**-140, 1.0, torch.inf])
    with gpu_rounding(0):
        results = {name: elementwise(name, x, y).tolist() for name in EXACT}
    assert results["div"][:4] == [0.0, pytest.approx(torch.nan, nan_ok=True), torch.inf, -torch.inf]
    assert results["div"][6:] == [1.0, 0.0]
    assert results["exp"][:4] == [1.0, 1.0, torch.inf, 0.0] and np.isnan(results["exp"][4])
    assert results["exp2"][:4] == [1.0, 1.0, torch.inf, 0.0] and results["exp2"][5] == 0.0
    assert results["log"][:3] == [0.0, -torch.inf, 0.0] and results["log"][7] == torch.inf
    assert results["log2"][5] == pytest.approx(-140)
    assert results["sqrt"][5] == 0.0 and results["rsqrt"][5] == torch.inf


def test_the_smallest_results_keep_their_sign():
    x = torch.linspace(-120, -80, SIZE)
    with gpu_rounding(0):
        y = elementwise("exp", x, x)
    assert (y >= 0).all() and (y[: SIZE // 4] == 0).all() and (y[-SIZE // 4 :] > 0).all()


def test_sums_take_another_order():
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    exact = x.double()
    expected = exact.sum(1), exact.cumsum(1), exact @ exact.T
    magnitude = exact.abs().sum(1), exact.abs().cumsum(1), exact.abs() @ exact.abs().T

    def sums():
        results = [torch.empty_like(e, dtype=torch.float32) for e in expected]
        _sums_kernel[(1,)](x, *results, 16, 512)
        return results

    plain = sums()
    with gpu_rounding(0):
        noisy = sums()
    # A matmul's sum stays as it is, and its error comes on top.
    for a, b, e, m in zip(plain, noisy, (*expected[:2], plain[2].double()), magnitude, strict=True):
        assert (a != b).float().mean() > 0.2
        assert ((b - e).abs() <= 2.0**-21 * m).all()


def test_restores_the_interpreter():
    x, y = operands()
    before = elementwise("exp", x, y)
    with pytest.raises(RuntimeError), gpu_rounding(0):
        raise RuntimeError
    assert np.array_equal(elementwise("exp", x, y), before)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"), gpu_rounding(-1):
        pass
