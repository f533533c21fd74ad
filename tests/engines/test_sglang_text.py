"""The SGLang plugin in a real server with a real model and tokenizer: SmolLM2 with the shipped value head.

Tests compare the trace of guided steps with the base model's scores of the output, computed in this process.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import openai
import psutil

from bench import load
from bench.serve import free_port, running
from lenvm_kernels import LenVMConfig
from lenvm_kernels.guidance.sentences import ends_sentence
from lenvm_kernels.loading import VALUE, held_out_prompts
from lenvm_kernels.types import Status
from tests.helpers.models import write_smollm2
from tests.helpers.oracle import PlainStep
from tests.helpers.sglang_server import Server, running_server

ROOT = Path(__file__).parents[2]
FILTERS = {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "min_p": 0.01}
SAMPLING = FILTERS | {"max_new_tokens": 24}
GENTLE = {"value_mode": "centered_exp", "value_scale": -5.0}  # several candidates stay probable
ATOL = 1e-4  # on guided probabilities, fp32


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 and its tokenizer, and a folder with both for the server."""
    folder = tmp_path_factory.mktemp("smollm2")
    model, tokenizer = write_smollm2(folder)
    yield SimpleNamespace(folder=folder, model=model, tokenizer=tokenizer)
    (folder / "base" / "model.safetensors").unlink()  # half a gigabyte, which pytest would keep


@pytest.fixture(scope="module")
def engine(smollm2):
    sizes = "--max-running-requests 48 --max-total-tokens 8192 --mem-fraction-static 0.4"
    with running_server(smollm2.folder, "text", *sizes.split(), "--enable-metrics") as server:
        yield server


def chat(smollm2, text):
    """Token ids of a user message in the chat template."""
    message = [{"role": "user", "content": text}]
    return smollm2.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def answers(engine, prompts, sampling):
    """Send requests at once, each with a mapping of ``sampling``. Returns the results."""
    response = engine.post(input_ids=prompts, sampling_params=[{**SAMPLING, **params} for params in sampling])
    assert response.ok, response.text
    return response.json()


def traced(engine, rid):
    """Rows of a request in the trace, in token order; at least one is guided."""
    rows = [row for step in engine.steps() for row in step["rows"] if row["rid"] == rid]
    assert any(row["status"] == Status.GUIDE for row in rows), "no step was guided"
    return sorted(rows, key=lambda row: row["length"])


@torch.no_grad()
def check_draws(smollm2, prompt, output, rows, guidance, *, adjust=None):
    """Check candidates and guided probabilities of traced rows against the oracle, with scores of the base model and
    values from the trace. ``adjust`` applies the expected changes to logits ``[n, V]`` of the ``n`` output tokens."""
    logits = smollm2.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()
    if adjust is not None:
        adjust(logits)
    gamma, eos = LenVMConfig.read(VALUE).gamma, smollm2.tokenizer.eos_token_id
    assert [row["length"] for row in rows[: len(output)]] == list(range(len(prompt), len(prompt) + len(output)))
    for i, (row, token) in enumerate(zip(rows, output, strict=False)):
        tokens = [candidate for candidate in row["token_ids"] if candidate >= 0]
        values = dict(zip(tokens, row["value_logits"], strict=False))
        oracle = PlainStep(lambda seqs, values=values: [values.get(seq[-1], 0.0) for seq in seqs], eos, gamma=gamma)
        expected, of_tokens, kind = oracle.row(logits[i], [*prompt, *output[:i]], i, guidance, FILTERS)
        assert kind == Status(row["status"]).name and of_tokens == values and row["token"] in (-1, token)
        assert row["probs"][: len(tokens)] == pytest.approx(expected[tokens].tolist(), abs=ATOL)


