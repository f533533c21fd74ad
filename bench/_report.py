"""Tables and plots of what :mod:`bench.gpu_suite` measured, from the JSON files it wrote. Nothing is typed by hand."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench._common import STATES, header

SHORT_CASE = 44  # characters of a case in the short table
DRY_RUN = "DRY RUN on a CPU with tiny shapes: the times mean nothing."


def load(folder: Path) -> dict[str, dict]:
    """Operator -> the results of its benchmark, of all in the folder."""
    files = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return {data["operator"]: data for data in files if "operator" in data}


def is_rival(label: str) -> bool:
    """Whether a peer computes what ours does; what is in parentheses computes a part, to be put into relation."""
    return not label.startswith("(")


def best_rival(entry: dict) -> tuple[str, float] | None:
    """(label, its time / ours) of the fastest peer, cold where that was measured; None if none was measured."""
    ratios = {label: ratio(found) for label, found in entry["peers"].items() if is_rival(label)}
    return min(((label, r) for label, r in ratios.items() if r), key=lambda pair: pair[1], default=None)


def ratio(found: dict) -> float | None:
    """A peer's time / ours, cold where that was measured."""
    return found.get("ratio_cold") or found.get("ratio_warm")


def share(entry: dict) -> float | None:
    """Floor / our time, cold where that was measured."""
    of_floor = entry.get("of_floor", {})
    return of_floor.get("cold") or of_floor.get("warm")


def reason(found: dict) -> str:
    """Why there is no measurement, empty if there is one."""
    return next((f"{key}: {found[key]}" for key in ("absent", "failed", "left out") if key in found), "")


# --- Markdown ---


def summary(suite: dict, results: dict[str, dict]) -> str:
    """The whole run as Markdown."""
    where = suite["environment"]
    lines = [f"# {where['device']}", ""]
    lines += [f"**{DRY_RUN}**", ""] if where["dry_run"] else []
    lines += [f"**Cut short by {suite['cut']}.**", ""] if suite.get("cut") else []
    lines += [
        f"`{where['command']}`, {where['date']}; torch {where['torch']}, triton {where['triton']}, "
        f"Python {where['python']}.",
        "",
        "Times are microseconds of one call. *Warm*: again and again, from a CUDA graph. *Cold*: after a flush of the "
        "L2 cache, weights, caches and activations alike. *Spread*: (80th - 20th percentile) / median, the larger of "
        "the two. *Of floor*: the floor / our time; the floor is the larger of bytes / copy bandwidth and operations / "
        "matmul rate, both measured in the same process. A peer's column is its time / ours, cold / warm: above 1 ours "
        "is faster. *e*: timed as called, with launches and host waits. In parentheses: computes a part only.",
        "",
        *steps_table(suite),
        *tests_table(suite),
    ]
    for operator, data in results.items():
        lines += operator_section(operator, data)
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table and an empty line."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
        "",
    ]


def steps_table(suite: dict) -> list[str]:
    rows = [[name, step["outcome"], f"{step['seconds']:.0f}", step["log"]] for name, step in suite["steps"].items()]
    return ["## Steps", "", *table(["step", "outcome", "s", "log"], rows)]


def tests_table(suite: dict) -> list[str]:
    if not suite.get("tests"):
        return []
    outcomes = ["passed", "failed", "skipped", "not run"]
    rows = [
        [name, *(counts[outcome] for outcome in outcomes), f"{counts['seconds']:.0f}"]
        for name, counts in suite["tests"]["modules"].items()
    ]
    failures = [f"- `{test}`: {message}" for test, message in suite["tests"]["failures"].items()]
    return ["## Tests", "", *table(["module", *outcomes, "s"], rows), *failures, *([""] if failures else [])]


