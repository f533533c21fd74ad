"""``reweight_scatter``: the fork's pairs, the kernels against the fp64 reference, and the root on 10,000 hard rows."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops import reweight_scatter as generator
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops import reweight_scatter as module
from lenvm_kernels.ops.reweight_scatter import Mode, reweight_scatter
from lenvm_kernels.ops.topk_candidates import Candidates, Status
from tests.cases import assert_right, cases

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "guidance.jsonl").open()]
GOLDEN_ATOL = 1e-3  # the fork's stopping rule, says golden/README.md
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch, device):
    """Rows of a tile do not see each other, and the interpreter takes as long for a row as for 1,024."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILE", 8192)


def make_candidates(token_ids, probs, status=None):
    counts = (token_ids >= 0).sum(1).int()
    if status is None:
        status = torch.where(counts == 1, int(Status.SINGLE), int(Status.GUIDE)).to(torch.int8)
    return Candidates(token_ids, probs, counts, status, torch.zeros_like(probs[:, 0]))


def move(thing, device):
    """A copy of Candidates or a GuidanceTable on a device."""
    return type(thing)(**{name: tensor.to(device).clone() for name, tensor in vars(thing).items()})


def expectation(probs, z, eos=None):
    """fp64 ``E[v]`` of each row."""
    v = torch.sigmoid(z.double())
    if eos is not None:
        v = torch.where(eos, 0.0, v)
    return (probs.double() * v).sum(1)


@pytest.mark.parametrize("backend, dtype", [("reference", "float64"), ("reference", "float32"), ("triton", "float32")])
def test_golden_pairs_of_the_fork(backend, dtype, device):
    def column(name, dtype, pad, slots=32):
        return torch.tensor([pair[name] + [pad] * (slots - len(pair[name])) for pair in GOLDEN], dtype=dtype)

    dtype = getattr(torch, dtype)
    table = GuidanceTable.from_params(
        [parse_guidance(pair["params"]) for pair in GOLDEN], [set(pair["eos"]) for pair in GOLDEN], device
    )
    candidates = make_candidates(column("token_ids", torch.int32, -1), column("probs", dtype, 0.0))
    result = reweight_scatter(
        move(candidates, device),
        column("value_logits", dtype, 0.0).to(device),
        table,
        generated=torch.tensor([pair["generated"] for pair in GOLDEN], dtype=torch.int32, device=device),
        backend=backend,
    )
    assert result.dtype == dtype and table.faults.sum() == 0
    expected = column("expected", torch.float64, 0.0)
    error = (result.double().cpu() - expected).abs().amax(dim=1)
    assert error.max() <= GOLDEN_ATOL
    assert (error <= 1e-4).double().mean() >= 0.95


def hard_rows(rows, slots, seed):
    """(probabilities, value logits, parameters) of rows to tilt."""
    p, z, columns = generator.hard_rows(Draws(seed), rows, slots)
    params = [
        GuidanceParams(Mode(mode), scale, target_length=target if mode == Mode.EQ_SOFT else None)
        for mode, scale, target in zip(*(columns[n].tolist() for n in ("mode", "scale", "target_length")), strict=True)
    ]
    return p, z, params


def target_of(table, q, z):
    """The specification's target of each row, in fp64, written down as it stands there; NaN: leave the row as it is."""
    v = torch.sigmoid(z)
    low = torch.where(q > 0, v, 2.0).amin(1)
    high = torch.where(q > 0, v, -1.0).amax(1)
    mean = (q * v).sum(1)
    s, mode = table.scale.double(), table.mode
    above = mean + (s - 1) * (high - mean)
    below = mean - (1 - s) * (mean - low)
    one_minus_u = (q * (high[:, None] - v)).sum(1) / (high - low)  # keeps its digits where u is within 1e-16 of 1
    target = {
        Mode.MUL: s * mean,
        Mode.LINEAR: torch.where(s >= 1, above, below),
        Mode.EXP: low + (1 - one_minus_u**s) * (high - low),
        Mode.LENGTH_MUL: 1 - (1 - mean) ** s,
        Mode.EQ_SOFT: -torch.expm1(-table.target_length.double() * table.nats_per_token.double()),
    }
    target = sum(torch.where(mode == m, t, 0.0) for m, t in target.items())
    target = target.clamp(low, high)
    left_alone = (high - low < 1e-8) | ((target - mean).abs() < 1e-8)
    margin = (1e-6 * (high - low)).clamp(min=1e-12)
    edge = (mode == Mode.EQ_SOFT) & ((target == low) | (target == high))
    target = torch.where(edge, target, target.clamp(low + margin, high - margin))
    return torch.where(left_alone & ~edge, mean, target)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_root_meets_the_target_on_10000_hard_rows(backend, device):
    rows = 10_000
    p, z, params = hard_rows(rows, 8, seed=0)
    assert p[p > 0].min() < 1e-29
    table = GuidanceTable.from_params(params, [set()] * rows, device)
    ids = torch.where(p > 0, torch.arange(8), -1).int()
    status = torch.full((rows,), int(Status.GUIDE), dtype=torch.int8)
    candidates = move(make_candidates(ids, p, status), device)
    result = reweight_scatter(candidates, z.to(device), table, backend=backend).double().cpu()
    q = p.double() / p.double().sum(1, keepdim=True)
    error = (expectation(result, z) - target_of(move(table, "cpu"), q, z.double())).abs()
    assert result.isfinite().all() and (result.sum(1) - 1).abs().max() < 1e-5
    assert error.max() <= 1e-5, f"row {error.argmax()}: off by {error.max():.2e}; {(error > 1e-5).sum()} rows"


