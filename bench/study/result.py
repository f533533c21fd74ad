"""What each run of a study was, in ``NAME.meta.json``, and the stages of its steps, a line each in ``NAME.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from bench.study.flops import Architecture, Guidance, Workload, operations, step_bytes

ENVIRONMENT = ("command", "date", "device", "operators", "dtype", "torch", "triton", "python")
ELEMENT_SIZE = {"float32": 4, "bfloat16": 2}
Stages = dict[str, list[float]]  # milliseconds of each step; "total" is the last
Components = dict[str, float]  # operations or bytes


def stages_of(lines: Sequence[str], source: object = "the timer") -> Stages:
    """The stages in lines ``{"step": ..., "rows": ..., "STAGE_ms": ..., "total_ms": ...}``.

    Raises:
        ValueError: lines of different stages.
    """
    stages: Stages = {}
    for number, text in enumerate(lines, 1):
        line = {key.removesuffix("_ms"): value for key, value in json.loads(text).items() if key.endswith("_ms")}
        if stages and set(stages) != set(line):
            raise ValueError(f"line {number} of {source} must have the stages {', '.join(stages)}, got {text}")
        for stage, ms in line.items():
            stages.setdefault(stage, []).append(ms)
    return stages


@dataclass(frozen=True)
class Ratios:
    """A run's figures over those of the base model alone; ``step`` is of :attr:`Run.over_base_part`."""

    seconds: float
    step: float
    operations: float
    bytes: float


@dataclass(frozen=True)
class Run:
    """One way of decoding: what it was, and how long the fastest of its repeats took; or the error that it ended by."""

    name: str
    way: str
    base_model: Architecture
    environment: dict[str, str] = field(repr=False)
    rows: int = 0
    prompt_tokens: float = 0.0  # in the mean
    prompts_computed: bool = False
    steps: int = 0
    repeats: int = 0
    value_model: Architecture | None = None
    top_k: int | None = None
    computed: Guidance | None = None
    load_average: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: str | None = None
    stages: Stages = field(default_factory=dict, repr=False)

    def save(self, folder: Path) -> None:
        meta = {name: value for name, value in asdict(self).items() if value is not None}
        meta |= meta.pop("environment")
        if stages := meta.pop("stages"):
            names, steps = [f"{stage}_ms" for stage in stages], zip(*stages.values(), strict=True)
            lines = [{"step": i, "rows": self.rows} | dict(zip(names, ms, strict=True)) for i, ms in enumerate(steps)]
            (folder / f"{self.name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{self.name}.meta.json").write_text(json.dumps(meta, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Run:
        """Read ``NAME.meta.json`` and ``NAME.jsonl`` beside it (absent if the run failed).

        Raises:
            ValueError: lines that are not those of a run.
        """
        meta = json.loads(file.read_text())
        facts = {known.name: meta[known.name] for known in fields(cls) if known.name in meta}
        for name, kind in (("base_model", Architecture), ("value_model", Architecture), ("computed", Guidance)):
            if name in facts:
                facts[name] = kind(**facts[name])
        if "error" not in facts:
            steps = file.with_name(file.name.replace(".meta.json", ".jsonl"))
            facts["stages"] = stages_of(steps.read_text().splitlines(), steps)
        return cls(**facts, environment={name: meta[name] for name in ENVIRONMENT})

    @property
    def work(self) -> Workload:
        return Workload(self.rows, 1, self.prompt_tokens, self.steps, self.prompts_computed)

    @property
    def output_tokens(self) -> int:
        return self.rows * self.steps

    @property
    def seconds(self) -> float:
        """Of all that :attr:`work` says."""
        return self.decode_seconds + (self.prompt_seconds if self.prompts_computed else 0)

    @property
    def _counted(self) -> tuple:
        return self.base_model, self.work, self.value_model, self.computed

    @property
    def operations(self) -> Components:
        """Of the run."""
        return operations(*self._counted)

    @property
    def step_bytes(self) -> Components:
        """Bytes of a step, at half of the output."""
        forwards = 0
        if self.computed and self.computed.candidates + self.computed.extended > 0:
            forwards = 2 if self.way == "two_forward" else 1
        return step_bytes(*self._counted, element_size=ELEMENT_SIZE[self.environment["dtype"]], forwards=forwards)

    @property
    def over_base_part(self) -> float:
        """A step's median over that of its base part: what else the machine did weighs on both."""
        return float(np.median(self.stages["total"]) / np.median(self.stages["base"]))

    def ratios(self, base: Run | None) -> Ratios | None:
        """None unless both decoded the same with the same base model; a folder may hold runs of several commands."""

        def decoded(run: Run) -> tuple:
            return run.work, run.base_model, run.environment["dtype"], run.environment["device"]

        if base is None or decoded(self) != decoded(base):
            return None
        return Ratios(
            seconds=self.seconds / base.seconds,
            step=self.over_base_part / base.over_base_part,
            operations=sum(self.operations.values()) / sum(base.operations.values()),
            bytes=sum(self.step_bytes.values()) / sum(base.step_bytes.values()),
        )
