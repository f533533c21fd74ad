"""``bench.serve`` against a stand-in. tests/engines/ runs ``bench.load``, which sends the same way, on real servers."""

import csv
import json
import re
from itertools import product

import numpy as np
import pytest

from bench import serve
from tests.helpers import fake_servers

STAND_IN = f"{{python}} -S {fake_servers.__file__} {{port}}"
URLS = "--base-url http://127.0.0.1:9 --guided-url "


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Function that runs the command with a stand-in; returns exit status, summary.json and both servers' log lines."""
    monkeypatch.setenv("LENVM_GAMMA", "0.9")
    monkeypatch.delenv("LENVM_MAX_CANDIDATES", raising=False)

    def run(flags, *, prompts="hello", flaw=""):
        (tmp_path / "prompts").write_text(prompts)
        argv = f"serve --out {tmp_path} --model M --max-tokens 3 --prompts {tmp_path}/prompts {flags}".split()
        monkeypatch.setattr("sys.argv", [*argv, "--command", f"{STAND_IN} {flaw}"])
        status = serve.main()
        logs = [(tmp_path / f"{name}.log").read_text().splitlines() for name in ("base", "guided")]
        return status, json.loads((tmp_path / "summary.json").read_text()), logs

    return run


@pytest.mark.parametrize(("engine", "field"), [("sglang", "custom_params"), ("vllm", "vllm_xargs")])
def test_both_servers_in_turn(bench, tmp_path, monkeypatch, engine, field):
    answers, ask_all = [], serve.ask_all
    monkeypatch.setattr(serve, "ask_all", lambda *given: answers.append(ask_all(*given)) or answers[-1])
    status, summary, logs = bench(f"--engine {engine} --value-model W --num-prompts 3 --k 1 3 --concurrency 1 2")
    assert (status, summary["failures"], summary["engine"]) == (0, [], f"{engine} 0.fake")
    (base_variables, *base), (guided_variables, *guided) = ([json.loads(line) for line in log] for log in logs)
    assert base_variables == {"LENVM_VALUE_MODEL": "off"}
    assert guided_variables == {"LENVM_GAMMA": "0.9", "LENVM_VALUE_MODEL": "W"}
    assert len({body["prompt"] for body in base}) == len(base) == 2 * (1 + 2 + 3 + 3)
    assert {body["prompt"]: body | {field: {"target_length": 3}} for body in base} == {x["prompt"]: x for x in guided}
    assert all(body["min_p"] == 0.01 and body["ignore_eos"] for body in base)

    rows = summary["conditions"]
    for i, (row, condition) in enumerate(zip(rows, product(("base", "guided"), (1, 3), (1, 2)), strict=True)):
        assert (row["server"], row["k"], row["concurrency"]) == condition
        ttft, tpot = 1e3 * np.array(answers[2 * i + 1]).T  # answers[2 * i] belong to the warm-up
        assert min(ttft) >= 1e3 * fake_servers.SECONDS and max(tpot) > 0.5e3 * fake_servers.SECONDS
        expected = [np.median(ttft), *np.percentile(tpot, (50, 99))]
        assert [row["ttft_ms"], row["tpot_ms"], row["tpot_p99_ms"]] == pytest.approx(expected, abs=1e-3)
        assert row["tokens_per_s"] == pytest.approx(9 / row["seconds"], rel=1e-3) and row["failed"] == 0
        assert row["seconds"] > {1: 3, 2: 2}[row["concurrency"]] * 3 * fake_servers.SECONDS
        if row["server"] == "guided":
            assert (row["guided_steps"], row.get("step_ms")) == (9, fake_servers.STEP_MS)
            assert row["tpot_ratio"] == pytest.approx(row["tpot_ms"] / rows[i - 4]["tpot_ms"], abs=1e-4)
    lines = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())
    assert list(lines) == [{name: str(row.get(name, "")) for name in serve.COLUMNS} for row in rows]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("throughput.png", "tpot.png"))


FAILURES = [  # flaw of the stand-in, prompts, exit status, failed requests per server, message
    ("", "hello\nREFUSED\nABORTED", 1, [2, 2], "1 x OSError: status 400: too long .*\n.* 1 x OSError: ended by abort"),
    ("", "DEADLY", 2, [0], r"the server ended with status 3; the end of \S+guided.log:\n(.*\n)*a bad end\n"),
    ("without-plugin", "hello", 2, [0], "guided server must run the plugin, but /metrics of .* has no lenvm:guided"),
    ("failing", "hello", 1, [0, 0], "guided, k 2, concurrency 1: 9 x lenvm:fallbacks_total has grown"),
    ("idle", "hello", 1, [0, 0], "guided, k 2, concurrency 1: 1 x no step was guided"),
]


@pytest.mark.parametrize(("flaw", "prompts", "status", "failed", "message"), FAILURES)
def test_failures(bench, capfd, flaw, prompts, status, failed, message):
    found, summary, _ = bench("--value-model W --num-prompts 3 --k 2 --concurrency 1", prompts=prompts, flaw=flaw)
    assert (found, [row["failed"] for row in summary["conditions"]]) == (status, failed)
    assert re.search(message, capfd.readouterr().err)
    for row in summary["conditions"]:
        assert row["tokens_per_s"] == pytest.approx(3 * (3 - row["failed"]) / row["seconds"], rel=1e-3)


EITHER = "either --value-model or both --base-url and --guided-url must be given"
BAD = [("", EITHER), (URLS + "http://x --value-model W", EITHER)]
BAD += [(URLS + "https://x", "--base-url and --guided-url must both begin with http://, got")]
BAD += [("--k 2 9", "--k must be from 1 to 8 .LENVM_MAX_CANDIDATES., got .2, 9")]
BAD += [("--concurrency 65", "--concurrency must be from 1 to 64 .--num-prompts., got .65")]
BAD += [("--max-tokens 1", "--max-tokens must be at least 2, got .1"), ("--guidance [1]", "must be a JSON object, got")]
BAD += [("--value-model W --prompts /dev/null", "--prompts must have at least one prompt, got an empty file")]


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_bad_flags_are_rejected(bench, capsys, flags, message):
    with pytest.raises(SystemExit):
        bench(flags)
    assert re.search(message, capsys.readouterr().err)
