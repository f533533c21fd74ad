"""``lenvm train``: the stages in turn, and their estimated cost on one H100."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from lenvm_kernels.evaluate import command as evaluate
from lenvm_kernels.loading import TEST, TRAIN, spread
from lenvm_kernels.loading.models import load_tokenizer, locate, quiet, source_of, tokens_of
from lenvm_kernels.train.collect import CollectionPlan, collect, vocabulary
from lenvm_kernels.train.fit import check_model, fit, table
from lenvm_kernels.train.settings import PROBE, Fitting

EVALUATED = (20, 40, 80, 160, 320, 640)  # targets in tokens
# Dense bf16 operations and bytes of memory traffic per second of an H100 SXM, and the shares that are assumed.
FLOPS, BANDWIDTH, SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 989e12, 3.35e12, 0.4, 0.6
GIB = 2**30


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
    if args.dry_run:
        prompts = tokens_of(tokenizer, [prompt.text for prompt in plan.prompts])
        print(estimate(plan, how, args.rounds, base, path, [len(ids) for ids in prompts]))
        return

    folders: list[Path] = []
    for number in range(1, args.rounds + 1):
        folder = args.output / f"round-{number}"
        value = None if number == 1 else str(folder.with_name(f"round-{number - 1}") / "value")
        folders.append(folder / "answers")
        of_round = replace(plan, value=value, seed=plan.seed + number - 1)
        collect(of_round, folders[-1], device=args.device)
        report = fit(how, model, folders, folder, command)
        assert report is not None  # this command has one process
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


def estimate(
    plan: CollectionPlan, how: Fitting, rounds: int, base: Path, backbone: Path, prompts: Sequence[int]
) -> str:
    """A Markdown table with the cost of every stage, for prompts of ``prompts[i]`` tokens.

    A forward takes two operations per weight and token. Every answer counts with ``plan.max_new_tokens``.
    """
    config = AutoConfig.from_pretrained(**source_of(base)).get_text_config()
    size, backbone_size = parameters(base), parameters(backbone)
    tokens = len(prompts) * plan.samples * plan.max_new_tokens
    # Memory holds the weights, keys and values; a decode step reads keys and values of half an answer on average.
    prompt, kv = sum(prompts) / len(prompts), plan.rows * kv_bytes(config)
    memory, read = (2 * size + (prompt + length) * kv for length in (plan.max_new_tokens, plan.max_new_tokens / 2))
    step = max(read / (BANDWIDTH * SHARE_OF_BANDWIDTH), plan.rows * 2 * size / (FLOPS * SHARE_OF_FLOPS))
    collect = tokens, 2.0 * tokens * size, tokens / plan.rows * step / 3600, memory / GIB
    lines = [
        f"Every answer counts with {plan.max_new_tokens} tokens, and every expert of a mixture with all tokens. Hours "
        f"assume one H100 at {SHARE_OF_FLOPS:.0%} of its operations and {SHARE_OF_BANDWIDTH:.0%} of its bandwidth. "
        "Guidance, and activations of a value model's fit, are not counted.",
        "",
        "| stage | tokens | FLOPs | hours | GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    of_training = sum(prompt.split == TRAIN for prompt in plan.prompts) / len(plan.prompts)
    for number in range(1, rounds + 1):
        answered = number * of_training * (tokens + plan.samples * sum(prompts))
        if how.kind == PROBE:
            flops = 2 * answered * size
            memory = 2 * size + 2 * min(how.states, answered) * len(how.layers or [0]) * config.hidden_size
        else:  # a frozen weight has no gradient, and 2 bytes; a trained one has 16 with its gradient and moments
            answered *= how.epochs
            flops = answered * backbone_size * (4 if how.lora_rank else 6)
            memory = backbone_size * (2 if how.lora_rank else 16)
        fit = answered, flops, flops / (FLOPS * SHARE_OF_FLOPS) / 3600, memory / GIB
        for stage, numbers in (("collect", collect), ("fit", fit)):
            lines.append(f"| {stage}, round {number} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |")
    return "\n".join(lines)


def parameters(path: Path) -> int:
    """Number of weights of a model, counted without loading them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source_of(path)))
    return sum(parameter.numel() for parameter in model.parameters())


def kv_bytes(config: PreTrainedConfig) -> int:
    """Bytes of a token's keys and values in bf16; 0 for a model without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return 2 * 2 * config.num_hidden_layers * kv_heads * head_dim
