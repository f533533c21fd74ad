"""Rejection of vLLM servers that cannot guide requests, and of requests that cannot be guided."""

import contextvars
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.vllm import front_end
from lenvm_kernels.engines.vllm.processor import LenVMProcessor, guidance_of
from tests.helpers import models
from tests.helpers.probes import write_random_probe

REFUSALS = ValueError, VLLMValidationError  # in the processor, and after it
SECOND = "guidance needs vLLM's second model runner"
TARGET, OTHERS = {"target_length": 5}, {"session_id": "of another consumer"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A value model and a probe."""
    folder = tmp_path_factory.mktemp("sources")
    value_model = models.save_checkpoint(folder / "value", seed=1, value_head=True)
    write_random_probe(folder / "probe", models.random_model(*models.ARCHITECTURES["qwen2"]))
    return {"model": value_model, "probe": folder / "probe", "none": "none"}


@pytest.fixture(autouse=True)
def clean(monkeypatch, clean_settings):
    """Restores the methods wrapped by front ends. The input processor returns the request."""
    for owner, name in (
        (EngineArgs, "create_engine_config"),
        (ChatCompletionRequest, "to_beam_search_params"),
        (CompletionRequest, "to_beam_search_params"),
        (ChatCompletionRequest, "to_sampling_params"),
        (ResponsesRequest, "to_sampling_params"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, request: request)
    for name, value in (("reason", None), ("config", None), ("is_checked_later", False)):
        monkeypatch.setattr(LenVMProcessor, name, value)


def config(is_second=True, **changes):
    """A configuration of the engine."""
    model = dict(tokenizer="", runner_type="generate", enable_sleep_mode=False)
    parts = dict(model_config=model, parallel_config={}, speculative_config={})
    parts = {name: SimpleNamespace(**part | changes.get(name, {})) for name, part in parts.items()}
    return SimpleNamespace(use_v2_model_runner=is_second, additional_config={}, **parts)


PIPELINE, SLEEP = dict(parallel_config={"pipeline_parallel_size": 2}), dict(model_config={"enable_sleep_mode": True})
# Value source, configuration and version of vLLM, and reason against guidance.
SERVERS = [
    ("", {}, None),
    ("", dict(version="0.33.1+cu130"), None),
    ("", dict(version="0.34.0"), "guidance fits vLLM 0.32, 0.33, got 0.34.0; LENVM_VALUE_MODEL=none tries it"),
    ("none", dict(version="0.34.0"), None),
    ("", dict(is_second=False), SECOND),
    ("", dict(model_config={"is_diffusion": True}), "is_diffusion must be False together with guidance, got"),
    ("model", dict(is_second=False), SECOND),
    ("none", dict(is_second=False, model_config={"runner_type": "pooling"}), None),
    ("none", PIPELINE, None),
    ("model", PIPELINE, None),
    ("probe", PIPELINE, "pipeline_parallel_size must be 1 together with guidance, got 2"),
    ("none", SLEEP, None),
    ("probe", SLEEP, None),
    ("model", SLEEP, "enable_sleep_mode must be False together with guidance, got True"),
    *(
        ("none", {part: {name: value}}, f"{name} must be {accepted} together with guidance, got")
        for part, name, value, accepted in (
            ("model_config", "return_sampling_mask", True, False),
            ("parallel_config", "prefill_context_parallel_size", 2, 1),
            ("parallel_config", "decode_context_parallel_size", 2, 1),
            ("parallel_config", "enable_batch_sharded_sampling", True, False),
            ("speculative_config", "enable_adaptive_verification", True, False),
            ("speculative_config", "rejection_sample_method", "synthetic", "standard or block"),
        )
    ),
]


@pytest.mark.parametrize(("source", "changes", "reason"), SERVERS)
def test_server_that_cannot_guide_ends_or_rejects_requests(folders, monkeypatch, source, changes, reason):
    """It ends if a setting turns guidance on. Otherwise, it starts and rejects guided requests."""
    monkeypatch.setattr(vllm, "__version__", changes.get("version", "0.32.0"))
    if source:
        monkeypatch.setenv("LENVM_VALUE_MODEL", str(folders[source]))
    engine = config(**{name: change for name, change in changes.items() if name != "version"})
    if reason is not None and source:
        with pytest.raises(ValueError, match=reason):
            front_end.configure(None, engine)
        return
    front_end.configure(None, engine)
    for xargs, message in (
        (TARGET | OTHERS, reason and rf"guidance \(target_length, session_id\) must be absent.*{reason}"),
        ({"value_mode": "loud"}, reason or "value_mode must be one of"),
        (OTHERS, None),
        (None, None),
    ):
        with nullcontext() if message is None else pytest.raises(REFUSALS, match=message):
            LenVMProcessor.validate_params(sampling := SamplingParams(extra_args=xargs))
            InputProcessor.process_inputs(None, Request(sampling))


def test_disabled_guidance_changes_nothing(monkeypatch):
    monkeypatch.setenv("LENVM_VALUE_MODEL", "off")
    before = EngineArgs.create_engine_config
    front_end.install()
    assert EngineArgs.create_engine_config is before
    LenVMProcessor.validate_params(SamplingParams(extra_args={"value_mode": "loud"}))


def test_variables_reach_every_worker(monkeypatch):
    """Ray does not copy ``LENVM_*`` variables to workers. Without any, the configuration is unchanged."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: config())
    front_end.install()
    front_end.install()
    assert EngineArgs.create_engine_config("args").additional_config == {}
    monkeypatch.setenv("LENVM_GAMMA", "0.9")
    Settings.current.cache_clear()
    engine = EngineArgs.create_engine_config("args")
    assert engine.additional_config == {"lenvm": {"LENVM_GAMMA": "0.9"}}
    monkeypatch.delenv("LENVM_GAMMA")
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(is_last_rank=False))
    LenVMProcessor(engine, None)
    assert os.environ["LENVM_GAMMA"] == "0.9"


