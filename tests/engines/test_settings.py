"""Settings of the SGLang and vLLM plugins, tested without the engines."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from lenvm_kernels import LenVMConfig, engines
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.tokenizers import check_vocabulary, load_text_breaks, load_with
from lenvm_kernels.step import StepConfig
from lenvm_kernels.types import Mode
from tests.helpers.models import random_pair, save_checkpoint
from tests.helpers.probes import write_random_probe


@pytest.fixture
def model(tmp_path, clean_settings):
    """An existing path, in an environment without settings."""
    path = tmp_path / "value-model"
    path.mkdir()
    return path


@pytest.fixture
def given(model, monkeypatch):
    """Function that writes a settings file (or arbitrary text) and sets environment variables."""

    def write(file=None, **variables):
        if file is not None:
            path = model.parent / "lenvm.json"
            path.write_text(file if isinstance(file, str) else json.dumps(file))
            monkeypatch.setenv("LENVM_CONFIG", str(path))
        for name, value in variables.items():
            monkeypatch.setenv(f"LENVM_{name.upper()}", str(value))

    return write


# File, variables, whether guidance is off, whether a variable is set, and whether there is a value model.
SWITCHES = [
    (None, {}, False, False, False),
    (None, {"value_model": " "}, False, False, False),
    (None, {"chunk_tokens": 4096}, False, True, False),
    (None, {"value_model": "none"}, False, True, False),
    ({"chunk_tokens": 4096}, {}, False, True, False),
    (None, {"value_model": "{model}"}, False, True, True),
    (None, {"value_model": "off"}, True, True, False),
    ({"value_model": "off"}, {}, True, True, False),
    ({"value_model": "none"}, {"value_model": "off"}, True, True, False),
    ({"value_model": "off"}, {"value_model": "{model}"}, False, True, True),
]


@pytest.mark.parametrize(("file", "given_variables", "is_off", "is_explicit", "has_model"), SWITCHES)
def test_guidance_without_values_is_on_by_default(model, given, file, given_variables, is_off, is_explicit, has_model):
    given(file, **{name: str(text).format(model=model) for name, text in given_variables.items()})
    assert (engines.is_off(), bool(engines.variables())) == (is_off, is_explicit)
    if not is_off:
        assert Settings.current() == Settings.from_environment() == Settings(model if has_model else None)


# fmt: off
# Per setting: texts with values, the accepted values in words, and rejected texts. "{model}" is an existing path.
SOURCE = "an existing directory or .gguf file, a name on Hugging Face, none or off"
COUNT, SHARE, MODEL = "an integer of at least 1", "a number > 0 and ", {"{model}": "{model}"}
EACH = {
    "value_model": ({}, SOURCE, ["nowhere"]),
    "value_head": (MODEL, "an existing .safetensors or .bin file, or a directory or name with one", ["nowhere"]),
    "gamma": ({"0.5": 0.5}, f"{SHARE}< 1", ["1", "0", "nan", "x"]),
    "dtype": ({"bfloat16": torch.bfloat16}, "one of float32, bfloat16, float16", ["int8"]),
    "max_candidates": ({"64": 64}, "a power of two up to 64", ["5", "True", "128"]),
    "chunk_tokens": ({"7": 7}, COUNT, ["0"]),
    "memory_share": ({"0.25": 0.25}, f"{SHARE}<= 1", ["1.5", "nan", "0"]),
    "value_stride": ({"4": 4}, COUNT, ["0", "1.5"]),
    "graphs": ({"0": False, "1": True}, "0 or 1", ["yes", "2"]),
    "defaults": ({'{"target_length": 9}': {"target_length": 9}},
                 "a JSON object of guidance .* by reasoning_effort or verbosity",
                 ["9", "x", '{"reasoning_effort": 3}', '{"reasoning_effort": {"low": 3}}']),
    "tokenizer": ({"owner/name": "owner/name"}, "", []),
    "predictions": (MODEL, "", []),
    "trace": (MODEL, "", []),
}
# fmt: on


@pytest.mark.parametrize("source", ["variable", "file"])
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (texts, *_) in EACH.items() for text in texts])
def test_settings_are_read_from_variables_and_files(model, given, name, text, source):
    value = EACH[name][0][text]
    if source == "variable":
        given(value_model=model, **{name: text.replace("{model}", str(model))})
    else:
        is_text = not isinstance(value, (bool, int, float, dict))
        given({"value_model": str(model), name: text.replace("{model}", str(model)) if is_text else value})
    assert Settings.from_environment() == Settings(model, **{name: model if value == "{model}" else value})


# A setting and its value from each source, by precedence: request or engine option, variable, settings file,
# lenvm_config.json, default.
PRECEDENCE = [
    ("gamma", [0.8, 0.95, 0.93, 0.9, 0.997]),
    ("strength", [3.0, None, None, 8.5, 5.0]),
    ("value_stride", [7, 4, 3, None, 1]),
    ("max_candidates", [None, 4, 16, None, None]),
]


@pytest.mark.parametrize(("name", "values"), PRECEDENCE)
@pytest.mark.parametrize("first", range(5))
def test_precedence(model, given, name, values, first):
    """Only sources from ``first`` on have a value."""
    of_request, variable, in_file, beside_model, _ = [x if i >= first else None for i, x in enumerate(values)]
    LenVMConfig(**({} if beside_model is None else {name: beside_model})).write(model)
    in_file = {name: in_file} if name in EACH else {}
    given({"value_model": str(model)} | in_file, **({} if variable is None else {name: variable}))
    settings = Settings.from_environment()
    params = settings.parse_request({"target_length": 9} | ({} if of_request is None else {name: of_request}))
    config = settings.step_config(has_graphs=False, vocab_size=9)
    found = dict(gamma=params.gamma, strength=params.scale, max_candidates=config.max_candidates)
    found["value_stride"] = params.value_stride or config.value_stride
    assert found[name] == next((value for value in values[first:] if value is not None), None)


def test_hugging_face_names_are_found_in_cache(model, given, put_into_cache):
    (model / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    LenVMConfig(gamma=0.75).write(model)
    snapshot = put_into_cache("namezz/lvm-x", model)
    given(value_model="namezz/lvm-x", value_head="namezz/lvm-x")
    settings = Settings.from_environment()
    assert settings == Settings(snapshot, snapshot, gamma=0.75) and settings.reads_images
    given(value_model="namezz/lvm-y")
    with pytest.raises(ValueError, match=r"^LENVM_VALUE_MODEL must be .*: namezz/lvm-y is not .*/hub, nor could"):
        Settings.from_environment()


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (_, _, texts) in EACH.items() for text in texts])
def test_bad_settings_are_rejected_by_name(model, given, name, text):
    accepted = EACH[name][1]
    given({"value_model": str(model), name: text})
    with pytest.raises(ValueError, match=rf"^{name} in .*lenvm.json must be {accepted}, got '{text}'"):
        Settings.from_environment()
    given({}, **{"value_model": model, name: text})
    with pytest.raises(ValueError, match=f"^LENVM_{name.upper()} must be {accepted}, got '{text}'"):
        Settings.from_environment()


BAD_DEFAULTS = "defaults in .*lenvm.json has invalid parameters"
BAD_FILES = [
    (None, "LENVM_CONFIG must be a JSON file, got .*No such file"),
    ("{", "LENVM_CONFIG must be a JSON file, got .*lenvm.json"),
    ([1], "LENVM_CONFIG must be a JSON object of settings, got list in .*lenvm.json"),
    ({"value_modell": "x"}, r"value_modell in .*lenvm.json is not a setting; did you mean value_model\?"),
    ({"seed": 1}, "seed in .*lenvm.json is not a setting; accepted are value_model, value_head"),
    ({"defaults": {"target_lenght": 9}}, f"{BAD_DEFAULTS}: target_lenght is not .*; did you mean target_length"),
    ({"defaults": {"return_values": True}}, f"{BAD_DEFAULTS}: return_values must not be given without a value model"),
    ({"defaults": {"verbosity": {"low": {"thinking_budget": -3}}}}, f"{BAD_DEFAULTS}: thinking_budget must be"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_bad_files_are_rejected_by_name(model, given, content, message):
    given(content, config=model.parent / "lenvm.json")
    with pytest.raises(ValueError, match=f"^{message}"):
        Settings.from_environment()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("graphs", [None, False, True])
def test_step_config_from_settings(model, has_graphs, graphs):
    settings = Settings(model, max_candidates=4, chunk_tokens=9, value_stride=3, graphs=graphs)
    expected = dict(max_candidates=4, max_eos=64, chunk_tokens=9, value_stride=3, vocab_size=99, max_delta=5)
    expected |= {"graphs": False if graphs is None and not has_graphs else graphs}
    assert settings.step_config(has_graphs=has_graphs, vocab_size=99, max_delta=5) == StepConfig(**expected)


# By source: default strength, error of value_head, and an unsupported request with its error.
MINIMUM = {"target_length": 9, "value_min": 0.5}
UNSUPPORTED = [
    ("none", 10, "without a value model", {"return_values": True}, "return_values must not be given without a value"),
    ("probe", 40, "with a probe", MINIMUM, r"value_min must be absent .* probe, got 0.5"),
]


@pytest.mark.parametrize(("source", "strength", "of_head", "request_", "message"), UNSUPPORTED)
def test_sources_that_do_not_read_tokens(given, model, source, strength, of_head, request_, message):
    """The plugin is active, and rejects parameters that need a value model."""
    if source == "probe":
        write_random_probe(model, random_pair("qwen2")[0])
    given(value_model=model if source == "probe" else source, gamma="0.9")
    settings = Settings.from_environment()
    assert settings == Settings(model if source == "probe" else None, gamma=0.9)
    assert settings.has_probe == (source == "probe") and not settings.reads_tokens and not settings.reads_images
    params = settings.parse_request({"target_length": 9})
    assert (params.gamma, params.scale) == (0.9, strength)
    with pytest.raises(ValueError, match=message):
        settings.parse_request(request_)
    given(value_head=model)
    with pytest.raises(ValueError, match=f"LENVM_VALUE_HEAD must not be given {of_head}, got '"):
        Settings.from_environment()


# Requests with the maximum number of tokens and one more, and the error.
LIMITS = [({"target_length": 9}, 48, None), ({"token_temperature_scale": {i: 2.0 for i in range(32)}}, 0, None)]
LIMITS += [({"target_length": 9}, 49, "stop_token_ids must have at most 48 tokens together with guidance, got 49")]
LIMITS += [({"token_temperature_scale": {i: 2.0 for i in range(33)}}, 0, "token_temperature_scale .* 32 .*, got 33")]


@pytest.mark.parametrize(("fields", "stops", "message"), [*LIMITS, ({"session_id": "of another"}, 99, None)])
def test_requests_with_too_many_tokens_are_rejected(fields, stops, message):
    """Unguided requests are not limited, because they have no row of the device table."""
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        Settings(None).parse_request(fields, range(stops))


def test_text_breaks_of_engine_tokenizer(tmp_path, caplog):
    """None, with a warning, if the engine's tokenizer does not load."""
    path = save_checkpoint(tmp_path, seed=0, words=["<unk>", "<eos>", "<pad>", "a", "b.", "c\n"])
    assert load_text_breaks(path, 8).tolist() == [0, 0, 0, 0, 2, 65, 0, 0]
    assert load_text_breaks(None, 6) is None and not caplog.records
    assert load_text_breaks(str(tmp_path / "nowhere"), 6) is None
    assert "outputs may end within sentences: the tokenizer" in caplog.text and "nowhere" in caplog.text


