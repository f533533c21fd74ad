"""What every benchmark shares: command line, cases and their order, peers beside them, and the results on disk.

A benchmark is a list of shapes, the most important first, and a function that makes a :class:`Case` of one. A case
counts the bytes it must move and the operations it must do; the floor is the larger of bytes / copy bandwidth and
operations / matmul rate, both measured in the same run on the same device. The results are written after every
measurement, so that a run cut short leaves what it has, and ``--resume`` goes on where a run has ended.
"""

import argparse
import faulthandler
import gc
import importlib
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

import __main__
from bench import _memory
from bench._measure import Ceilings, NotCapturableError, Uncaptured, measure, measure_ceilings
from bench.baselines import Absent, Run, describe, pytorch

Shape = dict[str, object]  # axis -> value, as B, K, L, V, model, dtype
Expected = Callable[[], torch.Tensor]
STATES = ("warm", "cold")

MEASUREMENT_LIMIT = 60.0  # seconds, with what a peer compiles; then the process ends, and a resumed one leaves it out
TRIAL_SECONDS = 0.02  # of a measurement in a dry run
BROKEN = 3  # exit status: this process can use the device no more, another one may go on
# Relative errors ||x - y|| / ||y|| past which a result is not that of the operator, by dtype of the operands.
ERROR_LIMITS = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}


@dataclass
class Case:
    """One shape of one operator.

    Attributes:
        run: one call of ours.
        bytes, operations: the least that any implementation must move and do.
        peers: by label, what prepares a peer on the same inputs and gives its ``run``. It is called just before the
            peer is timed, and may raise :class:`bench.baselines.Absent`. One in parentheses computes only a part.
        expected: computes the result in fp64, for those implementations whose ``run`` returns a tensor.
    """

    run: Run
    bytes: int
    operations: int = 0
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    expected: Expected | None = None


MakeCase = Callable[[str, Shape], Case]  # of the device and a shape, which has a dtype


def grid(production: Shape, axes: dict[str, Iterable], others: Sequence[Shape] = ()) -> list[Shape]:
    """Shapes in the order to run them: the production point, one axis after the other through it, then others.

    Args:
        production: the point that matters most.
        axes: values of an axis, the others as in production.
        others: what of a shape differs from production.
    """
    points = [{}, *({axis: value} for axis, values in axes.items() for value in values), *others]
    shapes = []
    for point in points:
        if (shape := production | point) not in shapes:
            shapes.append(shape)
    return shapes


def peer(module: str, function: str, *args: object, **kwargs: object) -> Callable[[], Run]:
    """What prepares ``bench.baselines.<module>.<function>`` on these arguments; it is imported only then."""
    return lambda: getattr(importlib.import_module(f"bench.baselines.{module}"), function)(*args, **kwargs)


def reference_peers(
    function: Callable, *args: object, compiles: bool, **kwargs: object
) -> dict[str, Callable[[], Run]]:
    """The plain reference as a peer, and compiled. Compiling takes long: only where ``compiles``."""
    peers = {"reference": lambda: pytorch.eager(function, *args, **kwargs)}
    if compiles:
        peers["reference, compiled"] = lambda: pytorch.compiled(function, *args, **kwargs)
    return peers


def parse_args(description: str | None) -> argparse.Namespace:
    """The options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda times the Triton kernels, cpu the PyTorch reference on small shapes (default: cuda if there is one)",
    )
    parser.add_argument("--dtype", choices=list(ERROR_LIMITS), default="bfloat16", help="of weights and activations")
    parser.add_argument("--quick", action="store_true", help="only a few small shapes")
    parser.add_argument("--json", type=Path, help="also write the results to this file, after every measurement")
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


def environment(device: str) -> dict[str, object]:
    """What a file of results says of where it comes from."""
    spec = __main__.__spec__
    module = ["-m", spec.name] if spec else [sys.argv[0]]
    return {
        "command": " ".join([Path(sys.executable).name, *module, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: Path, data: object) -> None:
    """Replace the file at once: whoever reads it, or ends this process, finds the old or the new one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def case_name(shape: Shape) -> str:
    """``B 64 K 8 V 151936``: how a case is called in tables and logs."""
    return " ".join(f"{axis} {value}" for axis, value in shape.items())


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


