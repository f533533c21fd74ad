"""A request's parameters: all spellings are accepted, other input is rejected by name."""

import math
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, Thoughts, parse_guidance
from lenvm_kernels.guidance.fields import FIELDS, markdown
from lenvm_kernels.guidance.params import read_names
from lenvm_kernels.types import CountFrom, Mode, TextBreak

INF, NAN, LARGEST = math.inf, math.nan, (2 - 2**-23) * 2.0**127
CANDIDATES = dict(min_end_prob=1e-4, least_share=0.05)


def near(target, **changed):
    return dict(mode=Mode.NEAR, scale=5.0, target_length=target, counts_down=True) | CANDIDATES | changed


def budget(target, **changed):
    return near(target, mode=Mode.LE_NEAR, end_token_ids=((7,),)) | changed


def lands(target, **changed):
    return near(target, allow_eos=True, end_message=(5, 6)) | changed


# Requests, and the parameters that differ from an empty request.
ACCEPTED = [
    ({"value_scale": None, "lenvm": None}, {}),  # absent
    ({"Value-Scale": 0.5, "lengthGamma": 0.9}, dict(mode=Mode.MUL, scale=0.5, gamma=0.9)),
    ({"lenvm": {"scale": 0.5, "mode": None}, "gamma": 0.9}, dict(mode=Mode.MUL, scale=0.5, gamma=0.9)),
    ({"lenvm": '{"scale": 0.5}'}, dict(mode=Mode.MUL, scale=0.5)),
    ({"scale": "0.5", "mode": " MUL "}, dict(mode=Mode.MUL, scale=0.5)),
    ({"mode": "linear", "scale": 2, "length_gamma": 0.99}, dict(mode=Mode.LINEAR, scale=2.0, gamma=0.99)),
    ({"scale": 3e38, "value_min": -3e38}, dict(mode=Mode.MUL, scale=3e38, value_min=-3e38)),
    ({"length_mode": "total", "scale": 2}, dict(mode=Mode.MUL, scale=2.0)),
    ({"entropy_threshold": 0, "value_min": 0}, dict(value_min=0.0, entropy_threshold=0.0)),
    ({"value_entropy_threshold": 0.3, "value_stride": 4.0}, dict(entropy_threshold=0.3, value_stride=4)),
    ({"boosted_token_ids": [2, 5], "token_temp_divisor": 1.5}, dict(token_temperature_scale={2: 1.5, 5: 1.5})),
    ({"token_temperature_scale": {"7": 0.5, 0: 999_999}}, dict(token_temperature_scale={7: 0.5, 0: 999_999.0})),
    # Targets.
    ({"target_length": 60, "op": "near", "min_end_prob": 0}, near(60.0, min_end_prob=0.0)),
    ({"target_length": 9, "target_length_mode": "budget"}, near(9.0)),
    ({"target_length": 3e38, "tolerance": 0.5, "length_mode": "remaining"},
     near(3e38, counts_down=False, tolerance=LARGEST - 3e38)),
    ({"target_length": 9, "op": "eq", "min_end_prob": "0.5"},
     dict(mode=Mode.EQ, target_length=9.0, counts_down=True, min_end_prob=0.5)),
    ({"mode": "exp", "scale": 2, "target_length": 60, "length_mode": "remaining", "cmp": "gte"},
     dict(mode=Mode.GE, scale=2.0, target_length=60.0)),
    ({"target_length": 9, "op": " LE_near", "strength": "0.5", "length_mode": "remaining", "scale": 2},
     near(9.0, mode=Mode.LE_NEAR, scale=0.5, counts_down=False)),
    ({"target_value": 0.0, "target_length": 60, "op": "soft"}, dict(mode=Mode.EQ_SOFT, target_length=0.0)),
    ({"target_value": 0, "op": "ge_near", "strength": 0},
     near(0.0, mode=Mode.GE_NEAR, scale=0.0, counts_down=False, least_share=0.0)),
    ({"target_value": 0.5, "gamma": 0.5, "length_mode": "total", "op": "="},
     dict(mode=Mode.EQ, gamma=0.5, target_length=1.0)),
    # Spans.
    ({"end_token_ids": [[7, 3], 9, [4], (7, 3)], "start_token_ids": [[5, 5]]},
     dict(end_token_ids=((7, 3), (9,), (4,)), start_token_ids=((5, 5),))),
    ({"end_token_ids": "[[7, 3], 9]", "allow_eos": 1}, dict(end_token_ids=((7, 3), (9,)), allow_eos=True)),
    ({"token_temperature_scale": '{"7": 0.5}'}, dict(token_temperature_scale={7: 0.5})),
    ({"end_token_ids": [7], "hard_limit": 9, "hard_limit_grace": 4, "end_message": [1, 0]},
     dict(end_token_ids=((7,),), hard_limit=9, hard_limit_grace=4, end_message=(1, 0))),
    ({"scale": 0.5, "end_token_ids": (2**31 - 1, 0, 1, 2), "allow_eos": True, "hard_limit": 1},
     dict(mode=Mode.MUL, scale=0.5, end_token_ids=((2**31 - 1,), (0,), (1,), (2,)), allow_eos=True, hard_limit=1)),
    ({"end_token_ids": [7], "hard_limit": "30", "answer_length": 12.5, "allow_eos": False},
     dict(end_token_ids=((7,),), hard_limit=30, answer_length=12.5)),
    ({"thinking_budget": 8, "end_token_ids": [7], "op": "le_near", "strength": 3e38},
     budget(8.0, scale=3e38, hard_limit=10)),
    ({"thinking_budget": 8, "end_token_ids": [7], "hard_limit": 5, "answer_length": 3, "allow_eos": True},
     budget(8.0, hard_limit=5, answer_length=3.0, allow_eos=True)),
    ({"thinking_budget": 0.5, "end_token_ids": [7], "op": "eq", "length_mode": "total", "gamma": 0.9},
     dict(mode=Mode.EQ, gamma=0.9, target_length=0.5, counts_down=True, end_token_ids=((7,),), hard_limit=1)),
    ({"target_length": 80.5, "landing": [5, 6]}, lands(80.5, hard_limit=57, hard_limit_grace=14)),
    ({"target_length": 80, "tolerance": 0.25, "landing": [5, 6]},
     lands(80.0, tolerance=20.0, hard_limit=76, hard_limit_grace=14)),
    ({"target_length": 20, "landing": [5, 6], "landing_tokens": 30}, lands(20.0, hard_limit=1, hard_limit_grace=20)),
    ({"target_length": 3e38, "landing": [5, 6], "landing_tokens": 4}, lands(3e38, hard_limit=2**31 - 2)),
]  # fmt: skip


