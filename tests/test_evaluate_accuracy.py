"""What ``lenvm evaluate`` takes for an answer, when it counts as right, and shares of prompts by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lenvm_kernels.evaluate import accuracy
from lenvm_kernels.evaluate.measures import Answer, bootstrap
from lenvm_kernels.evaluate.prompts import Prompt, read_prompts

PROBLEMS = Path(__file__).parent.parent / "examples" / "problems.jsonl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"3 and \boxed{4}, not 5", "4"),
        (r"\boxed{1}, no: \boxed{ \frac{3}{4+\sqrt{5}} } of 7", r"\frac{3}{4+\sqrt{5}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"so $\boxed 8$.", "8"),
        (r"\fbox{9} of 10", "9"),
        (r"\boxed{11} and \boxed{}, 3", "11"),
        (r"\boxed{12} and 13 and \boxed{14", "12"),
        (r"16 and \boxed{ \frac{2}{3}", "3"),  # cut before it is closed
        ("It is $1,250.50.", "$1,250.50"),
        ("1,000, then 2,500, 30", "30"),
        ("from 1,2345", "2345"),
        ("10-15", "15"),
        ("it falls to -4.", "-4"),
        ("about .5", ".5"),
        ("3/4 of it, 5 in all, or 3/8", "3/8"),
        (r"20 of 160: 12.5\%", r"12.5\%"),
        ("none", ""),
        ("", ""),
    ],
)
def test_what_a_text_gives_for_an_answer(text, expected):
    assert accuracy.extract(text) == expected


def test_an_answer_by_a_regular_expression():
    text = "Answer: B (2)\nAnswer: C (3)\n5"
    assert accuracy.extract(text, re.compile(r"Answer: \w")) == "Answer: C"
    assert accuracy.extract(text, re.compile(r"Answer: (\w) \((\d)\)")) == "C"
    assert accuracy.extract(text, re.compile(r"Answer: (X)|5")) == ""
    assert accuracy.extract(text + r" \boxed{D}", re.compile(r"Answer: (\w)")) == "D"


RIGHT = [
    ("1250", "1,250"),
    ("$1,250.00", "1250"),
    (r"\$7.5", "$7.50"),
    ("0.75", "3/4"),
    (r"\dfrac{6}{8}", r"\frac34"),
    (r"12.5\%", "12.5"),
    ("62.5", "62.5%"),
    ("0.25", "25%"),
    ("370 km", "370 kilometers"),
    (r"18\text{ apples}", "18"),
    ("6 dollars", "$6"),
    ("72.", "72"),
    ("x = 5", "5"),
    ("(x-1)(x+1)", "x^2-1"),
    (r"\text{Evelyn}", "Evelyn"),
    ("C", r"\text{C}"),
]
WRONG = [
    ("1", "1,000"),
    ("1,00", "1000"),
    ("-9", "9"),
    ("0.5", "50"),
    ("25", "0.25"),
    ("0.33", "1/3"),
    ("5, 7", "7"),
    ("6x", "6"),
    ("4", r"\frac{3}{4}"),
    ("B", "C"),
    ("", "0"),
    (r"\frac{", "3"),
    ("{{{ $ \x00 \\", "2"),
]


def test_answers_are_compared_as_numbers_and_expressions():
    found = accuracy.check([*RIGHT, *WRONG, *RIGHT])
    assert [pair for pair in RIGHT if not found[pair]] == [] and [pair for pair in WRONG if found[pair]] == []


def test_an_answer_that_takes_for_ever_is_wrong_and_those_behind_it_count(monkeypatch):
    monkeypatch.setattr(accuracy, "SECONDS", 3.0)
    pairs = [("4", "4"), ("9^{9^{9^9}}", "4"), ("5", "5.0")]
    assert accuracy.check(pairs) == dict(zip(pairs, [True, False, True], strict=True))


def test_shares_are_of_prompts():
    solved = {(7, 0): True, (7, 5): False, (3, 0): False, (3, 5): False, (4, 0): True, (4, 5): True, (1, 5): True}
    solved |= {(1, 0): False, (9, 5): False, (9, 0): False}
    answers = [Answer("x", 10, seed, prompt, [5], "", True, [1.0]) for prompt, seed in solved]
    found = accuracy.accuracies(answers, list(solved.values()), 5)
    assert {name: found[name] for name in ("acc_first", "acc_any")} == {"acc_first": 2 / 5, "acc_any": 3 / 5}
    assert accuracy.accuracies(answers, list(solved.values()), 0)["acc_first"] == 2 / 5
    del solved[7, 5], answers[1]  # without it the prompt still counts
    found = accuracy.accuracies(answers[::-1], list(solved.values())[::-1], 5)
    assert found["acc_first"] == 2 / 5 and found["acc_any"] == 3 / 5
    each = np.ones(5)
    firsts, anys = bootstrap(np.array([1.0, 0, 1, 0, 0]), each), bootstrap(np.array([1.0, 0, 1, 1, 0]), each)
    assert found["intervals"] == {"acc_first": list(firsts), "acc_any": list(anys)} and firsts != anys


def test_references_of_gsm8k_of_math_and_of_ones_own(tmp_path):
    file = tmp_path / "problems.jsonl"
    lines = [
        {"question": "a", "answer": "He has 3 + 4 = <<3+4=7>>7.\n#### 1,007"},
        {"problem": "b", "level": "Level 5", "solution": "First 2.\nSo $\\boxed{\\frac{1}{2}}$ or 4."},
        {"problem": "c", "solution": "In 3 steps it is \\boxed{9}.", "answer": "8"},
        {"prompt": "d", "answer": 0},
        {"prompt": "e", "answer": " $2.50 "},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts(file)
    assert [prompt.text for prompt in prompts] == list("abcde")
    assert accuracy.references(prompts, "x") == ["1,007", r"\frac{1}{2}", "8", "0", "$2.50"]
    assert accuracy.references([Prompt("a"), Prompt("b")], "x") is None


def test_the_problems_of_the_examples_have_these_answers():
    prompts = read_prompts(PROBLEMS)
    assert all(prompt.text.endswith(r" \boxed{}.") for prompt in prompts)
    computed = [24 * (15 - 9), 18 / 8, 3 / 8, 36 * 45 + 12 * 110, 80 * 3 + 65 * 2, 150 / 240]
    computed += [12 + 24 + 21, (500 - 365) / (35 - 20), 3 * 8.5 + 4 * 5, -6 + 11 - 14]
    pairs = list(zip(map(str, computed), accuracy.references(prompts, "x"), strict=True))
    assert all(accuracy.check(pairs).values()) and len(set(pairs)) == 10


@pytest.mark.parametrize("answer", ["", " ", "#### ", "3\n4", True, [3], {"a": 3}])
def test_an_answer_that_is_none_is_named(answer):
    with pytest.raises(ValueError, match='these, line 2 must have an "answer" that is a number or one line') as error:
        accuracy.references([Prompt("a", answer=3), Prompt("b", answer=answer)], "these")
    assert repr(str(answer)) in str(error.value)


def test_all_prompts_have_answers_or_none():
    with pytest.raises(ValueError, match='these, line 2 must have an "answer" as other lines have, or none may'):
        accuracy.references([Prompt("a", answer=0), Prompt("b"), Prompt("c", answer=4)], "these")


def test_a_regular_expression_that_is_none_is_named():
    assert accuracy.compiled(None, False) is accuracy.NUMBER
    with pytest.raises(ValueError, match=r"--answer-regex must be a regular expression, got '\('"):
        accuracy.compiled("(", True)
    with pytest.raises(ValueError, match='--answer-regex must come with --prompts whose lines have an "answer"'):
        accuracy.compiled("a", False)