def test_engine_tokenizer_is_loaded_by_the_engine(model, tmp_path):
    """It is loaded once. transformers loads the value model's tokenizer."""
    path, loaded = save_checkpoint(tmp_path / "words", seed=0, words=["<think>", "</think>"]), []
    tokenizers = [AutoTokenizer.from_pretrained(path)] * 3 + [SimpleNamespace(get_vocab=dict)]
    for i, tokenizer in enumerate(tokenizers):
        load_with(f"engine/{i}", lambda i=i, tokenizer=tokenizer: loaded.append(i) or tokenizer)
    assert Settings.current("engine/0").thoughts.ends == ((1,),)
    assert load_text_breaks("engine/1", 2) is None
    check_vocabulary(path, 2, 3, "engine/2")
    with pytest.raises(ValueError, match=r"LENVM_VALUE_MODEL must have a tokenizer .* has 2 tokens .* 3, got none in"):
        check_vocabulary(model, 2, 3, "engine/2")
    with pytest.raises(ValueError, match=r"LENVM_VALUE_MODEL must share .* tokens differ, .* \(ids None and \d+\)"):
        check_vocabulary(path, 2, 3, "engine/3")
    assert loaded == [0, 1, 2, 3]


# Tokenizers of the setting, the engine and the value model, named by the id that ends a thought ("none": no thoughts),
# and the expected id.
TOKENIZERS = [("7", "8", "9", 7), (None, "8", "9", 8), (None, None, "9", 9), (None, None, "none", None)]


