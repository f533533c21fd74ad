"""The drop-in for the LenVM fork of SGLang: against the fork's own functions where it can be imported.

Everywhere else a stand-in with the fork's names and parameters shows that ``install()`` refuses what does not fit, and
what the functions do that it puts there. In an environment with what the fork depends on::

    PYTHONPATH=Length-Value-Model/sglang-LenVM/python python -m pytest tests/test_sglang_fork.py
"""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lenvm_kernels.adapters import sglang_fork
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from tests.helpers.sglang_fork import ALL, GUIDED_SAMPLING, install_in_fork, use_stand_in
from tests.helpers.targets import expectation, target_of

GOLDEN_MASKS = [json.loads(line) for line in (Path(__file__).parent / "golden" / "tree_mask.jsonl").open()]
VOCAB, EOS = 50, 7
ATOL = 1e-3  # of probabilities: the fork's stopping rule, as for the golden pairs
MET = 1e-5  # of expected values: a target that was met


@pytest.fixture
def stand_in(monkeypatch):
    """In place of the fork, whether there is one or not."""
    return use_stand_in(monkeypatch)


@pytest.fixture(scope="module")
def fork():
    """The fork after ``install()``: its module, its functions as they were, and its sampler with these."""
    return install_in_fork()


@pytest.fixture(params=["stand-in", "fork"])
def installed(request):
    """The sampler's module after ``install()``."""
    if request.param == "fork":
        return request.getfixturevalue("fork").module
    modules = request.getfixturevalue("stand_in")
    sglang_fork.install()
    return modules[GUIDED_SAMPLING]


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """No warning was given, and no value model loaded."""
    monkeypatch.setattr(sglang_fork, "_warned", set())
    monkeypatch.setattr(sglang_fork, "_gamma", None)


class Values:
    """In place of the fork's value model, or of its client of a server: the logit of each request and token."""

    def __init__(self, z):
        self.z = z

    def clean_stale_requests(self, active_rids): ...
    def tree_value_extend(self, rids, prefix_ids, reqs): ...

    def tree_value_launch_gpu(self, rids, candidate_ids, gpu_candidates=None):
        return [self.z[int(rid), ids] for rid, ids in zip(rids, candidate_ids, strict=True)]

    def tree_value_collect_gpu(self, embeddings):
        return embeddings

    def tree_value(self, rids, prefix_ids, candidate_ids, reqs):
        assert prefix_ids == [req.origin_input_ids + req.output_ids for req in reqs]
        return [values.tolist() for values in self.tree_value_launch_gpu(rids, candidate_ids)]


def request_of(row, custom_params, generated=3):
    return SimpleNamespace(
        rid=str(row),
        sampling_params=SimpleNamespace(custom_params=custom_params),
        origin_input_ids=[5, 6],
        output_ids=list(range(1, generated + 1)),
        eos_token_ids={EOS},
    )


def random_rows(rows, seed, end=0.0):
    """``probs [rows, V]``, of which the token that ends the output has ``end`` more, and as many value logits."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(rows, VOCAB, generator=generator), dim=1)
    probs[:, EOS] += end
    return probs / (1 + end), 2 * torch.randn(rows, VOCAB, generator=generator)


def sampler_of(cls, z, function=None):
    sampler = cls.__new__(cls)
    sampler._inproc = Values(z)
    sampler._fn = function or sys.modules[GUIDED_SAMPLING].lvm_combined_guidance
    return sampler


def filters_of(rows, top_k=8, top_p=1.0, min_p=0.0):
    """In the order of the fork's parameters, temperatures first."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    f32 = torch.float32
    return torch.ones(rows, 1), column(top_p, f32), column(top_k, torch.int32), column(min_p, f32)


def both(fork, *arguments, **options):
    """:func:`run` with our functions and with the fork's."""
    return tuple(run(cls, *arguments, **options) for cls in (fork.module.LvmGuidedSampler, fork.Original))


def both_pending(fork, probs, z, params, filters):
    """The candidates that both send to the value model."""
    requests = [request_of(row, p) for row, p in enumerate(params)]
    samplers = [sampler_of(cls, z) for cls in (fork.module.LvmGuidedSampler, fork.Original)]
    return [sampler._build_pending(probs.clone(), requests, *filters) for sampler in samplers]


