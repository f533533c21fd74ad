"""Seconds of a call with the L2 cache warm and cold; what the device reaches: ``python -m bench.harness.measuring``.

On a GPU each call is replayed from a CUDA graph and timed with device events, in two ways:

- warm: again and again, so that what fits the L2 cache stays there from one call to the next;
- cold: after a flush, which leaves nothing in the L2 cache that the call needs: weights and caches, which between two
  steps of a server have gone, but also activations and index tensors, which the kernel before has just written there.

A server is between the two, nearer to cold for what is larger than the cache. A call that cannot be captured, because
it waits for the host, is called and timed as it is ("eager"): its launches and waits then count, as they do in use. On
a CPU the wall time of a call is taken, and there is no cold.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise

import torch
import triton

from bench.harness import flags

Run = Callable[[], object]

SECONDS = {"cuda": 0.2, "cpu": 0.3}  # that a measurement takes, about
ROUNDS = 2  # warm and cold take turns, so that the spread covers a clock that drifts
GRAPH_SECONDS, MAX_CALLS = 1e-3, 500  # a warm graph holds so many calls that it outlasts its launch
LEAD = 2  # first samples, which see an idle GPU waiting for the host
MIN_FLUSH = 2**28
MEMORY_SHARE = "BENCH_MEMORY_SHARE"  # environment variable: a number > 0 and <= 1


class NotCapturableError(RuntimeError):
    """A run failed in a capture. The capture may have left this process's random generator unusable."""


@dataclass
class Uncaptured:
    """A run to be timed as it is called, with its launches from the host, whether it could be captured or not."""

    run: Run

    def __call__(self) -> object:
        return self.run()


@dataclass
class Times:
    """Median seconds of a call, and their spread: (80th - 20th percentile) / median.

    Attributes:
        warm, warm_spread: with the L2 cache as the call before has left it.
        cold, cold_spread: after a flush of the L2 cache; None on a CPU.
        mode: ``graph`` (of the GPU's work), ``eager`` (GPU, with the host's launches and waits) or ``wall`` (CPU).
    """

    warm: float
    warm_spread: float
    cold: float | None
    cold_spread: float | None
    mode: str

    @property
    def spread(self) -> float:
        """The larger one."""
        return max(self.warm_spread, self.cold_spread or 0.0)


@dataclass
class Ceilings:
    """What the device reaches, on random data.

    Attributes:
        copy_bandwidth: bytes/s, read plus written, of a copy far larger than any cache.
        matmul_rate: operations/s of a large matmul, by dtype.
        launch_warm, launch_cold: seconds of an empty kernel; no time below them can be told from theirs. None on a CPU.
        l2_bytes: size of the L2 cache; 0 on a CPU.
        small_copy_warm, small_copy_cold: bytes/s of a copy that fits the cache: they differ if the flush works.
    """

    copy_bandwidth: float
    matmul_rate: dict[str, float]
    launch_warm: float | None = None
    launch_cold: float | None = None
    l2_bytes: int = 0
    small_copy_warm: float | None = None
    small_copy_cold: float | None = None

    def floor(self, moved: int, operations: int, dtype: str) -> float:
        """Seconds that no implementation beats: bytes at copy bandwidth or operations at the matmul rate."""
        return max(moved / self.copy_bandwidth, operations / self.matmul_rate[dtype])


def measure(run: Run, device: str, seconds: float | None = None) -> Times:
    """Time ``run`` for about ``seconds`` (None: :data:`SECONDS`).

    Raises:
        NotCapturableError: on a GPU; :class:`Uncaptured` avoids it.
    """
    seconds = SECONDS[device] if seconds is None else seconds
    if device == "cuda":
        return _measure_gpu(run, seconds)
    return Times(*median_and_spread(_wall_samples(run, seconds)), None, None, "wall")


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    """(median, (80th - 20th percentile) / median)."""
    ordered, last = sorted(samples), len(samples) - 1
    median = statistics.median(ordered)
    return median, (ordered[round(0.8 * last)] - ordered[round(0.2 * last)]) / median


def _wall_samples(run: Run, seconds: float) -> list[float]:
    run()
    samples, deadline = [], time.perf_counter() + seconds
    while len(samples) < 3 or (len(samples) < 50 and time.perf_counter() < deadline):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return samples


def _measure_gpu(run: Run, seconds: float) -> Times:
    once, mode = _replay(run, 1)
    estimate = statistics.median(_warm_samples(once, 5))
    calls = min(MAX_CALLS, max(1, int(GRAPH_SECONDS / estimate))) if mode == "graph" else 1
    many = _replay(run, calls)[0] if calls > 1 else once
    part = seconds / (2 * ROUNDS)
    repeats = min(50, max(5, int(part / (estimate * calls))))
    cold_repeats = min(100, max(8, int(part / (estimate + 1e-4))))
    warm, cold = [], []
    for _ in range(ROUNDS):
        warm += [sample / calls for sample in _warm_samples(many, repeats)]
        cold += _cold_samples(once, cold_repeats, is_eager=mode == "eager")
    return Times(*median_and_spread(warm), *median_and_spread(cold), mode)