@pytest.mark.parametrize(("setting", "engine", "value_model", "end"), [*TOKENIZERS, (None, None, None, None)])
def test_source_of_thought_marks(model, given, tmp_path, setting, engine, value_model, end):
    """The tokenizer is only loaded if a request needs it, because loading takes seconds."""

    def path_of(name):
        words = [f"w{i}" for i in range(20)]
        if name not in (None, "none"):
            words[int(name)] = "</think>"
        return name and save_checkpoint(tmp_path / name, seed=0, words=words)

    given(tokenizer=path_of(setting) or "", value_model=path_of(value_model) or model)
    engine = path_of(engine)
    settings = Settings.current(engine)
    assert settings is Settings.current(engine)
    settings.parse_request({"value_mode": "centered_exp", "value_scale": 9, "thinking_budget": None})
    assert "thoughts" not in vars(settings)
    message = "thinking_budget needs end_token_ids: no token is known"
    with pytest.raises(ValueError, match=message) if end is None else nullcontext():
        assert settings.parse_request({"thinking_budget": 9}).end_token_ids == ((end,),)
    assert settings.parse_request({"thinking_budget": 9, "end_token_ids": [3, 4]}).end_token_ids == ((3,), (4,))
    assert not settings.parse_request({"target_length": 9}).end_token_ids
    # Without marks of thoughts, only the engine applies its budget.
    params = settings.parse_request({"target_length": 9}, engine_budget=30)
    assert bool(params.end_token_ids) == (end is not None)


