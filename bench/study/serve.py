"""Decoding with and without guidance in the SGLang server, over HTTP: tokens, wall clock, memory, and who took them.

Two lifecycles of the server, one after the other: without the plugin, and with it. Each gets the same prompts, each
prompt several times, as requests of their own that all wait at once. What is measured under one set of request
parameters is a condition:

- ``plain``: without the plugin, as published over the whole vocabulary (top-k off);
- ``neutral``: with the plugin, but parameters that guide nothing: what the plugin costs those who do not use it;
- ``k5-stride1`` and so on: guided, with that limit on candidates and that stride. With k = 1 the engine decodes
  greedily: there is nothing to guide.

Each is run with outputs of fixed and of free length. Fixed: ends of sequence are passed over, so that all conditions do
the same work. Free: an output ends by itself; then only rates compare, as the outputs have different lengths.

The time of the base model and of the value model is what the server's own metrics say. On a GPU both are times of its
stream. On a CPU the value model's is the host's clock, and the base model has the rest of the engine's batches, the
engine's sampler included. All other time is ``other``: the scheduler, tokens to text, HTTP; on a GPU the engine's
sampler and gaps, too. The stages of guided steps come from ``LENVM_TIMING``.

A prompt is a JSON object in a line of the file, with one of these fields; others are passed over:

    {"prompt": "What is a comet?"}                                   what a user says, in the model's chat template
    {"messages": [{"role": "user", "content": "What is a comet?"}]}  a chat, in the model's chat template
    {"input_ids": [1, 4093, 198]}                                    the tokens themselves

The folder gets ``conditions.jsonl``, ``requests.jsonl`` (a line a request), ``samples.jsonl`` (a line a second),
``steps.PROCESS.jsonl`` (a line a guided step), the server's logs, ``summary.md`` and ``summary.json``. The form of the
table is that of eric-ai-lab/Length-Value-Model, ``inference/timing``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.study.report import statistics
from bench.study.result import stages_of
from bench.study.served import (
    IDLE_SECONDS,
    Answer,
    Condition,
    Counters,
    Load,
    Models,
    Result,
    Sample,
    Work,
    described,
    failures_of,
    label,
    write_summary,
)
from lenvm_kernels import timing
from lenvm_kernels.adapters.settings import CONFIG_VARIABLE
from lenvm_kernels.demo import held_out_prompts

HOST, FIRST_PORT = "127.0.0.1", 30_000
PERIOD = 1.0  # seconds from sample to sample, as published
GRACE = 20.0  # seconds that a server has to end by itself
SETTLING = 10.0  # seconds at most for the server to count what it has done; it does so every second
LOG_LINES = 20  # of a server that failed
MIB = 2**20


# --- prompts ---


def read_prompts(file: Path, tokenizer: Callable[[], Any]) -> list[list[int]]:
    """The token ids of the prompts of a JSONL file; for its fields see this module.

    Args:
        file: one JSON object a line; empty lines are passed over.
        tokenizer: gives the tokenizer of the base model when called, and is called only if a prompt needs it.

    Raises:
        ValueError: naming the line, what came and what is accepted; or there is no prompt in the file.
        OSError: the file cannot be read.
    """
    prompts, loaded = [], None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8: {error}") from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"line {number} of {file}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} must be JSON, got {text[:80]!r}: {error}") from error
        fields = ("prompt", "messages", "input_ids")
        given = [name for name in fields if name in line] if isinstance(line, dict) else []
        if len(given) != 1:
            raise ValueError(f"{where} must be an object with one of {', '.join(fields)}, got {text[:80]}")
        (name,) = given
        if name == "input_ids":
            prompts.append(_checked_ids(line[name], where))
            continue
        loaded = loaded or tokenizer()
        messages = [{"role": "user", "content": line[name]}] if name == "prompt" else line[name]
        prompts.append(chat_ids(loaded, _checked_messages(messages, name, where), where))
    if not prompts:
        raise ValueError(f"{file} must hold at least one prompt, got none")
    return prompts


def demo_prompts(tokenizer: Callable[[], Any]) -> list[list[int]]:
    """The token ids of the held-out prompts of the demo, likewise."""
    loaded = tokenizer()
    return [chat_ids(loaded, [{"role": "user", "content": text}], "--prompts") for text in held_out_prompts()]


def chat_ids(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> list[int]:
    """The token ids of a chat that the model is to go on with.

    Raises:
        ValueError: the tokenizer has no chat template, or its template does not take the messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{where} must have input_ids: the tokenizer of the base model has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # whatever the template raises
        raise ValueError(f"{where} must fit the chat template of the base model: {error}") from error


