"""What holds of every operator at its edges: without rows, around its results, for any number of requests."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenvm_kernels.fuzz.check import check, operators
from tests.helpers.cases import cases
from tests.helpers.drafts import variants

OPERATORS = operators()
MARGIN = 4096  # of numbers, more than the largest tile of a row
# The operator that has to have a request, and says so.
NEVER_EMPTY = "ragged_layout"


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != NEVER_EMPTY])
@given(data=st.data())
@settings(max_examples=10)
def test_a_batch_may_be_empty(device, name, backend, data):
    """As it is between two requests. A step without requests is none: nothing is counted."""
    accepted = {"step": ["none"]} if name == "select_scored" else {}
    case = replace(data.draw(cases(name, **accepted)), rows=())
    failure = check(case, partial(OPERATORS[name].function, backend=backend), device=device)
    assert failure is None, str(failure)


def in_guarded_memory(function, buffers):
    """The function with fresh memory that holds something, as a GPU's does, in the middle of memory to be left alone.

    ``buffers``: is given the bytes before and after each tensor, as the call leaves them and as they were.
    """
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def guarded(*shape, dtype, device):
        size = torch.Size(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
        memory = empty(size.numel() + 2 * MARGIN, dtype=dtype, device=device)
        memory.fill_(float("nan") if dtype.is_floating_point else 77)
        for around in (memory[:MARGIN], memory[-MARGIN:]):
            buffers.append((around.view(torch.uint8), around.clone().view(torch.uint8)))
        return memory[MARGIN : MARGIN + size.numel()].view(size)

    def guarded_new(x, *shape, dtype=None, device=None):
        return guarded(*shape, dtype=dtype or x.dtype, device=device or x.device)

    def call(*args, **kwargs):
        torch.empty, torch.Tensor.new_empty = guarded, guarded_new
        try:
            return function(*args, **kwargs)
        finally:
            torch.empty, torch.Tensor.new_empty = empty, new_empty

    return call


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=max(1, settings().max_examples // 5))
def test_fresh_memory_is_filled_and_nothing_beside_it(device, name, data):
    """Results are right whatever lay there. Rows and columns of a tile that are none are not stored."""
    buffers = []
    function = in_guarded_memory(partial(OPERATORS[name].function, backend="triton"), buffers)
    failure = check(data.draw(cases(name)), function, device=device, other_batches=False)
    assert failure is None, str(failure)
    assert all(torch.equal(found, before) for found, before in buffers)


def test_no_number_of_requests_compiles_anything():
    """Of the operators on drafts, nor do slices of longer tensors."""
    names = ["expand_drafts", "limit_span", "pack_drafts", "ragged_layout", "verify_drafts"]
    assert variants(*names) == {f"_{name}_kernel": 1 for name in names}
