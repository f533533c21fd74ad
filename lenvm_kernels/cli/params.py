"""``lenvm params``: the parameters of a request."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from lenvm_kernels.guidance.fields import FIELDS, NAMESPACE


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "params",
        help="print the parameters of a request",
        description="Print the parameters of a request with their defaults: keys of SGLang's custom_params, vLLM's "
        f"vllm_xargs and the guidance argument in Python, at the top level or in an object {NAMESPACE}.",
    )
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Print each parameter's name, default, meaning and other names."""
    lines = []
    for field in FIELDS.values():
        default = "none" if field.default in (None, ()) else str(field.default).lower()
        text = "; ".join(filter(None, (field.meaning, field.limits)))
        if field.elsewhere:
            text += f"; also {', '.join(field.elsewhere.split())}"
        lines.append(f"{field.name} (default: {default})")
        lines.append(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    "))
    print("\n".join(lines))  # one write, because `| head` closes the pipe