LOW = {"thinking_budget": 50, "end_token_ids": [7]}
DEFAULTS = {"soft_max_tokens": True, "reasoning_effort": {"low": LOW, "high": {"target_length": 300}}}
DEFAULTS["verbosity"] = {"low": {"target_length": 20}}
# A request's custom_params, its other parameters, and its target and mode.
DEFAULTED = [
    (None, {}, (None, Mode.UNGUIDED)),  # the default needs max_tokens
    (None, {"max_tokens": 100}, (80, Mode.LE_NEAR)),
    ({"session_id": "of another", "strength": 3}, {"max_tokens": 100}, (80, Mode.LE_NEAR)),
    ({"lenvm": {}}, {"max_tokens": 100}, (None, Mode.UNGUIDED)),
    ({"target_length": 30}, {"max_tokens": 100}, (30, Mode.NEAR)),
    ({"target_length": 300}, {"max_tokens": 100}, (300, Mode.NEAR)),
    ({"lenvm_selected": {"reasoning_effort": "low"}}, {"max_tokens": 100}, (50, Mode.LE_NEAR)),
    ({"lenvm_selected": {"reasoning_effort": "medium"}}, {"max_tokens": 100}, (80, Mode.LE_NEAR)),
    ({"lenvm_selected": {"reasoning_effort": "high"}}, {"max_tokens": 1000}, (300, Mode.NEAR)),
    ({"lenvm_selected": {"reasoning_effort": "high"}, "target_length": 30}, {"max_tokens": 100}, (30, Mode.NEAR)),
    ({"lenvm_selected": '{"verbosity": "low"}'}, {"max_tokens": 100}, (20, Mode.NEAR)),
    ({"lenvm_selected": {"reasoning_effort": "high", "verbosity": "low"}}, {"max_tokens": 100}, (20, Mode.NEAR)),
    (None, {"max_tokens": 100, "stop_token_ids": range(49)}, (None, Mode.UNGUIDED)),
    # With a schema, a target is an upper limit.
    ({"target_length": 30}, {"has_schema": True}, (30, Mode.LE_NEAR)),
    ({"target_length": 30, "value_constraint": "near"}, {"has_schema": True}, (30, Mode.NEAR)),
    ({"value_mode": "exp", "value_scale": 2}, {"has_schema": True}, (None, Mode.EXP)),
]


@pytest.mark.parametrize(("custom_params", "other", "expected"), DEFAULTED)
def test_defaults_of_requests_without_parameters(model, given, custom_params, other, expected):
    given({"defaults": DEFAULTS}, value_model=model)
    params = Settings.current().parse_request(custom_params, **other)
    assert (params.target_length, params.mode) == expected
    assert params.hard_limit == (63 if expected[0] == 50 else None)


# Marks of the engine's parser, the engine's budget, parameters, and the expected ends and budget.
PARSERS = [
    (None, None, {"thinking_budget": 9}, (((1,),), ((0,),), 9)),
    (("<a>", "</a>"), None, {"thinking_budget": 9}, (((3,),), ((2,),), 9)),
    (("<a>", "</a>"), 30, None, (((3,),), ((2,),), 30)),
    (None, 30, {"target_length": 5}, (((1,),), ((0,),), 30)),
    (None, 30, {"thinking_budget": 9}, (((1,),), ((0,),), 9)),
    (ValueError("no marks"), 30, None, (((1,),), ((0,),), 30)),
    (None, 30, {"lenvm": {}}, ((), (), None)),
    (None, 30, {"end_token_ids": [2], "target_length": 5}, (((2,),), (), 5)),
    (None, 30, {"target_length": 5, "landing": [2]}, ((), ((1,),), 5)),
]


@pytest.mark.parametrize(("marks", "engine_budget", "custom_params", "expected"), PARSERS)
def test_marks_and_budgets_of_an_engine(given, tmp_path, marks, engine_budget, custom_params, expected):
    def read(tokenizer):
        if isinstance(marks, ValueError):
            raise marks
        return marks

    path = save_checkpoint(tmp_path / "words", seed=0, words=["<think>", "</think>", "<a>", "</a>"])
    load_with(str(tmp_path), lambda: AutoTokenizer.from_pretrained(path), read)
    params = Settings.current(str(tmp_path)).parse_request(custom_params, engine_budget=engine_budget)
    assert (params.end_token_ids, params.start_token_ids, params.target_length) == expected
