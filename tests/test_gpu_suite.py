"""The GPU suite and what the benchmarks share, as far as a CPU can tell: what goes wrong loses no other results."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import _common, _every_kernel, _measure, _memory, _outcomes, _report, gpu_suite
from bench._common import Case, grid, relative_error, run_cases
from bench._measure import Ceilings, NotCapturableError, Times, Uncaptured, median_and_spread
from bench._outcomes import summarize
from bench.baselines import Absent, flashinfer

ROOT = Path(__file__).parent.parent
CEILINGS = Ceilings(1e12, {"float32": 5e13, "bfloat16": 1e15}, 2e-6, 4e-6, 50 * 2**20, 8e12, 2e12)


def arguments(path=None, **changed):
    given = dict(device="cpu", dtype="bfloat16", quick=True, json=path, seconds=math.inf, resume=False)
    given |= dict(warm_up=False, dry_run=True)
    return argparse.Namespace(**given | changed)


@pytest.fixture
def times(monkeypatch):
    """Replaces the clock: a run that returns (warm, cold) takes so long."""
    monkeypatch.setattr(_common, "measure_ceilings", lambda *args: CEILINGS)

    def measure(run, device, seconds):
        if not isinstance(run, Uncaptured) and isinstance(run(), str):
            raise NotCapturableError(run())
        warm, cold = (3.0, 4.0) if isinstance(run, Uncaptured) else run()
        return Times(warm, 0.01, cold, 0.02, "eager" if isinstance(run, Uncaptured) else "graph")

    monkeypatch.setattr(_common, "measure", measure)


def run(make_case, shapes, path, **changed):
    """Run cases into a file; (exit status, results)."""
    args, status = arguments(path, **changed), 0
    try:
        run_cases("made_up", shapes, shapes, make_case, args)
    except SystemExit as ending:
        status = ending.code
    return status, json.loads(path.read_text())


# --- cases ---


def test_a_grid_has_the_production_point_first_and_nothing_twice():
    assert grid({"B": 64, "V": 9}, {"B": [1, 64], "V": [5, 9]}, [{"B": 1, "V": 5}, {"V": 5}]) == [
        {"B": 64, "V": 9},
        {"B": 1, "V": 9},
        {"B": 64, "V": 5},
        {"B": 1, "V": 5},
    ]


def test_every_benchmark_makes_its_axes_in_one_order():
    """make_case unpacks a shape by position."""
    for name in gpu_suite.BENCHES:
        module = __import__(f"bench.bench_{name}", fromlist=["SHAPES"])
        orders = {tuple(axis for axis in shape if axis != "dtype") for shape in [*module.SHAPES, *module.QUICK]}
        assert len(orders) == 1, name
        assert all(list(shape)[-1] == "dtype" for shape in module.SHAPES if "dtype" in shape), name


def test_share_of_floor_and_ratios(times, tmp_path):
    def make_case(device, shape):
        # 2e9 bytes at 1e12 bytes/s are 2 ms; 4e12 operations at 1e15 a second are 4 ms.
        return Case(lambda: (5e-3, 8e-3), 2 * 10**9, 4 * 10**12, {"slower": lambda: lambda: (10e-3, 12e-3)})

    status, data = run(make_case, [{"B": 2}], tmp_path / "r.json")
    (entry,) = data["results"]
    assert status == 0 and data["finished"] and data["environment"]["dry_run"]
    assert entry["case"] == "B 2 dtype bfloat16" and entry["floor"] == pytest.approx(4e-3)
    assert entry["of_floor"] == pytest.approx({"warm": 0.8, "cold": 0.5})
    assert entry["peers"]["slower"]["ratio_warm"] == pytest.approx(2.0)
    assert entry["peers"]["slower"]["ratio_cold"] == pytest.approx(1.5)


def test_the_larger_of_the_two_floors(times, tmp_path):
    status, data = run(lambda *_: Case(lambda: (1.0, 1.0), 10**12, 10**12), [{"dtype": "float32"}], tmp_path / "r.json")
    assert status == 0 and data["results"][0]["floor"] == pytest.approx(1.0)


def test_what_fails_or_is_absent_loses_nothing_else(times, tmp_path):
    def absent():
        raise Absent("not installed")

    def broken():
        raise RuntimeError("no such kernel" + 1000 * "!")

    def make_case(device, shape):
        if shape["B"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        peers = {"absent": absent, "broken": broken, "fails later": lambda: broken, "fine": lambda: lambda: (2.0, 2.0)}
        return Case(lambda: (1.0, 1.0), 10, peers=peers)

    status, data = run(make_case, [{"B": 1}, {"B": 2}, {"B": 3}], tmp_path / "r.json")
    first, second, third = data["results"]
    assert status == 1 and "CUDA out of memory" in second["ours"]["failed"]
    for entry in (first, third):
        assert entry["ours"]["warm"] == 1.0 and entry["peers"]["fine"]["ratio_cold"] == 2.0
        assert entry["peers"]["absent"] == {"absent": "not installed"}
        assert entry["peers"]["broken"]["failed"].startswith("RuntimeError: no such kernel!")
        assert (
            len(entry["peers"]["broken"]["failed"]) == 300 and entry["peers"]["fails later"] == entry["peers"]["broken"]
        )
    text = "\n".join(_report.operator_section("made_up", data))
    assert "- absent: absent: not installed (2 of 3 cases, first B 1 dtype bfloat16)" in text
    assert "- ours: failed: OutOfMemoryError: CUDA out of memory (B 2 dtype bfloat16)" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ceilings_are_of_the_dtypes_of_the_shapes(times, monkeypatch, tmp_path, device):
    measured = []
    monkeypatch.setattr(_common, "gc", SimpleNamespace(freeze=lambda: None))
    monkeypatch.setattr(_common, "environment", lambda device: {"device": device, "date": ""})
    monkeypatch.setattr(_common, "measure_ceilings", lambda device, dtypes, _: measured.append(dtypes) or CEILINGS)
    shapes = [{"dtype": dtype} for dtype in ("bfloat16", "float32", "bfloat16")]
    _common.Results("made_up", shapes, None, arguments(device=device))
    assert measured == [["bfloat16", "float32"]]


@pytest.mark.parametrize("whose", ["ours", "peer"])
def test_a_wrong_result_is_no_result(whose, tmp_path):
    right = torch.randn(50)
    wrong = right + 0.1 * torch.randn(50)
    results = (wrong, right) if whose == "ours" else (right, wrong)

    def make_case(device, shape):
        return Case(lambda: results[0], 10, peers={"peer": lambda: lambda: results[1]}, expected=right.double)

    status, data = run(make_case, [{}], tmp_path / "r.json")
    (entry,) = data["results"]
    found = entry["ours"] if whose == "ours" else entry["peers"]["peer"]
    assert "wrong result: relative error" in found["failed"] and "warm" not in found
    assert status == (whose == "ours")
    if whose == "peer":
        assert entry["ours"]["error"] == 0.0


def test_relative_error():
    assert relative_error(torch.tensor([[3.0], [4.5]]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"shape \[3\], expected \[2\]"):
        relative_error(torch.zeros(3), torch.zeros(2))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            relative_error(torch.tensor([1.0, bad]), torch.ones(2))


@pytest.mark.parametrize(
    "seconds, measured, with_peers",
    [
        (-1.0, 0, []),
        (5.0, 1, ["slow"]),  # the peers of the first case before the others
        (12.5, 3, ["slow, later"]),
        (15.0, 4, ["slow, later", "slow"]),
        (99.0, 4, ["slow, later"] * 4),
    ],
)
def test_a_deadline_leaves_what_matters_most_and_a_valid_file(
    times, monkeypatch, tmp_path, seconds, measured, with_peers
):
    now = 0.0
    monkeypatch.setattr(_common, "time", SimpleNamespace(monotonic=lambda: now, strftime=time.strftime))

    def take(duration):
        nonlocal now
        now += duration
        return lambda: (2.0, 2.0)

    def make_case(device, shape):
        take(1.0)
        return Case(lambda: (1.0, 1.0), 10, peers={"slow": lambda: take(10.0), "later": lambda: take(0.0)})

    status, data = run(make_case, [{"B": b} for b in range(4)], tmp_path / "r.json", seconds=seconds)
    assert status == 0 and data["finished"] and len(data["planned"]) == 4
    assert [entry["ours"]["warm"] for entry in data["results"]] == [1.0] * measured
    peers = (", ".join(label for label, p in entry["peers"].items() if "warm" in p) for entry in data["results"])
    assert [labels for labels in peers if labels] == with_peers
    text = "\n".join(_report.operator_section("made_up", data))
    assert (f"left out, out of time: {4 - measured} of 4 cases" in text) == (measured < 4)


def test_a_case_that_ends_the_process_when_made_for_its_peers_keeps_its_time(times, tmp_path):
    def make_case(device, shape):
        return Case(lambda: (1.0, 1.0), 10, peers={"peer": lambda: lambda: (2.0, 2.0)})

    shapes, path = [{"B": b} for b in range(3)], tmp_path / "r.json"
    _, data = run(make_case, shapes, path)
    first, second, third = data["results"]
    for entry in (first, second):
        entry["running"] = "ours"
        entry["peers"].clear()
        del entry["peers_done"]
    del second["ours"]
    path.write_text(json.dumps(data))
    status, data = run(make_case, shapes, path, resume=True)
    assert data["results"][0]["ours"]["warm"] == 1.0 and data["results"][0]["peers"] == {}
    assert status == 1 and data["results"][1]["ours"]["fatal"] and data["results"][2] == third


def test_what_cannot_be_captured_is_timed_as_called(times, tmp_path):
    status, data = run(lambda *_: Case(lambda: "no capture", 10), [{"B": 1}], tmp_path / "r.json")
    assert status == 0 and data["results"][0]["ours"]["mode"] == "eager"
    assert data["uncaptured"] == ["B 1 dtype bfloat16"]


def test_a_warm_up_calls_ours_once_and_nothing_that_is_large(monkeypatch):
    called = []

    def make_case(device, shape):
        def peer():
            raise AssertionError("a peer was called")

        if shape["model"] == "broken":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Case(lambda: called.append(shape), 10, peers={"peer": peer})

    shapes = [{"model": "Qwen2.5-1.5B", "L": length, "base": "none"} for length in (512, 2048, 8192, 32_768)]
    shapes[1:1] = [{"model": "broken"}, {"model": "Qwen2.5-7B"}, shapes[0] | {"base": "Qwen2.5-7B"}]
    limited = []
    monkeypatch.setattr(_memory, "limit", lambda: limited.append(len(called)))
    run_cases("made_up", shapes, shapes, make_case, arguments(warm_up=True))
    assert [shape["L"] for shape in called] == [512, 2048] and limited == [0]


@pytest.mark.parametrize("share", [None, "0.025"])
def test_memory_of_a_process_is_limited_where_its_environment_says_so(monkeypatch, share):
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(_every_kernel, "kernels", dict)
    monkeypatch.setattr(_every_kernel, "run", lambda device: [])
    monkeypatch.delenv("BENCH_MEMORY_SHARE", raising=False)
    if share:
        monkeypatch.setenv("BENCH_MEMORY_SHARE", share)
    assert _every_kernel.main() == 0
    _outcomes.pytest_collection_finish(SimpleNamespace(items=[]))  # where pytest-xdist hands out the tests
    assert shares == ([0.025] if share else [])
    _outcomes.pytest_collection_finish(SimpleNamespace(items=["a test"]))
    assert shares == ([0.025] * 2 if share else [])


# --- measuring ---


def test_median_and_spread():
    assert median_and_spread([5.0, 1.0, 3.0, 2.0, 4.0, 100.0]) == (3.5, (5.0 - 2.0) / 3.5)


def test_a_warm_time_is_that_of_one_call_of_many(monkeypatch):
    def replay(run, calls):
        return calls, "graph"

    monkeypatch.setattr(_measure, "_replay", replay)
    monkeypatch.setattr(_measure, "_warm_samples", lambda calls, repeats: [calls * 1e-5] * repeats)
    monkeypatch.setattr(_measure, "_cold_samples", lambda calls, repeats, is_eager: [calls * 3e-5] * repeats)
    measured = _measure.measure(lambda: None, "cuda")
    assert (measured.warm, measured.cold, measured.mode) == (pytest.approx(1e-5), pytest.approx(3e-5), "graph")
    assert measured.warm_spread == pytest.approx(0.0)


class FakeDevice:
    """Stands for ``torch.cuda``: a clock that calls and flushes move, and captures that fail when they are told to."""

    def __init__(self):
        self.now, self.debug_mode, self.is_capturing, self.captured = 0.0, "default", False, 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = device.now

            def elapsed_time(self, end):
                return (end.time - self.time) * 1e3

        class Graph:
            def replay(self):
                device.now += device.captured

        self.Event, self.CUDAGraph = Event, Graph

    @contextmanager
    def graph(self, graph):
        self.is_capturing, self.captured = True, 0
        yield
        self.is_capturing = False

    def stream(self, stream):
        return nullcontext()

    def current_stream(self):
        return None

    def set_sync_debug_mode(self, mode):
        self.debug_mode = mode

    def synchronize(self):
        pass


@pytest.fixture
def fake_device(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(_measure, "torch", SimpleNamespace(cuda=device))

    def flush():
        device.now += 1000.0

    monkeypatch.setattr(_measure, "_flush", lambda: flush)
    return device


def test_samples_hold_the_call_and_not_the_flush(fake_device):
    calls = 0

    def run():
        nonlocal calls
        calls += 1
        fake_device.now += 7.0 if calls <= _measure.LEAD else 3.0  # the first waits for its launch

    assert _measure._warm_samples(run, 4) == pytest.approx([3.0] * 4)
    calls = 0
    assert _measure._cold_samples(run, 4) == pytest.approx([3.0] * 4) and fake_device.now > 6000


@pytest.mark.parametrize("is_eager", [False, True])
def test_cold_launches_count_where_they_do_in_use(fake_device, monkeypatch, is_eager):
    """The device is still at the flush when the host launches what comes next, unless it was waited for."""
    flush, is_busy, was_busy = _measure._flush(), False, []

    def busy_flush():
        nonlocal is_busy
        is_busy = True
        flush()

    def synchronize():
        nonlocal is_busy
        is_busy = False

    monkeypatch.setattr(_measure, "_flush", lambda: busy_flush)
    monkeypatch.setattr(fake_device, "synchronize", synchronize)
    _measure._cold_samples(lambda: was_busy.append(is_busy), 3, is_eager=is_eager)
    assert was_busy == [not is_eager] * (_measure.LEAD + 3)


def test_a_graph_replays_so_many_calls(fake_device):
    def run():
        fake_device.captured += 1

    replay, mode = _measure._replay(run, 5)
    replay()
    assert mode == "graph" and fake_device.now == 5 and fake_device.debug_mode == "default"


def test_what_waits_for_the_host_is_not_captured(fake_device):
    def run():
        assert not fake_device.is_capturing
        if fake_device.debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert _measure._replay(run, 5) == (run, "eager")
    called = Uncaptured(lambda: None)
    assert _measure._replay(called, 5) == (called, "eager") and fake_device.debug_mode == "default"


def test_a_capture_that_fails_is_told_from_a_run_that_fails(fake_device):
    def run():
        if fake_device.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotCapturableError, match="not permitted"):
        _measure._replay(run, 5)

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal") as error:
        _measure._replay(broken, 5)
    assert not isinstance(error.value, NotCapturableError)


def test_a_cpu_is_timed_by_the_wall():
    measured = _measure.measure(lambda: time.sleep(1e-3), "cpu", 0.01)
    assert measured.mode == "wall" and measured.cold is None and measured.warm >= 1e-3


# --- processes ---

DYING = """
import os, sys, time
from bench import _common
from bench._common import Case, parse_args, run_cases

