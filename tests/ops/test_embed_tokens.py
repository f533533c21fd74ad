"""``embed_tokens``: the reference against transformers, exact sums, and far positions."""

from functools import partial

import pytest
import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from lenvm_kernels.ops.embed_tokens import MAX_BLOCK_H, embed_tokens
from tests.helpers.cases import simple_arguments

make_inputs = partial(simple_arguments, "embed_tokens")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_matches_transformers(dtype):
    config = Qwen2Config(hidden_size=64, num_attention_heads=2, max_position_embeddings=131_072, rope_theta=1e6)
    rotary = Qwen2RotaryEmbedding(config)
    inputs = make_inputs(9, size=64, half=16, dtype=dtype) | {"inv_freq": rotary.inv_freq, "rope_scale": 1.5}
    embedded = embed_tokens(**inputs, backend="reference")
    cos, sin = rotary(torch.zeros(1), inputs["positions"][None])
    assert torch.equal(embedded.cos, 1.5 * cos[0, :, :16]) and torch.equal(embedded.sin, 1.5 * sin[0, :, :16])
    assert torch.equal(embedded.hidden, torch.nn.Embedding.from_pretrained(inputs["embedding"])(inputs["token_ids"]))
    assert embedded.hidden.dtype == dtype and embedded.square_sums.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 65, 200, MAX_BLOCK_H + 70])
def test_sums_of_small_integers_are_exact(device, backend, dtype, size):
    """Each group sums its own columns, and each token has its own column in the result."""
    tokens = 3
    table = torch.arange(tokens * size).view(tokens, size) % 7 - 3
    ids, zeros = torch.tensor([2, 0, 1], device=device), torch.zeros(tokens, dtype=torch.int64, device=device)
    embedded = embed_tokens(ids, zeros, table.to(device, dtype), torch.ones(1, device=device), backend=backend)
    rows = table[ids.cpu()]
    expected = torch.stack([x.square().sum(1) for x in rows.split(64, dim=1)])
    assert torch.equal(embedded.hidden.cpu(), rows.to(dtype))
    assert embedded.square_sums.is_contiguous() and torch.equal(embedded.square_sums.cpu(), expected.float())


def test_angles_of_far_positions(device, backend):
    """The angle is the fp32 product, as in transformers; its cosine and sine are accurate to the last bits of fp32."""
    positions = [0, 1, 2, 1000, 32_767, 99_999, 100_000, 105_700, 131_071, 2**24 + 2, 2**33]
    inv_freq = torch.tensor([1.0, 0.8111, 0.0317, 1e-6, 3.7e-7])
    ids = torch.zeros(len(positions), dtype=torch.int64, device=device)
    embedded = embed_tokens(
        ids,
        torch.tensor(positions, device=device),
        torch.ones(1, 1, device=device),
        inv_freq.to(device),
        rope_scale=1.25,
        backend=backend,
    )
    angles = (torch.tensor(positions).float()[:, None] * inv_freq).double()
    for x, expected in ((embedded.cos, angles.cos()), (embedded.sin, angles.sin())):
        torch.testing.assert_close(x.cpu().double(), 1.25 * expected, rtol=0, atol=3e-7)
