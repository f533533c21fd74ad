"""``lenvm demo`` and ``lenvm export`` as commands: their flags, and what they print."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenvm_kernels.cli_arguments import add_device, add_seed, check_output_files, device_of, usage_errors

if TYPE_CHECKING:
    from lenvm_kernels.demo.run import Result


def add(commands: Any) -> None:
    """Add the command to those of ``lenvm``."""
    parser = commands.add_parser(
        "demo",
        help="measure length control on SmolLM2-135M-Instruct",
        description="Answer held-out prompts with SmolLM2-135M-Instruct: alone, guided shorter, guided longer, and to "
        "target lengths. Prints lengths, how answers end and perplexities, and plots lengths against targets.",
    )
    parser.set_defaults(run=_demo)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer prompts and tokens: 4 minutes on 2 cores (default: all prompts, about a quarter of an hour)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("lenvm-demo.png"),
        metavar="FILE",
        help="where to write the plot, a PNG (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: not written)")
    add_device(parser)
    add_seed(parser)


def add_export(commands: Any) -> None:
    """Add ``export`` to those of ``lenvm``."""
    parser = commands.add_parser(
        "export",
        help="write the demo's models as directories, for engines",
        description="Write SmolLM2 and its value model in Hugging Face format, as the directories DIR/base and "
        "DIR/value (540 MB), and its trunk as DIR/trunk, to try an engine with. lenvm_config.json says their gamma.",
    )
    parser.set_defaults(run=_export)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the three directories are made")


def _demo(args: argparse.Namespace) -> None:
    with usage_errors():
        check_output_files(plot=args.plot, json=args.json)
        start = time.monotonic()
        import torch

        from lenvm_kernels.demo import held_out_prompts
        from lenvm_kernels.demo.models import Models, require_extras

        require_extras("gguf", "accelerate", "matplotlib", "tqdm")
        from lenvm_kernels.demo.run import FULL, QUICK, plot, run

        print("loading SmolLM2-135M-Instruct: about 20 seconds ...", file=sys.stderr, flush=True)
        models = Models.load("demo", "demo", device=device_of(args.device), dtype=torch.float32)

    result = run(models, held_out_prompts(), QUICK if args.quick else FULL, seed=args.seed)
    seconds = time.monotonic() - start
    _print_samples(result)
    _print_table(result)
    with usage_errors():
        plot(result, args.plot)
        print(f"\n{args.plot}: lengths against targets; {seconds:.0f} s in all")
        if args.json is not None:
            numbers = {
                "settings": result.rows(),
                "target_length": result.plan.target,
                "prompts": len(result.prompts),
                "max_new_tokens": result.plan.max_new_tokens,
                "lengths": {name: [len(a.ids) for a in answers] for name, answers in result.answers.items()},
                "seed": args.seed,
                "seconds": seconds,
            }
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _print_samples(result: Result, count: int = 3, width: int = 60) -> None:
    """The first characters of some prompts' answers, setting under setting of the table."""
    for index, prompt in enumerate(result.prompts[:count]):
        print(f"\n> {prompt}")
        for setting, answers in result.answers.items():
            if "/" in setting:  # only plotted
                continue
            answer = answers[index]
            text = " ".join(answer.text.split())
            text = text if len(text) <= width else text[:width] + "..."
            print(f"  {setting:8} {len(answer.ids):>4} tokens  {text}")


def _print_table(result: Result) -> None:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.0f} %"

    target = f"|length - {result.plan.target}|"
    print(
        f"\n{'setting':10} {'mean length':>11} {target:>13} {'within 25 %':>11} {'sentence ends':>13} "
        f"{'perplexity':>10}  guidance"
    )
    for row in result.rows():
        guidance = "none" if row["guidance"] is None else " ".join(f"{k}={v}" for k, v in row["guidance"].items())
        print(
            f"{row['setting']:10} {row['mean_length']:>11.1f} {row['distance']:>13.1f} {percent(row['within_25']):>11} "
            f"{percent(row['sentence_ends']):>13} {row['perplexity']:>10.2f}  {guidance}"
        )
    print(
        f"{len(result.prompts)} held-out prompts. Lengths in tokens, end-of-sequence included, at most "
        f"{result.plan.max_new_tokens}.\n|length - target|: mean distance. Sentence ends: of answers that ended by "
        "themselves, those that end a sentence.\nPerplexity: of the output under the base model alone, fp32, "
        "temperature 1. constant: guided by the end of the text alone."
    )


def _export(args: argparse.Namespace) -> None:
    with usage_errors():
        from lenvm_kernels.demo.models import export

        base, value, trunk = export(args.folder)
    print(f"base model: {base}\nvalue model: {value}\ntrunk: {trunk}")
