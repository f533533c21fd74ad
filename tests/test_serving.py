"""``lenvm serve``: its values against plain forwards of ``transformers``, its errors, and guidance through it."""

import json
import math
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
import uvicorn
from torch.nn.functional import softplus
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lenvm_kernels import cli
from lenvm_kernels.adapters.remote import RemoteValueModel
from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
from lenvm_kernels.serving.app import create_app, listen
from lenvm_kernels.serving.engine import Query, ValueEngine
from lenvm_kernels.value_model import LenVMConfig, ValueModel
from tests.helpers.engine import Engine, make_step
from tests.helpers.models import ARCHITECTURES, VOCAB, random_head, random_model, save_checkpoint, value_model_of
from tests.helpers.models import value_logits as plain_values
from tests.helpers.server import free_port

TOLERANCE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def pair():
    return random_model(*ARCHITECTURES["qwen3"]), random_head()


@pytest.fixture(scope="module")
def value_model(pair):
    return value_model_of(*pair)


@pytest.fixture(scope="module")
def base():
    return random_model(*ARCHITECTURES["llama"], seed=5)


@pytest.fixture
def make_engine(value_model):
    engines = []

    def make(model=value_model, **options):
        engines.append(ValueEngine(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Gate:
    """A value model whose forwards wait until they are let through; the tokens that each has laid out are noted."""

    def __init__(self, model):
        self._model, self.opened, self.entered, self.widths = model, threading.Event(), threading.Event(), []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, *args, **options):
        self.entered.set()
        assert self.opened.wait(30)
        self.widths.append(len(batch.table_rows))
        return self._model.forward(batch, *args, **options)


@contextmanager
def served(engine, port=None, **options):
    """The URL of a server in a thread, and what stops it."""
    listener = listen("127.0.0.1", port or free_port())
    config = uvicorn.Config(create_app(engine, **options), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def url(make_engine):
    with served(make_engine(max_tokens=512)) as (url, _):
        yield url


def sequence(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


def expected(pair, tokens):
    return plain_values(*pair, torch.tensor([tokens]))[0]


def expected_of(pair, tokens, candidates):
    return torch.stack([expected(pair, [*tokens, candidate])[-1] for candidate in candidates])


def ask(engine, pair, *queries):
    """The answers to queries that come together; their values are those of plain forwards."""
    answers = [future.result(timeout=30) for future in engine.submit(queries)]
    for query, answer in zip(queries, answers, strict=True):
        ids, candidates = query.token_ids, query.candidate_ids
        check(answer.values, expected_of(pair, ids, candidates) if candidates else expected(pair, ids))
    return answers


def post(url, path, body, **options):
    return requests.post(f"{url}/{path}", json=body, timeout=30, **options)


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError


def refuses(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def check(values, wanted):
    torch.testing.assert_close(torch.tensor(values), wanted, **TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "backend"), [("qwen2", "auto"), ("qwen3", "auto"), ("llama", "auto"), ("qwen3", "triton")]
)
def test_values_are_those_of_a_plain_forward(make_engine, device, architecture, backend):
    pair = random_model(*ARCHITECTURES[architecture]), random_head()
    # Forwards of 40 tokens: a long sequence takes several, and so do many candidates.
    model = value_model_of(*pair, device=device if backend == "triton" else "cpu")
    engine = make_engine(model, max_tokens=512, chunk_tokens=40, backend=backend)
    tokens = sequence(100)
    queries = [
        Query(tokens),
        Query(tokens[:37], [1, 2, 2, 3]),
        Query([], [5]),
        Query(tokens[:48], list(range(90))),
        Query(sequence(3, seed=1)),
    ]
    for _ in range(2):  # the second time from the cache
        ask(engine, pair, *queries)


@pytest.mark.parametrize(("max_queries", "widths"), [(256, [1, 7]), (3, [1, 3, 3, 1])])
def test_calls_that_wait_are_one_forward(pair, value_model, make_engine, max_queries, widths):
    """As many of them as it takes at once."""
    gate = Gate(value_model)
    engine = make_engine(gate, max_queries=max_queries)
    (first,) = engine.submit([Query(sequence(4), [1])])
    assert gate.entered.wait(30)
    others = [engine.submit([Query(sequence(5 + i, seed=i), [i, i + 1])])[0] for i in range(7)]
    gate.opened.set()
    first.result(timeout=30)
    for i, future in enumerate(others):
        check(future.result(timeout=30).values, expected_of(pair, sequence(5 + i, seed=i), [i, i + 1]))
    assert gate.widths == widths and engine.counts.forwards == len(widths)


def test_a_prefix_is_computed_once(pair, make_engine):
    engine = make_engine(max_tokens=512, page_size=4)
    tokens = sequence(64)

    def computed(*queries):
        before, answers = engine.counts.computed_tokens, ask(engine, pair, *queries)
        count = engine.counts.computed_tokens - before
        assert sum(answer.cached_tokens for answer in answers) == sum(len(q.token_ids) for q in queries) - count
        return count

    assert computed(Query(tokens[:40], [1])) == 40
    # Decoding: what is computed is at most a page's rest and the new token.
    for length in range(41, 60):
        assert computed(Query(tokens[:length], [1, 2])) <= 4
    # Sequences of one call share what the first of them computes; their values from the cache are whole.
    assert computed(*(Query([7, *tokens[:length]]) for length in (30, 31, 33))) == 31 + 4 + 2
    assert computed(Query(tokens[:56], bypass_cache=True)) == 56
    engine.flush_cache()
    assert computed(Query(tokens[:56])) == 56
    assert computed(Query(tokens[:56])) == 0


def test_a_sequence_that_grows_takes_nobodys_place(make_engine):
    engine = make_engine(max_tokens=64, page_size=4, max_queries=2, max_sequences=2)
    kept = Query(sequence(20))
    for query in (kept, *(Query(sequence(20, seed=1)[:length], [3]) for length in range(8, 16)), kept):
        (answer,) = (future.result() for future in engine.submit([query]))
    assert answer.cached_tokens == 20


def test_a_sequence_that_comes_twice_is_kept_once(pair, make_engine):
    """Its second row is free again, and has no pages that the row could lose later."""
    engine = make_engine(max_tokens=32, page_size=4, max_queries=5, max_sequences=5)
    for seed in range(6):
        ask(engine, pair, *[Query(sequence(4, seed=seed))] * 2)
    grown = sequence(32, seed=9)
    ask(engine, pair, *[Query(sequence(4, seed=7))] * 2, Query(grown[:24]))
    for length in range(25, 33):
        ask(engine, pair, Query(grown[:length]))
    ask(engine, pair, *(Query(sequence(4, seed=seed)) for seed in range(10, 15)))


def test_a_forward_has_room_for_so_many_tokens(make_engine):
    """Of all queries together."""
    engine = make_engine(max_tokens=512, chunk_tokens=40)
    for future in engine.submit([Query(sequence(30, seed=seed)) for seed in range(4)]):
        future.result()
    assert (engine.counts.forwards, engine.counts.computed_tokens) == (3, 120)


def test_the_cache_makes_room_and_what_does_not_fit_waits(pair, make_engine):
    engine = make_engine(max_tokens=32, page_size=4, max_queries=4, max_sequences=5)
    rng = random.Random(3)
    for _ in range(20):
        sequences = (sequence(rng.randint(1, 28), seed=rng.randint(0, 5)) for _ in range(6))
        ask(engine, pair, *(Query(tokens, [3], bypass_cache=rng.random() < 0.3) for tokens in sequences))


def test_what_bypasses_the_cache_leaves_its_row_once(pair, make_engine):
    """Its pages are free at once. If they were taken from it later, its row would be free a second time."""
    engine = make_engine(max_tokens=32, page_size=4, max_queries=3, max_sequences=3)
    short, long = ([Query(sequence(n, seed=seed), bypass_cache=True) for seed in range(3)] for n in (8, 10))
    for queries in (long, [Query(sequence(32))], short):
        ask(engine, pair, *queries)


def test_values_that_are_no_numbers_are_null(value_model, make_engine, monkeypatch):
    forward = value_model.forward

    def broken(*args, **options):
        values = forward(*args, **options)
        return values.masked_fill(torch.arange(values.shape[1]) % 2 == 1, math.nan)

    monkeypatch.setattr(value_model, "forward", broken)
    with served(make_engine(max_tokens=512)) as (url, _):
        values = post(url, "encode", {"input_ids": [5, 6, 7]}).json()["embedding"]
        assert post(url, "predict", {"input_ids": [5, 6]}).json()["predicted_output_length"] is None
    assert values[1] is None and None not in values[::2]


def test_a_failure_is_an_error_of_its_calls_and_no_more(pair, value_model, make_engine, monkeypatch, capsys):
    engine = make_engine(max_tokens=512)
    tokens = sequence(40)
    with served(engine) as (url, _):
        assert post(url, "encode", {"input_ids": tokens}).ok
        longer = [*tokens, *sequence(40, seed=2)]  # whose full pages are not computed when it fails
        broken = {"input_ids": [longer], "candidate_ids": [[1]]}
        with monkeypatch.context() as patch:
            patch.setattr(value_model, "forward", lambda *_, **__: (_ for _ in ()).throw(ValueError("no memory")))
            answer = post(url, "tree_value", broken)
        assert answer.status_code == 500 and "the value model failed" in answer.json()["error"]["message"]
        check(post(url, "tree_value", broken).json()["embedding"], expected_of(pair, longer, [1]))
    assert "the value model failed: ValueError: no memory" in capsys.readouterr().err


def test_bodies_of_the_forks_scripts_get_the_forks_answers(pair, url):
    a, b = sequence(9), sequence(4, seed=1)
    # Prediction of a prompt's length, and token analysis: every value of each sequence, cached or not.
    for _ in range(2):
        first, second = post(url, "encode", {"input_ids": [a, b], "bypass_cache": [True, True]}).json()
        check(first["embedding"], expected(pair, a))
        check(second["embedding"], expected(pair, b))
        (alone,) = post(url, "encode", {"input_ids": [a], "bypass_cache": [True]}).json()
        check(alone["embedding"], expected(pair, a))
        assert alone["meta_info"]["prompt_tokens"] == 9
    # Visualisation: every prefix of an answer with its next token; one row alone is no list.
    rows = post(url, "tree_value", {"input_ids": [a[:i] for i in (3, 4)], "candidate_ids": [[a[3]], [a[4]]]}).json()
    check([value for row in rows for value in row["embedding"]], expected(pair, a)[3:5])
    row = post(url, "tree_value", {"input_ids": [a[:3]], "candidate_ids": [[a[3]]]}).json()
    check(row["embedding"], expected(pair, a)[3:4])
    # With a body that is empty, as they send it.
    assert requests.post(f"{url}/flush_cache", data=b"", timeout=30).text


def test_other_forms(pair, url):
    a, b = sequence(9), sequence(4, seed=1)
    absent = dict.fromkeys(("text", "image_data", "bypass_cache", "sampling_params"))
    single = post(url, "encode", {"input_ids": a, "rid": "mine", **absent}).json()
    check(single["embedding"], expected(pair, a))
    assert single["meta_info"]["id"] == "mine"
    values = post(url, "token_value", {"input_ids": [a, b]}).json()
    check(values["values"][0], expected(pair, a))
    check(values["values"][1], expected(pair, b))
    assert [info["prompt_tokens"] for info in values["meta_info"]] == [9, 4]
    values = requests.put(f"{url}/token_value", json={"input_ids": a}, timeout=30).json()
    check(values["values"][0], expected(pair, a))
    assert values["meta_info"]["prompt_tokens"] == 9
    values = post(url, "candidate_value", {"input_ids": [a, b], "candidate_ids": [[1, 2, 3], [4]]}).json()
    check(values["values"][0], expected_of(pair, a, [1, 2, 3]))
    check(values["values"][1], expected_of(pair, b, [4]))
    assert len(values["meta_info"]) == 2
    values = post(url, "candidate_value", {"input_ids": [b], "candidate_ids": [[4]]}).json()
    assert values["meta_info"]["prompt_tokens"] == 5
    assert requests.get(f"{url}/model_info", timeout=30).json() == dict(vocab_size=VOCAB, gamma=None, max_len=512)
    assert requests.get(f"{url}/health", timeout=30).json()["queries"] == 7


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("encode", b"{", "the body must be JSON"),
        ("encode", b"\xff", "the body must be JSON"),
        ("encode", b"[" * 100_000, "the body must be JSON"),
        ("encode", [1], "the body must be a JSON object, got [1]"),
        ("encode", {}, "one of input_ids, text must be given, got none"),
        ("encode", {"input_ids": [1], "text": "a"}, "got input_ids and text"),
        ("encode", {"input_ids": "a"}, 'input_ids must be a list of lists of token ids, got "a"'),
        ("encode", {"input_ids": []}, "input_ids must have at least one token, got none"),
        ("encode", {"input_ids": [[1], []]}, "input_ids must have at least one token, got none"),
        ("encode", {"input_ids": [[1], 2]}, "input_ids[1] must be a list of token ids, got 2"),
        ("encode", {"input_ids": [1, 2.0]}, "input_ids[0] must be a list of token ids, got 2.0 in it"),
        ("encode", {"input_ids": [True]}, "got true in it"),
        ("encode", {"input_ids": [-1]}, "input_ids must be token ids in [0, 97), got -1"),
        ("encode", {"input_ids": [10**30]}, "input_ids must be token ids in [0, 97), got 1000"),
        ("encode", {"input_ids": [1] * 513}, "input_ids must be at most 512 tokens, got 513"),
        ("encode", {"text": "w1 w2"}, "text needs a tokenizer"),
        ("encode", {"text": [1]}, "text must be a text or a list of some, got [1]"),
        ("encode", {"input_ids": "a" * 80}, f'got "{"a" * 39}...'),
        ("encode", {"text": "a", "image_data": "data:"}, "image_data must be absent"),
        ("token_value", {"inputs": [1]}, "inputs must be one of input_ids, text, bypass_cache, rid"),
        ("token_value", {"input_ids": [1], "bypass_cache": 1}, "bypass_cache must be true or false, or a list of 1"),
        ("token_value", {"input_ids": [[1]], "rid": ["a", "b"]}, "rid must be a text, or a list of 1"),
        ("predict", {"text": "a", "messages": []}, "one of input_ids, text, messages must be given, got text and mess"),
        ("predict", {"messages": [{"role": "user", "content": "w1"}]}, "messages needs a tokenizer"),
        ("tree_value", {"input_ids": [[1]]}, "candidate_ids must be a list of lists of token ids, got null"),
        ("tree_value", {"input_ids": [1], "candidate_ids": [[1]]}, "input_ids[0] must be a list of token ids, got 1"),
        ("tree_value", {"input_ids": [[1]], "candidate_ids": [[1], [2]]}, "for each of the 1 in input_ids, got 2"),
        ("candidate_value", {"input_ids": [[1]], "candidate_ids": [[]]}, "candidate_ids[0] must have at least one"),
        ("candidate_value", {"input_ids": [[1]], "candidate_ids": [[97]]}, "candidate_ids must be token ids in [0, 97"),
        ("candidate_value", {"input_ids": [[1] * 512], "candidate_ids": [[1]]}, "a candidate included, got 513"),
        ("candidate_value", {"input_ids": [[1]], "candidate_ids": [[1]], "text": "a"}, "text must be one of"),
    ],
)
def test_bad_input_is_refused_by_name(url, path, body, message):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(f"{url}/{path}", data=data, timeout=30)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


CHAT = """{% if messages[0].role == "tool" %}{{ raise_exception("no tools") }}{% endif %}{% for m in messages %}
{{ "w30" if m.role == "user" else "w31" }} {{ m.content }} {% endfor %}{% if add_generation_prompt %} w32{% endif %}"""


@pytest.mark.parametrize(("form", "scale"), [({}, -1 / math.log(0.97)), (dict(target_form="length"), 1.0)])
def test_output_lengths_of_prompts_are_predicted(pair, make_engine, tmp_path, form, scale):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_checkpoint(tmp_path, seed=1))
    tokenizer.chat_template = CHAT

    def check_lengths(body, *prompts):
        answers = post(url, "predict", body).json()
        answers = answers if len(prompts) > 1 else [answers]
        wanted = torch.tensor([scale * softplus(expected(pair, tokens)[-1]).item() for tokens in prompts])
        found = torch.tensor([answer["predicted_output_length"] for answer in answers])
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-4)
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == list(map(len, prompts))

    (a, b), words = (sequence(9), sequence(4, seed=1)), ((30, 5, 6, 32), (30, 7, 31, 8, 9, 30, 1, 32))
    prompts = [tokenizer.convert_tokens_to_ids([f"w{i}" for i in chat]) for chat in words]
    chats = [[("user", "w5 w6")], [("user", "w7"), ("assistant", "w8 w9"), ("user", "w1")]]
    chats = [[dict(zip(("role", "content"), message, strict=True)) for message in chat] for chat in chats]
    engine = make_engine(value_model_of(*pair, lenvm_config=LenVMConfig(gamma=0.97, **form)), max_tokens=512)
    with served(engine, tokenizer=tokenizer) as (url, _):
        check_lengths({"input_ids": [a, b]}, a, b)
        check_lengths({"input_ids": b}, b)
        check_lengths({"text": ["w3 w4", "w2"]}, [6, 7], [5])
        check_lengths({"messages": chats[::-1]}, *prompts[::-1])
        check_lengths({"messages": chats[0]}, prompts[0])
        wrong = [[], 5, [["w1"]], [{"role": "user"}], [{"role": "user", "content": [1]}], [chats[0], []]]
        for messages in (*wrong, [{"role": "tool", "content": "w1"}]):
            answer = post(url, "predict", {"messages": messages})
            named = "one or several conversations" if messages in wrong else "fit a chat template .* no tools"
            assert answer.status_code == 400 and re.search(f"messages must .*{named}", answer.text)


