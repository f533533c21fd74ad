"""Do the tests see a mistake? Changes one expression or statement of the sources at a time, and runs what tests it.

    python -m tools.mutants make --count 120 > FILE      draw mutants, the same every time
    python -m tools.mutants run FILE --output RESULTS    run each in a copy of the tree; goes on where it stopped
    python -m tools.mutants compare BEFORE AFTER         what was killed before and is no longer

A mutant is known by its statement, not by its place: it is found again in a tree whose files have been taken apart. It
is ``gone`` where no such statement is left, and ``killed`` where a test fails, or takes longer than ``--seconds``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
# Folders of the package, and the share of all mutants that each gets.
SHARES = {"ops": 10, "step": 4, "guidance": 3, "value_model": 4, "adapters": 3}
# They need an engine, or are of one that is not published.
NOT_HERE = ("sglang", "vllm_guide", "vllm_filters", "vllm.py", "vllm_report", "trace", "metrics", "remote", "images")
STEP_TESTS = (
    *("test_step", "test_step_lengths", "test_step_drafts", "test_step_spans", "test_step_catch_up", "test_step_ends"),
    *("test_step_device", "test_step_arguments", "test_transformers_adapter", "test_warm_up", "test_value_model_vl"),
)
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "amin": "amax", "amax": "amin"}
# A source whose tests have to pass before any is changed.
CONTROL = "lenvm_kernels/guidance/params.py"
# Of pytest.
PASSED, NO_TESTS = 0, 5


@dataclass(frozen=True)
class Mutant:
    """A change.

    Attributes:
        file: where it was drawn.
        statement: the statement as ``ast`` writes it.
        mutated: the same, changed.
    """

    file: str
    statement: str
    mutated: str


FIELDS = ("file", "statement", "mutated")


def mutations(statement: ast.stmt) -> Iterator[str]:
    """Every changed form of a simple statement, or of the head of a compound one."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield "pass"
    for i, node in enumerate(_expressions(statement)):
        for change in _changes(node):
            changed = copy.deepcopy(statement)
            target = _expressions(changed)[i]
            target.__dict__.clear()
            target.__class__ = change.__class__
            target.__dict__.update(change.__dict__)
            yield _written(changed)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    """Other expressions in the place of one."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in SWAPS:
        other.ops[0] = SWAPS[type(other.ops[0])]()
        yield other
    elif isinstance(other, (ast.BinOp, ast.BoolOp)) and type(other.op) in SWAPS:
        other.op = SWAPS[type(other.op)]()
        yield other
    elif isinstance(other, ast.UnaryOp):
        yield other.operand
    elif isinstance(other, ast.Call):
        name = other.func.attr if isinstance(other.func, ast.Attribute) else getattr(other.func, "id", "")
        if name == "where" and len(other.args) == 3:
            other.args[1:] = other.args[:0:-1]
            yield other
        elif name in NAMES:
            setattr(other.func, "attr" if isinstance(other.func, ast.Attribute) else "id", NAMES[name])
            yield other
    elif isinstance(other, ast.Constant) and isinstance(other.value, int):
        yield ast.Constant(not other.value if isinstance(other.value, bool) else other.value + 1)


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """Those of a statement in a fixed order, without annotations and what is in its body."""
    found: list[ast.expr] = []

    def visit(node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            is_other = name in ("annotation", "returns", "body", "orelse", "finalbody", "handlers", "decorator_list")
            if is_other and not isinstance(node, (ast.IfExp, ast.Lambda)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.expr):
                    found.append(child)
                visit(child)

    visit(statement)
    return found


def _written(statement: ast.stmt) -> str:
    """A simple statement; of a compound one its head."""
    if isinstance(statement, (ast.If, ast.While, ast.For, ast.With)):
        statement = copy.copy(statement)
        statement.body = [ast.Pass()]
        if hasattr(statement, "orelse"):
            statement.orelse = []
    return ast.unparse(statement)


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those within functions, but docstrings, what is raised, nested functions and assertions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                kinds = (ast.Raise, ast.Assert, ast.FunctionDef, ast.Pass, ast.Import, ast.ImportFrom, ast.Try)
                is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and not isinstance(node, kinds) and not is_text:
                    yield node


def draw(count: int) -> list[Mutant]:
    """So many mutants, spread over the folders."""
    chosen, generator = [], random.Random(0)
    for folder, share in SHARES.items():
        every = []
        for file in sorted((ROOT / "lenvm_kernels" / folder).glob("*.py")):
            if not file.name.startswith(NOT_HERE):
                name = str(file.relative_to(ROOT))
                for statement in statements(ast.parse(file.read_text())):
                    every += [Mutant(name, _written(statement), mutated) for mutated in mutations(statement)]
        chosen += generator.sample(sorted(set(every), key=str), round(count * share / sum(SHARES.values())))
    return chosen


def place(mutant: Mutant, root: Path) -> tuple[Path, str] | None:
    """The file where the mutant's statement is now, and its changed text; where it was drawn if it is there still."""
    files = sorted((root / "lenvm_kernels").rglob("*.py"), key=lambda file: str(file.relative_to(root)) != mutant.file)
    for file in files:
        text = file.read_text()
        for statement in statements(ast.parse(text)):
            if _written(statement) == mutant.statement:
                lines = text.splitlines(keepends=True)
                first, last = statement.lineno - 1, statement.end_lineno
                body = getattr(statement, "body", None)
                if body:  # the head alone
                    last = body[0].lineno - 1
                indent = " " * statement.col_offset
                changed = "".join(f"{indent}{line}\n" for line in mutant.mutated.split("\n"))
                if body:
                    changed = changed[: changed.rindex("pass")].rstrip() + "\n"
                return file, "".join(lines[:first]) + changed + "".join(lines[last:])
    return None


