"""Answers of the base model, their directory, and the target values computed from their lengths.

The value of a state is ``1 - gamma^remaining`` (arXiv 2604.27039), where ``remaining`` is the number of tokens to come,
including the end-of-sequence token: ``L`` at the last prompt token for an answer of ``L`` tokens, 1 before the end.

States in the guided part of an answer have no target, because guidance chose the next tokens, not the base model.
The unknown tail of an answer that was cut at its limit is assumed geometric, with the rate at which answers end in the
second half of their limit; the target is the expectation. Dropping cut answers would hide that long answers exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lenvm_kernels.evaluate.stored_answers import StoredAnswers
from lenvm_kernels.loading import TRAIN

# The prompt's index, and the index of the answer among the prompt's answers.
Key = tuple[int, int]


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the base model."""

    prompt: int  # index of the prompt
    sample: int  # index among the prompt's answers
    target: int | None  # target length of the guidance, in tokens. None if the answer is unguided
    guided: int  # number of leading tokens that were sampled under guidance
    limit: int  # maximum number of tokens
    ids: list[int]  # tokens, including the end-of-sequence token of a finished answer
    finished: bool

    @property
    def key(self) -> Key:
        return self.prompt, self.sample


@dataclass(frozen=True)
class Example:
    """An answer with its targets: values of its last T states, 1 <= T <= ``len(answer.ids)``.

    A state follows the prompt or any token of the answer except the last.
    """

    prompt: list[int]  # tokens
    answer: SampledAnswer
    targets: torch.Tensor  # fp32 [T]


Examples = Sequence[Example]


class AnswerStore(StoredAnswers):
    """A directory of ``lenvm collect``.

    ``plan["prompts"]`` are objects with ``text``, ``split`` and ``ids`` (tokens in the chat template).
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        super().__init__(folder, plan, SampledAnswer, "lenvm collect")
        self.prompts: list[dict[str, Any]] = plan["prompts"]

    @classmethod
    def open(cls, folder: Path) -> AnswerStore:
        """Open a directory of ``--answers`` with its own plan."""
        file = folder / "plan.json"
        if not file.is_file():
            raise ValueError(f"--answers must be directories of lenvm collect, {str(folder)!r} has no plan.json")
        return cls(folder, json.loads(file.read_text(encoding="utf-8")))

    def of_split(self, split: str) -> list[SampledAnswer]:
        """Answers to the prompts of a split, sorted by key."""
        answers = sorted(self.answers.values(), key=lambda answer: answer.key)
        return [answer for answer in answers if self.prompts[answer.prompt]["split"] == split]

    def examples(self, split: str, gamma: float, *, of_prompts: bool = True) -> list[Example]:
        """The answers of a split that have a target, sorted by key; tails are estimated on the training prompts.

        If ``of_prompts`` is False, the last token of a prompt has no target, because a probe only values candidates.
        """
        tail = tail_factor(self.of_split(TRAIN), gamma)
        found = []
        for answer in self.of_split(split):
            values = targets(answer, gamma, tail)[0 if of_prompts or answer.guided else 1 :]
            if len(values):
                found.append(Example(self.prompts[answer.prompt]["ids"], answer, values))
        return found


def gamma_of(answers: Iterable[SampledAnswer]) -> float:
    """The discount at which the 99th percentile of the lengths, in tokens, has the value 0.99 (arXiv 2604.27039)."""
    return float(0.01 ** (1 / np.percentile([len(answer.ids) for answer in answers], 99)))


def tail_factor(answers: Sequence[SampledAnswer], gamma: float) -> float:
    """``E[gamma^tail]`` of a geometric tail of at least one token; 1 if no answer reached half of its limit."""
    late = ended = 0
    for answer in answers:
        tokens = len(answer.ids) - max(answer.limit // 2, answer.guided)
        if tokens > 0:
            late += tokens
            ended += answer.finished
    if late == 0:
        return 1.0
    rate = ended / late
    return rate * gamma / (1 - (1 - rate) * gamma)


def targets(answer: SampledAnswer, gamma: float, tail: float) -> torch.Tensor:
    """Values of an answer's states from the last guided token on: fp32 ``[len(ids) - guided]``."""
    remaining = torch.arange(len(answer.ids) - answer.guided, 0, -1, dtype=torch.float64)
    return (1 - gamma**remaining * (1.0 if answer.finished else tail)).float()
