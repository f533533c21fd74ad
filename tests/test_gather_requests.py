"""``gather_requests``: what is looked up for whom, requests that do not exist, and places over many steps."""

import math

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.gather_requests import inputs
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_requests, gather_requests
from lenvm_kernels.types import Mode, StepHistory, StepRequests
from tests.helpers.cases import assert_right, cases
from tests.helpers.wrong_tensors import assert_refuses

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


def make_history(rows, device, step=1):
    places, steps = (torch.full((rows,), -1, device=device) for _ in range(2))
    return StepHistory(places, steps, torch.tensor([step], device=device))


def lists(table, tokens, table_rows, lengths, slots, *, rows, active=None, padding_row=0, history=None):
    """The columns of ``rows`` requests, request by request. The history is brought up to date."""
    fields = {name: [] for name in StepRequests._fields}
    for i in range(rows):
        row = table_rows[i].item() if i < len(tokens) else padding_row
        found = (0, -1, -1, row, -1, False, False, math.nan, 0, 0)
        if i < len(tokens):
            is_active = active is None or active[i].item()
            place = -1
            if history is not None:
                step = history.step.item()
                if history.steps[row].item() == step - 1:
                    place = history.places[row].item()
                history.places[row], history.steps[row] = i, step
            found = (
                tokens[i].item(),
                lengths[i].item() - 1,
                slots[i].item(),
                row,
                place,
                is_active and table.mode[row].item() != Mode.UNGUIDED,
                is_active and table.return_values[row].item(),
                table.entropy_threshold[row].item(),
                lengths[i].item() - table.prompt_len[row].item(),
                table.seed[row].item(),
            )
        for name, value in zip(fields, found, strict=True):
            fields[name].append(value)
    dtypes = [x.dtype for x in empty_requests(0, torch.device("cpu"))]
    return StepRequests(*(torch.tensor(x, dtype=dtype) for x, dtype in zip(fields.values(), dtypes, strict=True)))


def assert_equal(actual, expected, names=StepRequests._fields):
    for name in names:
        x, wanted = getattr(actual, name).cpu(), getattr(expected, name)
        assert x.dtype == wanted.dtype and torch.equal(x.nan_to_num(-7.0), wanted.nan_to_num(-7.0)), name


@given(cases("gather_requests"))
def test_kernel_matches_reference(device, case):
    assert_right(case, device)


