"""The drop-in for the LenVM fork of SGLang: ``install()``, token temperatures, the tree mask and the value head."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lenvm_kernels.engines.sglang_fork import drop_in
from lenvm_kernels.engines.signatures import USED
from tests.helpers.sglang_fork import SAMPLING, Request, install, use_stand_in

GOLDEN_MASKS = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "tree_mask.jsonl").open()]
build_mask = drop_in.build_tree_value_custom_mask_and_positions


def resolve(modules, name):
    """A function of the stand-in by ``module:name``."""
    module, path = name.split(":")
    *owner, attribute = path.split(".")
    return getattr(getattr(modules[module], owner[0]) if owner else modules[module], attribute)


def test_install_replaces_every_name_once(monkeypatch):
    modules = use_stand_in(monkeypatch)
    before = {name: resolve(modules, name) for name in drop_in.REPLACED}
    assert drop_in.install() == before
    after = {name: resolve(modules, name) for name in drop_in.REPLACED}
    assert all(after[name] is not before[name] for name in before)
    assert drop_in.install() == before and {name: resolve(modules, name) for name in before} == after


@pytest.mark.parametrize("change", ["is not there", "takes"])
@pytest.mark.parametrize("name", USED["sglang_fork"])
def test_install_changes_nothing_in_other_versions(monkeypatch, name, change):
    attribute = name.replace(":", ".").rpartition(".")[2]
    if change == "takes":
        modules = use_stand_in(monkeypatch, **{attribute: "one, other"})
    else:
        modules = use_stand_in(monkeypatch, without=name)
    before = vars(modules[SAMPLING].LvmGuidedSampler).copy()
    with pytest.raises(ImportError, match=f"needs the LenVM fork of SGLang .*{attribute} {change}"):
        drop_in.install()
    assert vars(modules[SAMPLING].LvmGuidedSampler) == before


def test_token_temperatures_drop_ids_beyond_int64(monkeypatch):
    extract = install(monkeypatch)[SAMPLING]._extract_token_temperature_scale
    scale = {"3": 2.0, str(10**30): 2.0}
    assert extract(Request("a", [5], {"token_temperature_scale": scale})) == {3: 2.0}
    assert extract(Request("a", [5], None)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_logits_are_fp32(dtype):
    torch.manual_seed(8)
    head = SimpleNamespace(fc=torch.nn.Linear(24, 24, dtype=dtype), summary=torch.nn.Linear(24, 1, dtype=dtype))
    hidden = torch.randn(2, 5, 24)
    with torch.no_grad():
        logits = drop_in.value_head_forward(head, hidden)
        x = torch.nn.functional.silu(head.fc.double()(hidden.to(dtype).double()))
        torch.testing.assert_close(logits, head.summary.double()(x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("golden", GOLDEN_MASKS)
def test_golden_masks_of_the_fork(golden):
    lens = {name: golden[name] for name in ("prefix_lens", "candidate_lens", "cached_prefix_lens")}
    mask, positions = build_mask(**lens, device=torch.device("cpu"))
    assert mask.dtype == torch.bool and positions.dtype == torch.int64
    assert "".join("01"[bit] for bit in mask.tolist()) == golden["mask"]
    assert positions.tolist() == golden["positions"]


@pytest.mark.parametrize(("prefix", "candidates", "cached"), [(0, 2, 0), (3, 0, 0), (3, 2, 4), (3, 2, -1)])
def test_mask_rejects_bad_lengths(prefix, candidates, cached):
    lens = dict(prefix_lens=[5, prefix], candidate_lens=[2, candidates], cached_prefix_lens=[5, cached])
    with pytest.raises(ValueError, match=f"got prefix {prefix}, candidates {candidates}, cached {cached}"):
        build_mask(**lens, device="cpu")
