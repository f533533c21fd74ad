"""``select_scored``: what is scored for whom, which last tokens are computed, and requests that do not exist."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.select_scored import inputs
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.types import Candidates, ScoredCandidates, Status
from tests.helpers.cases import assert_right, cases
from tests.helpers.wrong_tensors import assert_refuses

BACKENDS = ["triton", "reference"]
UNGUIDED, GUIDE, SINGLE, SKIP = (int(status) for status in Status)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_candidates(token_ids, counts, status, device="cpu"):
    no_probs = torch.zeros(token_ids.shape, device=device)
    status = torch.tensor(status, dtype=torch.int8, device=device)
    return Candidates(token_ids.to(device), no_probs, counts.to(device), status, no_probs[:, 0].contiguous())


def make_requests(positions, guided, wants_length, device="cpu"):
    """Requests of so many rows, of which the fields that do not matter are 1."""
    requests = empty_requests(len(positions), device)
    for x in requests:
        x.fill_(1)
    for name, values in (("positions", positions), ("guided", guided), ("wants_length", wants_length)):
        getattr(requests, name).copy_(torch.tensor(values))
    return requests


def lists(candidates, requests, *, drawn=None, sample=False, score_all=False):
    """What is scored, request by request."""
    b, k = candidates.token_ids.shape
    fields = {name: [] for name in ScoredCandidates._fields}
    for i in range(len(requests.guided)):
        found = ([-1] * k, 0, 0, 0, 0, False)
        if i < b:
            ids, count, status = (x[i].tolist() for x in (candidates.token_ids, candidates.counts, candidates.status))
            wants_length, length = requests.wants_length[i].item(), requests.positions[i].item() + 1
            scored = count if status == GUIDE or score_all else 0
            next_token = -1 if drawn is None else drawn[i].item()
            if sample and status == SINGLE:
                next_token = ids[0]
            alone = wants_length and status != GUIDE and next_token >= 0
            if alone:
                ids, scored = [next_token, *ids[1:]], 1
            delta = requests.guided[i].item() or wants_length
            found = (ids, scored, length, int(delta), length - int(delta), alone)
        for name, value in zip(fields, found, strict=True):
            fields[name].append(value)
    dtypes = [x.dtype for x in empty_scored(0, k, torch.device("cpu"))]
    return ScoredCandidates(*(torch.tensor(x, dtype=dtype) for x, dtype in zip(fields.values(), dtypes, strict=True)))


def assert_equal(actual, expected):
    for name, x, wanted in zip(ScoredCandidates._fields, actual, expected, strict=True):
        assert x.dtype == wanted.dtype and torch.equal(x.cpu(), wanted), name


@given(cases("select_scored"))
def test_kernel_matches_reference(device, case):
    assert_right(case, device)


@given(cases("select_scored"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    step, out = (arguments.pop(name, None) for name in ("step", "out"))
    counted = None if step is None else step.clone()
    found = select_scored(**arguments, out=out, step=counted, backend="reference")
    assert_equal(found, lists(**arguments))
    assert out is None or found is out
    assert step is None or counted.item() == step.item() + 1


# One request of each status, each with two candidates but the single one; all want lengths.
IDS, COUNTS, STATUS = i32([5, 6], [7, 8], [0, -1], [9, 4]), i32(2, 2, 1, 2), [UNGUIDED, GUIDE, SINGLE, SKIP]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "token_ids", "counts", "alone"),
    [
        ({}, IDS.tolist(), [0, 2, 0, 0], [0, 0, 0, 0]),
        ({"score_all": True}, IDS.tolist(), [2, 2, 1, 2], [0, 0, 0, 0]),
        ({"sample": True}, IDS.tolist(), [0, 2, 1, 0], [0, 0, 1, 0]),  # the single candidate, token 0
        ({"drawn": [3, 3, 3, 3]}, [[3, 6], [7, 8], [3, -1], [3, 4]], [1, 2, 1, 1], [1, 0, 1, 1]),
        ({"drawn": [0, 0, -1, -2]}, [[0, 6], *IDS.tolist()[1:]], [1, 2, 0, 0], [1, 0, 0, 0]),
        ({"drawn": [-1, 3, 3, -1], "sample": True}, IDS.tolist(), [0, 2, 1, 0], [0, 0, 1, 0]),
        (
            {"drawn": [3, -1, -1, 3], "score_all": True},
            [[3, 6], [7, 8], [0, -1], [3, 4]],
            [1, 2, 1, 1],
            [1, 0, 0, 1],
        ),
    ],
)
def test_what_is_scored_of_each_status(device, backend, options, token_ids, counts, alone):
    options = dict(options)
    if "drawn" in options:
        options["drawn"] = i32(*options["drawn"]).to(device)
    candidates = make_candidates(IDS, COUNTS, STATUS, device)
    requests = make_requests([4, 5, 6, 7], [False, True, True, True], [True] * 4, device)
    scored = select_scored(candidates, requests, **options, backend=backend)
    assert scored.token_ids.tolist() == token_ids
    assert scored.counts.tolist() == counts
    assert scored.alone.int().tolist() == alone
    assert scored.positions.tolist() == [5, 6, 7, 8]
    # Who wants no length has no token scored alone.
    requests.wants_length.fill_(False)
    scored = select_scored(candidates, requests, **options, backend=backend)
    assert not scored.alone.any()
    assert scored.token_ids.tolist() == IDS.tolist()
    assert scored.counts.tolist() == (COUNTS.tolist() if options.get("score_all") else [0, 2, 0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_tokens_are_computed_where_somebody_needs_them(device, backend):
    """The requests: nobody's, guided, of lengths, both."""
    b = 4
    candidates = make_candidates(torch.full((b, 1), 3, dtype=torch.int32), i32(*[1] * b), [GUIDE] * b, device)
    guided, wants_length = [False, True, False, True], [False, False, True, True]
    requests = make_requests([10, 0, 20, 100_000], guided, wants_length, device)
    scored = select_scored(candidates, requests, backend=backend)
    assert scored.delta_lens.tolist() == [0, 1, 1, 1]
    assert scored.positions.tolist() == [11, 1, 21, 100_001]
    assert scored.cached_lens.tolist() == [11, 0, 20, 100_000]


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_that_do_not_exist_have_nothing_to_score(device, backend):
    """Whatever their rows of ``requests`` and of the result hold, in the same program and in one of their own."""
    candidates = make_candidates(i32([5, 6, -1, -1]), i32(2), [GUIDE], device)
    requests = make_requests([4] * 70, [True] * 70, [True] * 70, device)
    out = empty_scored(70, 4, torch.device(device))
    for x in out:
        x.fill_(9)
    options = dict(drawn=i32(8).to(device), sample=True, score_all=True)
    found = select_scored(candidates, requests, **options, out=out, backend=backend)
    assert found is out
    assert found.token_ids.tolist() == [[5, 6, -1, -1]] + [[-1] * 4] * 69
    for x, first in ((out.counts, 2), (out.positions, 5), (out.delta_lens, 1), (out.cached_lens, 4), (out.alone, 0)):
        assert x.tolist() == [first] + [0] * 69


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 70])
def test_no_requests(device, backend, rows):
    candidates = make_candidates(torch.zeros(0, 8, dtype=torch.int32), i32(), [], device)
    scored = select_scored(candidates, make_requests([3] * rows, [True] * rows, [True] * rows, device), backend=backend)
    assert scored.token_ids.tolist() == [[-1] * 8] * rows
    assert all(not x.any() for x in scored[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [1, 32, 33, 100])
def test_a_step_is_counted_once(device, backend, requests):
    candidates = make_candidates(torch.zeros(requests, 2, dtype=torch.int32), i32(*[2] * requests), [GUIDE] * requests)
    candidates = Candidates(*(x.to(device) for x in candidates))
    step = torch.tensor([2**32 - 1], device=device)
    for number in (2**32, 2**32 + 1):
        flags = [True] * requests
        select_scored(candidates, make_requests(flags, flags, flags, device), step=step, backend=backend)
        assert step.item() == number


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [1, 16, 32, 64])
def test_every_number_of_columns(device, backend, columns):
    b = 35
    ids = torch.randperm(b * columns, generator=torch.Generator().manual_seed(0)).int().view(b, columns)
    status = [i % 4 for i in range(b)]
    candidates = make_candidates(ids, torch.arange(b, dtype=torch.int32) % (columns + 1), status, device)
    requests = make_requests(list(range(b)), [i % 3 == 0 for i in range(b)], [i % 5 < 3 for i in range(b)], device)
    drawn = (torch.arange(b, dtype=torch.int32) - 3).to(device)
    scored = select_scored(candidates, requests, drawn=drawn, sample=True, backend=backend)
    expected = lists(
        Candidates(*(x.cpu() for x in candidates)), requests._make(x.cpu() for x in requests), drawn=drawn, sample=True
    )
    assert_equal(scored, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_is_the_same_in_every_batch(device, backend):
    b, generator = 40, torch.Generator().manual_seed(0)
    flags = torch.rand(2, b, generator=generator) < 0.5
    status = torch.randint(0, 4, (b,), generator=generator).tolist()
    ids = torch.randint(0, 99, (b, 4), generator=generator, dtype=torch.int32)
    candidates = make_candidates(ids, torch.randint(0, 5, (b,), generator=generator, dtype=torch.int32), status, device)
    requests = make_requests(torch.randint(0, 99, (b,), generator=generator).tolist(), *flags.tolist(), device)
    drawn = torch.randint(-1, 9, (b,), generator=generator, dtype=torch.int32).to(device)

    def select(chosen):
        rows = candidates._make(x[chosen] for x in candidates), requests._make(x[chosen] for x in requests)
        return select_scored(*rows, drawn=drawn[chosen], sample=True, backend=backend)

    together = select(torch.arange(b, device=device))
    for chosen in (torch.randperm(b, generator=generator), torch.tensor([0]), torch.tensor([39, 7])):
        for x, wanted in zip(select(chosen.to(device)), together, strict=True):
            assert torch.equal(x, wanted[chosen.to(device)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(device):
    candidates = make_candidates(IDS, COUNTS, STATUS, device)
    requests = make_requests([4, 5, 6, 7], [True] * 4, [True] * 4, device)
    drawn, step = i32(3, -1, -1, 3).to(device), torch.ones(1, dtype=torch.int64, device=device)
    options = dict(drawn=drawn, step=step, sample=True, out=empty_scored(4, 2, device))
    select_scored(candidates, requests, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scored = select_scored(candidates, requests, **options)
    drawn.fill_(-1)
    candidates.counts.copy_(i32(1, 1, 1, 1))
    before = step.item()
    graph.replay()
    assert scored.counts.tolist() == [0, 1, 1, 0] and scored.alone.tolist() == [False, False, True, False]
    assert step.item() == before + 1


def good_arguments():
    return dict(
        candidates=make_candidates(IDS, COUNTS, STATUS),
        requests=make_requests([4] * 5, [True] * 5, [True] * 5),
        drawn=i32(1, 2, 3, 4),
        step=torch.tensor([7]),
        out=empty_scored(5, 2, torch.device("cpu")),
    )


@pytest.mark.parametrize("name", ["drawn", "step"])
def test_wrong_tensors_are_named(name):
    arguments = good_arguments()
    assert_refuses(select_scored, arguments, name, arguments[name].dtype)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("candidates", name) for name in ("counts", "status")),
        *(("requests", name) for name in ("positions", "guided", "wants_length")),
        *(("out", name) for name in ScoredCandidates._fields),
    ],
)
def test_wrong_fields_are_named(owner, name):
    arguments = good_arguments()

    def select(**field):
        return select_scored(**arguments | {owner: arguments[owner]._replace(**{name: field[f"{owner}.{name}"]})})

    field = getattr(arguments[owner], name)
    allowed = dict(any_rows=True) if name == "guided" else {}
    if (owner, name) == ("out", "token_ids"):
        allowed = dict(rows_apart=False)
    assert_refuses(select, {f"{owner}.{name}": field}, f"{owner}.{name}", field.dtype, **allowed)


def candidates_with(token_ids):
    return make_candidates(IDS, COUNTS, STATUS)._replace(token_ids=token_ids)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("candidates", tuple(make_candidates(IDS, COUNTS, STATUS)), TypeError, "candidates must be the .*, got tuple"),
        ("requests", [1, 2], TypeError, "requests must be the StepRequests of gather_requests, got list"),
        ("requests", make_requests([4] * 3, [True] * 3, [True] * 3), ValueError, "requests must have a row .*, got 3"),
        ("out", tuple(empty_scored(5, 2, torch.device("cpu"))), TypeError, "out must be ScoredCandidates, got tuple"),
        ("out", empty_scored(4, 2, torch.device("cpu")), ValueError, r"out.token_ids must be int32 \[5, 2\] on cpu"),
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
        ("candidates", candidates_with(IDS[:3]), ValueError, r"candidates.counts must be int32 \[3\] on cpu, got .*4"),
        ("backend", "cuda", ValueError, "backend must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        select_scored(**good_arguments() | {name: value})
