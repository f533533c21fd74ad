"""What a guided step costs the host, against the two-forward baseline: ``python -m bench.host [--json FILE]``.

On a CPU, for batches of several sizes, everything around the kernels:

- Python time: CPU time of a step in which nothing computes. Every operator of torch is called, and returns what it did
  in a recorded step; every Triton launch binds its arguments and finds its kernel, compiled for sm_90, and does not
  launch it. What a call of an operator costs this way is measured too: it stands where its dispatch would.
- Calls of operators that compute or copy, tensors that are views, and Triton launches.
- Tensors allocated, and their bytes.
- Bytecodes executed, and calls of functions of Python and C: the Python work, to the unit.

The model has as many layers as Qwen2.5-1.5B and is narrow, and so are the bytes, but the vocabulary is real. A request
has 512 cached tokens and 5 candidates. Copies between host and device are not there on a CPU, nor are the waits for the
device that reading back brings.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType, SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import launches
from bench.baselines.two_forward import TwoForwardStep
from bench.codegen import PARTS
from bench.harness import flags
from bench.harness.reporting import table
from bench.harness.storing import environment, write_json
from bench.launches import compiling_for, without_kernels
from bench.models import DIMENSIONS, VOCAB, make_config, make_model
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.value_model import ValueModel

NAME = "Qwen2.5-1.5B"
CACHED, TOP_K = 512, 5
ROWS = (1, 8, 64, 512)
TILT, TARGET = {"value_mode": "mul", "value_scale": 0.8}, {"target_length": 100, "constraint": "eq"}
# Steps are timed in rounds over the batch sizes, so that what else the machine does meanwhile tells on all of them.
ROUNDS, ROUND_SECONDS = 8, 0.15


@dataclass
class Subject:
    """An implementation in the middle of its requests' outputs.

    Attributes:
        step: one guided step of the batch.
        again: puts the host back to where it was before the step.
    """

    step: Callable[[], object]
    again: Callable[[], object] = lambda: None


@dataclass
class Cost:
    """What a step costs the host."""

    operators: int
    views: int
    launches: int
    allocations: int
    bytes: int
    bytecodes: int
    calls: int


# --- the implementations ---


def narrow_model(layers: int, vocab: int) -> ValueModel:
    """A value model of so many layers, with the heads of Qwen2.5-1.5B, as narrow as its kernels can be."""
    narrow = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    return make_model(make_config(NAME, vocab_size=vocab, num_layers=layers, **narrow), torch.bfloat16, "cpu")


def step_arguments(rows: int, vocab: int) -> tuple[torch.Tensor, StepBatch, Sampling]:
    """A step of ``rows`` requests, each with ``TOP_K`` candidates of its own."""
    numbers = torch.arange(rows)
    scores = torch.full((rows, vocab), -1e4)
    scores.scatter_(1, (TOP_K * numbers[:, None] + torch.arange(TOP_K)) % vocab, 0.0)
    batch = StepBatch(numbers % vocab, numbers, torch.full((rows,), CACHED + 1, dtype=torch.int32))
    ones, top_k = torch.ones(rows), torch.full((rows,), TOP_K, dtype=torch.int32)
    return scores, batch, Sampling(top_k, ones, 0.01 * ones, ones, is_logits=True, sample=True)


class NoGraphs(Graphs):
    """Graphs that cost nothing, and leave what the function gave at first."""

    def _capture(self, requests: int, nodes: int) -> tuple[SimpleNamespace, torch.Tensor]:
        return SimpleNamespace(replay=lambda: None), self._score(requests, nodes)


def guided_step(model: ValueModel, rows: int, vocab: int, *, graph: bool) -> Subject:
    """Ours, through the launchers. With ``graph``, the value model is a graph whose replay costs nothing."""
    slots = PagedSlots(rows, CACHED + 1)
    for row in range(rows):
        slots.extend(row, CACHED + 1)
    step = GuidedStep(model, slots, StepConfig(vocab_size=vocab, backend="triton"))
    for row in range(rows):
        step.add_request(row, parse_guidance(TILT), {0})
    none, zeros, numbers = torch.empty(0).long(), torch.zeros(rows).int(), torch.arange(rows)
    step.extend(none, none, numbers, zeros, zeros, zeros + CACHED)
    arguments = step_arguments(rows, vocab)
    if graph:
        step.config = replace(step.config, graphs=True)
        step.values._graphs = NoGraphs(step.values._score, model.device)
    return Subject(lambda: step.step(*arguments))


def two_forwards(model: ValueModel, rows: int, vocab: int, guidance: dict, *, outside: bool = False) -> Subject:
    """The baseline. With ``outside``, its forwards are left out, not what prepares them."""
    slots = EngineSlots(torch.empty(rows, CACHED + 1), rows * (CACHED + 1))
    step = TwoForwardStep(model, slots, StepConfig(vocab_size=vocab))
    forward, size = step.forward.hidden_states, model.config.hidden_size
    step.forward.hidden_states = lambda batch: torch.zeros(len(batch.token_ids), size, dtype=model.dtype)
    for row in range(rows):
        step.add_request(row, parse_guidance(guidance), {0})
    lens = torch.full((rows,), CACHED, dtype=torch.int32)
    numbers = torch.arange(rows)
    step.extend(torch.zeros(rows * CACHED, dtype=torch.int64), None, numbers, CACHED * numbers, lens, 0 * lens)
    if not outside:
        step.forward.hidden_states = forward
    arguments = step_arguments(rows, vocab)
    return Subject(lambda: step.step(*arguments), lambda: [step.retract(row, CACHED) for row in range(rows)])


# What is measured, by its name in the tables.
SUBJECTS: dict[str, Callable[[ValueModel, int, int], Subject]] = {
    "guided step": lambda *args: guided_step(*args, graph=False),
    "guided step, value model in a graph": lambda *args: guided_step(*args, graph=True),
    "two forwards": lambda *args: two_forwards(*args, TILT),
    "two forwards, outside the forwards": lambda *args: two_forwards(*args, TILT, outside=True),
    "two forwards, with a target": lambda *args: two_forwards(*args, TARGET),
}


# --- counting ---


@contextmanager
def one_norm() -> Iterator[None]:
    """In here ``F.rms_norm`` is one operator, as on a GPU; a CPU has seven in its place."""
    with mock.patch.object(F, "rms_norm", lambda x, *args, **kwargs: x.clone()):
        yield


class Operators(TorchDispatchMode):
    """Counts operators, and the memory that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.views = self.allocations = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.is_view:
            self.views += len(tree_leaves(result))  # unbind() and split() make many
            return result
        self.operators += 1
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.allocations += 1
                self.bytes += x.untyped_storage().nbytes()
        return result


