"""Timing of a step's stages: whole and complete lines when it is on, no trace of it when it is off."""

import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from lenvm_kernels import timing
from lenvm_kernels.step import StepBatch, step
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.timing import STAGES, StepRecord, StepTimer, file_of_process
from tests.helpers.engine import GUIDANCE, PROMPTS, Engine, make_step, needs_gpu, run_requests
from tests.helpers.models import VOCAB, tiny_value_model
from tests.helpers.watch import Operators

NAMES = ["step", "rows", *(f"{stage}_ms" for stage in STAGES), "total_ms"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Turns timing on; this process' lines go to the path it gives."""
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "steps.jsonl"))
    return tmp_path / f"steps.{os.getpid()}.jsonl"


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_lines(lines, rows):
    assert [line["step"] for line in lines] == list(range(len(rows)))
    assert [line["rows"] for line in lines] == rows
    for line in lines:
        assert list(line) == NAMES
        stages = [line[f"{stage}_ms"] for stage in STAGES]
        assert all(ms >= 0 for ms in stages) and line["forward_ms"] > 0
        assert sum(stages) == pytest.approx(line["total_ms"], abs=1e-3)


def decode(device="cpu", steps=3, **options):
    """Tokens and value logits of a few requests, guided and not."""
    engine = Engine(*make_step(tiny_value_model(torch.device(device)), **options))
    guidance = [GUIDANCE[0], GUIDANCE[1], None, GUIDANCE[3] | {"return_values": True}]
    sequences, outputs = run_requests(engine, PROMPTS, guidance, steps)
    return engine, sequences, torch.stack([output.value_logits for output in outputs])


def test_a_line_a_step(file):
    decode()
    check_lines(lines_of(file), [4] * 3)


def test_steps_of_a_process_share_its_file(file, monkeypatch):
    for _ in range(2):
        engine, *_ = decode(steps=2)
    check_lines(lines_of(file), [4] * 4)
    with monkeypatch.context() as patch:  # a record of a step may still wait to be read: nothing else may touch it
        patch.setattr(StepRecord, "mark", None)
        engine.step.predict(StepBatch(*(engine.tensor([x]) for x in (5, 0, 4))))
        engine.step.warm_up(progress=False)  # whose steps serve nobody
    assert len(lines_of(file)) == 4
    engine.decode([0], [[5, 6, 7, 8]], torch.zeros(1, VOCAB))  # goes on after it
    check_lines(lines_of(file), [4] * 4 + [1])


def test_a_step_that_fails_has_no_line(file, monkeypatch):
    engine, *_ = decode(steps=1)
    with monkeypatch.context() as patch, pytest.raises(TypeError):  # in its last stage
        patch.setattr(step, "sample_candidates_unchecked", None)
        engine.decode([0], [[5, 6, 7, 8]], torch.zeros(1, VOCAB))
    engine.decode([0], [[5, 6, 7, 8]], torch.zeros(1, VOCAB), sample=False)
    check_lines(lines_of(file), [4, 1])


def test_off_it_leaves_no_trace(tmp_path, monkeypatch):
    """Without the variable nothing is recorded; with it the operators called are the same, and so are the results."""
    monkeypatch.setattr(timing, "StepRecord", None)  # making one would fail
    monkeypatch.delenv(timing.VARIABLE, raising=False)
    with Operators() as off:
        _, *without = decode()
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "steps.jsonl"))
    with Operators() as on:
        _, *with_timing = decode()
    assert off.names == on.names and len(off.names) > 500
    assert without[0] == with_timing[0]
    torch.testing.assert_close(*(values for _, values in (without, with_timing)))
    assert len(list(tmp_path.iterdir())) == 1


def test_every_process_has_a_file(tmp_path, monkeypatch):
    assert file_of_process(tmp_path / "a.jsonl", 4711) == tmp_path / "a.4711.jsonl"
    assert file_of_process(tmp_path / "a", 4711) == tmp_path / "a.4711"
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "a.jsonl"))
    first = StepTimer.from_environment()
    assert StepTimer.from_environment() is first
    monkeypatch.setattr(os, "getpid", lambda: 4711)  # as in a child that was forked
    assert StepTimer.from_environment() is not first
    assert (tmp_path / "a.4711.jsonl").exists()


@pytest.mark.parametrize("path", ["{}/missing/steps.jsonl", "{}/file/steps.jsonl", "{}/"])
def test_a_bad_path_is_refused_at_the_start(tmp_path, monkeypatch, path):
    (tmp_path / "file").touch()
    path = path.format(tmp_path)
    if path.endswith("/"):
        file_of_process(tmp_path, os.getpid()).mkdir()
    monkeypatch.setenv(timing.VARIABLE, path)
    with pytest.raises(ValueError, match=r"LENVM_TIMING must be a file in a folder that can be written to, got '"):
        make_step(tiny_value_model(torch.device("cpu")))


