"""Command line of ``lenvm fuzz``."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.loading.arguments import check_output_files, device_of, positive, seed_of, usage_errors

if TYPE_CHECKING:
    from lenvm_kernels.fuzz.case import Operator


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "fuzz",
        help="compare the operators, or one of your own, with the fp64 reference on random inputs",
        description="Draw inputs at random, compare the operators' results with the fp64 reference and with the same "
        "rows in other batches. On a CPU the kernels run in Triton's interpreter. Exit code 1 if something failed.",
        epilog="example: lenvm fuzz --seconds 300 --against mykernels:reweight_scatter --json fuzz.json",
    )
    parser.set_defaults(run=run_command)
    add, length = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--ops", nargs="+", choices=OPERATORS, metavar="OP", help=f"of {', '.join(OPERATORS)} (default: all)")
    length.add_argument("--seconds", type=positive(float), metavar="S", help="how long to draw cases (default: 60)")
    length.add_argument("--cases", type=positive(int), metavar="N", help="how many cases to draw")
    length.add_argument("--replay", metavar="LINE", help="run one case: the line of JSON that a failure ends with")
    add(
        "--seed",
        type=seed_of,
        default=0,
        metavar="N",
        help="the same seed and --cases draw the same cases (default: 0)",
    )
    add("--device", choices=("cuda", "cpu"), help="(default: cuda where there is one)")
    against = "a function with the signature of one operator, tested in place of its kernels. The operator is the one "
    against += "of that name, or the one in --ops; the working directory is searched for the module"
    add("--against", metavar="MODULE:FUNCTION", help=against)
    only = "draw no other values of these options; an option may be given several times (default: draw all)"
    add("--only", nargs="+", default=[], metavar="OPTION=VALUE", help=only)
    reference = "compare with the reference only (default: also with the same rows in other batches, bit by bit, which "
    reference += "a function made of PyTorch's matmuls cannot pass)"
    add("--reference-only", action="store_true", help=reference)
    add("--json", type=Path, metavar="FILE", help="also write all numbers here (default: not written)")


def run_command(args: argparse.Namespace) -> int:
    """Fuzz and return the exit code: 1 if a case failed, 130 if interrupted."""
    with usage_errors():
        check_output_files(json=args.json)
        device = device_of(args.device)
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

        from lenvm_kernels.fuzz import check
        from lenvm_kernels.fuzz.case import Case
        from lenvm_kernels.ops._common import INTERPRETED

        if (device == "cpu") != INTERPRETED:
            raise ValueError(f"--device {device} needs TRITON_INTERPRET={int(device == 'cpu')} when Python starts")
        replayed = None if args.replay is None else Case.from_line(args.replay, check.operators())
        function, ops = None, args.ops or ([*OPERATORS] if replayed is None else [replayed.op])
        if args.against is not None:
            function, ops = _function_of(args.against, ops)
        chosen = _restricted([check.operators()[name] for name in ops], args.only)

    seconds = args.seconds or (60.0 if args.cases is None else None)
    cases = check.drawn(chosen, seed=args.seed, cases=args.cases, seconds=seconds, interpreted=device == "cpu")
    test = partial(check.check, function=function, device=device, other_batches=not args.reference_only)
    tallies: dict[str, check.Tally] = {}
    interrupted = False
    try:
        check.fuzz(cases if replayed is None else [replayed], test, tallies)
    except KeyboardInterrupt:
        interrupted = True
    print("\n".join(check.text(tallies)))
    numbers = check.as_json(tallies, device)
    with usage_errors():
        if args.json is not None:
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 130 if interrupted else int(not numbers["ok"])


def _restricted(chosen: list[Operator], pairs: list[str]) -> list[Operator]:
    """The operators, with options restricted to the values in ``--only``."""
    known, restricted = dict.fromkeys(name for operator in chosen for name in operator.options), []
    for pair in pairs:
        if "=" not in pair or pair.partition("=")[0] not in known:
            raise ValueError(f"--only must be OPTION=VALUE with an option of {', '.join(known)}, got {pair!r}")
    names = {pair.partition("=")[0] for pair in pairs}
    for operator in chosen:
        options = dict(operator.options)
        for name in names & options.keys():
            options[name] = [value for value in options[name] if f"{name}={value}" in pairs]
            if not options[name]:
                accepted = ", ".join(map(str, operator.options[name]))
                raise ValueError(f"--only: {name} of {operator.name} must be of {accepted}, got {' '.join(pairs)}")
        restricted.append(replace(operator, options=options))
    return restricted


def _function_of(name: str, ops: list[str]) -> tuple[Callable, list[str]]:
    """The function named by ``--against``, and the operator that it replaces."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"--against must be MODULE:FUNCTION, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"--against must be MODULE:FUNCTION, but {error}") from error
    ops = ops if len(ops) == 1 else [path.rpartition(".")[2]]
    if ops[0] not in OPERATORS or not callable(function):
        what = "a function of an operator's name, or --ops must name one operator"
        raise ValueError(f"--against must be {what}, got {name!r}")
    return function, ops
