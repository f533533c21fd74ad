"""Measures of answers: how well they meet a target, and how well predicted lengths match actual lengths.

Every measure of :func:`measure` except the quartiles is a sum over answers divided by another sum, so a bootstrap over
prompts needs only the two sums of each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lenvm_kernels.guidance.sentences import ends_sentence

RESAMPLES = 1000
# Decay of LIFEBench's score, steeper for answers that are too short.
SHORT_DECAY, LONG_DECAY = 5.0, 2.0
WITH_INTERVALS = ("distance", "within_10", "within_25", "perplexity", "sentence_ends", "acc_first", "acc_any")
# Setting, target, seed and prompt identify an answer.
Key = tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Answer:
    """An answer, a line of ``answers.jsonl``. Answers of a setting without a target are scored against every target."""

    setting: str
    target: int | None  # target length in tokens
    seed: int
    prompt: int  # index of the prompt
    ids: list[int]  # tokens, including the end-of-sequence token if the answer ended by itself
    text: str
    ended: bool  # True if the answer ended by itself, False if the limit of new tokens cut it
    nll: list[float]  # negative log-likelihood of each token under the base model alone, in nats
    predicted: float | None = None  # length in tokens before the first one; None if not requested or unknown

    @property
    def key(self) -> Key:
        return self.setting, self.target, self.seed, self.prompt

    def cut(self, limit: int) -> Answer:
        """The answer under a limit of ``limit`` tokens; the text still contains all tokens."""
        if len(self.ids) <= limit:
            return self
        return replace(self, ids=self.ids[:limit], nll=self.nll[:limit], ended=False)


def measure(
    answers: Sequence[Answer], target: int, right: Mapping[tuple[int, ...], bool] | None = None, first_seed: int = 0
) -> dict[str, Any]:
    """Score the answers of one setting against one target.

    Args:
        answers: at least one; each prompt has the same number. The seeds of a prompt share its index.
        target: tokens, at least 1.
        right: see :func:`.judge`. If None, accuracies are left out.

    Returns:
        Shares from 0 to 1 and lengths in tokens: ``answers`` (their number), ``mean``, ``quartiles`` (three),
        ``distance`` (mean of ``|length - target|``), ``within_10`` and ``within_25`` (per cent of the target),
        ``too_short`` (below a quarter of it), ``cut`` (at the limit), ``length_score`` (LIFEBench's LS, 0 to 100),
        ``length_deviation`` (its LD, signed), ``relative_error`` (mean of ``|length - target| / target``),
        ``perplexity``, ``repetition``, ``sentence_ends`` (share of the answers that ended by themselves), ``distinct``
        (share of different texts per prompt), and shares of prompts with a right answer for ``first_seed``
        (``acc_first``) and for any seed (``acc_any``). ``intervals`` has ``[low, high]`` for :data:`WITH_INTERVALS`.
        A denominator of 0 gives None. Source of LS and LD: arXiv 2505.16234; arXiv 2604.27039, equations 17 and 18.
    """
    prompts, rows = np.unique([answer.prompt for answer in answers], return_inverse=True)
    lengths = np.array([len(answer.ids) for answer in answers])
    distance, deviation = np.abs(lengths - target), (lengths - target) / target
    ended = np.array([answer.ended for answer in answers])
    repeated = np.array([repeated_4grams(answer.ids) for answer in answers])
    keys = [(answer.prompt, *answer.ids) for answer in answers]
    last_of_each = {key: i for i, key in enumerate(keys)}
    each = np.ones(len(answers))
    # Numerators and denominators per answer.
    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "mean": (lengths, each),
        "distance": (distance, each),
        "within_10": (distance * 10 <= target, each),
        "within_25": (distance * 4 <= target, each),
        "too_short": (lengths * 4 < target, each),
        "cut": (~ended, each),
        "length_score": (100 * np.exp(np.where(deviation < 0, SHORT_DECAY, -LONG_DECAY) * deviation), each),
        "length_deviation": (deviation, each),
        "relative_error": (distance / target, each),
        "perplexity": (np.array([sum(answer.nll) for answer in answers]), lengths),
        "repetition": (repeated[:, 0], repeated[:, 1]),
        "sentence_ends": (np.array([answer.ended and ends_sentence(answer.text) for answer in answers]), ended),
        "distinct": (np.isin(np.arange(len(answers)), list(last_of_each.values())), each),
    }
    if right is not None:
        is_right = np.array([right[key] for key in keys])
        is_first = np.array([answer.seed == first_seed for answer in answers])
        parts["acc_first"] = is_right & is_first, is_first
        parts["acc_any"] = np.bincount(rows, weights=is_right)[rows] > 0, each
    scores: dict[str, Any] = {"answers": len(answers), "quartiles": np.percentile(lengths, (25, 50, 75)).tolist()}
    intervals: dict[str, list[float] | None] = {}
    for name, (above, below) in parts.items():
        sums = [np.bincount(rows, weights=part, minlength=len(prompts)) for part in (above, below)]
        finish = np.exp if name == "perplexity" else np.asarray
        scores[name] = float(finish(sums[0].sum() / sums[1].sum())) if sums[1].any() else None
        if name in WITH_INTERVALS:
            intervals[name] = [float(finish(end)) for end in bootstrap(*sums)] if sums[1].any() else None
    return scores | {"intervals": intervals}


def repeated_4grams(ids: Sequence[int]) -> tuple[int, int]:
    """The number of 4-grams of tokens that occur earlier in the answer, and the number of all 4-grams."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(grams) - len(set(grams)), len(grams)


def calibrate(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Compare predicted with actual lengths of the base model's answers, in tokens with the end-of-sequence token.

    A cut answer counts with its tokens, a lower bound. Answers without a prediction are left out.

    Returns:
        ``answers`` (their number), ``left_out``, ``cut`` (share), ``rank_correlation`` (Spearman's; None if a length is
        constant), ``mae_tokens`` (mean of ``|predicted - actual|``), ``mean_relative_error`` (mean of that difference
        over the actual length, arXiv 2604.27039, equation 15), and at most ten ``bins`` by ascending predicted length:
        ``answers``, the means ``predicted`` and ``actual``, their ``ratio``, and ``cut``. Equal predictions share a
        bin, and no bin is empty. None if no answer has a prediction.
    """
    rows = [(a.predicted, len(a.ids), not a.ended) for a in answers if a.predicted is not None]
    if not rows:
        return None
    predicted, actual, cut = columns = torch.tensor(rows, dtype=torch.float64).T
    place = ranks(predicted)
    bins = (place - 0.5) * min(10, len(place.unique())) // len(place)
    error = (predicted - actual).abs()

    def describe(in_bin: torch.Tensor) -> dict[str, Any]:
        p, a, c = columns[:, in_bin].mean(1).tolist()
        return {"answers": int(in_bin.sum()), "predicted": p, "actual": a, "ratio": p / a, "cut": c}

    return {
        "answers": len(place),
        "left_out": len(answers) - len(place),
        "cut": cut.mean().item(),
        "rank_correlation": pearson(place, ranks(actual)),
        "mae_tokens": error.mean().item(),
        "mean_relative_error": (error / actual).mean().item(),
        "bins": [describe(bins == number) for number in bins.unique()],
    }


def bootstrap(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of ``above.sum() / below.sum()``: percentiles over prompts drawn with replacement.

    Each call draws the same prompts, so that settings are compared on equal resamples.

    Args:
        above, below: fp64 ``[P]``, one number per prompt; ``below`` is not all 0.
    """
    count = len(above)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    denominators = draws @ below
    ratios = (draws @ above)[denominators > 0] / denominators[denominators > 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def ranks(x: torch.Tensor) -> torch.Tensor:
    """The ranks of a vector, fp64, starting at 1. Equal values share their mean rank."""
    _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[place]


def pearson(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The correlation of two vectors; None if one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    norms = float((a.square().sum() * b.square().sum()).sqrt())
    # Rounding errors of a constant are not variation.
    return float((a * b).sum()) / norms if norms > 1e-12 * len(a) else None