@pytest.mark.parametrize("request_, expected", ACCEPTED)
def test_accepted_requests(request_, expected):
    assert parse_guidance(request_) == GuidanceParams(**expected)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.EQ, "= == eq equal equals"),
        (Mode.GE, "> >= ge gte greater_equal"),
        (Mode.LE, "< <= le lte less_equal"),
        (Mode.EQ_SOFT, "eq_soft soft equal_soft"),
        *((mode, mode.name) for mode in (Mode.GE_SOFT, Mode.LE_SOFT, Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)),
    ],
)
def test_every_spelling_of_the_constraints(mode, words):
    for word in words.split():
        for name in ("value_constraint", "constraint", "cmp", "op"):
            assert parse_guidance({name: word, "target_length": 5}).mode == mode, (name, word)


@pytest.mark.parametrize(
    "mode, neutral, guiding",
    [
        ("centered_exp", [0], [1]),
        ("value_bias", [0], [1]),
        ("mul", [1, 0, -2], [0.9]),
        ("linear", [1], [0]),
        ("exp", [1], [0]),
        ("length_mul", [1], [-1]),
    ],
)
def test_neutral_parameters_are_unguided(mode, neutral, guiding):
    for scale in (*neutral, *guiding):
        params = parse_guidance({"value_mode": mode, "value_scale": scale})
        assert (params.mode == Mode.UNGUIDED) == (scale in neutral), scale
        assert parse_guidance({"value_mode": mode, "value_scale": scale, "target_length": 4}).mode == Mode.NEAR


def test_requests_that_need_a_step():
    for request in ({"return_values": True}, {"end_token_ids": [5]}, {"target_length": 5}):
        assert parse_guidance(request).needs_step, request
    assert not parse_guidance({"return_values": False, "token_temperature_scale": {1: 2.0}}).needs_step


