"""``rope_cache``: rounding of the kernel, the reference against transformers, and large strides of heads."""

from functools import partial

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from lenvm_kernels.fuzz.ops.rope_cache import expected_of
from lenvm_kernels.ops.rope_cache import rope_cache
from tests.helpers.cases import simple_arguments

make_inputs = partial(simple_arguments, "rope_cache")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 128), (9, 3, 256)])
def test_kernel_rounds_as_the_reference(device, heads, kv_heads, head_dim, dtype, norm):
    inputs = make_inputs(4, heads=[heads, kv_heads], head_dim=head_dim, dtype=dtype, device=device, norm=norm)
    expected_q, expected_k, _ = expected_of(inputs)
    q, k, _ = rope_cache(**inputs, backend="triton")
    different = torch.cat([(q != expected_q).flatten(), (k != expected_k).flatten()]).double().mean()
    assert different < 0.01  # an additional or missing rounding would change at least a tenth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_reference_matches_transformers(dtype, norm):
    tokens, heads, kv_heads, head_dim = 7, 4, 2, 32
    inputs = make_inputs(tokens, heads=[heads, kv_heads], head_dim=head_dim, dtype=dtype)
    states = inputs["qkv"].view(tokens, -1, head_dim)
    q, k, v = states.split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q_norm, k_norm = Qwen3RMSNorm(head_dim, eps=0.5), Qwen3RMSNorm(head_dim, eps=0.5)
        q_norm.weight.data = torch.linspace(0.5, 1.5, head_dim).to(dtype)
        k_norm.weight.data = torch.linspace(2.0, -1.0, head_dim).to(dtype)
        weights = [q_norm.weight.expand(heads, -1), k_norm.weight.expand(kv_heads, -1)]
        inputs |= {"qk_norm_weight": torch.cat(weights).detach(), "norm_eps": 0.5}
        q, k = q_norm(q), k_norm(k)
    cos, sin = inputs["cos"].repeat(1, 2), inputs["sin"].repeat(1, 2)
    q, k = (x.detach().to(dtype) for x in apply_rotary_pos_emb(q, k, cos, sin))
    actual = rope_cache(**inputs, backend="reference")
    if dtype == torch.float32:
        torch.testing.assert_close(actual, (q, k, v))
    else:  # equal roundings; only the order of a sum may differ
        for x, expected in zip(actual, (q, k, v), strict=True):
            assert (x != expected).double().mean() < 0.01


def test_heads_past_32_bits(device):
    """Strides of 2**30, so that the third head is 2**31 elements away. Untouched pages take no memory on a CPU."""
    rows, kv_heads, head_dim, far = 3, 3, 8, 2**30
    plain = make_inputs(rows, heads=[2, kv_heads], head_dim=head_dim, dtype=torch.float16, device=device)
    plain["slots"] = torch.tensor([1, 2, 0], device=device)
    expected = rope_cache(**plain, backend="triton")
    memory, names = torch.empty(2 * far + 256, dtype=torch.float16, device=device), ("k_cache", "v_cache")
    shape, strides = (rows, kv_heads, head_dim), (head_dim, far, 1)
    spread = {name: memory.as_strided(shape, strides, 32 * i) for i, name in enumerate(names)}
    for actual, x in zip(rope_cache(**plain | spread, backend="triton"), expected, strict=True):
        assert torch.equal(actual, x)
    for name, x in zip(names, expected[1:], strict=False):
        assert torch.equal(spread[name][plain["slots"]], x)