def operator_section(operator: str, data: dict) -> list[str]:
    """Where it comes from, the table of all cases, and why what is missing is missing."""
    entries, where = data["results"], data["environment"]
    axes = list(entries[0]["shape"]) if entries else []
    labels = list(dict.fromkeys(label for entry in entries for label in entry["peers"]))
    columns = [*axes, "warm", "cold", "spread", "MB", "Gops", "floor", "of floor, warm", "cold", *labels]
    rows, missing = [], {}
    for entry in entries:
        ours, of_floor = entry.get("ours", {}), entry.get("of_floor", {})
        row = [entry["shape"][axis] for axis in axes]
        row += [_microseconds(ours.get(state)) for state in STATES]
        row.append(_percent(max(ours.get(f"{state}_spread") or 0 for state in STATES)) if "warm" in ours else "")
        if "floor" in entry:
            row += [f"{entry['bytes'] / 1e6:.2f}", f"{entry['operations'] / 1e9:.2f}", _microseconds(entry["floor"])]
        else:
            row += [""] * 3
        row += [_percent(of_floor.get(state)) for state in STATES]
        row += [_peer_cell(entry["peers"].get(label, {})) for label in labels]
        rows.append(row)
        for label, found in [("ours", ours), *entry["peers"].items()]:
            if why := reason(found):
                missing.setdefault((label, why), []).append(entry["case"])
        if "running" in entry:
            missing.setdefault((entry["running"], "cut while it ran"), []).append(entry["case"])
    begun = {entry["case"] for entry in entries}
    left_out = [case for case in data["planned"] if case not in begun]
    versions = f"torch {where['torch']}, triton {where['triton']}, Python {where['python']}"
    note = [f"**{DRY_RUN}**", ""] if where["dry_run"] else []
    return [
        f"## {operator}",
        "",
        *note,
        f"`{where['command']}`, {where['device']}, {where['date']}; {versions}. {header(data).splitlines()[1]}.",
        "",
        *table(columns, rows),
        f"![{operator}]({operator}.png)",
        "",
        *(f"- {label}: {why} ({_cases(cases, len(entries))})" for (label, why), cases in missing.items()),
        *([f"- left out, out of time: {len(left_out)} of {len(data['planned'])} cases"] if left_out else []),
        *([f"- {line}" for line in beside_base(entries)]),
        "",
    ]


def beside_base(entries: list[dict]) -> list[str]:
    """Of steps beside a base model, what they add to its step."""
    lines = []
    for entry in entries:
        both, base, step = (found or {} for found in _base_and_step(entry))
        for state in STATES:
            if all(found.get(state) for found in (both, base, step)):
                lines.append(
                    f"{entry['case']}: base alone {base[state] * 1e6:.0f} us, with the step {both[state] * 1e6:.0f} us "
                    f"({both[state] / base[state] - 1:+.1%}); the step alone is {step[state] / base[state]:.1%} of the "
                    f"base ({state})"
                )
    return lines


def _base_and_step(entry: dict) -> tuple[dict | None, dict | None, dict | None]:
    return entry.get("ours"), entry["peers"].get("(base alone)"), entry["peers"].get("(step alone)")


def _cases(cases: list[str], total: int) -> str:
    return cases[0] if len(cases) == 1 else f"{len(cases)} of {total} cases, first {cases[0]}"


def _peer_cell(found: dict) -> str:
    if "warm" not in found:
        return reason(found).partition(":")[0]
    ratios = [f"{found[key]:.2f}" for key in ("ratio_cold", "ratio_warm") if key in found]
    return " / ".join(ratios) + (" e" if found["mode"] == "eager" else "")


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


# --- the short table ---


