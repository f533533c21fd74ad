"""The vLLM processor in a real server on CPU. ``make test-vllm`` builds the environment; skipped without vLLM.

All tests check the trace of guided steps, because a server without guidance also generates plausible tokens.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from transformers import AutoModelForCausalLM

from bench import load, serve
from lenvm_kernels.engines.own_slots import PAGE_SIZE
from lenvm_kernels.step import working_bytes
from lenvm_kernels.types import Status
from lenvm_kernels.values import KVCache, ValueModel
from tests.helpers.models import write_smollm2
from tests.helpers.probes import probe_values, write_random_probe
from tests.helpers.sglang_server import ATOL, GENTLE, MODES, STOPS, TARGETS, VOCAB, check_targets, prompts_of
from tests.helpers.spans import FEW, SEVERAL, SPANS_ENDED, check_several
from tests.helpers.vllm_server import NGRAM, PIECES, SITE, WORDS, running_server, write_checkpoints

ROOT = Path(__file__).parents[2]
# Start and end of a thought for the engine's budget; the tokenizer splits other words.
START, END = WORDS.index("<unk>"), WORDS.index("<pad>")
GAMMA = 0.9  # of servers that predict lengths
CHAT = {"messages": [{"role": "user", "content": "w1"}]}
REASONING = json.dumps({"reasoning_start_str": WORDS[START], "reasoning_end_str": WORDS[END]})


@pytest.fixture(scope="module")
def engine(folder):
    options = ("--enable-prompt-tokens-details", "--block-size", "32", "--reasoning-config", REASONING)
    with running_server(folder, "engine", *options) as server:
        yield server


@pytest.fixture(scope="module")
def speculating(folder):
    options = dict(LENVM_PREDICTIONS=str(folder / "predictions"), LENVM_GAMMA=str(GAMMA))
    with running_server(folder, "speculating", "--reasoning-config", REASONING, speculation=NGRAM, **options) as server:
        yield server


@pytest.fixture(params=["engine", "speculating"])
def server(request):
    """Without and with drafts."""
    return request.getfixturevalue(request.param)


def generate(engine, prompts, guidance, each=None, **sampling):
    """Send all prompts at once, with further parameters in ``each``. Returns prompts with outputs, responses and
    guided steps."""
    before = len(engine.steps())

    def answer(i):
        options = sampling | (each[i] if each else {})
        response = engine.post(prompt=prompts[i], vllm_xargs=guidance[i], seed=i, **options)
        assert response.ok, response.text
        return response.json()

    with ThreadPoolExecutor(len(prompts)) as pool:
        responses = list(pool.map(answer, range(len(prompts))))
    outputs = [response["choices"][0]["token_ids"] for response in responses]
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    return sequences, responses, engine.steps()[before:]


def rows_of(steps, *status):
    return [row for step in steps for row in step["rows"] if row["status"] in (status or tuple(Status))]


# Guidance and further parameters of requests. With strong guidance, the engine's filters select the candidates.
FAR = {"value_mode": "centered_exp", "value_scale": 40.0}
UNGUIDED = [(None, {}), ({}, {}), (None, {"temperature": 0.0})]
REQUESTS = [
    *((mode, {}) for mode in MODES),
    *((FAR, filters) for filters in ({"min_p": 0.05}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.95}, {"top_k": -1})),
    *((MODES[0], greedy) for greedy in ({"temperature": 0.0}, {"top_k": 1})),
    (GENTLE | {"value_stride": 3}, {}),
    (MODES[1] | {"value_stride": 1, "value_entropy_threshold": 100.0}, {}),
    ({"token_temperature_scale": json.dumps({i: 50.0 + i for i in range(40, 60)})}, {}),
    (GENTLE | {"boosted_token_ids": [*range(80, 100), 600], "token_temp_divisor": 80.0}, {}),
]


def test_every_kind_of_request_in_one_batch(engine):
    """Prompts are shorter and longer than a prefill chunk."""
    count, requests = len(REQUESTS), REQUESTS + UNGUIDED
    prompts = prompts_of(*(3 + 9 * i % 110 for i in range(len(requests))))
    guidance, each = zip(*requests, strict=True)
    each = [dict(min_p=0.01, temperature=0.7, max_tokens=24) | own for own in each]
    sequences, _, steps = generate(engine, prompts, guidance, each)
    assert engine.check_steps(sequences, steps) > 16 * 24
    rows = {i: [row for row in rows_of(steps) if row["tokens"][: len(p)] == p] for i, p in enumerate(prompts)}
    found = {i: Counter(Status(row["status"]).name for row in of_prompt) for i, of_prompt in rows.items()}
    assert all(found[i]["GUIDE"] for i in range(count - 3)) and found[count - 4]["NOT_DUE"] > 10
    assert found[count - 3]["SKIP"] >= 20 and all(found[i].keys() <= {"UNGUIDED"} for i in range(count, len(found)))
    for i in (14, 15):  # greedy requests take the most probable candidate
        for row in rows_of([{"rows": rows[i]}], Status.GUIDE):
            assert row["token"] == row["token_ids"][row["probs"].index(max(row["probs"]))]
    # With this many tokens, a logit is above 0 and becomes by far the largest.
    assert set(sequences[count - 2][-24:]) <= set(range(40, 60))
    assert set(sequences[count - 1][-24:]) <= set(range(80, 100))
    # On a busy machine, the requests may not run at once.
    batches = [[row["status"] for row in step["rows"]] for step in steps]
    assert any(len(batch) >= 6 and {Status.GUIDE, Status.UNGUIDED} <= {*batch} for batch in batches)
    # Unguided requests draw the same tokens in a batch without guidance.
    alone, _, steps = generate(engine, prompts, [None] * len(prompts), each)
    assert alone[count:] == sequences[count:] and alone[:14] != sequences[:14] and not steps
    metrics = engine.metrics()
    assert metrics["guided_steps_total"] >= 24 and metrics["value_model_milliseconds_total"] > 0
    assert metrics["rows_total guide"] > 16 * 16 and metrics["rows_total unguided"] > 0
    assert metrics["cache_bytes"] > 0 and metrics["fallbacks_total"] == 0


def test_guided_log_probabilities(server):
    """The second request returns the base model's log-probabilities, as the third, which is unguided."""
    prompts, guidance = prompts_of(9, 12, 7, seed=23), [MODES[0] | {"guided_logprobs": 1}, MODES[0], None]
    sequences, responses, steps = generate(server, prompts, guidance, logprobs=2, temperature=0.6)
    rows, is_guided = {tuple(row["tokens"]): row for row in rows_of(steps, Status.GUIDE)}, []
    for prompt, sequence, response in zip(prompts[:2], sequences, responses, strict=False):
        returned, expected, logprobs = [], [], response["choices"][0]["logprobs"]
        for place, token in enumerate(sequence[len(prompt) :]):
            row = rows[tuple(sequence[: len(prompt) + place])]
            returned += [logprobs["token_logprobs"][place], max(logprobs["top_logprobs"][place].values())]
            expected += [math.log(p) for p in (row["probs"][row["token_ids"].index(token)], max(row["probs"]))]
        is_guided.append(returned == pytest.approx(expected, abs=1e-3))
    assert is_guided == [True, False]


