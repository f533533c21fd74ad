"""Where the time and the operations of length-guided decoding go, beside the base model alone and the published way.

python -m bench.study flops --check                 operations and bytes by the models' dimensions, no run needed
python -m bench.study run --out DIR                 decode in each way; per-step JSON lines, and what each run was
python -m bench.study run --out DIR --top-k 1 2 3 4 5      the sweep over the limit on candidates
python -m bench.study report DIR                    tables and plots of what is there: DIR/summary.md
python -m bench.study COMMAND --help                options
"""

import argparse
import sys
from pathlib import Path

import torch

from bench.study import flops, report, run

# Of the random load.
RANDOM_BASE, RANDOM_VALUE_MODELS, CACHED = "Qwen2.5-7B", ("Qwen2.5-0.5B", "Qwen2.5-1.5B"), 512


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="flops | run | report")

    estimate = commands.add_parser("flops", help=flops.__doc__.splitlines()[0])
    estimate.add_argument(
        "--check", action="store_true", help="compare with the published figures; fails if they differ"
    )
    model = "config.json, a folder with one, or a name of bench.models"
    estimate.add_argument("--base", default=flops.PUBLISHED_BASE, help=f"base model: {model} (default: %(default)s)")
    estimate.add_argument("--value-model", default=flops.PUBLISHED_VALUE, help=f"{model} (default: %(default)s)")
    estimate.add_argument("--top-k", type=_positive, default=5, help="candidates of an output token (default: 5)")
    work = flops.PUBLISHED_WORK
    for name, what in (
        ("prompts", "prompts"),
        ("samples", "samples of each prompt"),
        ("prompt-tokens", "tokens of a prompt"),
        ("output-tokens", "tokens of a sample"),
    ):
        default = getattr(work, name.replace("-", "_"))
        estimate.add_argument(f"--{name}", type=_positive, default=default, help=f"{what} (default: {default})")

    decode = commands.add_parser(
        "run",
        help=run.__doc__.splitlines()[0],
        description=run.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cuda = torch.cuda.is_available()
    decode.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    decode.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    decode.add_argument(
        "--load", choices=["smollm2", "random"], help="(default: random weights on a GPU, smollm2 on a CPU)"
    )
    decode.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: bfloat16 on a GPU, else float32)")
    decode.add_argument("--rows", type=_positive, help="rows of the batch (default: 64 on a GPU, else 4)")
    decode.add_argument("--steps", type=_positive, help="steps to decode (default: 128 on a GPU, else 24)")
    decode.add_argument("--repeats", type=_positive, default=3, help="of each way; the fastest counts (default: 3)")
    decode.add_argument("--ways", nargs="+", choices=run.WAYS, default=run.WAYS, help="(default: all)")
    decode.add_argument("--top-k", nargs="+", type=_positive, default=[5], help="limits on candidates (default: 5)")
    # No defaults, so that the other load can refuse them.
    decode.add_argument("--base", help=f"dimensions of the random base (default: {RANDOM_BASE})")
    decode.add_argument(
        "--value-model",
        nargs="+",
        help=f"dimensions of the random value models (default: {' '.join(RANDOM_VALUE_MODELS)}; smollm2 has its own)",
    )
    decode.add_argument("--cached", type=_positive, help=f"tokens before the first step, random load ({CACHED})")

    tables = commands.add_parser("report", help=report.__doc__.splitlines()[0])
    tables.add_argument("folder", type=Path, help="what `run` wrote; gets summary.md, summary.json and plots")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        return {"flops": _flops, "run": _run, "report": lambda a: report.write(a.folder)}[args.command](args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def _flops(args: argparse.Namespace) -> int:
    if args.check:
        figures = flops.published_figures()
        print(report.figures_table(figures))
        return int(not all(figure.agrees for figure in figures))
    base, value = flops.Architecture.load(args.base), flops.Architecture.load(args.value_model)
    work = flops.Workload(args.prompts, args.samples, args.prompt_tokens, args.output_tokens)
    print(report.estimate_text(base, value, work, args.top_k))
    return 0


def _run(args: argparse.Namespace) -> int:
    gpu = args.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; --device cpu decodes with the reference")
    if max(args.top_k) > run.MAX_CANDIDATES:
        raise ValueError(f"--top-k must be at most {run.MAX_CANDIDATES}, got {max(args.top_k)}")
    dtype = getattr(torch, args.dtype or ("bfloat16" if gpu else "float32"))
    rows, steps = args.rows or (64 if gpu else 4), args.steps or (128 if gpu else 24)
    if (args.load or ("random" if gpu else "smollm2")) == "smollm2":
        options = {"--base": args.base, "--value-model": args.value_model, "--cached": args.cached}
        if given := [option for option, value in options.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: only with --load random; smollm2 has models and prompts of its own")
        base, value_models = run.SmolBase(rows, dtype, args.device), [run.SmolBase.VALUE_MODEL]
    else:
        base_name, value_models = args.base or RANDOM_BASE, args.value_model or RANDOM_VALUE_MODELS
        for name in (base_name, *value_models):
            if name not in flops.DIMENSIONS:
                raise ValueError(f"--base and --value-model must be of {', '.join(flops.DIMENSIONS)}, got {name!r}")
        base = run.RandomBase(base_name, rows, args.cached or CACHED, steps, dtype, args.device)
    study = run.Study(base, steps, args.repeats, args.out, run.environment(args.device, dtype))
    return study.run(args.ways, value_models, args.top_k)


if __name__ == "__main__":
    sys.exit(main())