def run(cls, probs, z, params, *filters, function=None, generated=3):
    """One step of the fork's sampler: the probabilities it goes on with, None for those it came with."""
    requests = [request_of(row, p, generated) for row, p in enumerate(params)]
    return sampler_of(cls, z, function).apply(probs.clone(), requests, *(filters or filters_of(len(probs))))


# --- install() ---


def test_install_without_the_fork_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(sglang_fork, "_originals", {})
    monkeypatch.setitem(sys.modules, GUIDED_SAMPLING, None)  # None: not to be imported, even if it is there
    with pytest.raises(ImportError, match=rf"needs the LenVM fork of SGLang .* cannot import {GUIDED_SAMPLING}: "):
        sglang_fork.install()


def test_install_replaces_every_place_once(stand_in):
    before = {name: lookup(stand_in, name) for name in sglang_fork.REPLACED}
    assert sglang_fork.install() == before
    assert {name: lookup(stand_in, name) for name in before} == sglang_fork.REPLACED
    assert sglang_fork.install() == before  # ours are not taken for the fork's


@pytest.mark.parametrize("name", [*sglang_fork.REPLACED, *sglang_fork.USED])
@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_install_changes_nothing_in_another_version(stand_in, monkeypatch, name, change):
    owner, attribute = owner_of(stand_in, name)
    if change == "gone":
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, staticmethod(lambda one, *, other=3: None))
    names = [other for other in sglang_fork.REPLACED if other != name]
    before = [lookup(stand_in, other) for other in names]
    message = name if change == "gone" else rf"{name} has parameters \(one, \*, other=3\), expected \("
    with pytest.raises(ImportError, match=message):
        sglang_fork.install()
    assert [lookup(stand_in, other) for other in names] == before


def owner_of(modules, name):
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    return getattr(modules[module], owner) if owner else modules[module], attribute


def lookup(modules, name):
    owner, attribute = owner_of(modules, name)
    return getattr(owner, attribute)


# --- what the replacements do, in the fork or in the stand-in for it ---


def test_rows_have_their_own_modes(installed):
    """A row of a batch of all modes is the row alone."""
    params = [
        {"mode": "centered_exp", "value_scale": -20.0},
        {"mode": "value_bias", "value_scale": 2.0},
        {"value_scale": 0.7},
        {"mode": "linear", "value_scale": 0.5},
        {"mode": "exp", "value_scale": 2.0},
        {"mode": "length_mul", "value_scale": 0.5, "gamma": 0.9},
        {"target_length": 12, "gamma": 0.9},
        {"target_length": 12, "op": "ge"},
        {"target_length": 12, "op": "le"},
        {"target_length": 200, "op": "eq_soft"},
    ]
    probs, z = random_rows(len(params), seed=0)
    together = run(installed.LvmGuidedSampler, probs, z, params)
    for row, p in enumerate(params):
        alone = [None] * len(params)
        alone[row] = p
        expected = run(installed.LvmGuidedSampler, probs, z, alone)[row]
        assert not torch.equal(expected, probs[row])
        torch.testing.assert_close(together[row], expected, rtol=0, atol=0)


def test_targets_count_the_tokens_generated(installed):
    """The candidate whose length is nearest to what is left of the target, then the end of the output."""
    gamma = 0.9
    z = torch.full((1, VOCAB), 9.0)  # also that of the end, which counts as 0
    probs = torch.zeros(1, VOCAB)
    tokens = [EOS, 20, 21, 22]
    probs[0, tokens] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    values = 1 - gamma ** torch.tensor([5.0, 10.0, 15.0])  # lengths
    z[0, tokens[1:]] = torch.logit(values)
    for generated, chosen in ((1, 22), (6, 21), (11, 20), (16, EOS)):
        params = [{"target_length": 16, "gamma": gamma}]
        result = run(installed.LvmGuidedSampler, probs, z, params, generated=generated)
        assert result[0].nonzero().tolist() == [[chosen]]


