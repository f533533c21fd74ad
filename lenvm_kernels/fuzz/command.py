"""Command line of ``lenvm fuzz``."""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lenvm_kernels import __version__
from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.loading.arguments import check_output_files, device_of, positive, seed_of, usage_errors


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "fuzz",
        help="compare the operators, or your own function, with the fp64 reference on random inputs",
        description="Draw random inputs and compare the operators' results with the fp64 reference and with the same "
        "rows in other batches. On a CPU, the kernels run in Triton's interpreter. Exit code 1 if a case failed.",
        epilog="example: lenvm fuzz --seconds 300 --against mykernels:reweight_scatter --json fuzz.json",
    )
    parser.set_defaults(run=run_command)
    add, length = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--ops", nargs="+", choices=OPERATORS, metavar="OP", help=f"operators: {', '.join(OPERATORS)} (default: all)")
    length.add_argument("--seconds", type=positive(float), metavar="S", help="duration (default: 60)")
    length.add_argument("--cases", type=positive(int), metavar="N", help="number of cases")
    length.add_argument("--replay", metavar="LINE", help="run one case, given as the last line of a failure")
    seed = "equal seeds and --cases draw equal cases (default: %(default)s)"
    add("--seed", type=seed_of, default=0, metavar="N", help=seed)
    add("--device", choices=("cuda", "cpu"), help="(default: cuda if there is a GPU)")
    against = "function to test instead of the kernels of the operator with its name, or of the operator in --ops"
    add("--against", metavar="MODULE:FUNCTION", help=f"{against}; the module may be in the working directory")
    reference = "omit the bitwise comparison with other batches, which functions with PyTorch's matmuls cannot pass"
    add("--reference-only", action="store_true", help=reference)
    add("--json", type=Path, metavar="FILE", help="also write all numbers to FILE (default: not written)")


def run_command(args: argparse.Namespace) -> int:
    """Fuzz and return the exit code: 1 if a case failed, 130 if interrupted."""
    with usage_errors():
        check_output_files(json=args.json)
        device = device_of(args.device)
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

        import torch
        import triton

        from lenvm_kernels.fuzz import check
        from lenvm_kernels.fuzz.case import Case
        from lenvm_kernels.ops._common import INTERPRETED

        if (device == "cpu") != INTERPRETED:
            raise ValueError(f"--device {device} needs TRITON_INTERPRET={int(device == 'cpu')} when Python starts")
        every = check.operators()
        replayed = None if args.replay is None else Case.from_line(args.replay, every)
        function, ops = None, args.ops or ([*OPERATORS] if replayed is None else [replayed.op])
        if args.against is not None:
            function, ops = _function_of(args.against, ops)
        own = getattr(function, "options", {})
        chosen = [replace(every[name], options={**every[name].options, **own}) for name in ops]

    count = args.cases if replayed is None else 1
    end = time.monotonic() + (args.seconds or (math.inf if count else 60))
    test = partial(check.check, function=function, device=device, other_batches=not args.reference_only)
    tallies: dict[str, Any] = {}
    failures: dict[tuple[str, str], check.Failure] = {}
    interrupted = is_lost = False
    try:
        for i in range(count or sys.maxsize):
            if (start := time.monotonic()) >= end or is_lost:
                break
            rng = random.Random(f"{args.seed} {i}")
            case = replayed or chosen[i % len(chosen)].draw(rng, interpreted=device == "cpu")
            failure, tally = test(case), tallies.setdefault(case.op, Counter())
            tally.update(cases=1, rows=len(case.rows), seconds=time.monotonic() - start)
            if failure is None:
                continue
            tally["failed"] += 1
            is_lost = failure.problem == check.LOST
            if (case.op, failure.problem) not in failures:
                alone = None if is_lost else test(replace(case, rows=failure.rows))
                failure = alone if alone is not None and alone.problem == failure.problem else failure
                failures[case.op, failure.problem] = failure
                print(f"FAILED {failure}\n", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    print(f"{'operator':22} {'cases':>7} {'rows':>9} {'seconds':>8} {'failed':>8}")
    for name, x in tallies.items():
        print(f"{name:22} {x['cases']:>7} {x['rows']:>9} {x['seconds']:>8.1f} {x['failed']:>8}")
    versions = {"lenvm_kernels": __version__, "torch": torch.__version__, "triton": triton.__version__}
    report = {"ok": not failures, **versions, "device": torch.cuda.get_device_name() if device == "cuda" else device}
    report |= {"operators": tallies, "failures": [asdict(failure) for failure in failures.values()]}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 130 if interrupted else int(bool(failures))


def _function_of(name: str, ops: list[str]) -> tuple[Callable, list[str]]:
    """The function named by ``--against``, and the operator that it replaces."""
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--against must be MODULE:FUNCTION, but {error}") from error
    ops = ops if len(ops) == 1 else [name.replace(":", ".").rpartition(".")[2]]
    if ops[0] not in OPERATORS or not callable(function):
        what = "a function with an operator's name, or --ops must name one operator"
        raise ValueError(f"--against must be {what}, got {name!r}")
    return function, ops
