"""The GPU suite and the benchmarks' harness, as far as a CPU can tell: what goes wrong loses no other results."""

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
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import every_kernel, gpu_suite, outcomes
from bench.baselines import Absent, flashinfer
from bench.harness import cases, measuring, reporting
from bench.harness.cases import Benchmark, Case
from bench.harness.measuring import Ceilings, NotCapturableError, Times, Uncaptured, median_and_spread, relative_error
from bench.harness.storing import CaseResult, Measurement, Results, StepResult, SuiteResults, case_name, write_json
from bench.outcomes import Counts, summarize

ROOT = Path(__file__).parent.parent
CEILINGS = Ceilings(1e12, {"float32": 5e13, "bfloat16": 1e15}, 2e-6, 4e-6, 50 * 2**20, 8e12, 2e12)


def arguments(path=None, **changed):
    given = dict(device="cpu", dtype="bfloat16", quick=True, json=path, seconds=math.inf, resume=False)
    given |= dict(warm_up=False, dry_run=True)
    return argparse.Namespace(**given | changed)


@pytest.fixture
def times(monkeypatch):
    """Replaces the clock: a run that returns (warm, cold) takes so long."""
    monkeypatch.setattr(measuring, "measure_ceilings", lambda *args: CEILINGS)

    def measure(run, device, seconds):
        if not isinstance(run, Uncaptured) and isinstance(run(), str):
            raise NotCapturableError(run())
        warm, cold = (3.0, 4.0) if isinstance(run, Uncaptured) else run()
        return Times(warm, 0.01, cold, 0.02, "eager" if isinstance(run, Uncaptured) else "graph")

    monkeypatch.setattr(measuring, "measure", measure)


def made_up(make_case, shapes):
    """A benchmark of exactly these shapes; ``make_case`` takes the shape as one dictionary."""
    benchmark = Benchmark("made_up", lambda device, **shape: make_case(shape), {})
    benchmark.shapes = lambda quick: shapes
    return benchmark


def run(make_case, shapes, path, **changed):
    """Run cases into a file; (exit status, results)."""
    args, status = arguments(path, **changed), 0
    try:
        made_up(make_case, shapes).run(args)
    except SystemExit as ending:
        status = ending.code
    return status, Results.read(path)


# --- cases ---


def test_shapes_have_the_production_point_first_and_nothing_twice():
    axes, more, quick = {"B": [1, 64], "V": [5, 9]}, [{"B": 1, "V": 5}, {"V": 5}], ({"B": 2}, {"V": 7})
    benchmark = Benchmark("made_up", None, {"B": 64, "V": 9}, axes, more, quick)
    shapes = [{"B": 64, "V": 9}, {"B": 1, "V": 9}, {"B": 64, "V": 5}, {"B": 1, "V": 5}]
    assert benchmark.shapes() == shapes
    assert benchmark.shapes(quick=True) == [{"B": 2, "V": 9}, {"B": 2, "V": 7}]


@pytest.mark.parametrize("name", gpu_suite.BENCHES)
def test_every_benchmark_declares_its_shapes(name):
    """By the names that its cases take; what differs from production is an axis of it."""
    benchmark = import_module(gpu_suite.module(name)).BENCHMARK
    assert benchmark.operator == name
    axes = list(benchmark.production)
    for shape in (*benchmark.shapes(), *benchmark.shapes(quick=True)):
        assert list(shape) == axes
    assert set(benchmark.make_case.__annotations__) == {"device", *axes, "dtype", "return"}
    assert len(benchmark.shapes()) >= 8 and len(benchmark.shapes(quick=True)) == 2


@pytest.mark.parametrize("name", [name for name in gpu_suite.BENCHES if name != "step"])
def test_every_operators_case_runs(name):
    benchmark = import_module(gpu_suite.module(name)).BENCHMARK
    shape = {"dtype": "float32"} | benchmark.shapes(quick=True)[0]
    case = benchmark.make_case("cpu", **shape)
    case.run()
    if case.reference is not None:
        case.reference()
    assert case.bytes > 0


def test_the_reference_is_a_peer_and_compiled_at_the_production_point():
    case = Case(None, 1, peers={"peer": None}, reference="the reference")
    benchmark = Benchmark("made_up", None, {"B": 2, "V": 3})
    production, other = ({"B": B, "V": 3, "dtype": "float32"} for B in (2, 1))
    assert [*benchmark.peers(case)] == ["peer", "reference"] and benchmark.peers(case)["reference"]() == "the reference"
    assert [*benchmark.peers(replace(case, reference=None))] == ["peer"]
    assert benchmark.compiles(production, "cuda")
    assert not benchmark.compiles(production, "cpu") and not benchmark.compiles(other, "cuda")