@contextmanager
def hooked(setter: Callable, hook: Callable) -> Iterator[None]:
    """In here the interpreter calls ``hook``: ``sys.settrace`` or ``sys.setprofile``."""
    setter(hook)
    try:
        yield
    finally:
        setter(None)


def count(subject: Subject) -> Cost:
    """What a step costs, without what stands in for launches; call it in :func:`without_kernels`, :func:`one_norm`."""
    bytecodes = calls = 0

    def on_bytecode(frame: FrameType, event: str, argument: object) -> Callable | None:
        nonlocal bytecodes
        if frame.f_code.co_filename == launches.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecodes += event == "opcode"
        return on_bytecode

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename != launches.__file__

    subject.step()  # what is done once
    subject.again()
    with without_kernels() as names, Operators() as operators:
        subject.step()
    subject.again()
    gc.collect()
    gc.disable()  # what it finalises is not the step's
    for _ in range(2):  # Python 3.12 and 3.13 see no bytecodes of functions that they have not traced before
        bytecodes = 0
        with hooked(sys.settrace, on_bytecode):
            subject.step()
        subject.again()
    with hooked(sys.setprofile, on_call):
        subject.step()
    subject.again()
    gc.enable()
    counted = (operators.operators, operators.views, len(names), operators.allocations, operators.bytes)
    return Cost(*counted, bytecodes, calls)


def count_case(name: str, model: ValueModel, rows: int, vocab: int) -> Cost:
    """What a step of an implementation of ``SUBJECTS`` costs."""
    with one_norm(), without_kernels():
        return count(SUBJECTS[name](model, rows, vocab))


# --- timing ---