@given(cases("gather_requests"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    out, history = arguments.pop("out", None), arguments.pop("history", None)
    rows = len(arguments["tokens"] if out is None else out.tokens)
    known = None if history is None else StepHistory(*(x.clone() for x in history))
    found = gather_requests(**arguments, out=out, history=history, backend="reference")
    expected = lists(**arguments, history=known, rows=rows)
    names = [name for name in StepRequests._fields if name != "places" or history is not None]
    assert_equal(found, expected, names)
    if history is not None:
        for name, x, wanted in zip(StepHistory._fields, history, known, strict=True):
            assert torch.equal(x, wanted), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_three_requests(device, backend):
    table = guidance_table(device)
    history = make_history(7, device, step=4)
    history.places.copy_(torch.arange(10, 17))
    history.steps.copy_(i64(3, 3, 3, 3, 2, 3, 3))
    requests = gather_requests(
        table,
        i64(11, 12, 13).to(device),
        i64(6, 4, 1).to(device),
        i32(70, 43, 99).to(device),
        i64(30, 2**33, 50).to(device),
        active=torch.tensor([True, True, False], device=device),
        history=history,
        padding_row=5,
        out=empty_requests(5, device),
        backend=backend,
    )
    assert requests.tokens.tolist() == [11, 12, 13, 0, 0]
    assert requests.positions.tolist() == [69, 42, 98, -1, -1]
    assert requests.slots.tolist() == [30, 2**33, 50, -1, -1]
    assert requests.table_rows.tolist() == [6, 4, 1, 5, 5]
    assert requests.places.tolist() == [16, -1, 11, -1, -1]  # row 4 was not in step 3
    assert requests.guided.tolist() == [True, False, False, False, False]
    assert requests.wants_length.tolist() == [True, True, False, False, False]
    assert requests.entropy_threshold.isnan().tolist() == [True, True, False, True, True]
    assert requests.entropy_threshold[2].item() == 0.5  # what is not active keeps its other parameters
    assert requests.generated.tolist() == [10, 3, 89, 0, 0]
    assert requests.seeds.tolist() == [2**40 + 6, 2**40 + 4, 2**40 + 1, 0, 0]
    assert history.places.tolist() == [10, 2, 12, 13, 1, 15, 0]
    assert history.steps.tolist() == [3, 4, 3, 3, 4, 3, 4]
    assert history.step.item() == 4  # select_scored counts


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
            numbers,
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
        requests = gather_requests(table, numbers, numbers, numbers.int(), numbers, history=history, backend=backend)
        assert requests.places.item() == -1 and history.places.tolist() == [0, *[3] * 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_history_places_are_left_alone(device, backend):
    out = empty_requests(4, device)
    out.places.fill_(77)
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    rows = torch.tensor([3, 1], device=device)
    found = gather_requests(guidance_table(device), numbers, rows, numbers.int(), numbers, out=out, backend=backend)
    assert found is out and out.places.tolist() == [77] * 4 and out.table_rows.tolist() == [3, 1, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_requests(device, backend):
    numbers = torch.zeros(0, dtype=torch.int64, device=device)
    table = guidance_table(device)
    arguments = (table, numbers, numbers, numbers.int(), numbers)
    assert [len(x) for x in gather_requests(*arguments, backend=backend)] == [0] * 10
    history = make_history(7, device)
    found = gather_requests(*arguments, history=history, padding_row=6, out=empty_requests(33, device), backend=backend)
    assert_equal(found, lists(table, *(x.cpu() for x in arguments[1:]), rows=33, padding_row=6))
    assert history.steps.tolist() == [-1] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_is_the_same_in_every_batch(device, backend):
    generator = torch.Generator().manual_seed(0)
    b, table = 40, GuidanceTable(50, device)
    for name in ("mode", "return_values", "prompt_len"):
        getattr(table, name).copy_(torch.randint(0, 2, (50,), generator=generator))
    rows = torch.randperm(50, generator=generator)[:b].to(device)
    tokens, slots = torch.randint(0, 2**40, (2, b), generator=generator).to(device)
    lengths = torch.randint(1, 100_000, (b,), generator=generator, dtype=torch.int32).to(device)

    def gather(chosen):
        out = empty_requests(len(chosen), device)
        out.places.fill_(0)
        batch = (tokens[chosen], rows[chosen], lengths[chosen], slots[chosen])
        return gather_requests(table, *batch, out=out, backend=backend)

    together = gather(torch.arange(b, device=device))
    for chosen in (torch.randperm(b, generator=generator), i64(0), i64(39, 7)):
        for x, wanted in zip(gather(chosen.to(device)), together, strict=True):
            assert torch.equal(x.nan_to_num(), wanted[chosen.to(device)].nan_to_num())


def test_offsets_past_32_bits(device):
    """Row 2 of a column is 2**31 away. Pages that nothing touches take no memory on a CPU."""
    far = 2**30
    column = torch.empty(2 * far + 1, dtype=torch.bool, device=device)[::far]
    column.copy_(torch.tensor([False, False, True]))
    table = guidance_table(device, rows=7).columns
    table = table._make(x[:3] for x in table)._replace(return_values=column)
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    rows = torch.tensor([2, 1], device=device)
    requests = gather_requests(table, numbers, rows, numbers.int(), numbers, backend="triton")
    assert requests.wants_length.tolist() == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(device):
    table, history, out = guidance_table(device), make_history(7, device), empty_requests(4, device)
    tokens, rows, slots = (torch.tensor(x, device=device) for x in ([5, 6, 7], [6, 0, 4], [1, 2, 3]))
    lengths = torch.tensor([80, 90, 100], dtype=torch.int32, device=device)
    arguments = dict(history=history, padding_row=5, out=out)
    gather_requests(table, tokens, rows, lengths, slots, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_requests(table, tokens, rows, lengths, slots, **arguments)
    history.step.add_(1)
    rows.copy_(torch.tensor([4, 1, 6]))
    graph.replay()
    batch = (x.cpu() for x in (tokens, rows, lengths, slots))
    expected = lists(table, *batch, rows=4, padding_row=5)
    assert_equal(out, expected._replace(places=i64(2, -1, 0, -1)))


def good_arguments():
    table = guidance_table("cpu")
    return dict(
        table=table.columns,
        tokens=i64(5, 6, 7),
        table_rows=i64(6, 0, 4),
        lengths=i32(80, 90, 100),
        slots=i64(1, 2, 3),
        active=torch.tensor([True, False, True]),
        history=make_history(7, "cpu"),
        out=empty_requests(4, torch.device("cpu")),
    )


@pytest.mark.parametrize("name", ["table_rows", "lengths", "slots", "active"])
def test_wrong_tensors_are_named(name):
    arguments = good_arguments()
    assert_refuses(gather_requests, arguments, name, arguments[name].dtype)


@pytest.mark.parametrize("name", ["mode", "return_values", "entropy_threshold", "prompt_len", "seed"])
def test_wrong_columns_of_the_table_are_named(name):
    arguments = good_arguments()

    def gather(**column):
        table = arguments["table"]._replace(**{name: column[f"table.{name}"]})
        return gather_requests(**arguments | {"table": table})

    column = getattr(arguments["table"], name)
    rows = dict(any_rows=True) if name == "mode" else {}
    assert_refuses(gather, {f"table.{name}": column}, f"table.{name}", column.dtype, strided=True, **rows)
    if name == "mode":
        with pytest.raises(ValueError, match=r"table.return_values must be bool \[6\] on cpu, got bool \[7\]"):
            gather(**{"table.mode": column[:6]})


@pytest.mark.parametrize(
    ("owner", "name"),
    [("history", name) for name in StepHistory._fields] + [("out", name) for name in StepRequests._fields],
)
def test_wrong_fields_are_named(owner, name):
    arguments = good_arguments()

    def gather(**field):
        return gather_requests(**arguments | {owner: arguments[owner]._replace(**{name: field[f"{owner}.{name}"]})})

    field = getattr(arguments[owner], name)
    rows = dict(any_rows=True) if (owner, name) == ("out", "tokens") else {}
    assert_refuses(gather, {f"{owner}.{name}": field}, f"{owner}.{name}", field.dtype, **rows)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("tokens", [5, 6, 7], TypeError, r"tokens must be a tensor int64 \[\*\], got list"),
        ("tokens", i32(5, 6, 7), ValueError, r"tokens must be int64 \[\*\], got int32 \[3\] on cpu"),
        ("tokens", i64([5, 6, 7]), ValueError, r"tokens must be int64 \[\*\], got int64 \[1, 3\] on cpu"),
        ("tokens", torch.arange(6)[::2], ValueError, "tokens must be contiguous in its last dimension"),
        ("tokens", i64(5, 6), ValueError, r"table_rows must be int64 \[2\] on cpu, got int64 \[3\]"),
        ("table", {"mode": 1}, TypeError, "table must be a GuidanceTable, got dict"),
        ("history", (1, 2, 3), TypeError, "history must be a StepHistory, got tuple"),
        ("out", list(empty_requests(4, torch.device("cpu"))), TypeError, "out must be StepRequests, got list"),
        ("out", empty_requests(2, torch.device("cpu")), ValueError, "out must have a row for each of the 3 .*, got 2"),
        ("padding_row", 7, ValueError, r"padding_row must be in \[0, 7\), got 7"),
        ("padding_row", -1, ValueError, r"padding_row must be in \[0, 7\), got -1"),
        ("padding_row", 1.0, TypeError, "padding_row must be an int, got float"),
        ("padding_row", True, TypeError, "padding_row must be an int, got bool"),
        ("backend", "cuda", ValueError, "backend must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        gather_requests(**good_arguments() | {name: value})
