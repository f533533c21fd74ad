"""What a guided step takes on a GPU that is not there: its launches, each with the time its machine code predicts.

    python -m bench.step_model [--out FILE] [--json FILE] [--before FILE] [--calibrate FOLDER]

:mod:`bench.step_launches` compiles a step's launches for sm_90, :mod:`bench.kernel_model` has the formulas. Nothing
here is measured. ``--calibrate`` takes a folder of :mod:`bench.gpu_suite`, or a file in it, and fits the rates that the
model assumes to the times in it: the share of HBM's bandwidth, the share of the chip's own rates, the gap between
launches. It prints them and what is left, and writes them to the device's results, where the model reads them.
"""

import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from bench.harness import flags
from bench.harness.reporting import table
from bench.harness.storing import dump
from bench.kernel_model import GPUS, Cost, Gpu, Rates
from bench.models import VOCAB
from bench.step import CACHED
from bench.step_launches import COPY_SHARE, DRAFTS, MATMUL_SHARE, TORCH_OPERATOR, TRUNK_BASE, Launch, Step
from bench.step_rates import CalibrationError, calibrate

RESULT = Path(__file__).parent / "results" / "step-model.md"
BEFORE = RESULT.with_name("step-model-before.json")
MODELS, SIZES = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"), (1, 8, 64, 256, 512)
DETAILED, DETAILED_SIZES = "Qwen2.5-1.5B", (8, 64, 256)
BATCHES = [f"B {requests}" for requests in DETAILED_SIZES]

Numbers = dict[str, dict]  # model -> "requests GPU" -> see numbers_of


def numbers_of(step: Step, gpu: Gpu, rates: Rates) -> dict[str, object]:
    """Milliseconds of a step and of its floor, its launches; microseconds by label of a layer's, and of the others."""

    def by_label(launches: Sequence[Launch], costs: Sequence[Cost], operators: int) -> dict[str, tuple[float, str]]:
        times: dict[str, tuple[float, str]] = {}
        for launch, cost in zip(launches, costs, strict=True):
            times[launch.label] = times.get(launch.label, (0.0, ""))[0] + cost.seconds, cost.bound
        times["gaps"] = sum(launch.gap(rates) for launch in launches) + operators * rates.gap, ""
        if operators:
            times[f"{operators} torch operators"] = operators * TORCH_OPERATOR, ""
        return {label: (round(seconds * 1e6, 2), bound) for label, (seconds, bound) in times.items()}

    layer, others = step.costs(gpu, rates)
    return {
        "milliseconds": round(step.seconds(gpu, rates) * 1e3, 3),
        "floor": round(step.floor(gpu) * 1e3, 3),
        "launches": step.num_launches,
        "layer": by_label(step.layer, layer, step.operators[0]),
        "others": by_label(step.others, others, step.operators[1]),
    }


def predict(make_step: Callable[[int], Step], sizes: Sequence[int], rates: dict[str, Rates]) -> dict[str, dict]:
    """:func:`numbers_of` of steps of so many requests, by requests and GPU."""
    steps = ((requests, make_step(requests)) for requests in sizes)
    return {
        f"{requests} {gpu.name}": numbers_of(step, gpu, rates[gpu.name])
        for requests, step in steps
        for gpu in GPUS.values()
    }


def launch_table(part: str, now: Numbers, before: Numbers, gpu: str) -> list[str]:
    """Markdown: microseconds of the launches of a ``layer``, or of the ``others``."""
    sides = [[side[DETAILED][f"{requests} {gpu}"][part] for requests in DETAILED_SIZES] for side in (now, before)]
    labels = dict.fromkeys(label for side in sides for times in side for label in times)
    rows = []
    for label in labels:
        new, old = ([f"{times[label][0]:.1f}" if label in times else "-" for times in side] for side in sides)
        bounds = dict.fromkeys(times[label][1] for times in sides[0] if label in times)
        rows.append([label, *new, ", ".join(bounds), *old])
    sums = [[f"{sum(microseconds for microseconds, _ in times.values()):.1f}" for times in side] for side in sides]
    rows.append(["**together**", *sums[0], "", *sums[1]])
    return table(["launch", *BATCHES, "bound by", *(f"before, {size}" for size in BATCHES)], rows)


def step_table(now: Numbers, before: Numbers) -> list[str]:
    """Markdown: milliseconds of steps, and their floors."""
    columns = ("model", "B", "GPU", "launches", "before", "at rates ms", "step ms", "before ms", "at rates / step")
    rows = []
    for model, by_size in now.items():
        for key, n in by_size.items():
            requests, gpu = key.split()
            old = before[model][key]
            shares = [f"{numbers['floor'] / numbers['milliseconds']:.0%}" for numbers in (n, old)]
            times = [f"{value:.2f}" for value in (n["floor"], n["milliseconds"], old["milliseconds"])]
            rows.append([model, requests, gpu, n["launches"], old["launches"], *times, *shares])
    return table([*columns, "before"], rows)


def fp8_tables(plain: dict[str, dict], quantized: dict[str, dict]) -> list[str]:
    """Markdown: what weights and a cache in fp8 make of the launches of a layer, and of a step."""
    lines = []
    for gpu in GPUS:
        steps = [side[f"{requests} {gpu}"] for side in (quantized, plain) for requests in DETAILED_SIZES]
        rows = [[f"{name}, us", *(f"{step['layer'][name][0]:.1f}" for step in steps)] for name in steps[0]["layer"]]
        rows.append(["**a step, ms**", *(f"{step['milliseconds']:.2f}" for step in steps)])
        rows.append(["at rates, ms", *(f"{step['floor']:.2f}" for step in steps)])
        lines += [f"### {gpu}\n", *table(["", *BATCHES, *(f"bf16, {size}" for size in BATCHES)], rows)]
    return lines


