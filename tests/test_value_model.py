"""The value model against ``transformers``: tiny random checkpoints, each prefix + candidate a plain full forward."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.models import make_config
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.ragged_linear import choose_tile, num_splits, quantize_weight, ragged_linear
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.reference._common import of_codes, to_codes
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel, ValueModelConfig
from lenvm_kernels.value_model.cache_scales import key_and_value_bounds, scales_of
from tests.helpers.models import (
    ARCHITECTURES,
    TINY,
    VOCAB,
    random_head,
    random_model,
    random_pair,
    tiny_value_model,
    value_logits,
    value_model_of,
)
from tests.helpers.wrong_tensors import assert_refuses

ATOL = 1e-5  # on logits of O(1), fp32 against fp32
ROPE_SCALING = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request, tmp_path_factory):
    """A ``transformers`` model, its head, and the value model loaded from their checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint")
    model, head = random_pair(request.param)
    model.save_pretrained(path)
    save_file(head, path / "value_head.safetensors")
    return model, head, ValueModel.from_pretrained(path)


def expected_values(model, head, tokens):
    """fp32 ``[len(tokens)]``: the value logit at every token."""
    return value_logits(model, head, torch.tensor([tokens]))[0]


def random_tokens(count, seed):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Requests:
    """Requests with scattered pages of a cache, extended by deltas: the host's view of what a batch must mean."""

    def __init__(self, value_model, rows, max_len=64, page_size=1, fill=0.0, cache=None, backend="auto"):
        self.value_model, self.page_size, self.backend = value_model, page_size, backend
        generator = torch.Generator().manual_seed(5)
        pages = -(-max_len // page_size)
        table = torch.randperm((rows + 2) * pages, generator=generator).view(rows + 2, pages).int()
        self.table = table.to(value_model.device)
        self.cache = KVCache.of_slots(value_model, table.numel() * page_size, cache)
        self.cache.keys.fill_(fill)
        self.cache.values.fill_(fill)
        self.table_rows = torch.randperm(rows + 2, generator=generator)[:rows].to(value_model.device)
        self.prefixes = [[] for _ in range(rows)]

    def slot(self, request, position):
        page = self.table[self.table_rows[request], position // self.page_size].item()
        return page * self.page_size + position % self.page_size

    def batch(self, deltas, candidates, width=None, spare_deltas=0, parents=None):
        """The ragged batch of these deltas and candidates, with room for ``spare_deltas`` more delta tokens."""
        width = max(map(len, candidates)) if width is None else width
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=self.value_model.device)  # noqa: E731
        padded = lambda lists: i32([x + [-1] * (width - len(x)) for x in lists]).view(len(lists), width)  # noqa: E731
        lens = [len(delta) for delta in deltas]
        cached = [len(prefix) for prefix in self.prefixes]
        slots = [self.slot(i, cached[i] + j) for i, n in enumerate(lens) for j in range(n)]
        return RaggedBatch.build(
            i32([token for delta in deltas for token in delta] + [VOCAB] * spare_deltas),
            i32(slots + [0] * spare_deltas),
            i32([sum(lens[:i]) for i in range(len(lens))]),
            i32(lens),
            padded(candidates),
            i32([len(tokens) for tokens in candidates]),
            i32(cached),
            self.table,
            self.table_rows,
            candidate_parents=None if parents is None else padded(parents),
            page_size=self.page_size,
            backend=self.backend,
        )

    def step(self, deltas, candidates, **layout):
        z = self.value_model.forward(self.batch(deltas, candidates, **layout), self.cache, backend=self.backend)
        self.append(deltas)
        return z

    def step_rows(self, deltas, candidates, **layout):
        """The candidates' values among those of all rows, and all rows'."""
        batch = self.batch(deltas, candidates, **layout)
        model, row = self.value_model, torch.arange(len(batch.layout.token_ids), device=self.value_model.device)
        hidden, square_sums = model._run_layers(batch, self.cache, None, self.backend)
        live_rows = torch.where(row < batch.layout.q_offsets[-1:], row, -1)
        rows = model._run_head(hidden, square_sums, live_rows, None, self.backend)
        self.append(deltas)
        return torch.where(batch.layout.candidate_rows < 0, 0.0, rows[batch.layout.candidate_rows]), rows

    def append(self, deltas):
        for prefix, delta in zip(self.prefixes, deltas, strict=True):
            prefix += delta

    def check(self, z, candidates, model, head, atol=ATOL):
        """Every candidate's value is that of a full forward over its request's prefix and it; padding is 0."""
        assert z.dtype == torch.float32
        expected = torch.zeros(z.shape)
        for i, (prefix, tokens) in enumerate(zip(self.prefixes, candidates, strict=True)):
            for j, token in enumerate(tokens):
                expected[i, j] = expected_values(model, head, [*prefix, token])[-1]
        torch.testing.assert_close(z.cpu(), expected, rtol=0, atol=atol)


MIXED_PREFIXES = [0, 3, 17, 33, 1, 20]
MIXED_DELTAS = [random_tokens(n, seed=20 + n) for n in (9, 1, 0, 5, 1, 18)]
MIXED_CANDIDATES = [random_tokens(n, seed=50 + n) for n in (3, 8, 4, 0, 1, 7)]


def mixed_requests(value_model, **options):
    """Six requests after a first forward that gave each its prefix."""
    requests = Requests(value_model, len(MIXED_PREFIXES), **options)
    requests.step([random_tokens(n, seed=n) for n in MIXED_PREFIXES], [[] for _ in MIXED_PREFIXES])
    return requests


@pytest.mark.parametrize("page_size", [1, 16])
def test_values_equal_transformers(loaded, page_size):
    model, head, value_model = loaded
    requests = mixed_requests(value_model, page_size=page_size)
    z = requests.step(MIXED_DELTAS, MIXED_CANDIDATES, width=8)
    assert z.shape == (6, 8)
    requests.check(z, MIXED_CANDIDATES, model, head)
    assert 0.3 < z[z != 0].std() < 30  # else 1e-5 would say nothing


def test_delta_values(loaded):
    model, head, value_model = loaded
    requests = mixed_requests(value_model)
    cached = [len(prefix) for prefix in requests.prefixes]
    z, rows = requests.step_rows(MIXED_DELTAS, MIXED_CANDIDATES, spare_deltas=3)
    requests.check(z, MIXED_CANDIDATES, model, head)
    start = 0
    for i, (delta, tokens) in enumerate(zip(MIXED_DELTAS, MIXED_CANDIDATES, strict=True)):
        end = start + len(delta)
        if delta:
            expected = expected_values(model, head, requests.prefixes[i])[cached[i] :]
            torch.testing.assert_close(rows[start:end], expected, rtol=0, atol=ATOL)
        start = end + len(tokens)
        torch.testing.assert_close(rows[end:start], z[i, : len(tokens)], rtol=0, atol=0)
    assert (rows[start:] == 0).all() and len(rows) == sum(map(len, MIXED_DELTAS)) + 3 + 6 * 8


def test_decoding_step_by_step(loaded):
    """Prompts first, then steps of fixed shape that extend each request by one of its own candidates."""
    model, head, value_model = loaded
    requests = Requests(value_model, rows=3, page_size=16)
    deltas = [random_tokens(n, seed=n) for n in (6, 1, 15)]
    shapes = set()
    for step in range(4):
        candidates = [random_tokens(1 + (i + step) % 4, seed=100 * step + i) for i in range(3)]
        shapes.add(len(requests.batch(deltas, candidates, width=4).layout.token_ids) if step else None)
        requests.check(requests.step(deltas, candidates, width=4), candidates, model, head)
        deltas = [[tokens[step % len(tokens)]] for tokens in candidates]
    assert shapes == {None, 3 * (1 + 4)}


def test_slots_that_hold_nothing_do_not_matter(loaded):
    """NaN in every slot that was never written changes nothing."""
    values = [
        mixed_requests(loaded[2], page_size=4, fill=fill).step(MIXED_DELTAS, MIXED_CANDIDATES, spare_deltas=5)
        for fill in (0.0, float("nan"))
    ]
    torch.testing.assert_close(*values, rtol=0, atol=ATOL)


def test_candidates_and_padding_are_not_kept(loaded):
    requests = mixed_requests(loaded[2], page_size=4)
    before = requests.cache.keys.clone()
    batch = requests.batch(MIXED_DELTAS, MIXED_CANDIDATES, spare_deltas=5)
    requests.step(MIXED_DELTAS, MIXED_CANDIDATES, spare_deltas=5)
    changed = (requests.cache.keys != before).any(dim=(0, 2, 3)).nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in batch.layout.slots.tolist() if slot >= 0)
    assert len(changed) == sum(map(len, MIXED_DELTAS))


