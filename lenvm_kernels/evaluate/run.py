"""The plan of a run, and the answers of a plan, made in process or by a server.

A unit of work is a batch of prompts under one setting, target and seed. The unit alone determines its random seed, so a
resumed run makes the same answers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.evaluate.measures import Answer, Key
from lenvm_kernels.evaluate.servers import Generated, Server
from lenvm_kernels.evaluate.stored_answers import StoredAnswers
from lenvm_kernels.loading import say
from lenvm_kernels.loading.models import AnswerBar, Models, sample, tokens_of

BASE, CUT, FORCED, CONSTANT, GUIDED = "none", "hard cut", "forced answer", "constant", "guided"
SAID = ", said"
# A forced answer leaves the base model's answer this many tokens before the target.
CLOSING_TOKENS = 16
# Maximum answer length, as a multiple of the target.
LONGEST = 2.5


@dataclass(frozen=True)
class Setting:
    """A way to answer prompts.

    Attributes:
        name: the name in tables.
        guidance: request parameters without the target. If None, answers are unguided.
        with_values: whether a value model guides the answers, or predicts the lengths of the base model's.
        said: whether the prompt names the target.
        targets: the targets that are answered, ``(None,)`` for a setting without a target. If None, the plan's targets.
    """

    name: str
    guidance: dict[str, Any] | None
    with_values: bool
    said: bool = False
    targets: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that determines the answers; a directory holds the answers of one plan.

    Attributes:
        targets: tokens.
        seeds: each seed answers every prompt.
        settings: the sampled settings; the hard cut is computed from the base model's answers.
        sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        rows: prompts per batch, or concurrent requests to a server.
        engine, constant_engine: engines of the servers. If None, answers are made in process.
        answers: reference answer of each prompt. If None, accuracy is not measured.
        say_it: text that is appended to the prompts of settings with ``said``.
        closing: text that forces an answer. If None, there is no such setting.
    """

    base: str
    value: str
    prompts: list[str]
    targets: list[int]
    seeds: list[int]
    settings: list[Setting]
    max_new_tokens: int
    sampling: dict[str, Any]
    rows: int
    dtype: str
    engine: str | None = None
    constant_engine: str | None = None
    answers: list[str] | None = None
    say_it: str | None = None
    closing: str | None = None

    def limit(self, target: int | None) -> int:
        """Maximum tokens of an answer to a target."""
        return self.max_new_tokens if target is None else min(self.max_new_tokens, default_limit(target))

    def units(self) -> list[Unit]:
        """All units, in the order in which they are made."""
        count = len(self.prompts)
        batches = [range(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]
        return [
            Unit(setting, target, seed, batch)
            for setting in self.settings
            for target in setting.targets or self.targets
            for seed in self.seeds
            for batch in batches
        ]

    def views(self, answers: Sequence[Answer]) -> dict[str, dict[str, list[Answer]]]:
        """Answers by target (a string, for JSON) and setting.

        Answers without a target are cut at the target's limit; for ``hard cut``, the base model's are at the target.
        """
        made: dict[tuple[str, int | None], list[Answer]] = {}
        for answer in answers:
            made.setdefault((answer.setting, answer.target), []).append(answer)
        views: dict[str, dict[str, list[Answer]]] = {}
        for target in self.targets:
            view = views[str(target)] = {}
            for name in (setting.name for setting in self.settings):
                if (name, target) in made:
                    view[name] = made[name, target]
                elif (name, None) in made:
                    view[name] = [answer.cut(self.limit(target)) for answer in made[name, None]]
                if name == BASE:
                    view[CUT] = [answer.cut(target) for answer in made[BASE, None]]
        return views


@dataclass(frozen=True)
class Unit:
    """A batch of prompts, by their indices, under one setting, target and seed."""

    setting: Setting
    target: int | None
    seed: int
    prompts: range

    def keys(self) -> list[Key]:
        return [(self.setting.name, self.target, self.seed, prompt) for prompt in self.prompts]

    def seed_of(self, *more: int) -> int:
        return seed_from(self.seed, self.setting.name, self.target, self.prompts.start, *more)


def seed_from(*content: Any) -> int:
    """A seed below 2**31, derived from content that JSON can represent."""
    return int.from_bytes(hashlib.sha256(json.dumps(content).encode()).digest()[:4], "little") >> 1


def default_limit(target: int) -> int:
    """2.5 times the target, rounded up to a multiple of 16."""
    return math.ceil(LONGEST * target / 16) * 16


def settings_of(
    guidances: Sequence[dict[str, Any]], *, with_values: bool, said: bool = False, forced: bool = False
) -> list[Setting]:
    """The settings of a plan, the baselines first.

    Args:
        guidances: parameters of the guided settings. If empty, the default parameters.
        with_values: whether there is a value model.
        said: repeat each setting except the forced answer with prompts that name the target.
        forced: add the forced answer.
    """
    settings = [Setting(BASE, None, with_values, targets=(None,))]
    if forced:
        settings.append(Setting(FORCED, None, False))
    settings.append(Setting(CONSTANT, {}, False))
    for guidance in guidances or [{}]:
        name = json.dumps(guidance, sort_keys=True) if guidance else GUIDED if with_values else CONSTANT
        settings.append(Setting(name, guidance, with_values))
    if said:
        named = [setting for setting in settings if setting.name != FORCED]
        settings += [replace(setting, name=setting.name + SAID, said=True, targets=None) for setting in named]
    return list({setting.name: setting for setting in settings}.values())


def stored_answers(folder: Path, plan: Plan) -> StoredAnswers:
    """The answers of a plan that a directory holds. Units that a kill has left incomplete are dropped."""
    stored = StoredAnswers(folder, asdict(plan), Answer, "lenvm evaluate")
    units = [unit.keys() for unit in plan.units()]
    keys = [key for unit in units if stored.answers.keys() >= set(unit) for key in unit]
    if len(keys) < len(stored.answers):
        stored.keep(keys)
    return stored


@dataclass(frozen=True)
class Runner:
    """Answers the units of a plan.

    Attributes:
        models: the base model, and the value model unless there is none or a server has it.
        server: answers settings with a value model, and unguided ones. If None, answers are made in process.
        constant_server: answers guided settings without a value model. If None, answers are made in process.
    """

    plan: Plan
    models: Models
    server: Server | None = None
    constant_server: Server | None = None

    def run(self, stored: StoredAnswers) -> None:
        """Add the answers of the plan that are not stored yet, with progress on stderr."""
        self.models.check_ends()
        units = self.plan.units()
        with AnswerBar(sum(len(unit.prompts) for unit in units), len(stored.answers), self.models) as bar:
            for unit in units:
                if unit.keys()[0] in stored.answers:
                    continue
                bar.set_description(unit.setting.name if unit.target is None else f"{unit.setting.name}, {unit.target}")
                stored.add(self.answer(unit, stored.answers, bar))
                bar.update(len(unit.prompts))

    def answer(self, unit: Unit, made: Mapping[Key, Answer], bar: AnswerBar) -> list[Answer]:
        """Answer the prompts of a unit. ``made`` has the base model's answers, which forced answers begin with."""
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

    def _generate(self, unit: Unit, prompts: list[list[int]], limit: int, bar: AnswerBar) -> list[Generated]:
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
            request: dict[str, Any] = dict(guidance=guidance, max_new_tokens=limit, sampling=sampling, eos=eos)
            with ThreadPoolExecutor(len(prompts)) as pool:
                futures = [
                    pool.submit(server.answer, prompt, seed=unit.seed_of(row), **request)
                    for row, prompt in enumerate(prompts)
                ]
                return [future.result() for future in futures]
        torch.manual_seed(unit.seed_of())
        value_model = self.models.value_model if setting.with_values and guidance is not None else None
        options: dict[str, Any] = dict(max_new_tokens=limit, streamer=bar, **sampling)
        sampled = sample(self.models, value_model, self.models.padded(prompts), guidance, **options)
        return [(ids, ids[-1] in eos, predicted) for ids, predicted in sampled]


@torch.no_grad()
def likelihoods(
    models: Models, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Negative log-likelihoods of answers' tokens under the base model alone, unfiltered, at temperature 1, in nats."""
    nlls = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=models.model.device)
        logits = models.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, len(prompt) :, None])
        nlls.append([round(-x, 6) for x in log_p[:, 0].tolist()])
    return nlls