@given(cases("reweight_scatter"))
def test_triton_matches_fp64_reference(device, case):
    assert_right(case, device)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_rewrites_guided_rows_only(device, backend, dtype, monkeypatch):
    """Rows of every status, several slices: candidates' values at their tokens, 0 elsewhere, other rows untouched."""
    monkeypatch.setattr(module, "SLICE", 64)
    vocab, rows = 150, 5
    rng = torch.Generator().manual_seed(3)
    probs = torch.softmax(torch.randn(rows, vocab, generator=rng), 1).to(dtype)
    ids = torch.tensor([[3, 149, 64, 63], [5, -1, -1, -1], [0, 1, 2, 3], [7, 70, -1, -1], [9, 8, 130, 2]]).int()
    kept = torch.where(ids >= 0, torch.rand(rows, 4, generator=rng), 0.0)
    status = torch.tensor([Status.GUIDE, Status.SINGLE, Status.SKIP, Status.GUIDE, Status.GUIDE], dtype=torch.int8)
    candidates = move(make_candidates(ids, kept, status), device)
    params = [parse_guidance({"mode": "mul", "scale": 0.7})] * 3 + [
        None,
        parse_guidance({"target_length": 5, "op": "le"}),
    ]
    table = GuidanceTable.from_params(params, [{8}] * rows, device)
    padded = torch.nn.functional.pad(probs, (0, 3)).to(device)  # rows apart by more than V
    written = padded[:, :vocab]
    z = torch.randn(rows, 4, generator=rng).to(device)
    result = reweight_scatter(candidates, z, table, probs=written, backend=backend)
    torch.testing.assert_close(result, reweight_scatter(candidates, z, table, backend=backend), rtol=0, atol=2e-6)
    result, written = result.cpu(), written.cpu()
    expected = probs.clone()
    for row in (0, 1, 4):
        listed = ids[row] >= 0
        expected[row] = 0
        expected[row, ids[row][listed].long()] = result[row][listed].to(dtype)
    assert torch.equal(written, expected)
    assert result[1].tolist() == [1, 0, 0, 0] and result[4].tolist() == [0, 1, 0, 0]
    assert (padded[:, vocab:] == 0).all()


