"""``gather_requests``: the fields of each request, dummy requests, and histories over many steps."""

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from tests.helpers.drafts import i32


def i64(*values):
    return torch.tensor(values)


def guidance_table(device, rows=7):
    """Row 1 is guided, row 4 wants lengths, row 6 both; all other rows are unguided."""
    table = GuidanceTable(rows, device)
    lengths = {"return_values": True}
    for row, guidance in ((1, {"target_length": 60, "entropy_threshold": 0.5}), (4, lengths), (6, {"scale": 2.0})):
        guidance = guidance | (lengths if row == 6 else {})
        table.add_request(row, parse_guidance(guidance), {0}, prompt_len=10 * row, seed=2**40 + row)
    return table.columns


def make_history(rows, device, step=1, held=3, told=100_000):
    """A history in which the first ``told`` tokens were passed and are cached; by default, none is missing."""
    history = empty_history(rows, held, device)
    history.step.fill_(step)
    history.told_lens.fill_(told)
    history.cached_lens.fill_(told)
    history.tokens.fill_(-7)
    return history


def assert_equal(actual, expected, names):
    for name in names:
        x, wanted = getattr(actual, name).cpu(), getattr(expected, name)
        assert x.dtype == wanted.dtype and torch.equal(x.nan_to_num(-7.0), wanted.nan_to_num(-7.0)), name


def test_step_of_five_requests(device, backend):
    """The third is guided, the fourth is past its span, the last is inactive and has more new tokens than columns."""
    table = guidance_table(device)
    table.span_ended[6] = table.span_ended[4] = True
    history = make_history(7, device, step=6)
    history.uncounted.fill_(2)
    history.told_lens.copy_(i32(10, 98, 30, 40, 42, 60, 69))
    history.cached_lens.copy_(i32(9, 97, 29, 39, 41, 59, 67))
    table.value_stride.copy_(i32(1, 2, 3, 1, 1, 4, 0))
    requests = gather_requests(
        table,
        i64([11, 7], [12, 7], [13, 14], [15, 7], [16, 17]).to(device),
        i64(0, 4, 1, 6, 2).to(device),
        i32(11, 43, 100, 70, 32).to(device),
        new_lens=i32(1, 1, 2, 1, 9).to(device),
        active=torch.tensor([True, True, True, True, False], device=device),
        history=history,
        padding_row=5,
        out=empty_requests(7, device),
        backend=backend,
    )
    assert requests.positions.tolist() == [10, 42, 99, 69, 31, -1, -1]
    assert requests.table_rows.tolist() == [0, 4, 1, 6, 2, 5, 5]
    assert requests.guided.tolist() == [False, False, True, False, False, False, False]
    assert requests.wants_length.tolist() == [False, True, False, True, False, False, False]
    assert requests.entropy_threshold.isnan().tolist() == [True, True, False, True, True, True, True]
    assert requests.entropy_threshold[2].item() == 0.5
    assert requests.generated.tolist() == [11, 3, 90, 10, 32, 0, 0]
    assert requests.seeds.tolist() == [0, 2**40 + 4, 2**40 + 1, 2**40 + 6, 0, 0, 0]
    assert requests.due.tolist() == [True, True, True, True, False, False, False]
    assert requests.cached_lens.tolist() == [9, 41, 97, 67, 29, 0, 0]
    assert history.step.item() == 6 and history.uncounted.item() == 2  # select_scored updates them
    no = [-7, -7, -7]
    assert history.tokens.tolist() == [[-7, 11, -7], [14, -7, 13], [16, 17, -7], no, [12, -7, -7], no, [15, -7, -7]]
    assert history.told_lens.tolist() == [11, 100, 32, 40, 43, 60, 70]
    assert history.cached_lens.tolist() == [9, 97, 29, 39, 41, 59, 67]  # catch_up updates them
    assert table.faults.tolist() == [0] * 7


def tell(table, history, rows, lengths, new_lens, *, backend, **options):
    """Gather the requests of a step, in these table rows, and begin the next step."""
    device, b = history.step.device, len(rows)
    batch = (torch.arange(3 * b, device=device).view(b, 3), i64(*rows).to(device), i32(*lengths).to(device))
    requests = gather_requests(
        table, *batch, new_lens=i32(*new_lens).to(device), history=history, backend=backend, **options
    )
    history.step.add_(1)
    return requests


@pytest.mark.parametrize(
    ("held", "length", "wanted"),
    [(1, 9, [2]), (2, 9, [2, 1]), (3, 7, [2, 0, 1]), (4, 2, [1, 2, -7, -7]), (7, 9, [1, 2, -7, -7, -7, -7, 0])],
)
def test_history_holds_the_last_new_tokens_by_position(device, backend, held, length, wanted):
    """Columns wrap around. With three new tokens in a sequence of two, the first new token has no position."""
    table, history = guidance_table(device), make_history(7, device, held=held)
    tell(table, history, [4], [length], [3], backend=backend)
    assert history.tokens[4].tolist() == wanted
    assert (history.tokens[[0, 1, 2, 3, 5, 6]] == -7).all()


def test_gap_disables_guidance_until_it_is_filled(device, backend):
    """The token at position 10 of row 6 is missing, row 3 is unguided, and row 1 is inactive."""
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
    # Its tokens are passed again, as in a prompt.
    history.told_lens[6] = history.cached_lens[6] = 16
    requests = tell(table, history, [4, 6], [16, 18], [1, 2], backend=backend)
    assert requests.guided.tolist() == [False, True] and requests.wants_length.tolist() == [True, True]
    assert table.faults.tolist() == [0] * 6 + [3] and history.told_lens.tolist() == [10, 10, 10, 10, 16, 10, 18]


@pytest.mark.parametrize("held", [1, 3, 16])
def test_more_uncomputed_tokens_than_the_history_holds_disable_guidance(device, backend, held):
    """No token is missing, so guidance returns when the cache has caught up."""
    table, history = guidance_table(device), make_history(7, device, held=held, told=40)
    history.cached_lens[1] = 41 - held  # one more than in row 6
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


def test_empty_requests_and_history(device):
    requests, history = empty_requests(3, device), empty_history(5, 3, device)
    assert [list(x.shape) for x in requests] == [[3]] * 9
    assert requests.positions.dtype == torch.int32 and requests.table_rows.dtype == torch.int64
    assert history.step.tolist() == [1]
    assert history.tokens.tolist() == [[0] * 3] * 5
    assert history.told_lens.tolist() == history.cached_lens.tolist() == [0] * 5
    assert history.uncounted.tolist() == [0]
    assert [x.dtype for x in history] == [torch.int64] * 2 + [torch.int32] * 3
    assert {x.device.type for x in (*history, *requests)} == {device.type}
