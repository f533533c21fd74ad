#!/usr/bin/env bash
# Build sdist and wheel, check their contents, and test the wheel in an environment without the source tree.
#
#     tools/smoke_test.sh PYTHON DIST
#
# PYTHON must have the package `build` and the dependencies of the wheel; both files are written to DIST.
set -euo pipefail
python=$(realpath -s "$1")
root=$(realpath "$(dirname "$0")/..")
mkdir -p "$2"
dist=$(realpath "$2")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Only files that git does not ignore, so that the wheel excludes leftovers of earlier builds.
mkdir "$scratch/tree"
cd "$root"
git ls-files -z --cached --others --exclude-standard |
    tar --create --null --ignore-failed-read --files-from - | tar --extract --directory "$scratch/tree"
rm -f "$dist"/lenvm_kernels-*

build() {
    "$python" -m build "$@" "$scratch/tree" > "$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
}
build --outdir "$dist"                    # the sdist, and the wheel of the sdist
build --wheel --outdir "$scratch/direct"  # the wheel of the tree

"$python" - "$scratch/tree" "$dist"/*.whl "$scratch/direct"/*.whl <<'PY'
import sys
import zipfile
from pathlib import Path


def contents(file):
    archive = zipfile.ZipFile(file)
    return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


tree, wheel, direct = Path(sys.argv[1]), contents(sys.argv[2]), contents(sys.argv[3])
assert wheel == direct, f"the sdist's wheel is another: {sorted(wheel.keys() ^ direct.keys())}"
package = {str(file.relative_to(tree)) for file in (tree / "lenvm_kernels").rglob("*") if file.is_file()}
package |= {f"lenvm_kernels/reference/{file.name}" for file in (tree / "reference").glob("*.py")}
got = {name for name in wheel if ".dist-info/" not in name}
assert got == package, f"missing {sorted(package - got)}, unexpected {sorted(got - package)}"
assert {"lenvm_kernels/py.typed", "lenvm_kernels/loading/prompts.json", "lenvm_kernels/loading/value/value_head.safetensors"} <= got
(entry_points,) = (text.decode() for name, text in wheel.items() if name.endswith("/entry_points.txt"))
assert "lenvm = lenvm_kernels.cli:main" in entry_points and "[sglang.srt.plugins]" in entry_points, entry_points
assert "[vllm.logits_processors]" in entry_points, entry_points
assert any(name.endswith("/LICENSE") for name in wheel)
print(f"the wheel has {len(got)} files, as the sdist's")
PY

# Packages of the other environment are visible, except editable installations, because .pth files are not read.
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" --disable-pip-version-check install --quiet --no-deps --no-index "$dist"/*.whl
"$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
    > "$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
cd "$scratch"
"$scratch/venv/bin/lenvm" --help > /dev/null
"$scratch/venv/bin/lenvm" --version
"$scratch/venv/bin/python" - "$scratch/venv" <<'PY'
import importlib
import importlib.metadata
import pkgutil
import sys
from pathlib import Path

import torch

import lenvm_kernels

assert Path(lenvm_kernels.__file__).is_relative_to(sys.argv[1]), lenvm_kernels.__file__
assert importlib.metadata.version("lenvm-kernels") == lenvm_kernels.__version__
absent = set()
for module in pkgutil.walk_packages(lenvm_kernels.__path__, "lenvm_kernels."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("sglang", "vllm"):  # an extra
            raise
        absent.add(module.name)
assert all(name.startswith(("lenvm_kernels.engines.sglang", "lenvm_kernels.engines.vllm")) for name in absent), absent
for name in lenvm_kernels.__all__:
    getattr(lenvm_kernels, name)

scores = torch.tensor([[0.5, 0.2, 0.3]])
row = dict(top_k=torch.tensor([2], dtype=torch.int32), top_p=torch.ones(1), min_p=torch.zeros(1))
candidates = lenvm_kernels.topk_candidates(scores, **row, max_candidates=2)
assert candidates.token_ids.tolist() == [[0, 2]]
print(f"every module imports{', but for SGLang ' + ', '.join(sorted(absent)) if absent else ''}; an operator runs")
PY