def test_token_outside_the_vocabulary_harms_only_its_request(loaded):
    model, head, value_model = loaded
    deltas, candidates = [[5, 6], [7, VOCAB + 3], [8, 9]], [[1, VOCAB], [1, 2], [1, 2]]
    requests = Requests(value_model, rows=3)
    z = requests.step(deltas, candidates)
    assert z[0, 1].isnan() and z[1].isnan().all()
    torch.testing.assert_close(z[2, 0], expected_values(model, head, [8, 9, 1])[-1], rtol=0, atol=ATOL)
    z = requests.step([[3], [3], [3]], candidates)
    assert z[1].isnan().all()
    torch.testing.assert_close(z[2, 1], expected_values(model, head, [8, 9, 3, 2])[-1], rtol=0, atol=ATOL)


def check_checkpoint(path, model, head, head_argument=None, **options):
    value_model = ValueModel.from_pretrained(path, head_argument, **options)
    requests = Requests(value_model, rows=2)
    candidates = [[1, 2, 3], [4]]
    requests.check(requests.step([random_tokens(40, seed=1), [5]], candidates), candidates, model, head)
    return value_model


@pytest.mark.parametrize("kind", ROPE_SCALING)
def test_rope_scaling(tmp_path, kind):
    config = LlamaConfig(**TINY, rope_scaling=dict(ROPE_SCALING[kind]))
    model, head = random_model(LlamaForCausalLM, config), random_head()
    model.save_pretrained(tmp_path)
    value_model = check_checkpoint(tmp_path, model, head, head)
    plain = ValueModelConfig.from_hf(LlamaConfig(**TINY))
    assert value_model.config.rope_inv_freq != plain.rope_inv_freq


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, head_dim=8)),
        (Qwen3ForCausalLM, Qwen3Config(**TINY, attention_bias=True, head_dim=8)),
        (Qwen2ForCausalLM, Qwen2Config(**{**TINY, "num_key_value_heads": 4}, rope_theta=1e6)),
    ],
    ids=["llama-biases", "qwen3-biases", "qwen2-all-heads"],
)
def test_variants_of_the_architectures(tmp_path, model_class, config):
    model, head = random_model(model_class, config), random_head()
    model.save_pretrained(tmp_path)
    check_checkpoint(tmp_path, model, head, head)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_are_saved_under_one_of_two_names(tmp_path, kept):
    model, head = random_model(LlamaForCausalLM, LlamaConfig(**{**TINY, "tie_word_embeddings": True})), random_head()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model, head, head)