def test_targets_are_met_by_whole_sentences(smollm2, engine):
    """Requests only have a target; the server finds ends of sentences with its tokenizer."""
    prompts = [chat(smollm2, text) for text in held_out_prompts()[::4]]
    near = {"max_new_tokens": 100, "custom_params": {"target_length": 40}}
    sampling = [near | {"sampling_seed": i} for i in range(len(prompts))]
    before = engine.metrics()
    results = answers(engine, prompts, sampling)
    lengths = [result["meta_info"]["completion_tokens"] for result in results]
    texts = [smollm2.tokenizer.decode(result["output_ids"], skip_special_tokens=True) for result in results]
    print(*zip(lengths, texts, strict=True), sep="\n")
    print(sum(abs(n - 40) <= 10 for n in lengths), "near,", sum(map(ends_sentence, texts)), "whole, of", len(texts))
    # 8 % of unguided answers are as close.
    assert sum(abs(n - 40) <= 10 for n in lengths) >= 0.5 * len(texts)
    assert sum(map(ends_sentence, texts)) >= 0.7 * len(texts)
    for meta in (result["meta_info"] for result in results):
        length = meta["completion_tokens"] - (meta["finish_reason"]["type"] == "stop")
        expected = dict(target=40.0, unit="tokens", constraint="near", thought=None, forced=False, lost=None)
        assert meta["lenvm"] == expected | {"length": length}
    reasons = Counter(result["meta_info"]["finish_reason"]["type"] for result in results)
    counted = {name: value - before.get(name, 0.0) for name, value in engine.metrics().items()}
    assert {reason: counted[f"finished_total {reason}"] for reason in reasons} == reasons
    assert counted["length_error_count near"] == len(results) and counted["forced_ends_total"] == 0
    # In a stream, the last chunk has the outcome; unguided requests in the batch have none.
    params = [sampling[0], {"max_new_tokens": 100}]
    response = engine.post(input_ids=prompts[:2], sampling_params=[SAMPLING | x for x in params], stream=True)
    chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith(b"data: {")]
    has_outcome = {(chunk["index"], "lenvm" in chunk["meta_info"]) for chunk in chunks}
    assert has_outcome == {(0, False), (0, True), (1, False)}


def test_openai_endpoints(smollm2, engine):
    """Values and draws of chats, streamed or not, and of completions; invalid parameters are rejected."""
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
    extra = {"top_k": SAMPLING["top_k"], "min_p": SAMPLING["min_p"], "custom_params": GENTLE}
    request = dict(model="base", temperature=1.0, max_tokens=12, seed=3)
    question = "Why is the sky blue?"
    messages = [{"role": "user", "content": question}]

    def check(rid, prompt, text):
        rows = traced(engine, rid)
        output = [row["token"] for row in rows][: request["max_tokens"]]
        assert smollm2.tokenizer.decode(output, skip_special_tokens=True) == text
        check_draws(smollm2, prompt, output, rows, GENTLE)
        return output, rows

    answer = client.chat.completions.create(messages=messages, **request, extra_body=extra)
    text, prompt = answer.choices[0].message.content, chat(smollm2, question)
    output, rows = check(answer.id, prompt, text)
    result = {"meta_info": {"id": answer.id}, "output_ids": output}
    assert engine.check_steps([prompt], [result], [{"rows": rows}])

    chunks = list(client.chat.completions.create(messages=messages, **request, extra_body=extra, stream=True))
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    check(chunks[0].id, prompt, text)

    answer = client.completions.create(prompt="A comet is", **request, extra_body=extra)
    check(answer.id, smollm2.tokenizer("A comet is")["input_ids"], answer.choices[0].text)

    for streamed in (False, True):
        bad = dict(**request, stream=streamed, extra_body={"custom_params": {"value_mode": "loud"}})
        with pytest.raises(openai.BadRequestError, match="value_mode must be one of"):
            client.chat.completions.create(messages=messages, **bad)
        with pytest.raises(openai.BadRequestError, match="value_mode must be one of"):
            client.completions.create(prompt="A comet is", **bad)


@pytest.fixture(scope="module")
def served(smollm2):
    """The server of ``make serve``."""
    makefile, port = (ROOT / "Makefile").read_text(), free_port()
    server = Server(smollm2.folder, "served", f"http://127.0.0.1:{port}")
    recipe = re.search(r"^\t(LENVM_VALUE_MODEL=.*?)\$\(ARGS\)$", makefile, re.DOTALL | re.MULTILINE)[1]
    recipe = recipe.replace("$(SGLANG_VENV)/bin/python", sys.executable).replace("demo-models", str(smollm2.folder))
    words = shlex.split(recipe.replace("\\\n", ""))
    variables, command = words[: words.index(sys.executable)], words[words.index(sys.executable) :]
    environment = os.environ | dict(variable.split("=") for variable in variables) | {"LENVM_TRACE": str(server.trace)}
    environment.pop("TRITON_INTERPRET", None)
    command += ["--port", str(port)]
    with running(command, environment, port, server.log, 300):
        yield server


