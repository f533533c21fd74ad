"""``lenvm collect``, ``lenvm fit`` and ``lenvm train`` as commands: their flags."""

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
# Of all weights the authors' (arXiv 2604.27039); adapters want some ten times as much.
RATE_FULL, RATE_ADAPTERS, RATE_HEAD, RATE_TRUNK = 2e-5, 2e-4, 5e-4, 2e-3
# Flags that only one kind has, and what they are where they are not given.
OF_KIND: dict[str, dict[str, Any]] = {
    VALUE_MODEL: {
        "initial": None,
        "full": False,
        "adapters": 16,
        "first_layer": 0,
        "head_learning_rate": RATE_HEAD,
        "row_tokens": None,
        "save_seconds": 300,
        "checkpointing": False,
    },
    TRUNK: {"layers": None, "states": 1_000_000},
}


def add(commands: Any) -> None:
    """Add the three commands to those of ``lenvm``."""
    _add_collect(commands)
    _add_fit(commands)
    _add_train(commands)


def _add_collect(commands: Any) -> None:
    parser = commands.add_parser(
        "collect",
        help="sample the answers that lenvm fit learns from",
        description="Have a base model answer prompts, and keep the tokens. A run that was ended goes on where it "
        "stopped: nothing is sampled twice.",
        epilog="example: lenvm collect demo --output answers --num-prompts 50 --max-new-tokens 256",
    )
    parser.set_defaults(run=_run_collect)
    parser.add_argument("base", metavar="BASE", help=f"the base model: {BASE_HELP}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="gets the answers; required")
    _add_answers(parser.add_argument_group("what is sampled"))
    group = parser.add_argument_group("guidance")
    group.add_argument(
        "--value", metavar="VALUE", help="a trunk or a value model that guides, as BASE (default: nothing does)"
    )
    _add_targets(group)
    where = parser.add_argument_group("where answers are made")
    where.add_argument("--url", metavar="SERVER", help="of SGLang or vLLM, with LENVM_VALUE_MODEL=VALUE if one guides")
    _add_places(where)


def _add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit",
        help="train on collected answers what predicts lengths",
        description="Train a trunk, which predicts from the base model's own states how many tokens are still to come; "
        f"or, with --kind {VALUE_MODEL}, a value head and low-rank adapters of a backbone, or all its weights. That "
        "training ends with Ctrl-C, goes on with the same command, and takes several GPUs: accelerate launch -m "
        "lenvm_kernels.cli fit ...",
        epilog="example: lenvm fit demo --answers answers --output fitted",
    )
    parser.set_defaults(run=_run_fit)
    parser.add_argument(
        "backbone",
        metavar="BASE",
        help=f"the base model: {BASE_HELP}; with --kind {VALUE_MODEL} another one with its vocabulary, if you like",
    )
    parser.add_argument(
        "--answers", type=Path, nargs="+", required=True, metavar="DIR", help="of lenvm collect; required"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets value/, which engines load, and report.json; required",
    )
    _add_training(parser.add_argument_group("training"))
    _add_trunk(parser.add_argument_group("training of a trunk"))
    of_value_model = parser.add_argument_group(f"training with --kind {VALUE_MODEL}")
    _add_value_model(of_value_model)
    of_value_model.add_argument(
        "--initial", type=Path, metavar="DIR", help="go on from the adapters of an adapter/ (default: new ones)"
    )
    add_seed(parser)
    add_device(parser)
    add_dtype(parser, "what is computed, and of weights that are not trained", by_device=True)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="make values for a base model: collect, fit and evaluate",
        description="Collect answers of a base model, fit a trunk or a value model to them, collect answers that it "
        "guides, fit again, and measure how well target lengths are met. Each stage goes on where it was ended.",
        epilog="example: lenvm train demo --output trained --num-prompts 50 --max-new-tokens 256 --dtype bfloat16",
    )
    parser.set_defaults(run=_run_train)
    parser.add_argument("base", metavar="BASE", help=f"the base model: {BASE_HELP}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="gets everything; required")
    parser.add_argument(
        "--rounds", type=positive(int), default=2, metavar="N", help="the first is not guided (default 2)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print tokens, FLOPs, hours on an H100 and GiB, and do nothing"
    )
    parser.add_argument(
        "--evaluate-prompts",
        type=int,
        default=24,
        metavar="N",
        help="held-out prompts that are answered to targets at the end, 0: none (default: %(default)s)",
    )
    _add_answers(parser.add_argument_group("what is sampled"))
    guided = parser.add_argument_group("guidance of the rounds from the second on")
    guided.add_argument(
        "--guided-answers-per-prompt", type=positive(int), metavar="N", help="(default: as --answers-per-prompt)"
    )
    _add_targets(guided)
    _add_training(parser.add_argument_group("training"))
    _add_trunk(parser.add_argument_group("training of a trunk"))
    of_value_model = parser.add_argument_group(f"training with --kind {VALUE_MODEL}")
    _add_value_model(of_value_model)
    of_value_model.add_argument("--backbone", default="base", metavar="NAME", help=f"{BASE_HELP}, or base (default)")
    where = parser.add_argument_group("where answers are made")
    where.add_argument("--url", metavar="SERVER", help="of SGLang or vLLM, for the first round (default: in process)")
    where.add_argument(
        "--guided-url",
        metavar="SERVER",
        help="the same with LENVM_VALUE_MODEL=DIR/round-1/value, for the second (default: in process)",
    )
    _add_places(where)


def _add_answers(group: Any) -> None:
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": "..."}, each a user\'s message, with "split": "train" or "test" or without (default: '
        "those of the demo)",
    )
    group.add_argument("--num-prompts", type=positive(int), metavar="N", help="so many of each split (default: all)")
    group.add_argument(
        "--held-out",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of prompts without a split, drawn by the seed, that nothing is trained on (default: %(default)s)",
    )
    group.add_argument(
        "--answers-per-prompt", type=positive(int), default=4, metavar="N", help="in a round (default: %(default)s)"
    )
    group.add_argument(
        "--max-new-tokens", type=positive(int), default=1024, metavar="N", help="cuts an answer (default: %(default)s)"
    )
    group.add_argument(
        "--plain-prompts", action="store_true", help="prompts are texts to go on with: no chat template is applied"
    )
    add_sampling(group)


