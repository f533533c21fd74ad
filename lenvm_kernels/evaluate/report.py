"""Markdown tables and the plot of ``lenvm evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.plan import Plan


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


# Title of a column, the measure, and its format.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("mean", "mean", _number(1)),
    ("distance", "distance", _number(1)),
    ("within 10 %", "within_10", _percent),
    ("within 25 %", "within_25", _percent),
    ("too short %", "too_short", _percent),
    ("cut %", "cut", _percent),
    ("LS", "length_score", _number(1)),
    ("LD %", "length_deviation", _percent),
    ("relative error %", "relative_error", _percent),
    ("perplexity", "perplexity", _number(2)),
    ("repeated %", "repetition", lambda share: f"{100 * share:.1f}"),
    ("sentence ends %", "sentence_ends", _percent),
    ("distinct %", "distinct", _percent),
    ("acc_first %", "acc_first", _percent),
    ("acc_any %", "acc_any", _percent),
)


def tables(plan: Plan, scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a table per target, with 95 % intervals in brackets and a dash for a missing number."""
    counts = f"{len(plan.prompts)} prompts, {len(plan.seeds)} seed{'s' * (len(plan.seeds) > 1)}"
    lines = []
    for target, settings in scores.items():
        columns = [column for column in COLUMNS if all(column[1] in score for score in settings.values())]
        lines += [f"Target {target} tokens, {counts}, at most {plan.limit(int(target))} tokens", ""]
        lines.append("| setting | quartiles | " + " | ".join(title for title, _, _ in columns) + " |")
        lines.append("| --- " * (len(columns) + 2) + "|")
        for name, score in settings.items():
            cells = [name.replace("|", "\\|"), ", ".join(f"{length:.0f}" for length in score["quartiles"])]
            for _, measure, write in columns:
                cell = "-" if score[measure] is None else write(score[measure])
                interval = score["intervals"].get(measure)
                cells.append(cell if interval is None else f"{cell} [{', '.join(map(write, interval))}]")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def calibration_table(plan: Plan, calibration: dict[str, Any] | None) -> str:
    """Markdown: a row per bin and the measures below, or the reason why there is none; empty without a value model."""
    if plan.value == NONE:
        return ""
    if calibration is None:
        reason = ": vLLM returns none" if plan.engine == "vllm" else ""
        return f"No calibration: no answer of the base model has a predicted length{reason}.\n"
    lines = [
        f"Calibration: predicted against actual lengths of {calibration['answers']} answers of the base model "
        f"({calibration['left_out']} more have no prediction), at most {plan.max_new_tokens} tokens",
        "",
        "| tenth | answers | mean predicted | mean actual | predicted / actual | cut % |",
        "| --- " * 6 + "|",
    ]
    for number, row in enumerate(calibration["bins"], start=1):
        numbers = f"{row['predicted']:.1f} | {row['actual']:.1f} | {row['ratio']:.2f} | {_percent(row['cut'])}"
        lines.append(f"| {number} | {row['answers']} | {numbers} |")
    correlation = "-" if calibration["rank_correlation"] is None else f"{calibration['rank_correlation']:.2f}"
    below = (
        f"Spearman's rank correlation {correlation}, mean absolute error {calibration['mae_tokens']:.1f} tokens, mean "
        f"relative error {_percent(calibration['mean_relative_error'])} %. {_percent(calibration['cut'])} % of the "
        "answers were cut at the limit, and count with the tokens that they have."
    )
    return "\n".join([*lines, "", below, ""])


def plot_lengths(targets: Sequence[int], views: Mapping[str, Mapping[str, Sequence[Answer]]], file: Path) -> None:
    """Write a PNG with a panel per setting and a dot per answer, length against target.

    Args:
        targets: tokens.
        views: see :meth:`Plan.views`.
        file: the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(views[str(targets[0])])
    longest, gap = max(targets), max(targets) / 50
    size = 2.6 * len(names) + 0.8, 3.8
    figure, (panels,) = pyplot.subplots(1, len(names), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, name in zip(panels, names, strict=True):
        axes.plot([0, longest * 1.1], [0, longest * 1.1], color="grey", linewidth=1, zorder=0)
        for target in targets:
            lengths = [len(answer.ids) for answer in views[str(target)][name]]
            places = target + gap * np.random.default_rng(0).uniform(-1, 1, len(lengths))
            axes.scatter(places, lengths, s=7, alpha=0.5, linewidths=0)
        axes.set_title(name if len(name) <= 30 else name[:29] + "…", fontsize=9)
        axes.set(xlabel="target in tokens", xticks=sorted(targets), xlim=(0, longest * 1.1))
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("length in tokens")
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)


def plot_accuracy(targets: Sequence[int], scores: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Write a PNG of ``acc_first`` with its intervals against mean length: a line per setting, a point per target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 4), layout="constrained")
    for name in scores[str(targets[0])]:
        points = [scores[str(target)][name] for target in targets]
        shares = np.array([[point["acc_first"], *point["intervals"]["acc_first"]] for point in points]) * 100
        share, low, high = shares.T
        lengths = [point["mean"] for point in points]
        axes.errorbar(lengths, share, (share - low, high - share), marker="o", elinewidth=0.8, label=name)
    axes.set(xlabel="mean length in tokens", ylabel="% right", ylim=(-2, 102))
    axes.set_xlim(left=0)
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
