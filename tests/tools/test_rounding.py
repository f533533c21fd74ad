"""The interpreter with a GPU's rounding errors: as large as documented, and no larger."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter
from tests.helpers.rounding import gpu_rounding

pytestmark = needs_interpreter
SIZE = 4096
# By name: Triton's function, its exact value, and its largest error in ulp.
FUNCTIONS = {
    "div": (lambda x, y: x / y, lambda x, y: x / y, 2),
    "exp": (lambda x, y: tl.exp(x), lambda x, y: np.exp(x), 2),
    "exp2": (lambda x, y: tl.exp2(x), lambda x, y: np.exp2(x), 2),
    "log": (lambda x, y: tl.log(y), lambda x, y: np.log(y), 1),
    "log2": (lambda x, y: tl.log2(y), lambda x, y: np.log2(y), 1),
    "sqrt": (lambda x, y: tl.sqrt(y), lambda x, y: np.sqrt(y), 1),
    "rsqrt": (lambda x, y: tl.rsqrt(y), lambda x, y: 1 / np.sqrt(y), 2),
}
EXACT = {
    "div_rn": lambda x, y: tl.div_rn(x, y),
    "sqrt_rn": lambda x, y: tl.sqrt_rn(y),
    "fma": lambda x, y: tl.fma(x, y, -(x * y)),
    "polynomial": lambda x, y: x * y + x - y,
}


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, FUNCTION: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@triton.jit
def _sums_kernel(x_ptr, sum_ptr, cumsum_ptr, dot_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(sum_ptr + tl.arange(0, ROWS), tl.sum(x, axis=1))
    tl.store(cumsum_ptr + offsets, tl.cumsum(x, axis=1))
    square = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(dot_ptr + square, tl.dot(x, x.T, input_precision="ieee"))


def operands():
    """``x`` of both signs up to 80, and ``y`` over many powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(SIZE, generator=generator) - 0.5) * 160
    y = torch.rand(SIZE, generator=generator) * torch.exp2(torch.randint(-50, 50, (SIZE,), generator=generator))
    return x, y


def elementwise(name, x, y):
    out = torch.empty_like(x)
    function = EXACT[name] if name in EXACT else FUNCTIONS[name][0]
    _elementwise_kernel[(1,)](x, y, out, x.numel(), function)
    return out.numpy()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_as_large_as_documented(name):
    x, y = operands()
    _, function, ulps = FUNCTIONS[name]
    exact = function(x.double().numpy(), y.double().numpy())
    with gpu_rounding(0):
        actual = elementwise(name, x, y)
    errors = np.abs(actual - exact) / np.spacing(np.abs(actual))
    largest = ulps
    if name == "exp":  # log2(e) is rounded, and its product with x (up to 80) by half an ulp of 2^6.8
        error_of_exponent = 2.0**-18 + 80 * abs(np.float32(np.log2(np.e)) - np.log2(np.e))
        largest += np.log(2) * error_of_exponent / 2.0**-24
    assert 0.7 * ulps < errors.max() <= largest * (1 + 1e-6)
    assert abs(np.mean(np.sign(actual - exact))) < 0.1  # neither direction is favoured


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_depend_on_the_seed_alone(name):
    results = []
    for seed in (0, 0, 1):
        with gpu_rounding(seed):
            results.append(elementwise(name, *operands()))
    assert np.array_equal(results[0], results[1])
    assert (results[0] != results[2]).mean() > 0.2


@pytest.mark.parametrize("name", EXACT)
def test_correctly_rounded_functions_stay_exact(name):
    expected = elementwise(name, *operands())
    with gpu_rounding(0):
        assert np.array_equal(elementwise(name, *operands()), expected)


def test_fma_rounds_once():
    """``x y - round(x y)`` is the rounding error of the product: it is exact, and mostly not 0."""
    x, y = operands()
    lost = x.double() * y.double() - (x * y).double()
    assert np.array_equal(elementwise("fma", x, y), lost.float().numpy())
    assert lost.count_nonzero() > SIZE / 2


NAN, INF = np.nan, np.inf
SMALL = 2.0**-140  # a subnormal number


@pytest.mark.parametrize(
    ("name", "x", "y", "expected"),
    [
        ("div", [0, 0, INF, -INF, 1, 1], [1, 0, 1, 2, 1, INF], [0, NAN, INF, -INF, 1, 0]),
        ("exp", [0, INF, -INF, NAN], [1, 1, 1, 1], [1, INF, 0, NAN]),
        ("exp2", [0, INF, -INF, -140], [1, 1, 1, 1], [1, INF, 0, 0]),
        ("log", [1, 1, 1, 1], [1, 0, INF, -1], [0, -INF, INF, NAN]),
        ("log2", [1, 1, 1, 1], [SMALL, 0, 1, INF], [-140, -INF, 0, INF]),
        ("sqrt", [1, 1], [SMALL, INF], [0, INF]),
        ("rsqrt", [1, 1], [SMALL, INF], [INF, 0]),
    ],
)
def test_special_values(name, x, y, expected):
    size = triton.next_power_of_2(len(x))
    x, y = (torch.tensor(values + [1] * (size - len(values)), dtype=torch.float32) for values in (x, y))
    with gpu_rounding(0):
        results = elementwise(name, x, y)[: len(expected)]
    np.testing.assert_allclose(results, expected, rtol=1e-6)


def test_smallest_results_keep_their_sign():
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
    # A matmul keeps the order of its sum, and gets an additional error.
    for a, b, e, m in zip(plain, noisy, (*expected[:2], plain[2].double()), magnitude, strict=True):
        assert (a != b).float().mean() > 0.2
        assert ((b - e).abs() <= 2.0**-21 * m).all()


def test_interpreter_is_restored():
    x, y = operands()
    before = elementwise("exp", x, y)
    with pytest.raises(RuntimeError), gpu_rounding(0):
        raise RuntimeError
    assert np.array_equal(elementwise("exp", x, y), before)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"), gpu_rounding(-1):
        pass
