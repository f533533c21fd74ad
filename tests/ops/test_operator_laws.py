"""Laws of every operator, tested through its description in ``lenvm_kernels/fuzz/ops``."""

import inspect
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map

import lenvm_kernels.ops._common as ops_common
from bench.launches import intercept_launches
from lenvm_kernels.fuzz.check import check, operators
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.ops.value_head import value_head
from tests.helpers.cases import arguments_of, cases, changed, i32, small_case
from tests.helpers.memory import GuardedMemory
from tests.helpers.watch import Operators
from tests.helpers.wrong_tensors import wrong_versions

OPERATORS = operators()


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
def test_kernels_match_the_reference(device, name, data):
    """The reference runs in fp64; the table of tolerances applies. Results do not depend on the contents of fresh
    memory, and the memory around them and elements that are not written are unchanged."""
    memory = GuardedMemory()
    function = partial(memory.call, OPERATORS[name].function, backend="triton")
    failure = check(data.draw(cases(name)), function, device=device, other_batches=False)
    assert failure is None, str(failure)
    memory.assert_kept()


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 5))
def test_rows_are_bitwise_identical_in_every_batch(device, name, data):
    """Each batch is compared with its rows in another order among more rows, and with a row alone."""
    failure = check(data.draw(cases(name)), device=device)
    assert failure is None, str(failure)


def results(name, function, device):
    """All tensors that a call returned or wrote."""
    return [*OPERATORS[name].run(OPERATORS[name].inputs(small_case(name), device), function).values()]


def tensors_of(x):
    """All tensors in a structure."""
    return [y for y in tree_flatten(x)[0] if isinstance(y, torch.Tensor)]


def assert_all_same(found, expected):
    """Assert that there are tensors, and that all are equal; NaN equals NaN."""
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_without_a_graph_break(device, name):
    torch.compiler.reset()
    function = partial(OPERATORS[name].function, backend="triton")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_all_same(results(name, compiled, device), results(name, function, device))


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_recorded_by_make_fx(tracing_mode):
    """From real tensors and from tensors without data; results in one tensor and in a named tuple.

    A mode that does not trace, such as a check for host-device syncs, sees the calls inside an operator.
    """

    def head_of(embedding):
        rows = torch.arange(2)
        hidden = embed_tokens(rows, rows, embedding, torch.ones(1)).hidden
        return value_head(hidden, torch.eye(3), torch.zeros(3), torch.ones(1, 3), torch.ones(1))

    embedding = torch.arange(6.0).view(2, 3)
    graph = make_fx(head_of, tracing_mode=tracing_mode)(embedding)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("lenvm.embed_tokens.default") == targets.count("lenvm.value_head.default") == 1
    torch.testing.assert_close(graph(embedding + 1), head_of(embedding + 1))
    with Operators() as seen:
        head_of(embedding)
    assert "aten::silu" in seen.names and not any(name.startswith("lenvm::") for name in seen.names)


