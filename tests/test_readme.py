"""The examples in the README and in docstrings run, its numbers are those of the results, and the version is one."""

import doctest
import importlib
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch

import lenvm_kernels
from tests.helpers.models import VOCAB, tiny_value_model

ROOT = Path(__file__).parent.parent


def test_the_operators_example_runs():
    torch.manual_seed(0)
    code = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    candidates, guided, probs = names["candidates"], names["guided"], names["probs"]
    assert torch.isclose(guided.sum(), torch.tensor(1.0, device=guided.device), atol=1e-5)
    listed = candidates.token_ids[0, :5].long()
    torch.testing.assert_close(probs[0, listed], guided[0, :5])
    assert probs[0, names["next_token"].item()] > 0


def test_the_step_example_runs(capsys):
    code = re.search(
        r"```python\n(from lenvm_kernels import GuidedStep.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )[1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    names = dict(
        torch=torch,
        device=device,
        value_model=tiny_value_model(device),
        vocab_size=VOCAB,
        eos=VOCAB,  # never drawn
        prompt=[5, 6, 7],
        base_logits=lambda tokens: scores[tokens[-1]][None],
    )
    exec(code, names)
    assert len(names["tokens"]) == 53 and all(0 <= token < VOCAB for token in names["tokens"])
    assert names["step"].table.faults.sum() == 0


OPERATORS = sorted(f"ops.{file.stem}" for file in (ROOT / "lenvm_kernels" / "ops").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", ["guidance", "paged_slots", *OPERATORS])
def test_docstring_examples_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"lenvm_kernels.{module}"))
    assert tried and not failed


def test_every_exported_name_is_there():
    assert all(getattr(lenvm_kernels, name) for name in lenvm_kernels.__all__)
    assert importlib.metadata.version("lenvm-kernels") == lenvm_kernels.__version__


def test_measured_numbers_are_those_of_the_results():
    found = json.loads((ROOT / "bench/results/cpu/host.json").read_text())
    where = found["environment"]
    ms = {(cost["step"], cost["rows"]): f"{cost['python_seconds'] * 1e3:.3g}" for cost in found["results"]}
    text = " ".join((ROOT / "README.md").read_text().split())
    for quoted in (
        f"(`{where['command']}`, one core of an {where['device']}, torch {where['torch'].removesuffix('+cpu')}, "
        f"triton {where['triton']}, Python {where['python']}, {where['date']};",
        f"is {ms['guided step, value model in a graph', 1]} and {ms['guided step, value model in a graph', 512]} ms",
        f"({ms['guided step', 1]} and {ms['guided step', 512]} ms if every kernel",
        f"from {float(ms['two forwards', 1]):.0f} to {float(ms['two forwards', 512]):.0f} ms",
        f"from {float(ms['two forwards, outside the forwards', 1]):.1f} to "
        f"{float(ms['two forwards, outside the forwards', 512]):.0f} ms outside",
    ):
        assert quoted in text
