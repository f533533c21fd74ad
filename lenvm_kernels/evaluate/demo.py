"""``lenvm demo``: a preset of ``lenvm evaluate`` with SmolLM2-135M-Instruct and the value model in this package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lenvm_kernels.loading import arguments, held_out_prompts, spread

if TYPE_CHECKING:
    from lenvm_kernels.evaluate.run import Plan

TARGET = 80  # target of the table; the plot has more targets


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "demo",
        help="measure length control on SmolLM2-135M-Instruct",
        description="Answer held-out prompts with SmolLM2-135M-Instruct: alone, guided shorter, guided longer, and to "
        "target lengths. Prints lengths, ends of answers and perplexities, and plots lengths against targets.",
    )
    parser.set_defaults(run=run_command)
    quick_help = "fewer prompts and tokens: 3 to 8 minutes on 2 cores (default: all prompts, up to half an hour)"
    parser.add_argument("--quick", action="store_true", help=quick_help)
    plot_help = "PNG file of the plot (default: %(default)s)"
    parser.add_argument("--plot", type=Path, default=Path("lenvm-demo.png"), metavar="FILE", help=plot_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers (default: not written)")
    arguments.add_device(parser)
    arguments.add_seed(parser)


def plan_of(prompts: list[str], *, quick: bool, seed: int) -> Plan:
    """The plan of the demo: the settings of ``lenvm evaluate``, two scales without a target, and the fork's ``eq``."""
    from lenvm_kernels.evaluate.run import BASE, CONSTANT, GUIDED, Plan, Setting

    return Plan(
        base="demo",
        value="demo",
        prompts=spread(prompts, 8 if quick else 40),
        targets=[20, 40, TARGET] if quick else [20, 40, TARGET, 120],
        seeds=[seed],
        settings=[
            Setting(BASE, None, False, targets=(None,)),
            Setting("shorter", {"value_mode": "centered_exp", "value_scale": -60.0}, True, targets=(None,)),
            Setting("longer", {"value_mode": "centered_exp", "value_scale": 20.0}, True, targets=(None,)),
            Setting("eq", {"value_constraint": "eq"}, True, targets=(TARGET,)),
            Setting(CONSTANT, {}, False),
            Setting(GUIDED, {}, True),
        ],
        max_new_tokens=128 if quick else 256,
        sampling=dict(temperature=0.8, top_k=8, top_p=1.0, min_p=0.02),  # as in the value model's training
        rows=32,
        dtype="float32",
    )


def run_command(args: argparse.Namespace) -> None:
    """Generate the answers, print some of them and a table, write the plot and the numbers."""
    start = time.monotonic()
    with arguments.usage_errors():
        arguments.check_output_files(plot=args.plot, json=args.json)
        import torch

        from lenvm_kernels.loading.models import Models, require_extras

        require_extras("gguf", "accelerate", "matplotlib")
        from lenvm_kernels.evaluate.measures import Answer, measure
        from lenvm_kernels.evaluate.report import plot_lengths
        from lenvm_kernels.evaluate.run import BASE, CONSTANT, GUIDED, run
        from lenvm_kernels.evaluate.stored_answers import StoredAnswers

        print("loading SmolLM2-135M-Instruct: about 20 seconds ...", file=sys.stderr, flush=True)
        models = Models.load("demo", "demo", device=arguments.device_of(args.device), dtype=torch.float32)
        plan = plan_of(held_out_prompts(), quick=args.quick, seed=args.seed)
        with TemporaryDirectory() as folder:
            stored = StoredAnswers(Path(folder), asdict(plan), Answer, "lenvm demo")
            run(plan, models, stored)
        views = plan.views(list(stored.answers.values()))
        view = views[str(TARGET)]
        for index, prompt in enumerate(plan.prompts[:3]):
            print(f"\n> {prompt}")
            for name, answers in view.items():
                text = " ".join(answers[index].text.split())
                text = text if len(text) <= 60 else text[:60] + "..."
                print(f"  {name:8} {len(answers[index].ids):>4} tokens  {text}")
        rows = [{"setting": name, **measure(answers, TARGET)} for name, answers in view.items()]
        _print_table(plan, rows)
        plotted = {
            target: {"base model": view[BASE], "no value model": of[CONSTANT], "guided": of[GUIDED]}
            for target, of in views.items()
        }
        plot_lengths(plan.targets, plotted, args.plot)
        seconds = time.monotonic() - start
        print(f"\n{args.plot}: lengths against targets; {seconds:.0f} s in all")
        if args.json is not None:
            sizes = dict(target_length=TARGET, prompts=len(plan.prompts), max_new_tokens=plan.max_new_tokens)
            numbers = {"settings": rows, **sizes, "seed": args.seed, "seconds": seconds}
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _print_table(plan: Plan, rows: list[dict[str, Any]]) -> None:
    titles = ("mean length", f"|length - {TARGET}|", "within 25 %", "sentence ends", "perplexity")
    print(f"\n{'setting':10} " + " ".join(f"{title:>13}" for title in titles))
    for row in rows:
        shares = ("-" if row[key] is None else f"{100 * row[key]:.0f} %" for key in ("within_25", "sentence_ends"))
        cells = (f"{row['mean']:.1f}", f"{row['distance']:.1f}", *shares, f"{row['perplexity']:.2f}")
        print(f"{row['setting']:10} " + " ".join(f"{cell:>13}" for cell in cells))
    print(
        f"{len(plan.prompts)} held-out prompts. Lengths in tokens, end-of-sequence included, at most "
        f"{plan.max_new_tokens}.\n|length - {TARGET}|: mean distance. sentence ends: share of answers that ended by "
        "themselves with a complete sentence.\nperplexity: of the output under the base model alone, fp32, "
        f"temperature 1. hard cut: answers of none, cut at {TARGET}.\neq, constant, guided: to {TARGET} tokens; eq is "
        "the fork's constraint, constant has no value model.\nshorter, longer: centered_exp with scales -60 and 20."
    )
