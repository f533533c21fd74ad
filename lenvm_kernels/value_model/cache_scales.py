"""Scales of a cache in e4m3, from a model's weights alone: no number that it computes is out of range.

The normed row ``n`` that a layer projects has ``|n|^2 = sum x^2 / (mean x^2 + eps) <= H``. By Cauchy and Schwarz row
``w_d`` of the projection, with the norm's weight multiplied into it, gives

    |w_d . n + b_d| <= sqrt(H) |w_d| + |b_d| = B_d

That bounds values. A rotation keeps the length of a pair of a key's numbers, times ``rope_scale``: pair ``(a, b)`` is
bounded by ``rope_scale hypot(B_a, B_b)``. Where keys have a norm of their own (Qwen3) a head's numbers have squares of
the sum ``D`` at most before its weight ``g``: they are bounded by ``rope_scale sqrt(D) max |g|``, rotated or not.

A scale is the least power of two by which the largest bound of its head, divided, is at most 448, e4m3's largest
number. Roundings of the model's dtype, three of them at most, exceed a bound by 1.2 % in bf16; up to 464, 3.5 % more
than 448, is rounded to 448 as to any nearest number. So nothing is ever cut off, and no prompt has to be looked at. A
power of two makes both scaling and its reverse exact.
"""

import math

import torch

from lenvm_kernels.reference._common import E4M3_MAX
from lenvm_kernels.value_model.checkpoint import ValueModelConfig

# Exponents of scales: of a head without weights too, and with an inverse in fp32.
EXPONENTS = -100, 100


def key_and_value_bounds(
    config: ValueModelConfig,
    weight: torch.Tensor,  # [(Hq + 2 Hkv) * D, H], times the weight of the norm before
    weight_scales: torch.Tensor | None,  # fp32 [(Hq + 2 Hkv) * D], of a weight in e4m3
    bias: torch.Tensor | None,  # [(Hq + 2 Hkv) * D]
    qk_norm: torch.Tensor | None,  # [Hq + Hkv, D]
) -> torch.Tensor:  # fp64 [2, Hkv]
    """What no key of each head, and no value of each head, exceeds in one layer, but for roundings."""
    shape = (2, config.num_kv_heads, config.head_dim)
    first = config.num_heads * config.head_dim
    bounds = math.sqrt(config.hidden_size) * torch.linalg.vector_norm(weight[first:].float(), dim=1)
    if weight_scales is not None:
        bounds = bounds * weight_scales[first:]
    if bias is not None:
        bounds = bounds + bias[first:].float().abs()
    keys, values = bounds.view(shape).double()
    if qk_norm is not None:
        of_keys = math.sqrt(config.head_dim) * qk_norm[config.num_heads :].abs().amax(1).double()
    else:
        of_keys = torch.hypot(*keys.chunk(2, dim=1)).amax(1)
    return torch.stack((config.rope_scale * of_keys, values.amax(1)))


def scales_of(bounds: torch.Tensor) -> torch.Tensor:
    """Scales, fp32, for numbers with these bounds."""
    exponents = (bounds.double().cpu() / E4M3_MAX).log2().ceil().clamp(*EXPONENTS)
    return exponents.exp2().float().to(bounds.device)  # on a CPU, where powers of two are exact
