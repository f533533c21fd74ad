"""Dependencies point one way (docs/design.md): no circle of imports, no import of what is further up, no path that
is not there."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the top; a module belongs to the first name that its own begins with. No layer imports one above it, and members
# of a layer do not import each other.
LAYERS = [
    ("lenvm_kernels.cli.",),
    ("lenvm_kernels.train.",),
    ("lenvm_kernels.evaluate.", "lenvm_kernels.fuzz.", "lenvm_kernels.serving."),
    ("lenvm_kernels.loading",),
    ("lenvm_kernels.engines",),
    ("lenvm_kernels.step",),
    ("lenvm_kernels.values.",),
    ("lenvm_kernels.guidance.", "lenvm_kernels.paged_slots.", "lenvm_kernels.profiling."),
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
    """Number of a module's layer, and the member that it belongs to."""
    return next((i, one) for i, layer in enumerate(LAYERS) for one in layer if f"{name}.".startswith(one))


def test_no_circle_and_no_way_up():
    files = modules()
    assert len(files) > 50
    # What imports a package may mean any of its modules: that says a layer, but no edge of a circle.
    names = {name for name, file in files.items() if file.name != "__init__.py"}
    graph = {name: imports_of(files[name], names) - {name} for name in names}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the circle
    everything = set(files) - {"lenvm_kernels"}
    edges = [(name, target) for name in names for target in imports_of(files[name], everything)]
    places = {edge: (layer_of(edge[0]), layer_of(edge[1])) for edge in edges}
    assert not [edge for edge, (a, b) in places.items() if b[0] < a[0] or (b[0] == a[0] and b[1] != a[1])]


def test_the_map_shows_the_house():
    """Every path in docs/design.md is there, and its floors have all that the package has, in the order of LAYERS."""
    text = (ROOT / "docs/design.md").read_text()
    floors = text.split("```")[1]
    named = re.findall(r"(\w+/(?= )|\w+\.py)", floors)
    package = {
        path.name + "/" * path.is_dir() for path in (ROOT / "lenvm_kernels").iterdir() if path.name[0] not in "_."
    }
    assert {*named} | {"py.typed"} == package | {"reference/"}
    modules = [name.removesuffix("/").removesuffix(".py") for name in named]
    layers = [layer_of(f"lenvm_kernels.{name}")[0] for name in modules]
    assert layers == sorted(layers)
    paths = [
        *re.findall(r"\]\(\.\./([^)#]+)", text),
        *re.findall(r"`((?:lenvm_kernels|reference|tests|bench|docs)/[\w/.]+)`", text),
    ]
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]
    operators = {file.stem for file in (ROOT / "lenvm_kernels/ops").glob("[a-z]*.py")}
    assert operators == {
        Path(path).stem for path in paths if path.startswith("lenvm_kernels/ops/") and path.endswith(".py")
    }
