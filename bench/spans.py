"""What ends a span: a hard cut, a soft budget, or both, on the demo's models.

    python -m bench.spans [--seeds 1 2 3] [--prompts 16] [--budget 60] [--json FILE]

The demo's model does not think before it answers. So the span is its whole answer, and the token that ends the sequence
is the one that ends the span. ``hard`` forces that token at the budget; ``le_soft`` and ``le_near`` guide to it;
``both`` is a ``thinking_budget``: ``le_near``, and a hard limit at 1.25 times as many tokens. ``le_soft`` leaves steps
alone where the model is sure. A span that is as long as its limit counts as cut. Perplexity is that of the base model,
the token that was forced included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from bench.harness import reporting
from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.demo.run import Setting, answer
from lenvm_kernels.guidance import parse_guidance

MAX_NEW_TOKENS = 200
ENTROPY_THRESHOLD = 0.5  # steps where the model is sure are left alone


@dataclass(frozen=True)
class Cell:
    """A row of the table, over all seeds.

    Attributes:
        setting: its name.
        lengths: tokens of each span, without the one that ends it.
        ended: spans that a token of their own has ended.
        perplexity: of the base model.
    """

    setting: str
    lengths: list[int]
    ended: int
    perplexity: float


def settings(budget: int, end: int) -> dict[str, dict[str, Any] | None]:
    """The guidance of each row."""
    of_span = {"end_token_ids": [end]}
    soft = {"entropy_threshold": ENTROPY_THRESHOLD, "constraint": "le_soft"}
    return {
        "none": None,
        "hard": of_span | {"hard_limit": budget},
        "le_soft": of_span | soft | {"target_length": budget},
        "le_soft and a limit": of_span | soft | {"thinking_budget": budget},
        "le_near": of_span | {"target_length": budget, "constraint": "le_near"},
        "both": of_span | {"thinking_budget": budget},
    }


def measure(runs: DemoRuns, setting: str, guidance: dict[str, Any] | None, bar: tqdm) -> Cell:
    """One row: the prompts answered with every seed."""
    limit = None if guidance is None else parse_guidance(guidance).hard_limit
    limit = MAX_NEW_TOKENS - 1 if limit is None else limit
    lengths: list[int] = []
    nats: list[float] = []
    for seed in runs.seeds:
        bar.set_description(f"{setting}, seed {seed}")
        asked = Setting(guidance, True, MAX_NEW_TOKENS)
        answers = answer(runs.models, runs.prompts, setting, asked, seed=seed, bar=bar)
        lengths += [len(found.ids) - 1 for found in answers]
        nats += [x for found in answers for x in found.nll]
    return Cell(setting, lengths, sum(length < limit for length in lengths), math.exp(sum(nats) / len(nats)))


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    columns = ("budget", "mean length", "median", "longest", "ended by a token of its own", "perplexity")
    rows = []
    for cell in cells:
        lengths = sorted(cell.lengths)
        of_lengths = (f"{sum(lengths) / len(lengths):.1f}", lengths[len(lengths) // 2], lengths[-1])
        rows.append((cell.setting, *of_lengths, f"{cell.ended / len(lengths):.0%}", f"{cell.perplexity:.2f}"))
    return reporting.text_table(columns, rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--budget", type=int, default=60, help="tokens of a span")
    args = arguments.parse_args()
    runs = DemoRuns.of(args)
    cells: list[Cell] = []
    with tqdm(unit="step") as bar:
        for setting, guidance in settings(args.budget, runs.models.eos_token_ids[0]).items():
            cells.append(measure(runs, setting, guidance, bar))
            print(table(cells), flush=True)
    runs.write("bench.spans", cells, budget=args.budget)


if __name__ == "__main__":
    main()
