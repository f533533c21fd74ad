"""What a study on a server asks for, what was measured of it, and the tables of that."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.reporting import text_table as table
from bench.harness.storing import write_json
from bench.study import flops
from bench.study.flops import Architecture, Guidance, Workload
from bench.study.run import MIN_P, TEMPERATURE

LENGTHS = ("fixed", "free")
NEUTRAL = {"value_mode": "centered_exp", "value_scale": 0.0}  # as the published runs were guided

# --- what is asked for ---


@dataclass(frozen=True)
class Condition:
    """What all requests of a run ask for. ``custom_params`` of None: nothing of the plugin."""

    name: str
    lengths: str
    top_k: int = -1
    stride: int | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def is_guided(self) -> bool:
        return self.stride is not None


def plain_conditions(lengths: Sequence[str]) -> list[Condition]:
    """Those of the server without the plugin."""
    return [Condition("plain", of) for of in lengths]


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
        timeout: seconds of a request.
    """

    prompts: Sequence[Sequence[int]]
    samples: int
    max_tokens: int
    concurrency: int | None = None
    timeout: float = 3600.0

    def body(self, condition: Condition, prompt: int, sample: int) -> dict[str, Any]:
        """Of a request to ``/generate``."""
        sampling: dict[str, Any] = {
            "temperature": TEMPERATURE,
            "min_p": MIN_P,
            "top_k": condition.top_k,
            "max_new_tokens": self.max_tokens,
            "ignore_eos": condition.lengths == "fixed",
            "sampling_seed": prompt * self.samples + sample,
        }
        if condition.custom_params is not None:
            sampling["custom_params"] = condition.custom_params
        return {"input_ids": list(self.prompts[prompt]), "sampling_params": sampling}


# --- what was measured ---

