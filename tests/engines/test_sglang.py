"""The SGLang plugin in a real server on CPU. ``make test-sglang`` builds the environment; skipped without SGLang.

Every test checks the trace of guided steps, because a server without guidance also generates plausible tokens.
"""

import itertools
import json
import math
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import requests
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.custom_logit_processor import ThinkingBudgetLogitProcessor
from sglang.srt.server_args import ServerArgs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lenvm_kernels.engines.sglang import guide as sglang_guide
from lenvm_kernels.engines.sglang import plugin as sglang_adapter
from lenvm_kernels.engines.tokenizers import check_vocabulary
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, StepConfig, value_source, working_bytes
from lenvm_kernels.types import Status
from lenvm_kernels.values import KVCache, ValueModel
from tests.helpers.models import random_model
from tests.helpers.sglang_server import (
    EOS,
    GENTLE,
    MODES,
    SAMPLING,
    TINY,
    VOCAB,
    check_spans,
    check_steps,
    prompts_of,
    running_server,
    values_from_scratch,
    write_checkpoints,
)
from tests.helpers.spans import LIKELY, SEVERAL, check_answers_of_several


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    options = ("--chunked-prefill-size", "32", "--enable-metrics", "--enable-custom-logit-processor")
    with running_server(folder, "engine", *options) as server:
        yield server


def test_every_mode_in_batch_with_unguided_requests(folder, engine):
    """Prompts shorter and longer than a prefill chunk, in one batch with every guidance mode and without guidance."""
    prompts = prompts_of(*range(3, 80, 6))[:12]
    results, steps = engine.generate(prompts, [*MODES, None, {}])
    assert check_steps(folder, prompts, results, steps) > 12 * 16
    guided = {row["rid"] for step in steps for row in step["rows"] if row["status"] != Status.UNGUIDED}
    assert guided == {result["meta_info"]["id"] for result in results[:10]}
    # On a busy machine the requests may not all run at once.
    batches = [[row["status"] for row in step["rows"]] for step in steps]
    assert any(len(batch) >= 6 and {Status.GUIDE, Status.UNGUIDED} <= {*batch} for batch in batches)


def test_guided_requests_share_only_prefixes_with_values(folder, engine):
    """A guided request must not reuse the cached prompt of an unguided one; the next guided request reuses its own."""
    prompts = prompts_of(40, seed=1)
    engine.generate(prompts, [None])
    for cached, guidance in ((False, MODES[0]), (True, MODES[1]), (True, MODES[2])):
        results, steps = engine.generate(prompts, [guidance])
        assert (results[0]["meta_info"]["cached_tokens"] > 0) == cached
        assert check_steps(folder, prompts, results, steps)
    results, _ = engine.generate(prompts, [None])
    assert results[0]["meta_info"]["cached_tokens"] > 0


def test_pending_end_of_answer_is_not_reused_as_prefix(folder, engine):
    """The second turn of a conversation reuses exactly the tokens that the value model had computed in the first."""
    prompts = prompts_of(30, seed=11)
    first, steps = engine.generate(prompts, [GENTLE | {"value_stride": 999_999}], max_new_tokens=40)
    assert {row["status"] for step in steps for row in step["rows"]} == {Status.NOT_DUE}
    longer = [[*prompts[0], *first[0]["output_ids"], 5, 6]]
    results, steps = engine.generate(longer, [GENTLE])
    assert results[0]["meta_info"]["cached_tokens"] == 30 + 39 - sglang_guide.MAX_WAITING
    assert check_steps(folder, longer, results, steps)


def test_tokens_after_a_span_are_not_reused_as_prefix(folder, engine):
    """The value model does not compute them."""
    prompts, span = prompts_of(30, seed=14), GENTLE | {"end_token_ids": [7], "hard_limit": 20}
    first, _ = engine.generate(prompts, [span], max_new_tokens=60)
    place = first[0]["output_ids"].index(7)
    longer = [[*prompts[0], *first[0]["output_ids"], 5, 6]]
    results, steps = engine.generate(longer, [GENTLE])
    assert results[0]["meta_info"]["cached_tokens"] == 30 + max(0, place - sglang_guide.MAX_WAITING)
    assert check_steps(folder, longer, results, steps)


