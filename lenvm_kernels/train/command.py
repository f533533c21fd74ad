"""Flags of the commands ``lenvm collect``, ``lenvm fit`` and ``lenvm train``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from lenvm_kernels.loading import arguments
from lenvm_kernels.loading.arguments import add_numbers, positive
from lenvm_kernels.train.settings import KINDS, PROBE, RATE_ADAPTERS, RATE_FULL, RATE_PROBE, VALUE_MODEL


def add(commands: Any) -> None:
    """Add the three commands to ``lenvm``."""
    parser = commands.add_parser(
        "collect",
        help="sample answers for lenvm fit",
        description="Sample a base model's answers to prompts. The same command resumes an interrupted run.",
        epilog="example: lenvm collect demo --output answers --num-prompts 50 --max-new-tokens 256",
    )
    _add_first(parser, "base model", "directory of the answers")
    parser.add_argument("--value", metavar="VALUE", help="probe or value model that guides the start of each answer")
    parser.add_argument("--url", metavar="SERVER", help="SGLang or vLLM server for the sampling (default: in process)")
    _add_answers(parser)

    parser = commands.add_parser(
        "fit",
        help="train a probe or a value model on collected answers",
        description="Train a probe, which predicts remaining lengths from the base model's states; or, with --kind "
        f"{VALUE_MODEL}, a second model with a value head. The same command resumes an interrupted training of a value "
        "model. On several GPUs: torchrun --nproc_per_node N -m lenvm_kernels.cli fit ...",
        epilog="example: lenvm fit demo --answers answers --output fitted",
    )
    _add_first(parser, "base model, or the backbone of a value model", "directory of value/ and report.json")
    answers_help = "directories of lenvm collect; required"
    parser.add_argument("--answers", type=Path, nargs="+", required=True, metavar="DIR", help=answers_help)
    _add_fitting(parser)

    parser = commands.add_parser(
        "train",
        help="collect, fit and evaluate in turn",
        description="Collect answers, fit a probe or a value model, collect answers that it guides, fit on all "
        "answers, and measure how well target lengths are met. The same command resumes an interrupted run.",
        epilog="example: lenvm train demo --output trained --num-prompts 50 --max-new-tokens 256 --dtype bfloat16",
    )
    _add_first(parser, "base model", "directory of all results")
    add_numbers(parser, rounds=(2, "rounds; the first is unguided"))
    of_evaluation = "number of prompts in the evaluation, 0: no evaluation (default: %(default)s)"
    count = positive(int, or_0=True)
    parser.add_argument("--evaluate-prompts", type=count, default=24, metavar="N", help=of_evaluation)
    _add_answers(parser)
    _add_fitting(parser)
    parser.add_argument("--backbone", metavar="NAME", help="backbone of a value model (default: BASE)")


def _add_first(parser: Any, base: str, output: str) -> None:
    parser.set_defaults(run=_run)
    parser.add_argument("base", metavar="BASE", help=f"{base}: {arguments.A_MODEL}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=f"{output}; required")
    arguments.add_seed(parser)
    arguments.add_device(parser)
    arguments.add_dtype(parser, "the models", by_device=True)


def _add_answers(parser: Any) -> None:
    group = parser.add_argument_group("answers")
    prompts_help = 'lines of {"prompt": "..."}, optionally with "split": "train" or "test" (default: the demo\'s)'
    group.add_argument("--prompts", type=Path, metavar="FILE", help=prompts_help)
    add_numbers(
        group,
        num_prompts=(None, "prompts of each split (default: all)"),
        answers_per_prompt=(4, "answers per prompt and round"),
        max_new_tokens=(1024, "maximum length of an answer"),
        rows=(64, "answers per batch, or concurrent requests to a server"),
    )
    arguments.add_sampling(group)


def _add_fitting(parser: Any) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--kind", choices=KINDS, default=PROBE, help="(default: %(default)s)")
    add_numbers(group, epochs=(2, "passes over the answers"))
    rate_help = f"(default: {RATE_PROBE:g} for a probe, {RATE_ADAPTERS:g} for adapters, {RATE_FULL:g} for all weights)"
    group.add_argument("--learning-rate", type=positive(float), metavar="R", help=rate_help)
    gamma_help = "discount (default: the 99th percentile of lengths gets the value 0.99)"
    group.add_argument("--gamma", type=positive(float, below=1), metavar="G", help=gamma_help)
    group = parser.add_argument_group(f"training with --kind {PROBE}")
    layers_help = "layers of which the probe reads the input (default: the output layer)"
    group.add_argument("--layers", type=positive(int), nargs="+", metavar="N", help=layers_help)
    add_numbers(group, states=(None, "maximum number of tokens in memory (default: 1000000)"))
    group = parser.add_argument_group(f"training with --kind {VALUE_MODEL}")
    rank_help = "rank of adapters, 0: all weights (default: 16)"
    group.add_argument("--lora-rank", type=positive(int, or_0=True), metavar="N", help=rank_help)
    add_numbers(
        group,
        batch_size=(None, "answers per forward and process (default: 8)"),
        accumulation=(None, "forwards per step (default: 8)"),
        save_steps=(None, "steps between checkpoints (default: 100)"),
    )
    checkpointing_help = "less memory, a third more time"
    group.add_argument("--gradient-checkpointing", action="store_true", default=None, help=checkpointing_help)


def _run(args: argparse.Namespace) -> None:
    """Check the packages, set the device and the dtype, and run the command."""
    with arguments.usage_errors():
        from lenvm_kernels.loading.models import require_extras

        require_extras("accelerate", "peft", extra="train")
        from lenvm_kernels.train.collect import CollectionPlan, collect
        from lenvm_kernels.train.fit import fit, table
        from lenvm_kernels.train.settings import Fitting
        from lenvm_kernels.train.train import train

        args.device = arguments.device_of(args.device)
        args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
        command_line = shlex.join(["lenvm", *sys.argv[1:]])
        if args.command == "train":
            train(args, command_line)
        elif args.command == "collect":
            collect(CollectionPlan.of(args, args.value), args.output, device=args.device, url=args.url)
        elif report := fit(Fitting.of(args), args.base, args.answers, args.output, command_line):
            print(table(report))
