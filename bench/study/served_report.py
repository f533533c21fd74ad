"""The files of a study on a server: ``summary.md``, ``summary.json`` and ``summary.csv``, and two plots."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness.reporting import text_table as table
from bench.harness.storing import write_json
from bench.study.report import plot_bars, statistics
from bench.study.result import Components
from bench.study.served import LENGTHS, Load, Models, Result, figures, label
from lenvm_kernels.timing import STAGES

Figures = dict[str, float | None]

TIME_PER_TOKEN = "time per output token (ms)"
SWEEP = {  # columns of the table of all conditions, and whose numbers they have
    "s": "end-to-end wall clock (s)",
    "tokens": "output tokens",
    "tokens/s": "throughput (output tokens/s)",
    "ms / token": TIME_PER_TOKEN,
    "first token, p50": "time to first token, median (ms)",
    "p99": "time to first token, 99th percentile (ms)",
    "next, p50": "time per output token of a request, median (ms)",
    "next, p99": "time per output token of a request, 99th percentile (ms)",
    "passes": "forward passes of the base model",
    "rows with values, %": "rows with values (%)",
    "MiB": "memory of the server's processes, peak (MiB)",
}
PARTS = {"base model": "base model (ms / pass)", "value model": "value model (ms / pass)", "other": "other (ms / pass)"}
# Of the time per output token, and what it is of.
SAME_FILTERS, UNFILTERED = "over plain with its top-k", "over plain without top-k"


def compared(plain: Figures, guided: Figures) -> dict[str, Figures]:
    """The published form: each number without and with guidance, and the second over the first.

    Numbers that neither has are left out.
    """
    rows = {}
    for name in plain:
        without, with_guidance = plain[name], guided[name]
        if without is not None or with_guidance is not None:
            ratio = with_guidance / without if without and with_guidance is not None else None
            rows[name] = {"plain": without, "guided": with_guidance, "guided / plain": ratio}
    return rows


def plain_run(results: Sequence[Result], lengths: str, top_k: int) -> Result | None:
    """Without the plugin, of these lengths and with this filter."""
    alike = (r for r in results if r.condition.lengths == lengths and r.condition.top_k == top_k)
    return next((r for r in alike if r.condition.is_plain), None)


def headline(results: Sequence[Result], lengths: str) -> tuple[Result, Result] | None:
    """The run of these lengths that is guided most, by the smallest stride, of these the largest k; before it the plain
    one with the same k.

    None if there is none of them.
    """
    guided = [result for result in results if result.condition.lengths == lengths and result.condition.is_guided]
    if not guided:
        return None
    most = max(guided, key=lambda result: (-(result.condition.stride or 0), result.condition.top_k))
    plain = plain_run(results, lengths, most.condition.top_k)
    return None if plain is None else (plain, most)


def ratios(results: Sequence[Result], numbers: Sequence[Figures]) -> list[dict[str, float | None]]:
    """Of each run the time per output token over that of the plain runs of these lengths."""
    times = {id(result): of[TIME_PER_TOKEN] for result, of in zip(results, numbers, strict=True)}

    def over(result: Result, top_k: int) -> float | None:
        own, plain = times[id(result)], plain_run(results, result.condition.lengths, top_k)
        return own / of if own is not None and plain is not None and (of := times[id(plain)]) else None

    return [{SAME_FILTERS: over(result, result.condition.top_k), UNFILTERED: over(result, 0)} for result in results]


def write_summary(
    folder: Path, environment: Mapping[str, Any], load: Load, models: Models, results: Sequence[Result]
) -> None:
    """Write all files of the conditions measured so far, at least one; plots if matplotlib is there."""
    numbers = [figures(result, load, models) for result in results]
    over = ratios(results, numbers)
    tables = {}
    requests = f"Prompts: {len(load.prompts)}, samples of each: {load.samples}"
    sections = [f"# Decoding with and without guidance in {environment['engine']}"]
    sections.append("\n".join(f"- {name}: {value}" for name, value in environment.items()))
    if environment["server device"] == "cpu":
        sections.append(
            "On a CPU the operators are the PyTorch reference, written to be read, and vLLM's own kernels run in"
            " Triton's interpreter: these times show what the study measures, not what the kernels cost."
        )
    if failures := failures_of(results):
        sections.append("Failed:\n\n" + "\n".join(f"- {failure}" for failure in failures))
    by_run = {id(result): of for result, of in zip(results, numbers, strict=True)}
    for lengths in LENGTHS:
        if (pair := headline(results, lengths)) is None:
            continue
        plain, guided = pair
        tables[lengths] = compared(by_run[id(plain)], by_run[id(guided)])
        outputs = (
            f"{load.max_tokens} tokens each, ends of sequence passed over"
            if lengths == "fixed"
            else f"{load.max_tokens} tokens each at most: outputs differ in length, so that only rates compare"
        )
        where = f"k = {guided.condition.top_k}, stride {guided.condition.stride}"
        rows = [(name, *row.values()) for name, row in tables[lengths].items()]
        sections += [
            f"## Outputs of {lengths} length, {where}",
            f"{requests}, {outputs}. The plain run has the same top-k, top-p, min-p and temperature.",
            table(("metric", "plain", "guided", "guided / plain"), rows),
        ]
    sections += ["## Every condition", *_sweep(results, numbers, over), *_parts(results, numbers)]
    (folder / "summary.md").write_text("\n\n".join(sections) + "\n")
    conditions = [described(*of) for of in zip(results, numbers, over, strict=True)]
    summary = {"environment": environment, "tables": tables, "conditions": conditions, "failed": failures}
    write_json(folder / "summary.json", summary)
    _write_csv(folder / "summary.csv", environment, results, numbers, over)
    if find_spec("matplotlib"):  # a server's environment may have none
        plot_bars(folder / "shares.png", "% of the wall clock", shares(results), totals=False)
        _plot_ratios(folder / "ratios.png", results, over)


def _sweep(results: Sequence[Result], numbers: Sequence[Figures], over: Sequence[Figures]) -> list[str]:
    rows = [
        (label(result.condition), result.load_average, *(has[name] for name in SWEEP.values()), *ratio.values())
        for result, has, ratio in zip(results, numbers, over, strict=True)
    ]
    paragraphs = [
        "Load is the machine's mean of the last minute, 1 a busy core. First token and next: milliseconds of a request"
        " until its first token, and for each after it. The last columns are ratios of the time per output token: to"
        " the plain run with the same filters, and to the one that draws from the whole vocabulary, as published. MiB:"
        " pages that processes share count for each. ![](ratios.png)",
        table(("condition", "load", *SWEEP, SAME_FILTERS, UNFILTERED), rows),
    ]
    if any(result.condition.top_k == 1 for result in results):
        paragraphs.append(
            "With k = 1 the engine decodes greedily: there is nothing to guide, and no value is computed."
        )
    return paragraphs


def _parts(results: Sequence[Result], numbers: Sequence[Figures]) -> list[str]:
    """Where the time goes, from inside the server."""
    rows = []
    for result, has in zip(results, numbers, strict=True):
        stages = {stage: statistics(ms) for stage, ms in result.stages.items()}
        means = [stages[stage]["mean"] if stage in stages else None for stage in STAGES]
        of_step = [stages["total"][name] if stages else None for name in ("mean", "p50", "p95")]
        steps = len(result.stages["total"]) if stages else None
        rows.append((label(result.condition), *(has[name] for name in PARTS.values()), steps, *means, *of_step))
    return [
        "## Where the time goes",
        "Milliseconds. Of a pass of the base model: the means of its own time, of the value model's, and of all other."
        " Of a guided step, from inside the server: the means of its stages and of all of it, its median and 95th"
        " percentile. ![](shares.png)",
        table(("condition", *PARTS, "steps", *STAGES, "step", "p50", "p95"), rows),
    ]


def shares(results: Sequence[Result]) -> dict[str, Components]:
    """Per cent of each run's wall clock by part; what the value model does beside guided steps are its prompts."""
    found = {}
    for result in results:
        work, seconds = result.work, result.seconds
        stages = {stage: sum(result.stages.get(stage, ())) / 1e3 for stage in STAGES}
        parts = {"base model": work.base_seconds} | stages
        parts["value model's prompts"] = max(0.0, work.value_seconds - sum(stages.values()))
        parts["other"] = max(0.0, seconds - work.base_seconds - work.value_seconds)
        found[label(result.condition)] = {name: part / seconds * 100 for name, part in parts.items()}
    return found


