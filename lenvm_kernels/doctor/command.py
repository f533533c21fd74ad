"""``lenvm doctor`` as a command: its flag, and how checks are printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.doctor.check import Check


def add(commands: Any) -> None:
    """Add the command to those of ``lenvm``."""
    parser = commands.add_parser(
        "doctor",
        help="look at the installation: versions, GPU, kernels, the SGLang plugin",
        description="Look at what is installed and whether versions fit, at the GPU and the kernels on it, at the "
        "LENVM_* variables of the SGLang plugin, and at which of its hooks took. Exit code 1 if something is wrong; "
        "what is only missing (a GPU, SGLang) is not.",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a line a check)")


def run_command(args: argparse.Namespace) -> int:
    """Look at section after section and return the exit code: 1 if something is wrong."""
    from lenvm_kernels.doctor.check import WRONG
    from lenvm_kernels.doctor.sections import SECTIONS, examine

    found = {}
    for section in SECTIONS:
        if not args.json:  # at once: importing SGLang takes a while
            print(section, flush=True)
        found[section] = examine(section)
        if not args.json:
            _print_checks(found[section])
    wrong = sum(check.mark == WRONG for checks in found.values() for check in checks)
    if args.json:
        as_json = {section: [asdict(check) for check in checks] for section, checks in found.items()}
        print(json.dumps({"ok": not wrong, **as_json}, indent=1))
    else:
        print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return int(wrong > 0)


def _print_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        accepted = f"  (accepted: {check.accepted})" if check.accepted else ""
        print(f"  {check.mark:7}  {check.name:{width}}  {check.found}{accepted}")
        if check.hint:
            print(f"{'':11}-> {check.hint}")
