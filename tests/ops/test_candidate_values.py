"""``candidate_values``: by hand, against an integral over lengths, and modes without a distance."""

import math

import pytest
import torch
from torch import nn

from lenvm_kernels import GuidanceTable, parse_guidance
from lenvm_kernels.ops.candidate_values import candidate_values
from lenvm_kernels.reference.candidate_values import SHORTEST
from lenvm_kernels.types import GuidanceColumns
from tests.helpers.cases import simple_arguments


def silu(x):
    return x / (1 + math.exp(-x))


def table_of(*requests, answer_length=0.0):
    params = [parse_guidance(request) if request else None for request in requests]
    table = GuidanceTable.from_params(params, [set()] * len(params), "cpu").columns
    table.answer_length[:] = answer_length
    return table


def nats_of(logits):
    return nn.functional.softplus(logits.double())


def test_candidates_by_hand(device, backend):
    """Two bins, for one token and for two or three; no request is guided."""
    token_ids = torch.tensor([[2, -1], [0, 2]], device=device)
    scale, shift = torch.tensor([[2.0, 0.5], [1.0, -1.0]]), torch.tensor([[0.25, -1.0], [0.0, 3.0]])
    embedding = torch.tensor([[1.0, 4.0], [9.0, 9.0], [-0.5, 2.0]])
    fc_weight, fc_bias = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]]), torch.tensor([0.1, 0.2, 0.3])
    bins_weight, bins_bias = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, -1.0]]), torch.tensor([0.7, -0.2])

    def by_hand(x, y):
        x, y = silu(x), silu(y)
        hidden = silu(x + 2 * y + 0.1), silu(0.5 * x - y + 0.2), silu(3 * x + 0.3)
        first = math.exp(hidden[0] - 2 * hidden[1] + 0.5 * hidden[2] + 0.7)
        second = math.exp(hidden[1] - hidden[2] - 0.2)
        value = 1 - (first * 0.997 + second * 0.997**2.5) / (first + second)
        return math.log(value / (1 - value))

    table = GuidanceTable.from_params([None, None], [set(), set()], device).columns
    table.nats_per_token[:] = -math.log(0.997)
    head = (scale, shift, embedding, fc_weight, fc_bias, bins_weight, bins_bias, torch.tensor([1.0, 2.0, 4.0]))
    rows = dict(table_rows=torch.tensor([1, 0], device=device), generated=torch.zeros(2, device=device).int())
    logits, mean = candidate_values(token_ids, *(x.to(device) for x in head), table, **rows, backend=backend)
    # Token 2 in row 0: 0.25 + 2 * -0.5 and -1 + 0.5 * 2; tokens 0 and 2 in row 1: 1 and 3 - 4, -0.5 and 3 - 2.
    expected = torch.tensor([[by_hand(-0.75, 0.0), 0.0], [by_hand(1.0, -1.0), by_hand(-0.5, 1.0)]])
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits, mean)


def make_inputs(rows, dtype, **options):
    """Arguments by name, without padding."""
    sizes = dict(size=96, outputs=100, index="int64") | options
    inputs = simple_arguments("candidate_values", rows, dtype=dtype, **sizes)
    return inputs | {"token_ids": inputs["token_ids"].clamp(0, len(inputs["embedding"]) - 1)}


EDGES = [1, 2, 3, 5, 9, 17, 40, 90, 200]
CLOSENESS = {
    "near": lambda s, below, above: math.exp(-s * (below + above)),
    "le_near": lambda s, below, above: math.exp(-s * above),
    "ge_near": lambda s, below, above: math.exp(-s * below),
}


@pytest.mark.parametrize("constraint", CLOSENESS)
@pytest.mark.parametrize(
    ("target", "generated", "strength", "answer", "tolerance"),
    [
        (80, 30, 5.0, 0, 0.0),
        (80, 30, 0.7, 0, 0.0),
        (20, 90, 2.0, 0, 0.0),  # the target is used up
        (60, 10, 3.0, 10, 0.0),  # the answer covers the lengths up to 10
        (500, 0, 3.0, 300, 0.0),  # the answer covers all lengths
        (80, 50, 5.0, 0, 0.25),  # 10 to 50 more tokens are within the tolerance
        (60, 40, 2.0, 0, 0.5),  # 0 to 50 more tokens
        (40, 55, 4.0, 0, 0.25),  # past the tolerance
        (50, 30, 3.0, 3, 0.002),  # the tolerance lies within a bin
    ],
)
def test_returned_length_is_as_close_as_the_distribution(
    device, backend, constraint, target, generated, strength, answer, tolerance
):
    """Against a numerical integral, over a distribution with probability on both sides of the remaining target."""
    params = {"target_length": target, "value_constraint": constraint, "strength": strength, "gamma": 0.99}
    params["tolerance"] = tolerance
    table = table_of(None, params, answer_length=answer)
    probs = torch.tensor([0.02, 0.08, 0.05, 0.1, 0.2, 0.25, 0.2, 0.1])
    inputs = make_inputs(1, torch.float32, size=4, outputs=4, bins=8, columns=1)
    inputs |= {"fc_weight": torch.zeros(4, 4), "bins_weight": torch.zeros(8, 4), "bins_bias": probs.log()}
    inputs |= {"bin_edges": torch.tensor(EDGES).float(), "table": GuidanceColumns(*(x.to(device) for x in table))}
    inputs |= {"table_rows": torch.tensor([1]), "generated": torch.tensor([generated]).int()}
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    logits, mean = candidate_values(**inputs, backend=backend)

    reach = tolerance * target
    least, most = (math.log(max(target + more - generated, 0) + 2) for more in (-reach, reach))

    def closeness_of(at):
        return CLOSENESS[constraint](strength, max(least - at, 0.0), max(at - most, 0.0))

    closeness, discounted, steps = 0.0, 0.0, 2000
    for p, low, high in zip(probs.tolist(), EDGES[:-1], EDGES[1:], strict=True):
        start, end = (math.log(max(x - 0.5 - answer, 0) + 2) for x in (low, high))
        points = [start + (end - start) * (i + 0.5) / steps for i in range(steps)]
        closeness += p * sum(map(closeness_of, points)) / steps
        discounted += p * 0.99 ** ((low + high - 1) / 2)
    length = nats_of(logits).item() / -math.log(0.99) - answer
    at = math.log(length + 2)
    if length > 1.01 * SHORTEST:
        assert closeness_of(at) == pytest.approx(closeness, rel=1e-3)
        assert at <= least + 1e-5 if constraint == "ge_near" else at >= most - 1e-5
    else:  # all lengths are close enough, or the answer covers them
        assert constraint == "ge_near" and (least == math.log(2) or answer == 300)
    assert math.exp(-nats_of(mean).item()) == pytest.approx(discounted, rel=1e-4)


@pytest.mark.parametrize(
    "params", [{"target_length": 40, "strength": 0}, {"target_length": 40, "value_constraint": "eq"}]
)
def test_eq_and_strength_0_are_guided_by_the_mean(params):
    inputs = make_inputs(1, torch.float32)
    logits, mean = candidate_values(**inputs | {"table": table_of(params), "table_rows": torch.tensor([0])})
    assert torch.equal(logits, mean)
