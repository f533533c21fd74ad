"""Common parts of the ``lenvm`` commands: flags, the accepted numbers, and user errors.

torch is imported only where it is needed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lenvm_kernels.loading import SAY_IT

DTYPES = ("float32", "bfloat16", "float16")
A_MODEL = "a Hugging Face directory or name, a .gguf file, or the word demo"


class UsageError(Exception):
    """An error that the user can fix; the message is one line."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the errors of checks and of loading into a :class:`UsageError`."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    except SafetensorError as error:  # the error does not name the file
        raise UsageError(f"a .safetensors file of the models is broken: {error}") from error


def positive(kind: type, *, or_0: bool = False, below: float = math.inf) -> Any:
    """The ``type`` of a flag: a finite ``kind`` above 0, or from 0 on with ``or_0``, and below ``below``."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not (0 < number < below or (or_0 and number == 0)):
            accepted = ("an integer " if kind is int else "a number ") + ("of at least 0" if or_0 else "above 0")
            accepted += f" and below {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be {accepted}, got {text!r}")
        return number

    return parse


seed_of = positive(int, or_0=True, below=2**63)  # the seeds that torch accepts


def add_numbers(group: Any, **flags: tuple[int | None, str]) -> None:
    """Add flags of a positive integer, with defaults and meanings. A default of None is not shown."""
    for name, (default, meaning) in flags.items():
        shown = meaning if default is None else f"{meaning} (default: {default})"
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=positive(int), default=default, metavar="N", help=shown)


def add_device(parser: Any) -> None:
    """Add ``--device``; :func:`device_of` reads it."""
    parser.add_argument("--device", help="torch device, such as cpu or cuda:1 (default: cuda if there is a GPU)")


def add_dtype(parser: Any, of: str, *, by_device: bool = False) -> None:
    """Add ``--dtype`` for the models named in ``of``. With ``by_device``, the default depends on the device."""
    default, said = (None, "bfloat16, on a CPU float32") if by_device else (DTYPES[0], DTYPES[0])
    parser.add_argument("--dtype", choices=DTYPES, default=default, help=f"of {of} (default: {said})")


def add_sampling(group: Any) -> None:
    """Add ``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``; :func:`sampling_of` reads them."""
    for flag, kind, default, metavar, meaning in (
        ("--temperature", float, 0.8, "T", "temperature of the base model, >= 0; 0: the most likely token"),
        ("--top-k", int, 8, "K", "most likely tokens to keep, 0: all"),
        ("--top-p", float, 1.0, "P", "probability mass of the most likely tokens to keep, in (0, 1]"),
        ("--min-p", float, 0.02, "P", "drop tokens less likely than this share of the most likely one, in [0, 1]"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{meaning} (default: {default})")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of a command line."""
    return {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def add_seed(parser: Any) -> None:
    """Add ``--seed``."""
    seed_help = "seed of the sampling, >= 0; equal seeds give equal text on one machine (default: %(default)s)"
    parser.add_argument("--seed", type=seed_of, default=0, metavar="N", help=seed_help)


def add_say_it(parser: Any, effect: str) -> None:
    """Add ``--say-it``; :func:`lenvm_kernels.loading.say` appends its text."""
    say_it_help = f"{effect}; {{words}} and {{tokens}} in TEXT are replaced by the target length; without TEXT: "
    say_it_help += f"{SAY_IT} (default: prompts as they are)"
    parser.add_argument("--say-it", nargs="?", const=SAY_IT, metavar="TEXT", help=say_it_help)


def check_output_files(**files: Path | None) -> None:
    """Raise ValueError if the output file of one of these flags cannot be written."""
    for name, file in files.items():
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ValueError(f"--{name} must be a file in an existing directory, got {str(file)!r}")


def device_of(name: str | None) -> str:
    """The device of ``--device``, or the default. Raises ValueError if this machine does not have it."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA asserts
        raise ValueError(f"--device must be a torch device of this machine, got {name!r}") from error
    return name