def save_sharded(model, head, path):
    """Several shards and their index, the head in a shard of its own."""
    model.save_pretrained(path, max_shard_size="60KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    save_file(head, path / "head-shard.safetensors")
    index["weight_map"] |= dict.fromkeys(head, "head-shard.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_with_the_head_among_them(tmp_path):
    model, head = random_pair("qwen2")
    save_sharded(model, head, tmp_path)
    check_checkpoint(tmp_path, model, head)


def test_which_head_wins(tmp_path):
    """The argument over the shards, the shards over the file beside them."""
    model = random_model(*ARCHITECTURES["qwen2"])
    given_head, shard_head, file_head = (random_head(seed) for seed in (11, 12, 13))
    model.save_pretrained(tmp_path)
    save_file(file_head, tmp_path / "value_head.safetensors")
    save_file(given_head, tmp_path / "given.safetensors")
    check_checkpoint(tmp_path, model, file_head)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, **shard_head}, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model, shard_head)
    check_checkpoint(tmp_path, model, given_head, tmp_path / "given.safetensors")
    check_checkpoint(tmp_path, model, given_head, given_head)


def test_backbone_without_the_prefix(tmp_path):
    """The backbone alone saves ``layers.0...`` for ``model.layers.0...``; old Llama files hold rotary buffers."""
    model, head = random_pair("llama")
    model.model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model, head, head)


