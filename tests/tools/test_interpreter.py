"""Triton's interpreter as this package patches it: matmuls are bitwise identical on every machine, in every batch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.interpreter import needs_interpreter

pytestmark = needs_interpreter
M, K, N = 16, 64, 32


@triton.jit
def _dot_kernel(x_ptr, w_ptr, out_ptr, start, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    x, w = tl.load(x_ptr + m * K + k[None, :]), tl.load(w_ptr + k[:, None] * N + n)
    acc = tl.full((M, N), 0.0, tl.float32) + start
    tl.store(out_ptr + m * N + n, tl.dot(x, w, acc, input_precision="ieee"))


def dot(x, w, start=0.0):
    out = torch.empty(len(x), w.shape[1])
    _dot_kernel[(1,)](x.contiguous(), w.contiguous(), out, start, len(x), *w.shape)
    return out


def operands(dtype):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(M, K, generator=generator).to(dtype), torch.randn(K, N, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_added_in_order(dtype):
    """The additions are fp32 and start with the accumulator. Another order gives other bits."""
    x, w = operands(dtype)
    product = dot(x, w, start=0.3)
    a, b = x.float().numpy(), w.float().numpy()
    for row, column in ((0, 0), (7, 31), (15, 4)):
        total = np.float32(0.3)
        for k in range(K):
            total = np.float32(total + np.float32(a[row, k] * b[k, column]))
        assert product[row, column].item() == total
    assert not torch.equal(dot(x.flip(1), w.flip(0), start=0.3), product)
    torch.testing.assert_close(product.double(), x.double() @ w.double() + 0.3, rtol=0, atol=2e-5)


def test_row_is_bitwise_identical_at_every_place():
    x, w = operands(torch.float32)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(6))
    assert torch.equal(dot(x[order], w), dot(x, w)[order])
    padded = torch.cat([torch.zeros(16, K), x, torch.full((32, K), torch.nan)])
    assert torch.equal(dot(padded, w)[16:32], dot(x, w))


def test_non_finite_numbers_stay_in_their_row():
    x, w = operands(torch.float32)
    healthy = dot(x, w)
    x[3, 9], x[5, 0], x[5, 1], w[0, 2], w[1, 2] = torch.nan, torch.inf, -torch.inf, 1.0, 1.0
    expected = dot(x, w)
    assert expected[3].isnan().all() and expected[5, 2].isnan()
    others = [i for i in range(M) if i not in (3, 5)]
    columns = [j for j in range(N) if j != 2]
    assert torch.equal(expected[others][:, columns], healthy[others][:, columns])


@triton.jit
def _masked_copy_kernel(x_ptr, out_ptr, length, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for block in range(2):
        tl.store(out_ptr + i, tl.load(x_ptr + i, mask=(i < length) & (block < length), other=7), mask=i < BLOCK)


def test_mask_may_combine_a_vector_and_a_scalar():
    out = torch.zeros(4)
    _masked_copy_kernel[(1,)](torch.ones(4), out, 3, 4)
    assert out.tolist() == [1, 1, 1, 7]