def test_other_rows_keep_their_own_filters(installed):
    """Unguided rows, and rows below their entropy threshold, beside a guided one; without filters they stay as is."""
    params = [{"scale": 0.5}, None, None, {"scale": 0.5, "entropy_threshold": 9.0}, {}, {"scale": 1.0}]
    probs, z = random_rows(len(params), seed=1)
    filters = filters_of(
        len(params), top_k=[4, 3, ALL, 6, ALL, ALL], top_p=[1, 1, 0.6, 0.9, 1, 1], min_p=[0, 0, 0, 0.05, 0, 0.2]
    )
    result = run(installed.LvmGuidedSampler, probs, z, params, *filters)
    assert torch.equal(result[4], probs[4])
    for row, (top_k, top_p, min_p) in {1: (3, 1, 0), 2: (VOCAB, 0.6, 0), 3: (6, 0.9, 0.05), 5: (VOCAB, 1, 0.2)}.items():
        kept, mass = [], 0.0
        for token in probs[row].argsort(descending=True)[:top_k].tolist():
            if mass <= top_p and probs[row, token] >= min_p * probs[row].max():
                kept.append(token)
            mass += probs[row, token].item()
        assert 1 < len(kept) < VOCAB
        assert result[row].nonzero()[:, 0].tolist() == sorted(kept)
        assert torch.equal(result[row, kept], probs[row, kept])


def test_nothing_to_guide(installed):
    probs, z = random_rows(2, seed=2)
    for params in (None, {}, {"mode": "centered_exp", "scale": 0}, {"scale": 0.5, "entropy_threshold": 9.0}):
        assert run(installed.LvmGuidedSampler, probs, z, [params, None]) is None


def test_a_single_candidate_needs_no_value(installed):
    probs, z = random_rows(2, seed=3)
    result = run(installed.LvmGuidedSampler, probs, z * math.nan, [{"scale": 0.5}] * 2, *filters_of(2, top_k=1))
    assert torch.equal(result, torch.nn.functional.one_hot(probs.argmax(dim=1), VOCAB).float())


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
def test_a_bad_request_harms_nobody(installed, caplog, custom_params, message):
    """It is not guided, which is logged once; the others are."""
    guided = {"mode": "centered_exp", "scale": -5.0}
    probs, z = random_rows(3, seed=4)
    requests = [request_of(row, p) for row, p in enumerate([guided, custom_params, guided])]
    sampler, filters = sampler_of(installed.LvmGuidedSampler, z), filters_of(3, top_k=[5, ALL, 5])
    for _ in range(2):
        assert installed._extract_token_temperature_scale(requests[1]) is None
        result = sampler.apply(probs.clone(), requests, *filters)
    expected = run(installed.LvmGuidedSampler, probs, z, [guided, None, guided], *filters)
    assert torch.equal(result, expected) and torch.equal(result[1], probs[1])
    assert caplog.text.count("request 1 has bad custom_params and is not guided") == 1 and message in caplog.text


def test_requests_come_and_go(installed):
    """One sampler for all steps of a server: a later request with the id and the row of an earlier one is another."""
    probs, z = random_rows(2, seed=5)
    sampler = sampler_of(installed.LvmGuidedSampler, z)
    for params in ([{"scale": 0.5}, None], [{"scale": 0.8}, None], [None, {"scale": 0.5}], [{"scale": 0.5}]):
        rows = len(params)
        requests = [request_of(row, p) for row, p in enumerate(params)]
        result = sampler.apply(probs[:rows].clone(), requests, *filters_of(rows))
        assert torch.equal(result, run(installed.LvmGuidedSampler, probs[:rows], z, params))


def test_token_temperatures(installed):
    """Ids that no tensor could hold are left out: the fork puts all of them into one."""
    scale = {"3": 2.0, str(10**30): 2.0}
    assert installed._extract_token_temperature_scale(request_of(0, {"token_temperature_scale": scale})) == {3: 2.0}
    assert installed._extract_token_temperature_scale(request_of(0, None)) is None


def test_more_candidates_than_slots_are_said(installed, caplog):
    probs, z = torch.full((1, 100), 0.01), torch.zeros(1, 100)
    for _ in range(2):
        result = run(installed.LvmGuidedSampler, probs, z, [{"scale": 0.5}], *filters_of(1, top_k=ALL))
    assert result[0].nonzero()[:, 0].tolist() == list(range(64))
    assert caplog.text.count("more than 64 candidates; the others, of probability 0.36") == 1


