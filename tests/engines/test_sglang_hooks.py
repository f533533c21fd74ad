"""The hooks of the SGLang plugin without a server. Skipped without SGLang."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import msgspec
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang import hooks
from lenvm_kernels.engines.sglang import options as sglang_options
from lenvm_kernels.engines.sglang.guide import MAX_DELTA, SGLangGuide
from lenvm_kernels.engines.sglang.hooks import SGLangPlugin
from lenvm_kernels.engines.sglang.requests import end_tokens, guidance_of
from lenvm_kernels.engines.sglang.value_model import ValueModelGuide
from lenvm_kernels.engines.tokenizers import check_vocabulary
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, StepConfig, value_source, working_bytes
from lenvm_kernels.values import KVCache, ValueModel
from tests.helpers.sglang_server import EOS, GENTLE, VOCAB


@pytest.fixture
def guide(folder):
    """The guidance of a process that has loaded the value model."""
    value_model = ValueModel.from_pretrained(folder / "value")
    return ValueModelGuide(Settings(folder / "value", chunk_tokens=64), torch.device("cpu"), value_model)


@pytest.mark.parametrize("cap", [None, 2000])
def test_pool_leaves_memory_for_the_step(guide, cap):
    """The pool uses the memory that the step does not need, up to a few slots; a requested smaller pool is kept."""
    cell, budget = 1000, 40_000_000
    configurator = SimpleNamespace(
        page_size=1,
        is_draft_worker=False,
        model_config=SimpleNamespace(context_len=512, vocab_size=VOCAB),
        resolve_max_num_reqs=lambda tokens: min(tokens // 512 + 1, 64),
    )

    def original(configurator, pool_bytes, *, cap_tokens):
        tokens = pool_bytes // cell
        return SimpleNamespace(max_total_num_tokens=tokens if cap is None else min(tokens, cap))

    tokens = guide.leave_room(original, configurator, budget).max_total_num_tokens
    sizes = dict(requests=configurator.resolve_max_num_reqs(tokens), max_len=512, vocab_size=VOCAB)
    working = working_bytes(guide.value_model, **sizes, max_candidates=8, max_delta=MAX_DELTA)
    working += working_bytes(guide.value_model, **sizes, tokens=64)
    used = tokens * cell + KVCache.num_bytes(guide.value_model, tokens + 1) + working
    assert used <= budget
    assert tokens == cap if cap else used > 0.9 * budget
    with pytest.raises(ValueError, match="LENVM_VALUE_MODEL leaves no memory for the engine's pool"):
        guide.leave_room(original, configurator, 100_000)
    guide.settings = replace(guide.settings, memory_share=0.01)
    with pytest.raises(ValueError, match=r"LENVM_MEMORY_SHARE is 0.01, but the guided step takes 0\.\d+ of"):
        guide.leave_room(original, configurator, budget)
    guide.has_slots = True  # sized again after the capture of graphs, beside the value model's cache
    assert guide.leave_room(original, configurator, budget, cap_tokens=cap).max_total_num_tokens == (cap or budget // cell)


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
def test_slot_table_is_kept_until_its_last_read(guide, monkeypatch, mode, is_delayed, is_guided):
    """With the engine's own barrier, in the order of its overlapping scheduler; grammars delay sampling."""
    forward_stream, plugin = Work(), SGLangPlugin(guide)
    monkeypatch.setattr(guide, "extend", lambda batch: forward_stream.append("the value model reads a prompt's slots"))
    monkeypatch.setattr(guide, "report", lambda *_: forward_stream.append("the value model reads a step's slots"))
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
        plugin.sample(lambda *arguments: torch.tensor([3]), runner, logits_output, batch)
        return result

    result = SimpleNamespace(delay_sample_func=draw if is_delayed else None, future_indices=None, logits_output=None)
    forward_stream.append("the base model reads the table")
    runner.shared_read_done_event = len(forward_stream)
    guide.extend_prompts(None, runner, batch)
    if not is_delayed:
        draw()
    scheduler._apply_war_barrier()
    if is_delayed:
        assert scheduler.schedule_stream.waits_for == len(forward_stream)  # results are processed in the meantime
    guide.sample_delayed(Scheduler.launch_batch_sample_if_needed, scheduler, result, scheduled)
    assert len(forward_stream) == 1 + is_guided * (1 + mode.is_extend())
    assert scheduler.schedule_stream.waits_for == len(forward_stream)


