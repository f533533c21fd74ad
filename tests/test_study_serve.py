"""The study on a server: whole ones with a stand-in, and their parts; test_sglang_study.py has a real server."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.study import __main__ as cli
from bench.study import flops, monitor, serve, served, served_report, server
from bench.study.flops import Architecture, Guidance, Workload
from bench.study.prompts import demo_prompts, read_prompts
from bench.study.served import Answer, Condition, Counters, Load, Models, Peak, Result, Sample, Work
from tests.helpers import fake_servers
from tests.helpers.fake_servers import (
    ABORTED,
    BASE_SECONDS,
    DEADLY,
    DEVICE_SECONDS,
    ENDLESS,
    REFUSED,
    STAGE_MS,
    VALUE_MS,
)

CONFIG = dict(
    model_type="qwen2",
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
)
TINY = Architecture("base", 24, 40, 3, 4, 2, 6, 50)
SMALLER = Architecture("value", 12, 20, 2, 2, 1, 6, 50)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs a study against the stand-in; gives the exit status, the folder, and what the stand-in wrote."""
    for module in ("sglang/launch_server.py", "vllm/entrypoints/openai/api_server.py"):
        (tmp_path / "fake" / module).parent.mkdir(parents=True)
        shutil.copy(fake_servers.__file__, tmp_path / "fake" / module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setattr(server, "VLLM_ON_CPU", tmp_path / "nothing")
    for name in ("LENVM_CONFIG", "LENVM_VALUE_MODEL", "LENVM_MAX_CANDIDATES"):
        monkeypatch.delenv(name, raising=False)
    smaller = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
    for name, changed in (("base", {}), ("value", smaller | {"num_key_value_heads": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | changed))

    def run(*options, command="serve", prompts=((3, 9, 9, 9), (5, 8)), **facts):
        file, log, out = tmp_path / "prompts.jsonl", tmp_path / "fake.jsonl", tmp_path / "out"
        file.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
        log.unlink(missing_ok=True)
        monkeypatch.setenv("FAKE_SERVER", json.dumps({"log": str(log), **facts}))
        where = ["--model", tmp_path / "base", "--prompts", file]
        where += ["--value-model", tmp_path / "value"] if command == "serve" else []
        size = ["--samples", "2", "--max-tokens", "4", "--device", "cpu", "--out", out]
        monkeypatch.setattr("sys.argv", ["study", command, *map(str, where + size), *options])
        status = cli.main()
        return status, out, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return run


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def conditions_of(out):
    return json.loads((out / "summary.json").read_text())["conditions"]


# --- whole studies ---


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_whole_study(study, monkeypatch, tmp_path, engine):
    """Every request, and every number, by hand."""
    monkeypatch.setenv("LENVM_CONFIG", "of the user")
    options = ["--engine", engine, "--temperature", "0.75", "--top-p", "0.9", "--peak", "2:8"]
    options += ["--guidance", '{"target_length": 7, "value_stride": 9}']  # the stride is that of the condition
    status, out, log = study("--top-k", "1", "3", "--stride", "1", "3", *options, "--", "--tp", "2")
    assert status == 0

    starts, ends = [line for line in log if "started" in line], [line["ended"] for line in log if "ended" in line]
    assert [line["started"] for line in starts] == ends and len(ends) == 2
    is_vllm, base = engine == "vllm", str(tmp_path / "base")
    for line in starts:
        assert line["arguments"][-2:] == ["--tp", "2"]
        if is_vllm:
            assert line["arguments"][:3] == ["--model", base, "--enable-logging-iteration-details"]
        else:
            assert line["arguments"][:5] == ["--model-path", base, "--device", "cpu", "--enable-metrics"]
    of_all = {"SGLANG_USE_CPU_ENGINE": "1"}
    if is_vllm:
        of_all = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_SERVER_DEV_MODE": "1"}
    of_guided = {"LENVM_CONFIG": "of the user", "LENVM_VALUE_MODEL": str(tmp_path / "value")}
    assert [line["variables"] for line in starts] == [of_all, of_all | of_guided]

    names = [(name, lengths) for lengths in ("fixed", "free") for name in ("plain", "plain-k1", "plain-k3")]
    guided = [f"k{k}-stride{stride}" for stride in (1, 3) for k in (1, 3)]
    names += [(name, lengths) for lengths in ("fixed", "free") for name in ("neutral", *guided)]
    conditions = conditions_of(out)
    assert [(line["name"], line["lengths"]) for line in conditions] == names

    # A request warms up, and the cache is emptied, before the others.
    requests = [line for line in log if "request" in line or "flushed" in line]
    for number, (name, lengths) in enumerate(names):
        warm_up, flushed, *others = requests[6 * number : 6 * number + 6]
        assert flushed == {"flushed": True} and warm_up in others
        bodies = [line["request"] for line in others]
        found, params, ignored = [], "custom_params", set()
        for body in bodies:
            assert body.pop("stream")
            if is_vllm:
                assert body.pop("stream_options") == {"include_usage": True, "continuous_usage_stats": True}
                prompt, sampling, params = body.pop("prompt"), body, "vllm_xargs"
                sampling["max_new_tokens"], sampling["sampling_seed"] = sampling.pop("max_tokens"), sampling.pop("seed")
                assert sampling.pop("return_token_ids")
            else:
                prompt, sampling = body["input_ids"], body["sampling_params"]
            ignored.add(sampling["ignore_eos"])
            found.append((sampling.pop("sampling_seed"), prompt))
        assert sorted(found) == [(0, [3, 9, 9, 9]), (1, [3, 9, 9, 9]), (2, [5, 8]), (3, [5, 8])]
        assert ignored == {lengths == "fixed"}
        (sampling,) = {
            json.dumps(body): body for body in (body if is_vllm else body["sampling_params"] for body in bodies)
        }.values()
        k, stride = re.fullmatch(r"\D*(\d?)(?:-stride(\d))?", name).groups()
        top_k = int(k) if k else 0 if is_vllm else -1
        expected = {"temperature": 0.75, "min_p": 0.01, "top_p": 0.9, "top_k": top_k, "max_new_tokens": 4}
        expected["ignore_eos"] = lengths == "fixed"
        if name == "neutral":
            expected[params] = {"value_mode": "centered_exp", "value_scale": 0.0}
        elif stride:
            expected[params] = {"target_length": 7, "value_stride": int(stride)}
        assert sampling == expected

        result = conditions[number]
        tokens = [4, 4, 4, 4] if lengths == "fixed" else [3, 3, 4, 4]
        rows = sum(tokens) if name.startswith("k3") else 0
        due = sum(len(range(0, n, result["stride"])) for n in tokens) if rows else 0
        assert result["requests"] == 4 and result["failed_requests"] == 0
        assert result["work"] == {
            "passes": sum(tokens),
            "decode_passes": sum(tokens) - 4,
            "base_seconds": pytest.approx(BASE_SECONDS * sum(tokens)),
            "value_seconds": pytest.approx(VALUE_MS * due / 1e3),
            "rows": rows,
            "guided_rows": due,
            "failed_steps": 0,
        }
        figures = result["figures"]
        assert figures["output tokens"] == sum(tokens)
        slots = 9 * 16 if is_vllm else 4321 + (not name.startswith("plain"))
        assert figures["room in the server's cache (tokens)"] == slots
        work = Workload(2, 2, 3.0, sum(tokens) / 4)
        more = (SMALLER, Guidance(3 * due / rows, 1 - due / rows)) if rows else ()
        estimated = flops.operations_per_output_token(TINY, work, *more) / 1e9
        assert figures["estimated GFLOP / output token"] == pytest.approx(estimated)
        assert 0 < figures["time to first token, median (ms)"] <= 1e3 * figures["end-to-end wall clock (s)"]
        share = figures["achieved GFLOP/s"] / 2e3 * 100
        assert figures["FLOP/s, share of 2 TFLOP/s, 8 GB/s (%)"] == pytest.approx(share)
        share = figures["achieved GB/s"] / 8 * 100
        assert figures["bytes/s, share of 2 TFLOP/s, 8 GB/s (%)"] == pytest.approx(share)
        # Steps of the warm-up were before the flush; those of the second server are the fourth condition's and later.
        of_flush = {**STAGE_MS, "total": sum(STAGE_MS.values())} if rows else {}
        means = {stage: ms * (number - 5) for stage, ms in of_flush.items()}
        assert {stage: of["mean"] for stage, of in result["stages_ms"].items()} == means

    answers = lines_of(out / "requests.jsonl")
    assert len(answers) == 4 * len(names) and answers[-1]["condition"] == "k3-stride3, free"
    assert {line["finish_reason"] for line in answers} == {"length"}
    found = [(line["prompt"], line["sample"], line["output_tokens"]) for line in answers[-4:]]
    assert found == [(0, 0, 3), (0, 1, 3), (1, 0, 4), (1, 1, 4)]
    samples = lines_of(out / "samples.jsonl")
    assert {line["condition"] for line in samples} == {f"{name}, {lengths}" for name, lengths in names}
    assert min(line["resident_mib"] for line in samples) > 5

    summary, text = json.loads((out / "summary.json").read_text()), (out / "summary.md").read_text()
    title = f"{'vLLM' if is_vllm else 'SGLang'} 0.fake"
    assert summary["environment"]["base model"].startswith("base, 1.62e-05 billion parameters, 6.04e-05 GiB in 32 bits")
    assert summary["failed"] == [] and f"# Decoding with and without guidance in {title}\n" in text
    assert summary["environment"]["engine"] == title and summary["environment"]["server device"] == "cpu"
    for lengths, tokens in (("fixed", 16), ("free", 14)):
        passes = summary["tables"][lengths]["forward passes of the base model"]
        assert passes == {"plain": tokens, "guided": tokens, "guided / plain": 1.0}
        assert f"## Outputs of {lengths} length, k = 3, stride 1" in text
        assert f"| output tokens | {tokens} | {tokens} | 1 |" in text
        value = summary["tables"][lengths]["value model (ms / pass)"]
        assert value == {"plain": 0, "guided": pytest.approx(2.0), "guided / plain": None}
        assert "GPU memory, peak (MiB)" not in summary["tables"][lengths]
    assert "Prompts: 2, samples of each: 2, 4 tokens each, ends of sequence passed over." in text
    assert "- command: python -m bench.study serve --model" in text
    assert "With k = 1 the engine decodes greedily" in text
    assert {file.name for file in out.glob("*.png")} == {"ratios.png", "shares.png"}
    with (out / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["engine"], row["condition"], row["lengths"]) for row in rows] == [(title, *name) for name in names]
    assert rows[-1]["forward (ms / guided step)"] == str(STAGE_MS["forward"] * (len(names) - 6))
    assert rows[3]["top_k"] == "0" and rows[-1]["stride"] == "3" and rows[3]["stride"] == ""


ONE = ["--top-k", "2", "--stride", "1", "--lengths", "fixed"]


@pytest.mark.parametrize(("engine", "aborted"), [("sglang", "aborted: no room"), ("vllm", "ended by error")])
def test_failed_requests_are_counted_and_shown(study, capsys, engine, aborted):
    status, out, _ = study(*ONE, "--engine", engine, prompts=[(REFUSED, 1), (3, 1), (ABORTED, 1), (4, 1)])
    assert status == 1
    conditions = conditions_of(out)
    assert len(conditions) == 4
    for result in conditions:
        assert result["requests"] == 8 and result["failed_requests"] == 4 and result["figures"]["output tokens"] == 16
    text, printed = (out / "summary.md").read_text(), capsys.readouterr().err
    for message in (
        'k2-stride1, fixed: 2 of 8 requests: OSError: status 400: {"error": {"message": "too long by 7 tokens"}}',
        f"plain, fixed: 2 of 8 requests: OSError: {aborted}",
    ):
        assert f"- {message}\n" in text and message in printed
        assert result["figures"]["time per output token of a request, median (ms)"] > 0


def test_when_every_request_fails_there_are_no_rates(study):
    status, out, _ = study(*ONE, prompts=[(REFUSED, 1)])
    assert status == 1 and "## Every condition" in (out / "summary.md").read_text()
    for result in conditions_of(out):
        assert result["figures"]["throughput (output tokens/s)"] == 0
        assert result["figures"]["time per output token (ms)"] is None
        assert result["figures"]["estimated GFLOP / output token"] is None


def test_a_server_that_does_not_come_up_shows_its_last_lines(study, capsys):
    status, out, log = study(*ONE, broken=True)
    printed = capsys.readouterr().err
    assert status == 2 and log == []
    assert "error: the server has ended with status 1\n" in printed
    assert f"the last lines of {out / 'plain.log'}:\nline 81\n" in printed and "line 99\nno such model\n" in printed


def test_a_server_that_is_never_healthy_is_ended(study, capsys):
    status, _, log = study(*ONE, "--startup-seconds", "2", late=True)
    assert status == 2 and "error: the server is not up after 2 seconds" in capsys.readouterr().err
    assert [next(iter(line)) for line in log] == ["started", "ended"] and not is_running(log[0]["started"])


def test_a_server_that_ends_meanwhile(study, capsys):
    """What was measured before stays."""
    status, out, _ = study(*ONE, prompts=[(2, 1), (DEADLY, 1)])
    assert status == 2 and [line["name"] for line in conditions_of(out)] == ["plain", "plain-k2"]
    assert "| plain, fixed |" in (out / "summary.md").read_text()
    assert re.search(r"error: the server has ended with status 3\n.*guided.log:\na bad end", capsys.readouterr().err)


def test_a_server_without_the_plugin_is_no_guided_one(study, capsys):
    status, out, log = study(*ONE, without_plugin=True)
    assert status == 2 and "--python must be of an environment with lenvm-kernels" in capsys.readouterr().err
    assert [line["name"] for line in conditions_of(out)] == ["plain", "plain-k2"]
    assert "| plain, fixed |" in (out / "summary.md").read_text()
    assert not is_running(log[-1]["ended"])


def test_a_server_that_passes_sigterm_over_is_killed(study, monkeypatch):
    """With all of its processes."""
    monkeypatch.setattr(server, "GRACE", 0.2)
    status, _, log = study(*ONE, stubborn=True)
    sessions = [line["started"] for line in log if "started" in line]
    assert status == 0 and len(sessions) == 2
    assert [monitor.resident_bytes(session) for session in sessions] == [0, 0]


@pytest.fixture
def interruptible():
    """SIGINT interrupts, in tests that a script started in its background, too: the shell has it ignored there."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_server(study, interruptible, tmp_path, capsys, sign):
    """While requests wait, and with the answers of the conditions before."""
    log, former = tmp_path / "fake.jsonl", signal.getsignal(signal.SIGTERM)

    def interrupt():
        while not log.exists() or str(ENDLESS) not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), sign)

    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    status, out, lines = study(*ONE, prompts=[(2, 1), (ENDLESS, 1)])
    assert status == 130 and time.monotonic() - begin < 60
    assert f"interrupted; what was measured before is in {out}" in capsys.readouterr().err
    assert "ended" in lines[-1] and not is_running(lines[0]["started"]) and signal.getsignal(signal.SIGTERM) is former


def test_an_earlier_study_is_replaced(study, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("requests.jsonl", "samples.jsonl", "steps.4711.jsonl"):
        (tmp_path / "out" / name).write_text('{"of": "before"}\n')
    status, out, _ = study(*ONE)
    assert status == 0 and not (out / "steps.4711.jsonl").exists()
    assert all('"of": "before"' not in file.read_text() for file in out.glob("*.jsonl"))


def test_numbers_of_a_gpu(study, tmp_path, monkeypatch):
    """The base model's time is that of the device, and nvidia-smi's numbers are in the table."""
    fake_nvidia_smi(tmp_path, monkeypatch, 'echo "1000, 60"; echo "500, 20"')
    status, out, log = study(*ONE, "--device", "cuda", gpu=True)
    assert status == 0
    timer = "SGLANG_ENABLE_METRICS_DEVICE_TIMER"
    assert [line["variables"].get(timer) for line in log if "started" in line] == ["1"] * 2
    assert not any("SGLANG_USE_CPU_ENGINE" in line.get("variables", ()) for line in log)
    for result in conditions_of(out):
        assert result["work"]["base_seconds"] == pytest.approx(16 * DEVICE_SECONDS)
        assert result["work"]["decode_passes"] == 12
        assert result["figures"]["GPU memory, peak (MiB)"] == 1500
        assert result["figures"]["GPU utilisation, mean (%)"] == 40
    text = (out / "summary.md").read_text()
    assert "| GPU memory, peak (MiB) | 1500 | 1500 | 1 |" in text and "PyTorch reference" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-k", "2", "9"], r"--top-k must be at most 8 \(LENVM_MAX_CANDIDATES of the server\), got 9"),
        (["--guidance", '{"value_scale": 1.0}'], "--guidance must guide, got .* which is neutral"),
        (["--guidance", '{"value_scale": "x"}'], "--guidance must be a JSON object of custom_params.* value_scale"),
        (["--guidance", "{"], "--guidance must be a JSON object of custom_params, got '{'"),
        (["--guidance", "[1]"], r"--guidance must be a JSON object of custom_params, got '\[1\]'"),
        (["--value-model", "/no/such"], "--value-model must be an existing directory or .gguf file, got '/no/such'"),
        (["--num-prompts", "3"], "--num-prompts must be from 1 to the 2 prompts that there are, got 3"),
        (["--peak", "1:0"], "--peak must be one of H100, H200, or TFLOP/s:GB/s as 312:2039, got '1:0'"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--prompts", "/no/such.jsonl"], "No such file or directory: '/no/such.jsonl'"),
        (["--python", "/no/such/python"], "No such file or directory: '/no/such/python'"),
    ],
)
def test_bad_options_are_named(study, capsys, options, message):
    status, _, log = study(*options)
    assert status == 2 and log == [] and re.search(message, capsys.readouterr().err)


def test_the_first_prompts(study):
    status, out, log = study(*ONE, "--num-prompts", "1", "--concurrency", "1")
    assert status == 0
    assert {tuple(line["request"]["input_ids"]) for line in log if "request" in line} == {(3, 9, 9, 9)}
    assert [line["requests"] for line in conditions_of(out)] == [2] * 4


# --- sources side by side ---

GUIDE = ["--guidance", '{"target_length": 7, "value_stride": 1}']


def test_sources_side_by_side(study, tmp_path):
    """All servers are up at once, and decode the same in turn; the first round does not count."""
    options = ["--sources", str(tmp_path / "value"), "none", "--top-k", "3", "2", "--rounds", "2", *GUIDE]
    status, out, log = study(*options, "--", "--tp", "2", command="sources")
    assert status == 0
    starts = [line for line in log if "started" in line]
    models = [line["variables"].get("LENVM_VALUE_MODEL") for line in starts]
    assert models == [None, str(tmp_path / "value"), "none"]
    assert all(line["arguments"][-2:] == ["--tp", "2"] for line in starts)
    assert ["started" in line for line in log[:3]] == [True] * 3  # none has ended
    assert sorted(line["ended"] for line in log if "ended" in line) == sorted(line["started"] for line in starts)

    of_rounds = [line for line in log if "request" in line or "flushed" in line]
    for number, measured in enumerate(of_rounds[begin : begin + 5] for begin in range(0, len(of_rounds), 5)):
        *requests, flushed = measured
        assert flushed == {"flushed": True}
        for body in (line["request"] for line in requests):
            sampling = body["sampling_params"]
            assert sampling["ignore_eos"] and sampling["top_k"] == (3 if number // 3 % 2 == 0 else 2)
            guidance = None if number % 3 == 0 else {"target_length": 7, "value_stride": 1}
            assert sampling.get("custom_params") == guidance
    assert number + 1 == 3 * 2 * 3  # sources, limits, rounds

    rounds = lines_of(out / "rounds.jsonl")
    names = [(k, source) for k in (3, 2) for source in ("plain", "value", "none")]
    found = [(line["round"], line["top_k"], line["source"]) for line in rounds]
    assert found == [(number, *name) for number in range(3) for name in names]
    assert {line["tokens"] for line in rounds} == {16} and not any(line["failed"] for line in rounds)
    found = json.loads((out / "sources.json").read_text())
    assert found["failed"] == [] and found["environment"]["engine"] == "SGLang 0.fake"
    seconds = {(line["round"], line["top_k"], line["source"]): line["seconds"] for line in rounds}
    for row in found["sources"]:
        times = [seconds[number, row["k"], row["source"]] for number in (1, 2)]
        ratios = [took / seconds[number, row["k"], "plain"] for number, took in zip((1, 2), times, strict=True)]
        assert row["ms / token"] == pytest.approx(sum(times) / 2 / 16 * 1e3)
        assert [row["least"], row["most"]] == pytest.approx(sorted(ratios))
        assert row["over plain"] == pytest.approx(sum(ratios) / 2)
    assert [(row["k"], row["source"]) for row in found["sources"]] == names
    text = (out / "sources.md").read_text()
    assert "Prompts at once: 2, samples of each: 2, tokens of a sample: 4." in text and "Medians of 2 rounds" in text


def test_failures_of_sources(study, capsys):
    options = ["--sources", "none", "--rounds", "1", *GUIDE]
    status, out, _ = study(*options, command="sources", prompts=[(REFUSED, 1), (3, 1)])
    assert status == 1 and "none: OSError: status 400" in (out / "sources.md").read_text()
    status, _, log = study(*options, command="sources", without_plugin=True)
    assert status == 2 and "--python must be of an environment with lenvm-kernels" in capsys.readouterr().err
    assert not any(is_running(line["started"]) for line in log if "started" in line)


def test_studies_side_by_side_take_ports_of_their_own():
    """A port is taken from when it is looked for, not from when a server listens there."""
    with server.reserved_port() as first:
        show = "from bench.study.server import reserved_port\nwith reserved_port() as port: print(port)"
        other = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
        assert int(other.stdout) != first
        of_server = socket.create_server((server.HOST, first))
    with of_server, server.reserved_port() as port:
        assert port != first


@pytest.mark.parametrize("given", [["a/plain"], ["a/value", "b/value"]])
def test_sources_of_one_name_are_refused(study, capsys, given):
    status, _, log = study("--sources", *given, command="sources")
    assert status == 2 and log == []
    assert "--sources must differ in their last part, none of them plain" in capsys.readouterr().err


# --- prompts ---


def template(messages, add_generation_prompt, tokenize, return_dict):
    assert add_generation_prompt and tokenize and not return_dict
    if any(message.get("role") not in ("user", "system") for message in messages):
        raise RuntimeError("roles must be user or system")
    return [len(message["content"]) for message in messages]


CHAT = SimpleNamespace(chat_template="x", apply_chat_template=template)


def test_prompts_of_every_form(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why é?"}]
    lines = [{"prompt": "What?", "answer": 4}, {"messages": chat}, {"input_ids": [0, 7], "id": "x"}]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    assert read_prompts(file, lambda: CHAT) == [[5], [9, 6], [0, 7]]
    file.write_text('{"input_ids": [4, 5]}\n')
    assert read_prompts(file, None) == [[4, 5]]  # needs no tokenizer
    assert demo_prompts(lambda: CHAT)[0] == [len("What are four symptoms of dehydration?")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of .*prompts.jsonl must be JSON, got '{'"),
        ("[1]", r"line 2 of .* must be an object with one of prompt, messages, input_ids, got \[1\]"),
        ('{"question": "x"}', r'line 2 of .* one of prompt, messages, input_ids, got {"question": "x"}'),
        ('{"prompt": "x", "input_ids": [1]}', "line 2 of .* must be an object with one of prompt, messages, input_ids"),
        ('{"prompt": 4}', "prompt in line 2 of .* must be a text, got 4"),
        ('{"prompt": null}', "prompt in line 2 of .* must be a text, got None"),
        ('{"messages": []}', r"messages in line 2 of .* must be a list of at least one {role, content}, got \[\]"),
        ('{"messages": ["x"]}', r"messages in line 2 of .* got \['x'\]"),
        ('{"messages": [{"role": "user"}]}', "messages in line 2 of .* got .*'role': 'user'"),
        (
            '{"messages": [{"role": "judge", "content": "x"}]}',
            "line 2 of .* must fit the chat template .* roles must be",
        ),
        ('{"input_ids": []}', r"input_ids in line 2 of .* must be a list of at least one token id, got \[\]"),
        ('{"input_ids": [1, -1]}', r"input_ids in line 2 of .* got \[1, -1\]"),
        ('{"input_ids": [1, true]}', r"input_ids in line 2 of .* got \[1, True\]"),
        ('{"input_ids": "12"}', "input_ids in line 2 of .* got 12"),
    ],
)
def test_bad_prompts_are_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(file, lambda: CHAT)


def test_files_without_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n \n")
    with pytest.raises(ValueError, match=r"prompts.jsonl must hold at least one prompt, got none"):
        read_prompts(file, None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts.jsonl must be text in UTF-8"):
        read_prompts(file, None)
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* must have input_ids: the tokenizer .* has no chat template"):
        read_prompts(file, lambda: SimpleNamespace(chat_template=None))


# --- requests ---


def event(prompt_tokens, tokens, reason=None):
    facts = dict(prompt_tokens=prompt_tokens, completion_tokens=tokens, finish_reason=reason)
    return {"meta_info": facts}


class Gate:
    """Answers of a server only when so many requests wait at once."""

    def __init__(self, together):
        self.barrier, self.most, self.waiting, self.lock = threading.Barrier(together), 0, 0, threading.Lock()

    def __call__(self, *_):
        with self.lock:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        self.barrier.wait(20)
        with self.lock:
            self.waiting -= 1
        return [event(2, 3)]


SGLANG = server.SGLang(SimpleNamespace(pid=1), 1, None)


@pytest.mark.parametrize(("concurrency", "together"), [(None, 6), (2, 2), (1, 1)])
def test_requests_wait_at_once(monkeypatch, concurrency, together):
    gate = Gate(together)
    monkeypatch.setattr(serve, "events", gate)
    load = Load([[5], [6, 7], [8]], 2, 4, concurrency)
    seconds, answers = serve.ask_all(SGLANG, load, Condition("plain", "free"))
    assert gate.most == together and 0 < max(answer.seconds for answer in answers) <= seconds
    assert [(answer.prompt, answer.sample) for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {answer.error for answer in answers} == {None}


def test_the_first_token_is_when_one_has_come(monkeypatch):
    """Not when the answer begins; and each after it counts, however many come at once."""

    def events(*_):
        for wait, tokens in ((0.05, 0), (0.15, 2), (0.1, 5), (0.1, 5)):
            time.sleep(wait)
            yield event(7, tokens, {"type": "stop"} if tokens == 5 and wait else None)

    monkeypatch.setattr(serve, "events", events)
    answer = serve.ask(SGLANG, Load([[5]], 1, 8), Condition("plain", "free"), 0, 0)
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (7, 5, "stop")
    assert 0.2 <= answer.first_seconds < 0.4 <= answer.seconds
    assert answer.token_seconds == pytest.approx((answer.seconds - answer.first_seconds) / 4)
    monkeypatch.setattr(serve, "events", lambda *_: [event(7, 0)])
    answer = serve.ask(SGLANG, Load([[5]], 1, 8), Condition("plain", "free"), 0, 0)
    assert answer.error == "OSError: no token came" and answer.token_seconds is None


# --- counters ---


def test_counters():
    lines = ["# TYPE a:b counter", 'a:b{x="1",y="p,q"} 2.5', 'a:b{x="2",y="p"} 3', 'a:bc{x="1"} 100', "plain 7e1"]
    counters = Counters("\n".join([*lines, 'odd{t="}\\" {"} 4']))
    assert counters.total("a:b") == 5.5 and counters.total("a:b", x="1") == 2.5 and counters.total("a:b", y="p") == 3
    assert counters.total("plain") == 70 and counters.total("odd", t='}\\" {') == 4
    assert counters.total("absent") == 0 and "a:b" in counters and "a:" not in counters


def test_a_server_that_does_not_come_to_rest(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "SETTLING", 0.3)
    monkeypatch.setattr(server, "exchange", lambda *_: f"{server.IDLE_SECONDS} 4\nvllm:num_requests_running 2\n")
    with pytest.raises(TimeoutError, match=r"has not counted .* for 0.3 seconds: it is not idle"):
        SGLANG.settled()
    (tmp_path / "log").touch()
    with pytest.raises(TimeoutError, match=r"still runs requests after 0.3 seconds"):
        server.VLLM(SimpleNamespace(pid=1), 1, tmp_path / "log").settled()


def test_vllm_has_settled_when_no_more_passes_come(monkeypatch):
    """Its log is behind its metrics: nothing may run, and lines of passes may still come."""
    waits, passes = [], iter([4, 6, 7, 7, 9])
    monkeypatch.setattr(server.time, "sleep", waits.append)
    monkeypatch.setattr(server.VLLM, "counted", lambda _: served.Counted(Counters(""), next(passes), 0, 0.0, True, 0))
    found = server.VLLM(SimpleNamespace(pid=1), 1, None).settled()
    assert found.passes == 7 and len(waits) == 3


# --- memory and utilisation ---


def is_running(process):
    """Whether there is such a process."""
    return Path(f"/proc/{process}").exists()


def test_resident_memory_is_that_of_the_session():
    """Of all its processes, and of no other."""
    code = "import sys; x = b'x' * {} * 2**20; print('up', flush=True); sys.stdin.read()"
    child = code.format(40)
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=sys.stdin); "
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    alone = subprocess.Popen([sys.executable, "-c", code.format(0)], start_new_session=True, **pipes)
    both = subprocess.Popen([sys.executable, "-c", parent + code.format(20)], start_new_session=True, **pipes)
    try:
        lines = [alone.stdout.readline(), both.stdout.readline(), both.stdout.readline()]
        assert lines == ["up\n"] * 3
        bare, loaded = (monitor.resident_bytes(process.pid) / 2**20 for process in (alone, both))
        assert 2 < bare < 40 and 2 * bare + 55 < loaded < 2 * bare + 75
    finally:
        for process in (alone, both):
            process.communicate("")
    assert monitor.resident_bytes(both.pid) == 0


def fake_nvidia_smi(folder, monkeypatch, script):
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_loads_of_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert monitor.gpu_loads() == []
    fake_nvidia_smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/arguments; echo "100, 50"; echo "8.5, [N/A]"')
    assert monitor.gpu_loads() == [(100.0, 50.0), (8.5, None)]
    query = "--query-gpu=memory.used,utilization.gpu --format=csv,noheader,nounits"
    assert (tmp_path / "arguments").read_text() == f"{query}\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monitor.gpu_loads()
    assert (tmp_path / "arguments").read_text() == f"{query} --id=2,3\n"
    fake_nvidia_smi(tmp_path, monkeypatch, "echo broken; exit 9")
    assert monitor.gpu_loads() == []


def test_samples_are_taken_in_time(monkeypatch):
    """At once, once a period, and at the end, whatever a sample takes."""
    numbers = iter(range(1, 1000))
    monkeypatch.setattr(monitor, "PERIOD", 0.2)
    monkeypatch.setattr(monitor, "resident_bytes", lambda session: session * next(numbers) * monitor.MIB)
    monkeypatch.setattr(monitor, "gpu_loads", lambda: time.sleep(0.1) or [])
    with monitor.Monitor(7) as watch:
        time.sleep(1.1)
    mib = [sample.resident_mib for sample in watch.samples]
    assert mib == [7 * number for number in range(1, len(mib) + 1)] and len(mib) in (7, 8)
    for number, sample in enumerate(watch.samples[:5]):
        assert sample.seconds == pytest.approx(0.2 * number, abs=0.15)
    assert watch.samples[-1].seconds >= 1.1


def test_sums_over_gpus():
    sample = Sample(0.0, 1.0, [(100.0, 50.0), (8.5, None), (None, 20.0)])
    assert sample.gpu_mib == 108.5 and sample.gpu_utilisation == 35
    nothing = Sample(0.0, 1.0, [(None, None)])
    assert nothing.gpu_mib is None and nothing.gpu_utilisation is None


# --- numbers and tables ---


def result_of(condition, *, seconds, tokens=(3, 5), work, errors=(), samples=(), stages=None):
    answers = [Answer(i, 0, 0.5 * (i + 1), 0.1 + 0.02 * i, 10 + 4 * i, n, "stop") for i, n in enumerate(tokens)]
    answers += [Answer(9, 0, 4.0, error=error) for error in errors]
    return Result(condition, seconds, answers, Work(*work), list(samples), 900, stages or {}, 0.5)


PLAIN, GUIDED = Condition("plain", "free"), Condition("k4-stride2", "free", 4, 2, {})
SAMPLES = [Sample(0.0, 70.0, [(10.0, 30.0)]), Sample(1.0, 90.0, [(50.0, 40.0)]), Sample(2.0, 80.0, [(20.0, None)])]
LOAD = Load([[1], [2]], 1, 8)


def test_figures_by_hand():
    result = result_of(GUIDED, seconds=2.0, work=(4, 3, 0.5, 0.25, 8, 2, 0), samples=SAMPLES)
    found = served.figures(result, LOAD, Models(TINY, SMALLER, 4, Peak("X", 1e6, 5e5)))
    work, guidance = Workload(2, 1, 12.0, 4.0), Guidance(4 * 0.25, 0.75)
    operations = sum(flops.operations(TINY, work, SMALLER, guidance).values())
    per_token = flops.operations_per_output_token(TINY, work, SMALLER, guidance)
    # A quarter of the passes have values: one. Outputs see 13 to 16 tokens each, and prompts are read once.
    seen, tokens = 2 * (13 + 14 + 15 + 16) + 24, 8 + 24
    elements = 4 * (TINY.active_weights + TINY.lm_head_weights) + TINY.kv_elements * (seen + tokens)
    elements += SMALLER.active_weights + SMALLER.value_head_weights
    elements += SMALLER.kv_elements * (seen / 4 + 8 * (1 + 0.75) + 24)
    assert found == {
        "end-to-end wall clock (s)": 2.0,
        "output tokens": 8,
        "throughput (output tokens/s)": 4.0,
        "time per output token (ms)": 250.0,
        "time to first token, median (ms)": pytest.approx(110),
        "time to first token, 99th percentile (ms)": pytest.approx(119.8),
        # 400 / 2 and 880 / 4
        "time per output token of a request, median (ms)": pytest.approx(210),
        "time per output token of a request, 99th percentile (ms)": pytest.approx(219.8),
        "forward passes of the base model": 4,
        "requests a decoding pass": 2.0,
        "base model (ms / pass)": 125.0,
        "value model (ms / pass)": 62.5,
        "other (ms / pass)": 312.5,
        "rows with values (%)": 25.0,
        "estimated GFLOP / output token": pytest.approx(per_token / 1e9),
        "achieved GFLOP/s": pytest.approx(operations / 2.0 / 1e9),
        "achieved GB/s": pytest.approx(elements * 4 / 2.0 / 1e9),
        "memory of the server's processes, peak (MiB)": 90.0,
        "room in the server's cache (tokens)": 900,
        "GPU memory, peak (MiB)": 50.0,
        "GPU utilisation, mean (%)": 35.0,
        "FLOP/s, share of X (%)": pytest.approx(operations / 2.0 / 1e6 * 100),
        "bytes/s, share of X (%)": pytest.approx(elements * 4 / 2.0 / 5e5 * 100),
    }
    # 2 (24 24 2 + 12 24 2) + 3 24 40 a layer, and twice 50 24; 12 12 + 12 of the value model's head.
    tiny, smaller = 3 * (2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 40) + 2 * 50 * 24, SMALLER.lm_head_weights + 12 * 13
    smaller += SMALLER.active_weights
    assert Models(TINY, SMALLER, 4).sizes() == {
        "base model": f"base, {tiny / 1e9:.3g} billion parameters, {tiny * 4 / 2**30:.3g} GiB in 32 bits",
        "value model": f"value, {smaller / 1e9:.3g} billion parameters, {smaller * 4 / 2**30:.3g} GiB in 32 bits",
    }
    for models in (Models(None, SMALLER), Models(TINY, None)):
        assert served.figures(result, LOAD, models)["achieved GFLOP/s"] is None


def test_operations_without_guidance_are_those_of_the_base_model():
    result = result_of(PLAIN, seconds=2.0, work=(4, 3, 0.5, 0.0, 0, 0, 0), errors=["x"])
    found, work = served.figures(result, LOAD, Models(TINY, None)), Workload(2, 1, 12.0, 4.0)
    assert found["estimated GFLOP / output token"] == pytest.approx(flops.operations_per_output_token(TINY, work) / 1e9)
    assert found["rows with values (%)"] is None and found["GPU memory, peak (MiB)"] is None
    assert found["requests a decoding pass"] == 2.0  # of those that did not fail


def test_dimensions(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert served.dimensions(str(tmp_path)) == Architecture(tmp_path.name, 24, 40, 3, 4, 2, 6, 50)
    assert served.dimensions(str(tmp_path / "none")) is None
    assert "operations are left out: " in capsys.readouterr().err


def test_the_published_form():
    plain = {"a": 4.0, "b": 0.0, "c": None, "d": None, "e": 3}
    guided = {"a": 6.0, "b": 2.0, "c": 5.0, "d": None, "e": 3}
    assert served_report.compared(plain, guided) == {
        "a": {"plain": 4.0, "guided": 6.0, "guided / plain": 1.5},
        "b": {"plain": 0.0, "guided": 2.0, "guided / plain": None},
        "c": {"plain": None, "guided": 5.0, "guided / plain": None},
        "e": {"plain": 3, "guided": 3, "guided / plain": 1.0},
    }


def test_the_headline_is_of_the_smallest_stride_and_the_largest_k():
    """Beside the plain run with the same k."""

    def of(name, lengths, *more):
        return result_of(Condition(name, lengths, *more), seconds=1.0, work=[0] * 7)

    plain = [of("plain", "free"), of("plain-k4", "free", 4), of("plain-k5", "free", 5), of("plain-k5", "fixed", 5)]
    others = [of("neutral", "free", 0, None, {})]
    guided = [of("x", "free", k, stride, {}) for k, stride in ((7, 2), (3, 1), (5, 1), (4, 1))] + [
        of("x", "fixed", 8, 1, {})
    ]
    assert served_report.headline([*others, *guided, *plain], "free") == (plain[2], guided[2])
    assert served_report.headline([*others, *plain], "free") is None
    assert served_report.headline(guided + plain[:2], "free") is None
    assert served_report.headline([*guided, *plain], "fixed") is None


def test_the_summary_compares_with_the_plain_runs_of_these_lengths(tmp_path):
    fixed = result_of(Condition("plain", "fixed"), seconds=8.0, tokens=(4, 4), work=(4, 3, 0.5, 0.0, 0, 0, 0))
    plain = result_of(PLAIN, seconds=2.0, work=(4, 3, 0.5, 0.0, 0, 0, 0), samples=SAMPLES)
    same = result_of(Condition("plain-k4", "free", 4), seconds=4.0, tokens=(1, 4), work=(4, 3, 0.5, 0.0, 0, 0, 0))
    times = {"candidates": [1.0, 3.0], "forward": [40.0, 60.0], "total": [41.0, 63.0]}
    work = (4, 3, 0.5, 0.25, 8, 2, 3)
    guided = result_of(GUIDED, seconds=3.0, tokens=(1, 1), work=work, samples=SAMPLES, stages=times)
    where = {"server device": "cuda", "engine": "X 1", "command": "x"}
    results = [fixed, plain, same, guided]
    served_report.write_summary(tmp_path, where, LOAD, Models(None, None), results)
    text = (tmp_path / "summary.md").read_text()
    assert "- k4-stride2, free: guidance failed in 3 steps, see the server's log" in text
    assert "## Outputs of free length, k = 4, stride 2" in text and "Outputs of fixed length" not in text
    assert "8 tokens each at most: outputs differ in length, so that only rates compare." in text
    for row in (
        "| time per output token (ms) | 800 | 1500 | 1.875 |",
        "| plain, fixed | 0.5 | 8 | 8 | 1 | 1000 | 110 | 119.8 | 213.3 | 291.7 | 4 |  |  | 1 | 1 |",
        "| plain, free | 0.5 | 2 | 8 | 4 | 250 | 110 | 119.8 | 210 | 219.8 | 4 |  | 90 | 1 | 1 |",
        "| plain-k4, free | 0.5 | 4 | 5 | 1.25 | 800 | 110 | 119.8 | 293.3 | 293.3 | 4 |  |  | 1 | 3.2 |",
        "| k4-stride2, free | 0.5 | 3 | 2 | 0.6667 | 1500 | 110 | 119.8 |  |  | 4 | 25 | 90 | 1.875 | 6 |",
        "| plain, free | 125 | 0 | 375 |  |  |  |  |  |  |  |  |  |",
        "| k4-stride2, free | 125 | 62.5 | 562.5 | 2 | 2 | 50 |  |  |  | 52 | 52 | 61.9 |",
    ):
        assert row in text
    assert "greedily" not in text and "GFLOP" not in text and "PyTorch reference" not in text
    tables = json.loads((tmp_path / "summary.json").read_text())["tables"]
    assert tables["free"]["end-to-end wall clock (s)"] == {"plain": 4.0, "guided": 3.0, "guided / plain": 0.75}
    # What the value model took beside its steps, 146 of 250 ms, were prompts.
    parts = served_report.shares(results)["k4-stride2, free"]
    expected = {"base model": 0.5, "candidates": 0.004, "forward": 0.1, "head": 0.0, "reweight": 0.0, "sample": 0.0}
    expected |= {"value model's prompts": 0.146, "other": 2.25}
    assert parts == pytest.approx({name: seconds / 3 * 100 for name, seconds in expected.items()})


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ("H200", "", Peak("H200", 989e12, 4.8e12)),
        (None, "NVIDIA H100 80GB HBM3", Peak("H100", 989e12, 3.35e12)),
        ("0.5:20", "NVIDIA H100", Peak("0.5 TFLOP/s, 20 GB/s", 0.5e12, 20e9)),
        (None, "another", None),
    ],
)
def test_peaks(monkeypatch, given, device, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: device)
    assert cli._peak(given) == expected
