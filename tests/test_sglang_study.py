"""The study on a server, with the real one: what it reads of SGLang is there, and adds up."""

import json

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from bench.study import __main__ as cli
from tests.helpers.sglang_server import prompts_of, write_checkpoints

SERVER = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
SERVER += ["--skip-tokenizer-init", "--mem-fraction-static", "0.5", "--max-total-tokens", "4096"]


def test_a_study_on_the_real_server(tmp_path, monkeypatch):
    for variable in ("LENVM_VALUE_MODEL", "LENVM_CONFIG", "LENVM_TRACE", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    write_checkpoints(tmp_path)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts_of(12, 7)))
    argv = ["serve", "--model", tmp_path / "base", "--value-model", tmp_path / "value", "--prompts", prompts]
    argv += ["--out", out, "--device", "cpu", "--samples", "3", "--max-tokens", "24", "--lengths", "fixed"]
    argv += ["--top-k", "1", "5", "--stride", "1", "4", "--", *SERVER]
    monkeypatch.setattr("sys.argv", ["study", *map(str, argv)])
    assert cli.main() == 0, (out / "guided.log").read_text()[-3000:]

    conditions = {line["name"]: line for line in map(json.loads, (out / "conditions.jsonl").read_text().splitlines())}
    assert list(conditions) == ["plain", "neutral", "k1-stride1", "k5-stride1", "k1-stride4", "k5-stride4"]
    for name, condition in conditions.items():
        work, figures = condition["work"], condition["figures"]
        assert figures["output tokens"] == 6 * 24 and condition["failed_requests"] == 0
        # All requests fit into a batch, but may not have come at the same time.
        assert 23 <= work["decode_passes"] < work["passes"] <= 6 * 24
        assert 0 < work["base_seconds"] < figures["end-to-end wall clock (s)"]
        assert figures["other (ms / pass)"] > 0 and figures["memory of the server's processes, peak (MiB)"] > 300
        assert figures["room in the server's cache (tokens)"] == 4096
        if name.startswith("k5"):
            assert work["rows"] == 6 * 24 and 0 < work["value_seconds"] < figures["end-to-end wall clock (s)"]
            assert condition["stages_ms"]["forward"]["mean"] > 0
        else:
            assert work["rows"] == work["value_seconds"] == 0 and condition["stages_ms"] == {}
    assert conditions["k5-stride1"]["work"]["guided_rows"] == 6 * 24
    # Steps are the engine's: a request is in none that computes the prompts of others, and such a one may be due.
    work = conditions["k5-stride4"]["work"]
    others = work["passes"] - work["decode_passes"] - 1
    assert abs(work["guided_rows"] - 6 * 24 // 4) <= 6 * others
    text = (out / "summary.md").read_text()
    assert "## Outputs of fixed length, k = 5, stride 1" in text and "- sglang: 0.5." in text
