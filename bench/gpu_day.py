"""Measurements for a short loan of a GPU: ceilings, gaps, the steps without a value model, untried tests.

    python -m bench.gpu_day --out DIR [--parts 0 1 2 3] [--seconds 240] [--rehearse]

- part 0: ceilings by kernels of this file: reads and copies of 1 GiB, reads from L2, a matmul, launches in a graph.
- part 1: the value model's step at B 1 and 64, each kernel's duration and the gap before it; again without PDL.
- part 2: the step with a trunk and without a value model, in one CUDA graph and from Python.
- part 3: tests that never passed on a GPU, and the times of ``limit_span``.

Each part is a process with a time limit. The tests run first; beside them processes compile what the other parts need.
Then one part after the other measures, and rewrites ``part-NAME.json`` after each measurement. ``gpu_day.json`` gathers
these files after each part. All times are in microseconds. The package must be installed, as for
:mod:`bench.gpu_suite`. ``--rehearse`` runs everything on a CPU with tiny shapes; its times mean nothing.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from bench.gpu_suite import ONE_THREAD, Job, Suite, python
from bench.harness import flags
from bench.harness.measuring import (
    Uncaptured,
    _empty_kernel,
    _replay,
    _warm_samples,
    is_device_broken,
    measure,
)
from bench.harness.storing import environment, write_json
from bench.models import DIMENSIONS, TRUNK_LAYERS, VOCAB, make_config, make_model, random_trunk
from bench.ops import limit_span
from bench.outcomes import summarize
from bench.step import CACHED, TOP_K, Decode, candidate_counts
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops._device import wait_for_inputs
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.value_model import Trunk

TESTS = [f"tests/test_{name}.py" for name in ("candidate_values", "trunk", "ragged_linear", "limit_span")]
# Seconds that each process may take; "tests" covers the processes that compile beside the tests, too.
LIMITS = {"tests": 90, "0": 30, "1": 45, "1-no-pdl": 35, "2": 75, "3": 25}
SHOWN = 2000  # characters of a part's log that the command prints
SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,pstate"  # of nvidia-smi
LAUNCHES = 200  # kernels in the graphs that measure launches

Run = Callable[[], object]


class Day:
    """A part's shapes, device and results.

    Args:
        file: where the results go; None while a part only compiles its kernels.
        rehearse: tiny shapes on a CPU.
    """

    def __init__(self, file: Path | None, rehearse: bool) -> None:
        self.file, self.rehearse, self.device = file, rehearse, "cpu" if rehearse else "cuda"
        self.found: dict[str, object] = {}

    def pick(self, real, tiny):
        """A shape, or the one of a rehearsal."""
        return tiny if self.rehearse else real

    def add(self, name: str, value: dict) -> None:
        """Keep a result, write the file, and print a line."""
        self.found[name] = value
        if self.file is not None:
            write_json(self.file, self.found)
            shown = {key: x for key, x in value.items() if key != "mode" and not isinstance(x, dict | list)}
            print(f"{name}: " + ", ".join(f"{key} {x}" for key, x in shown.items()), flush=True)

    @contextmanager
    def keep_going(self, name: str) -> Iterator[None]:
        """Record an error as the result, unless the device is broken."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(f"{name}, error", {"error": f"{type(error).__name__}: {error}"[:500]})
            if not self.rehearse and is_device_broken():
                raise

    def time(self, run: Run, seconds: float = 0.2) -> dict[str, float]:
        """Microseconds of a call in a CUDA graph, with the L2 cache warm and cold; without a file only call it."""
        if self.file is None:
            run()
            self.wait()
            return {}
        times = measure(run, self.device, 1e-3 if self.rehearse else seconds)
        cold = {} if times.cold is None else {"cold": round(times.cold * 1e6, 3)}
        return {"warm": round(times.warm * 1e6, 3), **cold, "spread": round(times.spread, 3), "mode": times.mode}

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    @property
    def measures(self) -> bool:
        """Whether graphs and profiles are wanted: on a GPU, and not while a part only compiles."""
        return self.file is not None and self.device == "cuda"


