"""What the operator decorator promises of every operator: it is one operator to whoever records, on either backend."""

from dataclasses import is_dataclass
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.types import GuidanceColumns
from tests.helpers.matches import assert_matches
from tests.helpers.watch import Operators

BACKENDS = ["triton", "reference"]
OPERATORS = operators()


def small_case(name):
    """Three requests, with every tensor that is optional."""
    wanted = {"table_rows": "int64", "token_rows": "int64", "trees": "chains", "columns": 8, "rows_not_there": "none"}
    options = {
        option: wanted.get(option, values[min(1, len(values) - 1)])
        for option, values in OPERATORS[name].options.items()
    }
    return Case(name, 11, (2, 0, 1), options)


def results(name, function, device):
    """Everything that a call returned or wrote, as a list of tensors."""
    result = OPERATORS[name].run(OPERATORS[name].inputs(small_case(name), device), function)
    parts = vars(result) if is_dataclass(result) else result
    return [x for x in tree_flatten(parts)[0] if isinstance(x, torch.Tensor)]


def assert_same(found, expected, name, backend="triton"):
    """To the bit, but for what the reference computes by a library's matmul."""
    exact = backend == "triton" or name not in ("ragged_linear", "value_head", "value_tree_attention")
    assert len(found) == len(expected) > 0
    for pair in zip(found, expected, strict=True):
        actual, wanted = (x.float() if x.dtype == E4M3 else x for x in pair)
        if exact or not actual.is_floating_point():
            assert torch.equal(actual.nan_to_num(), wanted.nan_to_num())
        else:
            assert_matches(actual, wanted, name, actual.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_without_a_graph_break(device, name, backend):
    torch.compiler.reset()
    function = partial(OPERATORS[name].function, backend=backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(results(name, compiled, device), results(name, function, device), name, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_recorded_by_make_fx(device, name, backend):
    """Recorded on tensors without data, as one operator, and then run."""
    graphs = []

    def recorded(*args, **kwargs):
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors):
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
            return OPERATORS[name].function(*args, **kwargs, backend=backend)

        tensors = [leaves[i] for i in places]
        graphs.append(make_fx(call, tracing_mode="fake")(*tensors))
        return graphs[-1](*tensors)

    expected = results(name, partial(OPERATORS[name].function, backend=backend), device)
    assert_same(results(name, recorded, device), expected, name, backend)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets.count(f"lenvm.{name}.default") == 1


def head_of(hidden):
    size = hidden.shape[1]
    return value_head(hidden, torch.eye(size), torch.zeros(size), torch.ones(1, size), torch.ones(1))


def test_recorded_by_make_fx_from_real_tensors():
    hidden = torch.arange(6.0).view(2, 3)
    graph = make_fx(head_of, tracing_mode="real")(hidden)
    assert [str(node.target) for node in graph.graph.nodes].count("lenvm.value_head.default") == 1
    torch.testing.assert_close(graph(hidden + 1), head_of(hidden + 1))


def test_whoever_watches_operators_sees_into_ours():
    """A mode that records nothing, such as one that looks for waits, is no reason to hide what an operator does."""
    with Operators() as seen:
        head_of(torch.ones(2, 3))
    assert "aten::silu" in seen.names and not any(name.startswith("lenvm::") for name in seen.names)


# Operators that compute with no floating-point number.
NO_FLOATS = ("gather_requests", "expand_drafts", "pack_drafts", "ragged_layout", "verify_drafts")


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in NO_FLOATS])
def test_fp64_is_accepted_on_a_cpu(name):
    """Without asking for the reference: ``auto`` is the reference there."""
    fp32_only = {"top_p", "min_p", "temperature", "entropy_threshold", "cos", "sin", "inv_freq"}
    fp32_only |= {"key_scales", "value_scales", "min_end_prob", "least_share", "due_length"}
    found = []

    def double(x):
        if isinstance(x, GuidanceColumns):
            return x

        def double_of(x):
            wide = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != E4M3
            return x.double() if wide else x

        return tree_map(double_of, x)

    def function(*args, **kwargs):
        given = {key: x if key in fp32_only else double(x) for key, x in kwargs.items()}
        found.append(OPERATORS[name].function(*map(double, args), **given))
        return OPERATORS[name].function(*args, **kwargs)

    results(name, function, "cpu")
    (result,) = found
    if name == "embed_tokens":
        result = result[:2]  # the angles' cosines and sines are fp32
    floats = [x for x in tree_flatten(result)[0] if x.is_floating_point()]
    assert all(x.dtype == torch.float64 for x in floats)
    assert floats or name in ("limit_span", "catch_up", "commit_winner", "select_scored", "sample_candidates")