# The name of a field, the requirement in its message, and values that it rejects.
TOKENS = "token ids >= 0 and < 2**31"
REJECTED_ALONE = [
    ("value_mode", "be one of mul, linear, exp, length_mul, centered_exp, value_bias", ["tilt", 3]),
    ("value_scale", "be a finite number", ["fast", NAN, INF, -1e39, 1e39, 10**400, True, False]),
    ("gamma", "be a finite number > 0 and < 1", [-0.5, 1.0, 0]),
    ("target_length", "be a finite number >= 0", [-1, [5]]),
    ("target_length_mode", "be one of answer, total, budget, remaining", ["left"]),
    ("target_value", "be a finite number >= 0 and < 1", [-0.1, 1.0]),
    ("strength", "be a finite number >= 0", [-0.1, NAN, INF, -INF, "much", True, 3.5e38]),
    ("min_end_prob", "be a finite number >= 0", [-0.1]),
    ("tolerance", "be a finite number >= 0 and < 1", [1]),
    ("thinking_budget", "be -1, or a finite number >= 0 and < 1e+09", [-2, -0.5, 1e9, "x"]),
    ("thinking_budget_total", "be -1, or a finite number >= 0 and < 1e+09", [-2]),
    ("value_min", "be a finite number", ["low"]),
    ("value_entropy_threshold", "be a finite number >= 0", [-0.1]),
    ("value_stride", "be an integer >= 1 and < 1e+06", [0, 1e6, 1.5]),
    ("return_values", "be true or false", [2, "true"]),
    ("allow_eos", "be true or false", [-1]),
    ("answer_length", "be a finite number >= 0", [-1]),
    ("hard_limit", "be an integer >= 1 and < 2147483647", [0, 2.5, 2**31 - 1]),
    ("hard_limit_grace", "be an integer >= 0 and < 1e+06", [-1]),
    ("landing_tokens", "be an integer >= 1 and < 1e+06", [2.5]),
    ("end_token_ids", "be a list of 1 to 4 token ids, or its JSON text", [5, "x", [], [1, 2, 3, 4, 5], "[" * 100_000]),
    ("end_token_ids", f"contain {TOKENS}, or lists of them", [[-1], [2**31], [1.0], [True], [[]], [[3, [4]]]]),
    ("start_token_ids", "be a list of 0 to 4 token ids, or its JSON text", [5]),
    ("end_message", f"be a text in Unicode, or a list of {TOKENS}", [[-3], 3, "a\ud83d", [2**31]]),
    ("landing", f"be a text in Unicode, or a list of {TOKENS}", [[-1]]),
    ("token_temperature_scale", "be a mapping of token id to divisor, or its JSON text", [[1]]),
    ("boosted_token_ids", "be a list of token ids", [1, "12"]),
    ("token_temp_divisor", "be a finite number > 0 and < 1e+06", [0, 1e6]),
]


@pytest.mark.parametrize(("name", "must", "values"), REJECTED_ALONE)
def test_rejected_values_are_reported_by_the_main_name(name, must, values):
    for value in values:
        for alias in FIELDS[name].names:
            with pytest.raises(ValueError, match=f"^{re.escape(f'{name} must {must}, got {value!r}')}$"):
                parse_guidance({alias: value})


