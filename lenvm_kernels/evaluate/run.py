"""Make the answers of a plan, in process or by a server, with their likelihoods under the base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lenvm_kernels.evaluate.measures import Answer, Key
from lenvm_kernels.evaluate.plan import BASE, CLOSING_TOKENS, FORCED, Plan, Unit
from lenvm_kernels.evaluate.servers import Generated, Server
from lenvm_kernels.evaluate.stored_answers import StoredAnswers
from lenvm_kernels.loading.generation import AnswerBar, sample
from lenvm_kernels.loading.models import Models, tokens_of
from lenvm_kernels.loading.prompts import say


@dataclass(frozen=True)
class Runner:
    """Answers the units of a plan.

    Attributes:
        models: the base model, and the value model unless there is none or a server has it.
        server: answers settings with a value model, and unguided ones. If None, answers are made in process.
        constant_server: the same for guided settings without a value model.
    """

    plan: Plan
    models: Models
    server: Server | None = None
    constant_server: Server | None = None

    def run(self, stored: StoredAnswers) -> None:
        """Add the answers of the plan that are not stored yet, with progress on stderr.

        Raises:
            ValueError: as :class:`Server` and :func:`sample`, or the base model has no end-of-sequence token.
        """
        self.models.check_ends()
        units = self.plan.units()
        with AnswerBar(sum(len(unit.prompts) for unit in units), len(stored.answers), self.models) as bar:
            for unit in units:
                if unit.keys()[0] in stored.answers:
                    continue
                bar.set_description(unit.setting.name if unit.target is None else f"{unit.setting.name}, {unit.target}")
                stored.add(self.answer(unit, stored.answers, bar))
                bar.update(len(unit.prompts))

    def answer(self, unit: Unit, made: Mapping[Key, Answer], bar: AnswerBar | None = None) -> list[Answer]:
        """Answer the prompts of a unit.

        Args:
            unit: the unit.
            made: holds the base model's answers, which a forced answer begins with.
            bar: shows the tokens of every step.
        """
        plan, setting, target, tokenizer = self.plan, unit.setting, unit.target, self.models.tokenizer
        texts = [plan.prompts[index] for index in unit.prompts]
        if setting.said:
            assert plan.say_it is not None and target is not None
            texts = [say(text, plan.say_it, target) for text in texts]
        prompts, limit = tokens_of(tokenizer, texts), plan.limit(target)
        begun: list[list[int]] = [[] for _ in prompts]
        answers: dict[int, Generated] = {}
        if setting.name == FORCED:
            assert plan.closing is not None and target is not None
            closing = tokenizer(plan.closing, add_special_tokens=False)["input_ids"]
            limit = max(4, CLOSING_TOKENS - len(closing))
            for row, index in enumerate(unit.prompts):
                own = made[BASE, None, unit.seed, index]
                begun[row] = own.ids[: target - CLOSING_TOKENS] + closing
                if len(own.ids) <= target:
                    answers[row] = own.ids, own.ended, None
        rows = [row for row in range(len(prompts)) if row not in answers]
        generated = self._generate(unit, [prompts[row] + begun[row] for row in rows], limit, bar) if rows else []
        for row, (new, ended, predicted) in zip(rows, generated, strict=True):
            answers[row] = begun[row] + new, ended, predicted
        all_ids = [answers[row][0] for row in range(len(prompts))]
        nlls = likelihoods(self.models, prompts, all_ids)
        texts = tokenizer.batch_decode(all_ids, skip_special_tokens=True)
        return [
            Answer(setting.name, target, unit.seed, index, ids, texts[row], answers[row][1], nlls[row], answers[row][2])
            for row, (index, ids) in enumerate(zip(unit.prompts, all_ids, strict=True))
        ]

    def _generate(self, unit: Unit, prompts: list[list[int]], limit: int, bar: AnswerBar | None) -> list[Generated]:
        """Generate in process, or by a server if there is one."""
        setting, sampling, eos = unit.setting, self.plan.sampling, self.models.eos_token_ids
        server = self.server if setting.with_values or setting.guidance is None else self.constant_server
        guidance = setting.guidance
        if guidance is not None and unit.target is not None:
            guidance = {"target_length": unit.target, **guidance}
        # The value model predicts the lengths of the base model's own answers. vLLM does not return predictions.
        if setting.name == BASE and setting.with_values and (server is None or server.engine == "sglang"):
            guidance = {"return_values": True}
        if server is not None:

            def ask(row: int) -> Generated:
                seed = unit.seed_of(row)
                return server.answer(
                    prompts[row], guidance, max_new_tokens=limit, sampling=sampling, seed=seed, eos=eos
                )

            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(ask, range(len(prompts))))
        torch.manual_seed(unit.seed_of())
        value_model = self.models.value_model if setting.with_values and guidance is not None else None
        inputs = self.models.padded(prompts)
        options: dict[str, Any] = dict(max_new_tokens=limit, streamer=bar, **sampling)
        sampled = sample(self.models, value_model, inputs, guidance, **options)
        return [(ids, ids[-1] in eos, predicted) for ids, predicted in sampled]


@torch.no_grad()
def likelihoods(
    models: Models, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Negative log-likelihood of each token of each answer under the base model alone, in nats.

    The distribution is the unfiltered one at temperature 1, by teacher forcing, with the softmax in fp32.
    """
    nlls = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=models.model.device)
        logits = models.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, len(prompt) :, None])
        nlls.append([round(-x, 6) for x in log_p[:, 0].tolist()])
    return nlls
