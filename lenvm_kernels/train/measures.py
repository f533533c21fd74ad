"""Agreement between predicted values and the targets of held-out answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lenvm_kernels.evaluate.statistics import pearson, ranks
from lenvm_kernels.train.targets import Example


def measure(values: Sequence[torch.Tensor], examples: Sequence[Example], gamma: float) -> dict[str, float | int | None]:
    """Measures of the predicted values of at least one example, over all of its states.

    Returns:
        ``answers``, ``states``, ``cut`` (share of cut answers), ``mse``, ``r2``, ``correlation``,
        ``rank_correlation_within_prompts`` (Spearman's over the states of a prompt, averaged over prompts),
        ``correlation_at_a_position`` (after subtracting the mean over a prompt's answers at a position, because
        guidance compares candidates of one position) and ``mae_tokens`` (of remaining lengths, finished answers only).
        None if the values or the targets are constant.
    """
    answers, targets = [example.answer for example in examples], [example.targets for example in examples]
    v, y = torch.cat(list(values)).double(), torch.cat(targets).double()
    counts = torch.tensor(list(map(len, targets)))
    prompt = torch.tensor([answer.prompt for answer in answers]).repeat_interleave(counts)
    position = torch.cat([torch.arange(len(a.ids) - n, len(a.ids)) for a, n in zip(answers, counts, strict=True)])
    ended = torch.tensor([answer.finished for answer in answers]).repeat_interleave(counts)

    correlations = (pearson(ranks(v[prompt == p]), ranks(y[prompt == p])) for p in prompt.unique())
    of_prompts = [found for found in correlations if found is not None]
    _, group = torch.unique(torch.stack([prompt, position]), dim=1, return_inverse=True)
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
    """Remaining tokens that values stand for."""
    return torch.log1p(-values.clamp(0, 1 - 1e-6)) / math.log(gamma)
