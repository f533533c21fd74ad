"""``candidate_values``: lengths compared with a numerical integral. ``test_probe.py`` tests the network."""

import math

import pytest
import torch
from torch import nn

from lenvm_kernels import GuidanceTable, parse_guidance
from lenvm_kernels.ops.candidate_values import candidate_values
from lenvm_kernels.reference.candidate_values import SHORTEST
from tests.helpers.cases import simple_arguments

EDGES = [1, 2, 3, 5, 9, 17, 40, 90, 200]


@pytest.mark.parametrize("constraint", ["near", "le_near", "ge_near"])
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
def test_returned_length_has_the_mean_closeness_of_the_distribution(
    device, backend, constraint, target, generated, strength, answer, tolerance
):
    """Compares with a numerical integral. The distribution has probability on both sides of the remaining target."""
    params = {"target_length": target, "value_constraint": constraint, "strength": strength, "gamma": 0.99}
    params = parse_guidance(params | {"tolerance": tolerance})
    table = GuidanceTable.from_params([None, params], [set(), set()], device).columns
    table.answer_length[:] = answer
    probs = torch.tensor([0.02, 0.08, 0.05, 0.1, 0.2, 0.25, 0.2, 0.1])
    inputs = simple_arguments("candidate_values", 1, size=64, outputs=1, bins=16, columns=1)
    inputs |= {"fc_weight": torch.zeros(1, 64), "bins_weight": torch.zeros(8, 1), "bins_bias": probs.log()}
    inputs |= {"bin_edges": torch.tensor(EDGES).float(), "token_ids": torch.zeros(1, 1).int(), "table": table}
    inputs |= {"table_rows": torch.tensor([1]).int(), "generated": torch.tensor([generated]).int()}
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    logits, mean = candidate_values(**inputs, backend=backend)

    reach = tolerance * target
    least, most = (math.log(max(target + more - generated, 0) + 2) for more in (-reach, reach))

    def closeness_of(at):
        below, above = max(least - at, 0.0), max(at - most, 0.0)
        return math.exp(-strength * (below * (constraint != "le_near") + above * (constraint != "ge_near")))

    closeness, discounted, steps = 0.0, 0.0, 2000
    for p, low, high in zip(probs.tolist(), EDGES[:-1], EDGES[1:], strict=True):
        start, end = (math.log(max(x - 0.5 - answer, 0) + 2) for x in (low, high))
        points = [start + (end - start) * (i + 0.5) / steps for i in range(steps)]
        closeness += p * sum(map(closeness_of, points)) / steps
        discounted += p * 0.99 ** ((low + high - 1) / 2)
    length = nn.functional.softplus(logits).item() / -math.log(0.99) - answer
    at = math.log(length + 2)
    if length > 1.01 * SHORTEST:
        assert closeness_of(at) == pytest.approx(closeness, rel=1e-3)
        assert at <= least + 1e-5 if constraint == "ge_near" else at >= most - 1e-5
    else:  # all lengths are within the tolerance or the answer
        assert constraint == "ge_near" and (least == math.log(2) or answer == 300)
    assert torch.sigmoid(-mean).item() == pytest.approx(discounted, rel=1e-4)
