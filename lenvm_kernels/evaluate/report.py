"""What ``lenvm evaluate`` shows: Markdown tables, and the plots of lengths and of distance against perplexity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.plan import BASE, CUT, Plan


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


# Title of a column, the measure, and how a number of it is written.
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


def table(plan: Plan, scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a table a target, with the 95 % intervals in brackets; a dash where nothing can be said."""
    counts = f"{len(plan.prompts)} prompts, {len(plan.seeds)} seed{'s' * (len(plan.seeds) > 1)}"
    lines = []
    for target, settings in scores.items():
        lines += [f"Target {target} tokens, {counts}, at most {plan.limit(int(target))} tokens", ""]
        lines += settings_table(settings)
        lines.append("")
    return "\n".join(lines)


def settings_table(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: a row for the measures of each setting."""
    columns = [column for column in COLUMNS if all(column[1] in found for found in settings.values())]
    lines = ["| setting | quartiles | " + " | ".join(title for title, _, _ in columns) + " |"]
    lines.append("| --- " * (len(columns) + 2) + "|")
    for name, found in settings.items():
        cells = [name.replace("|", "\\|"), ", ".join(f"{length:.0f}" for length in found["quartiles"])]
        for _, measure, write in columns:
            cell = "-" if found[measure] is None else write(found[measure])
            interval = found["intervals"].get(measure)
            cells.append(cell if interval is None else f"{cell} [{', '.join(map(write, interval))}]")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot_lengths(
    targets: Sequence[int],
    views: Mapping[str, Mapping[str, Sequence[Answer]]],
    file: Path,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Write a PNG with a dot an answer, its length against the target, and a panel a setting.

    Args:
        targets: tokens.
        views: answers by target and name of a setting.
        file: what to write.
        leave_out: settings without a panel.
    """
    from matplotlib import pyplot

    names = [name for name in views[str(targets[0])] if name not in leave_out]
    longest, gap = max(targets), max(targets) / 50
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(2.6 * len(names) + 0.8, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, name in zip(panels[0], names, strict=True):
        axes.plot([0, longest * 1.1], [0, longest * 1.1], color="grey", linewidth=1, zorder=0)
        for target in targets:
            lengths = [len(answer.ids) for answer in views[str(target)][name]]
            places = target + gap * np.random.default_rng(0).uniform(-1, 1, len(lengths))
            axes.scatter(places, lengths, s=7, alpha=0.5, linewidths=0)
        axes.set_title(name if len(name) <= 30 else name[:29] + "…", fontsize=9)
        axes.set_xticks(sorted(targets))
        axes.set_xlabel("target in tokens")
        axes.set_xlim(0, longest * 1.1)
        axes.set_ylim(bottom=0)
    panels[0, 0].set_ylabel("length in tokens")
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)


def plot_curves(plan: Plan, scores: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Write a PNG with distance against perplexity over the strengths, and a panel a target."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(scores), figsize=(3.4 * len(scores) + 0.8, 3.8), squeeze=False, layout="constrained"
    )
    for axes, (target, settings) in zip(panels[0], scores.items(), strict=True):
        for label, curve in plan.curves.items():
            points = [(settings[name]["perplexity"], settings[name]["distance"]) for _, name in curve]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
            for (strength, _), point in zip(curve, points, strict=True):
                axes.annotate(f"{strength:g}", point, textcoords="offset points", xytext=(4, 4), fontsize=7)
        for name, marker in ((BASE, "s"), (CUT, "x")):
            axes.scatter(settings[name]["perplexity"], settings[name]["distance"], marker=marker, c="grey", label=name)
        axes.set_title(f"target {target}", fontsize=9)
        axes.set_xlabel("perplexity under the base model")
        axes.set_xlim(left=1)  # the least that there is
        axes.set_ylim(bottom=0)
    panels[0, 0].set_ylabel("mean |length - target| in tokens")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)
