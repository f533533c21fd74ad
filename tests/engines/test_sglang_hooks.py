"""Hooks of the SGLang plugin without a server. Skipped without SGLang."""

import itertools
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import msgspec
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from lenvm_kernels.engines.report import StepReport
from lenvm_kernels.engines.settings import MAX_DELTA, Settings
from lenvm_kernels.engines.sglang import hooks, value_model
from lenvm_kernels.engines.sglang.guide import SGLangGuide, end_tokens
from lenvm_kernels.engines.sglang.hooks import SGLangPlugin, guidance_of
from lenvm_kernels.engines.sglang.plugin import plugin
from lenvm_kernels.engines.signatures import recorded
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import working_bytes
from lenvm_kernels.values import KVCache
from tests.helpers.sglang_server import GENTLE, VOCAB


@pytest.fixture
def guide(folder, monkeypatch):
    """The guidance of a process that has loaded the value model."""
    monkeypatch.setattr(value_model, "mambaish_config", lambda config: None)
    engine = SimpleNamespace(is_multimodal=False, vocab_size=VOCAB)
    runner = SimpleNamespace(is_hybrid_swa=False, model_config=engine, dtype=torch.float32)
    options = {name: accepted[0] for name, (accepted, _) in value_model.VALUE_MODEL_OPTIONS.items()}
    options, settings = SimpleNamespace(**options, tokenizer_path=""), Settings(folder / "value", chunk_tokens=64)
    return value_model.ValueModelGuide(settings, torch.device("cpu"), 0, runner, options)


@pytest.mark.parametrize("cap", [None, 2000])
def test_pool_leaves_memory_for_the_step(guide, cap):
    """The pool uses the remaining memory up to a few slots, or has the requested smaller size."""
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
    guide.step = None  # sized again after graph capture, when the value model's cache exists
    again = guide.leave_room(original, configurator, budget, cap_tokens=cap)
    assert again.max_total_num_tokens == (cap or budget // cell)


class Work(list):
    """A stream that only records submitted work, and the amount of another stream's work that it waits for."""

    waits_for = None

    def wait_event(self, event):
        self.waits_for = event

    def wait_stream(self, stream):
        self.waits_for = len(stream)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("is_guided", [True, False])
def test_slot_table_is_not_overwritten_before_its_last_read(guide, monkeypatch, mode, is_delayed, is_guided):
    """The engine's barrier in the order of its overlapping scheduler; grammars delay sampling."""
    forward_stream = Work()
    monkeypatch.setattr(guide, "extend", lambda batch: forward_stream.append("the value model reads a prompt's slots"))
    monkeypatch.setattr(guide, "report", lambda *_: forward_stream.append("the value model reads a step's slots"))
    reqs = [SimpleNamespace(lenvm_guidance=parse_guidance(GENTLE) if is_guided else None)]
    batch = SimpleNamespace(forward_mode=mode, lenvm_reqs=reqs if is_guided else [], sampling_info=None)
    logits_output = SimpleNamespace(next_token_logits=None, auxiliary_device_output=None)
    runner = guide.runner = SimpleNamespace(shared_read_done_event=None)
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
        guide.sample(lambda *arguments: torch.tensor([3]), runner, logits_output, batch)
        return result

    result = SimpleNamespace(delay_sample_func=draw if is_delayed else None, future_indices=None, logits_output=None)
    forward_stream.append("the base model reads the table")
    runner.shared_read_done_event = len(forward_stream)
    guide.extend_prompts(None, runner, batch)
    if not is_delayed:
        draw()
    scheduler._apply_war_barrier()
    if is_delayed:
        assert scheduler.schedule_stream.waits_for == len(forward_stream)  # before results are processed
    guide.sample_delayed(Scheduler.launch_batch_sample_if_needed, scheduler, result, SimpleNamespace(reqs=reqs))
    assert len(forward_stream) == 1 + is_guided * (1 + mode.is_extend())
    assert scheduler.schedule_stream.waits_for == len(forward_stream)
    # An idle engine sets up no barrier, which would fail here.
    guide.sample_delayed(Scheduler.launch_batch_sample_if_needed, SimpleNamespace(), None, None)


NOT_2 = "dllm_algorithm attn_cp_size enable_pdmux"
NOT_2_WITH_VALUE_MODEL = (
    "pp_size dcp_size disaggregation_mode enable_hierarchical_cache enable_lmcache enable_flexkv "
    "enable_unified_cache_external_linker radix_cache_backend enable_unified_memory enable_hisparse "
    "enable_kv_cache_sharding"
)
UNSUPPORTED = [
    *(({name: 2}, f"{name} must be .* together with guidance, .* turns off, got 2") for name in NOT_2.split()),
    *(({name: 2}, f"{name} must be .* together with a value model, got 2") for name in NOT_2_WITH_VALUE_MODEL.split()),
    ({"speculative_algorithm": "DFLASH"}, "must be one of None, EAGLE, EAGLE3, STANDALONE, NGRAM .* got DFLASH: not"),
    ({"speculative_algorithm": "EAGLE", "speculative_adaptive": True}, "speculative_adaptive must be False"),
    ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, "enable_multi_layer_eagle must be False"),
    ({"speculative_algorithm": "NGRAM", "enable_mixed_chunk": True}, "enable_mixed_chunk must be False .* speculative"),
    ({"startup_weight_load_mode": "overlap"}, "startup_weight_load_mode must be serial .*, got overlap"),
    ({"sampling_backend": "other"}, "sampling_backend must be built into the engine .* got other: OtherSampler does"),
]


