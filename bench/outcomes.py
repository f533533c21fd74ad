"""A pytest plugin that writes each test's outcome when it is known: ``pytest -p bench.outcomes --outcomes FILE``.

A run that is cut short leaves what it has: a JSON line for all tests there are, then one for each that ran. A worker of
pytest-xdist whose test broke the GPU (a memory fault makes every later call fail) ends, so that a fresh one goes on.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch


@dataclass
class Counts:
    """Of the tests of a module."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: int = 0
    seconds: float = 0.0


@dataclass
class Outcomes:
    """Counts by module, and messages of failures by test."""

    modules: dict[str, Counts] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def total(self) -> Counts:
        """Of all modules."""
        return Counts(*map(sum, zip(*(vars(counts).values() for counts in self.modules.values()), strict=True)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="file of JSON lines to write")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker())
    else:
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:  # else this process leaves the tests to workers, and needs no GPU
        # Not at the top: this imports Triton, for which tests/conftest.py first decides whether it interprets.
        from bench.harness.measuring import limit_memory

        limit_memory()


class _Outcomes:
    """Of the process that has all reports: the one that pytest was started in."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")
        self.collected = False

    def write(self, **line: object) -> None:
        print(json.dumps(line), file=self.file, flush=True)

    def collect(self, tests: list[str]) -> None:
        if not self.collected:
            self.collected = True
            self.write(collected=tests)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with pytest-xdist the workers collect
            self.collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self.collect(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, message=last_line(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has a report for set-up, call and tear-down; the call's counts, and what went wrong in the others.
        if report.when == "call" or not report.passed:
            self.write(
                test=report.nodeid,
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                message=last_line(report.longrepr) if report.failed else "",
            )


class _Worker:
    @pytest.hookimpl(trylast=True)  # after the report was sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                time.sleep(0.5)  # the sending is another thread's
                os._exit(1)


def last_line(longrepr: object) -> str:
    """Of a failure, where it was and what was raised."""
    return (str(longrepr).strip().splitlines() or [""])[-1][:300]


def summarize(path: Path) -> Outcomes:
    """What such a file says, up to where it ends."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # the last may be cut
    tests = {test: ("not_run", 0.0) for line in lines for test in line.get("collected", ())}
    found = Outcomes()
    for line in lines:
        if "test" in line and tests.get(line["test"], ("",))[0] != "failed":
            tests[line["test"]] = line["outcome"], line["seconds"]
            if line["outcome"] == "failed":
                found.failures[line["test"]] = line["message"]
    for test, (outcome, seconds) in tests.items():
        counts = found.modules.setdefault(Path(test.split("::")[0]).stem, Counts())
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        counts.seconds += seconds
    return found