def test_strides_with_mixture_of_experts_base(tmp_path):
    """Requests without a stride use the server's. Each row is guided at its own steps, with correct values."""
    write_checkpoints(tmp_path)
    sizes = TINY | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes), seed=0).save_pretrained(tmp_path / "base")
    prompts = prompts_of(9, 12, 40, 5, seed=12)
    guidance = [MODES[0], MODES[1] | {"value_stride": 1}, MODES[2] | {"value_stride": 3}, None]
    with running_server(tmp_path, "strides", "--chunked-prefill-size", "32", LENVM_VALUE_STRIDE="4") as server:
        results, steps = server.generate(prompts, guidance, max_new_tokens=24)
    assert check_steps(tmp_path, prompts, results, steps) > 24 * 2
    for result, stride in zip(results[:3], (4, 1, 3), strict=True):
        decodes = [step for step in steps if step["mode"] == "DECODE"]
        rows = [row for step in decodes for row in step["rows"] if row["rid"] == result["meta_info"]["id"]]
        due = [i for i, row in enumerate(rows) if row["status"] == Status.GUIDE]
        assert {row["status"] for row in rows} <= {Status.GUIDE, Status.NOT_DUE}
        assert {after - before for before, after in itertools.pairwise(due)} == {stride}


def test_prefills_of_other_requests_do_not_count_towards_a_stride(folder, engine):
    """A request with a stride of 2 is guided at every second of its own steps, whatever prefills run in between."""
    prompts, wants = prompts_of(9, 30, seed=15), {"max_new_tokens": 120, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        before = len(engine._lines())
        strided = [SAMPLING | wants | {"custom_params": GENTLE | {"value_stride": 2}}]
        running = pool.submit(engine.post, input_ids=prompts[:1], sampling_params=strided)
        for _ in range(5):
            assert engine.post(input_ids=prompts[1:], sampling_params=[SAMPLING | {"max_new_tokens": 3}]).ok
        (result,) = running.result().json()
    steps = [json.loads(line) for line in engine._lines()[before:]]
    guided: dict[str, list[bool]] = {"EXTEND": [], "DECODE": []}
    for step in steps:
        rows = [row for row in step["rows"] if row["rid"] == result["meta_info"]["id"]]
        guided[step["mode"]] += [row["status"] == Status.GUIDE for row in rows]
    # If another prompt is in the batch, the request's own may be split into two chunks.
    prompt, due = guided["EXTEND"][-1], guided["DECODE"]
    assert len(due) >= 119 and prompt == due[0]
    assert due == [prompt ^ bool(i % 2) for i in range(len(due))]
    assert sum(step["mode"] == "EXTEND" for step in steps) >= 1


def test_spans(folder, engine):
    """A span ends by an end token or at its limit, the sequence ends only after it, and then guidance is off."""
    prompts, ends = prompts_of(9, 12, 70, 5, 30, 8, seed=13), [7, *range(100, 103)]
    stops = list(range(200, 248))
    span = GENTLE | {"end_token_ids": ends, "hard_limit": 11}
    guidance = [span | {"answer_length": 4.0}, span, span, span, span, span]
    options = dict(ignore_eos=False, stop_token_ids=stops, max_new_tokens=40, min_p=0.0)
    results, steps = engine.generate(prompts, guidance, **options)
    assert check_steps(folder, prompts, results, steps) > 6 * 6
    places = check_spans(prompts, results, steps, ends, 11)
    outputs = [result["output_ids"] for result in results]
    assert all(not set(output[:place]) & set(stops) for output, place in zip(outputs, places, strict=True))
    assert any(output[-1] in stops for output in outputs)
    results, _ = engine.generate(prompts, [span | {"allow_eos": True}] * 6, **options)
    assert any(result["output_ids"][-1] in stops and len(result["output_ids"]) < 12 for result in results)


def test_several_spans_and_closings(folder, engine):
    """The value model also computes tokens between spans, which the next turn reuses from the radix cache."""
    prompts, guidance = prompts_of(9, 40, 5, 12, seed=17), [GENTLE | asked for asked in SEVERAL]
    results, steps = engine.generate(prompts, guidance, max_new_tokens=60, logit_bias=LIKELY)
    assert check_steps(folder, prompts, results, steps) > 60
    check_answers_of_several(prompts, results, steps)
    longer = [[*prompts[1], *results[1]["output_ids"], 5, 6]]
    results, steps = engine.generate(longer, [GENTLE])
    assert results[0]["meta_info"]["cached_tokens"] == 40 + 59 - sglang_guide.MAX_WAITING
    assert check_steps(folder, longer, results, steps)
    assert engine.metrics()["fallbacks_total"] == 0


def test_earlier_of_two_budgets_ends_thought(folder, engine):
    """The engine's processor reads the same ``thinking_budget``; it forces a line break, then the end of a thought."""
    start, line_break, end = 400, 401, 402

    class Budget(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID, NEW_LINE_TOKEN_ID, THINKING_END_TOKEN_ID = start, line_break, end

    prompts = [[*prompt, start] for prompt in prompts_of(9, 40, 5, 12, seed=14)]
    budget = {"thinking_budget": 6, "end_token_ids": [end], "gamma": 0.9}
    never = {str(end): -100.0, str(line_break): -100.0}  # the model does not end the thought itself
    options = dict(processor=Budget.to_str(), logit_bias=never, max_new_tokens=20)
    places = []
    for limit in (15, 8, 3):  # the second limit is reached while the engine forces the line break
        guidance = [budget | {"hard_limit": limit}, budget | {"hard_limit": limit, "op": "ge_soft"}] * 2
        results, steps = engine.generate(prompts, guidance, **options)
        places.append(results[0]["output_ids"].index(end))
        assert check_steps(folder, prompts, results, steps) > 4 * 3
        assert check_spans(prompts, results, steps, [end], places[-1]) == [places[-1]] * 4
        broken = [line_break in result["output_ids"][: places[-1]] for result in results]
        assert broken == [limit > 3] * 4
    assert places == [9, 9, 3]  # the engine counts a token two steps late, so it also forces two line breaks


def test_bad_parameters_are_rejected_without_side_effects(folder, engine):
    prompts = prompts_of(5, seed=2)
    for custom_params, message in (
        ({"mode": "loud"}, "value_mode must be one of"),
        ({"gamma": 1.5}, "gamma must be a finite number > 0 and < 1, got 1.5"),
        ({"target_lenght": 5}, "target_lenght is not a guidance parameter; did you mean target_length"),
        ({"thinking_budget": 5}, "thinking_budget needs end_token_ids: no token is known that ends a thought"),
        ("loud", "custom_params"),
    ):
        response = engine.post(input_ids=prompts[0], sampling_params={**SAMPLING, "custom_params": custom_params})
        assert response.status_code == 400 and message in response.json()["error"]["message"]
    results, steps = engine.generate(prompts, [MODES[0]])
    assert check_steps(folder, prompts, results, steps)


def test_greedy_requests_are_greedy(engine):
    """With and without guidance, alone and in a batch with sampled requests."""
    prompts = prompts_of(9, 9, seed=3)
    plain, _ = engine.generate(prompts[:1], [None], temperature=0.0)
    guided, steps = engine.generate(prompts[:1], [MODES[0]], temperature=0.0)
    assert steps == []
    params = [{**SAMPLING, "temperature": t, "custom_params": MODES[0]} for t in (0.0, 1.0)]
    mixed = engine.post(input_ids=prompts, sampling_params=params).json()
    assert plain[0]["output_ids"] == guided[0]["output_ids"] == mixed[0]["output_ids"]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_predicted_lengths_are_returned(folder, engine, temperature):
    """Only for requests with ``return_values``: guided, unguided, skipped or greedy, with prompts of several chunks."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [wants | GENTLE, wants, wants | MODES[2] | {"entropy_threshold": 100.0}, GENTLE, None]
    prompts = prompts_of(9, 70, 12, 5, 7, seed=8)
    results, steps = engine.generate(prompts, guidance, temperature=temperature)
    assert len(steps) >= 16
    for prompt, params, result in zip(prompts, guidance, results, strict=True):
        keys = result["meta_info"].keys() & {"predicted_output_length", "predicted_remaining_lengths"}
        assert len(keys) == (2 if params and "return_values" in params else 0)
        if keys:
            tokens = [*prompt, *result["output_ids"]]
            values = values_from_scratch(folder, [tokens[:end] for end in range(len(prompt), len(tokens) + 1)])
            lengths = torch.nn.functional.softplus(values) / -math.log(0.9)
            of_prompt, of_tokens = (result["meta_info"][key] for key in sorted(keys))
            torch.testing.assert_close(torch.tensor(of_prompt + of_tokens), lengths, rtol=0, atol=2e-3)


def test_greedy_output_is_not_reused_as_guided_prefix(folder, engine):
    """A greedy request is never guided, so no guided request may reuse its tokens as a prefix."""
    prompt = prompts_of(20, seed=9)
    first, _ = engine.generate(prompt, [GENTLE], temperature=0.0)
    longer = [[*prompt[0], *first[0]["output_ids"], 5, 6]]
    results, steps = engine.generate(longer, [GENTLE])
    assert check_steps(folder, longer, results, steps)


def test_metrics(engine):
    """Counted steps and rows equal those of the trace."""
    prompts = prompts_of(9, 12, 6, seed=10)
    before = engine.metrics()
    _, steps = engine.generate(prompts, [MODES[0], MODES[4] | {"entropy_threshold": 100.0}, None])
    more = {name: value - before.get(name, 0.0) for name, value in engine.metrics().items()}
    assert more["guided_steps_total"] == len(steps)
    rows = Counter(Status(row["status"]).name.lower() for step in steps for row in step["rows"])
    for status, count in rows.items():  # the overlapping scheduler computes one step more than a request returns
        assert count - 3 <= more[f"rows_total {status}"] <= count
    assert rows["guide"] and rows["skip"] and rows["unguided"] and more["rows_total broken"] == 0
    assert more["value_model_milliseconds_total"] > 0 and more["fallbacks_total"] == 0
    assert before["cache_bytes"] > 0


def test_metrics_use_the_model_name_of_the_engine(folder, engine):
    """Without a served model name both use the model's path."""
    engine.generate(prompts_of(9), [MODES[0]])
    text = requests.get(f"{engine.url}/metrics", timeout=60).text
    names = set(re.findall(r'^(lenvm|sglang):.*model_name="([^"]*)"', text, re.MULTILINE))
    assert names == {("lenvm", str(folder / "base")), ("sglang", str(folder / "base"))}


def test_seeds(engine):
    """A guided request with a seed is reproducible, alone and in a batch."""
    prompts = prompts_of(9, 12, 4, seed=4)
    alone, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=5)
    again, _ = engine.generate(prompts, [GENTLE, MODES[0], None], sampling_seed=5)
    other, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=6)
    assert alone[0]["output_ids"] == again[0]["output_ids"] != other[0]["output_ids"]


