"""What ends a span: a hard cut, a soft budget, or both, on the demo's models.

    python -m bench.spans [--seeds 1 2 3] [--prompts 16] [--budget 60] [--json FILE]

The demo's model does not think before it answers. So the span is its whole answer, and the token that ends the sequence
is the one that ends the span. ``hard`` forces that token at the budget; ``soft`` guides to the budget by ``le_soft``;
``both`` is a ``thinking_budget``, with its hard limit at 1.25 times as many tokens. A span that is as long as its limit
counts as cut. Perplexity is that of the base model, the token that was forced included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.demo.run import Answers, answer
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
    soft = {"entropy_threshold": ENTROPY_THRESHOLD, "end_token_ids": [end]}
    return {
        "none": None,
        "hard": {"end_token_ids": [end], "hard_limit": budget},
        "soft": soft | {"target_length": budget, "constraint": "le_soft"},
        "both": soft | {"thinking_budget": budget},
    }


def measure(runs: DemoRuns, setting: str, guidance: dict[str, Any] | None, bar: tqdm) -> Cell:
    """One row: the prompts answered with every seed."""
    limit = None if guidance is None else parse_guidance(guidance).hard_limit
    limit = MAX_NEW_TOKENS - 1 if limit is None else limit
    lengths: list[int] = []
    nll = 0.0
    for seed in runs.seeds:
        bar.set_description(f"{setting}, seed {seed}")
        answers = answer(runs.models, runs.prompts, guidance, MAX_NEW_TOKENS, seed=seed, bar=bar)
        lengths += [length - 1 for length in answers.lengths]
        nll += answers.nll
    perplexity = Answers([length + 1 for length in lengths], [], nll).perplexity
    return Cell(setting, lengths, sum(length < limit for length in lengths), perplexity)


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    lines = [
        "| budget | mean length | median | longest | ended by a token of its own | perplexity |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        lengths = sorted(cell.lengths)
        lines.append(
            f"| {cell.setting} | {sum(lengths) / len(lengths):.1f} | {lengths[len(lengths) // 2]} | {lengths[-1]} | "
            f"{cell.ended / len(lengths):.0%} | {cell.perplexity:.2f} |"
        )
    return "\n".join(lines)


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
