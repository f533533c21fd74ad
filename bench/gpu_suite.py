"""GPU tests and benchmarks: ``python -m bench.gpu_suite [--out DIR] [--only PART ...] [--without PART ...]``.

- ``tests``: operators and steps with compiled kernels against their references, bitwise identity across batches, and
  CUDA graphs;
- ``step``, then each operator of ``bench/ops``: compared with their peers (:mod:`bench.harness`);
- ``profile``: launches and time of every kernel of the step;
- ``vllm-7b``, ``vllm-0.5b``: the plugin in vLLM's engine, for base models of both sizes (:mod:`bench.serve`), if vLLM
  is installed; :file:`bench/gpu_vllm.sh` brings it to a machine without a network.

Each part is a process with a time limit and a log in DIR. A part that fails or times out does not affect the others; a
benchmark's JSON file has the cases before that. After each part, ``summary.md`` and ``summary.json`` are written. Needs
no network. On a CPU the parts run the references of a few cases.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import serve
from bench.harness import COLUMNS, environment, parser, row, table, write_json
from bench.models import RANDOM_PROBE
from bench.ops import operators

# Time limits in seconds, the most doubtful parts first.
HAS_VLLM = importlib.util.find_spec("vllm") is not None
SECONDS = {"tests": 150, "step": 140, "profile": 40} | ({"vllm-7b": 270, "vllm-0.5b": 150} if HAS_VLLM else {})
SECONDS |= {"value_tree_attention": 50, "topk_candidates": 35, "ragged_linear": 40, "value_head": 25}
SECONDS |= {name: 15 for name in operators() if name not in SECONDS}
LOG_LINES = 40  # of a part without other results, in summary.json
# The first two have tests of CUDA graphs, which have not run on a GPU.
TESTED = ["tests/step/test_step_device.py", "tests/step/test_warm_up.py", "tests/ops", "tests/values/test_probe.py"]
TESTED += ["tests/values/test_value_model.py"]
VLLM = {
    "vllm-7b": ("Qwen2.5-7B", "none", RANDOM_PROBE, "Qwen2.5-1.5B"),
    "vllm-0.5b": ("Qwen2.5-0.5B", "none", "Qwen2.5-0.5B"),
}


def command(part: str, out: Path) -> list[str]:
    """The command of a part."""
    if part == "tests":
        workers = ["-n", str(min(12, os.cpu_count() or 2)), "--dist", "worksteal"]
        workers = workers if importlib.util.find_spec("xdist") else []
        return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *workers, *TESTED]
    if part == "profile":
        return [sys.executable, "-m", "bench.step", "--profile"]
    if part in VLLM:
        return vllm_command(*VLLM[part], out=out / part, on_gpu=torch.cuda.is_available())
    benchmark = ["bench.step"] if part == "step" else ["bench.ops", part]
    return [sys.executable, "-m", *benchmark, "--json", str(out / f"{part}.json")]


def vllm_command(model: str, *values: str, out: Path, on_gpu: bool) -> list[str]:
    """The command that measures the plugin in vLLM, on a CPU with the smallest models and few tokens."""
    concurrency = [1, 8, 64, 256] if on_gpu else [2]
    sizes, options = [], ["--max-model-len", "1024", "--max-num-seqs", str(concurrency[-1])]
    graphs = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=concurrency)
    options += ["--compilation-config", json.dumps(graphs)] if on_gpu else ["--enforce-eager"]
    if not on_gpu:
        small = "SmolLM2-135M"
        model, values = small, tuple(small if value.startswith("Qwen") else value for value in values)
        sizes = ["--prompt-tokens", "8", "--max-tokens", "2"]
    command = [sys.executable, "-m", "bench.serve", "--engine", "vllm", "--in-process", "--model", model]
    command += ["--value-model", *dict.fromkeys(values), "--concurrency", *map(str, concurrency), *sizes]
    return [*command, "--out", str(out), "--", *options]


def run(part: str, out: Path) -> str:
    """Run a part and return its outcome as text."""
    variables = {"HYPOTHESIS_PROFILE": "gpu", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with serve.started(command(part, out), os.environ | variables, out / f"{part}.txt") as process:
        try:
            status = process.wait(SECONDS[part])
        except subprocess.TimeoutExpired:
            return f"ended after {SECONDS[part]} s"
    return "done" if status == 0 else f"failed with exit status {status}"


def results(part: str, out: Path) -> dict[str, Any]:
    """What a benchmark has written so far, or else the last lines of a part's log."""
    for file in (out / f"{part}.json", out / part / "summary.json"):
        if file.exists():
            return json.loads(file.read_text())
    return {"log": (out / f"{part}.txt").read_text().splitlines()[-LOG_LINES:]}


def summary(out: Path, outcomes: dict[str, str]) -> list[str]:
    """The lines of summary.md: outcome and last line of each part, and the tables of the benchmarks."""
    last = {part: ((out / f"{part}.txt").read_text().strip().splitlines() or [""])[-1] for part in outcomes}
    rows = [(part, outcome, re.sub(r"[|=]+", " ", last[part])[:120]) for part, outcome in outcomes.items()]
    lines = table(("part", "outcome", "last line"), rows)
    for part in outcomes:
        found = results(part, out)
        if "cases" in found:
            about = f"torch {found['torch']}, triton {found['triton']}"
            cells = table(COLUMNS, [row(entry) for entry in found["cases"]])
        elif "conditions" in found:
            about = found["engine"]
            cells = table(serve.COLUMNS, [[line.get(name) for name in serve.COLUMNS] for line in found["conditions"]])
        else:
            continue
        lines += [
            "",
            f"## {part}",
            "",
            f"`{found['command']}`, {found['device']}, {about}, {found['date']}",
            "",
            *cells,
        ]
    if "profile" in outcomes:
        lines += ["", "## profile", "", "```", (out / "profile.txt").read_text().strip(), "```"]
    return lines


def main() -> int:
    arguments = parser(__doc__)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    folder = Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower()) / time.strftime("%Y-%m-%d")
    arguments.add_argument("--out", type=Path, default=folder, help="folder of the results (default: %(default)s)")
    arguments.add_argument(
        "--only", nargs="+", choices=SECONDS, default=SECONDS, metavar="PART", help=", ".join(SECONDS)
    )
    arguments.add_argument(
        "--without", nargs="+", choices=SECONDS, default=(), metavar="PART", help="parts to leave out"
    )
    args, outcomes, seconds = arguments.parse_args(), {}, {}
    args.out.mkdir(parents=True, exist_ok=True)
    about = environment("cuda" if torch.cuda.is_available() else "cpu")
    for part in SECONDS:
        if part in args.only and part not in args.without:
            start = time.monotonic()
            outcomes[part] = run(part, args.out)
            seconds[part] = round(time.monotonic() - start)
            parts = {
                name: dict(outcome=outcomes[name], seconds=seconds[name], **results(name, args.out)) for name in seconds
            }
            write_json(args.out / "summary.json", about | {"parts": parts})
            (args.out / "summary.md").write_text("\n".join(summary(args.out, outcomes)) + "\n")
            print(f"{part}: {outcomes[part]}, {seconds[part]} s", flush=True)
    return int(any(outcome != "done" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
