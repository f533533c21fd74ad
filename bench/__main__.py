"""Benchmarks and their commands: ``python -m bench``."""

import argparse
import ast
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> dict[str, str]:
    """Summaries of the modules that are commands, by name. Modules are not imported, because some initialise a GPU."""
    found = {}
    for file in sorted(HERE.rglob("*.py")):
        source = file.read_text()
        if file == Path(__file__) or 'if __name__ == "__main__":' not in source:
            continue
        name = ".".join(file.relative_to(HERE.parent).with_suffix("").parts).removesuffix(".__main__")
        summary = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        found[name] = summary.partition(": ``python")[0].rstrip(".")
    return found


def main() -> None:
    lines = [f"python -m {name:<32}{summary}" for name, summary in commands().items()]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__.partition(":")[0] + ":\n\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Each has --help. What they say of this package is in docs/measuring.md.",
    )
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
