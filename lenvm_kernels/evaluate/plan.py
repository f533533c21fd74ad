"""The plan of a run: which answers are made, in which order, and the file that stores them.

A unit of work is a batch of prompts under one setting, target and seed. The unit alone determines its random seed, so a
resumed run makes the same answers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lenvm_kernels.evaluate.measures import Answer, Key
from lenvm_kernels.evaluate.stored_answers import StoredAnswers

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

        Answers without a target are cut at the limit of the other settings. ``hard cut`` is the base model's answers,
        cut at the target.
        """
        made: dict[tuple[str, int | None], list[Answer]] = {}
        for answer in answers:
            made.setdefault((answer.setting, answer.target), []).append(answer)
        views: dict[str, dict[str, list[Answer]]] = {}
        for target in self.targets:
            view = views[str(target)] = {}
            for setting in self.settings:
                targets = setting.targets or self.targets
                if target in targets:
                    view[setting.name] = made[setting.name, target]
                elif None in targets:
                    view[setting.name] = [answer.cut(self.limit(target)) for answer in made[setting.name, None]]
                if setting.name == BASE:
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
        """The keys of its answers."""
        return [(self.setting.name, self.target, self.seed, prompt) for prompt in self.prompts]

    def seed_of(self, *more: int) -> int:
        """A seed below 2**31, derived from the unit and from further numbers."""
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
        with_values: whether there is a value model. Without one, the default parameters of constant values apply.
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
