"""Time of each stage of every guided step, one JSON line a step, for whoever asks where a step's time goes.

On when the environment variable ``LENVM_TIMING`` names a file as a :class:`~lenvm_kernels.step.GuidedStep` is made: in
SGLang, with transformers and wherever else one is used, since the step itself keeps the time; not in the adapter for
the authors' fork, which has none. Each process writes a file of its own, so that the lines of several ranks never mix:
process 4711 writes ``steps.4711.jsonl`` for ``LENVM_TIMING=steps.jsonl``, and adds to it if it is there. A line is

    {"step": 0, "rows": 64, "candidates_ms": 0.21, "forward_ms": 3.1, "head_ms": 0.1, "reweight_ms": 0.05,
     "sample_ms": 0.03, "total_ms": 3.49}

with the steps of the process counted from 0, and stages that follow each other without a gap, so that they add up to
``total_ms``:

- ``candidates``: arguments, top-k, top-p and min-p, and who is to be scored;
- ``forward``: the winner of the last step, the layout of the tokens, and the layers of the value model;
- ``head``: final norm and value head;
- ``reweight``: guided probabilities, and their way into ``probs``;
- ``sample``: the draw, and remaining lengths if a request asks for them.

On a GPU these are times between events in its stream: what the device spent, gaps in which it waited for the host
included. Nothing waits for the device; a line is written by a later step that finds its last event reached, or at exit
(a killed process, and one that ends by ``os._exit`` as forked children do, loses those that wait). A line that cannot
be written, as on a full disk, costs a warning, not the step. A CUDA graph of the value model is split at the head,
because an event inside a graph is overwritten by the next replay: a step launches two graphs instead of one. A step
that the caller captures in a graph of its own is not timed, nor are those of ``warm_up``. On a CPU they are times of
the host's clock.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import torch

VARIABLE = "LENVM_TIMING"
STAGES = ("candidates", "forward", "head", "reweight", "sample")

Instant = Any  # seconds of the host's clock; on a GPU a torch.cuda.Event


class StepRecord:
    """One step: where it began, and where each stage ended."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._requests, self._stream = requests, None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        self._start = self._now()
        self._ends: dict[str, Instant] = {}

    def mark(self, stage: str) -> None:
        """Say that ``stage``, which began where the one before ended, ends here."""
        self._ends[stage] = self._now()

    def is_done(self) -> bool:
        """Whether the device has reached the last mark; asks without waiting."""
        return self._stream is None or self._last().query()

    def wait(self) -> None:
        """Wait until it has."""
        if self._stream is not None:
            self._last().synchronize()

    def line(self, step: int) -> str:
        """The line of a record that is done."""
        times, last = {}, self._start
        for stage, end in self._ends.items():
            times[f"{stage}_ms"], last = self._milliseconds(last, end), end
        times["total_ms"] = self._milliseconds(self._start, last)
        return json.dumps({"step": step, "rows": self._requests} | {name: round(ms, 6) for name, ms in times.items()})

    def _last(self) -> Instant:
        return next(reversed(self._ends.values()), self._start)

    def _now(self) -> Instant:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _milliseconds(self, start: Instant, end: Instant) -> float:
        return (end - start) * 1e3 if self._stream is None else start.elapsed_time(end)


class _NoRecord(StepRecord):
    """Of a step that nobody times."""

    def __init__(self) -> None:
        pass

    def mark(self, stage: str) -> None:
        pass


NO_RECORD = _NoRecord()


class StepTimer:
    """Writes the records of a process to its file, in the order of the steps.

    Args:
        file: opened to be added to.

    Raises:
        OSError: the file cannot be opened.
    """

    is_on = True

    @staticmethod
    def from_environment() -> StepTimer:
        """The timer of this process; one that times nothing where ``LENVM_TIMING`` is not set.

        Raises:
            ValueError: the variable does not name a file that can be written.
        """
        name = os.environ.get(VARIABLE, "").strip()
        return _timer_of(name, os.getpid()) if name else NO_TIMER

    def __init__(self, file: Path) -> None:
        self._file: TextIO = file.open("a", buffering=1)  # a line a write, so that a killed process leaves whole lines
        self._pending: deque[StepRecord] = deque()
        self._written = 0
        self._lock = threading.Lock()  # the steps of a process share the timer, and may run in several threads
        atexit.register(self.flush)

    def begin(self, requests: int, device: torch.device) -> StepRecord:
        """Begin to time a step. Where a graph is being captured it is not timed: no event may disturb that."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return NO_RECORD
        return StepRecord(requests, device)

    def end(self, record: StepRecord) -> None:
        """Take a step's record, and write those of the steps that the device has finished."""
        if record is NO_RECORD:
            return
        with self._lock:
            self._pending.append(record)
            while self._pending and self._pending[0].is_done():
                self._write()

    def flush(self) -> None:
        """Wait for the steps begun so far and write their lines."""
        with self._lock:
            while self._pending:
                self._pending[0].wait()
                self._write()

    def _write(self) -> None:
        step, self._written = self._written, self._written + 1
        line = self._pending.popleft().line(step) + "\n"
        try:
            self._file.write(line)
        except OSError as error:  # no reason to fail the step; its number keeps one warning from hiding the next
            warnings.warn(f"{VARIABLE}: the line of step {step} could not be written: {error}", stacklevel=3)


class _NoTimer(StepTimer):
    """Times nothing: what a step has where ``LENVM_TIMING`` is not set."""

    is_on = False

    def __init__(self) -> None:
        pass

    def begin(self, requests: int, device: torch.device) -> StepRecord:
        return NO_RECORD

    def flush(self) -> None:
        pass


NO_TIMER = _NoTimer()


def file_of_process(file: Path, process: int) -> Path:
    """Where a process writes when ``LENVM_TIMING`` is ``file``: its id goes before the suffix."""
    return file.with_name(f"{file.stem}.{process}{file.suffix}")


@functools.cache  # the steps of a process share a file
def _timer_of(name: str, process: int) -> StepTimer:
    try:
        return StepTimer(file_of_process(Path(name), process))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE} must be a file in a folder that can be written to, got {name!r}: {error}"
        ) from error