# Operators without floating-point computation.
NO_FLOATS = ("begin_step", "pack_drafts", "verify_drafts")


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in NO_FLOATS])
def test_fp64_is_accepted_on_a_cpu(name):
    """Uses backend ``auto``, which is the reference on a CPU."""
    fp32_only = {"top_p", "min_p", "temperature", "cos", "sin", "inv_freq", "table"}
    fp64_results = []

    def double(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def function(**arguments):
        fp64 = {key: x if key in fp32_only else tree_map(double, x) for key, x in arguments.items()}
        fp64_results.append(OPERATORS[name].function(**fp64))
        return OPERATORS[name].function(**arguments)

    results(name, function, "cpu")
    (result,) = fp64_results
    if name == "embed_tokens":
        result = result[:2]  # cosines and sines are fp32
    floats = [x for x in tree_flatten(result)[0] if x.is_floating_point()]
    assert all(x.dtype == torch.float64 for x in floats)
    assert floats or name in ("lay_out", "limit_span")


@pytest.mark.parametrize("name", OPERATORS)
def test_no_host_device_sync(device, name):
    """Covers checks of arguments and launches of kernels."""
    arguments = arguments_of(small_case(name), device)
    with Operators() as seen, intercept_launches(lambda kernel, launch: None):
        OPERATORS[name].function(**arguments, backend="triton")
    assert not {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"} & set(seen.names)


@pytest.mark.parametrize("name", OPERATORS)
def test_written_arguments_are_declared(name):
    """torch.compile relies on the schema and may reorder undeclared writes."""
    arguments = arguments_of(small_case(name), "cpu")
    before = {path: x.clone() for path, x in tensors_in(arguments)}
    OPERATORS[name].function(**arguments, backend="reference")
    schema = getattr(torch.ops.lenvm, name).default._schema.arguments
    declared = {x.name for x in schema if x.alias_info is not None and x.alias_info.is_write}
    if name == "reweight_scatter":
        declared.add("probs")  # the output of scatter_probs
    for path, x in tensors_in(arguments):
        is_written = not torch.equal(torch.nan_to_num(x, -7.0), torch.nan_to_num(before[path], -7.0))
        assert not is_written or path.replace(".", "_") in declared, path


@pytest.mark.parametrize("name", OPERATORS)
def test_replays_in_a_cuda_graph(device, name):
    """The graph is replayed with other numbers of the same shapes in the same memory."""

    def form(x):
        return (x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x

    seen = {}
    for seed in range(11, 1000):
        others = arguments_of(replace(small_case(name), seed=seed), device)
        arguments = seen.setdefault(repr(tree_map(form, others)), others)
        if arguments is not others:
            break
    assert arguments is not others, "no two cases have the same shapes"
    if device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    function = partial(OPERATORS[name].function, backend="triton")
    expected = {argument: tree_map(clone, x) for argument, x in others.items()}
    expected = [function(**expected), expected]
    function(**{argument: tree_map(clone, x) for argument, x in arguments.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(**arguments)
    tree_map(lambda x, y: x.copy_(y) if isinstance(x, torch.Tensor) else x, arguments, others)
    graph.replay()
    assert_all_same(tensors_of([result, arguments]), tensors_of(expected))


def clone(x):
    """A copy of a tensor with the same strides. Other values are returned unchanged."""
    return deepcopy(x) if isinstance(x, torch.Tensor) else x


def tensors_in(arguments):
    """(path, tensor) of each tensor argument, and of each tensor in a named tuple."""
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            yield name, x
        elif hasattr(x, "_asdict"):
            yield from ((f"{name}.{field}", y) for field, y in x._asdict().items() if y is not None)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in OPERATORS), ("lay_out", {"source": "delta"})])
def test_wrong_tensors_are_rejected_by_name(device, name, options, backend):
    """They are rejected before any launch. Properties that the description lists as free are accepted."""
    operator, case = OPERATORS[name], small_case(name, rows_not_there="2", **options)
    arguments = arguments_of(case, device)
    parameters = inspect.signature(operator.function).parameters
    if "counters" in parameters:
        arguments["counters"] = torch.zeros(4096, dtype=torch.int32, device=device)
    left_out = {x for x, parameter in parameters.items() if "Tensor" in str(parameter.annotation)} - arguments.keys()
    assert left_out <= {"plan", "addresses", "scores", "vocab_mask"}  # tested separately
    function, launched = partial(operator.function, backend=backend), []
    tensors = dict(tensors_in(arguments))
    names = "|".join(re.escape(x) for x in {*tensors, *arguments})
    free = {path: set(what.split()) for path, what in operator.free.items()}
    paths = {path for path in free if not path.startswith("delta.")}  # tested with another call
    assert options or paths <= tensors.keys(), "free names a tensor that no call has"
    with intercept_launches(lambda kernel, launch: launched.append(kernel)):
        for path, x in tensors.items():
            owner, _, field = path.partition(".")
            if field and field not in operator.reads.get(owner, (field,)):
                function(**changed(arguments, path, x.to("meta")[None]))  # not read
                continue
            with pytest.raises(TypeError, match=f"^{re.escape(path)} must be (.* or )?a tensor .*, got list"):
                function(**changed(arguments, path, x.tolist()))
            for what, wrong in wrong_versions(x):
                wrong_arguments = changed(arguments, path, wrong)
                if what.removeprefix("fewer ") in free.get(path, ()) and (what != "float64" or backend == "reference"):
                    if what != "fewer rows":  # the used rows depend on device data
                        function(**wrong_arguments)
                    continue
                launched.clear()
                with pytest.raises((TypeError, ValueError), match=f"^({names})(:| must) "):
                    function(**wrong_arguments)
                assert not launched
        for argument, x in arguments.items():
            if hasattr(x, "_asdict"):
                with pytest.raises(TypeError, match=f"^{argument} must be .*, got tuple"):
                    function(**arguments | {argument: tuple(x)})
    with pytest.raises(ValueError, match=r"^backend must be one of auto, triton, reference, got 'cuda'"):
        operator.function(**arguments, backend="cuda")


@pytest.mark.parametrize("name", OPERATORS)
def test_cpu_tensors_are_rejected_by_name(monkeypatch, name):
    """If kernels are compiled."""
    monkeypatch.setattr(ops_common, "INTERPRETED", False)
    arguments = arguments_of(small_case(name), "cpu")
    names = "|".join(re.escape(x) for x, _ in tensors_in(arguments))
    with pytest.raises(ValueError, match=rf"^({names}) must be on a GPU for backend 'triton' \(.*\), got cpu"):
        OPERATORS[name].function(**arguments, backend="triton")


def far_apart(x):
    """The same numbers with a row stride so large that the last rows are at least 2**31 elements from the first.
    Untouched pages take no memory on a CPU."""
    stride = min(5 * 2**29 // (len(x) - 1), 2**31 - 1)  # the stride itself fits into int32
    memory = torch.empty((len(x) - 1) * stride + x[0].numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (stride, *x[0].contiguous().stride())).copy_(x)


def far_tensors():
    """(operator, path) of each tensor with an arbitrary row stride."""
    for name, operator in OPERATORS.items():
        for path, what in operator.free.items():
            # The norm's weight has a row per head, too few for such offsets.
            if {"apart", "strided"} & set(what.split()) and path != "qk_norm_weight":
                yield name, path


@pytest.mark.parametrize(("name", "path"), list(far_tensors()))
def test_offsets_past_32_bits(device, name, path):
    arguments = arguments_of(replace(small_case(name), rows=(2, 0, 1, 5, 3, 4)), device)
    x = dict(tensors_in(arguments))[path]
    if len(x) == 1 or x.element_size() > (4 if device.type == "cpu" else 2):
        pytest.skip("one row, or 10 GiB and more")
    both = []
    for version in (x.clone(), far_apart(x)):
        copies = {argument: tree_map(clone, y) for argument, y in arguments.items()}
        try:
            result = OPERATORS[name].function(**changed(copies, path, version), backend="triton")
        except ValueError as error:
            assert "strides up to" in str(error)
            return
        both.append(tensors_of([result, copies, version]))
    assert_all_same(*both)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "lay_out"])  # which rejects an empty batch
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 10))
def test_empty_batch(device, name, backend, data):
    """As between two requests. Counters do not change in a step without requests."""
    case = replace(data.draw(cases(name)), rows=())
    failure = check(case, partial(OPERATORS[name].function, backend=backend), device=device)
    assert failure is None, str(failure)


