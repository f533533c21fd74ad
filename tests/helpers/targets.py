"""Targets of ``reweight_scatter`` by the specification, in fp64."""

import torch

from lenvm_kernels.types import Mode


def expectation(probs, z, eos=None):
    """Expected value ``E[v]`` of each row, fp64."""
    v = torch.sigmoid(z.double())
    if eos is not None:
        v = torch.where(eos, 0.0, v)
    return (probs.double() * v).sum(1)


def target_of(table, q, z):
    """Target of each row, fp64, written as in the specification. NaN means that the row stays unchanged."""
    v = torch.sigmoid(z)
    low = torch.where(q > 0, v, 2.0).amin(1)
    high = torch.where(q > 0, v, -1.0).amax(1)
    mean = (q * v).sum(1)
    s, mode = table.scale.double(), table.mode
    above = mean + (s - 1) * (high - mean)
    below = mean - (1 - s) * (mean - low)
    one_minus_u = (q * (high[:, None] - v)).sum(1) / (high - low)  # exact even if u is within 1e-16 of 1
    soft = -torch.expm1(-table.target_length.double() * table.nats_per_token.double())
    target = {
        Mode.MUL: s * mean,
        Mode.LINEAR: torch.where(s >= 1, above, below),
        Mode.EXP: low + (1 - one_minus_u**s) * (high - low),
        Mode.LENGTH_MUL: 1 - (1 - mean) ** s,
        Mode.EQ_SOFT: soft,
        Mode.GE_SOFT: torch.maximum(mean, soft),
        Mode.LE_SOFT: torch.minimum(mean, soft),
    }
    target = sum(torch.where(mode == m, t, 0.0) for m, t in target.items())
    target = target.clamp(low, high)
    left_alone = (high - low < 1e-8) | ((target - mean).abs() < 1e-8)
    margin = (1e-6 * (high - low)).clamp(min=1e-12)
    is_soft = (mode >= Mode.EQ_SOFT) & (mode <= Mode.LE_SOFT)
    edge = is_soft & ((target == low) | (target == high))
    target = torch.where(edge, target, target.clamp(low + margin, high - margin))
    return torch.where(left_alone & ~edge, mean, target)