@pytest.mark.parametrize(("given", "message"), UNSUPPORTED)
def test_unsupported_options_are_rejected_at_start(monkeypatch, tmp_path, given, message):
    settings = Settings(tmp_path)
    monkeypatch.setattr(Settings, "current", lambda tokenizer: settings)
    monkeypatch.setattr(hooks.HookRegistry, "_patched", set(hooks.HOOKS))
    monkeypatch.setenv("LENVM_VALUE_MODEL", "some/model")
    options = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert given.keys() <= options.keys()
    runner = SimpleNamespace(is_draft_worker=False, device="cpu", server_args=SimpleNamespace(**options | given))
    other = type("OtherSampler", (), {"forward": lambda self: None})  # from another plugin
    runner.sampler = other() if given.get("sampling_backend") == "other" else object.__new__(Sampler)
    with pytest.raises(ValueError, match=message):
        SGLangPlugin().load(None, runner)


SOFT = {"soft_max_tokens": True}
DEFAULTS = SOFT | {"reasoning_effort": {"low": {"target_length": 30}}}  # require hooks for chats
HOOKS_MODULE, MANAGERS = "lenvm_kernels.engines.sglang.hooks", "sglang.srt.managers"


@pytest.mark.parametrize(
    ("environment", "failing", "message"),
    [
        ({}, None, None),
        ({"LENVM_VALUE_MODEL": "/nowhere"}, None, "cannot be used: LENVM_VALUE_MODEL must be an existing directory"),
        ({"LENVM_VALUE_MODEL": "none"}, "import", f"plugin of SGLang cannot be used: import of {HOOKS_MODULE} halted"),
        ({"LENVM_TRACE": " "}, "signatures", None),
        ({"LENVM_VALUE_MODEL": "off"}, None, None),
        ({"LENVM_DEFAULTS": json.dumps(SOFT)}, None, None),
        ({"LENVM_DEFAULTS": json.dumps(DEFAULTS)}, None, None),
        ({}, "import", None),
        ({"LENVM_VALUE_MODEL": "/nowhere"}, "detokenizer", None),
    ],
)
def test_failures_of_the_entry_point(monkeypatch, caplog, clean_settings, environment, failing, message):
    """The engine's loader ignores exceptions, so they end the process if any variable is set."""
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    registered = []
    monkeypatch.setattr(hooks.HookRegistry, "register", lambda target, hook, kind: registered.append(target))
    if failing == "import":
        monkeypatch.setitem(sys.modules, HOOKS_MODULE, None)
    if failing == "signatures":
        monkeypatch.setattr(hooks.signatures, "differences", lambda engine: {"sampler:Sampler.forward": "is not there"})
    if failing == "detokenizer":
        monkeypatch.setitem(sys.modules, f"{MANAGERS}.detokenizer_manager", None)
        monkeypatch.delitem(sys.modules, f"{MANAGERS}.scheduler")
    with nullcontext() if message is None else pytest.raises(SystemExit, match=message):
        plugin()
    methods = {"check_request", "check_requests", "note_guidance"}  # if the plugin is off, only hooks that reject
    methods |= set() if "off" in environment.values() else {"add_meta_info", "load"}
    methods |= {"pass_selected"} if environment.get("LENVM_DEFAULTS") == json.dumps(DEFAULTS) else set()
    accepted = [target for target, (_, method) in (hooks.HOOKS | hooks.CHAT_HOOKS).items() if method in methods]
    assert registered == ([] if failing or message else accepted)
    assert ("guidance is off, because" in caplog.text) == (message is None and failing in ("import", "signatures"))