@pytest.mark.parametrize("resume", [False, True])
def test_ours_come_first_and_what_is_compiled_last(times, monkeypatch, tmp_path, resume):
    order = []

    def call(label):
        return lambda: order.append(label) or (1.0, 1.0)

    def make_case(shape):
        reference = None if shape["B"] == 3 else call(f"reference {shape['B']}")
        peers = {"peer": lambda: call(f"peer {shape['B']}")}
        return Case(call(f"ours {shape['B']}"), 10, peers=peers, reference=reference)

    monkeypatch.setattr(cases.pytorch, "compiled", lambda reference: call("compiled"))
    monkeypatch.setattr(Benchmark, "compiles", lambda self, shape, device: shape["B"] != 2)
    shapes, path = [{"B": b} for b in (1, 2, 3)], tmp_path / "r.json"
    _, results = run(make_case, shapes, path)
    expected = ["ours 1", "ours 2", "ours 3", "peer 1", "reference 1", "peer 2", "reference 2", "peer 3", "compiled"]
    assert list(dict.fromkeys(order)) == expected
    assert "reference, compiled" in results.cases[0].peers
    if resume:
        order.clear()
        assert run(make_case, shapes, path, resume=True)[1].cases == results.cases and not order


def test_share_of_floor_and_ratios(times, tmp_path):
    def make_case(shape):
        # 2e9 bytes at 1e12 bytes/s are 2 ms; 4e12 operations at 1e15 a second are 4 ms.
        return Case(lambda: (5e-3, 8e-3), 2 * 10**9, 4 * 10**12, {"slower": lambda: lambda: (10e-3, 12e-3)})

    status, results = run(make_case, [{"B": 2}], tmp_path / "r.json")
    (entry,) = results.cases
    assert status == 0 and results.finished and results.environment["dry_run"]
    assert entry.case == "B 2 dtype bfloat16" and entry.floor == pytest.approx(4e-3)
    assert [entry.of_floor(*states) for states in (["warm"], ["cold"], [])] == pytest.approx([0.8, 0.5, 0.5])
    assert [entry.ratio("slower", *states) for states in (["warm"], ["cold"], [])] == pytest.approx([2.0, 1.5, 1.5])


def test_a_cpu_has_no_cold_shares_and_ratios():
    warm = Measurement(Times(2.0, 0.0, None, None, "wall"))
    entry = CaseResult("B 1", {}, warm, {"peer": Measurement(Times(3.0, 0.0, None, None, "wall"))}, floor=1.0)
    assert (entry.of_floor(), entry.of_floor("cold")) == (0.5, None)
    assert (entry.ratio("peer"), entry.ratio("peer", "cold"), entry.ratio("another")) == (1.5, None, None)
    assert reporting.line(entry, None).split() == ["B", "1", "2000000.0", "-", "0.0%", "1000000.0", "50.0%"]
    assert reporting.line(entry, "peer").split() == ["peer", "3000000.0", "-", "0.0%", "1.50"]


def test_the_larger_of_the_two_floors(times, tmp_path):
    case = Case(lambda: (1.0, 1.0), 10**12, 10**12)
    status, results = run(lambda _: case, [{"dtype": "float32"}], tmp_path / "r.json")
    assert status == 0 and results.cases[0].floor == pytest.approx(1.0)