def card() -> dict[str, str]:
    """The card's state, which nvidia-smi reads and nothing changes."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    try:
        return {SMI: subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()}
    except (OSError, subprocess.SubprocessError) as error:
        return {SMI: str(error)}


def replayed(run: Run, times: int = 200) -> float:
    """Microseconds from one replay of a graph of one call to the next."""
    return round(statistics.median(_warm_samples(_replay(run, 1)[0], times)) * 1e6, 2)


def profile(run: Run, folder: Path, replays: int = 4) -> dict:
    """Profile replays of a graph of one call by CUPTI, see :func:`kernels_of`."""
    replay, trace = _replay(run, 1)[0], folder / f"trace-{os.getpid()}.json"
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    return kernels_of(events, replays)


def kernels_of(events: list[dict], replays: int) -> dict:
    """Medians over the replays in a trace, without the first replay.

    Returns:
        ``span``, first start to last end; ``busy`` and ``gaps``, sums of durations and gaps; ``kernels``, by name and
        grid the count, the median duration and gap, and the durations' sum; ``sequence``, name, duration and gap in
        order. A gap below 0 is an overlap with the kernel before. ``error`` instead if CUPTI reports no kernel.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    if not events:
        return {"error": f"CUPTI reported no kernel of {replays} replays"}
    if len(events) % replays:  # some got lost: all are one round
        print(f"CUPTI reported {len(events)} kernels of {replays} replays", flush=True)
        size, rounds = len(events), [events]
    else:
        size = len(events) // replays
        rounds = [events[start : start + size] for start in range(size if replays > 1 else 0, len(events), size)]
    sequence = []
    for place, column in enumerate(zip(*rounds, strict=True)):
        before = [of_round[place - 1] for of_round in rounds] if place else column
        gaps = [now["ts"] - last["ts"] - last["dur"] for last, now in zip(before, column, strict=True)]
        duration = statistics.median(event["dur"] for event in column)
        name = f"{column[0]['name'][:60]} {column[0].get('args', {}).get('grid', '')}"
        sequence.append((name, round(duration, 3), round(statistics.median(gaps), 3) if place else 0.0))
    by_name = defaultdict(list)
    for name, *times in sequence:
        by_name[name].append(times)
    kernels = {}
    for name, times in sorted(by_name.items(), key=lambda item: -sum(duration for duration, _ in item[1])):
        duration, gap = (round(statistics.median(column), 3) for column in zip(*times, strict=True))
        kernels[name] = dict(count=len(times), duration=duration, gap=gap, sum=round(sum(d for d, _ in times), 2))
    span = statistics.median(max(event["ts"] + event["dur"] for event in r) - r[0]["ts"] for r in rounds)
    busy, gaps = (round(sum(column), 2) for column in list(zip(*sequence, strict=True))[1:])
    return dict(span=round(span, 2), busy=busy, gaps=gaps, launches=size, kernels=kernels, sequence=sequence)


# --- part 0 ---


@triton.jit
def _read_kernel(x_ptr, out_ptr, blocks, REPEATS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.program_id(0), blocks * REPEATS, tl.num_programs(0)):
        offsets = (i % blocks) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offsets, cache_modifier=".cg")  # not from L1
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def _chain_kernel(x_ptr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    offsets = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1.0)


