"""``begin_step``: the fields of each node, dummy requests, drafts, spans, and requests with gaps in their history."""

import math

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.begin_step import begin_step, empty_history, empty_requests
from lenvm_kernels.types import Filters
from tests.helpers.cases import i32, make_drafts

GUIDED, LENGTHS = {"target_length": 60}, {"return_values": True}
BOTH = {"scale": 2.0} | LENGTHS
SPANS = {"target_length": 60, "end_token_ids": [3], "start_token_ids": [4]}


def guidance_table(rows, guidance, device):
    """A table with the guidance of some rows. The prompt of row ``r`` has ``10 r`` tokens."""
    table = GuidanceTable(rows, device)
    for row, asked in guidance.items():
        table.add_request(row, parse_guidance(asked), {0}, prompt_len=10 * row)
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
    passed, cached = [10, 98, 30, 40, 42, 60, 69], [9, 97, 29, 39, 41, 59, 67]
    history = make_history(7, 3, device, step=6, uncounted=2, passed_lens=passed, cached_lens=cached)
    table.value_stride.copy_(i32(1, 2, 3, 1, 1, 4, 0))
    requests = begin_step(
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
    assert requests.generated.tolist() == [11, 3, 90, 10, 32, 0, 0]
    assert requests.last_tokens.tolist() == [11, 12, 14, 15, 17, -1, -1]
    assert requests.needs_values.tolist() == [False, True, True, True, False, False, False]
    assert requests.due.tolist() == [True, True, True, True, False, False, False]
    assert requests.cached_lens.tolist() == [9, 41, 97, 67, 29, 0, 0]
    assert history.step.item() == 6 and history.uncounted.item() == 2  # choose_candidates updates them
    no = [-7, -7, -7]
    assert history.tokens.tolist() == [[-7, 11, -7], [14, -7, 13], [16, 17, -7], no, [12, -7, -7], no, [15, -7, -7]]
    assert history.passed_lens.tolist() == [11, 100, 32, 40, 43, 60, 70]
    assert history.cached_lens.tolist() == cached  # lay_out updates them


# Guidance, whether the span has ended and the request is active; numbers of passed, cached, all and new tokens; then
# whether the request is guided and wants a length, its faults, and the tokens passed afterwards. A request that needs
# values has a fault if a token is missing, or if more than three tokens are not cached.
HISTORIES = [
    ((GUIDED, False, True), (11, 9, 12, 1), (True, False, 0, 12)),
    ((GUIDED, False, True), (11, 8, 12, 1), (False, False, 1, 12)),  # four are not cached
    ((GUIDED, False, True), (10, 10, 12, 1), (False, False, 1, 10)),  # the token at position 10 is missing
    ((GUIDED, False, True), (10, 10, 12, 2), (True, False, 0, 12)),
    ((GUIDED, True, True), (10, 10, 12, 1), (False, False, 0, 10)),
    ((BOTH, False, True), (11, 9, 12, 1), (True, True, 0, 12)),
    ((BOTH, False, False), (11, 9, 12, 1), (False, False, 0, 12)),
    ((LENGTHS, False, True), (11, 8, 12, 1), (False, False, 1, 12)),
    ((LENGTHS, True, True), (11, 9, 12, 1), (False, True, 0, 12)),
    ((SPANS, True, True), (11, 9, 12, 1), (False, True, 0, 12)),  # another span may begin
    ((SPANS, False, True), (11, 9, 12, 1), (True, False, 0, 12)),
    (({}, False, True), (11, 8, 12, 1), (False, False, 0, 12)),
]


def test_missing_tokens_disable_guidance(device, backend):
    """Table rows are in reverse order. Cached lengths are returned, but only lay_out updates them."""
    requested, numbers, expected = zip(*HISTORIES, strict=True)
    asked, ended, active = zip(*requested, strict=True)
    passed, cached, lengths, new_lens = zip(*numbers, strict=True)
    table = guidance_table(len(HISTORIES), dict(enumerate(asked)), device)
    table.span_ended.copy_(torch.tensor(ended))
    history = make_history(len(HISTORIES), 3, device, passed_lens=passed, cached_lens=cached)
    rows = torch.arange(len(HISTORIES) - 1, -1, -1, device=device)
    requests = begin_step(
        table,
        torch.zeros(len(HISTORIES), 3, dtype=torch.int64, device=device),
        rows,
        i32(*lengths).to(device)[rows],
        new_lens=i32(*new_lens).to(device)[rows],
        active=torch.tensor(active, device=device)[rows],
        history=history,
        backend=backend,
    )
    fields = requests.guided.flip(0), requests.wants_length.flip(0), table.faults, history.passed_lens
    for case, wanted, found in zip(
        HISTORIES, expected, zip(*map(torch.Tensor.tolist, fields), strict=True), strict=True
    ):
        assert found == wanted, case
    assert requests.cached_lens.tolist()[::-1] == history.cached_lens.tolist() == list(cached)


def batch_of(lengths, device, rows=None):
    """The last token, the table row and the length of each request."""
    rows = list(range(len(lengths))) if rows is None else rows
    return torch.full((len(rows),), 5, device=device), torch.tensor(rows, device=device), i32(*lengths).to(device)


def test_positions_of_nodes_count_earlier_drafts(device, backend):
    """A tree, a chain that ends early, a request without a first draft, and a dummy request."""
    table = guidance_table(4, {0: BOTH, 2: GUIDED, 3: GUIDED}, device)
    table.value_stride[0], history = 2, make_history(4, 9, device, passed_lens=[99] * 4, cached_lens=[40, 0, 25, 35])
    drafts = make_drafts(
        [[6, 0, 6, 9, 2], [4, 4, 4, -1, 3], [-2, 5, 6, 7, 8]],
        [[-1, 0, 0, 2, 1], [-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3]],
        device=device,
    )
    nodes = begin_step(
        table,
        *batch_of([41, 27, 40], device, [0, 2, 3]),
        history=history,
        drafts=drafts,
        drawn=torch.arange(18, device=device),
        padding_row=1,
        out=empty_requests(4, device, 5),
        backend=backend,
    )
    yes, no = [True], [False]
    assert nodes.positions.tolist() == [40, 41, 42, 42, 43, 43, 26, 27, 28, 29, 26, 26, *[39] * 6, *[-1] * 6]
    assert nodes.generated.tolist() == [41, 42, 43, 43, 44, 44, 7, 8, 9, 10, 7, 7, *[10] * 6, *[0] * 6]
    assert nodes.table_rows.tolist() == [*[0] * 6, *[2] * 6, *[3] * 6, *[1] * 6]
    assert nodes.guided.tolist() == yes * 6 + yes * 4 + no * 2 + yes + no * 5 + no * 6
    assert nodes.wants_length.tolist() == yes * 6 + no * 18
    assert nodes.due.tolist() == no * 6 + yes * 4 + no * 2 + yes + no * 5 + no * 6
    assert nodes.last_tokens.tolist() == [5, 6, 0, 6, 9, 2, 5, 4, 4, 4, -1, -1, 5, *[-1] * 11]
    assert nodes.drawn.tolist() == [*range(18), *[-1] * 6]
    assert nodes.lengths.tolist() == [41, 27, 40, 0]
    assert nodes.request_rows.tolist() == [0, 2, 3, 1]
    assert nodes.needs_values.tolist() == [True, True, True, False]
    assert nodes.cached_lens.tolist() == [40, 25, 35, 0]
    none = [-1] * 5
    assert nodes.draft_ids.tolist() == [[6, 0, 6, 9, 2], [4, 4, 4, -1, -1], none, none]
    assert nodes.draft_parents.tolist() == [[-1, 0, 0, 2, 1], [-1, 0, 1, -1, -1], none, none]


def test_greedy_requests_keep_all_tokens_at_temperature_1(device, backend):
    """A request is greedy with top_k 1 or a temperature below 1e-6. A broken temperature is kept."""
    temperatures = torch.tensor([0.7, 0.0, 1e-6, 0.7, math.nan, 0.9])
    temperatures[5] = temperatures[2].nextafter(temperatures[2] - 1)
    table, ones = guidance_table(6, {}, device), torch.ones(6, device=device)
    filters = Filters(i32(1, 5, 5, 2, 5, 5).to(device), ones * 0.5, ones * 0.25, temperatures.to(device))
    requests = begin_step(table, *batch_of([1] * 6, device), filters=filters, backend=backend)
    greedy = torch.tensor([True, True, False, False, False, True])
    assert torch.equal(requests.greedy.cpu(), greedy)
    assert requests.top_k.tolist() == [0, 0, 5, 2, 5, 0]
    assert torch.equal(requests.top_p.cpu(), torch.where(greedy, 1.0, 0.5))
    assert torch.equal(requests.min_p.cpu(), torch.where(greedy, 0.0, 0.25))
    expected = torch.where(greedy, 1.0, temperatures)
    torch.testing.assert_close(requests.temperature.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_addresses_of_scores_and_mask(device, backend):
    """An argument that is not passed has the address 0."""
    table, scores = guidance_table(2, {}, device), torch.zeros(2, 70, device=device)[:, 3:40]
    mask = torch.zeros(2, 5, dtype=torch.int32, device=device)[:, :2]
    addresses = torch.full((4,), 7, device=device)
    options = dict(scores=scores, addresses=addresses, backend=backend)
    begin_step(table, *batch_of([1, 2], device), **options)
    assert addresses.tolist() == [scores.data_ptr(), 70, 0, 0]
    begin_step(table, *batch_of([1, 2], device), vocab_mask=mask, **options)
    assert addresses.tolist() == [scores.data_ptr(), 70, mask.data_ptr(), 5]
    with pytest.raises(ValueError, match=r"^addresses must be given with scores or vocab_mask, got None"):
        begin_step(table, *batch_of([1, 2], device), scores=scores, backend=backend)