_common.MEASUREMENT_LIMIT = 1.0
shapes = [{"B": 1}, {"B": 2}]

def make_case(device, shape):
    def dies():
        os._exit(7)
    def hangs():
        time.sleep(60)
    peers = {"fine": lambda: lambda: None, "dies": lambda: dies, "hangs": lambda: hangs, "last": lambda: lambda: None}
    return Case(lambda: None, 10, peers=peers)

run_cases("topk_candidates", shapes, shapes, make_case, parse_args(""))
"""


def test_a_benchmark_goes_on_after_what_ends_its_process(monkeypatch, tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(DYING))
    monkeypatch.setattr(gpu_suite, "python", lambda module, *arguments: [sys.executable, str(script), *arguments])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    suite = gpu_suite.Suite(tmp_path / "out", 120.0, dry_run=True)
    assert suite.bench("topk_candidates", 100.0) == "2 of 2 cases, begun again 2 times"
    assert not suite.failed
    first, second = json.loads((tmp_path / "out" / "topk_candidates.json").read_text())["results"]
    for entry in (first, second):
        assert all("warm" in found for found in (entry["ours"], entry["peers"]["fine"], entry["peers"]["last"]))
    for label in ("dies", "hangs"):
        assert first["peers"][label]["fatal"] and "the process ended" in first["peers"][label]["failed"]
        assert "B 1 dtype bfloat16" in second["peers"][label]["left out"]


def test_a_step_is_ended_at_its_limit_and_the_others_keep_theirs(tmp_path):
    suite = gpu_suite.Suite(tmp_path, 60.0, dry_run=True)
    jobs = [
        gpu_suite.Job("slow", ["sh", "-c", "trap '' TERM; echo $$; sleep 60 & wait"]),
        gpu_suite.Job("quick", ["sh", "-c", "echo $WORD; exit 3"], {"WORD": "said"}),
    ]
    assert suite.execute(jobs, 1.0) == {"slow": None, "quick": 3}
    assert not Path("/proc", (tmp_path / "slow.txt").read_text().splitlines()[-1]).exists()
    assert (tmp_path / "quick.txt").read_text().endswith("said\n")


@pytest.mark.parametrize("cores", [2, 16, 192])
def test_what_compiles_runs_beside_the_tests(monkeypatch, tmp_path, cores):
    """And all of it fits the memory of one GPU."""
    monkeypatch.setattr(gpu_suite.os, "cpu_count", lambda: cores)
    suite = gpu_suite.Suite(tmp_path, 540.0, dry_run=True)
    suite.dry_run, jobs = False, {}

    def execute(given, limit):
        jobs.update({job.name: job for job in given})
        return {"tests": 0}

    monkeypatch.setattr(suite, "execute", execute)
    suite.tests(100.0)
    assert suite.variables["FLASHINFER_COMPILE_SECONDS"] == "0"
    warm_ups = [f"warm-up-{name}" for name in (*gpu_suite.BENCHES, "sanitizer")]
    assert [*jobs] == ["tests", *warm_ups, *(f"flashinfer-{kernel}" for kernel in flashinfer.KERNELS)]
    for name in ("tests", *warm_ups):
        assert gpu_suite.ONE_THREAD.items() <= jobs[name].variables.items()
    workers = int(jobs["tests"].command[jobs["tests"].command.index("-n") + 1])
    assert workers == min(12, max(2, cores - 4))
    shares = {name: float(jobs[name].variables["BENCH_MEMORY_SHARE"]) for name in ("tests", *warm_ups)}
    gib = {name: 78 * share for name, share in shares.items()}  # of an H100
    left = 78 - sum(gib[name] for name in warm_ups) - 0.5 * (workers + len(jobs))  # with CUDA contexts
    assert gib["tests"] > 4.5 and left > 4 * 4 + 0.5 * workers
    assert jobs["warm-up-sanitizer"].command[-2:] == ["-m", "bench._every_kernel"]
    for kernel in flashinfer.KERNELS:
        job = jobs[f"flashinfer-{kernel}"]
        assert job.command[-2:] == ["bench.baselines.flashinfer", kernel]
        assert job.variables == {}


TESTS = """
import pytest
def test_passes(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_fails(x): assert x == 1
@pytest.mark.skip(reason="no")
def test_skipped(): pass
@pytest.fixture
def bad(): raise OSError("no set-up")
def test_without_set_up(bad): pass
"""


def test_outcomes_of_tests_and_of_a_run_cut_short(tmp_path):
    (tmp_path / "test_made_up.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "bench._outcomes"]
    command += ["--outcomes", "outcomes.jsonl", "--rootdir", ".", "test_made_up.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 1
    found = summarize(tmp_path / "outcomes.jsonl")
    counts = found["modules"]["test_made_up"]
    assert {key: counts[key] for key in counts if key != "seconds"} == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "not run": 0,
    }
    assert set(found["failures"]) == {"test_made_up.py::test_fails[2]", "test_made_up.py::test_without_set_up"}
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    counts = summarize(tmp_path / "cut.jsonl")["modules"]["test_made_up"]
    assert (counts["passed"], counts["not run"]) == (2, 3)
    assert summarize(tmp_path / "none.jsonl")["modules"] == {}


def test_the_first_failure_of_a_test_is_told(tmp_path):
    """The second is that of the worker, which ended because the first had broken its GPU."""
    lines = [{"collected": ["a.py::t"]}]
    lines += [{"test": "a.py::t", "outcome": "failed", "seconds": 1.0, "message": text} for text in ("wrong", "ended")]
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(tmp_path / "outcomes.jsonl")["failures"] == {"a.py::t": "wrong"}


# --- the report ---


def synthetic(operator="value_head"):
    """Results as a GPU would give them: two axes swept, a peer absent in one case, a base model beside a step."""
    shapes = grid({"model": "A", "M": 64, "dtype": "bfloat16"}, {"M": [1, 8], "model": ["B"]})
    entries = []
    for i, shape in enumerate(shapes):
        ours = {"warm": 1e-5, "warm_spread": 0.01, "cold": 2e-5, "cold_spread": 0.03, "mode": "graph"}
        peers = {
            "peer": ours | {"warm": 3e-5, "cold": 5e-5, "ratio_warm": 3.0, "ratio_cold": 2.5 + i},
            "faster": ours | {"ratio_warm": 1.0, "ratio_cold": 0.75, "mode": "eager"},
            "(base alone)": ours | {"warm": 8e-6, "cold": 1.6e-5, "ratio_warm": 0.8, "ratio_cold": 0.8},
            "(step alone)": ours | {"warm": 2e-6, "cold": 4e-6, "ratio_warm": 0.2, "ratio_cold": 0.2},
            "not here": {"absent": "no package"},
        }
        entries.append(
            {
                "case": _common.case_name(shape),
                "shape": shape,
                "peers": peers,
                "ours": ours,
                "bytes": 10**7,
                "operations": 10**9,
                "floor": 1e-5,
                "of_floor": {"warm": 1.0, "cold": 0.5},
            }
        )
    where = dict(command="python -m bench.x", device="NVIDIA H200", torch="2.11.0", triton="3.6.0", python="3.12.3")
    return {
        "operator": operator,
        "environment": where | {"date": "2026-11-21", "backend": "triton", "dry_run": False},
        "ceilings": vars(CEILINGS),
        "planned": [*(entry["case"] for entry in entries), "one more"],
        "results": entries,
        "finished": True,
    }


def test_tables_of_synthetic_results():
    data = synthetic()
    suite = {"environment": data["environment"], "steps": {"value_head": {"outcome": "4 of 5 cases", "seconds": 3.0}}}
    suite["steps"]["value_head"]["log"] = "value_head.txt"
    text = _report.summary(suite, {"value_head": data})
    assert "python -m bench.x" in text and "NVIDIA H200, 2026-11-21; torch 2.11.0, triton 3.6.0, Python 3.12.3" in text
    assert (
        "| A | 64 | bfloat16 | 10.0 | 20.0 | 3% | 10.00 | 1.00 | 10.0 | 100% | 50% | 2.50 / 3.00 | 0.75 / 1.00 e "
        "| 0.80 / 0.80 | 0.20 / 0.20 | absent |"
    ) in text
    assert "- left out, out of time: 1 of 5 cases" in text and "DRY RUN" not in text
    assert "base alone 16 us, with the step 20 us (+25.0%); the step alone is 25.0% of the base (cold)" in text
    short = _report.short_table(suite, {"value_head": data})
    (line,) = (line for line in short if line.startswith("value_head"))
    assert line.split() == ["value_head", "10.0", "20.0", "50%", "faster:", "0.75", "4/5"]
    assert "no not here: absent: no package" in short


def test_a_plot_has_the_axes_that_were_swept(tmp_path):
    data = synthetic()
    axes = _report.swept_axes(data["results"])
    assert {axis: [entry["shape"][axis] for entry in line] for axis, line in axes.items()} == {
        "model": ["A", "B"],
        "M": [1, 8, 64],
    }
    assert _report.plot(data, tmp_path / "plot.png") and (tmp_path / "plot.png").stat().st_size > 10_000
    del data["results"][1:]
    assert not _report.plot(data, tmp_path / "none.png")


# --- the whole ---


def suite_command(*options):
    return [sys.executable, "-m", "bench.gpu_suite", "--dry-run", *options]


def test_dry_run_end_to_end(tmp_path):
    """Tests, a benchmark whose GPU peers are absent, and every kernel in the interpreter."""
    steps = ("tests", "topk_candidates", "sanitizer")
    command = suite_command("--out", str(tmp_path), "--only", *steps)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = json.loads((tmp_path / "suite.json").read_text())
    assert list(suite["steps"]) == list(steps) and "every kernel ran" in suite["steps"]["sanitizer"]["outcome"]
    assert set(suite["tests"]["modules"]) == {"test_topk_candidates", "test_value_head"}
    data = json.loads((tmp_path / "topk_candidates.json").read_text())
    assert data["finished"] and data["environment"]["dry_run"] and data["environment"]["backend"] == "reference"
    for entry in data["results"]:
        assert "GPU" in entry["peers"]["FlashInfer top_k"]["absent"] and "warm" in entry["peers"]["torch.topk"]
    assert (tmp_path / "topk_candidates.png").exists()
    text = (tmp_path / "summary.md").read_text()
    where = data["environment"]
    for expected in (" -m bench.gpu_suite", "DRY RUN", *(where[key] for key in ("device", "torch", "date"))):
        assert expected in text
    assert "15 of 15 kernels launched" in (tmp_path / "sanitizer.txt").read_text()
    table = done.stdout.splitlines()[len(steps) :]
    assert len(table) <= 60 and any("DRY RUN" in line for line in table)


def test_sigterm_leaves_a_report(tmp_path):
    command = suite_command("--out", str(tmp_path), "--only", "ceilings", "step")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not (tmp_path / "step.txt").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "cut short by SIGTERM" in output
    assert "**Cut short by SIGTERM.**" in (tmp_path / "summary.md").read_text()
    suite = json.loads((tmp_path / "suite.json").read_text())
    assert suite["steps"]["ceilings"]["outcome"] == "done" and suite["steps"]["step"]["outcome"] == "cut"


@pytest.mark.parametrize(
    "options, message", [(["--dry-run"], "--dry-run needs --out"), (["--only", "nothing"], "invalid choice")]
)
def test_options_that_do_not_go_together(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *options])
    with pytest.raises(SystemExit, match="2"):
        gpu_suite.main()
    assert message in capsys.readouterr().err
