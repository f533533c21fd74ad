"""Base and guided decoding in a server of SGLang or vLLM, over HTTP: TTFT, TPOT, tokens/s, and guided over base.

    python -m bench.serve --model M --value-model W --out DIR [--engine vllm] [-- SERVER OPTIONS]
    python -m bench.serve --model NAME --base-url URL --guided-url URL --out DIR
    python -m bench.serve --model M --value-model W ... --out DIR --engine vllm --in-process [-- SERVER OPTIONS]

The first form starts two servers in turn: one with ``LENVM_VALUE_MODEL=off``, one with ``LENVM_VALUE_MODEL=W``. The
second uses running servers. The third starts vLLM's engines without servers (:mod:`bench.vllm_engine`), one for each W,
and also measures the plugin without guided requests, ``idle``, in the first guided engine. M and W may then be names
such as Qwen2.5-7B, for models with random weights, and W ``random-probe``.

A condition is a number of candidates (``--k``, the top-k of all servers) and a number of concurrent requests
(``--concurrency``). In each condition all servers get the same prompts, filters and seeds. Ends of sequence are
ignored: every output has ``--max-tokens`` tokens. Each prompt begins with a head unique to its condition, or is random,
so that no prefix is cached. Requests with few tokens warm up each condition.

``--out`` gets ``summary.csv``, a line per server and condition, the same with command and versions in ``summary.json``,
the logs of the servers, and ``throughput.png`` and ``tpot.png`` if matplotlib is installed. The exit status is 1 if a
request failed, guidance failed in a step, or no step was guided, and 2 if a server failed. The columns:

- ``ttft_ms``, ``ttft_p99_ms``: from sending a request to its first token, median and 99th percentile;
- ``tpot_ms``, ``tpot_p99_ms``: from the first to the last token of a request, divided by its tokens less one;
- ``decode_ms``: TPOT of the request whose first token is the last, if all requests are sent at once: no prompts are
  computed any more;
- ``tokens_per_s``: output tokens of all requests, divided by the time from the first request to the last answer;
- ``guided_steps``, ``step_ms``: guided steps by the plugin's metrics, and the mean time of one, which includes prompts
  in the value model. At k = 1 the base server decodes greedily, and the guided one by the largest guided weight;
- ``ttft_ratio``, ``tpot_ratio``, ``decode_ratio``, ``tokens_per_s_ratio``, ``kv_tokens_ratio``: guided over base, in
  the same condition;
- ``start_s``, ``start_gib``, ``kv_tokens``: only in process; time of the engine's start after imports, GPU memory
  beside the cache, and tokens in the cache.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import product
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from bench.models import DIMENSIONS, RANDOM_PROBE

SECONDS, GRACE = 3600.0, 20.0  # limits of a request, and of a server between SIGTERM and SIGKILL
LOG_LINES, WARM_UP_TOKENS = 20, 4
ERRORS = (OSError, HTTPException, ValueError)
COMMANDS = {
    "sglang": "{python} -m sglang.launch_server --model-path {model} --port {port} --enable-metrics",
    "vllm": "{python} -m vllm.entrypoints.openai.api_server --model {model} --port {port}",
}
GUIDANCE = {"sglang": "custom_params", "vllm": "vllm_xargs"}  # the field of a request
VERSION = {"sglang": "/server_info", "vllm": "/version"}
STEPS, MILLISECONDS = "lenvm:guided_steps_total", "lenvm:value_model_milliseconds_total"
FAILURES = ("lenvm:fallbacks_total", "lenvm:without_room_total")
PROMPT_IDS = 512  # of random prompts
QUESTIONS = (
    "Write about a walk in the rain.",
    "How does a boat float?",
    "Name three things in a kitchen, and say what each is for.",
    "Why do we sleep?",
)
COLUMNS = ["server", "k", "concurrency", "requests", "failed", "seconds", "tokens_per_s"]
COLUMNS += ["ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "decode_ms", "guided_steps", "step_ms"]
RATIOS = ("ttft_ms", "tpot_ms", "decode_ms", "tokens_per_s", "kv_tokens")
COLUMNS += [f"{name.removesuffix('_ms')}_ratio" for name in RATIOS]
COLUMNS += ["start_s", "start_gib", "kv_tokens"]
UNGUIDED = ("base", "idle")
Body = Mapping[str, Any] | None
Row = dict[str, Any]
Answer = tuple[float, float]  # seconds to the first token, and per token after it


@contextmanager
def sent(url: str, method: str, path: str, body: Body = None, *, timeout: float = SECONDS) -> Iterator[HTTPConnection]:
    """A connection to the server at ``url`` on which a request was sent, with ``body`` as JSON. Proxies are ignored."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def exchange(url: str, method: str, path: str, body: Body = None, *, timeout: float = SECONDS) -> tuple[int, str]:
    """Status and text of the answer to a request."""
    with sent(url, method, path, body, timeout=timeout) as connection:
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


