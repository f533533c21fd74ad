"""The commands ``lenvm collect``, ``lenvm fit`` and ``lenvm train``: their flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from lenvm_kernels.cli_arguments import (
    KINDS,
    TRUNK,
    VALUE_MODEL,
    add_device,
    add_dtype,
    add_sampling,
    add_seed,
    device_of,
    positive,
    usage_errors,
)

BASE_HELP = "a Hugging Face directory or name, a .gguf file, or the word demo"


def add(commands: Any) -> None:
    """Add the three commands to ``lenvm``."""
    parser = commands.add_parser(
        "collect",
        help="sample the answers that lenvm fit learns from",
        description="Sample a base model's answers to prompts and store their tokens. The same command resumes an "
        "interrupted run.",
        epilog="example: lenvm collect demo --output answers --num-prompts 50 --max-new-tokens 256",
    )
    parser.set_defaults(run=_run_collect)
    parser.add_argument("base", metavar="BASE", help=f"base model: {BASE_HELP}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the answers; required")
    parser.add_argument(
        "--value", metavar="VALUE", help="trunk or value model that guides the beginnings of answers (default: none)"
    )
    parser.add_argument("--url", metavar="SERVER", help="SGLang or vLLM server that samples (default: in process)")
    _add_answers(parser)
    _add_common(parser)

    parser = commands.add_parser(
        "fit",
        help="train a trunk or a value model on collected answers",
        description="Train a trunk, which predicts remaining lengths from the base model's own states; or, with --kind "
        f"{VALUE_MODEL}, a second model with a value head. The same command resumes an interrupted training of a value "
        "model. Several GPUs: torchrun --nproc_per_node N -m lenvm_kernels.cli fit ...",
        epilog="example: lenvm fit demo --answers answers --output fitted",
    )
    parser.set_defaults(run=_run_fit)
    parser.add_argument(
        "base", metavar="BASE", help=f"base model, or the backbone with --kind {VALUE_MODEL}: {BASE_HELP}"
    )
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, metavar="DIR", help="directories of lenvm collect; required"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory of value/ and report.json; required"
    )
    _add_fitting(parser)
    _add_common(parser)

    parser = commands.add_parser(
        "train",
        help="train lengths values for a base model: collect, fit and evaluate",
        description="Collect answers, fit a trunk or a value model, collect answers that it guides, fit on all answers, "
        "and measure how well target lengths are met. The same command resumes an interrupted run.",
        epilog="example: lenvm train demo --output trained --num-prompts 50 --max-new-tokens 256 --dtype bfloat16",
    )
    parser.set_defaults(run=_run_train)
    parser.add_argument("base", metavar="BASE", help=f"base model: {BASE_HELP}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of all results; required")
    parser.add_argument(
        "--rounds", type=positive(int), default=2, metavar="N", help="the first is unguided (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print estimated tokens, FLOPs, hours and GiB, and exit")
    parser.add_argument(
        "--evaluate-prompts",
        type=int,
        default=24,
        metavar="N",
        help="held-out prompts of the final evaluation, 0: no evaluation (default: %(default)s)",
    )
    parser.add_argument("--url", metavar="SERVER", help="SGLang or vLLM server of round 1 (default: in process)")
    parser.add_argument(
        "--guided-url",
        metavar="SERVER",
        help="server of round 2, with LENVM_VALUE_MODEL=DIR/round-1/value (default: in process)",
    )
    _add_answers(parser)
    group = _add_fitting(parser)
    group.add_argument("--backbone", metavar="NAME", help=f"{BASE_HELP} (default: BASE)")
    _add_common(parser)


def _add_answers(parser: Any) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": "..."}, optionally with "split": "train" or "test" (default: the demo\'s)',
    )
    group.add_argument("--num-prompts", type=positive(int), metavar="N", help="prompts of each split (default: all)")
    group.add_argument(
        "--answers-per-prompt", type=positive(int), default=4, metavar="N", help="in a round (default: %(default)s)"
    )
    group.add_argument(
        "--max-new-tokens", type=positive(int), default=1024, metavar="N", help="of an answer (default: %(default)s)"
    )
    group.add_argument("--plain-prompts", action="store_true", help="do not apply the chat template")
    group.add_argument(
        "--targets",
        type=positive(int),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="range of the target lengths of guided answers (default: 20 2000, at most --max-new-tokens)",
    )
    group.add_argument(
        "--rows",
        type=positive(int),
        default=64,
        metavar="N",
        help="answers per batch, or concurrent requests to a server (default: %(default)s)",
    )
    add_sampling(group)


def _add_fitting(parser: Any) -> Any:
    """Add the flags of :class:`Fitting`; returns the group of value models."""
    group = parser.add_argument_group("training")
    group.add_argument("--kind", choices=KINDS, default=TRUNK, help="(default: %(default)s)")
    group.add_argument(
        "--gamma",
        type=float,
        metavar="G",
        help="discount (default: 0.99 is the value of the 99th percentile of lengths)",
    )
    group.add_argument("--epochs", type=positive(int), default=2, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--learning-rate",
        type=positive(float),
        metavar="R",
        help="(default: 2e-3 for a trunk, 2e-4 for adapters, 2e-5 for all weights)",
    )
    group = parser.add_argument_group(f"training with --kind {TRUNK}")
    group.add_argument(
        "--layers",
        type=positive(int),
        nargs="+",
        metavar="N",
        help="layers whose inputs are read (default: the output layer)",
    )
    group.add_argument(
        "--states", type=positive(int), metavar="N", help="maximum number of tokens in memory (default: 1000000)"
    )
    group = parser.add_argument_group(f"training with --kind {VALUE_MODEL}")
    group.add_argument(
        "--lora-rank", type=int, metavar="N", help="rank of the adapters, 0: train all weights (default: 16)"
    )
    group.add_argument("--batch-size", type=positive(int), metavar="N", help="answers per forward (default: 8)")
    group.add_argument("--accumulation", type=positive(int), metavar="N", help="forwards per step (default: 8)")
    group.add_argument(
        "--gradient-checkpointing", action="store_true", default=None, help="less memory, a third more time"
    )
    group.add_argument("--save-steps", type=positive(int), metavar="N", help="steps per checkpoint (default: 100)")
    return group


def _add_common(parser: Any) -> None:
    add_seed(parser)
    add_device(parser)
    add_dtype(parser, "the models", by_device=True)


def _run_collect(args: argparse.Namespace) -> None:
    with usage_errors():
        _prepare(args)
        from dataclasses import replace

        from lenvm_kernels.training.collect import Plan, collect

        collect(replace(Plan.of(args), value=args.value), args.output, device=args.device, url=args.url)


def _run_fit(args: argparse.Namespace) -> None:
    with usage_errors():
        _prepare(args)
        from lenvm_kernels.training.fit import fit, table
        from lenvm_kernels.training.settings import Fitting

        report = fit(Fitting.of(args), args.base, args.answers, args.output, _command())
        if report is not None:
            print(table(report))


def _run_train(args: argparse.Namespace) -> None:
    with usage_errors():
        _prepare(args)
        from lenvm_kernels.training.train import train

        train(args, _command())


def _command() -> str:
    return shlex.join(["lenvm", *sys.argv[1:]])


def _prepare(args: argparse.Namespace) -> None:
    """Check the packages, and set the device and the dtype."""
    from lenvm_kernels.demo.models import require_extras

    require_extras("accelerate", "peft", extra="train")
    args.device = device_of(args.device)
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
