"""Models for the engines' servers, and an environment without settings."""

import importlib
import os

import pytest

from lenvm_kernels.engines.settings import Settings


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Random checkpoints of a base model and a value model."""
    engine = "sglang" if "sglang" in request.module.__name__ else "vllm"
    folder = tmp_path_factory.mktemp("models")
    importlib.import_module(f"tests.helpers.{engine}_server").write_checkpoints(folder)
    return folder


@pytest.fixture
def clean_settings(monkeypatch):
    """An environment without settings, and without cached settings."""
    for name in [name for name in os.environ if name.startswith("LENVM_")]:
        monkeypatch.delenv(name)
    Settings.current.cache_clear()
    yield
    Settings.current.cache_clear()
