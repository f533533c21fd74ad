"""What a study on a server asks for, what was measured of it, and what that comes to."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.study import flops
from bench.study.flops import Architecture, Guidance, Workload
from bench.study.result import Stages
from bench.study.run import MIN_P, TEMPERATURE
from lenvm_kernels.evaluate.servers import request_of

LENGTHS = ("fixed", "free")
NEUTRAL = {"value_mode": "centered_exp", "value_scale": 0.0}  # as the published runs were guided

# --- what is asked for ---


@dataclass(frozen=True)
class Condition:
    """What all requests of a run ask for. ``top_k`` of 0: all; ``custom_params`` of None: nothing of the plugin."""

    name: str
    lengths: str
    top_k: int = 0
    stride: int | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def is_guided(self) -> bool:
        return self.stride is not None

    @property
    def is_plain(self) -> bool:
        return self.custom_params is None


def plain_conditions(lengths: Sequence[str], top_ks: Sequence[int]) -> list[Condition]:
    """Those of the server without the plugin: over the whole vocabulary, and with the filters of guided runs."""
    names = {"plain": 0} | {f"plain-k{k}": k for k in top_ks}
    return [Condition(name, of, k) for of in lengths for name, k in names.items()]


def guided_conditions(
    lengths: Sequence[str], top_ks: Sequence[int], strides: Sequence[int], guidance: dict[str, Any]
) -> list[Condition]:
    """Those of the server with the plugin."""
    conditions = []
    for of in lengths:
        conditions.append(Condition("neutral", of, custom_params=NEUTRAL))
        for stride in strides:
            params = guidance | {"value_stride": stride}
            conditions += [Condition(f"k{k}-stride{stride}", of, k, stride, params) for k in top_ks]
    return conditions


@dataclass(frozen=True)
class Load:
    """What every condition decodes.

    Attributes:
        prompts: token ids.
        samples: of each prompt.
        max_tokens: of each sample; where the lengths are fixed exactly so many.
        concurrency: requests that wait at once; None: all.
        temperature, top_p: of every request, plain ones too.
        timeout: seconds of a request.
    """

    prompts: Sequence[Sequence[int]]
    samples: int
    max_tokens: int
    concurrency: int | None = None
    temperature: float = TEMPERATURE
    top_p: float = 1.0
    timeout: float = 3600.0

    def request(self, engine: str, condition: Condition, prompt: int, sample: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request."""
        sampling = dict(temperature=self.temperature, top_k=condition.top_k, top_p=self.top_p, min_p=MIN_P)
        return request_of(
            engine,
            self.prompts[prompt],
            condition.custom_params,
            max_new_tokens=self.max_tokens,
            sampling=sampling,
            seed=prompt * self.samples + sample,
        )


# --- what was measured ---


class Counters:
    """The metrics of a server at one moment, from the text of its ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._samples = []
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            self._samples.append((name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)))

    def __contains__(self, name: str) -> bool:
        return any(name == of for of, _, _ in self._samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all of this name and these labels; 0 without any."""
        return sum(value for of, has, value in self._samples if of == name and labels.items() <= has.items())

    def labels(self, name: str) -> dict[str, str]:
        """Of the first metric of this name; empty if there is none."""
        return next((has for of, has, _ in self._samples if of == name), {})


@dataclass(frozen=True)
class Counted:
    """What a server has counted until a moment.

    Attributes:
        counters: its metrics, with those of the plugin.
        passes: of the base model, over prompts and to decode.
        decode_passes: in which requests decode.
        seconds: of these passes.
        includes_value: whether these include the value model's.
        slots: tokens that it has room for in its cache.
    """

    counters: Counters
    passes: float
    decode_passes: float
    seconds: float
    includes_value: bool
    slots: int