def tests_of(file: str) -> list[str]:
    """Test files that look at a source, those nearest to it first."""
    name, folder = Path(file).stem.strip("_"), Path(file).parent.name
    found = [f"test_{name}", *(["test_operator_laws", "test_operator_edges"] if folder in ("ops", "reference") else [])]
    found += STEP_TESTS if folder in ("ops", "step") else ()
    if folder == "guidance":
        found += ["test_guidance", "test_guidance_table", "test_reweight_scatter", *STEP_TESTS]
    elif folder == "value_model":
        found += ["test_value_model", "test_value_model_checkpoint", "test_value_model_eight_bits", "test_low_rank"]
        found += ["test_quantization", "test_lenvm_config", *STEP_TESTS]
    elif folder == "adapters":
        found += ["test_settings", "test_transformers_adapter", "test_vllm_guide"]
    elif name in ("common", "device", "operator", "interpreter"):
        found += ["test_operator_laws", "test_interpreter", "test_topk_candidates", "test_value_tree_attention"]
    paths = [f"tests/{test}.py" for test in dict.fromkeys(found)]
    return [path for path in paths if (ROOT / path).exists()]


def operators_of(file: str) -> list[str]:
    """The operators that a source of ``ops`` is part of; none if it is of nearly all."""
    path = ROOT / file
    if path.parent.name != "ops":
        return []
    if not path.stem.startswith("_"):
        return [path.stem]
    text = f"lenvm_kernels.ops.{path.stem} import"
    found = [other.stem for other in sorted(path.parent.glob("[a-z]*.py")) if text in other.read_text()]
    return found if len(found) < 4 else []


def outcome(mutant: Mutant, seconds: float, scratch: Path | None) -> str:
    """``killed``, ``survived`` or ``gone``."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        copied = Path(folder) / "tree"
        skipped = shutil.ignore_patterns(".*", "results", "images", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copied, symlinks=True, ignore=skipped)
        (copied / "lenvm_kernels" / "reference").symlink_to(copied / "reference")  # as it is installed
        found = place(mutant, copied)
        if found is None:
            return "gone"
        file, text = found
        file.write_text(text)
        environment = os.environ | {"PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        name = str(file.relative_to(copied))
        for test in tests_of(name):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
            if "test_operator_" in test and operators_of(name):  # laws of all operators
                command += ["-k", " or ".join(operators_of(name))]
            try:
                run = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=seconds)
            except subprocess.TimeoutExpired:
                return "killed"
            if run.returncode not in (PASSED, NO_TESTS):
                return "killed"
    return "survived"


def read(file: Path) -> list[dict[str, str]]:
    """JSON lines; none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--count", type=int, default=120)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("--output", type=Path, required=True)
    running.add_argument("--seconds", type=float, default=600, help="that a test file may take")
    running.add_argument("--workers", type=int, default=2)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "make":
        for mutant in draw(args.count):
            print(json.dumps(asdict(mutant)))
        return
    if args.command == "compare":
        before, after = (
            {Mutant(*(line[key] for key in FIELDS)): line["outcome"] for line in read(file)}
            for file in (args.before, args.after)
        )
        print(Counter(before.values()), Counter(after.values()))
        lost = [mutant for mutant, found in before.items() if found == "killed" and after.get(mutant) == "survived"]
        print(*lost, sep="\n")
        sys.exit(1 if lost else 0)
    unchanged = next(iter(statements(ast.parse((ROOT / CONTROL).read_text()))))
    if outcome(Mutant(CONTROL, _written(unchanged), _written(unchanged)), args.seconds, None) != "survived":
        sys.exit("tests of an unchanged tree fail: nothing can be said of mutants")
    done = {Mutant(*(line[key] for key in FIELDS)) for line in read(args.output)}
    left = [mutant for line in read(args.file) if (mutant := Mutant(**line)) not in done]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.workers) as pool:
        outcomes = pool.map(lambda mutant: outcome(mutant, args.seconds, Path(scratch)), left)
        for mutant, found in zip(left, tqdm(outcomes, total=len(left)), strict=True):
            with args.output.open("a") as file:
                file.write(json.dumps(asdict(mutant) | {"outcome": found}) + "\n")
    print(Counter(line["outcome"] for line in read(args.output)))


if __name__ == "__main__":
    main()
