"""How well predicted values are those of answers that nothing was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lenvm_kernels.evaluate.statistics import pearson, ranks
from lenvm_kernels.training.answers import Answer


def measure(
    values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], answers: Sequence[Answer], gamma: float
) -> dict[str, float | int | None]:
    """Errors over all states of answers; those that were cut have the expected target.

    Args:
        values, targets: fp32 of each answer, of its last states: at most ``[len(ids) - guided]``.
        answers: at least one.
        gamma: the discount of the values.

    Returns:
        By name: ``answers``, ``states``, ``cut`` (share of the answers), ``mse``, ``r2`` (over the variance of these
        targets, so a constant fitted to other prompts may be below 0), ``correlation``,
        ``rank_correlation_within_prompts`` (Spearman's over the states of a prompt, its mean over prompts),
        ``correlation_at_a_position`` (of what is left after the mean of a prompt's answers at a position is taken off:
        guidance compares candidates of one position) and ``mae_tokens`` (of lengths in tokens, of answers that ended).
        None stands where nothing varies.
    """
    v, y = torch.cat(list(values)).double(), torch.cat(list(targets)).double()
    lens, counts = (torch.tensor([len(x) for x in of_answers]) for of_answers in ((a.ids for a in answers), values))
    prompt = torch.tensor([answer.prompt for answer in answers]).repeat_interleave(counts)
    position = torch.cat([torch.arange(n - count, n) for n, count in zip(lens.tolist(), counts.tolist(), strict=True)])
    ended = torch.tensor([answer.finished for answer in answers]).repeat_interleave(counts)

    correlations = (pearson(ranks(v[prompt == p]), ranks(y[prompt == p])) for p in prompt.unique())
    of_prompts = [found for found in correlations if found is not None]
    _, group = torch.unique(prompt * (int(position.max()) + 1) + position, return_inverse=True)
    size = torch.bincount(group)
    at_position = (x - (torch.bincount(group, x) / size)[group] for x in (v, y))
    variance = float((y - y.mean()).square().mean())
    mse = float((v - y).square().mean())
    off = (lengths(v, gamma) - lengths(y, gamma)).abs()[ended]
    return {
        "answers": len(answers),
        "states": len(v),
        "cut": sum(not answer.finished for answer in answers) / len(answers),
        "mse": mse,
        "r2": 1 - mse / variance if variance > 0 else None,
        "correlation": pearson(v, y),
        "rank_correlation_within_prompts": sum(of_prompts) / len(of_prompts) if of_prompts else None,
        "correlation_at_a_position": pearson(*at_position),
        "mae_tokens": float(off.mean()) if len(off) else None,
    }


def lengths(values: torch.Tensor, gamma: float) -> torch.Tensor:
    """Remaining tokens that belong to values."""
    return torch.log1p(-values.clamp(0, 1 - 1e-6)) / math.log(gamma)
