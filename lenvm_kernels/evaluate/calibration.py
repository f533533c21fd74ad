"""How well predicted lengths match the lengths of the base model's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.statistics import pearson, ranks


def calibrate(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Compare predicted with actual lengths, in tokens with the end-of-sequence token.

    An answer that was cut counts with the tokens that it has, a lower bound of its length.

    Args:
        answers: answers of the base model; answers without a prediction are left out.

    Returns:
        ``answers`` (their number), ``left_out``, ``cut`` (share), ``rank_correlation`` (Spearman's; None if a length is
        constant), ``mae_tokens`` (mean of ``|predicted - actual|``), ``mean_relative_error`` (mean of the same over the
        actual length, arXiv 2604.27039, equation 15), and at most ten ``bins`` by predicted length, the shortest first:
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
