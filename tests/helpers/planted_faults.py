"""Faulty operators, for ``lenvm fuzz --against tests.helpers.planted_faults:FAULT.OPERATOR``."""

from functools import partial
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves

from lenvm_kernels.fuzz.check import operators

CORRECT = {name: partial(operator.function, backend="triton") for name, operator in operators().items()}


def planted(change):
    """Namespace with a function per operator that applies ``change`` to the results of its kernels."""

    def faulty(name):
        def call(*arguments, **keywords):
            result = CORRECT[name](*arguments, **keywords)
            for x in tree_leaves(result):
                change(x)
            return result

        return call

    return SimpleNamespace(**{name: faulty(name) for name in CORRECT})


def _off(x):
    if x.dtype == torch.bool:
        x.logical_not_()
    else:
        x += torch.where(x > 0.5, 1e-3 if x.is_floating_point() else 1, 0).to(x.dtype)


def _nan(x):
    if x.is_floating_point():
        x[x > 0.5] = torch.nan


def _odd(x):
    if len(x) % 2 and x.is_floating_point():
        x *= 1 + 2.0**-22


correct = SimpleNamespace(**CORRECT)
off, nan, odd = map(planted, (_off, _nan, _odd))


def spills(*arguments, out, **keywords):
    out.as_strided((1,), (1,), out.storage_offset() + out.stride(0) - 1).zero_()
    return CORRECT["value_tree_attention"](*arguments, out=out, **keywords)


def fails(*arguments, **keywords):
    raise RuntimeError("out of luck")


def narrow(*arguments, **keywords):
    return off.value_head(*arguments, **keywords)


narrow.options = {"size": [80, 96], "dtype": ["bfloat16"]}


def halves(*arguments, **keywords):
    return CORRECT["value_head"](*arguments, **keywords).half()
