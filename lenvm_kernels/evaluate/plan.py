"""Which answers ``lenvm evaluate`` makes, in which order, and the file that keeps them.

A unit of work is a batch of prompts under one setting, target and seed. Its seed follows from these alone: a run that
goes on where another one stopped makes the answers that the other would have made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lenvm_kernels.evaluate.guarded_lines import GuardedLines
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.guidance.fields import FIELDS

BASE, CUT, FORCED, CONSTANT, GUIDED = "none", "hard cut", "forced answer", "constant", "guided"
SAID = ", said"
# Tokens before the target at which a forced answer leaves the base model's own answer.
CLOSING_TOKENS = 16
# Answers to a target take at most so many times as many tokens.
LONGEST = 2.5
# What answers are told apart by: setting, target, seed, prompt.
Key = tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Setting:
    """A way of answering: its name, its guidance but for the target, and whether values guide it."""

    name: str
    guidance: dict[str, Any] | None
    with_values: bool

    @property
    def said(self) -> bool:
        """Whether the prompt names the target. No field, so that plans of earlier versions stay the same."""
        return self.name.endswith(SAID)


@dataclass(frozen=True)
class Plan:
    """All that decides which answers are made; a directory holds those of one plan.

    Attributes:
        base, value: the models as they were named.
        prompts: the texts.
        targets: tokens.
        seeds: each of them answers every prompt.
        settings: those that are sampled; the hard cut is made of the base model's answers.
        curves: by label, strengths and the names of the settings that have them.
        max_new_tokens: the limit of every answer.
        sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        rows: prompts of a batch.
        dtype: of the models in process.
        engine, constant_engine: of the servers; None: in process.
        answers: what is right, a text a prompt; None: it is not known.
        say_it: text appended to the prompts of the settings that are said. If None, there are none.
        closing: text that forces an answer. If None, there is no such setting.
    """

    base: str
    value: str
    prompts: list[str]
    targets: list[int]
    seeds: list[int]
    settings: list[Setting]
    curves: dict[str, list[tuple[float, str]]]
    max_new_tokens: int
    sampling: dict[str, Any]
    rows: int
    dtype: str
    engine: str | None
    constant_engine: str | None
    answers: list[str] | None = None
    say_it: str | None = None
    closing: str | None = None

    def limit(self, target: int | None) -> int:
        """Tokens that an answer to a target may take: no more than 2.5 times the target, in whole 16s."""
        return self.max_new_tokens if target is None else min(self.max_new_tokens, default_limit(target))

    def units(self) -> list[Unit]:
        """In the order in which they are made."""
        batches = [
            range(start, min(start + self.rows, len(self.prompts))) for start in range(0, len(self.prompts), self.rows)
        ]
        return [
            Unit(setting, target, seed, batch)
            for setting in self.settings
            for target in ([None] if setting.name == BASE else self.targets)
            for seed in self.seeds
            for batch in batches
        ]


@dataclass(frozen=True)
class Unit:
    """A batch of prompts, by their indices, under one setting, target and seed."""

    setting: Setting
    target: int | None
    seed: int
    prompts: range

    def keys(self) -> list[Key]:
        """Those of its answers."""
        return [(self.setting.name, self.target, self.seed, prompt) for prompt in self.prompts]

    def seed_of(self, *more: int) -> int:
        """A seed below 2**31 that follows from what the unit is, and from further numbers."""
        return seed_from(self.seed, self.setting.name, self.target, self.prompts.start, *more)


def seed_from(*content: Any) -> int:
    """A seed below 2**31 that follows from what goes into JSON."""
    return int.from_bytes(hashlib.sha256(json.dumps(content).encode()).digest()[:4], "little") >> 1


def default_limit(target: int) -> int:
    """2.5 times the target, rounded up to a multiple of 16."""
    return math.ceil(LONGEST * target / 16) * 16


def settings_of(
    guidances: Sequence[dict[str, Any]],
    strengths: Sequence[float],
    *,
    with_values: bool,
    said: bool = False,
    forced: bool = False,
) -> tuple[list[Setting], dict[str, list[tuple[float, str]]]]:
    """The settings of a plan and the curves that they make.

    Args:
        guidances: of the guided settings; empty: the default one.
        strengths: of the curves; empty: there are none.
        with_values: without a value model the guided setting is the constant, and is not repeated.
        said: repeat each setting but the forced answer with prompts that name the target.
        forced: add the forced answer.
    """
    unguided = [BASE, FORCED] if forced else [BASE]
    settings = {name: Setting(name, None, False) for name in unguided} | {CONSTANT: Setting(CONSTANT, {}, False)}
    lines = {CONSTANT: settings[CONSTANT]}
    for guidance in guidances or [{}]:
        name = json.dumps(guidance, sort_keys=True) if guidance else GUIDED if with_values else CONSTANT
        lines[name] = settings.setdefault(name, Setting(name, guidance, with_values))
    curves: dict[str, list[tuple[float, str]]] = {}
    for label, line in lines.items() if strengths else ():
        curves[label] = []
        for strength in sorted(set(strengths)):
            own = (line.guidance or {}).get("strength", FIELDS["strength"].default)
            name = label if strength == own else f"{label}, strength {strength:g}"
            settings.setdefault(name, Setting(name, {**(line.guidance or {}), "strength": strength}, line.with_values))
            curves[label].append((strength, name))
    if said:
        settings |= {n + SAID: replace(setting, name=n + SAID) for n, setting in settings.items() if n != FORCED}
        curves |= {label + SAID: [(s, name + SAID) for s, name in curve] for label, curve in curves.items()}
    return list(settings.values()), curves


class AnswerFile:
    """``answers.jsonl`` of a directory, guarded by ``plan.json``.

    Attributes:
        answers: of whole units, by setting, target, seed and prompt.

    Raises:
        ValueError: the directory is that of another plan, or a line is no answer.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._lines = GuardedLines(folder, asdict(plan))
        self.answers = self._read(plan)

    def _read(self, plan: Plan) -> dict[Key, Answer]:
        """Answers of whole units; what stands of a unit that a kill cut short is dropped."""
        lines = self._lines.read(Answer, "lenvm evaluate")
        found: dict[Key, Answer] = {(a.setting, a.target, a.seed, a.prompt): a for a in lines}
        units = [unit.keys() for unit in plan.units()]
        kept = {key: found[key] for keys in units if found.keys() >= set(keys) for key in keys}
        if len(kept) < len(found):
            self._lines.replace(map(asdict, kept.values()))
        return kept

    def add(self, answers: Sequence[Answer]) -> None:
        """Append the answers of a unit. The first one makes the directory: a run that fails before leaves nothing."""
        self._lines.add(map(asdict, answers))
        self.answers |= {(a.setting, a.target, a.seed, a.prompt): a for a in answers}
