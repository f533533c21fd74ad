"""``bench.quantization``: what it says of answers that are known, and that each variant is what its name says."""

import math

import pytest
import torch

from bench import quantization
from bench.quantization import Variant
from lenvm_kernels.value_model import ValueModel


@pytest.fixture(scope="module")
def subject():
    return quantization.random("Qwen2.5-0.5B", 3, 1)


@torch.no_grad()
def test_errors_of_known_answers(subject, monkeypatch):
    """One candidate of all is off by 2."""
    there = subject.candidates.token_ids >= 0
    expected = torch.where(there, torch.linspace(-4.0, -3.0, there.numel()).view(there.shape), 0.0)
    z = expected.clone()
    z[1, 0] += 2.0
    monkeypatch.setattr(quantization, "value_logits", lambda *_: z)
    errors = quantization.compare(subject, quantization.VARIANTS[0], expected)
    count = int(there.sum())
    before, after = (math.log1p(math.exp(x[1, 0].item())) for x in (expected, z))
    assert errors.z_most == pytest.approx(2.0, rel=1e-2)
    assert errors.z_rms == pytest.approx(2.0 / count**0.5, rel=1e-2)
    assert errors.z_spread == pytest.approx(expected[there].std().item(), rel=1e-2)
    assert errors.length_most == pytest.approx(after / before - 1, rel=1e-2)
    assert errors.length_mean == pytest.approx((after / before - 1) / count, rel=1e-2)
    # Only that request's probabilities change.
    assert 0 < errors.scale_most == pytest.approx(3 * errors.scale_mean, rel=1e-2)
    assert 0 < errors.target_most == pytest.approx(3 * errors.target_mean, rel=1e-2)
    same = quantization.compare(subject, quantization.VARIANTS[0], z)
    assert same.z_most == same.length_most == same.scale_most == same.target_most == 0


@torch.no_grad()
def test_each_variant_changes_what_its_name_says(subject, monkeypatch):
    kept = []

    class Noted(ValueModel):
        def forward(self, batch, cache, **options):
            kept.append((self.layers[0].down.dtype, cache.keys.dtype))
            return super().forward(batch, cache, **options)

    monkeypatch.setattr(quantization, "ValueModel", Noted)
    found = {errors.variant: errors for errors in quantization.measure(iter([subject]))}
    dtypes = dict.fromkeys(kept)  # in their order
    bf16, fp32, e4m3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    assert list(dtypes) == [(fp32, fp32), (bf16, bf16), (e4m3, bf16), (bf16, e4m3), (e4m3, e4m3)]
    assert len(found) == len(quantization.VARIANTS) == 4
    rms = [errors.z_rms for errors in found.values()]
    assert all(0 < x < 0.2 for x in rms) and rms[3] != rms[1] != rms[2]
    nothing = Variant("nothing", torch.float32, torch.float32)
    expected = quantization.value_logits(subject, torch.float32, {}, {})
    assert quantization.compare(subject, nothing, expected).z_most == pytest.approx(0, abs=1e-4)
