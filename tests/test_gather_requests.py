"""``gather_requests``: what is looked up for whom, requests that do not exist, and histories over many steps."""

import math

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.gather_requests import inputs
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.types import Mode, StepHistory, StepRequests
from tests.helpers.cases import cases

BACKENDS = ["triton", "reference"]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def i64(*values):
    return torch.tensor(values)


def guidance_table(device, rows=7):
    """Row 1 is guided, 4 asks for lengths, 6 does both; all others are unguided."""
    table = GuidanceTable(rows, device)
    lengths = {"return_values": True}
    for row, guidance in ((1, {"target_length": 60, "entropy_threshold": 0.5}), (4, lengths), (6, {"scale": 2.0})):
        guidance = guidance | (lengths if row == 6 else {})
        table.add_request(row, parse_guidance(guidance), {0}, prompt_len=10 * row, seed=2**40 + row)
    return table


def make_history(rows, device, step=1, held=3, told=100_000):
    """Of requests whose first ``told`` tokens were told and are cached: with the default none is missing."""
    history = empty_history(rows, held, device)
    history.step.fill_(step)
    history.told_lens.fill_(told)
    history.cached_lens.fill_(told)
    history.tokens.fill_(-7)
    return history


def lists(
    table,
    tokens,
    table_rows,
    lengths,
    *,
    rows,
    width=1,
    new_lens=None,
    active=None,
    padding_row=0,
    history=None,
):
    """The columns of ``rows`` requests, request by request. The history and the table's faults are brought up to date.

    The result has room for ``width`` tokens of each. ``places`` and ``cached_lens`` are -1 and 0 without history.
    """
    fields = {name: [] for name in StepRequests._fields}
    for i in range(rows):
        row = table_rows[i].item() if i < len(tokens) else padding_row
        found = ([0] * width, 0, -1, row, -1, False, False, math.nan, 0, 0, False, 0)
        if i < len(tokens):
            is_active = active is None or active[i].item()
            guided = is_active and table.mode[row].item() != Mode.UNGUIDED and not table.span_ended[row].item()
            wants_length = is_active and table.return_values[row].item()
            columns = tokens[i].reshape(-1).tolist()
            new = 1 if new_lens is None else min(max(new_lens[i].item(), 0), len(columns))
            length, place, due, cached_len = lengths[i].item(), -1, True, 0
            if history is not None:
                step, held = history.step.item(), history.tokens.shape[1]
                if history.steps[row].item() == step - 1:
                    place = history.places[row].item()
                history.places[row], history.steps[row] = i, step
                due = step % max(table.value_stride[row].item(), 1) == 0
                told_len, cached_len = history.told_lens[row].item(), history.cached_lens[row].item()
                is_gap = told_len < length - new
                if (guided or wants_length) and (is_gap or length - cached_len > held):
                    guided = wants_length = False
                    table.faults[row] += 1
                if not is_gap:
                    history.told_lens[row] = max(told_len, length)
                for position, token in zip(range(length - new, length), columns[:new], strict=True):
                    if position >= 0:
                        history.tokens[row, position % held] = token
            found = (
                (columns[:new] + [0] * width)[:width],
                new,
                length - 1,
                row,
                place,
                guided,
                wants_length,
                table.entropy_threshold[row].item(),
                length - table.prompt_len[row].item(),
                table.seed[row].item(),
                due,
                cached_len,
            )
        for name, value in zip(fields, found, strict=True):
            fields[name].append(value)
    empty = empty_requests(rows, torch.device("cpu"), width)
    found = zip(fields.values(), empty, strict=True)
    return StepRequests(*(torch.tensor(x, dtype=e.dtype).view(e.shape) for x, e in found))


def assert_equal(actual, expected, names=StepRequests._fields):
    for name in names:
        x, wanted = getattr(actual, name).cpu(), getattr(expected, name)
        assert x.dtype == wanted.dtype and torch.equal(x.nan_to_num(-7.0), wanted.nan_to_num(-7.0)), name