REJECTED = [
    ({"value_mode": "loud"}, {}, "value_mode must be one of"),
    ({"lenvm": '{"target_lenght": 5}'}, {}, "target_lenght is not a guidance parameter; did you mean target_length"),
    ({"return_values": 1}, {}, "return_values must be false in vLLM without LENVM_PREDICTIONS"),
    ({"target_length": 9}, dict(use_beam_search=True, n=2), "use_beam_search must be false together with guidance"),
]


def test_bad_requests_are_rejected_without_side_effects(engine):
    prompts, beams = prompts_of(5, seed=2), dict(use_beam_search=True, n=2, max_tokens=2)
    for path, request in (("completions", {"prompt": prompts[0]}), ("chat/completions", CHAT)):
        for xargs, options, message in REJECTED:
            response = engine.post(path, **request, vllm_xargs=xargs, **options)
            assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
        assert engine.post(path, **request, **beams).ok
    sequences, _, steps = generate(engine, prompts, [MODES[0] | {"session_id": "of another consumer"}])
    assert engine.check_steps(sequences, steps)


def test_preemption_and_small_cache_of_value_model(folder):
    """The engine preempts requests, and the value model has too few slots, so tokens are recomputed.

    A prompt of 200 tokens does not fit into the value model's cache, so that request loses guidance.
    """
    value_model = ValueModel.from_pretrained(folder / "value", dtype=torch.float32)
    sizes = dict(requests=16, max_len=256, vocab_size=VOCAB)
    working = working_bytes(value_model, **sizes, max_candidates=8) + working_bytes(value_model, **sizes, tokens=16)
    share = (working + KVCache.num_bytes(value_model, 9 * PAGE_SIZE - 1)) / 2**30
    options = ("--block-size", "32", "--num-gpu-blocks-override", "12")
    with running_server(folder, "tight", *options, LENVM_MEMORY_SHARE=str(share), LENVM_CHUNK_TOKENS="16") as server:
        assert f"a cache of {8 * PAGE_SIZE} tokens takes" in server.log.read_text()
        prompts = prompts_of(*[20] * 10, seed=7)
        sequences, _, steps = generate(server, prompts, [MODES[i % 10] for i in range(10)], max_tokens=60)
        assert server.metrics()["vllm:num_preemptions_total"] > 0
        assert server.check_steps(sequences, steps) > 100
        before = server.metrics()["without_room_total"]
        prompts = prompts_of(200, 9, seed=8)
        sequences, _, steps = generate(server, prompts, MODES[:2])
        assert server.check_steps(sequences, steps) > 16
        assert not [row for row in rows_of(steps, Status.GUIDE) if len(row["tokens"]) >= 200]
        assert "the value model's cache is full" in server.log.read_text()
        assert server.metrics()["without_room_total"] == before + 1


