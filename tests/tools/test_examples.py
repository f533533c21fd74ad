"""All scripts of ``examples/`` run unchanged, with the documented results.

``openai_client.py`` needs a server: ``test_sglang_text.py`` runs it against the real one.
"""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.cases import simplest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example by its name with arguments; returns its globals and its output."""

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__"), capsys.readouterr().out

    return run_example


def test_operators(run):
    torch.manual_seed(0)
    names, text = run("operators")
    candidates, guided, probs = names["candidates"], names["guided"], names["probs"]
    assert torch.isclose(guided.sum(), torch.tensor(1.0, device=guided.device), atol=1e-5)
    listed = candidates.token_ids[0, :5].long()
    torch.testing.assert_close(probs[0, listed], guided[0, :5])
    assert probs[0, names["next_token"].item()] > 0
    assert text.endswith(f"drawn      {names['next_token'].item()}\n")


def test_transformers_generate(run, base, value):
    names, text = run("transformers_generate", base, value)
    headings = re.findall(r"^(None|\{.*\})\n(.*\?)\n", text, re.MULTILINE)
    assert headings == [(str(guidance), prompt) for guidance in names["GUIDANCE"] for prompt in names["PROMPTS"]]


def assert_all_released(names):
    """No row of the guidance table and no slot is in use, and no step had a fault."""
    step, slots = names["step"], names["slots"]
    assert not step.table.columns.mode.any() and step.table.columns.faults.sum() == 0
    assert slots.free_pages * names["PAGE_SIZE"] == slots.num_slots


def test_engine_loop(run, base, value):
    """There are more requests than rows in the table; all are answered."""
    names, text = run("engine_loop", base, value)
    answered = re.findall(r"^(.*\?)\n  (\{.*\})\n  (\d+)\n", text, re.MULTILINE)
    requests = [(prompt, str(guidance)) for prompt, guidance in names["REQUESTS"]]
    assert sorted(answer[:2] for answer in answered) == sorted(requests) and len(requests) > names["TABLE_ROWS"]
    assert all(1 <= int(length) <= names["MAX_NEW"] for *_, length in answered)
    assert_all_released(names)


def test_draft_loop(run, base, value, tmp_path):
    """The text is the same as without drafts, in fewer steps."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data *= 4  # peaked scores, so that the model repeats itself
    shutil.copytree(base, tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    answers = []
    for option in ([], ["--no-drafts"]):
        names, text = run("draft_loop", tmp_path / "base", value, *option)
        drawn, steps = (sum(map(int, x)) for x in zip(*re.findall(r"(\d+) tokens in (\d+) steps", text), strict=True))
        answers.append([names["output_of"](request)[0] for request in names["requests"]])
        assert (steps == drawn) if option else (steps < drawn)
        assert drawn == sum(map(len, answers[-1]))
        assert_all_released(names)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("setting", [{"dtype": "float32"}, {"dtype": "bfloat16", "token_rows": "int32", "size": 100}])
def test_fuzz_own_kernel(setting, monkeypatch, lenvm):
    """The command in its docstring, on a case with few rows."""
    monkeypatch.chdir(EXAMPLES)
    command = re.search(r"^    lenvm (fuzz .*)$", (EXAMPLES / "fuzz_own_kernel.py").read_text(), re.MULTILINE)[1]
    code, out, _ = lenvm(*command.split(), "--replay", simplest("value_head", 6, seed=3, **setting))
    assert code == 0 and out.split()[-5:-2] == ["value_head", "1", "6"]
