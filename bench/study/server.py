"""The servers of a study, SGLang's and vLLM's: how they are started and asked, what they count, and their end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from bench.study.served import Condition, Counted, Counters, Load
from lenvm_kernels import timing
from lenvm_kernels.adapters.settings import CONFIG_VARIABLE

HOST, FIRST_PORT = "127.0.0.1", 30_000
GRACE = 20.0  # seconds that a server has to end by itself
SETTLING = 10.0  # seconds at most for the server to count what it has done; it does so every second
LOG_LINES = 20  # of a server that failed
IDLE_SECONDS = "sglang:scheduler_idle_seconds_total"
# With it on the path vLLM's second model runner runs on a CPU.
VLLM_ON_CPU = Path(__file__).parents[2] / "tests" / "vllm_cpu" / "site"
# What goes wrong with a request.
FAULTS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Setup:
    """How the servers are started.

    Attributes:
        engine: one of :data:`ENGINES`.
        model: as the server takes it.
        value_model: what ``LENVM_VALUE_MODEL`` is where the plugin is wanted.
        python: of the server's environment.
        device: ``cuda`` or ``cpu``.
        options: further ones of the server, which take precedence.
        startup_seconds: that it has to come up.
    """

    engine: str
    model: str
    value_model: str | None
    python: str
    device: str
    options: Sequence[str] = ()
    startup_seconds: float = 1200.0

    def command(self, port: int) -> list[str]:
        kind = ENGINES[self.engine]
        command = [self.python, "-m", *kind.options(self.model, self.device), "--host", HOST, "--port", str(port)]
        return [*command, *self.options]

    def environment(self, folder: str, steps: Path | None = None) -> dict[str, str]:
        """Of the server, with the plugin if there is a value model.

        Args:
            folder: empty, for what its processes tell each other.
            steps: the file of its timed steps.
        """
        variables = ENGINES[self.engine].variables(self.device, folder)
        if self.value_model is not None:
            of_steps = {timing.VARIABLE: str(steps)} if steps is not None else {}
            return variables | {"LENVM_VALUE_MODEL": self.value_model} | of_steps
        return {name: text for name, text in variables.items() if name not in ("LENVM_VALUE_MODEL", CONFIG_VARIABLE)}


@contextmanager
def _response(port: int, method: str, path: str, body: Any, timeout: float) -> Iterator[http.client.HTTPResponse]:
    """The server's answer; past any proxy."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")
            raise OSError(f"status {response.status}: {text.strip()[:300]}")
        yield response
    finally:
        connection.close()


def exchange(port: int, method: str, path: str, body: Any = None, timeout: float = 60.0) -> str:
    """The text that the server answers with.

    Raises:
        OSError, http.client.HTTPException: no answer, or one that is not 200, whose status and text it names.
    """
    with _response(port, method, path, body, timeout) as response:
        return response.read().decode(errors="replace")


def events(port: int, path: str, body: Any, timeout: float) -> Iterator[dict[str, Any]]:
    """The objects that the server streams as its answer, each as it arrives.

    Raises:
        OSError, http.client.HTTPException: as :func:`exchange`, or one of the objects is an error.
    """
    with _response(port, "POST", path, body, timeout) as response:
        for line in response:
            text = line.decode().strip().removeprefix("data: ")
            if text == "[DONE]":
                return
            if text:
                event = json.loads(text)
                if "error" in event:
                    raise OSError(str(event["error"]))
                yield event