def test_limits_and_the_api_key(make_engine):
    with served(make_engine(max_tokens=512), api_key="secret", max_body_bytes=100) as (url, _):
        key = dict(headers={"Authorization": "Bearer secret"})
        for path in ("encode", "token_value", "tree_value", "candidate_value", "flush_cache"):
            assert post(url, path, {}).status_code == 401
            assert post(url, path, {}, headers={"Authorization": "Bearer Secret"}).status_code == 401
        assert requests.get(f"{url}/model_info", timeout=30).status_code == 401
        assert requests.get(f"{url}/health", timeout=30).ok
        assert post(url, "encode", {"input_ids": [1]}, **key).ok
        answer = post(url, "encode", {"input_ids": [1] * 3_000_000}, **key)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body must be at most 100 bytes, got 9000015"
        for body, status in ((b'{"input_ids": [1]}'.ljust(100), 200), (b'{"input_ids": [1]}'.ljust(101), 413)):
            assert requests.post(f"{url}/encode", data=body, timeout=30, **key).status_code == status
        parts = (b" " * 60 for _ in range(3))  # of unknown length
        assert requests.post(f"{url}/encode", data=parts, timeout=30, **key).status_code == 413
        assert requests.get(f"{url}/encode", timeout=30, **key).status_code == 405
        assert requests.get(f"{url}/nothing", timeout=30, **key).status_code == 404


