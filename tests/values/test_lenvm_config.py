"""``lenvm_config.json``, and the defaults that it gives requests."""

import json
import math

import pytest
import torch

from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.values import LenVMConfig, ValueModel
from tests.helpers.models import VOCAB, random_pair


def test_written_fields_round_trip(tmp_path):
    assert LenVMConfig.read(tmp_path) == LenVMConfig() == LenVMConfig(None, None)
    for config in (LenVMConfig(), LenVMConfig(0.9), LenVMConfig(strength=8.5), LenVMConfig(0.9, 0.0)):
        config.write(tmp_path)
        assert LenVMConfig.read(tmp_path) == LenVMConfig.read(str(tmp_path / "model.gguf")) == config
        assert LenVMConfig.read(tmp_path, gamma=0.95) == LenVMConfig(0.95, config.strength)


def test_lengths_of_value_logits():
    z = torch.tensor([0.0, math.log(math.e - 1)])
    torch.testing.assert_close(LenVMConfig(0.5).lengths(z), torch.tensor([1.0, 1 / math.log(2)]))
    torch.testing.assert_close(LenVMConfig().lengths(z[1:]), torch.tensor([-1 / math.log(0.997)]))


REJECTED = [
    ("{", r"lenvm_config.json must be a JSON file: "),
    ([0.9], r"lenvm_config.json must hold a JSON object of fields, got list"),
    ({"gama": 0.9}, r"gama in .*lenvm_config.json is not a field; accepted are gamma, strength"),
    *(({"gamma": x}, f"gamma must be a finite number > 0 and < 1, got {x!r}") for x in (1, 0, math.nan, True)),
    *(({"strength": x}, f"strength must be a finite number >= 0, got {x!r}") for x in (-1, math.inf, "much")),
]


@pytest.mark.parametrize(("content", "message"), REJECTED)
def test_bad_files_are_named(tmp_path, content, message):
    (tmp_path / "lenvm_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    for read in (LenVMConfig.read, ValueModel.from_pretrained):  # before looking for weights
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


NEAR, OWN = {"target_length": 9}, {"target_length": 9, "gamma": 0.8, "strength": 2}


@pytest.mark.parametrize(
    ("config", "requests", "explicit"),
    [
        (LenVMConfig(0.9, 8.5), [NEAR, OWN], [NEAR | {"gamma": 0.9, "strength": 8.5}, OWN]),
        (LenVMConfig(gamma=0.9), [NEAR, parse_guidance(OWN)], [NEAR | {"gamma": 0.9}, OWN]),
    ],
)
def test_transformers_requests_get_the_defaults_of_the_value_model(config, requests, explicit):
    pair = random_pair("qwen2")

    def probs(config, requests):
        value_model = ValueModel.from_causal_lm(*pair, lenvm_config=config)
        ids = torch.tensor([[5, 6, 7, 8]] * 2)
        options = dict(max_new_tokens=4, record=True)
        processor = LenVMLogitsProcessor(pair[0], value_model, requests, torch.ones_like(ids), **options)
        processor(ids, torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)))
        return processor.records[0].probs

    found = probs(config, requests)
    assert torch.equal(found, probs(LenVMConfig(), explicit))
    assert not torch.allclose(found[0], probs(LenVMConfig(), requests)[0])
