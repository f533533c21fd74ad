"""GPU tests and benchmarks of this package: ``python -m bench.gpu_suite [--out DIR] [--only PART ...]``.

- ``tests``: operators with compiled kernels against their references, and bitwise identity across batches;
- each operator of ``bench/ops`` and ``step``, compared with their peers (:mod:`bench.harness`);
- ``profile``: launches and time of every kernel of the step.

Each part is a process with a time limit and a log in DIR. A part that fails or times out does not affect the others; a
benchmark's JSON file has the cases before that. Needs no network. On a CPU the parts run the references of a few cases.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.harness import COLUMNS, parser, row, table
from bench.ops import operators

# Time limits in seconds.
SECONDS = {"tests": 150, "step": 100, "profile": 40, "value_tree_attention": 50, "topk_candidates": 35}
SECONDS |= {"ragged_linear": 40, "value_head": 25} | {name: 15 for name in operators() if name not in SECONDS}
TESTED = ["tests/ops", "tests/values/test_value_model.py", "tests/step/test_step.py"]


def command(part: str, out: Path) -> list[str]:
    """The command of a part."""
    if part == "tests":
        workers = ["-n", str(min(12, os.cpu_count() or 2)), "--dist", "worksteal"]
        workers = workers if importlib.util.find_spec("xdist") else []
        return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *workers, *TESTED]
    if part == "profile":
        return [sys.executable, "-m", "bench.step", "--profile"]
    benchmark = ["bench.step"] if part == "step" else ["bench.ops", part]
    return [sys.executable, "-m", *benchmark, "--json", str(out / f"{part}.json")]


def run(part: str, out: Path) -> str:
    """Run a part and return its outcome as text."""
    with (out / f"{part}.txt").open("w") as log:
        variables = {"HYPOTHESIS_PROFILE": "gpu", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        options = dict(stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables, timeout=SECONDS[part])
        try:
            status = subprocess.run(command(part, out), check=False, **options).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {SECONDS[part]} s"
    return "done" if status == 0 else f"failed with exit status {status}"


def summary(out: Path, outcomes: dict[str, str]) -> list[str]:
    """The lines of summary.md: outcome and last line of each part, and the tables of the benchmarks."""
    last = {part: ((out / f"{part}.txt").read_text().strip().splitlines() or [""])[-1] for part in outcomes}
    rows = [(part, outcome, re.sub(r"[|=]+", " ", last[part])[:120]) for part, outcome in outcomes.items()]
    lines = table(("part", "outcome", "last line"), rows)
    for part in outcomes:
        if (file := out / f"{part}.json").exists():
            found = json.loads(file.read_text())
            about = f"`{found['command']}`, {found['device']}, torch {found['torch']}, triton {found['triton']}"
            lines += ["", f"## {part}", "", f"{about}, {found['date']}", ""]
            lines += table(COLUMNS, [row(entry) for entry in found["cases"]])
    if "profile" in outcomes:
        lines += ["", "## profile", "", "```", (out / "profile.txt").read_text().strip(), "```"]
    return lines


def main() -> int:
    arguments = parser(__doc__)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    folder = Path(__file__).parent / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower()) / time.strftime("%Y-%m-%d")
    arguments.add_argument("--out", type=Path, default=folder, help="folder of the results (default: %(default)s)")
    arguments.add_argument("--only", nargs="+", choices=SECONDS, metavar="PART", help=", ".join(SECONDS))
    args, outcomes = arguments.parse_args(), {}
    args.out.mkdir(parents=True, exist_ok=True)
    for part in SECONDS:
        if args.only is None or part in args.only:
            start = time.monotonic()
            outcomes[part] = run(part, args.out)
            (args.out / "summary.md").write_text("\n".join(summary(args.out, outcomes)) + "\n")
            print(f"{part}: {outcomes[part]}, {time.monotonic() - start:.0f} s", flush=True)
    return int(any(outcome != "done" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
