"""Hypothesis strategies of the fuzzer's cases: what ``lenvm fuzz`` draws, small and simple first."""

import hypothesis.strategies as st
import torch
from hypothesis import assume

from lenvm_kernels.fuzz.case import INTERPRETED_WORK, Case
from lenvm_kernels.fuzz.check import check, operators

MOST_ROWS = 12
WORK = INTERPRETED_WORK // 4  # a test is to be quick


@st.composite
def cases(draw, name, **accepted):
    """Cases of an operator. ``accepted``: values of options, instead of all."""
    operator = operators()[name]
    options = {option: draw(st.sampled_from(accepted.get(option, v))) for option, v in operator.options.items()}
    assume(operator.row_work(options) <= INTERPRETED_WORK)
    most = min(MOST_ROWS, max(1, int(WORK / operator.row_work(options))))
    rows = draw(st.lists(st.integers(0, 99), min_size=1, max_size=most, unique=True))
    return Case(name, draw(st.integers(0, 2**31)), tuple(rows), options)


def simplest(name, rows, *, seed=0, **options):
    """A case of so many rows, or of some, with the simplest value of each option that is not given."""
    accepted = operators()[name].options
    assert options.keys() <= accepted.keys()
    rows = tuple(range(rows)) if isinstance(rows, int) else rows
    return Case(name, seed, rows, {option: values[0] for option, values in accepted.items()} | options)


def simple_arguments(name, rows, *, device="cpu", **options):
    """The arguments of such a case, by name."""
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    return operators()[name].inputs(simplest(name, rows, **options), torch.device(device)).arguments


def assert_right(case, device, function=None):
    """The result is that of the fp64 reference. That rows do not see each other has tests of its own."""
    failure = check(case, function, device=device, other_batches=False)
    assert failure is None, str(failure)
