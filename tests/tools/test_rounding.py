"""The interpreter with a GPU's rounding errors: as large as documented, and no larger."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter
from tests.helpers.rounding import gpu_rounding

pytestmark = needs_interpreter
SIZE, NAN, INF, SUBNORMAL = 4096, np.nan, np.inf, 2.0**-140
# log2(e) is rounded, and its product with x (up to 80) by half an ulp of 2^6.8.
EXP_ULPS = 2 + np.log(2) * (2.0**-18 + 80 * abs(np.float32(np.log2(np.e)) - np.log2(np.e))) / 2.0**-24
# Triton's function, its exact value, its largest error in ulp, and special operands (x, y) with their results.
FUNCTIONS = {
    "div": (
        lambda x, y: x / y,
        lambda x, y: x / y,
        2,
        [(0, 1, 0), (0, 0, NAN), (-INF, 2, -INF), (1, 1, 1), (1, INF, 0)],
    ),
    "exp": (lambda x, y: tl.exp(x), lambda x, y: np.exp(x), EXP_ULPS, [(0, 1, 1), (INF, 1, INF), (-INF, 1, 0)]),
    "exp2": (lambda x, y: tl.exp2(x), lambda x, y: np.exp2(x), 2, [(0, 1, 1), (INF, 1, INF), (-140, 1, 0)]),
    "log": (lambda x, y: tl.log(y), lambda x, y: np.log(y), 1, [(1, 1, 0), (1, 0, -INF), (1, INF, INF), (1, -1, NAN)]),
    "log2": (lambda x, y: tl.log2(y), lambda x, y: np.log2(y), 1, [(1, SUBNORMAL, -140), (1, 1, 0), (1, INF, INF)]),
    "sqrt": (lambda x, y: tl.sqrt(y), lambda x, y: np.sqrt(y), 1, [(1, SUBNORMAL, 0), (1, INF, INF)]),
    "rsqrt": (lambda x, y: tl.rsqrt(y), lambda x, y: 1 / np.sqrt(y), 2, [(1, SUBNORMAL, INF), (1, INF, 0)]),
}
EXACT = {
    "div_rn": lambda x, y: tl.div_rn(x, y),
    "sqrt_rn": lambda x, y: tl.sqrt_rn(y),
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
    return x, torch.rand(SIZE, generator=generator) * torch.exp2(torch.randint(-50, 50, (SIZE,), generator=generator))


def computed(function, x, y, seed=0):
    """The function in the interpreter; without rounding errors if ``seed`` is None."""
    out = torch.empty_like(x)
    if seed is None:
        _elementwise_kernel[(1,)](x, y, out, x.numel(), function)
    else:
        with gpu_rounding(seed):
            _elementwise_kernel[(1,)](x, y, out, x.numel(), function)
    return out.numpy()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_as_large_as_documented(name):
    (x, y), (function, exact, ulps, _) = operands(), FUNCTIONS[name]
    actual, expected = computed(function, x, y), exact(x.double().numpy(), y.double().numpy())
    assert 0.7 * int(ulps) < (np.abs(actual - expected) / np.spacing(np.abs(actual))).max() <= ulps * (1 + 1e-6)
    assert abs(np.mean(np.sign(actual - expected))) < 0.1  # neither direction is favoured
    assert np.array_equal(computed(function, x, y), actual)
    assert (computed(function, x, y, seed=1) != actual).mean() > 0.2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name):
    function, _, _, special = FUNCTIONS[name]
    x, y, expected = torch.tensor([*special, *[(1, 1, NAN)] * (8 - len(special))], dtype=torch.float32).T.contiguous()
    found = computed(function, x, y)[: len(special)]
    np.testing.assert_allclose(found, expected[: len(special)], rtol=1e-6)


def test_smallest_results_keep_their_sign():
    y = computed(FUNCTIONS["exp"][0], *[torch.linspace(-120, -80, SIZE)] * 2)
    assert (y >= 0).all() and (y[: SIZE // 4] == 0).all() and (y[-SIZE // 4 :] > 0).all()


@pytest.mark.parametrize("name", EXACT)
def test_correctly_rounded_functions_stay_exact(name):
    x, y = operands()
    found = computed(EXACT[name], x, y)
    assert np.array_equal(found, computed(EXACT[name], x, y, seed=None))
    if name == "fma":  # ``x y - round(x y)`` is the rounding error of the product: exact, and mostly not 0
        lost = x.double() * y.double() - (x * y).double()
        assert np.array_equal(found, lost.float().numpy()) and lost.count_nonzero() > SIZE / 2


def test_sums_take_another_order():
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    exact, magnitude = ((y.sum(1), y.cumsum(1), y @ y.T) for y in (x.double(), x.double().abs()))
    plain, noisy = ([torch.empty_like(y, dtype=torch.float32) for y in exact] for _ in range(2))
    _sums_kernel[(1,)](x, *plain, 16, 512)
    with gpu_rounding(0):
        _sums_kernel[(1,)](x, *noisy, 16, 512)
    # A matmul keeps the order of its sum, and gets an additional error.
    for before, after, right, size in zip(plain, noisy, (*exact[:2], plain[2].double()), magnitude, strict=True):
        assert (before != after).float().mean() > 0.2
        assert ((after - right).abs() <= 2.0**-21 * size).all()
