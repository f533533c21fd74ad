"""What holds of every operator at its edges: without rows, around its results, for any number of requests."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenvm_kernels.fuzz.check import check, operators
from tests.helpers.cases import cases
from tests.helpers.drafts import variants
from tests.helpers.memory import GuardedMemory

OPERATORS = operators()
# The operator that has to have a request, and says so.
NEVER_EMPTY = "ragged_layout"


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != NEVER_EMPTY])
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 10))
def test_a_batch_may_be_empty(device, name, backend, data):
    """As it is between two requests. A step without requests is none: nothing is counted."""
    case = replace(data.draw(cases(name)), rows=())
    failure = check(case, partial(OPERATORS[name].function, backend=backend), device=device)
    assert failure is None, str(failure)


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 5))
def test_fresh_memory_is_filled_and_nothing_beside_it(device, name, data):
    """Results are right whatever lay there. Rows and columns of a tile that are none are not stored."""
    memory = GuardedMemory()
    function = partial(memory.call, OPERATORS[name].function, backend="triton")
    failure = check(data.draw(cases(name)), function, device=device, other_batches=False)
    assert failure is None, str(failure)
    memory.assert_kept()


def test_no_number_of_requests_compiles_anything():
    """Of the operators on drafts, nor do slices of longer tensors."""
    names = ["expand_drafts", "limit_span", "pack_drafts", "ragged_layout", "verify_drafts"]
    assert variants(*names) == {f"_{name}_kernel": 1 for name in names}