def test_what_fails_or_is_absent_loses_nothing_else(times, tmp_path):
    def absent():
        raise Absent("not installed")

    def broken():
        raise RuntimeError("no such kernel" + 1000 * "!")

    def make_case(shape):
        if shape["B"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        peers = {"absent": absent, "broken": broken, "fails later": lambda: broken, "fine": lambda: lambda: (2.0, 2.0)}
        return Case(lambda: (1.0, 1.0), 10, peers=peers)

    status, results = run(make_case, [{"B": 1}, {"B": 2}, {"B": 3}], tmp_path / "r.json")
    first, second, third = results.cases
    assert status == 1 and "CUDA out of memory" in second.ours.missing and results.failed == [second]
    for entry in (first, third):
        assert entry.times.warm == 1.0 and entry.ratio("fine", "cold") == 2.0
        assert entry.peers["absent"].missing == "absent: not installed"
        assert entry.peers["broken"].missing.startswith("failed: RuntimeError: no such kernel!")
        assert len(entry.peers["broken"].missing) == len("failed: ") + 300
        assert entry.peers["fails later"] == entry.peers["broken"]
    text = "\n".join(reporting.operator_section(results))
    assert "- absent: absent: not installed (2 of 3 cases, first B 1 dtype bfloat16)" in text
    assert "- ours: failed: OutOfMemoryError: CUDA out of memory (B 2 dtype bfloat16)" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ceilings_are_of_the_dtypes_of_the_shapes(times, monkeypatch, device):
    measured = []
    monkeypatch.setattr(cases, "gc", SimpleNamespace(freeze=lambda: None))
    monkeypatch.setattr(cases, "environment", lambda device: {"device": device, "date": ""})
    monkeypatch.setattr(measuring, "measure_ceilings", lambda device, dtypes, _: measured.append(dtypes) or CEILINGS)
    shapes = [{"dtype": dtype} for dtype in ("bfloat16", "float32", "bfloat16")]
    cases.Runner(made_up(None, shapes), shapes, arguments(device=device))
    assert measured == [["bfloat16", "float32"]]


@pytest.mark.parametrize("whose", ["ours", "peer"])
def test_a_wrong_result_is_no_result(whose, tmp_path):
    right = torch.randn(50)
    wrong = right + 0.1 * torch.randn(50)
    found = (wrong, right) if whose == "ours" else (right, wrong)

    def make_case(shape):
        return Case(lambda: found[0], 10, peers={"peer": lambda: lambda: found[1]}, expected=right.double)

    status, results = run(make_case, [{}], tmp_path / "r.json")
    (entry,) = results.cases
    measured = entry.ours if whose == "ours" else entry.peers["peer"]
    assert "wrong result: relative error" in measured.missing and measured.times is None
    assert status == (whose == "ours")
    if whose == "peer":
        assert entry.ours.error == 0.0


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
        (2.5, 3, []),  # ours of all cases before any peer
        (5.0, 4, ["slow"]),
        (16.0, 4, ["slow, later", "slow"]),
        (99.0, 4, ["slow, later"] * 4),
    ],
)
def test_a_deadline_leaves_what_matters_most_and_a_valid_file(
    times, monkeypatch, tmp_path, seconds, measured, with_peers
):
    now = 0.0
    monkeypatch.setattr(cases, "time", SimpleNamespace(monotonic=lambda: now))

    def take(duration):
        nonlocal now
        now += duration
        return lambda: (2.0, 2.0)

    def make_case(shape):
        take(1.0)
        return Case(lambda: (1.0, 1.0), 10, peers={"slow": lambda: take(10.0), "later": lambda: take(0.0)})

    status, results = run(make_case, [{"B": b} for b in range(4)], tmp_path / "r.json", seconds=seconds)
    assert status == 0 and results.finished and len(results.planned) == 4
    assert [entry.times.warm for entry in results.cases] == [1.0] * measured and results.measured == measured
    peers = (", ".join(label for label, peer in entry.peers.items() if peer.times) for entry in results.cases)
    assert [labels for labels in peers if labels] == with_peers
    text = "\n".join(reporting.operator_section(results))
    assert (f"left out, out of time: {4 - measured} of 4 cases" in text) == (measured < 4)


def test_a_case_that_ends_the_process_when_made_for_its_peers_keeps_its_time(times, tmp_path):
    def make_case(shape):
        return Case(lambda: (1.0, 1.0), 10, peers={"peer": lambda: lambda: (2.0, 2.0)})

    shapes, path = [{"B": b} for b in range(3)], tmp_path / "r.json"
    _, results = run(make_case, shapes, path)
    first, second, third = results.cases
    for entry in (first, second):
        entry.running, entry.peers, entry.peers_done = "ours", {}, False
    second.ours = None
    write_json(path, results)
    status, again = run(make_case, shapes, path, resume=True)
    assert again.cases[0].times.warm == 1.0 and again.cases[0].peers == {}
    assert status == 1 and again.cases[1].ours.fatal and again.cases[2] == third


def test_what_cannot_be_captured_is_timed_as_called(times, tmp_path):
    status, results = run(lambda _: Case(lambda: "no capture", 10), [{"B": 1}], tmp_path / "r.json")
    assert status == 0 and results.cases[0].times.mode == "eager"
    assert results.uncaptured == ["B 1 dtype bfloat16"]


