"""Dependencies point one way (docs/design.md): no import cycles, no imports from higher layers, no missing paths."""

import ast
import pkgutil
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# From the top; a module belongs to the first prefix of its name. Layers do not import from layers above them, and
# members of a layer do not import each other.
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
    """The file of each module, by installed name."""
    package = {file: file.relative_to(ROOT) for file in (ROOT / "lenvm_kernels").rglob("*.py")}
    reference = {file: Path("lenvm_kernels/reference") / file.name for file in (ROOT / "reference").glob("*.py")}
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): file
        for file, path in (package | reference).items()
    }


def imports_of(file, names):
    """Modules that a file imports at its top, inside functions, or only for types."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return imported & names


def layer_of(name):
    """Index of a module's layer, and the module's member of that layer."""
    return next((i, one) for i, layer in enumerate(LAYERS) for one in layer if f"{name}.".startswith(one))


def test_no_import_cycles_and_no_imports_from_higher_layers():
    files = modules()
    assert len(files) > 50
    # An import of a package may refer to any of its modules, so it counts for the layers, but not for cycles.
    names = {name for name, file in files.items() if file.name != "__init__.py"}
    graph = {name: imports_of(files[name], names) - {name} for name in names}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle
    everything = set(files) - {"lenvm_kernels"}
    edges = [(name, target) for name in names for target in imports_of(files[name], everything)]
    places = {edge: (layer_of(edge[0]), layer_of(edge[1])) for edge in edges}
    assert not [edge for edge, (a, b) in places.items() if b[0] < a[0] or (b[0] == a[0] and b[1] != a[1])]


def test_map_of_the_package_is_complete():
    """All paths in docs/design.md exist, and its map lists the whole package in the order of LAYERS."""
    text = (ROOT / "docs/design.md").read_text()
    package_map = text.split("```")[1]
    named = re.findall(r"(\w+/(?= )|\w+\.py)", package_map)
    files = [path for path in (ROOT / "lenvm_kernels").iterdir() if path.name[0] not in "_."]
    package = {path.name + "/" * path.is_dir() for path in files}
    assert {*named} | {"py.typed"} == package | {"reference/"}
    modules = [name.removesuffix("/").removesuffix(".py") for name in named]
    layers = [layer_of(f"lenvm_kernels.{name}")[0] for name in modules]
    assert layers == sorted(layers)
    paths = re.findall(r"\]\(\.\./([^)#]+)", text)
    paths += re.findall(r"`((?:lenvm_kernels|reference|tests|bench|docs)/[\w/.]+)`", text)
    assert len(paths) > 30 and all((ROOT / path).exists() for path in paths), paths
    operators = {module.name for module in pkgutil.iter_modules([ROOT / "lenvm_kernels/ops"]) if module.name[0] != "_"}
    linked = (re.match(r"lenvm_kernels/ops/(\w+)(/__init__)?\.py", path) for path in paths)
    assert operators == {link[1] for link in linked if link}
