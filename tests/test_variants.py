"""Alternatives to tuning constants name constants that exist, apply while they run, and leave nothing behind."""

from types import SimpleNamespace

import pytest

from bench import variants
from bench._common import Case


@pytest.mark.parametrize("operator", variants.OPERATORS)
def test_alternatives_replace_constants_that_exist(operator):
    module, bench, changes, alternatives = variants.OPERATORS[operator]
    before = dict(vars(module))
    for constants in alternatives:
        assert any(vars(module)[name] != value for name, value in constants.items()), "no alternative: it is what is"
        with variants.replaced(module, constants):
            assert all(vars(module)[name] == value for name, value in constants.items())
    assert dict(vars(module)) == before
    for change in changes:
        assert change.keys() <= bench.PRODUCTION.keys()


def test_the_attention_as_it_is_is_no_alternative():
    module, _, _, alternatives = variants.OPERATORS["value_tree_attention"]
    now = module._launch_config(128, None)
    assert all(constants.get("_launch_config", lambda *_: None)(128, None) != now for constants in alternatives)


def test_an_alternative_applies_while_its_run_lasts(monkeypatch):
    module = SimpleNamespace(TILE=1, WARPS=4)
    bench = SimpleNamespace(make_case=lambda device, shape: Case(lambda: (module.TILE, shape), bytes=1))
    monkeypatch.setattr(variants, "OPERATORS", {"made_up": (module, bench, [], [{"TILE": 2}, {"TILE": 3, "WARPS": 8}])})
    case = variants.make_case("cpu", {"operator": "made_up", "B": 4})
    assert case.run() == (1, {"B": 4})
    assert {label: prepare()() for label, prepare in case.peers.items()} == {
        "TILE 2": (2, {"B": 4}),
        "TILE 3, WARPS 8": (3, {"B": 4}),
    }
    assert module.TILE == 1

    def broken():
        raise RuntimeError("out of shared memory")

    case.run = broken
    with pytest.raises(RuntimeError, match="out of shared memory"):
        case.peers["TILE 2"]()()
    assert module.TILE == 1
