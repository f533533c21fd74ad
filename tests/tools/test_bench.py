"""The benchmark harness and the GPU suite on a CPU: all cases run, and an error does not discard other results."""

import importlib
import inspect
import json
import sys

import pytest
import torch

from bench import gpu_suite, harness, step
from bench.harness import Benchmark, Eager, TimedCase
from bench.ops import operators

CEILINGS = {"bandwidth": 1e12, "matmul_rate": 1e15}
BENCHMARKS = {name: module.BENCHMARK for name, module in operators().items()} | {"step": step.BENCHMARK}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_cases_run(name):
    benchmark = BENCHMARKS[name]
    parameters = inspect.signature(benchmark.make_case).parameters.keys()
    assert all(shape.keys() | {"dtype"} == parameters | {"dtype"} for shape in benchmark.shapes())
    assert benchmark.operator == name and len(benchmark.shapes()) >= 5
    shapes = [dict(values=values, B=2, L=8, launch="python") for values in ("none", "probe 7B")]
    if name != "step":
        module, shapes = operators()[name], benchmark.shapes(quick=True)
        assert module.make_call(**module.FORMS[f"{name}, every size 1"]).func.__name__ == name
    for shape in shapes:
        case = benchmark.make_case(**shape)
        (case.run.run if isinstance(case.run, Eager) else case.run)()
        assert case.bytes > 0 and isinstance(case.run, Eager) == (name == "step")


def times(warm, **more):
    return lambda: {"warm": warm, "spread": 0.01, **more}


def fail():
    raise RuntimeError("no\n memory")


def test_results_of_cases_peers_and_errors(monkeypatch, tmp_path):
    """Three cases, one of which fails. A case's ``run`` returns its times."""
    monkeypatch.setattr(harness, "measure", lambda run, device: run())
    monkeypatch.setattr(harness, "measure_ceilings", lambda device: CEILINGS)

    def make_case(B):
        peers = {"slow": lambda: times(9.0, cold=40.0), "broken": fail}
        peers["nopeer"] = lambda: importlib.import_module("nopeer")
        return TimedCase(fail() if B == 2 else times(4.0 * B, cold=5.0 * B), 2_000_000, 10_000_000 * B, peers)

    path = tmp_path / "made_up.json"
    assert Benchmark("made_up", make_case, {"B": 1}).run("cpu", [{"B": B} for B in (1, 2, 4)], path) == 1
    found = json.loads(path.read_text())
    first, failed, last = found["cases"]
    assert failed == {"shape": {"B": 2}, "peers": {}, "error": "RuntimeError: no memory"}
    assert (first["floor"], last["floor"]) == (2.0, pytest.approx(2.0)) and first["peers"]["slow"]["cold"] == 40.0
    ratios = "slow 8.00, broken RuntimeError, nopeer absent"
    assert harness.row(first) == ["B 1", "4.0", "5.0", "1.0%", "2.0", "40%", ratios]
    assert harness.row(failed)[:2] == ["B 2", "RuntimeError: no memory"]
    assert found["bandwidth"] == 1e12 and found["torch"] == torch.__version__ and found["command"].startswith("python")


def test_suite_of_parts(monkeypatch, tmp_path):
    """One part succeeds, one fails and one runs out of time; the summary lists all three."""
    scripts = {"tests": "print('boom'); exit(3)", "profile": "import time; print('begun', flush=True); time.sleep(60)"}
    commands = {part: [sys.executable, "-c", script] for part, script in scripts.items()}
    commands["pack_drafts"] = gpu_suite.command("pack_drafts", tmp_path)
    monkeypatch.setattr(gpu_suite, "command", lambda part, out: commands[part])
    monkeypatch.setattr(gpu_suite, "SECONDS", {"tests": 60, "profile": 5, "pack_drafts": 120})
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(tmp_path)])
    assert gpu_suite.main() == 1
    text = (tmp_path / "summary.md").read_text()
    assert "| tests | failed with exit status 3 | boom |" in text and "| profile | ended after 5 s | begun |" in text
    assert "| pack_drafts | done | " in text and "| B 64 D 4 K 8 | " in text
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert parts["tests"]["log"] == ["boom"] and parts["profile"]["outcome"] == "ended after 5 s"
    shapes = [case["shape"] for case in parts["pack_drafts"]["cases"]]
    assert shapes == BENCHMARKS["pack_drafts"].shapes(quick=not torch.cuda.is_available())
