"""A stand-in for SGLang's server, with the answers and counters that a study reads; they are known beforehand.

A copy of this file is a package's ``launch_server.py``, so it imports the standard library only.

A prompt's first token says what becomes of its requests: 400 is refused, 499 aborted, 500 ends a server with the
plugin, 600 is never answered, and any other number is the length of its free outputs. The rest is in the variable
FAKE_SGLANG, a JSON object: ``log``, a file that gets a line for each start, request and end; ``gpu``,
``without_plugin``, ``stubborn`` (it passes SIGTERM over), ``late`` (it is never healthy), ``broken`` (it ends at once).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REFUSED, ABORTED, DEADLY, ENDLESS = 400, 499, 500, 600
# Seconds and milliseconds of a pass, of a guided row, and of the stages of a step, times the flushes until then.
BASE_SECONDS, VALUE_MS, DEVICE_SECONDS = 0.25, 2.0, 0.125
STAGE_MS = {"candidates": 1.0, "forward": 4.0, "head": 0.5, "reweight": 0.25, "sample": 0.125}


class FakeServer(ThreadingHTTPServer):
    """Listens at once."""

    daemon_threads = True

    def __init__(self, port, facts):
        super().__init__(("127.0.0.1", port), Handler)
        self.facts, self.lock, self.idle, self.steps, self.flushes = facts, threading.Lock(), 0, 0, 0
        self.has_plugin = "LENVM_VALUE_MODEL" in os.environ and not facts.get("without_plugin")
        self.counted, self.published = {}, {}
        if self.has_plugin:
            self.count("lenvm:guided_steps_total", 0)
        self.publish()

    def write(self, **line):
        if "log" in self.facts:
            with open(self.facts["log"], "a") as file:
                file.write(json.dumps(line) + "\n")

    def count(self, name, number, **labels):
        labels = ",".join(f'{key}="{value}"' for key, value in {"model_name": "a, {b}", **labels}.items())
        key = f"{name}{{{labels}}}"
        self.counted[key] = self.counted.get(key, 0) + number

    def publish(self):
        """As SGLang does every second: until then its counters know nothing of the work."""
        self.idle += 1
        self.published = self.counted | {"sglang:scheduler_idle_seconds_total": self.idle}
        self.published["sglang:max_total_num_tokens"] = 4321 + self.has_plugin

    def generate(self, sampling, length):
        """Count a request with so many tokens, as if it were alone in its batches."""
        passes = "sglang:cuda_graph_passes_total"
        self.count(passes, 1, mode="prefill_none")
        self.count(passes, length - 1, mode="decode_cuda_graph" if self.facts.get("gpu") else "decode_none")
        if self.facts.get("gpu"):
            self.count("sglang:forward_execution_seconds_total", DEVICE_SECONDS, category="extend")
            self.count("sglang:forward_execution_seconds_total", DEVICE_SECONDS * (length - 1), category="decode")
        stage = "sglang:scheduler_stage_seconds_total"
        self.count(stage, 7.0, category="idle")
        params = sampling.get("custom_params") or {}
        guided = length if self.has_plugin and "value_stride" in params and sampling["top_k"] != 1 else 0
        due = len(range(0, guided, params.get("value_stride", 1)))
        self.count("lenvm:rows_total", due, status="guide")
        self.count("lenvm:rows_total", guided - due, status="not_due")
        self.count("lenvm:value_model_milliseconds_total", VALUE_MS * due)
        self.count(stage, BASE_SECONDS * length + VALUE_MS * due / 1e3, category="run_batch")
        if guided and "LENVM_TIMING" in os.environ:
            steps, stages = Path(os.environ["LENVM_TIMING"]), STAGE_MS | {"total": sum(STAGE_MS.values())}
            for rank in (1, 2):  # each takes the same steps; the second is slower
                times = {f"{stage}_ms": ms * self.flushes * rank for stage, ms in stages.items()}
                with steps.with_name(f"{steps.stem}.{rank}{steps.suffix}").open("a") as file:
                    for step in range(self.steps, self.steps + guided):
                        file.write(json.dumps({"step": step, "rows": 1} | times) + "\n")
            self.steps += guided


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, content):
        text = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        server = self.server
        if self.path == "/health":
            self.answer(503 if server.facts.get("late") else 200, "")
        elif self.path == "/server_info":
            self.answer(200, {"version": "0.fake"})
        else:
            assert self.path == "/metrics", self.path
            with server.lock:  # what it tells is that of the call before
                text = "".join(f"{key} {number}\n" for key, number in server.published.items())
                server.publish()
            self.answer(200, "# HELP lenvm:other Something.\n" + text)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/flush_cache":
            server.write(flushed=True)
            server.flushes += 1
            return self.answer(200, "")
        assert self.path == "/generate", self.path
        server.write(request=body)
        first, sampling = body["input_ids"][0], body["sampling_params"]
        if first == REFUSED:
            return self.answer(400, {"error": {"message": "too long by 7 tokens"}})
        if first == DEADLY and server.has_plugin:
            print("a bad end", flush=True)
            os._exit(3)
        if first == ENDLESS:
            time.sleep(600)
        reason = {"type": "abort", "message": "no room"} if first == ABORTED else {"type": "length"}
        length = sampling["max_new_tokens"] if sampling["ignore_eos"] else min(first, sampling["max_new_tokens"])
        with server.lock:
            server.generate(sampling, length)
        facts = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": length, "finish_reason": reason}
        self.answer(200, {"output_ids": [1] * length, "meta_info": facts})


def main():
    facts = json.loads(os.environ["FAKE_SGLANG"])
    if facts.get("broken"):
        print("\n".join(f"line {i}" for i in range(100)), flush=True)
        sys.exit("no such model")
    server = FakeServer(int(sys.argv[sys.argv.index("--port") + 1]), facts)
    helper = subprocess.Popen(["sleep", "600"])  # a process beside it, as SGLang has some

    def end(*_):
        server.write(ended=os.getpid())
        if not facts.get("stubborn"):
            helper.kill()
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    names = ("LENVM_VALUE_MODEL", "LENVM_CONFIG", "SGLANG_USE_CPU_ENGINE", "SGLANG_ENABLE_METRICS_DEVICE_TIMER")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    server.write(started=os.getpid(), arguments=sys.argv[1:], variables=variables)
    server.serve_forever()


if __name__ == "__main__":
    main()
