"""Where the time and the operations of length-guided decoding go, beside the base model alone and the published way.

python -m bench.study flops --check                 operations and bytes by the models' dimensions, no run needed
python -m bench.study run --out DIR                 decode in each way; per-step JSON lines, and what each run was
python -m bench.study run --out DIR --top-k 1 2 3 4 5      the sweep over the limit on candidates
python -m bench.study report DIR                    tables and plots of what is there: DIR/summary.md
python -m bench.study serve --model M --value-model W --out DIR     the same in a server, over HTTP
python -m bench.study sources --model M --sources none TRUNK W --out DIR    what a source of values costs there a token
python -m bench.study COMMAND --help                options
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.harness import storing
from bench.study import flops, report, run, serve, served, server, sources
from bench.study.prompts import demo_prompts, read_prompts
from lenvm_kernels.cli_arguments import positive
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.value_model.checkpoint import local_path

# What is not given, by device.
DEFAULTS = {
    "cuda": dict(load="random", dtype="bfloat16", rows=64, steps=128),
    "cpu": dict(load="smollm2", dtype="float32", rows=4, steps=24),
}
# What is not given, of the random load.
RANDOM = dict(base="Qwen2.5-7B", value_model=["Qwen2.5-0.5B", "Qwen2.5-1.5B"], cached=512)
# The same of the server; prompts and samples on a GPU are as many as published.
SERVED = {
    "cuda": dict(num_prompts=50, samples=16, max_tokens=512),
    "cpu": dict(num_prompts=4, samples=2, max_tokens=32),
}
# By what a device's name contains; operations in bf16, of the data sheets.
PEAKS = {"H100": served.Peak("H100", 989e12, 3.35e12), "H200": served.Peak("H200", 989e12, 4.8e12)}


def parse_args() -> argparse.Namespace:
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m bench.study", description=__doc__, **options)
    commands = parser.add_subparsers(dest="command", required=True, metavar="flops | run | report | serve | sources")

    add = commands.add_parser("flops", help=flops.__doc__.splitlines()[0]).add_argument
    add("--check", action="store_true", help="compare with the published figures; fails if they differ")
    model = "config.json, a folder with one, or a name that is known (default: %(default)s)"
    add("--base", default=flops.PUBLISHED_BASE, help=f"base model: {model}")
    add("--value-model", default=flops.PUBLISHED_VALUE, help=model)
    work, default = flops.PUBLISHED_WORK, "(default: %(default)s)"
    add("--top-k", type=_positive, default=5, help=f"candidates of an output token {default}")
    add("--prompts", type=_positive, default=work.prompts, help=f"prompts {default}")
    add("--samples", type=_positive, default=work.samples, help=f"samples of each prompt {default}")
    add("--prompt-tokens", type=_positive, default=work.prompt_tokens, help=f"tokens of a prompt {default}")
    add("--output-tokens", type=_positive, default=work.output_tokens, help=f"tokens of a sample {default}")

    text = run.__doc__
    add = commands.add_parser("run", help=text.splitlines()[0], description=text, **options).add_argument
    by_device = {
        name: f"(default: {value} on a GPU, else {DEFAULTS['cpu'][name]})" for name, value in DEFAULTS["cuda"].items()
    }
    add("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--load", choices=["smollm2", "random"], help=by_device["load"])
    add("--dtype", choices=["float32", "bfloat16"], help=by_device["dtype"])
    add("--rows", type=_positive, help=f"rows of the batch {by_device['rows']}")
    add("--steps", type=_positive, help=f"steps to decode {by_device['steps']}")
    add("--repeats", type=_positive, default=3, help=f"of each way; the fastest counts {default}")
    add("--ways", nargs="+", choices=run.WAYS, default=run.WAYS, help="(default: all)")
    add("--top-k", nargs="+", type=_positive, default=[5], help="limits on candidates (default: 5)")
    # No defaults, so that the other load can refuse them.
    add("--base", help=f"dimensions of the random base (default: {RANDOM['base']})")
    names = " ".join(RANDOM["value_model"])
    add(
        "--value-model",
        nargs="+",
        help=f"dimensions of the random value models (default: {names}; smollm2 has its own)",
    )
    add("--cached", type=_positive, help=f"tokens before the first step, random load (default: {RANDOM['cached']})")

    tables = commands.add_parser("report", help=report.__doc__.splitlines()[0])
    tables.add_argument("folder", type=Path, help="what `run` wrote; gets summary.md, summary.json and plots")

    text = serve.__doc__
    add = commands.add_parser("serve", help=text.splitlines()[0], description=text, **options).add_argument
    _add_served(add)
    add("--value-model", type=Path, required=True, help="value model: a directory or .gguf file")
    add("--lengths", nargs="+", choices=served.LENGTHS, default=served.LENGTHS, help="of the outputs (default: both)")
    add("--top-k", nargs="+", type=_positive, default=[1, 2, 3, 4, 5], help="limits on candidates (default: 1 to 5)")
    add("--stride", nargs="+", type=_positive, default=[1, 4], help="strides of guidance (default: 1 and 4)")
    add("--concurrency", type=_positive, help="requests that wait at once (default: all)")
    add(
        "--peak",
        metavar="GPU",
        help=f"{', '.join(PEAKS)}, or TFLOP/s:GB/s of a data sheet: rates are shown as shares of it (default: by the "
        "GPU's name)",
    )

    text = sources.__doc__
    add = commands.add_parser("sources", help=text.splitlines()[0], description=text, **options).add_argument
    _add_served(add)
    add("--sources", nargs="+", required=True, metavar="SOURCE", help="what LENVM_VALUE_MODEL is, of each server")
    add("--top-k", nargs="+", type=_positive, default=[5, 8], help="limits on candidates (default: 5 and 8)")
    add("--rounds", type=_positive, default=5, help=f"that count {default}")
    return parser.parse_args()


def _add_served(add: Callable[..., Any]) -> None:
    """Arguments of all commands that start servers."""
    by_device = {
        name: f"(default: {value} on a GPU, else {SERVED['cpu'][name]})" for name, value in SERVED["cuda"].items()
    }
    add("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    add("--engine", choices=server.ENGINES, default="sglang", help="whose server it is (default: %(default)s)")
    add("--model", required=True, help="base model: a directory, or a name that the server knows")
    add("--python", default=sys.executable, help="Python of the server's environment (default: this one)")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--prompts", type=Path, metavar="FILE", help="JSONL file of prompts, see serve (default: those of the demo)")
    add("--num-prompts", type=_positive, help=f"first prompts of the file {by_device['num_prompts']}")
    add("--samples", type=_positive, help=f"samples of each prompt {by_device['samples']}")
    add(
        "--max-tokens",
        type=_positive,
        help=f"tokens of a sample, at most where its length is free {by_device['max_tokens']}",
    )
    add("--temperature", type=positive(float), default=run.TEMPERATURE, help="of all requests (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="of all requests (default: %(default)s)")
    guidance = json.dumps(run.GUIDANCE)
    add("--guidance", default=guidance, help="custom_params of guided requests, as JSON (default: %(default)s)")
    add("--startup-seconds", type=_positive, default=1200, help="that a server has to come up (default: %(default)s)")
    add("options", nargs="*", metavar="-- OPTION", help="options of the server, behind two dashes")


def main() -> int:
    args = parse_args()
    try:
        commands = {"flops": _flops, "run": _run, "report": lambda args: report.write(args.folder)}
        commands |= {"serve": _serve, "sources": _sources}
        return commands[args.command](args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _flops(args: argparse.Namespace) -> int:
    if args.check:
        figures = flops.published_figures()
        print(report.figures_table(figures))
        return int(not all(figure.agrees for figure in figures))
    base, value = flops.Architecture.load(args.base), flops.Architecture.load(args.value_model)
    if value.num_experts:
        raise ValueError(f"--value-model must be a dense model, {args.value_model} is a mixture of experts")
    work = flops.Workload(args.prompts, args.samples, args.prompt_tokens, args.output_tokens)
    print(report.estimate_text(base, value, work, args.top_k))
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; --device cpu decodes with the reference")
    if max(args.top_k) > run.MAX_CANDIDATES:
        raise ValueError(f"--top-k must be at most {run.MAX_CANDIDATES}, got {max(args.top_k)}")
    _fill(args, DEFAULTS[args.device])
    dtype = getattr(torch, args.dtype)
    if args.load == "smollm2":
        if given := [f"--{name.replace('_', '-')}" for name in RANDOM if getattr(args, name) is not None]:
            raise ValueError(f"{', '.join(given)}: only with --load random; smollm2 has models and prompts of its own")
        base, value_models = run.SmolBase(args.rows, dtype, args.device), [run.SmolBase.VALUE_MODEL]
    else:
        _fill(args, RANDOM)
        for name in (args.base, *args.value_model):
            if name not in flops.DIMENSIONS:
                raise ValueError(f"--base and --value-model must be of {', '.join(flops.DIMENSIONS)}, got {name!r}")
        base = run.RandomBase(args.base, args.rows, args.cached, args.steps, dtype, args.device)
        value_models = args.value_model
    study = run.Study(base, args.steps, args.repeats, args.out, run.environment(args.device, dtype))
    return study.run(args.ways, value_models, args.top_k)


def _serve(args: argparse.Namespace) -> int:
    guidance = _checked_guidance(args)
    if not local_path(args.value_model).exists():
        raise ValueError(f"--value-model must be an existing directory or .gguf file, got {str(args.value_model)!r}")
    load = _load(args, args.concurrency)
    setup = _setup(args, str(args.value_model))
    size = 4 if "float32" in setup.command(0) else 2
    dimensions = served.dimensions(args.model), served.dimensions(str(args.value_model))
    models = served.Models(*dimensions, size, _peak(args.peak))
    study = serve.Study(setup, load, models, args.out, _where(args) | models.sizes())
    plain = served.plain_conditions(args.lengths, args.top_k)
    guided = served.guided_conditions(args.lengths, args.top_k, args.stride, guidance)
    return _until_interrupted(args, lambda: study.run(plain, guided))


def _sources(args: argparse.Namespace) -> int:
    guidance = _checked_guidance(args)
    named = {Path(source).name: source for source in args.sources}
    if len(named) < len(args.sources) or sources.PLAIN in named:
        raise ValueError(f"--sources must differ in their last part, none of them {sources.PLAIN}, got {args.sources}")
    load, setup, where = _load(args), _setup(args, None), _where(args)
    return _until_interrupted(
        args, lambda: sources.compare(setup, named, load, args.top_k, args.rounds, guidance, args.out, where)
    )


def _peak(given: str | None) -> served.Peak | None:
    """What rates are compared with."""
    if given is None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        given = next((name for name in PEAKS if name in device), None)
    if given is None:
        return None
    if given in PEAKS:
        return PEAKS[given]
    try:
        tera, giga = map(float, given.split(":"))
        if not (0 < tera < math.inf and 0 < giga < math.inf):
            raise ValueError
    except ValueError:
        names = ", ".join(PEAKS)
        raise ValueError(f"--peak must be one of {names}, or TFLOP/s:GB/s as 312:2039, got {given!r}") from None
    return served.Peak(f"{tera:g} TFLOP/s, {giga:g} GB/s", tera * 1e12, giga * 1e9)


def _checked_guidance(args: argparse.Namespace) -> dict[str, Any]:
    most = int(os.environ.get("LENVM_MAX_CANDIDATES", run.MAX_CANDIDATES))
    if max(args.top_k) > most:
        raise ValueError(f"--top-k must be at most {most} (LENVM_MAX_CANDIDATES of the server), got {max(args.top_k)}")
    try:
        guidance = json.loads(args.guidance)
        guides = parse_guidance(guidance).needs_step
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--guidance must be a JSON object of custom_params, got {args.guidance!r}: {error}"
        ) from error
    if not guides:
        raise ValueError(f"--guidance must guide, got {args.guidance!r}, which is neutral")
    return guidance


def _load(args: argparse.Namespace, concurrency: int | None = None) -> served.Load:
    def tokenizer():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(args.model)

    prompts = read_prompts(args.prompts, tokenizer) if args.prompts else demo_prompts(tokenizer)
    _fill(args, SERVED[args.device] | {"num_prompts": min(SERVED[args.device]["num_prompts"], len(prompts))})
    if args.num_prompts > len(prompts):
        there = f"the {len(prompts)} prompts that there are"
        raise ValueError(f"--num-prompts must be from 1 to {there}, got {args.num_prompts}")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {args.top_p}")
    sampling = dict(temperature=args.temperature, top_p=args.top_p)
    return served.Load(prompts[: args.num_prompts], args.samples, args.max_tokens, concurrency, **sampling)


def _setup(args: argparse.Namespace, value_model: str | None) -> server.Setup:
    return server.Setup(
        args.engine, args.model, value_model, args.python, args.device, args.options, args.startup_seconds
    )


def _where(args: argparse.Namespace) -> dict[str, Any]:
    command = " ".join(["python -m bench.study", *sys.argv[1:]])
    environment = storing.environment("cuda" if torch.cuda.is_available() else "cpu")
    return environment | {"command": command, "server device": args.device}


def _until_interrupted(args: argparse.Namespace, study: Callable[[], int]) -> int:
    try:
        with serve.ending_on_sigterm():
            return study()
    except KeyboardInterrupt:
        print(f"interrupted; what was measured before is in {args.out}", file=sys.stderr)
        return 130


def _fill(args: argparse.Namespace, defaults: Mapping[str, object]) -> None:
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


if __name__ == "__main__":
    sys.exit(main())
