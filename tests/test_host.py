"""The guided step costs the host the same at any batch size, the two-forward baseline does not; how that is counted.

Counts only: they are exact, and a loop over requests shows in them. Times are ``bench.host``'s.
"""

from itertools import groupby, pairwise

import pytest
import torch

from bench import host

VOCAB, LAYERS = 3000, 1
ROWS = (1, 8, 64, 512)


@pytest.fixture(scope="module")
def model():
    return host.narrow_model(LAYERS, VOCAB)


def costs(model, name):
    return {rows: host.count_case(name, model, rows, VOCAB) for rows in ROWS}


def assert_same_for_all(of):
    """Equal, but for what asks whether there is one row or a few: a dozen bytecodes a tensor, none a row."""
    one, few = of[1], of[8]
    for rows, cost in of.items():
        for count in ("operators", "views", "launches", "allocations"):
            assert getattr(cost, count) == getattr(one, count), (count, of)
        assert cost.calls <= few.calls + 3 and cost.bytecodes <= few.bytecodes + 30, (rows, of)
    assert few.calls <= 1.1 * one.calls and few.bytecodes <= 1.1 * one.bytecodes, of


@pytest.mark.parametrize("name", ["guided step", "guided step, value model in a graph"])
def test_the_guided_step_does_not_grow_with_the_batch(model, name):
    of = costs(model, name)
    assert_same_for_all(of)
    assert of[1].launches > 3 and of[1].operators > 9 and of[1].calls > 100


@pytest.mark.parametrize("name", ["two forwards", "two forwards, outside the forwards", "two forwards, with a target"])
def test_the_baseline_grows_with_the_batch(model, name):
    """At least four operators and two allocations more a row; what the test above would not let pass."""
    of = costs(model, name)
    for few, many in pairwise(ROWS):
        more = many - few
        assert of[many].operators - of[few].operators >= 4 * more
        assert of[many].allocations - of[few].allocations >= 2 * more
        assert of[many].calls - of[few].calls >= 10 * more
        assert of[many].bytecodes - of[few].bytecodes >= 100 * more
    with pytest.raises(AssertionError):
        assert_same_for_all(of)


def test_a_graph_leaves_the_launches_of_the_value_model_out(model):
    """Of both layers and head; what else is launched is what a step of no layers launches."""
    launches, graph = (
        host.count_case(name, model, 8, VOCAB) for name in ("guided step", "guided step, value model in a graph")
    )
    deeper = host.count_case("guided step", host.narrow_model(LAYERS + 1, VOCAB), 8, VOCAB)
    assert host.count_case("guided step, value model in a graph", host.narrow_model(2, VOCAB), 8, VOCAB) == graph
    a_layer = deeper.launches - launches.launches
    assert a_layer >= 5 and launches.launches - graph.launches > a_layer


def test_a_step_takes_no_more_python_than_it_did(model):
    """Bytecodes and calls of Python 3.11, and a fifth more. A decode step of 2 ms has to be fed."""
    graph = host.count_case("guided step, value model in a graph", model, 8, VOCAB)
    assert graph.bytecodes <= 3400 and graph.calls <= 260, graph
    one, two = (host.count_case("guided step", host.narrow_model(layers, VOCAB), 8, VOCAB) for layers in (1, 2))
    assert two.bytecodes - one.bytecodes <= 8100 and two.calls - one.calls <= 470, (one, two)


def test_counting_a_step():
    """Operators, memory that is theirs, views, bytecodes and calls."""
    x = torch.zeros(4, 4)

    def step(times=3):
        y = x + 1  # an allocation of 64 bytes
        y.add_(1)
        for _ in range(times):
            abs(-1)
        y.unbind()  # four views
        return y.view(16)[:8].sum()  # two more, and an allocation of 4 bytes

    places = []
    cost = host.count(host.Subject(step, lambda: places.append(0)))
    assert (cost.operators, cost.views, cost.allocations, cost.bytes, cost.launches) == (3, 6, 2, 68, 0)
    assert len(places) == 5  # put back after each of its calls
    longer = host.count(host.Subject(lambda: step(103)))
    assert longer.calls == cost.calls + 100 + 1  # and that of the lambda
    assert 300 <= longer.bytecodes - cost.bytecodes <= 1500


def test_replay_computes_nothing_and_returns_what_was_recorded():
    x = torch.zeros(3)
    replay = host.Replay()

    def step():
        y = x + 1
        x.add_(1)
        return y, y[:2].sum().item()

    with replay:
        recorded = step()
    assert x.tolist() == [1.0] * 3 and recorded[1] == 2.0
    for _ in range(2):
        replay.place = 0
        with replay:
            replayed = step()
        assert replayed[0] is recorded[0] and replayed[1] == 2.0 and x.tolist() == [1.0] * 3
    assert replay.place == len(replay.tape) == 4
    replay.place = 0
    with (
        replay,
        pytest.raises(RuntimeError, match=r"operator 0 of the step was aten.add.Tensor, is now aten.mul.Tensor"),
    ):
        x * 2


def test_times_are_of_every_call(monkeypatch):
    """Subjects are timed in turns, and each is put back after every step."""
    monkeypatch.setattr(host, "ROUND_SECONDS", 0.001)
    x, calls = torch.zeros(1), []

    def subject(name):
        return host.Subject(lambda: calls.append(name) or x + 1, lambda: calls.append(f"{name} again"))

    times = host.python_seconds([subject("a"), subject("b")])
    assert len(times) == 2 and min(times) > 0
    assert calls[:8] == ["a", "a again"] * 2 + ["b", "b again"] * 2
    assert all(after == f"{step} again" for step, after in zip(calls[::2], calls[1::2], strict=True))
    turns = [step for step, _ in groupby(calls[8::2])]
    assert turns == ["a", "b"] * host.ROUNDS


def test_tables():
    cost = host.Cost(operators=10, views=4, launches=3, allocations=2, bytes=1_500_000, bytecodes=1200, calls=20)
    twice = dict(python_seconds=0.004, rows=8, **{**vars(cost), "operators": 25})
    results = [{"step": "s", "rows": 1, "python_seconds": 0.002, **vars(cost)}, {"step": "s", **twice}]
    lines = host.tables(results).splitlines()
    assert lines[2] == "| s | 1 | 2.00 | 10 | 4 | 3 | 2 | 1.5 | 1,200 | 20 |"
    assert lines[-1] == "| s | 2.00 | 2.50 | 1.00 | 1.00 | 1.00 |"
    about = host.environment("cpu") | {"layers": 2, "operator_seconds": 2e-6}
    assert about["command"] in host.page(about, results) and host.tables(results) in host.page(about, results)