def test_logprobs_and_several_samples(engine):
    """Log-probabilities of the drawn tokens are the base model's; the ``n`` samples differ."""
    prompts = prompts_of(9, seed=5)
    params = {**SAMPLING, "n": 3, "custom_params": GENTLE}
    results = engine.post(input_ids=prompts[0], sampling_params=params, return_logprob=True).json()
    assert len({tuple(result["output_ids"]) for result in results}) == 3
    for result in results:
        drawn = [(token, value) for value, token, _ in result["meta_info"]["output_token_logprobs"]]
        assert [token for token, _ in drawn] == result["output_ids"]
        assert all(-20 < value < 0 for _, value in drawn)


def test_retracted_requests_keep_correct_values(folder):
    """The engine retracts running requests every few steps and resumes them later."""
    prompts = prompts_of(*[20] * 8, seed=6)
    with running_server(folder, "retracting", SGLANG_TEST_RETRACT="1") as server:
        results, steps = server.generate(prompts, MODES[:8], max_new_tokens=32)
    assert all(len(result["output_ids"]) == 32 for result in results)
    check_steps(folder, prompts, results, steps)
    again = [row for step in steps if step["mode"] == "EXTEND" for row in step["rows"] if row["length"] > 20]
    assert len(again) > 4, "no request was retracted: the test shows nothing"


