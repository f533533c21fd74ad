"""``lenvm evaluate``: flags, their checks, and output files."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lenvm_kernels.loading import Prompt, arguments, held_out_prompts, read_prompts, say, spread
from lenvm_kernels.loading.arguments import positive

OWN_FIELDS = ("target_length", "target_length_mode", "length_mode", "target_value")


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "evaluate",
        help="measure how well target lengths are met, and the cost in quality",
        description="Answer prompts to target lengths, guided and with three baselines: the base model alone, the base "
        "model cut at the target, and guidance without a value model. Prints tables of lengths, perplexity and ends of "
        "answers, with 95 % intervals, and of predicted lengths. The same command resumes an interrupted run.",
        epilog="example: lenvm evaluate demo demo --targets 40 80 --output evaluation",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("base", metavar="BASE", help=arguments.A_MODEL)
    value_help = "value model, as BASE, or a probe, or none; with --url, the server's, which is not loaded here"
    parser.add_argument("value", metavar="VALUE", help=value_help)
    output_help = "directory of the answers, numbers, tables and the plot; required"
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=output_help)

    what = parser.add_argument_group("prompts and settings")
    prompts_help = (
        'lines of {"prompt": "..."}, each a user\'s message; with "answer", accuracies are measured; GSM8K and MATH '
        "are accepted unchanged (default: the held-out prompts of the demo)"
    )
    what.add_argument("--prompts", type=Path, metavar="FILE", help=prompts_help)
    regex_help = "finds answers without \\boxed{}: the last match or its first group (default: the last number)"
    what.add_argument("--answer-regex", metavar="REGEX", help=regex_help)
    for flag, kind, default, metavar, meaning in (
        ("--targets", positive(int), [20, 40, 80, 160], "T", "target lengths in tokens (default: 20 40 80 160)"),
        ("--seeds", arguments.seed_of, [0, 1, 2], "N", "each seed answers every prompt (default: 0 1 2)"),
        ("--guidance", _params, [], "JSON", "request parameters, one setting per object (default: {})"),
    ):
        what.add_argument(flag, type=kind, nargs="+", default=default, metavar=metavar, help=meaning)
    limit_help = "maximum answer length, at most 2.5 times the answer's target (default: 2.5 times the largest target)"
    of_prompts = "number of prompts, evenly spaced (default: all)"
    arguments.add_numbers(what, num_prompts=(None, of_prompts), max_new_tokens=(None, limit_help))
    arguments.add_say_it(what, "also answer every setting with TEXT appended to each prompt, after an empty line")

    arguments.add_sampling(parser.add_argument_group("sampling"))

    where = parser.add_argument_group("where answers are generated")
    url_help = "SGLang or vLLM with LENVM_VALUE_MODEL=VALUE (default: in process)"
    where.add_argument("--url", metavar="SERVER", help=url_help)
    constant_help = "the same with LENVM_VALUE_MODEL=none (default: in process; --url if VALUE is none)"
    where.add_argument("--constant-url", metavar="SERVER", help=constant_help)
    arguments.add_numbers(where, rows=(16, "answers per batch, or concurrent requests to a server"))
    arguments.add_device(where)
    arguments.add_dtype(where, "the models")


def run_command(args: argparse.Namespace) -> None:
    """Check the flags, load the models, generate the answers, write and print the tables."""
    start = time.monotonic()
    with arguments.usage_errors():
        import torch

        from lenvm_kernels.engines.settings import NONE
        from lenvm_kernels.evaluate.accuracy import compiled, references
        from lenvm_kernels.evaluate.measures import Answer
        from lenvm_kernels.evaluate.report import write_results
        from lenvm_kernels.evaluate.run import Plan, default_limit, run, settings_of
        from lenvm_kernels.evaluate.servers import Server
        from lenvm_kernels.evaluate.stored_answers import StoredAnswers
        from lenvm_kernels.guidance import Thoughts, parse_guidance
        from lenvm_kernels.loading.models import Models, require_extras

        prompts = read_prompts(args.prompts) if args.prompts else [Prompt(text) for text in held_out_prompts()]
        count = args.num_prompts or len(prompts)
        if count > len(prompts):
            raise ValueError(f"--num-prompts must be at most the number of prompts, {len(prompts)}, got {count}")
        answers = references(prompts, f"--prompts {args.prompts}")
        answer_regex = compiled(args.answer_regex, answers is not None)
        require_extras("matplotlib", *([] if answers is None else ["math_verify"]))
        if args.say_it is not None:
            say("", args.say_it, args.targets[0])  # rejects other placeholders
        settings = settings_of(args.guidance, with_values=args.value != NONE, said=args.say_it is not None)
        for setting in settings:  # rejects wrong parameters before models are loaded
            if setting.guidance is not None:
                fields = {"target_length": args.targets[0], **setting.guidance}
                parse_guidance(fields, thoughts=Thoughts.unknown(), has_values=setting.with_values)
        constant_url = args.constant_url or (args.url if args.value == NONE else None)
        server, constant_server = Server.find("--url", args.url), Server.find("--constant-url", constant_url)
        same = {name: getattr(args, name) for name in ("base", "value", "rows", "dtype", "say_it")}
        plan = Plan(
            prompts=spread([prompt.text for prompt in prompts], count),
            targets=list(dict.fromkeys(args.targets)),
            seeds=list(dict.fromkeys(args.seeds)),
            settings=settings,
            max_new_tokens=args.max_new_tokens or default_limit(max(args.targets)),
            sampling=arguments.sampling_of(args),
            engine=None if server is None else server.engine,
            constant_engine=None if constant_server is None else constant_server.engine,
            answers=None if answers is None else spread(answers, count),
            **same,
        )
        stored = StoredAnswers(args.output, asdict(plan), Answer, "lenvm evaluate")
        device, dtype = arguments.device_of(args.device), getattr(torch, args.dtype)
        value = args.value if server is None else NONE
        models = Models.load(args.base, value, device=device, dtype=dtype, names=("BASE", "VALUE"))
        run(plan, models, stored, server, constant_server)
        facts = {
            "command": shlex.join(["lenvm", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "seconds": round(time.monotonic() - start, 1),
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "url": args.url,
            "constant_url": constant_url,
        }
        print(write_results(args.output, plan, list(stored.answers.values()), models.tokenizer, answer_regex, facts))


def _params(text: str) -> dict[str, Any]:
    """The ``type`` of ``--guidance``: parameters besides the target."""
    try:
        guidance = json.loads(text)
    except json.JSONDecodeError:
        guidance = None
    if not isinstance(guidance, dict):
        raise argparse.ArgumentTypeError(f'must be JSON objects such as {{"strength": 8}}, got {text!r}')
    if own := [name for name in OWN_FIELDS if name in guidance]:
        raise argparse.ArgumentTypeError(f"must not contain a target (use --targets), got {own[0]} in {text!r}")
    return guidance
