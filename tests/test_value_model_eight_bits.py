"""Value models whose weights or cache are in 8 bits: they are those of the numbers that the bytes stand for."""

import copy
from dataclasses import replace

import pytest
import torch

from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.reference._common import of_codes, to_codes
from lenvm_kernels.value_model import KVCache, ValueModel
from lenvm_kernels.value_model.cache_scales import key_and_value_bounds, scales_of
from tests.helpers.models import ARCHITECTURES, random_pair, tiny_value_model, value_model_of
from tests.helpers.value_requests import ATOL, MIXED_CANDIDATES, MIXED_DELTAS, mixed_requests


@pytest.fixture(scope="module")
def qwen2():
    """A ``transformers`` model, its head, and the value model of both."""
    model, head = random_pair("qwen2")
    return model, head, value_model_of(model, head)


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
    half = value_model_of(model, head, dtype=torch.bfloat16, weights="fp8")
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


@pytest.mark.parametrize(("kind", "dtype"), [(None, torch.float32), ("fp8", torch.float8_e4m3fn)])
def test_bytes_of_a_cache(qwen2, kind, dtype):
    value_model = qwen2[2]
    cache = KVCache.of_slots(value_model, 7, kind)
    assert cache.keys.shape == cache.values.shape == (2, 7, 2, 12)
    assert cache.keys.dtype == cache.values.dtype == dtype
    of_all = cache.keys.nbytes + cache.values.nbytes
    assert of_all == 2 * 2 * 7 * 2 * 12 * dtype.itemsize
    if kind is None:
        assert cache.scales_of(1) == {}
    else:
        assert cache.key_scales.shape == cache.value_scales.shape == (2, 2)
        of_all += cache.key_scales.nbytes + cache.value_scales.nbytes
        scales = {"key_scales": cache.key_scales[1], "value_scales": cache.value_scales[1]}
        found = cache.scales_of(1)
        assert found.keys() == scales.keys() and all(torch.equal(found[name], scales[name]) for name in scales)
        assert of_all == 2 * 2 * 7 * 2 * 12 + 2 * 2 * 2 * 4
    assert KVCache.num_bytes(value_model, 7, kind) == of_all


def test_caches_that_are_refused(qwen2, monkeypatch):
    """Of another kind, and e4m3 on a GPU that does not know it."""
    monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", "sm_86")
    on_gpu = copy.copy(qwen2[2])
    on_gpu.device = torch.device("cuda")
    for call in (KVCache.of_slots, KVCache.num_bytes):
        with pytest.raises(ValueError, match="cache must be None or 'fp8', got 'int8'"):
            call(qwen2[2], 7, "int8")
        with pytest.raises(ValueError, match="cache: the kernels take e4m3 on GPUs from sm_89 on, got sm_86"):
            call(on_gpu, 7, "fp8")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_fp8_is_one_rounded_by_hand(device, dtype, backend):
    """After a forward the codes are of its keys and values; the next one reads the numbers that they stand for."""
    value_model = tiny_value_model(device, dtype)
    plain, coded = (mixed_requests(value_model, page_size=4, cache=c, backend=backend) for c in (None, "fp8"))
    before = plain.cache.keys.clone()
    for name in ("key", "value"):
        numbers, codes = getattr(plain.cache, f"{name}s"), getattr(coded.cache, f"{name}s")
        scales = getattr(coded.cache, f"{name}_scales")[:, None]
        numbers.copy_(of_codes(to_codes(numbers, scales), scales))
        assert torch.equal(numbers.float(), of_codes(codes, scales))
    assert not torch.equal(plain.cache.keys, before)
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
