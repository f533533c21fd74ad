"""A request's parameters: every spelling is understood, everything else refused by name."""

import math
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.guidance.fields import FIELDS, markdown
from lenvm_kernels.types import Mode
from tests.helpers.watch import Operators

OF_NEAR = dict(min_end_prob=1e-4, least_share=0.05)
# Of a thinking_budget with the token 7.
BUDGET = dict(counts_down=True, **OF_NEAR, end_token_ids=(7,))


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, GuidanceParams()),
        ({"value_scale": 0.5}, GuidanceParams(Mode.MUL, 0.5)),
        ({"scale": "0.5", "mode": " MUL "}, GuidanceParams(Mode.MUL, 0.5)),
        ({"value_mode": "centered_exp", "value_scale": -20}, GuidanceParams(Mode.CENTERED_EXP, -20.0)),
        ({"mode": "linear", "scale": 2, "length_gamma": 0.99}, GuidanceParams(Mode.LINEAR, 2.0, gamma=0.99)),
        (
            {"target_length": 60},
            GuidanceParams(Mode.NEAR, 5.0, target_length=60.0, counts_down=True, **OF_NEAR),
        ),
        ({"target_length": 60, "op": "eq"}, GuidanceParams(Mode.EQ, target_length=60.0, counts_down=True)),
        (
            {"target_length": 60, "op": "eq", "min_end_prob": "0.5"},
            GuidanceParams(Mode.EQ, target_length=60.0, counts_down=True, min_end_prob=0.5),
        ),
        (
            {"mode": "exp", "scale": 2, "target_length": 60, "length_mode": "remaining", "cmp": "gte"},
            GuidanceParams(Mode.GE, 2.0, target_length=60.0),
        ),
        (
            {"target_length": 9, "target_length_mode": "budget", "op": "<"},
            GuidanceParams(Mode.LE, 1.0, 0.997, None, 9, True),
        ),
        ({"target_value": 0.0, "target_length": 60, "op": "soft"}, GuidanceParams(Mode.EQ_SOFT, target_length=0.0)),
        (
            {"target_length": 60, "op": "near", "min_end_prob": 0},
            GuidanceParams(Mode.NEAR, 5.0, target_length=60.0, counts_down=True, **OF_NEAR | {"min_end_prob": 0.0}),
        ),
        (
            {"target_length": 9, "op": " LE_near", "strength": "0.5", "length_mode": "remaining", "scale": 2},
            GuidanceParams(Mode.LE_NEAR, 0.5, target_length=9.0, **OF_NEAR),
        ),
        (
            {"target_value": 0, "op": "ge_near", "strength": 0},
            GuidanceParams(Mode.GE_NEAR, 0.0, target_length=0.0, min_end_prob=1e-4),
        ),
        (
            {"scale": 2, "value_min": 0.1, "entropy_threshold": 0.3},
            GuidanceParams(Mode.MUL, 2.0, 0.997, 0.1, entropy_threshold=0.3),
        ),
        (
            {"boosted_token_ids": [2, 5], "token_temp_divisor": 1.5},
            GuidanceParams(token_temperature_scale={2: 1.5, 5: 1.5}),
        ),
        ({"token_temperature_scale": {"7": 0.5}}, GuidanceParams(token_temperature_scale={7: 0.5})),
        ({"token_temperature_scale": {"0": 999_999}}, GuidanceParams(token_temperature_scale={0: 999_999.0})),
        ({"target_length": 0}, GuidanceParams(Mode.NEAR, 5.0, target_length=0.0, counts_down=True, **OF_NEAR)),
        ({"entropy_threshold": 0, "value_min": 0}, GuidanceParams(value_min=0.0, entropy_threshold=0.0)),
        ({"scale": 3e38, "value_min": -3e38}, GuidanceParams(Mode.MUL, 3e38, value_min=-3e38)),
        (
            {"target_value": 0.5, "gamma": 0.5, "length_mode": "total", "op": "="},
            GuidanceParams(Mode.EQ, 1.0, 0.5, None, 1.0),
        ),
        ({"length_mode": "total", "scale": 2}, GuidanceParams(Mode.MUL, 2.0)),
        ({"return_values": True}, GuidanceParams(return_values=True)),
        ({"value_scale": None, "budget_of_tools": 5}, GuidanceParams()),  # absent; another consumer's
        ({"end_token_ids": [7, 3, 7]}, GuidanceParams(end_token_ids=(7, 3))),
        (
            {"scale": 0.5, "end_token_ids": (2**31 - 1, 0, 1, 2), "allow_eos": True, "hard_limit": 1},
            GuidanceParams(Mode.MUL, 0.5, end_token_ids=(2**31 - 1, 0, 1, 2), allow_eos=True, hard_limit=1),
        ),
        (
            {"end_token_ids": [7], "hard_limit": "30", "answer_length": 12.5, "allow_eos": False},
            GuidanceParams(end_token_ids=(7,), hard_limit=30, answer_length=12.5),
        ),
        (
            {"thinking_budget": 10, "end_token_ids": [7]},
            GuidanceParams(Mode.LE_NEAR, 5.0, target_length=10.0, **BUDGET, hard_limit=13),
        ),
        (
            {"thinking_budget": 0.5, "end_token_ids": [7], "op": "eq", "length_mode": "total", "gamma": 0.9},
            GuidanceParams(Mode.EQ, 1.0, 0.9, None, 0.5, True, end_token_ids=(7,), hard_limit=1),
        ),
        (
            {"thinking_budget": 8, "end_token_ids": [7], "op": "le_near", "strength": 3e38},
            GuidanceParams(Mode.LE_NEAR, 3e38, target_length=8.0, **BUDGET, hard_limit=10),
        ),
        (
            {"thinking_budget": 8, "end_token_ids": [7], "hard_limit": 5, "answer_length": 3, "allow_eos": True},
            GuidanceParams(
                Mode.LE_NEAR, 5.0, target_length=8.0, **BUDGET, hard_limit=5, answer_length=3.0, allow_eos=True
            ),
        ),
        ({"thinking_budget": None, "hard_limit": None, "end_token_ids": None, "allow_eos": None}, GuidanceParams()),
    ],
)
def test_accepted(given, expected):
    assert parse_guidance(given) == expected