def test_unguided_requests_draw_the_same_tokens_without_the_plugin(folder):
    """Servers with the same seed, with and without the plugin, return the same tokens for unguided rows."""
    prompts = prompts_of(5, 9, 7, 4, seed=7)
    guidance = [GENTLE, None, MODES[0], None]
    outputs = []
    for plugin in (True, False):
        with running_server(folder, f"seeded-{plugin}", plugin=plugin) as server:
            results, steps = server.generate(prompts, guidance)
        outputs.append([result["output_ids"] for result in results])
        assert bool(steps) == plugin
    assert outputs[0][1] == outputs[1][1] and outputs[0][3] == outputs[1][3]
    assert outputs[0][0] != outputs[1][0] and outputs[0][2] != outputs[1][2]


def test_unsupported_option_is_rejected_at_start(folder):
    with (
        pytest.raises(AssertionError, match="enable_hierarchical_cache must be False"),
        running_server(folder, "s", "--enable-hierarchical-cache"),
    ):
        pass


# --- the adapter without an engine ---


@pytest.fixture
def guide(folder, monkeypatch):
    """The guidance of this process, set up as if an engine had loaded the value model."""
    settings = sglang_adapter.Settings(folder / "value", chunk_tokens=64)
    guide = sglang_guide.SGLangGuide(settings, ValueModel.from_pretrained(folder / "value"), torch.device("cpu"))
    monkeypatch.setattr(sglang_adapter, "_guide", guide)
    return guide