def test_a_warm_up_calls_ours_once_and_nothing_that_is_large(monkeypatch):
    called = []

    def make_case(shape):
        def peer():
            raise AssertionError("a peer was called")

        if shape["model"] == "broken":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Case(lambda: called.append(shape), 10, peers={"peer": peer})

    shapes = [{"model": "Qwen2.5-1.5B", "L": length, "base": "none"} for length in (512, 2048, 8192, 32_768)]
    shapes[1:1] = [{"model": "broken"}, {"model": "Qwen2.5-7B"}, shapes[0] | {"base": "Qwen2.5-7B"}]
    limited = []
    monkeypatch.setattr(measuring, "limit_memory", lambda: limited.append(len(called)))
    made_up(make_case, shapes).run(arguments(warm_up=True))
    assert [shape["L"] for shape in called] == [512, 2048] and limited == [0]


@pytest.mark.parametrize("share", [None, "0.025"])
def test_memory_of_a_process_is_limited_where_its_environment_says_so(monkeypatch, share):
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(every_kernel, "kernels", dict)
    monkeypatch.setattr(every_kernel, "run", lambda device: [])
    monkeypatch.delenv("BENCH_MEMORY_SHARE", raising=False)
    if share:
        monkeypatch.setenv("BENCH_MEMORY_SHARE", share)
    assert every_kernel.main() == 0
    outcomes.pytest_collection_finish(SimpleNamespace(items=[]))  # where pytest-xdist hands out the tests
    assert shares == ([0.025] if share else [])
    outcomes.pytest_collection_finish(SimpleNamespace(items=["a test"]))
    assert shares == ([0.025] * 2 if share else [])


# --- measuring ---


def test_median_and_spread():
    assert median_and_spread([5.0, 1.0, 3.0, 2.0, 4.0, 100.0]) == (3.5, (5.0 - 2.0) / 3.5)


def test_a_warm_time_is_that_of_one_call_of_many(monkeypatch):
    def replay(run, calls):
        return calls, "graph"

    monkeypatch.setattr(measuring, "_replay", replay)
    monkeypatch.setattr(measuring, "_warm_samples", lambda calls, repeats: [calls * 1e-5] * repeats)
    monkeypatch.setattr(measuring, "_cold_samples", lambda calls, repeats, is_eager: [calls * 3e-5] * repeats)
    measured = measuring.measure(lambda: None, "cuda")
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
    monkeypatch.setattr(measuring, "torch", SimpleNamespace(cuda=device))

    def flush():
        device.now += 1000.0

    monkeypatch.setattr(measuring, "_flush", lambda: flush)
    return device


def test_samples_hold_the_call_and_not_the_flush(fake_device):
    calls = 0

    def run():
        nonlocal calls
        calls += 1
        fake_device.now += 7.0 if calls <= measuring.LEAD else 3.0  # the first waits for its launch

    assert measuring._warm_samples(run, 4) == pytest.approx([3.0] * 4)
    calls = 0
    assert measuring._cold_samples(run, 4) == pytest.approx([3.0] * 4) and fake_device.now > 6000


@pytest.mark.parametrize("is_eager", [False, True])
def test_cold_launches_count_where_they_do_in_use(fake_device, monkeypatch, is_eager):
    """The device is still at the flush when the host launches what comes next, unless it was waited for."""
    flush, is_busy, was_busy = measuring._flush(), False, []

    def busy_flush():
        nonlocal is_busy
        is_busy = True
        flush()

    def synchronize():
        nonlocal is_busy
        is_busy = False

    monkeypatch.setattr(measuring, "_flush", lambda: busy_flush)
    monkeypatch.setattr(fake_device, "synchronize", synchronize)
    measuring._cold_samples(lambda: was_busy.append(is_busy), 3, is_eager=is_eager)
    assert was_busy == [not is_eager] * (measuring.LEAD + 3)


def test_a_graph_replays_so_many_calls(fake_device):
    def run():
        fake_device.captured += 1

    replay, mode = measuring._replay(run, 5)
    replay()
    assert mode == "graph" and fake_device.now == 5 and fake_device.debug_mode == "default"


def test_what_waits_for_the_host_is_not_captured(fake_device):
    def run():
        assert not fake_device.is_capturing
        if fake_device.debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert measuring._replay(run, 5) == (run, "eager")
    called = Uncaptured(lambda: None)
    assert measuring._replay(called, 5) == (called, "eager") and fake_device.debug_mode == "default"


