"""The guided step's host cost does not depend on the batch size, unlike the published algorithm's. Counts are exact."""

import pytest

from bench import host

ROWS = (1, 8, 64, 512)
# Per step, with a model of one layer: launches of Triton kernels in the graph, and upper limits of torch operators
# (allocations included) and trace events (a fifth above the number in Python 3.11). One kernel is launched from Python.
LIMITS = {
    "value model": (13, 2, 860),
    "value model, drafts": (15, 5, 980),
    "probe": (5, 3, 870),
    "none": (3, 2, 860),
}
LAYER_LAUNCHES = 7


@pytest.mark.parametrize("kind", LIMITS)
def test_cost_of_the_guided_step_does_not_grow_with_the_batch(kind):
    """A few events differ between one row and several rows, because torch branches; no event is per row."""
    one, *more = costs = [host.cost_of(kind, rows) for rows in ROWS]
    assert all(cost[1:] == one[1:] and abs(cost.events - one.events) <= 10 for cost in more), costs
    in_graph, operators, events = LIMITS[kind]
    assert (one.launches, one.in_graph) == (1, in_graph) and one.operators <= operators and one.events <= events, one


def test_cost_of_the_published_step_grows_with_the_batch():
    """By at least four operators and ten events per row."""
    few, many = (host.cost_of("two forwards", rows) for rows in (8, 64))
    assert many.operators - few.operators >= 4 * 56 and many.events - few.events >= 10 * 56


def test_launches_of_a_layer():
    one, two, three = (host.cost_of("value model", 8, layers).in_graph for layers in (1, 2, 3))
    assert three - two == two - one <= LAYER_LAUNCHES
