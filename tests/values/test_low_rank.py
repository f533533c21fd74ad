"""Low-rank adapters of a value model's backbone, written by PEFT, are merged as in PEFT."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lenvm_kernels.loading import models as demo_models
from lenvm_kernels.values import LenVMConfig, ValueModel
from lenvm_kernels.values.low_rank import read_adapter
from tests.helpers.models import change_checkpoint, random_head, random_pair, save_checkpoint

EVERY_MATRIX = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "plain": dict(r=3, lora_alpha=5, target_modules=EVERY_MATRIX),
    "of one layer": dict(r=2, lora_alpha=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
    "scaled": dict(r=4, lora_alpha=3, use_rslora=True, rank_pattern={"up_proj": 6}, target_modules=["up_proj"]),
    "gaussian at first": dict(r=4, lora_alpha=3, init_lora_weights="gaussian", target_modules=["v_proj"]),
    "ranks that differ": dict(r=2, lora_alpha=7, rank_pattern={"k_proj": 5}, target_modules=["k_proj", "o_proj"]),
    "orthogonal at first": dict(r=4, lora_alpha=3, init_lora_weights="orthogonal", target_modules=["q_proj"]),
    "minor components": dict(r=3, lora_alpha=2, init_lora_weights="mica", target_modules=["up_proj"]),
    "a tensor trained whole": dict(r=2, lora_alpha=4, target_modules=["gate_proj"], modules_to_save=["norm"]),
}


def adapted(model, folder, seed=3, **config):
    """``model`` merged by PEFT with a random adapter, which PEFT saves in ``folder``."""
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


def assert_same(got, expected):
    """Compare weights of two value models with fp32 sums in different orders, or rounded once to bf16."""
    rtol = 1e-5 if expected.dtype == torch.float32 else 2**-7
    for one, other in zip(got.layers, expected.layers, strict=True):
        for x, y in zip(one, other, strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                torch.testing.assert_close(x, y, rtol=rtol, atol=1e-6)
    for x, y in zip((got.embedding, *got.head), (expected.embedding, *expected.head), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_adapter_beside_the_weights(architecture, variant, tmp_path):
    model, head = random_pair(architecture)
    model.save_pretrained(tmp_path)
    save_file(head, tmp_path / "value_head.safetensors")
    plain = ValueModel.from_pretrained(tmp_path)
    expected = ValueModel.from_causal_lm(adapted(model, tmp_path, **variant), head)
    with pytest.raises(AssertionError):
        assert_same(plain, expected)
    assert_same(ValueModel.from_pretrained(tmp_path), expected)


def test_adapter_passed_as_a_directory(tmp_path):
    """The passed adapter replaces the adapter in the directory, and does not change a loaded model."""
    model, head = random_pair("llama")
    model.save_pretrained(tmp_path / "model")
    adapted(model, tmp_path / "model", **VARIANTS["scaled"])
    expected = ValueModel.from_causal_lm(adapted(model, tmp_path / "adapter", **VARIANTS["plain"]), head)
    before = copy.deepcopy(model.state_dict())
    assert_same(ValueModel.from_pretrained(tmp_path / "model", head, adapter=tmp_path / "adapter"), expected)
    assert_same(ValueModel.from_causal_lm(model, head, adapter=tmp_path / "adapter"), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_value_model_of_the_demo(tmp_path, monkeypatch):
    """It has the shipped adapter, and shares the other weights with the demo's base model."""
    base, head = Path(save_checkpoint(tmp_path / "base", seed=0, layers=2)), random_head()
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = ValueModel.from_causal_lm(adapted(model, tmp_path / "value", **VARIANTS["plain"]), head)
    save_file(head, tmp_path / "value" / "value_head.safetensors")
    LenVMConfig(gamma=0.9).write(tmp_path / "value")
    monkeypatch.setattr(demo_models, "model_path", lambda: base)
    monkeypatch.setattr(demo_models, "VALUE", tmp_path / "value")
    options = dict(device="cpu", dtype=torch.float32)
    both = demo_models.Models.load("demo", "demo", gamma=0.8, **options)
    assert_same(both.value_model, expected)
    assert both.value_model.embedding.data_ptr() == both.model.get_input_embeddings().weight.data_ptr()
    for file in base.glob("token*"):
        file.unlink()
    alone, tokenizer = demo_models.load_value_model("demo", gamma=None, **options)
    assert_same(alone, expected)
    assert (both.value_model.lenvm_config.gamma, alone.lenvm_config.gamma, tokenizer) == (0.8, 0.9, None)


