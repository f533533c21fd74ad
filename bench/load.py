"""Mixed traffic against a running server of SGLang or vLLM: does every answer stay what it is on a quiet server?

    python -m bench.load URL [--minutes 10] [--workers 6] [--pid PID] [--output DIR]

Some requests are asked one at a time first: guided, unguided, with a JSON schema, with a span, and second turns that
share their prefix with first ones. Then all are asked again and again, several at once and in an order drawn by a seed,
among requests whose client hangs up and others that are wrong. An answer has to be the quiet server's, a wrong request
has to get status 400, and what the server holds has to be what it was: memory of its processes (``--pid``), tokens of
its cache, guidance that failed. ``--grammars`` and ``--values`` add what a server may not have.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.study.served import Counters
from lenvm_kernels.evaluate.servers import Server

SECONDS = 600  # that an answer may take
IDLE_SECONDS = 30  # at most, until a server has counted that nothing runs
# Metrics that say what is held: those of the engines' caches, and this package's.
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
HELD = ("sglang:num_used_tokens", "vllm:kv_cache_usage_perc", *RUNNING)
FAULTS = ("lenvm:fallbacks_total", "lenvm:without_room_total")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "kind": {"enum": ["long", "short"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Write about a walk in the rain.",
    "How does a boat float?",
    "Name three things in a kitchen, and say what each is for.",
    "Why do we sleep?",
)


@dataclass(frozen=True)
class Request:
    """A request, and what its answer has to be.

    Attributes:
        kind: what it is of.
        body: of a chat completion.
        expected: the quiet server's answer; None: any, or none.
    """

    kind: str
    body: dict[str, Any]
    expected: str | None = None


@dataclass
class Report:
    """What came of a run.

    Attributes:
        engine: which the server is.
        about: the command, the server's, and the date.
        seconds: that the traffic took.
        answers: by kind.
        different: answers that were not the quiet server's, by kind.
        wrong: what else went wrong, in words.
        before, after: metrics of what the server holds, and MiB of its processes, around the traffic.
    """

    engine: str
    about: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"answers": dict(self.answers), "different": dict(self.different)}

    def markdown(self) -> str:
        """Tables of the answers and of what is held."""
        lines = [f"# {self.seconds:.0f} seconds of mixed traffic against {self.engine}", ""]
        lines += [f"- {name}: {text}" for name, text in self.about.items()]
        lines += ["", "| requests | answers | different |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| {kind} | {n} | {self.different[kind]} |" for kind, n in sorted(self.answers.items())]
        lines += ["", "| held | before | after |", "| --- | --- | --- |"]
        lines += [f"| {name} | {x:g} | {self.after.get(name, 0):g} |" for name, x in self.before.items()]
        return "\n".join([*lines, "", *(f"- {words}" for words in self.wrong)]).rstrip() + "\n"


class Load:
    """Traffic for one server.

    Args:
        server: to be asked.
        pid: of its first process; None: its memory is not looked at.
        model: the name that requests give.
        questions: what they ask.
    """

    def __init__(
        self,
        server: Server,
        *,
        pid: int | None = None,
        model: str = "default",
        questions: Sequence[str] = QUESTIONS,
    ) -> None:
        self.server, self.pid, self.model, self.questions = server, pid, model, questions
        self._guidance = {"sglang": "custom_params", "vllm": "vllm_xargs"}[server.engine]

    def requests(self, *, grammars: bool, values: bool, span_end: int | None, max_tokens: int) -> list[Request]:
        """Those whose answers are known, once a quiet server has been asked."""
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("guided", {"target_length": max_tokens // 3}),
            ("guided", {"value_constraint": "ge_near", "target_length": max_tokens // 2, "value_stride": 1}),
            ("unguided", {}),
        ]
        if span_end is not None:
            kinds.append(("span", {"end_token_ids": [span_end], "thinking_budget": max_tokens // 4}))
        if values:
            kinds.append(("with predicted lengths", {"target_length": max_tokens // 4, "return_values": True}))
        found = []
        for i, question in enumerate(self.questions):
            for kind, guidance in kinds:
                more: dict[str, Any] = {"max_tokens": max_tokens, "seed": 7 * i + len(found)}
                if kind == "span":  # what follows is drawn by the engine, from no seed in SGLang
                    more["stop_token_ids"] = [span_end]
                found.append(self._request(kind, [question], guidance, **more))
            if grammars:
                schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
                more = {"response_format": schema, "max_tokens": 64, "seed": i}
                found.append(self._request("with a schema", [question], {"target_length": 20}, **more))
        return found

    def _request(self, kind: str, messages: Sequence[str], guidance: Mapping[str, Any], **more: Any) -> Request:
        roles = ("user", "assistant")
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)],
            # Without guidance SGLang draws from no seed.
            "temperature": 0.8 if guidance else 0.0,
            "top_k": 8,
            **more,
        }
        return Request(kind, body | ({self._guidance: dict(guidance)} if guidance else {}))

    def quiet(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests and second turns of some, each with its answer, asked one after the other."""
        answered = []
        for request in requests:
            answered.append(Request(request.kind, request.body, self._answer(request)))
        for request in [x for x in answered if x.kind == "guided"]:
            texts = [message["content"] for message in request.body["messages"]]
            turns = [*texts, request.expected or ".", "Go on."]
            guidance = request.body[self._guidance]
            more = {name: request.body[name] for name in ("max_tokens", "seed")}
            second = self._request("second turn", turns, guidance, **more)
            answered.append(Request(second.kind, second.body, self._answer(second)))
        return answered

    def run(self, requests: Sequence[Request], seconds: float, *, workers: int, seed: int = 0) -> Report:
        """Ask them in any order for so long, with others between them."""
        report, lock, end = Report(self.server.engine), threading.Lock(), time.monotonic() + seconds
        report.before = self.held()
        started = time.monotonic()

        def work(number: int) -> None:
            draws = random.Random(1000 * seed + number)
            while time.monotonic() < end:
                request, kind = draws.choice(requests), draws.random()
                try:
                    if kind < 0.1:
                        found = "aborted", self._hang_up(request, draws.uniform(0.05, 1.0))
                    elif kind < 0.15:
                        found = "refused", self._refused(request)
                    else:
                        is_same = self._answer(request) == request.expected
                        found = request.kind, None if is_same else "different"
                except (OSError, http.client.HTTPException, ValueError) as error:
                    found = request.kind, f"{type(error).__name__}: {error}"
                with lock:
                    report.answers[found[0]] += 1
                    if found[1] == "different":
                        report.different[found[0]] += 1
                    elif found[1]:
                        report.wrong.append(found[1])

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
        report.seconds = time.monotonic() - started
        # Aborted requests leave with the step after, and what is held is counted in steps.
        self._answer(requests[0])
        for _ in range(IDLE_SECONDS):
            time.sleep(1)
            report.after = self.held()
            if not any(report.after.get(name.partition(":")[2]) for name in RUNNING):
                break
        for name in (name.partition(":")[2] for name in FAULTS):
            before, after = (held.get(name, 0.0) for held in (report.before, report.after))
            if after > before:
                report.wrong.append(f"{name} rose from {before:g} to {after:g}")
        return report

    def held(self) -> dict[str, float]:
        """What the server holds now."""
        counters = Counters(self._ask("GET", "/metrics", None)[1])
        found = {name.partition(":")[2]: counters.total(name) for name in HELD + FAULTS if name in counters}
        if self.pid is not None:
            first = psutil.Process(self.pid)
            found["MiB"] = sum(p.memory_info().rss for p in [first, *first.children(recursive=True)]) / 2**20
        return found

    def _answer(self, request: Request) -> str:
        status, text = self._ask("POST", "/v1/chat/completions", request.body)
        if status != 200:
            raise ValueError(f"status {status} for {request.kind}: {text[:300]}")
        return json.loads(text)["choices"][0]["message"]["content"]

    def _refused(self, request: Request) -> str | None:
        """Ask what cannot be; what is wrong with the reply, if anything."""
        body = request.body | {self._guidance: {"target_length": -1}}
        status, text = self._ask("POST", "/v1/chat/completions", body)
        return None if status == 400 and "target_length" in text else f"status {status} for a bad request: {text[:300]}"

    def _hang_up(self, request: Request, seconds: float) -> None:
        """Ask, and leave before the answer is there, or after that."""
        connection = self._connection()
        body = json.dumps(request.body | {"stream": True})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        time.sleep(seconds)
        connection.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        connection = self._connection()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        address = urlsplit(self.server.url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=6, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=60, help="of an answer")
    parser.add_argument(
        "--model", default="default", help="the name that requests give; vLLM's is its --served-model-name"
    )
    parser.add_argument("--pid", type=int, help="of the server, whose memory is looked at")
    parser.add_argument("--grammars", action="store_true", help="ask for JSON schemas, too")
    parser.add_argument("--values", action="store_true", help="ask for predicted lengths, too")
    parser.add_argument("--span-end", type=int, help="a token: ask for spans that it ends, too")
    parser.add_argument("--server", default="", help="how the server was started, for the page")
    parser.add_argument("--output", type=Path, help="a folder for load.json and load.md")
    args = parser.parse_args()
    load = Load(Server.find("URL", args.url), pid=args.pid, model=args.model)
    asked = load.requests(
        grammars=args.grammars, values=args.values, span_end=args.span_end, max_tokens=args.max_tokens
    )
    report = load.run(load.quiet(asked), 60 * args.minutes, workers=args.workers)
    flags = f"--minutes {args.minutes:g} --workers {args.workers} --max-tokens {args.max_tokens}"
    flags += " --grammars" * args.grammars + " --values" * args.values
    flags += "" if args.span_end is None else f" --span-end {args.span_end}"
    report.about = {
        "command": f"python -m bench.load {args.url} {flags} --pid PID",
        "server": args.server,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(report.markdown(), end="")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "load.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        (args.output / "load.md").write_text(report.markdown())
    raise SystemExit(bool(report.wrong or report.different))


if __name__ == "__main__":
    main()
