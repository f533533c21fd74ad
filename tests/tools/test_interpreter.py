"""Triton's interpreter: sums of matmuls in one order on every machine, and a GPU's rounding errors on request."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter
from tests.helpers.rounding import gpu_rounding

pytestmark = needs_interpreter
M, K, N = 16, 64, 32
SIZE = 4096


@triton.jit
def _dot_kernel(x_ptr, w_ptr, out_ptr, start, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    x, w = tl.load(x_ptr + m * K + k[None, :]), tl.load(w_ptr + k[:, None] * N + n)
    acc = tl.full((M, N), 0.0, tl.float32) + start
    tl.store(out_ptr + m * N + n, tl.dot(x, w, acc, input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_added_in_order(dtype):
    """The additions are fp32 and start with the accumulator."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((M, K), (K, N)))
    product = torch.empty(M, N)
    _dot_kernel[(1,)](x, w, product, 0.3, M, K, N)
    a, b = x.float().numpy(), w.float().numpy()
    for row, column in ((0, 0), (7, 31), (15, 4)):
        total = np.float32(0.3)
        for k in range(K):
            total = np.float32(total + np.float32(a[row, k] * b[k, column]))
        assert product[row, column].item() == total
    torch.testing.assert_close(product.double(), x.double() @ w.double() + 0.3, rtol=0, atol=2e-5)


# log2(e) is rounded, and its product with x (up to 80) by half an ulp of 2^6.8.
EXP_ULPS = 2 + np.log(2) * (2.0**-18 + 80 * abs(np.float32(np.log2(np.e)) - np.log2(np.e))) / 2.0**-24
# Triton's function of x and y, its exact value, and its largest error in ulp.
FUNCTIONS = [
    (lambda x, y: x / y, lambda x, y: x / y, 2),
    (lambda x, y: tl.exp(x), lambda x, y: np.exp(x), EXP_ULPS),
    (lambda x, y: tl.exp2(x), lambda x, y: np.exp2(x), 2),
    (lambda x, y: tl.log(y), lambda x, y: np.log(y), 1),
    (lambda x, y: tl.log2(y), lambda x, y: np.log2(y), 1),
    (lambda x, y: tl.sqrt(y), lambda x, y: np.sqrt(y), 1),
    (lambda x, y: tl.rsqrt(y), lambda x, y: 1 / np.sqrt(y), 2),
    (lambda x, y: tl.div_rn(x, y), lambda x, y: x / y, 0.5),
    (lambda x, y: tl.sqrt_rn(y), lambda x, y: np.sqrt(y), 0.5),
]


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, FUNCTION: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@pytest.mark.parametrize(("function", "exact", "ulps"), FUNCTIONS)
def test_errors_are_as_large_as_documented(function, exact, ulps):
    """``x`` has both signs, up to 80; ``y`` has many powers of two. Errors depend on the seed."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(SIZE, generator=generator) for _ in range(2))
    x, y = (x - 0.5) * 160, y * torch.exp2(torch.randint(-50, 50, (SIZE,), generator=generator))
    found = torch.empty(2, SIZE)
    for seed in range(2):
        with gpu_rounding(seed):
            _elementwise_kernel[(1,)](x, y, found[seed], SIZE, function)
    (actual, other), expected = found.numpy(), exact(x.double().numpy(), y.double().numpy())
    assert 0.7 * ulps < (np.abs(actual - expected) / np.spacing(np.abs(actual))).max() <= ulps * (1 + 1e-6)
    assert ((other != actual).mean() > 0.2) == (ulps > 0.5)
