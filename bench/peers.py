"""What a target length costs and gives by each way to ask for it, on the demo's models in transformers.

    python -m bench.peers [--target 60] [--prompts 16] [--seeds 1 2 3] [--device cuda] [--json FILE]

Every way answers the same prompts, a batch a seed, by ``model.generate`` with the same temperature, top-k and min-p:

- ``plain``: the base model alone;
- ``cut``: the same with the target as the limit of new tokens;
- ``published way``: a logits processor that takes the fork's steps (:mod:`bench.baselines.two_forward`) to ``eq``, the
  fork's constraint that the expected length be the target;
- ``ours``: this package's processor to the same ``eq``, and to its own ``target_length`` with the value model, with the
  trunk, and without either.

A token counts from the prompt to the end of its answer, and time is that of ``generate``, prompts included. Distance is
the mean of ``|length - target|``. Perplexity is the base model's, without filters. A ratio is of two times of the same
seed, the median over all seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from bench.baselines.two_forward import TwoForwardStep
from bench.harness import reporting
from bench.harness.demo_runs import DemoRuns, parser
from lenvm_kernels.cli_arguments import add_device, device_of, positive
from lenvm_kernels.evaluate.measures import Answer, measure
from lenvm_kernels.evaluate.plan import default_limit
from lenvm_kernels.evaluate.run import likelihoods, with_end
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.loading.generation import sample
from lenvm_kernels.loading.models import DEMO, DEMO_TRUNK, Models
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import Sampling, StepBatch, StepConfig
from lenvm_kernels.value_model import ValueModel

SAMPLING = dict(temperature=0.8, top_k=8, min_p=0.1)
PLAIN, CUT, PUBLISHED = "plain", "cut at the target", "published way, eq"
# Not measured here: another task, with models that think, on a GPU.
QUOTED = "Budget Guidance (arXiv 2506.13752, quoted: 0.6 % more latency; thoughts only)"
Answering = Callable[[Mapping[str, torch.Tensor]], list[list[int]]]


@dataclass(frozen=True)
class Way:
    """What came of one way with all seeds."""

    way: str
    tokens_per_second: float
    over_plain: float
    mean_length: float
    distance: float
    within_10: float
    cut: float
    perplexity: float


class TwoForwardProcessor(LogitsProcessor):
    """The published step as a processor of ``model.generate``, for prompts padded on the left.

    Args:
        value_model: that values candidates.
        guidance: of every row.
        mask: ``[B, S]`` of the prompts.
        limit: of new tokens.
        eos: tokens that end an answer.
    """

    def __init__(
        self, value_model: ValueModel, guidance: Mapping[str, Any], mask: torch.Tensor, limit: int, eos: list[int]
    ) -> None:
        (rows, self._width), device = mask.shape, mask.device
        slots = PagedSlots(rows, self._width + limit, device=device)
        config = StepConfig(vocab_size=value_model.config.vocab_size, max_candidates=SAMPLING["top_k"])
        self._step, self._lens = TwoForwardStep(value_model, slots, config), mask.sum(1)
        self._rows, self._eos = torch.arange(rows, device=device), torch.tensor(eos, device=device)
        ones = torch.ones(rows, device=device)
        filters = (ones * SAMPLING["top_k"]).int(), ones, ones * SAMPLING["min_p"], ones * SAMPLING["temperature"]
        self._sampling = Sampling(*filters, is_logits=True)
        params = parse_guidance(guidance, gamma=value_model.lenvm_config.gamma)
        for row, length in enumerate(self._lens.tolist()):
            self._step.add_request(row, params, set(eos), prompt_len=length)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logarithms of the guided probabilities, fp32 ``[B, V]``."""
        step, generated = self._step, input_ids.shape[1] - self._width
        if generated == 0:
            starts, none = self._rows * self._width + self._width - self._lens, torch.zeros_like(self._lens)
            step.extend(input_ids.flatten(), None, self._rows, starts, self._lens - 1, none)
        else:
            for row in self._rows[torch.isin(input_ids[:, -1], self._eos)].tolist():
                step.add_request(row, None, set())  # its answer has ended
        batch = StepBatch(input_ids[:, -1], self._rows, self._lens + generated)
        return step.step(scores, batch, self._sampling).probs.log()


