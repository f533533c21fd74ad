"""Results beside what is expected, within the table of tolerances."""

import torch

from lenvm_kernels.fuzz.tolerances import TOLERANCE


def assert_same(actual, expected, operator, backend):
    """Assert equality: to the bit of what kernels computed, within the table's tolerance of what the reference did. Its
    matmuls are a library's, which may give a row other last bits beside other rows, or somewhere else in memory."""
    if backend == "triton":
        assert torch.equal(actual, expected)
    else:
        assert_matches(actual, expected, operator, actual.dtype)


def assert_matches(actual, expected, operator, dtype):
    """Assert equality within the table's tolerance; NaN equals NaN."""
    rtol, atol = TOLERANCE[operator][dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)
