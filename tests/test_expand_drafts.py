"""``expand_drafts``: what is asked for at which node, drafts that are none, and requests without drafts."""

import math
import re

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.expand_drafts import inputs
from lenvm_kernels.ops import expand_drafts as ops
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, empty_nodes, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.types import Drafts, StepRequests
from tests.helpers.cases import cases
from tests.helpers.drafts import (
    BACKENDS,
    LARGEST,
    listed,
    make_drafts,
    random_drafts,
    variants,
)

OTHERS = ("tokens", "new_lens", "places", "cached_lens")


def make_requests(rows, *, seed=0, device="cpu"):
    """Of which no two fields are in the same order, and all ask for something."""
    requests, generator = empty_requests(rows, torch.device(device)), torch.Generator().manual_seed(seed)
    for i, x in enumerate(requests):
        x.copy_(torch.randperm(2 * x.numel(), generator=generator)[: x.numel()].view(x.shape) + 1000 * i)
    requests.table_rows.add_(2**40)
    requests.seeds.mul_(-(2**50))
    for x in (requests.guided, requests.wants_length, requests.due):
        x.copy_(torch.rand(rows, generator=generator) < 0.7)
    requests.entropy_threshold[::3] = math.nan
    return requests


def lists(requests, drafts):
    """The fields of the nodes, node by node; NaN is None."""
    of_drafts, columns = listed(drafts), drafts.token_ids.shape[1]
    fields = {name: [] for name in NODE_FIELDS}
    for i in range(len(requests.positions)):
        behind = [0]  # drafts behind each node
        for _, parent_node in of_drafts[i] if i < len(of_drafts) else []:
            behind.append(behind[parent_node] + 1)
        for node in range(1 + columns):
            is_there = node < len(behind)
            for name in NODE_FIELDS:
                value = getattr(requests, name)[i].item()
                if name in ("positions", "generated") and is_there:
                    value += behind[node]
                if name in ("guided", "wants_length", "due"):
                    value = value and is_there
                fields[name].append(None if value != value else value)
    return fields


def assert_nodes(nodes, expected):
    for name, dtype in NODE_FIELDS.items():
        x = getattr(nodes, name)
        assert x.dtype == dtype and [None if v != v else v for v in x.tolist()] == expected[name], name


