"""``lenvm serve``: values against ``transformers`` forwards, the request formats of the fork's scripts, and errors."""

import json
import math
import random
import sys

import pytest
import requests
import torch
from starlette.testclient import TestClient
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerFast

from lenvm_kernels.serving import Query, ValueEngine, create_app
from lenvm_kernels.values import LenVMConfig
from tests.helpers.models import ARCHITECTURES, VOCAB, random_head, random_model, save_checkpoint, value_model_of
from tests.helpers.models import value_logits as plain_values
from tests.helpers.server import free_port, running

CHAT = """{% if messages[0].role == "tool" %}{{ raise_exception("no tools") }}{% endif %}{% for m in messages %}
{{ "w30" if m.role == "user" else "w31" }} {{ m.content }} {% endfor %}{% if add_generation_prompt %} w32{% endif %}"""


@pytest.fixture(scope="module")
def pair():
    return random_model(*ARCHITECTURES["qwen3"]), random_head()


@pytest.fixture(scope="module")
def value_model(pair):
    return value_model_of(*pair, lenvm_config=LenVMConfig(gamma=0.97))


def client_of(engine, **options):
    return TestClient(create_app(engine, **options), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(value_model):
    return client_of(ValueEngine(value_model, max_tokens=512))


def sequence(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


def expected(pair, query):
    """Value logits of a query's candidates, or of its tokens, by forwards of ``transformers``."""
    if not query.candidate_ids:
        return plain_values(*pair, torch.tensor([query.token_ids]))[0]
    sequences = torch.tensor([[*query.token_ids, candidate] for candidate in query.candidate_ids])
    return plain_values(*pair, sequences)[:, -1]


def check(pair, answers, queries):
    for values, query in zip(answers, queries, strict=True):
        torch.testing.assert_close(torch.tensor(values), expected(pair, query), atol=1e-5, rtol=1e-5)


def compute(engine, pair, *queries):
    """Compute queries and check their values; returns the number of cached tokens per query."""
    answers = engine.compute(queries)
    check(pair, [answer.values for answer in answers], queries)
    return [answer.cached_tokens for answer in answers]


def post(client, path, body, **options):
    return client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


@pytest.mark.parametrize(
    ("architecture", "backend"), [("qwen2", "auto"), ("qwen3", "auto"), ("llama", "auto"), ("qwen3", "triton")]
)
def test_values_match_plain_forwards(device, architecture, backend):
    """With 40 tokens per forward, a long sequence and many candidates take several forwards."""
    pair, tokens = (random_model(*ARCHITECTURES[architecture]), random_head()), sequence(100)
    model = value_model_of(*pair, device=device if backend == "triton" else "cpu")
    engine = ValueEngine(model, max_tokens=512, chunk_tokens=40, backend=backend)
    queries = [
        Query(tokens),
        Query(tokens[:37], [1, 2, 2, 3]),
        Query([], [5]),
        Query(tokens[:48], list(range(90))),
        Query(sequence(3, seed=1)),
    ]
    assert compute(engine, pair, *queries) == [0, 0, 0, 32, 0]
    assert compute(engine, pair, *queries) == [0, 32, 0, 48, 0]


def test_prefixes_are_computed_once(pair, value_model):
    engine, tokens = ValueEngine(value_model, max_tokens=512), sequence(80)
    for length in range(40, 60):  # decoding
        assert compute(engine, pair, Query(tokens[:length], [1, 2])) == [(length - 1) // 16 * 16 if length > 40 else 0]
    # Later sequences of a call share the pages computed for the first.
    assert compute(engine, pair, *(Query([7, *tokens[:n]], [3]) for n in (34, 40, 50))) == [0, 32, 32]
    assert compute(engine, pair, Query(tokens[:56], [1], bypass_cache=True)) == [0]
    engine.flush_cache()
    assert compute(engine, pair, Query(tokens[:56], [1])) == [0]
    assert compute(engine, pair, Query(tokens[:56], [1])) == [48]


def test_queries_of_a_call_share_forwards(pair, value_model):
    engine = ValueEngine(value_model, max_tokens=1024, chunk_tokens=64)
    compute(engine, pair, *(Query(sequence(9 + i, seed=i), [i]) for i in range(4)))
    assert engine.forwards == 1
    compute(engine, pair, *(Query(sequence(30, seed=i), [i]) for i in range(5, 9)))
    assert engine.forwards in (3, 4)


def test_small_cache_evicts_pages(pair, value_model):
    """The queries of a call do not fit into the cache together, or fit only after cached pages are evicted."""
    engine, rng = ValueEngine(value_model, max_tokens=64), random.Random(3)
    for _ in range(20):
        sequences = [sequence(rng.randint(1, 63), seed=rng.randint(0, 5)) for _ in range(6)]
        compute(engine, pair, *(Query(tokens, [3], bypass_cache=rng.random() < 0.3) for tokens in sequences))


def test_queries_that_bypass_the_cache_evict_nothing(pair, value_model):
    engine, kept = ValueEngine(value_model, max_tokens=64), Query(sequence(32), [1])
    compute(engine, pair, kept)
    for seed in (1, 2):
        compute(engine, pair, Query(sequence(32, seed), [1], bypass_cache=True))
        compute(engine, pair, Query(sequence(32, seed)))
    assert compute(engine, pair, kept) == [32]


A, B = sequence(9), sequence(4, seed=1)
PREFIXES = {"input_ids": [A[:3], A[:4]], "candidate_ids": [[A[3]], [A[4], 7]], "bypass_cache": False}


@pytest.mark.parametrize(
    ("path", "body", "queries", "is_list"),
    [
        ("encode", {"input_ids": [A, B], "bypass_cache": [True, True], "rid": ["x", "y"]}, [Query(A), Query(B)], True),
        ("encode", {"input_ids": [A], "bypass_cache": [True]}, [Query(A)], True),
        ("encode", {"input_ids": A, "priority": 1, "text": None, "rid": "x"}, [Query(A)], False),
        ("tree_value", PREFIXES, [Query(A[:3], [A[3]]), Query(A[:4], [A[4], 7])], True),
        ("tree_value", {"input_ids": [A[:3]], "candidate_ids": [[A[3]]]}, [Query(A[:3], [A[3]])], False),
    ],
)
def test_request_formats_of_fork_scripts(pair, client, path, body, queries, is_list):
    """Prediction of lengths, token analysis, and visualisation: every prefix of an answer with its next token."""
    answer = post(client, path, body).json()
    assert isinstance(answer, list) == is_list
    rows = answer if is_list else [answer]
    check(pair, [row["embedding"] for row in rows], queries)
    about = [row["meta_info"] for row in rows]
    lengths = [len(query.token_ids) + len(query.candidate_ids) for query in queries]
    assert [(facts["prompt_tokens"], facts["cached_tokens"]) for facts in about] == [(n, 0) for n in lengths]
    assert "rid" not in body or [facts["id"] for facts in about] == list(body["rid"])
    assert post(client, "flush_cache", b"").text and client.get("health").json()["forwards"] >= 1


@pytest.mark.parametrize(("form", "scale"), [({}, -1 / math.log(0.97)), (dict(target_form="length"), 1.0)])
def test_predicted_lengths_of_prompts(pair, tmp_path, form, scale):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_checkpoint(tmp_path, seed=1, template=CHAT))
    engine = ValueEngine(value_model_of(*pair, lenvm_config=LenVMConfig(gamma=0.97, **form)), max_tokens=512)
    chat = [dict(role=role, content=text) for role, text in (("user", "w7"), ("assistant", "w8"), ("user", "w1"))]
    of_chat, of_turn = map(
        tokenizer.convert_tokens_to_ids, (["w30", "w7", "w31", "w8", "w30", "w1", "w32"], ["w30", "w7", "w32"])
    )
    client = client_of(engine, tokenizer=tokenizer)
    for body, prompts in (
        ({"input_ids": [A, [5]]}, [A, [5]]),
        ({"input_ids": A}, [A]),
        ({"text": ["w3 w4", "w2"]}, [[6, 7], [5]]),
        ({"messages": chat}, [of_chat]),
        ({"messages": [chat, chat[:1]]}, [of_chat, of_turn]),
    ):
        answers = post(client, "predict", body).json()
        answers = answers if isinstance(answers, list) else [answers]
        for answer, prompt in zip(answers, prompts, strict=True):
            wanted = scale * softplus(expected(pair, Query(prompt))[-1]).item()
            assert answer["predicted_output_length"] == pytest.approx(wanted, abs=2e-3, rel=1e-4), body
    refused = post(client, "predict", {"messages": [{"role": "tool", "content": "w1"}]})
    assert refused.status_code == 400 and "messages must fit" in refused.text and "no tools" in refused.text


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("encode", b"{", "the body: Invalid JSON"),
        ("encode", [1], "the body: Input should be an object, got [1]"),
        ("encode", {}, "one of input_ids, text must be given, got none"),
        ("encode", {"input_ids": [1], "text": "a"}, "got input_ids and text"),
        ("encode", {"messages": [{"role": "user"}]}, "one of input_ids, text must be given, got messages"),
        ("encode", {"input_ids": "a"}, "valid array, got 'a'"),
        ("encode", {"input_ids": []}, "input_ids must have 1 to 512 tokens, a candidate included, got 0"),
        ("encode", {"input_ids": [[True]]}, "valid integer, got True"),
        ("encode", {"input_ids": [-(10**30)]}, "input_ids must be token ids in [0, 97), got -1000"),
        ("encode", {"input_ids": [1] * 513}, "input_ids must have 1 to 512 tokens, a candidate included, got 513"),
        ("encode", {"input_ids": [1], "bypass_cache": [True, False]}, "bypass_cache must have one per sequence, 1"),
        ("encode", {"input_ids": [1], "candidate_ids": [[1]]}, "and be absent elsewhere"),
        ("encode", {"text": "a"}, "text needs a tokenizer"),
        ("encode", {"input_ids": [1], "image_data": "data:"}, "image_data: Extra inputs are not permitted"),
        ("tree_value", {"input_ids": [[1], [2]], "candidate_ids": [[1], []]}, "must have tokens for each"),
        ("tree_value", {"input_ids": [[1]], "candidate_ids": [[1], [2]]}, "must have one per sequence, 1"),
        ("tree_value", {"input_ids": [[1]], "candidate_ids": [[97]]}, "candidate_ids must be token ids in [0, 97)"),
        ("tree_value", {"input_ids": [[1] * 512], "candidate_ids": [[1]]}, "a candidate included, got 513"),
    ],
)
def test_bad_input_is_rejected_by_name(client, path, body, message):
    answer = post(client, path, body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_non_finite_values_are_null(value_model, monkeypatch):
    forward = value_model.forward
    broken = lambda *a, **o: forward(*a, **o).index_fill(1, torch.tensor([1]), math.nan)  # noqa: E731
    monkeypatch.setattr(value_model, "forward", broken)
    client = client_of(ValueEngine(value_model))
    values = post(client, "encode", {"input_ids": [5, 6, 7]}).json()["embedding"]
    assert [z is None for z in values] == [False, True, False]
    assert post(client, "predict", {"input_ids": [5, 6]}).json()["predicted_output_length"] is None


def test_failed_forward_fails_its_call_only(pair, value_model, monkeypatch):
    """Pages of the failed forward are not shared with later calls."""
    body, query = {"input_ids": [sequence(80)], "candidate_ids": [[1]]}, Query(sequence(80), [1])
    client = client_of(ValueEngine(value_model, max_tokens=512))
    with monkeypatch.context() as patch:
        patch.setattr(value_model, "forward", lambda *_, **__: (_ for _ in ()).throw(ValueError("no memory")))
        assert post(client, "tree_value", body).status_code == 500
    check(pair, [post(client, "tree_value", body).json()["embedding"]], [query])


def test_api_key(value_model):
    client = client_of(ValueEngine(value_model), api_key="secret")
    for key, status in (("Secret", 401), ("secret", 200)):
        for path in ("encode", "predict", "flush_cache"):
            answer = post(client, path, {"input_ids": [1]}, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, path
    assert post(client, "tree_value", {}).status_code == 401
    assert client.get("health").is_success
    assert [client.get(path).status_code for path in ("encode", "nothing")] == [405, 404]


def test_command(tmp_path):
    value, port = save_checkpoint(tmp_path / "value", seed=1, value_head=True), free_port()
    command = [sys.executable, "-m", "lenvm_kernels.cli", "serve", value, "--port", str(port), "--device", "cpu"]
    with running(command, None, tmp_path / "log", url := f"http://127.0.0.1:{port}"):
        assert len(requests.post(f"{url}/encode", json={"text": "w1 w2 w3"}, timeout=30).json()["embedding"]) == 3
