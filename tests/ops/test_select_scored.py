"""``select_scored``: tokens scored per request, requests that are not due, and padding rows."""

import pytest
import torch

from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, Status
from tests.helpers.drafts import i32

UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE = (int(status) for status in Status)


def make_candidates(token_ids, counts, status, device="cpu"):
    no_probs = torch.zeros(token_ids.shape, device=device)
    status = torch.tensor(status, dtype=torch.int8, device=device)
    return Candidates(token_ids.to(device), no_probs, counts.to(device), status, no_probs[:, 0].contiguous())


def make_requests(positions, wants_length, due=None, device="cpu"):
    """Requests with unused fields set to 1 and table rows in descending order down to 0."""
    rows = len(positions)
    requests = empty_requests(rows, device)
    for x in requests:
        x.fill_(1)
    requests.positions.copy_(torch.tensor(positions))
    requests.wants_length.copy_(torch.tensor(wants_length))
    requests.table_rows.copy_(torch.arange(rows).flip(0))
    if due is not None:
        requests.due.copy_(torch.tensor(due))
    return requests


def no_ends(rows, device="cpu"):
    """End tokens of a table without any: all padding."""
    return torch.full((rows, 3), -2, dtype=torch.int32, device=device)


# One request of each status with two candidates (one if SINGLE); all request lengths.
IDS, COUNTS = i32([5, 6], [7, 8], [0, -1], [9, 4], [2, 3]), i32(2, 2, 1, 2, 2)
STATUS = [UNGUIDED, GUIDE, SINGLE, SKIP, GUIDE]
DUE = [False, True, False, False, False]  # the status of the last request becomes NOT_DUE


ALL = IDS.tolist()
# Options; then tokens, counts, and which requests have one token alone, the next one.
SELECTIONS = [
    ({}, ALL, [0, 2, 0, 0, 0], [0, 0, 0, 0, 0]),
    ({"score_all": True}, ALL, [2, 2, 1, 2, 2], [0, 0, 0, 0, 0]),
    ({"sample": True}, ALL, [0, 2, 1, 0, 0], [0, 0, 1, 0, 0]),  # the single candidate, token 0
    ({"drawn": [3] * 5}, [[3, 6], [7, 8], [3, -1], [3, 4], [3, 3]], [1, 2, 1, 1, 1], [1, 0, 1, 1, 1]),
    ({"drawn": [0, 0, -1, -2, -1]}, [[0, 6], *ALL[1:]], [1, 2, 0, 0, 0], [1, 0, 0, 0, 0]),
    ({"drawn": [-1, 3, 3, -1, -1], "sample": True}, ALL, [0, 2, 1, 0, 0], [0, 0, 1, 0, 0]),
    (
        {"drawn": [3, -1, -1, 3, 0], "score_all": True},
        [[3, 6], [7, 8], [0, -1], [3, 4], [0, 3]],
        [1, 2, 1, 1, 1],
        [1, 0, 0, 1, 1],
    ),
    ({"drawn": [-1] * 4 + [7], "score_all": True}, [*ALL[:4], [7, 3]], [2, 2, 1, 2, 1], [0, 0, 0, 0, 1]),
]


@pytest.mark.parametrize(("options", "token_ids", "counts", "alone"), SELECTIONS)
def test_scored_tokens_of_each_status(device, backend, options, token_ids, counts, alone):
    options = dict(options)
    if "drawn" in options:
        options["drawn"] = i32(*options["drawn"]).to(device)
    candidates = make_candidates(IDS, COUNTS, STATUS, device)
    requests = make_requests([4, 5, 6, 7, 8], [True] * 5, DUE, device)
    # Table row 3 belongs to the request that is due, whose end tokens are not read.
    ends = i32([-2, -2], [4, 9], [0, -2], [-2, -2], [6, 5]).to(device)
    scored = select_scored(candidates, requests, ends, **options, backend=backend)
    assert scored.token_ids.tolist() == token_ids
    assert scored.counts.tolist() == counts
    assert scored.alone.int().tolist() == alone
    assert scored.positions.tolist() == [5, 6, 7, 8, 9]
    assert candidates.status.tolist() == [UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE]
    # Without requested lengths no token is scored alone.
    requests.wants_length.fill_(False)
    scored = select_scored(candidates, requests, ends, **options, backend=backend)
    assert not scored.alone.any()
    assert scored.token_ids.tolist() == IDS.tolist()
    assert scored.counts.tolist() == (COUNTS.tolist() if options.get("score_all") else [0, 2, 0, 0, 0])
    assert candidates.status.tolist() == [UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE]


