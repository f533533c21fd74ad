"""Wrong versions of a tensor argument, to test that a public function rejects them."""

import re

import pytest
import torch

DTYPES = ["bool", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def wrong_versions(x):
    """(kind, tensor) of wrong versions of a valid tensor, which a function must reject unless the kind is allowed.

    Kinds are ``device``, ``dimensions``, names of dtypes, ``strided`` (strided elements), ``apart`` (strided rows),
    and ``rows`` and ``columns`` (their number).
    """
    yield "device", x.to("meta")
    for name in DTYPES:
        if getattr(torch, name) != x.dtype:
            yield name, x.to(getattr(torch, name))
    yield "dimensions", x[None]
    if x.shape[-1] > 1:
        yield "strided", torch.stack([x, x], dim=-1)[..., 0]
    if x.dim() > 1:
        yield "apart", torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    for dim, kind in ((0, "rows"), (-1, "columns")):
        if dim == 0 or x.dim() > 1:
            yield kind, torch.cat([x, x], dim=dim)
            if x.shape[dim] > 1:
                yield f"fewer {kind}", x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def assert_refuses(function, arguments, name, *free, shown=None):
    """Check that ``function(**arguments)`` works, and that wrong versions of one tensor raise an error with its name.

    ``free`` are the allowed kinds of :func:`wrong_versions`, ``shown`` is the tensor's name in errors.
    """
    shown = re.escape(shown or name)
    function(**arguments)
    for what, wrong in wrong_versions(arguments[name]):
        if what.removeprefix("fewer ") not in free:
            with pytest.raises(ValueError, match=f"^{shown} must be"):
                function(**arguments | {name: wrong})
    with pytest.raises(TypeError, match=f"^{shown} must be (.* or )?a tensor .*, got list"):
        function(**arguments | {name: arguments[name].tolist()})
