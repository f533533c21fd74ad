"""What the best of values would do: those of each candidate out of continuations that the base model samples.

    python -m bench.oracle [--targets 20 40] [--continuations 8] [--prompts 16] [--seeds 1] [--json FILE]

A candidate's value is the mean of ``1 - gamma^length`` over its continuations, as the value model was trained to
predict. What is beyond the target by half of it and 32 tokens is not sampled. Beside it stand the demo's value model
and no values, on the same prompts: where all three miss a target, it is not for want of values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessor

from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
from lenvm_kernels.demo.generation import Sampled, new_tokens
from lenvm_kernels.demo.models import Models
from lenvm_kernels.demo.run import LONGEST, SAMPLING, Setting, answer, answers_of
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.measures import measure as measure_answers
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step.values import ValueSource
from lenvm_kernels.timing import StepRecord
from lenvm_kernels.types import ScoredCandidates

SPARE, SPARE_SHARE = 32, 0.5


class Continuations(ValueSource, LogitsProcessor):
    """Values of the candidates of one sequence, which ``generate`` tells as the first of its processors.

    Args:
        models: the base model, which continues.
        scored: of the step, the candidates whose values are wanted.
        continuations: of each candidate.
        limit: tokens of the whole answer that are sampled at most.
    """

    def __init__(self, models: Models, scored: ScoredCandidates, continuations: int, limit: int) -> None:
        self.models, self.scored, self.continuations, self.limit = models, scored, continuations, limit
        self.sequence: torch.Tensor | None = None
        self.prompt_len = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.sequence is None:
            self.prompt_len = input_ids.shape[1]
        self.sequence = input_ids
        return scores

    def value_logits(self, requests: int, nodes: int, record: StepRecord) -> torch.Tensor:
        """See :class:`ValueSource`."""
        assert self.sequence is not None and (requests, nodes) == (1, 1)
        record.mark("forward")
        found = torch.zeros(1, self.scored.token_ids.shape[1])
        count = int(self.scored.counts[0])
        if count == 0:
            return found
        begun = torch.cat([self.sequence.expand(count, -1), self.scored.token_ids[0, :count, None].long()], dim=1)
        output = self.models.model.generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel lacks
            begun,
            attention_mask=torch.ones_like(begun),
            do_sample=True,
            num_return_sequences=self.continuations,
            max_new_tokens=max(8, self.limit - (begun.shape[1] - self.prompt_len)),
            pad_token_id=self.models.pad_token_id,
            **SAMPLING,
        )
        _, counts = new_tokens(self.models, output, begun.shape[1])
        lengths = counts.sum(dim=1).view(count, self.continuations)
        values = -torch.expm1(lengths * math.log(self.models.value_model.lenvm_config.gamma)).mean(dim=1)
        found[0, :count] = torch.logit(values)
        return found


def oracle_answer(models: Models, prompt: str, target: int, continuations: int) -> Sampled:
    """One answer of at most ``LONGEST`` times its target."""
    inputs, params = models.encode([prompt]), parse_guidance({"target_length": target})
    processor = LenVMLogitsProcessor(
        models.model,
        None,
        params,
        inputs["attention_mask"],
        max_new_tokens=int(LONGEST * target),
        tokenizers=(models.tokenizer, models.value_tokenizer),
        **SAMPLING,
    )
    step = processor._step
    limit = target + int(SPARE_SHARE * target) + SPARE
    step.values = values = Continuations(models, step._tensors.rows(1).scored, continuations, limit)
    options = processor.generation_kwargs
    options["logits_processor"].insert(0, values)
    output = models.model.generate(  # type: ignore[operator]
        **inputs, **options, pad_token_id=models.pad_token_id, return_dict_in_generate=True, output_logits=True
    )
    return Sampled(*new_tokens(models, output.sequences, inputs["input_ids"].shape[1]), output.logits)


@dataclass(frozen=True)
class Cell:
    """A row of the table: the measures of ``lenvm evaluate``."""

    target: int
    values: str
    measures: dict[str, Any]


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    lines = [
        "| target | values | within 25 % | within 10 % | distance | sentence ends | cut | perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        found = cell.measures
        shares = " | ".join(f"{found[name]:.0%}" for name in ("within_25", "within_10"))
        ends = "" if found["sentence_ends"] is None else f"{found['sentence_ends']:.0%}"
        lines.append(
            f"| {cell.target} | {cell.values} | {shares} | {found['distance']:.1f} | {ends} | {found['cut']:.0%} | "
            f"{found['perplexity']:.2f} |"
        )
    return "\n".join(lines)


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
            torch.manual_seed(seed)
            for i, prompt in enumerate(tqdm(runs.prompts, desc=f"oracle, target {target}")):
                sampled = oracle_answer(runs.models, prompt, target, args.continuations)
                answers["oracle"] += answers_of(runs.models, sampled, "oracle", target, seed, i)
            for name in ("value model", "none"):
                setting = Setting({"target_length": target}, name != "none", int(LONGEST * target))
                with tqdm(disable=True) as bar:
                    answers[name] += answer(runs.models, runs.prompts, name, setting, seed=seed, bar=bar)
        cells += [Cell(target, name, measure_answers(found, target)) for name, found in answers.items()]
        print(table(cells), flush=True)
        runs.write("bench.oracle", cells, continuations=args.continuations)


if __name__ == "__main__":
    main()
