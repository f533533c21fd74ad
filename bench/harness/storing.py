"""What a benchmark measured, as it is in memory and as JSON on disk."""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

import __main__
from bench.harness.measuring import Ceilings, Times
from bench.outcomes import Outcomes

Shape = dict[str, object]  # axis -> value, as B, K, L, V, model, dtype
STATES = ("warm", "cold")


@dataclass
class Measurement:
    """Of ours or of a peer in a case.

    Attributes:
        times: None if there are none.
        error: the result's relative error, where it was compared.
        missing: why there are no times: ``absent: ...``, ``failed: ...`` or ``left out: ...``.
        fatal: it ended the process.
    """

    times: Times | None = None
    error: float | None = None
    missing: str = ""
    fatal: bool = False

    @property
    def failed(self) -> bool:
        return self.missing.startswith("failed")


@dataclass
class CaseResult:
    """What is known of a case.

    Attributes:
        case: its name, see :func:`case_name`.
        shape: what it is made of.
        ours: None until it was tried.
        peers: by label.
        bytes, operations: the least that any implementation must move and do.
        floor: seconds in which the device does that; None if the case could not be made.
        running: what runs, and in a file what ran when the process ended.
        peers_done: all peers were tried.
    """

    case: str
    shape: Shape
    ours: Measurement | None = None
    peers: dict[str, Measurement] = field(default_factory=dict)
    bytes: int = 0
    operations: int = 0
    floor: float | None = None
    running: str = ""
    peers_done: bool = False

    @property
    def times(self) -> Times | None:
        """Ours."""
        return self.ours and self.ours.times

    def of_floor(self, *states: str) -> float | None:
        """Floor / our time, in the first of the states (all: cold, warm) that was measured."""
        times = (getattr(self.times, state) for state in states or STATES[::-1]) if self.times and self.floor else ()
        return next((self.floor / seconds for seconds in times if seconds), None)

    def ratio(self, label: str, *states: str) -> float | None:
        """A peer's time / ours, in the first of the states (all: cold, warm) that was measured."""
        theirs = self.peers[label].times if label in self.peers else None
        if theirs is None or self.times is None:
            return None
        pairs = ((getattr(theirs, state), getattr(self.times, state)) for state in states or STATES[::-1])
        return next((their / our for their, our in pairs if their and our), None)


@dataclass
class Results:
    """The results of a benchmark.

    Attributes:
        operator: its name.
        environment: of :func:`environment`, with the backend of ours, and whether the times mean nothing (a dry run).
        ceilings: of the same process.
        planned: names of all cases.
        cases: those that were begun.
        uncaptured: peers, and cases of ours, that failed in a capture.
        finished: nothing ended the run early.
    """

    operator: str
    environment: dict[str, object]
    ceilings: Ceilings
    planned: list[str]
    cases: list[CaseResult] = field(default_factory=list)
    uncaptured: list[str] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def read(cls, path: Path) -> "Results":
        data = json.loads(path.read_text())
        data["ceilings"] = Ceilings(**data["ceilings"])
        data["cases"] = [
            CaseResult(
                **case
                | {"ours": case["ours"] and _measurement(case["ours"])}
                | {"peers": {label: _measurement(peer) for label, peer in case["peers"].items()}}
            )
            for case in data["cases"]
        ]
        return cls(**data)

    @property
    def measured(self) -> int:
        """Cases of ours."""
        return sum(case.times is not None for case in self.cases)

    @property
    def failed(self) -> list[CaseResult]:
        """Cases of ours."""
        return [case for case in self.cases if case.ours and case.ours.failed]


def _measurement(data: dict) -> Measurement:
    return Measurement(**data | {"times": data["times"] and Times(**data["times"])})


@dataclass
class StepResult:
    """A step of :mod:`bench.gpu_suite`: its outcome in words, its seconds, and the name of its log."""

    outcome: str
    seconds: float
    log: str


@dataclass
class SuiteResults:
    """A run of :mod:`bench.gpu_suite`; ``cut`` says what ended it early."""

    environment: dict[str, object]
    steps: dict[str, StepResult] = field(default_factory=dict)
    tests: Outcomes | None = None
    cut: str = ""


def case_name(shape: Shape) -> str:
    """``B 64 K 8 V 151936``: how a case is called in tables and logs."""
    return " ".join(f"{axis} {value}" for axis, value in shape.items())


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
    """Replace the file at once: whoever reads it, or ends this process, finds the old or the new one whole.

    Args:
        path: the file.
        data: a dataclass, or what JSON can hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(data, indent=1, allow_nan=False, default=asdict) + "\n")
    os.replace(unfinished, path)


def dump(data: object, depth: int, indent: int = 0) -> str:
    """JSON in which what lies so deep takes a line each, so that a diff shows what changed."""
    if depth == 0 or not data or not isinstance(data, dict | list):
        return json.dumps(data)
    inner = [dump(x, depth - 1, indent + 1) for x in (data.values() if isinstance(data, dict) else data)]
    if isinstance(data, dict):
        inner = [f"{json.dumps(key)}: {text}" for key, text in zip(data, inner, strict=True)]
    lines = ",".join(f"\n{' ' * (indent + 1)}{text}" for text in inner)
    opening, closing = "{}" if isinstance(data, dict) else "[]"
    return f"{opening}{lines}\n{' ' * indent}{closing}" + ("" if indent else "\n")


def read_folder(folder: Path) -> dict[str, Results]:
    """Operator -> results, of all benchmarks whose files are in the folder."""
    files = (file for file in sorted(folder.glob("*.json")) if "operator" in json.loads(file.read_text()))
    return {results.operator: results for results in map(Results.read, files)}