IDLE_SECONDS = "sglang:scheduler_idle_seconds_total"


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
    def between(cls, before: Counters, after: Counters) -> Work:
        def grown(name: str, **labels: str) -> float:
            return after.total(name, **labels) - before.total(name, **labels)

        passes = "sglang:cuda_graph_passes_total"
        decode = [int(grown(passes, mode=mode)) for mode in ("decode_none", "decode_cuda_graph")]
        value = grown("lenvm:value_model_milliseconds_total") / 1e3
        forward = "sglang:forward_execution_seconds_total"  # of a GPU
        in_batches = grown("sglang:scheduler_stage_seconds_total", category="run_batch") - value
        return cls(
            passes=int(grown(passes)),
            decode_passes=sum(decode),
            base_seconds=grown(forward) if forward in after else in_batches,
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
    """To one request; ``seconds`` from sending it to the last byte. A failed one has an ``error``, and no tokens."""

    prompt: int
    sample: int
    seconds: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Result:
    """What was measured of a condition.

    Attributes:
        seconds: of all requests.
        work: of the server meanwhile.
        samples: taken meanwhile.
        slots: tokens that the server has room for in its cache.
        stages: mean, median and 95th percentile of the milliseconds of each stage of the guided steps.
        load_average: of the machine, over the minute before the end.
    """

    condition: Condition
    seconds: float
    answers: list[Answer] = field(repr=False)
    work: Work
    samples: list[Sample] = field(repr=False)
    slots: int
    stages: dict[str, dict[str, float]]
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


@dataclass(frozen=True)
class Models:
    """The dimensions of both, where they are known."""

    base: Architecture | None
    value: Architecture | None

    def operations(self, result: Result, load: Load) -> tuple[float, float] | None:
        """Of one output token without prompts, and of the whole run; None where dimensions are not known."""
        work, guidance = result.workload(len(load.prompts), load.samples), result.guidance
        if work is None or self.base is None or (guidance is not None and self.value is None):
            return None
        value = self.value if guidance is not None else None
        token = flops.operations_per_output_token(self.base, work, value, guidance)
        return token, sum(flops.operations(self.base, work, value, guidance).values())


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
    operations = models.operations(result, load)

    def share(number: float, of: float, scale: float = 1.0) -> float | None:
        return number / of * scale if of else None

    def largest(numbers: Iterable[float | None]) -> float | None:
        return max((number for number in numbers if number is not None), default=None)

    of_requests = [answer.seconds / answer.output_tokens for answer in result.finished if answer.output_tokens]
    utilisation = [sample.gpu_utilisation for sample in result.samples if sample.gpu_utilisation is not None]
    return {
        "end-to-end wall clock (s)": seconds,
        "output tokens": tokens,
        "throughput (output tokens/s)": share(tokens, seconds),
        "time per output token (ms)": share(seconds, tokens, 1e3),
        "time per output token of a request (ms)": share(sum(of_requests), len(of_requests), 1e3),
        "forward passes of the base model": work.passes,
        "requests a decoding pass": share(tokens - len(result.finished), work.decode_passes),
        "base model (ms / pass)": share(work.base_seconds, work.passes, 1e3),
        "value model (ms / pass)": share(work.value_seconds, work.passes, 1e3),
        "other (ms / pass)": share(other, work.passes, 1e3),
        "rows with values (%)": share(work.guided_rows, work.rows, 100),
        "estimated GFLOP / output token": operations and operations[0] / 1e9,
        "achieved GFLOP/s": operations and operations[1] / seconds / 1e9,
        "memory of the server's processes, peak (MiB)": largest(sample.resident_mib for sample in result.samples),
        "room in the server's cache (tokens)": result.slots,
        "GPU memory, peak (MiB)": largest(sample.gpu_mib for sample in result.samples),
        "GPU utilisation, mean (%)": share(sum(utilisation), len(utilisation)),
    }


# --- tables ---

TIME_PER_TOKEN = "time per output token (ms)"
SWEEP = {  # columns of the table of all conditions, and whose numbers they have
    "s": "end-to-end wall clock (s)",
    "tokens": "output tokens",
    "tokens/s": "throughput (output tokens/s)",
    "ms / token": TIME_PER_TOKEN,
    "of a request": "time per output token of a request (ms)",
    "passes": "forward passes of the base model",
    "base ms / pass": "base model (ms / pass)",
    "value ms / pass": "value model (ms / pass)",
    "other ms / pass": "other (ms / pass)",
    "rows with values, %": "rows with values (%)",
    "MiB": "memory of the server's processes, peak (MiB)",
}


def compared(plain: dict[str, float | None], guided: dict[str, float | None]) -> dict[str, dict[str, float | None]]:
    """The published form: each number without and with guidance, and the second over the first.

    Numbers that neither has are left out.
    """
    rows = {}
    for name in plain:
        without, with_guidance = plain[name], guided[name]
        if without is not None or with_guidance is not None:
            ratio = with_guidance / without if without and with_guidance is not None else None
            rows[name] = {"plain": without, "guided": with_guidance, "ratio": ratio}
    return rows


def headline(results: Sequence[Result], lengths: str) -> tuple[Result, Result] | None:
    """The plain run of these lengths, and the one that is guided most: by the smallest stride, of these the largest k.

    None if there is none of them.
    """
    alike = [result for result in results if result.condition.lengths == lengths]
    plain = [result for result in alike if result.condition.name == "plain"]
    guided = [result for result in alike if result.condition.is_guided]
    if not plain or not guided:
        return None
    return plain[0], max(guided, key=lambda result: (-(result.condition.stride or 0), result.condition.top_k))


def write_summary(
    folder: Path, environment: dict[str, Any], load: Load, models: Models, results: Sequence[Result]
) -> None:
    """Write ``summary.md`` and ``summary.json`` of the conditions measured so far."""
    numbers = {id(result): figures(result, load, models) for result in results}
    tables = {}
    requests = f"Prompts: {len(load.prompts)}, samples of each: {load.samples}"
    sections = ["# Decoding with and without guidance in the server"]
    sections.append("\n".join(f"- {name}: {value}" for name, value in environment.items()))
    if environment["server device"] == "cpu":
        sections.append(
            "On a CPU the operators are the PyTorch reference, written to be read: these times show what the study"
            " measures, not what the kernels cost."
        )
    if failures := failures_of(results):
        sections.append("Failed:\n\n" + "\n".join(f"- {failure}" for failure in failures))
    for lengths in LENGTHS:
        if (pair := headline(results, lengths)) is None:
            continue
        plain, guided = pair
        tables[lengths] = compared(numbers[id(plain)], numbers[id(guided)])
        outputs = (
            f"{load.max_tokens} tokens each, ends of sequence passed over"
            if lengths == "fixed"
            else f"{load.max_tokens} tokens each at most: outputs differ in length, so that only rates compare"
        )
        where = f"k = {guided.condition.top_k}, stride {guided.condition.stride}"
        sections += [
            f"## Outputs of {lengths} length, {where}",
            f"{requests}, {outputs}.",
            table(
                ("metric", "plain", "guided", "ratio"), [(name, *row.values()) for name, row in tables[lengths].items()]
            ),
        ]
    if results:
        sections += ["## Every condition", *_sweep(results, numbers)]
    if stages := [
        (label(result.condition), stage, *ms.values()) for result in results for stage, ms in result.stages.items()
    ]:
        sections += [
            "## Stages of a guided step",
            "Milliseconds: mean, median, 95th percentile.",
            table(("condition", "stage", "mean", "p50", "p95"), stages),
        ]
    (folder / "summary.md").write_text("\n\n".join(sections) + "\n")
    summary = {
        "environment": environment,
        "tables": tables,
        "conditions": [described(result, load, models) for result in results],
        "failed": failures,
    }
    write_json(folder / "summary.json", summary)


def _sweep(results: Sequence[Result], numbers: dict[int, dict[str, float | None]]) -> list[str]:
    plain_times = {
        result.condition.lengths: numbers[id(result)][TIME_PER_TOKEN]
        for result in results
        if result.condition.name == "plain"
    }
    rows = []
    for result in results:
        has, plain = numbers[id(result)], plain_times.get(result.condition.lengths)
        own = has[TIME_PER_TOKEN]
        ratio = own / plain if own is not None and plain else None
        rows.append((label(result.condition), result.load_average, *(has[name] for name in SWEEP.values()), ratio))
    paragraphs = [
        "Load is the machine's mean of the last minute, 1 a busy core. The ratio is of the time per output token to"
        " that of the plain run. MiB: pages that processes share count for each.",
        table(("condition", "load", *SWEEP, "ratio"), rows),
    ]
    if any(result.condition.top_k == 1 for result in results):
        paragraphs.append(
            "With k = 1 the engine decodes greedily: there is nothing to guide, and no value is computed."
        )
    return paragraphs


def failures_of(results: Sequence[Result]) -> list[str]:
    """What failed, a line for each way in each condition."""
    lines = []
    for result in results:
        name, count = label(result.condition), len(result.answers)
        lines += [f"{name}: {times} of {count} requests: {error}" for error, times in result.errors.items()]
        if failed := result.work.failed_steps:
            lines.append(f"{name}: guidance failed in {failed} steps, see the server's log")
    return lines


def described(result: Result, load: Load, models: Models) -> dict[str, Any]:
    """A condition in ``summary.json`` and ``conditions.jsonl``."""
    return {
        **asdict(result.condition),
        "requests": len(result.answers),
        "failed_requests": sum(result.errors.values()),
        "load_average": result.load_average,
        "work": asdict(result.work),
        "figures": figures(result, load, models),
        "stages_ms": result.stages,
    }


def label(condition: Condition) -> str:
    return f"{condition.name}, {condition.lengths}"
