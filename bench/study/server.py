"""SGLang's server for a study: how it is started and asked, what it counts, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.study.served import IDLE_SECONDS, Counters
from lenvm_kernels import timing
from lenvm_kernels.adapters.settings import CONFIG_VARIABLE

HOST, FIRST_PORT = "127.0.0.1", 30_000
GRACE = 20.0  # seconds that a server has to end by itself
SETTLING = 10.0  # seconds at most for the server to count what it has done; it does so every second
LOG_LINES = 20  # of a server that failed
# What goes wrong with a request.
FAULTS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Setup:
    """How the servers are started.

    Attributes:
        model: as the server takes it.
        value_model: what ``LENVM_VALUE_MODEL`` is where the plugin is wanted.
        python: of the server's environment.
        device: ``cuda`` or ``cpu``.
        options: further ones of the server, which take precedence.
        startup_seconds: that it has to come up.
    """

    model: str
    value_model: str | None
    python: str
    device: str
    options: Sequence[str] = ()
    startup_seconds: float = 1200.0

    def command(self, port: int) -> list[str]:
        command = [self.python, "-m", "sglang.launch_server", "--model-path", self.model, "--device", self.device]
        command += ["--host", HOST, "--port", str(port), "--enable-metrics"]
        if self.device == "cpu":
            command += ["--dtype", "float32", "--max-running-requests", "32", "--sleep-on-idle"]
        return [*command, *self.options]

    def environment(self, steps: Path | None = None) -> dict[str, str]:
        """Of the server, with the plugin if there is a value model; ``steps`` is the file of its timed steps."""
        # The device timer needs events of a GPU.
        of_device = "SGLANG_USE_CPU_ENGINE" if self.device == "cpu" else "SGLANG_ENABLE_METRICS_DEVICE_TIMER"
        variables = {**os.environ, of_device: "1"}
        if self.value_model is not None:
            of_steps = {timing.VARIABLE: str(steps)} if steps is not None else {}
            return variables | {"LENVM_VALUE_MODEL": self.value_model} | of_steps
        return {name: text for name, text in variables.items() if name not in ("LENVM_VALUE_MODEL", CONFIG_VARIABLE)}


def exchange(port: int, method: str, path: str, body: Any = None, timeout: float = 60.0) -> str:
    """The text that the server answers with; past any proxy.

    Raises:
        OSError, http.client.HTTPException: no answer, or one that is not 200, whose status and text it names.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"status {response.status}: {text.strip()[:300]}")
    return text


class Server:
    """A server that is up.

    Attributes:
        port: it listens at.
        session: of its processes, all of which are in one of their own.
    """

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.port, self.session, self._process, self._log = port, process.pid, process, log

    def check(self) -> None:
        """Raise ChildProcessError, with the last lines of its log, if the server has ended."""
        if (status := self._process.poll()) is not None:
            raise ChildProcessError(f"the server has ended with status {status}\n{last_lines(self._log)}")

    def counters(self) -> Counters:
        """What it has counted."""
        return Counters(exchange(self.port, "GET", "/metrics"))

    def check_plugin(self) -> None:
        """Raise ValueError if lenvm-kernels is not in its environment."""
        if "lenvm:guided_steps_total" not in self.counters():
            python = self._process.args[0]
            raise ValueError(f"--python must be of an environment with lenvm-kernels installed: {python} has none")

    def settled_counters(self) -> Counters:
        """What it has counted once it has nothing left to do.

        The scheduler adds up its time every second. All of it is in what it counted when it has added idle time.

        Raises:
            TimeoutError: it does not come to rest.
        """
        first, deadline = self.counters(), time.monotonic() + SETTLING
        while (last := self.counters()).total(IDLE_SECONDS) == first.total(IDLE_SECONDS):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the server has not counted {IDLE_SECONDS} for {SETTLING:g} seconds: it is not idle"
                )
            time.sleep(0.1)
        return last

    def forget(self) -> None:
        """Empty its cache of prefixes, so that every condition computes the prompts."""
        deadline = time.monotonic() + SETTLING
        while True:
            try:
                exchange(self.port, "POST", "/flush_cache")
                return
            except OSError:  # refused while something runs
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


@contextmanager
def running(
    command: Sequence[str], environment: dict[str, str], log: Path, port: int, startup_seconds: float
) -> Iterator[Server]:
    """A server by its command, from when it is healthy to the end of the block, however that ends.

    Raises:
        ChildProcessError: it ended by itself; the message has the last lines of its log.
        TimeoutError: it is not up in time, likewise.
    """
    with log.open("w") as output:
        # A session of its own: an interrupt from the keyboard reaches it only through `_end`, which waits for it.
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        server, deadline = Server(process, port, log), time.monotonic() + startup_seconds
        while True:
            server.check()
            with suppress(*FAULTS):
                exchange(port, "GET", "/health", timeout=10)
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not up after {startup_seconds:g} seconds\n{last_lines(log)}")
            time.sleep(0.5)
        try:
            yield server
        except FAULTS:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)  # its connections break a moment before it has ended
            server.check()
            raise
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """SIGTERM, on which it writes what it has; after a while SIGKILL for all that is left."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path) -> str:
    """Of a server's log, with its name."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"the last lines of {log}:", *lines])


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nothing listens at, and that no other study takes meanwhile: else another server might answer.

    A server listens long after it was started, so a study that looks for a port holds it by a datagram socket, which no
    server wants. SGLang takes more ports above its own.
    """
    for port in range(FIRST_PORT, FIRST_PORT + 2_000, 100):
        with socket.socket(type=socket.SOCK_DGRAM) as reserved, socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
            try:
                reserved.bind((HOST, port))
                tried.bind((HOST, port))
            except OSError:
                continue
            tried.close()
            yield port
            return
    raise OSError(f"no port from {FIRST_PORT} on is free")
