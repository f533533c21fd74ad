"""``lenvm evaluate`` as a command: its flags, what they may be, and the files that it leaves."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from lenvm_kernels import __version__
from lenvm_kernels.cli_arguments import (
    add_device,
    add_dtype,
    add_sampling,
    add_say_it,
    device_of,
    positive,
    seed_of,
    usage_errors,
)
from lenvm_kernels.demo import held_out_prompts, spread
from lenvm_kernels.evaluate.prompts import Prompt, read_prompts, say

OWN_FIELDS = ("target_length", "target_length_mode", "length_mode", "target_value")


def add(commands: Any) -> None:
    """Add the command to those of ``lenvm``."""
    parser = commands.add_parser(
        "evaluate",
        help="measure how well target lengths are met, and at what price",
        description="Answer prompts to target lengths, guided and by three baselines: the base model alone, the same "
        "cut at the target, and guidance without a value model. Prints tables of lengths, perplexity and how answers "
        "end, with 95 % intervals, and of predicted lengths. A run that was ended goes on where it stopped.",
        epilog="example: lenvm evaluate demo demo --targets 40 80 --output evaluation",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("base", metavar="BASE", help="a Hugging Face directory or name, a .gguf file, or demo")
    parser.add_argument(
        "value",
        metavar="VALUE",
        help="value model, as BASE, or a trunk; or the word none: targets are met by the end of the text alone. With "
        "--url it is the server's, and is not loaded",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets answers, numbers, tables and plots; if it holds answers of the same plan, the run goes on; required",
    )

    what = parser.add_argument_group("what is asked")
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": "..."}, each a user\'s message; with "answer", accuracies are measured; GSM8K '
        "and MATH are read as they are (default: the held-out prompts of the demo)",
    )
    what.add_argument(
        "--answer-regex",
        metavar="REGEX",
        help="finds the answer of a text without \\boxed{}: its last match's first group, or all of it (default: the "
        "last number)",
    )
    what.add_argument(
        "--num-prompts", type=positive(int), metavar="N", help="so many, spread over all of them (default: all)"
    )
    what.add_argument(
        "--targets",
        type=positive(int),
        nargs="+",
        default=[20, 40, 80, 160],
        metavar="T",
        help="tokens (default: 20 40 80 160)",
    )
    what.add_argument(
        "--seeds", type=seed_of, nargs="+", default=[0, 1, 2], metavar="N", help="an answer each (default: 0 1 2)"
    )
    what.add_argument(
        "--guidance",
        nargs="+",
        default=[],
        metavar="JSON",
        help="parameters of a request beside its target, a setting each (default: {}, those of the package)",
    )
    what.add_argument(
        "--strengths",
        type=float,
        nargs="+",
        default=[],
        metavar="S",
        help="a curve of distance against perplexity over these strengths of near (default: no curve)",
    )
    what.add_argument(
        "--max-new-tokens",
        type=positive(int),
        metavar="N",
        help="tokens at which an answer is cut (default: 2.5 times the largest target, in whole 16s); at a target no "
        "more than 2.5 times that count",
    )
    add_say_it(what, "also answer in every setting with TEXT appended to each prompt, after an empty line")
    what.add_argument(
        "--closing",
        metavar="TEXT",
        help="add the setting forced answer: base model answers longer than the target are cut 16 tokens before it and "
        "continue with TEXT and new tokens of the base model (default: no such setting)",
    )

    add_sampling(parser.add_argument_group("sampling"))

    where = parser.add_argument_group("where answers are made")
    where.add_argument(
        "--url", metavar="SERVER", help="of SGLang or vLLM with LENVM_VALUE_MODEL=VALUE (default: in process)"
    )
    where.add_argument(
        "--constant-url",
        metavar="SERVER",
        help="the same with LENVM_VALUE_MODEL=none, for the constant (default: in process; that of --url if VALUE is "
        "none)",
    )
    where.add_argument(
        "--rows", type=positive(int), default=16, metavar="N", help="prompts of a batch (default: %(default)s)"
    )
    where.add_argument(
        "--concurrency",
        type=positive(int),
        default=8,
        metavar="N",
        help="requests to a server at a time, no more than --rows (default: %(default)s)",
    )
    add_device(where)
    add_dtype(where, "the models")


def run_command(args: argparse.Namespace) -> None:
    """Run the command: check all that can be checked, load the models, make the answers, write and print."""
    command = shlex.join(["lenvm", *sys.argv[1:]])
    start = time.monotonic()
    with usage_errors():
        guidances = [_guidance(text) for text in args.guidance]
        prompts, right_answers = _prompts(args.prompts, args.num_prompts)
        import numpy
        import torch
        import transformers

        from lenvm_kernels.demo.models import NONE, Models, require_extras
        from lenvm_kernels.guidance import Thoughts, parse_guidance

        require_extras("matplotlib", "tqdm", *([] if right_answers is None else ["math_verify"]))
        import matplotlib

        from lenvm_kernels.evaluate import accuracy, calibration, report
        from lenvm_kernels.evaluate.measures import measure
        from lenvm_kernels.evaluate.plan import BASE, CLOSING_TOKENS, AnswerFile, Plan, default_limit, settings_of
        from lenvm_kernels.evaluate.run import run, views
        from lenvm_kernels.evaluate.servers import Server

        matplotlib.use("Agg")
        answer_regex = accuracy.compiled(args.answer_regex, right_answers is not None)
        if args.say_it is not None:
            say("", args.say_it, args.targets[0])  # refuses other placeholders
        if args.closing is not None and min(args.targets) <= CLOSING_TOKENS:
            raise ValueError(f"--closing needs --targets above {CLOSING_TOKENS}, got {min(args.targets)}")
        settings, curves = settings_of(
            guidances,
            args.strengths,
            with_values=args.value != NONE,
            said=args.say_it is not None,
            forced=args.closing is not None,
        )
        for setting in settings:
            if setting.guidance is not None:
                fields = {"target_length": args.targets[0], **setting.guidance}
                parse_guidance(fields, thoughts=Thoughts.unknown(), has_values=setting.with_values)
        constant_url = args.constant_url or (args.url if args.value == NONE else None)
        server = None if args.url is None else Server.find("--url", args.url)
        constant_server = None if constant_url is None else Server.find("--constant-url", constant_url)
        plan = Plan(
            base=args.base,
            value=args.value,
            prompts=prompts,
            targets=list(dict.fromkeys(args.targets)),
            seeds=list(dict.fromkeys(args.seeds)),
            settings=settings,
            curves=curves,
            max_new_tokens=args.max_new_tokens or default_limit(max(args.targets)),
            sampling=dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
            rows=args.rows,
            dtype=args.dtype,
            engine=None if server is None else server.engine,
            constant_engine=None if constant_server is None else constant_server.engine,
            answers=right_answers,
            say_it=args.say_it,
            closing=args.closing,
        )
        file = AnswerFile(args.output, plan)
        device = device_of(args.device)
        value = args.value if server is None else NONE
        dtype = getattr(torch, args.dtype)
        models = Models.load(args.base, value, device=device, dtype=dtype, names=("BASE", "VALUE"))
        run(plan, file, models, server, constant_server, workers=args.concurrency)

        found = views(plan, list(file.answers.values()))
        scores = {
            target: {name: measure(answers, int(target)) for name, answers in by_name.items()}
            for target, by_name in found.items()
        }
        own = [answer for answer in file.answers.values() if answer.setting == BASE]
        calibrated = calibration.calibrate(own)
        if right_answers is not None:
            accuracy.add(scores, found, plan, models.tokenizer, answer_regex)
        versions = {"lenvm_kernels": __version__, "python": sys.version.split()[0]}
        versions |= {module.__name__: module.__version__ for module in (torch, transformers, numpy)}
        result = {
            "command": command,
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "seconds": round(time.monotonic() - start, 1),
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "url": args.url,
            "constant_url": constant_url,
            "versions": versions,
            "scores": scores,
            "curves": curves,
            "calibration": calibrated,
        }
        (args.output / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        table = "\n".join(filter(None, (report.table(plan, scores), calibration.table(plan, calibrated))))
        (args.output / "table.md").write_text(table, encoding="utf-8")
        of_curves = {name for curve in curves.values() for _, name in curve} - set(curves)
        report.plot_lengths(plan.targets, found, args.output / "lengths.png", leave_out=of_curves)
        if right_answers is not None:
            accuracy.plot(plan, scores, args.output / "accuracy.png", leave_out=of_curves)
        if curves:
            report.plot_curves(plan, scores, args.output / "curve.png")
        if calibrated is not None:
            calibration.plot(own, calibrated, args.output / "calibration.png")
    print(table)


def _guidance(text: str) -> dict[str, Any]:
    """What ``--guidance`` asks for beside a target."""
    try:
        guidance = json.loads(text)
    except json.JSONDecodeError:
        guidance = None
    if not isinstance(guidance, dict):
        raise ValueError(f'--guidance must be JSON objects such as {{"strength": 8}}, got {text!r}')
    if own := [name for name in OWN_FIELDS if name in guidance]:
        raise ValueError(f"--guidance must leave the target to --targets, got {own[0]} in {text!r}")
    return guidance


def _prompts(file: Path | None, count: int | None) -> tuple[list[str], list[str] | None]:
    """The prompts of a file, or the demo's, of which ``count`` are taken evenly, and their answers if known."""
    from lenvm_kernels.evaluate.accuracy import references

    prompts = [Prompt(text) for text in held_out_prompts()] if file is None else read_prompts(file)
    answers = references(prompts, f"--prompts {file}")
    count = len(prompts) if count is None else count
    if count > len(prompts):
        raise ValueError(f"--num-prompts must be at most the {len(prompts)} prompts that there are, got {count}")
    return spread([prompt.text for prompt in prompts], count), None if answers is None else spread(answers, count)
