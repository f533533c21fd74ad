"""Test set-up: device of the kernels, Hypothesis profiles, and rounding in Triton's interpreter.

With a GPU, kernels are compiled and run there. Without one, they run in Triton's interpreter, which must be enabled
before Triton is imported (pytest imports this file first).
"""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Two workers and their subprocesses share two cores, so idle threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, settings

from lenvm_kernels.ops import _operator  # noqa: F401 - patches the interpreter before tests do
from tests.helpers.rounding import gpu_rounding

if os.environ.get("TRITON_INTERPRET") == "1" and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # one core per worker

_COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("ci", derandomize=True, max_examples=50, print_blob=True, **_COMMON)
settings.register_profile("fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "500")), **_COMMON)
# On a GPU, compilation takes most of a test's time, and bench.gpu_suite limits the time.
settings.register_profile("gpu", derandomize=True, max_examples=10, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounding-seed",
        type=int,
        metavar="N",
        help="run the kernels in the interpreter with rounding errors as large as a GPU's, drawn from seed N",
    )


@pytest.fixture(scope="session", autouse=True)
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = request.config.getoption("rounding_seed")
    if seed is None:
        yield
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("--rounding-seed applies to Triton's interpreter, but kernels are compiled here")
    with gpu_rounding(seed):
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the Triton kernels under test: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both backends of every operator. Session-scoped, because Hypothesis does not set up fixtures per example."""
    return request.param


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Write files (path -> text) into a directory that precedes the installed packages; returns that directory."""
    folder = tmp_path / "site"
    folder.mkdir()
    names = ("sglang", "vllm", "made_up", "lenvm_kernels.engines.vllm.processor")

    def loaded():
        return [name for name in sys.modules if name.startswith(names)]

    monkeypatch.syspath_prepend(folder)
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)

    def fill(files):
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    yield fill
    for name in loaded():  # Other tests look for the real packages.
        del sys.modules[name]


@pytest.fixture(scope="module")
def models():
    """A value model for guided steps, with its expected values."""
    from tests.helpers.engine import StepModels  # a slow import

    return StepModels()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny base model."""
    from tests.helpers.models import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture(scope="module")
def value(tmp_path_factory):
    """The directory of a tiny value model."""
    from tests.helpers.models import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("value"), seed=1, value_head=True)


@pytest.fixture
def lenvm(capsys):
    """Run the command in this process; returns its exit code, stdout and stderr."""
    from lenvm_kernels import cli

    def run(*argv):
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as exit:  # argparse
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def put_into_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Path]:
    """Store a directory as a repository in a Hugging Face cache, as links to blobs; connections are disabled."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", None)

    def put(name: str, folder: Path) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot, blobs, refs = (repository / part for part in ("snapshots/ab12", "blobs", "refs"))
        for directory in (snapshot, blobs, refs):
            directory.mkdir(parents=True)
        (refs / "main").write_text(snapshot.name)
        for number, file in enumerate(folder.iterdir()):
            (snapshot / file.name).symlink_to(shutil.copy(file, blobs / str(number)))
        return snapshot

    return put
