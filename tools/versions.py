"""Run tests with the oldest and newest versions that pyproject.toml admits: ``make versions``.

Each environment is created in ``.venv-versions`` and removed after its tests. Two run side by side. A CPU build of
torch, which PyPI lacks for Linux on x86-64, comes from the index that pip is configured with. For Python versions
without such a build, the sources are only compiled and type-checked.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-versions"
# The oldest CPU build. Older admitted versions were tested on a GPU (bench/results).
CPU_TORCH = "torch==2.13.0"
NEWEST_TORCH = "torch>=2.14,<2.15"
LARGEST = 8 * 2**30  # total bytes of the environments; the newest torch is a CUDA build
OTHER_PYTHONS = ("3.10", "3.13")

TESTS = [
    *("ops/test_operator_laws", "step/test_step_device", "step/test_scenarios", "step/test_refusals"),
    *("values/test_value_model", "values/test_value_model_checkpoint", "guidance/test_guidance"),
    "engines/test_transformers_adapter",
]
# Long tests, 32-bit offsets and other batches do not depend on library versions; CUDA graphs need a GPU.
LEFT_OUT = "not (random_arrivals or offsets_past or in_every_batch or replays_in_a_cuda_graph)"

DEPENDENCIES = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
NEWEST = [requirement for requirement in re.findall(r'"(.*?)"', DEPENDENCIES) if not requirement.startswith("torch")]
OLDEST = [re.sub(r">=([\d.]+).*", r"==\1", requirement) for requirement in NEWEST]
ENVIRONMENTS = {
    "newest torch": [NEWEST_TORCH, *NEWEST],  # the largest starts first
    "newest Triton": [CPU_TORCH, *NEWEST],
    "oldest": [CPU_TORCH, *OLDEST],
}
_installing = threading.Lock()  # an editable installation writes to the tree


def run(*command: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, **options)


def python_of(version: str) -> str | None:
    """A Python of this version in PATH or in pyenv's folder, or None."""
    candidates = [f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    return next(
        (str(python) for python in candidates if shutil.which(python) and not run(python, "-V").returncode), None
    )


def test(name: str, requirements: list[str], python: str = sys.executable) -> str:
    """Create the environment and run the tests; returns a line of the summary, empty if a command failed."""
    folder, start = FOLDER / name.replace(" ", "-"), time.monotonic()
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    try:
        for step in (
            [python, "-m", "venv", folder],
            [*pip, "install", "--quiet", "--no-compile", *requirements, "pytest", "hypothesis", "peft", "gguf"],
            [*pip, "install", "--quiet", "--no-deps", "--editable", "."],
            [folder / "bin/python", *command, *(f"tests/{file}.py" for file in TESTS)],
        ):
            with _installing if "--editable" in step else nullcontext():
                done = run(*step)
            if done.returncode:
                print(f"{name}: {' '.join(map(str, step))} failed\n{done.stdout[-20_000:]}{done.stderr[-5_000:]}")
                return ""
        listed = run(*pip, "list", "--format=freeze").stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    versions = re.findall(r"^(?:numpy|torch|transformers|triton)==.*", listed, re.M)
    return f"{', '.join(versions)}: {done.stdout.splitlines()[-1]} ({time.monotonic() - start:.0f} s in all)"


def test_python(version: str) -> str:
    """As :func:`test`, with another Python. Without a torch for it, compile and type-check the sources."""
    python = python_of(version)
    types = run(sys.executable, "-m", "mypy", "--python-version", version)
    if types.returncode:
        print(f"Python {version}: {types.stdout}")
        return ""
    if python is None:
        return "not installed: NO TEST RUN, only type-checked"
    # Only CPU builds have this version; without one in the index, pip would install a CUDA build.
    cpu_build = f"{CPU_TORCH}+cpu"
    if not run(python, "-m", "pip", "download", "--no-deps", "--dest", FOLDER / "wheels", cpu_build).returncode:
        return test(f"Python {version}", [cpu_build, *ENVIRONMENTS["newest Triton"][1:]], python)
    sources = run("git", "ls-files", "*.py").stdout.split()
    compiled = run(python, "-c", "import sys; [compile(open(f).read(), f, 'exec') for f in sys.argv[1:]]", *sources)
    if compiled.returncode:
        print(f"Python {version}: {compiled.stderr}")
        return ""
    return f"no {cpu_build} for it: NO TEST RUN, {len(sources)} files compiled and type-checked"


def main() -> int:
    start, free = time.monotonic(), shutil.disk_usage(ROOT).free
    if free < LARGEST:
        print(f"make versions needs {LARGEST / 2**30:.0f} GiB of disk, {free / 2**30:.1f} GiB are free")
        return 1
    shutil.rmtree(FOLDER, ignore_errors=True)
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(test, name, requirements) for name, requirements in ENVIRONMENTS.items()}
        runs |= {f"Python {version}": pool.submit(test_python, version) for version in OTHER_PYTHONS}
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, done in runs.items():
        print(f"{name}: {done.result() or 'FAILED, see above'}")
    failed = sum(not done.result() for done in runs.values())
    print(f"{len(runs) - failed} passed, {failed} failed\n{time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