def repeating(seed, *lengths):
    """Repetitive prompts, which yield drafts."""
    return [prompt * 3 for prompt in prompts_of(*lengths, seed=seed)]


def test_several_spans_and_closings(server):
    """The value model also computes tokens between spans. The engine accepts nested lists as JSON text."""
    prompts = repeating(18, 9, 20, 5, 12)
    guidance = [
        {name: json.dumps(x) if name in ("end_token_ids", "start_token_ids") else x for name, x in asked.items()}
        for asked in (GENTLE | asked for asked in SEVERAL)
    ]
    sequences, _, steps = generate(server, prompts, guidance, max_tokens=60, allowed_token_ids=FEW, temperature=2.0)
    assert server.check_steps(sequences, steps) > 40
    for asked, prompt, sequence, spans in zip(SEVERAL, prompts, sequences, SPANS_ENDED, strict=True):
        rows = [row for row in rows_of(steps) if row["tokens"] == sequence[: len(row["tokens"])]]
        statuses = {len(row["tokens"]): row["status"] for row in rows}
        assert check_several(asked, prompt, sequence[len(prompt) :], statuses) >= spans
    metrics = server.metrics()
    if drafts := metrics.get("verifications_total yes"):
        assert 1 <= metrics["verified_tokens_total yes"] / drafts < 1 + 3


