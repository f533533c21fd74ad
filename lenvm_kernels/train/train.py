"""``lenvm train``: runs the stages in turn."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from lenvm_kernels.evaluate import command as evaluate
from lenvm_kernels.loading import TEST, spread
from lenvm_kernels.loading.models import load_tokenizer, locate, quiet
from lenvm_kernels.train.collect import CollectionPlan, collect, vocabulary
from lenvm_kernels.train.fit import check_model, fit, table
from lenvm_kernels.train.settings import PROBE, Fitting

EVALUATED = (20, 40, 80, 160, 320, 640)  # targets in tokens


def train(args: argparse.Namespace, command: str) -> None:
    """Check flags and models, and run all stages; finished stages are skipped."""
    plan, how = CollectionPlan.of(args, value=None), Fitting.of(args)
    if args.backbone is not None and how.kind == PROBE:
        raise ValueError(f"--backbone requires --kind value-model, got --kind {PROBE}")
    quiet()
    model, base = args.backbone or args.base, locate("BASE", args.base)
    path = check_model(how, model, "BASE" if args.backbone is None else "--backbone")
    tokenizer = load_tokenizer("BASE", base)
    if vocabulary(load_tokenizer("--backbone", path)) != vocabulary(tokenizer):
        raise ValueError(f"--backbone must have the vocabulary of {args.base!r}, {model!r} has another")

    folders: list[Path] = []
    for number in range(1, args.rounds + 1):
        folder = args.output / f"round-{number}"
        value = None if number == 1 else str(folder.with_name(f"round-{number - 1}") / "value")
        folders.append(folder / "answers")
        of_round = replace(plan, value=value, seed=plan.seed + number - 1)
        collect(of_round, folders[-1], device=args.device)
        report = fit(how, model, folders, folder, command)
        assert report is not None  # this command runs in one process
        print(f"round {number}:\n{table(report)}", flush=True)
    link = args.output / "value"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(f"round-{args.rounds}") / "value")
    if args.evaluate_prompts:
        _evaluate(args, plan, link)


def _evaluate(args: argparse.Namespace, plan: CollectionPlan, value: Path) -> None:
    texts = spread([prompt.text for prompt in plan.prompts if prompt.split == TEST], args.evaluate_prompts)
    file = args.output / "evaluation-prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    parser = argparse.ArgumentParser()
    evaluate.add(parser.add_subparsers())
    argv = ["evaluate", args.base, str(value), "--prompts", str(file), "--output", str(args.output / "evaluation")]
    targets = sorted({target for target in EVALUATED if target <= plan.max_new_tokens} or {plan.max_new_tokens})
    argv += ["--targets", *map(str, targets), "--seeds", "0", "--dtype", plan.dtype, "--device", args.device]
    argv += [part for name, setting in plan.sampling.items() for part in (f"--{name.replace('_', '-')}", str(setting))]
    found = parser.parse_args(argv)
    found.run(found)
