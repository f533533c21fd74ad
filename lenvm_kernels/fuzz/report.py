"""What a run found: as text, JSON and JUnit's XML."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import torch
import triton

from lenvm_kernels import __version__
from lenvm_kernels.fuzz.run import Found, Result


def text(result: Result) -> Iterator[str]:
    """Lines: coverage by class of input, the operators' cases and rows, the failures."""
    for operator in result.plan.ops:
        name, tally = operator.name, result.tallies[operator.name]
        if not tally.cases:
            continue
        yield f"{name}: cases by option, rows by class"
        for option, values in operator.options.items():
            counts = (f"{value}: {tally.options[option][str(value)]}" for value in values)
            yield f"  {option:18} {'  '.join(counts)}"
        yield f"  {'rows that are':18} {'  '.join(f'{name}: {rows}' for name, rows in tally.classes.items())}"
        yield ""
    yield f"{'operator':22} {'cases':>7} {'rows':>9} {'cases/s':>8} {'rows/s':>9} {'failures':>8}"
    for name, tally in result.tallies.items():
        rates = f"{_rate(tally.cases, tally.seconds)} {_rate(tally.rows, tally.seconds):>9}"
        yield f"{name:22} {tally.cases:>7} {tally.rows:>9} {rates:>18} {len(tally.found):>8}"
    cases, rows = (sum(getattr(tally, n) for tally in result.tallies.values()) for n in ("cases", "rows"))
    yield (
        f"{cases} cases ({result.replayed} from the corpus), {rows} rows in {result.seconds:.1f} s on "
        f"{result.plan.device}, seed {result.plan.seed}" + (", interrupted" if result.interrupted else "")
    )
    for found in failures(result):
        failure = found.failure
        yield ""
        yield f"FAILED {failure.case.op}: {failure.problem}"
        yield f"  {failure.details}"
        yield f"  {_history(found)}"
        yield f"  {json.dumps(failure.case.to_json())}"
    if result.device_lost:
        yield f"The device was lost, and the run with it: {result.device_lost}"


def _rate(number: int, seconds: float) -> str:
    return f"{number / seconds:.1f}" if seconds else "-"


def _history(found: Found) -> str:
    times = f"met {found.times} time{'s' if found.times > 1 else ''}"
    if found.replayed:
        return f"from the corpus; {times}"
    return f"{len(found.failure.case.rows)} of {found.rows_before} rows are enough; {times}"


def failures(result: Result) -> list[Found]:
    return [found for tally in result.tallies.values() for found in tally.found.values()]


def as_json(result: Result) -> dict[str, Any]:
    """Everything, for a program to read."""
    return {
        "ok": not result.failed,
        "lenvm_kernels": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name() if result.plan.device == "cuda" else platform.processor() or "cpu",
        "seed": result.plan.seed,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "replayed": result.replayed,
        "operators": {
            name: {
                "cases": tally.cases,
                "rows": tally.rows,
                "seconds": tally.seconds,
                "cases_by_option": {option: dict(values) for option, values in tally.options.items()},
                "rows_by_class": dict(tally.classes),
            }
            for name, tally in result.tallies.items()
        },
        "failures": [
            {
                "case": found.failure.case.to_json(),
                "problem": found.failure.problem,
                "details": found.failure.details,
                "rows_before": found.rows_before,
                "from_corpus": found.replayed,
                "times": found.times,
            }
            for found in failures(result)
        ],
    }


def as_junit(result: Result) -> str:
    """A test case for each operator, and one for each way in which it failed."""
    suite = ElementTree.Element("testsuite", name="lenvm fuzz", time=f"{result.seconds:.3f}")
    for name, tally in result.tallies.items():
        properties = {"classname": "lenvm.fuzz", "time": f"{tally.seconds:.3f}"}
        if not tally.found:
            ElementTree.SubElement(suite, "testcase", {"name": name} | properties)
        for problem, found in tally.found.items():
            test = ElementTree.SubElement(suite, "testcase", {"name": f"{name}: {problem}"} | properties)
            ElementTree.SubElement(test, "failure", message=problem).text = str(found.failure)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(failures(result))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
