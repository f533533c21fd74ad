"""Results beside what is expected, within the table of tolerances."""

import torch

from lenvm_kernels.fuzz.tolerances import TOLERANCE


def assert_matches(actual, expected, operator, dtype):
    """Assert equality within the table's tolerance; NaN equals NaN."""
    rtol, atol = TOLERANCE[operator][dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)