def test_every_spelling_of_the_constraints():
    spellings = {
        Mode.EQ: "= == eq equal equals",
        Mode.GE: "> >= ge gte greater_equal",
        Mode.LE: "< <= le lte less_equal",
        Mode.EQ_SOFT: "eq_soft soft equal_soft",
        Mode.GE_SOFT: "ge_soft",
        Mode.LE_SOFT: "le_soft",
        Mode.NEAR: "near",
        Mode.GE_NEAR: "ge_near",
        Mode.LE_NEAR: "le_near",
    }
    for mode, words in spellings.items():
        for word in words.split():
            for name in ("value_constraint", "constraint", "cmp", "op"):
                assert parse_guidance({name: word, "target_length": 5}).mode == mode


def test_another_constraint_may_be_the_default():
    assert parse_guidance({"target_length": 5}, constraint="eq").mode == Mode.EQ
    assert parse_guidance({"target_length": 5, "op": "le"}, constraint="eq").mode == Mode.LE
    assert parse_guidance({"scale": 2}, constraint="eq") == parse_guidance({"scale": 2})


def test_values_may_be_asked_for_without_guidance():
    params = parse_guidance({"return_values": True})
    assert params.mode == Mode.UNGUIDED and params.return_values and params.needs_step
    assert not parse_guidance({"return_values": False, "token_temperature_scale": {1: 2.0}}).needs_step
    assert parse_guidance({"target_length": 5}).needs_step


def test_a_budget_ends_with_what_ends_a_thought():
    """Unless it says what else; other requests have no span."""
    ends = dict(ends_of_thought=(9, 4))
    params = parse_guidance({"thinking_budget": 100}, **ends)
    assert (params.end_token_ids, params.hard_limit, params.target_length) == ((9, 4), 125, 100.0)
    assert parse_guidance({"thinking_budget": 100, "end_token_ids": [3]}, **ends).end_token_ids == (3,)
    assert parse_guidance({"target_length": 100}, **ends) == parse_guidance({"target_length": 100})
    with pytest.raises(ValueError, match="hard_limit needs end_token_ids, or a thinking_budget"):
        parse_guidance({"target_length": 100, "hard_limit": 5}, **ends)
    largest = parse_guidance({"thinking_budget": 999_999_999}, **ends)  # the table holds its limit
    assert GuidanceTable.from_params([largest], [set()], "cpu").hard_limit.tolist() == [1_249_999_999]