def test_earlier_of_two_budgets_ends_thought(server):
    """The engine's budget and the span's hard limit; the prompt opens the thought."""
    prompts = [[*prompt, START] for prompt in repeating(16, 3, 9, 5, 20)]
    for budget, limit in ((5, 11), (11, 5)):
        span = {"end_token_ids": [END], "hard_limit": limit}
        # A soft budget of strength 0 does not end a thought.
        guidance = [GENTLE | span, {"thinking_budget": 4, "strength": 0} | span] * 2
        sequences, _, steps = generate(server, prompts, guidance, thinking_token_budget=budget, max_tokens=20)
        assert server.check_steps(sequences, steps, forced=[END]) > 4 * 5
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.index(END) == len(prompt) + 5
            after = [row for row in rows_of(steps) if row["tokens"][: len(prompt) + 6] == sequence[: len(prompt) + 6]]
            assert {row["status"] for row in after} == {Status.UNGUIDED}


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_of_models(folder, method):
    """Drafts from the base model, and from an EAGLE head; one request in the batch is unguided."""
    model = folder / ("base" if method == "draft_model" else "eagle")
    speculation = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    with running_server(folder, method, speculation=speculation, TORCHDYNAMO_DISABLE="1") as server:
        prompts, guidance = repeating(26, 3, 60, 5, 9), [*MODES[:3], None]
        sequences, _, steps = generate(server, prompts, guidance, max_tokens=24)
        assert server.check_steps(sequences, steps) > 24 * 3
        assert sum(row["node"] > 0 for row in rows_of(steps, Status.GUIDE)) > 100
        found = server.metrics()
        verified, times = found["verified_tokens_total yes"], found["verifications_total yes"]
        assert found["fallbacks_total"] == 0 and times > 20
        assert method == "eagle" or verified > times * 1.1  # hardly any draft of this head is accepted


def test_drafts_do_not_change_the_text(engine, speculating):
    """Guided requests have a seed; many drafts are accepted."""
    draws, texts, name = 40, [], "vllm:spec_decode_num_accepted_tokens_total"
    options = dict(n=draws, seed=5, top_k=2, max_tokens=9, temperature=0.7)
    for server in (engine, speculating):
        before = server.metrics().get(name, 0.0)
        response = server.post(prompt=repeating(10, 4)[0], vllm_xargs=GENTLE, **options).json()
        texts.append([choice["token_ids"] for choice in response["choices"]])
        accepted = server.metrics().get(name, 0.0) - before
        assert (accepted > draws / 4) == (server is speculating)
    assert texts[0] == texts[1] and len({*map(tuple, texts[0])}) >= 6


def test_guidance_without_settings(folder):
    """Guidance by end tokens only, with drafts. A thinking budget ends at the given tokens; parameters that need values
    are rejected."""
    with running_server(folder, "default", speculation=NGRAM, has_settings=False) as server:
        name = r"LenVM: guidance by end tokens alone.*; 16 requests, 64 candidates each; .* without CUDA"
        assert re.search(name, server.log.read_text())
        prompts = repeating(24, 14, 3, 25, 2, 5)
        guidance = [{"target_length": target, "strength": 9} for target in TARGETS]
        sequences, _, steps = generate(server, prompts, guidance, stop_token_ids=STOPS, max_tokens=80)
        check_targets([s[len(p) :] for s, p in zip(sequences, prompts, strict=True)])
        response = server.post(prompt=prompts[0], vllm_xargs={"target_length": 9, "value_constraint": "eq"})
        assert response.status_code == 400 and "value_constraint must be one of near" in response.text
        span = {"end_token_ids": [7, 9], "thinking_budget": 6}
        sequences, _, _ = generate(server, prompts, [span] * 5, max_tokens=24)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert {7, 9} & set(sequence[len(prompt) :][:9])
        for path, request in (("completions", {"prompt": prompts[:2]}), ("chat/completions", CHAT)):
            request = dict(request, n=2, seed=3, vllm_xargs=guidance[0], max_tokens=30)
            whole, stream = (server.post(path, **request, stream=has_stream).text for has_stream in (False, True))
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
            outcomes = {c["index"]: c["lenvm"] for event in events for c in event["choices"] if c.get("finish_reason")}
            assert outcomes == {choice["index"]: choice["lenvm"] for choice in json.loads(whole)["choices"]}
        before = server.metrics()
        answers_to_schema(server, guidance)
        found = server.metrics()
        assert found["rows_total guide"] > before["rows_total guide"] > 50 and not steps
        assert found["verifications_total yes"] > 20 and found["fallbacks_total"] == 0


