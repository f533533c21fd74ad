"""Mixed traffic against a running server of SGLang or vLLM: each answer must equal the answer of the idle server.

    python -m bench.load URL [--engine vllm] [--minutes 10] [--workers 6] [--pid PID] [--output FILE]

First, requests are sent one at a time: guided, unguided, and second turns that share a prefix with first turns; with
``--also`` and ``--span-end``, also with a JSON schema, with predicted lengths, and with a span. Then the same requests
are sent concurrently in a random order, among aborted and invalid requests. Answers must not change, invalid requests
must get status 400, and afterwards memory of the server's processes (``--pid``), cached tokens and failures of guidance
must be as before.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.serve import ERRORS, FAILURES, GUIDANCE, QUESTIONS, exchange, metrics, sent

PATH = "/v1/chat/completions"
IDLE_SECONDS = 30  # time limit for the server to become idle
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
HELD = ("sglang:num_used_tokens", "vllm:kv_cache_usage_perc", *RUNNING, *FAILURES)
OTHERS = ("schema", "values")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "kind": {"enum": ["long", "short"]}},
} | {"required": ["n", "kind"], "additionalProperties": False}
Body = dict[str, Any]
Request = tuple[str, Body, str]  # kind, body of a chat completion, and the answer of the idle server


@dataclass
class LoadReport:
    """Numbers of answers by kind, and the server's metrics before and after."""

    before: dict[str, float]  # result of :func:`held`
    after: dict[str, float] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)  # differs from the answer of the idle server
    wrong: list[str] = field(default_factory=list)  # other failures

    def markdown(self) -> str:
        """Tables of the answers and of the server's metrics."""
        lines = ["| requests | answers | different |", "| --- | --- | --- |"]
        lines += [f"| {kind} | {n} | {self.different[kind]} |" for kind, n in sorted(self.answers.items())]
        lines += ["", "| held | before | after |", "| --- | --- | --- |"]
        lines += [f"| {name} | {x:g} | {self.after.get(name, 0):g} |" for name, x in self.before.items()]
        return "\n".join([*lines, "", *(f"- {text}" for text in self.wrong)]).rstrip() + "\n"


