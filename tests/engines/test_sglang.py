"""The SGLang plugin in a real server on CPU. ``make test-sglang`` builds the environment; skipped without SGLang.

All tests check the trace of guided steps, because a server without guidance also generates plausible tokens.
"""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from lenvm_kernels.engines.sglang.value_model import MAX_WAITING
from lenvm_kernels.types import Status
from tests.helpers.sglang_server import GENTLE, MODES, SAMPLING, cached_tokens, prompts_of, rows_of, running_server
from tests.helpers.spans import check_answers_with_spans

OPTIONS = ("--chunked-prefill-size", "32", "--enable-metrics", "--enable-custom-logit-processor")
STOPS = list(range(200, 248))
# Answers that end at a stop token.
ENDING = dict(ignore_eos=False, stop_token_ids=STOPS, max_new_tokens=40, min_p=0.0)


@pytest.fixture(scope="module")
def engine(folder):
    """A server in which a test can make a guided step fail."""
    variables = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.patches", "LENVM_TEST_FAIL": str(folder / "fail")}
    with running_server(folder, "engine", *OPTIONS, **variables) as server:
        yield server


def test_unguided_requests_are_unchanged_by_the_plugin(folder, engine):
    """Servers with the same seed, with and without the plugin, return the same tokens for unguided rows.

    This test must run first, because draws depend on all earlier draws of the engine.
    """
    prompts, guidance = prompts_of(5, 9, 7, 4, seed=7), [GENTLE, None, MODES[0], None]
    with_plugin, steps = engine.generate(prompts, guidance)
    with running_server(folder, "without plugin", *OPTIONS, SGLANG_PLUGINS="no plugin has this name") as server:
        without, no_steps = server.generate(prompts, guidance)
    same = [a["output_ids"] == b["output_ids"] for a, b in zip(with_plugin, without, strict=True)]
    assert same == [False, True, False, True] and steps and not no_steps


def test_guided_requests_only_share_guided_prefixes(engine):
    """A guided request does not reuse the cached prompt of an unguided request, only of a guided request."""
    prompts = prompts_of(40, seed=1)
    for guidance, is_cached in ((None, False), (MODES[0], False), (MODES[1], True), (MODES[2], True), (None, True)):
        results, steps = engine.generate(prompts, [guidance])
        assert (cached_tokens(results)[0] > 0) == is_cached
        assert not guidance or engine.check_steps(prompts, results, steps)


def test_second_turn_reuses_computed_tokens(engine):
    """It reuses exactly the tokens computed by the value model, without tokens after a span or pending at its end."""
    (prompt,), guidance = prompts_of(30, seed=11), {"end_token_ids": [7], "hard_limit": 20, "value_stride": 999_999}
    (first,), _ = engine.generate([prompt], [GENTLE | guidance], max_new_tokens=60)
    longer, before_end = [[*prompt, *first["output_ids"], 5, 6]], first["output_ids"].index(7)
    results, steps = engine.generate(longer, [GENTLE])
    assert cached_tokens(results) == [30 + max(0, before_end - MAX_WAITING)]
    assert engine.check_steps(longer, results, steps)


def test_prefills_of_other_requests_do_not_count_towards_a_stride(engine):
    """A request with a stride of 2 is guided in every second of its steps, with prefills in between."""
    prompts, before = prompts_of(9, 30, seed=15), len(engine.lines())
    with ThreadPoolExecutor() as pool:
        strided = GENTLE | {"value_stride": 2}
        running = pool.submit(engine.generate, prompts[:1], [strided], max_new_tokens=120)
        for _ in range(5):
            assert engine.post(input_ids=prompts[1:], sampling_params=[SAMPLING | {"max_new_tokens": 3}]).ok
        ((result,), _), steps = running.result(), engine.steps(before)
    guided = {
        mode: [row["status"] == Status.GUIDE for row in rows_of(result, [s for s in steps if s["mode"] == mode])]
        for mode in ("EXTEND", "DECODE")
    }
    # With another prompt in the batch, the request's prompt may be split into two chunks.
    prompt, due = guided["EXTEND"][-1], guided["DECODE"]
    assert len(due) >= 119 and due == [prompt ^ bool(i % 2) for i in range(len(due))]


