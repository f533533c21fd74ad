"""Tables and stacked bars of what a study measured, beside what its operations and bytes come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import reporting
from bench.study.flops import (
    PUBLISHED_BASE,
    PUBLISHED_RATIOS,
    PUBLISHED_VALUE,
    PUBLISHED_WORK,
    Architecture,
    Figure,
    Guidance,
    Workload,
    base_operations,
    operations_per_output_token,
    published_figures,
    ratio,
    step_bytes,
    value_operations,
)

ELEMENT_SIZE = {"float32": 4, "bfloat16": 2}
ENVIRONMENT = ("command", "date", "device", "operators", "dtype", "torch", "triton", "python")
# What a base run must have in common with a run for their ratio to say what guidance costs.
ALIKE = ("rows", "prompt_tokens", "steps", "prompts_computed", "base_model", "dtype", "device")
SWEPT_VALUE_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
TOP_KS = range(1, 6)


@dataclass(frozen=True)
class Run:
    """One way of decoding: its ``.meta.json``, and each stage's milliseconds by step."""

    meta: dict[str, Any]
    stages: dict[str, list[float]]  # "total" among them

    @classmethod
    def load(cls, file: Path) -> Run:
        """Read ``NAME.meta.json`` and ``NAME.jsonl`` beside it (absent if the run failed).

        Raises:
            ValueError: lines that are not those of ``run``.
        """
        meta, steps = json.loads(file.read_text()), file.with_name(file.name.replace(".meta.json", ".jsonl"))
        stages: dict[str, list[float]] = {}
        if "error" not in meta:
            for number, line in enumerate(steps.read_text().splitlines(), 1):
                record = json.loads(line)
                if stages and set(stages) != {key.removesuffix("_ms") for key in record if key.endswith("_ms")}:
                    raise ValueError(f"line {number} of {steps} must have the stages {', '.join(stages)}, got {line}")
                for key, value in record.items():
                    if key.endswith("_ms"):
                        stages.setdefault(key.removesuffix("_ms"), []).append(value)
        return cls(meta, stages)

    @property
    def name(self) -> str:
        return self.meta["name"]

    @property
    def base(self) -> Architecture:
        return Architecture(**self.meta["base_model"])

    @property
    def value(self) -> Architecture | None:
        return Architecture(**self.meta["value_model"]) if "value_model" in self.meta else None

    @property
    def computed(self) -> Guidance | None:
        return Guidance(**self.meta["computed"]) if "computed" in self.meta else None

    @property
    def work(self) -> Workload:
        meta = self.meta
        return Workload(meta["rows"], 1, meta["prompt_tokens"], meta["steps"], meta["prompts_computed"])

    @property
    def seconds(self) -> float:
        """Of all that :attr:`work` says."""
        return self.meta["decode_seconds"] + (self.meta["prompt_seconds"] if self.meta["prompts_computed"] else 0)

    def is_alike(self, base: Run) -> bool:
        """Whether both decoded the same with the same base model; a folder may hold runs of several commands."""
        return all(self.meta[key] == base.meta[key] for key in ALIKE)

    def operations(self) -> dict[str, float]:
        """Of the run, by component."""
        operations = base_operations(self.base, self.work)
        return operations | (value_operations(self.value, self.work, self.computed) if self.value else {})

    def moved(self) -> dict[str, float]:
        """Bytes of a step, by component, at half of the output."""
        forwards = 0
        if self.computed and self.computed.candidates + self.computed.extended > 0:
            forwards = 2 if self.meta["way"] == "two_forward" else 1
        return step_bytes(
            self.base,
            self.value,
            self.computed,
            rows=self.meta["rows"],
            cached=self.meta["prompt_tokens"] + self.meta["steps"] / 2,
            element_size=ELEMENT_SIZE[self.meta["dtype"]],
            forwards=forwards,
        )

    def over_base_part(self) -> float:
        """A step's median over that of its base part: what else the machine did weighs on both."""
        return float(np.median(self.stages["total"]) / np.median(self.stages["base"]))

    def summary(self, base: Run | None) -> dict[str, Any]:
        """One row of ``summary.json``; ratios are to ``base``, None without it."""
        operations, moved = sum(self.operations().values()), sum(self.moved().values())
        step = float(np.mean(self.stages["total"])) / 1e3
        row = {
            "name": self.name,
            "top_k": self.meta.get("top_k"),
            "load_average": self.meta["load_average"],
            "seconds": self.seconds,
            "output_tokens": self.meta["output_tokens"],
            "output_tokens_per_second": self.meta["output_tokens"] / self.seconds,
            "stages_ms": {stage: statistics(times) for stage, times in self.stages.items()},
            "computed": self.meta.get("computed"),
            "operations": self.operations(),
            "operations_per_output_token": operations / self.meta["output_tokens"],
            "operations_per_second": operations / self.seconds,
            "bytes_per_step": self.moved(),
            "bytes_per_second": moved / step,
        }
        ratios = None
        if base is not None and self.is_alike(base):
            ratios = {
                "seconds": self.seconds / base.seconds,
                "step": self.over_base_part() / base.over_base_part(),
                "operations": operations / sum(base.operations().values()),
                "bytes": moved / sum(base.moved().values()),
            }
        return row | {"ratios": ratios}


