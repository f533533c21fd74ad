"""Host cost of a guided step by batch size: ``python -m bench.host [--rows 1 8 64 512]``.

Runs on a CPU without kernels: launches are intercepted, so the step computes almost nothing. As on a GPU, everything
after the first launch is replayed from a CUDA graph, which costs nothing here. The command counts

- trace events of Python (``sys.settrace``: calls, lines and returns), which a loop over requests multiplies;
- torch operators, except views and including allocations, and launches of Triton kernels from Python;
- launches of Triton kernels in the graph;
- the minimum CPU time of a step, without launches.

The guided step costs the same for every batch size (``tests/tools/test_host.py``); the published algorithm does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness import parser, table
from bench.launches import without_kernels
from bench.models import make_config, make_model, random_probe
from bench.step import Decode
from lenvm_kernels.step import GuidedStep, StepBatch
from lenvm_kernels.step.state import Graphs
from lenvm_kernels.types import Drafts
from lenvm_kernels.values import LengthProbe

VOCAB, CACHED, DRAFTS = 4096, 16, 4
STEPS = ("value model", "value model, drafts", "probe", "none", "two forwards")
NARROW = dict(hidden_size=64, intermediate_size=128, head_dim=16)
# Operators that launch nothing; scalar_tensor creates a tensor on the host.
NO_LAUNCH = ("detach", "_unsafe_view", "lift_fresh", "scalar_tensor")
REPEATS = 20


class Cost(NamedTuple):
    """Host cost of a step: trace events, torch operators, launches from Python, and launches in the graph."""

    events: int
    operators: int
    launches: int
    in_graph: int


class _ReplayedGraphs(Graphs):
    """Runs a function once per key. Later runs return the first result, as replays of a graph do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._results: dict[Hashable, Any] = {}

    @staticmethod
    def supports(device: torch.device) -> bool:
        return True

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        if key not in self._results:
            self._results[key] = function()
        return self._results[key]


class ReplayedStep(GuidedStep):
    """A step with launches after the first replayed."""

    graphs_class = _ReplayedGraphs


class _Operators(TorchDispatchMode):
    """Counts torch operators that launch a kernel on a GPU, and allocations, which are ``torch.zeros`` here."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.count += not function.is_view and "empty" not in name and name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def make_step(kind: str, rows: int, layers: int = 1) -> Callable[[], object]:
    """A step of kind ``STEPS`` for a batch of ``rows``. Create and call it within :func:`without_kernels`."""
    options = dict(cached=CACHED, vocab_size=VOCAB, step_class=ReplayedStep)
    if kind == "none":
        return Decode(None, rows, backend="triton", **options).take_step
    if kind == "probe":
        config, tensors = random_probe((1, 2), 2, 64, VOCAB)
        return Decode(LengthProbe(config, tensors, torch.zeros(VOCAB, 64)), rows, backend="triton", **options).take_step
    config = make_config("Qwen2.5-1.5B", vocab_size=VOCAB, num_layers=layers, **NARROW)
    model = make_model(config, torch.bfloat16, "cpu")
    if kind == "two forwards":
        return Decode(model, rows, two_forwards=True, **options)
    if kind == "value model":
        return Decode(model, rows, backend="triton", **options).take_step
    decode = Decode(model, rows, backend="triton", max_drafts=DRAFTS, **options)
    scores, tokens = decode.scores.repeat(1 + DRAFTS, 1), decode.tokens[:, None].repeat(1, 1 + DRAFTS)
    drafts = Drafts(tokens[:, 1:].contiguous(), torch.arange(DRAFTS, dtype=torch.int32).repeat(rows, 1) - 1)
    batch = StepBatch(tokens, decode.rows, decode.lengths, torch.ones_like(decode.lengths))

    def take_step() -> object:
        prepared = decode.step.prepare(scores, batch, drafts)
        return decode.step.step(prepared, decode.sampling, verify="same_draws")

    return take_step


def cost_of(kind: str, rows: int, layers: int = 1) -> Cost:
    """Counts of a step, which are exact and reproducible."""
    events = 0

    def trace(frame: object, event: str, argument: object) -> Callable:
        nonlocal events
        events += 1
        return trace

    with torch.no_grad(), without_kernels():
        step = make_step(kind, rows, layers)
        with without_kernels() as first:
            step()  # one-time work, and the launches of the graph
        with without_kernels() as launches, _Operators() as operators:
            step()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            step()
        finally:
            sys.settrace(before)
    return Cost(events, operators.count, len(launches), len(first) - len(launches))


def seconds_of(kind: str, rows: int) -> float:
    """Minimum CPU seconds of a step."""
    with without_kernels():
        step, seconds = make_step(kind, rows), []
        for _ in range(REPEATS):
            start = time.thread_time()
            step()
            seconds.append(time.thread_time() - start)
    return min(seconds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="batch sizes")
    args, lines = arguments.parse_args(), []
    torch.set_num_threads(1)
    for kind, rows in product(STEPS, args.rows):
        lines.append((kind, rows, f"{1e3 * seconds_of(kind, rows):.2f}", *cost_of(kind, rows)))
    columns = ("step", "rows", "CPU ms", "trace events", "torch operators", "launches", "in the graph")
    print(*table(columns, lines), sep="\n")


if __name__ == "__main__":
    main()