@pytest.mark.parametrize("cap", [None, 2000])
def test_pool_leaves_memory_for_the_step(guide, cap):
    """The pool uses the memory that the step does not need, up to a few slots; a requested smaller pool is kept."""
    cell, budget = 1000, 40_000_000

    class Configurator:
        page_size, is_draft_worker = 1, False
        model_config = SimpleNamespace(context_len=512, vocab_size=VOCAB)

        def resolve_max_num_reqs(self, tokens):
            return min(tokens // 512 + 1, 64)

    def original(configurator, pool_bytes, *, cap_tokens):
        tokens = pool_bytes // cell
        return SimpleNamespace(max_total_num_tokens=tokens if cap is None else min(tokens, cap))

    pool = sglang_adapter.leave_room(original, Configurator(), budget)
    tokens, rows = pool.max_total_num_tokens, Configurator().resolve_max_num_reqs(pool.max_total_num_tokens)
    sizes = dict(requests=rows, max_len=512, vocab_size=VOCAB)
    working = working_bytes(guide.value_model, **sizes, max_candidates=8, max_delta=sglang_guide.MAX_DELTA)
    working += working_bytes(guide.value_model, **sizes, tokens=64)
    used = tokens * cell + KVCache.num_bytes(guide.value_model, tokens + 1) + working
    assert used <= budget
    assert tokens == cap if cap else used > 0.9 * budget
    with pytest.raises(ValueError, match="LENVM_VALUE_MODEL leaves no memory for the engine's pool"):
        sglang_adapter.leave_room(original, Configurator(), 100_000)
    guide.settings = replace(guide.settings, memory_share=0.01)
    with pytest.raises(ValueError, match=r"LENVM_MEMORY_SHARE is 0.01, but the guided step takes 0\.\d+ of"):
        sglang_adapter.leave_room(original, Configurator(), budget)


class Work(list):
    """A stream that records submitted work without running it, and how much work of another stream it waits for."""

    waits_for = None

    def wait_event(self, event):
        self.waits_for = event

    def wait_stream(self, stream):
        self.waits_for = len(stream)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("is_guided", [True, False])
def test_slot_table_is_kept_until_its_last_read(monkeypatch, mode, is_delayed, is_guided):
    """With the engine's own barrier, in the order of its overlapping scheduler; grammars delay sampling."""
    forward_stream = Work()
    guide = SimpleNamespace(
        reads_tokens=True,
        extend=lambda batch: forward_stream.append("the value model reads the table for a prompt"),
        sampling=lambda batch: nullcontext(),
        report=lambda *arguments: forward_stream.append("the value model reads the table for a step"),
        note_drawn=lambda *arguments: None,
    )
    monkeypatch.setattr(sglang_adapter, "_guide", guide)
    reqs = [SimpleNamespace(lenvm_guidance=parse_guidance(GENTLE) if is_guided else None)]
    scheduled = SimpleNamespace(reqs=reqs)
    batch = SimpleNamespace(forward_mode=mode, lenvm_reqs=reqs if is_guided else [], sampling_info=None)
    logits_output = SimpleNamespace(next_token_logits=None, auxiliary_device_output=None)
    runner = SimpleNamespace(shared_read_done_event=None)
    scheduler = SimpleNamespace(
        _war_barrier_enabled=True,
        _relay_forward_payload=lambda *arguments: None,
        _copy_result_to_cpu=lambda *arguments: None,
        forward_stream=forward_stream,
        forward_stream_ctx=nullcontext(),
        model_worker=SimpleNamespace(last_shared_read_runner=runner),
        schedule_stream=Work(),
    )
    scheduler._apply_war_barrier = lambda: Scheduler._apply_war_barrier(scheduler)

    def draw():
        sglang_adapter.sample(lambda *arguments: torch.tensor([3]), runner, logits_output, batch)
        return result

    result = SimpleNamespace(delay_sample_func=draw if is_delayed else None, future_indices=None, logits_output=None)
    forward_stream.append("the base model reads the table")
    runner.shared_read_done_event = len(forward_stream)
    sglang_adapter.extend_prompts(None, runner, batch)
    if not is_delayed:
        draw()
    scheduler._apply_war_barrier()
    if is_delayed:
        assert scheduler.schedule_stream.waits_for == len(forward_stream)  # results are processed in the meantime
    sglang_adapter.sample_delayed(Scheduler.launch_batch_sample_if_needed, scheduler, result, scheduled)
    assert len(forward_stream) == 1 + is_guided * (1 + mode.is_extend())
    assert scheduler.schedule_stream.waits_for == len(forward_stream)


def test_idle_engine_draws_nothing():
    scheduler = SimpleNamespace()  # any attempt to set up a barrier fails
    sglang_adapter.sample_delayed(Scheduler.launch_batch_sample_if_needed, scheduler, None, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"speculative_algorithm": "DFLASH"},
            "speculative_algorithm must be one of None, EAGLE, EAGLE3, STANDALONE, NGRAM .* got DFLASH",
        ),
        ({"speculative_algorithm": "EAGLE", "speculative_adaptive": True}, "speculative_adaptive must be False"),
        (
            {"speculative_algorithm": "EAGLE", "enable_mixed_chunk": True},
            "enable_mixed_chunk must be False .* speculative",
        ),
        ({"speculative_algorithm": "DSPARK"}, "speculative_algorithm must be one of .* got DSPARK: not tried"),
        (
            {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True},
            "enable_multi_layer_eagle must be False",
        ),
        ({"speculative_algorithm": None, "pp_size": 2}, "pp_size must be 1 together .*, got 2: not built"),
        (
            {"speculative_algorithm": None, "startup_weight_load_mode": "overlap"},
            "startup_weight_load_mode must be serial together with LENVM_VALUE_MODEL, got overlap",
        ),
    ],
)
def test_unsupported_options_are_rejected(monkeypatch, tmp_path, given, message):
    settings = sglang_adapter.Settings(tmp_path)
    monkeypatch.setattr(sglang_adapter.Settings, "current", lambda tokenizer: settings)
    monkeypatch.setattr(sglang_adapter, "resolved_view", lambda options: options)
    monkeypatch.setattr(sglang_adapter.HookRegistry, "_patched", set(sglang_adapter.HOOKS))
    given = {"enable_mixed_chunk": False, "tokenizer_path": None} | given
    runner = SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(**given))
    with pytest.raises(ValueError, match=message):
        sglang_adapter.load_value_model(None, runner)


