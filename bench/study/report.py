"""Tables and stacked bars of what a study measured, beside what its operations and bytes come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.reporting import text_table as table
from bench.harness.storing import write_json
from bench.study import flops
from bench.study.flops import Architecture, Figure, Guidance, Workload
from bench.study.result import Components, Ratios, Run

SWEPT_VALUE_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
TOP_KS = range(1, 6)


def write(folder: Path) -> int:
    """Write ``summary.md``, ``summary.json`` and the plots beside what ``run`` wrote.

    Raises:
        FileNotFoundError: there is nothing of a run in the folder.
    """
    runs = sorted((Run.load(file) for file in folder.glob("*.meta.json")), key=_order)
    if not runs:
        raise FileNotFoundError(f"{folder} must hold the .meta.json files that `python -m bench.study run` writes")
    failed, runs = [run for run in runs if run.error], [run for run in runs if not run.error]
    environments = list({tuple(run.environment.items()): run.environment for run in (*runs, *failed)}.values())
    base = next((run for run in runs if run.way == "base"), None)
    ratios = {run.name: run.ratios(base) for run in runs}
    estimated = estimated_ratios()
    summary = {
        "environments": environments,
        "runs": [_summary(run, ratios[run.name]) for run in runs],
        "estimated_ratios": estimated,
        "failed": {run.name: run.error for run in failed},
    }
    write_json(folder / "summary.json", summary)
    sections = ["# Decoding with and without guidance"]
    sections += ["\n".join(f"- {key}: {value}" for key, value in facts.items()) for facts in environments]
    if any(facts["operators"] != "Triton kernels" for facts in environments):
        sections.append(
            "On a CPU the operators are the PyTorch reference, written to be read: these times show what the study"
            " measures, not what the kernels cost."
        )
    if failed:
        sections.append("Failed:\n\n" + "\n".join(f"- {run.name}: {run.error}" for run in failed))
    if runs:
        sections += _measured_sections(runs, ratios)
        means = {run.name: {n: float(np.mean(ms)) for n, ms in run.stages.items() if n != "total"} for run in runs}
        plot_bars(folder / "stages.png", "ms a step", means)
        plot_bars(folder / "operations.png", "GFLOP an output token", _gigaflop(runs))
    sections += [
        f"Estimated: ratio of operations to {flops.PUBLISHED_BASE} alone, {_in_words(flops.PUBLISHED_WORK)}."
        " ![](ratios.png)",
        table(("value model", *(f"k = {k}" for k in TOP_KS)), [(name, *row) for name, row in estimated.items()]),
        "## The estimator against the published figures",
        figures_table(flops.published_figures()),
    ]
    _plot_ratios(folder / "ratios.png", runs, ratios, estimated)
    text = "\n\n".join(sections)
    (folder / "summary.md").write_text(text + "\n")
    print(text)
    return 0


def _order(run: Run) -> tuple:
    size = run.value_model.hidden_size if run.value_model else 0
    return ("base", "ours", "two_forward").index(run.way), size, run.top_k or 0, run.name


def _summary(run: Run, ratios: Ratios | None) -> dict[str, Any]:
    """A run in ``summary.json``."""
    operations = sum(run.operations.values())
    return {
        "name": run.name,
        "top_k": run.top_k,
        "load_average": run.load_average,
        "seconds": run.seconds,
        "output_tokens": run.output_tokens,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "stages_ms": {stage: statistics(times) for stage, times in run.stages.items()},
        "computed": run.computed and asdict(run.computed),
        "operations": run.operations,
        "operations_per_output_token": operations / run.output_tokens,
        "operations_per_second": operations / run.seconds,
        "bytes_per_step": run.step_bytes,
        "bytes_per_second": _bytes_per_second(run),
        "ratios": ratios and asdict(ratios),
    }


def statistics(times: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95th percentile (linear between neighbours)."""
    p50, p95 = np.percentile(times, [50, 95])
    return {"mean": float(np.mean(times)), "p50": float(p50), "p95": float(p95)}


def _bytes_per_second(run: Run) -> float:
    return sum(run.step_bytes.values()) / (float(np.mean(run.stages["total"])) / 1e3)


def _gigaflop(runs: Sequence[Run]) -> dict[str, Components]:
    """Of an output token, by run."""
    return {run.name: {n: x / run.output_tokens / 1e9 for n, x in run.operations.items()} for run in runs}


