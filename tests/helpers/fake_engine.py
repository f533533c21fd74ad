"""A server that answers like SGLang or vLLM, with tokens derived from the seed."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.models import EOS


class FakeEngine(BaseHTTPRequestHandler):
    """Stores the requests. ``server.broken`` is a status and an object that replace all answers to POST requests."""

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
        prompt, limit, seed, guidance = request_of(body)
        ids, ended = answer_to(seed, limit)
        reason = "stop" if ended else "length"
        if self.path == "/generate":
            facts = {"finish_reason": {"type": reason}}
            if guidance.get("return_values"):
                facts["predicted_output_length"] = [len(prompt) + 0.5]
            return self.reply(200, {"output_ids": ids, "meta_info": facts})
        # vLLM does not return the end token.
        self.reply(200, {"choices": [{"token_ids": ids[: len(ids) - ended], "finish_reason": reason}]})


def request_of(body):
    """Prompt, limit, seed and guidance of a request."""
    params = body.get("sampling_params", body)
    if "prompt" in body:
        return body["prompt"], params["max_tokens"], params["seed"], params.get("vllm_xargs", {})
    return body["input_ids"], params["max_new_tokens"], params["sampling_seed"], params.get("custom_params", {})


def answer_to(seed, limit):
    """Tokens of the answer to a request, and whether it ends by itself."""
    ids = [5 + seed % 7] * (1 + seed % 9) + [EOS]
    return ids[:limit], len(ids) <= limit


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