def ceilings(day: Day) -> None:
    """Measure the ceilings (part 0)."""
    device, block, n, buffers = day.device, 4096, day.pick(2**28, 2**15), 3
    many = day.pick(132 * 8, 2)
    x = [torch.randn(n, device=device) for _ in range(buffers)]
    y, sums, turns = torch.empty_like(x[0]), torch.empty(n // block, device=device), itertools.cycle(x)

    def bandwidth(name: str, run: Run, moved: int) -> None:
        with day.keep_going(name):
            times = day.time(run)
            rate = {f"TB/s {key}": round(moved / times[key] * 1e-6, 3) for key in ("warm", "cold") if key in times}
            day.add(name, times | rate)

    for programs in (many, n // block):
        read = _read_kernel[(programs,)]
        run = partial(lambda read: read(next(turns), sums, n // block, 1, block, num_warps=8), read)
        bandwidth(f"read 1 GiB, {programs} programs", run, 4 * n)
    copy = _copy_kernel[(n // block,)]
    bandwidth("Triton copy of 1 GiB", lambda: copy(next(turns), y, block, num_warps=8), 8 * n)
    bandwidth("copy_ of 1 GiB in a graph", lambda: y.copy_(next(turns)), 8 * n)
    bandwidth("torch.mul of 1 GiB in a graph", lambda: torch.mul(next(turns), 2.0, out=y), 8 * n)
    bandwidth("copy_ of 1 GiB without a graph", Uncaptured(lambda: y.copy_(next(turns))), 8 * n)
    for megabytes in (20, 40):
        blocks, repeats = day.pick(megabytes * 10**6 // (4 * block), 3), day.pick(100, 2)
        read = _read_kernel[(many,)]
        run = partial(lambda read, b, r: read(x[0], sums, b, r, block, num_warps=8), read, blocks, repeats)
        bandwidth(f"read {megabytes} MB again and again", run, 4 * block * blocks * repeats)

    with day.keep_going("matmul"):
        m = day.pick(8192, 64)
        a, b = (torch.randn(m, m, dtype=torch.bfloat16, device=device) for _ in range(2))
        times = day.time(lambda: a @ b)
        day.add("bf16 matmul of 8192", times | ({"Tflop/s": round(2 * m**3 / times["warm"] * 1e-6)} if times else {}))
    day.add("card after the matmul", card())

    ways = {"empty": partial(lambda: _empty_kernel[(1,)]())}
    for programs, overlaps in itertools.product((1, 132), (False, True)):
        options = dict(OVERLAPS=True, launch_pdl=True) if overlaps and device == "cuda" else dict(OVERLAPS=False)
        launch = partial(_chain_kernel[(programs,)], x[0], num_warps=4, **options)
        ways[f"read and write, {programs} programs{', PDL' * overlaps}"] = launch
    for name, launch in ways.items():
        with day.keep_going(name):
            count = day.pick(LAUNCHES, 2)
            times = day.time(partial(lambda launch, count: [launch() for _ in range(count)], launch, count))
            alone = {"graph of one": replayed(launch)} if day.measures else {}
            each = {"each": round(times["warm"] / count, 3)} if times else {}
            day.add(f"{LAUNCHES} launches: {name}", times | each | alone)


# --- part 1 ---


def model_step(day: Day) -> None:
    """Measure the value model's step (part 1), with programmatic dependent launch unless LENVM_PDL is 0."""
    name, vocab = day.pick(("Qwen2.5-1.5B", VOCAB), ("SmolLM2-135M", 4096))
    config = make_config(name, vocab_size=vocab, **day.pick({}, {"num_layers": 1}))
    model = make_model(config, day.pick(torch.bfloat16, torch.float32), day.device)
    steps = {}
    for requests in day.pick((64, 1), (2, 1)):
        options = dict(cached=day.pick(CACHED, 8), vocab_size=vocab)
        steps[requests] = step = Decode(model, candidate_counts(requests, "full"), **options)
        step.check()
        with day.keep_going(f"B {requests}"):
            times = day.time(step, 0.6)
            day.add(f"step, B {requests}", times | ({"replay": replayed(step, 50)} if day.measures else {}))
    day.add("card after the steps", card())
    profiles(day, {f"B {requests}": step for requests, step in steps.items()})


def profiles(day: Day, runs: dict[str, Run]) -> None:
    """Profile runs, after one that only starts CUPTI. CUPTI then stays, and may slow what follows."""
    if not day.measures:
        return
    runs = {"nothing": partial(torch.zeros, 1, device=day.device)} | runs
    for name, run in runs.items():
        with day.keep_going(f"profile, {name}"):
            found = profile(run, day.file.parent)
            day.add(f"profile, {name}", found)
            for kernel, of in list(found.get("kernels", {}).items())[:10]:
                print(f"  {of['count']} x {of['duration']:.2f}, gap {of['gap']:.2f}: {kernel}", flush=True)


# --- part 2 ---


class Batch:
    """A guided step of one batch that stays as it is, given tensors as an engine gives them.

    Args:
        source: the trunk. If None, there is no value model.
        requests: number of requests in the batch.
        guidance: guidance that every request asks for.
        dtype: dtype of the logits.
        breaks: whether it is known which tokens end lines and sentences, as engines tell it.
    """

    def __init__(
        self, source: Trunk | None, requests: int, device: str, vocab: int, guidance: dict, dtype: str, breaks: bool
    ) -> None:
        i32 = dict(dtype=torch.int32, device=device)
        slots = EngineSlots(torch.zeros(requests, 1, **i32), requests)
        text_breaks = torch.zeros(vocab, dtype=torch.int8, device=device) if breaks else None
        self.step = GuidedStep(source, slots, StepConfig(vocab_size=vocab, text_breaks=text_breaks))
        for row in range(requests):
            self.step.add_request(row, parse_guidance(guidance), {0})
        rows = torch.arange(requests, device=device)
        first = 1 + 1000 * rows % (vocab - TOP_K - 1)
        scores = torch.randn(requests, vocab, device=device)
        scores.scatter_(1, first[:, None] + torch.arange(TOP_K, device=device), 30.0)
        self.scores = scores.to(getattr(torch, dtype))
        states = None
        if source is not None:
            states = torch.randn(requests, source.config.state_size, dtype=source.dtype, device=device)
        self.batch = StepBatch(first, rows, torch.full((requests,), CACHED + 1, **i32), states=states)
        ones = torch.ones(requests, device=device)
        self.sampling = Sampling(torch.full((requests,), TOP_K, **i32), ones, 0.01 * ones, is_logits=True, sample=True)
        self.step.flush()

    def __call__(self) -> object:
        return self.step.step(self.scores, self.batch, self.sampling)

    def check(self) -> dict[str, float]:
        """Take a step and count candidates. Raises ValueError if a request had a fault or no candidate."""
        counts = self().candidates.counts
        if self.step.table.columns.faults.any() or not counts.all():
            raise ValueError(f"the step has faults, or requests without candidates: {counts.tolist()}")
        return {"candidates": round(counts.float().mean().item(), 2)}


def from_python(day: Day, run: Run, steps: int = 200, rounds: int = 4) -> dict[str, float]:
    """Microseconds a step: ``wall`` with one wait at the end, ``host`` until calls return, ``synced`` with a wait each.

    The host's time is of short rounds: it would wait for the device in long ones, whose launches fill the queue."""
    steps, host, synced = day.pick(steps, 2), [], []

    def seconds(times: int) -> tuple[float, float]:
        day.wait()
        start = time.perf_counter()
        for _ in range(times):
            run()
        returned = time.perf_counter() - start
        day.wait()
        return returned / times * 1e6, (time.perf_counter() - start) / times * 1e6

    wall = statistics.median(seconds(steps)[1] for _ in range(3))
    for _ in range(rounds):
        host.append(seconds(max(1, steps // 4))[0])
        synced += [seconds(1)[1] for _ in range(steps // 4)]
    found = dict(wall=wall, host=statistics.median(host), synced=statistics.median(synced or host))
    return {name: round(us, 1) for name, us in found.items()}


def make_trunk(day: Day, base: str, vocab: int) -> Trunk:
    """A trunk of random tensors for a base model's sizes."""
    hidden, _, layers, *_ = DIMENSIONS[base]
    hidden, read = day.pick((hidden, tuple(min(layer, layers) for layer in TRUNK_LAYERS)), (64, (1, 2, 3)))
    config, tensors = random_trunk(read, layers, hidden, vocab, day.device)
    return Trunk(config, tensors, torch.randn(vocab, hidden, dtype=torch.bfloat16, device=day.device))


def small_steps(day: Day) -> None:
    """Measure the steps with a trunk and without a value model (part 2)."""
    vocab, near, mul = day.pick(VOCAB, 2048), {"target_length": 600}, {"value_mode": "mul", "value_scale": 0.8}
    trunk = make_trunk(day, "Qwen2.5-7B", vocab)
    every, some, fp32 = day.pick((1, 8, 64, 256, 512), (1, 3)), day.pick((64, 512), (2,)), "float32"
    plan = [
        ("none", None, near, fp32, False, every),
        ("trunk 7B", trunk, mul, fp32, False, every),
        ("trunk 7B, near", trunk, near, fp32, False, every),
        ("none, bf16 logits", None, near, "bfloat16", False, some),
        ("trunk 7B, bf16 logits", trunk, mul, "bfloat16", False, some),
        ("trunk 7B, near, text breaks", trunk, near, fp32, True, some),
        ("trunk 1.5B", make_trunk(day, "Qwen2.5-1.5B", vocab), mul, fp32, False, every),
    ]
    runs = {}
    for name, source, guidance, dtype, breaks, sizes in plan:
        for requests in sizes:
            with day.keep_going(case := f"{name}, B {requests}"):
                runs[case] = run = Batch(source, requests, day.device, vocab, guidance, dtype, breaks)
                day.add(f"{case}, python", run.check() | (from_python(day, run) if day.file is not None else {}))
    for case, run in runs.items():  # last: a capture that fails may end this process
        with day.keep_going(f"{case}, graph"):
            day.add(f"{case}, graph", day.time(run, 0.1) | ({"replay": replayed(run)} if day.measures else {}))
    sizes = [f"{name}, B {requests}" for requests in (1, 64, 512) for name in ("none", "trunk 7B", "trunk 7B, near")]
    profiled = {case: runs[case] for case in sizes if case in runs}
    day.add("card after the steps", card())
    profiles(day, profiled)


# --- part 3 ---


def limit_spans(day: Day) -> None:
    """Time ``limit_span`` (part 3)."""
    for requests, drafts in ((1, 0), (64, 0), (512, 0), (64, 4)):
        with day.keep_going(f"limit_span, B {requests}"):
            call = limit_span.make_call(day.device, B=day.pick(requests, 1), D=drafts, V=day.pick(VOCAB, 512))
            day.add(f"limit_span, B {requests}, D {drafts}", day.time(call))


WORKERS = {"0": ceilings, "1": model_step, "1-no-pdl": model_step, "2": small_steps, "3": limit_spans}


def work(name: str, file: Path | None, rehearse: bool) -> None:
    """Run a part in this process; without a file only compile its kernels."""
    day = Day(file, rehearse)
    torch.manual_seed(0)
    if file is not None:
        x = torch.randn(day.pick(8192, 8), day.pick(8192, 8), dtype=torch.bfloat16, device=day.device)
        for _ in range(100):  # an idle card's clock is low
            x @ x
        day.wait()
        day.add("before", environment(day.device) | card())
    with torch.no_grad():
        WORKERS[name](day)


def job_of(name: str, out: Path, *, compiles: bool, rehearse: bool) -> Job:
    """The process of a part."""
    options = [*(["--compile"] if compiles else []), *(["--rehearse"] if rehearse else [])]
    variables = {"LENVM_PDL": "0"} if name == "1-no-pdl" else {}
    # CUPTI has to stay as it is between profiles of graphs.
    variables |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    variables |= {"TRITON_INTERPRET": "1"} if rehearse else {}
    command = python("bench.gpu_day", "--out", str(out), "--worker", name, *options)
    return Job(f"compile-{name}" if compiles else f"part-{name}", command, variables)


def main() -> int:
    parser = flags.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--parts", nargs="+", default=list("0123"), choices=list("0123"), help="default: all")
    parser.add_argument("--seconds", type=float, default=240, help="for everything (default: 240)")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--worker", choices=list(WORKERS), help="run this part in this process")
    parser.add_argument("--compile", action="store_true", help="with --worker: only compile its kernels")
    args = parser.parse_args()
    rehearse = args.rehearse or not torch.cuda.is_available()
    if args.worker:
        work(args.worker, None if args.compile else args.out / f"part-{args.worker}.json", rehearse)
        return 0

    start, jobs = time.monotonic(), [name for name in WORKERS if name[0] in args.parts]
    suite = Suite(args.out, args.seconds, dry_run=rehearse)  # runs processes, and ends those that take too long
    about = environment("cpu" if rehearse else "cuda") | card() | {"commit": os.environ.get("GPU_DAY_COMMIT", "")}
    day: dict = {"about": about, "parts": {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def left() -> float:
        return args.seconds - (time.monotonic() - start)

    def finish(name: str, outcome: str, since: float, found: object) -> None:
        seconds = round(time.monotonic() - since, 1)
        day["parts"][name] = {"outcome": outcome, "seconds": seconds, "found": found}
        write_json(args.out / "gpu_day.json", day)
        print(f"== {name}: {outcome}, {seconds} s of {time.monotonic() - start:.0f}", flush=True)

    beside = [job_of(name, args.out, compiles=True, rehearse=rehearse) for name in jobs if name not in ("0", "3")]
    if "3" in args.parts:
        options = ["-q", "-p", "no:cacheprovider", "-p", "bench.outcomes", "--outcomes", str(args.out / "tests.jsonl")]
        options += ["--maxfail=10", "-n", "1" if rehearse else "8", "--dist", "worksteal"]
        tests = [TESTS[3], "-k", "errors_name or bad_arguments"] if rehearse else TESTS
        variables = ONE_THREAD | {"HYPOTHESIS_PROFILE": "gpu"}
        beside = [Job("tests", python("pytest", *options, *tests), variables), *beside]
    if beside:
        since, limit = time.monotonic(), min(LIMITS["tests"], left())
        ended = {name: suite._outcome(status) for name, status in suite.execute(beside, limit).items()}
        outcomes = summarize(args.out / "tests.jsonl") if "3" in args.parts else None
        finish("tests", ", ".join(f"{name} {outcome}" for name, outcome in ended.items()), since, outcomes)
        if outcomes is not None:
            print(outcomes.total(), *outcomes.failures, sep="\n  ", flush=True)
    for name in jobs:
        since = time.monotonic()
        if left() < 5:
            finish(name, "left out, out of time", since, None)
            continue
        job = job_of(name, args.out, compiles=False, rehearse=rehearse)
        file = args.out / f"part-{name}.json"
        file.unlink(missing_ok=True)
        status = suite.execute([job], min(LIMITS[name], left()))[job.name]
        finish(name, suite._outcome(status), since, json.loads(file.read_text()) if file.exists() else None)
        print((args.out / f"{job.name}.txt").read_text()[-SHOWN:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
