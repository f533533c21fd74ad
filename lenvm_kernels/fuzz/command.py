"""``lenvm fuzz`` as a command: its flags, what they name, and the files that it writes."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lenvm_kernels.cli_arguments import check_output_files, device_of, positive, seed_of, usage_errors
from lenvm_kernels.fuzz import OPERATORS


def add(commands: Any) -> None:
    """Add the command to those of ``lenvm``."""
    parser = commands.add_parser(
        "fuzz",
        help="compare the operators, or one of your own, with the fp64 reference on random inputs",
        description="Draw inputs at random, compare the operators' results with the fp64 reference and with the same "
        "rows in other batches, and make small what fails. On a CPU the kernels run in Triton's interpreter. Exit "
        "code 1 if something failed.",
        epilog="example: lenvm fuzz --seconds 300 --against mykernels:reweight_scatter --junit fuzz.xml",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPERATORS,
        default=None,
        metavar="OP",
        help=f"of {', '.join(OPERATORS)} (default: all)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=positive(float),
        metavar="S",
        help="how long to draw cases; making one small comes on top (default: 60)",
    )
    length.add_argument(
        "--cases", type=positive(int), metavar="N", help="how many cases to draw (default: as --seconds allow)"
    )
    parser.add_argument(
        "--seed",
        type=seed_of,
        default=0,
        metavar="N",
        help="the same seed and --cases draw the same cases (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda where there is one)")
    parser.add_argument(
        "--against",
        metavar="MODULE:FUNCTION",
        help="a function with the signature of one operator, to be tested in place of its kernels. The operator is the "
        "one of that name, or that of --ops; the working directory is searched for the module",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="OPTION=VALUE",
        help="draw no other values of these options, of which one may be given several times; a run prints them all "
        "(default: draw all)",
    )
    parser.add_argument(
        "--reference-only",
        action="store_true",
        help="compare with the reference only (default: also with the same rows in other batches, bit by bit, which a "
        "function made of PyTorch's matmuls cannot pass)",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("lenvm-fuzz.jsonl"),
        metavar="FILE",
        help="failing cases: run first if the file is there, added to when one is found (default: %(default)s)",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit's XML here (default: not written)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here (default: not written)")


def run_command(args: argparse.Namespace) -> int:
    """Fuzz and return the exit code: 1 if something failed, 130 when interrupted."""
    with usage_errors():
        check_output_files(corpus=args.corpus, junit=args.junit, json=args.json)
        device = device_of(args.device)
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

        from lenvm_kernels.fuzz import check, corpus, report
        from lenvm_kernels.fuzz.run import Plan, fuzz
        from lenvm_kernels.ops._common import INTERPRETED

        if (device == "cpu") != INTERPRETED:
            raise ValueError(f"--device {device} needs TRITON_INTERPRET={int(device == 'cpu')} when Python starts")
        function, ops = None, tuple(args.ops or OPERATORS)
        if args.against is not None:
            function, ops = _function_of(args.against, args.ops)
        operators = tuple(check.operators()[name].restricted(_options(args.only, ops)) for name in ops)
        known = corpus.read(args.corpus)

    seconds = args.seconds or (60.0 if args.cases is None else None)
    plan = Plan(operators, args.seed, args.cases, seconds, device, function, args.corpus, args.reference_only)
    result = fuzz(plan, known, tell=lambda line: print(line, file=sys.stderr, flush=True))
    for line in report.text(result):
        print(line)
    with usage_errors():
        if args.json is not None:
            args.json.write_text(json.dumps(report.as_json(result), indent=1) + "\n", encoding="utf-8")
        if args.junit is not None:
            args.junit.write_text(report.as_junit(result), encoding="utf-8")
    return 130 if result.interrupted else int(result.failed)


def _options(pairs: list[str] | None, ops: tuple[str, ...]) -> dict[str, list[str]]:
    """``--only`` as values by option."""
    from lenvm_kernels.fuzz.check import operators

    accepted: dict[str, list[str]] = {}
    for pair in pairs or []:
        name, sign, value = pair.partition("=")
        if not sign or not any(name in operators()[op].options for op in ops):
            known = dict.fromkeys(option for op in ops for option in operators()[op].options)
            raise ValueError(f"--only must be OPTION=VALUE with an option of {', '.join(known)}, got {pair!r}")
        accepted.setdefault(name, []).append(value)
    return accepted


def _function_of(name: str, ops: list[str] | None) -> tuple[Callable, tuple[str, ...]]:
    """What ``--against`` names, and the operator it takes the place of."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"--against must be MODULE:FUNCTION, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"--against must be MODULE:FUNCTION, but {error}") from error
    ops = ops or [path.rpartition(".")[2]]
    if len(ops) != 1 or ops[0] not in OPERATORS or not callable(function):
        raise ValueError(
            f"--against must be a function of an operator's name, or --ops must name one operator, got {name!r}"
        )
    return function, tuple(ops)
