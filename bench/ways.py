"""Cost and result of each way to request a target length, on the demo's models: ``python -m bench.ways``.

Every way answers the same prompts, one batch per seed, by ``model.generate`` with the same temperature, top-k, min-p:

- ``plain``: the base model alone; ``cut``: with the target as the limit of new tokens;
- ``published way``: the fork's steps (:mod:`bench.two_forward`) to ``eq``, its constraint, which takes the candidate
  nearest to the target;
- ``ours``: this package's processor to ``eq``, and to ``target_length`` with each source of values.

Times cover ``generate``, prompts included. Distance is the mean of ``|length - target|``. The base model computes the
perplexity, without filters. A ratio compares two times of the same seed; the table has the median over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from bench.harness import environment, parser, table, write_json
from bench.two_forward import TwoForwardStep
from lenvm_kernels.evaluate.measures import Answer, measure
from lenvm_kernels.evaluate.run import default_limit, likelihoods
from lenvm_kernels.evaluate.servers import with_end
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.loading import held_out_prompts, spread
from lenvm_kernels.loading.models import DEMO, DEMO_PROBE, Models, sample
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import Sampling, StepBatch, StepConfig
from lenvm_kernels.values import ValueModel

SAMPLING = dict(temperature=0.8, top_k=8, min_p=0.1)
COLUMNS = ("way", "tokens/s", "time over plain", "length", "distance", "within 10 %", "cut", "perplexity")
Answering = Callable[[Mapping[str, torch.Tensor]], list[list[int]]]


class TwoForwardProcessor(LogitsProcessor):
    """The published step as a processor of ``model.generate``, for prompts padded on the left.

    Args:
        value_model: the value model.
        guidance: guidance of every row.
        mask: bool ``[B, S]``, attention mask of the prompts.
        limit: maximum number of new tokens.
        eos: tokens that end an answer.
    """

    def __init__(
        self, value_model: ValueModel, guidance: Mapping[str, Any], mask: torch.Tensor, limit: int, eos: list[int]
    ) -> None:
        (rows, self._width), device = mask.shape, mask.device
        slots = PagedSlots(rows, self._width + limit, device=device)
        config = StepConfig(vocab_size=value_model.config.vocab_size, max_candidates=SAMPLING["top_k"])
        self.step, self._lens = TwoForwardStep(value_model, slots, config), mask.sum(1)
        self._rows, self._eos = torch.arange(rows, device=device), torch.tensor(eos, device=device)
        ones = torch.ones(rows, device=device)
        filters = (ones * SAMPLING["top_k"]).int(), ones, ones * SAMPLING["min_p"], ones * SAMPLING["temperature"]
        self._sampling = Sampling(*filters, is_logits=True)
        params = parse_guidance(guidance, gamma=value_model.lenvm_config.gamma)
        for row, length in enumerate(self._lens.tolist()):
            self.step.add_request(row, params, set(eos), prompt_len=length)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logarithms of the guided probabilities, fp32 ``[B, V]``."""
        generated = input_ids.shape[1] - self._width
        if generated == 0:
            starts, none = self._rows * self._width + self._width - self._lens, torch.zeros_like(self._lens)
            self.step.extend(input_ids.flatten(), self._rows, starts, self._lens - 1, none)
        else:
            for row in self._rows[torch.isin(input_ids[:, -1], self._eos)].tolist():
                self.step.add_request(row, None, set())  # the answer has ended
        batch = StepBatch(input_ids[:, -1], self._rows, self._lens + generated)
        return self.step.step(self.step.prepare(scores, batch), self._sampling).probs.log()


def ways_of(models: Models, probe: Models, target: int) -> dict[str, Answering]:
    """Each way's function from encoded prompts to answers."""
    limit, equal, near = default_limit(target), {"target_length": target, "constraint": "eq"}, {"target_length": target}

    def ours(loaded: Models, guidance: dict[str, Any] | None, values: Any, longest: int = limit) -> Answering:
        def answer(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
            found = sample(loaded, values, inputs, guidance, max_new_tokens=longest, **SAMPLING)
            return [ids for ids, _ in found]

        return answer

    def published(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
        mask, eos = inputs["attention_mask"], models.eos_token_ids
        processor = TwoForwardProcessor(models.value_model, equal, mask, limit, eos)
        options = dict(max_new_tokens=limit, pad_token_id=eos[0], do_sample=True, temperature=1.0, top_k=0)
        found = models.model.generate(**inputs, logits_processor=LogitsProcessorList([processor]), **options)
        return [with_end(ids, False, eos)[0] for ids in found[:, mask.shape[1] :].tolist()]

    return {
        "plain": ours(models, None, None),
        "cut at the target": ours(models, None, None, target),
        "published way, eq": published,
        "ours, eq": ours(models, equal, models.value_model),
        "ours, target_length": ours(models, near, models.value_model),
        "ours, target_length, probe": ours(probe, near, probe.value_model),
        "ours, target_length, no values": ours(models, near, None),
    }


def compare(models: Models, ways: Mapping[str, Answering], prompts: list[str], seeds: list[int], target: int) -> list:
    """A row of ``COLUMNS`` per way, over all seeds. The first way is the plain one."""
    inputs, eos, rows = models.encode(prompts), models.eos_token_ids, []
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ids_of = [ids[mask.bool()].tolist() for ids, mask in pairs]
    per_token: dict[str, list[float]] = {}
    for way, answer in ways.items():
        answers, seconds, per_token[way] = [], 0.0, []
        for seed in seeds:
            torch.manual_seed(seed)
            begin = time.perf_counter()
            found = answer(inputs)
            took = time.perf_counter() - begin
            seconds += took
            per_token[way].append(took / sum(map(len, found)))
            texts = models.tokenizer.batch_decode(found, skip_special_tokens=True)
            for i, (ids, text, nll) in enumerate(zip(found, texts, likelihoods(models, ids_of, found), strict=True)):
                answers.append(Answer(way, target, seed, i, ids, text, bool(ids) and ids[-1] in eos, nll))
        scores = measure(answers, target)
        ratio = median(t / plain for t, plain in zip(per_token[way], next(iter(per_token.values())), strict=True))
        speed = sum(len(a.ids) for a in answers) / seconds
        rows.append([way, speed, ratio, *(scores[k] for k in ("mean", "distance", "within_10", "cut", "perplexity"))])
        print(*table(COLUMNS, rows[-1:])[0 if len(rows) == 1 else 2 :], sep="\n", flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--target", type=int, default=60, help="tokens (default: 60)")
    arguments.add_argument("--prompts", type=int, default=16, help="held-out prompts per seed (default: 16)")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--json", type=Path, help="also write the numbers to this file")
    args, device = arguments.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    models, probe = (Models.load(DEMO, kind, device=device, dtype=torch.float32) for kind in (DEMO, DEMO_PROBE))
    prompts = spread(held_out_prompts(), args.prompts)
    rows = compare(models, ways_of(models, probe, args.target), prompts, args.seeds, args.target)
    if args.json:
        ways = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        write_json(args.json, environment(device) | SAMPLING | {"target": args.target, "ways": ways})


if __name__ == "__main__":
    main()
