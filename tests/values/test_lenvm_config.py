"""``lenvm_config.json``, and the value logits of heads trained to predict lengths."""

import json
import math
from dataclasses import replace

import pytest
import torch

from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.values import LenVMConfig, ValueModel
from tests.helpers.models import random_pair, value_logits
from tests.helpers.value_requests import Requests

FORMS = {
    "softplus": LenVMConfig(gamma=0.99, target_form="length", length_normalizer=100.0),
    "sigmoid": LenVMConfig(gamma=0.9998, target_form="length", length_normalizer=4096.0, length_activation="sigmoid"),
    "log_length": LenVMConfig(gamma=0.9, target_form="log_length"),
}


def trained_lengths(config, outputs):
    """Lengths as decoded in the training's evaluation, in fp64."""
    x = outputs.double()
    if config.target_form == "log_length":
        return torch.expm1(torch.nn.functional.softplus(x))
    activation = {"softplus": torch.nn.functional.softplus, "sigmoid": torch.sigmoid}[config.length_activation]
    return activation(x) * config.length_normalizer


def test_written_fields_round_trip(tmp_path):
    strong = LenVMConfig(strength=8.5), replace(FORMS["softplus"], strength=0.0)
    for config in (LenVMConfig(), LenVMConfig(gamma=0.9), *FORMS.values(), *strong):
        config.write(tmp_path)
        assert LenVMConfig.read(tmp_path) == LenVMConfig.read(str(tmp_path / "model.gguf")) == config
        assert LenVMConfig.read(tmp_path, gamma=0.95).gamma == 0.95
        assert LenVMConfig.read(tmp_path, gamma=0.95).target_form == config.target_form


def test_defaults_without_a_file(tmp_path):
    assert LenVMConfig.read(tmp_path) == LenVMConfig() == LenVMConfig(None, "discounted_return", 1.0, "softplus")
    assert LenVMConfig.read(tmp_path, gamma=0.95) == LenVMConfig(gamma=0.95)
    assert LenVMConfig().nats_per_token == -math.log(0.997)


FILE, LENGTH = "lenvm_config.json", {"target_form": "length"}
REJECTED = [
    ("{", r"lenvm_config.json must be a JSON file: "),
    ([0.9], r"lenvm_config.json must hold a JSON object of fields, got list"),
    ({"gama": 0.9}, r"gama in .*lenvm_config.json is not a field; accepted are gamma, target_form"),
    ({"lam": 1}, "lam in .* is not a field; accepted are gamma, target_form, length_normalizer, length_activation, "),
    *(({"gamma": x}, f"{FILE}: gamma must be a number > 0 and < 1, got {x!r}") for x in (1, 0, math.nan, "0.9")),
    *(({"strength": x}, f"strength must be a finite number >= 0, got {x!r}") for x in (-1, math.inf, "5")),
    ({"target_form": "value"}, r"target_form must be one of discounted_return, length, log_length, got 'value'"),
    ({"target_form": ["length"]}, r"target_form must be one of .*, got \['length'\]"),
    *((LENGTH | {"length_normalizer": x}, f"length_normalizer must be a finite number > 0, got {x!r}")
      for x in (0, math.inf, True)),
    (LENGTH | {"length_activation": "exp"}, r"length_activation must be one of softplus, sigmoid, got 'exp'"),
    ({"length_normalizer": 2}, r"length_normalizer must be 1.0 or absent unless target_form is length, got 2 with"),
    ({"target_form": "log_length", "length_activation": "sigmoid"},
     "length_activation must be softplus or absent unless target_form is length, got 'sigmoid' with log_length"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REJECTED)
def test_bad_files_are_named(tmp_path, content, message):
    (tmp_path / "lenvm_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    for read in (LenVMConfig.read, ValueModel.from_pretrained):  # before looking for weights
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.997, 1 - 1e-6])
@pytest.mark.parametrize("form", FORMS)
def test_value_logits_encode_the_trained_lengths(form, gamma):
    """Lengths from 1e-9 to a million tokens keep six digits in fp32. NaN and infinite lengths are preserved."""
    config = LenVMConfig(**{**vars(FORMS[form]), "gamma": gamma})
    outputs = torch.linspace(-20, 14, 1001)
    if form == "softplus":
        outputs = torch.cat((outputs, torch.linspace(15, 10_000, 500)))
    z = config.value_logits(outputs)
    assert z.dtype == torch.float32
    lengths = torch.nn.functional.softplus(z.double()) / -math.log(gamma)
    torch.testing.assert_close(lengths, trained_lengths(config, outputs), rtol=5e-6, atol=0)
    assert (z.diff() >= 0).all()
    extreme = config.value_logits(torch.tensor([-200.0, -40.0, -5.0, 2.0, math.nan, math.inf]))
    assert extreme[:4].isfinite().all() and (extreme[:4].diff() > 0).all() and extreme[4].isnan()
    assert extreme[5].isinf() == (form != "sigmoid")


@pytest.fixture(scope="module")
def pair():
    return random_pair("qwen2")


PROMPT, CANDIDATES = [5, 6, 7], [11, 12]


@pytest.mark.parametrize("form", FORMS)
def test_model_trained_on_lengths_returns_value_logits(tmp_path, pair, form):
    """Requests without a gamma have the trained lengths, for any gamma of the model."""
    config = FORMS[form]
    config.write(tmp_path)
    pair[0].save_pretrained(tmp_path)
    outputs = torch.stack([value_logits(*pair, torch.tensor([[*PROMPT, token]]))[0, -1] for token in CANDIDATES])
    for gamma in (None, 0.95):
        value_model = ValueModel.from_pretrained(tmp_path, pair[1], gamma=gamma)
        assert value_model.lenvm_config.gamma == (gamma or config.gamma)
        z = Requests(value_model, rows=1).step([PROMPT], [CANDIDATES], width=4)
        assert z.dtype == torch.float32 and z[0, 2:].eq(0).all()
        params = parse_guidance({"target_length": 9}, gamma=value_model.lenvm_config.gamma)
        table = GuidanceTable.from_params([params], [{0}], "cpu")
        lengths = table.remaining_lengths(torch.zeros(2, dtype=torch.int64), z[0, :2], torch.tensor(CANDIDATES))
        torch.testing.assert_close(lengths.double(), trained_lengths(config, outputs), rtol=1e-4, atol=0)


def test_transformers_requests_get_the_defaults_of_the_value_model(pair):
    own = {"target_length": 9, "gamma": 0.8, "strength": 2}
    for defaults in ({"gamma": 0.9, "strength": 8.5}, {"gamma": 0.9}):
        value_model = ValueModel.from_causal_lm(*pair, lenvm_config=LenVMConfig(**defaults))
        requests, options = [{"target_length": 9}, own, parse_guidance(own)], dict(max_new_tokens=9)
        processor = LenVMLogitsProcessor(pair[0], value_model, requests, torch.ones(3, 4), **options)
        assert processor.params == [parse_guidance(x) for x in ({"target_length": 9} | defaults, own, own)]
