"""``embed_tokens``: large positions. ``test_value_model.py`` compares embeddings and angles with transformers."""

import torch

from lenvm_kernels.ops.embed_tokens import embed_tokens


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