def test_spans(engine):
    """A span ends by an end token or at its limit; the sequence ends after it, without guidance. The last prompt has no
    open span, as from a chat template with thinking disabled."""
    prompts, ends = prompts_of(9, 12, 70, 5, 30, 8, 9, seed=13), [7, *range(100, 103)]
    prompts[6] += [7, 12]
    span = GENTLE | {"end_token_ids": ends, "hard_limit": 11}
    guidance = [span | {"answer_length": 4.0}, *[span] * 6]
    results, steps = engine.generate(prompts, guidance, **ENDING)
    assert engine.check_steps(prompts, results, steps) > 6 * 6
    check_answers_with_spans(guidance, prompts, results, steps, [*[1] * 6, 0])
    outputs = [result["output_ids"] for result in results[:6]]
    places = [min(i for i, token in enumerate(output) if token in ends) for output in outputs]
    assert max(places) == 11 and all(not {*output[:n]} & {*STOPS} for output, n in zip(outputs, places, strict=True))
    assert any(output[-1] in STOPS for output in outputs)
    results, _ = engine.generate(prompts, [span | {"allow_eos": True}] * 7, **ENDING)
    assert any(result["output_ids"][-1] in STOPS and len(result["output_ids"]) < 12 for result in results[:6])


def test_greedy_requests(engine):
    """A greedy request takes the most probable candidate by guided weights, alone and in a batch; without guidance, by
    the base model's."""
    prompts, guidance = prompts_of(9, 9, seed=3), [MODES[0], MODES[0]]
    plain, no_steps = engine.generate(prompts[:1], [None], temperature=0.0)
    found = []
    for greedy in (dict(temperature=0.0), dict(top_k=1)):
        results, steps = engine.generate(prompts[:1], guidance[:1], request=dict(return_logprob=True), **greedy)
        assert engine.check_steps(prompts[:1], results, steps)
        for row in rows_of(results[0], steps):
            assert row["token"] == row["token_ids"][row["probs"].index(max(row["probs"]))]
        found.append(results[0]["output_ids"])
    params = [{**SAMPLING, "temperature": t, "custom_params": MODES[0]} for t in (0.0, 1.0)]
    found.append(engine.post(input_ids=prompts, sampling_params=params).json()[0]["output_ids"])
    assert found[1:] == found[:1] * 2 and found[0] != plain[0]["output_ids"] and no_steps == []
    logprobs = [logprob for logprob, _, _ in results[0]["meta_info"]["output_token_logprobs"]]
    assert min(logprobs) < -1  # of the base model


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"temperature": 0.6, "top_k": 1}])
def test_guided_log_probabilities(engine, sampling):
    """The engine divides logits by the temperature, unless all requests are greedy. The second request returns the base
    model's log-probabilities."""
    prompts, wants = prompts_of(9, 12, 7, 5, seed=23), {"guided_logprobs": True}
    guidance = [MODES[0] | wants, MODES[0], None, MODES[1] | wants]
    request = dict(return_logprob=True, top_logprobs_num=2)
    results, steps = engine.generate(prompts, guidance, request=request, **sampling)
    engine.check_logprobs(prompts, guidance, results, steps)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_predicted_lengths_are_returned(engine, temperature):
    """Requests with ``return_values`` are guided, unguided, skipped or greedy, with prompts of several chunks."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [wants | GENTLE, wants, wants | MODES[2] | {"value_entropy_threshold": 100.0}, GENTLE, None]
    prompts = prompts_of(9, 70, 12, 5, 7, seed=8)
    results, steps = engine.generate(prompts, guidance, temperature=temperature)
    assert len(steps) >= 16
    engine.check_lengths(prompts, guidance, results)


def test_metrics(folder, engine):
    """Counted steps and rows equal the trace. The model has the same name as in the engine's metrics."""
    prompts, before = prompts_of(9, 12, 6, seed=10), engine.metrics()
    _, steps = engine.generate(prompts, [MODES[0], MODES[4] | {"value_entropy_threshold": 100.0}, None])
    more = {name: value - before.get(name, 0.0) for name, value in engine.metrics().items()}
    assert more["guided_steps_total"] == len(steps)
    rows = Counter(Status(row["status"]).name.lower() for step in steps for row in step["rows"])
    for status, count in rows.items():  # the overlapping scheduler computes one step too many
        assert count - 3 <= more[f"rows_total {status}"] <= count
    assert rows["guide"] and rows["skip"] and rows["unguided"] and more["rows_total broken"] == 0
    assert more["value_model_milliseconds_total"] > 0 and more["fallbacks_total"] == 0
    assert before["cache_bytes"] > 0
    text = requests.get(f"{engine.url}/metrics", timeout=60).text
    names = set(re.findall(r'^(lenvm|sglang):.*model_name="([^"]*)"', text, re.MULTILINE))
    assert names == {("lenvm", str(folder / "base")), ("sglang", str(folder / "base"))}