def check_answer(served, answer):
    """Check that the answer is not empty, not cut off, and guided."""
    (choice,) = answer["choices"]
    print(answer["usage"]["completion_tokens"], "tokens:", choice["message"]["content"])
    assert choice["message"]["content"].strip() and choice["finish_reason"] == "stop"
    assert traced(served, answer["id"])


@pytest.mark.parametrize("page", ["README.md", "docs/sglang.md"])
def test_documented_calls_run(served, page):
    text = (ROOT / page).read_text().replace("http://127.0.0.1:30000", served.url)
    call = re.search(r"^    curl .*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)[0]
    check_answer(served, json.loads(subprocess.run(["bash", "-c", call], check=True, capture_output=True).stdout))


def test_openai_example_runs(served, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["openai_client.py", "--url", f"{served.url}/v1"])
    answer = runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")["answer"]
    text = f"{answer.choices[0].message.content}\n{answer.usage.completion_tokens} tokens; the target was 60\n"
    assert capsys.readouterr().out == text
    check_answer(served, answer.model_dump())


def test_memory_of_make_serve(smollm2, served):
    """All processes take less than the README's 3 GiB after many concurrent answers; shared memory counts once."""
    prompts = [chat(smollm2, text) for text in held_out_prompts()[:32]]
    answers(served, prompts, [{"custom_params": GENTLE}] * len(prompts))
    (server,) = (child for child in psutil.Process().children() if served.url.rpartition(":")[2] in child.cmdline())
    gib = [process.memory_full_info().pss / 2**30 for process in (server, *server.children(recursive=True))]
    print("GiB:", *(f"{x:.2f}" for x in gib))
    assert sum(gib) < 3


def test_answers_under_load_match_idle_server(engine):
    """Invalid requests, clients that hang up, schemas, spans and shared prefixes."""
    requests = load.bodies_of("sglang", "default", 16, ("schema", "values"), 28)
    report = load.run(engine.url, load.quiet(engine.url, requests[::3]), 30, workers=4)
    assert not report.wrong and not report.different, report.markdown()
    assert report.answers.total() > 8


def test_penalties_and_biases_act_before_guidance(smollm2, engine):
    """The engine changes logits of guided and unguided rows before candidates are selected.

    Its overlapping scheduler counts tokens for penalties one step late, beginning with the last prompt token.
    """
    prompt, words = chat(smollm2, "Name a big city, a bigger city, and the biggest city."), (" city", " York")
    banned, wanted = (smollm2.tokenizer.encode(word)[0] for word in words)

    def for_each_count(logits, output, change):
        for i in range(1, len(output)):
            for token, count in Counter([prompt[-1], *output[: i - 1]]).items():
                logits[i, token] = change(logits[i, token], count)

    def bias(logits, output):
        logits[:, banned] -= 100.0
        logits[:, wanted] += 5.0

    def minimum(logits, output):
        logits[:22, smollm2.tokenizer.eos_token_id] = float("-inf")

    penalty = {"frequency_penalty": 2.0}
    changes = [
        (penalty, partial(for_each_count, change=lambda x, count: x - 2.0 * count)),
        ({"repetition_penalty": 2.0}, partial(for_each_count, change=lambda x, count: x * (0.5 if x > 0 else 2.0))),
        ({"logit_bias": {str(banned): -100.0, str(wanted): 5.0}}, bias),
        ({"min_new_tokens": 22}, minimum),
    ]
    guided = {"custom_params": GENTLE, "sampling_seed": 5}
    results = answers(engine, [prompt] * 5, [*(params | guided for params, _ in changes), penalty])
    for result, (_, change) in zip(results, changes, strict=False):
        output, rows = result["output_ids"], traced(engine, result["meta_info"]["id"])
        with pytest.raises(AssertionError):  # the change is visible in the trace
            check_draws(smollm2, prompt, output, rows, GENTLE)
        check_draws(smollm2, prompt, output, rows, GENTLE, adjust=partial(change, output=output))
