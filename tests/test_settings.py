"""The settings of the plugins of SGLang and vLLM, which need neither."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lenvm_kernels import LenVMConfig
from lenvm_kernels.adapters.settings import (
    Settings,
    default_gamma,
    default_strength,
    default_thoughts,
    has_trunk,
    has_value_model,
    load_text_breaks,
    parse_request,
    value_model_reads_images,
    writes_predictions,
)
from lenvm_kernels.adapters.vllm_requests import guidance_of
from lenvm_kernels.step import StepConfig
from lenvm_kernels.types import Mode
from tests.helpers.models import save_checkpoint


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A path that exists, in an environment without settings."""
    for name in [name for name in os.environ if name.startswith("LENVM_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "value-model"
    path.mkdir()
    return path


@pytest.fixture
def config(model, monkeypatch):
    """Writes a settings file."""

    def write(content):
        file = model.parent / "lenvm.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("LENVM_CONFIG", str(file))
        return file

    return write


def test_off_unless_there_is_a_value_model(model, monkeypatch):
    assert Settings.from_environment() is None
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    assert Settings.from_environment() is None and not Settings.are_given()
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    assert Settings.from_environment() == Settings(model, max_candidates=4)


def test_a_file_gives_the_same_as_variables_which_take_precedence(model, config, monkeypatch):
    config(
        {"value_model": str(model), "dtype": "bfloat16", "max_candidates": 16, "memory_share": 0.25, "graphs": False}
    )
    expected = dict(dtype=torch.bfloat16, max_candidates=16, memory_share=0.25, graphs=False)
    assert Settings.from_environment() == Settings(model, **expected)
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    monkeypatch.setenv("LENVM_VALUE_STRIDE", "4")
    changed = dict(max_candidates=4, value_stride=4)
    assert Settings.from_environment() == Settings(model, **expected | changed)


def test_an_engine_with_an_option_of_its_own(model, config, monkeypatch):
    """Its value model goes before any other, its default before ours; a variable and a file go before a default."""
    option = ("--value-model", str(model))
    assert Settings.from_environment(option) == Settings(model)
    assert Settings.from_environment(option, max_candidates=64) == Settings(model, max_candidates=64)
    monkeypatch.setenv("LENVM_VALUE_MODEL", "/nowhere")
    config({"value_model": "/nowhere", "max_candidates": 16, "gamma": 0.9})
    assert Settings.from_environment(option, max_candidates=64) == Settings(model, max_candidates=16, gamma=0.9)
    with pytest.raises(ValueError, match=r"--value-model must be an existing .* or none, got '/nowhere'$"):
        Settings.from_environment(("--value-model", "/nowhere"))


def test_names_in_the_hugging_face_cache(model, monkeypatch, put_into_cache):
    (model / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    LenVMConfig(gamma=0.75).write(model)
    snapshot = put_into_cache("namezz/lvm-x", model)
    monkeypatch.setenv("LENVM_VALUE_MODEL", "namezz/lvm-x")
    monkeypatch.setenv("LENVM_VALUE_HEAD", "namezz/lvm-x")
    assert Settings.from_environment() == Settings(snapshot, snapshot, gamma=0.75)
    assert value_model_reads_images.__wrapped__()
    monkeypatch.setenv("LENVM_VALUE_MODEL", "namezz/lvm-y")
    with pytest.raises(ValueError, match=r"^LENVM_VALUE_MODEL must be .*: namezz/lvm-y is no .*/hub, .*`hf download "):
        Settings.from_environment()


def test_what_a_step_is_made_with(model):
    settings = Settings(model, max_candidates=4, chunk_tokens=9, value_stride=3, graphs=None)
    expected = dict(max_candidates=4, max_eos=64, chunk_tokens=9, value_stride=3, graphs=None)
    expected |= dict(vocab_size=99, max_delta=5)
    assert settings.step_config(has_graphs=True, vocab_size=99, max_delta=5) == StepConfig(**expected)
    expected |= {"graphs": False}
    assert settings.step_config(has_graphs=False, vocab_size=99, max_delta=5) == StepConfig(**expected)
    for has_graphs in (False, True):
        for graphs in (False, True):
            config = Settings(model, graphs=graphs).step_config(has_graphs=has_graphs, vocab_size=9)
            assert config.graphs is graphs


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "VALUE_MODEL",
            "nowhere",
            "LENVM_VALUE_MODEL must be an existing directory or .* none, got 'nowhere'",
        ),
        ("DTYPE", "int8", "LENVM_DTYPE must be one of float32, bfloat16, float16, got 'int8'"),
        ("GAMMA", "1", "LENVM_GAMMA must be a number > 0 and < 1, got '1'"),
        ("GAMMA", "0", "LENVM_GAMMA must be a number > 0 and < 1, got '0'"),
        ("GAMMA", "nan", "LENVM_GAMMA must be a number > 0 and < 1, got 'nan'"),
        ("MAX_CANDIDATES", "5", "LENVM_MAX_CANDIDATES must be a power of two up to 64, got '5'"),
        ("CHUNK_TOKENS", "0", "LENVM_CHUNK_TOKENS must be an integer of at least 1, got '0'"),
        ("VALUE_STRIDE", "0", "LENVM_VALUE_STRIDE must be an integer of at least 1, got '0'"),
        ("MEMORY_SHARE", "1.5", "LENVM_MEMORY_SHARE must be a number > 0 and <= 1, got '1.5'"),
        ("MEMORY_SHARE", "nan", "LENVM_MEMORY_SHARE must be a number > 0 and <= 1, got 'nan'"),
        ("GRAPHS", "yes", "LENVM_GRAPHS must be 0 or 1, got 'yes'"),
    ],
)
def test_bad_variables_are_named(model, monkeypatch, variable, value, message):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    monkeypatch.setenv(f"LENVM_{variable}", value)
    with pytest.raises(ValueError, match=message):
        Settings.from_environment()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "LENVM_CONFIG must be a JSON file, got .*lenvm.json"),
        ([1], "LENVM_CONFIG must be a JSON object of settings, got list"),
        ({"dtype": "float32"}, "value_model must be in .*lenvm.json or in LENVM_VALUE_MODEL"),
        ({"value_model": "nowhere"}, "value_model in .*lenvm.json must be an existing directory or .gguf file"),
        ({"value_modell": "x"}, "value_modell in .*lenvm.json is not a setting; did you mean value_model"),
        ({"seed": 1}, "seed in .*lenvm.json is not a setting; accepted are value_model, value_head"),
        ({"value_model": ".", "graphs": 2}, "graphs in .*lenvm.json must be 0 or 1, got '2'"),
        (
            {"value_model": ".", "max_candidates": True},
            "max_candidates in .* must be a power of two up to 64, got 'True'",
        ),
    ],
)
def test_bad_files_are_named(config, content, message):
    config(content)
    with pytest.raises(ValueError, match=message):
        Settings.from_environment()


