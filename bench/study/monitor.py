"""What a server's processes and the GPU do while it works: samples of memory and utilisation."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.study.served import Sample

PERIOD = 1.0  # seconds from sample to sample, as published
MIB = 2**20


def resident_bytes(session: int) -> int:
    """Memory of all processes of a session. Pages that they share count for each of them."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                # After the name, which may have any characters: state, parent, group, session.
                facts = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(facts[3]) == session:
                    total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def gpu_loads() -> list[tuple[float | None, float | None]]:
    """MiB in use and per cent of utilisation of each GPU that the server sees; nothing without ``nvidia-smi``.

    What a GPU does not tell is None.
    """
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    loads = []
    for line in answer.strip().splitlines():
        numbers = [_number(text) for text in line.split(",")]
        loads.append((numbers[0], numbers[1]))
    return loads


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Monitor:
    """Takes samples in a thread of its own, at once, every :data:`PERIOD` and at the end.

    Attributes:
        samples: so far.
    """

    def __init__(self, session: int) -> None:
        self.samples: list[Sample] = []
        self._session, self._ended = session, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Monitor:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        due = self._begin
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self._take()
            due += PERIOD

    def _take(self) -> None:
        seconds = round(time.monotonic() - self._begin, 3)
        self.samples.append(Sample(seconds, resident_bytes(self._session) / MIB, gpu_loads()))