def metrics(server: str | Engine) -> dict[str, float]:
    """The sum over all labels of each metric at ``/metrics`` of a server, given its URL, or of an engine."""
    if isinstance(server, Engine):
        text = server.call("metrics")
    else:
        status, text = exchange(server, "GET", "/metrics", timeout=60)
        if status != 200:
            raise OSError(f"status {status} for {server}/metrics: {text[:300]}")
    found: dict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)
    return dict(found)


def ask(url: str, body: Mapping[str, Any]) -> Answer:
    """Stream a completion; one of :data:`ERRORS` if it fails or does not output ``max_tokens`` tokens."""
    begun, times, tokens, reason = time.perf_counter(), [], 0, None
    with sent(url, "POST", "/v1/completions", body) as connection:
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"status {response.status}: {response.read().decode(errors='replace').strip()[:300]}")
        for line in response:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data:"))
            if "error" in event:
                raise OSError(str(event["error"]))
            if event.get("choices"):
                times.append(time.perf_counter())
                reason = event["choices"][0].get("finish_reason") or reason
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if reason != "length" or tokens != body["max_tokens"]:
        raise OSError(f"ended by {reason} after {tokens} of {body['max_tokens']} tokens")
    return times[0] - begun, (times[-1] - times[0]) / (tokens - 1)