def test_seeds_and_samples(engine):
    """A seeded guided request is reproducible, alone and in a batch. Samples of a prompt differ; with a seed they are
    reproducible, and the first sample equals the answer with ``n = 1``."""
    prompts, found = prompts_of(9, 12, 4, seed=4), []
    alone, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=5)
    again, _ = engine.generate(prompts, [GENTLE, MODES[0], None], sampling_seed=5)
    other, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=6)
    assert alone[0]["output_ids"] == again[0]["output_ids"] != other[0]["output_ids"]
    for seed in (None, 5, 5):
        params = {**SAMPLING, "n": 3, "custom_params": GENTLE, "sampling_seed": seed}
        results = engine.post(input_ids=prompts[0], sampling_params=params).json()
        found.append([result["output_ids"] for result in results])
        assert len(set(map(tuple, found[-1]))) == 3
    assert found[1] == found[2] and found[1][0] == alone[0]["output_ids"]


class Negated(CustomLogitProcessor):
    """A processor that restores the logits in a second run."""

    def __call__(self, logits, custom_param_list=None):
        return -logits


def test_custom_logit_processors_run_once(engine):
    """Candidates and unguided tokens are the least probable tokens, also in a batch with a guided request."""
    (prompt,), found, before = prompts_of(9, seed=16), [], len(engine.lines())
    for guidance in (None, GENTLE):
        params = [{**SAMPLING, "temperature": 0.0, "custom_params": x} for x in (None, guidance)]
        request = dict(input_ids=[prompt] * 2, custom_logit_processor=Negated.to_str())
        found.append(engine.post(**request, sampling_params=params).json())
    unguided, beside = (results[0]["output_ids"] for results in found)
    assert unguided == beside
    assert rows_of(found[1][1], engine.steps(before))[0]["token_ids"][0] == unguided[0]


def test_failed_step_ends_guidance_of_its_requests(folder, engine):
    """Tokens of a failed request in the radix cache are not reused, and later requests are guided."""
    prompts, before = prompts_of(20, seed=17), engine.metrics()["fallbacks_total"]
    for method in ("extend", "step"):
        (folder / "fail").write_text(f"{method} 0")
        results, steps = engine.generate(prompts, [GENTLE])
        assert not (folder / "fail").exists() and steps == [] and len(results[0]["output_ids"]) == 16
        results, steps = engine.generate(prompts, [GENTLE])
        assert cached_tokens(results) == [0] and engine.check_steps(prompts, results, steps)
        assert requests.post(f"{engine.url}/flush_cache", timeout=60).ok
    assert engine.metrics()["fallbacks_total"] == before + 2
    assert engine.log.read_text().count("LenVM: a step failed") == 1
