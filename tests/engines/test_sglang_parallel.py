"""The SGLang plugin on several ranks, and with engine options that affect the hooked functions.

Tensor-parallel ranks trace the same steps into one file: every line occurs twice if and only if the ranks are bitwise
identical.
"""

import json
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import msgspec
import requests
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lenvm_kernels.engines.sglang import plugin as sglang_adapter
from tests.helpers.models import random_model
from tests.helpers.sglang_server import (
    ATOL,
    GENTLE,
    HIDDEN,
    MODES,
    SAMPLING,
    TINY,
    check_steps,
    prompts_of,
    running_server,
    write_checkpoints,
)

PROMPT_LENGTHS = range(3, 72, 6)  # twelve lengths, shorter and longer than a chunk
GUIDANCE = [*MODES, None, {}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_checkpoints(folder)
    return folder


def running_ranks(folder, name, *options):
    """A server of two ranks with one core each, without the engine's compilation, which takes most of the start."""
    variables = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.patches",
        "LENVM_TEST_FAIL": str(folder / "fail"),
    }
    return running_server(folder, name, "--tp", "2", "--chunked-prefill-size", "32", *options, **variables)


@pytest.fixture(scope="module")
def ranks(folder):
    with running_ranks(folder, "ranks", "--enable-metrics") as server:
        yield server


def ask(server, prompts, guidance, **request):
    params = [{**SAMPLING, "custom_params": custom_params} for custom_params in guidance]
    response = server.post(input_ids=prompts, sampling_params=params, return_logprob=True, **request)
    assert response.ok, response.text
    return response.json()


def traced(server):
    """Complete lines of the trace so far; a rank may still be writing the last one."""
    return server.trace.read_text().split("\n")[:-1] if server.trace.exists() else []


def agreed(server):
    """Lines of the trace without duplicates, once both ranks have written all of them."""
    end = time.monotonic() + 20  # the second rank reaches its last step after the first has answered
    while set((lines := Counter(traced(server))).values()) - {2}:
        assert time.monotonic() < end, f"ranks disagree: {[line for line, n in lines.items() if n != 2][:2]}"
        time.sleep(0.1)
    return list(lines)


def steps_of(lines, results):
    ids = {result["meta_info"]["id"] for result in results}
    return [step for step in map(json.loads, lines) if any(row["rid"] in ids for row in step["rows"])]