def test_a_function_of_ones_own_is_left_to_the_fork(stand_in, caplog):
    sglang_fork.install()
    probs, z = random_rows(1, seed=7)
    sampler = stand_in[GUIDED_SAMPLING].LvmGuidedSampler
    for _ in range(2):
        assert run(sampler, probs, z, [{"scale": 0.5}], function=min) is None  # as the stand-in does
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
    mask, positions = sglang_fork.build_tree_value_custom_mask_and_positions(**lens, device=torch.device("cpu"))
    assert mask.dtype == torch.bool and positions.dtype == torch.int64
    assert "".join("01"[bit] for bit in mask.tolist()) == golden["mask"]
    assert positions.tolist() == golden["positions"]


# --- against the fork's own functions ---


def test_a_function_of_ones_own_keeps_the_forks_path(fork):
    def function(token_probs, token_values, token_ids, req):
        return token_values

    params = [{"scale": 0.5}, None, {"target_length": 40}]
    probs, z = random_rows(3, seed=7)
    assert torch.equal(*both(fork, probs, z, params, function=function))


def test_candidates_are_the_forks(fork):
    rows = 300
    generator = torch.Generator().manual_seed(8)
    probs, z = random_rows(rows, seed=8)
    params = [
        {"mode": "centered_exp", "scale": -5.0, "entropy_threshold": threshold}
        for threshold in (2 * torch.rand(rows, generator=generator)).tolist()
    ]
    for row in range(0, rows, 2):
        del params[row]["entropy_threshold"]
    params[::5] = [None] * len(params[::5])
    filters = filters_of(
        rows,
        top_k=torch.randint(1, 30, (rows,), generator=generator),
        top_p=torch.where(torch.rand(rows, generator=generator) < 0.5, 1.0, torch.rand(rows, generator=generator)),
        min_p=torch.where(torch.rand(rows, generator=generator) < 0.5, 0.0, torch.rand(rows, generator=generator)),
    )
    ours, theirs = both_pending(fork, probs, z, params, filters)
    assert ours.send_batch_indices == theirs.send_batch_indices and 50 < len(ours.send_batch_indices) < 200
    assert ours.candidate_ids_send == theirs.candidate_ids_send
    assert ours.prefix_ids_send == theirs.prefix_ids_send

    ours, theirs = both(fork, probs, z, params, *filters)
    written = (theirs != probs).any(dim=1)
    singles = (theirs == 1).any(dim=1)
    assert singles.sum() > 20
    torch.testing.assert_close(ours[written], theirs[written], rtol=0, atol=1e-6)
    assert torch.equal(ours[singles], theirs[singles])


def test_candidates_without_top_k_are_the_forks(fork):
    rows = 40
    probs, z = random_rows(rows, seed=9)
    filters = filters_of(rows, top_k=ALL, top_p=torch.linspace(0.3, 1.0, rows), min_p=0.01)
    params = [{"mode": "linear", "scale": 0.9}] * rows
    ours, theirs = both_pending(fork, probs, z, params, filters)
    assert ours.send_batch_indices == theirs.send_batch_indices
    assert [sorted(ids) for ids in ours.candidate_ids_send] == theirs.candidate_ids_send


@pytest.mark.parametrize("mode", ["centered_exp", "value_bias"])
def test_modes_without_a_target_are_the_forks(fork, mode):
    rows = 200
    probs, z = random_rows(rows, seed=10, end=0.2)
    params = [{"mode": mode, "scale": scale} for scale in torch.linspace(-20, 20, rows).tolist()]
    ours, theirs = both(fork, probs, z, params)
    assert (theirs[:, EOS] > 0).sum() > 100
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def expected_values(result, z):
    end = torch.arange(VOCAB) == EOS
    return expectation(result / result.sum(1, keepdim=True), z, end)


def targets(probs, z, params, top_k=8):
    """The specification's target of the expected value of each row."""
    q = torch.where(probs >= probs.topk(top_k, dim=1).values[:, -1:], probs, 0.0).double()
    z = torch.where(torch.arange(VOCAB) == EOS, -math.inf, z.double())
    table = GuidanceTable.from_params([parse_guidance(p) for p in params], [{EOS}] * len(params), "cpu").columns
    return target_of(table, q / q.sum(1, keepdim=True), z)