@pytest.mark.parametrize(("has_windows", "has_states"), [(True, False), (False, True), (False, False)])
def test_base_models_with_other_pools_are_rejected(folder, monkeypatch, has_windows, has_states):
    """A value model is rejected with such a base model, because it needs the engine's slots."""
    monkeypatch.setattr(sglang_adapter, "mambaish_config", lambda config: {"layers": 3} if has_states else None)
    runner = SimpleNamespace(is_hybrid_swa=has_windows, model_config=None)
    is_refused = has_windows or has_states
    which = "sliding windows" if has_windows else "layers with a state"
    message = f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {which}"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        sglang_adapter.check_pool(runner)


def save_tokenizer(folder, vocabulary):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(folder)


def test_vocabularies_may_differ_in_padding_only(folder, tmp_path):
    """Without a tokenizer path, the engine uses the model's tokenizer."""
    base, value = tmp_path / "base", tmp_path / "value"
    for path in (base, value):
        shutil.copytree(folder / path.name, path)
    save_tokenizer(base, {"a": 0, "b": 1})
    save_tokenizer(value, {"a": 0, "b": 1})
    server_args = ServerArgs(model_path=str(base), device="cpu")
    server_args.resolve_once()
    arguments = value, 32, 64, resolved_view(server_args).tokenizer_path
    check_vocabulary(*arguments)
    save_tokenizer(value, {"a": 0, "c": 1})
    with pytest.raises(ValueError, match=r"must share .*: 2 tokens differ, 'b' among them \(ids 1 and None\)"):
        check_vocabulary(*arguments)


