"""How a benchmark is declared and run: cases by name, the most important first, and each beside its peers.

A case counts the bytes it must move and the operations it must do. Its floor is the larger of bytes / copy bandwidth
and operations / matmul rate, both measured in the same run on the same device. The results are written after every
measurement, so that a run cut short leaves what it has, and ``--resume`` goes on where a run has ended.
"""

import argparse
import faulthandler
import gc
import importlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

import __main__
from bench.baselines import Absent, describe, pytorch
from bench.harness import flags, measuring, reporting
from bench.harness.measuring import NotCapturableError, Run, Uncaptured, is_device_broken, relative_error
from bench.harness.storing import CaseResult, Measurement, Results, Shape, case_name, environment, write_json

Expected = Callable[[], torch.Tensor]

MEASUREMENT_LIMIT = 60.0  # seconds, with what a peer compiles; then the process ends, and a resumed one leaves it out
TRIAL_SECONDS = 0.02  # of a measurement in a dry run
# What is measured of all shapes, one after the other.
STAGES = ("ours", "peers", "reference, compiled")
BROKEN = 3  # exit status: this process can use the device no more, another one may go on
# Relative errors ||x - y|| / ||y|| past which a result is not that of the operator, by dtype of the operands.
ERROR_LIMITS = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}
FLOATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by their names in forms of launch


@dataclass
class Case:
    """One shape of one operator.

    Attributes:
        run: one call of ours.
        bytes, operations: the least that any implementation must move and do.
        peers: by label, what prepares a peer on the same inputs and gives its ``run``. It is called just before the
            peer is timed, and may raise :class:`bench.baselines.Absent`. One in parentheses computes only a part.
        reference: a call of the plain reference: a peer, and at the production point of a GPU another one, compiled.
        expected: computes the result in fp64, for those implementations whose ``run`` returns a tensor.
    """

    run: Run
    bytes: int
    operations: int = 0
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    reference: partial | None = None
    expected: Expected | None = None


@dataclass
class Benchmark:
    """The benchmark of an operator.

    Attributes:
        operator: names the results.
        make_case: makes the case of a shape: of the device, and by name of the shape's axes and its dtype.
        production: the shape that matters most. Without a dtype it has that of ``--dtype``, and so have the others.
        axes: of an axis, values to take with the others as in production.
        others: shapes besides, by what differs from production.
        quick: a small shape, by what differs from production, and what differs from that in another one: all there is
            with ``--quick``, and on a CPU, where references are timed.
    """

    operator: str
    make_case: Callable[..., Case]
    production: Shape
    axes: Mapping[str, Sequence[object]] = field(default_factory=dict)
    others: Sequence[Shape] = ()
    quick: tuple[Shape, ...] = ({},)

    def shapes(self, *, quick: bool = False) -> list[Shape]:
        """Production, one axis after the other through it, then the others; none twice."""
        if quick:
            small = self.production | self.quick[0]
            points = [small, *(small | change for change in self.quick[1:])]
        else:
            lines = ({axis: value} for axis, values in self.axes.items() for value in values)
            points = [self.production | change for change in ({}, *lines, *self.others)]
        return [point for i, point in enumerate(points) if point not in points[:i]]

    def main(self) -> None:
        """The command."""
        self.run(parse_args(__main__.__doc__))

    def run(self, args: argparse.Namespace) -> None:
        """Measure the cases, print a line each, and write the file of results. Exits with 1 if one of ours failed.

        Ours for all shapes come first, then the peers for all, then what takes many seconds to compile.

        Args:
            args: of :func:`parse_args`.
        """
        shapes = self.shapes(quick=args.quick or args.device == "cpu")
        shapes = [{**shape, "dtype": shape.get("dtype", args.dtype)} for shape in shapes]
        if args.warm_up:
            self._warm_up(shapes, args)
            return
        runner = Runner(self, shapes, args)
        for stage in STAGES:
            for shape in shapes:
                runner.run(shape, stage)
        if runner.finish():
            sys.exit(1)

    def peers(self, case: Case) -> dict[str, Callable[[], Run]]:
        """The case's own peers, and its reference."""
        return case.peers if case.reference is None else case.peers | {"reference": lambda: case.reference}

    def compiles(self, shape: Shape, device: str) -> bool:
        """Whether the reference is compiled, too. That takes long, so it is done at one shape only."""
        return device == "cuda" and shape.items() >= self.production.items()

    def _warm_up(self, shapes: Sequence[Shape], args: argparse.Namespace) -> None:
        """Call ours once for each shape that leaves other processes room on the GPU, until the time is up."""
        measuring.limit_memory()
        deadline = time.monotonic() + args.seconds
        if args.seconds < math.inf:
            faulthandler.dump_traceback_later(args.seconds, exit=True)
        for shape in shapes:
            # Weights or caches of tens of gigabytes. Smaller shapes compile most of the same kernels.
            if "Qwen2.5-7B" in shape.values() or shape.get("L", 0) >= 8192:
                continue
            try:
                self.make_case(args.device, **shape).run()
            except Exception as error:
                print(f"{case_name(shape)}: {describe(error)}", flush=True)
            if time.monotonic() > deadline or (args.device == "cuda" and is_device_broken()):
                return
            _free()
        faulthandler.cancel_dump_traceback_later()


