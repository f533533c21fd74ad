"""The vLLM processor, in the real server on a CPU: ``make test-vllm`` builds its environment. Elsewhere skipped.

Every test looks at the trace of guided steps: a server that never guided would generate plausible tokens, too.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai
from transformers import AutoModelForCausalLM

from bench.load import Load
from lenvm_kernels.adapters.own_slots import PAGE_SIZE
from lenvm_kernels.evaluate.servers import Server as FoundServer
from lenvm_kernels.step import working_bytes
from lenvm_kernels.types import Status
from lenvm_kernels.value_model import KVCache, ValueModel
from tests.helpers.models import write_smollm2
from tests.helpers.sglang_server import (
    ATOL,
    GENTLE,
    MODES,
    STOPS,
    TARGETS,
    VOCAB,
    check_targets,
    prompts_of,
    values_from_scratch,
)
from tests.helpers.spans import FEW, SEVERAL, SPANS_ENDED, check_several
from tests.helpers.statistics import p_value
from tests.helpers.studies import check_study
from tests.helpers.trunks import trunk_values, write_random_trunk
from tests.helpers.vllm_server import (
    NGRAM,
    PIECES,
    SITE,
    WORDS,
    check_steps,
    running_server,
    write_checkpoints,
    write_eagle,
)

ROOT = Path(__file__).parent.parent
# What begins and ends a thought, for the engine's own budget. Of other words its tokenizer makes several tokens.
# Fields whose lists of lists are given as JSON text.
LISTS = ("end_token_ids", "start_token_ids")
START, END = WORDS.index("<unk>"), WORDS.index("<pad>")
REASONING = json.dumps({"reasoning_start_str": WORDS[START], "reasoning_end_str": WORDS[END]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    options = ("--enable-prompt-tokens-details", "--block-size", "32", "--reasoning-config", REASONING)
    with running_server(folder, "engine", *options) as server:
        yield server


@pytest.fixture(scope="module")
def speculating(folder):
    with running_server(folder, "speculating", "--reasoning-config", REASONING, speculation=NGRAM) as server:
        yield server


def generate(engine, prompts, guidance, **sampling):
    """Generate for each prompt, all at once; returns prompts with outputs, the responses, and the guided steps."""
    before = len(engine.steps())

    def answer(i):
        response = engine.post(prompt=prompts[i], vllm_xargs=guidance[i], seed=i, **sampling)
        assert response.ok, response.text
        return response.json()

    with ThreadPoolExecutor(len(prompts)) as pool:
        responses = list(pool.map(answer, range(len(prompts))))
    outputs = [response["choices"][0]["token_ids"] for response in responses]
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    return sequences, responses, engine.steps()[before:]


def rows_of(steps, *status):
    return [row for step in steps for row in step["rows"] if row["status"] in (status or tuple(Status))]


def test_every_mode_beside_unguided_requests(folder, engine):
    """Prompts shorter and longer than a chunk of the prefill, guided in every mode and not at all, in one batch."""
    prompts = prompts_of(*range(3, 110, 9))[:12]
    guidance = [*MODES, None, {}]
    sequences, _, steps = generate(engine, prompts, guidance, min_p=0.01, temperature=0.7)
    assert check_steps(folder, sequences, steps) > 12 * 16
    guided = {tuple(row["tokens"][: len(prompt)]) for row in rows_of(steps, Status.GUIDE) for prompt in prompts}
    assert guided.issuperset(map(tuple, prompts[:10])) and not guided.intersection(map(tuple, prompts[10:]))
    # A busy machine may not have all of them at once.
    batches = [[row["status"] for row in step["rows"]] for step in steps]
    assert any(len(batch) >= 6 and {Status.GUIDE, Status.UNGUIDED} <= {*batch} for batch in batches)
    # The others draw what they draw among themselves.
    alone, _, steps = generate(engine, prompts, [None] * 12, min_p=0.01, temperature=0.7)
    assert alone[10:] == sequences[10:] and alone[:10] != sequences[:10] and not steps


def test_the_token_drawn_is_one_that_guidance_left(engine):
    """The engine's top-k, top-p and min-p choose the candidates, and cut off none that guidance has made likely."""
    prompts = prompts_of(9, 12, 5, seed=4)
    far = {"mode": "centered_exp", "value_scale": 40.0}
    unlikely = 0
    for filters in ({"min_p": 0.05}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.95}, {"top_k": -1, "min_p": 0.2}):
        sequences, _, steps = generate(engine, prompts, [far, None, far], **filters, max_tokens=24)
        tokens = {tuple(sequence[:n]): sequence[n] for sequence in sequences for n in range(len(sequence))}
        for row in rows_of(steps, Status.GUIDE):
            drawn = tokens.get(tuple(row["tokens"]))
            if drawn is not None:  # else the engine has computed a step more than it returns
                assert row["probs"][row["token_ids"].index(drawn)] > 0
                unlikely += row["token_ids"].index(drawn) >= 2
    assert unlikely > 30