def test_a_span_takes_part_in_guided_steps():
    """They look for its end, though nothing is guided."""
    params = parse_guidance({"end_token_ids": [5]})
    assert params.mode == Mode.UNGUIDED and params.needs_step


def test_target_value_is_the_length_it_stands_for():
    params = parse_guidance({"target_value": 0.5, "gamma": 0.99})
    assert params.target_length == pytest.approx(math.log(0.5) / math.log(0.99))
    assert not params.counts_down


@pytest.mark.parametrize(
    "mode, scale, neutral",
    [
        ("centered_exp", 0, True),
        ("centered_exp", 1, False),
        ("value_bias", 0, True),
        ("value_bias", 1, False),
        ("mul", 1, True),
        ("mul", 0, True),
        ("mul", -2, True),
        ("mul", 0.9, False),
        ("linear", 1, True),
        ("linear", 0, False),
        ("exp", 1, True),
        ("length_mul", 1, True),
        ("length_mul", -1, False),
    ],
)
def test_neutral_parameters_are_unguided(mode, scale, neutral):
    params = parse_guidance({"value_mode": mode, "value_scale": scale})
    assert (params.mode == Mode.UNGUIDED) == neutral
    assert parse_guidance({"value_mode": mode, "value_scale": scale, "target_length": 4}).mode == Mode.NEAR


