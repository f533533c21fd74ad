"""A study with a real server, for the tests of each engine: what it reads of the engine is there, and adds up."""

import json

from bench.study import __main__ as cli


def check_study(folder, monkeypatch, prompts, options, *, slots):
    """Study the models ``base`` and ``value`` of a folder.

    Args:
        prompts: two, in tokens.
        options: of the command, those of the server behind two dashes.
        slots: of the server's cache.
    """
    for variable in ("LENVM_VALUE_MODEL", "LENVM_CONFIG", "LENVM_TRACE", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    file, out = folder / "prompts.jsonl", folder / "out"
    file.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    argv = ["serve", "--model", folder / "base", "--value-model", folder / "value", "--prompts", file]
    argv += ["--out", out, "--device", "cpu", "--samples", "3", "--max-tokens", "24", "--lengths", "fixed"]
    argv += ["--top-k", "1", "5", "--stride", "1", "4", *options]
    monkeypatch.setattr("sys.argv", ["study", *map(str, argv)])
    assert cli.main() == 0, (out / "guided.log").read_text()[-3000:]

    conditions = {line["name"]: line for line in json.loads((out / "summary.json").read_text())["conditions"]}
    plain, guided = ["plain", "plain-k1", "plain-k5"], ["k1-stride1", "k5-stride1", "k1-stride4", "k5-stride4"]
    assert list(conditions) == [*plain, "neutral", *guided]
    for name, condition in conditions.items():
        work, figures = condition["work"], condition["figures"]
        assert figures["output tokens"] == 6 * 24 and condition["failed_requests"] == 0
        # All requests fit into a batch, but may not have come at the same time.
        assert 23 <= work["decode_passes"] <= work["passes"] <= 6 * 24
        assert 0 < work["base_seconds"] < figures["end-to-end wall clock (s)"]
        assert figures["other (ms / pass)"] > 0 and figures["memory of the server's processes, peak (MiB)"] > 300
        assert figures["room in the server's cache (tokens)"] == slots
        of_request = figures["time to first token, median (ms)"]
        of_request += 23 * figures["time per output token of a request, median (ms)"]
        assert 0 < of_request <= 1.2e3 * figures["end-to-end wall clock (s)"]
        if name.startswith("k5"):
            assert work["rows"] == 6 * 24 and 0 < work["value_seconds"] < figures["end-to-end wall clock (s)"]
            assert condition["stages_ms"]["forward"]["mean"] > 0
        else:
            assert work["rows"] == work["value_seconds"] == 0 and condition["stages_ms"] == {}
    assert conditions["k5-stride1"]["work"]["guided_rows"] == 6 * 24
    assert "## Outputs of fixed length, k = 5, stride 1" in (out / "summary.md").read_text()
    return conditions