def run_cases(
    operator: str, shapes: Sequence[Shape], quick: Sequence[Shape], make_case: MakeCase, args: argparse.Namespace
) -> None:
    """Measure the cases, print a line each, and write the file of results. Exits with 1 if one of ours failed.

    Everything about the first shape comes first, then ours for all shapes, then the peers for all.

    Args:
        operator: names the results.
        shapes: in the order to run them; those without a dtype have that of ``--dtype``.
        quick: those of ``--quick`` and of a CPU, where references are timed.
        make_case: makes the case of a shape.
        args: of :func:`parse_args`.
    """
    shapes = quick if args.quick or args.device == "cpu" else shapes
    shapes = [{**shape, "dtype": shape.get("dtype", args.dtype)} for shape in shapes]
    if args.warm_up:
        _warm_up(shapes, make_case, args)
        return
    results = Results(operator, shapes, make_case, args)
    for part, wants_peers in ((shapes[:1], True), (shapes, False), (shapes, True)):
        for shape in part:
            results.run(shape, wants_peers=wants_peers)
    if results.finish():
        sys.exit(1)


class Results:
    """The results of a benchmark, in memory and in the file of ``--json``, and what adds to them.

    ``data["results"]`` has an entry for each case that was begun. Its ``ours`` and each of its ``peers`` is a
    measurement (:class:`bench._measure.Times`, the relative error where one is known, and of a peer the ratio of its
    time to ours), or says why there is none: ``absent``, ``failed`` or ``left out``. ``running`` names what ran when
    the process ended.
    """

    def __init__(self, operator: str, shapes: Sequence[Shape], make_case: MakeCase, args: argparse.Namespace) -> None:
        self.make_case, self.args, self.path = make_case, args, args.json
        self.deadline = time.monotonic() + args.seconds
        self.seconds = TRIAL_SECONDS if args.dry_run else None
        if args.resume and self.path.exists():
            self.data = json.loads(self.path.read_text())
            self._take_over()
        else:
            dtypes = list({shape["dtype"]: 0 for shape in shapes})  # no time for those that no floor needs
            self.data = {
                "operator": operator,
                "environment": environment(args.device)
                | {"backend": "triton" if args.device == "cuda" else "reference", "dry_run": args.dry_run},
                "ceilings": asdict(measure_ceilings(args.device, dtypes, self.seconds)),
                "planned": [case_name(shape) for shape in shapes],
                "results": [],
                "uncaptured": [],  # peers, and cases of ours, that failed in a capture
                "finished": False,
            }
            self.save()
        self.ceilings = Ceilings(**self.data["ceilings"])
        if args.device == "cuda":
            gc.freeze()  # what is imported by now stays, and need not be looked at after each measurement
        print(header(self.data), flush=True)
        print(f"{'':<62}{'warm us':>10}{'cold us':>10}{'spread':>8}{'floor us':>10}{'of floor':>10}{'ratio':>8}")

    def save(self) -> None:
        if self.path:
            write_json(self.path, self.data)

    def finish(self) -> bool:
        """The run has come to its end; says whether one of ours failed."""
        self.data["finished"] = True
        self.save()
        left_out = len(self.data["planned"]) - len(self.data["results"])
        if left_out:
            print(f"out of time: {left_out} of {len(self.data['planned'])} cases left out")
        return any("failed" in entry.get("ours", {}) for entry in self.data["results"])

    def run(self, shape: Shape, *, wants_peers: bool) -> None:
        """Measure what is still to be measured of a case."""
        name, dtype = case_name(shape), shape["dtype"]
        entry = next((e for e in self.data["results"] if e["case"] == name), None)
        is_timed = entry is None or "ours" not in entry
        if not is_timed and (not wants_peers or "peers_done" in entry or "warm" not in entry["ours"]):
            return
        if time.monotonic() > self.deadline:
            return
        if entry is None:
            entry = {"case": name, "shape": shape, "peers": {}}
            self.data["results"].append(entry)
        made: list[Case] = []

        def make() -> tuple[Run, Expected | None]:
            torch.manual_seed(0)
            made.append(self.make_case(self.args.device, shape))
            return made[0].run, made[0].expected

        found = self._attempt(entry, "ours", make, dtype, is_timed=is_timed)
        if is_timed:
            entry["ours"] = found
            if made:
                self._add_floor(entry, made[0], dtype)
            self._report(entry, name, found)
        elif "failed" in found:
            print(f"{name}: cannot be made again for its peers: {found['failed']}", flush=True)
            return
        if wants_peers and made and "warm" in entry["ours"]:
            if made[0].peers and not is_timed:
                print(f"{name}, peers:", flush=True)
            self._run_peers(entry, made[0], dtype)

    def _add_floor(self, entry: dict, case: Case, dtype: str) -> None:
        floor, ours = self.ceilings.floor(case.bytes, case.operations, dtype), entry["ours"]
        entry |= {"bytes": case.bytes, "operations": case.operations, "floor": floor}
        entry["of_floor"] = {state: floor / ours[state] for state in STATES if ours.get(state)}

    def _run_peers(self, entry: dict, case: Case, dtype: str) -> None:
        ours, peers = entry["ours"], entry["peers"]
        fatal = {label: e["case"] for e in self.data["results"] for label, p in e["peers"].items() if p.get("fatal")}
        for label, prepare in case.peers.items():
            if label in peers:
                continue
            if label in fatal:
                peers[label] = {"left out": f"it ended the process in case {fatal[label]}"}
            elif time.monotonic() > self.deadline:
                peers[label] = {"left out": "out of time"}
            else:
                found = self._attempt(entry, label, lambda prepare=prepare: (prepare(), case.expected), dtype)
                found |= {f"ratio_{state}": found[state] / ours[state] for state in STATES if found.get(state)}
                peers[label] = found
            self._report(entry, f"  {label}", peers[label])
        entry["peers_done"] = True
        self.save()

    def _attempt(
        self,
        entry: dict,
        label: str,
        prepare: Callable[[], tuple[Run, Expected | None]],
        dtype: str,
        *,
        is_timed: bool = True,
    ) -> dict:
        """A measurement of what ``prepare`` gives (empty if it is not to be timed), or why there is none."""
        entry["running"] = label
        self.save()
        _free()
        # Ends the process if C code does not return, which no exception would reach.
        faulthandler.dump_traceback_later(MEASUREMENT_LIMIT, exit=True, file=sys.__stderr__)
        try:
            run, expected = prepare()
            found = self._measure(entry, label, run, expected, dtype) if is_timed else {}
        except Absent as absence:
            found = {"absent": str(absence)}
        except Exception as error:  # whatever it is, it must not lose the other measurements
            traceback.print_exc(limit=-4)
            found = {"failed": describe(error)}
        finally:
            faulthandler.cancel_dump_traceback_later()
        del entry["running"]
        if "failed" in found and self.args.device == "cuda" and _is_device_broken():
            self._end(entry, label, found)
            print(f"{entry['case']}, {label}: the device is broken to this process: {found['failed']}", flush=True)
            self.save()
            sys.exit(BROKEN)
        return found

    def _end(self, entry: dict, label: str, found: dict) -> None:
        """Record what ended the process. Ours may have been measured before, and only made again for its peers."""
        if label == "ours":
            entry.setdefault("ours", found | {"fatal": True})
            entry["peers_done"] = True
        else:
            entry["peers"][label] = found | {"fatal": True}

    def _measure(self, entry: dict, label: str, run: Run, expected: Expected | None, dtype: str) -> dict:
        found, result = {}, run()
        if expected is not None and isinstance(result, torch.Tensor):
            found["error"] = relative_error(result, expected())
            if found["error"] > ERROR_LIMITS[dtype]:
                return {"failed": f"wrong result: relative error {found['error']:.2g}"}
        del result
        key = entry["case"] if label == "ours" else label
        if key in self.data["uncaptured"]:
            run = Uncaptured(run)
        try:
            times = measure(run, self.args.device, self.seconds)
        except NotCapturableError as error:
            print(f"{entry['case']}, {label}: cannot be captured: {describe(error)}", flush=True)
            self.data["uncaptured"].append(key)
            if self.args.device == "cuda" and _is_device_broken():
                del entry["running"]
                self.save()
                sys.exit(BROKEN)
            times = measure(Uncaptured(run), self.args.device, self.seconds)
        return found | asdict(times)

    def _take_over(self) -> None:
        """What was running when the last process ended has ended it."""
        for entry in self.data["results"]:
            label = entry.pop("running", None)
            if label is not None:
                self._end(entry, label, {"failed": f"the process ended, or ran past {MEASUREMENT_LIMIT:.0f} s"})

    def _report(self, entry: dict, name: str, found: dict) -> None:
        self.save()
        if "warm" not in found:
            reason = next(f"{key}: {found[key]}" for key in ("absent", "failed", "left out") if key in found)
            print(f"{name:<62} {reason}", flush=True)
            return
        time_of = found["cold"] or found["warm"]
        floor = " " * 20
        if found is entry["ours"]:
            floor = f"{entry['floor'] * 1e6:>10.1f}{entry['floor'] / time_of:>10.1%}"
        ratio = found.get("ratio_cold") or found.get("ratio_warm")
        cold = f"{found['cold'] * 1e6:>10.1f}" if found["cold"] else f"{'-':>10}"
        spread = max(found["warm_spread"], found["cold_spread"] or 0)
        print(
            f"{name:<62}{found['warm'] * 1e6:>10.1f}{cold}{spread:>8.1%}{floor}"
            f"{'' if ratio is None else f'{ratio:>8.2f}'}{' (eager)' if found['mode'] == 'eager' else ''}",
            flush=True,
        )


