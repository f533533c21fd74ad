"""The rates of :mod:`bench.step_model`, fitted to what a GPU suite has measured.

HBM's share is that of the suite's own copies. The chip's share and the gap between launches are those with which the
model is closest to the times of whole steps and of single matmuls: the least sum of squares of log(model / measured).
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench import kernel_model
from bench.harness.storing import Results, read_folder, write_json
from bench.kernel_model import GPUS, Gpu, Rates
from bench.ops import ragged_linear
from bench.step_launches import Live, Step, costs_of, launches_of

FEWEST_STEPS = 3  # of different sizes tell the gap and the chip's share apart
ROUNDS = 30
STARTS = (0.4, 0.7, 1.0)  # of the chip's share: where latency bounds every launch, its slope is 0 and leads nowhere


class CalibrationError(ValueError):
    """The results lack what a fit needs."""


@dataclass(frozen=True)
class Measured:
    """A time, and what the model makes of it."""

    case: str
    seconds: float
    model: Callable[[Rates], float]


def calibrate(path: Path) -> list[str]:
    """Fit the rates to a suite's results, write them where the model reads them; what to print."""
    folder = path if path.is_dir() else path.parent
    results = read_folder(folder)
    if "step" not in results:
        raise CalibrationError(f"{folder} has no results of bench.step (step.json)")
    environment, ceilings = results["step"].environment, results["step"].ceilings
    device = str(environment["device"])
    gpu = next((gpu for gpu in GPUS.values() if gpu.name in device), None)
    if gpu is None or environment.get("dry_run"):
        what = "a dry run" if environment.get("dry_run") else device
        raise CalibrationError(f"the model knows {' and '.join(GPUS)}, the results in {folder} are of {what}")
    measured = list(_steps(results["step"], gpu))
    if len(measured) < FEWEST_STEPS:
        raise CalibrationError(
            f"{folder}/step.json has {len(measured)} steps in a graph with winners committed, {FEWEST_STEPS} are needed"
        )
    if "ragged_linear" in results:
        measured += _matmuls(results["ragged_linear"], gpu)
    rates = fit(measured, replace(Rates(), copy=ceilings.copy_bandwidth / gpu.bandwidth))
    rates = replace(rates, source=f"fitted to {device}, {environment['date']}")
    lines = [f"{gpu.name}: {rates}", f"assumed: {Rates()}", "", "model / measured, measured:"]
    ratios = {m.case: m.model(rates) / m.seconds for m in measured}
    lines += [f"{ratios[m.case]:7.2f} {m.seconds * 1e6:10.1f} us  {m.case}" for m in measured]
    file = kernel_model.RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()) / "rates.json"
    command = "python -m bench.step_model --calibrate FOLDER"
    about = {"gpu": gpu.name, "device": device, "command": command, "date": time.strftime("%Y-%m-%d")}
    write_json(file, about | {"rates": asdict(rates), "model / measured": ratios})
    return [*lines, "", f"written to {file}"]


def fit(measured: Sequence[Measured], start: Rates) -> Rates:
    """The chip's share and the gap with which the model is closest to the times, by Gauss and Newton."""

    def rates_of(x: torch.Tensor) -> Rates:
        chip, gap = x.exp().tolist()
        return replace(start, chip=chip, gap=gap)

    def errors(x: torch.Tensor) -> torch.Tensor:
        rates = rates_of(x)
        return torch.tensor([math.log(m.model(rates) / m.seconds) for m in measured], dtype=torch.float64)

    fitted = []
    for chip in STARTS:
        x = torch.tensor([chip, start.gap], dtype=torch.float64).log()
        for _ in range(ROUNDS):
            now, small = errors(x), 1e-4
            slopes = torch.stack([(errors(x + small * unit) - now) / small for unit in torch.eye(2, dtype=x.dtype)], 1)
            step = torch.linalg.lstsq(slopes, -now[:, None], driver="gelsd").solution[:, 0].clamp(-1, 1)
            while errors(x + step).norm() > now.norm() and step.norm() > 1e-9:
                step = step / 2
            x = x + step
        fitted.append(x)
    return rates_of(min(fitted, key=lambda x: errors(x).norm()))


def _steps(results: Results, gpu: Gpu) -> Iterator[Measured]:
    for case in results.cases:
        shape = case.shape
        kind = {key: shape.get(key) for key in ("launch", "base", "winners", "dtype")}
        if kind == {"launch": "graph", "base": "none", "winners": "committed", "dtype": "bfloat16"} and case.times:
            kept = {key: shape.get(key, "dtype") for key in ("weights", "cache")}
            kept = {key: None if value == "dtype" else value for key, value in kept.items()}
            step = Step.of(shape["model"], shape["B"], shape["counts"], shape["L"], **kept)
            # The weights do not stay in the L2 cache from one step to the next.
            yield Measured(f"step {case.case}", case.times.warm, lambda rates, step=step: step.seconds(gpu, rates))


def _matmuls(results: Results, gpu: Gpu) -> Iterator[Measured]:
    empty = results.ceilings.launch_cold or 0.0
    for case in results.cases:
        if case.times and case.times.cold and case.shape["dtype"] == "bfloat16":
            call = ragged_linear.call_of("cpu", **case.shape)
            launches = launches_of(partial(call, backend="triton"), Live(case.shape["rows"]))

            def model(rates: Rates, launches=launches) -> float:
                kernels = sum(cost.seconds for cost in costs_of(launches, gpu, rates))
                return empty + kernels + sum(launch.gap(rates) for launch in launches[1:])

            yield Measured(f"ragged_linear {case.case}", case.times.cold, model)
