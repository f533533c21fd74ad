"""Value head: the reference against torch.nn, and its tile."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lenvm_kernels.ops import ragged_linear as linear
from lenvm_kernels.ops.value_head import value_head
from tests.helpers.cases import simple_arguments

make_inputs = partial(simple_arguments, "value_head")
WEIGHTS = ("fc_weight", "fc_bias", "summary_weight", "summary_bias")


def test_reference_matches_torch_modules():
    size, eps = 96, 0.3
    inputs = make_inputs(17, size=size, dtype=torch.float64)
    norm, fc, summary = LlamaRMSNorm(size, eps), nn.Linear(size, size), nn.Linear(size, 1)
    for parameter, name in zip((fc.weight, fc.bias, summary.weight, summary.bias), WEIGHTS, strict=True):
        parameter.data = inputs[name]
    nn.init.uniform_(norm.weight)
    head, hidden = nn.Sequential(fc, nn.SiLU(), summary), inputs["hidden"]
    rows = torch.tensor([3, 3, 16, 0])
    with torch.no_grad():
        torch.testing.assert_close(value_head(**inputs), head(hidden)[:, 0])
        torch.testing.assert_close(value_head(**inputs, token_rows=rows), head(hidden[rows])[:, 0])
        # LlamaRMSNorm always computes in fp32.
        normalised = head(norm(hidden))[:, 0]
        folded = inputs | {"fc_weight": inputs["fc_weight"] * norm.weight.double()}
        sums = torch.stack([hidden[:, :64].square().sum(1), hidden[:, 64:].square().sum(1)])
        for options in ({"norm_eps": eps}, {"norm_eps": eps, "square_sums": sums}):
            torch.testing.assert_close(value_head(**folded, **options), normalised, rtol=1e-5, atol=1e-5)
        logits = value_head(**folded, token_rows=rows, norm_eps=4 * eps, square_sums=4 * sums)
        torch.testing.assert_close(logits, head(norm(hidden) / 2)[rows, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expected_rows", [None, 2])
def test_expected_rows_choose_the_tile(device, monkeypatch, expected_rows):
    requested, choose_tile = [], linear.choose_tile
    monkeypatch.setattr(linear, "choose_tile", lambda rows, *rest: requested.append(rows) or choose_tile(rows, *rest))
    inputs = make_inputs(9, size=96, dtype=torch.float32, device=device)
    value_head(**inputs, expected_rows=expected_rows, backend="triton")
    assert requested == [9 if expected_rows is None else expected_rows]