def _checked_ids(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"input_ids in {where} must be a list of at least one token id, got {str(ids)[:80]}")
    return ids


def _checked_messages(messages: Any, name: str, where: str) -> list[dict[str, Any]]:
    is_chat = isinstance(messages, list) and bool(messages)
    if not is_chat or not all(isinstance(x, dict) and isinstance(x.get("content"), str) for x in messages):
        accepted = "a text" if name == "prompt" else "a list of at least one {role, content}"
        got = messages[0]["content"] if name == "prompt" else messages
        raise ValueError(f"{name} in {where} must be {accepted}, got {str(got)[:80]}")
    return messages


# --- the server ---


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


FAULTS = (OSError, http.client.HTTPException)


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


def free_port() -> int:
    """A port that nothing listens at: else another server might answer. SGLang takes more of them above its own."""
    for port in range(FIRST_PORT, FIRST_PORT + 2_000, 100):
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections linger
            tried.bind((HOST, port))
            return port
    raise OSError(f"no port from {FIRST_PORT} on is free")


# --- what its processes and the GPU do meanwhile ---


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


# --- the requests ---


def ask(port: int, load: Load, condition: Condition, prompt: int, sample: int) -> Answer:
    """Send one request. Whatever goes wrong with it is in the answer."""
    begin = time.perf_counter()
    try:
        text = exchange(port, "POST", "/generate", load.body(condition, prompt, sample), load.timeout)
        facts = json.loads(text)["meta_info"]
        reason = (facts["finish_reason"] or {}).get("type")
        if reason == "abort":
            raise OSError(f"aborted: {facts['finish_reason'].get('message')}")
        tokens = facts["prompt_tokens"], facts["completion_tokens"]
        return Answer(prompt, sample, time.perf_counter() - begin, *tokens, reason)
    except (*FAULTS, ValueError, KeyError, TypeError) as error:
        return Answer(prompt, sample, time.perf_counter() - begin, error=f"{type(error).__name__}: {error}")


def ask_all(port: int, load: Load, condition: Condition) -> tuple[float, list[Answer]]:
    """Send every prompt as often as it has samples; seconds from the first request to the last answer."""
    requests = [(prompt, sample) for prompt in range(len(load.prompts)) for sample in range(load.samples)]
    pool = ThreadPoolExecutor(load.concurrency or len(requests))
    begin = time.perf_counter()
    try:
        futures = [pool.submit(ask, port, load, condition, *request) for request in requests]
        answers = [future.result() for future in futures]
        return time.perf_counter() - begin, answers
    finally:
        # After an interrupt nobody waits for answers: they fail when the server ends, a moment later.
        pool.shutdown(wait=False, cancel_futures=True)


# --- the study ---


@dataclass(frozen=True)
class Setup:
    """How the servers are started.

    Attributes:
        model: as the server takes it.
        value_model: a directory or ``.gguf`` file.
        python: of the server's environment.
        device: ``cuda`` or ``cpu``.
        options: further ones of the server, which take precedence.
        startup_seconds: that it has to come up.
    """

    model: str
    value_model: Path
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

    def environment(self, steps: Path | None) -> dict[str, str]:
        """Of the server, with the plugin if there is a file for its steps."""
        # The device timer needs events of a GPU.
        of_device = "SGLANG_USE_CPU_ENGINE" if self.device == "cpu" else "SGLANG_ENABLE_METRICS_DEVICE_TIMER"
        variables = {**os.environ, of_device: "1"}
        if steps is not None:
            return variables | {"LENVM_VALUE_MODEL": str(self.value_model), timing.VARIABLE: str(steps)}
        return {name: text for name, text in variables.items() if name not in ("LENVM_VALUE_MODEL", CONFIG_VARIABLE)}