@pytest.mark.parametrize(
    "given, message",
    [
        ({"value_mode": "tilt"}, "value_mode must be one of mul, linear, exp, .*, got 'tilt'"),
        ({"mode": 3}, "value_mode must be one of .*, got 3"),
        ({"value_scale": "fast"}, "value_scale must be a finite number, got 'fast'"),
        ({"scale": math.nan}, "value_scale must be a finite number, got nan"),
        ({"scale": math.inf}, "value_scale must be a finite number, got inf"),
        ({"scale": -1e39}, r"value_scale must be a finite number, got -1e\+39"),
        ({"gamma": -0.5}, "gamma must be a finite number > 0 and < 1, got -0.5"),
        ({"target_value": -0.1}, "target_value must be a finite number >= 0 and < 1, got -0.1"),
        ({"value_scale": False}, "value_scale must be a finite number, got False"),
        ({"length_mode": "left"}, "target_length_mode must be one of total, budget, remaining, got 'left'"),
        ({"token_temperature_scale": {True: 2}}, "token_temperature_scale must hold token ids >= 0, got True"),
        ({"token_temperature_scale": {1.0: 2}}, "token_temperature_scale must hold token ids >= 0, got 1.0"),
        ({"token_temperature_scale": {1: 1e6}}, r"token_temperature_scale\[1\] must be .* < 1e\+06, got 1000000.0"),
        ({"boosted_token_ids": "12", "token_temp_divisor": 2}, "boosted_token_ids must be a list of .*, got '12'"),
        ({"boosted_token_ids": [-1], "token_temp_divisor": 2}, "boosted_token_ids must hold token ids >= 0, got -1"),
        ({"scale": 1e39}, r"value_scale must be a finite number, got 1e\+39"),
        ({"scale": True}, "value_scale must be a finite number, got True"),
        ({"gamma": 1.0}, "gamma must be a finite number > 0 and < 1, got 1.0"),
        ({"length_gamma": 0}, "gamma must be a finite number > 0 and < 1, got 0"),
        ({"target_value": 1.0}, "target_value must be a finite number >= 0 and < 1, got 1.0"),
        ({"target_length": -1}, "target_length must be a finite number >= 0, got -1"),
        ({"target_length": [5]}, "target_length must be a finite number"),
        (
            {"target_length": 5, "length_mode": "left"},
            "target_length_mode must be one of total, budget, remaining, got 'left'",
        ),
        ({"target_length": 5, "op": "!="}, "value_constraint must be one of eq, =, ==, .*, got '!='"),
        ({"constraint": "ge"}, "value_constraint needs a target"),
        ({"constraint": "near", "strength": 2}, "value_constraint needs a target"),
        *(
            (other | {"strength": 5}, "strength needs a value_constraint of near, ge_near or le_near")
            for other in ({}, {"scale": 2}, {"target_length": 5, "op": "eq"}, {"target_length": 5, "op": "le_soft"})
        ),
        *(
            ({"target_length": 5, "op": "near", "strength": s}, f"strength must be a finite number >= 0, got {s!r}")
            for s in (-0.1, math.nan, math.inf, -math.inf, "much", True)
        ),
        (
            {"target_length": 5, "op": "near", "strength": 3.5e38},
            r"strength must be a finite number >= 0, got 3.5e\+38",
        ),
        *(
            (other | {"min_end_prob": 0.1}, "min_end_prob needs a target: give target_length or target_value as well")
            for other in ({}, {"scale": 2})
        ),
        ({"target_length": 5, "min_end_prob": -0.1}, "min_end_prob must be a finite number >= 0, got -0.1"),
        ({"value_min": "low"}, "value_min must be a finite number"),
        ({"entropy_threshold": -0.1}, "value_entropy_threshold must be a finite number >= 0, got -0.1"),
        ({"scale": 2, "value_scale": 3}, "value_scale is given twice: accepted is one of value_scale, scale"),
        ({"value_scal": 2}, "value_scal is not a guidance parameter; did you mean value_scale"),
        ({"token_temperature_scale": [1]}, "token_temperature_scale must be a mapping of token id to divisor"),
        ({"token_temperature_scale": {"x": 1}}, "token_temperature_scale must hold token ids >= 0, got 'x'"),
        ({"token_temperature_scale": {-1: 1}}, "token_temperature_scale must hold token ids >= 0, got -1"),
        ({"token_temperature_scale": {1: 0}}, r"token_temperature_scale\[1\] must be a finite number > 0 and < 1e\+06"),
        ({"token_temperature_scale": {1: 3e38}}, r"token_temperature_scale\[1\] must be .* < 1e\+06, got 3e\+38"),
        ({"boosted_token_ids": [1]}, "boosted_token_ids and token_temp_divisor must be given together"),
        ({"token_temp_divisor": 2}, "boosted_token_ids and token_temp_divisor must be given together"),
        ({"return_values": 1}, "return_values must be true or false, got 1"),
        ({"boosted_token_ids": 1, "token_temp_divisor": 2}, "boosted_token_ids must be a list of token ids, got 1"),
        ({"end_token_ids": 5}, "end_token_ids must be a list of 1 to 4 token ids, got 5"),
        ({"end_token_ids": "57"}, "end_token_ids must be a list of 1 to 4 token ids, got '57'"),
        ({"end_token_ids": []}, r"end_token_ids must be a list of 1 to 4 token ids, got \[\]"),
        (
            {"end_token_ids": [1, 2, 3, 4, 5]},
            r"end_token_ids must be a list of 1 to 4 token ids, got \[1, 2, 3, 4, 5\]",
        ),
        ({"end_token_ids": [-1]}, r"end_token_ids must hold token ids >= 0, got \[-1\]"),
        ({"end_token_ids": [2**31]}, r"end_token_ids must hold token ids >= 0, got \[2147483648\]"),
        ({"end_token_ids": [1.0]}, r"end_token_ids must hold token ids >= 0, got \[1.0\]"),
        ({"end_token_ids": [True]}, r"end_token_ids must hold token ids >= 0, got \[True\]"),
        ({"allow_eos": True}, "allow_eos needs end_token_ids, or a thinking_budget"),
        ({"answer_length": 5, "target_length": 9}, "answer_length needs end_token_ids, or a thinking_budget"),
        ({"hard_limit": 5}, "hard_limit needs end_token_ids, or a thinking_budget"),
        ({"end_token_ids": [1], "allow_eos": 1}, "allow_eos must be true or false, got 1"),
        ({"end_token_ids": [1], "answer_length": -1}, "answer_length must be a finite number >= 0, got -1"),
        ({"end_token_ids": [1], "hard_limit": 0}, r"hard_limit must be an integer >= 1 and < 2.14748e\+09, got 0"),
        ({"end_token_ids": [1], "hard_limit": 2.5}, r"hard_limit must be an integer .*, got 2.5"),
        ({"end_token_ids": [1], "hard_limit": 2**31 - 1}, "hard_limit must be an integer .*, got 2147483647"),
        ({"thinking_budget": 5}, "thinking_budget needs end_token_ids: no token is known that ends a thought"),
        ({"thinking_budget": 5, "end_token_ids": []}, "thinking_budget needs end_token_ids: no token is known"),
        (
            {"thinking_budget": 0, "end_token_ids": [1]},
            r"thinking_budget must be a finite number > 0 and < 1e\+09, got 0",
        ),
        ({"thinking_budget": 1e9, "end_token_ids": [1]}, r"thinking_budget must be .* < 1e\+09, got 1000000000.0"),
        *(
            ({"thinking_budget": 5, "end_token_ids": [1]} | other, "thinking_budget is a target_length of its own")
            for other in ({"target_length": 5}, {"target_value": 0.5}, {"length_mode": "remaining"})
        ),
        ({"end_token_id": [1]}, "end_token_id is not a guidance parameter; did you mean end_token_ids"),
        ({"thinking_budgets": 4}, "thinking_budgets is not a guidance parameter; did you mean thinking_budget"),
        (
            {"boosted_token_ids": [1], "token_temp_divisor": 0},
            "token_temp_divisor must be a finite number > 0 .*, got 0",
        ),
        (
            {"boosted_token_ids": [1], "token_temp_divisor": 2, "token_temperature_scale": {1: 2}},
            "give token_temperature_scale or boosted_token_ids",
        ),
    ],
)
def test_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        parse_guidance(given)


