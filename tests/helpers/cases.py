"""Hypothesis strategies of the fuzzer's cases: what ``lenvm fuzz`` draws, small and simple first."""

import hypothesis.strategies as st
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


def assert_right(case, device, function=None):
    """The result is that of the fp64 reference. That rows do not see each other has tests of its own."""
    failure = check(case, function, device=device, other_batches=False)
    assert failure is None, str(failure)
