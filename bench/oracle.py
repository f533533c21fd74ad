"""What the best of values would do: those of each candidate out of continuations that the base model samples.

    python -m bench.oracle [--targets 20 40] [--continuations 8] [--prompts 16] [--seeds 1] [--json FILE]

A candidate's value is the mean of ``1 - gamma^length`` over its continuations, as the value model was trained to
predict. What is beyond the target by half of it and 32 tokens is not sampled. Beside it stand the demo's value model
and no values, on the same prompts: where all three miss a target, it is not for want of values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
from lenvm_kernels.demo import generation
from lenvm_kernels.demo.models import Models
from lenvm_kernels.demo.run import SAMPLING, Setting, answer
from lenvm_kernels.evaluate.measures import Answer, measure
from lenvm_kernels.evaluate.plan import LONGEST
from lenvm_kernels.evaluate.report import settings_table
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step.values import ValueSource
from lenvm_kernels.timing import StepRecord

SPARE, SPARE_SHARE, SHORTEST = 32, 0.5, 8


class Continuations(ValueSource):
    """Values of the candidates of one sequence.

    Args:
        models: the base model, which continues.
        processor: of the sequence, whose step asks.
        continuations: of each candidate.
        length: of the sequence and a continuation at most; a continuation has 8 tokens in any case.
    """

    def __init__(self, models: Models, processor: LenVMLogitsProcessor, continuations: int, length: int) -> None:
        self.models, self.continuations, self.length = models, continuations, length
        self._processor, self._scored = processor, processor._step._tensors.rows(1).scored

    def value_logits(
        self, requests: int, nodes: int, record: StepRecord, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        record.mark("forward")
        sequence, count = self._processor._previous, int(self._scored.counts[0])
        found = torch.zeros(1, self._scored.token_ids.shape[1])
        if sequence is None or count == 0:
            return found, found
        begun = torch.cat([sequence.expand(count, -1), self._scored.token_ids[0, :count, None].long()], dim=1)
        begun = begun.repeat_interleave(self.continuations, dim=0)
        inputs = {"input_ids": begun, "attention_mask": torch.ones_like(begun)}
        limit = max(SHORTEST, self.length - begun.shape[1])
        sampled = generation.sample(self.models, None, inputs, None, max_new_tokens=limit, **SAMPLING)
        lengths = sampled.counts.sum(dim=1).view(count, self.continuations)
        values = -torch.expm1(lengths * math.log(self.models.value_model.lenvm_config.gamma)).mean(dim=1)
        found[0, :count] = torch.logit(values)
        return found, found


def oracle_answer(models: Models, prompt: str, asked: Setting, seed: int, continuations: int) -> Answer:
    """An answer that such values guide."""

    def processor_of(model: Any, value_model: Any, guidance: Mapping[str, Any] | None, mask: torch.Tensor, **options):
        if guidance is None:  # of the continuations
            return LenVMLogitsProcessor(model, value_model, guidance, mask, **options)
        target = guidance["target_length"]
        processor = LenVMLogitsProcessor(model, None, parse_guidance(guidance), mask, **options)
        length = mask.shape[1] + target + int(SPARE_SHARE * target) + SPARE
        processor._step.values = Continuations(models, processor, continuations, length)
        return processor

    with patch.object(generation, "LenVMLogitsProcessor", processor_of), tqdm(disable=True) as bar:
        return answer(models, [prompt], "oracle", asked, seed=seed, bar=bar)[0]


@dataclass(frozen=True)
class Cell:
    """A row of the table: the measures of ``lenvm evaluate``."""

    target: int
    values: str
    measures: dict[str, Any]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--targets", type=int, nargs="+", default=[20, 40], help="tokens")
    arguments.add_argument("--continuations", type=int, default=8, help="of each candidate")
    args = arguments.parse_args()
    runs = DemoRuns.of(args)
    cells: list[Cell] = []
    for target in args.targets:
        answers: dict[str, list[Answer]] = {"oracle": [], "value model": [], "none": []}
        for seed in runs.seeds:
            for name in answers:
                asked = Setting({"target_length": target}, name == "value model", int(LONGEST * target))
                if name == "oracle":
                    for i, prompt in enumerate(tqdm(runs.prompts, desc=f"{name}, target {target}")):
                        found = oracle_answer(runs.models, prompt, asked, seed, args.continuations)
                        answers[name].append(replace(found, prompt=i))
                    continue
                with tqdm(disable=True) as bar:
                    answers[name] += answer(runs.models, runs.prompts, name, asked, seed=seed, bar=bar)
        measures = {name: measure(found, target) for name, found in answers.items()}
        cells += [Cell(target, name, found) for name, found in measures.items()]
        print(f"Target {target} tokens", "", *settings_table(measures), sep="\n", flush=True)
        runs.write("bench.oracle", cells, continuations=args.continuations)


if __name__ == "__main__":
    main()