def _in_words(work: Workload) -> str:
    prompts = f"{work.prompts} prompts of {work.prompt_tokens} tokens"
    return f"{prompts}, {work.samples} samples of {work.output_tokens} tokens each"


def _measured_sections(runs: Sequence[Run], ratios: dict[str, Ratios | None]) -> list[str]:
    """The paragraphs of ``summary.md`` about what was run."""

    def ratio(name: str) -> Callable[[Run], float | None]:
        return lambda run: getattr(ratios[run.name], name, None)

    end_to_end = {
        "run": lambda run: run.name,
        "load": lambda run: run.load_average,
        "seconds": lambda run: run.seconds,
        "output tokens": lambda run: run.output_tokens,
        "tokens/s": lambda run: run.output_tokens / run.seconds,
        "ms a step": lambda run: float(np.mean(run.stages["total"])),
        "time ratio": ratio("seconds"),
        "operations ratio": ratio("operations"),
        "bytes ratio": ratio("bytes"),
    }
    over_k = {
        "run": lambda run: run.name,
        "k": lambda run: run.top_k,
        "candidates": lambda run: run.computed.candidates,
        "extended": lambda run: run.computed.extended,
        "ratio of a step": ratio("step"),
        "operations ratio": ratio("operations"),
    }
    stages = [(run.name, stage, *statistics(ms).values()) for run in runs for stage, ms in run.stages.items()]
    megabytes = {run.name: {name: count / 1e6 for name, count in run.step_bytes.items()} for run in runs}
    gigaflops = [sum(run.operations.values()) / run.seconds / 1e9 for run in runs]
    gigabytes = [_bytes_per_second(run) / 1e9 for run in runs]
    return [
        "## End to end",
        "The fastest of the repeats; load is the machine's mean of the last minute, 1 a busy core. Ratios are to"
        " the base model alone, if its run had the same model, rows, prompts, steps, dtype and device; prompts"
        " count if they were run.",
        run_table(end_to_end, runs),
        "## Stages of a step",
        "Milliseconds: mean, median, 95th percentile. ![](stages.png)",
        table(("run", "stage", "mean", "p50", "p95"), stages),
        "## Operations",
        "GFLOP an output token, prompts included where they were run. ![](operations.png)",
        component_table(_gigaflop(runs), "achieved GFLOP/s", gigaflops),
        "## Bytes",
        "MB that a step moves at least, in the middle of the output.",
        component_table(megabytes, "achieved GB/s", gigabytes),
        "## Over k",
        "Measured. Candidates and extended tokens are those computed for an output token; with a single candidate"
        " no value is needed, and the published way computes none. The ratio of a step is of its median over that"
        " of its own base part, to the same of the base run: what else the machine did weighs on both parts.",
        run_table(over_k, [run for run in runs if run.computed]),
    ]


def run_table(columns: dict[str, Callable[[Run], Any]], runs: Sequence[Run]) -> str:
    """A row for each run, and what each column says of it."""
    return table(list(columns), [[column(run) for column in columns.values()] for run in runs])


def component_table(components: dict[str, Components], rate: str, rates: Sequence[float]) -> str:
    """A row for each run: its components, all of them together, and the rate that comes to."""
    names = _names(components)
    rows = [
        (run, *(parts.get(name, 0) for name in names), sum(parts.values()), achieved)
        for (run, parts), achieved in zip(components.items(), rates, strict=True)
    ]
    return table(("run", *names, "all", rate), rows)


def _names(components: dict[str, Components]) -> list[str]:
    return list(dict.fromkeys(name for parts in components.values() for name in parts))


def figures_table(figures: Sequence[Figure]) -> str:
    """Published figures beside ours."""
    rows = []
    for figure in figures:
        allowed, verdict = "", ""
        if figure.tolerance is not None:
            allowed, verdict = f"{figure.tolerance:.1%}", "agrees" if figure.agrees else "DIFFERS"
        difference = f"{figure.difference:+.1%}"
        rows.append((figure.name, figure.published, figure.ours, difference, allowed, verdict, figure.remark))
    return table(("figure", "published", "ours", "difference", "allowed", "", "remark"), rows)


