"""Faulty references of operators, for ``lenvm fuzz --against tests.helpers.planted_faults:FAULT.OPERATOR``."""

import inspect
from functools import partial
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.fuzz.ops.candidate_values import exact as exact_candidate_values
from lenvm_kernels.reference._common import sums_of_squares

REFERENCES = {name: partial(operator.function, backend="reference") for name, operator in operators().items()}


def rounded_once(name, *widened):
    """The reference in fp64, because PyTorch's fp32 sums of a row depend on the batch. ``widened`` names the arguments
    that become fp64; if empty, all do."""

    def call(*arguments, **keywords):
        keywords = inspect.signature(operators()[name].function).bind(*arguments, **keywords).arguments
        # Only one of the two calls counts the step.
        plain = REFERENCES[name](**{key: x for key, x in keywords.items() if key != "step"})
        wide = {
            key: x.double() if torch.is_tensor(x) and x.is_floating_point() and (key in widened or not widened) else x
            for key, x in keywords.items()
        }
        return tree_map(lambda x, like: x.to(like.dtype), REFERENCES[name](**wide), plain)

    return call


def ragged_linear(*, x, square_sums_out=None, **keywords):
    """The sums of squares belong to the rounded result."""
    y = rounded_once("ragged_linear")(x=x, **keywords)
    if square_sums_out is not None:
        rows = int(keywords.get("num_rows", len(x)))
        square_sums_out[:, :rows] = sums_of_squares(y[:rows].double()).float()
    return y


def candidate_values(**keywords):
    """The operand of the matmul is rounded as in the kernel, which a wider dtype cannot imitate."""
    return tuple(x.float() for x in exact_candidate_values(**keywords))


CORRECT = REFERENCES | {
    "candidate_values": candidate_values,
    "topk_candidates": rounded_once("topk_candidates", "scores"),
    "embed_tokens": rounded_once("embed_tokens", "embedding"),
    "value_head": rounded_once("value_head"),
    "ragged_linear": ragged_linear,
    "value_tree_attention": rounded_once("value_tree_attention", "q", "k_new", "v_new", "k_cache", "v_cache", "out"),
}


def planted(change):
    """Namespace of one function per operator, which applies ``change`` to its results."""

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
