"""Checkpoints of value models: accepted names of tensors, and rejected checkpoints."""

import copy
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lenvm_kernels.loading.models import locate
from lenvm_kernels.values import LenVMConfig, ValueModel, ValueModelConfig
from lenvm_kernels.values.checkpoint import local_path
from tests.helpers.models import (
    ARCHITECTURES,
    TINY,
    VOCAB,
    change_checkpoint,
    random_head,
    random_model,
    random_pair,
    value_model_of,
)
from tests.helpers.value_requests import Requests, random_tokens


def check_checkpoint(path, model, head, head_argument=None, **options):
    value_model = ValueModel.from_pretrained(path, head_argument, **options)
    requests = Requests(value_model, rows=2)
    candidates = [[1, 2, 3], [4]]
    requests.check(requests.step([random_tokens(40, seed=1), [5]], candidates), candidates, model, head)
    return value_model


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**TINY, rope_scaling={"rope_type": "linear", "factor": 4.0})),
        (LlamaForCausalLM, LlamaConfig(**TINY, rope_scaling=LLAMA3)),
        (LlamaForCausalLM, LlamaConfig(**TINY, rope_scaling=YARN)),
        (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, head_dim=8)),
        (Qwen3ForCausalLM, Qwen3Config(**TINY, attention_bias=True, head_dim=8)),
        (Qwen2ForCausalLM, Qwen2Config(**{**TINY, "num_key_value_heads": 4}, rope_theta=1e6)),
    ],
    ids=["linear", "llama3", "yarn", "llama-biases", "qwen3-biases", "qwen2-all-heads"],
)
def test_variants_of_architectures(tmp_path, model_class, config):
    model, head = random_model(model_class, config), random_head()
    model.save_pretrained(tmp_path)
    value_model = check_checkpoint(tmp_path, model, head, head)
    if config.rope_parameters["rope_type"] != "default":
        plain = ValueModelConfig.from_hf(LlamaConfig(**TINY))
        assert value_model.config.rope_inv_freq != plain.rope_inv_freq


# Heads in a checkpoint (seeds by file), the argument ``head``, and the seed of the expected head, or an error.
HEADS = [
    ({"value_head.safetensors": 1}, None, 1),
    ({"value_head.bin": 1}, None, 1),
    ({"length-head.bin": 1}, None, 1),
    ({"length-head.safetensors": 1}, None, 1),
    ({"value_head.safetensors": 1, "length-head.bin": 2}, None, 1),
    ({"value_head.bin": 1, "another.safetensors": 2}, None, 1),
    ({"length-head.bin": 1, "another.safetensors": 2}, None, r"must have one .*, got another\.safetensors, length-"),
    ({"model.safetensors": 1, "value_head.safetensors": 2}, None, 1),
    ({"model.safetensors": 2, "value_head.safetensors": 3, "given.bin": 1}, "given.bin", 1),
    ({"model.safetensors": 2}, random_head(1), 1),
    ({}, None, r"missing v_head\.fc\.weight, .*head="),
    ({}, "nowhere.safetensors", r"nowhere\.safetensors must be an existing \.safetensors or \.bin file"),
    ({}, {**random_head(), "v_head.extra": torch.zeros(1)}, r"unexpected v_head\.extra"),
    ({}, "model.safetensors", r"head must hold only v_head\.\* tensors, got .*\(27 in all\)"),
    ({}, "training_args.bin", r"training_args\.bin must be a dictionary of tensors by name"),
    ({"value_head.pt": 1}, "value_head.pt", r"value_head\.pt must be an existing \.safetensors or \.bin file"),
]