def test_a_file_that_is_not_there(model, monkeypatch):
    monkeypatch.setenv("LENVM_CONFIG", str(model / "lenvm.json"))
    with pytest.raises(ValueError, match=r"LENVM_CONFIG must be a JSON file, got .*No such file"):
        Settings.from_environment()


def test_which_gamma_wins(model, config, monkeypatch):
    """That of a variable over that of the settings' file, and that over the one beside the model."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    assert Settings.from_environment().gamma is None
    LenVMConfig(gamma=0.9).write(model)
    assert Settings.from_environment().gamma == 0.9
    config({"gamma": 0.93})
    assert Settings.from_environment().gamma == 0.93
    monkeypatch.setenv("LENVM_GAMMA", "0.95")
    assert Settings.from_environment().gamma == 0.95


def test_a_broken_file_beside_the_model_is_named(model, monkeypatch):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    (model / "lenvm_config.json").write_text('{"gamma": 2}')
    with pytest.raises(ValueError, match=r"lenvm_config.json: gamma must be a number > 0 and < 1, got 2"):
        Settings.from_environment()


@pytest.fixture
def fresh_default():
    """Processes look defaults up once; what is given looks them up again."""

    def clear():
        default_gamma.cache_clear()
        default_strength.cache_clear()
        default_thoughts.cache_clear()
        has_value_model.cache_clear()
        has_trunk.cache_clear()
        writes_predictions.cache_clear()

    clear()
    yield clear
    clear()


def test_requests_get_the_gamma_of_the_server_unless_they_name_one(model, monkeypatch, fresh_default):
    def gamma(**extra_args):
        params = dict(temperature=1.0, top_k=0, stop_token_ids=None)
        return guidance_of(SimpleNamespace(extra_args={"target_length": 9} | extra_args, **params)).gamma

    assert gamma() == 0.997 and default_gamma() is None
    assert parse_request({"target_length": 9}).scale == 5
    fresh_default()
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    LenVMConfig(gamma=0.9).write(model)
    assert gamma() == 0.9
    fresh_default()
    monkeypatch.setenv("LENVM_GAMMA", "0.95")
    assert gamma() == 0.95
    assert gamma(gamma=0.8) == gamma(length_gamma=0.8) == 0.8


def test_requests_get_the_strength_of_the_value_model_unless_they_name_one(model, monkeypatch, fresh_default):
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(model))
    assert default_strength() is None and parse_request({"target_length": 9}).scale == 5
    fresh_default()
    LenVMConfig(gamma=0.9, strength=8.5).write(model)
    assert parse_request({"target_length": 9}).scale == 8.5
    assert parse_request({"target_length": 9, "strength": 3}).scale == 3


def test_without_a_value_model(model, monkeypatch, fresh_default, tmp_path):
    """The plugin is on, requests are met by their ends alone, and what needs a value model is refused by name."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", "none")
    monkeypatch.setenv("LENVM_GAMMA", "0.9")
    settings = Settings.from_environment()
    assert settings == Settings(None, gamma=0.9) and Settings.are_given() and not has_value_model()
    assert settings.load_value_model(torch.float32, "cpu") is None
    assert parse_request({"target_length": 9}).gamma == 0.9
    # Nothing but ends depends on it: twice as strong as by values, unless a request says otherwise.
    assert (
        parse_request({"target_length": 9}).scale == 10
        and parse_request({"target_length": 9, "strength": 3}).scale == 3
    )
    budget = parse_request({"thinking_budget": 40, "end_token_ids": [7]})
    assert budget.hard_limit == 50 and budget.mode == Mode.LE_NEAR
    for bad, message in (
        ({"target_length": 9, "constraint": "le_soft"}, "value_constraint must be one of near, ge_near, le_near"),
        ({"value_mode": "exp", "value_scale": 2}, "value_mode exp needs a value model"),
        ({"return_values": True}, "return_values must not be given without a value model"),
        ({"thinking_budget": 40}, "thinking_budget needs end_token_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_request(bad)
    monkeypatch.setenv("LENVM_VALUE_HEAD", str(tmp_path))
    with pytest.raises(ValueError, match="LENVM_VALUE_HEAD must not be given without a value model, got '"):
        Settings.from_environment()


def test_text_breaks_of_an_engine(tmp_path, caplog):
    """Of the tokenizer where the engine has its own; without one, or where it cannot be loaded, nothing is known."""
    words = Tokenizer(WordLevel({"a": 0, "b.": 1, "c\n": 2, "<unk>": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    assert load_text_breaks(str(tmp_path), 6).tolist() == [0, 2, 1, 0, 0, 0]
    assert load_text_breaks(None, 6) is None and not caplog.records
    assert load_text_breaks(str(tmp_path / "nowhere"), 6) is None
    assert "outputs may end within sentences: the tokenizer" in caplog.text and "nowhere" in caplog.text


@pytest.mark.parametrize(("given", "allows"), [(True, True), (1, True), (0, False)])
def test_vllm_makes_numbers_of_switches(model, fresh_default, given, allows):
    extra_args = {"target_length": 9, "end_token_ids": [3], "allow_eos": given}
    params = SimpleNamespace(extra_args=extra_args, temperature=1.0, top_k=0, stop_token_ids=None)
    assert guidance_of(params).allow_eos is allows


def test_the_end_of_a_thought_is_looked_up_beside_the_value_model(model, tmp_path, monkeypatch, fresh_default):
    words = [f"w{i}" for i in range(20)]
    thinking = save_checkpoint(tmp_path / "thinking", seed=0, words=[*words[:7], "</think>", *words[8:]])
    not_thinking = save_checkpoint(tmp_path / "not_thinking", seed=0, words=words)
    for folder, expected in ((thinking, (7,)), (not_thinking, None), (model, None)):
        monkeypatch.setenv("LENVM_VALUE_MODEL", str(folder))
        fresh_default()
        parse_request({"target_length": 9, "thinking_budget": None})
        assert default_thoughts.cache_info().misses == 0  # a tokenizer takes seconds
        if expected is not None:
            assert parse_request({"thinking_budget": 9}).end_token_ids == expected
        else:
            with pytest.raises(ValueError, match="thinking_budget needs end_token_ids: no token is known"):
                parse_request({"thinking_budget": 9})
        assert parse_request({"thinking_budget": 9, "end_token_ids": [3, 4]}).end_token_ids == (3, 4)
        assert not parse_request({"target_length": 9}).end_token_ids
