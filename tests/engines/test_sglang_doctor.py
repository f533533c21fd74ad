"""Failures of the plugin in SGLang's plugin loader and in ``lenvm doctor``, in separate processes because the hooks
cannot be removed."""

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from lenvm_kernels.engines.signatures import recorded

REMOVE = "from sglang.srt.layers.sampler import Sampler; del Sampler._preprocess_logits"
FAIL = "import lenvm_kernels.engines.sglang.plugin as adapter; adapter.plugin = lambda: {}['x']"
TRIED = ", ".join(recorded("sglang"))


def run(code, environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LENVM_", "SGLANG_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("before", "environment", "wrong"),
    [
        ("", {}, {}),
        ("", {"LENVM_VALUE_MODEL": "off"}, {}),
        (REMOVE, {}, {"plugin": "did not run", "Sampler._preprocess_logits": "is not there"}),
        ("", {"SGLANG_PLUGINS": "other"}, {"plugin": "did not run"}),
        (FAIL, {}, {"plugin": "did not run"}),
    ],
)
def test_hooks_and_signatures(before, environment, wrong):
    code = (
        f"import contextlib, io, os, sys\nwith contextlib.redirect_stderr(io.StringIO()):\n    {before or 'pass'}\n"
        "from lenvm_kernels.cli import main\nstatus = main(['doctor', '--json'])\n"
        f"assert os.environ.get('LENVM_VALUE_MODEL') == {environment.get('LENVM_VALUE_MODEL')!r}\nsys.exit(status)"
    )
    result = run(code, environment)
    assert result.stderr == ""
    checks = json.loads(result.stdout)["sglang"]
    assert {check["name"]: check["found"] for check in checks if check["mark"] == "wrong"} == wrong
    assert result.returncode == bool(wrong)
    if not wrong:
        assert [check["name"] for check in checks] == ["signatures"] and checks[0]["found"].endswith(TRIED)


LOAD = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print("served", *sorted(target.rpartition(".")[2] for target in HookRegistry._patched))
"""
ALL = "served __init__ _send_one_request load_model update_request_meta_info"


@pytest.mark.parametrize(
    ("before", "environment", "printed", "logged"),
    [
        ("", {}, ALL, ""),
        ("", {"LENVM_VALUE_MODEL": "off"}, "served __init__ _send_one_request", ""),
        (REMOVE, {"LENVM_TRACE": "t"}, "", "the plugin of SGLang cannot be used: .* Sampler._preprocess_logits is not"),
    ],
)
def test_hooks_in_the_loader_of_the_engine(before, environment, printed, logged):
    """The loader ignores exceptions of a plugin, so the process ends if the plugin does not fit the engine."""
    result = run(f"{before}\n{LOAD}", environment)
    assert result.stdout.strip() == printed, result.stderr
    assert result.returncode == (not printed)
    assert re.search(logged, result.stderr)
