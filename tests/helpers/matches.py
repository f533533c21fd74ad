"""Comparison of results with expected tensors, within the table of tolerances."""

import torch

from lenvm_kernels.fuzz.tolerances import TOLERANCE


def assert_same(actual, expected, operator, backend):
    """Assert equality: bitwise, or within the table's tolerance for references that call a library's matmul, which may
    round a row differently beside other rows or at another address."""
    has_matmul = operator in ("ragged_linear", "value_head", "value_tree_attention")
    if backend == "triton" or not has_matmul or not actual.is_floating_point():
        assert torch.equal(actual, expected)
    else:
        assert_matches(actual, expected, operator, actual.dtype)


def assert_matches(actual, expected, operator, dtype):
    """Assert equality within the table's tolerance; NaN equals NaN."""
    rtol, atol = TOLERANCE[operator][dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)
