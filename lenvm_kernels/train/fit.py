"""``lenvm fit``: trains on collected answers and reports on held-out answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lenvm_kernels.evaluate.measures import pearson, ranks
from lenvm_kernels.evaluate.stored_answers import check_plan
from lenvm_kernels.loading import TEST, TRAIN
from lenvm_kernels.loading.models import load_tokenizer, locate, quiet, source_of
from lenvm_kernels.train.answers import AnswerStore, Example, gamma_of
from lenvm_kernels.train.collect import vocabulary
from lenvm_kernels.train.probe import fit_probe
from lenvm_kernels.train.settings import PROBE, VALUE_MODEL, Fitting
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
        The report; None in all processes except the first.

    Raises:
        ValueError: the answers have another vocabulary, or ``output`` is from another training.
    """
    quiet()
    path = check_model(how, model, "BASE")
    stores = {str(folder): AnswerStore.open(folder) for folder in folders}
    own = vocabulary(load_tokenizer("BASE", path))
    for folder, store in stores.items():
        if store.plan["vocabulary"] != own:
            base = store.plan["base"]
            raise ValueError(f"BASE must have the vocabulary of {base!r}, which answered in {folder}, got {model!r}")
    answers = [answer for store in stores.values() for answer in store.of_split(TRAIN)]
    if not answers:
        raise ValueError("--answers must have answers to training prompts, got none")
    gamma = how.gamma or gamma_of(answers)
    content = json.dumps([[asdict(answer) for answer in store.of_split(TRAIN)] for store in stores.values()])
    plan: dict[str, Any] = {**asdict(how), "model": model, "gamma": gamma}
    plan["answers"] = hashlib.sha256(content.encode()).hexdigest()[:16]
    for name in ("device", "save_steps"):  # they do not affect the result
        del plan[name]
    if (output / REPORT).exists():
        report = json.loads((output / REPORT).read_text(encoding="utf-8"))
        check_plan(plan, report["plan"], output)
        return report

    is_probe = how.kind == PROBE
    examples = [e for store in stores.values() for e in store.examples(TRAIN, gamma, of_prompts=not is_probe)]
    held_out = {folder: store.examples(TEST, gamma, of_prompts=not is_probe) for folder, store in stores.items()}
    held_out = {folder: of_store for folder, of_store in held_out.items() if of_store}
    if is_probe:
        facts, values = fit_probe(how, model, examples, [*held_out.values()], gamma, output)
    else:
        facts, values = fit_value_model(how, path, examples, [*held_out.values()], plan, output)
        if not facts:
            return None
    mean = torch.cat([example.targets for example in examples]).mean()
    test = {}
    for (folder, of_store), predicted in zip(held_out.items(), values, strict=True):
        named = {"constant": mean.expand_as(predicted), how.kind: predicted}
        test[folder] = {name: measure(found, of_store, gamma) for name, found in named.items()}
    report = {
        "command": command,
        "versions": {name: version(name) for name in ("lenvm-kernels", "torch", "transformers")},
        "plan": plan,
        "training": {"answers": len(examples), "states": sum(len(e.targets) for e in examples), **facts},
        "guided": {folder: store.plan.get("value") is not None for folder, store in stores.items()},
        "test": test,
    }
    (output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def measure(values: torch.Tensor, examples: Sequence[Example], gamma: float) -> dict[str, float | int | None]:
    """Measures of the predicted values ``[N]`` of at least one example, over all states.

    Returns:
        ``answers``, ``states``, ``cut`` (share of cut answers), ``mse``, ``r2``, ``correlation``,
        ``rank_correlation_within_prompts`` (Spearman's over the states of a prompt, averaged over prompts),
        ``correlation_at_a_position`` (after subtraction of the mean over a prompt's answers at a position, because
        guidance compares candidates of one position) and ``mae_tokens`` (of remaining lengths, finished answers only).
        None if the values or the targets are constant.
    """
    answers, targets = [example.answer for example in examples], [example.targets for example in examples]
    v, y = values.double(), torch.cat(targets).double()
    counts = torch.tensor(list(map(len, targets)))
    prompt = torch.tensor([answer.prompt for answer in answers]).repeat_interleave(counts)
    position = torch.cat([torch.arange(len(a.ids) - n, len(a.ids)) for a, n in zip(answers, counts, strict=True)])
    ended = torch.tensor([answer.finished for answer in answers]).repeat_interleave(counts)

    correlations = (pearson(ranks(v[prompt == p]), ranks(y[prompt == p])) for p in prompt.unique())
    of_prompts = [found for found in correlations if found is not None]
    _, group = torch.unique(torch.stack([prompt, position]), dim=1, return_inverse=True)
    size = torch.bincount(group)
    at_position = (x - (torch.bincount(group, x) / size)[group] for x in (v, y))
    variance = float((y - y.mean()).square().mean())
    mse = float((v - y).square().mean())
    off = (lengths(v, gamma) - lengths(y, gamma)).abs()[ended]
    return {
        "answers": len(answers),
        "states": len(v),
        "cut": sum(not answer.finished for answer in answers) / len(answers),
        "mse": mse,
        "r2": 1 - mse / variance if variance > 0 else None,
        "correlation": pearson(v, y),
        "rank_correlation_within_prompts": sum(of_prompts) / len(of_prompts) if of_prompts else None,
        "correlation_at_a_position": pearson(*at_position),
        "mae_tokens": float(off.mean()) if len(off) else None,
    }


def lengths(values: torch.Tensor, gamma: float) -> torch.Tensor:
    """Convert values to remaining tokens."""
    return torch.log1p(-values.clamp(0, 1 - 1e-6)) / math.log(gamma)


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
