"""The README and ``docs/``: code blocks come from the examples, links resolve, and docstring examples run."""

import doctest
import importlib
import importlib.metadata
import pkgutil
import re
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


OPERATORS = sorted(f"ops.{module.name}" for module in pkgutil.iter_modules(ops.__path__) if module.name[0] != "_")


@pytest.mark.parametrize("module", ["guidance.params", "guidance.table", "paged_slots", *OPERATORS])
def test_docstring_examples_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"lenvm_kernels.{module}"))
    assert tried and not failed


def test_every_exported_name_exists():
    assert all(getattr(lenvm_kernels, name) for name in lenvm_kernels.__all__)
    assert importlib.metadata.version("lenvm-kernels") == lenvm_kernels.__version__
