"""Wrong versions of a tensor argument, for the tests that a public function refuses them."""

import re

import pytest
import torch

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def wrong_versions(x, dtypes, any_rows=False, any_columns=False, rows_apart=True, strided=False):
    """Of a good tensor: another device, dtype, number of dimensions, size and stride than the function accepts.

    Args:
        x: the good tensor.
        dtypes: those that the function accepts.
        any_rows: its first dimension may have any size.
        any_columns: its last of two dimensions may have any size.
        rows_apart: its rows may be apart by more than their length.
        strided: its last dimension may have any stride.
    """
    yield x.to("meta")
    yield from (x.to(dtype) for dtype in DTYPES if dtype not in dtypes)
    yield x[None]
    if x.shape[-1] > 1 and not strided:
        yield torch.stack([x, x], dim=-1)[..., 0]
    if not any_rows:
        yield from (torch.cat([x, x]), x[:-1])
    if x.dim() == 2 and not any_columns:
        yield from (torch.cat([x, x], dim=1), x[:, :-1].contiguous())
    if not rows_apart:
        yield torch.cat([x, x], dim=1)[:, : x.shape[1]]


def assert_refuses(function, arguments, name, *dtypes, **allowed):
    """``function(**arguments)`` works; with a wrong version of one tensor it raises an error that begins with its name.

    ``dtypes`` and ``allowed`` are those of :func:`wrong_versions`.
    """
    function(**arguments)
    for wrong in wrong_versions(arguments[name], dtypes, **allowed):
        with pytest.raises(ValueError, match=f"^{re.escape(name)} must be"):
            function(**{**arguments, name: wrong})
    with pytest.raises(TypeError, match=f"^{re.escape(name)} must be (.* or )?a tensor .*, got list"):
        function(**{**arguments, name: arguments[name].tolist()})
