"""``lenvm serve``: values against ``transformers`` forwards, the request formats of the fork's scripts, and errors."""

import json
import math
import os
import random
import sys

import pytest
import requests
import torch
from starlette.testclient import TestClient
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerFast

from bench.serve import free_port, running
from lenvm_kernels.serving import Query, ValueEngine, create_app
from lenvm_kernels.values import LenVMConfig
from tests.helpers.models import VOCAB, random_pair, save_checkpoint, value_model_of
from tests.helpers.models import value_logits as plain_values

TEMPLATE = """{% if messages[0].role == "tool" %}{{ raise_exception("no tools") }}{% endif %}{% for m in messages %}
{{ "w30" if m.role == "user" else "w31" }} {{ m.content }} {% endfor %}{% if add_generation_prompt %} w32{% endif %}"""
GAMMA = 0.97


@pytest.fixture(scope="module")
def pair():
    return random_pair("qwen3")


@pytest.fixture(scope="module")
def value_model(pair):
    return value_model_of(*pair, lenvm_config=LenVMConfig(gamma=GAMMA))


def client_of(value_model, **options):
    return TestClient(create_app(ValueEngine(value_model, max_tokens=512), **options), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(value_model, tmp_path_factory):
    path = save_checkpoint(tmp_path_factory.mktemp("tokenizer"), seed=1, template=TEMPLATE)
    return client_of(value_model, tokenizer=PreTrainedTokenizerFast.from_pretrained(path))


def sequence(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


def expected(pair, query):
    """Value logits of a query's candidates, or of its tokens, from forwards of ``transformers``."""
    if not query.candidate_ids:
        return plain_values(*pair, torch.tensor([query.token_ids]))[0]
    sequences = torch.tensor([[*query.token_ids, candidate] for candidate in query.candidate_ids])
    return plain_values(*pair, sequences)[:, -1]


def post(client, path, body, **options):
    return client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


TOKENS, KEPT = sequence(100), Query(sequence(32), [1])
SHORT = [Query(sequence(17, seed), [3]) for seed in range(3)]
PASSING = [Query(sequence(32, seed), *more) for seed in (1, 2) for more in ((), ([1], True))]
SEVERAL = [Query(TOKENS), Query(TOKENS[:37], [1, 2, 2, 3]), Query([], [5]), Query(TOKENS[:48], list(range(90)))]
SEVERAL += [Query(sequence(3, seed=1))]
# Tokens of the cache; calls, each with queries and their numbers of cached tokens; forwards of 40 tokens.
CALLS = {
    "several forwards": (512, [(SEVERAL, [0, 0, 0, 32, 0]), (SEVERAL, [0, 32, 0, 48, 0])], 12),
    "decoding": (512, [([Query(TOKENS[:n], [1, 2])], [(n - 1) // 16 * 16 * (n > 40)]) for n in range(40, 60)], 21),
    "shared pages": (512, [([Query(TOKENS[:n], [3]) for n in (35, 41, 51)], [0, 32, 32])], 2),
    "queries that do not fit together": (48, [(SHORT, [0, 0, 0]), (SHORT[::-1], [16, 0, 0])], 6),
    "bypassed cache": (64, [([KEPT], [0]), *(([query], [0]) for query in PASSING), ([KEPT], [32])], 6),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "auto") for name in CALLS), ("several forwards", "triton")])
def test_values_cached_tokens_and_forwards(pair, device, name, backend):
    max_tokens, calls, forwards = CALLS[name]
    model = value_model_of(*pair, device=device if backend == "triton" else "cpu")
    engine = ValueEngine(model, max_tokens=max_tokens, chunk_tokens=40, backend=backend)
    for queries, cached in calls:
        answers = engine.compute(queries)
        for answer, query in zip(answers, queries, strict=True):
            torch.testing.assert_close(torch.tensor(answer.values), expected(pair, query), atol=1e-5, rtol=1e-5)
        assert [answer.cached_tokens for answer in answers] == cached
    assert engine.forwards == forwards


A, B = sequence(29), sequence(4, seed=1)
PREFIXES = {"input_ids": [A[:23], A[:24]], "candidate_ids": [[A[23]], [A[24], 7]], "bypass_cache": False}
CHAT = [dict(role=role, content=text) for role, text in (("user", "w7"), ("assistant", "w8"), ("user", "w1"))]
OF_CHAT, OF_TURN = Query([33, 10, 34, 11, 33, 4, 35]), Query([33, 10, 35])  # word w7 is token 10


@pytest.mark.parametrize(
    ("path", "body", "queries", "is_list"),
    [
        ("encode", {"input_ids": [A, B], "bypass_cache": [True, True], "rid": ["x", "y"]}, [Query(A), Query(B)], True),
        ("encode", {"input_ids": [A], "bypass_cache": [True]}, [Query(A)], True),
        ("encode", {"input_ids": A, "priority": 1, "text": None, "rid": "x"}, [Query(A)], False),
        ("tree_value", PREFIXES, [Query(A[:23], [A[23]]), Query(A[:24], [A[24], 7])], True),
        ("tree_value", {"input_ids": [A[:3]], "candidate_ids": [[A[3]]]}, [Query(A[:3], [A[3]])], False),
        ("predict", {"input_ids": [A, [5]]}, [Query(A), Query([5])], True),
        ("predict", {"input_ids": A}, [Query(A)], False),
        ("predict", {"text": ["w3 w4", "w2"]}, [Query([6, 7]), Query([5])], True),
        ("predict", {"messages": CHAT}, [OF_CHAT], False),
        ("predict", {"messages": [CHAT, CHAT[:1]]}, [OF_CHAT, OF_TURN], True),
    ],
)
def test_request_formats(pair, client, path, body, queries, is_list):
    """The fork's scripts request values of tokens, and of each prefix of an answer with its next token."""
    for _ in range(2):
        answer = post(client, path, body).json()
        assert isinstance(answer, list) == is_list
        for i, (row, query) in enumerate(zip(answer if is_list else [answer], queries, strict=True)):
            z, about = expected(pair, query), row["meta_info"]
            if path == "predict":
                length = softplus(z[-1]).item() / -math.log(GAMMA)
                assert row["predicted_output_length"] == pytest.approx(length, abs=2e-3, rel=1e-4)
            else:
                torch.testing.assert_close(torch.tensor(row["embedding"]), z, atol=1e-5, rtol=1e-5)
            cached = 16 if path == "tree_value" and i else 0
            assert about["prompt_tokens"] == len(query.token_ids) + len(query.candidate_ids)
            assert about["cached_tokens"] == cached and about["id"] == body.get("rid", [about["id"]] * 2)[i]
        assert post(client, "flush_cache", b"").text and client.get("health").json()["forwards"] >= 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("encode", b"{", "the body: Invalid JSON"),
        ("encode", [1], "the body: Input should be an object, got [1]"),
        ("encode", {}, "one of input_ids, text is required, got none"),
        ("encode", {"input_ids": [1], "text": "a"}, "got input_ids and text"),
        ("encode", {"messages": [{"role": "user"}]}, "one of input_ids, text is required, got messages"),
        ("encode", {"input_ids": []}, "input_ids must have 1 to 512 tokens, a candidate included, got 0"),
        ("encode", {"input_ids": [[True]]}, "valid integer, got True"),
        ("encode", {"input_ids": [-(10**30)]}, "input_ids must be token ids in [0, 97), got -1000"),
        ("encode", {"input_ids": [1] * 513}, "input_ids must have 1 to 512 tokens, a candidate included, got 513"),
        ("encode", {"input_ids": [1], "bypass_cache": [True, False]}, "bypass_cache must have one entry per sequence"),
        ("encode", {"input_ids": [1], "candidate_ids": [[1]]}, "and be absent elsewhere"),
        ("encode", {"input_ids": [1], "image_data": "data:"}, "image_data: Extra inputs are not permitted"),
        ("tree_value", {"input_ids": [[1], [2]], "candidate_ids": [[1], []]}, "must have tokens for each"),
        ("tree_value", {"input_ids": [[1]], "candidate_ids": [[1], [2]]}, "must have one entry per sequence"),
        ("tree_value", {"input_ids": [[1]], "candidate_ids": [[97]]}, "candidate_ids must be token ids in [0, 97)"),
        ("tree_value", {"input_ids": [[1] * 512], "candidate_ids": [[1]]}, "a candidate included, got 513"),
        ("predict", {"messages": [{"role": "tool"}]}, "messages must fit the value model's tokenizer and template: no"),
    ],
)
def test_bad_input_is_rejected_by_name(client, path, body, message):
    answer = post(client, path, body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_non_finite_values_are_null(value_model, monkeypatch):
    forward = value_model.forward
    broken = lambda *a, **o: forward(*a, **o).index_fill(1, torch.tensor([1]), math.nan)  # noqa: E731
    monkeypatch.setattr(value_model, "forward", broken)
    client = client_of(value_model)
    values = post(client, "encode", {"input_ids": [5, 6, 7]}).json()["embedding"]
    assert [z is None for z in values] == [False, True, False]
    assert post(client, "predict", {"input_ids": [5, 6]}).json()["predicted_output_length"] is None


def test_failed_forward_only_fails_its_call(client, value_model, monkeypatch):
    """Pages of the failed forward are not shared with later calls."""
    body = {"input_ids": [sequence(80)], "candidate_ids": [[1]]}
    with monkeypatch.context() as patch:
        patch.setattr(value_model, "forward", lambda *_, **__: (_ for _ in ()).throw(ValueError("no memory")))
        assert post(client, "tree_value", body).status_code == 500
    assert post(client, "tree_value", body).json()["meta_info"]["cached_tokens"] == 0


def test_api_key(value_model):
    client = client_of(value_model, api_key="secret")
    for key, status in (("Secret", 401), ("secret", 200)):
        for path in ("encode", "predict", "flush_cache"):
            answer = post(client, path, {"input_ids": [1]}, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, path
    assert post(client, "tree_value", {}).status_code == 401
    assert client.get("health").is_success
    assert [client.get(path).status_code for path in ("encode", "nothing")] == [405, 404]
    refused = post(client, "encode", {"text": "a"}, headers={"Authorization": "Bearer secret"})
    assert "text needs a tokenizer" in refused.text


def test_command(tmp_path):
    value, port = save_checkpoint(tmp_path / "value", seed=1, value_head=True), free_port()
    command = [sys.executable, "-m", "lenvm_kernels.cli", "serve", value, "--port", str(port), "--device", "cpu"]
    with running(command, dict(os.environ), port, tmp_path / "log", 300) as url:
        assert len(requests.post(f"{url}/encode", json={"text": "w1 w2 w3"}, timeout=30).json()["embedding"]) == 3