def _add_targets(group: Any) -> None:
    group.add_argument(
        "--targets",
        type=positive(int),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="tokens between which targets are drawn, evenly by their logarithm, no more than --max-new-tokens; an "
        "answer is guided for a random part of its target, and then goes on alone (default: 20 2000)",
    )


def _add_training(group: Any) -> None:
    group.add_argument(
        "--kind",
        choices=KINDS,
        default=TRUNK,
        help="a trunk: a small network on the base model's own states; or a value model (default: %(default)s)",
    )
    group.add_argument(
        "--gamma",
        default="auto",
        metavar="G",
        help="discount in (0, 1); auto: the 99th percentile of the training answers' lengths gets the value 0.99",
    )
    group.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        default=2,
        help="of a trunk the best is kept; 0 measures what --initial has on held-out answers (default: %(default)s)",
    )
    group.add_argument(
        "--learning-rate",
        type=positive(float),
        metavar="R",
        help=f"(default: {RATE_ADAPTERS:g} of adapters, {RATE_FULL:g} of all weights, {RATE_TRUNK:g} of a trunk)",
    )
    group.add_argument(
        "--batch-tokens", type=positive(int), metavar="N", help="of a step (default: 16384, of a trunk 4096)"
    )
    group.add_argument(
        "--forward-tokens", type=positive(int), metavar="N", help="of a forward (default: 16384, on a CPU 1536)"
    )