def test_custom_params_must_be_a_mapping():
    with pytest.raises(TypeError, match="custom_params must be a mapping of field names to values, got list"):
        parse_guidance([("scale", 2)])


NAMES = [name for field in FIELDS.values() for name in field.names]
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), ANYTHING, max_size=5))
def test_anything_is_parsed_or_refused(params):
    """Whatever a client sends gives usable parameters or a ValueError, and what is accepted fits the device table."""
    try:
        parsed = parse_guidance(params)
    except ValueError:
        return
    table = GuidanceTable.from_params([parsed], [set()], "cpu")
    assert table.scale.isfinite().all() and (table.nats_per_token > 0).all() and table.target_length.isfinite().all()


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
    table.add_request(2, params, {0}, span_ended=True)
    table.add_request(1, params, {0})
    assert table.span_ended.tolist() == [False, False, True]
    table.span_ended.fill_(True)  # as limit_span does it
    table.add_request(0, params, {0}, span_ended=True)
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


def test_the_docs_have_the_table_of_the_fields():
    page = Path(__file__).parent.parent / "docs" / "modes-and-parameters.md"
    assert markdown() in page.read_text(), f"put lenvm_kernels.guidance.fields.markdown() into {page}"


# --- requests that come and go ---


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
    full |= {"end_token_ids": [1, 2, 3], "hard_limit": 9, "answer_length": 5, "allow_eos": True}
    table.add_request(
        1,
        parse_guidance(full | {"token_temperature_scale": {1: 2, 2: 3, 3: 4}}),
        {4, 5, 6},
        seed=2**63 - 1,
        span_ended=True,
    )
    assert table.seed.tolist() == [0, 2**63 - 1] and table.return_values.tolist() == [False, True]
    table.faults += 2
    table.add_request(1, parse_guidance({"scale": 0.5}), {8}, prompt_len=3, seed=-(2**63))
    fresh = GuidanceTable(2, "cpu", max_eos=3, max_scaled_tokens=3)
    fresh.faults += 2
    fresh.mode[1], fresh.scale[1], fresh.eos_token_ids[1, 0] = Mode.MUL, 0.5, 8
    fresh.prompt_len[1], fresh.seed[1], fresh.faults[1] = 3, -(2**63), 0
    assert str([columns(table, row) for row in range(2)]) == str([columns(fresh, row) for row in range(2)])


def test_without_values():
    """Another strength unless one is named, and only what needs none."""
    asked = {"target_length": 9}
    assert parse_guidance(asked).scale == 5 and parse_guidance(asked, has_values=False).scale == 10
    assert parse_guidance(asked | {"strength": 3}, has_values=False).scale == 3
    assert parse_guidance(asked).least_share == 0.05 and parse_guidance(asked, has_values=False).least_share == 0
    assert parse_guidance({}, has_values=False).mode == Mode.UNGUIDED
    with pytest.raises(ValueError, match="value_constraint must be one of near, ge_near, le_near without a"):
        parse_guidance(asked | {"op": "eq"}, has_values=False)


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