def test_a_prefix_that_the_engine_has_cached(folder, engine):
    """An unguided request leaves its prompt in the engine's cache: the value model computes it all the same."""
    prompts = prompts_of(100, seed=1)
    for guidance, is_cached in ((None, False), (MODES[0], True), (MODES[1], True)):
        sequences, responses, steps = generate(engine, prompts, [guidance])
        details = responses[0]["usage"]["prompt_tokens_details"] or {}
        assert bool(details.get("cached_tokens")) == is_cached
        if guidance is not None:
            assert check_steps(folder, sequences, steps) > 16
    longer = [[*sequences[0], 5, 6], [*prompts[0][:70], 9, 8, 7]]
    sequences, _, steps = generate(engine, longer, [MODES[2], MODES[6]])
    assert check_steps(folder, sequences, steps) > 32


def test_strides_thresholds_and_token_temperatures(folder, engine):
    prompts = prompts_of(9, 60, 5, 7, seed=12)
    guidance = [
        GENTLE | {"value_stride": 3},
        MODES[1] | {"value_stride": 1, "entropy_threshold": 100.0},
        {"token_temperature_scale": json.dumps({i: 50.0 + i for i in range(40, 60)})},
        GENTLE | {"boosted_token_ids": [*range(80, 100), 600], "token_temp_divisor": 80.0},
    ]
    sequences, _, steps = generate(engine, prompts, guidance, max_tokens=24)
    assert check_steps(folder, sequences, steps) > 24
    found = Counter(Status(row["status"]).name for row in rows_of(steps))
    assert found["NOT_DUE"] > 10 and found["SKIP"] >= 24 and found["GUIDE"] > 10
    # Some of so many tokens always have a logit above 0, which is then the largest by far.
    assert set(sequences[2][-24:]) <= set(range(40, 60)) and set(sequences[3][-24:]) <= set(range(80, 100))


def test_bad_parameters_are_refused_and_harm_nobody(folder, engine):
    prompts = prompts_of(5, seed=2)
    for xargs, message in (
        ({"mode": "loud"}, "value_mode must be one of"),
        ({"gamma": 1.5}, "gamma must be a finite number > 0 and < 1, got 1.5"),
        ({"target_lenght": 5}, "target_lenght is not a guidance parameter; did you mean target_length"),
        ({"return_values": 1}, "return_values must be false in vLLM without LENVM_PREDICTIONS"),
        ({"thinking_budget": 5}, "thinking_budget needs end_token_ids: no token is known that ends a thought"),
        ({"token_temperature_scale": "13=0.5"}, "token_temperature_scale must be a JSON object in a text"),
        ({"token_temperature_scale": str({i: 2.0 for i in range(40)}).replace(" ", "").replace("{", '{"')}, "token_te"),
    ):
        response = engine.post(prompt=prompts[0], vllm_xargs=xargs)
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    sequences, _, steps = generate(engine, prompts, [MODES[0] | {"session_id": "of another consumer"}])
    assert check_steps(folder, sequences, steps)