class Server(ABC):
    """A server that is up.

    Attributes:
        name: of the engine.
        port: it listens at.
        session: of its processes, all of which are in one of their own.
        log: what it writes.
    """

    name: ClassVar[str]

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.port, self.session, self.log, self._process = port, process.pid, log, process

    @staticmethod
    @abstractmethod
    def options(model: str, device: str) -> list[str]:
        """The module that is the server, and its options."""

    @staticmethod
    @abstractmethod
    def variables(device: str, folder: str) -> dict[str, str]:
        """Of its environment; ``folder`` is empty, for what its processes tell each other."""

    @abstractmethod
    def body(self, load: Load, condition: Condition, prompt: int, sample: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request whose answer is streamed."""

    @abstractmethod
    def progress(self, event: dict[str, Any]) -> tuple[int, int, str | None]:
        """What a streamed object says: tokens of the prompt and of the output so far, and why that has ended.

        Raises:
            OSError: the server has given the request up.
        """

    @abstractmethod
    def version(self) -> str:
        """Of the engine, with its name."""

    @abstractmethod
    def counted(self) -> Counted:
        """What it has counted."""

    @abstractmethod
    def settled(self) -> Counted:
        """What it has counted once it has nothing left to do.

        Raises:
            TimeoutError: it does not come to rest.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Empty its cache of prefixes; OSError if something runs."""

    def check(self) -> None:
        """Raise ChildProcessError, with the last lines of its log, if the server has ended."""
        if (status := self._process.poll()) is not None:
            raise ChildProcessError(f"the server has ended with status {status}\n{last_lines(self.log)}")

    def counters(self) -> Counters:
        """Its metrics."""
        return Counters(exchange(self.port, "GET", "/metrics"))

    def check_plugin(self) -> None:
        """Raise ValueError if lenvm-kernels is not in its environment."""
        if "lenvm:guided_steps_total" not in self.counters():
            python = self._process.args[0]
            raise ValueError(f"--python must be of an environment with lenvm-kernels installed: {python} has none")

    def forget(self) -> None:
        """Empty its cache of prefixes, so that every condition computes the prompts."""
        deadline = time.monotonic() + SETTLING
        while True:
            try:
                return self._forget()
            except OSError:  # refused while something runs
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


class SGLang(Server):
    """SGLang's server. Its scheduler adds up times and passes."""

    name = "SGLang"

    @staticmethod
    def options(model: str, device: str) -> list[str]:
        command = ["sglang.launch_server", "--model-path", model, "--device", device, "--enable-metrics"]
        of_cpu = ["--dtype", "float32", "--max-running-requests", "32", "--sleep-on-idle"]
        return command + (of_cpu if device == "cpu" else [])

    @staticmethod
    def variables(device: str, folder: str) -> dict[str, str]:
        # The device timer needs events of a GPU.
        return {**os.environ, "SGLANG_USE_CPU_ENGINE" if device == "cpu" else "SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1"}

    def body(self, load: Load, condition: Condition, prompt: int, sample: int) -> tuple[str, dict[str, Any]]:
        path, body = load.request("sglang", condition, prompt, sample)
        body["sampling_params"]["ignore_eos"] = condition.lengths == "fixed"
        return path, body | {"stream": True}

    def progress(self, event: dict[str, Any]) -> tuple[int, int, str | None]:
        facts = event["meta_info"]
        reason = facts["finish_reason"] or {}
        if reason.get("type") == "abort":
            raise OSError(f"aborted: {reason.get('message')}")
        return facts["prompt_tokens"], facts["completion_tokens"], reason.get("type")

    def version(self) -> str:
        return f"{self.name} {json.loads(exchange(self.port, 'GET', '/server_info')).get('version')}"

    def counted(self) -> Counted:
        counters = self.counters()
        passes, forward = "sglang:cuda_graph_passes_total", "sglang:forward_execution_seconds_total"
        is_device_time = forward in counters
        in_batches = counters.total("sglang:scheduler_stage_seconds_total", category="run_batch")
        return Counted(
            counters,
            passes=counters.total(passes),
            decode_passes=sum(counters.total(passes, mode=mode) for mode in ("decode_none", "decode_cuda_graph")),
            seconds=counters.total(forward) if is_device_time else in_batches,
            includes_value=not is_device_time,
            slots=int(counters.total("sglang:max_total_num_tokens")),
        )

    def settled(self) -> Counted:
        """See above: all of its time is in what it counted when it has added idle time, which it does every second."""
        first, deadline = self.counters(), time.monotonic() + SETTLING
        while (last := self.counted()).counters.total(IDLE_SECONDS) == first.total(IDLE_SECONDS):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the server has not counted {IDLE_SECONDS} for {SETTLING:g} seconds: it is not idle"
                )
            time.sleep(0.1)
        return last

    def _forget(self) -> None:
        exchange(self.port, "POST", "/flush_cache")


