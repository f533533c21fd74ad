"""The plan of a run, and the generation of its answers, in process or on a server.

A batch mixes settings, targets and seeds. Its random seed depends only on its first answer, so a resumed run gives the
same answers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from lenvm_kernels.evaluate.measures import Answer, Key
from lenvm_kernels.evaluate.servers import Generated, Server
from lenvm_kernels.evaluate.stored_answers import StoredAnswers
from lenvm_kernels.loading import say
from lenvm_kernels.loading.models import AnswerBar, Models, sample, tokens_of

BASE, CUT, CONSTANT, GUIDED = "none", "hard cut", "constant", "guided"
SAID = ", said"
# Maximum answer length, as a multiple of the target.
LONGEST = 2.5


@dataclass(frozen=True)
class Setting:
    """A way to answer prompts."""

    name: str  # the name in tables
    guidance: dict[str, Any] | None  # request parameters without the target. If None, answers are unguided
    with_values: bool  # a value model guides the answers, or predicts the lengths of the base model's answers
    said: bool = False  # the prompt names the target
    targets: tuple[int | None, ...] | None = None  # (None,) without a target. If None, the plan's targets

    @property
    def is_constant(self) -> bool:
        """Whether answers are guided without a value model."""
        return self.guidance is not None and not self.with_values


@dataclass(frozen=True)
class Plan:
    """Everything that determines the answers. A directory has the answers of one plan."""

    base: str
    value: str
    prompts: list[str]
    targets: list[int]  # tokens
    seeds: list[int]  # each seed answers every prompt
    settings: list[Setting]  # the sampled settings; the hard cut is derived from the base model's answers
    max_new_tokens: int
    sampling: dict[str, Any]  # temperature, top_k, top_p and min_p
    rows: int  # answers per batch, or concurrent requests to a server
    dtype: str
    engine: str | None = None  # of the server. If None, answers are generated in process
    constant_engine: str | None = None  # of the server without a value model
    answers: list[str] | None = None  # reference answer of each prompt. If None, accuracy is not measured
    say_it: str | None = None  # text appended to the prompts of settings with ``said``

    def limit(self, target: int | None) -> int:
        """Maximum tokens of an answer to a target."""
        return self.max_new_tokens if target is None else min(self.max_new_tokens, default_limit(target))

    def units(self) -> list[list[Key]]:
        """Keys of the answers of each batch, in the order of generation. A batch runs on one server, or in process."""
        units = []
        for is_constant in (False, True):
            keys: list[Key] = [
                (setting.name, target, seed, prompt)
                for setting in self.settings
                if setting.is_constant == is_constant
                for target in setting.targets or self.targets
                for seed in self.seeds
                for prompt in range(len(self.prompts))
            ]
            units += [keys[start : start + self.rows] for start in range(0, len(keys), self.rows)]
        return units

    def views(self, answers: Sequence[Answer]) -> dict[str, dict[str, list[Answer]]]:
        """Answers by target (a string, for JSON) and setting.

        Answers without a target are cut at the target's limit; for ``hard cut``, base-model answers at the target.
        """
        views: dict[str, dict[str, list[Answer]]] = {}
        for target in self.targets:
            view = views[str(target)] = {}
            for name in (setting.name for setting in self.settings):
                if made := [a for a in answers if a.setting == name and a.target in (None, target)]:
                    view[name] = [answer.cut(self.limit(target)) for answer in made]
                if name == BASE:
                    view[CUT] = [answer.cut(target) for answer in made]
        return views


def seed_from(*content: Any) -> int:
    """A seed below 2**31, derived from JSON-serializable content."""
    return int.from_bytes(hashlib.sha256(json.dumps(content).encode()).digest()[:4], "little") >> 1


def default_limit(target: int) -> int:
    """2.5 times the target, rounded up to a multiple of 16."""
    return math.ceil(LONGEST * target / 16) * 16


def settings_of(guidances: Sequence[dict[str, Any]], *, with_values: bool, said: bool = False) -> list[Setting]:
    """The settings of a plan, the baselines first.

    Args:
        guidances: parameters of the guided settings. If empty, the default parameters.
        with_values: whether there is a value model.
        said: whether to repeat each setting with prompts that name the target.
    """
    settings = [Setting(BASE, None, with_values, targets=(None,)), Setting(CONSTANT, {}, False)]
    for guidance in guidances or [{}]:
        name = json.dumps(guidance, sort_keys=True) if guidance else GUIDED if with_values else CONSTANT
        settings.append(Setting(name, guidance, with_values))
    if said:
        settings += [replace(setting, name=setting.name + SAID, said=True, targets=None) for setting in settings]
    return list({setting.name: setting for setting in settings}.values())


def run(
    plan: Plan,
    models: Models,
    stored: StoredAnswers,
    server: Server | None = None,
    constant_server: Server | None = None,
) -> None:
    """Generate the missing answers of the plan, with progress on stderr.

    A batch that was interrupted is answered again, and its missing answers are added.

    Args:
        models: the base model, and the value model if it runs in process.
        server: generates answers with a value model, and unguided answers. If None, they are generated in process.
        constant_server: generates guided answers without a value model. If None, they are generated in process.
    """
    units, settings = plan.units(), {setting.name: setting for setting in plan.settings}
    with AnswerBar(sum(map(len, units)), len(stored.answers), models) as bar:
        for keys in units:
            if not stored.answers.keys() >= set(keys):
                bar.set_description(", ".join(dict.fromkeys(name for name, *_ in keys)))
                source = constant_server if settings[keys[0][0]].is_constant else server
                bar.update(len(stored.add(answer(plan, keys, models, source, bar))))


def answer(plan: Plan, keys: Sequence[Key], models: Models, server: Server | None, bar: AnswerBar) -> list[Answer]:
    """Generate the answers of a batch, on ``server`` unless it is None."""
    by_name, eos = {setting.name: setting for setting in plan.settings}, models.eos_token_ids
    texts, guidances, limits = list[str](), list[dict[str, Any] | None](), list[int]()
    for name, target, _, prompt in keys:
        setting, text = by_name[name], plan.prompts[prompt]
        if setting.said:
            assert plan.say_it is not None and target is not None
            text = say(text, plan.say_it, target)
        guidance = setting.guidance
        if guidance is not None and target is not None:
            guidance = {"target_length": target, **guidance}
        # The value model predicts the lengths of the base model's own answers. vLLM does not return predictions.
        if name == BASE and setting.with_values and (server is None or server.engine == "sglang"):
            guidance = {"return_values": True}
        texts.append(text)
        guidances.append(guidance)
        limits.append(plan.limit(target))
    prompts = tokens_of(models.tokenizer, texts)
    generated: list[Generated]
    if server is not None:
        options: dict[str, Any] = dict(sampling=plan.sampling, eos=eos)
        with ThreadPoolExecutor(len(keys)) as pool:
            asked = [
                pool.submit(server.answer, ids, given, max_new_tokens=limit, seed=seed_from(*key), **options)
                for ids, given, limit, key in zip(prompts, guidances, limits, keys, strict=True)
            ]
        generated = [answer.result() for answer in asked]
    else:
        torch.manual_seed(seed_from(*keys[0]))
        value_model = None if by_name[keys[0][0]].is_constant else models.value_model
        inputs = models.padded(prompts)
        sampled = sample(models, value_model, inputs, guidances, max_new_tokens=limits, streamer=bar, **plan.sampling)
        generated = [(ids, ids[-1] in eos, predicted) for ids, predicted in sampled]
    all_ids = [ids for ids, _, _ in generated]
    nlls = likelihoods(models, prompts, all_ids)
    texts = models.tokenizer.batch_decode(all_ids, skip_special_tokens=True)
    return [
        Answer(*key, ids, text, ended, nll, predicted)
        for key, (ids, ended, predicted), text, nll in zip(keys, generated, texts, nlls, strict=True)
    ]


@torch.no_grad()
def likelihoods(models: Models, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
    """Negative log-likelihoods in nats of answers' tokens under the base model alone, unfiltered, at temperature 1."""
    nlls = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=models.model.device)
        logits = models.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, len(prompt) :, None])
        nlls.append([round(-x, 6) for x in log_p[:, 0].tolist()])
    return nlls