def test_greedy_requests_are_greedy(engine):
    """Guided or not, alone or in a batch with requests that are sampled."""
    prompts = prompts_of(9, 9, seed=3)
    (plain,), _, _ = generate(engine, prompts[:1], [None], temperature=0.0)
    (guided,), _, steps = generate(engine, prompts[:1], [MODES[0]], temperature=0.0)
    assert plain == guided and not steps


def test_many_requests_come_and_go(folder, engine):
    """200 of all kinds, more than the engine has slots for, some of which their clients leave."""
    prompts = prompts_of(*(3 + i % 41 for i in range(200)), seed=5)
    before = len(engine.steps())

    def ask(i):
        guidance = [*MODES, None][i % 11]
        if i % 5 == 0:
            with engine.post(prompt=prompts[i], vllm_xargs=guidance, max_tokens=200, stream=True) as response:
                next(response.iter_lines())
            return None
        response = engine.post(prompt=prompts[i], vllm_xargs=guidance, max_tokens=1 + i % 7)
        assert response.ok, response.text
        return [*prompts[i], *response.json()["choices"][0]["token_ids"]]

    with ThreadPoolExecutor(24) as pool:
        sequences = [sequence for sequence in pool.map(ask, range(200)) if sequence is not None]
    steps = engine.steps()[before:]
    whole = {tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence))}
    kept = [{"rows": [row for row in step["rows"] if tuple(row["tokens"]) in whole]} for step in steps]
    assert check_steps(folder, sequences, kept) > 1000
    sequences, _, steps = generate(engine, prompts_of(9, seed=6), [MODES[0]])
    assert check_steps(folder, sequences, steps)


def test_preemption_and_a_small_cache_of_the_value_model(folder):
    """The engine takes back slots and gives them again; the value model's are too few for all, and it computes anew.

    A prompt of 200 tokens is more than its cache holds: its guidance ends, and nothing else.
    """
    value_model = ValueModel.from_pretrained(folder / "value", dtype=torch.float32)
    sizes = dict(requests=16, max_len=256, vocab_size=VOCAB)
    working = working_bytes(value_model, **sizes, max_candidates=8) + working_bytes(value_model, **sizes, tokens=16)
    share = (working + KVCache.num_bytes(value_model, 9 * PAGE_SIZE - 1)) / 2**30
    options = ("--block-size", "32", "--num-gpu-blocks-override", "12")
    with running_server(folder, "tight", *options, LENVM_MEMORY_SHARE=str(share), LENVM_CHUNK_TOKENS="16") as server:
        assert f"its cache of {8 * PAGE_SIZE} tokens takes" in server.log.read_text()
        prompts = prompts_of(*[20] * 10, seed=7)
        sequences, _, steps = generate(server, prompts, [MODES[i % 10] for i in range(10)], max_tokens=60)
        assert server.metrics()["vllm:num_preemptions_total"] > 0
        assert check_steps(folder, sequences, steps) > 100
        before = server.metrics()["lenvm:without_room_total"]
        prompts = prompts_of(200, 9, seed=8)
        sequences, _, steps = generate(server, prompts, MODES[:2])
        assert check_steps(folder, sequences, steps) > 16
        assert not [row for row in rows_of(steps, Status.GUIDE) if len(row["tokens"]) >= 200]
        assert "the value model's cache is full" in server.log.read_text()
        assert server.metrics()["lenvm:without_room_total"] == before + 1


def repeating(seed, *lengths):
    """Prompts that repeat themselves, so that there are drafts."""
    return [prompt * 3 for prompt in prompts_of(*lengths, seed=seed)]


def test_values_at_the_nodes_of_drafts(folder, speculating):
    prompts = repeating(9, 3, 5, 9, 20, 4, 6)
    guidance = [*MODES[:4], None, MODES[6] | {"value_stride": 2}]
    sequences, _, steps = generate(speculating, prompts, guidance, max_tokens=32)
    assert check_steps(folder, sequences, steps) > 32 * 5
    assert sum(row["node"] > 0 for row in rows_of(steps, Status.GUIDE)) > 32
    assert {len(prompt) for prompt in prompts} - {len(row["tokens"]) for row in rows_of(steps)} == set()


