"""A check, which is what ``lenvm doctor`` prints, and what sections share that make them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

OK, MISSING, WRONG = "ok", "missing", "wrong"


@dataclass(frozen=True)
class Check:
    """What one look found.

    Attributes:
        name: of what was looked at.
        mark: ``ok``, ``missing`` (something optional, which is no fault) or ``wrong``.
        found: a version, a number, what is there instead.
        accepted: what would be ok, if that can be said.
        hint: one line; of something wrong, what to do.
    """

    name: str
    mark: str
    found: str
    accepted: str = ""
    hint: str = ""


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what is printed, warned and logged to the terminal."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type where the text says too little."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"
