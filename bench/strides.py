"""What a stride of guidance changes and saves, on the demo's models: lengths, perplexity, the value model's work.

    python -m bench.strides [--seeds 1 2 3] [--prompts 16] [--json FILE]

A request with a stride is guided at every n-th step, and wherever one of its end tokens is among its candidates. The
table has strides with and without that rule. ``due`` is the share of the rows of requests that have not ended which
were guided. ``tokens`` and ``forwards`` are what the value model computed in steps, prompts left out, beside stride 1:
a forward of no tokens costs its launches only, and is not counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from unittest.mock import patch

import torch
from tqdm import tqdm

from bench.harness import reporting
from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.demo.run import QUICK, Setting, answer
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.measures import measure as measure_answers
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step import step as step_module
from lenvm_kernels.types import Status
from lenvm_kernels.value_model import ValueModel

STRIDES = (1, 2, 4, 8)


@dataclass
class Work:
    """What the value model did in the steps of a run.

    Attributes:
        rows: of requests that had not ended.
        due: of these, that were guided.
        steps: of a batch.
        forwards: of any tokens.
        tokens: computed.
    """

    rows: int = 0
    due: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0


@contextmanager
def counting() -> Iterator[Work]:
    """Counts the work of all steps in here."""
    work = Work()
    step, forward = GuidedStep.step, ValueModel.forward

    @wraps(step)
    def counted_step(self, scores, batch, *args, **options):
        output = step(self, scores, batch, *args, **options)
        work.rows += int(batch.active.sum())
        work.due += int((batch.active & (output.candidates.status == Status.GUIDE)).sum())
        return output

    @wraps(forward)
    def counted_forward(self, batch, *args, **options):
        if batch.layout.candidate_rows.shape[1]:  # else it is of prompts
            tokens = int(batch.layout.q_offsets[-1])
            work.steps, work.forwards, work.tokens = work.steps + 1, work.forwards + (tokens > 0), work.tokens + tokens
        return forward(self, batch, *args, **options)

    with patch.object(GuidedStep, "step", counted_step), patch.object(ValueModel, "forward", counted_forward):
        yield work


@contextmanager
def without_end_rule() -> Iterator[None]:
    """In here no candidate is taken for an end token when it is decided who is due."""
    select = step_module.select_scored_unchecked

    def without(candidates, requests, eos_token_ids, **options):
        return select(candidates, requests, torch.full_like(eos_token_ids, -2), **options)

    with patch.object(step_module, "select_scored_unchecked", without):
        yield


@dataclass(frozen=True)
class Cell:
    """A row of the table, summed over seeds."""

    setting: str
    stride: int
    end_rule: bool
    mean_length: float
    length_deviation: float
    perplexity: float
    work: Work


def measure(runs: DemoRuns, setting: str, stride: int, end_rule: bool, bar: tqdm) -> Cell:
    """One row: the prompts answered with every seed."""
    guidance = QUICK.settings()[setting].guidance
    asked = Setting(guidance and guidance | {"value_stride": stride}, True, QUICK.max_new_tokens)
    answers: list[Answer] = []
    with counting() as work:
        for seed in runs.seeds:
            bar.set_description(f"{setting}, stride {stride}, seed {seed}")
            options = dict(seed=seed, bar=bar)
            with nullcontext() if end_rule else without_end_rule():
                answers += answer(runs.models, runs.prompts, setting, asked, **options)
    found = measure_answers(answers, QUICK.target)
    return Cell(setting, stride, end_rule, found["mean"], found["distance"], found["perplexity"], work)


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    columns = ("guidance", "stride", "end rule", "mean length", "distance from target", "perplexity")
    rows = []
    for cell in cells:
        found = (f"{cell.mean_length:.1f}", f"{cell.length_deviation:.1f}", f"{cell.perplexity:.2f}")
        if cell.setting == "base":
            rows.append(("none", "", "", *found, "", "", ""))
            continue
        first = next(c.work for c in cells if (c.setting, c.stride) == (cell.setting, 1))
        work = cell.work
        # Runs differ in how long they are: what a row cost, beside what it cost with stride 1.
        tokens = work.tokens / work.rows / (first.tokens / first.rows)
        forwards = work.forwards / work.steps / (first.forwards / first.steps)
        shares = (f"{share:.0%}" for share in (work.due / work.rows, tokens, forwards))
        rows.append((cell.setting, cell.stride, "yes" if cell.end_rule else "no", *found, *shares))
    return reporting.text_table((*columns, "due", "tokens", "forwards"), rows)


def main() -> None:
    runs = DemoRuns.of(parser(__doc__).parse_args())
    rows = [(stride, rule) for stride in STRIDES for rule in (True, False) if stride > 1 or rule]
    cells: list[Cell] = []
    with tqdm(unit="step") as bar:
        for setting in ("base", "shorter", "target"):
            for stride, rule in rows if setting != "base" else rows[:1]:
                cells.append(measure(runs, setting, stride, rule, bar))
                print(table(cells), flush=True)
                runs.write("bench.strides", cells)


if __name__ == "__main__":
    main()