def ways_of(models: Models, trunk: Models, target: int) -> dict[str, Answering]:
    """How each way answers."""
    limit = default_limit(target)

    def ours(of: Models, guidance: dict[str, Any] | None, value_model: Any, longest: int = limit) -> Answering:
        def answer(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
            found = sample(of, value_model, inputs, guidance, max_new_tokens=longest, **SAMPLING)
            return [tokens[counts].tolist() for tokens, counts in zip(found.tokens, found.counts, strict=True)]

        return answer

    def published(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
        mask, eos = inputs["attention_mask"], models.eos_token_ids
        processor = TwoForwardProcessor(models.value_model, equal, mask, limit, eos)
        found = models.model.generate(
            **inputs,
            logits_processor=LogitsProcessorList([processor]),
            max_new_tokens=limit,
            pad_token_id=eos[0],
            do_sample=True,
            **dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        )
        return [with_end(ids, False, eos)[0] for ids in found[:, mask.shape[1] :].tolist()]

    equal, near = {"target_length": target, "constraint": "eq"}, {"target_length": target}
    return {
        PLAIN: ours(models, None, None),
        CUT: ours(models, None, None, target),
        PUBLISHED: published,
        "ours, eq": ours(models, equal, models.value_model),
        "ours, target_length": ours(models, near, models.value_model),
        "ours, target_length, trunk": ours(trunk, near, trunk.value_model),
        "ours, target_length, no values": ours(models, near, None),
    }


def compare(runs: DemoRuns, trunk: Models, target: int, bar: tqdm) -> list[Way]:
    """Every way with every seed."""
    models, eos = runs.models, runs.models.eos_token_ids
    inputs = models.encode(runs.prompts)
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    prompts = [ids[mask.bool()].tolist() for ids, mask in pairs]
    ways = ways_of(models, trunk, target)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for seed in runs.seeds:
        for way, answer in ways.items():
            bar.set_description(f"{way}, seed {seed}")
            torch.manual_seed(seed)
            begin = time.perf_counter()
            found = answer(inputs)  # on the host, so that the device has done it
            seconds[way].append(time.perf_counter() - begin)
            texts = models.tokenizer.batch_decode(found, skip_special_tokens=True)
            nlls = likelihoods(models, prompts, found)
            answers[way] += [
                Answer(way, target, seed, i, ids, text, bool(ids) and ids[-1] in eos, nll)
                for i, (ids, text, nll) in enumerate(zip(found, texts, nlls, strict=True))
            ]
            bar.update()

    def per_token(way: str) -> list[float]:
        tokens = [sum(len(a.ids) for a in answers[way] if a.seed == seed) for seed in runs.seeds]
        return [took / count for took, count in zip(seconds[way], tokens, strict=True)]

    rows = []
    for way in ways:
        scores = measure(answers[way], target)
        ratios = [ours / plain for ours, plain in zip(per_token(way), per_token(PLAIN), strict=True)]
        speed = sum(len(a.ids) for a in answers[way]) / sum(seconds[way])
        of = [scores[name] for name in ("mean", "distance", "within_10", "cut", "perplexity")]
        rows.append(Way(way, speed, median(ratios), *of))
    return rows


def table(ways: list[Way]) -> str:
    """Markdown."""
    columns = ("way", "tokens/s", "time over plain", "length", "distance", "within 10 %", "cut", "perplexity")
    rows = [
        (
            way.way,
            f"{way.tokens_per_second:.1f}",
            f"{way.over_plain:.2f}",
            f"{way.mean_length:.1f}",
            f"{way.distance:.1f}",
            f"{way.within_10:.0%}",
            f"{way.cut:.0%}",
            f"{way.perplexity:.2f}",
        )
        for way in ways
    ]
    return reporting.text_table(columns, [*rows, (QUOTED, "", "1.006", *[""] * 5)])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--target", type=positive(int), default=60, help="tokens")
    add_device(arguments)
    args = arguments.parse_args()
    device = device_of(args.device)
    runs = DemoRuns.of(args, device)
    trunk = Models.load(DEMO, DEMO_TRUNK, device=device, dtype=torch.float32)
    with tqdm(unit="batch") as bar:
        found = compare(runs, trunk, args.target, bar)
    print(table(found))
    runs.write("bench.peers", found, target=args.target, device=device, **SAMPLING)


if __name__ == "__main__":
    main()
