"""What ``lenvm evaluate`` measures: numbers of answers to one target, with numpy alone.

Every measure but the quartiles is a sum over answers divided by another sum, so a bootstrap over prompts needs nothing
but both sums of each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lenvm_kernels.guidance.sentences import ends_sentence

RESAMPLES = 1000
# Of LIFEBench's score: answers that are too short lose more than those that are too long.
SHORT_DECAY, LONG_DECAY = 5.0, 2.0
# Measures that get an interval.
WITH_INTERVALS = ("distance", "within_10", "within_25", "perplexity", "sentence_ends")


@dataclass(frozen=True)
class Answer:
    """An answer as it stands in ``answers.jsonl``.

    Attributes:
        setting: the name of the setting.
        target: tokens to aim at; None for the base model alone, which is scored against each target.
        seed: of the seeds that were asked for.
        prompt: its index.
        ids: tokens of the answer, the end-of-sequence token last if it ended by itself.
        text: of the tokens.
        ended: whether it ended by itself; else it was cut at the limit of new tokens.
        nll: nats of each token, under the base model alone.
        predicted: tokens that it was predicted to have before its first one; None: not asked for, or not known.
    """

    setting: str
    target: int | None
    seed: int
    prompt: int
    ids: list[int]
    text: str
    ended: bool
    nll: list[float]
    predicted: float | None = None

    def cut(self, limit: int) -> Answer:
        """What a limit of so many tokens would have left of it; the text stays that of all tokens."""
        if len(self.ids) <= limit:
            return self
        return replace(self, ids=self.ids[:limit], nll=self.nll[:limit], ended=False)


def length_deviation(lengths: np.ndarray, target: int) -> np.ndarray:
    """LIFEBench's LD, below 0 where an answer is too short: ``(length - target) / target`` (arXiv 2505.16234)."""
    return (lengths - target) / target


def length_score(lengths: np.ndarray, target: int) -> np.ndarray:
    """LIFEBench's LS for "equal to", 0 to 100: ``100 exp(5 LD)`` of short answers, else ``100 exp(-2 LD)``.

    Source: arXiv 2505.16234; arXiv 2604.27039, equations 17 and 18.
    """
    deviation = length_deviation(lengths, target)
    return 100 * np.exp(np.where(deviation < 0, SHORT_DECAY, -LONG_DECAY) * deviation)


def repeated_4grams(ids: Sequence[int]) -> tuple[int, int]:
    """How many 4-grams of tokens stand earlier in the answer already, and how many there are."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(grams) - len(set(grams)), len(grams)


def measure(answers: Sequence[Answer], target: int) -> dict[str, Any]:
    """Score the answers of one setting against one target.

    Args:
        answers: at least one; those of a prompt are its seeds'.
        target: tokens, at least 1.

    Returns:
        By name, shares from 0 to 1 and lengths in tokens: ``answers`` (how many), ``mean``, ``quartiles`` (three),
        ``distance`` (mean of ``|length - target|``), ``within_10`` and ``within_25`` (per cent of the target),
        ``too_short`` (below a quarter of it), ``cut`` (at the limit), ``length_score`` (0 to 100), ``length_deviation``
        (its mean, signed), ``relative_error`` (mean of ``|length - target| / target``), ``perplexity``, ``repetition``,
        ``sentence_ends`` (of the answers that ended by themselves), ``distinct`` (texts of a prompt that differ).
        ``intervals`` has ``[low, high]`` for those of :data:`WITH_INTERVALS`. None stands where there is nothing to
        divide by.
    """
    prompts = sorted({answer.prompt for answer in answers})
    rows = np.array([prompts.index(answer.prompt) for answer in answers])
    lengths = np.array([len(answer.ids) for answer in answers])
    distance = np.abs(lengths - target)
    ended = np.array([answer.ended for answer in answers])
    repeated = np.array([repeated_4grams(answer.ids) for answer in answers])
    seen: set[tuple[int, tuple[int, ...]]] = set()
    is_new = np.zeros(len(answers))
    for i, answer in enumerate(answers):
        is_new[i] = (answer.prompt, tuple(answer.ids)) not in seen
        seen.add((answer.prompt, tuple(answer.ids)))
    each = np.ones(len(answers))
    # Numerators and denominators, by answer.
    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "mean": (lengths, each),
        "distance": (distance, each),
        "within_10": (distance * 10 <= target, each),
        "within_25": (distance * 4 <= target, each),
        "too_short": (lengths * 4 < target, each),
        "cut": (~ended, each),
        "length_score": (length_score(lengths, target), each),
        "length_deviation": (length_deviation(lengths, target), each),
        "relative_error": (distance / target, each),
        "perplexity": (np.array([sum(answer.nll) for answer in answers]), lengths),
        "repetition": (repeated[:, 0], repeated[:, 1]),
        "sentence_ends": (np.array([answer.ended and ends_sentence(answer.text) for answer in answers]), ended),
        "distinct": (is_new, each),
    }
    found: dict[str, Any] = {"answers": len(answers), "quartiles": np.percentile(lengths, (25, 50, 75)).tolist()}
    intervals = {}
    for name, (above, below) in parts.items():
        sums = [np.bincount(rows, weights=part, minlength=len(prompts)) for part in (above, below)]
        finish = np.exp if name == "perplexity" else np.asarray
        found[name] = float(finish(sums[0].sum() / sums[1].sum())) if sums[1].any() else None
        if name in WITH_INTERVALS:
            interval = bootstrap(*sums) if sums[1].any() else None
            intervals[name] = None if interval is None else [float(finish(end)) for end in interval]
    return found | {"intervals": intervals}


def bootstrap(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of ``above.sum() / below.sum()``, by percentiles over prompts drawn with replacement.

    Every call draws the same prompts, so that settings are compared on the same resamples.

    Args:
        above, below: fp64 ``[P]``, by prompt; ``below`` is not 0 everywhere.
    """
    count = len(above)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    denominators = draws @ below
    ratios = (draws @ above)[denominators > 0] / denominators[denominators > 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
