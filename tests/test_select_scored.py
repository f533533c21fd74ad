"""``select_scored``: what is scored for whom, who has to wait, and requests that do not exist."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.select_scored import inputs
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, ScoredCandidates, Status
from tests.helpers.cases import cases

BACKENDS = ["triton", "reference"]
UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE = (int(status) for status in Status)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_candidates(token_ids, counts, status, device="cpu"):
    no_probs = torch.zeros(token_ids.shape, device=device)
    status = torch.tensor(status, dtype=torch.int8, device=device)
    return Candidates(token_ids.to(device), no_probs, counts.to(device), status, no_probs[:, 0].contiguous())


def make_requests(positions, wants_length, due=None, device="cpu"):
    """Requests of so many rows, of which the fields that do not matter are 1. Their table rows go down to 0."""
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
    """End tokens of a table, all of them padding."""
    return torch.full((rows, 3), -2, dtype=torch.int32, device=device)


def lists(candidates, requests, eos_token_ids, *, drawn=None, sample=False, score_all=False):
    """(what is scored, the status), request by request."""
    b, k = candidates.token_ids.shape
    fields, statuses = {name: [] for name in ScoredCandidates._fields}, []
    for i in range(len(requests.due)):
        found = ([-1] * k, 0, 0, False)
        if i < b:
            ids, count, status = (x[i].tolist() for x in (candidates.token_ids, candidates.counts, candidates.status))
            ends = set(eos_token_ids[requests.table_rows[i].item()].tolist())
            if status == GUIDE and not requests.due[i].item() and not ends & set(ids[:count]):
                status = NOT_DUE
            statuses.append(status)
            wants_length, length = requests.wants_length[i].item(), requests.positions[i].item() + 1
            scored = count if status == GUIDE or score_all else 0
            next_token = -1 if drawn is None else drawn[i].item()
            if sample and status == SINGLE:
                next_token = ids[0]
            alone = wants_length and status != GUIDE and next_token >= 0
            if alone:
                ids, scored = [next_token, *ids[1:]], 1
            found = (ids, scored, length, alone)
        for name, value in zip(fields, found, strict=True):
            fields[name].append(value)
    dtypes = [x.dtype for x in empty_scored(0, k, torch.device("cpu"))]
    scored = (torch.tensor(x, dtype=dtype) for x, dtype in zip(fields.values(), dtypes, strict=True))
    return ScoredCandidates(*scored), torch.tensor(statuses, dtype=torch.int8)


def assert_equal(actual, expected):
    for name, x, wanted in zip(ScoredCandidates._fields, actual, expected, strict=True):
        assert x.dtype == wanted.dtype and torch.equal(x.cpu(), wanted), name


@given(cases("select_scored"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    step, out = (arguments.pop(name, None) for name in ("step", "out"))
    counted = None if step is None else step.clone()
    expected, status = lists(**arguments)
    found = select_scored(**arguments, out=out, step=counted, backend="reference")
    assert_equal(found, expected)
    assert torch.equal(arguments["candidates"].status, status)
    assert out is None or found is out
    assert step is None or counted.item() == step.item() + 1


# One request of each status, each with two candidates but the single one; all want lengths.
IDS, COUNTS = i32([5, 6], [7, 8], [0, -1], [9, 4], [2, 3]), i32(2, 2, 1, 2, 2)
STATUS = [UNGUIDED, GUIDE, SINGLE, SKIP, GUIDE]
DUE = [False, True, False, False, False]  # the last one's status becomes NOT_DUE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "token_ids", "counts", "alone"),
    [
        ({}, IDS.tolist(), [0, 2, 0, 0, 0], [0, 0, 0, 0, 0]),
        ({"score_all": True}, IDS.tolist(), [2, 2, 1, 2, 2], [0, 0, 0, 0, 0]),
        ({"sample": True}, IDS.tolist(), [0, 2, 1, 0, 0], [0, 0, 1, 0, 0]),  # the single candidate, token 0
        (
            {"drawn": [3, 3, 3, 3, 3]},
            [[3, 6], [7, 8], [3, -1], [3, 4], [3, 3]],
            [1, 2, 1, 1, 1],
            [1, 0, 1, 1, 1],
        ),
        ({"drawn": [0, 0, -1, -2, -1]}, [[0, 6], *IDS.tolist()[1:]], [1, 2, 0, 0, 0], [1, 0, 0, 0, 0]),
        ({"drawn": [-1, 3, 3, -1, -1], "sample": True}, IDS.tolist(), [0, 2, 1, 0, 0], [0, 0, 1, 0, 0]),
        (
            {"drawn": [3, -1, -1, 3, 0], "score_all": True},
            [[3, 6], [7, 8], [0, -1], [3, 4], [0, 3]],
            [1, 2, 1, 1, 1],
            [1, 0, 0, 1, 1],
        ),
        (
            {"drawn": [-1, -1, -1, -1, 7], "score_all": True},
            [*IDS.tolist()[:4], [7, 3]],
            [2, 2, 1, 2, 1],
            [0, 0, 0, 0, 1],
        ),
    ],
)
def test_what_is_scored_of_each_status(device, backend, options, token_ids, counts, alone):
    options = dict(options)
    if "drawn" in options:
        options["drawn"] = i32(*options["drawn"]).to(device)
    candidates = make_candidates(IDS, COUNTS, STATUS, device)
    requests = make_requests([4, 5, 6, 7, 8], [True] * 5, DUE, device)
    # Row 3 is that of the request that is due, which does not need its end tokens.
    ends = i32([-2, -2], [4, 9], [0, -2], [-2, -2], [6, 5]).to(device)
    scored = select_scored(candidates, requests, ends, **options, backend=backend)
    assert scored.token_ids.tolist() == token_ids
    assert scored.counts.tolist() == counts
    assert scored.alone.int().tolist() == alone
    assert scored.positions.tolist() == [5, 6, 7, 8, 9]
    assert candidates.status.tolist() == [UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE]
    # Who wants no length has no token scored alone.
    requests.wants_length.fill_(False)
    scored = select_scored(candidates, requests, ends, **options, backend=backend)
    assert not scored.alone.any()
    assert scored.token_ids.tolist() == IDS.tolist()
    assert scored.counts.tolist() == (COUNTS.tolist() if options.get("score_all") else [0, 2, 0, 0, 0])
    assert candidates.status.tolist() == [UNGUIDED, GUIDE, SINGLE, SKIP, NOT_DUE]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(4))
def test_candidates_that_end_a_request_make_it_due(device, backend, turn):
    """None of the requests is due. In any order, which takes end tokens of a table whose rows are apart."""
    ids, counts, rows, status, expected = zip(
        ([1, 2, 3, 4], 4, 5, GUIDE, GUIDE),  # its first end token, in the last column
        ([30, 31, 32, 33], 3, 2, GUIDE, GUIDE),  # its last one
        ([30, 31, 33, 32], 2, 6, GUIDE, NOT_DUE),  # 33 is beyond those that count
        ([8, 9, 33, 4], 4, 1, GUIDE, NOT_DUE),  # those are of others
        ([40, 41, -2, -1], 2, 3, GUIDE, NOT_DUE),  # -2 is padding
        ([33, 4, 7, 9], 0, 2, GUIDE, NOT_DUE),
        ([1, 2, 3, 4], 4, 5, SKIP, SKIP),
        ([1, 2, 3, 9], 4, 5, SKIP, SKIP),
        ([9, -1, -1, -1], 1, 1, SINGLE, SINGLE),
        ([7, 4, 5, 6], 4, 1, UNGUIDED, UNGUIDED),
        ([70, 5, 60, 61], 4, 0, GUIDE, GUIDE),
        strict=True,
    )
    table = [[5, -2, 70], [7, -2, -2], [11, 12, 32], [-2, -2, -2], [1, 2, 3], [4, -2, -2], [33, -2, -2], [8, 9, 4]]
    memory = torch.full((8, 5), 9, dtype=torch.int32)
    memory[:, 1:4] = i32(*table)
    order = torch.arange(11).roll(5 * turn)
    candidates = make_candidates(i32(*ids)[order], i32(*counts)[order], torch.tensor(status)[order].tolist(), device)
    requests = make_requests([3] * 11, [False] * 11, [False] * 11, device)
    requests.table_rows.copy_(torch.tensor(rows)[order])
    scored = select_scored(candidates, requests, memory.to(device)[:, 1:4], backend=backend)
    wanted = torch.tensor(expected)[order]
    assert candidates.status.tolist() == wanted.tolist()
    assert scored.counts.tolist() == torch.where(wanted == GUIDE, i32(*counts)[order], 0).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("waiting", [0, 31, 32, 40, 69])
def test_one_request_of_many_waits(device, backend, waiting):
    """In whichever program it is, all others being due or of another status."""
    status = [GUIDE if i % 3 == 0 or i == waiting else i % 3 for i in range(70)]
    candidates = make_candidates(torch.arange(140).int().view(70, 2), i32(*[2] * 70), status, device)
    due = [i != waiting and i % 3 == 0 for i in range(70)]
    ends = torch.arange(138, -1, -2, dtype=torch.int32)[:, None].to(device)  # of each its first candidate
    requests = make_requests(list(range(70)), [False] * 70, due, device)
    ends[requests.table_rows[waiting]] = 200
    scored = select_scored(candidates, requests, ends, backend=backend)
    status[waiting] = NOT_DUE
    assert candidates.status.tolist() == status
    assert scored.counts.tolist() == [2 * (x == GUIDE) for x in status]


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_that_do_not_exist_have_nothing_to_score(device, backend):
    """Whatever their rows of ``requests`` and of the result hold, in the same program and in one of their own."""
    candidates = make_candidates(i32([5, 6, -1, -1]), i32(2), [GUIDE], device)
    requests = make_requests([4] * 70, [True] * 70, device=device)
    out = empty_scored(70, 4, torch.device(device))
    for x in out:
        x.fill_(9)
    options = dict(drawn=i32(8).to(device), sample=True, score_all=True)
    found = select_scored(candidates, requests, no_ends(70, device), **options, out=out, backend=backend)
    assert found is out
    assert found.token_ids.tolist() == [[5, 6, -1, -1]] + [[-1] * 4] * 69
    for x, first in ((out.counts, 2), (out.positions, 5), (out.alone, 0)):
        assert x.tolist() == [first] + [0] * 69


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 70])
def test_no_requests(device, backend, rows):
    candidates = make_candidates(torch.zeros(0, 8, dtype=torch.int32), i32(), [], device)
    requests = make_requests([3] * rows, [True] * rows, [False] * rows, device)
    scored = select_scored(candidates, requests, no_ends(rows, device), backend=backend)
    assert scored.token_ids.tolist() == [[-1] * 8] * rows
    assert all(not x.any() for x in scored[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [1, 32, 33, 100])
def test_a_step_is_counted_once(device, backend, requests):
    candidates = make_candidates(torch.zeros(requests, 2, dtype=torch.int32), i32(*[2] * requests), [GUIDE] * requests)
    candidates = Candidates(*(x.to(device) for x in candidates))
    step = torch.tensor([2**32 - 1], device=device)
    for number in (2**32, 2**32 + 1):
        rows = make_requests([True] * requests, [True] * requests, device=device)
        select_scored(candidates, rows, no_ends(requests, device), step=step, backend=backend)
        assert step.item() == number


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [1, 16, 32, 64])
def test_every_number_of_columns(device, backend, columns):
    b = 35
    ids = torch.randperm(b * columns, generator=torch.Generator().manual_seed(0)).int().view(b, columns)
    status = [i % 5 for i in range(b)]
    candidates = make_candidates(ids, torch.arange(b, dtype=torch.int32) % (columns + 1), status, device)
    requests = make_requests(list(range(b)), [i % 5 < 3 for i in range(b)], [i % 3 == 0 for i in range(b)], device)
    drawn = (torch.arange(b, dtype=torch.int32) - 3).to(device)
    # The last column's token is one of the end tokens of every other request.
    ends = torch.stack([torch.full((b,), -2), torch.where(torch.arange(b) % 2 == 0, ids[:, -1], -2)], 1).int()
    ends = ends.flip(0).to(device)
    on_cpu = Candidates(*(x.to("cpu", copy=True) for x in candidates)), requests._make(x.cpu() for x in requests)
    expected, expected_status = lists(*on_cpu, ends, drawn=drawn, sample=True)
    scored = select_scored(candidates, requests, ends, drawn=drawn, sample=True, backend=backend)
    assert_equal(scored, expected)
    assert torch.equal(candidates.status.cpu(), expected_status)


def good_arguments():
    return dict(
        candidates=make_candidates(IDS, COUNTS, STATUS),
        requests=make_requests([4] * 6, [True] * 6),
        eos_token_ids=no_ends(6),
        drawn=i32(1, 2, 3, 4, 5),
        step=torch.tensor([7]),
        out=empty_scored(6, 2, torch.device("cpu")),
    )


def candidates_with(token_ids):
    return make_candidates(IDS, COUNTS, STATUS)._replace(token_ids=token_ids)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("candidates", tuple(make_candidates(IDS, COUNTS, STATUS)), TypeError, "candidates must be the .*, got tuple"),
        ("requests", [1, 2], TypeError, "requests must be the StepRequests of gather_requests, got list"),
        ("requests", make_requests([4] * 3, [True] * 3), ValueError, "requests must have a row .*, got 3"),
        ("out", tuple(empty_scored(6, 2, torch.device("cpu"))), TypeError, "out must be ScoredCandidates, got tuple"),
        ("out", empty_scored(5, 2, torch.device("cpu")), ValueError, r"out.token_ids must be int32 \[6, 2\] on cpu"),
        ("candidates", candidates_with(IDS.tolist()), TypeError, "candidates.token_ids must be a tensor .*, got list"),
        ("candidates", candidates_with(IDS.long()), ValueError, r"candidates.token_ids must be int32 .*, got int64"),
        (
            "candidates",
            candidates_with(IDS[0]),
            ValueError,
            r"candidates.token_ids must be .* \[\*, \*\], got .* \[2\]",
        ),
        ("candidates", candidates_with(IDS[:, [0, 1, 1]]), ValueError, "candidates.token_ids must have a power of two"),
        (
            "candidates",
            candidates_with(torch.cat([IDS, IDS], dim=1)[:, :2]),
            ValueError,
            "candidates.token_ids must be contiguous, got strides",
        ),
        ("candidates", candidates_with(IDS[:3]), ValueError, r"candidates.counts must be int32 \[3\] on cpu, got .*5"),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        select_scored(**good_arguments() | {name: value})
