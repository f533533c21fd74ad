"""Everything to run where a GPU is at hand, in one command: ``python -m bench.gpu_suite --out bench/results/h200``.

First the tests, so that the compiled kernels are known to be right, then the benchmarks of the guided step and of its
operators. Output goes to a file each in the folder, benchmarks also as JSON with command, versions and the ceilings
measured in the same run. What fails or runs out of time does not keep the next from running; the exit status tells.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

OPERATORS = (
    "topk_candidates",
    "commit_winner",
    "ragged_layout",
    "ragged_linear",
    "rope_cache",
    "value_tree_attention",
    "value_head",
    "reweight_scatter",
    "sample_candidates",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--limit", type=int, default=150, help="seconds for each step (default: 150)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps = {
        f"test_{tests}": ["pytest", "-q", "-x", f"tests/test_{tests}.py"]
        for tests in (*OPERATORS, "value_model", "step")
    }
    for name in ("step", *OPERATORS):
        steps[name] = [f"bench.bench_{name}", "--json", str(args.out / f"{name}.json")]
    return max(run_step(name, command, args.out / f"{name}.txt", args.limit) for name, command in steps.items())


def run_step(name: str, command: list[str], log: Path, limit: int) -> int:
    """Run ``python -m command`` with its output in ``log``; 0 if it succeeded."""
    start = time.perf_counter()
    with log.open("w") as output:
        try:
            status = subprocess.run(
                [sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    print(f"{name}: exit status {status} after {time.perf_counter() - start:.0f} s, {log}", flush=True)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
