"""``lenvm doctor`` with SGLang, in separate processes because the hooks cannot be removed."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from lenvm_kernels.engines.signatures import recorded

TARGET = "sglang.srt.layers.sampler.Sampler._preprocess_logits"
REMOVE = "from sglang.srt.layers.sampler import Sampler; del Sampler._preprocess_logits"
FAIL = "import lenvm_kernels.engines.sglang.plugin as adapter; adapter.plugin = lambda: {}['x']"
TRIED = ", ".join(recorded("sglang"))


@pytest.mark.parametrize(
    ("before", "environment", "wrong"),
    [
        ("", {}, {}),
        ("", {"LENVM_VALUE_MODEL": "off"}, {}),
        (REMOVE, {}, {TARGET: "hook not applied", "Sampler._preprocess_logits": "is not there"}),
        ("", {"SGLANG_PLUGINS": "other"}, {"plugin": "did not run"}),
        (FAIL, {}, {"plugin": "did not run"}),
    ],
)
def test_hooks_and_signatures(before, environment, wrong):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LENVM_", "SGLANG_"))}
    code = (
        f"import contextlib, io, os, sys\nwith contextlib.redirect_stderr(io.StringIO()):\n    {before or 'pass'}\n"
        "from lenvm_kernels.cli import main\nstatus = main(['doctor', '--json'])\n"
        f"assert os.environ.get('LENVM_VALUE_MODEL') == {environment.get('LENVM_VALUE_MODEL')!r}\nsys.exit(status)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=300)
    assert result.stderr == ""
    checks = json.loads(result.stdout)["sglang"]
    assert {check["name"]: check["found"] for check in checks if check["mark"] == "wrong"} == wrong
    assert result.returncode == bool(wrong)
    if not wrong:
        assert [check["name"] for check in checks] == ["signatures"] and checks[0]["found"].endswith(TRIED)