NEAR_ONLY = "needs value_constraint near, ge_near or le_near"
A_TARGET = "needs a target: give target_length or target_value as well"
A_SPAN, A_LIMIT = "needs end_token_ids, or a thinking_budget", "needs a hard_limit, or a thinking_budget"
LANDING = "landing needs a target_length of all new tokens, and neither end_token_ids nor a budget"
OWN_TARGET = "thinking_budget is a target; the only other target allowed is a target_length of the answer"
NO_END = "thinking_budget needs end_token_ids: no token is known to end a thought"
TOGETHER = "boosted_token_ids and token_temp_divisor must be given together"
ENDS, KNOWN = {"end_token_ids": [1]}, {"thoughts": Thoughts(encode=list)}
LIMIT = {"end_token_ids": [[7, 3]], "hard_limit": 9}
REJECTED_TOGETHER = [
    ({"target_length": 5, "op": "!="}, "value_constraint must be one of eq, =, ==, equal, equals, ge, .*, got '!='"),
    ({"constraint": "near", "strength": 2}, f"value_constraint {A_TARGET}"),
    ({"min_end_prob": 0.1}, f"min_end_prob {A_TARGET}"),
    ({"target_length": 5, "op": "eq", "strength": 5}, f"strength {NEAR_ONLY}"),
    ({"tolerance": 0.1, "target_length": 9, "op": "eq"}, f"tolerance {NEAR_ONLY}"),
    ([("scale", 2)], "custom_params must be a mapping of field names to values, got list"),
    ({"lenvm": {"loudness": 2}}, "loudness is not a guidance parameter; accepted are value_mode, value_scale, .*"),
    ({"lenvm": {"scale": 2}, "value_scale": 3}, "value_scale is given twice; give one of value_scale, scale"),
    ({"target_tokens": 2, "target_length": 3}, "target_length is given twice; give one of target_length, .*"),
    ({"lenvm": 5}, "lenvm must be an object of guidance parameters, or its JSON text, got 5"),
    ({"max_length": 9}, "max_length is not a guidance parameter: give target_length with .* le_near, .*"),
    ({"Min-Length": 9}, "Min-Length is not a guidance parameter: give target_length with .* ge_near, .*"),
    ({"token_temperature_scale": {"x": 1}}, "token_temperature_scale must contain token ids >= 0, got 'x'"),
    ({"token_temperature_scale": {True: 2}}, "token_temperature_scale must contain token ids >= 0, got True"),
    ({"token_temperature_scale": {1: 0}}, r"token_temperature_scale\[1\] must be .* > 0 and < 1e\+06, got 0"),
    ({"boosted_token_ids": [1]}, TOGETHER),
    ({"token_temp_divisor": 2}, TOGETHER),
    ({"boosted_token_ids": [1], "token_temp_divisor": 2, "token_temperature_scale": {1: 2}},
     "give token_temperature_scale or boosted_token_ids with token_temp_divisor, not both"),
    ({"allow_eos": True}, f"allow_eos {A_SPAN}"),
    ({"answer_length": 5, "target_length": 9}, f"answer_length {A_SPAN}"),
    ({"hard_limit": 5, "target_length": 9}, f"hard_limit {A_SPAN}"),
    ({"start_token_ids": [3]}, f"start_token_ids {A_SPAN}"),
    (ENDS | {"hard_limit_grace": 3}, f"hard_limit_grace {A_LIMIT}"),
    (ENDS | {"end_message": [3]}, f"end_message {A_LIMIT}"),
    (LIMIT | {"end_message": "So."}, "end_message must be a list of token ids without a tokenizer, got 'So.'"),
    (LIMIT | {"end_message": [3] * 31}, "end_message must have at most 30 tokens, got 31"),
    ({"end_token_ids": [[1] * 16], "start_token_ids": [[1] * 16]},
     "end_token_ids and start_token_ids must have at most 31 tokens together, got 32"),
    ({"target_words": 5}, "target_words needs a tokenizer, and none was given"),
    ({"target_words": 5, "target_length": 5}, "give one of .*, got target_length and target_words"),
    ({"target_sentences": 5, "landing": [3]}, "landing cannot be combined with target_sentences", KNOWN),
    ({"target_words": 5, "end_token_ids": [3]}, "end_token_ids cannot be combined with target_words", KNOWN),
    ({"target_words": 5, "target_value": 0.5}, "target_value cannot be combined with target_words", KNOWN),
    ({"target_words": 5, "length_mode": "total"}, "target_length_mode must be answer .*, got 'total'", KNOWN),
    ({"landing": [3]}, LANDING),
    ({"landing": [3], "target_length": 9} | ENDS, LANDING),
    ({"landing": [3], "target_length": 9, "target_value": 0.5}, LANDING),
    ({"landing": [3], "target_length": 9, "length_mode": "remaining"}, LANDING),
    ({"landing": [3] * 33, "target_length": 99}, "landing must have at most 32 tokens, got 33"),
    ({"landing": "A", "target_length": 9}, "landing must be a list of token ids without a tokenizer, got 'A'"),
    ({"landing_tokens": 9, "target_length": 9}, "landing_tokens needs a landing"),
    ({"thinking_budget": 5}, NO_END),
    ({"thinking_budget": 5, "thinking_budget_total": 5} | ENDS,
     "give one of thinking_budget and thinking_budget_total, not both"),
    ({"soft_max_tokens": True}, "soft_max_tokens needs a limit of new tokens, such as max_tokens"),
    ({"target_length": 9, "answer_reserve": 5},
     "answer_reserve needs a thinking_budget, a thinking_budget_total or soft_max_tokens"),
    ({"thinking_budget": 5, "answer_reserve": 5} | ENDS,
     "answer_reserve must be less than the limit of new tokens, None, got 5"),
    ({"thinking_budget": 5, "target_length": 5, "landing": [3]} | ENDS, LANDING),
    ({"thinking_budget": 5, "target_length": 5, "target_value": 0.5} | ENDS, OWN_TARGET),
    ({"thinking_budget": 5, "target_length": 5, "op": "eq", "strength": 2} | ENDS,
     "strength needs value_constraint near, ge_near or le_near"),
    ({"thinking_budget": 5, "length_mode": "remaining"} | ENDS, OWN_TARGET),
    ({"target_length": 5, "flavour": 1}, f"flavour is not a guidance parameter; accepted are {', '.join(FIELDS)}"),
    ({"target_length": 5, "hardlimits": 1}, r"hardlimits is not a guidance parameter; did you mean hard_limit\?",
     {"others": "ignored"}),
    # With defaults of a server.
    ({"target_length": 9, "op": "eq"}, "value_constraint must be one of near, ge_near, le_near without a value model, "
     "got 'eq'", {"has_values": False}),
    ({"scale": 2}, "value_mode mul needs a value model; without one, give a target_length", {"has_values": False}),
    ({"return_values": True}, "return_values must not be given without a value model, got True", {"has_values": False}),
    ({"value_min": 0.0}, "value_min must not be given without a value model, got 0.0", {"has_values": False}),
    ({}, "gamma must be a finite number > 0 and < 1, got 1.5", {"gamma": 1.5}),
    # Among parameters of other components.
    ({"target_length": 5, "op": "ge"}, "op must be value_constraint, or be inside lenvm", {"others": "shared"}),
    ({"target_length": 5, "value_scal": 2}, r"value_scal is not a guidance parameter; did you mean value_scale\?",
     {"others": "shared"}),
    ({"target_lenght": 5, "mode": 1}, "target_lenght is not .*; did you mean target_length.", {"others": "shared"}),
    ({"lenvm": {"thinking_budget": -2}}, r"thinking_budget must be -1, or a finite number >= 0 and < 1e\+09, got -2",
     {"others": "shared"}),
]  # fmt: skip


