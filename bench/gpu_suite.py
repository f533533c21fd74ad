"""Everything to run where a GPU is at hand, in one command and under nine minutes: ``python -m bench.gpu_suite``.

    python -m bench.gpu_suite [--out bench/results/nvidia-h200] [--minutes 9] [--only STEP ...] [--dry-run]

The ceilings; the tests with compiled kernels, beside which the benchmarks warm the compilers' caches; each benchmark,
the most important first; every kernel under compute-sanitizer. Each step is a process of its own with a time limit and
a log in the folder. A benchmark whose process ends goes on in another one, without what ended it. The folder has, after
each step: ``summary.md``, a plot and a JSON file an operator, ``suite.json``, and ``tests.jsonl`` with each test's
outcome. SIGTERM ends it early, with a report of what there is; so a time limit from outside should send that, some
seconds before it kills (``timeout -s TERM 570 python -m bench.gpu_suite``): SIGKILL leaves no final report, only the
files written so far. The exit status is 1 if a test, a benchmark or a check failed.

It needs the package installed (``pip install --no-deps --no-build-isolation --editable .``; by setuptools 64 or later,
before 70.1 with wheel), and no network. Peers that are not installed are reported as absent. ``--dry-run`` tries the
suite without a GPU, on tiny shapes.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.baselines import describe, flashinfer
from bench.harness import flags
from bench.harness.cases import TRIAL_SECONDS
from bench.harness.measuring import MEMORY_SHARE
from bench.harness.reporting import plot, short_table, summary
from bench.harness.storing import Results, StepResult, SuiteResults, environment, read_folder, write_json
from bench.outcomes import summarize

# Seconds of nine minutes, in the order to run. Of an operator's process the first six or so are imports and ceilings
# (on an H200, where a few processes took more than twelve), and then a case takes half a second.
BENCHES = {
    "step": 60,
    "value_tree_attention": 48,
    "topk_candidates": 33,
    "ragged_linear": 28,
    "value_head": 23,
    "candidate_values": 10,
    "reweight_scatter": 21,
    "rope_cache": 15,
    "embed_tokens": 15,
    "sample_candidates": 15,
    "ragged_layout": 13,
    "gather_requests": 11,
    "select_scored": 11,
    "catch_up": 11,
    "expand_drafts": 10,
    "pack_drafts": 10,
    "verify_drafts": 10,
    "limit_span": 10,
}
SECONDS = {"ceilings": 15, "tests": 112, **BENCHES, "sanitizer": 45}
TESTED = ("operator_laws", "operator_edges", *(name for name in BENCHES if name != "step"), "value_model", "step")
DRY_TESTS = ("tests/test_topk_candidates.py", "tests/test_value_head.py", "-k", "bad_arguments or errors_name")
RESERVE = 10  # seconds for the report
# Seconds before a benchmark is ended, in which it starts nothing more: no more than a quarter of its time. What it has
# measured is in its file by then.
GRACE = 8
SHORTEST = 5  # seconds that a step is begun for
MOST_RESTARTS = 8
# For what runs beside much else, on fewer cores than processes: threads that spin would take them from compilers.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# Most of the GPU's memory that a process of the tests step may take: a worker (a test of offsets past 32 bits takes
# 5 GiB, others far less), the warm-up of the whole step, and each other one. CUDA contexts come on top.
TEST_MEMORY, STEP_MEMORY, OTHER_MEMORY = 0.07, 0.25, 0.012
MOST_WORKERS = 12
SANITIZER_PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/local/cuda/bin"
SANITIZER_ERRORS = 9


class Cut(BaseException):
    """SIGTERM came."""


@dataclass
class Job:
    """A command with its output in a file of the folder, and what is set in its environment."""

    name: str
    command: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)


def python(*arguments: str) -> list[str]:
    """``python -m`` and arguments."""
    return [sys.executable, "-m", *arguments]


def module(benchmark: str) -> str:
    """Where a benchmark is."""
    return f"bench.{'' if benchmark == 'step' else 'ops.'}{benchmark}"


class Suite:
    """The steps, their time, and what they gave.

    Args:
        out: folder for the results; made if it is not there.
        seconds: for everything.
        dry_run: tiny shapes on a CPU.
    """

    def __init__(self, out: Path, seconds: float, *, dry_run: bool) -> None:
        self.out, self.dry_run = out, dry_run
        self.deadline = time.monotonic() + seconds * (1 - RESERVE / sum([*SECONDS.values(), RESERVE]))
        device = "cpu" if dry_run else "cuda"
        self.state = SuiteResults(environment(device) | {"dry_run": dry_run})
        self.failed, self.logs = False, set()
        self.variables = {"PYTHONUNBUFFERED": "1"}
        if dry_run:  # beside other work, threads that spin while they wait take many times as long
            self.variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, names: Sequence[str]) -> None:
        """Take the steps; a report is written after each."""
        for i, name in enumerate(names):
            # What earlier steps have left of their time is shared by all that follow.
            start = time.monotonic()
            limit = (self.deadline - start) * SECONDS[name] / sum(SECONDS[other] for other in names[i:])
            self.state.steps[name] = step = StepResult("cut", 0.0, f"{name}.txt")
            try:
                if limit < SHORTEST:
                    step.outcome = "left out, out of time"
                elif name in BENCHES:
                    step.outcome = self.bench(name, limit)
                else:
                    step.outcome = getattr(self, name)(limit)
            finally:
                step.seconds = round(time.monotonic() - start, 1)
                self.report(name)
            print(f"{name}: {step.outcome}, {step.seconds:.0f} s", flush=True)

    # --- steps: each returns its outcome in words ---

    def ceilings(self, limit: float) -> str:
        trial = ["--seconds", str(TRIAL_SECONDS)] if self.dry_run else []
        jobs = [Job("ceilings", python("bench.harness.measuring", "--json", str(self.out / "ceilings.json"), *trial))]
        if tool := shutil.which("nvidia-smi"):
            jobs.append(Job("nvidia-smi", [tool]))
        return self._outcome(self.execute(jobs, limit)["ceilings"])

    def tests(self, limit: float) -> str:
        """The tests, and beside them, where they only wait for compilers, a first call of most to be timed."""
        outcomes = self.out / "tests.jsonl"
        command = python("pytest", "-q", "-p", "no:cacheprovider", "-p", "bench.outcomes", "--outcomes", str(outcomes))
        if self.dry_run:
            jobs = [Job("tests", [*command, *DRY_TESTS])]
        else:
            if importlib.util.find_spec("xdist"):
                workers = min(MOST_WORKERS, max(2, (os.cpu_count() or 2) - 4))
                command += ["-n", str(workers), "--dist", "worksteal"]
            command += [f"tests/test_{name}.py" for name in TESTED]

            def beside(name: str, command: list[str], memory: float, **variables: str) -> Job:
                return Job(name, command, ONE_THREAD | {MEMORY_SHARE: f"{memory}"} | variables)

            jobs = [beside("tests", command, TEST_MEMORY, HYPOTHESIS_PROFILE="gpu")]
            warm_ups = {name: python(module(name), "--warm-up", "--seconds", f"{limit:.0f}") for name in BENCHES}
            warm_ups["sanitizer"] = python("bench.every_kernel")  # else it would compile in its own step
            for name, warm_up in warm_ups.items():
                memory = STEP_MEMORY if name == "step" else OTHER_MEMORY
                jobs.append(beside(f"warm-up-{name}", ["nice", "-n", "10", *warm_up], memory))
            jobs += [
                Job(f"flashinfer-{kernel}", python("bench.baselines.flashinfer", kernel))
                for kernel in flashinfer.KERNELS
            ]
        status = self.execute(jobs, limit)["tests"]
        self.state.tests = summarize(outcomes)
        total = self.state.tests.total()
        self.failed |= bool(total.failed) or status not in (0, None) or not total.passed
        ended = "" if status is not None else f", ended after {limit:.0f} s"
        return f"{total.passed} passed, {total.failed} failed, {total.not_run} not run{ended}"

    def bench(self, name: str, limit: float) -> str:
        file, end = self.out / f"{name}.json", time.monotonic() + limit
        command = python(module(name), "--json", str(file), *(["--dry-run"] if self.dry_run else []))
        file.unlink(missing_ok=True)
        restarts = 0
        while True:
            left = end - time.monotonic()
            options = ["--seconds", f"{max(1.0, left - min(GRACE, left / 4)):.0f}", *(["--resume"] if restarts else [])]
            status = self.execute([Job(name, [*command, *options])], left)[name]
            results = Results.read(file) if file.exists() else None
            if results is None or results.finished or status is None or restarts == MOST_RESTARTS:
                break
            restarts += 1
        if results is None:
            self.failed = True
            return f"failed before its first result: {self._outcome(status)}"
        failed = len(results.failed)
        self.failed |= bool(failed) or (not results.finished and status is not None)
        parts = [f"{results.measured} of {len(results.planned)} cases"]
        parts += [f"{failed} failed"] if failed else []
        parts += [f"begun again {restarts} times"] if restarts else []
        parts += [f"ended after {limit:.0f} s"] if status is None else []
        return ", ".join(parts)

    def sanitizer(self, limit: float) -> str:
        """Every kernel once, plainly (is each launched?), then where there is a tool under its two checks at once."""
        start, command = time.monotonic(), python("bench.every_kernel")
        variables = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"} if self.dry_run else {}
        plain = self.execute([Job("sanitizer", command, variables)], limit)["sanitizer"]
        outcome = f"every kernel {'ran' if plain == 0 else self._outcome(plain)}"
        self.failed |= plain not in (0, None)
        tool = shutil.which("compute-sanitizer", path=SANITIZER_PATH)
        if tool is None or self.dry_run:
            return f"{outcome}; compute-sanitizer absent" if tool is None else f"{outcome}; no checks in a dry run"
        jobs = [
            Job(
                f"sanitizer-{check}",
                [tool, "--tool", check, "--error-exitcode", str(SANITIZER_ERRORS), *command],
                {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor an allocation of its own, with ends to run past
            )
            for check in ("memcheck", "racecheck")
        ]
        statuses = self.execute(jobs, limit - (time.monotonic() - start))
        for name, status in statuses.items():
            check = name.removeprefix("sanitizer-")
            found = {0: "clean", SANITIZER_ERRORS: f"ERRORS, see {name}.txt"}.get(status) or self._outcome(status)
            outcome += f"; {check} {found}"
            self.failed |= status not in (0, None)
        return outcome

    @staticmethod
    def _outcome(status: int | None) -> str:
        return {0: "done", None: "ended at its time limit"}.get(status, f"failed with exit status {status}")

    # --- processes ---

    def execute(self, jobs: Sequence[Job], limit: float) -> dict[str, int | None]:
        """Run jobs side by side for at most ``limit`` seconds; their exit statuses, None for what had to be ended."""
        end, processes = time.monotonic() + limit, {}
        try:
            for job in jobs:
                with (self.out / f"{job.name}.txt").open("a" if job.name in self.logs else "w") as log:
                    self.logs.add(job.name)
                    print(f"$ {' '.join(job.command)}", file=log, flush=True)
                    processes[job.name] = subprocess.Popen(
                        job.command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=os.environ | self.variables | job.variables,
                        start_new_session=True,
                    )
            while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
                time.sleep(0.05)
            return {name: process.poll() for name, process in processes.items()}
        finally:
            running = [process for process in processes.values() if process.poll() is None]
            for sign in (signal.SIGTERM, signal.SIGKILL):
                for process in running:
                    if process.poll() is None:
                        os.killpg(process.pid, sign)
                wait_until = time.monotonic() + 3
                while any(process.poll() is None for process in running) and time.monotonic() < wait_until:
                    time.sleep(0.05)

    # --- the report ---

    def report(self, name: str) -> None:
        """Write what there is; the plot only of the benchmark that has just ended."""
        write_json(self.out / "suite.json", self.state)
        try:
            results = read_folder(self.out)
            (self.out / "summary.md").write_text(summary(self.state, results))
            if name in results:
                plot(results[name], self.out / f"{name}.png")
        except Exception as error:  # no fault of a table or a plot may end the measurements
            self.state.steps[name].outcome += f"; report incomplete: {describe(error)}"

    def short_table(self) -> list[str]:
        """Of the steps of this run; the folder may have results of an earlier one."""
        found = read_folder(self.out)
        return short_table(self.state, {name: found[name] for name in self.state.steps if name in found})


def main() -> int:
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: bench/results/ and the device's name)"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--only", nargs="+", choices=list(SECONDS), metavar="STEP", help=f"of {', '.join(SECONDS)}")
    parser.add_argument("--dry-run", action="store_true", help="try it on a CPU, with tiny shapes")
    args = parser.parse_args()
    if importlib.util.find_spec("lenvm_kernels.reference") is None:
        parser.error("the package is not installed: pip install --no-deps --no-build-isolation --editable .")
    if args.dry_run and args.out is None:
        parser.error("--dry-run needs --out: its results do not belong among the others")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("this machine has no GPU; --dry-run --out DIR tries the suite without one")
    out = args.out
    if out is None:
        folder = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
        out = Path(os.path.relpath(Path(__file__).parent / "results" / folder))

    def end(signum, frame):
        raise Cut

    signal.signal(signal.SIGTERM, end)
    suite = Suite(out, args.minutes * 60, dry_run=args.dry_run)
    names = [name for name in SECONDS if args.only is None or name in args.only]
    try:
        suite.run(names)
    except (Cut, KeyboardInterrupt) as cut:
        suite.state.cut = "SIGTERM" if isinstance(cut, Cut) else "an interrupt"
        suite.failed = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if suite.state.steps:
        suite.report(list(suite.state.steps)[-1])
        print("\n".join(suite.short_table()), flush=True)
    return int(suite.failed)


if __name__ == "__main__":
    sys.exit(main())