def drafts_table(plain: dict[str, dict], drafted: dict[str, dict]) -> list[str]:
    """Markdown: milliseconds of a step with drafts beside those of as many steps as it has nodes."""
    steps, rows = 1 + DRAFTS, []
    for key, of_step in drafted.items():
        together, single = of_step["milliseconds"], plain[key]["milliseconds"] * steps
        numbers = (str(of_step["launches"]), f"{together:.2f}", f"{single:.2f}", f"{together / single:.0%}")
        rows.append([*key.split(), *numbers])
    return table(["B", "GPU", "launches", f"with {DRAFTS} drafts", f"{steps} steps", "share"], rows)


def trunk_tables(of_trunk: dict[str, dict]) -> list[str]:
    """Markdown: microseconds of the launches of a step with a trunk, and of the step."""
    lines = []
    for gpu in GPUS:
        steps = [of_trunk[f"{requests} {gpu}"] for requests in DETAILED_SIZES]
        rows = [[label, *(f"{step['others'][label][0]:.1f}" for step in steps)] for label in steps[0]["others"]]
        rows.append(["**a step**", *(f"{step['milliseconds'] * 1e3:.0f}" for step in steps)])
        rows.append(["at rates", *(f"{step['floor'] * 1e3:.0f}" for step in steps)])
        lines += [f"### {gpu}\n", *table([f"{steps[0]['launches']} launches", *BATCHES], rows)]
    return lines


def page(
    now: Numbers,
    quantized: dict[str, dict],
    drafted: dict[str, dict],
    of_trunk: dict[str, dict],
    before: dict,
    rates: dict[str, Rates],
) -> str:
    """The page of results."""
    of_rates = "\n".join(f"- {gpu}: {of_gpu}" for gpu, of_gpu in rates.items())
    lines = [
        f"""# A guided step, computed from its machine code

Counted and computed, not measured: [measuring.md](../../docs/measuring.md) says how. What an H200 took is in
[its results](nvidia-h200/tuning.md).

- command: `python -m bench.step_model`, {time.strftime("%Y-%m-%d")}
- torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}, on a CPU
- weights and cache in bf16; vocabulary {VOCAB:,}; {CACHED} cached tokens a request; K = 8 slots, five candidates a
  request; winners committed; logits in fp32; the whole step in one CUDA graph
- "before": the kernels of commit {before["commit"]}, by the same model (`{before["command"]}`, {before["date"]})
{of_rates}

## Launches of {DETAILED}, microseconds
""",
    ]
    for gpu in GPUS:
        for part, title in (("layer", "of a layer"), ("others", "of the rest of a step")):
            lines += [f"### {gpu}, {title}\n", *launch_table(part, now, before["models"], gpu)]
    lines += [
        f"""## Weights and cache in fp8

The matrices of the layers, keys and values in e4m3, the rest as above; {DETAILED}.
""",
        *fp8_tables(now[DETAILED], quantized),
        f"""## Drafts

{DETAILED}, a chain of {DRAFTS} drafts a request, all of which are candidates, and five candidates at each of its nodes;
milliseconds. How many of these tokens are accepted depends on the drafts.
""",
        *drafts_table(now[DETAILED], drafted),
        f"""## A trunk instead of a value model

Of {TRUNK_BASE}, with the states of three of its layers; microseconds of a whole step, candidates, reweighting and the
draw of a token among them. Handing the states over is not counted.
""",
        *trunk_tables(of_trunk),
        f"""## Steps

`at rates` is the larger of bytes at {COPY_SHARE:.0%} of the data sheet's bandwidth and operations at \
{MATMUL_SHARE:.0%} of its tensor rate,
about what a copy and cuBLAS were expected to reach; on an H200 it was 56 % and 70 %.
The aim is a step of at most 1.35 times that, a share of 74 %.
""",
        *step_table(now, before["models"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = flags.parser(__doc__, json="write the numbers of this commit to a file, and no page")
    parser.add_argument("--out", type=Path, default=RESULT, help="where to write the page (default: %(default)s)")
    parser.add_argument("--before", type=Path, default=BEFORE, help="numbers to set beside (default: %(default)s)")
    parser.add_argument("--calibrate", type=Path, metavar="FOLDER", help="fit the rates to a GPU suite's results")
    args = parser.parse_args()
    if args.calibrate:
        try:
            print("\n".join(calibrate(args.calibrate)))
        except CalibrationError as error:
            parser.error(str(error))
        return
    rates = {gpu.name: Rates.of(gpu) for gpu in GPUS.values()}
    now = {model: predict(partial(Step.of, model), SIZES, rates) for model in MODELS}
    if args.json:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULT.parent).stdout.strip()
        about = {
            "command": "python -m bench.step_model --json FILE",
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
        }
        about |= {"torch": torch.__version__, "triton": triton.__version__}
        args.json.write_text(dump(about | {"models": now}, 3))
        return
    detailed = partial(Step.of, DETAILED)
    steps = (partial(detailed, weights="fp8", cache="fp8"), partial(detailed, drafts=DRAFTS), Step.of_trunk)
    quantized, drafted, of_trunk = (predict(make_step, DETAILED_SIZES, rates) for make_step in steps)
    text = page(now, quantized, drafted, of_trunk, json.loads(args.before.read_text()), rates)
    args.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
