"""A stand-in for SGLang's and vLLM's server, with the answers and counters that a study reads, known beforehand.

A copy of this file is a module of a package, so it imports the standard library only. It is the server that its
options are of.

A prompt's first token says what becomes of its requests: 400 is refused, 499 aborted, 500 ends a server with the
plugin, 600 is never answered, and any other number is the length of its free outputs. The rest is in the variable
FAKE_SERVER, a JSON object: ``log``, a file that gets a line for each start, request and end; ``gpu``,
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
        self.is_vllm = "--model" in sys.argv
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
        self.published = dict(self.counted)
        if self.is_vllm:
            self.published['vllm:cache_config_info{block_size="16",num_gpu_blocks="9"}'] = 1.0
            self.published["vllm:num_requests_running"] = 0
        else:
            self.published |= {"sglang:scheduler_idle_seconds_total": self.idle}
            self.published["sglang:max_total_num_tokens"] = 4321 + self.has_plugin

    def generate(self, top_k, params, length):
        """Count a request with so many tokens, as if it were alone in its batches."""
        guided = length if self.has_plugin and "value_stride" in params and top_k != 1 else 0
        due = len(range(0, guided, params.get("value_stride", 1)))
        self.count("lenvm:rows_total", due, status="guide")
        self.count("lenvm:rows_total", guided - due, status="not_due")
        self.count("lenvm:value_model_milliseconds_total", VALUE_MS * due)
        if self.is_vllm:
            for step in range(length):
                ms = BASE_SECONDS * 1e3 + (VALUE_MS if step < due else 0)
                old = int(step > 0)
                print(
                    f"INFO 11-27 Engine 000: Iteration({step}): {1 - old} context requests, 7 context tokens, {old} "
                    f"generation requests, 5 generation tokens, iteration elapsed time: {ms:.2f} ms, GPU KV: 1.0%",
                    "\nEngine 000: Iteration(9): 0 context requests, 0 context tokens, 1 generation requests, "
                    "1 generation tokens, iteration elapsed time: 99.00 ms (dummy), GPU KV cache usage: 0.0%",
                    flush=True,
                )
        else:
            passes, stage = "sglang:cuda_graph_passes_total", "sglang:scheduler_stage_seconds_total"
            self.count(passes, 1, mode="prefill_none")
            self.count(passes, length - 1, mode="decode_cuda_graph" if self.facts.get("gpu") else "decode_none")
            if self.facts.get("gpu"):
                self.count("sglang:forward_execution_seconds_total", DEVICE_SECONDS, category="extend")
                self.count("sglang:forward_execution_seconds_total", DEVICE_SECONDS * (length - 1), category="decode")
            self.count(stage, 7.0, category="idle")
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
        elif self.path == ("/version" if server.is_vllm else "/server_info"):
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
        if self.path == ("/reset_prefix_cache" if server.is_vllm else "/flush_cache"):
            server.write(flushed=True)
            server.flushes += 1
            return self.answer(200, {"success": True} if server.is_vllm else "")
        assert self.path == ("/v1/completions" if server.is_vllm else "/generate"), self.path
        server.write(request=body)
        assert body["stream"]
        prompt, sampling = (body["prompt"], body) if server.is_vllm else (body["input_ids"], body["sampling_params"])
        first = prompt[0]
        if first == REFUSED:
            return self.answer(400, {"error": {"message": "too long by 7 tokens"}})
        if first == DEADLY and server.has_plugin:
            print("a bad end", flush=True)
            os._exit(3)
        if first == ENDLESS:
            time.sleep(600)
        limit = sampling["max_tokens" if server.is_vllm else "max_new_tokens"]
        length = limit if sampling["ignore_eos"] else min(first, limit)
        params = sampling.get("vllm_xargs" if server.is_vllm else "custom_params") or {}
        with server.lock:
            server.generate(sampling["top_k"], params, length)
        self.send_response(200)
        self.end_headers()
        for tokens in (0, 1, length):
            is_last = tokens == length
            if server.is_vllm:
                reason = ("error" if first == ABORTED else "length") if is_last else None
                event = {"choices": [{"finish_reason": reason}]}
            else:
                reason = {"type": "abort", "message": "no room"} if first == ABORTED else {"type": "length"}
                event = {"meta_info": {"finish_reason": reason if is_last else None}}
            facts = event.setdefault("usage" if server.is_vllm else "meta_info", {})
            self.stream(facts.update(prompt_tokens=len(prompt), completion_tokens=tokens) or event)
        if server.is_vllm:
            self.stream({"choices": [], "usage": facts})
        self.wfile.write(b"data: [DONE]\n\n")

    def stream(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def main():
    facts = json.loads(os.environ["FAKE_SERVER"])
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
    names = ["LENVM_VALUE_MODEL", "LENVM_CONFIG", "SGLANG_USE_CPU_ENGINE", "SGLANG_ENABLE_METRICS_DEVICE_TIMER"]
    names += ["VLLM_USE_V2_MODEL_RUNNER", "VLLM_SERVER_DEV_MODE"]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    server.write(started=os.getpid(), arguments=sys.argv[1:], variables=variables)
    server.serve_forever()


if __name__ == "__main__":
    main()
