"""The table of requests on the device: every parameter in its row, written once, gone with its request."""

import math
from types import SimpleNamespace

import pytest
import torch

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, SpanState, parse_guidance
from lenvm_kernels.types import Mode
from tests.helpers.watch import Operators


def test_table():
    params = [parse_guidance({"target_length": 7}), None, parse_guidance({"scale": 0.5, "value_min": 0.25})]
    table = GuidanceTable.from_params(params, [{5, 2}, set(), {9}], "cpu")
    assert table.guided.tolist() == [True, False, True]
    assert table.mode.tolist() == [Mode.NEAR, Mode.UNGUIDED, Mode.MUL]
    assert table.eos_token_ids.tolist() == [[2, 5], [-2, -2], [9, -2]]
    assert table.value_min.tolist() == [-math.inf, -math.inf, 0.25]
    assert table.target_length.tolist() == [7, 0, 0] and table.counts_down.tolist() == [True, False, False]
    torch.testing.assert_close(table.nats_per_token, torch.full((3,), -math.log(0.997)))
    assert GuidanceTable.from_params([], [], "cpu").mode.shape == (0,)
    nobody = GuidanceTable.from_params([None], [set()], "cpu")
    assert nobody.eos_token_ids.tolist() == [[-2]] and nobody.scaled_token_ids.tolist() == [[0]]
    with pytest.raises(ValueError, match=r"eos_token_ids must have one set per request \(1\), got 2 sets"):
        GuidanceTable.from_params([None], [set(), set()], "cpu")


def test_totals_that_are_aimed_at_early():
    """By 6 tokens or a tenth: near and le_near of a total without a tolerance. The due length stays."""
    near = {"target_length": 100, "value_constraint": "near"}
    of_row = [  # parameters, what is taken off
        (near, 6),
        (near | {"target_length": 40, "value_constraint": "le_near"}, 4),
        (near | {"value_constraint": "ge_near"}, 0),
        (near | {"tolerance": 0.1}, 0),
        (near | {"target_length_mode": "remaining"}, 0),
        ({"target_length": 100, "value_constraint": "eq"}, 0),
    ]
    tables = [GuidanceTable(len(of_row), "cpu", early=early) for early in (0.0, 6.0)]
    for table in tables:
        for row, (given, _) in enumerate(of_row):
            table.add_request(row, parse_guidance(given), set())
    late, early = tables
    assert (late.target_length - early.target_length).tolist() == [off for _, off in of_row]
    assert torch.equal(late.due_length, early.due_length)


def test_every_column_is_of_its_own_row():
    """Values that are 0 are not "none", and every parameter lands in the row of its request."""
    params = [
        parse_guidance({"mode": "exp", "scale": 3, "entropy_threshold": 0.5, "gamma": 0.9}),
        parse_guidance({"mode": "centered_exp", "scale": -2, "entropy_threshold": 0.0, "value_min": 0.0}),
        parse_guidance({"target_length": 0, "length_mode": "remaining", "gamma": 0.5, "return_values": True}),
        parse_guidance({"target_length": 0, "op": "ge_near", "strength": 2.5, "min_end_prob": 0.25}),
        parse_guidance({"boosted_token_ids": [9, 3], "token_temp_divisor": 0.25}),
    ]
    table = GuidanceTable.from_params(params, [{1}, {0, 4, 2}, set(), {7}, {5}], "cpu")
    assert table.mode.tolist() == [Mode.EXP, Mode.CENTERED_EXP, Mode.NEAR, Mode.GE_NEAR, Mode.UNGUIDED]
    assert table.scale.tolist() == [3, -2, 5, 2.5, 1]
    least = torch.tensor(1e-4).item()
    assert table.min_end_prob.tolist() == [math.inf, math.inf, least, 0.25, math.inf]
    assert str(table.entropy_threshold.tolist()) == "[0.5, 0.0, nan, nan, nan]"
    assert table.value_min.tolist() == [-math.inf, 0, -math.inf, -math.inf, -math.inf]
    assert table.target_length.tolist() == [0] * 5
    assert table.counts_down.tolist() == [False, False, False, True, False]
    assert table.return_values.tolist() == [False, False, True, False, False]
    torch.testing.assert_close(table.nats_per_token, -torch.tensor([0.9, 0.997, 0.5, 0.997, 0.997]).log())
    assert table.eos_token_ids.tolist() == [[1, -2, -2], [0, 2, 4], [-2, -2, -2], [7, -2, -2], [5, -2, -2]]
    assert table.scaled_token_ids.tolist() == [[0, 0]] * 4 + [[3, 9]]
    assert table.token_scales.tolist() == [[1, 1]] * 4 + [[0.25, 0.25]]


