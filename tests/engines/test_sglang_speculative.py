"""Guidance with speculative decoding in a real SGLang server on CPU, where it verifies by argmax.

``sglang_cpu/patches/speculation.py`` replaces the engine's GPU kernels.
"""

import re

import pytest
import requests

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from lenvm_kernels.types import Status
from tests.helpers.sglang_server import (
    GENTLE,
    MODES,
    SAMPLING,
    STOPS,
    TARGETS,
    TWO_RANKS,
    cached_tokens,
    check_targets,
    prompts_of,
    running_server,
    running_speculation,
    write_checkpoints,
)
from tests.helpers.spans import LIKELY, SEVERAL, SPANS_ENDED, check_answers_with_spans
from tests.helpers.vllm_server import WORDS, save_tokenizer

GUIDANCE = [
    GENTLE,
    MODES[1],
    MODES[3],
    MODES[9],
    GENTLE | {"value_entropy_threshold": 0.5},
    {"value_mode": "centered_exp", "value_scale": 2.0, "token_temperature_scale": {"7": 2.0}},
]
PROMPTS = prompts_of(*range(4, 70, 12), seed=20)  # shorter and longer than a chunk
TOKENS = dict(sampling_seed=5, max_new_tokens=24)
NO_VALUES = {"LENVM_VALUE_MODEL": "none"}
NGRAM = {"algorithm": "NGRAM", "draft": None}
KINDS = {
    "chain": ((), {}),  # the base model drafts its own tokens
    "pages": (("--page-size", "16", "--disable-overlap-schedule"), {}),
    "ngram": ((), NGRAM),
    "tree": ((), {"algorithm": "EAGLE", "draft": "eagle", "shape": {"steps": 3, "topk": 2, "tokens": 6}}),
    "ranks": (("--tp", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}


@pytest.fixture(scope="module")
def texts(folder):
    """Tokens of guided requests with seeds, and of unguided greedy requests, without speculation."""
    with running_server(folder, "plain", "--chunked-prefill-size", "32") as server:
        return outputs(server, GUIDANCE), outputs(server, [None] * len(PROMPTS), temperature=0)


@pytest.fixture(scope="module", params=KINDS)
def engine(folder, request):
    """A server with a kind of drafts."""
    options, more = KINDS[request.param]
    with running_speculation(folder, request.param, "--enable-metrics", *options, **more) as server:
        server.kind = request.param
        yield server


def outputs(server, guidance, **sampling):
    results, _ = server.generate(PROMPTS, guidance, **TOKENS | sampling)
    return [result["output_ids"] for result in results]


def test_output_is_unchanged_by_drafts(engine, texts):
    """Guided requests in a mixed batch get the same tokens as without drafts, also with prompts in the radix cache. The
    base model's drafts are accepted, and counted by metrics."""
    state = requests.get(f"{engine.url}/server_info", timeout=60).json()["internal_states"][0]
    assert state["disable_overlap_schedule"] == (engine.kind == "pages")
    prompts, guidance = [*PROMPTS, *prompts_of(9, 14, seed=21)], [*GUIDANCE, None, None]
    for _ in range(2):
        results, steps = engine.generate(prompts, guidance, **TOKENS)
        assert [result["output_ids"] for result in results[: len(PROMPTS)]] == texts[0]
        assert engine.check_steps(prompts, results, steps) > 200
        assert any(step["mode"] == "TARGET_VERIFY" for step in steps)
    assert outputs(engine, [None] * len(PROMPTS), temperature=0) == texts[1]
    if engine.kind == "chain":
        infos, metrics = [result["meta_info"] for result in results[: len(PROMPTS)]], engine.metrics()
        accepted, verified = (sum(i[f"spec_{x}"] for i in infos) for x in ("num_correct_drafts", "verify_ct"))
        assert accepted > 0.2 * verified
        guided, others = (
            metrics[f"verified_tokens_total {x}"] / metrics[f"verifications_total {x}"] for x in ("yes", "no")
        )
        assert 1.2 < guided < others <= 4


def test_several_spans_and_closings(engine):
    """Between spans, the engine verifies as in unguided requests, and the value model still computes tokens."""
    prompts, guidance = PROMPTS[:4], [GENTLE | asked for asked in SEVERAL]
    results, steps = engine.generate(prompts, guidance, max_new_tokens=60, logit_bias=LIKELY)
    assert engine.check_steps(prompts, results, steps) > 60
    check_answers_with_spans(SEVERAL, prompts, results, steps, SPANS_ENDED)


@pytest.mark.parametrize("engine", ["chain"], indirect=True)
def test_strides_and_predicted_lengths(engine):
    """Guided, strided and unguided requests, with and without ``return_values``."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [wants, wants | GENTLE, wants | GENTLE | {"value_stride": 3}, GENTLE | {"value_stride": 2}, None]
    prompts = prompts_of(9, 40, 12, 5, 7, seed=22)
    results, steps = engine.generate(prompts, guidance, max_new_tokens=24)
    assert engine.check_steps(prompts, results, steps) > 100
    status = {row["status"] for step in steps for row in step["rows"]}
    assert status >= {Status.GUIDE, Status.NOT_DUE, Status.UNGUIDED}
    engine.check_lengths(prompts, guidance, results)
    guidance[1] |= {"guided_logprobs": True}
    request = dict(return_logprob=True, top_logprobs_num=2)
    results, steps = engine.generate(prompts[:2], guidance[:2], request=request, temperature=0.6)
    engine.check_logprobs(prompts[1:2], guidance[1:2], results[1:], steps)


def test_without_a_value_model(folder):
    """Targets are met by end tokens only. Outputs are the same on two ranks, in two pipeline stages, with drafts,
    and with unguided requests in the batch. Guided requests may reuse cached prompts of unguided requests."""
    prompts, found = prompts_of(40, 9, 70, 5, 12, seed=24), []
    guidance = [{"target_length": target, "strength": 9} for target in TARGETS]
    tokens = dict(sampling_seed=5, max_new_tokens=80, ignore_eos=False, stop_token_ids=STOPS)
    options = ("--chunked-prefill-size", "32", "--enable-metrics")
    starts = [
        running_server(folder, f"no values, {kind}", f"--{kind}-size", "2", *options, **NO_VALUES | TWO_RANKS)
        for kind in ("tp", "pp")
    ]
    for start in (*starts, running_speculation(folder, "no values, drafts", *options, **NO_VALUES)):
        with start as server:
            server.generate(prompts[:1], [None], max_new_tokens=2)
            for others in (0, 2):
                everyone = prompts_of(8, 30)[:others] + prompts
                results, steps = server.generate(everyone, [None] * others + guidance, **tokens)
                assert cached_tokens(results)[others] > 30
                found.append([result["output_ids"] for result in results[others:]])
                check_targets(found[-1])
                assert Status.GUIDE in {row["status"] for step in steps for row in step["rows"]}
            response = server.post(input_ids=prompts[1], sampling_params={"custom_params": {"value_scale": 0.5}})
            assert response.status_code == 400 and "value_mode mul needs a value model" in response.text
            ends = {"end_token_ids": [7, 9], "thinking_budget": 6}
            results, _ = server.generate(prompts, [ends] * 5, max_new_tokens=24)
            places = [min(i for i, t in enumerate(r["output_ids"]) if t in (7, 9)) for r in results]
            assert max(places) <= 8 and cached_tokens(results)[0] > 30
            metrics = server.metrics()
            assert metrics["fallbacks_total"] == 0 and metrics["guided_steps_total"] > 20
            assert metrics["length_error_count near"] == 2 * len(guidance)
    assert found[1:] == found[:1] * 5


# Texts of 17 to 41 tokens, and of 7 to 9 tokens.
LIST, OBJECT = r'"long"(,("long"|"short")){8,20}', r'\{"n":[0-9]{1,3},"kind":("long"|"short")\}'


def test_grammars_and_drafts(tmp_path):
    """Guided answers match their grammar, and are unchanged by drafts; some drafts are accepted."""
    write_checkpoints(tmp_path)
    save_tokenizer(tmp_path / "base")
    asked = [(LIST, {"target_length": 8}), (LIST, {"target_length": 20}), (OBJECT, GENTLE), (LIST, GENTLE)]
    sampling = SAMPLING | {"ignore_eos": False, "max_new_tokens": 60, "min_p": 0.0, "top_k": 20, "sampling_seed": 7}
    sampling = [sampling | {"regex": regex, "custom_params": params} for regex, params in asked]
    prompts, found = prompts_of(9, 12, 40, 5, seed=24), []
    for start in (
        running_server(tmp_path, "grammar", "--skip-server-warmup"),
        running_speculation(tmp_path, "grammar and drafts", "--skip-server-warmup", **NGRAM),
    ):
        with start as server:
            response = server.post(input_ids=prompts, sampling_params=sampling)
            assert response.ok, response.text
            results, rows = response.json(), [row for step in server.steps() for row in step["rows"]]
        assert {r["meta_info"]["id"] for r in results} <= {row["rid"] for row in rows if row["status"] == Status.GUIDE}
        found.append(["".join(WORDS[token] for token in result["output_ids"]) for result in results])
    assert found[0] == found[1] and sum(r["meta_info"]["spec_num_correct_drafts"] for r in results) > 5
    for text, (regex, _) in zip(found[0], asked, strict=True):
        assert re.fullmatch(regex, text.removesuffix("<eos>")), text