def header(data: dict) -> str:
    """Two lines: where the results come from, and the ceilings."""
    where, ceilings = data["environment"], Ceilings(**data["ceilings"])
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in ceilings.matmul_rate.items())
    line = f"copy {ceilings.copy_bandwidth / 1e9:.0f} GB/s, matmul {rates} Tops/s"
    if ceilings.launch_warm:
        line += f", an empty kernel {ceilings.launch_warm * 1e6:.1f} us warm, {ceilings.launch_cold * 1e6:.1f} cold"
    note = " (DRY RUN: the times mean nothing)" if where["dry_run"] else ""
    return f"{data['operator']} on {where['device']} ({where['backend']}), {where['date']}{note}\n{line}"


def _warm_up(shapes: Sequence[Shape], make_case: MakeCase, args: argparse.Namespace) -> None:
    """Call ours once for each shape that leaves other processes room on the GPU, until the time is up."""
    _memory.limit()
    deadline = time.monotonic() + args.seconds
    if args.seconds < math.inf:
        faulthandler.dump_traceback_later(args.seconds, exit=True)
    for shape in shapes:
        if _is_large(shape):
            continue
        try:
            make_case(args.device, shape).run()
        except Exception as error:
            print(f"{case_name(shape)}: {describe(error)}", flush=True)
        if time.monotonic() > deadline or (args.device == "cuda" and _is_device_broken()):
            return
        _free()
    faulthandler.cancel_dump_traceback_later()


def _is_large(shape: Shape) -> bool:
    """Whether weights or caches take tens of gigabytes. Smaller shapes compile most of the same kernels."""
    return "Qwen2.5-7B" in shape.values() or shape.get("L", 0) >= 8192


def _is_device_broken() -> bool:
    """Whether later calls would fail too: after a memory fault, or a capture that left the random generator in it."""
    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda").item()
    except RuntimeError as error:
        return not isinstance(error, torch.OutOfMemoryError)
    return False


def _free() -> None:
    """Give the device's memory back before the next case or peer takes its own."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
