"""Strategies that draw the cases of ``lenvm fuzz``, comparisons within the table of tolerances, and drafts."""

import hypothesis.strategies as st
import torch
from hypothesis import assume

from lenvm_kernels.fuzz.case import INTERPRETED_WORK, Case
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.fuzz.ops._inputs import apart
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.types import Drafts

MOST_ROWS = 12
WORK = INTERPRETED_WORK // 4  # keeps a test short


@st.composite
def cases(draw, name, **accepted):
    """Cases of an operator. ``accepted``: values of an option to draw from, instead of all values."""
    operator = operators()[name]
    options = {option: draw(st.sampled_from(accepted.get(option, v))) for option, v in operator.options.items()}
    assume(operator.row_work(options) <= INTERPRETED_WORK)
    most = min(MOST_ROWS, max(1, int(WORK / operator.row_work(options))))
    rows = draw(st.lists(st.integers(0, 99), min_size=1, max_size=most, unique=True))
    return Case(name, draw(st.integers(0, 2**31)), tuple(rows), options)


def simplest(name, rows, *, seed=0, **options):
    """A case with ``rows`` (their number, or their ids). Other options have their simplest value."""
    accepted = operators()[name].options
    assert options.keys() <= accepted.keys()
    rows = tuple(range(rows)) if isinstance(rows, int) else rows
    return Case(name, seed, rows, {option: values[0] for option, values in accepted.items()} | options)


def simple_arguments(name, rows, *, device="cpu", **options):
    """The arguments of a :func:`simplest` case, by name."""
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    return arguments_of(simplest(name, rows, **options), device)


def small_case(name, **chosen):
    """Three requests, with every optional tensor."""
    wanted = {"table_rows": "int64", "token_rows": "int64", "trees": "chain", "columns": 8, "rows_not_there": "none"}
    wanted |= {"table": "whole"} | chosen  # its columns share memory, and some are written
    options = {
        option: wanted.get(option, values[min(1, len(values) - 1)])
        for option, values in operators()[name].options.items()
    }
    return Case(name, 11, (2, 0, 1), options)


def arguments_of(case, device):
    """The arguments of a call, by name."""
    return operators()[case.op].inputs(case, torch.device(device)).arguments


def changed(arguments, path, x):
    """The arguments with the tensor at ``path`` replaced by ``x``."""
    name, _, field = path.partition(".")
    return arguments | {name: arguments[name]._replace(**{field: x}) if field else x}


def assert_same(actual, expected, operator, backend):
    """Assert equality: bitwise, or within the table's tolerance for references that call a library's matmul, which may
    round a row differently next to other rows or at another address."""
    has_matmul = operator in ("ragged_linear", "value_head", "value_tree_attention")
    if backend == "triton" or not has_matmul or not actual.is_floating_point():
        assert torch.equal(actual, expected)
    else:
        assert_matches(actual, expected, operator, actual.dtype)


def assert_matches(actual, expected, operator, dtype):
    """Assert equality within the table's tolerance; NaN equals NaN."""
    rtol, atol = TOLERANCE[operator][dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)


LARGEST = 2**31 - 1


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_drafts(token_ids, parents, *, dtype=torch.int64, device="cpu"):
    """Drafts in strided rows; the stride of the parents is larger than the stride of the tokens."""
    token_ids, parents = torch.as_tensor(token_ids, dtype=dtype), torch.as_tensor(parents, dtype=torch.int32)
    return Drafts(apart(token_ids.to(device), 3), apart(parents.to(device), 4))
