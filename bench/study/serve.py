"""Decoding with and without guidance in the server of SGLang or vLLM, over HTTP: who takes the time of a token.

Two lifecycles of the server, one after the other: without the plugin, and with it. Each gets the same prompts, each
prompt several times, as requests of their own that all wait at once. What is measured under one set of request
parameters is a condition:

- ``plain``: without the plugin, as published over the whole vocabulary (top-k off);
- ``plain-k5`` and so on: the same with the filters of guided requests, what these are compared with;
- ``neutral``: with the plugin, but parameters that guide nothing: what the plugin costs those who do not use it;
- ``k5-stride1`` and so on: guided, with that limit on candidates and that stride. With k = 1 the engine decodes
  greedily: there is nothing to guide.

Each is run with outputs of fixed and of free length. Fixed: ends of sequence are passed over, so that all conditions do
the same work. Free: an output ends by itself; then only rates compare, as the outputs have different lengths.

Answers are streamed, so that the time to the first token is known. The time of the base model and of the value model is
what the server itself says. In SGLang on a GPU both are times of its stream. In SGLang on a CPU and in vLLM the base
model has the rest of the engine's passes, the engine's sampler included. vLLM's passes take as long as the engine waits
for them, which on a GPU overlaps the host's work, and a guided step is counted during a later one. All other time is
``other``: the scheduler, tokens to text, HTTP; in SGLang on a GPU the engine's sampler and gaps, too. The stages of
guided steps come from ``LENVM_TIMING``.

A prompt is a JSON object in a line of the file, with one of these fields; others are passed over:

    {"prompt": "What is a comet?"}                                   what a user says, in the model's chat template
    {"messages": [{"role": "user", "content": "What is a comet?"}]}  a chat, in the model's chat template
    {"input_ids": [1, 4093, 198]}                                    the tokens themselves

The folder gets ``summary.md``, ``summary.json``, ``summary.csv`` (a line a condition) and plots; ``requests.jsonl`` (a
line a request), ``samples.jsonl`` (a line a second), ``steps.PROCESS.jsonl`` (a line a guided step) and the servers'
logs. The form of the first table is that of the authors' timing study.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.study.monitor import Monitor
from bench.study.result import stages_of
from bench.study.served import Answer, Condition, Load, Models, Result, Work, label
from bench.study.served_report import failures_of, write_summary
from bench.study.server import FAULTS, Server, Setup, events, reserved_port, running


def ask(server: Server, load: Load, condition: Condition, prompt: int, sample: int) -> Answer:
    """Send one request. Whatever goes wrong with it is in the answer."""
    begin = time.perf_counter()
    first, prompt_tokens, output_tokens, reason = None, 0, 0, None
    try:
        path, body = server.body(load, condition, prompt, sample)
        for event in events(server.port, path, body, load.timeout):
            prompt_tokens, output_tokens, ended = server.progress(event)
            reason = ended or reason
            if first is None and output_tokens:
                first = time.perf_counter() - begin
        if first is None:
            raise OSError("no token came")
        return Answer(prompt, sample, time.perf_counter() - begin, first, prompt_tokens, output_tokens, reason)
    except (*FAULTS, ValueError, KeyError, TypeError) as error:
        return Answer(prompt, sample, time.perf_counter() - begin, error=f"{type(error).__name__}: {error}")


def ask_all(server: Server, load: Load, condition: Condition) -> tuple[float, list[Answer]]:
    """Send every prompt as often as it has samples; seconds from the first request to the last answer."""
    requests = [(prompt, sample) for prompt in range(len(load.prompts)) for sample in range(load.samples)]
    pool = ThreadPoolExecutor(load.concurrency or len(requests))
    begin = time.perf_counter()
    try:
        futures = [pool.submit(ask, server, load, condition, *request) for request in requests]
        answers = [future.result() for future in futures]
        return time.perf_counter() - begin, answers
    finally:
        # After an interrupt nobody waits for answers: they fail when the server ends, a moment later.
        pool.shutdown(wait=False, cancel_futures=True)


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
        for file in (*self._step_files(), *(out / f"{name}.jsonl" for name in ("requests", "samples"))):
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
        setup = self._setup if steps is not None else replace(self._setup, value_model=None)
        with reserved_port() as port:
            print(f"{name} server: {' '.join(setup.command(port))}", flush=True)
            with running(setup, self._out / f"{name}.log", port, steps) as server:
                self._environment["engine"] = server.version()
                if steps is not None:
                    server.check_plugin()
                for condition in conditions:
                    self._measure(server, condition)

    def _measure(self, server: Server, condition: Condition) -> None:
        load, name = self._load, label(condition)
        ask(server, load, condition, 0, 0)  # what the first request of its kind compiles, the others do not
        server.forget()
        before, lines = server.settled(), self._step_lines()
        with Monitor(server.session) as monitor:
            seconds, answers = ask_all(server, load, condition)
        after = server.settled()
        result = Result(
            condition=condition,
            seconds=seconds,
            answers=answers,
            work=Work.between(before, after),
            samples=monitor.samples,
            slots=after.slots,
            stages=stages_of(self._step_lines()[len(lines) :], self._steps),
            load_average=os.getloadavg()[0],
        )
        self._results.append(result)
        self._append("requests", ({"condition": name} | asdict(answer) for answer in answers))
        self._append("samples", ({"condition": name} | asdict(sample) for sample in monitor.samples))
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
