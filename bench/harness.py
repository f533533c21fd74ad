"""Benchmarks of cases and their peers, timed by ``triton.testing``, with a table and a JSON file.

A case counts the bytes that it must move and the operations that it must do. Its floor is the larger of bytes / copy
bandwidth and operations / matmul rate, both measured in the same run on the same device. Times are medians:

- warm: ``do_bench_cudagraph``. The L2 cache holds data of the previous call.
- cold: ``do_bench`` of a CUDA graph of one call. The L2 cache is overwritten before each call.
- a run in :class:`Eager` is launched from Python (``do_bench``) and includes exposed host time.

On a CPU, ``torch.utils.benchmark`` times the reference on the quick shapes.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from triton.testing import do_bench, do_bench_cudagraph

Run = Callable[[], object]
Shape = Mapping[str, Any]  # axis -> value, as B, K, L, V, model, dtype

FLOATS = ("float32", "bfloat16", "float16")

QUANTILES = [0.5, 0.2, 0.8]
CPU_SECONDS = 0.1  # per measurement


@dataclass(frozen=True)
class Eager:
    """A run that includes host time or waits for the host, so it is not captured in a CUDA graph."""

    run: Run


@dataclass
class TimedCase:
    """One shape of one operator.

    Attributes:
        run: one call of this package's implementation.
        bytes, operations: minimum of any implementation.
        peers: label -> function that prepares a peer on the same inputs and returns its run. Preparation is not timed.
            A label in parentheses marks a peer that only computes a part.
    """

    run: Run | Eager
    bytes: int
    operations: int = 0
    peers: Mapping[str, Callable[[], Run | Eager]] = field(default_factory=dict)


@dataclass
class Benchmark:
    """The benchmark of an operator.

    Attributes:
        operator: name of the results.
        make_case: makes a case from the axes of a shape, on the default device.
        production: the most important shape.
        axes: axis -> values that replace the value of ``production``, one at a time.
        others: other shapes, as changes of ``production``.
        quick: shapes for ``--quick`` and for a CPU, as changes of ``production``.
    """

    operator: str
    make_case: Callable[..., TimedCase]
    production: Shape
    axes: Mapping[str, Sequence[object]] = field(default_factory=dict)
    others: Sequence[Shape] = ()
    quick: Sequence[Shape] = ({},)

    def shapes(self, *, quick: bool = False) -> list[dict[str, Any]]:
        """Production first, then each axis, then the others; without duplicates."""
        lines = [{axis: value} for axis, values in self.axes.items() for value in values]
        points = [{**self.production, **change} for change in (self.quick if quick else ({}, *lines, *self.others))]
        return [point for i, point in enumerate(points) if point not in points[:i]]

    def main(self, description: str | None, argv: Sequence[str] | None = None) -> None:
        """Run the command with arguments ``argv``. Exits with 1 if a case of this package failed."""
        arguments = parser(description)
        arguments.add_argument("--quick", action="store_true", help="only a few small shapes, as on a CPU")
        arguments.add_argument("--json", type=Path, help="also write the results to this file, after each case")
        args = arguments.parse_args(argv)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sys.exit(self.run(device, self.shapes(quick=args.quick or device == "cpu"), args.json))

    def run(self, device: str, shapes: Sequence[Shape], path: Path | None = None) -> int:
        """Measure the shapes, print a line per case, and write the file after each case; returns failed cases."""
        ceilings = measure_ceilings(device)
        results: dict[str, Any] = {"operator": self.operator, **environment(device), **ceilings, "cases": []}
        rates = f"{ceilings['bandwidth'] / 1e12:.3g} TB/s, {ceilings['matmul_rate'] / 1e12:.3g} Tflop/s"
        print(f"{self.operator} on {results['device']}, {rates}", *table(COLUMNS, ()), sep="\n", flush=True)
        for shape in shapes:
            results["cases"].append(entry := self.measure(device, shape, ceilings))
            if path:
                write_json(path, results)
            print(*table(COLUMNS, [row(entry)])[2:], sep="\n", flush=True)
        return sum("error" in entry for entry in results["cases"])

    def measure(self, device: str, shape: Shape, ceilings: Mapping[str, float]) -> dict[str, Any]:
        """Measure a case and its peers. An exception is recorded instead of the times."""
        torch.manual_seed(0)
        entry: dict[str, Any] = {"shape": dict(shape), "peers": {}}
        try:
            with torch.device(device):
                case = self.make_case(**shape)
            floor = max(case.bytes / ceilings["bandwidth"], case.operations / ceilings["matmul_rate"]) * 1e6
            entry |= {"bytes": case.bytes, "operations": case.operations, "floor": floor, **measure(case.run, device)}
        except Exception as error:
            traceback.print_exc(limit=-4)
            return entry | {"error": described(error)}
        for label, prepare in case.peers.items():
            try:
                entry["peers"][label] = measure(prepare(), device)
            except Exception as error:
                entry["peers"][label] = {"error": described(error)}
        return entry


def nbytes(*trees: object) -> int:
    """Bytes of all tensors in nested containers."""
    return sum(x.nbytes for x in tree_leaves(trees) if isinstance(x, torch.Tensor))


def described(error: Exception) -> str:
    """The type and message of an exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def measure(run: Run | Eager, device: str) -> dict[str, float]:
    """``warm`` (not for an :class:`Eager` run), ``cold`` (not on a CPU), and ``spread``, (80th - 20th) / median."""
    call = run.run if isinstance(run, Eager) else run
    if device == "cpu":
        found = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=CPU_SECONDS)
        return {"warm": found.median * 1e6, "spread": found.iqr / found.median}
    if isinstance(run, Eager):
        cold, low, high = do_bench(call, quantiles=QUANTILES)
        return {"cold": cold * 1e3, "spread": (high - low) / cold}
    warm, low, high = do_bench_cudagraph(call, quantiles=QUANTILES)
    cold = do_bench(captured(call).replay, return_mode="median")
    return {"warm": warm * 1e3, "cold": cold * 1e3, "spread": (high - low) / warm}


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, captured after a warm-up call."""
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure_ceilings(device: str) -> dict[str, float]:
    """``bandwidth``, bytes/s of a copy far larger than any cache; ``matmul_rate``, bf16 ops/s."""
    n, m = (2**28, 8192) if device == "cuda" else (2**22, 256)
    x, a = torch.randn(n, device=device), torch.randn(m, m, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    kernel, matmul = measure(lambda: torch.mul(x, 2.0, out=y), device), measure(lambda: a @ a, device)
    return {"bandwidth": 2 * x.nbytes / kernel["warm"] * 1e6, "matmul_rate": 2 * m**3 / matmul["warm"] * 1e6}


COLUMNS = ("case", "warm us", "cold us", "spread", "floor us", "of floor", "peers: time / ours")


def best(times: Mapping[str, float]) -> float:
    """The cold time, or the warm time without one."""
    return times.get("cold") or times["warm"]


def row(entry: Mapping[str, Any]) -> list[str]:
    """The cells of ``COLUMNS``."""
    name = " ".join(f"{axis} {value}" for axis, value in entry["shape"].items())  # B 64 K 8 V 151936
    if "error" in entry:
        return [name, entry["error"], *[""] * 5]
    found = {}
    for label, times in entry["peers"].items():
        kind = times["error"].split(":")[0] if "error" in times else f"{best(times) / best(entry):.2f}"
        found[label] = "absent" if kind == "ModuleNotFoundError" else kind
    numbers = [f"{entry[key]:.1f}" if key in entry else "" for key in ("warm", "cold")]
    numbers += [f"{entry['spread']:.1%}", f"{entry['floor']:.1f}", f"{entry['floor'] / best(entry):.0%}"]
    return [name, *numbers, ", ".join(f"{label} {text}" for label, text in found.items())]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table. None is an empty cell; floats have four significant digits."""

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(cell, line))} |" for line in lines]


def environment(device: str) -> dict[str, str]:
    """Command, device, versions and date."""
    spec = sys.modules["__main__"].__spec__
    return {
        "command": " ".join(["python", *(["-m", spec.name] if spec else sys.argv[:1]), *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: Path, data: object) -> None:
    """Replace the file atomically, so that readers find a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command's parser, with the module's docstring as its help."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