def test_server_without_settings_starts_without_guidance(monkeypatch, clean_settings):
    """Without any variable, requests with guidance are rejected, and other requests are served."""
    process = SGLangPlugin()
    process.load(None, SimpleNamespace(is_draft_worker=False))  # no hook was applied
    assert process.guide is None and process.off.startswith("LenVM does not fit this SGLang: it could not hook")
    errors = []
    others = None, {"thinking_budget": 5}, {"other": [1]}, {"max_length": 9}, {"mode": "x"}
    for custom_params in (*others, GENTLE, {"lenvm": {"target_length": 9}}):
        sampling = SimpleNamespace(custom_params=custom_params)
        req = SimpleNamespace(sampling_params=sampling, set_finish_with_abort=errors.append, input_embeds=None)
        process.note_guidance(None, req)
        assert req.lenvm_guidance is None
    assert errors == [f"guidance in custom_params must be absent: {process.off}"] * 2
    monkeypatch.setenv("LENVM_VALUE_MODEL", "none")
    with pytest.raises(RuntimeError, match="could not hook"):
        process.load(None, SimpleNamespace(is_draft_worker=False))


def test_bad_requests_end_neither_scheduler_nor_batch(monkeypatch):
    """The front end checks each request of a batch. Further HTTP workers check none, so the scheduler does."""
    manager, errors = SimpleNamespace(server_args=ServerArgs(model_path="x", device="cpu")), []
    bad = (
        {"lenvm_selected": "low"},
        {"lenvm_selected": {"lenvm": "x"}},
        {"lenvm": "[" * 100_000},
        NEAR | {"landing": "\ud83d"},
    )
    for custom_params in (*bad, NEAR):
        process, requests = SGLangPlugin(), []
        process.guide = SGLangGuide(Settings(), torch.device("cpu"))
        if custom_params is NEAR:
            monkeypatch.setattr(Settings, "parse_request", lambda *args, **kwargs: [][0])
        for given in (None, custom_params):
            sampling = SamplingParams(custom_params=given, max_new_tokens=9)
            fields = dict(set_finish_with_abort=errors.append, input_embeds=None, positional_embed_overrides=None)
            requests.append(SimpleNamespace(sampling_params=sampling, **fields))
        with pytest.raises((ValueError, IndexError)):
            process.check_requests(manager, requests)
        process.note_guidance(None, requests[1])
        assert requests[1].lenvm_guidance is None
    names = "lenvm_selected must", "lenvm_selected must", "lenvm must be an object", "landing must", "list index out of"
    assert [error.startswith(name) for error, name in zip(errors, names, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("has_windows", "has_states", "kind"),
    [(True, False, "sliding windows"), (False, True, "recurrent layers"), (False, False, None)],
)
def test_base_models_with_other_pools_are_rejected(monkeypatch, has_windows, has_states, kind):
    """A value model is rejected, because it uses the slots of the engine's pool."""
    monkeypatch.setattr(value_model, "mambaish_config", lambda config: {"layers": 3} if has_states else None)
    runner = SimpleNamespace(is_hybrid_swa=has_windows, model_config=None)
    message = f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {kind}"
    with pytest.raises(ValueError, match=message) if kind else nullcontext():
        value_model.check_pool(runner)


SPAN = parse_guidance(GENTLE | {"end_token_ids": [7, 9], "hard_limit": 50})


@pytest.mark.parametrize(
    ("params", "output", "prefilled", "protected", "expected"),
    [
        (parse_guidance(GENTLE), range(40, 70), 20, 16, 45),  # 30 output tokens, 15 of which may be pending
        (parse_guidance(GENTLE), range(40, 50), 30, 16, 30),  # the whole prompt is computed at once
        (parse_guidance(GENTLE), range(40, 70), 50, 48, 50),  # after a retraction
        (parse_guidance(GENTLE), range(40, 70), 0, 48, 48),  # after a retraction, with a cached prefix
        (parse_guidance(GENTLE), range(40, 60), 20, 16, 35),  # tokens of the running step are not on the host
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
    given = []
    for guide.drafts in (0, 60):  # with 60 drafts, all tokens may be pending
        guide.checkpoint(lambda tree, req, *, up_to: given.append(up_to), None, req, up_to=60)
    is_read = params is not None and params.needs_step
    assert given == [expected, max(prefilled, protected) if is_read else expected]


NEAR = {"target_length": 9}


def request_in(row, asked, **fields):
    """A request in a row of the engine's table."""
    sampling = SimpleNamespace(sampling_seed=1, ignore_eos=True, stop_token_ids=None, stop_strs=[])
    req = dict(kv=SimpleNamespace(req_pool_idx=row), sampling_params=sampling, lora_id=None, tokenizer=None)
    req |= dict(origin_input_ids=[5], output_ids=[], lenvm_row=None, lenvm_broken=0)
    req |= dict(lenvm_guidance=asked and parse_guidance(asked))
    return SimpleNamespace(**req | fields)


def test_responses_have_the_reason_for_lost_guidance():
    guide, kept = SGLangGuide(Settings(), torch.device("cpu")), dict(lenvm_lost=None, finished=lambda: True)
    guide.step, kept["output_ids_through_stop"] = MagicMock(text_breaks=()), [7, 8]
    reqs = [request_in(row, NEAR, lenvm_broken=n, **kept) for row, n in enumerate((0, 2, 0))]
    reqs += [request_in(3, None, **kept), request_in(4, NEAR, finished=lambda: False)]
    guide.lose(reqs[2:4])
    guide.add_outcomes(outputs := SimpleNamespace(output_reqs=reqs, customized_info={}))
    lost = [[outcome["lost"] for outcome in outcomes] for outcomes in outputs.customized_info["lenvm"]]
    assert lost == [[None], ["scores or values were not finite, number of steps: 2"], ["a guided step failed"], [], []]


def test_steps_without_guidance_are_counted_across_admissions():
    """Rows without a committed token are not counted. The device counts from 0 after a retraction."""
    reqs, commit = [request_in(row, NEAR, lenvm_broken_before=0) for row in (0, 1)], MagicMock()

    def counted(*faults, commits=(commit, commit)):
        report = StepReport(None, None, torch.tensor(faults), None, None, None, lambda: 0.0)
        report.consume(SimpleNamespace(reqs=reqs), commits)
        return [req.lenvm_broken for req in reqs]

    assert counted(0, 1, commits=(commit, None)) == [0, 0]
    assert counted(2, 1) == counted(2, 1) == [2, 1]
    guide = SGLangGuide(Settings(), torch.device("cpu"))
    guide.step = MagicMock(text_breaks=())
    guide.admit(SimpleNamespace(lenvm_reqs=reqs, lenvm_failed=False), reqs, is_prefill=True)
    assert counted(0, 0) == [2, 1] and counted(1, 0) == [3, 1]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_requests_are_admitted_once(is_prefill):
    """In each prefill batch, or in the first decode batch if another server has computed the prompt. An ended request,
    still in the batch of the overlapping scheduler, is skipped."""
    guide, given, rows = SGLangGuide(Settings(), torch.device("cpu")), [], (4, 1, 3)
    guide.step = SimpleNamespace(
        add_request=lambda row, *args, **kwargs: given.append((row, True)),
        remove_request=lambda row: given.append((row, False)),
        text_breaks=(),
    )
    reqs = [request_in(row, asked) for row, asked in zip(rows, (NEAR, None, NEAR), strict=True)]
    batch, ended = SimpleNamespace(lenvm_reqs=[reqs[0], reqs[2]], lenvm_failed=False), request_in(None, NEAR)
    for _ in range(2):
        guide.admit(batch, [ended, *reqs], is_prefill=is_prefill)
    assert batch.lenvm_reqs == [reqs[0], reqs[2]] and guide.fallbacks == 0
    assert given == [(4, True), (3, True)] * (1 + is_prefill)
    given.clear()
    reqs[0].lenvm_guidance, reqs[0].lenvm_row = None, None  # an unguided request replaces a guided request
    guide.admit(batch, reqs[:1], is_prefill=is_prefill)
    assert given == [(4, False)]


def test_lora_requests_are_counted(guide):
    """Only with a value model, which ignores the adapter."""
    for values, lora_id in ((guide, "adapter"), (guide, None), (SGLangGuide(Settings(), guide.device), "adapter")):
        counted = itertools.count()
        values.metrics = SimpleNamespace(lora_requests=SimpleNamespace(inc=counted.__next__))
        values.step = MagicMock()
        req = request_in(3, NEAR, lora_id=lora_id, lenvm_images=None, extend_end=1)
        values.admit(SimpleNamespace(lenvm_reqs=[req], lenvm_failed=False), [req], is_prefill=True)
        assert values.fallbacks == 0 and next(counted) == (values is guide and lora_id is not None)


def test_samples_are_sent_with_separate_parameters():
    """Samples of a prompt have different seeds, and nested parameters are accepted by the engine's msgpack."""
    custom_params = NEAR | {"end_token_ids": [[7, 3], 9], "token_temperature_scale": {"5": 2.0}, "other": [1, 2]}
    shared = SamplingParams(custom_params=custom_params, sampling_seed=5)
    manager = SimpleNamespace(server_args=ServerArgs(model_path="x", device="cpu"))
    plugin, sent = SGLangPlugin(), []
    with envs.SGLANG_USE_PICKLE_IPC.override(False):
        for _ in range(3):
            request = SimpleNamespace(sampling_params=shared)
            plugin.check_request(manager, request)
            sent.append(request.sampling_params)
    assert len({params.sampling_seed for params in sent}) == 3 and sent[0].sampling_seed == 5
    assert shared.custom_params is custom_params and custom_params["end_token_ids"] == [[7, 3], 9]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent[2]), type=SamplingParams)
    assert received.custom_params["other"] == [1, 2]
    assert Settings().parse_request(received.custom_params) == Settings().parse_request(custom_params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"sampling_seed": 2**70}, "sampling_seed must be an int64, got 1180591620717411303424"),
        ({"stop_token_ids": range(49)}, "stop_token_ids must have at most 48 tokens together with .*, got 49"),
        (
            {
                "custom_params": GENTLE | {"thinking_budget": 9, "end_token_ids": [5], "answer_reserve": 5},
                "max_new_tokens": 0,
            },
            None,
        ),
        ({"watermark": {"key": "03"}}, "watermark cannot be combined with guidance"),
        ({"custom_params": "loud"}, "custom_params must be an object of named values, got 'loud'"),
        ({"positional_embed_overrides": [0.5]}, "positional_embed_overrides cannot be combined with"),
        ({"mm_inputs": [0.5]}, "images, videos and audio cannot be combined with"),
        ({"session": SimpleNamespace(streaming=False)}, None),
    ],
)
def test_requests_that_cannot_be_guided_are_rejected(folder, changes, message):
    names = SamplingParams.__struct_fields__
    sampling = dict(top_k=5, custom_params=GENTLE) | {name: x for name, x in changes.items() if name in names}
    request = dict(positional_embed_overrides=None) | {x: y for x, y in changes.items() if x not in names}
    request = SimpleNamespace(sampling_params=SamplingParams(**sampling), **request)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        assert guidance_of(request, Settings(folder / "value")) is not None
    if message is not None and sampling["custom_params"] is GENTLE:
        request.sampling_params.custom_params = None
        assert guidance_of(request, Settings(folder / "value")) is None
    if changes.keys() & {"positional_embed_overrides", "mm_inputs"}:
        request.sampling_params.custom_params = NEAR
        assert guidance_of(request, Settings()) is not None  # these are only rejected with a value model


