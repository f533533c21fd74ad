"""Record the signatures of the engine functions that the plugins use, from the engine's sources.

    python -m tools.engine_signatures vllm 0.33.0 FOLDER

FOLDER contains the package: an unpacked wheel, or ``site-packages``. The package is not imported. The version is added
or replaced in ``lenvm_kernels/engines/signatures.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
from inspect import Parameter
from pathlib import Path

from lenvm_kernels.engines.signatures import ANYTHING, FILE, USED, written


def signature_in(folder: Path, target: str) -> str | None:
    """The result of :func:`lenvm_kernels.engines.signatures.signature_of`, or None if the target does not exist."""
    module, name = target.split(":")
    file = folder / (module.replace(".", "/") + ".py")
    if not file.exists():
        return None
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds) and child.name == part]
        if not found:
            return None
        node = found[-1]
    if isinstance(node, ast.ClassDef):  # a dataclass
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        names = [(field.target.id, field.value is not None) for field in fields if isinstance(field.target, ast.Name)]
        return written([(name, Parameter.POSITIONAL_OR_KEYWORD, has_default) for name, has_default in names])
    if name.endswith(".__init__"):
        return ANYTHING
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [(a.arg, Parameter.POSITIONAL_OR_KEYWORD, i >= first_default) for i, a in enumerate(positional)]
    parameters += [(arguments.vararg.arg, Parameter.VAR_POSITIONAL, False)] if arguments.vararg else []
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [(a.arg, Parameter.KEYWORD_ONLY, default is not None) for a, default in named]
    parameters += [(arguments.kwarg.arg, Parameter.VAR_KEYWORD, False)] if arguments.kwarg else []
    return written([parameter for parameter in parameters if parameter[0] not in ("self", "cls")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=USED)
    parser.add_argument("version")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    found = {target: signature_in(args.folder, target) for target in USED[args.engine]}
    if missing := [target for target, signature in found.items() if signature is None]:
        parser.error(f"{args.folder} has no {', '.join(missing)}")
    signatures = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    signatures.setdefault(args.engine, {})[args.version] = found
    FILE.write_text(json.dumps(signatures, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
