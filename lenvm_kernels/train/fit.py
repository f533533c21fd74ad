"""``lenvm fit``: training on collected answers, and a report on held-out answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lenvm_kernels.evaluate.stored_answers import check_plan
from lenvm_kernels.loading.arguments import PROBE, VALUE_MODEL
from lenvm_kernels.loading.models import load_tokenizer, locate, quiet, source_of
from lenvm_kernels.loading.prompts import TEST, TRAIN
from lenvm_kernels.train.answers import AnswerStore
from lenvm_kernels.train.collect import vocabulary
from lenvm_kernels.train.measures import measure
from lenvm_kernels.train.probe import fit_probe
from lenvm_kernels.train.settings import Fitting
from lenvm_kernels.train.targets import examples_of, gamma_of
from lenvm_kernels.train.value_model import fit_value_model
from lenvm_kernels.values import ValueModelConfig

REPORT = "report.json"
# Columns of the table.
MEASURES = {
    "r2": "R^2",
    "rank_correlation_within_prompts": "rank correlation within a prompt",
    "correlation_at_a_position": "at a position",
    "mae_tokens": "mean error, tokens",
}


def check_model(how: Fitting, name: str, flag: str) -> Path:
    """Locate the base model of a probe or the backbone of a value model; errors name the flag."""
    path = locate(flag, name)
    config = AutoConfig.from_pretrained(**source_of(path))
    count = config.get_text_config().num_hidden_layers
    if max(how.layers or [0]) > count:
        raise ValueError(f"--layers must be at most the {count} layers of {name!r}, got {max(how.layers or [0])}")
    if how.kind == VALUE_MODEL:
        try:
            facts = ValueModelConfig.from_hf(config)
        except ValueError as error:
            raise ValueError(f"{flag} does not fit --kind {VALUE_MODEL}, --kind {PROBE} does: {error}") from error
        if facts.vision is not None:
            raise ValueError(f"{flag} must be a text model with --kind {VALUE_MODEL}, got {config.model_type!r}")
    return path


def fit(how: Fitting, model: str, folders: Sequence[Path], output: Path, command: str) -> dict[str, Any] | None:
    """Train on the answers of directories unless ``output / "report.json"`` exists.

    Returns:
        The report; None in every process but the first.

    Raises:
        ValueError: the answers have another vocabulary, or ``output`` holds another training.
    """
    quiet()
    is_probe = how.kind == PROBE
    path = check_model(how, model, "BASE")
    stores = [AnswerStore.open(folder) for folder in folders]
    own = vocabulary(load_tokenizer("BASE", path))
    for folder, store in zip(folders, stores, strict=True):
        if store.plan["vocabulary"] != own:
            base = store.plan["base"]
            raise ValueError(f"BASE must have the vocabulary of {base!r}, which answered in {folder}, got {model!r}")
    answers = [answer for store in stores for answer in store.of_split(TRAIN)]
    if not answers:
        raise ValueError("--answers must have answers to training prompts, got none")
    gamma = how.gamma or gamma_of(answers)
    content = json.dumps([[asdict(answer) for answer in store.of_split(TRAIN)] for store in stores])
    plan: dict[str, Any] = {**asdict(how), "model": model, "gamma": gamma}
    plan["answers"] = hashlib.sha256(content.encode()).hexdigest()[:16]
    for name in ("device", "save_steps"):  # neither affects the result
        del plan[name]
    if (output / REPORT).exists():
        report = json.loads((output / REPORT).read_text(encoding="utf-8"))
        check_plan(plan, report["plan"], output)
        return report

    training, held_out = (
        [examples_of(store, split, gamma, of_prompts=not is_probe) for store in stores] for split in (TRAIN, TEST)
    )
    examples = [example for of_store in training for example in of_store]
    if is_probe:
        facts, values = fit_probe(how, model, examples, held_out, gamma, output)
    else:
        facts, values = fit_value_model(how, path, examples, held_out, gamma, plan, output)
        if not facts:
            return None
    mean = torch.cat([example.targets for example in examples]).mean()
    test = {}
    for folder, of_store, predicted in zip(folders, held_out, values, strict=True):
        if of_store:
            constant = [mean.expand_as(example.targets) for example in of_store]
            named = {"constant": constant, how.kind: predicted}
            test[str(folder)] = {name: measure(found, of_store, gamma) for name, found in named.items()}
    report = {
        "command": command,
        "versions": {name: version(name) for name in ("lenvm-kernels", "torch", "transformers")},
        "plan": plan,
        "training": {"answers": len(examples), "states": sum(len(e.targets) for e in examples), **facts},
        "guided": {str(f): store.plan.get("value") is not None for f, store in zip(folders, stores, strict=True)},
        "test": test,
    }
    (output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def table(report: dict[str, Any]) -> str:
    """The measures of held-out answers as a Markdown table."""
    lines = [f"| held-out answers | values | {' | '.join(MEASURES.values())} |", "| --- " * (2 + len(MEASURES)) + "|"]
    for folder, found in report["test"].items():
        kind = "guided" if report["guided"][folder] else "plain"
        for name, measures in found.items():
            cells = [measures[measure] for measure in MEASURES]
            texts = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
            lines.append(f"| {folder}: {measures['answers']} {kind} | {name} | {texts} |")
    return "\n".join(lines) + "\n"