def failures_of(results: Sequence[Result]) -> list[str]:
    """What failed, a line for each way in each condition."""
    lines = []
    for result in results:
        name, count = label(result.condition), len(result.answers)
        lines += [f"{name}: {times} of {count} requests: {error}" for error, times in result.errors.items()]
        if failed := result.work.failed_steps:
            lines.append(f"{name}: guidance failed in {failed} steps, see the server's log")
    return lines


def described(result: Result, numbers: Figures, over: Figures) -> dict[str, Any]:
    """A condition in ``summary.json``."""
    return {
        **asdict(result.condition),
        "requests": len(result.answers),
        "failed_requests": sum(result.errors.values()),
        "load_average": result.load_average,
        "work": asdict(result.work),
        "figures": numbers,
        "ratios": over,
        "stages_ms": {stage: statistics(ms) for stage, ms in result.stages.items()},
    }


def _write_csv(
    file: Path,
    environment: Mapping[str, Any],
    results: Sequence[Result],
    numbers: Sequence[Figures],
    over: Sequence[Figures],
) -> None:
    """A line a condition; the files of several engines may be put together."""
    with file.open("w", newline="") as opened:
        asked = ("engine", "condition", "lengths", "top_k", "stride", "requests", "failed_requests")
        stages = {stage: f"{stage} (ms / guided step)" for stage in (*STAGES, "total")}
        lines = csv.DictWriter(opened, (*asked, *numbers[0], *over[0], *stages.values()))
        lines.writeheader()
        for result, has, ratio in zip(results, numbers, over, strict=True):
            of, failed = result.condition, sum(result.errors.values())
            values = (environment["engine"], of.name, of.lengths, of.top_k, of.stride, len(result.answers), failed)
            means = {stages[stage]: statistics(ms)["mean"] for stage, ms in result.stages.items()}
            lines.writerow(dict(zip(asked, values, strict=True)) | has | ratio | means)


def _plot_ratios(file: Path, results: Sequence[Result], over: Sequence[Figures]) -> None:
    """Guided over plain, over k, a line a stride; a panel for the lengths."""
    from matplotlib import figure, ticker

    kinds = list(dict.fromkeys(result.condition.lengths for result in results))
    plot = figure.Figure(figsize=(5 * len(kinds), 4), layout="constrained")
    for axis, lengths in zip(plot.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
        for result, ratio in zip(results, over, strict=True):
            of = result.condition
            if of.lengths == lengths and of.stride is not None:
                for kind, value in ratio.items():
                    if value is not None:
                        lines.setdefault((of.stride, kind), []).append((of.top_k, value))
        strides = sorted({stride for stride, _ in lines})
        for (stride, kind), points in lines.items():
            style = dict(color=f"C{strides.index(stride)}", linestyle="-" if kind == SAME_FILTERS else ":")
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"stride {stride}, {kind}", **style)
        axis.set(title=f"outputs of {lengths} length", xlabel="k", ylabel="time per output token, guided over plain")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if lines:
            axis.legend(fontsize="small")
    plot.savefig(file, dpi=95)