def peer(module: str, function: str, *args: object, **kwargs: object) -> Callable[[], Run]:
    """What prepares ``bench.baselines.<module>.<function>`` on these arguments; it is imported only then."""
    return lambda: getattr(importlib.import_module(f"bench.baselines.{module}"), function)(*args, **kwargs)


def parse_args(description: str | None) -> argparse.Namespace:
    """The options common to all benchmarks."""
    parser = flags.parser(description, json="also write the results to this file, after every measurement")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda times the Triton kernels, cpu the PyTorch reference on small shapes (default: cuda if there is one)",
    )
    parser.add_argument("--dtype", choices=list(ERROR_LIMITS), default="bfloat16", help="of weights and activations")
    parser.add_argument("--quick", action="store_true", help="only a few small shapes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after so many seconds")
    parser.add_argument("--resume", action="store_true", help="go on with the results in the file of --json")
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="call ours once for all but the largest shapes and time nothing, to fill the compilers' caches",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="--device cpu --quick, and too few calls for the times to mean anything"
    )
    args = parser.parse_args()
    if args.dry_run:
        args.device, args.quick = "cpu", True
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU; use --device cpu to time the reference")
    if args.resume and not args.json:
        parser.error("--resume needs --json, the file to go on with")
    return args


class Runner:
    """Measures cases one by one into ``results``, in memory and in the file of ``--json``."""

    def __init__(self, benchmark: Benchmark, shapes: Sequence[Shape], args: argparse.Namespace) -> None:
        self.benchmark, self.args, self.path = benchmark, args, args.json
        self.deadline = time.monotonic() + args.seconds
        self.seconds = TRIAL_SECONDS if args.dry_run else None
        if args.resume and self.path.exists():
            self.results = Results.read(self.path)
            for entry in self.results.cases:  # what was running when the last process ended has ended it
                if label := entry.running:
                    entry.running = ""
                    self._end(entry, label, f"failed: the process ended, or ran past {MEASUREMENT_LIMIT:.0f} s")
        else:
            dtypes = list({shape["dtype"]: 0 for shape in shapes})  # no time for those that no floor needs
            backend = {"backend": "triton" if args.device == "cuda" else "reference", "dry_run": args.dry_run}
            self.results = Results(
                benchmark.operator,
                environment(args.device) | backend,
                measuring.measure_ceilings(args.device, dtypes, self.seconds),
                [case_name(shape) for shape in shapes],
            )
            self.save()
        if args.device == "cuda":
            gc.freeze()  # what is imported by now stays, and need not be looked at after each measurement
        print(reporting.header(self.results), reporting.COLUMNS, sep="\n", flush=True)

    def save(self) -> None:
        if self.path:
            write_json(self.path, self.results)

    def finish(self) -> bool:
        """The run has come to its end; says whether one of ours failed."""
        self.results.finished = True
        self.save()
        planned = len(self.results.planned)
        if left_out := planned - len(self.results.cases):
            print(f"out of time: {left_out} of {planned} cases left out")
        return bool(self.results.failed)

    def run(self, shape: Shape, stage: str) -> None:
        """Measure what is still to be measured of a case in one of :data:`STAGES`."""
        name = case_name(shape)
        entry = next((entry for entry in self.results.cases if entry.case == name), None)
        is_timed = entry is None or entry.ours is None
        if not is_timed and (entry.times is None or not self._lacks(entry, stage)):
            return
        if time.monotonic() > self.deadline:
            return
        if entry is None:
            entry = CaseResult(name, shape)
            self.results.cases.append(entry)
        made: list[Case] = []

        def make() -> tuple[Run, Expected | None]:
            torch.manual_seed(0)
            made.append(self.benchmark.make_case(self.args.device, **shape))
            return made[0].run, made[0].expected

        found = self._attempt(entry, "ours", make, is_timed=is_timed)
        if is_timed:
            entry.ours = found
            if made:
                entry.bytes, entry.operations = made[0].bytes, made[0].operations
                entry.floor = self.results.ceilings.floor(entry.bytes, entry.operations, shape["dtype"])
            self._report(entry, None)
        elif found.failed:
            print(f"{name}: cannot be made again for its peers: {found.missing}", flush=True)
            return
        if stage != "ours" and made and entry.times:
            case = made[0]
            compiled = {stage: lambda: pytorch.compiled(case.reference)}
            peers = self.benchmark.peers(case) if stage == "peers" else compiled
            if peers:
                print(f"{name}, peers:", flush=True)
            self._run_peers(entry, peers, case.expected)

    def _lacks(self, entry: CaseResult, stage: str) -> bool:
        if stage == "reference, compiled":
            has_reference = "reference" in entry.peers and stage not in entry.peers
            return has_reference and self.benchmark.compiles(entry.shape, self.args.device)
        return stage == "peers" and not entry.peers_done

    def _run_peers(self, entry: CaseResult, peers: dict[str, Callable[[], Run]], expected: Expected | None) -> None:
        fatal = {label: case.case for case in self.results.cases for label, p in case.peers.items() if p.fatal}
        for label, prepare in peers.items():
            if label in entry.peers:
                continue
            if label in fatal:
                found = Measurement(missing=f"left out: it ended the process in case {fatal[label]}")
            elif time.monotonic() > self.deadline:
                found = Measurement(missing="left out: out of time")
            else:
                found = self._attempt(entry, label, lambda prepare=prepare: (prepare(), expected))
            entry.peers[label] = found
            self._report(entry, label)
        entry.peers_done = True
        self.save()

    def _report(self, entry: CaseResult, label: str | None) -> None:
        self.save()
        print(reporting.line(entry, label), flush=True)

    def _attempt(
        self,
        entry: CaseResult,
        label: str,
        prepare: Callable[[], tuple[Run, Expected | None]],
        *,
        is_timed: bool = True,
    ) -> Measurement:
        """A measurement of what ``prepare`` gives (empty if it is not to be timed), or why there is none."""
        entry.running = label
        self.save()
        _free()
        # Ends the process if C code does not return, which no exception would reach.
        faulthandler.dump_traceback_later(MEASUREMENT_LIMIT, exit=True, file=sys.__stderr__)
        try:
            run, expected = prepare()
            found = self._measure(entry, label, run, expected) if is_timed else Measurement()
        except Absent as absence:
            found = Measurement(missing=f"absent: {absence}")
        except Exception as error:  # whatever it is, it must not lose the other measurements
            traceback.print_exc(limit=-4)
            found = Measurement(missing=f"failed: {describe(error)}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        entry.running = ""
        if found.failed and self.args.device == "cuda" and is_device_broken():
            self._end(entry, label, found.missing)
            print(f"{entry.case}, {label}: the device is broken to this process: {found.missing}", flush=True)
            self.save()
            sys.exit(BROKEN)
        return found

    def _end(self, entry: CaseResult, label: str, missing: str) -> None:
        """Record what ended the process. Ours may have been measured before, and only made again for its peers."""
        if label == "ours":
            entry.ours = entry.ours or Measurement(missing=missing, fatal=True)
            entry.peers_done = True
        else:
            entry.peers[label] = Measurement(missing=missing, fatal=True)

    def _measure(self, entry: CaseResult, label: str, run: Run, expected: Expected | None) -> Measurement:
        error, result = None, run()
        if expected is not None and isinstance(result, torch.Tensor):
            error = relative_error(result, expected())
            if error > ERROR_LIMITS[entry.shape["dtype"]]:
                return Measurement(missing=f"failed: wrong result: relative error {error:.2g}")
        del result
        key = entry.case if label == "ours" else label
        if key in self.results.uncaptured:
            run = Uncaptured(run)
        try:
            times = measuring.measure(run, self.args.device, self.seconds)
        except NotCapturableError as refusal:
            print(f"{entry.case}, {label}: cannot be captured: {describe(refusal)}", flush=True)
            self.results.uncaptured.append(key)
            if self.args.device == "cuda" and is_device_broken():
                entry.running = ""
                self.save()
                sys.exit(BROKEN)
            times = measuring.measure(Uncaptured(run), self.args.device, self.seconds)
        return Measurement(times, error)


def _free() -> None:
    """Give the device's memory back before the next case or peer takes its own."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
