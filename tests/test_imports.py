"""Dependencies point one way (docs/design.md): no circle of imports, and no import of what is further up."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the top; a module belongs to the first that its name begins with. Modules of one layer may import each other.
LAYERS = [
    (
        "lenvm_kernels.cli",
        "lenvm_kernels.doctor",
        "lenvm_kernels.demo",
        "lenvm_kernels.evaluate",
        "lenvm_kernels.fuzz",
        "lenvm_kernels.serving.command",
    ),
    ("lenvm_kernels.serving",),
    ("lenvm_kernels.adapters",),
    ("lenvm_kernels.step",),
    (
        "lenvm_kernels.value_model",
        "lenvm_kernels.guidance",
        "lenvm_kernels.timing",
        "lenvm_kernels.paged_slots",
        "lenvm_kernels.slot_pool",
    ),
    ("lenvm_kernels.ops",),
    ("lenvm_kernels.reference",),
    ("lenvm_kernels.types",),
]


def modules():
    """Every module's file, by its name once installed."""
    package = {file: file.relative_to(ROOT) for file in (ROOT / "lenvm_kernels").rglob("*.py")}
    reference = {file: Path("lenvm_kernels/reference") / file.name for file in (ROOT / "reference").glob("*.py")}
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): file
        for file, path in (package | reference).items()
    }


def imports_of(file, names):
    """Modules that a file imports, as it is loaded, inside functions, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & names


def layer_of(name):
    return next(i for i, prefixes in enumerate(LAYERS) if name.startswith(prefixes))


def test_no_circle_and_no_way_up():
    files = modules()
    assert len(files) > 50
    # What imports a package may mean any of its modules: that says a layer, but no edge of a circle.
    names = {name for name, file in files.items() if file.name != "__init__.py"}
    graph = {name: imports_of(files[name], names) - {name} for name in names}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the circle
    everything = set(files) - {"lenvm_kernels"}
    upward = [
        (name, target)
        for name in names
        for target in imports_of(files[name], everything)
        if layer_of(target) < layer_of(name)
    ]
    assert not upward