def test_prompt_that_leaves_no_span_open(folder, engine):
    """As from a chat template with thinking disabled: no token is guided or forced, and the answer may end."""
    (prompt,), span = prompts_of(9, seed=16), GENTLE | {"end_token_ids": [7], "hard_limit": 4}
    prompts, stops = [[*prompt, 7, 12], [*prompt, 7, 12, 13, 14, 15]], list(range(200, 248))
    options = dict(ignore_eos=False, stop_token_ids=stops, max_new_tokens=40, min_p=0.0)
    for seed in range(20):
        (closed, opened), steps = engine.generate(prompts, [span, span], sampling_seed=seed, **options)
        rows = [row for step in steps for row in step["rows"] if row["rid"] == closed["meta_info"]["id"]]
        assert {row["status"] for row in rows} == {Status.UNGUIDED}
        assert opened["output_ids"].index(7) <= 4
        if 7 not in closed["output_ids"] and closed["output_ids"][-1] in stops:
            break
    else:
        raise AssertionError("the span was taken to be open")


SPAN = parse_guidance(GENTLE | {"end_token_ids": [7, 9], "hard_limit": 50})


@pytest.mark.parametrize(
    ("params", "output", "prefilled", "protected", "expected"),
    [
        (parse_guidance(GENTLE), range(40, 70), 20, 16, 45),  # 30 output tokens, 15 of which may be pending
        (parse_guidance(GENTLE), range(40, 50), 30, 16, 30),  # the whole prompt is computed at once
        (parse_guidance(GENTLE), range(40, 70), 50, 48, 50),  # after a retraction
        (parse_guidance(GENTLE), range(40, 70), 0, 48, 48),  # after a retraction, with a cached prefix
        (parse_guidance(GENTLE), range(40, 60), 20, 16, 35),  # the running step has tokens that the host lacks
        (SPAN, [*range(40, 60), 9, 50, 7, *range(60, 70)], 20, 16, 35),  # 20 tokens before the first end of the span
        (SPAN, range(40, 70), 20, 16, 45),
        (replace(SPAN, start_token_ids=(8,)), [8, *range(40, 60), 9, 50, 7, *range(60, 66)], 20, 16, 45),  # can reopen
        (parse_guidance({}), range(40, 70), 20, 16, 60),  # no guided step, and a separate part of the cache
        (None, range(40, 70), 20, 16, 60),
    ],
)
def test_tokens_that_may_enter_the_radix_cache(guide, params, output, prefilled, protected, expected):
    req = SimpleNamespace(
        lenvm_guidance=params,
        lenvm_prefilled=prefilled,
        origin_input_ids=[3] * 30,
        output_ids=list(output),
        kv=SimpleNamespace(cache_protected_len=protected),
    )
    guide.step = SimpleNamespace(values=SimpleNamespace(needs_tokens=True))
    given = []
    checkpoint = lambda tree, req, *, up_to: given.append(up_to)  # noqa: E731
    guide.has_slots = True
    sglang_adapter.checkpoint(checkpoint, None, req, up_to=60)
    assert given == [expected]


def test_failing_step_ends_guidance_but_not_the_engine(guide, caplog):
    def request(row):
        return SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=row), lenvm_guidance=parse_guidance(GENTLE), skip_radix_cache_insert=False
        )

    cleared = []
    guide.step = SimpleNamespace(remove_request=cleared.append)  # no other method, so every step fails
    info, drawn = SimpleNamespace(top_ks=None, top_ps=None, min_ps=None), torch.tensor([7, 8])
    for failures in (1, 2):
        batch = SimpleNamespace(lenvm_reqs=[request(3), request(5)], forward_mode=ForwardMode.DECODE)
        reqs = batch.lenvm_reqs
        with guide.sampling(batch):
            for _ in range(2):  # at the second draw no request is guided any more
                assert guide.draw(torch.ones(2, VOCAB), info, drawn) is drawn
            assert guide.report(torch.ones(2, VOCAB), info, drawn) is None
        assert guide.fallbacks == failures
        assert all(req.lenvm_guidance is None and req.skip_radix_cache_insert for req in reqs)
    assert cleared == [3, 5, 3, 5]
    assert caplog.text.count("a step failed") == 1


NEAR = {"target_length": 9}


