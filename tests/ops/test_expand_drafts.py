"""``expand_drafts``: the fields of each node, invalid drafts, and requests without drafts."""

import math

import pytest
import torch

from lenvm_kernels.ops.expand_drafts import empty_nodes, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_requests
from tests.helpers.drafts import LARGEST, make_drafts, random_drafts


def make_requests(rows, *, seed=0, device="cpu"):
    """Random requests, with a different order and range of values in each numeric field."""
    requests, generator = empty_requests(rows, torch.device(device)), torch.Generator().manual_seed(seed)
    for i, x in enumerate(requests):
        x.copy_(torch.randperm(2 * x.numel(), generator=generator)[: x.numel()].view(x.shape) + 1000 * i)
    requests.table_rows.add_(2**40)
    for x in (requests.guided, requests.wants_length, requests.due):
        x.copy_(torch.rand(rows, generator=generator) < 0.7)
    requests.entropy_threshold[::3] = math.nan
    return requests


def test_positions_of_nodes_count_the_drafts_before_them(device, backend):
    """A tree, a chain that ends early, a request whose first draft is absent, and a request without drafts."""
    requests = make_requests(4, device=device)
    for name, values in (
        ("positions", [40, 7, 90, 3]),
        ("generated", [0, 5, 12, 30]),
        ("table_rows", [8, 3, 5, 2**33]),
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
    assert nodes.guided.tolist() == yes * 6 + yes * 4 + no * 2 + yes + no * 5 + yes + no * 5
    assert nodes.wants_length.tolist() == yes * 6 + no * 6 + yes + no * 5 + yes + no * 5
    assert nodes.due.tolist() == no * 6 + yes * 4 + no * 2 + yes + no * 5 + yes + no * 5
    thresholds = nodes.entropy_threshold.view(4, 6)
    assert thresholds[1].isnan().all()
    assert thresholds[[0, 2, 3]].tolist() == [[0.5] * 6, [0.25] * 6, [2.0] * 6]


@pytest.mark.parametrize("parent", [-1, -2, -(2**31), 3, 4, 5, 99, LARGEST])
def test_invalid_parents_count_as_the_root(device, backend, parent):
    """The fourth draft's parent is the root, itself, a later draft or out of range. Its descendants count from it."""
    drafts = make_drafts([[1, 2, 3, 4, 5, 6]], [[-1, 0, 1, parent, 3, 4]], device=device)
    nodes = expand_drafts(make_requests(2, device=device), drafts, backend=backend)
    assert (nodes.positions - nodes.positions[0]).tolist()[:7] == [0, 1, 2, 3, 1, 2, 3]
    assert (nodes.generated - nodes.generated[0]).tolist()[:7] == [0, 1, 2, 3, 1, 2, 3]


def test_requests_are_not_modified(device, backend):
    requests, drafts = make_requests(3, device=device), random_drafts(2, 4, device=device)
    before, out = [x.clone() for x in requests], empty_nodes(requests, 4)
    nodes = expand_drafts(requests, drafts, backend=backend)
    assert nodes.cached_lens is requests.cached_lens
    assert expand_drafts(requests, drafts, out=out, backend=backend) is out
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(requests, before, strict=True))
