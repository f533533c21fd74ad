"""Correctness of answers: the final answer of a text is compared with a reference by the package ``math-verify``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from multiprocessing import TimeoutError, get_context
from typing import Any

from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.loading import Prompt

# A number in a text: a sign that does not belong to a range, money, thousands, decimals or a fraction, a percent sign.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/\d+)?|\.\d+)(?:\\?%)?")
BRACED = r"[^{}]*"
for _ in range(8):  # nested braces; a single word needs no braces in TeX
    BRACED = rf"(?:[^{{}}]|\{{{BRACED}\}})*"
BOXED = re.compile(rf"\\(?:boxed|fbox)\s*(?:\{{({BRACED})\}}|([^\s${{}}\\]+))")
# Words after a number. math-verify parses few units and treats others as factors.
UNIT = r"(?<=\d)\s+[A-Za-z]{2,}[A-Za-z/. ]*$"
# Timeout of a comparison. math-verify's own timeouts do not interrupt C code, e.g. for towers of powers.
SECONDS = 10.0


def compiled(pattern: str | None, has_answers: bool) -> re.Pattern[str]:
    """``--answer-regex``, or :data:`NUMBER`; raises ValueError if it is invalid or no prompt has a reference answer."""
    if pattern is not None and not has_answers:
        raise ValueError('--answer-regex needs --prompts with an "answer" in each line, got none')
    try:
        return NUMBER if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--answer-regex must be a regular expression, got {pattern!r}: {error}") from error


def references(prompts: Sequence[Prompt], where: str) -> list[str] | None:
    r"""The reference answers: the text after GSM8K's ``####``, else in the last ``\boxed{}``, else the whole text.

    Returns None if no prompt has an answer. If only some have one, or one is invalid, ValueError names ``where``.
    """
    if all(prompt.answer is None for prompt in prompts):
        return None
    texts = []
    for number, answer in enumerate((prompt.answer for prompt in prompts), start=1):
        text = str(answer) if isinstance(answer, (int, float, str)) and not isinstance(answer, bool) else ""
        text = (text.rpartition("####")[2] if "####" in text else boxed(text) or text).strip()
        if not text or "\n" in text:
            raise ValueError(
                f'{where}, line {number} must have an "answer", as other lines do: a number or one line of text, after '
                f"#### or in \\boxed{{}} if the text is longer, got {str(answer)[:100]!r}"
            )
        texts.append(text)
    return texts


def boxed(text: str) -> str:
    r"""The content of the last ``\boxed{}`` that is closed and not blank, or an empty string."""
    return ["", *filter(None, ((match[1] or match[2] or "").strip() for match in BOXED.finditer(text)))][-1]


def extract(text: str, pattern: re.Pattern[str] = NUMBER) -> str:
    r"""The last ``\boxed{}``, else the first group of the last match or the match, or an empty string."""
    matches = list(pattern.finditer(text))
    return boxed(text) or ((matches[-1][1 if pattern.groups else 0] or "").strip() if matches else "")


def is_right(pair: tuple[str, str]) -> bool:
    """Whether an answer equals a reference. Units are ignored, and 25 % equals both 25 and 1/4."""
    from math_verify import parse, verify

    for signs in (r"\\?\$", r"\\?[$%]"):
        texts = [re.sub(UNIT, "", re.sub(signs, "", text)) for text in pair]
        answer, reference = (parse(f"${text}$", parsing_timeout=None) for text in texts)
        if verify(reference, answer, timeout_seconds=None):
            return True
    return False


def check(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """:func:`is_right` of each pair, in a process that is killed when a pair times out. Such a pair counts as wrong."""
    left, results = list(dict.fromkeys(pairs)), {}
    while left:
        # Otherwise math-verify warns that its timeouts are off.
        with get_context("spawn").Pool(1, logging.getLogger("math_verify").setLevel, [logging.ERROR]) as pool:
            pool.apply(is_right, [("1", "1")])  # so that the imports do not count as comparison time
            checked = pool.imap(is_right, left)
            for pair in left:
                try:
                    results[pair] = checked.next(SECONDS)
                except TimeoutError:
                    results[pair] = False
                    break
        left = [pair for pair in left if pair not in results]
    return results


def judge(
    answers: Iterable[Answer], expected: Sequence[str], tokenizer: Any, pattern: re.Pattern[str]
) -> dict[tuple[int, ...], bool]:
    """Whether answers are right, by prompt and tokens. ``expected`` has the reference answer of each prompt.

    Tokens are decoded again, because the text of a cut answer is the whole text.
    """
    keys = list(dict.fromkeys((answer.prompt, *answer.ids) for answer in answers))
    texts = tokenizer.batch_decode([ids for _, *ids in keys], skip_special_tokens=True)
    pairs = [(extract(text, pattern), expected[prompt]) for text, (prompt, *_) in zip(texts, keys, strict=True)]
    right = check(pairs)
    return {key: right[pair] for key, pair in zip(keys, pairs, strict=True)}