@dataclass
class Work:
    """What a server did between two moments.

    Attributes:
        passes: of the base model, over prompts and to decode.
        decode_passes: to decode.
        base_seconds: of the base model, see :mod:`bench.study.serve`.
        value_seconds: of guided steps, and of prompts in the value model.
        rows: of guided steps: a row is a request in a step.
        guided_rows: those of them that values were computed for.
        failed_steps: guided steps that failed, and whose requests lost their guidance.
    """

    passes: int
    decode_passes: int
    base_seconds: float
    value_seconds: float
    rows: int
    guided_rows: int
    failed_steps: int

    @classmethod
    def between(cls, before: Counted, after: Counted) -> Work:
        def grown(name: str, **labels: str) -> float:
            return after.counters.total(name, **labels) - before.counters.total(name, **labels)

        value = grown("lenvm:value_model_milliseconds_total") / 1e3
        return cls(
            passes=int(after.passes - before.passes),
            decode_passes=int(after.decode_passes - before.decode_passes),
            base_seconds=after.seconds - before.seconds - value * after.includes_value,
            value_seconds=value,
            rows=int(grown("lenvm:rows_total")),
            guided_rows=int(grown("lenvm:rows_total", status="guide")),
            failed_steps=int(grown("lenvm:fallbacks_total")),
        )


@dataclass(frozen=True)
class Sample:
    """Of memory and utilisation; ``gpus`` as :func:`gpu_loads` gives them."""

    seconds: float
    resident_mib: float
    gpus: list[tuple[float | None, float | None]]

    @property
    def gpu_mib(self) -> float | None:
        """Of all GPUs together."""
        known = [mib for mib, _ in self.gpus if mib is not None]
        return sum(known) if known else None

    @property
    def gpu_utilisation(self) -> float | None:
        """Of all GPUs in the mean."""
        known = [percent for _, percent in self.gpus if percent is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Answer:
    """To one request. A failed one has an ``error``, and no tokens.

    Attributes:
        seconds: from sending it to the last byte.
        first_seconds: from sending it to the first token.
    """

    prompt: int
    sample: int
    seconds: float
    first_seconds: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def token_seconds(self) -> float | None:
        """Of each token after the first."""
        if self.first_seconds is None or self.output_tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.output_tokens - 1)


@dataclass
class Result:
    """What was measured of a condition.

    Attributes:
        seconds: of all requests.
        work: of the server meanwhile.
        samples: taken meanwhile.
        slots: tokens that the server has room for in its cache.
        stages: milliseconds of each stage of each guided step.
        load_average: of the machine, over the minute before the end.
    """

    condition: Condition
    seconds: float
    answers: list[Answer] = field(repr=False)
    work: Work
    samples: list[Sample] = field(repr=False)
    slots: int
    stages: Stages
    load_average: float

    @property
    def finished(self) -> list[Answer]:
        """The answers that did not fail."""
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> Counter[str]:
        """How often a request failed in each way."""
        return Counter(answer.error for answer in self.answers if answer.error is not None)

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)

    def workload(self, prompts: int, samples: int) -> Workload | None:
        """What was decoded, tokens in the mean; None if nothing was."""
        if not self.output_tokens:
            return None
        finished = self.finished
        prompt_tokens = sum(answer.prompt_tokens for answer in finished) / len(finished)
        return Workload(prompts, samples, prompt_tokens, self.output_tokens / (prompts * samples))

    @property
    def guidance(self) -> Guidance | None:
        """What the value model computed at most for an output token: at each guided row k candidates."""
        if not self.work.rows:
            return None
        share = self.work.guided_rows / self.work.rows
        return Guidance(self.condition.top_k * share, 1 - share)

    @property
    def value_passes(self) -> float:
        """Passes that values were computed in, if all rows of a step are due at once."""
        return self.work.passes * self.work.guided_rows / self.work.rows if self.work.rows else 0


@dataclass(frozen=True)
class Peak:
    """What a device could do, by its data sheet or as measured."""

    name: str
    operations: float  # a second
    bandwidth: float  # bytes a second