def test_a_capture_that_fails_is_told_from_a_run_that_fails(fake_device):
    def run():
        if fake_device.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotCapturableError, match="not permitted"):
        measuring._replay(run, 5)

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal") as error:
        measuring._replay(broken, 5)
    assert not isinstance(error.value, NotCapturableError)


def test_a_cpu_is_timed_by_the_wall():
    measured = measuring.measure(lambda: time.sleep(1e-3), "cpu", 0.01)
    assert measured.mode == "wall" and measured.cold is None and measured.warm >= 1e-3


# --- processes ---

DYING = """
import os, sys, time
from bench.harness import cases
from bench.harness.cases import Benchmark, Case

cases.MEASUREMENT_LIMIT = 1.0

def make_case(device, **shape):
    def dies():
        os._exit(7)
    def hangs():
        time.sleep(60)
    peers = {"fine": lambda: lambda: None, "dies": lambda: dies, "hangs": lambda: hangs, "last": lambda: lambda: None}
    return Case(lambda: None, 10, peers=peers)

Benchmark("topk_candidates", make_case, {"B": 1}, quick=({}, {"B": 2})).main()
"""


def test_a_benchmark_goes_on_after_what_ends_its_process(monkeypatch, tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(DYING))
    monkeypatch.setattr(gpu_suite, "python", lambda module, *arguments: [sys.executable, str(script), *arguments])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    suite = gpu_suite.Suite(tmp_path / "out", 120.0, dry_run=True)
    assert suite.bench("topk_candidates", 100.0) == "2 of 2 cases, begun again 2 times"
    assert not suite.failed
    first, second = Results.read(tmp_path / "out" / "topk_candidates.json").cases
    for entry in (first, second):
        assert all(found.times for found in (entry.ours, entry.peers["fine"], entry.peers["last"]))
    for label in ("dies", "hangs"):
        assert first.peers[label].fatal and first.peers[label].missing.startswith("failed: the process ended")
        assert second.peers[label].missing == "left out: it ended the process in case B 1 dtype bfloat16"


def test_a_step_is_ended_at_its_limit_and_the_others_keep_theirs(tmp_path):
    suite = gpu_suite.Suite(tmp_path, 60.0, dry_run=True)
    jobs = [
        gpu_suite.Job("slow", ["sh", "-c", "trap '' TERM; echo $$; sleep 60 & wait"]),
        gpu_suite.Job("quick", ["sh", "-c", "echo $WORD; exit 3"], {"WORD": "said"}),
    ]
    assert suite.execute(jobs, 1.0) == {"slow": None, "quick": 3}
    assert not Path("/proc", (tmp_path / "slow.txt").read_text().splitlines()[-1]).exists()
    assert (tmp_path / "quick.txt").read_text().endswith("said\n")