def ask_all(url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[Answer | str]:
    """Send all requests, ``concurrency`` at once. An element is as from :func:`ask`, or the error of the request."""

    def attempt(body: Mapping[str, Any]) -> Answer | str:
        try:
            return ask(url, body)
        except ERRORS as error:
            return f"{type(error).__name__}: {error}"

    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(pool.map(attempt, bodies))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, requests fail once the server has ended


def failure(what: str, log: Path) -> OSError:
    """The error of a server, with the last lines of its log."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return OSError("\n".join([f"the server {what}; the end of {log}:", *lines]))


@contextmanager
def started(
    command: list[str], environment: dict[str, str], log: Path, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that writes to ``log``. In the end, it and the processes that it started are ended."""
    with log.open("w") as output:
        common: dict[str, Any] = dict(stdout=output, stderr=output, start_new_session=True, text=True)
        process = subprocess.Popen(command, env=environment, **common, **options)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running(command: list[str], environment: dict[str, str], port: int, log: Path, limit: float) -> Iterator[str]:
    """Start a server that listens on ``port``, yield its URL once it is healthy, and end all its processes.

    Raises:
        OSError: the server ended by itself, or is not healthy after ``limit`` seconds. The message has the last lines
            of ``log``, to which the server writes.
    """
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + limit
    with started(command, environment, log) as process:
        while True:
            with suppress(OSError, HTTPException):
                if exchange(url, "GET", "/health", timeout=10)[0] == 200:
                    break
            if process.poll() is not None:
                raise failure(f"ended with status {process.returncode}", log)
            if time.monotonic() > deadline:
                raise failure(f"is not healthy after {limit:g} seconds", log)
            time.sleep(0.5)
        try:
            yield url
        except (OSError, HTTPException) as error:
            with suppress(subprocess.TimeoutExpired):  # connections break a moment before the process has ended
                raise failure(f"ended with status {process.wait(1)}", log) from error
            raise


class Engine:
    """An engine of vLLM in a separate process: :class:`bench.vllm_engine.Engine`, which imports vLLM at once.

    Args:
        stack: ends the process.
        python: Python of vLLM's environment.
        environment, log: environment and log of the process.
    """

    measures: Row  # columns of its lines in the summary

    def __init__(self, stack: ExitStack, python: str, environment: dict[str, str], log: Path) -> None:
        self.log, (read, write) = log, os.pipe()
        command = [python, "-m", "bench.vllm_engine", str(write)]
        options = dict(stdin=subprocess.PIPE, pass_fds=[write], cwd=Path(__file__).parents[1])
        self._process = stack.enter_context(started(command, environment, log, **options))
        os.close(write)
        self._answers = stack.enter_context(os.fdopen(read))

    def call(self, name: str, limit: float = SECONDS, **arguments: Any) -> Any:
        """The result of a method in the process. Raises OSError if it ends, or is ended after ``limit`` seconds."""
        assert self._process.stdin is not None
        timer = Timer(limit, self._process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
            line = self._answers.readline()
        finally:
            timer.cancel()
        if not line:
            raise failure(f"ended with status {self._process.wait()} in {name}", self.log)
        return json.loads(line)


def free_port() -> int:
    """A free port below the ephemeral ones, with room above it for the further ports that SGLang takes."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000, 500):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("no port from 20,000 to 32,000 is free")


def environment_of(value_model: str, stack: ExitStack) -> dict[str, str]:
    """The environment of a server with this ``LENVM_VALUE_MODEL``."""
    environment = {key: text for key, text in os.environ.items() if value_model != "off" or key[:6] != "LENVM_"}
    # vLLM's processes share metrics by files in an empty folder.
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return environment | {"LENVM_VALUE_MODEL": value_model, "PROMETHEUS_MULTIPROC_DIR": folder}


@contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, tuple[ExitStack, Engine, dict[str, Any]]]]:
    """The process of each engine, what ends it, and the arguments of its start. All import vLLM at the same time."""
    with ExitStack() as stack:
        found = {}
        for name, value_model in args.servers.items():
            own = stack.enter_context(ExitStack())
            folder = own.enter_context(tempfile.TemporaryDirectory())
            is_random = value_model == RANDOM_PROBE or value_model in DIMENSIONS
            environment = environment_of(f"{folder}/values" if is_random else value_model, own)
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
            engine = Engine(own, args.python, environment, args.out / f"{name}.log")
            call = dict(model=args.model, value_model=value_model, folder=folder, options=args.options)
            found[name] = own, engine, call
        yield found


@contextmanager
def server(args: argparse.Namespace, name: str, about: dict[str, Any]) -> Iterator[str | Engine]:
    """The URL of a server, or an engine; ``about`` gets the server's command or URL, and the engine's version."""
    with ExitStack() as stack:
        if args.in_process:
            own, engine, call = args.engines[name]
            stack.enter_context(own)
            found = engine.call("start", args.startup_seconds, **call)
            engine.measures = {key: round(x, 4) for key, x in found.pop("measures").items()}
            about |= {"engine": f"vllm {found.pop('version')}", name: shlex.join(args.options)} | found
            server: str | Engine = engine
        else:
            server = about[name] = getattr(args, f"{name}_url")
            if server is None:
                places = dict(python=args.python, model=args.model, port=free_port())
                command = [part.format(**places) for part in shlex.split(args.command or COMMANDS[args.engine])]
                command += args.options
                about[name] = shlex.join(command)
                print(f"{name}: {about[name]}", flush=True)
                environment, log = environment_of(args.servers[name], stack), args.out / f"{name}.log"
                server = stack.enter_context(running(command, environment, places["port"], log, args.startup_seconds))
            version = json.loads(exchange(server, "GET", VERSION[args.engine])[1])["version"]
            about["engine"] = f"{args.engine} {version}"
        if name != "base" and STEPS not in metrics(server):
            raise ValueError(f"the guided server must run the plugin, but /metrics of {name} has no {STEPS}")
        yield server


def bodies_of(args: argparse.Namespace, name: str, k: int, head: str, count: int, tokens: int) -> list[dict[str, Any]]:
    """``count`` requests for the server ``name`` with ``tokens`` output tokens each.

    In process, prompts are random tokens, few for a warm-up."""
    common = {**args.sampling, "model": args.model, "top_k": k, "max_tokens": tokens, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    common |= {} if name in UNGUIDED else {GUIDANCE[args.engine]: args.guidance}
    prompts: list[Any] = [f"[{head} {i}] {args.prompts[i % len(args.prompts)]}" for i in range(count)]
    if args.in_process:
        length = args.prompt_tokens if tokens == args.max_tokens else tokens
        prompts = [random.Random(prompt).choices(range(PROMPT_IDS), k=length) for prompt in prompts]
    return [common | {"seed": i, "prompt": prompt} for i, prompt in enumerate(prompts)]


def sender(server: str | Engine, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> Callable[[], list[Any]]:
    """Function that sends all requests and returns their answers as :func:`ask_all`."""
    if not isinstance(server, Engine):
        return partial(ask_all, server, bodies, concurrency)
    server.call("prepare", bodies=bodies, concurrency=concurrency)
    return partial(server.call, "run")


def measure(
    args: argparse.Namespace, name: str, server: str | Engine, k: int, concurrency: int
) -> tuple[Row, Counter[str]]:
    """Warm up and measure a condition; a line of the summary, and how often each failure occurred."""
    sender(server, bodies_of(args, name, k, f"warm-up {k} {concurrency}", concurrency, WARM_UP_TOKENS), concurrency)()
    bodies = bodies_of(args, name, k, f"{k} {concurrency}", args.num_prompts or concurrency, args.max_tokens)
    send = sender(server, bodies, concurrency)
    before, begun = metrics(server), time.perf_counter()
    outcomes = send()
    seconds, after = time.perf_counter() - begun, metrics(server)

    grown = {key: after.get(key, 0.0) - before.get(key, 0.0) for key in (STEPS, MILLISECONDS, *FAILURES)}
    failures = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    row: Row = dict(server=name, k=k, concurrency=concurrency, requests=len(bodies), failed=failures.total())
    row |= dict(seconds=seconds, tokens_per_s=(len(bodies) - row["failed"]) * args.max_tokens / seconds)
    times = np.array([outcome for outcome in outcomes if not isinstance(outcome, str)]).reshape(-1, 2) * 1e3
    if len(times):
        ttft, tpot = np.percentile(times, (50, 99), axis=0).T.tolist()
        row |= dict(ttft_ms=ttft[0], ttft_p99_ms=ttft[1], tpot_ms=tpot[0], tpot_p99_ms=tpot[1])
    if len(times) == len(bodies) <= concurrency:
        row["decode_ms"] = times[times[:, 0].argmax(), 1].item()
    row |= server.measures if isinstance(server, Engine) else {}
    if name not in UNGUIDED:
        row["guided_steps"] = int(grown[STEPS])
        row |= {"step_ms": grown[MILLISECONDS] / grown[STEPS]} if grown[STEPS] else {}
        failures.update({f"{key} has grown": int(grown[key]) for key in FAILURES if grown[key]})
        if not grown[STEPS]:
            failures["no step was guided"] = 1
    return {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}, failures


def ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Guided over base, if the condition is also in ``rows``."""
    condition = ("base", row["k"], row["concurrency"])
    base = next((x for x in rows if (x["server"], x["k"], x["concurrency"]) == condition), {})
    known = (name for name in RATIOS if base.get(name) and name in row)
    return {f"{name.removesuffix('_ms')}_ratio": round(row[name] / base[name], 4) for name in known}


def write(out: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write ``summary.csv`` and ``summary.json``."""
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "summary.json").write_text(json.dumps({**about, "conditions": rows}, indent=1) + "\n")


def plot(out: Path, rows: Sequence[Row]) -> None:
    """Plot throughput against concurrency, and the ratio of TPOT against k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def draw(file: str, x: str, y: str, line: str) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        with_y = [row for row in rows if y in row]
        for name, value in sorted({(row["server"], row[line]) for row in with_y}):
            points = sorted((row[x], row[y]) for row in with_y if (row["server"], row[line]) == (name, value))
            axes.plot(*zip(*points, strict=True), "--o" if name == "base" else "-o", label=f"{name}, {line} {value}")
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        if with_y:
            axes.legend(fontsize="small")
        figure.savefig(out / file, dpi=120, bbox_inches="tight")
        pyplot.close(figure)

    draw("throughput.png", "concurrency", "tokens_per_s", "k")
    draw("tpot.png", "k", "tpot_ratio", "concurrency")


def _json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--out", type=Path, required=True, help="folder for the results")
    add("--engine", choices=COMMANDS, default="sglang", help=default)
    add("--model", required=True, help="base model, as the server takes it; requests give it as the model's name")
    add("--value-model", nargs="+", help="LENVM_VALUE_MODEL of the guided server that is started; several in process")
    add("--in-process", action="store_true", help="engines without servers (only --engine vllm)")
    add("--base-url", help="running server to use in place of the base server")
    add("--guided-url", help="running server to use in place of the guided server")
    add("--command", help="server to start, with {model} and {port} (default: the engine's, by --python)")
    add("--python", default=sys.executable, help=f"Python of the server's environment {default}")
    add("--startup-seconds", type=float, default=1200, help=f"until a server must be healthy {default}")
    add("--k", nargs="+", type=int, help="numbers of candidates (default: 1 to 5, in process 5)")
    add("--concurrency", nargs="+", type=int, help="requests at once (default: 1 8 64, in process also 256)")
    add("--num-prompts", type=int, help="requests of a condition (default: 64, in process --concurrency)")
    add("--prompts", type=Path, metavar="FILE", help="text file with a prompt per line (default: four questions)")
    add("--prompt-tokens", type=int, default=512, help=f"random tokens of a prompt in process {default}")
    add("--max-tokens", type=int, default=128, help=f"output tokens of a request {default}")
    add(
        "--sampling",
        type=_json_object,
        default='{"temperature": 1.0, "min_p": 0.01}',
        help=f"filters of all requests {default}",
    )
    add("--guidance", type=_json_object, help="of guided requests (default: --max-tokens as target_length)")
    add("options", nargs="*", metavar="-- OPTION", help="further options of the servers that are started")
    args = parser.parse_args()
    try:
        _check(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    """Read the prompts and fill in the guidance; ValueError names the first flag that is wrong."""
    args.guidance = args.guidance or {"target_length": args.max_tokens}
    args.k = args.k or ([5] if args.in_process else [1, 2, 3, 4, 5])
    args.concurrency = args.concurrency or [1, 8, 64, *([256] if args.in_process else [])]
    args.num_prompts = args.num_prompts or (None if args.in_process else 64)
    candidates = int(os.environ.get("LENVM_MAX_CANDIDATES", 8))
    for flag, numbers, least, most, why in (
        ("--num-prompts", [args.num_prompts or 1], 1, math.inf, ""),
        ("--max-tokens", [args.max_tokens], 2, math.inf, ""),
        ("--concurrency", args.concurrency, 1, args.num_prompts or math.inf, " (--num-prompts)"),
        ("--k", args.k, 1, candidates, " (LENVM_MAX_CANDIDATES)"),
    ):
        if not least <= min(numbers) <= max(numbers) <= most:
            limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ValueError(f"{flag} must be {limits}{why}, got {numbers}")
    urls = [args.base_url, args.guided_url]
    if any(urls) == bool(args.value_model):
        raise ValueError("either --value-model or both --base-url and --guided-url must be given")
    if args.in_process and (args.engine != "vllm" or any(urls)):
        raise ValueError("--in-process must be given with --engine vllm and --value-model")
    if len(args.value_model or "W") > 1 and not args.in_process:
        raise ValueError(f"--value-model must be one without --in-process, got {args.value_model}")
    guided = {Path(text).name if args.in_process else "guided": text for text in args.value_model or ["off"]}
    args.servers = {"base": "off"} | guided
    if any(urls) and not all((url or "").startswith("http://") for url in urls):
        raise ValueError(f"--base-url and --guided-url must both begin with http://, got {urls}")
    lines = QUESTIONS if args.prompts is None else args.prompts.read_text(encoding="utf-8").splitlines()
    args.prompts = [line for line in lines if line.strip()]
    if not args.prompts:
        raise ValueError("--prompts must have at least one prompt, got an empty file")


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"command": shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]])}
    about |= {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    if not args.in_process:  # this process uses no memory of the GPU
        about["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    rows: list[Row] = []
    about["failures"] = failed = []
    status = 0
    with ExitStack() as stack:
        args.engines = stack.enter_context(engines(args)) if args.in_process else {}
        for name in args.servers:
            try:
                with server(args, name, about) as target:
                    # A call returns after the imports of its engine, which must not run during a measurement.
                    for _, other, _ in args.engines.values() if name == "base" else ():
                        with suppress(OSError):
                            other.call("metrics")
                    idle = ["idle"] if args.in_process and name == list(args.servers)[1] else []
                    for each, k, concurrency in product([*idle, name], args.k, args.concurrency):
                        row, failures = measure(args, each, target, k, concurrency)
                        rows.append(row | ratios(row, rows))
                        failed += [f"{each}, k {k}, concurrency {concurrency}: {n} x {x}" for x, n in failures.items()]
                        write(args.out, about, rows)
                        print(json.dumps(rows[-1]), flush=True)
            except ERRORS as error:
                print(f"error: {error}", file=sys.stderr)
                status = 2
                if not args.in_process:
                    return status
    with suppress(ImportError):
        plot(args.out, rows)
    print("\n".join(failed), file=sys.stderr)
    return status or int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a server that was started must end, too
    sys.exit(main())
