"""The models that the engines' servers load."""

import importlib

import pytest


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Random checkpoints for the engine of a test file: a base model and a value model."""
    engine = "sglang" if "sglang" in request.module.__name__ else "vllm"
    folder = tmp_path_factory.mktemp("models")
    importlib.import_module(f"tests.helpers.{engine}_server").write_checkpoints(folder)
    return folder
