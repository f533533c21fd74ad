"""The tests that compare bits, and the fuzzer, on machines that are not at hand: ``python -m tests.machines``.

Machines differ here in the kernels that OpenBLAS takes (numpy's matmul), in those that ATen takes (torch's), and in how
many threads share a matmul. The variables below choose them on any CPU that has the instructions. Last, a matmul whose
bits depend on a row's place has to be found by the same tests and by the fuzzer.

Two machines run side by side, for two cores.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

VALUES = {
    "OPENBLAS_CORETYPE": ("Haswell", "Zen", "SkylakeX", "Nehalem"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "OMP_NUM_THREADS": ("1", "2"),
}
# Every value, and every pair of the last two.
MACHINES = [
    dict(zip(VALUES, (core, *others), strict=True))
    for core, others in zip(VALUES["OPENBLAS_CORETYPE"], product(*list(VALUES.values())[1:]), strict=True)
]
NEEDS = {"Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}  # instructions of the CPU at hand
FILES = [
    str(file) for file in sorted(Path(__file__).parent.glob("test_*.py")) if "pytest.mark.bits" in file.read_text()
]
TESTS = ["pytest", "-q", "-m", "bits", "-p", "no:cacheprovider"]
FUZZ = ["lenvm_kernels.cli", "fuzz", "--cases"]
PLANTED = [
    [*TESTS, "-x", str(Path(__file__).parent / "test_value_head.py")],
    [*FUZZ, "3", "--ops", "value_head", "--only", "size=64"],
]


def run(arguments: list[str], variables: dict[str, str], seconds: list[float]) -> subprocess.CompletedProcess:
    start = time.monotonic()
    environment = os.environ | {"OPENBLAS_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1")} | variables
    with tempfile.TemporaryDirectory() as folder:
        corpus = ["--corpus", f"{folder}/corpus.jsonl"] if "fuzz" in arguments else []
        command = [sys.executable, "-m", *arguments, *corpus]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds.append(time.monotonic() - start)
    return done


def check(machine: dict[str, str]) -> bool:
    """Whether all is right there; prints a line, and what failed."""
    name, seconds = " ".join(machine.values()), []
    instructions = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    needed = NEEDS.get(machine["OPENBLAS_CORETYPE"], "")
    if needed not in instructions:
        print(f"{name}: skipped, this CPU has no {needed}", flush=True)
        return True
    for arguments in ([*TESTS, *FILES], [*FUZZ, "150"]):
        done = run(arguments, machine, seconds)
        if done.returncode:
            print(f"{name}: {' '.join(arguments)} failed\n{done.stdout[-20_000:]}", flush=True)
            return False
    print(f"{name}: tests {seconds[0]:.0f} s, fuzz {seconds[1]:.0f} s", flush=True)
    return True


def finds_the_planted_fault(arguments: list[str]) -> bool:
    done = run(["tests.helpers.planted_dot", *arguments], {}, [])
    if done.returncode != 1:
        print(f"planted fault: not found by {' '.join(arguments)}\n{done.stdout[-5_000:]}", flush=True)
        return False
    print(f"planted fault: found by {arguments[0]}", flush=True)
    return True


def main() -> int:
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        right = [*pool.map(check, MACHINES), *pool.map(finds_the_planted_fault, PLANTED)]
    print(f"{sum(right)} passed, {len(right) - sum(right)} failed")
    print(f"{time.monotonic() - start:.0f} s")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