@pytest.mark.parametrize(("effort", "default"), [(None, 80), ("low", 30), ("high", 80)])
@pytest.mark.parametrize("custom_params", [None, {"other": [1, 2]}, NEAR])
@pytest.mark.parametrize("uses_pickle", [False, True])
def test_defaults_of_chats_and_responses(monkeypatch, clean_settings, effort, default, custom_params, uses_pickle):
    """Defaults depend on the reasoning effort, which the front end adds to the request's parameters."""
    monkeypatch.setenv("LENVM_DEFAULTS", json.dumps(DEFAULTS))
    messages, plugin = [{"role": "user", "content": "w1"}], SGLangPlugin()
    manager = SimpleNamespace(server_args=ServerArgs(model_path="x", device="cpu"))
    chat = ChatCompletionRequest(model="base", reasoning_effort=effort, custom_params=custom_params, messages=messages)
    response = ResponsesRequest(model="base", reasoning=effort and {"effort": effort}, input="w1")
    for request, sampling, expected in (
        (chat, chat.to_sampling_params([], {}), 9 if custom_params is NEAR else default),
        (response, response.to_sampling_params(), default),
    ):
        sampling = SamplingParams(**plugin.pass_selected(sampling, request) | {"max_new_tokens": 100})
        request = SimpleNamespace(sampling_params=sampling, positional_embed_overrides=None)
        with envs.SGLANG_USE_PICKLE_IPC.override(uses_pickle):
            plugin.check_request(manager, request)
        assert guidance_of(request, Settings.current()).target_length == expected


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
    req = SimpleNamespace(sampling_params=params, eos_token_ids={1, 2}, tokenizer=tokenizer)
    assert end_tokens(req) == expected and end_tokens(req, {9}) == expected | {9}


