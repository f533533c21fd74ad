"""``lenvm fit``: training on collected answers, and a report on held-out answers."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.cli_arguments import TRUNK
from lenvm_kernels.demo.models import load_tokenizer, quiet
from lenvm_kernels.evaluate.guarded_lines import check_plan
from lenvm_kernels.evaluate.prompts import TEST, TRAIN
from lenvm_kernels.training.answers import AnswerStore
from lenvm_kernels.training.collect import vocabulary
from lenvm_kernels.training.measures import measure
from lenvm_kernels.training.settings import Fitting
from lenvm_kernels.training.targets import examples_of, gamma_of
from lenvm_kernels.training.trunk import check_base, fit_trunk
from lenvm_kernels.training.value_model import check_backbone, fit_value_model

REPORT = "report.json"
PACKAGES = ("lenvm-kernels", "torch", "transformers", "peft", "accelerate")
# Columns of the table.
MEASURES = {
    "r2": "R^2",
    "rank_correlation_within_prompts": "rank correlation within a prompt",
    "correlation_at_a_position": "at a position",
    "mae_tokens": "mean error, tokens",
}


def fit(how: Fitting, model: str, folders: Sequence[Path], output: Path, command: str) -> dict[str, Any] | None:
    """Train on the answers of directories unless the report exists, and return the report.

    Args:
        how: the settings.
        model: the base model of a trunk, or the backbone of a value model.
        folders: directories of :func:`collect`.
        output: the directory of ``value`` and ``report.json``.
        command: the command line, for the report.

    Returns:
        The report; None in every process but the first.

    Raises:
        ValueError: the answers have another vocabulary, or the directory holds another training.
    """
    quiet()
    is_trunk = how.kind == TRUNK
    path = check_base(model, how.layers) if is_trunk else check_backbone(model, "BASE")
    stores = _opened(folders, model, path)
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

    began = time.monotonic()
    training, held_out = (
        [examples_of(store, split, gamma, of_prompts=not is_trunk) for store in stores] for split in (TRAIN, TEST)
    )
    examples = [example for of_store in training for example in of_store]
    if is_trunk:
        found = fit_trunk(how, model, examples, held_out, gamma, output)
    elif (found := fit_value_model(how, path, examples, held_out, gamma, plan, output)) is None:
        return None
    facts, values = found
    mean = torch.cat([example.targets for example in examples]).mean()
    test = {}
    for folder, of_store, predicted in zip(folders, held_out, values, strict=True):
        if of_store:
            constant = [mean.expand_as(example.targets) for example in of_store]
            named = {"constant": constant, how.kind: predicted}
            test[str(folder)] = {name: measure(found, of_store, gamma) for name, found in named.items()}
    report = {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "device": how.device,
        "plan": plan,
        "training": {"answers": len(examples), "states": sum(len(e.targets) for e in examples), **facts},
        "guided": {str(f): store.plan.get("value") is not None for f, store in zip(folders, stores, strict=True)},
        "test": test,
    }
    (output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _opened(folders: Sequence[Path], model: str, path: Path) -> list[AnswerStore]:
    """The answers of directories, whose tokens must be those of the model."""
    stores = [AnswerStore.open(folder, "--answers") for folder in folders]
    own = vocabulary(load_tokenizer("BASE", path))
    for folder, store in zip(folders, stores, strict=True):
        if store.plan["vocabulary"] != own:
            raise ValueError(
                f"BASE must have the vocabulary of {store.plan['base']!r}, the base model of {str(folder)!r}, "
                f"{model!r} has another"
            )
    return stores


def table(report: dict[str, Any]) -> str:
    """The measures of held-out answers as a Markdown table."""
    lines = [
        f"| held-out answers | values | {' | '.join(MEASURES.values())} |",
        f"| --- | --- |{' --- |' * len(MEASURES)}",
    ]
    for folder, found in report["test"].items():
        kind = "guided" if report["guided"][folder] else "plain"
        for name, measures in found.items():
            cells = [measures[measure] for measure in MEASURES]
            texts = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
            lines.append(f"| {folder}: {measures['answers']} {kind} | {name} | {texts} |")
    return "\n".join(lines) + "\n"
