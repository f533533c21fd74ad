"""What each source of values costs a token: servers of all sources side by side, which decode the same in turn.

A server without the plugin and one with each source are up at once. In every round each of them decodes the same
prompts, all at once, with the same filters and outputs of fixed length; the others have nothing to do meanwhile. A
ratio is of two times of the same round, so that a machine whose speed drifts does not move it. The first round warms up
and does not count.

The folder gets ``rounds.jsonl`` (a line a server and round), the servers' logs, ``sources.md`` and ``sources.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.reporting import text_table
from bench.harness.storing import write_json
from bench.study.serve import ask_all
from bench.study.served import Condition, Load
from bench.study.server import Server, Setup, reserved_port, running

PLAIN = "plain"


def compare(
    setup: Setup,
    sources: Mapping[str, str],
    load: Load,
    top_ks: Sequence[int],
    rounds: int,
    guidance: dict[str, Any],
    out: Path,
    environment: dict[str, Any],
) -> int:
    """Measure the sources beside no plugin.

    Args:
        setup: of all servers; its value model is not used.
        sources: what ``LENVM_VALUE_MODEL`` is, by the name in the tables.
        load: what a server decodes in a round.
        top_ks: limits on candidates, of the plain server as of the others.
        rounds: that count.
        guidance: ``custom_params`` of guided requests.
        out: the folder; made if it is not there. What an earlier comparison left there is replaced.
        environment: goes into the summary.

    Returns:
        The exit status: 1 if requests failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[tuple[int, str], list[float]] = {}
    failed: list[str] = []
    with ExitStack() as stack, (out / "rounds.jsonl").open("w") as file:
        servers: dict[str, Server] = {}
        for name, source in {PLAIN: None, **sources}.items():
            of_source, port = replace(setup, value_model=source), stack.enter_context(reserved_port())
            servers[name] = stack.enter_context(running(of_source, out / f"{name}.log", port))
            if source is not None:
                servers[name].check_plugin()
            print(f"{name}: up", flush=True)
        environment["engine"] = servers[PLAIN].version()
        for number in range(rounds + 1):
            for k in top_ks:
                for name, server in servers.items():
                    params = None if name == PLAIN else guidance
                    took, answers = ask_all(server, load, Condition(name, "fixed", k, custom_params=params))
                    server.forget()
                    errors = [f"{name}: {answer.error}" for answer in answers if answer.error is not None]
                    failed += errors
                    tokens = sum(answer.output_tokens for answer in answers)
                    line = dict(round=number, source=name, top_k=k, seconds=took, tokens=tokens, failed=len(errors))
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(f"round {number}, k = {k}, {name}: {tokens / took:.1f} tokens/s", flush=True)
                    if number:
                        seconds.setdefault((k, name), []).append(took)
        for name, server in servers.items():
            if steps := int(server.counters().total("lenvm:fallbacks_total")):
                failed.append(f"{name}: guidance failed in {steps} steps, see the server's log")
    rows = []
    for (k, name), times in seconds.items():
        ratios = [took / plain for took, plain in zip(times, seconds[k, PLAIN], strict=True)]
        per_token = median(times) / (len(load.prompts) * load.samples * load.max_tokens) * 1e3
        rows.append((k, name, per_token, median(ratios), min(ratios), max(ratios)))
    columns = ("k", "source", "ms / token", "over plain", "least", "most")
    measured = text_table(columns, rows)
    sections = [
        "# The time of a token by the source of values",
        "\n".join(f"- {name}: {value}" for name, value in environment.items()),
        f"Prompts at once: {len(load.prompts)}, samples of each: {load.samples}, tokens of a sample: {load.max_tokens}."
        f" `plain` is without the plugin, with the same filters. Medians of {rounds} rounds, and the least and the"
        " most of the ratio in one.",
        measured,
    ]
    if failed:
        sections.append("Failed:\n\n" + "\n".join(f"- {error}" for error in failed))
    (out / "sources.md").write_text("\n\n".join(sections) + "\n")
    of_rows = [dict(zip(columns, row, strict=True)) for row in rows]
    write_json(out / "sources.json", {"environment": environment, "sources": of_rows, "failed": failed})
    print(measured)
    return int(bool(failed))
