"""From the lengths of answers to the values that a model is to predict.

The value of a state is ``1 - gamma^remaining`` (arXiv 2604.27039), where ``remaining`` counts the tokens still to come,
end-of-sequence included: of an answer of ``L`` tokens it is ``L`` at the last token of the prompt and 1 at the token
before the end. The end itself has value 0 by definition, and nothing is trained there.

What guidance chose tells nothing of how the base model goes on, so nothing is trained before the last token that it
chose: guidance only leads to where answers are learned from.

An answer that was cut at its limit has an unknown tail. Its length is taken as geometric, with the rate at which
answers end in the second half of their limit, and the target is the expectation under it. Leaving these answers out
would teach that long ones do not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lenvm_kernels.loading.prompts import TRAIN
from lenvm_kernels.training.answers import Answer, AnswerStore
from lenvm_kernels.training.packs import Example

# 1 - gamma^L99 = 0.99 (arXiv 2604.27039).
PERCENTILE, VALUE_THERE = 99, 0.99


def gamma_of(answers: Iterable[Answer]) -> float:
    """The discount with which the 99th percentile of lengths, in tokens, has the value 0.99."""
    length = np.percentile([len(answer.ids) for answer in answers], PERCENTILE)
    return float((1 - VALUE_THERE) ** (1 / length))


def tail_factor(answers: Sequence[Answer], gamma: float) -> float:
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


def targets(answer: Answer, gamma: float, tail: float) -> torch.Tensor:
    """Values of the states of an answer, the first one after the last guided token: fp32 ``[len(ids) - guided]``."""
    remaining = torch.arange(len(answer.ids) - answer.guided, 0, -1, dtype=torch.float64)
    return (1 - gamma**remaining * (1.0 if answer.finished else tail)).float()


@dataclass(frozen=True)
class Split:
    """The answers of one split of one directory.

    Attributes:
        answers: those whose prompts are of the split, without the ones that ended under guidance.
        examples: the same with their targets.
    """

    answers: list[Answer]
    examples: list[Example]


def split_of(store: AnswerStore, split: str, gamma: float, *, of_prompts: bool = True) -> Split:
    """The answers to the prompts of a split, with targets. Tails are estimated on the training prompts alone.

    Without ``of_prompts`` a prompt's last token has none: only tokens that were candidates are valued.
    """
    tail = tail_factor(store.of_split(TRAIN), gamma)
    first = {a.key: 0 if of_prompts or a.guided else 1 for a in store.of_split(split)}
    answers = [a for a in store.of_split(split) if len(a.ids) > a.guided + first[a.key]]
    return Split(
        answers,
        [Example(store.prompts[a.prompt]["ids"], a.ids, targets(a, gamma, tail)[first[a.key] :]) for a in answers],
    )