@pytest.mark.parametrize(
    ("guidance", "value_model", "is_captured", "engine_draws"),
    [
        ([NEAR, NEAR, NEAR], False, False, False),
        ([NEAR, None, NEAR], False, False, True),
        ([NEAR, NEAR, {}], False, False, True),
        ([NEAR, {"thinking_budget": 5, "end_token_ids": [3]}, NEAR], False, False, True),
        ([NEAR, NEAR, NEAR | {"value_entropy_threshold": 100.0}], False, False, True),
        ([NEAR, NEAR, NEAR], False, True, True),
        ([NEAR, NEAR, NEAR], True, False, True),
    ],
)
def test_engine_draws_rows_that_guidance_may_not(guide, monkeypatch, guidance, value_model, is_captured, engine_draws):
    """If guidance draws all rows, the engine's sampler is skipped. Guided requests get the same tokens either way."""
    rows, lengths = torch.tensor([4, 1, 3]), torch.tensor([9, 12, 30])
    scores = torch.rand(3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(1)
    if not value_model:
        guide.value_model = None
    slots = EngineSlots(torch.arange(320, dtype=torch.int32).view(5, 64), 320)
    guide.step = GuidedStep(value_source(guide.value_model), slots, StepConfig(vocab_size=VOCAB))
    for row, length, asked in zip(rows.tolist(), lengths.tolist(), guidance, strict=True):
        if asked is not None:
            guide.step.add_request(row, parse_guidance(asked), {EOS}, prompt_len=length - 2, seed=row)
    info = SimpleNamespace(
        top_ks=torch.full([3], 6, dtype=torch.int32),
        top_ps=torch.ones(3),
        min_ps=torch.zeros(3),
        sampling_mask_batch_indices=torch.tensor([1]) if is_captured else None,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, input_ids=torch.tensor([7, 8, 9]), req_pool_indices=rows, seq_lens=lengths
    )
    batch.lenvm_reqs = [SimpleNamespace(lenvm_guidance=parse_guidance(x)) for x in guidance if x is not None]
    calls, drawn = [], torch.tensor([500, 501, 502], dtype=torch.int32)

    def original(sampler, probs, info):
        calls.append(probs)
        return drawn, "capture"

    with guide.sampling(batch):
        tokens, capture = sglang_adapter.sample_from_probs(original, None, scores.clone(), info)
    assert bool(calls) == engine_draws and capture == ("capture" if engine_draws else None)
    with guide.sampling(batch):
        assert torch.equal(tokens, guide.draw(scores, info, drawn))
    for token, likely, of_engine, asked in zip(tokens, scores.topk(6).indices, drawn, guidance, strict=True):
        # The value model has computed no tokens of the requests.
        is_guided = asked and not value_model and "value_entropy_threshold" not in asked
        assert token in (*likely, EOS) if is_guided else token == of_engine  # the end is also a candidate


@pytest.mark.parametrize(
    ("sampling", "custom_params", "message"),
    [
        ({"sampling_seed": 2**70}, {}, "sampling_seed must be an int64, got 1180591620717411303424"),
        ({"stop_token_ids": range(49)}, {}, "stop_token_ids must be at most 48 together with guidance, got 49"),
        (
            {},
            {"token_temperature_scale": {i: 2.0 for i in range(33)}},
            "token_temperature_scale must be of at most 32 tokens, got 33",
        ),
    ],
)
def test_requests_beyond_table_limits_are_rejected(tmp_path, sampling, custom_params, message):
    params = dict(top_k=5, sampling_seed=None, stop_token_ids=None, custom_params=GENTLE | custom_params)
    settings = sglang_adapter.Settings(tmp_path)
    assert sglang_adapter.requested_guidance(SimpleNamespace(**params | {"custom_params": GENTLE}), settings)
    with pytest.raises(ValueError, match=message):
        sglang_adapter.requested_guidance(SimpleNamespace(**params | sampling), settings)


def test_end_tokens_match_those_of_the_engine():
    def end_tokens(ignore_eos=False, tokenizer=None):
        params = SimpleNamespace(ignore_eos=ignore_eos, stop_token_ids=[5])
        return sglang_guide.end_tokens(
            SimpleNamespace(sampling_params=params, eos_token_ids={1, 2}, tokenizer=tokenizer)
        )

    assert end_tokens() == {1, 2, 5} and end_tokens(ignore_eos=True) == set()
    assert end_tokens(tokenizer=SimpleNamespace(eos_token_id=3, additional_stop_token_ids={4})) == {1, 2, 3, 4, 5}
