"""``catch_up``: which tokens are computed for whom and when, where they belong, and requests that do not exist."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.catch_up import inputs
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.types import DeltaTokens, StepHistory
from tests.helpers.cases import cases

BACKENDS = ["triton", "reference"]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_requests(lengths, cached_lens, table_rows, *, new_lens=None, guided=None, wants_length=None, device="cpu"):
    """Guided requests, or as ``guided`` says, with a new token each. The fields that do not matter are 1."""
    requests = empty_requests(len(lengths), torch.device(device))
    for x in requests:
        x.fill_(1)
    requests.new_lens.copy_(i32(*([1] * len(lengths) if new_lens is None else new_lens)))
    requests.positions.copy_(i32(*lengths) - 1)
    requests.cached_lens.copy_(i32(*cached_lens))
    requests.table_rows.copy_(torch.tensor(table_rows))
    requests.guided.copy_(torch.tensor([True] * len(lengths) if guided is None else guided))
    requests.wants_length.copy_(torch.tensor([False] * len(lengths) if wants_length is None else wants_length))
    return requests


def make_history(rows, held, device="cpu"):
    """Of tokens that are 100 times their row and more by their column; -5 tokens are cached of each."""
    history = empty_history(rows, held, torch.device(device))
    history.tokens.copy_(100 * torch.arange(rows)[:, None] + torch.arange(held))
    history.cached_lens.fill_(-5)  # what is not written shows
    return history


def lists(history, requests, counts, slot_table, *, committed=None, page_size=1):
    """(the delta, what is cached afterwards of each table row), request by request."""
    held, cached_lens = history.tokens.shape[1], history.cached_lens.tolist()
    fields = {name: [] for name in DeltaTokens._fields}
    for i in range(len(counts)):
        row, cached, new = (x[i].item() for x in (requests.table_rows, requests.cached_lens, requests.new_lens))
        length = requests.positions[i].item() + 1
        if committed is not None and cached == length - new:
            cached += committed[i].item()
        missing = [*range(cached, length)]
        needs_values = requests.guided[i] or requests.wants_length[i]
        if not needs_values or (counts[i] == 0 and len(missing) <= held - requests.tokens.shape[1]):
            missing = []
        missing = missing[:held]
        padding = held - len(missing)
        token_ids = [history.tokens[row, p % held].item() for p in missing]
        slots = [slot_table[row, p // page_size].item() * page_size + p % page_size for p in missing]
        found = (token_ids + [0] * padding, slots + [-1] * padding, len(missing), min(cached, length))
        for name, value in zip(fields, found, strict=True):
            fields[name].append(value)
        if length > 0:
            cached_lens[row] = cached + len(missing)
    empty = empty_delta(len(counts), held, torch.device("cpu"))
    fields = [torch.tensor(x, dtype=e.dtype).view(e.shape) for x, e in zip(fields.values(), empty, strict=True)]
    return DeltaTokens(*fields), cached_lens


def assert_equal(actual, expected):
    for name, x, wanted in zip(DeltaTokens._fields, actual, expected, strict=True):
        assert x.dtype == wanted.dtype and torch.equal(x.cpu(), wanted), name


def copied(history):
    return StepHistory(*(x.clone() for x in history))


@given(cases("catch_up"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    out, history = arguments.pop("out", None), arguments.pop("history")
    expected, cached_lens = lists(history, **arguments)
    left = copied(history)
    found = catch_up(left, **arguments, out=out, backend="reference")
    assert_equal(found, expected)
    assert out is None or found is out
    assert left.cached_lens.tolist() == cached_lens
    for name in ("places", "steps", "step", "tokens", "told_lens"):
        assert torch.equal(getattr(left, name), getattr(history, name)), name


# Of a history of three tokens: the length of each request, its table row, tokens that are cached, tokens scored,
# whether it is guided and asks for lengths; then the positions of the tokens computed.
WHO_COMPUTES = [
    ((8, 5, 7, 2, True, False), [7]),
    ((8, 2, 6, 1, True, False), [6, 7]),
    ((9, 7, 6, 1, False, True), [6, 7, 8]),
    ((4, 0, 4, 2, True, True), []),  # all are cached
    ((9, 4, 8, 0, True, False), []),  # waits
    ((5, 8, 3, 0, False, True), []),  # waits
    ((8, 1, 5, 0, True, False), [5, 6, 7]),  # can wait no longer
    ((7, 9, 4, 0, False, True), [4, 5, 6]),
    ((8, 6, 5, 3, False, False), []),  # needs no values
    ((3, 3, 0, 0, False, False), []),
    ((1, 10, 0, 1, True, False), [0]),
    ((2, 11, 0, 1, True, False), [0, 1]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(3))
def test_who_computes_what(device, backend, turn):
    """In any order; each row's pages are its own, and the slot table has room for more."""
    order = torch.arange(len(WHO_COMPUTES)).roll(5 * turn).tolist()
    asked, expected = zip(*(WHO_COMPUTES[i] for i in order), strict=True)
    lengths, rows, cached_lens, counts, guided, wants_length = zip(*asked, strict=True)
    requests = make_requests(lengths, cached_lens, rows, guided=guided, wants_length=wants_length, device=device)
    history, b = make_history(13, 3, device), len(asked)
    pages = torch.randperm(12 * 17, generator=torch.Generator().manual_seed(turn)).int().view(12, 17)
    delta = catch_up(history, requests, i32(*counts).to(device), pages.to(device)[:, 4:], backend=backend)
    assert delta.lens.tolist() == [len(positions) for positions in expected]
    assert delta.cached_lens.tolist() == list(cached_lens)
    left = [-5] * 13
    for i in range(b):
        row, positions = rows[i], expected[i]
        padding = 3 - len(positions)
        assert delta.token_ids[i].tolist() == [100 * row + p % 3 for p in positions] + [0] * padding
        assert delta.slots[i].tolist() == [pages[row, 4 + p].item() for p in positions] + [-1] * padding
        left[row] = cached_lens[i] + len(positions)
    assert history.cached_lens.tolist() == left


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("held", [1, 2, 3, 5, 16, 64])
def test_every_number_of_tokens_held(device, backend, held):
    """A request waits with one token less, whichever columns they are in; with one more the first ones are computed."""
    lengths, cached_lens, rows, counts = [], [], [], []
    for i, missing in enumerate((held, held - 1, 1, held + 1, held - 1, 0)):
        lengths.append(200 + 37 * i)
        cached_lens.append(lengths[-1] - missing)
        counts.append(int(i == 4))
        rows.append((5 * i + 3) % 7)
    history, slot_table = make_history(7, held, device), torch.randperm(7 * 400).int().view(7, 400)
    requests = make_requests(lengths, cached_lens, rows, device=device)
    delta = catch_up(history, requests, i32(*counts).to(device), slot_table.to(device), backend=backend)
    only_one = held == 1
    assert delta.lens.tolist() == [held, 0, int(only_one), held, held - 1, 0]
    for i, count in enumerate(delta.lens.tolist()):
        positions = torch.arange(cached_lens[i], cached_lens[i] + count)
        assert delta.token_ids[i, :count].tolist() == (100 * rows[i] + positions % held).tolist()
        assert delta.slots[i, :count].tolist() == slot_table[rows[i], positions].tolist()
        assert not delta.token_ids[i, count:].any() and (delta.slots[i, count:] == -1).all()
        assert history.cached_lens[rows[i]] == cached_lens[i] + count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_tokens_lie_in_pages(device, backend, page_size):
    """Those of a request in several of them, in no order. Slots are past 32 bits where pages are."""
    history, rows = make_history(3, 16, device), [2, 0, 1]
    requests = make_requests([20, 33, 7], [5, 17, 4], rows, device=device)
    slot_table = torch.randperm(3 * 40, generator=torch.Generator().manual_seed(0)).int().view(3, 40)
    slot_table[0] = 2**31 - 1 - slot_table[0]
    delta = catch_up(history, requests, i32(1, 1, 1).to(device), slot_table.to(device), page_size=page_size)
    found = catch_up(
        history, requests, i32(1, 1, 1).to(device), slot_table.to(device), page_size=page_size, backend=backend
    )
    for x, wanted in zip(found, delta, strict=True):
        assert torch.equal(x, wanted)
    assert found.lens.tolist() == [15, 16, 3]
    for i, (first, last) in enumerate(((5, 20), (17, 33), (4, 7))):
        pages = slot_table[rows[i]].tolist()
        wanted = [pages[p // page_size] * page_size + p % page_size for p in range(first, last)]
        assert found.slots[i].tolist() == wanted + [-1] * (16 - len(wanted))
    assert page_size == 1 or found.slots.max() > 2**31


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_committed_token_counts_if_all_before_it_are_cached(device, backend):
    """Also of a request that nobody guides any more. Otherwise it is computed with those before it, or it waits."""
    rows = [4, 2, 6, 0, 5, 1, 3]
    lengths, cached_lens = [9, 9, 9, 9, 9, 9, 12], [8, 7, 8, 8, 7, 9, 8]
    counts, committed = i32(1, 1, 1, 0, 0, 1, 0), i32(1, 1, 0, 1, 1, 1, 1)
    guided = [True, True, True, False, True, True, True]
    requests = make_requests(lengths, cached_lens, rows, guided=guided, device=device)
    history, slot_table = make_history(7, 4, device), torch.arange(139, -1, -1).int().view(7, 20).to(device)
    delta = catch_up(history, requests, counts.to(device), slot_table, committed=committed.to(device), backend=backend)
    assert delta.lens.tolist() == [0, 2, 1, 0, 0, 0, 4]
    assert delta.cached_lens.tolist() == [9, 7, 8, 9, 7, 9, 8]
    assert delta.token_ids.tolist()[1:3] == [[203, 200, 0, 0], [600, 0, 0, 0]]
    assert delta.slots.tolist()[1:3] == [[139 - 47, 139 - 48, -1, -1], [139 - 128, -1, -1, -1]]
    assert history.cached_lens[rows].tolist() == [9, 9, 9, 9, 7, 9, 12]


# Of a history of five tokens: the length of each request, its table row, tokens that are cached and that are new, how
# many of these are committed, and whether any is scored; then tokens that are cached, and the positions computed.
COMMITTED = [
    ((9, 5, 6, 3, 3, True), 9, []),  # all of them
    ((9, 0, 6, 3, 2, True), 8, [8]),
    ((9, 7, 6, 3, 1, True), 7, [7, 8]),
    ((9, 2, 6, 3, 0, True), 6, [6, 7, 8]),
    ((9, 3, 6, 3, 2, False), 8, []),  # the last one waits
    ((9, 8, 4, 5, 0, False), 4, [4, 5, 6, 7, 8]),  # as many are missing as are held
    ((9, 1, 4, 5, 1, False), 5, []),  # one less
    ((9, 4, 6, 2, 2, True), 6, [6, 7, 8]),  # the one before them is missing
    ((9, 6, 7, 3, 3, True), 7, [7, 8]),  # the first of them was cached before
    ((9, 9, 9, 0, 0, True), 9, []),  # nothing is new
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(3))
def test_committed_tokens_count_from_the_first_new_one_on(device, backend, turn):
    order = torch.arange(len(COMMITTED)).roll(3 * turn).tolist()
    asked, cached_lens, expected = zip(*(COMMITTED[i] for i in order), strict=True)
    lengths, rows, were_cached, new_lens, committed, scored = zip(*asked, strict=True)
    requests = make_requests(lengths, were_cached, rows, new_lens=new_lens, device=device)
    history, slot_table = make_history(10, 5, device), torch.arange(199, -1, -1).int().view(10, 20).to(device)
    options = dict(committed=i32(*committed).to(device), backend=backend)
    delta = catch_up(history, requests, i32(*scored).to(device), slot_table, **options)
    assert delta.cached_lens.tolist() == list(cached_lens)
    assert delta.lens.tolist() == [len(positions) for positions in expected]
    for i, positions in enumerate(expected):
        padding = [0] * (5 - len(positions))
        assert delta.token_ids[i].tolist() == [100 * rows[i] + p % 5 for p in positions] + padding
        assert delta.slots[i].tolist() == [199 - 20 * rows[i] - p for p in positions] + [-1] * len(padding)
        assert history.cached_lens[rows[i]] == cached_lens[i] + len(positions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_one_token_held_nobody_waits(device, backend):
    """What is committed is not computed again, and what is not is, whether anything is scored or not."""
    requests = make_requests([9, 6, 5, 4], [8, 5, 5, 3], [2, 0, 3, 1], device=device)
    history, committed = make_history(4, 1, device), i32(1, 0, 0, 0).to(device)
    slot_table = torch.arange(40).int().view(4, 10).to(device)
    delta = catch_up(history, requests, i32(3, 0, 2, 4).to(device), slot_table, committed=committed, backend=backend)
    assert delta.token_ids.tolist() == [[0], [0], [0], [100]] and delta.slots.tolist() == [[-1], [5], [-1], [13]]
    assert delta.lens.tolist() == [0, 1, 0, 1] and delta.cached_lens.tolist() == [9, 5, 5, 3]
    assert history.cached_lens.tolist() == [6, 4, 9, 5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_committed", [False, True])
def test_more_is_cached_than_the_sequence_has(device, backend, is_committed):
    """As where a prediction looks at a sequence without its last token: nothing is computed, and all stays cached."""
    requests = make_requests([7, 3, 1, 0], [8, 30, 2, 4], [1, 3, 0, 2], device=device)
    history = make_history(4, 2, device)
    committed = i32(*[int(is_committed)] * 4).to(device)
    slot_table = torch.zeros(4, 9, dtype=torch.int32, device=device)
    delta = catch_up(history, requests, i32(1, 0, 5, 1).to(device), slot_table, committed=committed, backend=backend)
    assert delta.lens.tolist() == [0] * 4 and delta.cached_lens.tolist() == [7, 3, 1, 0]
    assert delta.token_ids.tolist() == [[0, 0]] * 4 and delta.slots.tolist() == [[-1, -1]] * 4
    assert history.cached_lens.tolist() == [2, 8, -5, 30]  # the request of row 2 has no tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_that_do_not_exist_write_nothing(device, backend):
    """Their table row is the last one, which the slot table need not have; in a program of their own and not."""
    history, b = make_history(3, 4, device), 41
    requests = make_requests(
        [7] + [0] * 40, [5] + [0] * 40, [1] + [2] * 40, guided=[True] + [False] * 40, device=device
    )
    out = DeltaTokens(*(x.fill_(77) for x in empty_delta(b, 4, torch.device(device))))
    slot_table = i32([1] * 9, [10, 11, 12, 13, 14, 19, 16, 17, 18]).to(device)
    counts = i32(3, *[0] * 40).to(device)
    found = catch_up(history, requests, counts, slot_table, out=out, backend=backend)
    assert found is out
    assert out.token_ids.tolist() == [[101, 102, 0, 0]] + [[0] * 4] * 40
    assert out.slots.tolist() == [[19, 16, -1, -1]] + [[-1] * 4] * 40
    assert out.lens.tolist() == [2] + [0] * 40 and out.cached_lens.tolist() == [5] + [0] * 40
    assert history.cached_lens.tolist() == [-5, 7, -5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_requests(device, backend):
    history = make_history(3, 4, device)
    delta = catch_up(
        history,
        make_requests([], [], [], device=device),
        i32().to(device),
        i32([0], [0], [0]).to(device),
        backend=backend,
    )
    assert [list(x.shape) for x in delta] == [[0, 4], [0, 4], [0], [0]] and history.cached_lens.tolist() == [-5] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_over_many_steps(device, backend):
    """With another one beside it, of row 0, that is scored at every step and computes its last token each time.

    The request of row 2 begins with 5 cached tokens of a prompt of 6. Its token at position p is 10 + p.
    """
    guidance = [parse_guidance({"target_length": 60})] * 3
    table = GuidanceTable.from_params(guidance, [{0}] * 3, device)
    history, page_size = empty_history(3, 3, torch.device(device)), 4
    history.told_lens.copy_(i32(10, 0, 5))
    history.cached_lens.copy_(i32(10, 0, 5))
    slot_table = i32([0, 1, 2, 3, 4, 5, 6, 7], [0] * 8, [31, 22, 13, 40, 8, 9, 10, 11]).to(device)

    def slot(position):
        return slot_table[2, position // page_size].item() * page_size + position % page_size

    length, other = 5, 10
    # Tokens that are new, whether any is scored, how many were committed; then the positions computed.
    for new, scored, committed, expected in (
        (1, True, 0, [5]),
        (1, True, 1, []),  # 6 was a candidate of the step before
        (1, False, 1, []),  # 7 too
        (1, False, 0, []),  # 8 waits
        (1, False, 1, []),  # 9 waits, though its keys and values were there: 8 is missing
        (1, True, 0, [8, 9, 10]),
        (1, False, 0, []),  # 11 waits
        (2, False, 0, [11, 12, 13]),  # as many as are held
        (3, False, 1, []),  # 14 was a candidate; 15 and 16 wait
        (1, False, 1, [15, 16, 17]),
        (0, True, 0, []),
        (2, True, 2, []),  # 18 and 19 were, one after the other
        (3, True, 1, [21, 22]),
        (1, True, 0, [23]),
    ):
        first, length, other = length, length + new, other + 1
        tokens = torch.tensor([[10 + first + i for i in range(3)], [500 + other, 7, 7]], device=device)
        requests = gather_requests(
            table,
            tokens,
            torch.tensor([2, 0], device=device),
            i32(length, other).to(device),
            new_lens=i32(new, 1).to(device),
            history=history,
            backend=backend,
        )
        delta = catch_up(
            history,
            requests,
            i32(2 * scored, 1).to(device),
            slot_table,
            committed=i32(committed, 0).to(device),
            page_size=page_size,
            backend=backend,
        )
        padding = 3 - len(expected)
        assert requests.guided.tolist() == [True, True]
        assert delta.lens.tolist() == [len(expected), 1]
        assert delta.token_ids.tolist() == [[10 + p for p in expected] + [0] * padding, [500 + other, 0, 0]]
        assert delta.slots.tolist() == [[slot(p) for p in expected] + [-1] * padding, [other - 1, -1, -1]]
    assert history.told_lens.tolist() == [other, 0, 24] and history.cached_lens.tolist() == [other, 0, 24]
    assert table.faults.tolist() == [0, 0, 0]


def good_arguments():
    return dict(
        history=make_history(7, 3),
        requests=make_requests([4] * 5, [2] * 5, [5, 0, 4, 1, 3]),
        counts=i32(1, 0, 2, 0, 1),
        slot_table=torch.zeros(7, 9, dtype=torch.int32),
        committed=i32(1, 0, 2, 0, 0),
        out=empty_delta(5, 3, torch.device("cpu")),
    )


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("history", tuple(make_history(7, 3)), TypeError, "history must be a StepHistory, got tuple"),
        (
            "history",
            make_history(6, 3)._replace(told_lens=i32(0)),
            ValueError,
            r"history.told_lens must be int32 \[6\]",
        ),
        ("history", make_history(7, 4), ValueError, r"out.token_ids must be int64 \[5, 4\] on cpu, got int64 \[5, 3\]"),
        ("counts", torch.ones(5).long(), ValueError, r"counts must be int32 \[\*\], got int64 \[5\] on cpu"),
        ("counts", i32([1] * 5), ValueError, r"counts must be int32 \[\*\], got int32 \[1, 5\] on cpu"),
        ("counts", i32(*range(10))[::2], ValueError, "counts must be contiguous in its last dimension"),
        ("counts", i32(1, 0, 2, 0), ValueError, r"requests.new_lens must be int32 \[4\] on cpu, got int32 \[5\]"),
        ("requests", [1, 2], TypeError, "requests must be the StepRequests of gather_requests, got list"),
        ("requests", make_requests([4], [2], [6]), ValueError, r"requests.new_lens must be int32 \[5\] on cpu, got"),
        ("out", tuple(empty_delta(5, 3, torch.device("cpu"))), TypeError, "out must be DeltaTokens, got tuple"),
        (
            "out",
            empty_delta(4, 3, torch.device("cpu")),
            ValueError,
            r"out.token_ids must be int64 \[5, 3\] on cpu, got",
        ),
        *(
            ("page_size", value, ValueError, f"page_size must be an int of at least 1, got {value!r}")
            for value in (0, -4, 2.0, True, "4")
        ),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        catch_up(**good_arguments() | {name: value})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 4, 6, 9])
def test_who_waits_leaves_room_for_all_that_a_step_may_bring(device, backend, width):
    """Seven tokens are held: with up to ``width`` new ones a step, 7 - ``width`` may be missing after a step."""
    missing = [7, 1, 5, 3, 6, 0, 2, 4]
    requests = make_requests([20] * 8, [20 - n for n in missing], [3, 1, 7, 0, 2, 6, 4, 5], device=device)
    requests = requests._replace(tokens=requests.tokens.new_zeros(8, width))
    history, counts = make_history(9, 7, device), torch.zeros(8, dtype=torch.int32, device=device)
    slot_table = torch.zeros(8, 20, dtype=torch.int32, device=device)
    delta = catch_up(history, requests, counts, slot_table, backend=backend)
    assert delta.lens.tolist() == [n if n > 7 - width else 0 for n in missing]
