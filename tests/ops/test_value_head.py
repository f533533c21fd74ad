"""Value head: the reference against torch.nn, targets of logits, sums of squares, and outputs of many blocks."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lenvm_kernels.fuzz.ops.value_head import exact, square_sums_of
from lenvm_kernels.ops import value_head as ops
from lenvm_kernels.ops.value_head import value_head
from tests.helpers.cases import simple_arguments
from tests.helpers.matches import assert_matches
from tests.helpers.memory import GuardedMemory

make_inputs = partial(simple_arguments, "value_head")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = ("fc_weight", "fc_bias", "summary_weight", "summary_bias")
MANY = 300  # outputs, enough for the larger tiles


def test_reference_matches_torch_modules():
    size, eps = 96, 0.3
    inputs = make_inputs(17, size=size, dtype=torch.float64, norm=True) | {"norm_eps": eps}
    norm, fc, summary = LlamaRMSNorm(size, eps), nn.Linear(size, size), nn.Linear(size, 1)
    parameters = (norm.weight, fc.weight, fc.bias, summary.weight, summary.bias)
    for parameter, name in zip(parameters, ("norm_weight", *WEIGHTS), strict=True):
        parameter.data = inputs[name]
    head, hidden = nn.Sequential(fc, nn.SiLU(), summary), inputs["hidden"]
    rows = torch.tensor([3, 3, 16, 0])
    with torch.no_grad():
        plain = {k: v for k, v in inputs.items() if not k.startswith("norm")}
        torch.testing.assert_close(value_head(**plain), head(hidden)[:, 0])
        torch.testing.assert_close(value_head(**plain, token_rows=rows), head(hidden[rows])[:, 0])
        # LlamaRMSNorm always computes in fp32.
        normalised = head(norm(hidden))[:, 0]
        torch.testing.assert_close(value_head(**inputs), normalised, rtol=1e-5, atol=1e-5)
        # Sums of squares may be passed, and the norm's weight may be folded into the first matrix.
        sums = torch.stack([hidden[:, :64].square().sum(1), hidden[:, 64:].square().sum(1)])
        folded = plain | {"fc_weight": plain["fc_weight"] * norm.weight.double(), "square_sums": sums, "norm_eps": eps}
        torch.testing.assert_close(value_head(**folded), normalised, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value_head(**folded, token_rows=rows), normalised[rows], rtol=1e-5, atol=1e-5)
        sums *= 4
        doubled = value_head(
            **inputs | {"square_sums": sums, "norm_eps": 4 * eps, "norm_weight": 2 * norm.weight.double()}
        )
        torch.testing.assert_close(doubled, normalised, rtol=1e-5, atol=1e-5)
    small = inputs | {"hidden": 1e-3 * hidden, "norm_eps": 1e-6}
    expected = value_head(**small)
    del small["norm_eps"]
    assert torch.equal(value_head(**small), expected)  # the default


@pytest.mark.parametrize("norm", ["none", "computed", "folded"])
@pytest.mark.parametrize("wide_from", [0, ops.WIDE_FROM])
def test_rows_of_many_and_few_blocks_have_the_same_bits(device, monkeypatch, norm, wide_from):
    """Alone, in smaller tiles, in another order, repeated, and with any ``targets``."""
    monkeypatch.setattr(ops, "WIDE_FROM", wide_from)
    inputs = make_inputs(MANY, size=100, dtype=torch.bfloat16, device=device, norm=norm == "computed")
    hidden, order = inputs.pop("hidden"), torch.randperm(MANY, generator=torch.Generator().manual_seed(1)).to(device)

    def logits_of(rows, **options):
        options |= {"square_sums": square_sums_of(hidden)[:, rows]} if norm == "folded" else {}
        return value_head(hidden[rows], **inputs, **options, backend="triton")

    logits, everything = logits_of(slice(None)), slice(None)
    assert ops.FEW_OUTPUTS < MANY
    for rows in (slice(0, 1), slice(130, 131), slice(MANY - 1, MANY), slice(65), slice(ops.FEW_OUTPUTS), order):
        assert torch.equal(logits_of(rows), logits[rows])
    repeated = torch.cat([order, order[:7]])
    targets = torch.randperm(MANY + 7, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(logits_of(everything, token_rows=repeated), logits[repeated])
    assert torch.equal(logits_of(everything, token_rows=repeated, targets=targets)[targets], logits[repeated])


@pytest.mark.parametrize("outputs", [5, 33, 127])
@pytest.mark.parametrize("padding", [False, True])
def test_kernel_writes_only_valid_targets(device, outputs, padding):
    """The result and the memory around it hold NaN first. A logit with a target out of range is not stored."""
    inputs = make_inputs(5, size=2 * ops.BLOCK_N + 20, dtype=torch.float32, device=device)
    rows = torch.full((outputs,), -1) if padding else torch.arange(outputs) % 7 - 1  # -1 and 5 are padding
    targets = torch.arange(outputs).flip(0)
    targets[:4] = torch.tensor([outputs, -1, 2**31 - 1, -(2**31)])
    chosen, memory = dict(token_rows=rows.to(device), targets=targets.to(device)), GuardedMemory()
    reference = value_head(**inputs, **chosen, backend="reference")
    logits = memory.call(value_head, **inputs, **chosen, backend="triton")
    memory.assert_kept()
    expected = exact(**inputs, token_rows=chosen["token_rows"])
    assert logits[outputs - 4 :].isnan().all() and (reference[outputs - 4 :] == 0).all()
    for found in (logits, reference):
        assert_matches(found[: outputs - 4].flip(0), expected[4:], "value_head", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_sums_are_added_in_order(device, dtype):
    """Each 2**-24 added to 1 is lost, but not the sum of several."""
    inputs = make_inputs(3, size=5 * 64 - 10, dtype=dtype, device=device)
    sums = torch.zeros(5, 3, device=device)
    sums[0] = 1.0
    expected = value_head(**inputs, square_sums=sums, backend="triton")
    sums[1:] = 2.0**-24
    assert torch.equal(value_head(**inputs, square_sums=sums, backend="triton"), expected)
    sums[0], sums[4] = 2.0**-24, 1.0  # 4 * 2**-24 + 1
    assert not torch.equal(value_head(**inputs, square_sums=sums, backend="triton"), expected)


@pytest.mark.parametrize("magnitude", [6e4, 300.0, 1e-2, 1e-4])
def test_fp16_norm_of_extreme_rows(device, magnitude):
    inputs = make_inputs(9, size=96, dtype=torch.float16, device=device, norm=True)
    hidden = inputs["hidden"].float()
    inputs["hidden"] = (hidden / hidden.abs().amax(-1, keepdim=True) * magnitude).half()
    inputs["norm_weight"] *= 16  # h * w up to 2e6, far beyond fp16
    assert_matches(value_head(**inputs, backend="triton"), exact(**inputs), "value_head", torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_activations(device, dtype):
    inputs = make_inputs(9, size=96, dtype=dtype, device=device)
    inputs["fc_bias"][::2] = -6e4  # exp(6e4) overflows: silu is 0
    inputs["fc_bias"][1::8] = 6e4  # silu is the identity
    assert_matches(value_head(**inputs, backend="triton"), exact(**inputs), "value_head", dtype)


def test_rows_of_empty_input_are_padding(device, backend):
    inputs = make_inputs(0, size=64, dtype=torch.float32, device=device)
    rows = torch.tensor([-1, 0, 3], device=device)
    assert value_head(**inputs, token_rows=rows, backend=backend).tolist() == [0, 0, 0]