class Study:
    """The conditions of one command into one folder.

    Args:
        setup: of the servers.
        load: of every condition.
        models: their dimensions.
        out: the folder; made if it is not there. What an earlier study left there is replaced.
        environment: goes into the summary.
    """

    def __init__(self, setup: Setup, load: Load, models: Models, out: Path, environment: dict[str, Any]) -> None:
        self._setup, self._load, self._models, self._out = setup, load, models, out
        self._environment = environment
        self._results: list[Result] = []
        self._steps = out.resolve() / "steps.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        for file in (*self._step_files(), *(out / f"{name}.jsonl" for name in ("conditions", "requests", "samples"))):
            file.unlink(missing_ok=True)

    def run(self, plain: Sequence[Condition], guided: Sequence[Condition]) -> int:
        """Both lifecycles, each if it has conditions.

        Returns:
            The exit status: 1 if requests or guided steps failed.
        """
        if plain:
            self._lifecycle("plain", None, plain)
        if guided:
            self._lifecycle("guided", self._steps, guided)
        return int(bool(failures_of(self._results)))

    def _lifecycle(self, name: str, steps: Path | None, conditions: Sequence[Condition]) -> None:
        port = free_port()
        command, log = self._setup.command(port), self._out / f"{name}.log"
        print(f"{name} server: {' '.join(command)}", flush=True)
        with running(command, self._setup.environment(steps), log, port, self._setup.startup_seconds) as server:
            info = json.loads(exchange(port, "GET", "/server_info"))
            self._environment["sglang"] = info.get("version")
            if steps is not None and "lenvm:guided_steps_total" not in server.counters():
                raise ValueError(
                    f"--python must be of an environment with lenvm-kernels installed: {command[0]} has none"
                )
            for condition in conditions:
                self._measure(server, condition)

    def _measure(self, server: Server, condition: Condition) -> None:
        load, name = self._load, label(condition)
        ask(server.port, load, condition, 0, 0)  # what the first request of its kind compiles, the others do not
        server.forget()
        before, lines = server.settled_counters(), self._step_lines()
        with Monitor(server.session) as monitor:
            seconds, answers = ask_all(server.port, load, condition)
        after = server.settled_counters()
        stages = stages_of(self._step_lines()[len(lines) :], self._steps)
        result = Result(
            condition=condition,
            seconds=seconds,
            answers=answers,
            work=Work.between(before, after),
            samples=monitor.samples,
            slots=int(after.total("sglang:max_total_num_tokens")),
            stages={stage: statistics(ms) for stage, ms in stages.items()},
            load_average=os.getloadavg()[0],
        )
        self._results.append(result)
        self._append("requests", ({"condition": name} | asdict(answer) for answer in answers))
        self._append("samples", ({"condition": name} | asdict(sample) for sample in monitor.samples))
        self._append("conditions", [described(result, load, self._models)])
        write_summary(self._out, self._environment, load, self._models, self._results)
        rate = result.output_tokens / seconds
        print(f"{name}: {seconds:.2f} s, {result.output_tokens} tokens, {rate:.1f} tokens/s", flush=True)
        for failure in failures_of([result]):
            print(f"  {failure}", file=sys.stderr, flush=True)

    def _step_files(self) -> list[Path]:
        return sorted(self._steps.parent.glob(f"{self._steps.stem}.*{self._steps.suffix}"))

    def _step_lines(self) -> list[str]:
        """Of the one server that has written any: with several ranks those of one, as all take the same steps."""
        files = self._step_files()
        return files[0].read_text().splitlines() if files else []

    def _append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        with (self._out / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an interrupt from the keyboard does, so that the server ends with it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