@pytest.mark.parametrize("drafts", [False, True])
def test_spans(folder, engine, speculating, drafts):
    """They end by a token of their own or at their limit, the sequence not before that, and then guidance is off."""
    server, prompts = speculating if drafts else engine, repeating(15, 3, 5, 9, 20, 4, 6)
    ends, limit, stops = [7, 100, 101, 102], 11, list(range(200, 248))
    span = GENTLE | {"end_token_ids": ends, "hard_limit": limit}
    guidance = [span | {"answer_length": 4.0}, *[span] * 5]
    options = dict(stop_token_ids=stops, max_tokens=40, top_k=8)
    sequences, responses, steps = generate(server, prompts, guidance, **options)
    assert check_steps(folder, sequences, steps) > 6 * 6
    places = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        output = sequence[len(prompt) :]
        places.append(min(i for i, token in enumerate(output) if token in ends))
        assert not set(output[: places[-1]]) & set(stops)
        guided = {
            len(row["tokens"])
            for row in rows_of(steps, Status.GUIDE)
            if row["tokens"] == sequence[: len(row["tokens"])]
        }
        assert max(guided) <= len(prompt) + places[-1]
        assert places[-1] < limit or output[limit] == ends[0]
    assert max(places) == limit
    assert any(response["choices"][0]["finish_reason"] == "stop" for response in responses)


@pytest.mark.parametrize("drafts", [False, True])
def test_several_spans_and_closings(folder, engine, speculating, drafts):
    """The value model reads on between two."""
    server, prompts = speculating if drafts else engine, repeating(18, 9, 20, 5, 12)
    guidance = [{k: json.dumps(v) if k in LISTS else v for k, v in (GENTLE | asked).items()} for asked in SEVERAL]
    sequences, _, steps = generate(server, prompts, guidance, max_tokens=60, allowed_token_ids=FEW, temperature=2.0)
    assert check_steps(folder, sequences, steps) > 40
    for asked, prompt, sequence, spans in zip(SEVERAL, prompts, sequences, SPANS_ENDED, strict=True):
        rows = [row for row in rows_of(steps) if row["tokens"] == sequence[: len(row["tokens"])]]
        statuses = {len(row["tokens"]): row["status"] for row in rows}
        assert check_several(asked, prompt, sequence[len(prompt) :], statuses) >= spans


@pytest.mark.parametrize("drafts", [False, True])
def test_the_earlier_of_two_budgets_ends_a_thought(folder, engine, speculating, drafts):
    """Of the engine's own and the hard limit of the span; the prompt begins the thought."""
    server, prompts = speculating if drafts else engine, [[*prompt, START] for prompt in repeating(16, 3, 9, 5, 20)]
    for budget, limit in ((5, 11), (11, 5)):
        span = {"end_token_ids": [END], "hard_limit": limit}
        # A soft budget of strength 0 ends no thought itself.
        guidance = [GENTLE | span, {"thinking_budget": 4, "strength": 0} | span] * 2
        sequences, _, steps = generate(server, prompts, guidance, thinking_token_budget=budget, max_tokens=20)
        assert check_steps(folder, sequences, steps) > 4 * 5
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.index(END) == len(prompt) + 5
            after = [row for row in rows_of(steps) if row["tokens"][: len(prompt) + 6] == sequence[: len(prompt) + 6]]
            assert {row["status"] for row in after} == {Status.UNGUIDED}


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_of_a_model(folder, method):
    """The base model's own, and those of a head on its states; in batches whose other requests are not guided."""
    model = folder / ("base" if method == "draft_model" else "eagle")
    if method == "eagle":
        write_eagle(model)
    speculation = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    with running_server(folder, method, speculation=speculation, TORCHDYNAMO_DISABLE="1") as server:
        prompts, guidance = repeating(26, 3, 60, 5, 9), [*MODES[:3], None]
        sequences, _, steps = generate(server, prompts, guidance, max_tokens=24)
        assert check_steps(folder, sequences, steps) > 24 * 3
        assert sum(row["node"] > 0 for row in rows_of(steps, Status.GUIDE)) > 100
        found = server.metrics()
        verified, times = found["lenvm:verified_tokens_total yes"], found["lenvm:verifications_total yes"]
        assert found["lenvm:fallbacks_total"] == 0 and times > 20
        assert method == "eagle" or verified > times * 1.1  # which drafts hardly what is drawn


