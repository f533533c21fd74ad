"""The ``lenvm`` command, and ``lenvm generate`` on tiny random checkpoints."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lenvm_kernels import LenVMConfig
from lenvm_kernels.guidance.fields import FIELDS
from tests.helpers.models import random_head, save_checkpoint
from tests.helpers.probes import write_random_probe


@pytest.fixture
def generate(lenvm, base, value):
    """Run ``lenvm generate``; returns its text, and the rows of its table of values."""

    def run(*argv, prompts=("w1 w2 w3",), model=base, value_model=value):
        models = ["--model", model, "--device", "cpu", "--max-new-tokens", 12]
        models += [] if value_model is None else ["--value-model", value_model]
        code, text, error = lenvm("generate", *models, *(x for text in prompts for x in ("--prompt", text)), *argv)
        assert (code, error) == (0, "")
        answer, _, table = text.partition("\n\nstep")
        return (answer if table else text.removesuffix("\n")), [row.split() for row in table.splitlines()[1:-1]]

    return run


def test_equal_texts(generate, base, put_into_cache, tmp_path):
    """Equal seeds, a table of values, cached model names, chat templates and written-out lengths give equal texts."""
    write_random_probe(tmp_path / "probe", AutoModelForCausalLM.from_pretrained(base))
    put_into_cache("owner/base", Path(base))
    put_into_cache("owner/probe", tmp_path / "probe")
    template = "w9 {{ messages[0]['content'] }} w9{% if add_generation_prompt %} w10{% endif %}"
    chat = save_checkpoint(tmp_path / "chat", seed=0, template=template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(chat)
    guided = ("--value-mode", "centered_exp", "--value-scale", 20)
    said = ("--target-length", 30, "--max-new-tokens", 30)
    text = generate(*guided)[0]
    assert re.fullmatch(r"(w\d+|<unk>)( (w\d+|<unk>))*", text) and text == generate(*guided)[0]
    assert any(generate(*guided, "--seed", seed)[0] != text for seed in (2, 3, 4))
    assert generate()[0] == generate("--show-values")[0]
    greedy = {generate("--temperature", 0, "--seed", seed)[0] for seed in (2, 3)}
    assert greedy == {generate("--top-k", 1)[0]} != {generate()[0]}
    cached = generate(*said, model="owner/base", value_model="owner/probe")
    assert cached == generate(*said, value_model=tmp_path / "probe")
    templated, plain = generate(model=chat)[0], generate()[0]
    assert templated != plain
    both = generate(prompts=("w1 w2 w3", "w9 w1 w2 w3 w9 w10"))[0]
    assert both == f"\n> w1 w2 w3\n{plain}\n\n> w9 w1 w2 w3 w9 w10\n{templated}"
    in_prompt = generate(*said, prompts=("w1 w2 w3\n\nw20 w30",))[0]
    assert in_prompt == generate(*said, "--say-it", "w{words} w{tokens}")[0] != generate(*said)[0]


def test_table_of_values(generate):
    answer, rows = generate("--target-length", 5, "--constraint", "eq_soft", "--gamma", 0.9, "--show-values")
    tokens = [json.loads(row[3]) for row in rows]
    assert [row[0] for row in rows] == [str(step) for step in range(1, len(rows) + 1)]
    assert all((float(row[1]) == 0) == (token == "<eos>") for row, token in zip(rows, tokens, strict=True))
    assert all(0 < float(row[2]) <= 1 for row in rows)
    assert " ".join(token for token in tokens if token != "<eos>") == answer
    hot = ("--top-k", 0, "--min-p", 0, "--temperature", 5, "--max-candidates", 2, "--show-values")
    assert any(row[1:3] == ["-", "-"] for row in generate(*hot)[1])  # tokens outside the candidates


LOG_2 = math.log(2)


@pytest.mark.parametrize(
    ("config", "argv", "length"),
    [
        ({"gamma": 0.9}, ("--gamma", 0.8), LOG_2 / -math.log(0.8)),
        ({"gamma": 0.9, "target_form": "length", "length_normalizer": 100.0}, ("--gamma", 0.8), 100 * LOG_2),
    ],
)
def test_lengths_are_computed_from_logit_gamma_and_target_form(tmp_path, generate, config, argv, length):
    """A head of zeros predicts softplus(0)."""
    value = save_checkpoint(tmp_path / "value", seed=1)
    head = {name: torch.zeros_like(x) for name, x in random_head().items()}
    save_file(head, tmp_path / "value" / "value_head.safetensors")
    LenVMConfig(**config).write(tmp_path / "value")
    _, rows = generate("--show-values", *argv, value_model=value)
    assert {row[1] for row in rows} - {"0.0"} == {f"{length:.1f}"}


@pytest.mark.parametrize("values", [{}, {"value_model": None}])
def test_landing_is_forced_in_words(generate, values):
    text, _ = generate("--target-length", 12, "--landing", "w7 w8 w9", "--landing-tokens", 12, **values)
    assert text.split("\n")[-1].split()[2:5] == ["w7", "w8", "w9"]


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)]
)
def test_threads_wait_briefly_by_default(lenvm, monkeypatch, given, spins):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    assert lenvm("--version")[0] == 0
    assert (environment.get("GOMP_SPINCOUNT"), environment["HF_HUB_OFFLINE"]) == (spins, "1")


@pytest.mark.parametrize("argv", ["--version", "generate -h", "demo -h", "evaluate -h", "params", "doctor -h"])
def test_help_does_not_import_torch(argv):
    code = (
        f"import sys; from lenvm_kernels.cli import main\ntry: main({argv.split()})\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_parameters_are_printed(lenvm):
    status, text, _ = lenvm("params")
    assert status == 0 and [line.split(" (default: ")[0] for line in text.splitlines() if line[0] != " "] == [*FIELDS]


def test_every_flag_has_help_with_its_default(lenvm):
    for command in ("generate", "demo", "evaluate"):
        text = " ".join(lenvm(command, "--help")[1].split())
        flags = re.findall(r"(?<!usage: )\[?(--[a-z-]+)", text.split("options:")[0])
        other_names = {f"--{name.replace('_', '-')}" for field in FIELDS.values() for name in field.names[1:]}
        assert len(flags) >= 5
        assert text.count("(default: ") + text.count("; required") == len(set(flags) - {"--help"} - other_names)