def _add_trunk(group: Any) -> None:
    group.add_argument(
        "--layers",
        type=positive(int),
        nargs="+",
        metavar="N",
        help="which states it reads, those that layer N reads; as many as the base model has layers: those that its "
        "output layer reads (default)",
    )
    group.add_argument(
        "--states",
        type=positive(int),
        metavar="N",
        help=f"tokens that it learns from at most, which are kept in memory (default: {OF_KIND[TRUNK]['states']})",
    )


def _add_value_model(group: Any) -> None:
    defaults = OF_KIND[VALUE_MODEL]
    what = group.add_mutually_exclusive_group()
    what.add_argument(
        "--adapters",
        type=positive(int),
        metavar="RANK",
        help=f"train adapters of this rank (default: {defaults['adapters']})",
    )
    what.add_argument("--full", action="store_true", default=None, help="train all weights")
    group.add_argument(
        "--first-layer",
        type=int,
        metavar="N",
        help=f"the lowest layer with adapters (default: {defaults['first_layer']})",
    )
    group.add_argument("--head-learning-rate", type=positive(float), metavar="R", help=f"(default: {RATE_HEAD:g})")
    group.add_argument(
        "--row-tokens", type=positive(int), metavar="N", help="of a row of answers (default: 4096, on a CPU 512)"
    )
    group.add_argument(
        "--save-seconds",
        type=positive(float),
        metavar="S",
        help=f"between two writings of what a run that was killed goes on from (default: {defaults['save_seconds']})",
    )
    group.add_argument("--checkpointing", action="store_true", default=None, help="less memory for a third more time")


def _add_places(where: Any) -> None:
    where.add_argument(
        "--rows",
        type=positive(int),
        default=64,
        metavar="N",
        help="prompts of a batch in process (default: %(default)s)",
    )
    where.add_argument(
        "--concurrency",
        type=positive(int),
        default=64,
        metavar="N",
        help="requests to a server at a time (default: 64)",
    )
    add_seed(where)
    add_device(where)
    add_dtype(where, "models in process and of what is computed", by_device=True)


def _run_collect(args: argparse.Namespace) -> None:
    with usage_errors():
        _prepare(args)
        from lenvm_kernels.training.stages import Collecting, collect_stage

        collect_stage(Collecting.of(args), args.base, args.output, seed=args.seed, value=args.value, url=args.url)


def _run_fit(args: argparse.Namespace) -> None:
    command = shlex.join(["lenvm", *sys.argv[1:]])
    with usage_errors():
        _prepare(args)
        from lenvm_kernels.training.report import table
        from lenvm_kernels.training.stages import Fitting, TrunkFitting, fit_stage, fit_trunk_stage

        if args.kind == TRUNK:
            report = fit_trunk_stage(TrunkFitting.of(args), args.backbone, args.answers, args.output, command=command)
        else:
            how = Fitting.of(args)
            report = fit_stage(how, args.backbone, args.answers, args.output, initial=args.initial, command=command)
        if report:  # of several processes the first one has it
            print(table(report))


def _run_train(args: argparse.Namespace) -> None:
    with usage_errors():
        _prepare(args)
        from lenvm_kernels.training.train import train

        train(args, shlex.join(["lenvm", *sys.argv[1:]]))


def _prepare(args: argparse.Namespace) -> None:
    """What has to be installed, and the defaults that other flags and the device decide."""
    from lenvm_kernels.loading.models import require_extras

    require_extras("accelerate", "peft", extra="train")
    if hasattr(args, "kind"):
        is_trunk = args.kind == TRUNK
        for kind, flags in OF_KIND.items():
            for name, default in flags.items():
                if getattr(args, name, None) is None:
                    setattr(args, name, default)
                elif kind != args.kind:
                    flag = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{flag} must not be given with --kind {args.kind}, only with --kind {kind}")
        defaults = {
            "learning_rate": RATE_TRUNK if is_trunk else RATE_FULL if args.full else RATE_ADAPTERS,
            "batch_tokens": 4096 if is_trunk else 16384,
        }
        for name, default in defaults.items():
            if getattr(args, name) is None:
                setattr(args, name, default)
    args.device = device_of(args.device)
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