def test_idle_engine_draws_nothing(guide):
    scheduler = SimpleNamespace()  # any attempt to set up a barrier fails
    guide.sample_delayed(Scheduler.launch_batch_sample_if_needed, scheduler, None, None)


UNSUPPORTED = [
    *(
        ({option: 2}, f"{option} must be .* together with LENVM_VALUE_MODEL, got 2")
        for option in (
            "dllm_algorithm",
            "pp_size",
            "attn_cp_size",
            "dcp_size",
            "enable_pdmux",
            "disaggregation_mode",
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "radix_cache_backend",
            "enable_unified_memory",
            "enable_hisparse",
            "enable_kv_cache_sharding",
        )
    ),
    ({"speculative_algorithm": "DFLASH"}, "must be one of None, EAGLE, EAGLE3, STANDALONE, NGRAM .* got DFLASH: not"),
    ({"speculative_algorithm": "DSPARK"}, "speculative_algorithm must be one of .* got DSPARK: not tried"),
    ({"speculative_algorithm": "EAGLE", "speculative_adaptive": True}, "speculative_adaptive must be False"),
    ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, "enable_multi_layer_eagle must be False"),
    ({"speculative_algorithm": "NGRAM", "enable_mixed_chunk": True}, "enable_mixed_chunk must be False .* speculative"),
    ({"startup_weight_load_mode": "overlap"}, "startup_weight_load_mode must be serial .*, got overlap"),
]


@pytest.mark.parametrize(("given", "message"), UNSUPPORTED)
def test_unsupported_options_are_rejected_at_start(monkeypatch, tmp_path, given, message):
    settings = Settings(tmp_path)
    monkeypatch.setattr(Settings, "current", lambda tokenizer: settings)
    monkeypatch.setattr(sglang_plugin.HookRegistry, "_patched", set(sglang_plugin.HOOKS))
    options = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert given.keys() <= options.keys()
    runner = SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(**options | given))
    with pytest.raises(ValueError, match=message):
        SGLangPlugin().load_value_model(None, runner)


@pytest.mark.parametrize(
    ("has_windows", "has_states", "kind"),
    [(True, False, "sliding windows"), (False, True, "layers with a state"), (False, False, None)],
)
def test_base_models_with_other_pools_are_rejected(monkeypatch, has_windows, has_states, kind):
    """A value model is rejected with such a base model, because it needs the engine's slots."""
    monkeypatch.setattr(sglang_options, "mambaish_config", lambda config: {"layers": 3} if has_states else None)
    runner = SimpleNamespace(is_hybrid_swa=has_windows, model_config=None)
    message = f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {kind}"
    with pytest.raises(ValueError, match=message) if kind else nullcontext():
        sglang_options.check_pool(runner)


def save_tokenizer(folder, vocabulary):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(folder)


def test_vocabularies_may_differ_in_padding_only(folder, tmp_path):
    """Without a tokenizer path, the engine uses the model's tokenizer."""
    base, value = tmp_path / "base", tmp_path / "value"
    for path in (base, value):
        shutil.copytree(folder / path.name, path)
        save_tokenizer(path, {"a": 0, "b": 1})
    server_args = ServerArgs(model_path=str(base), device="cpu")
    server_args.resolve_once()
    arguments = value, 32, 64, resolved_view(server_args).tokenizer_path
    check_vocabulary(*arguments)
    save_tokenizer(value, {"a": 0, "c": 1})
    with pytest.raises(ValueError, match=r"must share .*: 2 tokens differ, 'b' among them \(ids 1 and None\)"):
        check_vocabulary(*arguments)


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
    kv = SimpleNamespace(cache_protected_len=protected)
    req = SimpleNamespace(lenvm_guidance=params, lenvm_prefilled=prefilled, kv=kv)
    req.origin_input_ids, req.output_ids = [3] * 30, list(output)
    guide.has_slots, given = True, []
    guide.checkpoint(lambda tree, req, *, up_to: given.append(up_to), None, req, up_to=60)
    assert given == [expected]


