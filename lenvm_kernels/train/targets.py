"""Target values from the lengths of answers.

The value of a state is ``1 - gamma^remaining`` (arXiv 2604.27039), where ``remaining`` counts the tokens to come,
end-of-sequence included: in an answer of ``L`` tokens it is ``L`` at the last token of the prompt and 1 at the token
before the end.

States inside the guided part of an answer have no target, because guidance and not the base model chose what follows.
The unknown tail of an answer that was cut at its limit is taken as geometric, with the rate at which answers end in the
second half of their limit. The target is the expectation. Without cut answers, long answers would seem not to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lenvm_kernels.loading.prompts import TRAIN
from lenvm_kernels.train.answers import AnswerStore, SampledAnswer


@dataclass(frozen=True)
class Example:
    """An answer with its targets.

    Attributes:
        prompt: tokens.
        targets: fp32 ``[T]``, 1 <= T <= ``len(answer.ids)``: values of the last T of the states after the prompt and
            after every token of the answer but the last.
    """

    prompt: list[int]
    answer: SampledAnswer
    targets: torch.Tensor


def gamma_of(answers: Iterable[SampledAnswer]) -> float:
    """The discount that gives the 99th percentile of the lengths, in tokens, the value 0.99 (arXiv 2604.27039)."""
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


def examples_of(store: AnswerStore, split: str, gamma: float, *, of_prompts: bool = True) -> list[Example]:
    """The answers of a split that have a target, sorted by key; tails are estimated on the training prompts.

    If ``of_prompts`` is False, the state at the last token of a prompt has no target: a probe values candidates.
    """
    tail = tail_factor(store.of_split(TRAIN), gamma)
    found = []
    for answer in store.of_split(split):
        values = targets(answer, gamma, tail)[0 if of_prompts or answer.guided else 1 :]
        if len(values):
            found.append(Example(store.prompts[answer.prompt]["ids"], answer, values))
    return found