@pytest.mark.parametrize("num_rows", [-1, 0, 3, 9])
@pytest.mark.parametrize("name", ["embed_tokens", "ragged_linear", "rope_cache", "value_head"])
def test_rows_past_num_rows_are_not_written(device, name, num_rows):
    """In results and workspaces. Fresh memory is NaN. Logits of ``value_head`` are 0 in these rows."""
    case, memory, rows = small_case(name, size=160, token_rows="none"), GuardedMemory(), min(max(0, num_rows), 7)
    case = replace(case, rows=tuple(range(7)))
    arguments = arguments_of(case, device) | {"num_rows": i32(num_rows).to(device)}
    with OPERATORS[name].setting(case):
        found = memory.call(OPERATORS[name].function, **arguments, backend="triton")
    memory.assert_kept()
    if name == "value_head":
        for logits in (found, OPERATORS[name].function(**arguments, backend="reference")):
            assert logits[:rows].all() and not logits[rows:].any()
    for x in memory.tensors:
        if name == "value_head" and x.dim() == 1:
            continue
        x = x if len(x) == 7 else x.movedim(-1, 0)
        assert len(x) == 7 and x[rows:].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "bias"), [("ragged_linear", "bias"), ("value_head", "fc_bias"), ("candidate_values", "fc_bias")]
)
def test_saturated_activations(device, name, bias, dtype):
    """The SiLU of some numbers is 0, because its exponential overflows; of others, it is the identity."""
    operator = OPERATORS[name]
    given = operator.inputs(small_case(name, dtype=dtype, broken=False, outputs=64, size=96), device)
    gates = given.arguments[bias][: len(given.arguments[bias]) // 2]  # with swiglu, the other half are factors
    gates[::2], gates[1::8] = -3e3, 3e3
    result = operator.run(given, partial(operator.function, backend="triton"))
    assert not any(difference.wrong.any() for difference in operator.differences(given, result))
