"""Extraction and comparison of answers in ``lenvm evaluate``, and accuracies computed by hand."""

import json
import re
from pathlib import Path

import pytest

from lenvm_kernels.evaluate import accuracy
from lenvm_kernels.loading import Prompt, read_prompts

PROBLEMS = Path(__file__).parents[2] / "examples" / "problems.jsonl"
# Texts and the answers extracted from them; then right and wrong answers, and their references.
TEXTS = r"""\boxed{4}, not 5 ~ 4; \boxed{1}, no: \boxed{ \frac{3}{4+\sqrt{5}} } of 7 ~ \frac{3}{4+\sqrt{5}};
\fbox{9} of 8 ~ 9; \boxed{\{1, 2\}} ~ \{1, 2\}; so $\boxed 8$. ~ 8; \boxed{11} and \boxed{ }, 3 ~ 11;
\boxed{12} and 13 and \boxed{14 ~ 12; 16 and \boxed{ \frac{2}{3} ~ 3; It is $1,250.50. ~ $1,250.50;
1,000, 2,500, 30 ~ 30; from 1,2345 ~ 2345; 10-15 ~ 15; it falls to -4. ~ -4; -6 ~ -6; about .5 ~ .5;
3/4 of it, 5 in all, or 3/8 ~ 3/8; 20 of 160: 12.5\% ~ 12.5\%; none ~ """
RIGHT = r"""1250 ~ 1,250; $1,250.00 ~ 1250; \$7.5 ~ $7.50; 0.75 ~ 3/4; \dfrac{6}{8} ~ \frac34; 12.5\% ~ 12.5;
0.25 ~ 25%; 62.5 ~ 62.5%; 370 km ~ 370 kilometers; 18\text{ apples} ~ 18; 6 dollars ~ $6; 72. ~ 72; x = 5 ~ 5;
(x-1)(x+1) ~ x^2-1; \text{Evelyn} ~ Evelyn; C ~ \text{C}; \boxed{6} ~ 6"""
WRONG = r"""1 ~ 1,000; 1,00 ~ 1000; -9 ~ 9; 0.5 ~ 50; 25 ~ 0.25; 0.33 ~ 1/3; 5, 7 ~ 7; 6x ~ 6; 4 ~ \frac{3}{4}; B ~ C;
 ~ 0; \frac{ ~ 3; {{{ $ \ ~ 2"""


def pairs(text):
    return [tuple(pair.split(" ~ ")) for pair in re.split(r";\s", text)]


def test_extracted_answers():
    assert [(text, accuracy.extract(text)) for text, _ in pairs(TEXTS)] == pairs(TEXTS)
    text = "Answer: B (2)\nAnswer: C (3)\n5"
    assert accuracy.extract(text, re.compile(r"Answer: \w")) == "Answer: C"
    assert accuracy.extract(text, re.compile(r"Answer: (\w) \((\d)\)")) == "C"
    assert accuracy.extract(text, re.compile(r"Answer: (X)|5")) == ""


def test_answers_are_compared_as_numbers_and_expressions():
    checked = accuracy.check(pairs(RIGHT) + pairs(WRONG) + pairs(RIGHT))
    assert [pair for pair, is_so in checked.items() if is_so] == pairs(RIGHT) and len(checked) == 17 + 13


def test_answer_that_times_out_is_wrong_and_later_answers_count(monkeypatch):
    monkeypatch.setattr(accuracy, "SECONDS", 3.0)
    checked = accuracy.check([("4", "4"), ("9^{9^{9^9}}", "4"), ("5", "5.0")])
    assert list(checked.values()) == [True, False, True]


def test_references_of_gsm8k_math_and_custom_problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    lines = [
        {"question": "a", "answer": "He has 3 + 4 = <<3+4=7>>7.\n#### 1,007"},
        {"problem": "b", "level": "Level 5", "solution": "First 2.\nSo $\\boxed{\\frac{1}{2}}$ or 4."},
        {"problem": "c", "solution": "In 3 steps it is \\boxed{9}.", "answer": "8"},
        {"prompt": "d", "answer": 0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts(file)
    assert [prompt.text for prompt in prompts] == list("abcd")
    assert accuracy.references(prompts, "x") == ["1,007", r"\frac{1}{2}", "8", "0"]
    assert accuracy.references([Prompt("a"), Prompt("b")], "x") is None


def test_answers_of_the_example_problems():
    computed = [24 * (15 - 9), 18 / 8, 3 / 8, 36 * 45 + 12 * 110, 80 * 3 + 65 * 2, 150 / 240]
    computed += [12 + 24 + 21, (500 - 365) / (35 - 20), 3 * 8.5 + 4 * 5, -6 + 11 - 14]
    answers = zip(map(str, computed), accuracy.references(read_prompts(PROBLEMS), "x"), strict=True)
    assert list(accuracy.check(answers).values()) == [True] * 10


@pytest.mark.parametrize("answer", [None, "", "#### ", "3\n4", True, [3]])
def test_invalid_reference_is_named(answer):
    with pytest.raises(ValueError, match='these, line 2 must have an "answer", as other lines do') as error:
        accuracy.references([Prompt("a", answer=0), Prompt("b", answer=answer)], "these")
    assert repr(str(answer)) in str(error.value)