# Candidates, their number, the table row, the status before and after. No request is due by its stride.
ENDS = i32([5, -2, 70], [7, -2, -2], [11, 12, 32], [-2, -2, -2], [1, 2, 3], [4, -2, -2], [33, -2, -2], [8, 9, 4])
DUE_BY_END = [
    ([1, 2, 3, 4], 4, 5, GUIDE, GUIDE),  # first end token, in the last candidate column
    ([30, 31, 32, 33], 3, 2, GUIDE, GUIDE),  # last end token
    ([30, 31, 33, 32], 2, 6, GUIDE, NOT_DUE),  # 33 is past the row's candidate count
    ([8, 9, 33, 4], 4, 1, GUIDE, NOT_DUE),  # end tokens of other requests
    ([40, 41, -2, -1], 2, 3, GUIDE, NOT_DUE),  # -2 is padding
    ([33, 4, 7, 9], 0, 2, GUIDE, NOT_DUE),
    ([1, 2, 3, 4], 4, 5, SKIP, SKIP),
    ([1, 2, 3, 9], 4, 5, SKIP, SKIP),
    ([9, -1, -1, -1], 1, 1, SINGLE, SINGLE),
    ([7, 4, 5, 6], 4, 1, UNGUIDED, UNGUIDED),
    ([70, 5, 60, 61], 4, 0, GUIDE, GUIDE),
]


def test_end_token_among_candidates_makes_request_due(device, backend):
    ids, counts, rows, status, expected = zip(*DUE_BY_END, strict=True)
    candidates = make_candidates(i32(*ids), i32(*counts), status, device)
    requests = make_requests([3] * 11, [False] * 11, [False] * 11, device)
    requests.table_rows.copy_(torch.tensor(rows))
    scored = select_scored(candidates, requests, ENDS.to(device), backend=backend)
    assert candidates.status.tolist() == list(expected)
    wanted = [count if after == GUIDE else 0 for count, after in zip(counts, expected, strict=True)]
    assert scored.counts.tolist() == wanted


def test_padding_rows_have_nothing_to_score(device, backend):
    """Padding rows are written whatever they held, in the program of a request and in separate programs."""
    candidates = make_candidates(i32([5, 6, -1, -1]), i32(2), [GUIDE], device)
    requests = make_requests([4] * 70, [True] * 70, device=device)
    out = empty_scored(70, 4, torch.device(device))
    for x in out:
        x.fill_(9)
    step = torch.tensor([2**32 - 1], device=device)
    options = dict(drawn=i32(8).to(device), sample=True, score_all=True, step=step)
    found = select_scored(candidates, requests, no_ends(70, device), **options, out=out, backend=backend)
    assert found is out and step.item() == 2**32  # counted once, independent of the number of programs
    assert found.token_ids.tolist() == [[5, 6, -1, -1]] + [[-1] * 4] * 69
    for x, first in ((out.counts, 2), (out.positions, 5), (out.alone, 0)):
        assert x.tolist() == [first] + [0] * 69


@pytest.mark.parametrize("rows", [0, 3])
def test_step_without_rows_is_not_counted(backend, device, rows):
    """A step with padding rows only is counted, because its results are written."""
    empty = make_candidates(torch.zeros(0, 2, dtype=torch.int32), i32(), [], device)
    requests, step = make_requests([0] * rows, [False] * rows, device=device), torch.tensor([6], device=device)
    select_scored(empty, requests, no_ends(4, device), step=step, backend=backend)
    assert step.item() == 6 + (rows > 0)