NAMINGS = {
    "none": lambda name: name.removeprefix("model."),
    "pretrained": lambda name: f"pretrained_model.{name}",
    "text": lambda name: name.replace("model.", "model.language_model.", 1),
    "pretrained-text": lambda name: "pretrained_model." + name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_prefixes_of_names(tmp_path, naming, tied):
    """As trainers and models with further parts name them. Tied weights may be the head's alone."""
    model = random_model(LlamaForCausalLM, LlamaConfig(**{**TINY, "tie_word_embeddings": tied}))
    model.save_pretrained(tmp_path / "plain")
    save_file(random_head(), tmp_path / "plain" / "value_head.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "renamed")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    if tied:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    assert "lm_head.weight" in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file({naming(name): tensor for name, tensor in tensors.items()}, tmp_path / "renamed" / "model.safetensors")
    plain, renamed = (ValueModel.from_pretrained(tmp_path / name) for name in ("plain", "renamed"))
    assert torch.equal(plain.embedding, renamed.embedding)
    assert all(map(torch.equal, plain.head, renamed.head))
    for one, other in zip(plain.layers, renamed.layers, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_tensor_under_two_names_is_refused(checkpoint):
    def change(tensors):
        tensors["pretrained_model.model.norm.weight"] = tensors["model.norm.weight"].clone()

    edit_tensors(checkpoint, change)
    with pytest.raises(ValueError, match=r"each tensor once, got (pretrained_model\.)?model\.norm\.weight and another"):
        ValueModel.from_pretrained(checkpoint)


def test_from_causal_lm_shares_memory():
    model, head = random_pair("llama")
    value_model = ValueModel.from_causal_lm(model, head)
    requests = Requests(value_model, rows=1)
    requests.check(requests.step([[1, 2]], [[3, 4]]), [[3, 4]], model, head)
    layer = model.model.layers[1]
    for mine, theirs in (
        (value_model.embedding, model.model.embed_tokens.weight),
        (value_model.layers[1].o, layer.self_attn.o_proj.weight),
        (value_model.layers[1].down, layer.mlp.down_proj.weight),
    ):
        assert mine.data_ptr() == theirs.data_ptr() and not mine.requires_grad


def test_bfloat16(loaded, tmp_path):
    """Another dtype on request; bf16 rounding through two layers stays far below what a wrong tensor would do."""
    model, head, value_model = loaded
    model.save_pretrained(tmp_path)
    half = ValueModel.from_pretrained(tmp_path, head, dtype=torch.bfloat16)
    z, z_half = (mixed_requests(m).step(MIXED_DELTAS, MIXED_CANDIDATES) for m in (value_model, half))
    assert z_half.dtype == torch.float32 and half.embedding.dtype == torch.bfloat16
    torch.testing.assert_close(z_half, z, rtol=0, atol=0.2)


@pytest.fixture
def checkpoint(tmp_path):
    """A good checkpoint to break."""
    random_model(*ARCHITECTURES["qwen3"]).save_pretrained(tmp_path)
    save_file(random_head(), tmp_path / "value_head.safetensors")
    return tmp_path


def edit_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_missing_and_unexpected_tensors_are_named(checkpoint):
    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.norm.weight"]
        tensors["model.layers.7.odd"] = torch.zeros(1)
        tensors["visual.patch.weight"] = torch.zeros(1)

    edit_tensors(checkpoint, change)
    with pytest.raises(ValueError) as error:
        ValueModel.from_pretrained(checkpoint)
    assert "missing model.layers.1.self_attn.q_norm.weight, model.norm.weight;" in str(error.value)
    assert "unexpected model.layers.7.odd, visual.patch.weight" in str(error.value)


def test_many_missing_tensors_are_counted(checkpoint):
    edit_tensors(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.input_layernorm\.weight, .* \(11 in all\)$"):
        ValueModel.from_pretrained(checkpoint)


def test_wrong_shape_or_dtype_is_named(checkpoint):
    good = load_file(checkpoint / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    for bad, got in ((good[:-1].clone(), r"float32 \[79, 48\]"), (good.to(torch.int8), r"int8 \[80, 48\]")):
        edit_tensors(checkpoint, lambda tensors, bad=bad: tensors.update({"model.layers.0.mlp.up_proj.weight": bad}))
        with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.up_proj\.weight must be .* \[80, 48\], got {got}"):
            ValueModel.from_pretrained(checkpoint)


def test_vocabulary_that_does_not_match_the_embedding(checkpoint):
    edit_config(checkpoint, vocab_size=VOCAB + 7)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight must be .* \[104, 48\], got float32 \[97, 48\]"):
        ValueModel.from_pretrained(checkpoint)


def test_missing_and_broken_heads(checkpoint):
    (checkpoint / "value_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing v_head\.fc\.weight, .*head="):
        ValueModel.from_pretrained(checkpoint)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors must be an existing \.safetensors file"):
        ValueModel.from_pretrained(checkpoint, checkpoint / "nowhere.safetensors")
    with pytest.raises(ValueError, match=r"unexpected v_head\.extra"):
        ValueModel.from_pretrained(checkpoint, {**random_head(), "v_head.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"head must hold only v_head\.\* tensors, got .*\(25 in all\)"):
        ValueModel.from_pretrained(checkpoint, checkpoint / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "value_head.pt"])
def test_pickles_are_refused(checkpoint, name):
    (checkpoint / "model.safetensors").unlink()
    torch.save({}, checkpoint / name)
    with pytest.raises(FileNotFoundError, match=rf"must hold model\.safetensors .* found {name}; pickled"):
        ValueModel.from_pretrained(checkpoint)
    with pytest.raises(FileNotFoundError, match=rf"{name} must be an existing \.safetensors file"):
        ValueModel.from_causal_lm(random_model(*ARCHITECTURES["qwen3"]), checkpoint / name)


def test_an_index_that_names_a_pickle_is_refused(checkpoint):
    torch.save({}, checkpoint / "model.bin")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.bin"}}))
    with pytest.raises(FileNotFoundError, match=r"model\.bin must be an existing \.safetensors file"):
        ValueModel.from_pretrained(checkpoint)


def test_directory_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be a directory with config\.json"):
        ValueModel.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must be an existing \.gguf file"):
        ValueModel.from_pretrained(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type .* one of qwen2, qwen3, llama, qwen2_5_vl, got 'mistral'"),
        ({"model_type": "no_such_model"}, "model_type .* one of qwen2, qwen3, llama, qwen2_5_vl, got 'no_such_model'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
            r"layer_types must all be 'full_attention' .* got \['sliding_attention'\]",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type .*got 'dynamic'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type .*got 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1 or absent, got 0.5",
        ),
    ],
)
def test_unsupported_configurations(checkpoint, changes, message):
    if "rope_scaling" in changes:  # the layout of transformers 4.57
        config = json.loads((checkpoint / "config.json").read_text())
        config.pop("rope_parameters", None)
        (checkpoint / "config.json").write_text(json.dumps(config))
    edit_config(checkpoint, **changes)
    with pytest.raises(ValueError, match=message):
        ValueModel.from_pretrained(checkpoint)


def test_unsupported_models_and_dtypes():
    with pytest.raises(ValueError, match="model_type must be one of"):
        ValueModel.from_causal_lm(MistralForCausalLM(MistralConfig(**TINY)), random_head())
    model = random_model(*ARCHITECTURES["llama"])
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got float64"):
        ValueModel.from_causal_lm(model.double(), random_head())


# --- candidate trees, and what a batch refuses ---


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_candidate_trees_equal_transformers(trees_loaded, rows, seed):
    """A candidate's value is that of the sequence prefix, delta, its ancestors from the root down, itself."""
    model, head, value_model = trees_loaded
    generator = torch.Generator().manual_seed(seed)
    randint = lambda low, high: torch.randint(low, high, (), generator=generator).item()  # noqa: E731
    requests = Requests(value_model, len(rows))
    requests.step([random_tokens(c, seed=c) for c, _, _ in rows], [[] for _ in rows])
    deltas = [random_tokens(d, seed=40 + d) for _, d, _ in rows]
    candidates = [random_tokens(n, seed=80 + n) for _, _, n in rows]
    parents = [[randint(-1, j) for j in range(n)] for _, _, n in rows]
    z = value_model.forward(requests.batch(deltas, candidates, parents=parents), requests.cache)
    for i, tokens in enumerate(candidates):
        for j in range(len(tokens)):
            path, node = [], j
            while node >= 0:
                path, node = [tokens[node], *path], parents[i][node]
            expected = expected_values(model, head, [*requests.prefixes[i], *deltas[i], *path])[-1]
            torch.testing.assert_close(z[i, j], expected, rtol=0, atol=ATOL)


@pytest.fixture(scope="module")
def trees_loaded():
    model, head = random_pair("qwen2")
    return model, head, value_model_of(model, head)


def test_a_parent_that_is_no_earlier_candidate_is_none(trees_loaded):
    requests = Requests(trees_loaded[2], rows=1)
    requests.step([[1, 2, 3]], [[]])
    z = [
        trees_loaded[2].forward(requests.batch([[4]], [[5, 6, 7]], parents=[parents]), requests.cache)
        for parents in ([-1, -1, 0], [0, 2, 0], [9, 5, 0])
    ]
    for malformed in z[1:]:
        torch.testing.assert_close(malformed, z[0], rtol=0, atol=ATOL)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epsilon_of_the_norms(architecture):
    """Of a model whose norms have a large one: every norm of the forward takes it, that of queries and keys too."""
    model_class, config = ARCHITECTURES[architecture]
    model, head = random_model(model_class, type(config)(**{**config.to_dict(), "rms_norm_eps": 0.3})), random_head()
    requests = Requests(ValueModel.from_causal_lm(model, head), rows=2)
    requests.check(requests.step([[1, 2, 3], [4]], [[5, 6], [7]]), [[5, 6], [7]], model, head)
    z, rows = requests.step_rows([[8], []], [[9], [10, 11]])
    requests.check(z, [[9], [10, 11]], model, head)
    torch.testing.assert_close(rows[0], expected_values(model, head, [1, 2, 3, 8])[-1], rtol=0, atol=ATOL)


def test_weights_are_rounded_once():
    """In bf16 from an fp32 checkpoint: norms are multiplied in before the rounding, the head's vectors stay fp32."""
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


def dequantized(value_model, like):
    """The model in 8 bits with its matrices spelt out in the dtype of another."""
    matrices = ("qkv", "o", "gate_up", "down")
    like.layers = [
        layer._replace(
            **{name: getattr(layer, name).float() * getattr(layer, f"{name}_scales")[:, None] for name in matrices},
            **{f"{name}_scales": None for name in matrices},
        )
        for layer in value_model.layers
    ]
    return like


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_in_8_bits(architecture, tmp_path):
    """The forward is that of the weights that the quantised ones mean; no other tensor is another one."""
    model, head = random_pair(architecture)
    model.save_pretrained(tmp_path)
    plain, quantized, for_reference = (
        ValueModel.from_pretrained(tmp_path, head, weights=weights) for weights in (None, "fp8", None)
    )
    assert (plain.weights, quantized.weights) == (None, "fp8")
    results = [
        mixed_requests(m).step(MIXED_DELTAS, MIXED_CANDIDATES)
        for m in (quantized, dequantized(quantized, for_reference), plain)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=ATOL)
    assert 1e-3 < (results[0] - results[2]).abs().max() < 0.5
    for mine, other in zip(quantized.layers, plain.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            expected, scales = quantize_weight(getattr(other, name))
            assert getattr(mine, name).dtype == torch.float8_e4m3fn
            assert torch.equal(getattr(mine, name).float(), expected.float())
            assert torch.equal(getattr(mine, f"{name}_scales"), scales)
            assert getattr(other, f"{name}_scales") is None
        for name in ("qkv_bias", "qk_norm", "o_bias", "gate_up_bias", "down_bias"):
            biases = getattr(mine, name), getattr(other, name)
            assert biases == (None, None) or torch.equal(*biases)
    assert torch.equal(quantized.embedding, plain.embedding)
    assert all(map(torch.equal, quantized.head, plain.head))


def test_weights_in_8_bits_of_a_model_in_memory():
    """Made of the weights before they are rounded to the dtype; the same from any constructor."""
    model, head = random_pair("qwen2")
    half = ValueModel(
        ValueModelConfig.from_hf(model.config),
        {**model.state_dict(), **head},
        dtype=torch.bfloat16,
        weights="fp8",
    )
    shared = ValueModel.from_causal_lm(model, head, weights="fp8")
    attention, norm = model.model.layers[1].self_attn, model.model.layers[1].input_layernorm.weight
    qkv = torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]) * norm
    for value_model in (half, shared):
        for mine, expected in zip(
            (value_model.layers[1].qkv, value_model.layers[1].qkv_scales), quantize_weight(qkv.detach()), strict=True
        ):
            assert mine.dtype == expected.dtype and torch.equal(mine.float(), expected.float())
    assert half.embedding.dtype == half.layers[0].qkv_bias.dtype == torch.bfloat16


def test_the_kernels_take_weights_in_8_bits():
    """Against the references, in fp16, at places that permute and pad the requests."""
    model, head = random_pair("qwen3")
    value_model = value_model_of(model, head, dtype=torch.float16, weights="fp8")
    results = [
        mixed_requests(value_model, backend=backend).step(MIXED_DELTAS, MIXED_CANDIDATES)
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0.02)
    assert not value_model._counters.any()


@pytest.mark.parametrize("weights", ["int8", "bf16", "", True])
def test_unknown_weights_are_refused(weights):
    model, head = random_pair("llama")
    with pytest.raises(ValueError, match=f"weights must be one of None, 'fp8', got {weights!r}"):
        ValueModel.from_causal_lm(model, head, weights=weights)


def test_negative_tokens_are_outside_the_vocabulary(trees_loaded):
    """In a delta and among candidates; the other request keeps its values, and the last token of the vocabulary too."""
    model, head, value_model = trees_loaded
    requests = Requests(value_model, rows=3)
    z = requests.step([[1, 2], [3, -4], [VOCAB - 1]], [[-5, 6], [7, 8], [0, VOCAB - 1]])
    assert z[0, 0].isnan() and z[1].isnan().all()
    requests.prefixes = requests.prefixes[2:]
    requests.check(z[2:], [[0, VOCAB - 1]], model, head)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_positions_in_a_chain_of_candidates(trees_loaded, depth):
    """The deepest trees there are, beside a flat one and one whose numbers point at nothing."""
    requests = Requests(trees_loaded[2], rows=3)
    parents = [list(range(-1, depth - 1)), [-1] * depth, [-7, *range(1, depth)]]
    candidates = [[1] * depth] * 3
    batch = requests.batch([[3, 4], [5], [6]], candidates, parents=parents, spare_deltas=2)
    flat = [0, *[1] * depth]
    assert batch.layout.positions.tolist() == [*range(2 + depth), *flat, *flat, 0, 0]
    chain = [-1, *range(2, 1 + depth)]
    assert batch.layout.parents.tolist() == [-1, -1, *chain, *[-1] * (2 * depth + 4)]


def test_keys_and_values_of_all_rows_are_kept(trees_loaded):
    """Those of candidates too, in the order of the rows; and what runs before the head runs once, after the layers."""
    value_model = trees_loaded[2]
    requests = mixed_requests(value_model, page_size=4)
    batch = requests.batch(MIXED_DELTAS, MIXED_CANDIDATES)
    keep = KVCache.of_slots(value_model, len(batch.layout.token_ids))
    calls = []

    def before_head():
        calls.append(keep.keys[:, :used].clone())

    used = int(batch.layout.q_offsets[-1])
    value_model.forward(batch, requests.cache, keep=keep, before_head=before_head)
    assert len(calls) == 1 and torch.equal(calls[0], keep.keys[:, :used])
    kept = batch.layout.slots >= 0
    slots = batch.layout.slots[kept]
    for cache, rows in ((requests.cache.keys, keep.keys), (requests.cache.values, keep.values)):
        assert torch.equal(cache[:, slots], rows[:, kept])
        assert (rows[:, :used] != 0).all() and (rows[:, used:] == 0).all()


def test_bytes_of_a_cache(trees_loaded):
    cache = KVCache.of_slots(trees_loaded[2], 7)
    assert cache.keys.shape == cache.values.shape == (2, 7, 2, 12)
    assert KVCache.num_bytes(trees_loaded[2], 7) == cache.keys.nbytes + cache.values.nbytes


def test_a_cache_in_fp8(trees_loaded):
    value_model = trees_loaded[2]
    cache = KVCache.of_slots(value_model, 7, "fp8")
    assert cache.keys.shape == cache.values.shape == (2, 7, 2, 12)
    assert cache.keys.dtype == cache.values.dtype == torch.float8_e4m3fn
    assert cache.key_scales.shape == cache.value_scales.shape == (2, 2)
    of_all = sum(x.nbytes for x in (cache.keys, cache.values, cache.key_scales, cache.value_scales))
    assert KVCache.num_bytes(value_model, 7, "fp8") == of_all == 2 * 2 * 7 * 2 * 12 + 2 * 2 * 2 * 4
    scales = cache.scales_of(1)
    assert torch.equal(scales["key_scales"], cache.key_scales[1])
    assert torch.equal(scales["value_scales"], cache.value_scales[1])
    assert KVCache.of_slots(value_model, 7).scales_of(1) == {}
    for call in (KVCache.of_slots, KVCache.num_bytes):
        with pytest.raises(ValueError, match="cache must be None or 'fp8', got 'int8'"):
            call(value_model, 7, "int8")


def test_a_cache_in_fp8_needs_a_gpu_that_knows_e4m3(trees_loaded, monkeypatch):
    monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", "sm_86")
    on_gpu = copy.copy(trees_loaded[2])
    on_gpu.device = torch.device("cuda")
    for call in (KVCache.of_slots, KVCache.num_bytes):
        with pytest.raises(ValueError, match="cache: the kernels take e4m3 on GPUs from sm_89 on, got sm_86"):
            call(on_gpu, 7, "fp8")


def round_to_e4m3(cache, codes):
    """Round what a cache keeps in the model's dtype to what ``codes``, a cache in fp8, would stand for."""
    scales = codes.key_scales, codes.value_scales
    for numbers, of_heads in zip((cache.keys, cache.values), scales, strict=True):
        numbers.copy_(of_codes(to_codes(numbers, of_heads[:, None]), of_heads[:, None]))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_fp8_is_one_rounded_by_hand(device, dtype, backend):
    """After a forward the codes are of its keys and values; the next one reads the numbers that they stand for."""
    value_model = tiny_value_model(device, dtype)
    plain, coded = (mixed_requests(value_model, page_size=4, cache=c, backend=backend) for c in (None, "fp8"))
    before = plain.cache.keys.clone()
    round_to_e4m3(plain.cache, coded.cache)
    assert not torch.equal(plain.cache.keys, before)
    assert torch.equal(plain.cache.keys.float(), of_codes(coded.cache.keys, coded.cache.key_scales[:, None]))
    assert torch.equal(plain.cache.values.float(), of_codes(coded.cache.values, coded.cache.value_scales[:, None]))
    expected, actual = (x.step(MIXED_DELTAS, MIXED_CANDIDATES) for x in (plain, coded))
    torch.testing.assert_close(actual, expected, rtol=0, atol=ATOL if dtype == torch.float32 else 3e-2)
    # Its own delta is attended to as it is. Whatever rounds it first would be as far off as an unrounded prefix.
    unrounded = mixed_requests(value_model, page_size=4, backend=backend).step(MIXED_DELTAS, MIXED_CANDIDATES)
    if dtype == torch.float32:
        assert (unrounded - expected).abs().max() > 100 * ATOL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_key_nor_value_exceeds_its_bound(architecture, dtype):
    """Of the hidden states that make each number as large as it can be: they reach the bound, and never the end of
    e4m3's range, where numbers would be cut off."""
    model, head = random_pair(architecture)
    value_model = value_model_of(model, head, dtype=dtype)
    config, reached = value_model.config, []
    q_rows, shape = config.num_heads * config.head_dim, (2, config.num_kv_heads, config.head_dim)
    key_scales, value_scales = value_model.cache_scales()
    for i, layer in enumerate(value_model.layers):
        rows = layer.qkv[q_rows:].float()
        if config.qk_norm:  # a head with a single number that is not 0
            by_head = rows[: len(rows) // 2].view(*shape[1:], -1)
            alone = torch.linalg.pinv(by_head).mT.flatten(0, 1)
            rows = torch.cat([rows, alone])
        hidden = torch.cat([rows, -rows, torch.randn(50, config.hidden_size)])
        hidden = (1e3 * hidden / hidden.norm(dim=1, keepdim=True)).to(dtype).repeat(3, 1)
        angle = torch.rand(3, len(hidden) // 3, config.head_dim // 2) * 6.3
        angle[0], angle[1] = 0.0, torch.pi / 4  # at which one number of a pair, or both, make the largest
        angle = angle.flatten(0, 1)
        cache = torch.zeros(2, len(hidden), *shape[1:], dtype=dtype)
        _, keys, values = rope_cache(
            ragged_linear(hidden, layer.qkv, layer.qkv_bias, norm_eps=config.rms_norm_eps),
            angle.cos(),
            angle.sin(),
            torch.arange(len(hidden)),
            *cache,
            num_heads=config.num_heads,
            qk_norm_weight=layer.qk_norm,
            norm_eps=config.rms_norm_eps,
        )
        bounds = key_and_value_bounds(config, layer.qkv, None, layer.qkv_bias, layer.qk_norm)
        largest = torch.stack([x.double().abs().amax((0, 2)) for x in (keys, values)])
        assert (largest <= bounds * (1 + 3 * 2**-8)).all()
        reached.append(largest / bounds)
        scales = torch.stack((key_scales[i], value_scales[i]))
        assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))  # a power of two
        assert ((bounds / scales > 224) & (bounds / scales <= 448)).all()
        assert (largest / scales < 464).all()
    keys, values = torch.stack(reached).unbind(1)
    assert (values > 0.97).all() and (keys > (0.97 if config.qk_norm else 0.55)).all()


def test_a_scale_on_the_rotation_is_in_the_bound_of_keys():
    value_model = tiny_value_model("cpu")
    layer, config = value_model.layers[0], value_model.config
    arguments = (layer.qkv, None, layer.qkv_bias, layer.qk_norm)
    once, twice = (key_and_value_bounds(replace(config, rope_scale=x), *arguments) for x in (1.0, 1.5))
    assert torch.equal(twice[0], 1.5 * once[0]) and torch.equal(twice[1], once[1])


def test_a_bias_is_in_the_bound_whatever_its_sign():
    """Alone, without weights: of a pair of a key's numbers the length, of a value the largest."""
    config = tiny_value_model("cpu").config
    first, half = config.num_heads * config.head_dim, config.head_dim // 2
    weight = torch.zeros(first + 2 * config.num_kv_heads * config.head_dim, config.hidden_size)
    bias = torch.zeros(len(weight))
    keys, values = bias[first:].view(2, config.num_kv_heads, config.head_dim)
    keys[1, 1], keys[1, half + 1], values[0, 2], values[1, 0] = -3.0, 4.0, -7.0, 6.0
    bounds = key_and_value_bounds(config, weight, None, bias, None)
    assert bounds.tolist() == [[0.0, 5.0], [7.0, 6.0]]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_scales_of_a_cache_beside_weights_in_8_bits(architecture):
    """They are those of the weights that the bytes and their scales stand for, which differ by head."""
    value_model = value_model_of(*random_pair(architecture), weights="fp8")
    for layer in value_model.layers:
        layer.qkv_scales.mul_(2.0 ** torch.arange(len(layer.qkv_scales)).remainder(5))
    spelt_out = copy.copy(value_model)
    spelt_out.layers = [
        layer._replace(qkv=layer.qkv.float() * layer.qkv_scales[:, None], qkv_scales=None)
        for layer in value_model.layers
    ]
    for scales, expected in zip(value_model.cache_scales(), spelt_out.cache_scales(), strict=True):
        assert torch.equal(scales, expected)


def test_scales_of_bounds():
    nan = float("nan")
    bounds = torch.tensor([[448.0, 448.0 * (1 + 2**-40), 449.0], [1.75, 0.0, nan]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 2.0, 2.0], [2.0**-8, 2.0**-100, nan]])
    torch.testing.assert_close(scales_of(bounds), expected, rtol=0, atol=0, equal_nan=True)


def test_an_embedding_that_is_not_tied_is_not_replaced():
    model, head = random_pair("qwen2")
    tensors = {**model.state_dict(), **head}
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"missing model\.embed_tokens\.weight"):
        ValueModel(ValueModelConfig.from_hf(model.config), tensors)


I32 = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
BATCH = dict.fromkeys(("delta_starts", "delta_lens", "candidate_lens", "cached_lens", "table_rows"), I32(2))
BATCH |= dict(delta_ids=I32(2), delta_slots=I32(2), slot_table=I32(4, 5))
BATCH |= dict(candidate_ids=I32(2, 3), candidate_parents=I32(2, 3))


@pytest.mark.parametrize(
    ("name", "free"),
    [("slot_table", ["rows", "columns", "apart"]), ("table_rows", ["int64"]), ("candidate_parents", ["apart"])],
)
def test_batch_refuses_bad_arguments(name, free):
    assert_refuses(RaggedBatch.build, BATCH, name, *free)
    with pytest.raises(ValueError, match="delta_ids must"):
        RaggedBatch.build(**BATCH | {"delta_ids": I32(2, 1)})


# --- other ways in ---


def write_gguf(path: Path, model) -> None:
    """The weights of a tiny Qwen2 in a GGUF file, unquantised."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    model, head = random_pair("qwen2")
    write_gguf(tmp_path / "tiny.gguf", model)
    check_checkpoint(tmp_path / "tiny.gguf", model, head, head)
    save_file(head, tmp_path / "value_head.safetensors")
    check_checkpoint(tmp_path / "tiny.gguf", model, head)


def test_gguf_without_its_packages(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ImportError("no gguf")

    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ImportError, match=r"pip install \"lenvm-kernels\[demo\]\""):
        ValueModel.from_pretrained(tmp_path / "tiny.gguf", random_head())


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_triton_backend(architecture, device):
    """The same forward with every operator's Triton kernel, heads of a width the kernels take."""
    model_class, config = ARCHITECTURES[architecture]
    config = type(config)(**{**TINY, "num_hidden_layers": 1}, head_dim=64)
    model, head = random_model(model_class, config), random_head()
    value_model = value_model_of(model, head, device=device)
    requests = Requests(value_model, rows=3, page_size=16, fill=float("nan"), backend="triton")
    requests.step([random_tokens(n, seed=n) for n in (18, 0, 3)], [[], [], []])
    candidates = [[1, 2, 3], [4], [5, 6]]
    z = requests.step([[7], [8, 9], []], candidates, width=4, spare_deltas=1)
    requests.check(z, candidates, model, head, atol=TOLERANCE["value_head"][torch.float32][1])


# --- sizes ---


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_sizes_of_every_tile(weights):
    """Each weight of a layer changes its tile at numbers of rows of its own; every combination is in the list."""
    config = make_config("Qwen2.5-1.5B", vocab_size=8, num_layers=1)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in config.tensor_shapes().items()
    }
    value_model = ValueModel(config, tensors, weights=weights)
    layer = value_model.layers[0]

    def tiles(tokens):
        return tuple(
            choose_tile(tokens, len(w), num_splits(len(w), w.shape[1], swiglu), swiglu, w.dtype)
            for w, swiglu in ((layer.qkv, False), (layer.o, False), (layer.gate_up, True), (layer.down, False))
        )

    sizes = value_model.sizes_of_every_tile(2000)
    assert {tiles(tokens) for tokens in sizes} == {tiles(tokens) for tokens in range(1, 2001)}
    assert len(sizes) == len({tiles(tokens) for tokens in sizes}) > len({tiles(tokens)[0] for tokens in sizes})


def test_operators_make_more_counters_than_there_are_themselves(trees_loaded):
    _, _, value_model = trees_loaded
    held = len(value_model._counters)
    assert value_model._zeros(held) is value_model._counters and value_model._zeros(held + 1) is None