@pytest.mark.parametrize("has_grammar", [False, True])
def test_speculation_changes_no_distribution(engine, speculating, has_grammar):
    """The same requests without and with drafts: a chi-square test of three tokens, the last two of them drafted."""
    prompt, draws, counts, grammar = repeating(10, 4)[0], 200, [], {}
    if has_grammar:  # whose digits the prompt repeats
        digits = [WORDS.index(digit) for digit in "131421"]
        prompt, grammar = digits * 3, {"structured_outputs": {"regex": "[1-4]{9}"}}
    for server in (engine, speculating):
        before = server.metrics().get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
        response = server.post(
            prompt=prompt, vllm_xargs=GENTLE, n=draws, seed=5, top_k=2, max_tokens=3, temperature=0.7, **grammar
        ).json()
        counts.append(Counter(tuple(choice["token_ids"]) for choice in response["choices"]))
        allowed = {WORDS.index(digit) for digit in "1234"} if has_grammar else set(range(VOCAB))
        assert all(allowed.issuperset(tokens) for tokens in counts[-1])
        accepted = server.metrics().get("vllm:spec_decode_num_accepted_tokens_total", 0.0) - before
        assert (accepted > draws / 10) == (server is speculating)
    assert [sum(found.values()) for found in counts] == [draws, draws] and len(counts[0] | counts[1]) >= 6
    table = torch.tensor([[found[x] for x in counts[0] | counts[1]] for found in counts])
    rare = table.sum(0) < 10
    table = torch.cat((table[:, ~rare], table[:, rare].sum(1, keepdim=True)), 1)
    p = p_value(table.flatten(), table.double().mean(0).repeat(2), freedom=table.shape[1] - 1)
    print(f"chi-square test of {table.shape[1]} outcomes: p = {p:.3f}")
    assert p > 0.001


def test_without_a_value_model(folder):
    """Targets are met by the end tokens alone, whether there are drafts or not; what needs values is refused."""
    for speculation in (None, NGRAM):
        name = "no values" if speculation is None else "no values, drafts"
        with running_server(folder, name, speculation=speculation, LENVM_VALUE_MODEL="none") as server:
            options = dict(stop_token_ids=STOPS, max_tokens=80)
            prompts = repeating(24, 14, 3, 25, 2, 5)
            guidance = [{"target_length": target, "strength": 9} for target in TARGETS]
            sequences, _, steps = generate(server, prompts, guidance, **options)
            check_targets([s[len(p) :] for s, p in zip(sequences, prompts, strict=True)])
            assert rows_of(steps, Status.GUIDE)
            assert (speculation is not None) == any(row["node"] for row in rows_of(steps, Status.GUIDE))
            response = server.post(prompt=prompts[0], vllm_xargs={"target_length": 9, "constraint": "eq"})
            assert response.status_code == 400 and "value_constraint must be one of near" in response.text
            span = {"end_token_ids": [7, 9], "thinking_budget": 6}
            sequences, _, _ = generate(server, prompts, [span] * 5, max_tokens=24)
            for prompt, sequence in zip(prompts, sequences, strict=True):
                assert {7, 9} & set(sequence[len(prompt) :][:9])
            _, steps = answers_to_schema(server, guidance)
            assert rows_of(steps, Status.GUIDE)
            assert server.metrics()["lenvm:fallbacks_total"] == 0


def check_trunk_steps(folder, prompts, guidance, steps):
    """As :func:`check_steps`, for prompts that begin differently; returns the values."""
    rows, values = [], []
    for row in rows_of(steps, Status.GUIDE):
        (i,) = (i for i, prompt in enumerate(prompts) if row["tokens"][: len(prompt)] == prompt)
        rows.append((guidance[i], len(prompts[i]), row["tokens"], row["token_ids"]))
        values.append(row["value_logits"])
    found = torch.tensor(values)
    torch.testing.assert_close(found, trunk_values(folder / "base", folder / "trunk", rows), rtol=0, atol=ATOL)
    return found


