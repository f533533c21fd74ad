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

BINS = 10


def calibrate(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Compare predicted with actual lengths, in tokens with the end-of-sequence token.

    An answer that was cut counts with the tokens that it has: its whole length is unknown, and no less.

    Args:
        answers: of the base model; those without a prediction are left out.

    Returns:
        By name: ``answers`` (how many), ``left_out``, ``cut`` (share), ``rank_correlation`` (Spearman's; None where
        nothing varies), ``mae_tokens`` (mean of ``|predicted - actual|``), ``mean_relative_error`` (of the same over
        the actual length, arXiv 2604.27039, equation 15), and ``bins`` by predicted length, the shortest first: of
        each ``answers``, ``predicted`` and ``actual`` (means), ``ratio`` (of these two) and ``cut``. There are ten
        bins, or fewer where predictions are few or equal: equal ones share a bin, and none is empty. None: there is no
        answer with a prediction.
    """
    known = [answer for answer in answers if answer.predicted is not None]
    if not known:
        return None
    predicted, actual = _lengths(known)
    cut = torch.tensor([not answer.ended for answer in known], dtype=torch.float64)
    place = ranks(predicted)  # from 1 on, in the middle of equal ones
    bins = torch.div((place - 0.5) * min(BINS, len(place.unique())), len(known), rounding_mode="floor")
    off = (predicted - actual).abs()
    return {
        "answers": len(known),
        "left_out": len(answers) - len(known),
        "cut": cut.mean().item(),
        "rank_correlation": pearson(place, ranks(actual)),
        "mae_tokens": off.mean().item(),
        "mean_relative_error": (off / actual).mean().item(),
        "bins": [
            {
                "answers": int(of_bin.sum()),
                "predicted": predicted[of_bin].mean().item(),
                "actual": actual[of_bin].mean().item(),
                "ratio": (predicted[of_bin].sum() / actual[of_bin].sum()).item(),
                "cut": cut[of_bin].mean().item(),
            }
            for of_bin in (bins == number for number in bins.unique())
        ],
    }


def _lengths(answers: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted and actual ones, fp64 ``[len(answers)]``."""
    predicted = torch.tensor([answer.predicted for answer in answers], dtype=torch.float64)
    return predicted, torch.tensor([len(answer.ids) for answer in answers], dtype=torch.float64)


def table(plan: Plan, found: dict[str, Any] | None) -> str:
    """Markdown: a row a bin, and the measures below; a sentence why there is none; nothing without a value model."""
    if plan.value == NONE:
        return ""
    if found is None and plan.engine == "vllm":
        return "No calibration: vLLM's answers have no predicted lengths, only its file LENVM_PREDICTIONS has.\n"
    if found is None:
        return "No calibration: no answer of the base model in the directory has a predicted length.\n"
    lines = [
        "Calibration: predicted length of the prompt against the length of the base model's answer, "
        f"{found['answers']} answers, at most {plan.max_new_tokens} tokens",
        "",
        "| tenth | answers | mean predicted | mean actual | predicted / actual | cut % |",
        "| --- " * 6 + "|",
    ]
    for number, of in enumerate(found["bins"], start=1):
        numbers = f"{of['predicted']:.1f} | {of['actual']:.1f} | {of['ratio']:.2f} | {100 * of['cut']:.0f}"
        lines.append(f"| {number} | {of['answers']} | {numbers} |")
    correlation = found["rank_correlation"]
    lines += [
        "",
        f"Spearman's rank correlation {'-' if correlation is None else f'{correlation:.2f}'}, mean absolute error "
        f"{found['mae_tokens']:.1f} tokens, mean relative error {100 * found['mean_relative_error']:.0f} %. "
        f"{100 * found['cut']:.0f} % of the answers were cut at the limit, and count with the tokens that they have.",
    ]
    if found["left_out"]:
        lines.append(f"{found['left_out']} further answers have no predicted length.")
    return "\n".join(lines) + "\n"


def plot(answers: Sequence[Answer], found: dict[str, Any], file: Path) -> None:
    """Write a PNG with a dot an answer, actual against predicted length, hollow if cut; and the means of the bins."""
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = pyplot.subplots(figsize=(4.6, 4.4), layout="constrained")
    known = [answer for answer in answers if answer.predicted is not None]
    x, y = (lengths.clamp(min=0.5) for lengths in _lengths(known))  # a logarithm has no place for 0
    ends = 0.8 * min(x.min().item(), y.min().item()), 1.25 * max(x.max().item(), y.max().item())
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    ended = torch.tensor([answer.ended for answer in known])
    for dots, color in ((ended, "C0"), (~ended, "none")):
        axes.scatter(x[dots], y[dots], s=12, facecolors=color, edgecolors="C0", linewidths=0.6, alpha=0.6)
    means = [(max(of["predicted"], 0.5), of["actual"]) for of in found["bins"]]
    axes.plot(*zip(*means, strict=True), color="C1", marker="o", markersize=5, label="means of the tenths")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("predicted length in tokens")
    axes.set_ylabel("actual length in tokens (hollow: cut)")
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