def test_modes_with_a_target_are_the_forks(fork):
    """In one batch, which a target sends to the fork's slow path. That path, too, stops short on some rows."""
    rows = 400
    probs, z = random_rows(rows, seed=11, end=0.1)
    tilting, choosing = [], []
    for scale in torch.linspace(0.3, 1.9, 40).tolist():
        tilting += [{"mode": mode, "scale": scale} for mode in ("mul", "linear", "exp", "length_mul")]
        tilting.append({"target_value": scale / 2, "op": "eq_soft"})
        choosing += [{"target_length": 500 * scale, "op": op, "gamma": 0.99} for op in ("eq", "ge", "le")]
        choosing += [{"target_length": 2, "op": "ge"}, {"scale": scale, "value_min": 2.0}]
    params = tilting + choosing
    ours, theirs = both(fork, probs, z, params)
    torch.testing.assert_close(ours[200:], theirs[200:], rtol=0, atol=1e-6)

    target = targets(probs[:200], z[:200], tilting)
    our_error, their_error = ((expected_values(x[:200], z[:200]) - target).abs() for x in (ours, theirs))
    assert our_error.max() <= MET
    met = their_error <= MET
    assert met.sum() > 180
    torch.testing.assert_close(ours[:200][met], theirs[:200][met], rtol=0, atol=ATOL)


@pytest.mark.parametrize("mode", ["mul", "linear", "exp", "length_mul"])
def test_tilts_meet_targets_that_the_fork_misses(fork, mode):
    rows = 1000
    probs, z = random_rows(rows, seed=12)
    params = [{"mode": mode, "scale": scale} for scale in torch.linspace(0.2, 0.8, rows).tolist()]
    ours, theirs = both(fork, probs, 2 * z, params)
    target = targets(probs, 2 * z, params)
    our_error, their_error = ((expected_values(x, 2 * z) - target).abs() for x in (ours, theirs))
    assert our_error.max() <= MET
    assert (their_error > 0.01).sum() > rows / 50  # else this test is in vain
    met = their_error <= MET
    assert met.sum() > rows / 2
    torch.testing.assert_close(ours[met], theirs[met], rtol=0, atol=ATOL)


def test_long_lengths_stay_apart(fork):
    """Two candidates of 8,000 and of 20,000 tokens: both are 6,897 to the fork, which takes the likelier."""
    z = torch.zeros(1, VOCAB)
    probs = torch.zeros(1, VOCAB)
    probs[0, [20, 21]] = torch.tensor([0.9, 0.1])
    z[0, [20, 21]] = torch.tensor([8_000.0, 20_000.0]) * -math.log(0.997)  # softplus(z) is z up here
    params = [{"target_length": 20_000, "length_mode": "remaining"}]
    ours, theirs = both(fork, probs, z, params)
    assert ours[0, 21] == 1 and theirs[0, 20] == 1


def test_the_fork_does_none_of_this(fork):
    """What this package does otherwise, so that a version of the fork that changes any of it is noticed."""
    probs, z = random_rows(3, seed=13)
    gentle = {"mode": "centered_exp", "scale": -5.0}

    mixed = run(fork.Original, probs, z, [gentle, {"scale": 0.5}, None])
    assert torch.equal(mixed, run(fork.Original, probs, z, [{"scale": -5.0}, {"scale": 0.5}, None]))
    assert torch.equal(mixed[2], probs[2]), "its filters are gone"
    skipped = run(fork.Original, probs, z, [gentle, {**gentle, "entropy_threshold": 9.0}, None])
    assert torch.equal(skipped[1], probs[1]), "its filters are gone"
    with pytest.raises(RuntimeError, match="LenVM guidance function failed"):
        run(fork.Original, probs, z, [gentle, {"target_length": 40}, None])
    with pytest.raises(ValueError, match="target_length"):
        run(fork.Original, probs, z, [gentle, {"target_length": "long"}, None])
    with pytest.raises(RuntimeError, match="LenVM GPU guidance path failed"):
        run(fork.Original, probs, z, [{"mode": "loud"}] * 3)

    sampler = sampler_of(fork.Original, z)
    pending = sampler._build_pending(probs.clone(), [request_of(0, gentle)] * 3, *filters_of(3))
    with pytest.raises(IndexError):  # without a target, the candidates' probabilities are missing
        sampler._apply_guidance(pending, [[0.0] * 8] * 3)