@pytest.mark.parametrize(("files", "given", "used"), HEADS)
def test_heads(tmp_path, files, given, used):
    """Heads are found under any file name, next to files without a head."""
    random_model(*ARCHITECTURES["qwen2"]).save_pretrained(tmp_path)
    torch.save({"v_head.fc.bias": Path("x")}, tmp_path / "training_args.bin")  # torch.load rejects it with weights_only
    torch.save({"v_head.fc.bias": torch.ones(1), "step": torch.ones(1)}, tmp_path / "a.bin")
    save_file({"v_heads": torch.ones(1)}, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_text("cut off")
    for name, seed in files.items():
        others = load_file(tmp_path / name) if name == "model.safetensors" else {}
        save = save_file if name.endswith(".safetensors") else torch.save
        save({**others, **random_head(seed)}, tmp_path / name)
    given = tmp_path / given if isinstance(given, str) else given
    if isinstance(used, str):
        with pytest.raises((ValueError, FileNotFoundError), match=used):
            ValueModel.from_pretrained(tmp_path, given)
    else:
        found = ValueModel.from_pretrained(tmp_path, given).head[1:]
        assert all(map(torch.equal, found, list(random_head(used).values())[1:]))


def test_shards_that_include_the_head(tmp_path):
    """Several shards with an index; one contains the head."""
    model, head = random_pair("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    save_file(head, tmp_path / "head-shard.safetensors")
    index["weight_map"] |= dict.fromkeys(head, "head-shard.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_checkpoint(tmp_path, model, head)


NAMINGS = {
    "transformers": lambda name: name,
    "none": lambda name: name.removeprefix("model."),
    "pretrained": lambda name: f"pretrained_model.{name}",
    "text": lambda name: name.replace("model.", "model.language_model.", 1),
    "pretrained-text": lambda name: "pretrained_model." + name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
@pytest.mark.parametrize("kept", [None, "lm_head.weight", "model.embed_tokens.weight"])
def test_names_of_tensors(tmp_path, naming, kept):
    """Prefixes of trainers and multimodal models, rotary buffers of old files, and both names of tied weights."""
    model = random_model(LlamaForCausalLM, LlamaConfig(**{**TINY, "tie_word_embeddings": kept is not None}))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if kept is not None:
        tensors[kept] = tensors.pop("model.embed_tokens.weight")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file({naming(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model, random_head(), random_head())


def test_hugging_face_names_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: tmp_path / "hub" / name)
    assert local_path("owner/lvm-3") == tmp_path / "hub" / "owner/lvm-3"


def test_hugging_face_names_are_found_in_cache(tmp_path, monkeypatch, put_into_cache):
    """Model, adapter and head are in separate repositories. An existing path takes precedence over a name."""
    (model, head), adapted = random_pair("qwen2"), tmp_path / "adapted"
    (tmp_path / "head").mkdir()
    model.save_pretrained(tmp_path / "model")
    save_file(head, tmp_path / "head" / "value_head.safetensors")
    lora = peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(model), lora).save_pretrained(adapted)
    LenVMConfig(gamma=0.75).write(adapted)
    by_path = ValueModel.from_pretrained(tmp_path / "model", head, adapter=adapted)
    config = json.loads((adapted / "adapter_config.json").read_text())
    (adapted / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "owner/model-1.5B"}))
    for name, folder in (("model-1.5B", "model"), ("lora", "adapted"), ("head", "head")):
        put_into_cache(f"owner/{name}", tmp_path / folder)
    alone = ValueModel.from_pretrained("owner/lora", "owner/head")
    beside = ValueModel.from_pretrained("owner/model-1.5B", "owner/head", adapter="owner/lora")
    for found in (alone, beside, ValueModel.from_causal_lm(model, "owner/head", adapter="owner/lora")):
        assert torch.equal(found.layers[0].down, by_path.layers[0].down)
        assert torch.equal(found.head[0], by_path.head[0])
    assert alone.lenvm_config.gamma == beside.lenvm_config.gamma == LenVMConfig.read("owner/lora").gamma == 0.75

    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "model", "owner/model-1.5B")
    assert local_path("owner/model-1.5B") == Path("owner/model-1.5B")
    for path in ("owner/model.gguf", "a/b/c", "model-2", "../owner/model", tmp_path / "nowhere"):
        assert local_path(path) == Path(path)
    with pytest.raises(FileNotFoundError, match=rf"^owner/lvm-2 is not .*{tmp_path}/hub, nor could it be downloaded: "):
        ValueModel.from_pretrained("owner/lvm-2")
    with pytest.raises(FileNotFoundError, match=r"an adapter must have adapter_config\.json"):
        ValueModel.from_pretrained(tmp_path / "model", adapter=tmp_path / "nowhere")
    (adapted / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/no/such"}))
    with pytest.raises(FileNotFoundError, match=r"base_model_name_or_path in .*adapted/.* got '/no/such'"):
        ValueModel.from_pretrained(adapted)


def test_from_causal_lm_shares_memory():
    model, head = random_pair("llama")
    value_model = ValueModel.from_causal_lm(model, head)
    layer, values = model.model.layers[1], value_model.layers[1]
    shared = [model.model.embed_tokens, layer.self_attn.o_proj, layer.mlp.down_proj]
    for mine, theirs in zip([value_model.embedding, values.o, values.down], shared, strict=True):
        assert mine.data_ptr() == theirs.weight.data_ptr() and not mine.requires_grad


def test_weights_are_rounded_once():
    """From fp32 to bf16: norms are folded before rounding, and vectors of the head stay fp32."""
    model, head = random_pair("qwen3")
    value_model = value_model_of(model, head, dtype=torch.bfloat16)
    attention, mlp, layer = model.model.layers[1].self_attn, model.model.layers[1].mlp, value_model.layers[1]
    qkv = torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert torch.equal(layer.qkv, (qkv * model.model.layers[1].input_layernorm.weight).bfloat16())
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(layer.gate_up, (gate_up * model.model.layers[1].post_attention_layernorm.weight).bfloat16())
    assert layer.qk_norm.shape == (6, 16)
    for row, weight in enumerate([attention.q_norm.weight] * 4 + [attention.k_norm.weight] * 2):
        assert torch.equal(layer.qk_norm[row], weight.bfloat16())
    assert torch.equal(value_model.head[0], (head["v_head.fc.weight"] * model.model.norm.weight).bfloat16())
    for mine, name in zip(value_model.head[1:], ("fc.bias", "summary.weight", "summary.bias"), strict=True):
        assert torch.equal(mine, head[f"v_head.{name}"])


def cut(rows, dtype):
    """A change of the shape or dtype of a matrix."""
    name = "model.layers.0.mlp.up_proj.weight"
    return lambda tensors: tensors | {name: tensors[name][:rows].to(dtype)}


def without(*parts):
    return lambda tensors: {name: x for name, x in tensors.items() if not any(part in name for part in parts)}


NORM, Q_NORM = "model.norm.weight", "model.layers.1.self_attn.q_norm.weight"
ODD = ("model.layers.7.odd", "visual.patch")


def of_rope(**rope):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | rope}


ARCHITECTURES_ARE = "model_type .*be one of qwen2, qwen3, llama, qwen2_5_vl, got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors | {f"pretrained_model.{NORM}": tensors[NORM].clone()},
         r"each tensor once, got (pretrained_model\.)?model\.norm\.weight and another"),
        (without(NORM, Q_NORM), rf"missing {Q_NORM}, {NORM}$"),
        (lambda tensors: tensors | {name: torch.zeros(1) for name in ODD}, f"unexpected {ODD[0]}, {ODD[1]}"),
        (without("embed_tokens"), r"missing model\.embed_tokens\.weight$"),
        (without("layers.1"), r"missing model\.layers\.1\.input_layernorm\.weight, .* \(11 in all\)$"),
        (cut(79, torch.float32), r"layers\.0\.mlp\.up_proj\.weight must be .* \[80, 48\], got float32 \[79, 48\]"),
        (cut(80, torch.int8), r"layers\.0\.mlp\.up_proj\.weight must be .* \[80, 48\], got int8 \[80, 48\]"),
        ({"vocab_size": VOCAB + 7}, r"embed_tokens\.weight must be .* \[104, 48\], got float32 \[97, 48\]"),
        ({"model_type": "no_such_model"}, f"{ARCHITECTURES_ARE} 'no_such_model'"),
        ({"model_type": "mistral"}, f"{ARCHITECTURES_ARE} 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
         r"layer_types must all be 'full_attention' .* got \['sliding_attention'\]"),
        (of_rope(rope_type="dynamic", factor=2.0), "rope_type .*got 'dynamic'"),
        (of_rope(partial_rotary_factor=0.5), "partial_rotary_factor must be 1 or absent, got 0.5"),
    ],
)  # fmt: skip
def test_inconsistent_checkpoints_are_rejected(tmp_path, change, message):
    random_model(*ARCHITECTURES["qwen3"]).save_pretrained(tmp_path)
    change_checkpoint(tmp_path / "config.json", tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        ValueModel.from_pretrained(tmp_path, random_head())


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "", r"must be a directory with config\.json"),
        ({}, "model.gguf", r"must be an existing \.gguf file"),
        ({"config.json": '{"model_type": "qwen2"}', "pytorch_model.bin": ""}, "",
         r"must hold model\.safetensors .* found pytorch_model\.bin; pickled"),
        ({"config.json": '{"model_type": "qwen2"}', "model.safetensors.index.json": '{"weight_map": {"a": "b.bin"}}'},
         "", r"b\.bin must be an existing \.safetensors file"),
    ],
)  # fmt: skip
def test_missing_files_are_named(tmp_path, files, path, message):
    """Pickled weights are never read."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(FileNotFoundError, match=message):
        ValueModel.from_pretrained(tmp_path / path)


def test_unsupported_dtype():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got float64"):
        ValueModel.from_causal_lm(random_model(*ARCHITECTURES["llama"]).double(), random_head())


def test_gguf(tmp_path, monkeypatch):
    """``transformers`` reads a tiny Qwen2, or lacks a package. The demo's tests read a real file."""
    pytest.importorskip("gguf")
    (model, head), path = random_pair("qwen2"), tmp_path / "tiny.gguf"
    read = {(tmp_path, "tiny.gguf"): model}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, gguf_file, dtype: read[path, gguf_file])
    path.touch()
    check_checkpoint(path, model, head, head)
    save_file(head, tmp_path / "value_head.safetensors")
    check_checkpoint(path, model, head)
    (tmp_path / "blob").hardlink_to(path)
    (tmp_path / "linked.gguf").symlink_to(tmp_path / "blob")
    assert locate("--model", str(tmp_path / "linked.gguf")).suffix == ".gguf"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=ImportError("no gguf")))
    with pytest.raises(ImportError, match=r"pip install \"lenvm-kernels\[demo\]\""):
        ValueModel.from_pretrained(path, head)