def test_spans_in_the_table():
    """What ends the sequence and what ends the span lie beside each other: the tokens of value 0."""
    asked = {"end_token_ids": [9, 3], "hard_limit": 40, "answer_length": 2.5}
    params = [parse_guidance(asked), None, parse_guidance({"end_token_ids": [1, 2, 5, 4], "allow_eos": True})]
    table = GuidanceTable.from_params(params, [{5, 2}, {7}, set()], "cpu")
    assert table.span_end_token_ids.tolist() == [[9, 3, -2, -2], [-2] * 4, [1, 2, 5, 4]]
    assert table.ending_token_ids.tolist() == [[2, 5, 9, 3, -2, -2], [7] + [-2] * 5, [-2, -2, 1, 2, 5, 4]]
    assert table.hard_limit.tolist() == [40, 2**31 - 1, 2**31 - 1]
    assert table.answer_length.tolist() == [2.5, 0, 0] and table.allows_eos.tolist() == [False, False, True]
    assert table.span_ended.tolist() == [False] * 3
    table.eos_token_ids[1, 1], table.span_end_token_ids[1, 0] = 60, 61
    assert table.ending_token_ids[1].tolist() == [7, 60, 61, -2, -2, -2]
    table.ending_token_ids[0] = 6
    assert table.eos_token_ids[0].tolist() == [6] * 2 and table.span_end_token_ids[0].tolist() == [6] * 4


def test_a_request_begins_with_an_open_span():
    """Unless it says that it has ended; what the request before has left is gone."""
    params, table = parse_guidance({"end_token_ids": [9]}), GuidanceTable(3, "cpu")
    table.add_request(2, params, {0}, span=SpanState(9, 4, end=8))
    table.add_request(1, params, {0})
    assert table.span_ended.tolist() == [False, False, True]
    table.span_ended.fill_(True)  # as limit_span does it
    table.add_request(0, params, {0}, span=SpanState(9, 4, end=8))
    table.add_request(1, params, {0})
    assert table.span_ended.tolist() == [True, False, True]
    table.remove_request(2)
    assert table.span_ended.tolist() == [True, False, False] and table.span_end_token_ids[2].tolist() == [-2] * 4


def test_lengths_of_rows_out_of_order():
    """Each by its own discount and end-of-sequence ids; -1 and the padding of the ids are nobody's end."""
    params = [parse_guidance({"gamma": gamma}) for gamma in (0.5, 0.9, 0.99, 0.8)]
    table = GuidanceTable.from_params(params, [{0, 3}, {1}, set(), {2}], "cpu")
    z = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5])
    rows, tokens = torch.tensor([3, 0, 2, 1, 0]), torch.tensor([1, 0, -1, -2 + 1, 1])
    expected = torch.nn.functional.softplus(z) / -torch.tensor([0.8, 0.5, 0.99, 0.9, 0.5]).log()
    expected[1] = 0.0
    torch.testing.assert_close(table.remaining_lengths(rows, z, tokens), expected)


def columns(table, row):
    """A row of every column of a table, padding of lists included."""
    return {name: column[row].tolist() for name, column in table.columns._asdict().items()}


def test_set_and_clear_write_one_row():
    params = parse_guidance(
        {"target_length": 50, "op": "le", "gamma": 0.99, "token_temperature_scale": {"4": 2.0}, "value_min": 0.1}
    )
    table = GuidanceTable(3, "cpu", max_eos=2, max_scaled_tokens=2)
    empty = [columns(table, row) for row in range(3)]
    assert not table.guided.any()
    table.add_request(1, params, {7}, prompt_len=9, seed=-5)
    packed = GuidanceTable.from_params([params], [{7}], "cpu")
    row = columns(table, 1)
    assert (row["prompt_len"], row["seed"]) == (9, -5)
    assert row["eos_token_ids"] == [7, -2] and row["scaled_token_ids"] == [4, 0] and row["token_scales"] == [2.0, 1.0]
    scalars = ("mode", "scale", "nats_per_token", "value_min", "target_length", "counts_down")
    assert {name: row[name] for name in scalars} == {name: columns(packed, 0)[name] for name in scalars}
    assert table.guided.tolist() == [False, True, False]
    table.faults[1] = 4
    table.remove_request(1)
    assert str([columns(table, row) for row in range(3)]) == str(empty)  # as text: NaN is not itself


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, None, set()), IndexError, r"table_row must be in \[0, 3\), got 3"),
        ((0, None, {1, 2, 3}), ValueError, "eos_token_ids must be at most 2 ids, got 3"),
        (
            (0, parse_guidance({"boosted_token_ids": [1, 2, 3], "token_temp_divisor": 2}), set()),
            ValueError,
            "token_temperature_scale must be of at most 2 tokens, got 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(arguments, error, message):
    table = GuidanceTable(3, "cpu", max_eos=2, max_scaled_tokens=2)
    table.add_request(0, parse_guidance({"target_length": 5}), {1})
    before = str(columns(table, 0))
    with pytest.raises(error, match=message):
        table.add_request(*arguments)
    assert str(columns(table, 0)) == before
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"seed must be an int64, got {seed}"):
            table.add_request(0, None, set(), seed=seed)
    with pytest.raises(IndexError, match=r"table_row must be in \[0, 3\), got -1"):
        table.add_request(-1, None, set())
    assert str(columns(table, 0)) == before


