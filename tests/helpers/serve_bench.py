"""A run of ``bench.serve`` against a real server, for the tests of each engine."""

import json

from bench import serve


def check_serve(url, engine, model, folder, monkeypatch):
    """Run against a server with the plugin, which also serves as the base server."""
    flags = f"--engine {engine} --model {model} --base-url {url} --guided-url {url}"
    flags += f" --out {folder} --k 1 5 --concurrency 2 --num-prompts 3 --max-tokens 6"
    monkeypatch.setattr("sys.argv", ["serve", *flags.split()])
    summary = folder / "summary.json"
    assert serve.main() == 0, summary.read_text()
    for row in json.loads(summary.read_text())["conditions"]:
        assert row["failed"] == 0 and row["tpot_ms"] > 0 and 0 < row["ttft_ms"] < 1e3 * row["seconds"], row
        if row["server"] == "guided":  # three requests in two rounds at most; a step may be counted during a later one
            assert row["guided_steps"] in range(4, 3 * 6 + 1) and row["step_ms"] > 0 and row["tpot_ratio"] > 0, row
