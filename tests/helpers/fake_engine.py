"""A server that answers like SGLang or vLLM, with tokens derived from the seed."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.models import EOS


class FakeEngine(BaseHTTPRequestHandler):
    """Stores the requests. ``server.broken`` is a status and an object that replace every answer to a POST."""

    def log_message(self, *_):
        pass

    def reply(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        path = {"sglang": "/get_model_info", "vllm": "/version"}.get(self.server.engine)
        self.reply(200 if self.path == path else 404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.server.broken:
            return self.reply(*self.server.broken)
        if self.path == "/generate":
            params = body["sampling_params"]
            seed, limit = params["sampling_seed"], params["max_new_tokens"]
        else:
            seed, limit = body["seed"], body["max_tokens"]
        length = 2 + seed % 9  # includes the end token
        ids = [5 + seed % 7] * min(length, limit)
        stops = length <= limit
        if self.path == "/generate":  # SGLang returns the end token here, vLLM does not
            ids[-1] = EOS if stops else ids[-1]
            reason = {"type": "stop", "matched": EOS} if stops else {"type": "length", "length": limit}
            facts = {"finish_reason": reason}
            if params.get("custom_params", {}).get("return_values"):
                facts["predicted_output_length"] = [len(body["input_ids"]) + 0.5]
            return self.reply(200, {"text": "", "output_ids": ids, "meta_info": facts})
        choice = {"token_ids": ids[: length - 1], "finish_reason": "stop" if stops else "length"}
        self.reply(200, {"choices": [choice]})


@contextmanager
def fake_engines():
    """Yield a function that starts a server, given the engine's name, and returns it with its address."""
    running = []

    def start(engine, broken=None):
        server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
        server.engine, server.broken, server.requests = engine, broken, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()