@dataclass(frozen=True)
class Models:
    """The dimensions of both, where they are known.

    Attributes:
        base, value: the models.
        element_size: bytes of an element of weights and cache.
        peak: of the device; None: unknown.
    """

    base: Architecture | None
    value: Architecture | None
    element_size: int = 2
    peak: Peak | None = None

    def sizes(self) -> dict[str, str]:
        """Name, parameters and weights of each that is known."""
        found = {}
        if self.base is not None:
            found["base model"] = self.base.name, self.base.parameters
        if self.value is not None:
            found["value model"] = self.value.name, self.value.value_parameters
        size = self.element_size
        return {
            kind: f"{name}, {n / 1e9:.3g} billion parameters, {n * size / 2**30:.3g} GiB in {8 * size} bits"
            for kind, (name, n) in found.items()
        }

    def _counted(self, result: Result, load: Load) -> tuple[Architecture, Workload, Architecture | None] | None:
        """What is counted of a run: the base model, tokens, and the value model if it computed any; None: unknown."""
        work, guidance = result.workload(len(load.prompts), load.samples), result.guidance
        if work is None or self.base is None or (guidance is not None and self.value is None):
            return None
        return self.base, work, self.value if guidance is not None else None

    def operations(self, result: Result, load: Load) -> tuple[float, float] | None:
        """Of one output token without prompts, and of the whole run; None where dimensions are not known."""
        if (counted := self._counted(result, load)) is None:
            return None
        token = flops.operations_per_output_token(*counted, result.guidance)
        return token, sum(flops.operations(*counted, result.guidance).values())

    def bytes(self, result: Result, load: Load) -> float | None:
        """That the whole run moved at least; None likewise."""
        if (counted := self._counted(result, load)) is None:
            return None
        passes = dict(passes=result.work.passes, value_passes=result.value_passes)
        return flops.run_bytes(*counted, result.guidance, element_size=self.element_size, **passes)


def dimensions(model: str) -> Architecture | None:
    """Of a model by its directory or name; None, with a line that says why, where they are not to be had."""
    from transformers import AutoConfig

    try:
        return Architecture.from_config(AutoConfig.from_pretrained(model).to_dict(), Path(model).name)
    except (OSError, ValueError) as error:
        print(f"operations are left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def figures(result: Result, load: Load, models: Models) -> dict[str, float | None]:
    """The numbers of a condition by the names that they have in the table; None: there is no such number."""
    tokens, work, seconds = result.output_tokens, result.work, result.seconds
    other = seconds - work.base_seconds - work.value_seconds
    operations, moved = models.operations(result, load), models.bytes(result, load)

    def share(number: float | None, of: float, scale: float = 1.0) -> float | None:
        return number / of * scale if of and number is not None else None

    def largest(numbers: Iterable[float | None]) -> float | None:
        return max((number for number in numbers if number is not None), default=None)

    def percentile(numbers: Iterable[float | None], percent: float) -> float | None:
        """In milliseconds, linear between neighbours."""
        known = [number for number in numbers if number is not None]
        return float(np.percentile(known, percent)) * 1e3 if known else None

    first = [answer.first_seconds for answer in result.finished]
    of_token = [answer.token_seconds for answer in result.finished]
    utilisation = [sample.gpu_utilisation for sample in result.samples if sample.gpu_utilisation is not None]
    found = {
        "end-to-end wall clock (s)": seconds,
        "output tokens": tokens,
        "throughput (output tokens/s)": share(tokens, seconds),
        "time per output token (ms)": share(seconds, tokens, 1e3),
        "time to first token, median (ms)": percentile(first, 50),
        "time to first token, 99th percentile (ms)": percentile(first, 99),
        "time per output token of a request, median (ms)": percentile(of_token, 50),
        "time per output token of a request, 99th percentile (ms)": percentile(of_token, 99),
        "forward passes of the base model": work.passes,
        "requests a decoding pass": share(tokens - len(result.finished), work.decode_passes),
        "base model (ms / pass)": share(work.base_seconds, work.passes, 1e3),
        "value model (ms / pass)": share(work.value_seconds, work.passes, 1e3),
        "other (ms / pass)": share(other, work.passes, 1e3),
        "rows with values (%)": share(work.guided_rows, work.rows, 100),
        "estimated GFLOP / output token": operations and operations[0] / 1e9,
        "achieved GFLOP/s": operations and operations[1] / seconds / 1e9,
        "achieved GB/s": share(moved, seconds, 1e-9),
        "memory of the server's processes, peak (MiB)": largest(sample.resident_mib for sample in result.samples),
        "room in the server's cache (tokens)": result.slots,
        "GPU memory, peak (MiB)": largest(sample.gpu_mib for sample in result.samples),
        "GPU utilisation, mean (%)": share(sum(utilisation), len(utilisation)),
    }
    if (peak := models.peak) is not None:
        found[f"FLOP/s, share of {peak.name} (%)"] = operations and operations[1] / seconds / peak.operations * 100
        found[f"bytes/s, share of {peak.name} (%)"] = share(moved, seconds, 100 / peak.bandwidth)
    return found


def label(condition: Condition) -> str:
    return f"{condition.name}, {condition.lengths}"
