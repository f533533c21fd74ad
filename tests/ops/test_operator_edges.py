"""Edge cases of every operator: empty batches, rows past ``num_rows``, and saturated gates."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenvm_kernels.fuzz.check import check, operators
from tests.helpers.cases import arguments_of, cases, small_case
from tests.helpers.memory import GuardedMemory

OPERATORS = operators()
# This operator rejects an empty batch.
NEVER_EMPTY = "lay_out"


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != NEVER_EMPTY])
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
    arguments = arguments_of(case, device) | {"num_rows": torch.tensor([num_rows], dtype=torch.int32, device=device)}
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
