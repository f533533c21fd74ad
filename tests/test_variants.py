"""Alternatives to tuning constants name constants that exist, apply while they run, and leave nothing behind."""

from types import SimpleNamespace

import pytest

from bench import variants
from bench.harness.cases import Benchmark, Case


@pytest.mark.parametrize("operator", variants.OPERATORS)
def test_alternatives_replace_constants_that_exist(operator):
    changes, alternatives = variants.OPERATORS[operator]
    now = vars(variants.module(operator))
    for constants in alternatives:
        assert any(now[name] != value for name, value in constants.items()), "no alternative: it is what is"
    for change in changes:
        assert change.keys() <= variants.benchmark(operator).production.keys()


def test_the_attention_as_it_is_is_no_alternative():
    now = variants.module("value_tree_attention")._launch_config(128, None)
    for constants in variants.OPERATORS["value_tree_attention"][1]:
        assert constants.get("_launch_config", lambda *_: None)(128, None) != now


def test_shapes_are_those_of_the_benchmarks():
    shapes, quick = variants.BENCHMARK.shapes(), variants.BENCHMARK.shapes(quick=True)
    assert len(shapes) == sum(len(changes) for changes, _ in variants.OPERATORS.values())
    assert [shape["operator"] for shape in quick] == list(variants.OPERATORS)
    attention = dict(model="Qwen2.5-1.5B", B=1, L=32_768, delta=1, tree="5", cache="dtype")
    assert shapes[1] == {"operator": "value_tree_attention", **attention}
    assert quick[-1] == dict(operator="reweight_scatter", B=4, K=8, V=32_000, scatter=True, dtype="float32")


def test_an_alternative_applies_while_its_run_lasts(monkeypatch):
    module = SimpleNamespace(TILE=1, WARPS=4)
    benchmark = Benchmark("made_up", lambda device, B: Case(lambda: (module.TILE, B), bytes=1), {})
    monkeypatch.setattr(variants, "module", lambda operator: module)
    monkeypatch.setattr(variants, "benchmark", lambda operator: benchmark)
    monkeypatch.setitem(variants.OPERATORS, "made_up", ([], [{"TILE": 2}, {"TILE": 3, "WARPS": 8}]))
    case = variants.make_case("cpu", operator="made_up", B=4)
    assert case.run() == (1, 4)
    assert {label: prepare()() for label, prepare in case.peers.items()} == {
        "TILE 2": (2, 4),
        "TILE 3, WARPS 8": (3, 4),
    }
    assert module.TILE == 1

    def broken():
        raise RuntimeError("out of shared memory")

    case.run = broken
    with pytest.raises(RuntimeError, match="out of shared memory"):
        case.peers["TILE 2"]()()
    assert vars(module) == {"TILE": 1, "WARPS": 4}
