"""What every benchmark shares: command line, timing, measured ceilings, and the table printed at the end.

A benchmark counts the bytes it must move and the operations it must do; the floor is the larger of bytes / copy
bandwidth and operations / matmul rate, both measured in the same run on the same device.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton


@dataclass
class Case:
    """One thing to time. ``bytes`` and ``operations`` are the least any implementation must move and do."""

    name: str
    run: Callable[[], object]
    bytes: int
    operations: int = 0


@dataclass
class Ceilings:
    """What the device reaches: copy bandwidth in bytes/s (read plus write), matmul rate in operations/s."""

    copy_bandwidth: float
    matmul_rate: float


def parse_args(description: str | None) -> argparse.Namespace:
    """The options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda times the Triton kernels, cpu the PyTorch reference (default: cuda if there is one)",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="only the first, smallest cases")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU; use --device cpu to time the reference")
    args.dtype = getattr(torch, args.dtype)
    return args


def median_seconds(run: Callable[[], object], device: str) -> float:
    """Median seconds of one call: CUDA-graph replays on a GPU (no launch gaps), wall time on a CPU."""
    if device == "cuda":
        return triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1e-3
    run()
    times, deadline = [], time.perf_counter() + 1.0
    while len(times) < 3 or (len(times) < 50 and time.perf_counter() < deadline):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """Measure copy bandwidth and matmul rate on random data far larger than any cache."""
    n = 2**30 if device == "cuda" else 2**26
    source = torch.empty(n, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    bandwidth = 2 * n / median_seconds(lambda: target.copy_(source), device)
    m = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(m, m, dtype=dtype, device=device) for _ in range(2))
    rate = 2 * m**3 / median_seconds(lambda: a @ b, device)
    return Ceilings(bandwidth, rate)


def run_cases(operator: str, cases: list[Case], args: argparse.Namespace) -> None:
    """Time the cases and print one row each: time, bytes, operations, floor, share of the floor."""
    ceilings = measure_ceilings(args.device, args.dtype)
    environment = {
        "command": " ".join([Path(sys.executable).name, "-m", f"bench.bench_{operator}", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "backend": "triton" if args.device == "cuda" else "reference",
        **asdict(ceilings),
    }
    print(f"{operator} on {environment['device']} ({environment['backend']}), {environment['date']}")
    print(f"copy {ceilings.copy_bandwidth / 1e9:.1f} GB/s, matmul {ceilings.matmul_rate / 1e12:.3f} Tops/s")
    print(f"{'case':<44}{'time us':>12}{'MB':>10}{'Gops':>10}{'floor us':>12}{'of floor':>10}")
    results = []
    for case in cases:
        seconds = median_seconds(case.run, args.device)
        floor = max(case.bytes / ceilings.copy_bandwidth, case.operations / ceilings.matmul_rate)
        results.append(
            {"case": case.name, "seconds": seconds, "bytes": case.bytes, "operations": case.operations, "floor": floor}
        )
        print(
            f"{case.name:<44}{seconds * 1e6:>12.1f}{case.bytes / 1e6:>10.2f}{case.operations / 1e9:>10.3f}"
            f"{floor * 1e6:>12.1f}{floor / seconds:>10.1%}",
            flush=True,
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")