@dataclass
class Request:
    """Result of ``InputProcessor.process_inputs``."""

    sampling_params: SamplingParams
    lora_request: object = None
    mm_features: list | None = None
    prompt_embeds: torch.Tensor | None = None


TEXT = "the prompt must be text together with guidance by a value model, got"
ADAPTER = "a LoRA adapter must be absent together with guidance by a value model or probe"
MARKED, LORA, IMAGES = {"watermarking": True}, {"lora_request": "adapter"}, {"mm_features": [1]}
EMBEDS = {"prompt_embeds": torch.zeros(2, 3)}
# Value source, parameters and contents of a request, and its error with guidance.
REQUESTS = [
    ("none", {}, LORA | IMAGES | EMBEDS, None),
    ("none", MARKED, {}, "watermarking must be false together with guidance, got true"),
    ("probe", {}, IMAGES, None),
    ("probe", {}, LORA, ADAPTER),
    ("model", {}, {}, None),
    ("model", {}, LORA, ADAPTER),
    ("model", {}, IMAGES, f"{TEXT} images or audio"),
    ("model", {}, EMBEDS, f"{TEXT} prompt_embeds"),
]


@pytest.mark.parametrize(("source", "params", "contents", "message"), REQUESTS)
def test_requests_that_cannot_be_guided_are_rejected(folders, monkeypatch, source, params, contents, message):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(folders[source]))
    front_end.configure(None, config())
    for xargs, error in ((OTHERS, None), (TARGET, message)):
        request = Request(SamplingParams(extra_args=xargs, **params), **contents)
        with nullcontext() if error is None else pytest.raises(VLLMValidationError, match=error):
            assert InputProcessor.process_inputs(None, request) is request


CHAT = {"messages": [{"role": "user", "content": "w1"}]}


SELECTED = {"soft_max_tokens": True, "reasoning_effort": {"low": {"target_length": 30}}}
SELECTED["verbosity"] = {"high": {"target_length": 70}}


@pytest.mark.parametrize(
    ("effort", "verbosity", "default"), [(None, "low", 80), ("low", None, 30), ("low", "high", 70)]
)
@pytest.mark.parametrize("xargs", [None, OTHERS, TARGET])
@pytest.mark.parametrize("has_defaults", [True, False])
def test_defaults_of_chats_and_responses(monkeypatch, effort, verbosity, default, xargs, has_defaults):
    """Defaults depend on reasoning effort and verbosity. A request that cannot be guided is unguided."""
    if has_defaults:
        monkeypatch.setenv("LENVM_DEFAULTS", json.dumps(SELECTED))
    front_end.configure(None, config())
    parts = dict(reasoning=effort and {"effort": effort}, text=verbosity and {"verbosity": verbosity}, input="w1")
    response = ResponsesRequest(model="base", vllm_xargs=xargs, **parts)
    parts = dict(reasoning_effort=effort, verbosity=verbosity) | CHAT
    chat = ChatCompletionRequest(model="base", vllm_xargs=xargs, **parts)
    expected = TARGET["target_length"] if xargs is TARGET else default if has_defaults else None
    for sampling in (chat.to_sampling_params(100, {}), response.to_sampling_params(100, {})):
        LenVMProcessor.validate_params(sampling)
        InputProcessor.process_inputs(None, Request(sampling))
        guidance = guidance_of(sampling, LenVMProcessor.settings())
        assert vars(sampling).get("lenvm") == guidance
        assert (guidance and guidance.target_length) == expected
    if xargs is not TARGET:
        InputProcessor.process_inputs(None, Request(sampling := SamplingParams(extra_args=xargs, watermarking=True)))
        assert guidance_of(sampling, LenVMProcessor.settings()) is None
        context = contextvars.copy_context()
        context.run(chat.to_beam_search_params, 100, {})
        context.run(InputProcessor.process_inputs, None, Request(sampling := SamplingParams()))
        assert guidance_of(sampling, LenVMProcessor.settings()) is None