def test_time_that_a_step_has_left_is_shared_by_all_that_follow(monkeypatch, tmp_path):
    suite, limits = gpu_suite.Suite(tmp_path, 540.0, dry_run=True), []
    monkeypatch.setattr(suite, "bench", lambda name, limit: str(limits.append(limit)))
    monkeypatch.setitem(gpu_suite.SECONDS, "catch_up", 3 * gpu_suite.SECONDS["pack_drafts"])
    suite.run(["limit_span", "catch_up", "pack_drafts"])  # as long as pack_drafts, and three times as long
    assert limits == pytest.approx([530 / 5, 530 * 3 / 4, 530], abs=10)


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
    assert jobs["warm-up-sanitizer"].command[-2:] == ["-m", "bench.every_kernel"]
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "bench.outcomes"]
    command += ["--outcomes", "outcomes.jsonl", "--rootdir", ".", "test_made_up.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 1
    found = summarize(tmp_path / "outcomes.jsonl")
    counts = found.modules["test_made_up"]
    assert replace(counts, seconds=0.0) == Counts(passed=2, failed=2, skipped=1, not_run=0)
    assert set(found.failures) == {"test_made_up.py::test_fails[2]", "test_made_up.py::test_without_set_up"}
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    expected = Counts(passed=2, not_run=3, seconds=pytest.approx(0, abs=5))
    assert summarize(tmp_path / "cut.jsonl").total() == expected
    none = summarize(tmp_path / "none.jsonl")
    assert none.modules == {} and none.total() == Counts()


def test_the_first_failure_of_a_test_is_told(tmp_path):
    """The second is that of the worker, which ended because the first had broken its GPU."""
    lines = [{"collected": ["a.py::t"]}]
    lines += [{"test": "a.py::t", "outcome": "failed", "seconds": 1.0, "message": text} for text in ("wrong", "ended")]
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(tmp_path / "outcomes.jsonl").failures == {"a.py::t": "wrong"}


# --- the report ---


def synthetic():
    """Results as a GPU would give them: two axes swept, a peer absent in one case, a base model beside a step."""
    shapes = Benchmark("value_head", None, {"model": "A", "M": 64, "dtype": "bfloat16"}, {"M": [1, 8], "model": ["B"]})

    def took(warm, cold, mode="graph"):
        return Measurement(Times(warm, 0.01, cold, 0.03, mode))

    entries = [
        CaseResult(
            case_name(shape),
            shape,
            ours=took(1e-5, 2e-5),
            peers={
                "peer": took(3e-5, 2e-5 * (2.5 + i)),
                "faster": took(1e-5, 1.5e-5, "eager"),
                "(base alone)": took(8e-6, 1.6e-5),
                "(step alone)": took(2e-6, 4e-6),
                "not here": Measurement(missing="absent: no package"),
            },
            bytes=10**7,
            operations=10**9,
            floor=1e-5,
        )
        for i, shape in enumerate(shapes.shapes())
    ]
    where = dict(command="python -m bench.x", device="NVIDIA H200", torch="2.11.0", triton="3.6.0", python="3.12.3")
    where |= {"date": "2026-11-21", "backend": "triton", "dry_run": False}
    planned = [*(entry.case for entry in entries), "one more"]
    return Results("value_head", where, CEILINGS, planned, entries, finished=True)


def test_results_are_read_as_they_were_written(tmp_path):
    write_json(tmp_path / "r.json", synthetic())
    write_json(tmp_path / "suite.json", SuiteResults({}))
    assert Results.read(tmp_path / "r.json") == synthetic()
    assert gpu_suite.read_folder(tmp_path) == {"value_head": synthetic()}


def test_tables_of_synthetic_results():
    results = synthetic()
    suite = SuiteResults(results.environment, {"value_head": StepResult("4 of 5 cases", 3.0, "value_head.txt")})
    text = reporting.summary(suite, {"value_head": results})
    assert "python -m bench.x" in text and "NVIDIA H200, 2026-11-21; torch 2.11.0, triton 3.6.0, Python 3.12.3" in text
    assert "| value_head | 4 of 5 cases | 3 | value_head.txt |" in text
    row = "| A | 64 | bfloat16 | 10.0 | 20.0 | 3% | 10.00 | 1.00 | 10.0 | 100% | 50% | 2.50 / 3.00 | 0.75 / 1.00 e "
    assert row + "| 0.80 / 0.80 | 0.20 / 0.20 | absent |" in text
    assert "- left out, out of time: 1 of 5 cases" in text and "DRY RUN" not in text
    assert "base alone 16 us, with the step 20 us (+25.0%); the step alone is 25.0% of the base (cold)" in text
    short = reporting.short_table(suite, {"value_head": results})
    (line,) = (line for line in short if line.startswith("value_head"))
    assert line.split() == ["value_head", "10.0", "20.0", "50%", "faster:", "0.75", "4/5"]
    assert "no not here: absent: no package" in short


def test_a_plot_has_the_axes_that_were_swept(tmp_path):
    results = synthetic()
    axes = reporting.swept_axes(results.cases)
    swept = {axis: [entry.shape[axis] for entry in line] for axis, line in axes.items()}
    assert swept == {"model": ["A", "B"], "M": [1, 8, 64]}
    assert reporting.plot(results, tmp_path / "plot.png") and (tmp_path / "plot.png").stat().st_size > 10_000
    del results.cases[1:]
    assert not reporting.plot(results, tmp_path / "none.png")


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
    results = Results.read(tmp_path / "topk_candidates.json")
    where = results.environment
    assert results.finished and where["dry_run"] and where["backend"] == "reference"
    for entry in results.cases:
        assert entry.peers["FlashInfer top_k"].missing.startswith("absent: runs on a GPU only")
        assert entry.peers["torch.topk"].times and entry.peers["reference"].times
    assert (tmp_path / "topk_candidates.png").exists()
    text = (tmp_path / "summary.md").read_text()
    for expected in (" -m bench.gpu_suite", "DRY RUN", *(where[key] for key in ("device", "torch", "date"))):
        assert expected in text
    assert "23 of 23 kernels launched" in (tmp_path / "sanitizer.txt").read_text()
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
