"""Lines, tables and plots of what was measured. Nothing is typed by hand."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.harness.storing import STATES, CaseResult, Measurement, Results, SuiteResults

DRY_RUN = "DRY RUN on a CPU with tiny shapes: the times mean nothing."


def best_rival(entry: CaseResult) -> tuple[str, float] | None:
    """(label, its time / ours) of the fastest peer, cold where that was measured; None if none was measured.

    What is in parentheses computes a part only, to be put into relation.
    """
    ratios = {label: entry.ratio(label) for label in entry.peers if not label.startswith("(")}
    return min(((label, r) for label, r in ratios.items() if r), key=lambda pair: pair[1], default=None)


# --- lines of a benchmark that runs ---

COLUMNS = f"{'':<62}{'warm us':>10}{'cold us':>10}{'spread':>8}{'floor us':>10}{'of floor':>10}{'ratio':>8}"


def header(results: Results) -> str:
    """Two lines: where the results come from, and the ceilings."""
    where, ceilings = results.environment, results.ceilings
    note = " (DRY RUN: the times mean nothing)" if where["dry_run"] else ""
    first = f"{results.operator} on {where['device']} ({where['backend']}), {where['date']}{note}"
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in ceilings.matmul_rate.items())
    line = f"copy {ceilings.copy_bandwidth / 1e9:.0f} GB/s, matmul {rates} Tops/s"
    if ceilings.launch_warm:
        line += f", an empty kernel {ceilings.launch_warm * 1e6:.1f} us warm, {ceilings.launch_cold * 1e6:.1f} cold"
    return f"{first}\n{line}"


def line(entry: CaseResult, label: str | None) -> str:
    """A measurement of a case: of ours, or of the peer ``label``."""
    name, found = (entry.case, entry.ours) if label is None else (f"  {label}", entry.peers[label])
    if (times := found.times) is None:
        return f"{name:<62} {found.missing}"
    text = f"{name:<62}{_microseconds(times.warm):>10}{_microseconds(times.cold) or '-':>10}{times.spread:>8.1%}"
    if label is None:
        text += f"{_microseconds(entry.floor):>10}{entry.of_floor():>10.1%}"
    elif ratio := entry.ratio(label):
        text += f"{ratio:>28.2f}"
    return text + " (eager)" * (times.mode == "eager")


# --- Markdown ---


def summary(suite: SuiteResults, results: dict[str, Results]) -> str:
    """The whole run as Markdown."""
    where = suite.environment
    lines = [f"# {where['device']}", ""]
    lines += [f"**{DRY_RUN}**", ""] if where["dry_run"] else []
    lines += [f"**Cut short by {suite.cut}.**", ""] if suite.cut else []
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
        "## Steps",
        "",
        *table(
            ["step", "outcome", "s", "log"],
            [[name, step.outcome, f"{step.seconds:.0f}", step.log] for name, step in suite.steps.items()],
        ),
    ]
    if suite.tests:
        lines += ["## Tests", ""]
        lines += table(
            ["module", "passed", "failed", "skipped", "not run", "s"],
            [
                [name, m.passed, m.failed, m.skipped, m.not_run, f"{m.seconds:.0f}"]
                for name, m in suite.tests.modules.items()
            ],
        )
        if suite.tests.failures:
            lines += [*(f"- `{test}`: {message}" for test, message in suite.tests.failures.items()), ""]
    for of_operator in results.values():
        lines += operator_section(of_operator)
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table and an empty line."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
        "",
    ]


def text_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """:func:`table` as text; None is an empty cell, and floats get four significant digits."""

    def cell(value: object) -> object:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value

    return "\n".join(table(columns, ([cell(value) for value in row] for row in rows))[:-1])


def operator_section(results: Results) -> list[str]:
    """Where it comes from, the table of all cases, and why what is missing is missing."""
    entries, where = results.cases, results.environment
    axes = list(entries[0].shape) if entries else []
    labels = list(dict.fromkeys(label for entry in entries for label in entry.peers))
    columns = [*axes, "warm", "cold", "spread", "MB", "Gops", "floor", "of floor, warm", "cold", *labels]
    rows, missing = [], {}
    for entry in entries:
        times, row = entry.times, [entry.shape[axis] for axis in axes]
        row += [_microseconds(times.warm), _microseconds(times.cold), _percent(times.spread)] if times else [""] * 3
        if entry.floor is None:
            row += [""] * 3
        else:
            row += [f"{entry.bytes / 1e6:.2f}", f"{entry.operations / 1e9:.2f}", _microseconds(entry.floor)]
        row += [_percent(entry.of_floor(state)) for state in STATES]
        rows.append(row + [_peer_cell(entry, label) for label in labels])
        for label, found in {"ours": entry.ours or Measurement(), **entry.peers}.items():
            if found.missing:
                missing.setdefault((label, found.missing), []).append(entry.case)
        if entry.running:
            missing.setdefault((entry.running, "cut while it ran"), []).append(entry.case)
    left_out = len(results.planned) - len(entries)
    versions = f"torch {where['torch']}, triton {where['triton']}, Python {where['python']}"
    return [
        f"## {results.operator}",
        "",
        *([f"**{DRY_RUN}**", ""] if where["dry_run"] else []),
        f"`{where['command']}`, {where['device']}, {where['date']}; {versions}. {header(results).splitlines()[1]}.",
        "",
        *table(columns, rows),
        f"![{results.operator}]({results.operator}.png)",
        "",
        *(f"- {label}: {why} ({_cases(cases, len(entries))})" for (label, why), cases in missing.items()),
        *([f"- left out, out of time: {left_out} of {len(results.planned)} cases"] if left_out else []),
        *(f"- {line}" for line in beside_base(entries)),
        "",
    ]


def beside_base(entries: list[CaseResult]) -> list[str]:
    """Of steps beside a base model, what they add to its step."""
    lines = []
    for entry in entries:
        alone = [entry.peers.get(f"({whose} alone)") for whose in ("base", "step")]
        if entry.times is None or not all(found and found.times for found in alone):
            continue
        for state in STATES:
            both, base, step = (getattr(times, state) for times in (entry.times, *(found.times for found in alone)))
            if both and base and step:
                lines.append(
                    f"{entry.case}: base alone {base * 1e6:.0f} us, with the step {both * 1e6:.0f} us "
                    f"({both / base - 1:+.1%}); the step alone is {step / base:.1%} of the base ({state})"
                )
    return lines


def _cases(cases: list[str], total: int) -> str:
    return cases[0] if len(cases) == 1 else f"{len(cases)} of {total} cases, first {cases[0]}"


def _peer_cell(entry: CaseResult, label: str) -> str:
    found = entry.peers.get(label, Measurement())
    if found.times is None:
        return found.missing.partition(":")[0]
    ratios = [f"{ratio:.2f}" for state in STATES[::-1] if (ratio := entry.ratio(label, state))]
    return " / ".join(ratios) + " e" * (found.times.mode == "eager")


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


# --- the short table ---


def short_table(suite: SuiteResults, results: dict[str, Results]) -> list[str]:
    """At most about 60 lines: each operator's first case, tests, other steps, and what is absent."""
    where = suite.environment
    lines = [f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"]
    lines += [DRY_RUN] if where["dry_run"] else []
    lines += [f"cut short by {suite.cut}"] if suite.cut else []
    lines.append(
        f"{'operator':<22}{'warm us':>10}{'cold us':>10}{'of floor':>9}  {'fastest peer: ratio':<30}{'cases':>7}"
    )
    absent: dict[str, str] = {}
    for operator, found in results.items():
        first = found.cases[0] if found.cases else CaseResult("", {})
        warm, cold = (_microseconds(first.times and getattr(first.times, state)) for state in STATES)
        rival, failed = best_rival(first), found.failed
        lines.append(
            f"{operator:<22}{warm:>10}{cold:>10}{_percent(first.of_floor()):>9}  "
            f"{f'{rival[0]}: {rival[1]:.2f}' if rival else 'none':<30}"
            f"{found.measured:>3}/{len(found.planned):<3}{f' {len(failed)} FAILED' if failed else ''}"
        )
        lines += [f"  FAILED {e.case}: {e.ours.missing.removeprefix('failed: ')[:80]}" for e in failed[:2]]
        lines += [f"  {line[:150]}" for line in beside_base(found.cases)[:2]]
        for entry in found.cases:
            absent |= {label: peer.missing for label, peer in entry.peers.items() if peer.missing}
    if suite.tests:
        total = suite.tests.total()
        lines.append(
            f"tests: {total.passed} passed, {total.failed} failed, {total.skipped} skipped, {total.not_run} not run"
        )
        lines += [f"  FAILED {test[:140]}" for test in list(suite.tests.failures)[:6]]
    steps = {name: step.outcome for name, step in suite.steps.items() if name not in results}
    lines += [f"{name}: {outcome}" for name, outcome in steps.items() if name != "tests"]
    lines += [f"no {label}: {why[:110]}" for label, why in list(absent.items())[:12]]
    return lines


# --- plots ---


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def swept_axes(entries: list[CaseResult]) -> dict[str, list[CaseResult]]:
    """Axis -> measured cases that differ from the first, the production point, in it alone; in the order of values."""
    measured = [entry for entry in entries if entry.times]
    if not measured or measured[0] is not entries[0]:
        return {}
    production = entries[0].shape
    axes = {}
    for axis, value in production.items():
        rest = {key: v for key, v in production.items() if key != axis}
        line = [entry for entry in measured if rest.items() <= entry.shape.items()]
        if len(line) > 1:
            axes[axis] = sorted(line, key=lambda e, axis=axis: e.shape[axis]) if _is_number(value) else line
    return axes


def plot(results: Results, path: Path) -> bool:
    """Share of the floor (upper row) and the peers' time / ours (lower row) over each swept axis; says if there is one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = swept_axes(results.cases)
    if not axes:
        return False
    figure, panels = pyplot.subplots(
        2, len(axes), figsize=(max(8, 4 * len(axes)), 7), squeeze=False, sharey="row", layout="constrained"
    )
    peers = list(dict.fromkeys(label for line in axes.values() for entry in line for label in entry.peers))
    for (upper, lower), (axis, line) in zip(panels.T, axes.items(), strict=True):
        values = [entry.shape[axis] for entry in line]
        is_numeric = all(map(_is_number, values))
        x, style = (values, "o-") if is_numeric else ([str(value) for value in values], "o")
        for state in STATES:
            shares = [entry.of_floor(state) or math.nan for entry in line]
            if not all(map(math.isnan, shares)):
                upper.plot(x, shares, style, label=state)
        for number, label in enumerate(peers):
            ratios = [entry.ratio(label) or math.nan for entry in line]
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
    state = "cold" if results.cases[0].of_floor("cold") else "warm"
    panels[0, 0].set_ylabel("floor / time")
    panels[0, 0].legend(fontsize="small")
    panels[1, 0].set_ylabel(f"peer's time / ours, {state}")
    legend = {}
    for panel in panels[1]:
        legend |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize="small")
    where = results.environment
    title = f"{results.operator}, {where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    figure.suptitle(f"{title}\n{DRY_RUN}" if where["dry_run"] else title, fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
