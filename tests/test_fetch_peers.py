"""Fetching the peers' wheels: what is kept of each, and what is said of those that are not to be had."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import fetch_peers


def test_fetch(tmp_path, monkeypatch):
    def pip(command, **kwargs):
        folder = Path(command[command.index("--dest") + 1])
        assert command[-1] == "some-peer==2.0" and command[command.index("--python-version") + 1] == "3.12"
        with zipfile.ZipFile(folder / "some_peer-2.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some_peer/kernel.py", "kernel = 1")
            wheel.writestr("some_peer/large.py", "large = 1")

    monkeypatch.setattr(subprocess, "run", pip)
    for name in ("some_peer-1.0-py3-none-any.whl", "other-1.0.whl"):
        (tmp_path / name).touch()
    whole = fetch_peers.fetch("some-peer==2.0", None, {}, tmp_path, "3.12")
    assert {path.name for path in tmp_path.iterdir()} == {"some_peer-2.0-py3-none-any.whl", "other-1.0.whl"}
    assert len(zipfile.ZipFile(whole).namelist()) == 2

    stubs = {"some_peer/settings.py": "settings = None"}
    excerpt = fetch_peers.fetch("some-peer==2.0", ["some_peer/kernel.py"], stubs, tmp_path, "3.12")
    assert {path.name for path in tmp_path.iterdir()} == {excerpt.name, "other-1.0.whl"}
    with zipfile.ZipFile(excerpt) as file:
        texts = {name: file.read(name).decode() for name in file.namelist()}
    assert texts == {"some_peer/kernel.py": "kernel = 1", "some_peer/settings.py": "settings = None"}
    with pytest.raises(KeyError, match="nothing"):
        fetch_peers.fetch("some-peer==2.0", ["some_peer/nothing.py"], {}, tmp_path, "3.12")
    assert excerpt.exists()


def test_fetch_tells_what_is_missing(tmp_path, monkeypatch, capsys):
    def fetch(requirement, files, stubs, folder, python_version):
        if requirement.startswith("flash"):
            raise subprocess.CalledProcessError(1, "pip", output="WARNING: old pip\nERROR: No matching distribution\n")
        (folder / requirement).write_bytes(bytes(2**20))

    monkeypatch.setattr(fetch_peers, "fetch", fetch)
    monkeypatch.setattr(fetch_peers, "ARCHIVES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fetch_peers"])
    assert fetch_peers.main() == 1
    printed = capsys.readouterr()
    assert "flashinfer-python==0.6.14: ERROR: No matching distribution" in printed.err
    assert "1.00 MiB  vllm-tpu==0.21.0" in printed.out
    assert f"{len(os.listdir(tmp_path)):.2f} MiB of at most 64" in printed.out


def test_fetch_tells_of_a_pip_that_fails_without_a_word(tmp_path, monkeypatch, capsys):
    def fetch(*arguments):
        raise subprocess.CalledProcessError(9, "pip", output="\n")

    monkeypatch.setattr(fetch_peers, "fetch", fetch)
    monkeypatch.setattr(fetch_peers, "ARCHIVES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fetch_peers"])
    assert fetch_peers.main() == 1
    assert "flag-gems==5.0.2: Command 'pip' returned non-zero exit status 9." in capsys.readouterr().err
