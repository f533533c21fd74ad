"""How well the lengths that a value model predicts of prompts are those of the base model's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.adapters.settings import NONE
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.plan import Plan
from lenvm_kernels.training.measures import pearson, ranks


def calibrate(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Compare predicted with actual lengths, in tokens with the end-of-sequence token.

    An answer that was cut counts with the tokens that it has: its whole length is unknown, and no less.

    Args:
        answers: of the base model; those without a prediction are left out.

    Returns:
        By name: ``answers`` (how many), ``left_out``, ``cut`` (share), ``rank_correlation`` (Spearman's; None where
        nothing varies), ``mae_tokens`` (mean of ``|predicted - actual|``), ``mean_relative_error`` (of the same over
        the actual length, arXiv 2604.27039, equation 15), and ten ``bins`` by predicted length, the shortest first:
        of each ``answers``, the means ``predicted`` and ``actual``, their ``ratio``, and ``cut``. Equal predictions
        share a bin, and none is empty: there may be fewer. None: there is no answer with a prediction.
    """
    predicted, actual, cut = columns = _columns(answers)
    if not len(predicted):
        return None
    place = ranks(predicted)  # from 1 on, in the middle of equal ones
    bins = (place - 0.5) * min(10, len(place.unique())) // len(place)
    off = (predicted - actual).abs()

    def described(of_bin: torch.Tensor) -> dict[str, Any]:
        p, a, c = columns[:, of_bin].mean(1).tolist()
        return {"answers": int(of_bin.sum()), "predicted": p, "actual": a, "ratio": p / a, "cut": c}

    return {
        "answers": len(place),
        "left_out": len(answers) - len(place),
        "cut": cut.mean().item(),
        "rank_correlation": pearson(place, ranks(actual)),
        "mae_tokens": off.mean().item(),
        "mean_relative_error": (off / actual).mean().item(),
        "bins": [described(bins == number) for number in bins.unique()],
    }


def _columns(answers: Sequence[Answer]) -> torch.Tensor:
    """fp64 ``[3, N]``: of the answers with a prediction that, their length, and whether they were cut."""
    rows = [(a.predicted, len(a.ids), not a.ended) for a in answers if a.predicted is not None]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3).T


def table(plan: Plan, found: dict[str, Any] | None) -> str:
    """Markdown: a row a bin, and the measures below; a sentence why there is none; nothing without a value model."""
    if plan.value == NONE:
        return ""
    if found is None:
        why = ": vLLM returns none" if plan.engine == "vllm" else ""
        return f"No calibration: no answer of the base model has a predicted length{why}.\n"
    lines = [
        f"Calibration: predicted against actual lengths of {found['answers']} answers of the base model "
        f"({found['left_out']} more have no prediction), at most {plan.max_new_tokens} tokens",
        "",
        "| tenth | answers | mean predicted | mean actual | predicted / actual | cut % |",
        "| --- " * 6 + "|",
    ]
    for number, of in enumerate(found["bins"], start=1):
        numbers = f"{of['predicted']:.1f} | {of['actual']:.1f} | {of['ratio']:.2f} | {100 * of['cut']:.0f}"
        lines.append(f"| {number} | {of['answers']} | {numbers} |")
    correlation = "-" if found["rank_correlation"] is None else f"{found['rank_correlation']:.2f}"
    below = (
        f"Spearman's rank correlation {correlation}, mean absolute error {found['mae_tokens']:.1f} tokens, mean "
        f"relative error {100 * found['mean_relative_error']:.0f} %. {100 * found['cut']:.0f} % of the answers were "
        "cut at the limit, and count with the tokens that they have."
    )
    return "\n".join([*lines, "", below, ""])


def plot(answers: Sequence[Answer], found: dict[str, Any], file: Path) -> None:
    """Write a PNG with a dot an answer, actual against predicted length, hollow if cut; and the means of the bins."""
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(figsize=(4.6, 4.4), layout="constrained")
    x, y, cut = _columns(answers).clamp(min=0.5)  # a logarithm has no place for 0
    ends = 0.8 * min(x.min().item(), y.min().item()), 1.25 * max(x.max().item(), y.max().item())
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    for dots, color in ((cut < 1, "C0"), (cut == 1, "none")):
        axes.scatter(x[dots], y[dots], s=12, facecolors=color, edgecolors="C0", linewidths=0.6, alpha=0.6)
    means = [(max(of["predicted"], 0.5), of["actual"]) for of in found["bins"]]
    axes.plot(*zip(*means, strict=True), color="C1", marker="o", markersize=5, label="means of the tenths")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="predicted length in tokens", ylabel="actual length in tokens (hollow: cut)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