def statistics(times: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95th percentile (linear between neighbours)."""
    p50, p95 = np.percentile(times, [50, 95])
    return {"mean": float(np.mean(times)), "p50": float(p50), "p95": float(p95)}


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats get four significant digits."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join(reporting.table(columns, [[cell(value) for value in row] for row in rows])[:-1])


def figures_table(figures: Sequence[Figure]) -> str:
    """Published figures beside ours."""
    rows = []
    for figure in figures:
        allowed = "" if figure.tolerance is None else f"{figure.tolerance:.1%}"
        verdict = "" if figure.tolerance is None else "agrees" if figure.agrees else "DIFFERS"
        rows.append(
            (figure.name, figure.published, figure.ours, f"{figure.difference:+.1%}", allowed, verdict, figure.remark)
        )
    return table(("figure", "published", "ours", "difference", "allowed", "", "remark"), rows)


def estimate_text(base: Architecture, value: Architecture, work: Workload, top_k: int) -> str:
    """What a guided run of two models comes to, as published and with the last winner kept."""
    ways = {"two forwards": (Guidance(top_k), 2), "winner kept": (Guidance(top_k, 0), 1)}
    rows: dict[str, list[Any]] = {}
    for guidance, forwards in ways.values():
        operations = base_operations(base, work) | value_operations(value, work, guidance)
        for name, count in operations.items():
            rows.setdefault(f"{name}, TFLOP", []).append(count / 1e12)
        rows.setdefault("all, TFLOP", []).append(sum(operations.values()) / 1e12)
        rows.setdefault("ratio to the base alone", []).append(ratio(base, value, work, guidance, work))
        token = operations_per_output_token(base, value, work, guidance)
        rows.setdefault("decoding, GFLOP an output token", []).append(token / 1e9)
        moved = step_bytes(
            base,
            value,
            guidance,
            rows=work.prompts * work.samples,
            cached=work.prompt_tokens + work.output_tokens / 2,
            element_size=2,
            forwards=forwards,
        )
        for name, count in moved.items():
            rows.setdefault(f"a step of all samples, bf16: {name}, GB", []).append(count / 1e9)
    models = "\n".join(f"- {model.name}: {model.parameters / 1e9:.2f} billion parameters" for model in (base, value))
    body = table((f"top-k {top_k}", *ways), [(name, *values) for name, values in rows.items()])
    return f"{models}\n- {_in_words(work)}\n\n{body}"


def _in_words(work: Workload) -> str:
    prompts = f"{work.prompts} prompts of {work.prompt_tokens} tokens"
    return f"{prompts}, {work.samples} samples of {work.output_tokens} tokens each"


def estimated_ratios() -> dict[str, list[float]]:
    """Operations over those of the base model alone for k = 1 to 5, by value model and way, of the published runs."""
    base, work, ratios = Architecture.load(PUBLISHED_BASE), PUBLISHED_WORK, {}
    for name in SWEPT_VALUE_MODELS:
        value = Architecture.load(name)
        for way, extended in (("two forwards", 1), ("winner kept", 0)):
            ratios[f"{name}, {way}"] = [ratio(base, value, work, Guidance(k, extended), work) for k in TOP_KS]
    return ratios


def write(folder: Path) -> int:
    """Write ``summary.md``, ``summary.json`` and the plots beside what ``run`` wrote.

    Raises:
        FileNotFoundError: there is nothing of a run in the folder.
    """
    runs = sorted((Run.load(file) for file in folder.glob("*.meta.json")), key=lambda run: _order(run.meta))
    if not runs:
        raise FileNotFoundError(f"{folder} must hold the .meta.json files that `python -m bench.study run` writes")
    failed, runs = [run for run in runs if "error" in run.meta], [run for run in runs if "error" not in run.meta]
    base = next((run for run in runs if run.meta["way"] == "base"), None)
    rows = [run.summary(base) for run in runs]
    estimated = estimated_ratios()
    environments = list({json.dumps({key: run.meta[key] for key in ENVIRONMENT}): None for run in (*runs, *failed)})
    environments = [json.loads(text) for text in environments]
    summary = {"environments": environments, "runs": rows, "estimated_ratios": estimated}
    summary["failed"] = {run.name: run.meta["error"] for run in failed}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    text = "\n\n".join(_sections(runs, failed, rows, estimated, environments))
    (folder / "summary.md").write_text(text + "\n")
    if runs:
        _plot_bars(folder / "stages.png", "ms a step", {run.name: _means(run) for run in runs})
        tokens = {run.name: run.meta["output_tokens"] * 1e9 for run in runs}
        operations = {run.name: {n: x / tokens[run.name] for n, x in run.operations().items()} for run in runs}
        _plot_bars(folder / "operations.png", "GFLOP an output token", operations)
    _plot_ratios(folder / "ratios.png", rows, estimated)
    print(text)
    return 0


def _order(meta: dict[str, Any]) -> tuple:
    value = meta.get("value_model", {}).get("hidden_size", 0)
    return ("base", "ours", "two_forward").index(meta["way"]), value, meta.get("top_k", 0), meta["name"]


def _means(run: Run) -> dict[str, float]:
    return {stage: float(np.mean(times)) for stage, times in run.stages.items() if stage != "total"}


def _sections(
    runs: list[Run],
    failed: list[Run],
    rows: list[dict[str, Any]],
    estimated: dict[str, list[float]],
    environments: list[dict[str, str]],
) -> list[str]:
    """The paragraphs of ``summary.md``."""
    sections = ["# Decoding with and without guidance"]
    sections += ["\n".join(f"- {key}: {value}" for key, value in facts.items()) for facts in environments]
    if any(facts["operators"] != "Triton kernels" for facts in environments):
        sections.append(
            "On a CPU the operators are the PyTorch reference, written to be read: these times show what the study"
            " measures, not what the kernels cost."
        )
    if failed:
        sections.append("Failed:\n\n" + "\n".join(f"- {run.name}: {run.meta['error']}" for run in failed))
    if runs:
        ratios = [row["ratios"] or {} for row in rows]
        sections += [
            "## End to end",
            "The fastest of the repeats; load is the machine's mean of the last minute, 1 a busy core. Ratios are to"
            " the base model alone, if its run had the same model, rows, prompts, steps, dtype and device; prompts"
            " count if they were run.",
        ]
        columns = ("run", "load", "seconds", "output tokens", "tokens/s", "ms a step", "time ratio", "operations ratio")
        sections.append(
            table(
                (*columns, "bytes ratio"),
                [
                    (
                        row["name"],
                        row["load_average"],
                        row["seconds"],
                        row["output_tokens"],
                        row["output_tokens_per_second"],
                        row["stages_ms"]["total"]["mean"],
                        r.get("seconds"),
                        r.get("operations"),
                        r.get("bytes"),
                    )
                    for row, r in zip(rows, ratios, strict=True)
                ],
            )
        )
        sections += ["## Stages of a step", "Milliseconds: mean, median, 95th percentile. ![](stages.png)"]
        sections.append(
            table(
                ("run", "stage", "mean", "p50", "p95"),
                [
                    (row["name"], stage, values["mean"], values["p50"], values["p95"])
                    for row in rows
                    for stage, values in row["stages_ms"].items()
                ],
            )
        )
        sections += [
            "## Operations",
            "GFLOP an output token, prompts included where they were run. ![](operations.png)",
        ]
        names = list(dict.fromkeys(name for row in rows for name in row["operations"]))
        sections.append(
            table(
                ("run", *names, "all", "achieved GFLOP/s"),
                [
                    (
                        row["name"],
                        *(row["operations"].get(name, 0) / row["output_tokens"] / 1e9 for name in names),
                        row["operations_per_output_token"] / 1e9,
                        row["operations_per_second"] / 1e9,
                    )
                    for row in rows
                ],
            )
        )
        sections += ["## Bytes", "MB that a step moves at least, in the middle of the output."]
        names = list(dict.fromkeys(name for row in rows for name in row["bytes_per_step"]))
        sections.append(
            table(
                ("run", *names, "all", "achieved GB/s"),
                [
                    (
                        row["name"],
                        *(row["bytes_per_step"].get(name, 0) / 1e6 for name in names),
                        sum(row["bytes_per_step"].values()) / 1e6,
                        row["bytes_per_second"] / 1e9,
                    )
                    for row in rows
                ],
            )
        )
        sections += [
            "## Over k",
            "Measured. Candidates and extended tokens are those computed for an output token; with a single candidate"
            " no value is needed, and the published way computes none. The ratio of a step is of its median over that"
            " of its own base part, to the same of the base run: what else the machine did weighs on both parts.",
        ]
        sections.append(
            table(
                ("run", "k", "candidates", "extended", "ratio of a step", "operations ratio"),
                [
                    (
                        row["name"],
                        row["top_k"],
                        row["computed"]["candidates"],
                        row["computed"]["extended"],
                        r.get("step"),
                        r.get("operations"),
                    )
                    for row, r in zip(rows, ratios, strict=True)
                    if row["computed"]
                ],
            )
        )
    sections.append(
        f"Estimated: ratio of operations to {PUBLISHED_BASE} alone, {_in_words(PUBLISHED_WORK)}. ![](ratios.png)"
    )
    sections.append(table(("value model", *(f"k = {k}" for k in TOP_KS)), [(n, *r) for n, r in estimated.items()]))
    sections += ["## The estimator against the published figures", figures_table(published_figures())]
    return sections


def _figure(width: float, height: float, columns: int = 1):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(file, format="png", dpi=95)
    pyplot.close(figure)


def _plot_bars(file: Path, unit: str, bars: dict[str, dict[str, float]]) -> None:
    """One stacked bar for each run."""
    figure, ((axes,),) = _figure(8, 1.5 + 0.32 * len(bars))
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    left = np.zeros(len(bars))
    for i, name in enumerate(names):
        values = np.array([parts.get(name, 0.0) for parts in bars.values()])
        axes.barh(list(bars), values, left=left, label=name, color=f"C{i}")
        left += values
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_xlim(0, left.max() * 1.1)
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    _save(figure, file)


def _plot_ratios(file: Path, rows: list[dict[str, Any]], estimated: dict[str, list[float]]) -> None:
    """Ratios to the base model over k: measured on the left, if there are any, estimated on the right."""
    from matplotlib.ticker import MaxNLocator

    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["top_k"] is not None and row["ratios"]:
            way = row["name"].rpartition("-k")[0]
            lines.setdefault(f"{way}, step", {})[row["top_k"]] = row["ratios"]["step"]
            lines.setdefault(f"{way}, operations", {})[row["top_k"]] = row["ratios"]["operations"]
    figure, (axes,) = _figure(10 if lines else 5, 4, 2 if lines else 1)
    for i, (name, points) in enumerate(lines.items()):
        axes[0].plot(
            *zip(*sorted(points.items()), strict=True),
            marker="o",
            linestyle="-:"[i % 2],
            color=f"C{i // 2}",
            label=name,
        )
        axes[0].set_title("measured")
    for i, (name, values) in enumerate(estimated.items()):
        axes[-1].plot(TOP_KS, values, marker="o", linestyle="-:"[i % 2], color=f"C{i // 2}", label=name)
    axes[-1].plot(*zip(*PUBLISHED_RATIOS.items(), strict=True), "kx", label=f"{PUBLISHED_VALUE}, published")
    axes[-1].set_title(f"estimated operations, base {PUBLISHED_BASE}")
    for axis in axes:
        axis.set_xlabel("k")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel("ratio to the base model alone")
        axis.set_ylim(bottom=1 if axis is axes[-1] else 0)
        axis.legend(fontsize="small")
    _save(figure, file)