@torch.no_grad()
def check_logprobs(folder, prompts, results):
    """Check log-probabilities of drawn tokens with the base model: different tokens on one rank would change them."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    for prompt, result in zip(prompts, results, strict=True):
        logits = model(torch.tensor([[*prompt, *result["output_ids"]]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(result["output_ids"])[:, None])[:, 0]
        drawn = [logprob for logprob, _, _ in result["meta_info"]["output_token_logprobs"]]
        torch.testing.assert_close(torch.tensor(drawn), expected, rtol=0, atol=ATOL)


def test_tensor_parallel_ranks_agree(folder, ranks):
    """Every mode and unguided requests, with prompts in chunks, then with prompts in the radix cache."""
    prompts = prompts_of(*PROMPT_LENGTHS)
    for is_cached in (False, True):
        results = ask(ranks, prompts, GUIDANCE)
        assert check_steps(folder, prompts, results, steps_of(agreed(ranks), results)) > 12 * 16
        check_logprobs(folder, prompts, results)
        assert all((result["meta_info"]["cached_tokens"] > 0) == is_cached for result in results)
    assert ranks.metrics()["guided_steps_total"] == len(agreed(ranks))


@pytest.mark.parametrize("method", ["extend", "step"])
def test_failure_on_one_rank_ends_guidance_on_both(folder, ranks, method):
    prompts = prompts_of(20, 20, seed=len(method))
    fallbacks = ranks.metrics()["fallbacks_total"]
    (folder / "fail").write_text(method)
    results = ask(ranks, prompts, [GENTLE, None])
    assert not (folder / "fail").exists(), "the second rank did not fail"
    assert steps_of(agreed(ranks), results) == []
    assert ranks.metrics()["fallbacks_total"] == fallbacks + 1
    check_logprobs(folder, prompts, results)
    for cached_tokens in (0, 19):  # guided requests must not reuse what the failed request left in the radix cache
        results = ask(ranks, prompts[:1], [GENTLE])
        assert results[0]["meta_info"]["cached_tokens"] == cached_tokens
        assert check_steps(folder, prompts[:1], results, steps_of(agreed(ranks), results))
        check_logprobs(folder, prompts[:1], results)


def test_data_parallel_attention(tmp_path):
    """Two ranks with separate requests, whose batches the engine pads to the same size; then one rank has none."""
    write_checkpoints(tmp_path)
    base = random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=HIDDEN // 4), seed=0)
    base.save_pretrained(tmp_path / "base")
    prompts = prompts_of(*PROMPT_LENGTHS)
    with running_ranks(tmp_path, "attention", "--dp", "2", "--enable-dp-attention") as server:
        results = ask(server, prompts, GUIDANCE)
        by_rank = [[r for r in results if r["meta_info"]["dp_rank"] == rank] for rank in (0, 1)]
        assert all(steps_of(traced(server), by_rank[rank]) for rank in (0, 1))
        assert check_steps(folder=tmp_path, prompts=prompts, results=results, steps=steps_of(traced(server), results))
        check_logprobs(tmp_path, prompts, results)
        for rank in (0, 1):
            alone = ask(server, prompts[-1:], [GENTLE], routed_dp_rank=rank)
            assert alone[0]["meta_info"]["dp_rank"] == rank
            assert check_steps(tmp_path, prompts[-1:], alone, steps_of(traced(server), alone))
            check_logprobs(tmp_path, prompts[-1:], alone)


def test_mixed_prefill_and_decode_batches(folder):
    """Mixed chunks, with pages of 16 slots."""
    options = ("--enable-mixed-chunk", "--page-size", "16", "--chunked-prefill-size", "32")
    prompts = prompts_of(*PROMPT_LENGTHS, seed=1)
    with running_server(folder, "mixed", *options) as server:
        for is_cached in (False, True):
            results, steps = server.generate(prompts, GUIDANCE)
            assert check_steps(folder, prompts, results, steps) > 12 * 16
            assert any(result["meta_info"]["cached_tokens"] > 0 for result in results) == is_cached
            lens = {result["meta_info"]["id"]: len(prompt) for prompt, result in zip(prompts, results, strict=True)}
            batches = [[row["length"] > lens[row["rid"]] for row in step["rows"]] for step in steps]
            assert any({True, False} <= set(decoding) for decoding in batches)


def test_requests_that_cannot_be_guided_are_rejected(folder):
    """The scheduler rejects them, because the engine loads no plugins in several HTTP workers. Without radix cache and
    overlapping scheduler; guided requests still work."""
    options = ("--disable-overlap-schedule", "--disable-radix-cache", "--enable-streaming-session")
    options += ("--tokenizer-worker-num", "2", "--skip-server-warmup")  # warm-up would overlap with serving
    prompts = prompts_of(*PROMPT_LENGTHS, seed=2)
    guided, unguided = ({**SAMPLING, "custom_params": custom_params} for custom_params in (GENTLE, None))
    beams = {"beam_width": 2, "n": 2}
    patient = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}  # imports of a worker take long on a busy machine
    with running_server(folder, "refusing", *options, "--chunked-prefill-size", "32", **patient) as server:
        session = requests.post(f"{server.url}/open_session", json={"capacity_of_str_len": 500, "streaming": True})
        in_session = {"input_ids": prompts[0], "session_params": {"id": session.json()}}
        assert server.post(sampling_params=unguided, **in_session).ok
        assert server.post(sampling_params={**unguided, **beams}, input_ids=prompts[0]).ok
        for message, request in {
            "a streaming session": {**in_session, "sampling_params": guided},
            "beam_width": {"sampling_params": {**guided, **beams}, "input_ids": prompts[0]},
            "input_embeds": {"sampling_params": guided, "input_embeds": torch.zeros(5, HIDDEN).tolist()},
        }.items():
            response = server.post(**request)
            assert response.status_code == 400
            assert f"{message} cannot be combined with guidance" in response.json()["error"]["message"]
        assert server.post(sampling_params=unguided, **in_session).ok
        assert server.post(input_ids=prompts[0], sampling_params={**guided, "max_new_tokens": 0}).ok
        scores = {"query": prompts[0], "items": prompts[1:3], "label_token_ids": [3, 4], "model": "base"}
        assert requests.post(f"{server.url}/v1/score", json=scores, timeout=60).ok
        results, steps = server.generate(prompts, GUIDANCE)
        assert check_steps(folder, prompts, results, steps) > 12 * 16


@pytest.mark.parametrize(
    "option",
    [
        "speculative_algorithm",
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
    ],
)
def test_unsupported_options_are_rejected_at_start(monkeypatch, tmp_path, option):
    settings = sglang_adapter.Settings(tmp_path)
    monkeypatch.setattr(sglang_adapter.Settings, "current", lambda tokenizer: settings)
    monkeypatch.setattr(HookRegistry, "_patched", set(sglang_adapter.HOOKS))
    args = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert option in args
    runner = SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(**args | {option: 2}))
    with pytest.raises(ValueError, match=f"{option} must (be .*|not be set) together with LENVM_VALUE_MODEL.*got 2"):
        sglang_adapter.load_value_model(None, runner)
