"""The SGLang plugin under load: many concurrent requests in every mode and without guidance, a quarter cut short."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

import requests

from lenvm_kernels.types import Status
from tests.helpers.sglang_server import (
    MODES,
    SAMPLING,
    check_steps,
    prompts_of,
    running_server,
    running_speculation,
    write_checkpoints,
)

MORE_THAN_ANY_GETS = 300
# The engine checks for leaked slots after every step, not only when idle, and exits if it finds one.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TEST_RETRACT": "1"}


def leave_early(engine, body, *, after, abort):
    """Abort a request by its id after some chunks of its stream, or hang up. Returns the last chunk that was read."""
    with requests.post(f"{engine.url}/generate", json={**body, "stream": True}, stream=True, timeout=300) as response:
        assert response.ok, response.text
        lines = (line.removeprefix(b"data: ") for line in response.iter_lines() if line)
        chunk = list(islice(lines, after))[-1]
        if abort:
            assert requests.post(f"{engine.url}/abort_request", json={"rid": body["rid"]}, timeout=60).ok
            chunk = [line for line in lines if line != b"[DONE]"][-1]
    return json.loads(chunk)


def wait_until_idle(engine):
    for _ in range(240):
        (load,) = requests.get(f"{engine.url}/v1/loads", timeout=60).json()["loads"]
        if not load["num_running_reqs"] and not load["num_waiting_reqs"]:
            return load
        time.sleep(0.25)
    raise AssertionError(f"requests are left behind: {load}")


@pytest.mark.parametrize(("running", "count"), [(running_server, 200), (running_speculation, 80)])
def test_many_requests_with_aborts(tmp_path, running, count):
    """Without and with drafts. Each prompt is sent twice; in every eight requests, one is aborted by its id and one
    client hangs up."""
    write_checkpoints(tmp_path)
    prompts = prompts_of(*[3 + i * 7 % 50 for i in range(count // 2)], seed=8) * 2
    rids = [f"{i:03}" for i in range(count)]  # the engine aborts every request whose id begins with the given one
    guidance = [*MODES, None]  # eleven, so each of them is also used by requests that are cut short
    lengths = [4 + i * 5 % 37 for i in range(count)]
    leaving = {i: "abort" if i % 8 else "hang up" for i in range(0, count, 4)}

    def body(i):
        sampling = {**SAMPLING, "custom_params": guidance[i % len(guidance)]}
        sampling["max_new_tokens"] = MORE_THAN_ANY_GETS if i in leaving else lengths[i]
        return {"rid": rids[i], "input_ids": prompts[i], "sampling_params": sampling}

    def ask(i):
        if i in leaving:
            return leave_early(engine, body(i), after=1 + i // 4 % 5, abort=leaving[i] == "abort")
        response = engine.post(**body(i))
        assert response.ok, response.text
        return response.json()

    with running(tmp_path, "load", "--chunked-prefill-size", "64", **CHECKS) as engine:
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(ask, range(count)))
        wait_until_idle(engine)
        steps = engine.steps()
        assert requests.post(f"{engine.url}/flush_cache", timeout=60).ok  # rejected unless the engine is idle
        load = wait_until_idle(engine)
        assert load["num_used_tokens"] == 0 and load["token_usage"] == 0
        followers = prompts_of(5, 40, seed=9)
        later = engine.generate(followers, MODES[:2])
        assert requests.get(f"{engine.url}/health", timeout=60).ok
    log = (tmp_path / "load.log").read_text()
    assert "Traceback" not in log and "LenVM: a step failed" not in log and "leak" not in log

    for i, how in leaving.items():
        if how == "abort":
            assert results[i]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(results[i]["output_ids"]) < MORE_THAN_ANY_GETS
    finished = [i for i in range(count) if i not in leaving]
    assert [len(results[i]["output_ids"]) for i in finished] == [lengths[i] for i in finished]
    assert any(results[i]["meta_info"]["num_retractions"] for i in finished)
    # At most 32 requests run at once. The number in one step depends on arrivals and retractions.
    assert 16 < max(len({row["rid"] for row in step["rows"]}) for step in steps) <= 32
    rows = {rid: [] for rid in rids}
    for step in steps:
        for row in step["rows"]:
            rows[row["rid"]].append(row)
    assert all(len(rows[rids[i]]) < MORE_THAN_ANY_GETS for i in leaving)
    for i in finished:  # one at a time, because a request has hundreds of candidates
        if guidance[i % len(guidance)] is None:
            assert all(row["status"] == Status.UNGUIDED for row in rows[rids[i]])
        else:
            assert check_steps(tmp_path, [prompts[i]], [results[i]], [{"rows": rows[rids[i]]}])
    assert check_steps(tmp_path, followers, *later)