@pytest.mark.parametrize(
    ("is_tied", "layers", "speculation"), [(False, None, None), (True, (3, 1, 2), None), (True, (2, 3), NGRAM)]
)
def test_a_trunk(tmp_path, is_tied, layers, speculation):
    """Values of the base model's own states: prompts in chunks, in batches whose other requests come and go, drafts,
    and requests for which the output layer is asked for more than the next token."""
    write_checkpoints(tmp_path, tie_word_embeddings=is_tied, num_hidden_layers=3)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    write_random_trunk(tmp_path / "trunk", base, layers)
    options = dict(speculation=speculation, LENVM_VALUE_MODEL=str(tmp_path / "trunk"))
    with running_server(tmp_path, "engine", **options) as server:
        prompts = repeating(24, 3, 5, 9, 20, 30, 4, 6, 11, 2, 7)
        guidance = [*MODES[:4], None, *MODES[6:], {"target_length": 9, "answer_length": 4.0, "end_token_ids": [7]}]
        _, _, steps = generate(server, prompts, guidance, max_tokens=24)
        values = check_trunk_steps(tmp_path, prompts, guidance, steps)
        assert len(values) > 24 * 5 and values.std() > 0.1
        assert (speculation is not None) == any(row["node"] for row in rows_of(steps, Status.GUIDE))
        assert max(len(step["rows"]) for step in steps) >= 6
        _, responses, steps = generate(server, prompts[:4], guidance[:4], prompt_logprobs=2)
        assert len(check_trunk_steps(tmp_path, prompts[:4], guidance[:4], steps)) >= 4 * 15
        assert len(responses[3]["choices"][0]["prompt_logprobs"]) == len(prompts[3])
        sequences, steps = answers_to_schema(server, MODES[:6])
        assert len(check_trunk_steps(tmp_path, [s[:3] for s in sequences], MODES[:6], steps)) > 10
        response = server.post(prompt=prompts[0], vllm_xargs={"target_length": 9, "value_min": 0.5})
        assert response.status_code == 400 and "value_min must be absent with near and a trunk" in response.text
        found = server.metrics()
        assert found["lenvm:fallbacks_total"] == 0 and "lenvm:cache_bytes" not in found
        verified, times = found["lenvm:verified_tokens_total yes"], found["lenvm:verifications_total yes"]
        assert times < verified < times * (1 + 3) if speculation else verified == times == 0


# The engine would compile, with no Triton for a CPU, how a rank looks up its part of an embedding.
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.parametrize("source", ["value model", "trunk"])
def test_tensor_parallel_ranks_agree(tmp_path, source):
    """Each has a value model or a trunk of its own, and a part of the base model; one of them counts."""
    write_checkpoints(tmp_path, num_hidden_layers=3)
    options = dict(speculation=NGRAM, **TWO)
    if source == "trunk":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        write_random_trunk(tmp_path / "trunk", base, (2, 3))
        options["LENVM_VALUE_MODEL"] = str(tmp_path / "trunk")
    with running_server(tmp_path, "ranks", "--tensor-parallel-size", "2", **options) as server:
        prompts, guidance = repeating(26, 3, 60, 5, 9, 20, 30), [*MODES[:4], None, MODES[7]]
        sequences, _, _ = generate(server, prompts, guidance, max_tokens=24)
        time.sleep(2)  # the second rank comes to its last step after the first has answered
        lines = Counter(server.trace.read_text().splitlines())
        assert set(lines.values()) == {2}
        steps = [json.loads(line) for line in lines]
        if source == "trunk":
            assert len(check_trunk_steps(tmp_path, prompts, guidance, steps)) > 24 * 3
        else:
            assert check_steps(tmp_path, sequences, steps) > 24 * 3
        found = server.metrics()
        assert found["lenvm:fallbacks_total"] == 0 and found["lenvm:guided_steps_total"] <= len(lines)