def test_the_largest_seeds_and_a_row_set_again():
    """A new request in a row leaves nothing of the one before."""
    table = GuidanceTable(2, "cpu", max_eos=3, max_scaled_tokens=3)
    full = {"target_length": 5, "entropy_threshold": 0.5, "value_min": 0.1, "return_values": True, "gamma": 0.5}
    full |= {"end_token_ids": [1, [2, 9], 3], "hard_limit": 9, "answer_length": 5, "allow_eos": True}
    full |= {"start_token_ids": [[5, 6], 4], "hard_limit_grace": 3, "end_message": [7, 7]}
    table.add_request(
        1,
        parse_guidance(full | {"token_temperature_scale": {1: 2, 2: 3, 3: 4}}),
        {4, 5, 6},
        seed=2**63 - 1,
        span=SpanState(9, 4, end=8, match=3, closing_from=6),
    )
    assert table.seed.tolist() == [0, 2**63 - 1] and table.return_values.tolist() == [False, True]
    table.faults += 2
    table.add_request(1, parse_guidance({"scale": 0.5}), {8}, prompt_len=3, seed=-(2**63))
    fresh = GuidanceTable(2, "cpu", max_eos=3, max_scaled_tokens=3)
    fresh.faults += 2
    fresh.mode[1], fresh.scale[1], fresh.eos_token_ids[1, 0] = Mode.MUL, 0.5, 8
    fresh.prompt_len[1], fresh.seed[1], fresh.faults[1] = 3, -(2**63), 0
    fresh.span_seen[1] = 3
    assert str([columns(table, row) for row in range(2)]) == str([columns(fresh, row) for row in range(2)])


@pytest.mark.parametrize("table_rows", [[2], [4, 0, 3, 4, 1]])
def test_requests_are_written_together_when_a_column_is_read(table_rows):
    """Two writes however many requests there are, of each row the last request, and none when nobody came."""
    table = GuidanceTable(5, "cpu")
    table.faults.fill_(3)
    for i, row in enumerate(table_rows):
        table.add_request(row, parse_guidance({"target_length": 10 + i}), {i}, prompt_len=i)
    with Operators() as seen:
        columns = table.columns
        assert table.columns is columns
    assert seen.writes == ["aten::index_copy_", "aten::index_fill_"]
    last = {row: i for i, row in enumerate(table_rows)}
    assert columns.target_length.tolist() == [10 + last[row] if row in last else 0 for row in range(5)]
    assert columns.prompt_len.tolist() == [last.get(row, 0) for row in range(5)]
    assert columns.faults.tolist() == [0 if row in last else 3 for row in range(5)]


@pytest.mark.parametrize(
    ("params", "eos", "prompt_len"),
    [
        (None, {2**31}, 0),
        (None, {1}, 2**31),
        (parse_guidance({"token_temperature_scale": {2**63: 2.0}}), {1}, 0),
        (GuidanceParams(scale=1e39), {1}, 0),
    ],
)
def test_numbers_that_no_column_holds_are_refused(params, eos, prompt_len):
    table = GuidanceTable(2, "cpu")
    with pytest.raises(ValueError, match=r"eos_token_ids and prompt_len must be int32, tokens of .* int64, .* got"):
        table.add_request(1, params, eos, prompt_len=prompt_len)
    with Operators() as seen:
        table.flush()
    assert seen.names == []


def test_nothing_is_written_while_a_graph_is_captured(monkeypatch):
    """Its replays would write it again, over requests that came later."""
    table = GuidanceTable(2, "cpu")
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(table, "_rows", on_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table.flush()
    monkeypatch.setattr(table, "_staged", {1: torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"flush\(\) it before a graph is captured"):
        table.flush()


def test_no_such_column():
    with pytest.raises(AttributeError, match="'GuidanceTable' object has no attribute 'modes'"):
        GuidanceTable(1, "cpu").modes  # noqa: B018