@given(cases("gather_requests"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    out, history, table = (arguments.pop(name, None) for name in ("out", "history", "table"))
    rows, width = (len(arguments["tokens"]), 1) if out is None else out.tokens.shape
    known = None if history is None else StepHistory(*(x.clone() for x in history))
    counted = table._replace(faults=table.faults.clone())
    found = gather_requests(table, **arguments, out=out, history=history, backend="reference")
    expected = lists(counted, **arguments, history=known, rows=rows, width=width)
    of_history = ("places", "cached_lens")
    assert_equal(found, expected, [x for x in StepRequests._fields if x not in of_history or history is not None])
    assert torch.equal(table.faults, counted.faults)
    if history is not None:
        for name, x, wanted in zip(StepHistory._fields, history, known, strict=True):
            assert torch.equal(x, wanted), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_three_requests(device, backend):
    table = guidance_table(device)
    history = make_history(7, device, step=4)
    history.places.copy_(torch.arange(10, 17))
    history.steps.copy_(i64(3, 3, 3, 3, 2, 3, 3))
    history.told_lens.copy_(i32(10, 98, 30, 40, 42, 60, 69))
    history.cached_lens.copy_(i32(9, 97, 29, 39, 41, 59, 67))
    requests = gather_requests(
        table,
        i64(11, 12, 13).to(device),
        i64(6, 4, 1).to(device),
        i32(70, 43, 99).to(device),
        active=torch.tensor([True, True, False], device=device),
        history=history,
        padding_row=5,
        out=empty_requests(5, device),
        backend=backend,
    )
    assert requests.tokens.tolist() == [[11], [12], [13], [0], [0]]
    assert requests.new_lens.tolist() == [1, 1, 1, 0, 0]
    assert requests.positions.tolist() == [69, 42, 98, -1, -1]
    assert requests.table_rows.tolist() == [6, 4, 1, 5, 5]
    assert requests.places.tolist() == [16, -1, 11, -1, -1]  # row 4 was not in step 3
    assert requests.guided.tolist() == [True, False, False, False, False]
    assert requests.wants_length.tolist() == [True, True, False, False, False]
    assert requests.entropy_threshold.isnan().tolist() == [True, True, False, True, True]
    assert requests.entropy_threshold[2].item() == 0.5  # what is not active keeps its other parameters
    assert requests.generated.tolist() == [10, 3, 89, 0, 0]
    assert requests.seeds.tolist() == [2**40 + 6, 2**40 + 4, 2**40 + 1, 0, 0]
    assert requests.due.tolist() == [True, True, True, False, False]
    assert requests.cached_lens.tolist() == [67, 41, 97, 0, 0]
    assert history.places.tolist() == [10, 2, 12, 13, 1, 15, 0]
    assert history.steps.tolist() == [3, 4, 3, 3, 4, 3, 4]
    assert history.step.item() == 4  # select_scored counts
    assert history.tokens.tolist() == [[-7] * 3, [-7, -7, 13], [-7] * 3, [-7] * 3, [12, -7, -7], [-7] * 3, [11, -7, -7]]
    assert history.told_lens.tolist() == [10, 99, 30, 40, 43, 60, 70]
    assert history.cached_lens.tolist() == [9, 97, 29, 39, 41, 59, 67]  # catch_up brings them up to date
    assert table.faults.tolist() == [0] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_places_are_those_of_the_step_before(device, backend):
    """Requests come and leave, sit out a step, stand elsewhere; row 0 and place 0 are like any other."""
    table, history, now = guidance_table(device), make_history(7, device), {}
    steps = [[4, 1, 0, 6], [0, 6, 4, 1], [1, 6], [6, 4, 1, 0], [2], [], [2, 3], [3, 2], [0, 2, 3, 6, 5, 4, 1]]
    for rows in steps:
        b = len(rows)
        numbers = torch.zeros(b, dtype=torch.int64, device=device)
        requests = gather_requests(
            table,
            numbers,
            torch.tensor(rows, dtype=torch.int64, device=device),
            numbers.int(),
            history=history,
            out=empty_requests(b + 2, device),
            backend=backend,
        )
        assert requests.places.tolist() == [now.get(row, -1) for row in rows] + [-1, -1]
        now = {row: place for place, row in enumerate(rows)}
        history.step.add_(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forgotten_request_was_nowhere(device, backend):
    """Whatever the number of the step: that of none is -1."""
    table, numbers = guidance_table(device), torch.zeros(1, dtype=torch.int64, device=device)
    for step in (1, 2, 2**40):
        history = make_history(7, device, step)
        history.places.fill_(3)
        requests = gather_requests(table, numbers, numbers, numbers.int(), history=history, backend=backend)
        assert requests.places.item() == -1 and history.places.tolist() == [0, *[3] * 6]


NEW = i64([21, 22, 23], [31, 32, 33], [41, 42, 43], [51, 52, 53])  # of four requests


def tell(table, history, rows, lengths, new_lens, *, tokens=NEW, backend, **options):
    """A step of requests in the rows of the table; the next one is another step."""
    device, b = history.step.device, len(rows)
    batch = (tokens[:b].to(device), i64(*rows).to(device), i32(*lengths).to(device))
    requests = gather_requests(
        table, *batch, new_lens=i32(*new_lens).to(device), history=history, backend=backend, **options
    )
    history.step.add_(1)
    return requests


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_new_tokens_are_held_by_their_positions(device, backend):
    """After the last column comes the first; the columns of ``tokens`` beyond ``new_lens`` are nobody's."""
    table, history = guidance_table(device), make_history(7, device, held=4)
    out = empty_requests(4, device, 3)
    requests = tell(table, history, [6, 1, 3, 0], [6, 9, 2, 1], [3, 1, 2, 3], out=out, backend=backend)
    assert history.tokens.tolist() == [
        [53, -7, -7, -7],  # the two before it would be at negative positions
        [31, -7, -7, -7],
        [-7, -7, -7, -7],
        [41, 42, -7, -7],
        [-7, -7, -7, -7],
        [-7, -7, -7, -7],
        [22, 23, -7, 21],
    ]
    assert requests.tokens.tolist() == [[21, 22, 23], [31, 0, 0], [41, 42, 0], [51, 52, 53]]
    assert requests.new_lens.tolist() == [3, 1, 2, 3]
    assert requests.positions.tolist() == [5, 8, 1, 0] and requests.guided.tolist() == [True, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("held", "length", "wanted"),
    [
        (1, 9, [14]),
        (2, 9, [14, 13]),
        (3, 7, [14, 12, 13]),
        (4, 7, [12, 13, 14, 11]),
        (7, 10, [12, 13, 14, 99, 99, 10, 11]),
    ],
)
def test_of_more_new_tokens_than_are_held_the_last_count(device, backend, held, length, wanted):
    table, history = guidance_table(device), make_history(7, device, held=held)
    history.tokens.fill_(99)
    requests = tell(table, history, [4], [length], [5], tokens=torch.arange(10, 15)[None], backend=backend)
    assert history.tokens[4].tolist() == wanted
    assert requests.tokens.tolist() == [[10]] and requests.new_lens.tolist() == [5]
    assert (history.tokens[[0, 1, 2, 3, 5, 6]] == 99).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_new_tokens_may_be_strided(device, backend):
    memory = torch.full((4, 9), 77)
    memory[:, 5:8] = NEW
    table, history = guidance_table(device), make_history(7, device)
    tokens = memory.to(device)[:, 5:8]
    assert tokens.stride() == (9, 1)
    options = dict(tokens=tokens, out=empty_requests(4, device, 3), backend=backend)
    requests = tell(table, history, [2, 6, 0, 5], [3, 4, 5, 6], [1, 3, 2, 3], **options)
    assert requests.tokens.tolist() == [[21, 0, 0], [31, 32, 33], [41, 42, 0], [51, 52, 53]]
    assert history.tokens.tolist() == [
        [41, 42, -7],
        [-7, -7, -7],
        [-7, -7, 21],
        [-7, -7, -7],
        [-7, -7, -7],
        [51, 52, 53],
        [33, 31, 32],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        (1, [[31], [0], [21], [41], [0], [0]]),
        (2, [[31, 32], [0, 0], [21, 22], [41, 0], [0, 0], [0, 0]]),
        (3, [[31, 32, 0], [0, 0, 0], [21, 22, 23], [41, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (5, [[31, 32, 0, 0, 0], [0] * 5, [21, 22, 23, 0, 0], [41, 0, 0, 0, 0], [0] * 5, [0] * 5]),
    ],
)
def test_the_first_new_tokens_are_given_as_far_as_there_is_room(device, backend, has_history, width, wanted):
    """How many are new is said in any case. Nothing of the columns beyond them is given, nor of any that was there."""
    table, history = guidance_table(device), make_history(7, device) if has_history else None
    memory = torch.full((4, 7), 77)
    memory[:, 3:6] = NEW[[1, 3, 0, 2]]
    out = StepRequests(*(x.fill_(1) for x in empty_requests(6, device, width)))
    rows, lengths, new_lens = i64(2, 6, 0, 5), i32(30, 4, 9, 60), i32(2, 0, 3, 1)
    batch = (memory.to(device)[:, 3:6], rows.to(device), lengths.to(device))
    options = dict(new_lens=new_lens.to(device), history=history, padding_row=3, out=out, backend=backend)
    requests = gather_requests(table, *batch, **options)
    assert requests is out and requests.tokens.tolist() == wanted
    assert requests.new_lens.tolist() == [2, 0, 3, 1, 0, 0]
    assert requests.positions.tolist() == [29, 3, 8, 59, -1, -1]
    assert requests.table_rows.tolist() == [2, 6, 0, 5, 3, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_token_each_fills_the_first_column(device, backend, width):
    """Without ``new_lens`` it is new, else it may not be. Tokens past 32 bits are given whole."""
    table, out = guidance_table(device), empty_requests(4, device, width)
    batch = (i64(2**33 + 5, 0, 2**40).to(device), i64(6, 0, 4).to(device), i32(8, 7, 9).to(device))
    for new_lens, wanted, lens in (
        (None, [2**33 + 5, 0, 2**40, 0], [1, 1, 1, 0]),
        (i32(1, 3, -1).to(device), [2**33 + 5, 0, 0, 0], [1, 1, 0, 0]),
    ):
        for x in out:
            x.fill_(1)
        requests = gather_requests(table, *batch, new_lens=new_lens, out=out, backend=backend)
        assert requests.tokens.tolist() == [[token] + [0] * (width - 1) for token in wanted]
        assert requests.new_lens.tolist() == lens
    assert gather_requests(table, *batch, backend=backend).tokens.tolist() == [[2**33 + 5], [0], [2**40]]


def test_empty_requests_have_the_room_asked_for(device):
    for options, width in (({}, 1), (dict(width=4), 4)):
        requests = empty_requests(3, device, **options)
        assert [list(x.shape) for x in requests] == [[3, width]] + [[3]] * 11
        assert {x.device.type for x in requests} == {device.type}
        assert requests.tokens.dtype == torch.int64 and requests.new_lens.dtype == torch.int32


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_new_tells_nothing(device, backend):
    """Also where their number is negative; one that is too large means every column."""
    table, history = guidance_table(device), make_history(7, device, held=4, told=50)
    requests = tell(table, history, [4, 6, 1], [50, 49, 53], [0, -3, 9], backend=backend)
    assert requests.new_lens.tolist() == [0, 0, 3] and requests.tokens.tolist() == [[0], [0], [41]]
    assert history.tokens.tolist() == [[-7] * 4, [43, -7, 41, 42], *[[-7] * 4] * 5]
    assert history.told_lens.tolist() == [50, 53, 50, 50, 50, 50, 50]
    assert requests.positions.tolist() == [49, 48, 52] and table.faults.tolist() == [0] * 7
    assert requests.guided.tolist() == [False, True, True] and requests.wants_length.tolist() == [True, True, False]
    # Of one column too.
    one = i64(61, 62).to(device), i64(4, 1).to(device), i32(50, 54).to(device)
    requests = gather_requests(table, *one, new_lens=i32(0, 1).to(device), history=history, backend=backend)
    assert history.tokens.tolist() == [[-7] * 4, [43, 62, 41, 42], *[[-7] * 4] * 5]
    assert requests.tokens.tolist() == [[0], [62]] and requests.new_lens.tolist() == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gap_loses_guidance_until_it_is_mended(device, backend):
    """The token at position 10 of row 6 is missing, row 3 is nobody's, and row 1 is left out of the step."""
    table, history = guidance_table(device), make_history(7, device, held=16, told=10)
    active = torch.tensor([True, True, False, True], device=device)
    for number in range(1, 4):  # lengths grow by two
        lengths = [10 + 2 * number, 9 + 2 * number, 30 + 2 * number, 20 + 2 * number]
        requests = tell(
            table, history, [6, 4, 1, 3], lengths, [1 + (number > 1), 2, 2, 2], active=active, backend=backend
        )
        assert requests.guided.tolist() == [False] * 4
        assert requests.wants_length.tolist() == [False, True, False, False]
        assert table.faults.tolist() == [0] * 6 + [number]
        assert history.told_lens.tolist() == [10, 10, 10, 10, 9 + 2 * number, 10, 10]
    # Its tokens are told anew, as by a prompt.
    history.told_lens[6] = history.cached_lens[6] = 16
    requests = tell(table, history, [4, 6], [16, 18], [1, 2], backend=backend)
    assert requests.guided.tolist() == [False, True] and requests.wants_length.tolist() == [True, True]
    assert table.faults.tolist() == [0] * 6 + [3] and history.told_lens.tolist() == [10, 10, 10, 10, 16, 10, 18]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("held", [1, 3, 16])
def test_more_uncomputed_tokens_than_are_held_lose_guidance(device, backend, held):
    """As long as they are: nothing is wrong with what is told, and what is cached may catch up."""
    table, history = guidance_table(device), make_history(7, device, held=held, told=40)
    history.cached_lens[1] = 41 - held  # one further than that of row 6
    history.cached_lens[6] = 40 - held

    def step(length):
        requests = tell(table, history, [6, 1, 2], [length] * 3, [1] * 3, backend=backend)
        assert requests.cached_lens.tolist() == history.cached_lens[[6, 1, 2]].tolist()
        assert history.told_lens.tolist() == [40, length, length, 40, 40, 40, length]
        return requests.guided.tolist(), requests.wants_length.tolist(), table.faults[[6, 1, 2]].tolist()

    assert step(40) == ([True, True, False], [True, False, False], [0, 0, 0])
    assert step(41) == ([False, True, False], [False, False, False], [1, 0, 0])
    assert step(42) == ([False, False, False], [False, False, False], [2, 1, 0])
    history.cached_lens[6] = 43 - held
    assert step(43) == ([True, False, False], [True, False, False], [2, 2, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [1, 4, 12, 30, 2**33 + 1])
def test_requests_are_due_by_their_stride(device, backend, step):
    """Whether guided or not. A stride below 1 is no stride."""
    strides = [3, 1, 2**31 - 1, 0, 5, -2, 4]
    table, history = guidance_table(device), make_history(7, device, step)
    table.value_stride.copy_(i32(*strides))
    rows = [5, 2, 0, 6, 1, 4, 3]
    numbers = torch.zeros(7, dtype=torch.int64, device=device)
    batch = (numbers, i64(*rows).to(device), numbers.int())
    out = empty_requests(9, device)
    requests = gather_requests(table, *batch, history=history, out=out, backend=backend)
    assert requests.due.tolist() == [step % max(strides[row], 1) == 0 for row in rows] + [False] * 2
    assert requests.due.any() and not requests.due.all()
    requests = gather_requests(table, *batch, out=out, backend=backend)
    assert requests.due.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_is_guided_after_the_end_of_a_span(device, backend):
    """Lengths are predicted still."""
    table = guidance_table(device)
    table.span_ended.copy_(torch.tensor([True, False, True, False, True, True, True]))
    rows = torch.tensor([6, 1, 0, 4], device=device)
    requests = gather_requests(table, rows, rows, rows.int(), backend=backend)
    assert requests.guided.tolist() == [False, True, False, False]
    assert requests.wants_length.tolist() == [True, False, False, True]
    table.span_ended.logical_not_()
    requests = gather_requests(table, rows, rows, rows.int(), backend=backend)
    assert requests.guided.tolist() == [True, False, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_history_what_is_of_it_is_left_alone(device, backend):
    """And nobody lacks a token, though the result said so before."""
    out = empty_requests(4, device)
    out.places.fill_(77)
    out.cached_lens.fill_(-78)
    numbers, table = torch.zeros(2, dtype=torch.int64, device=device), guidance_table(device)
    rows, lengths = torch.tensor([3, 1], device=device), i32(9, 90).to(device)
    found = gather_requests(table, numbers, rows, lengths, out=out, backend=backend)
    assert found is out and out.table_rows.tolist() == [3, 1, 0, 0]
    assert out.places.tolist() == [77] * 4 and out.cached_lens.tolist() == [-78] * 4
    assert out.guided.tolist() == [False, True, False, False] and table.faults.tolist() == [0] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_requests(device, backend):
    numbers = torch.zeros(0, dtype=torch.int64, device=device)
    table = guidance_table(device)
    arguments = (table, numbers, numbers, numbers.int())
    assert [len(x) for x in gather_requests(*arguments, backend=backend)] == [0] * 12
    history = make_history(7, device)
    found = gather_requests(*arguments, history=history, padding_row=6, out=empty_requests(33, device), backend=backend)
    assert_equal(found, lists(table, *(x.cpu() for x in arguments[1:]), rows=33, padding_row=6))
    for name, x, wanted in zip(StepHistory._fields, history, make_history(7, device), strict=True):
        assert torch.equal(x, wanted), name
    assert table.faults.tolist() == [0] * 7


def test_an_empty_history_knows_nobody(device):
    history = empty_history(5, 3, device)
    assert history.places.tolist() == history.steps.tolist() == [-1] * 5 and history.step.tolist() == [1]
    assert history.tokens.tolist() == [[0] * 3] * 5
    assert history.told_lens.tolist() == history.cached_lens.tolist() == [0] * 5
    assert [x.dtype for x in history] == [torch.int64] * 3 + [torch.int32] * 3
    assert {x.device.type for x in history} == {device.type}


def good_arguments():
    table = guidance_table("cpu")
    return dict(
        table=table.columns,
        tokens=i64(5, 6, 7),
        table_rows=i64(6, 0, 4),
        lengths=i32(80, 90, 100),
        new_lens=i32(1, 0, 1),
        active=torch.tensor([True, False, True]),
        history=make_history(7, "cpu"),
        out=empty_requests(4, torch.device("cpu"), 2),
    )


def test_a_history_without_room_for_tokens_is_named():
    arguments = good_arguments()
    history = arguments["history"]._replace(tokens=torch.zeros(7, 0, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^history.tokens must be contiguous and have a column, got \[7, 0\]"):
        gather_requests(**arguments | {"history": history})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("tokens", i32(5, 6, 7), ValueError, r"tokens must be int64 \[\*\], got int32 \[3\] on cpu"),
        ("tokens", i32([5], [6], [7]), ValueError, r"tokens must be int64 \[\*, \*\], got int32 \[3, 1\] on cpu"),
        ("tokens", i64([[5]]), ValueError, r"tokens must be int64 \[\*\], got int64 \[1, 1, 1\] on cpu"),
        ("tokens", i64([5, 6, 7]), ValueError, r"new_lens must be int32 \[1\] on cpu, got int32 \[3\]"),
        ("tokens", i64([], [], []).long(), ValueError, "tokens must have at least one column, got none"),
        ("tokens", i64([5, 6, 7], [8, 9, 1]).T, ValueError, "tokens must be contiguous in its last dimension"),
        ("tokens", torch.arange(6)[::2], ValueError, "tokens must be contiguous in its last dimension"),
        ("tokens", i64(5, 6), ValueError, r"new_lens must be int32 \[2\] on cpu, got int32 \[3\]"),
        ("table", {"mode": 1}, TypeError, "table must be a GuidanceTable, got dict"),
        ("history", (1, 2, 3), TypeError, "history must be a StepHistory, got tuple"),
        ("out", list(empty_requests(4, torch.device("cpu"))), TypeError, "out must be StepRequests, got list"),
        ("out", empty_requests(2, torch.device("cpu")), ValueError, "out must have a row for each of the 3 .*, got 2"),
        (
            "out",
            empty_requests(4, torch.device("cpu"))._replace(tokens=torch.zeros(4, dtype=torch.int64)),
            ValueError,
            r"out.tokens must be int64 \[\*, \*\] on cpu, got int64 \[4\] on cpu",
        ),
        ("padding_row", 7, ValueError, r"padding_row must be in \[0, 7\), got 7"),
        ("padding_row", -1, ValueError, r"padding_row must be in \[0, 7\), got -1"),
        ("padding_row", 1.0, TypeError, "padding_row must be an int, got float"),
        ("padding_row", True, TypeError, "padding_row must be an int, got bool"),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        gather_requests(**good_arguments() | {name: value})


def test_several_tokens_need_their_number():
    arguments = good_arguments() | {"tokens": i64([5], [6], [7]), "new_lens": None}
    with pytest.raises(ValueError, match=r"^new_lens must say how many of the tokens \[B, N\] are new, got None"):
        gather_requests(**arguments)