def bodies_of(engine: str, model: str, max_tokens: int, also: Collection[str], span_end: int | None) -> list[Request]:
    """Requests without answers; ``also`` are kinds in :data:`OTHERS`. Spans are included if ``span_end`` is a token."""
    wanted = {"guided", "guided every step", "unguided", *also, "" if span_end is None else "span"}
    kinds: dict[str, Body] = {
        "guided": {"target_length": max_tokens // 3},
        "guided every step": {"value_constraint": "ge_near", "target_length": max_tokens // 2, "value_stride": 1},
        "unguided": {},
        "span": {"end_token_ids": [span_end], "thinking_budget": max_tokens // 4},
        "values": {"target_length": max_tokens // 4, "return_values": True},
        "schema": {"target_length": 20},
    }
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    # SGLang ignores the seed of unguided draws, also after a span.
    changes = {"unguided": {"temperature": 0.0}, "span": {"stop_token_ids": [span_end]}}
    changes |= {"schema": {"response_format": schema, "max_tokens": 64}}
    found = []
    for question in QUESTIONS:
        for kind in [kind for kind in kinds if kind in wanted]:
            body: Body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0.8}
            body |= {"top_k": 8, "max_tokens": max_tokens, "seed": len(found), GUIDANCE[engine]: kinds[kind]}
            found.append((kind, body | changes.get(kind, {}), ""))
    return found


def quiet(url: str, requests: Sequence[Request]) -> list[Request]:
    """Send requests one at a time; returns them with answers, and a second turn for each guided request."""
    found = [(kind, body, answer(url, body)) for kind, body, _ in requests]
    for _, body, text in [request for request in found if request[0] == "guided"]:
        turns = [{"role": "assistant", "content": text or "."}, {"role": "user", "content": "Go on."}]
        second = body | {"messages": [*body["messages"], *turns]}
        found.append(("second turn", second, answer(url, second)))
    return found


def run(url: str, requests: Sequence[Request], seconds: float, workers: int, pid: int | None = None) -> LoadReport:
    """Send ``requests`` of :func:`quiet` in random order from ``workers`` threads, with aborted and invalid ones."""
    report, lock, end = LoadReport(held(url, pid)), threading.Lock(), time.monotonic() + seconds

    def work(number: int) -> None:
        draws = random.Random(number)
        while time.monotonic() < end:
            (name, body, expected), draw, wrong, is_same = draws.choice(requests), draws.random(), "", True
            name = "aborted" if draw < 0.1 else "refused" if draw < 0.15 else name
            try:
                if name == "aborted":
                    with sent(url, "POST", PATH, body | {"stream": True}):
                        time.sleep(draws.uniform(0.05, 1.0))
                elif name == "refused":
                    bad = {key: {"target_length": -1} for key in GUIDANCE.values() if key in body}
                    status, text = exchange(url, "POST", PATH, body | bad)
                    if status != 400 or "target_length" not in text:
                        wrong = f"status {status} for a bad request: {text[:300]}"
                else:
                    is_same = answer(url, body) == expected
            except ERRORS as error:
                wrong = f"{type(error).__name__}: {error}"
            with lock:
                report.answers[name] += 1
                report.different.update([] if is_same else [name])
                report.wrong += [wrong] if wrong else []

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    answer(url, requests[0][1])  # aborted requests leave with the next step, and metrics are updated in steps
    for _ in range(IDLE_SECONDS):
        time.sleep(1)
        report.after = held(url, pid)
        if not any(report.after.get(name) for name in RUNNING):
            break
    grown = [name for name in FAILURES if report.after.get(name, 0) > report.before.get(name, 0)]
    report.wrong += [f"{name} has grown" for name in grown]
    return report


def held(url: str, pid: int | None) -> dict[str, float]:
    """The metrics :data:`HELD`, and MiB of the process ``pid`` and its children."""
    found = {name: number for name, number in metrics(url).items() if name in HELD}
    if pid is not None:
        first = psutil.Process(pid)
        found["MiB"] = sum(process.memory_info().rss for process in [first, *first.children(recursive=True)]) / 2**20
    return found


def answer(url: str, body: Mapping[str, Any]) -> str:
    """The text of a chat completion."""
    status, text = exchange(url, "POST", PATH, body)
    if status != 200:
        raise ValueError(f"status {status}: {text[:300]}")
    return json.loads(text)["choices"][0]["message"]["content"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="running server")
    parser.add_argument("--engine", choices=GUIDANCE, default="sglang", help="(default: %(default)s)")
    parser.add_argument("--model", default="default", help="name of the model in requests; vLLM's --served-model-name")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=6, help="concurrent requests")
    parser.add_argument("--max-tokens", type=int, default=60, help="limit of an answer")
    parser.add_argument("--also", nargs="+", choices=OTHERS, default=(), help="kinds that not all servers support")
    parser.add_argument("--span-end", type=int, help="token that ends a span; enables requests with a span")
    parser.add_argument("--pid", type=int, help="server process to read the memory of")
    parser.add_argument("--output", type=Path, help="Markdown file for the report")
    args = parser.parse_args()
    requests = quiet(args.url, bodies_of(args.engine, args.model, args.max_tokens, args.also, args.span_end))
    report = run(args.url, requests, 60 * args.minutes, args.workers, args.pid)
    command = shlex.join(["python", "-m", "bench.load", *sys.argv[1:]])
    text = f"# Mixed traffic\n\n- command: {command}\n- date: {time.strftime('%Y-%m-%d')}\n\n{report.markdown()}"
    print(text, end="")
    if args.output is not None:
        args.output.write_text(text)
    return int(bool(report.wrong or report.different))


if __name__ == "__main__":
    sys.exit(main())