def short_table(suite: dict, results: dict[str, dict]) -> list[str]:
    """At most about 60 lines: each operator's first case, tests, other steps, and what is absent."""
    where = suite["environment"]
    lines = [f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"]
    lines += [DRY_RUN] if where["dry_run"] else []
    lines += [f"cut short by {suite['cut']}"] if suite.get("cut") else []
    lines.append(
        f"{'operator':<22}{'warm us':>10}{'cold us':>10}{'of floor':>9}  {'fastest peer: ratio':<30}{'cases':>7}"
    )
    absent: dict[str, str] = {}
    for operator, data in results.items():
        entries = data["results"]
        first = entries[0] if entries else {"peers": {}}
        ours, rival = first.get("ours", {}), best_rival(first)
        failed = sum("failed" in entry.get("ours", {}) for entry in entries)
        measured = sum("warm" in entry.get("ours", {}) for entry in entries)
        lines.append(
            f"{operator:<22}{_microseconds(ours.get('warm')):>10}{_microseconds(ours.get('cold')):>10}"
            f"{_percent(share(first)):>9}  {f'{rival[0]}: {rival[1]:.2f}' if rival else 'none':<30}"
            f"{measured:>3}/{len(data['planned']):<3}{f' {failed} FAILED' if failed else ''}"
        )
        lines += [
            f"  FAILED {e['case']}: {e['ours']['failed'][:80]}" for e in entries if "failed" in e.get("ours", {})
        ][:2]
        lines += [f"  {line[:150]}" for line in beside_base(entries)[:2]]
        for entry in entries:
            absent |= {label: why for label, found in entry["peers"].items() if (why := reason(found))}
    if suite.get("tests"):
        modules = suite["tests"]["modules"].values()
        counts = (f"{sum(m[key] for m in modules)} {key}" for key in ("passed", "failed", "skipped", "not run"))
        lines.append(f"tests: {', '.join(counts)}")
        lines += [f"  FAILED {test[:140]}" for test in list(suite["tests"]["failures"])[:6]]
    steps = {name: step["outcome"] for name, step in suite["steps"].items() if name not in results}
    lines += [f"{name}: {outcome}" for name, outcome in steps.items() if name != "tests"]
    lines += [f"no {label}: {why[:110]}" for label, why in list(absent.items())[:12]]
    return lines


# --- plots ---


def swept_axes(entries: list[dict]) -> dict[str, list[dict]]:
    """Axis -> measured cases that differ from the first, the production point, in it alone; in the order of values."""
    measured = [entry for entry in entries if "warm" in entry.get("ours", {})]
    if not measured or measured[0] is not entries[0]:
        return {}
    production = entries[0]["shape"]
    axes = {}
    for axis, value in production.items():
        rest = {key: v for key, v in production.items() if key != axis}
        line = [e for e in measured if rest.items() <= e["shape"].items()]
        if len(line) > 1:
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            axes[axis] = sorted(line, key=lambda e, axis=axis: e["shape"][axis]) if numeric else line
    return axes


def plot(data: dict, path: Path) -> bool:
    """Share of the floor (upper row) and the peers' time / ours (lower row) over each swept axis; says if there is one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = swept_axes(data["results"])
    if not axes:
        return False
    figure, panels = pyplot.subplots(
        2, len(axes), figsize=(max(8, 4 * len(axes)), 7), squeeze=False, sharey="row", layout="constrained"
    )
    peers = list(dict.fromkeys(label for line in axes.values() for entry in line for label in entry["peers"]))
    for (upper, lower), (axis, line) in zip(panels.T, axes.items(), strict=True):
        values = [entry["shape"][axis] for entry in line]
        is_numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        x, style = (values, "o-") if is_numeric else ([str(value) for value in values], "o")
        for state in STATES:
            if any(state in entry["of_floor"] for entry in line):
                upper.plot(x, [entry["of_floor"].get(state, math.nan) for entry in line], style, label=state)
        for number, label in enumerate(peers):
            ratios = [ratio(entry["peers"].get(label, {})) or math.nan for entry in line]
            if not all(map(math.isnan, ratios)):
                lower.plot(x, ratios, style, label=label, color=f"C{number}")
        lower.axhline(1.0, color="black", linewidth=0.8)
        lower.set_yscale("log", base=2)
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set_xlabel(axis)
        if is_numeric and min(values) > 0:
            for panel in (upper, lower):
                panel.set_xscale("log", base=2)
                panel.set_xticks(values, [str(value) for value in values], rotation=45)
        upper.set_ylim(bottom=0)
    state = "cold" if "cold" in data["results"][0]["of_floor"] else "warm"
    panels[0, 0].set_ylabel("floor / time")
    panels[0, 0].legend(fontsize="small")
    panels[1, 0].set_ylabel(f"peer's time / ours, {state}")
    legend = {}
    for panel in panels[1]:
        legend |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize="small")
    where = data["environment"]
    title = f"{data['operator']}, {where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    figure.suptitle(f"{title}\n{DRY_RUN}" if where["dry_run"] else title, fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