def test_pipeline_parallel_ranks(folder):
    """The last one guides."""
    with running_server(folder, "pipeline", "--pipeline-parallel-size", "2", **TWO) as server:
        prompts, guidance = prompts_of(3, 60, 5, 9, seed=27), [*MODES[:3], None]
        sequences, _, steps = generate(server, prompts, guidance, max_tokens=24)
        assert check_steps(folder, sequences, steps) > 24 * 2
        assert server.metrics()["lenvm:fallbacks_total"] == 0


def test_answers_under_load_are_those_of_a_quiet_server(speculating):
    """Among requests that are wrong and others whose client hangs up, with schemas, spans and shared prefixes."""
    questions = [f"w{i} w2 w3 w{i}" for i in range(4)]
    load = Load(FoundServer.find("URL", speculating.url), model="base", questions=questions)
    asked = load.requests(grammars=True, values=False, span_end=7, max_tokens=24)
    report = load.run(load.quiet(asked), 15, workers=4)
    assert not report.wrong and not report.different, report.markdown()
    assert report.answers.total() > 8
    assert report.after["num_requests_running"] == 0 and report.after["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("source", ["value model", "trunk"])
def test_predicted_lengths_are_in_a_file(tmp_path, source):
    """A line a request that asks, guided or not, by the engine's own name of it; of prompts in chunks, among drafts."""
    write_checkpoints(tmp_path, num_hidden_layers=3)
    file, gamma = tmp_path / "predictions.jsonl", 0.9
    options = dict(speculation=NGRAM, LENVM_PREDICTIONS=str(file), LENVM_GAMMA=str(gamma))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    if source == "trunk":
        write_random_trunk(tmp_path / "trunk", base, (2, 3))
        options["LENVM_VALUE_MODEL"] = str(tmp_path / "trunk")
    with running_server(tmp_path, "lengths", **options) as server:
        prompts, wants = repeating(28, 3, 60, 5, 9, 20), {"return_values": 1}
        guidance = [wants, GENTLE | wants, GENTLE, {"target_length": 9} | wants, None]
        _, responses, _ = generate(server, prompts, guidance, max_tokens=12)
        assert server.metrics()["lenvm:fallbacks_total"] == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 3
    for i in (0, 1, 3):
        (line,) = (line for line in lines if line["request_id"].startswith(responses[i]["id"]))
        assert line["prompt_tokens"] == len(prompts[i])
        if source == "trunk":
            likeliest = base(torch.tensor([prompts[i]])).logits[0, -1].argmax().item()
            row = [({"return_values": True, "gamma": gamma}, len(prompts[i]), prompts[i], [likeliest])]
            z = trunk_values(tmp_path / "base", tmp_path / "trunk", row)[0, :1]
        else:
            z = values_from_scratch(tmp_path, [prompts[i]])
        expected = (source == "trunk") + (torch.nn.functional.softplus(z) / -math.log(gamma)).item()
        assert line["predicted_output_length"] == pytest.approx(expected, abs=2e-3)


def test_metrics(engine, speculating):
    generate(engine, prompts_of(9, 5, seed=13), [GENTLE, None])
    found = engine.metrics()
    assert found["lenvm:guided_steps_total"] >= 16 and found["lenvm:value_model_milliseconds_total"] > 0
    assert found["lenvm:rows_total guide"] >= 15 and found["lenvm:rows_total unguided"] > 0
    assert found["lenvm:cache_bytes"] > 0 and found["lenvm:fallbacks_total"] == 0
    generate(speculating, repeating(14, 4), [GENTLE])
    found = speculating.metrics()
    assert 1 <= found["lenvm:verified_tokens_total yes"] / found["lenvm:verifications_total yes"] < 1 + 3


def answers_to_schema(engine, guidance):
    """Prompts with guided answers, which fit a schema; and the guided steps, whose candidates its grammar allows."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 999, "minimum": 0}, "kind": {"enum": ["long", "short"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
    before = len(engine.steps())

    def ask(i):
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": f"w{i} w2 w3"}],
            temperature=1.0,
            max_tokens=40,
            seed=i,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            extra_body={"top_k": 6, "vllm_xargs": guidance[i], "return_token_ids": True},
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        return [*answer.prompt_token_ids, *choice.token_ids]

    with ThreadPoolExecutor(len(guidance)) as pool:
        sequences = list(pool.map(ask, range(len(guidance))))
    for sequence in sequences:
        found = json.loads("".join(WORDS[token] for token in sequence[3:-1]))
        assert found.keys() == {"n", "kind"} and 0 <= found["n"] <= 999 and found["kind"] in ("long", "short")
    steps = engine.steps()[before:]
    assert {token for row in rows_of(steps) for token in row["token_ids"]} <= {-1, *range(len(PIECES))}
    return sequences, steps


def test_a_study(tmp_path, monkeypatch):
    write_checkpoints(tmp_path)
    options = ["--max-model-len", "256", "--num-gpu-blocks-override", "70", "--block-size", "32"]
    prompts = prompts_of(12, 7, seed=15)
    check_study(tmp_path, monkeypatch, prompts, ["--engine", "vllm", "--", *options], slots=70 * 32)


def test_json_schema(folder, engine):
    sequences, steps = answers_to_schema(engine, MODES[:6])
    assert check_steps(folder, sequences, steps) > 30


def test_json_schema_with_drafts(folder, speculating):
    """Of a target, in every mode and without guidance, all at once."""
    before = speculating.metrics()
    guidance = [{"target_length": 8}, *MODES[1:5], None]
    sequences, steps = answers_to_schema(speculating, guidance)
    assert check_steps(folder, sequences, steps) > 30
    name = "vllm:spec_decode_num_draft_tokens_total"
    assert speculating.metrics()[name] > before[name]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The server with the demo's models, which have something to say."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_smollm2(folder)
    with running_server(folder, "smollm2") as server:
        yield server
    (folder / "base" / "model.safetensors").unlink()  # pytest keeps the folder, this is half a gigabyte of it


def check_answer(answer, steps):
    """There is something to read, it ends by itself, and it was guided."""
    (choice,) = answer["choices"]
    print(answer["usage"]["completion_tokens"], "tokens:", choice["message"]["content"])
    assert choice["message"]["content"].strip() and choice["finish_reason"] == "stop"
    assert rows_of(steps, Status.GUIDE)


def test_the_client_of_the_docs(smollm2, monkeypatch, capsys):
    before = len(smollm2.steps())
    monkeypatch.setattr(sys, "argv", ["openai_client.py", "--engine", "vllm", "--url", f"{smollm2.url}/v1"])
    answer = runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")["answer"]
    assert capsys.readouterr().out.endswith(f"{answer.usage.completion_tokens} tokens; the target was 60\n")
    check_answer(answer.model_dump(), smollm2.steps()[before:])


def test_the_request_of_the_docs(smollm2):
    before = len(smollm2.steps())
    page = (ROOT / "docs" / "vllm.md").read_text()
    command = re.search(r"^    (curl (?:.*\n)+?)\n", page, re.MULTILINE)[1]
    command = command.replace("http://127.0.0.1:8000", smollm2.url).replace("path/to/base-model", "base")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    check_answer(json.loads(done.stdout), smollm2.steps()[before:])


def test_times_in_process(tmp_path):
    """bench.vllm_gpu with random weights: without the processor, and guided by a random probe."""
    options = "--dummy tiny --modes plain probe --requests 2 --prompt-tokens 20 --tokens 6 --repeats 2 --target 6"
    options += f" --attention auto --graphs NONE --max-model-len 256 --out {tmp_path}"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "PYTHONPATH": str(SITE)}
    command = [sys.executable, "-m", "bench.vllm_gpu", *options.split()]
    done = subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    plain, probe = map(json.loads, (tmp_path / "timings.jsonl").read_text().splitlines())
    assert probe["guided"] == 2 and probe["fallbacks"] == 0 and "guided" not in plain
    assert plain["digests"][0] == plain["digests"][1] != probe["digests"][0] == probe["digests"][1]
    assert all(result["tokens_per_s"] > 0 and result["kv_tokens"] > 0 for result in (plain, probe))
