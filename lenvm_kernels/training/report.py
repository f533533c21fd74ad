"""What a training says of itself: measures of held-out answers, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.training.measures import measure
from lenvm_kernels.training.targets import Split

# Whose values are measured: the mean of the training targets, what training goes on from, and what comes of it.
CONSTANT, INITIAL, FITTED = "constant", "initial", "value model"
# Of the table.
MEASURES = {
    "r2": "R^2",
    "rank_correlation_within_prompts": "rank correlation within a prompt",
    "correlation_at_a_position": "at a position",
    "mae_tokens": "mean error, tokens",
}


class Measured:
    """Measures of held-out answers.

    Args:
        folders: the directories of answers.
        splits: the held-out answers of each.
        gamma: the discount of the values.

    Attributes:
        folders: as given.
        found: by directory with held-out answers and by name, as :func:`measure` returns them.
    """

    def __init__(self, folders: Sequence[Path], splits: Sequence[Split], gamma: float) -> None:
        self._splits = {str(folder): split for folder, split in zip(folders, splits, strict=True) if split.answers}
        self.folders, self._gamma = folders, gamma
        self.found: dict[str, dict[str, Any]] = {folder: {} for folder in self._splits}

    def add(self, name: str, values: Callable[[Split], list[torch.Tensor]]) -> None:
        """Measure what a function says of a split."""
        for folder, split in self._splits.items():
            wanted = [example.targets for example in split.examples]
            self.found[folder][name] = measure(values(split), wanted, split.answers, self._gamma)


def means(numbers: Sequence[float], count: int) -> list[float]:
    """Of every so many numbers, to six digits behind the point."""
    parts = (numbers[start : start + count] for start in range(0, len(numbers), count))
    return [round(sum(part) / len(part), 6) for part in parts]


def table(report: dict[str, Any]) -> str:
    """The measures of held-out answers as a table in Markdown."""
    lines = [
        f"| held-out answers | values | {' | '.join(MEASURES.values())} |",
        f"| --- | --- |{' --- |' * len(MEASURES)}",
    ]
    for folder, found in report["test"].items():
        kind = "guided" if report["guided"][folder] else "plain"
        for name, measures in found.items():
            cells = [measures[measure] for measure in MEASURES]
            texts = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
            lines.append(f"| {folder}: {measures['answers']} {kind} | {name} | {texts} |")
    return "\n".join(lines) + "\n"
