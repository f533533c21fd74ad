"""The ``lenvm`` command: text generation with length control, demo, evaluation, training, value server, fuzzing.

torch is imported only when a command runs, so that ``--help`` and ``--version`` respond at once. User errors (a
flag, a path, a missing package) end in one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lenvm_kernels import __version__
from lenvm_kernels.cli import doctor, export, generate, params, serve
from lenvm_kernels.evaluate import command as evaluate
from lenvm_kernels.evaluate import demo
from lenvm_kernels.fuzz import command as fuzz
from lenvm_kernels.loading.arguments import UsageError
from lenvm_kernels.train import command as train


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse, without the usage, because its many flags would hide the error."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line; ``shtab`` writes shell completions for it (docs/install.md)."""
    parser = _Parser(prog="lenvm", description="Length-guided decoding with a length value model (LenVM).")
    parser.add_argument("--version", action="version", version=f"lenvm-kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, params, demo, evaluate, train, export, doctor, serve, fuzz):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for user errors, 130 when interrupted.

    ``lenvm doctor`` and ``lenvm fuzz`` return 1 if they find an error.
    """
    # Must be set before torch is imported: a thread spins for some 20 us before it sleeps. Without spinning, `lenvm
    # demo` takes 1.5 times as long. With long spinning, a second process on the same cores takes seven times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except UsageError as error:
        print(f"lenvm {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
