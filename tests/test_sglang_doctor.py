"""``lenvm doctor`` beside SGLang: what it says of hooks that take, and of those that do not."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from lenvm_kernels.adapters.engine_signatures import USED, recorded
from lenvm_kernels.adapters.sglang import HOOKS
from tests.helpers.sglang_server import write_checkpoints

COMMAND = "import sys; from lenvm_kernels.cli import main; sys.exit(main(['doctor', '--json']))"


def run_doctor(before="", after="", **variables):
    """The command in a process of its own: the hooks stay in it. Returns its exit code and what it found."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LENVM_", "SGLANG_"))}
    quietly = "import contextlib, io\nwith contextlib.redirect_stderr(io.StringIO()):\n    "
    code = f"{quietly}{before or 'pass'}\ntry:\n    {COMMAND}\nfinally:\n    {after or 'pass'}"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, timeout=300
    )
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def test_every_hook_takes(tmp_path):
    write_checkpoints(tmp_path)
    code, found = run_doctor(LENVM_VALUE_MODEL=str(tmp_path / "value"), LENVM_GAMMA="0.9")
    assert [(check["name"], check["mark"], check["found"]) for check in found["hooks"]] == [
        *((target, "ok", "took") for target in HOOKS),
        ("signatures", "ok", f"{len(USED['sglang'])} as in {', '.join(recorded('sglang'))}"),
    ]
    assert [check["mark"] for check in found["settings"]] == ["ok", "ok"]
    assert {check["name"]: check["mark"] for check in found["installed"]}["sglang"] == "ok"
    assert (code, found["ok"]) == (0, True)


def test_an_engine_that_has_moved_a_function(tmp_path):
    """And without LENVM_VALUE_MODEL, which must not stay set."""
    target = "sglang.srt.layers.sampler.Sampler._preprocess_logits"
    assert target in HOOKS
    code, found = run_doctor(
        before="from sglang.srt.layers.sampler import Sampler; del Sampler._preprocess_logits",
        after="import os; assert 'LENVM_VALUE_MODEL' not in os.environ",
    )
    wrong = [check for check in found["hooks"] if check["mark"] == "wrong"]
    assert [check["name"] for check in wrong] == [target, "Sampler._preprocess_logits"]
    assert wrong[1]["found"] == "is not there"
    assert wrong[0]["found"] == "type object 'Sampler' has no attribute '_preprocess_logits'"
    assert len(found["hooks"]) == len(HOOKS) + 1
    assert code == 1


def test_a_plugin_that_sglang_was_told_to_leave_out():
    code, found = run_doctor(SGLANG_PLUGINS="other")
    (check,) = found["hooks"]
    assert (check["name"], check["mark"], check["found"]) == ("SGLang plugin", "wrong", "did not run")
    assert check["hint"].startswith("SGLANG_PLUGINS=other is all that SGLang loads: add lenvm")
    assert code == 1


def test_a_plugin_that_fails():
    code, found = run_doctor(before="import lenvm_kernels.adapters.sglang as adapter; adapter.plugin = lambda: {}['x']")
    (check,) = found["hooks"]
    assert (check["mark"], check["hint"]) == ("wrong", "mend this first: KeyError: 'x'")
    assert code == 1