def estimate_text(base: Architecture, value: Architecture, work: Workload, top_k: int) -> str:
    """What a guided run of two models comes to, as published and with the last winner kept."""
    ways = {"two forwards": (Guidance(top_k), 2), "winner kept": (Guidance(top_k, 0), 1)}
    columns = []
    for guidance, forwards in ways.values():
        operations = flops.operations(base, work, value, guidance)
        moved = flops.step_bytes(base, work, value, guidance, element_size=2, forwards=forwards)
        token = flops.operations_per_output_token(base, work, value, guidance)
        columns.append(
            {f"{name}, TFLOP": count / 1e12 for name, count in operations.items()}
            | {"all, TFLOP": sum(operations.values()) / 1e12}
            | {"ratio to the base alone": flops.ratio(base, work, value, guidance)}
            | {"decoding, GFLOP an output token": token / 1e9}
            | {f"a step of all samples, bf16: {name}, GB": count / 1e9 for name, count in moved.items()}
        )
    of_token = base.parameters - base.layer_weights(base.num_experts) + base.active_weights
    active = f", {of_token / 1e9:.2f} of them for a token" if base.num_experts else ""
    models = f"- {base.name}: {base.parameters / 1e9:.2f} billion parameters{active}\n"
    models += f"- {value.name}: {value.parameters / 1e9:.2f} billion parameters"
    body = table((f"top-k {top_k}", *ways), [(name, *(column[name] for column in columns)) for name in columns[0]])
    return f"{models}\n- {_in_words(work)}\n\n{body}"


def estimated_ratios() -> dict[str, list[float]]:
    """Operations over those of the base model alone for k = 1 to 5, by value model and way, of the published runs."""
    base, work = Architecture.load(flops.PUBLISHED_BASE), flops.PUBLISHED_WORK
    return {
        f"{name}, {way}": [flops.ratio(base, work, Architecture.load(name), Guidance(k, extended)) for k in TOP_KS]
        for name in SWEPT_VALUE_MODELS
        for way, extended in (("two forwards", 1), ("winner kept", 0))
    }


def plot_bars(file: Path, unit: str, bars: dict[str, Components], *, totals: bool = True) -> None:
    """One stacked bar for each run, and its total beside it."""
    from matplotlib import figure

    plot = figure.Figure(figsize=(8, 1.5 + 0.32 * len(bars)), layout="constrained")
    axes, left = plot.subplots(), np.zeros(len(bars))
    for i, name in enumerate(_names(bars)):
        values = np.array([parts.get(name, 0.0) for parts in bars.values()])
        axes.barh(list(bars), values, left=left, label=name, color=f"C{i}")
        left += values
    for place, total in enumerate(left if totals else ()):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_xlim(0, left.max() * 1.1)
    plot.legend(loc="outside upper center", ncols=4, fontsize="small")
    plot.savefig(file, dpi=95)


def _plot_ratios(
    file: Path, runs: Sequence[Run], ratios: dict[str, Ratios | None], estimated: dict[str, list[float]]
) -> None:
    """Ratios to the base model over k: measured on the left, if there are any, estimated on the right."""
    from matplotlib import figure, ticker

    measured: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.top_k is not None and (found := ratios[run.name]):
            way = run.name.rpartition("-k")[0]
            measured.setdefault(f"{way}, step", {})[run.top_k] = found.step
            measured.setdefault(f"{way}, operations", {})[run.top_k] = found.operations
    panels = {"measured": measured} if measured else {}
    panels[f"estimated operations, base {flops.PUBLISHED_BASE}"] = {
        name: dict(zip(TOP_KS, row, strict=True)) for name, row in estimated.items()
    }
    plot = figure.Figure(figsize=(5 * len(panels), 4), layout="constrained")
    *_, last = axes = plot.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for i, (name, points) in enumerate(lines.items()):
            style = dict(marker="o", linestyle="-:"[i % 2], color=f"C{i // 2}", label=name)
            axis.plot(*zip(*sorted(points.items()), strict=True), **style)
        if axis is last:
            published = zip(*flops.PUBLISHED_RATIOS.items(), strict=True)
            axis.plot(*published, "kx", label=f"{flops.PUBLISHED_VALUE}, published")
        axis.set(title=title, xlabel="k", ylabel="ratio to the base model alone")
        axis.set_ylim(bottom=1 if axis is last else 0)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.legend(fontsize="small")
    plot.savefig(file, dpi=95)
