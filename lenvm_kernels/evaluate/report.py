"""Result files of ``lenvm evaluate``: numbers, Markdown tables and plots."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.evaluate.accuracy import judge
from lenvm_kernels.evaluate.measures import Answer, calibrate, measure
from lenvm_kernels.evaluate.run import BASE, Plan

# Measure, column title, and digits after the point. A percent sign in the title shows shares as percentages.
COLUMNS = (
    ("mean", "mean", 1),
    ("distance", "distance", 1),
    ("within_10", "within 10 %", 0),
    ("within_25", "within 25 %", 0),
    ("too_short", "too short %", 0),
    ("cut", "cut %", 0),
    ("length_score", "LS", 1),
    ("length_deviation", "LD %", 0),
    ("relative_error", "relative error %", 0),
    ("perplexity", "perplexity", 2),
    ("repetition", "repeated %", 1),
    ("sentence_ends", "sentence ends %", 0),
    ("distinct", "distinct %", 0),
    ("acc_first", "acc_first %", 0),
    ("acc_any", "acc_any %", 0),
)


def write_results(
    folder: Path, plan: Plan, answers: list[Answer], tokenizer: Any, regex: re.Pattern[str], facts: dict[str, Any]
) -> str:
    """Score the answers, write numbers, tables and plots, and return the tables. ``facts`` are added to the numbers."""
    views, right = plan.views(answers), None
    if plan.answers is not None:
        viewed = [answer for view in views.values() for made in view.values() for answer in made]
        right = judge(viewed, plan.answers, tokenizer, regex)
    scores = {
        target: {name: measure(made, int(target), right, plan.seeds[0]) for name, made in view.items()}
        for target, view in views.items()
    }
    calibration = calibrate([answer for answer in answers if answer.setting == BASE])
    versions = {name: metadata.version(name) for name in ("lenvm_kernels", "torch", "transformers", "numpy")}
    versions["python"] = sys.version.split()[0]
    result = facts | {"versions": versions, "scores": scores, "calibration": calibration}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(filter(None, (tables(plan, scores), calibration_table(plan, calibration))))
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot_lengths(plan.targets, views, folder / "lengths.png")
    if right is not None:
        plot_accuracy(plan.targets, scores, folder / "accuracy.png")
    return text


def tables(plan: Plan, scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a table per target, with 95 % intervals in brackets and a dash for a missing number."""
    counts = f"{len(plan.prompts)} prompts, {len(plan.seeds)} seed{'s' * (len(plan.seeds) > 1)}"
    lines = []
    for target, settings in scores.items():
        columns = [column for column in COLUMNS if all(column[0] in score for score in settings.values())]
        lines += [f"Target {target} tokens, {counts}, at most {plan.limit(int(target))} tokens", ""]
        lines.append("| setting | quartiles | " + " | ".join(title for _, title, _ in columns) + " |")
        lines.append("| --- " * (len(columns) + 2) + "|")
        for name, score in settings.items():
            cells = [name.replace("|", "\\|"), ", ".join(f"{length:.0f}" for length in score["quartiles"])]
            for key, title, digits in columns:
                value, interval, unit = score[key], score["intervals"].get(key), 100 if "%" in title else 1
                cell = "-" if value is None else f"{unit * value:.{digits}f}"
                ends = "" if interval is None else f" [{', '.join(f'{unit * end:.{digits}f}' for end in interval)}]"
                cells.append(cell + ends)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def calibration_table(plan: Plan, calibration: dict[str, Any] | None) -> str:
    """Markdown: a row per bin and the measures below, or why they are missing; empty without a value model."""
    if plan.value == NONE:
        return ""
    if calibration is None:
        reason = ": vLLM returns none" if plan.engine == "vllm" else ""
        return f"No calibration: no answer of the base model has a predicted length{reason}.\n"
    lines = [
        f"Calibration: predicted against actual lengths of {calibration['answers']} answers of the base model "
        f"({calibration['left_out']} others have no prediction), at most {plan.max_new_tokens} tokens",
        "",
        "| tenth | answers | mean predicted | mean actual | predicted / actual | cut % |",
        "| --- " * 6 + "|",
    ]
    for number, row in enumerate(calibration["bins"], start=1):
        numbers = f"{row['predicted']:.1f} | {row['actual']:.1f} | {row['ratio']:.2f} | {100 * row['cut']:.0f}"
        lines.append(f"| {number} | {row['answers']} | {numbers} |")
    correlation = "-" if calibration["rank_correlation"] is None else f"{calibration['rank_correlation']:.2f}"
    below = (
        f"Spearman's rank correlation {correlation}, mean absolute error {calibration['mae_tokens']:.1f} tokens, mean "
        f"relative error {100 * calibration['mean_relative_error']:.0f} %. {100 * calibration['cut']:.0f} % of the "
        "answers were cut at the limit, and count with their tokens."
    )
    return "\n".join([*lines, "", below, ""])


def plot_lengths(targets: Sequence[int], views: Mapping[str, Mapping[str, Sequence[Answer]]], file: Path) -> None:
    """Write a PNG with a panel per setting and a dot per answer of :meth:`Plan.views`, length against target."""
    from matplotlib.figure import Figure

    names = list(views[str(targets[0])])
    longest, gap = max(targets), max(targets) / 50
    figure = Figure(figsize=(2.6 * len(names) + 0.8, 3.8), layout="constrained")
    (panels,) = figure.subplots(1, len(names), sharey=True, squeeze=False)
    for axes, name in zip(panels, names, strict=True):
        axes.plot([0, longest * 1.1], [0, longest * 1.1], color="grey", linewidth=1, zorder=0)
        for target in targets:
            lengths = [len(answer.ids) for answer in views[str(target)][name]]
            places = target + gap * np.random.default_rng(0).uniform(-1, 1, len(lengths))
            axes.scatter(places, lengths, s=7, alpha=0.5, linewidths=0)
        axes.set_title(name if len(name) <= 30 else name[:29] + "…", fontsize=9)
        axes.set(xlabel="target in tokens", xticks=sorted(targets), xlim=(0, longest * 1.1), ylim=(0, None))
    panels[0].set_ylabel("length in tokens")
    figure.savefig(file, format="png", dpi=150)


def plot_accuracy(targets: Sequence[int], scores: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Write a PNG of ``acc_first`` with its intervals against mean length: a line per setting, a point per target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4), layout="constrained")
    axes = figure.subplots()
    for name in scores[str(targets[0])]:
        points = [scores[str(target)][name] for target in targets]
        shares = np.array([[point["acc_first"], *point["intervals"]["acc_first"]] for point in points]) * 100
        share, low, high = shares.T
        lengths = [point["mean"] for point in points]
        axes.errorbar(lengths, share, (share - low, high - share), marker="o", elinewidth=0.8, label=name)
    axes.set(xlabel="mean length in tokens", ylabel="% right", xlim=(0, None), ylim=(-2, 102))
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)