def test_the_forks_sampler_draws_by_it(fork, monkeypatch):
    """The fork's whole sampler, from logits to tokens: guided rows are guided, the others keep to their top-k."""
    module = importlib.import_module("sglang.srt.layers.sampler")
    args = SimpleNamespace(rl_on_policy_target=None, sampling_backend="pytorch")
    monkeypatch.setattr(module, "get_global_server_args", lambda: args)
    params = [
        {"mode": "centered_exp", "scale": -1e4},
        None,
        {"scale": 0.5, "entropy_threshold": 9.0},
        {"mode": "loud", "token_temperature_scale": {str(10**30): 2.0}},
    ]
    _, z = random_rows(len(params), seed=14)
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(15)) / 4
    best = [set(row.topk(3).indices.tolist()) for row in logits]
    temperatures, top_ps, top_ks, min_ps = filters_of(len(params), top_k=3)
    sampler = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.use_nan_detection = False
    sampler.lvm_guided_sampler = sampler_of(fork.module.LvmGuidedSampler, z)
    info = SimpleNamespace(
        reqs=[request_of(row, p) for row, p in enumerate(params)],
        temperatures=temperatures,
        top_ps=top_ps,
        top_ks=top_ks,
        min_ps=min_ps,
        is_all_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        has_custom_logit_processor=False,
        sampling_seed=None,
        grammars=None,
    )

    def draws(count):
        outputs = [SimpleNamespace(next_token_logits=logits.clone()) for _ in range(count)]
        return torch.stack([sampler.forward(output, info, False, [], [], None) for output in outputs])

    torch.manual_seed(16)
    tokens = draws(100)
    shortest = min(best[0], key=lambda token: -math.inf if token == EOS else z[0, token].item())
    assert set(tokens[:, 0].tolist()) == {shortest}
    assert [set(column) for column in tokens[:, 1:].T.tolist()] == best[1:]

    info.reqs = [request_of(row, p) for row, p in enumerate([*params[:3], None])]
    sampler.lvm_guided_sampler = sampler_of(fork.Original, z)
    assert not set(draws(100)[:, 1].tolist()) <= best[1]


def test_masks_are_the_forks(fork):
    name = "build_tree_value_custom_mask_and_positions"
    ours, theirs = getattr(sglang_fork, name), fork.originals[f"sglang.srt.lvm.tree_value_spec:{name}"]
    for module in ("tree_value_spec", "lvm_inproc_runner"):
        assert getattr(importlib.import_module(f"sglang.srt.lvm.{module}"), name) is ours
    generator = torch.Generator().manual_seed(17)
    for requests in (0, 1, 2, 7, 30):
        prefix = torch.randint(1, 60, (requests,), generator=generator)
        lens = dict(
            prefix_lens=prefix.tolist(),
            candidate_lens=torch.randint(1, 9, (requests,), generator=generator).tolist(),
            cached_prefix_lens=(prefix - torch.randint(0, 60, (requests,), generator=generator)).clamp(min=0).tolist(),
            device=torch.device("cpu"),
        )
        for result, expected in zip(ours(**lens), theirs(**lens), strict=True):
            assert result.dtype == expected.dtype and torch.equal(result, expected) and result.is_contiguous()
    for prefix, candidates, cached in ((0, 2, 0), (3, 0, 0), (3, 2, 4), (3, 2, -1)):
        for build in (ours, theirs):
            with pytest.raises(ValueError, match=r"prefix|candidate"):
                build(
                    prefix_lens=[5, prefix],
                    candidate_lens=[2, candidates],
                    cached_prefix_lens=[5, cached],
                    device=torch.device("cpu"),
                )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_value_heads_are_the_forks(fork, family):
    """Their logits, but in fp32: rounded to bf16 they are off by more than ours."""
    name = f"sglang.srt.models.{family}_lvm"
    original = fork.originals[f"{name}:MLP2SiLUValueHead.forward"]
    torch.manual_seed(18)
    head = importlib.import_module(name).MLP2SiLUValueHead(96)
    with torch.no_grad():
        for hidden in (torch.randn(40, 96), torch.randn(2, 3, 96), torch.randn(0, 96)):
            torch.testing.assert_close(head(hidden), original(head, hidden), rtol=1e-5, atol=1e-5)
        hidden = torch.randn(400, 96)
        head.bfloat16()
        ours, theirs = head(hidden), original(head, hidden)
        exact = original(head.double(), hidden.bfloat16().double())
    assert ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16
    our_error, their_error = ((x.double() - exact).abs().max() for x in (ours, theirs))
    assert our_error < 1e-4 < their_error / 10
