"""Whether answers are right: what an answer says, compared with the reference by the package ``math-verify``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import numpy as np

from lenvm_kernels.evaluate.measures import Answer, bootstrap
from lenvm_kernels.evaluate.plan import Plan
from lenvm_kernels.evaluate.prompts import Prompt

# Measures, and the titles of their plots.
ACCURACIES = {"acc_first": "right with the first seed", "acc_any": "right with any seed"}
# A number as texts write it: a sign that is no range's, money, thousands, decimals or a fraction, a percent sign.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/\d+)?|\.\d+)(?:\\?%)?")
# TeX takes a single word without braces.
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s${}\\]+))")
DOLLAR, PERCENT = r"\\?\$", r"\\?%"
# Words behind a number, which math-verify would multiply: most units are unknown to it.
UNIT = r"(?<=\d)\s+[A-Za-z]{2,}[A-Za-z/. ]*$"
# That a comparison may take. Towers of powers take for ever, in C, where no signal ends them.
SECONDS = 10.0


def compiled(pattern: str | None, has_answers: bool) -> re.Pattern[str]:
    """What finds the answer of a text without a box: ``--answer-regex``, or :data:`NUMBER`.

    Raises:
        ValueError: it is no regular expression, or there are no answers to compare with.
    """
    if pattern is None:
        return NUMBER
    if not has_answers:
        raise ValueError('--answer-regex must come with --prompts whose lines have an "answer", got none')
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--answer-regex must be a regular expression, got {pattern!r}: {error}") from error


def references(prompts: Sequence[Prompt], where: str) -> list[str] | None:
    r"""The answers to compare with: of a text, what is behind GSM8K's ``####``, in the last ``\boxed{}``, or all.

    Args:
        prompts: of a file, a line each.
        where: what errors call the file.

    Returns:
        None if no line has an answer.

    Raises:
        ValueError: some lines have an answer and others none, or it is no number and no such text.
    """
    if all(prompt.answer is None for prompt in prompts):
        return None
    found = []
    for number, answer in enumerate((prompt.answer for prompt in prompts), start=1):
        if answer is None:
            raise ValueError(f'{where}, line {number} must have an "answer" as other lines have, or none may')
        text = str(answer) if isinstance(answer, (int, float, str)) and not isinstance(answer, bool) else ""
        text = (text.rpartition("####")[2] if "####" in text else boxed(text) or text).strip()
        if not text or "\n" in text:
            raise ValueError(
                f'{where}, line {number} must have an "answer" that is a number or one line, or that ends with '
                f"#### and it or has it in \\boxed{{}}, got {str(answer)[:100]!r}"
            )
        found.append(text)
    return found


def boxed(text: str) -> str:
    r"""What the last ``\boxed{}`` holds, of those that are closed and not blank; empty if there is none."""
    found = ""
    for match in BOXED.finditer(text):
        content, depth = match[1] or "", 0 if match[1] else 1
        for character in text[match.end() :] if depth else "":
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                break
            content += character
        if depth == 0 and content.strip():
            found = content.strip()
    return found


def extract(text: str, pattern: re.Pattern[str] = NUMBER) -> str:
    r"""The answer that a text gives: in its last ``\boxed{}``, else the last match's first group, or all of the match.

    It is empty if there is none.
    """
    matches = list(pattern.finditer(text))
    in_text = (matches[-1][1 if pattern.groups else 0] or "").strip() if matches else ""
    return boxed(text) or in_text


def is_right(pair: tuple[str, str]) -> bool:
    """Whether an answer equals a reference; units do not count, and 25 % equals both 25 and 1/4.

    Args:
        pair: the answer and the reference.
    """
    from math_verify import parse, verify

    for signs in (DOLLAR, f"{DOLLAR}|{PERCENT}"):
        texts = [re.sub(UNIT, "", re.sub(signs, "", text)) for text in pair]
        answer, reference = (parse(f"${text}$", parsing_timeout=None) for text in texts)
        if verify(reference, answer, timeout_seconds=None):
            return True
    return False


def _start() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its timeouts are off


def check(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """:func:`is_right` of each pair, in a process that is ended where one takes too long, which counts as wrong."""
    left, found = list(dict.fromkeys(pairs)), {}
    while left:
        with get_context("spawn").Pool(1, _start) as pool:
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
    """Shares of prompts, 0 to 1, that the answers of one setting to one target get right.

    Args:
        answers: at least one; those of a prompt are its seeds'.
        right: whether each is.
        first: the seed of ``acc_first``.

    Returns:
        ``acc_first``, ``acc_any`` and, as :func:`.measure`, ``intervals``.
    """
    prompts = sorted({answer.prompt for answer in answers})
    solved = [answer for answer, is_so in zip(answers, right, strict=True) if is_so]
    by_name = {"acc_first": {a.prompt for a in solved if a.seed == first}, "acc_any": {a.prompt for a in solved}}
    shares = {name: np.array([prompt in these for prompt in prompts], float) for name, these in by_name.items()}
    intervals = {name: list(bootstrap(share, np.ones(len(prompts)))) for name, share in shares.items()}
    return {name: float(share.mean()) for name, share in shares.items()} | {"intervals": intervals}


def add(
    scores: Mapping[str, Mapping[str, dict[str, Any]]],
    views: Mapping[str, Mapping[str, Sequence[Answer]]],
    plan: Plan,
    decode: Callable[[list[list[int]]], list[str]],
    pattern: re.Pattern[str],
) -> None:
    """Add :func:`accuracies` to the scores, by target and setting.

    Args:
        scores, views: of :func:`.measure` and :func:`.views`.
        plan: has the references.
        decode: gives texts of tokens: that of an answer that was cut is still the whole one's.
        pattern: of :func:`compiled`.
    """
    assert plan.answers is not None
    pairs = {}
    for target, by_name in views.items():
        for name, answers in by_name.items():
            said = [extract(text, pattern) for text in decode([answer.ids for answer in answers])]
            pairs[target, name] = list(zip(said, [plan.answers[answer.prompt] for answer in answers], strict=True))
    is_so = check(pair for row in pairs.values() for pair in row)
    for (target, name), row in pairs.items():
        found = accuracies(views[target][name], [is_so[pair] for pair in row], plan.seeds[0])
        score = scores[target][name]
        score |= found | {"intervals": score["intervals"] | found["intervals"]}


def plot(plan: Plan, scores: Mapping[str, Mapping[str, Any]], file: Path, *, leave_out: Collection[str] = ()) -> None:
    """Write a PNG with accuracy against target, a line in its 95 % interval a setting; with one seed one panel."""
    from matplotlib import pyplot

    shown = list(ACCURACIES.items())[: len(plan.seeds)]
    targets = sorted(plan.targets)
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(4 * len(shown) + 0.8, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (measure, title) in zip(panels[0], shown, strict=True):
        for name in (name for name in scores[str(targets[0])] if name not in leave_out):
            found = [scores[str(target)][name] for target in targets]
            (line,) = axes.plot(
                targets, [100 * score[measure] for score in found], marker="o", markersize=4, label=name
            )
            low, high = zip(*([100 * end for end in score["intervals"][measure]] for score in found), strict=True)
            axes.fill_between(targets, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(targets)
        axes.set_xlabel("target in tokens")
        axes.set_ylim(-2, 102)
    panels[0, 0].set_ylabel("% of the prompts")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