class Replay(TorchDispatchMode):
    """Under it operators run and are recorded the first time; from then on they return what they did, and do nothing.

    Views are made all the same: they compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[object, bool, object]] = []
        self.place: int | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.is_view:
            return function(*args, **(kwargs or {}))
        if self.place is None:
            result = function(*args, **(kwargs or {}))
            self.tape.append((function, function._schema.is_mutable, result))
            return result
        recorded, in_place, result = self.tape[self.place]
        if recorded is not function:
            raise RuntimeError(f"operator {self.place} of the step was {recorded}, is now {function}")
        self.place += 1
        return args[0] if in_place else result


def python_seconds(subjects: Sequence[Subject]) -> list[float]:
    """The least CPU seconds of a step of each, in which no operator computes."""
    replays, times = [Replay() for _ in subjects], [[] for _ in subjects]
    for subject, replay in zip(subjects, replays, strict=True):
        subject.step()  # what is done once
        subject.again()
        with replay:
            subject.step()
        subject.again()
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for subject, replay, seconds in zip(subjects, replays, times, strict=True):
            end = time.perf_counter() + ROUND_SECONDS
            while not seconds or time.perf_counter() < end:
                replay.place = 0
                with replay:
                    start = time.thread_time()
                    subject.step()
                    seconds.append(time.thread_time() - start)
                if replay.place != len(replay.tape):
                    raise RuntimeError(f"the step had {len(replay.tape)} operators, now has {replay.place}")
                subject.again()
    gc.enable()
    return [min(seconds) for seconds in times]


def operator_seconds() -> float:
    """CPU seconds of a call of an operator in :func:`python_seconds`."""
    x, calls = torch.zeros(1), 1000
    return python_seconds([Subject(lambda: [x.neg() for _ in range(calls)])])[0] / calls


# --- the command ---


def tables(results: list[dict]) -> str:
    """A row for each result, and how a step's cost grows with the batch."""
    costs = [("step", "rows", "Python ms", "operators", "views", "launches", "allocations", "MB", "bytecodes", "calls")]
    for r in results:
        counts = (f"{r[key]:,}" for key in ("operators", "views", "launches", "allocations"))
        calls = (f"{r[key]:,}" for key in ("bytecodes", "calls"))
        costs.append(
            (r["step"], r["rows"], f"{r['python_seconds'] * 1e3:.2f}", *counts, f"{r['bytes'] / 1e6:.1f}", *calls)
        )
    few, many = min(r["rows"] for r in results), max(r["rows"] for r in results)
    growth = [("step", "Python time", "operators", "allocations", "bytecodes", "calls")]
    for name in dict.fromkeys(r["step"] for r in results):
        small, large = (next(r for r in results if r["step"] == name and r["rows"] == rows) for rows in (few, many))
        keys = ("python_seconds", "operators", "allocations", "bytecodes", "calls")
        growth.append((name, *(f"{large[key] / small[key]:.2f}" for key in keys)))
    lines = [*table(costs[0], costs[1:]), f"Of {many} rows, as a multiple of {few}:", "", *table(growth[0], growth[1:])]
    return "\n".join(lines[:-1])


def page(about: dict, results: list[dict]) -> str:
    """The Markdown file."""
    operator = f"{about['operator_seconds'] * 1e6:.1f}"
    return f"""# What a guided step costs the host

- command: `{about["command"]}`, {about["date"]}
- torch {about["torch"]}, triton {about["triton"]}, Python {about["python"]}, on a CPU: {about["device"]}
- {about["layers"]} layers as {NAME}, but narrow; vocabulary {VOCAB:,}
- {CACHED} cached tokens and {TOP_K} candidates a request

Python time is the least CPU time of a step in which nothing computes: an operator returns what it did in a recorded
step, which takes {operator} us a call, and a Triton launch ends before the driver's part of it. Copies between host and
device and waits for the device are not in it, so what the baseline reads back costs it more than is seen here. Its
operators are those of eager PyTorch; the fork has kernels for norms, rotary embedding and activation. "Outside the
forwards" is what is left without them, as "in a graph" is of the guided step. "With a target" is guidance that the
baseline computes on the host. Views are not among the operators. The model is narrow, and so are the megabytes.

{tables(results)}
"""


def main() -> None:
    parser = flags.parser(__doc__, json="write the results to this file, and a page to the .md beside it")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="batch sizes (default: %(default)s)")
    args = parser.parse_args()
    if min(args.rows) < 1:
        parser.error(f"--rows must be at least 1, got {min(args.rows)}")
    torch.set_num_threads(1)
    model = narrow_model(DIMENSIONS[NAME][2], VOCAB)
    results = []
    about = environment("cpu") | {"layers": model.config.num_layers, "operator_seconds": operator_seconds()}
    for name, make in SUBJECTS.items():
        costs = [count_case(name, model, rows, VOCAB) for rows in args.rows]
        with one_norm(), compiling_for(PARTS["sm_90"].target):
            times = python_seconds([make(model, rows, VOCAB) for rows in args.rows])
        for rows, cost, seconds in zip(args.rows, costs, times, strict=True):
            results.append({"step": name, "rows": rows, "python_seconds": seconds, **asdict(cost)})
        print(f"{name}: done", file=sys.stderr, flush=True)
    print(tables(results))
    if args.json:
        write_json(args.json, {"environment": about, "results": results})
        args.json.with_suffix(".md").write_text(page(about, results))


if __name__ == "__main__":
    main()