def test_running_calls_are_answered_before_it_stops(pair, value_model, make_engine):
    gate, answers = Gate(value_model), []
    tokens = sequence(6)
    with served(make_engine(gate)) as (url, server):
        call = threading.Thread(target=lambda: answers.append(post(url, "encode", {"input_ids": tokens})))
        call.start()
        assert gate.entered.wait(30)
        server.should_exit = True
        wait_for(lambda: refuses(int(url.rpartition(":")[2])))
        gate.opened.set()
        call.join()
    check(answers[0].json()["embedding"], expected(pair, tokens))
    with pytest.raises(requests.ConnectionError):
        post(url, "encode", {"input_ids": tokens})


def test_what_a_client_left_behind_is_not_computed(value_model, make_engine):
    gate = Gate(value_model)
    engine = make_engine(gate)
    with served(engine) as (url, _):
        (first,) = engine.submit([Query([1])])
        assert gate.entered.wait(30)
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/encode", json={"input_ids": [2]}, timeout=0.3)
        wait_for(lambda: all(future.cancelled() for _, future in engine._waiting))
        gate.opened.set()
        first.result(timeout=30)
        assert post(url, "encode", {"input_ids": [3]}).ok
    assert engine.counts.queries == 2


def test_engine_says_what_is_wrong(value_model, make_engine):
    for options, message in (
        (dict(max_queries=0), "max_queries must be at least 1, got 0"),
        (dict(max_tokens=15), "max_tokens must be at least page_size = 16, got 15"),
        (dict(max_sequences=9), "max_sequences must be at least max_queries = 256, got 9"),
        (dict(max_tokens=40, max_len=33), r"max_len must be in \[1, 32\], what the cache has room for, got 33"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(**options)
    engine = make_engine()
    engine.warm_up()
    engine.close()
    with pytest.raises(RuntimeError, match="the server is stopping"):
        engine.submit([Query([1])])


def test_the_command_serves_and_stops_on_sigterm(tmp_path):
    value = save_checkpoint(tmp_path, seed=1, value_head=True)
    port = free_port()
    command = [sys.executable, "-c", "import sys; from lenvm_kernels.cli import main; sys.exit(main())", "serve"]
    command += [value, *f"--port {port} --device cpu --max-body-bytes 1000 --max-tokens-in-cache 64".split()]
    environment = os.environ | {"LENVM_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline() == f"listening at http://127.0.0.1:{port}\n"
        url, key = f"http://127.0.0.1:{port}", dict(headers={"Authorization": "Bearer secret"})
        assert post(url, "encode", {"text": "w1 w2"}).status_code == 401
        model = LlamaForCausalLM.from_pretrained(value)
        tokens = PreTrainedTokenizerFast.from_pretrained(value)("w1 w2 w3")["input_ids"]
        embedding = post(url, "encode", {"text": "w1 w2 w3"}, **key).json()["embedding"]
        check(embedding, expected((model, random_head()), tokens))
        # A call of which the server has half when it is told to stop.
        body = json.dumps({"input_ids": tokens}).encode()
        head = "POST /encode HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nExpect: 100-continue\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
            half.sendall(head.encode() + body[:5])
            assert half.recv(1000).startswith(b"HTTP/1.1 100")
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses(port))
            half.sendall(body[5:])
            assert half.recv(1000).startswith(b"HTTP/1.1 200")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_commands_errors_are_one_line(tmp_path, capsys, monkeypatch):
    def refused(message, *arguments):
        capsys.readouterr()
        assert cli.main(["serve", *arguments, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("lenvm serve: error: ") and message in error

    refused("error: VALUE must be a directory with config.json", str(tmp_path))
    value = save_checkpoint(tmp_path, seed=1, value_head=True)
    with listen("127.0.0.1", 0) as taken:
        refused("--host and --port must be an address that is free", value, "--port", str(taken.getsockname()[1]))
    refused("max_len must be in [1, 64]", value, "--max-length", "99", "--max-tokens-in-cache", "64")
    refused("must not be empty", value, "--api-key", "")
    monkeypatch.delitem(sys.modules, "lenvm_kernels.serving.app")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused('must be installed: pip install "lenvm-kernels[serve]"', value)


class TestRemoteGuidance:
    GUIDANCE = ({"value_mode": "centered_exp", "value_scale": -20}, None, {"target_length": 4, "value_stride": 3})
    NEW = 12

    def generate(self, base, value_model, guidance=GUIDANCE, tell=None):
        """The tokens, and the steps of each prompt that lost their guidance."""
        ids = torch.tensor([sequence(6), [0, 0, 0, *sequence(3, seed=1)], [0] * 5 + [7]])
        inputs = dict(input_ids=ids, attention_mask=(torch.arange(6) >= torch.tensor([[0], [3], [5]])).long())
        processor = LenVMLogitsProcessor(
            base, value_model, list(guidance), inputs["attention_mask"], max_new_tokens=self.NEW, top_k=8
        )
        options = processor.generation_kwargs
        if tell is not None:
            options["logits_processor"].insert(0, lambda ids, scores: tell(ids.shape[1] - 6) or scores)
        torch.manual_seed(0)
        return base.generate(**inputs, **options, pad_token_id=0).tolist(), processor.faults

    def test_it_is_the_guidance_of_a_local_model(self, base, value_model, make_engine):
        local = self.generate(base, value_model)
        assert local[0] != self.generate(base, value_model, [None] * 3)[0]
        engine = make_engine(max_tokens=512, page_size=4)
        with served(engine, api_key="secret") as (url, _):
            # Small bodies, so that a step takes several calls.
            for max_body_bytes in (1_000_000, 1):
                remote = RemoteValueModel(f"{url}/", api_key="secret", timeout=30, max_body_bytes=max_body_bytes)
                assert self.generate(base, remote) == local
                assert remote.failed_calls == remote.skipped_calls == 0
        assert engine.counts.computed_tokens < engine.counts.cached_tokens

    def test_calls_are_as_few_as_their_size_allows(self, make_engine, monkeypatch):
        with served(make_engine()) as (url, _):
            remote = RemoteValueModel(url, timeout=30, max_body_bytes=400)
            bodies, exchange = [], remote._exchange
            monkeypatch.setattr(remote, "_exchange", lambda *call: bodies.append(call[2]) or exchange(*call))
            monkeypatch.setattr(remote, "_connect", None)  # it has a connection
            queries = [(place, sequence(20, seed=place), [place, 3]) for place in (4, 0, 9, 2, 7, 1, 8)]
            assert [place for place, _ in remote._ask(queries)] == [4, 0, 9, 2, 7, 1, 8]
        sizes = [len(json.loads(body)["input_ids"]) for body in bodies]
        assert all(len(body) <= 400 for body in bodies) and sizes == [2, 2, 2, 1]

    def test_foreign_tokens_cost_their_own_requests_their_guidance(self, pair, make_engine, monkeypatch):
        """Of rows of different lengths, whose places in the slot table beyond their tokens hold anything."""
        prompts, rows = [[5, 60], [6, 59], [8, *range(40, 53), 9], [10, 11]], [3, 1, 5, 2]
        with served(make_engine(max_tokens=512)) as (url, _):
            remote = RemoteValueModel(url, timeout=30)
            remote.config = replace(remote.config, vocab_size=60)
            asked, values = [], remote._values
            monkeypatch.setattr(remote, "_values", lambda *call: asked.append(call) or values(*call))
            step, slots = make_step(remote)
            slots.table.fill_(2**30)
            engine = Engine(step, slots).start(rows, prompts, [self.GUIDANCE[0]] * 4)
            scores = torch.zeros(4, VOCAB)
            for i, candidates in enumerate(([20, 21, 22], [30, 59], [32], [33, 60])):
                scores[i, candidates] = 9.0
            scores[2, 34] = 8.5
            output = engine.decode(rows, prompts, scores)
        assert asked == [([prompts[1], prompts[2]], [[30, 59], [32, 34]])]
        check(output.value_logits[1, :2].tolist(), expected_of(pair, prompts[1], [30, 59]))
        check(output.value_logits[2, :2].tolist(), expected_of(pair, prompts[2], [32, 34]))
        assert step.table.columns.faults[rows].tolist() == [1, 0, 0, 1]

    def test_without_a_server_rows_go_on_unguided(self, base, value_model, make_engine):
        with served(make_engine()) as (url, _):
            remote = RemoteValueModel(url, timeout=30, retry_after=0)
        with pytest.warns(UserWarning, match="the value server failed"):
            tokens, faults = self.generate(base, remote)
        # What is drawn is what no guidance would draw from the same candidates.
        unmoved = [{"value_mode": "centered_exp", "value_scale": 0}, None, self.GUIDANCE[2] | {"strength": 0}]
        assert tokens == self.generate(base, value_model, unmoved)[0]
        assert faults[0] == self.NEW and faults[1] == 0 and faults[2] >= 1
        assert remote.failed_calls >= self.NEW

    def test_a_server_that_hangs_costs_one_time_out_a_while(self, base, value_model, make_engine):
        gate = Gate(value_model)
        with served(make_engine(gate)) as (url, _):
            remote = RemoteValueModel(url, timeout=2, retry_after=60)
            start = time.monotonic()
            with pytest.warns(UserWarning, match="the value server failed"):
                _, faults = self.generate(base, remote)
            assert time.monotonic() - start < 20
            assert (remote.failed_calls, faults[0]) == (1, self.NEW) and remote.skipped_calls >= self.NEW - 1
            gate.opened.set()

    def test_a_restart_costs_the_steps_in_between(self, base, value_model, make_engine):
        port = free_port()
        servers = [served(make_engine(), port)]
        url, _ = servers[0].__enter__()
        remote = RemoteValueModel(url, timeout=30, retry_after=0)

        def tell(step):
            if step == 4:
                servers.pop().__exit__(None, None, None)
            if step == 7:
                servers.append(served(make_engine(), port))
                servers[0].__enter__()

        with pytest.warns(UserWarning, match="the value server failed"):
            _, faults = self.generate(base, remote, tell=tell)
        servers.pop().__exit__(None, None, None)
        assert faults[:2] == [3, 0] and remote.failed_calls == 3

    def test_a_restart_between_two_calls_costs_nothing(self, make_engine):
        port, query = free_port(), (4, [1, 2], [3, 5])
        with served(make_engine(), port) as (url, _):
            remote = RemoteValueModel(url, timeout=30)
            before = list(remote._ask([query]))
        with served(make_engine(), port):
            assert list(remote._ask([query])) == [(place, pytest.approx(values, rel=1e-5)) for place, values in before]
        assert remote.failed_calls == 0

    def test_a_call_ends_at_its_time_out_whatever_trickles_in(self):
        def trickle():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n")
                for _ in range(60):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        with listen("127.0.0.1", 0) as listener:
            thread = threading.Thread(target=trickle)
            thread.start()
            with pytest.raises(ConnectionError, match=r"TimeoutError: it takes more than 0.4 seconds"):
                RemoteValueModel(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.4)
            thread.join()

    def test_wrong_answers_and_foreign_tokens_are_no_guidance(self, base, make_engine, monkeypatch):
        def of_each(values):
            return lambda *call: json.dumps({"values": [values(c) for c in json.loads(call[2])["candidate_ids"]]})

        fixed = [b"[]", b"{}", b'{"values": [[1]]}', b'{"values": 3}', b"nothing"]
        wrong = [(lambda *_, answer=answer: answer, "the value server failed") for answer in fixed]
        wrong.append((of_each(lambda c: [0.5] * 20), "to 8 candidates"))
        with served(make_engine()) as (url, _):
            remote = RemoteValueModel(url, timeout=30, retry_after=0)
            for exchange, message in wrong:
                with monkeypatch.context() as patch, pytest.warns(UserWarning, match=message):
                    patch.setattr(remote, "_exchange", exchange)
                    assert self.generate(base, remote)[1][0] == self.NEW
            with monkeypatch.context() as patch:  # of a value model that has computed no number
                patch.setattr(remote, "_exchange", of_each(lambda c: [None] * len(c)))
                assert self.generate(base, remote)[1][0] == self.NEW
            # A base model whose embedding is padded further than the value model's.
            remote.config = type(remote.config)(**{**vars(remote.config), "vocab_size": 60})
            monkeypatch.setattr("lenvm_kernels.adapters.transformers.check_vocabulary", lambda *_: None)
            failed = remote.failed_calls
            assert self.generate(base, remote)[1][0] > 0
            assert remote.failed_calls == failed

    def test_it_says_what_is_wrong(self, make_engine, base):
        for bad, message in (
            (dict(url="127.0.0.1:1"), "url must be that of a server"),
            (dict(timeout=0), "timeout must be"),
            (dict(retry_after=-1), "retry_after must be"),
            (dict(max_body_bytes=0), "max_body_bytes must be"),
        ):
            with pytest.raises(ValueError, match=message):
                RemoteValueModel(**{"url": "http://127.0.0.1:1"} | bad)
        with pytest.raises(ConnectionError, match="url must be that of a lenvm serve that is up"):
            RemoteValueModel(f"http://127.0.0.1:{free_port()}")
        with served(make_engine(), api_key="secret") as (url, _), pytest.raises(ConnectionError, match="status 401"):
            RemoteValueModel(url)

    def test_the_example(self, tmp_path, monkeypatch, capsys):
        base = save_checkpoint(tmp_path / "base", seed=0)
        value = save_checkpoint(tmp_path / "value", seed=1, value_head=True)
        engine = ValueEngine(ValueModel.from_pretrained(value))
        with served(engine, api_key="secret") as (url, _):
            monkeypatch.setenv("LENVM_API_KEY", "secret")
            arguments = ["--url", url, "--model", base, "--prompt", "w1 w2", "--max-new-tokens", "12"]
            monkeypatch.setattr(sys, "argv", ["remote_guidance", *arguments])
            runpy.run_path(str(Path(__file__).parent.parent / "examples/remote_guidance.py"), run_name="__main__")
        assert "0 steps without guidance, 0 calls failed\n" in capsys.readouterr().out
        assert engine.counts.queries > 0
