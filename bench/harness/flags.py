"""What the commands' arguments have in common."""

import argparse
from pathlib import Path


def parser(description: str | None, *, json: str | None = None) -> argparse.ArgumentParser:
    """Arguments of a command that its module's text describes; with ``--json`` where ``json`` says what that writes."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json:
        arguments.add_argument("--json", type=Path, help=json)
    return arguments