@pytest.mark.parametrize("rejected", REJECTED_TOGETHER, ids=lambda rejected: str(rejected[0]))
def test_conflicting_fields_are_named(rejected):
    request_, message, *more = rejected
    defaults = dict(*more)
    others = defaults.pop("others", "rejected")
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        parse_guidance(read_names(request_, others=others), **defaults)


THOUGHT = {"thoughts": Thoughts(ends=((9, 4),), starts=((8,),))}
PAUSES = dict(pause_token_ids=((8,),), start_token_ids=((9, 4),), end_token_ids=(), allow_eos=True)
CALLS = {"thoughts": Thoughts(tool_calls=((6, 5),))}
SOFT = dict(target_length=80.0, mode=Mode.LE_NEAR, counts_down=True, count_from=CountFrom.SPAN)
NO_PAUSES = dict(pause_token_ids=(), start_token_ids=(), allow_eos=False)


@pytest.mark.parametrize(
    ("request_", "defaults", "expected"),
    [
        ({"target_length": 5}, {"constraint": "eq"}, dict(mode=Mode.EQ)),
        ({"target_length": 5, "op": "le"}, {"constraint": "eq"}, dict(mode=Mode.LE)),
        ({"scale": 2}, {"constraint": "eq"}, dict(mode=Mode.MUL, target_length=None)),
        ({"target_value": 0.5}, {"gamma": 0.9}, dict(gamma=0.9, target_length=math.log1p(-0.5) / math.log(0.9))),
        ({"gamma": None}, {"gamma": None}, dict(gamma=0.997)),
        ({"target_length": 9}, {"strength": 7}, dict(scale=7.0)),
        ({"target_length": 9, "strength": 3}, {"strength": 7}, dict(scale=3.0)),
        ({"target_length": 9}, {"has_values": False}, dict(scale=10.0, least_share=0.0, min_end_prob=1e-4)),
        ({"target_length": 9}, {"has_values": False, "strength": 7}, dict(scale=10.0)),  # unused without values
        # A budget uses the tokenizer's marks of thoughts, with a start for each end.
        ({"thinking_budget": 100}, {"thoughts": Thoughts(ends=((9,), (4,)))},
         dict(end_token_ids=((9,), (4,)), start_token_ids=(), target_length=100.0, hard_limit=125)),
        ({"thinking_budget": 100}, THOUGHT, dict(end_token_ids=((9, 4),), start_token_ids=((8,),))),
        ({"thinking_budget": 100, "start_token_ids": []}, THOUGHT, dict(end_token_ids=((9, 4),), start_token_ids=())),
        ({"thinking_budget": 100, "start_token_ids": [3]}, THOUGHT, dict(start_token_ids=((3,),))),
        ({"thinking_budget": 100, "end_token_ids": [3]}, THOUGHT, dict(end_token_ids=((3,),), start_token_ids=())),
        # With both a budget and a target, the budget applies to the thought and the target to the answer.
        ({"thinking_budget": 100, "target_length": 40, "op": "eq_soft", "hard_limit": 90, "gamma": 0.9}, THOUGHT,
         budget(100.0, hard_limit=90, answer_length=40.0, gamma=0.9, end_token_ids=((9, 4),), start_token_ids=((8,),),
                answer=parse_guidance({"target_length": 40, "op": "eq_soft", "gamma": 0.9}))),
        ({"thinking_budget": 100, "target_length": 40, "tolerance": 0.5, "answer_length": 3, "end_token_ids": [7]},
         {"has_values": False},
         dict(tolerance=0.0, scale=10.0, answer_length=3.0, end_token_ids=((7,),),
              answer=parse_guidance({"target_length": 40, "tolerance": 0.5}, has_values=False))),
        # A target in tokens counts from the end of a thought, other targets do not.
        ({"target_length": 100}, THOUGHT, PAUSES | dict(hard_limit=None, counts_down=True)),
        ({"target_length": 100, "op": "eq", "length_mode": "answer"}, THOUGHT, PAUSES),
        ({"target_length": 100, "landing": [3]}, THOUGHT, PAUSES | dict(end_message=(3,), hard_limit=76)),
        ({"target_length": 100, "target_length_mode": "total"}, THOUGHT,
         PAUSES | dict(counts_down=True, count_from=CountFrom.OUTPUT)),
        ({"target_length": 100, "length_mode": "remaining"}, THOUGHT, NO_PAUSES),
        ({"target_value": 0.5}, THOUGHT, NO_PAUSES),
        ({"target_length": 100, "end_token_ids": [3]}, THOUGHT, NO_PAUSES | dict(end_token_ids=((3,),))),
        ({"scale": 2}, THOUGHT, NO_PAUSES),
        ({"target_length": 100}, {"thoughts": Thoughts(ends=((9,),))}, NO_PAUSES),  # its start is unknown
        # Words and sentences of an answer, also with a budget.
        ({"target_words": 100}, KNOWN,
         dict(mode=Mode.NEAR, target_length=135.0, unit=TextBreak.WORD, target_units=100.0, allow_eos=True)),
        ({"target_sentences": 5, "op": "le_near", "thinking_budget": 30, "end_token_ids": [7]}, KNOWN,
         dict(target_length=30.0, answer_length=120.0, unit=TextBreak.SENTENCE, target_units=5.0, allow_eos=False,
              answer=parse_guidance({"target_sentences": 5, "op": "le_near"}, **KNOWN))),
        ({"target_words": 100, "soft_max_tokens": True}, KNOWN | {"max_tokens": 27}, dict(target_length=21.6)),
        # Budgets for several thoughts and for no thought, and no budget.
        ({"thinking_budget_total": 100}, THOUGHT, budget(100.0, end_token_ids=((9, 4),), start_token_ids=((8,),),
                                                         count_from=CountFrom.SPANS)),
        ({"thinking_budget": 0}, THOUGHT, dict(target_length=0.0, hard_limit=0, mode=Mode.LE_NEAR)),
        ({"thinking_budget": -1, "target_length": 100}, THOUGHT, PAUSES | dict(answer=None, target_length=100.0)),
        ({"thinking_budget": 100, "target_length": 400, "length_mode": "total"}, THOUGHT,
         dict(target_length=100.0, answer_length=300.0, count_from=CountFrom.OUTPUT,
              answer=parse_guidance({"target_length": 400, "length_mode": "total"}))),
        # Tool calls end a thought and an answer, but no other span.
        ({"target_length": 100}, CALLS, NO_PAUSES | dict(call_token_ids=((6, 5),), allow_eos=True)),
        ({"thinking_budget": 100, "end_token_ids": [3]}, CALLS, dict(call_token_ids=())),
        ({"scale": 2}, CALLS, dict(call_token_ids=())),
        # A limit of new tokens lowers a budget. Only a soft limit lowers a target, because an output may be continued.
        ({"target_length": 100}, {"max_tokens": 80}, dict(target_length=100.0)),
        ({"thinking_budget": 100}, THOUGHT | {"max_tokens": 100}, dict(target_length=64.0, hard_limit=80)),
        ({"thinking_budget": 40}, THOUGHT | {"max_tokens": 100}, dict(target_length=40.0, hard_limit=50)),
        ({"thinking_budget": 90, "answer_reserve": 50}, THOUGHT | {"max_tokens": 100}, dict(target_length=40.0)),
        # A soft limit is a target.
        ({"soft_max_tokens": True}, {"max_tokens": 100}, SOFT),
        ({"soft_max_tokens": True, "target_length": 90}, {"max_tokens": 100}, SOFT | dict(mode=Mode.NEAR)),
        ({"soft_max_tokens": True, "target_length": 60}, {"max_tokens": 100}, dict(target_length=60.0)),
        ({"soft_max_tokens": True}, THOUGHT | {"max_tokens": 100},
         dict(target_length=64.0, hard_limit=80, answer_length=16.0, count_from=CountFrom.OUTPUT,
              answer=parse_guidance({"target_length": 80, "length_mode": "total", "op": "le_near"}))),
        ({"soft_max_tokens": True, "thinking_budget": 30}, THOUGHT | {"max_tokens": 100}, dict(hard_limit=38)),
    ],
)  # fmt: skip
def test_defaults_of_a_server(request_, defaults, expected):
    params = parse_guidance(request_, **defaults)
    assert {name: getattr(params, name) for name in expected} == expected


