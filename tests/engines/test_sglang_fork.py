"""The drop-in for the LenVM fork of SGLang: ``install()``, bad requests, the tree mask and the value head."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lenvm_kernels.engines.sglang_fork import drop_in as sglang_fork
from lenvm_kernels.engines.signatures import USED
from tests.helpers.sglang_fork import ALL, SAMPLING, Request, install, use_stand_in

GOLDEN_MASKS = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "tree_mask.jsonl").open()]
VOCAB = 50
build_mask = sglang_fork.build_tree_value_custom_mask_and_positions


@pytest.fixture
def modules(monkeypatch):
    return install(monkeypatch)


def random_rows(rows, seed):
    """Probabilities and value logits, ``[rows, V]``."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.softmax(2 * torch.randn(rows, VOCAB, generator=generator), dim=1),
        2 * torch.randn(rows, VOCAB, generator=generator),
    )


def sampler_of(cls, z, function=None):
    """A sampler whose value server returns ``z [B, V]``, one row per request id."""

    def post_tree_value(rids, prefix_ids, candidate_ids, reqs):
        assert prefix_ids == [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        return [z[int(rid), ids].tolist() for rid, ids in zip(rids, candidate_ids, strict=True)]

    sampler = cls.__new__(cls)
    sampler._inproc, sampler._post_tree_value = False, post_tree_value
    sampler._fn = function or sys.modules[SAMPLING].lvm_combined_guidance
    return sampler


def requests_of(params, generated=3):
    requests = [Request(str(row), [5, 6], p) for row, p in enumerate(params)]
    for request in requests:
        request.output_ids = list(range(10, 10 + generated))
    return requests


def filters_of(rows, top_k=8, top_p=1.0, min_p=0.0):
    """Filters in the order of the fork's parameters, temperatures first."""
    kinds = ((top_p, torch.float32), (top_k, torch.int32), (min_p, torch.float32))
    columns = [torch.as_tensor(value, dtype=dtype).expand(rows).contiguous() for value, dtype in kinds]
    return torch.ones(rows, 1), *columns


def run(modules, probs, z, params, function=None, generated=3, **filters):
    """The probabilities that the fork's sampler draws from; None if they are unchanged."""
    sampler = sampler_of(modules[SAMPLING].LvmGuidedSampler, z, function)
    return sampler.apply(probs.clone(), requests_of(params, generated), *filters_of(len(probs), **filters))


def test_install_replaces_every_name_once(monkeypatch):
    modules = use_stand_in(monkeypatch)
    originals = sglang_fork.install()
    assert set(originals) == set(sglang_fork.REPLACED) and originals == sglang_fork.install()
    for name, function in sglang_fork.REPLACED.items():
        module, path = name.split(":")
        *owner, attribute = path.split(".")
        found = getattr(getattr(modules[module], owner[0]) if owner else modules[module], attribute)
        assert found is function and originals[name] is not function, name


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
        sglang_fork.install()
    assert vars(modules[SAMPLING].LvmGuidedSampler) == before


@pytest.mark.parametrize(
    "params", [None, {}, {"mode": "centered_exp", "scale": 0}, {"scale": 0.5, "entropy_threshold": 9.0}]
)
def test_batch_without_guidance_is_unchanged(modules, params):
    probs, z = random_rows(2, seed=2)
    assert run(modules, probs, z, [params, None]) is None


@pytest.mark.parametrize(
    ("custom_params", "message"),
    [
        ({"mode": "loud"}, "value_mode must be one of"),
        ({"target_length": "long"}, "target_length must be a finite number"),
        ({"scale": 0.5, "gamma": 1.5}, "gamma must be a finite number > 0 and < 1, got 1.5"),
        ({"token_temperature_scale": [3]}, "token_temperature_scale must be a mapping"),
        ({"scale": 0.5, "end_token_ids": [7]}, "end_token_ids and landing must be absent in the fork"),
        ({"target_length": 60, "landing": [7]}, "end_token_ids and landing must be absent in the fork"),
    ],
)
def test_bad_request_is_logged_once_and_changes_no_other_row(modules, caplog, custom_params, message):
    guided = {"mode": "centered_exp", "scale": -5.0}
    probs, z = random_rows(3, seed=4)
    requests, top_k = requests_of([guided, custom_params, guided]), torch.tensor([5, ALL, 5])
    sampler = sampler_of(modules[SAMPLING].LvmGuidedSampler, z)
    for _ in range(2):
        assert modules[SAMPLING]._extract_token_temperature_scale(requests[1]) is None
        result = sampler.apply(probs.clone(), requests, *filters_of(3, top_k))
    assert torch.equal(result, run(modules, probs, z, [guided, None, guided], top_k=top_k))
    assert torch.equal(result[1], probs[1])
    assert caplog.text.count("request 1 has bad custom_params and is not guided") == 1 and message in caplog.text


def test_token_temperatures_drop_ids_beyond_int64(modules):
    extract, scale = modules[SAMPLING]._extract_token_temperature_scale, {"3": 2.0, str(10**30): 2.0}
    assert extract(Request("a", [5], {"token_temperature_scale": scale})) == {3: 2.0}
    assert extract(Request("a", [5], None)) is None


def test_lost_candidates_are_logged_once(modules, caplog):
    for _ in range(2):
        result = run(modules, torch.full((1, 100), 0.01), torch.zeros(1, 100), [{"scale": 0.5}], top_k=ALL)
    assert result[0].nonzero()[:, 0].tolist() == list(range(64))
    assert caplog.text.count("more than 64 candidates; the others, of probability 0.36") == 1


def test_custom_guidance_function_uses_fork_path(monkeypatch, caplog):
    modules = use_stand_in(monkeypatch)
    sglang_fork.install()
    for _ in range(2):
        assert run(modules, *random_rows(1, seed=7), [{"scale": 0.5}], function=min) is None  # the stand-in's result
    assert caplog.text.count("lvm_guided_fn is <built-in function min>, not one of the fork's three") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_logits_are_fp32(dtype):
    torch.manual_seed(8)
    head = SimpleNamespace(fc=torch.nn.Linear(24, 24, dtype=dtype), summary=torch.nn.Linear(24, 1, dtype=dtype))
    hidden = torch.randn(2, 5, 24)
    with torch.no_grad():
        logits = sglang_fork.value_head_forward(head, hidden)
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
    with pytest.raises(ValueError, match=f"got prefix {prefix}, candidates {candidates}, cached {cached}"):
        build_mask(
            prefix_lens=[5, prefix], candidate_lens=[2, candidates], cached_prefix_lens=[5, cached], device="cpu"
        )