# --- the engine's plugin loader and lenvm doctor, in separate processes, because hooks cannot be removed ---

REMOVE = "from sglang.srt.layers.sampler import Sampler; del Sampler._preprocess_logits"
TRIED = ", ".join(recorded("sglang"))


def run(code, environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LENVM_", "SGLANG_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("before", "environment", "wrong"),
    [
        ("", {}, {}),
        ("", {"LENVM_VALUE_MODEL": "off"}, {}),
        (REMOVE, {}, {"plugin": "did not run", "Sampler._preprocess_logits": "is not there"}),
        ("", {"SGLANG_PLUGINS": "other"}, {"plugin": "did not run"}),
    ],
)
def test_hooks_and_signatures(before, environment, wrong):
    code = (
        f"import contextlib, io, os, sys\nwith contextlib.redirect_stderr(io.StringIO()):\n    {before or 'pass'}\n"
        "from lenvm_kernels.cli import main\nstatus = main(['doctor', '--json'])\n"
        f"assert os.environ.get('LENVM_VALUE_MODEL') == {environment.get('LENVM_VALUE_MODEL')!r}\nsys.exit(status)"
    )
    result = run(code, environment)
    assert result.stderr == ""
    checks = json.loads(result.stdout)["sglang"]
    assert {check["name"]: check["found"] for check in checks if check["mark"] == "wrong"} == wrong
    assert result.returncode == bool(wrong)
    if not wrong:
        assert [check["name"] for check in checks] == ["signatures"] and checks[0]["found"].endswith(TRIED)


def test_unfit_plugin_ends_the_process():
    """The engine's loader ignores exceptions, but not SystemExit."""
    load = "from sglang.srt.plugins import load_plugins; load_plugins(); print('served')"
    result = run(f"{REMOVE}\n{load}", {"LENVM_TRACE": "t"})
    assert result.returncode == 1 and result.stdout == ""
    assert re.search("the plugin of SGLang cannot be used: .* Sampler._preprocess_logits is not", result.stderr)
