"""Whether answers are right: what an answer says, compared with the reference by the package ``math-verify``."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import numpy as np

from lenvm_kernels.evaluate.measures import Answer, bootstrap
from lenvm_kernels.evaluate.plan import BASE, Plan
from lenvm_kernels.evaluate.prompts import Prompt

# A number as texts write it: a sign that is no range's, money, thousands, decimals or a fraction, a percent sign.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/\d+)?|\.\d+)(?:\\?%)?")
BRACED = r"[^{}]*"
for _ in range(8):  # braces in braces; TeX takes a single word without
    BRACED = rf"(?:[^{{}}]|\{{{BRACED}\}})*"
BOXED = re.compile(rf"\\(?:boxed|fbox)\s*(?:\{{({BRACED})\}}|([^\s${{}}\\]+))")
# Words behind a number, which math-verify would multiply: most units are unknown to it.
UNIT = r"(?<=\d)\s+[A-Za-z]{2,}[A-Za-z/. ]*$"
# That a comparison may take. Towers of powers take for ever, in C, where math-verify's own timeouts end nothing.
SECONDS = 10.0


def compiled(pattern: str | None, has_answers: bool) -> re.Pattern[str]:
    """``--answer-regex``, or :data:`NUMBER`; raises ValueError if it is none, or there are no answers for it."""
    if pattern is not None and not has_answers:
        raise ValueError('--answer-regex must come with --prompts whose lines have an "answer", got none')
    try:
        return NUMBER if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--answer-regex must be a regular expression, got {pattern!r}: {error}") from error


def references(prompts: Sequence[Prompt], where: str) -> list[str] | None:
    r"""The answers to compare with: of a text, what is behind GSM8K's ``####``, in the last ``\boxed{}``, or all.

    They are None if no line has one.

    Raises:
        ValueError: some lines have an answer and others none, or it is no number and no such text; ``where`` is named.
    """
    if all(prompt.answer is None for prompt in prompts):
        return None
    found = []
    for number, answer in enumerate((prompt.answer for prompt in prompts), start=1):
        text = str(answer) if isinstance(answer, (int, float, str)) and not isinstance(answer, bool) else ""
        text = (text.rpartition("####")[2] if "####" in text else boxed(text) or text).strip()
        if not text or "\n" in text:
            raise ValueError(
                f'{where}, line {number} must have an "answer" as other lines have: a number or one line, behind #### '
                f"or in \\boxed{{}} if there is more, got {str(answer)[:100]!r}"
            )
        found.append(text)
    return found


def boxed(text: str) -> str:
    r"""What the last ``\boxed{}`` holds, of those that are closed and not blank; empty if there is none."""
    return ["", *filter(None, ((match[1] or match[2] or "").strip() for match in BOXED.finditer(text)))][-1]


def extract(text: str, pattern: re.Pattern[str] = NUMBER) -> str:
    r"""What a text says in its last ``\boxed{}``, else the last match's first group, or all of it; empty if nothing."""
    matches = list(pattern.finditer(text))
    return boxed(text) or ((matches[-1][1 if pattern.groups else 0] or "").strip() if matches else "")


def is_right(pair: tuple[str, str]) -> bool:
    """Whether an answer equals a reference; units do not count, and 25 % equals both 25 and 1/4."""
    from math_verify import parse, verify

    for signs in (r"\\?\$", r"\\?[$%]"):
        texts = [re.sub(UNIT, "", re.sub(signs, "", text)) for text in pair]
        answer, reference = (parse(f"${text}$", parsing_timeout=None) for text in texts)
        if verify(reference, answer, timeout_seconds=None):
            return True
    return False


def check(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """:func:`is_right` of each pair, in a process that is ended where one takes too long, which counts as wrong."""
    left, found = list(dict.fromkeys(pairs)), {}
    while left:
        # It would warn that its timeouts are off.
        with get_context("spawn").Pool(1, logging.getLogger("math_verify").setLevel, [logging.ERROR]) as pool:
            pool.apply(is_right, [("1", "1")])  # imports count in no comparison's time
            results = pool.imap(is_right, left)
            for pair in left:
                try:
                    found[pair] = results.next(SECONDS)
                except TimeoutError:
                    found[pair] = False
                    break
        left = [pair for pair in left if pair not in found]
    return found


def accuracies(answers: Sequence[Answer], right: Sequence[bool], first: int) -> dict[str, Any]:
    """Shares of prompts, 0 to 1, answered rightly: ``acc_first`` with the seed ``first``, ``acc_any`` with any.

    With ``intervals``, as :func:`.measure`; ``right`` is of each answer.
    """
    prompts = sorted({answer.prompt for answer in answers})
    solved = [answer for answer, is_so in zip(answers, right, strict=True) if is_so]
    by_name = {"acc_first": {a.prompt for a in solved if a.seed == first}, "acc_any": {a.prompt for a in solved}}
    shares = {name: np.array([prompt in these for prompt in prompts], float) for name, these in by_name.items()}
    intervals = {name: list(bootstrap(share, np.ones(len(prompts)))) for name, share in shares.items()}
    return {name: float(share.mean()) for name, share in shares.items()} | {"intervals": intervals}


def add(scores: Any, views: Any, plan: Plan, tokenizer: Any, pattern: re.Pattern[str]) -> None:
    """Add :func:`accuracies` to the scores of :func:`.measure`, for the answers of :func:`.views`.

    Answers are decoded anew: the text of one that was cut is still the whole one's.
    """
    assert plan.answers is not None
    pairs = {}
    for target, by_name in views.items():
        for name, answers in by_name.items():
            texts = tokenizer.batch_decode([answer.ids for answer in answers], skip_special_tokens=True)
            rights = [plan.answers[answer.prompt] for answer in answers]
            pairs[target, name] = list(zip([extract(text, pattern) for text in texts], rights, strict=True))
    is_so = check(pair for row in pairs.values() for pair in row)
    for (target, name), row in pairs.items():
        found = accuracies(views[target][name], [is_so[pair] for pair in row], plan.seeds[0])
        score = scores[target][name]
        score |= found | {"intervals": score["intervals"] | found["intervals"]}


def plot(plan: Plan, scores: Mapping[str, Mapping[str, Any]], file: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write a PNG with accuracies against mean lengths: a line a setting, and a point a target.

    Bars are the intervals of ``acc_first``. The base model's own answers are one point, at the largest target's limit.
    """
    from matplotlib import pyplot

    targets = sorted(plan.targets)
    figure, axes = pyplot.subplots(figsize=(5.6, 4), layout="constrained")
    for name in (name for name in scores[str(targets[0])] if name not in leave_out):
        found = [scores[str(target)][name] for target in (targets[-1:] if name == BASE else targets)]
        lengths = [score["mean"] for score in found]
        first, any_seed = (100 * np.array([score[measure] for score in found]) for measure in ("acc_first", "acc_any"))
        low, high = 100 * np.array([score["intervals"]["acc_first"] for score in found]).T
        (line, *_) = axes.errorbar(lengths, first, (first - low, high - first), marker="o", elinewidth=0.8, label=name)
        if len(plan.seeds) > 1:
            axes.plot(lengths, any_seed, ".:", color=line.get_color())
    right = "% right (dotted: with any seed)" if len(plan.seeds) > 1 else "% right"
    axes.set(xlabel="mean length in tokens", ylim=(-2, 102), ylabel=right)
    axes.set_xlim(left=0)
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