class VLLM(Server):
    """vLLM's server. Its log has a line a pass, with the time that the engine waited for it."""

    name = "vLLM"
    # Requests that decode, and milliseconds. A rank without work joins the passes of others.
    PASS = re.compile(r"Iteration\(\d+\): .* (\d+) generation requests, .* elapsed time: ([\d.]+) ms(?! \(dummy)")

    @staticmethod
    def options(model: str, device: str) -> list[str]:
        command = ["vllm.entrypoints.openai.api_server", "--model", model, "--enable-logging-iteration-details"]
        of_cpu = ["--dtype", "float32", "--max-num-seqs", "32", "--enforce-eager"]
        return command + ["--disable-uvicorn-access-log"] + (of_cpu if device == "cpu" else [])

    @staticmethod
    def variables(device: str, folder: str) -> dict[str, str]:
        # The server forgets prefixes only when it is developed with.
        own = {"VLLM_SERVER_DEV_MODE": "1", "PROMETHEUS_MULTIPROC_DIR": folder}
        if device == "cpu":
            path = os.pathsep.join([str(VLLM_ON_CPU), os.environ.get("PYTHONPATH", "")])
            own |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": path}
            own["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return {**os.environ, **own}

    def body(self, load: Load, condition: Condition, prompt: int, sample: int) -> tuple[str, dict[str, Any]]:
        path, body = load.request("vllm", condition, prompt, sample)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return path, body | {"ignore_eos": condition.lengths == "fixed", "stream": True, "stream_options": usage}

    def progress(self, event: dict[str, Any]) -> tuple[int, int, str | None]:
        usage, choices = event["usage"], event["choices"]
        reason = choices[0]["finish_reason"] if choices else None
        if reason not in (None, "stop", "length"):
            raise OSError(f"ended by {reason}")
        return usage["prompt_tokens"], usage["completion_tokens"], reason

    def version(self) -> str:
        return f"{self.name} {json.loads(exchange(self.port, 'GET', '/version')).get('version')}"

    def counted(self) -> Counted:
        counters = self.counters()
        passes = [(int(old), float(ms)) for old, ms in self.PASS.findall(self.log.read_text(errors="replace"))]
        blocks = counters.labels("vllm:cache_config_info")
        return Counted(
            counters,
            passes=len(passes),
            decode_passes=sum(old > 0 for old, _ in passes),
            seconds=sum(ms for _, ms in passes) / 1e3,
            includes_value=True,
            slots=int(blocks.get("num_gpu_blocks", 0)) * int(blocks.get("block_size", 0)),
        )

    def settled(self) -> Counted:
        """See above: nothing runs, and for a moment no line of a pass has come."""
        before, deadline = self.counted(), time.monotonic() + SETTLING
        while True:
            time.sleep(0.3)
            last = self.counted()
            if last.passes == before.passes and not last.counters.total("vllm:num_requests_running"):
                return last
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server still runs requests after {SETTLING:g} seconds")
            before = last

    def _forget(self) -> None:
        if not json.loads(exchange(self.port, "POST", "/reset_prefix_cache")).get("success"):
            raise OSError("the server does not forget its prefixes: it still uses some")


ENGINES: dict[str, type[Server]] = {"sglang": SGLang, "vllm": VLLM}


@contextmanager
def running(setup: Setup, log: Path, port: int, steps: Path | None = None) -> Iterator[Server]:
    """A server, from when it is healthy to the end of the block, however that ends.

    Args:
        setup: of it.
        log: a file that gets what it writes.
        port: that nothing listens at.
        steps: the file of its timed steps; None: they are not timed.

    Raises:
        ChildProcessError: it ended by itself; the message has the last lines of its log.
        TimeoutError: it is not up in time, likewise.
    """
    with TemporaryDirectory() as folder, log.open("w") as output:
        # A session of its own: an interrupt from the keyboard reaches it only through `_end`, which waits for it.
        started = dict(env=setup.environment(folder, steps), stdout=output, stderr=output, start_new_session=True)
        process = subprocess.Popen(setup.command(port), **started)
        try:
            server = ENGINES[setup.engine](process, port, log)
            deadline = time.monotonic() + setup.startup_seconds
            while True:
                server.check()
                with suppress(*FAULTS):
                    exchange(port, "GET", "/health", timeout=10)
                    break
                if time.monotonic() > deadline:
                    seconds = f"{setup.startup_seconds:g} seconds"
                    raise TimeoutError(f"the server is not up after {seconds}\n{last_lines(log)}")
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
