"""A request's parameters: every spelling is understood, everything else refused by name."""

import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, Thoughts, parse_guidance
from lenvm_kernels.guidance.fields import FIELDS, markdown
from lenvm_kernels.types import Mode

OF_NEAR = dict(min_end_prob=1e-4, least_share=0.05)


# Of a thinking_budget with the token 7.
BUDGET = dict(counts_down=True, **OF_NEAR, end_token_ids=(7,))
LANDS = dict(counts_down=True, **OF_NEAR, allow_eos=True, end_message=(5, 6))
LIMIT = {"end_token_ids": [[7, 3]], "hard_limit": 9}


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
            {"end_token_ids": [[7, 3], 9, [4], (7, 3)], "start_token_ids": [[5, 5]]},
            GuidanceParams(end_token_ids=((7, 3), 9, 4), start_token_ids=((5, 5),)),
        ),
        (
            {"end_token_ids": [7], "hard_limit": 9, "hard_limit_grace": 4, "end_message": [1, 0]},
            GuidanceParams(end_token_ids=(7,), hard_limit=9, hard_limit_grace=4, end_message=(1, 0)),
        ),
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
        (
            {"target_length": 80.5, "landing": [5, 6]},
            GuidanceParams(Mode.NEAR, 5.0, target_length=80.5, **LANDS, hard_limit=57, hard_limit_grace=14),
        ),
        (
            {"target_length": 80, "tolerance": 0.25, "landing": [5, 6]},
            GuidanceParams(
                Mode.NEAR, 5.0, target_length=80.0, tolerance=20.0, **LANDS, hard_limit=76, hard_limit_grace=14
            ),
        ),
        (
            {"thinking_budget": 8, "tolerance": 0.5, "end_token_ids": [7]},
            GuidanceParams(Mode.LE_NEAR, 5.0, target_length=8.0, tolerance=4.0, **BUDGET, hard_limit=10),
        ),
        (
            {"target_length": 3e38, "tolerance": 0.5, "length_mode": "remaining"},
            GuidanceParams(Mode.NEAR, 5.0, target_length=3e38, tolerance=(2 - 2**-23) * 2.0**127 - 3e38, **OF_NEAR),
        ),
        (
            {"target_length": 20, "landing": [5, 6], "landing_tokens": 30},
            GuidanceParams(Mode.NEAR, 5.0, target_length=20.0, **LANDS, hard_limit=1, hard_limit_grace=20),
        ),
        (
            {"target_length": 3e38, "landing": [5, 6], "landing_tokens": 4},
            GuidanceParams(Mode.NEAR, 5.0, target_length=3e38, **LANDS, hard_limit=2**31 - 2),
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


def test_who_takes_part_in_a_step_without_guidance():
    """Who asks for values, and who has a span, whose end is looked for."""
    for asked in ({"return_values": True}, {"end_token_ids": [5]}):
        params = parse_guidance(asked)
        assert params.mode == Mode.UNGUIDED and params.needs_step
        assert params.return_values == ("return_values" in asked)
    assert not parse_guidance({"return_values": False, "token_temperature_scale": {1: 2.0}}).needs_step
    assert parse_guidance({"target_length": 5}).needs_step


def test_a_budget_ends_with_what_ends_a_thought():
    """Unless it says what else; other requests have no span."""
    ends = dict(thoughts=Thoughts(ends=((9,), (4,))))
    params = parse_guidance({"thinking_budget": 100}, **ends)
    assert (params.end_token_ids, params.hard_limit, params.target_length) == ((9, 4), 125, 100.0)
    assert parse_guidance({"thinking_budget": 100, "end_token_ids": [3]}, **ends).end_token_ids == (3,)
    assert parse_guidance({"target_length": 100}, **ends) == parse_guidance({"target_length": 100})
    # The tokenizer's start goes with its end, and goes with no other.
    thoughts = Thoughts(ends=((9, 4),), starts=((8,),))
    for asked, starts in (({}, (8,)), ({"start_token_ids": []}, ()), ({"start_token_ids": [3]}, (3,))):
        params = parse_guidance({"thinking_budget": 100} | asked, thoughts=thoughts)
        assert (params.end_token_ids, params.start_token_ids) == (((9, 4),), starts)
    assert parse_guidance({"thinking_budget": 100, "end_token_ids": [3]}, thoughts=thoughts).start_token_ids == ()
    with pytest.raises(ValueError, match="hard_limit needs end_token_ids, or a thinking_budget"):
        parse_guidance({"target_length": 100, "hard_limit": 5}, **ends)
    largest = parse_guidance({"thinking_budget": 999_999_999}, **ends)  # the table holds its limit
    assert GuidanceTable.from_params([largest], [set()], "cpu").columns.hard_limit.tolist() == [1_249_999_999]


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
        ({"end_token_ids": [-1]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[-1\]"),
        ({"end_token_ids": [2**31]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[2147483648\]"),
        ({"end_token_ids": [1.0]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[1.0\]"),
        ({"end_token_ids": [True]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[True\]"),
        ({"end_token_ids": [[]]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[\[\]\]"),
        ({"end_token_ids": [[3, [4]]]}, r"end_token_ids must hold token ids >= 0, or lists of them, got \[\[3, \[4"),
        ({"end_token_ids": [1], "start_token_ids": 5}, "start_token_ids must be a list of 0 to 4 token ids, got 5"),
        (
            {"end_token_ids": [[1] * 16], "start_token_ids": [[1] * 16]},
            "end_token_ids and start_token_ids must be of at most 31 tokens together, got 32",
        ),
        ({"start_token_ids": [3]}, "start_token_ids needs end_token_ids, or a thinking_budget"),
        ({"end_token_ids": [1], "hard_limit_grace": 3}, "hard_limit_grace needs a hard_limit, or a thinking_budget"),
        ({"end_token_ids": [1], "end_message": [3]}, "end_message needs a hard_limit, or a thinking_budget"),
        ({"end_message": [-3], **LIMIT}, r"end_message must be a text, or a list of token ids >= 0, got \[-3\]"),
        ({"end_message": 3, **LIMIT}, "end_message must be a text, or a list of token ids >= 0, got 3"),
        (
            {"end_message": "So.", **LIMIT},
            "end_message must be a list of token ids where no tokenizer is known, got 'So.'",
        ),
        ({"end_message": [3] * 31, **LIMIT}, "end_message must be of at most 30 tokens, got 31"),
        ({"hard_limit_grace": -1, **LIMIT}, r"hard_limit_grace must be an integer >= 0 and < 1e\+06, got -1"),
        ({"tolerance": 0.1}, "tolerance needs a value_constraint of near, ge_near or le_near"),
        (
            {"tolerance": 0.1, "target_length": 9, "op": "eq"},
            "tolerance needs a value_constraint of near, ge_near or le",
        ),
        ({"tolerance": 1, "target_length": 9}, "tolerance must be a finite number >= 0 and < 1, got 1"),
        ({"landing": [3]}, "landing needs a target_length of all new tokens, and neither end_token_ids nor a budget"),
        ({"landing": [3], "target_length": 9, "end_token_ids": [1]}, "landing needs a target_length of all new tokens"),
        ({"landing": [3], "thinking_budget": 9, "end_token_ids": [1]}, "landing needs a target_length of all new"),
        ({"landing": [3], "target_length": 9, "target_value": 0.5}, "landing needs a target_length of all new tokens"),
        ({"landing": [3], "target_length": 9, "length_mode": "remaining"}, "landing needs a target_length of all new"),
        ({"landing": [3] * 33, "target_length": 99}, "landing must be of at most 32 tokens, got 33"),
        ({"landing": "So", "target_length": 9}, "landing must be a list of token ids where no tokenizer is known"),
        ({"landing": [-1], "target_length": 9}, r"landing must be a text, or a list of token ids >= 0, got \[-1\]"),
        ({"landing_tokens": 9, "target_length": 9}, "landing_tokens needs a landing"),
        (
            {"landing": [3], "landing_tokens": 2.5, "target_length": 9},
            r"landing_tokens must be an integer >= 1 and < 1e\+06, got 2.5",
        ),
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
    table = GuidanceTable.from_params([parsed], [set()], "cpu").columns
    assert table.scale.isfinite().all() and (table.nats_per_token > 0).all() and table.target_length.isfinite().all()


def test_the_docs_have_the_table_of_the_fields():
    page = Path(__file__).parent.parent / "docs" / "modes-and-parameters.md"
    assert markdown() in page.read_text(), f"put lenvm_kernels.guidance.fields.markdown() into {page}"


def test_without_values():
    """Another strength unless one is named, and only what needs none."""
    asked = {"target_length": 9}
    assert parse_guidance(asked).scale == 5 and parse_guidance(asked, has_values=False).scale == 10
    assert parse_guidance(asked | {"strength": 3}, has_values=False).scale == 3
    assert parse_guidance(asked).least_share == 0.05 and parse_guidance(asked, has_values=False).least_share == 0
    assert parse_guidance({}, has_values=False).mode == Mode.UNGUIDED
    with pytest.raises(ValueError, match="value_constraint must be one of near, ge_near, le_near without a"):
        parse_guidance(asked | {"op": "eq"}, has_values=False)