def test_defaults_that_need_a_file_do_not_reject_requests(folders, monkeypatch):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(folders["model"]))
    monkeypatch.setenv("LENVM_DEFAULTS", '{"return_values": true}')
    assert guidance_of(SamplingParams(), Settings.from_environment()).return_values


def test_first_model_runner_without_a_front_end(monkeypatch):
    """VLLM_PLUGINS may exclude the front end. The worker ends if a setting turns guidance on."""
    processor = LenVMProcessor(config(is_second=False), None, False)
    logits = torch.randn(2, 5)
    assert processor.apply(logits) is logits and processor.is_argmax_invariant()
    assert not processor.add_request(0, SamplingParams(extra_args=TARGET))
    monkeypatch.setenv("LENVM_VALUE_MODEL", "none")
    with pytest.raises(ValueError, match=SECOND):
        LenVMProcessor(config(is_second=False), None, False)


NEW_GUIDE = "lenvm_kernels.engines.vllm.processor.new_guide"


@pytest.fixture
def group(monkeypatch):
    """The tensor-parallel group of a worker in the last stage."""
    group = SimpleNamespace(world_size=1, cpu_group="ranks")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    return group


@pytest.mark.parametrize("theirs", [None, "gamma=0.99", "off"])
def test_ranks_with_different_settings_are_rejected(monkeypatch, group, theirs):
    """They would draw different tokens. Output files may differ."""
    made, group.world_size = [], 2

    def all_gather_object(found, mine, group):
        assert group == "ranks" and "trace.jsonl" not in mine
        found[:] = mine, theirs or mine

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(NEW_GUIDE, lambda *args: made.append(args) or "guide")
    monkeypatch.setenv("LENVM_GAMMA", "0.9")
    monkeypatch.setenv("LENVM_TRACE", "trace.jsonl")
    message = rf"equal on all tensor-parallel ranks, got Settings.*gamma=0.9, .*{theirs}"
    with pytest.raises(ValueError, match=message) if theirs else nullcontext():
        LenVMProcessor(config(), "states")
    assert len(made) == (theirs is None)


@pytest.mark.parametrize("is_explicit", [False, True])
def test_failure_at_start_only_ends_servers_with_settings(monkeypatch, caplog, group, is_explicit):
    monkeypatch.setattr(NEW_GUIDE, MagicMock(side_effect=RuntimeError("on purpose")))
    if is_explicit:
        monkeypatch.setenv("LENVM_VALUE_MODEL", "none")
        with pytest.raises(RuntimeError, match="on purpose"):
            LenVMProcessor(config(), "states")
        return
    processor = LenVMProcessor(config(), "states")
    assert not processor.add_request(0, SamplingParams(extra_args=TARGET))
    assert "requests cannot be guided: on purpose" in caplog.text


INTERFACE = "vllm/v1/worker/gpu/sample/logits_processor/interface.py"
USE = """
import sys
from types import SimpleNamespace
sys.modules |= {modules}
from lenvm_kernels.engines.vllm.front_end import configure, install
from lenvm_kernels.engines.vllm.processor import LenVMProcessor, guidance_of
install()
model_config = SimpleNamespace(tokenizer='', runner_type='generate')
configure(None, SimpleNamespace(use_v2_model_runner={is_second}, model_config=model_config, additional_config={{}}))
LenVMProcessor(SimpleNamespace(model_config=None, additional_config={{}}), None, False)
LenVMProcessor.validate_params(SimpleNamespace(extra_args=None))
LenVMProcessor.validate_params(SimpleNamespace(extra_args={{"target_length": 5}}))
"""


@pytest.mark.parametrize(
    ("version", "files", "modules", "is_second", "message"),
    [
        ("0.11.0", {}, {}, False, "got 0.11.0"),
        ("0.32.0", {}, {}, False, SECOND),
        ("0.32.0", {INTERFACE: "class LogitsProcessor: pass\n"}, {"triton": None}, True, "triton"),
    ],
)
def test_plugin_does_not_break_other_environments(site, version, files, modules, is_second, message):
    """Another version of vLLM, without modules used by guidance, and an environment without Triton."""
    folder = site({"vllm/__init__.py": f"__version__ = '{version}'\n"} | files)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", USE.format(modules=modules, is_second=is_second)]
    error = subprocess.run(command, env=environment, capture_output=True, text=True).stderr.splitlines()[-1]
    assert "guidance (target_length) must be absent from this server" in error and message in error, error
