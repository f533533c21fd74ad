"""``lenvm train``: the stages one after the other, and what they would take."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lenvm_kernels.cli_arguments import TRUNK
from lenvm_kernels.evaluate import command as evaluate
from lenvm_kernels.loading import spread
from lenvm_kernels.loading.models import load_tokenizer, locate, quiet, tokens_of
from lenvm_kernels.loading.prompts import TEST, TRAIN
from lenvm_kernels.training import cost
from lenvm_kernels.training.checkpoint import ADAPTER, VALUE
from lenvm_kernels.training.report import table
from lenvm_kernels.training.stages import (
    Collecting,
    Fitting,
    TrunkFitting,
    check_backbone,
    check_trunk,
    collect_stage,
    fit_stage,
    fit_trunk_stage,
    vocabulary,
)

EVALUATED = (20, 40, 80, 160, 320, 640)  # targets in tokens


def train(args: argparse.Namespace, command: str) -> None:
    """All stages of ``lenvm train``, one after the other; each goes on where it was ended.

    Args:
        args: of the command.
        command: for the reports.

    Raises:
        ValueError, OSError: what a stage raises; all that can be checked is checked first.
    """
    if args.evaluate_prompts < 0:
        raise ValueError(f"--evaluate-prompts must be at least 0, got {args.evaluate_prompts}")
    how = Collecting.of(args)
    guided = replace(how, answers_per_prompt=args.guided_answers_per_prompt or how.answers_per_prompt)
    rounds = [how, *[guided] * (args.rounds - 1)]
    fitting = TrunkFitting.of(args) if args.kind == TRUNK else Fitting.of(args)
    backbone = args.base if args.backbone == "base" else args.backbone
    quiet()
    if isinstance(fitting, TrunkFitting):
        if args.backbone != "base":
            raise ValueError(f"--backbone must be base with --kind trunk, got {args.backbone!r}")
        check_trunk(args.base, fitting.layers)
    else:
        check_backbone(backbone, "--backbone", fitting.adapters)
    base, value_tokenizer = (
        load_tokenizer(f, locate(f, n)) for f, n in (("BASE", args.base), ("--backbone", backbone))
    )
    if vocabulary(base) != vocabulary(value_tokenizer):
        raise ValueError(f"--backbone must share the vocabulary of {args.base!r}, {backbone!r} has another")
    if args.dry_run:
        print(dry_run(rounds, fitting, args.base, backbone, base))
        return

    folders: list[Path] = []
    value = None
    for number, of_round in enumerate(rounds, start=1):
        folder = args.output / f"round-{number}"
        folders.append(folder / "answers")
        url = args.url if number == 1 else args.guided_url if number == 2 else None
        collect_stage(of_round, args.base, folders[-1], seed=args.seed + number - 1, value=value, url=url)
        if isinstance(fitting, TrunkFitting):
            report = fit_trunk_stage(fitting, args.base, folders, folder, command=command)
        else:
            start, initial = backbone, None
            if value is not None and fitting.adapters is not None:
                initial = Path(value).parent / ADAPTER
            elif value is not None:
                start, initial = value, Path(value)
            report = fit_stage(fitting, start, folders, folder, initial=initial, command=command)
        print(f"round {number}:\n{table(report)}", flush=True)
        value = str(folder / VALUE)
    assert value is not None
    link = args.output / VALUE
    link.unlink(missing_ok=True)
    link.symlink_to(Path(value).relative_to(args.output))
    if args.evaluate_prompts and how.chat:
        _evaluate(args, how, link)


def _evaluate(args: argparse.Namespace, how: Collecting, value: Path) -> None:
    """``lenvm evaluate`` on held-out prompts."""
    texts = spread([prompt.text for prompt in how.prompts if prompt.split == TEST], args.evaluate_prompts)
    file = args.output / "evaluation-prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    parser = argparse.ArgumentParser()
    evaluate.add(parser.add_subparsers())
    argv = ["evaluate", args.base, str(value), "--prompts", str(file), "--output", str(args.output / "evaluation")]
    targets = sorted({target for target in EVALUATED if target <= how.max_new_tokens} or {how.max_new_tokens})
    argv += ["--targets", *map(str, targets), "--seeds", "0", "--dtype", how.dtype, "--device", how.device]
    argv += [part for name, setting in how.sampling.items() for part in (f"--{name.replace('_', '-')}", str(setting))]
    found = parser.parse_args(argv)
    found.run(found)


def dry_run(
    rounds: Sequence[Collecting],
    fitting: Fitting | TrunkFitting,
    base: str,
    backbone: str,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """A table of what each stage takes on one H100, if every answer is as long as it may be.

    Args:
        rounds: how the answers of each are sampled; they differ in their number alone.
        fitting: of all rounds.
        base, backbone: names of the models.
        tokenizer: of both.

    Raises:
        ValueError: a base model whose operations cannot be counted without its weights.
    """
    how = rounds[0]
    paths = locate("BASE", base), locate("--backbone", backbone)
    row_tokens = 4096 if isinstance(fitting, TrunkFitting) else fitting.schedule.row_tokens
    try:
        of_base, kv = cost.model_cost(paths[0], None, row_tokens), cost.kv_bytes(paths[0])
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of transformers' model, whatever it is
        raise ValueError(
            f"BASE must be a language model that transformers runs without weights for --dry-run, got {base!r}: {error}"
        ) from error
    of_value: cost.ModelCost | None = None
    if isinstance(fitting, TrunkFitting):
        parameters, state_bytes = cost.trunk_cost(paths[0], len(fitting.layers or [0]))
        trained = f"trunk: {parameters / 1e6:.1f}M parameters"
    else:
        of_value = cost.model_cost(paths[1], fitting.adapters, row_tokens, checkpointing=fitting.checkpointing)
        trained = f"value model: {of_value.parameters / 1e6:.1f}M parameters, {of_value.trained / 1e6:.2f}M trained"
    prompt_tokens = [len(ids) for ids in tokens_of(tokenizer, [p.text for p in how.prompts], chat=how.chat)]
    mean_prompt = sum(prompt_tokens) / len(prompt_tokens)
    shares = {split: sum(prompt.split == split for prompt in how.prompts) for split in (TRAIN, TEST)}
    low, high = how.targets
    # Of the logarithm's even distribution between two targets.
    mean_target = (high - low) / math.log(high / low) if high > low else low
    lines = [
        f"{shares[TRAIN]} training and {shares[TEST]} held-out prompts of {mean_prompt:.0f} tokens, "
        f"answers to each in a round: {', '.join(str(of_round.answers_per_prompt) for of_round in rounds)}",
        trained,
        "Answers count with --max-new-tokens, half of the mean target guided. Hours are computed for one H100 at "
        f"{cost.SHARE_OF_FLOPS:.0%} of its operations and {cost.SHARE_OF_BANDWIDTH:.0%} of its bandwidth; nothing was "
        "measured.",
        "",
        "| stage | tokens | FLOPs | hours | GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    answered = 0.0  # tokens of all answers so far, and of their prompts
    for number, of_round in enumerate(rounds, start=1):
        answers = len(how.prompts) * of_round.answers_per_prompt
        tokens = answers * how.max_new_tokens
        under_guidance = answers * mean_target / 2 if number > 1 else 0
        context = mean_prompt + how.max_new_tokens / 2
        rows = how.concurrency
        flops = tokens * of_base.forward
        if of_value is not None:
            flops += under_guidance * (1 + cost.CANDIDATES) * of_value.forward
        hours = cost.collect_hours(of_base, kv, None, tokens - under_guidance, context, rows)
        hours += cost.collect_hours(of_base, kv, of_value, under_guidance, mean_prompt + mean_target / 4, rows)
        models = of_base.parameters + (of_value.parameters if of_value is not None and number > 1 else 0)
        gib = (2 * models + rows * 2 * context * kv) / cost.GIB
        lines.append(f"| collect, round {number} | {tokens:.3g} | {flops:.3g} | {hours:.2g} | {gib:.1f} |")
        share = shares[TRAIN] / len(how.prompts)
        answered += (tokens + sum(prompt_tokens)) * share
        if isinstance(fitting, TrunkFitting):  # a forward of the base model, and the head's training
            fitted = answered
            flops = cost.trunk_fit_flops(of_base, parameters, answered, fitting.states, fitting.schedule.epochs)
            gib = (2 * of_base.parameters + state_bytes * min(fitting.states, answered)) / cost.GIB
        else:
            assert of_value is not None
            fitted = fitting.schedule.epochs * answered
            flops = fitted * of_value.step
            gib = cost.fit_gib(of_value, fitting.schedule.forward_tokens)
        hours = cost.hours_of(flops)
        lines.append(f"| fit, round {number} | {fitted:.3g} | {flops:.3g} | {hours:.2g} | {gib:.1f} |")
    return "\n".join(lines)