# Parameters shared with other components of a server, and the fields among them.
SHARED = [
    *((other, {}) for other in ({"scale": 2}, {"mode": "x"}, {"op": 1}, {"cmp": 1}, {"constraint": "y"})),
    *((other, {}) for other in ({"gamma": 5}, {"strength": "high"}, {"tolerance": 7}, {"entropy_threshold": 1})),
    ({"target_lenght": None, "mode": "x", "target_length": None}, {}),
    ({"target_length": 5, "models": "x", "gamma": 0.5}, {"target_length": 5, "gamma": 0.5}),
    ({"lenvm": {"target_length": 5, "op": "ge"}, "mode": "x", "strength": "high"},
     {"target_length": 5, "value_constraint": "ge"}),
    *(({"max_thinking_tokens": budget}, {"thinking_budget": budget}) for budget in (0, -1)),
    *(({name: 5}, {"thinking_budget": 5}) for name in (
        "thinking_token_budget", "thinking_budget_tokens", "max_thinking_tokens", "MAX_THINKING_TOKENS",
        "maxThinkingTokens", "reasoning_budget", "reasoning_max_tokens", "budget_tokens", "thinkingBudget")),
    *(({name: 5}, {"target_length": 5}) for name in ("target_tokens", "Target-Tokens", "targetLength")),
    ({"scale": 2, "budget_of_tools": 5}, {"value_scale": 2}, "ignored"),  # short names of fields, as in the fork
]  # fmt: skip


@pytest.mark.parametrize("row", SHARED, ids=lambda row: str(row[0]))
def test_fields_among_parameters_of_other_components(row):
    request_, fields, others = (*row, "shared")[:3]
    assert read_names(request_, others=others) == fields


NAMES = ["lenvm", *(name for field in FIELDS.values() for name in (*field.names, *field.elsewhere.split()))]
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)


@given(
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), ANYTHING, max_size=5),
    st.sampled_from(["rejected", "ignored", "shared"]),
)
def test_any_input_is_parsed_or_rejected(params, others):
    """Any input gives usable parameters or a ValueError, and accepted parameters fit the device table."""
    try:
        parsed = parse_guidance(read_names(params, others=others))
    except ValueError:
        return
    columns = GuidanceTable.from_params([parsed], [set()], "cpu").columns
    assert columns.scale.isfinite().all() and columns.target_length.isfinite().all()
    assert (columns.nats_per_token > 0).all()


def test_docs_contain_the_table_of_fields():
    page = Path(__file__).parents[2] / "docs" / "modes-and-parameters.md"
    assert markdown() in page.read_text(), f"paste lenvm_kernels.guidance.fields.markdown() into {page}"