def test_head_of_an_adapter(tmp_path):
    """``value_head.safetensors`` in the adapter's directory precedes the head of the base model without adapter."""
    (model, head), other, base = random_pair("llama"), random_head(seed=8), tmp_path / "base"
    adapted(model, tmp_path, **VARIANTS["plain"])
    save_file(head, tmp_path / "value_head.safetensors")
    model.save_pretrained(base)
    save_file(other, base / "value_head.safetensors")
    for found, expected in (
        (ValueModel.from_causal_lm(model, adapter=tmp_path), head),
        (ValueModel.from_causal_lm(model, other, adapter=tmp_path), other),
        (ValueModel.from_pretrained(base, adapter=tmp_path), head),
    ):
        assert all(map(torch.equal, found.head, ValueModel.from_causal_lm(model, expected).head))


def test_merged_weights_are_rounded_once(tmp_path):
    """In a bf16 model, a small update is not lost by rounding before the sum."""
    model, head = random_pair("llama")
    model = model.bfloat16()
    adapted(model.float(), tmp_path, **VARIANTS["plain"])
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = model.state_dict()[name].bfloat16()
    expected = (weight.float() + read_adapter(tmp_path)[0][name]).bfloat16()
    got = ValueModel.from_causal_lm(model.bfloat16(), head, adapter=tmp_path).layers[1].o
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)


PREFIX = "base_model.model.model"


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(part):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def narrowed(end, columns):
    return lambda tensors: {name: x[:, :columns] if name.endswith(end) else x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type in .* must be 'LORA', got 'LOHA'"),
        ({"use_dora": True}, "use_dora in .* must be False, got True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out in .* must be False, got True"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern in .* must be {}, got {'q_proj': 2}"),
        ({"init_lora_weights": "pissa_niter_4"}, "must be True or False or 'gaussian' or .*, got 'pissa_niter_4'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights in .*, got 'lora_ga'"),
        ({"alora_invocation_tokens": [5, 7]}, r"alora_invocation_tokens in .* must be absent, got \[5, 7\]"),
        ({"lora_alpha": "8"}, "lora_alpha in .* must be a number, got '8'"),
        (renamed("layers.1", "layers.7"), r"adds \[48, 80\] to model.layers.7.mlp.down_proj.weight, .* has none"),
        (without("layers.1.mlp.up_proj.lora_B"), r"layers.1.mlp.up_proj.lora_A.* got \[3, 48\] and none"),
        (without("layers.0.self_attn.q_proj.lora_A"), r"layers.0.self_attn.q_proj.lora_B.* got none and \[48, 3\]"),
        (renamed("lora_B.weight", "lora_embedding_B"), r"layers.0.mlp.down_proj.* got \[3, 80\] and none"),
        (narrowed("lora_B.weight", 2), r"lora_A.weight \[r, in\] and .*, got \[3, 80\] and \[48, 2\]"),
        (narrowed("q_proj.lora_A.weight", 40), r"adds \[48, 40\] to model.layers.0.self_attn.q_proj.* one \[48, 48\]"),
        (lambda x: x | {f"{PREFIX}.extra.weight": torch.zeros(2)}, "unexpected .*extra.weight"),
        (lambda x: x | {f"{PREFIX}.up_proj.lora_magnitude": torch.zeros(2)}, "magnitude in .* form a pair"),
        ("adapter_config.json", "adapter_config.json is missing"),
        ("adapter_model.safetensors", "adapter_model.safetensors is missing"),
    ],
)
def test_broken_adapter_is_rejected(change, message, tmp_path):
    model, head = random_pair("llama")
    adapted(model, tmp_path, **VARIANTS["plain"])
    if isinstance(change, str):
        (tmp_path / change).unlink()
    else:
        change_checkpoint(tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors", change)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ValueModel.from_causal_lm(model, head, adapter=tmp_path)