def _replay(run: Run, calls: int) -> tuple[Run, str]:
    """(what replays ``calls`` calls from a graph, "graph"), or (``run``, "eager") if it waits for the host."""
    for _ in range(2):  # compile, and allocate what is kept
        run()
    if isinstance(run, Uncaptured) or _synchronizes(run):
        return run, "eager"
    graph = torch.cuda.CUDAGraph()
    # A capture that fails does not go back to the stream it came from; this does.
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    run()
        except RuntimeError as error:  # torch's, Triton's and others' names for what may not be captured
            raise NotCapturableError(str(error)) from error
    return graph.replay, "graph"


def _synchronizes(run: Run) -> bool:
    """Whether ``run`` waits for the device in a way that torch knows of. To ask is safer than a capture that fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _warm_samples(run: Run, repeats: int) -> list[float]:
    """Seconds between events with a call between each two; the host runs ahead of the device."""
    events = [_event() for _ in range(LEAD + repeats + 1)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairwise(events)][LEAD:]


def _cold_samples(run: Run, repeats: int, *, is_eager: bool = False) -> list[float]:
    """Seconds of a call after a flush, during which the host launches the call, unless its launches are to count."""
    flush, pairs = _flush(), [(_event(), _event()) for _ in range(LEAD + repeats)]
    for start, end in pairs:
        flush()
        if is_eager:  # else some launches would hide behind the flush
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairs][LEAD:]


@cache
def _flush() -> Run:
    """What replaces all of the L2 cache.

    It ends by reading, not by writing: a cache full of lines still to be written back would make the call pay for that.
    """
    buffer = torch.ones(max(MIN_FLUSH, 4 * l2_bytes()) // 4, device="cuda")
    total = torch.empty((), device="cuda")

    def flush() -> None:
        torch.sum(buffer, dim=0, out=total)

    return flush


def l2_bytes() -> int:
    """Size of the L2 cache of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@triton.jit
def _empty_kernel():
    pass


def measure_ceilings(device: str, dtypes: list[str], seconds: float | None = None) -> Ceilings:
    """Measure the ceilings; the matmul rate for each of ``dtypes``."""

    def copy_bandwidth(size: int) -> Times:
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
        target = torch.empty_like(source)
        return measure(lambda: target.copy_(source), device, seconds)

    def matmul_seconds(dtype: str, m: int) -> float:
        a, b = (torch.randn(m, m, dtype=getattr(torch, dtype), device=device) for _ in range(2))
        return measure(lambda: a @ b, device, seconds).warm

    n, m = (2**30, 8192) if device == "cuda" else (2**26, 512)
    bandwidth = 2 * n / copy_bandwidth(n).warm
    rates = {dtype: 2 * m**3 / matmul_seconds(dtype, m) for dtype in dtypes}
    if device == "cpu":
        return Ceilings(bandwidth, rates)
    launch = measure(lambda: _empty_kernel[(1,)](), device, seconds)
    small = l2_bytes() // 4
    copy = copy_bandwidth(small)
    return Ceilings(
        bandwidth, rates, launch.warm, launch.cold, l2_bytes(), 2 * small / copy.warm, 2 * small / copy.cold
    )


# --- the device and the process ---


def limit_memory() -> None:
    """Let torch allocate no more than the share of the GPU's memory in ``BENCH_MEMORY_SHARE``, if that is set.

    For processes beside each other on one GPU: what goes past its share gets an ordinary out-of-memory error, and no
    other process is harmed.
    """
    if share := os.environ.get(MEMORY_SHARE):
        torch.cuda.set_per_process_memory_fraction(float(share))


def is_device_broken() -> bool:
    """Whether later calls would fail too: after a memory fault, or a capture that left the random generator in it."""
    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda").item()
    except RuntimeError as error:
        return not isinstance(error, torch.OutOfMemoryError)
    return False


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in fp64.

    Raises:
        ValueError: not as many elements, or a result that is not finite.
    """
    if actual.numel() != expected.numel():
        raise ValueError(f"the result has shape {list(actual.shape)}, expected {list(expected.shape)}")
    expected = expected.double()
    error = ((actual.double().view_as(expected) - expected).norm() / expected.norm()).item()
    if not math.isfinite(error):
        raise ValueError("the result is not finite")
    return error


def main() -> None:
    parser = flags.parser(__doc__, json="also write the ceilings to this file")
    parser.add_argument("--seconds", type=float, help="that each measurement takes, about (default: 0.2, on a CPU 0.3)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ceilings = asdict(measure_ceilings(device, ["float32", "bfloat16", "float16"], args.seconds))
    print(json.dumps(ceilings, indent=1))
    if args.json:
        args.json.write_text(json.dumps(ceilings, indent=1) + "\n")


if __name__ == "__main__":
    main()