def write_models(folder, layers=None, **changes):
    """Write a base model of three layers, a value model and, with ``layers``, a probe. Returns base and options."""
    write_checkpoints(folder, num_hidden_layers=3, **changes)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    if layers is None:
        return base, {}
    write_random_probe(folder / "probe", base, layers)
    return base, {"LENVM_VALUE_MODEL": str(folder / "probe"), "LENVM_GAMMA": str(GAMMA)}


def check_probe_steps(folder, prompts, guidance, steps):
    """As :func:`check_steps`, with a probe, for prompts with different beginnings. Returns the values."""
    rows, values = [], []
    for row in rows_of(steps, Status.GUIDE):
        (i,) = (i for i, prompt in enumerate(prompts) if row["tokens"][: len(prompt)] == prompt)
        rows.append((guidance[i] | {"gamma": GAMMA}, len(prompts[i]), row["tokens"], row["token_ids"]))
        values.append(row["value_logits"])
    found, (expected, _) = torch.tensor(values), probe_values(folder / "base", folder / "probe", rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
    return found


WANTS = {"return_values": 1}
PREDICTED = [WANTS, GENTLE | WANTS, GENTLE, {"target_length": 9} | WANTS, None]


def check_predictions(file, prompts, responses, value):
    """Check the lines of :data:`PREDICTED` requests, by the engine's request ids.

    ``value(prompt)`` returns the expected value logit, and the number of tokens before the prediction.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for prompt, params, response in zip(prompts, PREDICTED, responses, strict=True):
        found = [line for line in lines if line["request_id"].startswith(response["id"])]
        assert len(found) == bool(params and "return_values" in params)
        for line in found:
            z, first = value(prompt)
            expected = first + (torch.nn.functional.softplus(z) / -math.log(GAMMA)).item()
            assert line["prompt_tokens"] == len(prompt)
            assert line["predicted_output_length"] == pytest.approx(expected, abs=2e-3)


def test_predicted_lengths_are_written_to_file(folder, speculating):
    """One line per request with ``return_values``, with prompts in chunks and drafts."""
    prompts = repeating(28, 3, 60, 5, 9, 20)
    _, responses, _ = generate(speculating, prompts, PREDICTED, max_tokens=12)
    value = lambda prompt: (speculating.values_from_scratch([prompt]), 0)  # noqa: E731
    check_predictions(folder / "predictions", prompts, responses, value)


@pytest.mark.parametrize(
    ("is_tied", "layers", "speculation"), [(False, None, None), (True, (3, 1, 2), None), (True, (2, 3), NGRAM)]
)
def test_probe_values_match_plain_forwards(tmp_path, is_tied, layers, speculation):
    """Prompts in chunks, changing batches, drafts, prompt log-probabilities, and a grammar."""
    base, options = write_models(tmp_path, layers or (3,), tie_word_embeddings=is_tied)
    options |= dict(speculation=speculation, LENVM_PREDICTIONS=str(tmp_path / "lengths"))
    with running_server(tmp_path, "engine", **options) as server:
        prompts = repeating(24, 3, 5, 9, 20, 30, 4, 6, 11, 2, 7)
        guidance = [*MODES[:4], None, *MODES[6:], {"target_length": 9, "answer_length": 4.0, "end_token_ids": [7]}]
        _, _, steps = generate(server, prompts, guidance, max_tokens=24)
        values = check_probe_steps(tmp_path, prompts, guidance, steps)
        assert len(values) > 24 * 5 and values.std() > 0.1
        assert (speculation is not None) == any(row["node"] for row in rows_of(steps, Status.GUIDE))
        assert max(len(step["rows"]) for step in steps) >= 3  # a busy machine accepts requests slowly
        _, responses, steps = generate(server, prompts[:4], guidance[:4], prompt_logprobs=2)
        assert len(check_probe_steps(tmp_path, prompts[:4], guidance[:4], steps)) >= 4 * 15
        assert len(responses[3]["choices"][0]["prompt_logprobs"]) == len(prompts[3])
        sequences, steps = answers_to_schema(server, MODES[:6])
        assert len(check_probe_steps(tmp_path, [s[:3] for s in sequences], MODES[:6], steps)) > 10
        response = server.post(prompt=prompts[0], vllm_xargs={"target_length": 9, "value_min": 0.5})
        assert response.status_code == 400 and "value_min must be absent with near and a probe" in response.text
        _, responses, _ = generate(server, prompts[:5], PREDICTED, max_tokens=12)
        found = server.metrics()
        assert found["fallbacks_total"] == 0 and "cache_bytes" not in found
        verified, times = found["verified_tokens_total yes"], found["verifications_total yes"]
        assert times < verified < times * (1 + 3) if speculation else verified == times == 0

    def value(prompt):
        likeliest = base(torch.tensor([prompt])).logits[0, -1].argmax().item()
        row = ({"return_values": True, "gamma": GAMMA}, len(prompt), prompt, [likeliest])
        return probe_values(tmp_path / "base", tmp_path / "probe", [row])[1][0], 1

    check_predictions(tmp_path / "lengths", prompts[:5], responses, value)


# Without TORCHDYNAMO_DISABLE, a rank compiles the embedding lookup, which needs Triton.
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.parametrize(
    ("kind", "layers", "speculation"), [("tensor", None, NGRAM), ("tensor", (2, 3), NGRAM), ("pipeline", None, None)]
)
def test_parallel_ranks_agree(tmp_path, kind, layers, speculation):
    """Each tensor-parallel rank has a value model or probe and a part of the base model; one rank counts metrics. The
    last rank of a pipeline guides."""
    _, options = write_models(tmp_path, layers)
    options |= dict(speculation=speculation, **TWO)
    with running_server(tmp_path, "ranks", f"--{kind}-parallel-size", "2", **options) as server:
        prompts, guidance = repeating(26, 3, 60, 5, 9, 20, 30), [*MODES[:4], None, MODES[7]]
        sequences, _, _ = generate(server, prompts, guidance, max_tokens=24)
        steps = server.agreed_steps(2 if kind == "tensor" else 1)
        if layers is None:
            assert server.check_steps(sequences, steps) > 24 * 3
        else:
            assert len(check_probe_steps(tmp_path, prompts, guidance, steps)) > 24 * 3
        found = server.metrics()
        assert found["fallbacks_total"] == 0 and found["guided_steps_total"] <= len(steps)


def test_answers_under_load_match_idle_server(speculating, monkeypatch):
    """Invalid requests, clients that hang up, schemas, spans and shared prefixes."""
    monkeypatch.setattr(load, "QUESTIONS", [f"w{i} w2 w3 w{i}" for i in range(4)])
    requests = load.bodies_of("vllm", "base", 24, ("schema",), 7)
    report = load.run(speculating.url, load.quiet(speculating.url, requests), 15, workers=4)
    assert not report.wrong and not report.different, report.markdown()
    assert report.answers.total() > 8
    assert report.after["vllm:num_requests_running"] == 0 and report.after["vllm:kv_cache_usage_perc"] == 0


def answers_to_schema(engine, guidance):
    """Send requests with a JSON schema, check answers and candidates; returns prompts with answers, guided steps."""
    before = len(engine.steps())

    def ask(i):
        request = {"messages": [{"role": "user", "content": f"w{i} w2 w3"}], "max_tokens": 40, "seed": i}
        request["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": load.SCHEMA}}
        response = engine.post("chat/completions", **request, vllm_xargs=guidance[i], ignore_eos=False)
        assert response.ok, response.text
        answer = response.json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        return [*answer["prompt_token_ids"], *choice["token_ids"]]

    with ThreadPoolExecutor(len(guidance)) as pool:
        sequences = list(pool.map(ask, range(len(guidance))))
    for sequence in sequences:
        found = json.loads("".join(WORDS[token] for token in sequence[3:-1]))
        assert found.keys() == {"n", "kind"} and 0 <= found["n"] <= 99 and found["kind"] in ("long", "short")
    steps = engine.steps()[before:]
    assert {token for row in rows_of(steps) for token in row["token_ids"]} <= {-1, *range(len(PIECES))}
    return sequences, steps


def test_json_schema(server):
    """A target, several modes and an unguided request in one batch."""
    name = "vllm:spec_decode_num_draft_tokens_total"  # missing without drafts
    before = server.metrics().get(name)
    sequences, steps = answers_to_schema(server, [{"target_length": 8}, *MODES[1:5], None])
    assert server.check_steps(sequences, steps) > 30
    assert before is None or server.metrics()[name] > before


def test_documented_client_and_request(tmp_path, monkeypatch, capsys):
    """With the demo's models, which generate real text."""
    write_smollm2(tmp_path)
    with running_server(tmp_path, "smollm2") as server:
        monkeypatch.setattr(sys, "argv", ["openai_client.py", "--engine", "vllm", "--url", f"{server.url}/v1"])
        answer = runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")["answer"]
        assert capsys.readouterr().out.endswith(f"{answer.usage.completion_tokens} tokens; the target was 60\n")
        steps = len(server.steps())
        command = re.search(r"^    (curl (?:.*\n)+?)\n", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE)[1]
        command = command.replace("http://127.0.0.1:8000", server.url).replace("path/to/base-model", "base")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        for found, guided in ((answer.model_dump(), steps), (json.loads(done.stdout), len(server.steps()) - steps)):
            (choice,) = found["choices"]
            print(found["usage"]["completion_tokens"], "tokens:", choice["message"]["content"])
            assert choice["message"]["content"].strip() and choice["finish_reason"] == "stop" and guided
            expected = dict(target=60.0, unit="tokens", constraint="near", thought=None, forced=False)
            assert choice["lenvm"] == expected | {"length": found["usage"]["completion_tokens"] - 1}
        metrics = server.metrics()
        assert metrics["finished_total stop"] == metrics["length_error_count near"] == 2
    (tmp_path / "base" / "model.safetensors").unlink()  # half a gigabyte, which pytest would keep


IN_PYTHON = """
import sys, vllm
engine = vllm.LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128)
params = vllm.SamplingParams(extra_args={"target_length": 6}, max_tokens=3, ignore_eos=True, seed=1)
(result,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], params)
assert result.outputs[0].lenvm["length"] == 3
"""


def test_requests_in_python(folder, tmp_path):
    """Front end and worker are in one process."""
    variables = dict(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")
    variables |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=f"{SITE}:{os.environ.get('PYTHONPATH', '')}")
    variables |= dict(LENVM_VALUE_MODEL=str(folder / "value"), LENVM_TRACE=str(tmp_path / "trace"))
    command = [sys.executable, "-c", IN_PYTHON, str(folder / "base")]
    subprocess.run(command, env=os.environ | variables, check=True)
    steps = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [len(row["tokens"]) for row in rows_of(steps, Status.GUIDE)] == [3, 4, 5]


def test_engines_in_process_are_measured(folder):
    """Plain, the plugin without guided requests, ``none``, a random probe and a value model; one does not exist."""
    flags = f"--engine vllm --in-process --value-model none random-probe {folder}/x {folder}/value --out {folder} "
    flags += f"--model {folder}/base --concurrency 1 3 --max-tokens 4 --prompt-tokens 9 -- --max-model-len 64"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": f"{SITE}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "bench.serve", *flags.split(), "--enforce-eager", "--dtype", "float32"]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode == 2
    summary, steps = json.loads((folder / "summary.json").read_text()), dict.fromkeys(serve.UNGUIDED)
    rows = {(row["server"], row["concurrency"]): row for row in summary["conditions"]}
    assert [*rows] == list(product(("base", "idle", "none", "random-probe", "value"), (1, 3)))
    for (name, count), row in rows.items():
        assert (row["requests"], row["failed"], row.get("guided_steps")) == (count, 0, steps.get(name, 4))
        assert row["decode_ms"] > 0 and row["kv_tokens"] > 0
