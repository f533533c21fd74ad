"""README and ``docs/``: code is from the examples, numbers are from result files, links resolve, docstrings run."""

import doctest
import importlib
import importlib.metadata
import json
import pkgutil
import re
import statistics
import textwrap
from pathlib import Path

import pytest

import lenvm_kernels
from lenvm_kernels import ops

ROOT = Path(__file__).parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [file.read_text().splitlines() for file in sorted((ROOT / "examples").glob("*.py"))]


def is_excerpt(paragraph, lines):
    """Whether the lines of a paragraph are consecutive lines of a file, at any indentation."""
    wanted, n = paragraph.splitlines(), len(paragraph.splitlines())
    return any(textwrap.dedent("\n".join(lines[i : i + n])).splitlines() == wanted for i in range(len(lines)))


def anchors(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page):
    """Python is from an example, which ``test_examples.py`` runs; links resolve; benchmarks are commands."""
    text = page.read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        assert any(all(is_excerpt(p, lines) for p in block.strip().split("\n\n")) for lines in EXAMPLES), block
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert link.startswith("https://") or (target.exists() and (not anchor or anchor in anchors(target))), link
    for name in re.findall(r"python -m (bench\.[\w.]*\w)", text):
        file = ROOT.joinpath(*name.split("."))
        command = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        assert 'if __name__ == "__main__":' in command.read_text(), name


def test_every_page_is_in_the_site():
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert pages == set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))


def half_up(x, digits=0):
    return f"{x + 1e-9:.{digits}f}"


def percent(x):
    return f"{half_up(100 * x)} %"


def tables(file):
    """Cells of the tables of a Markdown file without intervals, by the first two cells or by title and first cell."""
    title = None
    for line in (ROOT / "bench/results" / file).read_text().splitlines():
        title = line if line.startswith("Target") else title
        if line.startswith("| "):
            cells = [cell.split(" [")[0] for cell in line[2:-2].split(" | ")]
            yield (title, cells[0]) if title else tuple(cells[:2]), cells


