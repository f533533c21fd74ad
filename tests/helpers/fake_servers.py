"""A stand-in for the server of SGLang or vLLM: ``python fake_servers.py PORT [FLAW]``; standard library only.

Its log contains a JSON line with its LENVM variables and a line per request. Each token of a stream takes
:data:`SECONDS`. A word in the prompt determines a request's outcome: REFUSED, ABORTED, or DEADLY, which ends a server
with the plugin. FLAW is one of ``without-plugin``, ``failing`` (guidance fails in each step) and ``idle`` (no step is
guided).
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS, STEP_MS = 0.05, 2.0
FLAW = "".join(sys.argv[2:])
has_plugin = os.environ.get("LENVM_VALUE_MODEL") != "off" and FLAW != "without-plugin"
counted = {name: 0.0 for name in ("guided_steps", "value_model_milliseconds", "fallbacks")} if has_plugin else {}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        page = "".join(
            f'lenvm:{name}_total{{rank="{rank}"}} {n / 2}\n' for name, n in counted.items() for rank in (0, 1)
        )
        self.answer(200, page if self.path == "/metrics" else '{"version": "0.fake"}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sys.stdout.write(json.dumps(body) + "\n")  # print would interleave the lines of threads
        sys.stdout.flush()
        if "REFUSED" in body["prompt"]:
            return self.answer(400, "too long by 7 tokens")
        if "DEADLY" in body["prompt"] and has_plugin:
            print("a bad end", flush=True)
            os._exit(3)
        self.answer(200, "")
        count, end = body["max_tokens"], "abort" if "ABORTED" in body["prompt"] else "length"
        for i in range(count):
            time.sleep(SECONDS)
            self.stream({"choices": [{"text": "", "finish_reason": end if i == count - 1 else None}]})
            if has_plugin and FLAW != "idle":
                with lock:
                    counted["guided_steps"] += 1
                    counted["value_model_milliseconds"] += STEP_MS
                    counted["fallbacks"] += FLAW == "failing"
        self.stream({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    print(json.dumps({name: text for name, text in os.environ.items() if name.startswith("LENVM_")}), flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
