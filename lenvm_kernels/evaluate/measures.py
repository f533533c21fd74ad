"""The measures of ``lenvm evaluate``: numbers of the answers to one target.

Every measure except the quartiles is a sum over answers divided by another sum, so a bootstrap over prompts needs only
the two sums of each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lenvm_kernels.evaluate.statistics import bootstrap
from lenvm_kernels.guidance.sentences import ends_sentence

# Decay of LIFEBench's score: answers that are too short lose more than answers that are too long.
SHORT_DECAY, LONG_DECAY = 5.0, 2.0
WITH_INTERVALS = ("distance", "within_10", "within_25", "perplexity", "sentence_ends")
# Setting, target, seed and prompt identify an answer.
Key = tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Answer:
    """An answer, a line of ``answers.jsonl``.

    Attributes:
        target: target length in tokens; None for a setting without a target, which is scored against every target.
        prompt: index of the prompt.
        ids: tokens, including the end-of-sequence token if the answer ended by itself.
        ended: True if the answer ended by itself, False if the limit of new tokens cut it.
        nll: negative log-likelihood of each token under the base model alone, in nats.
        predicted: length in tokens, predicted before the first one; None if it was not requested or is not known.
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

    @property
    def key(self) -> Key:
        return self.setting, self.target, self.seed, self.prompt

    def cut(self, limit: int) -> Answer:
        """The answer under a limit of ``limit`` tokens; the text still contains all tokens."""
        if len(self.ids) <= limit:
            return self
        return replace(self, ids=self.ids[:limit], nll=self.nll[:limit], ended=False)


def length_deviation(lengths: np.ndarray, target: int) -> np.ndarray:
    """LIFEBench's LD, negative where an answer is too short: ``(length - target) / target`` (arXiv 2505.16234)."""
    return (lengths - target) / target


def length_score(lengths: np.ndarray, target: int) -> np.ndarray:
    """LIFEBench's LS for "equal to", 0 to 100: ``100 exp(5 LD)`` of short answers, else ``100 exp(-2 LD)``.

    Source: arXiv 2505.16234; arXiv 2604.27039, equations 17 and 18.
    """
    deviation = length_deviation(lengths, target)
    return 100 * np.exp(np.where(deviation < 0, SHORT_DECAY, -LONG_DECAY) * deviation)


def repeated_4grams(ids: Sequence[int]) -> tuple[int, int]:
    """The number of 4-grams of tokens that occur earlier in the answer, and the number of all 4-grams."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(grams) - len(set(grams)), len(grams)


def measure(answers: Sequence[Answer], target: int) -> dict[str, Any]:
    """Score the answers of one setting against one target.

    Args:
        answers: at least one; the seeds of a prompt share its index.
        target: tokens, at least 1.

    Returns:
        Shares from 0 to 1 and lengths in tokens: ``answers`` (their number), ``mean``, ``quartiles`` (three),
        ``distance`` (mean of ``|length - target|``), ``within_10`` and ``within_25`` (per cent of the target),
        ``too_short`` (below a quarter of it), ``cut`` (at the limit), ``length_score`` (0 to 100), ``length_deviation``
        (its mean, signed), ``relative_error`` (mean of ``|length - target| / target``), ``perplexity``, ``repetition``,
        ``sentence_ends`` (of the answers that ended by themselves), ``distinct`` (texts of a prompt that differ).
        ``intervals`` has ``[low, high]`` for :data:`WITH_INTERVALS`. None replaces a number whose denominator is 0.
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
    scores: dict[str, Any] = {"answers": len(answers), "quartiles": np.percentile(lengths, (25, 50, 75)).tolist()}
    intervals: dict[str, list[float] | None] = {}
    for name, (above, below) in parts.items():
        sums = [np.bincount(rows, weights=part, minlength=len(prompts)) for part in (above, below)]
        finish = np.exp if name == "perplexity" else np.asarray
        scores[name] = float(finish(sums[0].sum() / sums[1].sum())) if sums[1].any() else None
        if name in WITH_INTERVALS:
            intervals[name] = [float(finish(end)) for end in bootstrap(*sums)] if sums[1].any() else None
    return scores | {"intervals": intervals}
