"""Edge cases of every operator: empty batches, memory around the results, and any number of requests."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenvm_kernels.fuzz.check import check, operators
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from tests.helpers.cases import arguments_of, cases, small_case
from tests.helpers.memory import GuardedMemory

OPERATORS = operators()
# This operator rejects an empty batch.
NEVER_EMPTY = "lay_out"


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != NEVER_EMPTY])
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 10))
def test_empty_batch(device, name, backend, data):
    """As between two requests. A step without requests changes no counters."""
    case = replace(data.draw(cases(name)), rows=())
    failure = check(case, partial(OPERATORS[name].function, backend=backend), device=device)
    assert failure is None, str(failure)


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 5))
def test_fresh_memory_is_filled_and_memory_around_it_unchanged(device, name, data):
    """Results do not depend on the previous contents. Masked rows and columns of a tile are not stored."""
    memory = GuardedMemory()
    function = partial(memory.call, OPERATORS[name].function, backend="triton")
    failure = check(data.draw(cases(name)), function, device=device, other_batches=False)
    assert failure is None, str(failure)
    memory.assert_kept()


@pytest.mark.parametrize("num_rows", [-1, 0, 3])
@pytest.mark.parametrize("name", ["embed_tokens", "ragged_linear", "rope_cache"])
def test_rows_past_num_rows_are_not_written(device, name, num_rows):
    """Neither in the results nor in a workspace. Fresh memory is NaN."""
    case, memory, rows = replace(small_case(name, size=160), rows=tuple(range(7))), GuardedMemory(), max(0, num_rows)
    arguments = arguments_of(case, device) | {"num_rows": torch.tensor([num_rows], dtype=torch.int32, device=device)}
    with OPERATORS[name].setting(case):
        memory.call(OPERATORS[name].function, **arguments, backend="triton")
    memory.assert_kept()
    for x in memory.tensors:
        x = x if len(x) == 7 else x.movedim(-1, 0)
        assert len(x) == 7 and x[rows:].isnan().all()


def test_counters_of_attention_are_zero_afterwards(device):
    """Two calls share the counters. Rows are split."""
    case = replace(small_case("value_tree_attention", cached="long"), rows=tuple(range(5)))
    counters = torch.zeros(4096, dtype=torch.int32, device=device)
    function = partial(value_tree_attention, counters=counters, backend="triton")
    for _ in range(2):
        failure = check(case, function, device=device, other_batches=False)
        assert failure is None and not counters.any(), str(failure)
