"""``embed_tokens``: the reference against transformers, and large positions."""

from functools import partial

import pytest
import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from lenvm_kernels.ops.embed_tokens import embed_tokens
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


def test_angles_of_large_positions(device, backend):
    """The angle is the fp32 product, as in transformers; its cosine and sine are accurate to the last bits of fp32."""
    positions = [0, 1, 2, 1000, 32_767, 99_999, 100_000, 105_700, 131_071, 2**24 + 2, 2**33]
    inv_freq = torch.tensor([1.0, 0.8111, 0.0317, 1e-6, 3.7e-7])
    zeros, ones = torch.zeros(len(positions), dtype=torch.int64, device=device), torch.ones(1, 1, device=device)
    arguments = torch.tensor(positions, device=device), ones, inv_freq.to(device)
    embedded = embed_tokens(zeros, *arguments, rope_scale=1.25, backend=backend)
    angles = (torch.tensor(positions).float()[:, None] * inv_freq).double()
    for x, expected in ((embedded.cos, angles.cos()), (embedded.sin, angles.sin())):
        torch.testing.assert_close(x.cpu().double(), 1.25 * expected, rtol=0, atol=3e-7)
