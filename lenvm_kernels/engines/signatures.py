"""Recorded signatures of engine functions that the plugins wrap, call or read, in tested versions.

A process with guidance compares installed signatures with them, and rejects differences by name.
``python -m tools.engine_signatures`` writes ``signatures.json``.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
# Recorded for constructors, because a wrapper only uses the created object.
ANYTHING = "..."


def recorded(engine: str) -> dict[str, dict[str, str]]:
    """Signatures by target, for each recorded version. A target is ``module:name``."""
    return json.loads(FILE.read_text(encoding="utf-8"))[engine]


# The recorded targets of each engine.
USED = {engine: tuple(next(iter(recorded(engine).values()))) for engine in ("sglang", "sglang_fork", "vllm")}


def signature_of(target: str) -> str | None:
    """The parameter names of a target, with ``=`` after names with a default; None if the target does not exist."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(target)).parameters.values()
    except (ImportError, AttributeError):
        return None
    if target.endswith(".__init__"):
        return ANYTHING
    return written([(p.name, p.kind, p.default is not p.empty) for p in parameters if p.name not in ("self", "cls")])


def written(parameters: list[tuple[str, Any, bool]]) -> str:
    """Parameters, given as name, kind and whether they have a default, in the format of the file."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    texts, is_keyword_only = [], False
    for name, kind, has_default in parameters:
        if kind == inspect.Parameter.KEYWORD_ONLY and not is_keyword_only:
            texts.append("*")
        is_keyword_only |= kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        texts.append(f"{stars.get(kind, '')}{name}{'=' * has_default}")
    return ", ".join(texts)


def differences(engine: str) -> dict[str, str]:
    """The targets of the installed engine that match no recorded version, each with its difference."""
    versions, found = recorded(engine), {}
    for target in USED[engine]:
        accepted = list(dict.fromkeys(version[target] for version in versions.values()))
        if (signature := signature_of(target)) is None:
            found[target] = "is not there"
        elif signature not in accepted:
            found[target] = f"takes ({signature}), not ({') or ('.join(accepted)})"
    return found


def check(engine: str) -> None:
    """Raise RuntimeError, naming the targets, if an engine's targets match no recorded version."""
    if wrong := differences(engine):
        texts = "; ".join(f"{target.split(':')[1]} {what}" for target, what in wrong.items())
        tried = ", ".join(recorded(engine))
        raise RuntimeError(f"LenVM does not fit this {engine}, only {tried}: {texts}")
