"""``gather_requests``: the fields of each request, dummy requests, and requests whose history lacks tokens."""

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from tests.helpers.drafts import i32

GUIDED, LENGTHS = {"target_length": 60, "entropy_threshold": 0.5}, {"return_values": True}
BOTH = {"scale": 2.0} | LENGTHS
SPANS = {"target_length": 60, "end_token_ids": [3], "start_token_ids": [4]}


def guidance_table(rows, guidance, device):
    """A table with the guidance of some rows; prompts have ten tokens times the row."""
    table = GuidanceTable(rows, device)
    for row, asked in guidance.items():
        table.add_request(row, parse_guidance(asked), {0}, prompt_len=10 * row, seed=2**40 + row)
    return table.columns


def make_history(rows, held, device, **columns):
    history = empty_history(rows, held, device)
    history.tokens.fill_(-7)
    for name, values in columns.items():
        getattr(history, name).copy_(torch.tensor(values))
    return history


def test_step_of_five_requests(device, backend):
    """The third is guided, the fourth is past its span, the last is inactive and has more new tokens than columns."""
    table = guidance_table(7, {1: GUIDED, 4: LENGTHS, 6: BOTH}, device)
    table.span_ended[6] = table.span_ended[4] = True
    told, cached = [10, 98, 30, 40, 42, 60, 69], [9, 97, 29, 39, 41, 59, 67]
    history = make_history(7, 3, device, step=6, uncounted=2, told_lens=told, cached_lens=cached)
    table.value_stride.copy_(i32(1, 2, 3, 1, 1, 4, 0))
    requests = gather_requests(
        table,
        torch.tensor([[11, 7], [12, 7], [13, 14], [15, 7], [16, 17]], device=device),
        torch.tensor([0, 4, 1, 6, 2], device=device),
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
    assert history.cached_lens.tolist() == cached  # lay_out updates them
    assert table.faults.tolist() == [0] * 7


# Guidance, whether the span has ended and the request is active; tokens that were passed, cached, in the sequence and
# new; then whether the request is guided and wants a length, its faults, and the tokens passed afterwards. A request
# that needs values is at fault if a token is missing, or if more than three tokens are not cached.
HISTORIES = [
    ((GUIDED, False, True), (11, 9, 12, 1), (True, False, 0, 12)),
    ((GUIDED, False, True), (11, 8, 12, 1), (False, False, 1, 12)),  # four are not cached
    ((GUIDED, False, True), (10, 10, 12, 1), (False, False, 1, 10)),  # the token at position 10 is missing
    ((GUIDED, False, True), (10, 10, 12, 2), (True, False, 0, 12)),
    ((GUIDED, False, True), (20, 12, 12, 1), (True, False, 0, 20)),
    ((GUIDED, False, False), (10, 10, 12, 1), (False, False, 0, 10)),
    ((GUIDED, True, True), (10, 10, 12, 1), (False, False, 0, 10)),
    ((BOTH, False, True), (11, 9, 12, 1), (True, True, 0, 12)),
    ((BOTH, False, True), (10, 10, 12, 1), (False, False, 1, 10)),
    ((BOTH, False, False), (11, 9, 12, 1), (False, False, 0, 12)),
    ((LENGTHS, False, True), (11, 8, 12, 1), (False, False, 1, 12)),
    ((LENGTHS, True, True), (11, 9, 12, 1), (False, True, 0, 12)),
    ((SPANS, True, True), (11, 9, 12, 1), (False, True, 0, 12)),  # another span may begin
    ((SPANS, False, True), (11, 9, 12, 1), (True, False, 0, 12)),
    (({}, False, True), (10, 8, 12, 1), (False, False, 0, 10)),
    (({}, False, True), (11, 8, 12, 1), (False, False, 0, 12)),
]


def test_missing_tokens_disable_guidance(device, backend):
    """Table rows are in reverse order. Cached lengths are returned, and updated by lay_out only."""
    requested, numbers, expected = zip(*HISTORIES, strict=True)
    asked, ended, active = zip(*requested, strict=True)
    told, cached, lengths, new_lens = zip(*numbers, strict=True)
    table = guidance_table(len(HISTORIES), dict(enumerate(asked)), device)
    table.span_ended.copy_(torch.tensor(ended))
    history = make_history(len(HISTORIES), 3, device, told_lens=told, cached_lens=cached)
    rows = torch.arange(len(HISTORIES) - 1, -1, -1, device=device)
    requests = gather_requests(
        table,
        torch.zeros(len(HISTORIES), 3, dtype=torch.int64, device=device),
        rows,
        i32(*lengths).to(device)[rows],
        new_lens=i32(*new_lens).to(device)[rows],
        active=torch.tensor(active, device=device)[rows],
        history=history,
        backend=backend,
    )
    fields = requests.guided.flip(0), requests.wants_length.flip(0), table.faults, history.told_lens
    for case, wanted, found in zip(
        HISTORIES, expected, zip(*map(torch.Tensor.tolist, fields), strict=True), strict=True
    ):
        assert found == wanted, case
    assert requests.cached_lens.tolist()[::-1] == history.cached_lens.tolist() == list(cached)


@pytest.mark.parametrize(
    ("held", "length", "wanted"),
    [(1, 9, [2]), (2, 9, [2, 1]), (3, 7, [2, 0, 1]), (4, 2, [1, 2, -7, -7]), (7, 9, [1, 2, -7, -7, -7, -7, 0])],
)
def test_history_holds_the_last_new_tokens_by_position(device, backend, held, length, wanted):
    """Columns wrap around. With three new tokens in a sequence of two, the first new token has no position."""
    table, history = guidance_table(3, {}, device), make_history(3, held, device)
    tokens, row = torch.tensor([[0, 1, 2]], device=device), torch.tensor([1], device=device)
    gather_requests(
        table, tokens, row, i32(length).to(device), new_lens=i32(3).to(device), history=history, backend=backend
    )
    assert history.tokens.tolist() == [[-7] * held, wanted, [-7] * held]