def mixed_batch(rows, seed):
    p, z, params = hard_rows(rows, 8, seed)
    extra = [
        parse_guidance(g)
        for g in (
            {"mode": "centered_exp", "scale": -9},
            {"mode": "value_bias", "scale": 2},
            {"target_length": 40},
            {"target_length": 40, "op": ">"},
            {},
        )
    ]
    params = [extra[i // 2 % 5] if i % 2 else p for i, p in enumerate(params)]
    ids = torch.where(p > 0, torch.arange(8), -1).int()
    return make_candidates(ids, p), z, params


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_do_not_see_each_other(device, backend, monkeypatch):
    """Permuted rows, fewer rows, rows taken through table_rows: the same bits."""
    monkeypatch.setattr(module, "TILE", 64)  # as on a GPU
    rows = 20
    candidates, z, params = mixed_batch(rows, seed=5)
    z[6] = math.nan
    table = GuidanceTable.from_params(params, [{1}] * rows, device)
    candidates, z = move(candidates, device), z.to(device)
    whole = reweight_scatter(candidates, z, table, backend=backend)
    for taken in (torch.randperm(rows, generator=torch.Generator().manual_seed(0)), torch.tensor([6, 2, 11])):
        taken = taken.to(device)
        part = type(candidates)(**{name: tensor[taken] for name, tensor in vars(candidates).items()})
        for index in (taken.int(), taken):
            assert torch.equal(reweight_scatter(part, z[taken], table, table_rows=index, backend=backend), whole[taken])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_faults_are_counted_by_row(device, backend):
    candidates = make_candidates(torch.arange(8).repeat(5, 1).int(), torch.full((5, 8), 0.125))
    candidates.status[:] = int(Status.GUIDE)
    z = torch.zeros(5, 8)
    z[0, 3] = math.nan  # a candidate
    z[1, 7] = -math.inf  # the end of sequence: its value is 0 whatever its logit
    z[2, 7] = math.inf  # but value_bias uses it
    z[3, 5] = math.nan  # in a row without guidance
    candidates.lost_mass[4] = math.nan  # broken scores
    candidates.status[4] = int(Status.UNGUIDED)
    mul, bias = parse_guidance({"scale": 0.5}), parse_guidance({"mode": "value_bias", "scale": 1})
    table = GuidanceTable.from_params([mul, mul, bias, None, mul], [{7}] * 5, device)
    candidates, z = move(candidates, device), z.to(device)
    for repeat in (1, 2):
        result = reweight_scatter(candidates, z, table, backend=backend).cpu()
        assert table.faults.tolist() == [repeat, 0, repeat, 0, repeat]
    q = torch.full((8,), 0.125)
    assert [torch.equal(row, q) for row in result] == [True, False, True, True, True]
    shared = torch.zeros(5, dtype=torch.int32, device=device)  # several rows of a batch on one row of the table
    table.faults.zero_()
    reweight_scatter(candidates, z, table, table_rows=shared, backend=backend)
    assert table.faults.tolist() == [3, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_long_horizons_stay_apart(device, backend):
    """Lengths of 20,000 and 32,000 tokens: their values differ by less than fp32 holds, their logits do not."""
    lengths = torch.tensor([[32_000.0, 20_000.0, 6_000.0, 100.0]])
    nats = lengths.double() * -math.log(0.997)
    z = (nats + torch.log(-torch.expm1(-nats))).float()
    assert torch.sigmoid(z)[0, 0] == torch.sigmoid(z)[0, 1] == 1
    candidates = make_candidates(torch.arange(4)[None].int(), torch.full((1, 4), 0.25))
    for target, chosen in ((31_000, 0), (21_000, 1), (7_000, 2), (0, 3)):
        table = GuidanceTable.from_params([parse_guidance({"target_length": target})], [set()], device)
        result = reweight_scatter(move(candidates, device), z.to(device), table, backend=backend)
        assert result.argmax() == chosen and result.sum() == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(device):
    candidates, z, params = mixed_batch(20, seed=5)
    table = GuidanceTable.from_params(params, [{1}] * 20, device)
    candidates, z = move(candidates, device), z.to(device)
    probs = torch.rand(20, 1000, device=device)
    reweight_scatter(candidates, z, table, probs=probs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = reweight_scatter(candidates, z, table, probs=probs)
    z.normal_()
    graph.replay()
    written = torch.rand(20, 1000, device=device)
    assert torch.equal(result, reweight_scatter(candidates, z, table, probs=written))
    assert torch.equal(probs, written)


def good_arguments():
    table = GuidanceTable.from_params([None, None], [set(), set()], "cpu")
    candidates = make_candidates(torch.zeros(2, 4).int(), torch.full((2, 4), 0.25))
    return dict(candidates=candidates, value_logits=torch.zeros(2, 4), table=table)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        (
            "value_logits",
            torch.zeros(2, 4).half(),
            ValueError,
            "value_logits must be float32 .* got float16",
        ),
        ("value_logits", torch.zeros(4), ValueError, "value_logits must be float32"),
        (
            "value_logits",
            torch.zeros(2, 3),
            ValueError,
            "value_logits must have a power of two up to 64 columns",
        ),
        (
            "value_logits",
            torch.zeros(2, 8)[:, ::2],
            ValueError,
            "value_logits must be contiguous",
        ),
        (
            "value_logits",
            torch.zeros(3, 4),
            ValueError,
            r"candidates.token_ids must be int32 \[3, 4\]",
        ),
        ("candidates", None, TypeError, "candidates must be the Candidates of topk_candidates, got NoneType"),
        ("table", [], TypeError, "table must be a GuidanceTable, got list"),
        ("table_rows", torch.zeros(2), ValueError, r"table_rows must be int32\|int64 \[2\] on cpu, got float32"),
        ("generated", torch.zeros(2).long(), ValueError, r"generated must be int32 \[2\]"),
        ("probs", torch.zeros(3, 9), ValueError, r"probs must be float32\|bfloat16\|float16 \[2, \*\]"),
        ("probs", torch.zeros(9, 2).T, ValueError, "probs must be contiguous in its last dimension"),
        ("backend", "gpu", ValueError, "backend must be one of"),
    ],
)
def test_bad_arguments_are_named(name, value, error, message):
    with pytest.raises(error, match=message):
        reweight_scatter(**{**good_arguments(), name: value})


def test_table_has_to_cover_the_rows():
    arguments = good_arguments()
    arguments["table"] = GuidanceTable.from_params([None], [set()], "cpu")
    with pytest.raises(ValueError, match="table must have a row for each of the 2 rows, got 1"):
        reweight_scatter(**arguments)
    arguments["candidates"].probs = torch.zeros(4, 2).T
    with pytest.raises(ValueError, match=r"candidates.probs must be .*contiguous"):
        reweight_scatter(**good_arguments() | {"candidates": arguments["candidates"]})