@given(cases("expand_drafts"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    out = arguments.pop("out", None)
    found = expand_drafts(**arguments, out=out, backend="reference")
    assert_nodes(found, lists(**arguments))
    assert out is None or found is out


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_node_is_as_far_as_it_has_drafts_behind_it(device, backend):
    """A tree, a chain that ends, a request whose first draft is not there, and one that has none."""
    requests = make_requests(4, device=device)
    for name, values in (
        ("positions", [40, 7, 90, 3]),
        ("generated", [0, 5, 12, 30]),
        ("table_rows", [8, 3, 5, 2**33]),
        ("seeds", [-9, 2**62, 4, 1]),
        ("guided", [True, True, True, True]),
        ("wants_length", [True, False, True, True]),
        ("due", [False, True, True, True]),
        ("entropy_threshold", [0.5, math.nan, 0.25, 2.0]),
    ):
        getattr(requests, name).copy_(torch.tensor(values))
    drafts = make_drafts(
        [[6, 0, 6, 9, 2], [4, 4, 4, -1, 3], [-2, 5, 6, 7, 8]],
        [[-1, 0, 0, 2, 1], [-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3]],
        device=device,
    )
    nodes = expand_drafts(requests, drafts, backend=backend)
    yes, no = [True], [False]
    assert nodes.positions.tolist() == [40, 41, 42, 42, 43, 43, 7, 8, 9, 10, 7, 7, *[90] * 6, *[3] * 6]
    assert nodes.generated.tolist() == [0, 1, 2, 2, 3, 3, 5, 6, 7, 8, 5, 5, *[12] * 6, *[30] * 6]
    assert nodes.table_rows.tolist() == [*[8] * 6, *[3] * 6, *[5] * 6, *[2**33] * 6]
    assert nodes.seeds.tolist() == [*[-9] * 6, *[2**62] * 6, *[4] * 6, *[1] * 6]
    assert nodes.guided.tolist() == yes * 6 + yes * 4 + no * 2 + yes + no * 5 + yes + no * 5
    assert nodes.wants_length.tolist() == yes * 6 + no * 6 + yes + no * 5 + yes + no * 5
    assert nodes.due.tolist() == no * 6 + yes * 4 + no * 2 + yes + no * 5 + yes + no * 5
    thresholds = nodes.entropy_threshold.view(4, 6)
    assert thresholds[1].isnan().all()
    assert thresholds[[0, 2, 3]].tolist() == [[0.5] * 6, [0.25] * 6, [2.0] * 6]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parent", [-1, -2, -(2**31), 3, 4, 5, 99, LARGEST])
def test_what_is_no_earlier_draft_is_no_parent(device, backend, parent):
    """Of the fourth draft: itself, later ones and none. What follows it counts from there."""
    drafts = make_drafts([[1, 2, 3, 4, 5, 6]], [[-1, 0, 1, parent, 3, 4]], device=device)
    nodes = expand_drafts(make_requests(2, device=device), drafts, backend=backend)
    assert (nodes.positions - nodes.positions[0]).tolist()[:7] == [0, 1, 2, 3, 1, 2, 3]
    assert (nodes.generated - nodes.generated[0]).tolist()[:7] == [0, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", range(1, 10))
def test_every_number_of_drafts(device, backend, columns):
    """Of more requests than a program has, of which fewer have drafts; of either dtype."""
    requests, drafts = make_requests(19, seed=columns, device=device), random_drafts(17, columns, seed=columns)
    for dtype in (torch.int32, torch.int64):
        given_drafts = Drafts(drafts.token_ids.to(device, dtype), drafts.parents.to(device))
        assert_nodes(expand_drafts(requests, given_drafts, backend=backend), lists(requests, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "with_drafts"), [(0, 0), (1, 0), (1, 1), (7, 2), (7, 7), (9, 1), (23, 10)])
@pytest.mark.parametrize("requests_a_program", [1, 4, ops.REQUESTS])
def test_requests_of_several_programs(device, monkeypatch, backend, rows, with_drafts, requests_a_program):
    monkeypatch.setattr(ops, "REQUESTS", requests_a_program)
    requests, drafts = make_requests(rows, device=device), random_drafts(with_drafts, 3, device=device)
    assert_nodes(expand_drafts(requests, drafts, backend=backend), lists(requests, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_belongs_to_sequences_is_left_as_it_is(device, backend):
    requests, drafts = make_requests(3, device=device), random_drafts(2, 4, device=device)
    before = [x.clone() for x in requests]
    nodes = expand_drafts(requests, drafts, backend=backend)
    assert all(getattr(nodes, name) is getattr(requests, name) for name in OTHERS)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(requests, before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_written_where_they_are_wanted(device, backend):
    """In slices of longer tensors, whose other numbers stay; so do the fields that no node has."""
    requests, drafts = make_requests(11, device=device), random_drafts(10, 2, device=device)
    memory = {name: torch.full((43,), 1, dtype=d, device=device) for name, d in NODE_FIELDS.items()}
    others = {name: torch.full((4,), 77, device=device) for name in OTHERS}
    out = StepRequests(**{name: x[5:38] for name, x in memory.items()}, **others)
    found = expand_drafts(requests, drafts, out=out, backend=backend)
    assert found is out
    assert_nodes(found, lists(requests, drafts))
    for name, x in memory.items():
        assert (x[:5] == 1).all() and (x[38:] == 1).all(), name
    assert all((x == 77).all() for x in others.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("negative", [-1, -(2**32), -(2**32) + 5, -(2**63)])
def test_any_negative_id_is_no_draft(device, backend, negative):
    """Also one whose low 32 bits are a token."""
    requests, drafts = make_requests(3, device=device), make_drafts([[4, negative, 3]], [[-1, 0, 1]], device=device)
    assert_nodes(expand_drafts(requests, drafts, backend=backend), lists(requests, drafts))


def test_no_number_of_requests_compiles_anything():
    assert variants("expand_drafts") == {"_expand_drafts_kernel": 1}


def good_arguments():
    requests = make_requests(5)
    return dict(requests=requests, drafts=random_drafts(4, 3), out=empty_nodes(requests, 3))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "requests",
            tuple(make_requests(5)),
            TypeError,
            "requests must be the StepRequests of gather_requests, got tup",
        ),
        ("requests", make_requests(3), ValueError, "requests must have a row for each of the 4 requests .*, got 3"),
        ("requests", make_requests(6), ValueError, r"out.positions must be int32 \[24\] on cpu, got int32 \[20\] on"),
        ("drafts", None, TypeError, "drafts must be Drafts, got NoneType"),
        (
            "drafts",
            Drafts(*(x[:, :0] for x in random_drafts(4, 3))),
            ValueError,
            "drafts.token_ids must have at least one",
        ),
        ("out", tuple(empty_nodes(make_requests(5), 3)), TypeError, "out must be StepRequests, got tuple"),
        (
            "out",
            empty_nodes(make_requests(5), 2),
            ValueError,
            r"out.positions must be int32 \[20\] on cpu, got .* \[15\]",
        ),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        expand_drafts(**good_arguments() | {name: value})


def test_fewer_rows_than_fields_say_are_named():
    requests = make_requests(5)
    with pytest.raises(ValueError, match=re.escape("requests.table_rows must be int64 [4] on cpu, got int64 [5]")):
        expand_drafts(requests._replace(positions=requests.positions[1:]), random_drafts(4, 3))