def published():
    """Lines and phrases of pages, made from the result files that the pages name."""

    def read(file):
        return json.loads((ROOT / "bench/results" / file).read_text())

    results = read("nvidia-h200/real-model/qwen2.5-coder-1.5b-ranges.json")["results"]
    h200 = {(r["name"], r.get("target")): r for r in results}
    alone = dict(cells[:2] for _, cells in tables("nvidia-h200/real-model/README.md"))
    for target, share, phrase, said in [(227, 75, "final", 151), (151, 50, "brief, final", 100), (76, 25, "calc", 40)]:
        guided = h200[f"probe, landing, range; {phrase}, {said} said", target]
        cut = percent(h200[f"cut and forced at {target}", target]["right"])
        within = alone[f"{target} ({share} %)"].split(", ")[-2]
        yield (
            "README.md",
            f"| {target} tokens | {within}, {percent(h200[f'{phrase} said, {said}', None]['right'])} | "
            f"**{percent(guided['within 25 %'])}**, {percent(guided['right'])} | {cut} right |",
        )
    own = h200["alone", None]
    yield "README.md", f"own answers have {half_up(own['mean'])} tokens, and {percent(own['right'])} are right"
    chat, said = (
        [half_up(100 * h200[name, target]["within 25 %"]) for target in (40, 80, 160, 320)]
        for name in ("chat none, tolerance 0", "chat, 1 times the target said")
    )
    yield "README.md", f"{', '.join(chat[:3])} and {chat[3]} % of the answers"
    yield "README.md", f"the prompt alone {min(said)} to {max(said)} %"
    for values in ("probe", "none"):
        for setting, words in [("landing", "landing"), ("landing, range", "landing, tolerance 0.2")]:
            row = h200[f"{values}, {setting}; brief, final, 100 said", 151]
            label = f"| prompt, {values.replace('none', '`none`')}, {words} | {half_up(row['mean'])} |"
            yield "docs/modes-and-parameters.md", f"{label} {percent(row['within 25 %'])} | {percent(row['right'])} |"
    day = read("nvidia-h200/gpu-day/gpu_day.json")["parts"]["2"]["found"]
    none, probe = (half_up(day[f"{values}, B 64, graph"]["replay"]) for values in ("none", "trunk 7B"))
    yield "README.md", f"{none} us with `none`, {probe} us with a probe of a 7B base model"
    none, probe = (half_up(day[f"{values}, B 64, python"]["synced"] / 1000, 1) for values in ("none", "trunk 7B"))
    yield "README.md", f"{none} and {probe} ms ([GPU day]"
    runs = read("nvidia-h200/vllm/qwen2.5-coder-1.5b.json")["timings"]
    ms = {(run["mode"], run["requests"]): run["decode_ms"] for run in runs if run["alone_on_gpu"]}
    one, some, many = (half_up(ms["probe", n] / ms["plain", n], 2) for n in (1, 64, 256))
    yield "README.md", f"{one} times as long as without guidance at 1 request, {some} at 64 and {many} at 256"
    over = {key: float(cells[3]) for key, cells in tables("cpu/sources/sources.md") if key[0] in "58"}
    for source, label, digits in [("none", "`none`", 2), ("trunk", "probe", 2), ("value", "value model", 1)]:
        five, eight = over["5", source], over["8", source]
        yield "docs/measuring.md", f"| {label} | {half_up(five, 2)} | {half_up(eight, 2)} |"
        yield "README.md", f"| {half_up(min(five, eight), digits)} to {half_up(max(five, eight), digits)} |"
    for row in read("cpu/spans.json")["rows"]:
        lengths, ended = row["lengths"], half_up(100 * row["ended"] / len(row["lengths"]))
        text = f"{half_up(statistics.mean(lengths), 1)} | {statistics.median(lengths):.0f} | {max(lengths)} | {ended}%"
        yield "docs/modes-and-parameters.md", f"| {row['setting']} | {text} | {half_up(row['perplexity'], 2)} |"
    for row in read("cpu/strides.json")["rows"]:
        if row["setting"] == "target" and row["end_rule"]:
            length, distance = (half_up(row[name], 1) for name in ("mean_length", "length_deviation"))
            text = f"| {row['stride']} | {length} | {distance} | {half_up(row['perplexity'], 2)} |"
            yield "docs/modes-and-parameters.md", text
    for row in read("cpu/peers.json")["rows"]:
        numbers = [half_up(row[name], 1) for name in ("mean_length", "distance")]
        numbers += [percent(row["within_10"]), percent(row["cut"]), half_up(row["perplexity"], 2)]
        numbers = [half_up(row["tokens_per_second"], 1), half_up(row["over_plain"], 2), *numbers]
        yield "docs/evaluating.md", f"| {' | '.join(numbers)} |"
    near = dict(tables("cpu/evaluate-near/table.md"))
    for title in dict.fromkeys(title for title, _ in near):
        for setting, label in [("constant", "no values"), ("guided", "probe")]:
            c = near[title, setting]
            yield "docs/evaluating.md", f"| | {label} | {c[4]} % | {c[5]} % | {c[3]} | {c[13]} % | {c[11]} |"
    strengths = dict(tables("cpu/evaluate-strengths/table.md")).items()
    for c in (cells for (_, setting), cells in strengths if setting.startswith(("guided", "constant"))):
        yield "docs/modes-and-parameters.md", f" | {c[3]} | {c[5]}% | {c[11]} |"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/evaluating.md", "docs/measuring.md", "docs/modes-and-parameters.md"]
)
def test_numbers_are_from_the_result_files(page):
    text = " ".join((ROOT / page).read_text().split())
    lines = [line for target, line in published() if target == page]
    assert len(lines) > 2 and not [line for line in lines if line not in text]


def test_workflow_runs_the_parts_of_ci():
    parts = set(re.findall(r"make ([a-z][\w-]*)", (ROOT / ".ci/run").read_text()))
    (listed,) = re.findall(r"part: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert set(listed.split(", ")) == parts and len(parts) > 5


OPERATORS = sorted(f"ops.{module.name}" for module in pkgutil.iter_modules(ops.__path__) if module.name[0] != "_")


@pytest.mark.parametrize("module", ["guidance.params", "guidance.table", "paged_slots", *OPERATORS])
def test_docstring_examples_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"lenvm_kernels.{module}"))
    assert tried and not failed


def test_every_exported_name_exists():
    assert all(getattr(lenvm_kernels, name) for name in lenvm_kernels.__all__)
    assert importlib.metadata.version("lenvm-kernels") == lenvm_kernels.__version__
