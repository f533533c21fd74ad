"""Correlations, and confidence intervals by bootstrap."""

from __future__ import annotations

import numpy as np
import torch

RESAMPLES = 1000


def bootstrap(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of ``above.sum() / below.sum()``: percentiles over prompts drawn with replacement.

    Every call draws the same prompts, so that settings are compared on the same resamples.

    Args:
        above, below: fp64 ``[P]``, one number per prompt; ``below`` has an entry that is not 0.
    """
    count = len(above)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    denominators = draws @ below
    ratios = (draws @ above)[denominators > 0] / denominators[denominators > 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def ranks(x: torch.Tensor) -> torch.Tensor:
    """The ranks of a vector, fp64, from 1 on. Equal values share their mean rank."""
    _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[place]


def pearson(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The correlation of two vectors; None if one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    norms = float((a.square().sum() * b.square().sum()).sqrt())
    # A constant leaves rounding errors, which are no variation.
    return float((a * b).sum()) / norms if norms > 1e-12 * len(a) else None
