"""The forward of a value model against ``transformers``, with a full forward for each prefix and candidate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bench.models import make_config
from lenvm_kernels.ops.ragged_linear import choose_tile, num_splits
from lenvm_kernels.values import KVCache, ValueModel
from tests.helpers.models import ARCHITECTURES, VOCAB, last_value_logits, random_head, random_model, random_pair
from tests.helpers.value_requests import (
    ATOL,
    MIXED_CANDIDATES,
    MIXED_DELTAS,
    Requests,
    mixed_requests,
    random_tokens,
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request, tmp_path_factory):
    """A ``transformers`` model, its head, and the value model loaded from their checkpoint.

    The epsilon is large, so that all norms must use it, including norms of queries and keys.
    """
    path, (model_class, config) = tmp_path_factory.mktemp("checkpoint"), ARCHITECTURES[request.param]
    model, head = random_model(model_class, type(config)(**{**config.to_dict(), "rms_norm_eps": 0.3})), random_head()
    model.save_pretrained(path)
    save_file(head, path / "value_head.safetensors")
    return model, head, ValueModel.from_pretrained(path)


@pytest.fixture(scope="module")
def qwen2():
    """A ``transformers`` model, its head, and the value model of both."""
    model, head = random_pair("qwen2")
    return model, head, ValueModel.from_causal_lm(model, head)


@pytest.mark.parametrize("page_size", [1, 16])
def test_values_equal_transformers(loaded, page_size):
    """NaN in unwritten slots and rows without a token do not change values."""
    model, head, value_model = loaded
    requests = mixed_requests(value_model, page_size=page_size, fill=math.nan)
    z = requests.step(MIXED_DELTAS, MIXED_CANDIDATES, width=8, spare_deltas=3)
    assert z.shape == (6, 8)
    requests.check(z, MIXED_CANDIDATES, model, head)
    assert 0.3 < z[z != 0].std() < 30  # otherwise a tolerance of 1e-5 is meaningless


@pytest.mark.parametrize("outside", [VOCAB, -4])
def test_token_outside_vocabulary_only_affects_its_request(loaded, outside):
    """In deltas and among candidates. The first and the last token of the vocabulary have correct values."""
    model, head, value_model = loaded
    last, candidates = VOCAB - 1, [[1, outside], [1, 2], [0, VOCAB - 1]]
    requests = Requests(value_model, rows=3)
    for deltas in ([[5, 6], [7, outside], [8, last]], [[3], [3], [3]]):
        z = requests.step(deltas, candidates)
        assert z[0, 1].isnan() and z[1].isnan().all()
        expected = last_value_logits(model, head, [[*requests.prefixes[2], token] for token in candidates[2]])
        torch.testing.assert_close(z[2], expected, rtol=0, atol=ATOL)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_candidate_trees_equal_transformers(qwen2, rows, seed):
    """A candidate has the value of the sequence of prefix, delta, ancestors from the root, and itself."""
    model, head, value_model = qwen2
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
            expected = last_value_logits(model, head, [[*requests.prefixes[i], *deltas[i], *path]])
            torch.testing.assert_close(z[i, j], expected[0], rtol=0, atol=ATOL)


def test_bfloat16(loaded, tmp_path):
    """The requested dtype is used. Rounding errors of two layers are far smaller than the effect of a wrong tensor."""
    model, head, value_model = loaded
    model.save_pretrained(tmp_path)
    half = ValueModel.from_pretrained(tmp_path, head, dtype=torch.bfloat16)
    z, z_half = (mixed_requests(m).step(MIXED_DELTAS, MIXED_CANDIDATES) for m in (value_model, half))
    assert z_half.dtype == torch.float32 and half.embedding.dtype == torch.bfloat16
    torch.testing.assert_close(z_half, z, rtol=0, atol=0.2)


def test_bytes_of_cache(qwen2):
    cache = KVCache.of_slots(qwen2[2], 7)
    assert cache.keys.shape == cache.values.shape == (2, 7, 2, 12)
    assert cache.keys.dtype == cache.values.dtype == torch.float32
    assert KVCache.num_bytes(qwen2[2], 7) == cache.keys.nbytes + cache.values.nbytes == 2 * 2 * 7 * 2 * 12 * 4


def test_sizes_of_every_tile():
    """Each weight changes its tile at different numbers of rows, and all combinations are in the list. Sums over the
    attention output are split, sums of the value head are not."""
    config = make_config("Qwen2.5-1.5B", vocab_size=8, num_layers=1, num_heads=32)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in config.tensor_shapes().items()
    }
    value_model = ValueModel(config, tensors)
    layer = value_model.layers[0]
    weights = [layer.qkv, layer.o, layer.down, value_model.head[0], layer.gate_up]

    def tiles(tokens):
        return tuple(
            choose_tile(tokens, len(w), num_splits(len(w), w.shape[1], w is layer.gate_up), w is layer.gate_up, w.dtype)
            for w in weights
        )

    sizes = value_model.sizes_of_every_tile(2000)
    assert {tiles(tokens) for tokens in sizes} == {tiles(tokens) for tokens in range(1, 2001)}
    assert len(sizes) == len({tiles(tokens) for tokens in sizes}) > len({tiles(tokens)[0] for tokens in sizes})