@pytest.mark.parametrize("changes_logits", [False, True])
def test_failing_step_ends_guidance_but_not_the_engine(guide, caplog, changes_logits):
    cleared = []
    guide.step = SimpleNamespace(remove_request=cleared.append)  # no other method, so every step fails
    info = SimpleNamespace(top_ks=None, top_ps=None, min_ps=None, is_all_greedy=False)
    drawn = torch.tensor([7, 8])
    for failures in (1, 2):
        reqs = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)) for row in (3, 5)]
        for req in reqs:
            req.lenvm_guidance, req.skip_radix_cache_insert = parse_guidance(GENTLE), False
        batch = SimpleNamespace(lenvm_reqs=reqs, forward_mode=ForwardMode.DECODE)
        with guide.sampling(batch):
            if changes_logits:
                guide.change_logits(torch.ones(2, VOCAB))
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
def test_engine_draws_rows_that_guidance_may_not(guide, guidance, value_model, is_captured, engine_draws):
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
        tokens, capture = SGLangPlugin(guide).sample_from_probs(original, None, scores.clone(), info)
    assert bool(calls) == engine_draws and capture == ("capture" if engine_draws else None)
    with guide.sampling(batch):
        assert torch.equal(tokens, guide.draw(scores, info, drawn))
    for token, likely, of_engine, asked in zip(tokens, scores.topk(6).indices, drawn, guidance, strict=True):
        # The value model has computed no tokens of the requests.
        is_guided = asked and not value_model and "value_entropy_threshold" not in asked
        assert token in (*likely, EOS) if is_guided else token == of_engine  # the end is also a candidate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"stop_token_ids": range(48)}, None),
        ({"sampling_seed": 2**70}, "sampling_seed must be an int64, got 1180591620717411303424"),
        ({"stop_token_ids": range(49)}, "stop_token_ids must be of at most 48 tokens together with .*, got 49"),
        (
            {"custom_params": GENTLE | {"token_temperature_scale": {i: 2.0 for i in range(33)}}},
            "token_temperature_scale must be of at most 32 tokens together with .*, got 33",
        ),
        ({"beam_width": 2}, "beam_width cannot be combined with guidance in custom_params"),
        ({"input_embeds": [0.5]}, "input_embeds cannot be combined with"),
        ({"positional_embed_overrides": [0.5]}, "positional_embed_overrides cannot be combined with"),
        ({"mm_inputs": [0.5]}, "images, videos and audio cannot be combined with"),
        ({"mm_inputs": [0.5], "custom_params": None}, None),
        ({"session": SimpleNamespace(streaming=True)}, "a streaming session cannot be combined with"),
        ({"session": SimpleNamespace(streaming=False)}, None),
    ],
)
def test_requests_that_cannot_be_guided_are_rejected(folder, changes, message):
    sampling = dict(top_k=5, sampling_seed=None, stop_token_ids=None, beam_width=None, custom_params=GENTLE)
    request = dict(positional_embed_overrides=None) | {x: y for x, y in changes.items() if x not in sampling}
    sampling |= {name: value for name, value in changes.items() if name in sampling}
    request = SimpleNamespace(sampling_params=SimpleNamespace(**sampling), **request)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        assert (guidance_of(request, Settings(folder / "value")) is None) == (sampling["custom_params"] is None)


@pytest.mark.parametrize(
    ("ignore_eos", "tokenizer", "expected"),
    [
        (False, None, {1, 2, 5}),
        (True, None, set()),
        (False, SimpleNamespace(eos_token_id=3, additional_stop_token_ids={4}), {1, 2, 3, 4, 5}),
    ],
)
def test_end_tokens_match_those_of_the_engine(ignore_eos, tokenizer, expected):
    params = SimpleNamespace(ignore_eos=ignore_eos, stop_token_ids=[5])
    assert end_tokens(SimpleNamespace(sampling_params=params, eos_token_ids={1, 2}, tokenizer=tokenizer)) == expected
