"""The SGLang plugin on several ranks, with engine options that affect the hooked functions, and under load.

Tensor-parallel ranks write their traces into one file: every line occurs twice if and only if the ranks are bitwise
identical.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import requests
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lenvm_kernels.types import Status
from tests.helpers.models import random_model
from tests.helpers.sglang_server import (
    ATOL,
    GENTLE,
    HIDDEN,
    MODES,
    SAMPLING,
    TINY,
    TWO_RANKS,
    cached_tokens,
    prompts_of,
    rows_of,
    running_server,
    running_speculation,
    write_checkpoints,
)

CHUNKS = ("--chunked-prefill-size", "32")
PROMPT_LENGTHS = range(3, 72, 6)  # twelve lengths, shorter and longer than a chunk
GUIDANCE = [*MODES, None, {}]


@pytest.fixture(scope="module")
def ranks(folder):
    options, fail = ("--tp", "2", "--enable-metrics", *CHUNKS), {"LENVM_TEST_FAIL": str(folder / "fail")}
    with running_server(folder, "ranks", *options, **TWO_RANKS | fail) as server:
        yield server


@torch.no_grad()
def ask(folder, server, prompts, guidance, **request):
    """Send requests and check log-probabilities of drawn tokens with the base model, because different tokens on one
    rank would change them. Returns the results."""
    results, _ = server.generate(prompts, guidance, request=dict(return_logprob=True, **request))
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    for prompt, result in zip(prompts, results, strict=True):
        logits = model(torch.tensor([[*prompt, *result["output_ids"]]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(result["output_ids"])[:, None])[:, 0]
        drawn = [logprob for logprob, _, _ in result["meta_info"]["output_token_logprobs"]]
        torch.testing.assert_close(torch.tensor(drawn), expected, rtol=0, atol=ATOL)
    return results


def test_tensor_parallel_ranks_agree(folder, ranks):
    """All modes and unguided requests, with prompts in chunks, then with prompts in the radix cache."""
    prompts = prompts_of(*PROMPT_LENGTHS)
    for is_cached in (False, True):
        results = ask(folder, ranks, prompts, GUIDANCE)
        assert ranks.check_steps(prompts, results, ranks.agreed_steps()) > 12 * 16
        assert all((count > 0) == is_cached for count in cached_tokens(results))
    assert ranks.metrics()["guided_steps_total"] == len(ranks.agreed_steps())


@pytest.mark.parametrize(
    ("method", "rank", "is_lost"), [("extend", 0, True), ("extend", 1, True), ("step", 0, True), ("step", 1, False)]
)
def test_failure_on_one_rank(folder, ranks, method, rank, is_lost):
    """If the first rank fails, guidance ends on both. A failure of the second rank has no effect."""
    prompts, fallbacks = prompts_of(20, 20, seed=10 * len(method) + rank), ranks.metrics()["fallbacks_total"]
    (folder / "fail").write_text(f"{method} {rank}")
    results = ask(folder, ranks, prompts, [GENTLE, None])
    assert not (folder / "fail").exists(), "the rank did not fail"
    assert ranks.metrics()["fallbacks_total"] == fallbacks + is_lost
    time.sleep(2)  # the second rank may write its last step after the response
    steps = ranks.steps()
    drawn = [row["token"] for row in rows_of(results[0], steps) if row["length"] >= 20]
    if not is_lost:
        assert ranks.check_steps(prompts, results, steps) > 16 and min(drawn) >= 0
    elif method == "extend":
        assert drawn == []
    else:
        assert drawn and max(drawn) < 0
    # Tokens of the failed request in the radix cache are not reused.
    for cached in (0 if method == "extend" else 19, 19):
        results = ask(folder, ranks, prompts[:1], [GENTLE])
        assert cached_tokens(results) == [cached]
        assert ranks.check_steps(prompts[:1], results, ranks.steps()[-34:])


def test_data_parallel_attention(tmp_path):
    """Two ranks with separate requests in batches padded to the same size; then one rank has no requests."""
    write_checkpoints(tmp_path, random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=HIDDEN // 4)))
    prompts, options = prompts_of(*PROMPT_LENGTHS), ("--tp", "2", "--dp", "2", "--enable-dp-attention", *CHUNKS)
    with running_server(tmp_path, "attention", *options, **TWO_RANKS) as server:
        results = ask(tmp_path, server, prompts, GUIDANCE)
        steps = server.steps()
        assert server.check_steps(prompts, results, steps)
        for rank in (0, 1):
            assert any(rows_of(result, steps) for result in results if result["meta_info"]["dp_rank"] == rank)
            alone = ask(tmp_path, server, prompts[-1:], [GENTLE], routed_dp_rank=rank)
            assert alone[0]["meta_info"]["dp_rank"] == rank
            assert server.check_steps(prompts[-1:], alone, server.steps())


def test_mixed_prefill_and_decode_batches(folder):
    """Mixed chunks, with pages of 16 slots."""
    prompts = prompts_of(*PROMPT_LENGTHS, seed=1)
    with running_server(folder, "mixed", "--enable-mixed-chunk", "--page-size", "16", *CHUNKS) as server:
        for is_cached in (False, True):
            results, steps = server.generate(prompts, GUIDANCE)
            assert server.check_steps(prompts, results, steps) > 12 * 16
            assert any(cached_tokens(results)) == is_cached
            lens = {result["meta_info"]["id"]: len(prompt) for prompt, result in zip(prompts, results, strict=True)}
            batches = [[row["length"] > lens[row["rid"]] for row in step["rows"]] for step in steps]
            assert any({True, False} <= set(decoding) for decoding in batches)


def test_strides_and_requests_that_cannot_be_guided(tmp_path):
    """The scheduler rejects such requests, because the engine loads no plugins in further HTTP workers.

    The server's stride is the default. Values are correct in the steps in which a row is guided. The base model is a
    mixture of experts, and the radix cache and the overlapping scheduler are disabled."""
    sizes = TINY | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    write_checkpoints(tmp_path, random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes)))
    options = ("--disable-overlap-schedule", "--disable-radix-cache", "--enable-streaming-session", *CHUNKS)
    options += ("--tokenizer-worker-num", "2", "--skip-server-warmup")  # warm-up would overlap with serving
    prompts = prompts_of(*PROMPT_LENGTHS, seed=2)
    guided, unguided = ({**SAMPLING, "custom_params": custom_params} for custom_params in (GENTLE, None))
    beams, prompt = {"beam_width": 2, "n": 2}, {"input_ids": prompts[0]}
    # A worker starts slowly on a busy machine.
    variables = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120", "LENVM_VALUE_STRIDE": "4"}
    with running_server(tmp_path, "refusing", *options, **variables) as server:
        session = requests.post(f"{server.url}/open_session", json={"capacity_of_str_len": 500, "streaming": True})
        in_session = prompt | {"session_params": {"id": session.json()}}
        for request, sampling, refused in (
            (in_session, unguided, None),
            (prompt, unguided | beams, None),
            (in_session, guided, "a streaming session"),
            (prompt, guided | beams, "beam_width"),
            (prompt | {"return_sampling_mask": True}, guided, "return_sampling_mask"),
            ({"input_embeds": torch.zeros(5, HIDDEN).tolist()}, guided, "input_embeds"),
            (in_session, unguided, None),
            (prompt, guided | {"max_new_tokens": 0}, None),
        ):
            response = server.post(**request, sampling_params=sampling)
            assert response.status_code == (400 if refused else 200), response.text
            assert not refused or f"{refused} cannot be combined with guidance" in response.json()["error"]["message"]
        scores = {"query": prompts[0], "items": prompts[1:3], "label_token_ids": [3, 4], "model": "base"}
        assert requests.post(f"{server.url}/v1/score", json=scores, timeout=60).ok
        prompts = prompts_of(9, 12, 40, 5, seed=12)
        guidance = [MODES[0], MODES[1] | {"value_stride": 1}, MODES[2] | {"value_stride": 3}, None]
        results, steps = server.generate(prompts, guidance, max_new_tokens=24)
    assert server.check_steps(prompts, results, steps) > 24 * 2
    for result, stride in zip(results[:3], (4, 1, 3), strict=True):
        rows = rows_of(result, [step for step in steps if step["mode"] == "DECODE"])
        due = [i for i, row in enumerate(rows) if row["status"] == Status.GUIDE]
        assert {row["status"] for row in rows} <= {Status.GUIDE, Status.NOT_DUE}
        assert {after - before for before, after in pairwise(due)} == {stride}


MORE_THAN_ANY_GETS = 300
# The engine checks for leaked slots after every step, not only when idle, and exits on a leak.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TEST_RETRACT": "1"}


def leave_early(engine, body, *, after, abort):
    """Abort a request by its id after some chunks of its stream, or hang up. Returns the last chunk."""
    with requests.post(f"{engine.url}/generate", json={**body, "stream": True}, stream=True, timeout=300) as response:
        assert response.ok, response.text
        lines = (line.removeprefix(b"data: ") for line in response.iter_lines() if line)
        chunk = list(islice(lines, after))[-1]
        if abort:
            assert requests.post(f"{engine.url}/abort_request", json={"rid": body["rid"]}, timeout=60).ok
            chunk = [line for line in lines if line != b"[DONE]"][-1]
    return json.loads(chunk)


@pytest.mark.parametrize(("running", "count"), [(running_server, 200), (running_speculation, 80)])
def test_many_requests_with_aborts(tmp_path, running, count):
    """Each prompt is sent twice. Per eight requests, one is aborted by its id, and one client hangs up."""
    write_checkpoints(tmp_path)
    prompts = prompts_of(*[3 + i * 7 % 50 for i in range(count // 2)], seed=8) * 2
    guidance = [*MODES, None]  # eleven, so that aborted requests use all
    lengths = [4 + i * 5 % 37 for i in range(count)]
    leaving = {i: "abort" if i % 8 else "hang up" for i in range(0, count, 4)}

    def body(i):
        sampling = {**SAMPLING, "custom_params": guidance[i % len(guidance)]}
        sampling["max_new_tokens"] = MORE_THAN_ANY_GETS if i in leaving else lengths[i]
        rid = f"{i:03}"  # the engine aborts all requests with an id prefix
        return {"rid": rid, "input_ids": prompts[i], "sampling_params": sampling}

    def ask(i):
        if i in leaving:
            return leave_early(engine, body(i), after=1 + i // 4 % 5, abort=leaving[i] == "abort")
        response = engine.post(**body(i))
        assert response.ok, response.text
        return response.json()

    with running(tmp_path, "load", "--chunked-prefill-size", "64", **CHECKS) as engine:
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(ask, range(count)))
        flush = dict(params={"timeout": 60}, timeout=90)  # rejected if the engine is not idle
        assert requests.post(f"{engine.url}/flush_cache", **flush).ok
        steps, (load,) = engine.steps(), requests.get(f"{engine.url}/v1/loads", timeout=60).json()["loads"]
        assert not any(load[x] for x in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage"))
        followers = prompts_of(5, 40, seed=9)
        later = engine.generate(followers, MODES[:2])
        assert requests.get(f"{engine.url}/health", timeout=60).ok
    log = engine.log.read_text()
    assert "Traceback" not in log and "LenVM: a step failed" not in log and "leak" not in log

    # At most 32 requests run at once, fewer depending on arrivals and retractions.
    assert 16 < max(len({row["rid"] for row in step["rows"]}) for step in steps) <= 32
    assert any(results[i]["meta_info"]["num_retractions"] for i in range(count) if i not in leaving)
    for i, result in enumerate(results):
        rows = rows_of(result, steps)
        if i in leaving:
            assert len(result["output_ids"]) < MORE_THAN_ANY_GETS and len(rows) < MORE_THAN_ANY_GETS
            assert leaving[i] == "hang up" or result["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        assert len(result["output_ids"]) == lengths[i]
        if guidance[i % len(guidance)] is None:
            assert all(row["status"] == Status.UNGUIDED for row in rows)
        else:  # one at a time, because a request has hundreds of candidates
            assert engine.check_steps([prompts[i]], [result], [{"rows": rows}])
    assert engine.check_steps(followers, *later)