def test_a_full_disk_costs_lines_and_no_step(file, monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    engine, *_ = decode(steps=1)
    tokens = [[5, 6, 7, 8]]
    with monkeypatch.context() as patch:
        patch.setattr(StepTimer.from_environment(), "_file", Full())
        with pytest.warns(UserWarning, match="LENVM_TIMING: the line of step") as warned:
            for _ in range(2):
                engine.decode([0], tokens, torch.zeros(1, VOCAB))
    lost = [str(warning.message) for warning in warned if "LENVM_TIMING" in str(warning.message)]
    assert lost == [
        f"LENVM_TIMING: the line of step {i} could not be written: [Errno 28] No space left on device" for i in (1, 2)
    ]
    engine.decode([0], tokens, torch.zeros(1, VOCAB))  # there is space again
    assert [line["step"] for line in lines_of(file)] == [0, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_device_that_is_full():
    timer = StepTimer(Path("/dev/full"))
    with pytest.warns(UserWarning, match="the line of step 0 could not be written: .*No space left"):
        timer.end(timer.begin(1, torch.device("cpu")))
    with pytest.raises(OSError, match="No space left"):  # what it still buffers
        timer._file.close()


def test_threads_share_a_timer(tmp_path, monkeypatch):
    """Every step has a number and a line of its own, though a thread is interrupted as it writes one."""
    line = StepRecord.line
    monkeypatch.setattr(StepRecord, "line", lambda record, step: time.sleep(1e-3) or line(record, step))
    timer = StepTimer(tmp_path / "steps.jsonl")

    def run_steps():
        for _ in range(10):
            timer.end(timer.begin(1, torch.device("cpu")))
            timer.flush()

    threads = [threading.Thread(target=run_steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["step"] for line in lines_of(tmp_path / "steps.jsonl")] == list(range(40))


# --- device events, with a device that is a counter ---


class FakeDevice:
    """Reaches one event after the other when told to; an event's time is its number in ms."""

    def __init__(self):
        self.recorded = self.reached = self.waits = 0

    def event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        assert stream == "stream"
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self):
        return self.number <= self.device.reached

    def synchronize(self):
        self.device.waits += 1
        self.device.reached = max(self.device.reached, self.number)

    def elapsed_time(self, end):
        assert self.query() and end.query(), "read before the device was there"
        return float(end.number - self.number)


@pytest.fixture
def gpu(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return device


def test_events_are_read_when_they_are_reached(tmp_path, gpu):
    timer = StepTimer(tmp_path / "steps.jsonl")

    def one_step(rows):
        record = timer.begin(rows, torch.device("cuda"))
        for stage in STAGES:
            record.mark(stage)
        timer.end(record)

    for rows in (1, 2, 3):
        one_step(rows)
    assert lines_of(tmp_path / "steps.jsonl") == []
    gpu.reached = 11  # all of the first step, and of the second all but its last stage
    one_step(4)
    assert [line["rows"] for line in lines_of(tmp_path / "steps.jsonl")] == [1]
    assert gpu.waits == 0
    timer.flush()
    assert gpu.waits == 3
    lines = lines_of(tmp_path / "steps.jsonl")
    check_lines(lines, [1, 2, 3, 4])
    assert all(line["head_ms"] == 1 and line["total_ms"] == 5 for line in lines)


def test_a_step_inside_a_capture_is_not_timed(tmp_path, gpu, monkeypatch):
    timer = StepTimer(tmp_path / "steps.jsonl")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert timer.begin(1, torch.device("cuda")) is timing.NO_RECORD and gpu.recorded == 0
    assert isinstance(timer.begin(1, torch.device("cpu")), StepRecord)


class FakeGraph:
    """A CUDA graph that only says what happens to it."""

    def __init__(self, events):
        self.events = events

    def replay(self):
        self.events.append(("replay", self))


@pytest.mark.parametrize("on", [True, False])
def test_graphs_are_split_at_the_head(tmp_path, monkeypatch, on):
    """With timing the layers and the head are graphs of their own, with a mark between them; without it one graph."""
    if on:
        monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "steps.jsonl"))
    else:
        monkeypatch.delenv(timing.VARIABLE, raising=False)
    engine, *_ = decode(steps=1)
    timer, events = engine.step._timer, []

    @contextlib.contextmanager
    def capture(graph, pool):
        assert pool == "pool"
        events.append(("begin", graph))
        yield
        events.append(("end", graph))

    def score(requests, nodes, before_head=None):
        if before_head is not None:
            before_head()
        return torch.zeros(requests, nodes)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(events))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    graphs = Graphs(score, torch.device("cpu"), split=timer.is_on)
    monkeypatch.setattr(StepRecord, "mark", lambda record, stage: events.append(("mark", stage)))
    for _ in range(2):  # at first as it is
        assert graphs.replay(4, 5, timer.begin(3, torch.device("cpu"))).shape == (4, 5)
    ((captured, _),) = graphs._captured.values()
    assert len(captured) == 1 + on
    expected = [(what, graph) for graph in captured for what in ("begin", "end")]
    replays = [("replay", graph) for graph in captured]
    if on:
        expected, replays = [("mark", "forward"), *expected], [replays[0], ("mark", "forward"), replays[1]]
    assert events == expected + replays


@needs_gpu
def test_timing_on_a_gpu_changes_nothing(tmp_path, monkeypatch):
    """Graphs split or whole give the same values to the bit, and every step has its line."""
    monkeypatch.delenv(timing.VARIABLE, raising=False)
    _, *without = decode("cuda", steps=6)
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "steps.jsonl"))
    _, *with_timing = decode("cuda", steps=6)
    StepTimer.from_environment().flush()
    check_lines(lines_of(tmp_path / f"steps.{os.getpid()}.jsonl"), [4] * 6)
    assert without[0] == with_timing[0] and torch.equal(without[1], with_timing[1])
