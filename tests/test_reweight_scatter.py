"""``reweight_scatter``: the fork's pairs, the kernels against the fp64 reference, and the root on 10,000 hard rows."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import triton.language as tl
from hypothesis import given

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops import reweight_scatter as generator
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops import reweight_scatter as module
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.types import Candidates, Mode, Status
from tests.helpers.cases import cases
from tests.helpers.targets import expectation, target_of

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "guidance.jsonl").open()]
GOLDEN_ATOL = 1e-3  # the fork's stopping rule, says golden/README.md
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["triton", "reference"])
def backend(request):
    return request.param


def make_candidates(token_ids, probs, status=None):
    counts = (token_ids >= 0).sum(1).int()
    if status is None:
        status = torch.where(counts == 1, int(Status.SINGLE), int(Status.GUIDE)).to(torch.int8)
    return Candidates(token_ids, probs, counts, status, torch.zeros_like(probs[:, 0]))


def move(thing, device):
    """A copy on a device of Candidates, or of the columns of a table."""
    thing = getattr(thing, "columns", thing)
    return type(thing)(*(tensor.to(device).clone() for tensor in thing))


def reweight(probs, z, params, eos, device, backend, *, token_ids=None, status=None, dense=None, **options):
    """(guided probabilities, table), both on the CPU; without ``token_ids`` they are the slots' numbers.

    ``dense`` is ``reweight_scatter``'s ``probs``, on the device.
    """
    probs, z = torch.as_tensor(probs), torch.as_tensor(z)
    if token_ids is None:
        token_ids = torch.where(probs > 0, torch.arange(probs.shape[1]), -1).int()
    table = params if isinstance(params, GuidanceTable) else GuidanceTable.from_params(params, eos, "cpu")
    table = move(table, device)
    options = {name: x.to(device) for name, x in options.items()}
    candidates = move(make_candidates(token_ids, probs, status), device)
    result = reweight_scatter(candidates, z.to(device), table, probs=dense, backend=backend, **options)
    return result.cpu(), move(table, "cpu")


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
        GuidanceParams(Mode(mode), scale, target_length=target if mode >= Mode.EQ_SOFT else None)
        for mode, scale, target in zip(*(columns[n].tolist() for n in ("mode", "scale", "target_length")), strict=True)
    ]
    return p, z, params


@pytest.mark.parametrize(
    "backend, rows, slots", [("triton", 10_000, 8), ("triton", 500, 64), ("triton", 1000, 2), ("reference", 10_000, 8)]
)
def test_root_meets_the_target_on_hard_rows(backend, rows, slots, device):
    p, z, params = hard_rows(rows, slots, seed=0)
    assert p[p > 0].min() < 1e-27
    status = torch.full((rows,), int(Status.GUIDE), dtype=torch.int8)
    result, table = reweight(p, z, params, [set()] * rows, device, backend, status=status)
    q = p.double() / p.double().sum(1, keepdim=True)
    error = (expectation(result, z) - target_of(table, q, z.double())).abs()
    assert result.isfinite().all() and (result.sum(1) - 1).abs().max() < 1e-5
    assert error.max() <= 1e-5, f"row {error.argmax()}: off by {error.max():.2e}; {(error > 1e-5).sum()} rows"


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
    mul, le = parse_guidance({"mode": "mul", "scale": 0.7}), parse_guidance({"target_length": 5, "op": "le"})
    params = [mul, mul, mul, None, le]
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
    others = [{"mode": "centered_exp", "scale": -9}, {"mode": "value_bias", "scale": 2}, {"target_length": 40}]
    others += [{"target_length": 40, "op": ">"}, {}, {"target_length": 40, "op": "near"}]
    params = [parse_guidance(others[i // 2 % len(others)]) if i % 2 else p for i, p in enumerate(params)]
    ids = torch.where(p > 0, torch.arange(8), -1).int()
    return make_candidates(ids, p), z, params


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
        part = type(candidates)(*(tensor[taken] for tensor in candidates))
        for index in (taken.int(), taken):
            assert torch.equal(reweight_scatter(part, z[taken], table, table_rows=index, backend=backend), whole[taken])


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


def test_value_bias_by_large_products(device, backend):
    """Logits of some hundreds times a scale of 15: the products are rounded by 1e-4, their differences are not."""
    z = torch.tensor([[300.0, 299.93, 299.87, 299.75], [-300.0, -299.93, -299.87, -299.75]])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2)
    params = [parse_guidance({"mode": "value_bias", "scale": s}) for s in (15, -15)]
    ids = torch.tensor([[3, 1, 0, 2]] * 2).int()
    result, _ = reweight(q, z, params, [set(), {1}], device, backend, token_ids=ids)
    expected = torch.softmax(q.double().log() + torch.tensor([[15.0], [-15.0]]) * z.double(), 1)
    assert (expected > 0.01).all()
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=5e-6)


def test_length_mul_of_tiny_values(device, backend):
    """Values near 1e-5: 1 - E[v] keeps three of their digits in fp32, and a share of their range moves with it."""
    z = torch.tensor([[-11.0, -11.7], [-12.1, -11.2]])
    q = torch.tensor([[0.3, 0.7], [0.6, 0.4]])
    scales = [1.2, 0.8]
    params = [parse_guidance({"mode": "length_mul", "scale": s}) for s in scales]
    ids = torch.tensor([[4, 2], [0, 7]]).int()
    result, _ = reweight(q, z, params, [set(), set()], device, backend, token_ids=ids)
    v = torch.sigmoid(z.double())
    target = -torch.expm1(torch.tensor(scales) * torch.log1p(-(q.double() * v).sum(1)))
    first = (target - v[:, 1]) / (v[:, 0] - v[:, 1])
    assert ((first > 0.05) & (first < 0.95)).all()
    torch.testing.assert_close(result[:, 0].double(), first, rtol=0, atol=2e-5)


def test_long_horizons_stay_apart(device, backend):
    """Lengths of 20,000 and 32,000 tokens: their values differ by less than fp32 holds, their logits do not."""
    lengths = torch.tensor([[32_000.0, 20_000.0, 6_000.0, 100.0]])
    nats = lengths.double() * -math.log(0.997)
    z = (nats + torch.log(-torch.expm1(-nats))).float()
    assert torch.sigmoid(z)[0, 0] == torch.sigmoid(z)[0, 1] == 1
    for target, chosen in ((31_000, 0), (21_000, 1), (7_000, 2), (0, 3)):
        params = [parse_guidance({"target_length": target, "op": "eq"})]
        result, _ = reweight(torch.full((1, 4), 0.25), z, params, [set()], device, backend)
        assert result.argmax() == chosen and result.sum() == 1


def rows_with_parameters_of_their_own():
    """Keyword arguments of 13 rows for a table of 17: modes, scales, gammas, bounds, targets, ends all differ."""
    rng = torch.Generator().manual_seed(8)
    rows, slots = 13, 8
    table_rows = torch.randperm(17, generator=rng)[:rows]
    token_ids = torch.rand(rows, 150, generator=rng).argsort(1)[:, :slots].int()
    token_ids[:3, 4] = 0
    token_ids[3:6, 2:5] = torch.tensor([63, 64, 149])
    probs = torch.softmax(torch.randn(rows, slots, generator=rng), 1)
    z = 2 * torch.randn(rows, slots, generator=rng)
    mul, eq = Mode.MUL, Mode.EQ_SOFT
    of_row = [
        GuidanceParams(mul, 0.6),
        GuidanceParams(Mode.LINEAR, 1.3, answer_length=90.0),
        GuidanceParams(Mode.EXP, 2.1),
        GuidanceParams(Mode.LENGTH_MUL, 0.5, gamma=0.95),
        GuidanceParams(Mode.CENTERED_EXP, -3.0),
        GuidanceParams(Mode.VALUE_BIAS, 0.4),
        GuidanceParams(eq, gamma=0.98, target_length=50.0, counts_down=True),
        GuidanceParams(eq, gamma=0.99, target_length=40.0, answer_length=7.0),
        GuidanceParams(Mode.EQ, gamma=0.9, target_length=20.0, counts_down=True, answer_length=4.0),
        GuidanceParams(Mode.GE, target_length=9.0, counts_down=True),
        GuidanceParams(Mode.LE, target_length=7.0),
        GuidanceParams(mul, 0.7, value_min=0.9),
        GuidanceParams(mul, 1.2, value_min=0.1),
    ]
    generated = torch.tensor([3, 4, 5, 6, 7, 8, 14, 10, 8, 9, 12, 13, 14]).int()
    params, eos = [None] * 17, [{5}] * 17
    for row, (table_row, p) in enumerate(zip(table_rows.tolist(), of_row, strict=True)):
        params[table_row] = p
        eos[table_row] = {*token_ids[row, 4 : 4 + row % 4].tolist(), *token_ids[(row + 1) % rows, :2].tolist()}
    z[7, 2], z[4, 0] = math.nan, -math.inf
    tensors = dict(probs=probs, z=z, token_ids=token_ids, table_rows=table_rows, generated=generated)
    return tensors | dict(params=params, eos=eos)


def one_by_one(probs, z, params, eos, token_ids, table_rows, generated):
    """The fp64 reference on batches of one row, each with a table of one row."""
    rows = []
    for row, table_row in enumerate(table_rows.tolist()):
        part = slice(row, row + 1)
        alone = dict(token_ids=token_ids[part], generated=generated[part])
        one, p = ([x[table_row]] for x in (eos, params))
        rows.append(reweight(probs[part].double(), z[part].double(), p, one, "cpu", "reference", **alone)[0])
    return torch.cat(rows)


@pytest.mark.parametrize("scattered", [False, True])
def test_parameters_are_those_of_the_table_row(device, backend, scattered, monkeypatch):
    """Table rows out of order; rows of value logits and of the vocabulary apart by different amounts."""
    monkeypatch.setattr(module, "SLICE", 64)
    batch = rows_with_parameters_of_their_own()
    expected = one_by_one(**batch)
    change = (expected - batch["probs"] / batch["probs"].sum(1, keepdim=True)).abs().amax(1)
    assert (change < 1e-6).nonzero()[:, 0].tolist() == [4, 7, 11]  # two faults, one expected value too small
    memory = torch.full((13, 150 + 7), 7.0, device=device)
    batch["z"] = torch.nn.functional.pad(batch["z"], (0, 3), value=1.0).to(device)[:, :8]
    dense = memory[:, :150] if scattered else None
    result, table = reweight(**batch, dense=dense, device=device, backend=backend)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=5e-5)
    counted = torch.zeros(17, dtype=torch.int32)
    counted[batch["table_rows"][[4, 7]]] = 1
    assert torch.equal(table.faults, counted)
    if scattered:
        written = torch.full((13, 157), 7.0)
        written[:, :150] = 0
        assert torch.equal(memory.cpu(), written.scatter(1, batch["token_ids"].long(), result))


def test_constraints_break_ties_by_probability_then_slot(device, backend):
    """Candidates in any order, several of the same value, end-of-sequence ones among them."""
    q = [[0.1, 0.2, 0.4, 0.3], [0.1, 0.4, 0.4, 0.1], [0.2, 0.3, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]]
    z = [[1.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 5.0, -2.0], [0.0, 0.5, 0.5, 0.0]]
    ends = [set(), set(), {0, 1}, set()]
    smallest, largest = [2, 1, 1, 0], [3, 1, 2, 1]
    for op, length, chosen in (
        ("le", 99, smallest),
        ("ge", 99, largest),
        ("ge", 0, smallest),
        ("eq", 0, smallest),
        ("eq", 9999, largest),
        ("soft", 0, smallest),
        ("soft", 9999, largest),
    ):
        params = [parse_guidance({"target_length": length, "op": op, "gamma": 0.9})] * 4
        result, _ = reweight(q, z, params, ends, device, backend)
        assert result.argmax(1).tolist() == chosen, (op, length)
        assert result.sum() == result.amax(1).sum() == 4


def test_soft_targets_at_the_ends_choose_one_candidate(device, backend):
    """A target equal to the largest or the smallest value is outside; 1 - exp(-100) has the logit 100."""
    params = [GuidanceParams(Mode.EQ_SOFT, target_length=100.0)] * 2
    table = GuidanceTable.from_params([*params, parse_guidance({"target_length": 0, "op": "soft"})], [{0}] * 3, "cpu")
    table.nats_per_token[:] = 1.0
    z = [[1.0, 100.0, 3.0, 2.0], [300.0, 101.0, 100.0, 110.0], [5.0, 1.0, 0.0, 0.0]]
    table.eos_token_ids[1] = -2
    result, _ = reweight([[0.4, 0.1, 0.2, 0.3]] * 3, z, table, None, device, backend)
    assert result.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]


def test_one_sided_targets_move_rows_towards_them_only(device, backend):
    """As eq_soft where the expected value is on the wrong side; else q to the bit, beyond the range of values, too."""
    z = torch.tensor([[-1.0, 0.5, 2.0, 1.0]] * 4)  # E[v] = 0.568
    lengths = [0.2, 0.6, 1.5, 5.0]  # -ln(1 - v): below every value, below E[v], above it, above every value
    table = [GuidanceParams(Mode.EQ_SOFT, target_length=length) for length in lengths]
    table = GuidanceTable.from_params(table, [set()] * 4, "cpu")
    table.nats_per_token[:] = 1.0
    q = [[0.375, 0.25, 0.25, 0.125]] * 4
    both, _ = reweight(q, z, table, None, device, backend)
    assert both[0].tolist() == [1, 0, 0, 0] and both[3].tolist() == [0, 0, 1, 0]
    assert ((both - torch.tensor(q)).abs().amax(1) > 0.05).all()
    for mode, moved in ((Mode.LE_SOFT, [True, True, False, False]), (Mode.GE_SOFT, [False, False, True, True])):
        table.mode[:] = int(mode)
        result, _ = reweight(q, z, table, None, device, backend)
        assert torch.equal(result, torch.where(torch.tensor(moved)[:, None], both, torch.tensor(q)))


def test_one_sided_targets_at_the_ends_of_the_values(device, backend):
    """Met exactly by a row of one value; rows that end the sequence have the value 0, which a target of 0 is met by."""
    z = torch.tensor([[100.0, 100.0], [100.0, 100.0], [3.0, 100.0], [-1.0, 9.0]])
    q = [[0.25, 0.75]] * 4
    for mode, expected in (
        (Mode.LE_SOFT, [[0.25, 0.75], [0, 1], [0.25, 0.75], [1, 0]]),
        (Mode.GE_SOFT, [[0.25, 0.75], [0.25, 0.75], [0, 1], [0.25, 0.75]]),
    ):
        params = [GuidanceParams(mode, target_length=length) for length in (100.0, 99.0, 100.0, 0.0)]
        table = GuidanceTable.from_params(params, [set(), set(), set(), {0}], "cpu")
        table.nats_per_token[:] = 1.0
        result, _ = reweight(q, z, table, None, device, backend)
        assert result.tolist() == expected


def test_a_target_above_every_value_is_reached_by_no_rounding(device, backend):
    """All but one candidate have the largest value: some sums of their probabilities are 1 + 2**-23."""
    q = torch.rand(256, 8, generator=torch.Generator().manual_seed(0))
    q[:, 3], z = 1e-12, torch.full((256, 8), 2.0).index_fill(1, torch.tensor([3]), -1.0)
    params = [parse_guidance({"target_length": 999, "op": "ge_soft", "gamma": 0.9})] * 256
    result, _ = reweight(q / q.sum(1, keepdim=True), z, params, [set()] * 256, device, backend)
    assert torch.equal(result.argmax(1), q.argmax(1)) and result.sum() == result.amax(1).sum() == 256


def logit_of(nats):
    """fp64; the logit of the value ``1 - exp(-nats)``."""
    return nats + torch.log(-torch.expm1(-nats))


# --- near a target ---

FP32_MAX = torch.finfo(torch.float32).max
NEAR = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)
LENGTHS = [0.01, 0.5, 3.0, 17.0, 18.0, 19.0, 250.0, 4000.0, 1e6]


@pytest.mark.parametrize("gamma", [0.9, 0.997, 0.99999])
def test_near_by_hand(device, backend, gamma):
    """Lengths of 0, 8, 18 and 78 tokens, 18 to come: with 2 added they are 10 and 2 times less, equal, 4 times more."""
    shorter, longer = torch.tensor([[10.0, 2, 1, 1]]), torch.tensor([[1.0, 1, 1, 4]])
    q = torch.tensor([[0.125, 0.375, 0.25, 0.25]])
    weights = [q * factor**-s for factor in (shorter * longer, shorter, longer) for s in (0.0, 1.0, 2.5)]
    expected = torch.cat([w / w.sum() for w in weights])
    of_row = [(mode, strength) for mode in NEAR for strength in (0.0, 1.0, 2.5)]
    params = [GuidanceParams(mode, s, gamma, target_length=28.0, counts_down=True) for mode, s in of_row]
    lengths = torch.tensor([[5.0, 8.0, 18.0, 78.0]], dtype=torch.float64)  # the first ends the output: 0
    z, generated = logit_of(lengths * -math.log(gamma)).float(), torch.full((9,), 10, dtype=torch.int32)
    result, _ = reweight(q.repeat(9, 1), z.repeat(9, 1), params, [{0}] * 9, device, backend, generated=generated)
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    assert torch.equal(result[::3], q.expand(3, -1))


def test_near_grows_stronger_past_a_total(device, backend):
    """Lengths of 0, 8, 18 and 78 tokens and none to come: with 2 added they are 1, 5, 10 and 40 times that."""
    q = torch.tensor([[0.01, 0.375, 0.25, 0.365]])
    of_row = [  # mode, total, generated, times stronger
        (Mode.NEAR, 28.0, 28, 1.0),
        (Mode.NEAR, 28.0, 35, 2.0),
        (Mode.LE_NEAR, 40.0, 70, 4.0),
        (Mode.NEAR, 28.0, 56, 5.0),
        (Mode.LE_NEAR, 28.0, 1_000, 5.0),  # no stronger than at twice the total
        (Mode.GE_NEAR, 28.0, 56, 0.0),  # nobody is too short
        (Mode.NEAR, 0.0, 1, 1.0),
        (Mode.NEAR, 0.0, 2, 5.0),
    ]
    params = [GuidanceParams(mode, 0.5, 0.99, target_length=total, counts_down=True) for mode, total, *_ in of_row]
    # What is to come by a target that does not count down is not late.
    params.append(GuidanceParams(Mode.NEAR, 0.5, 0.99, target_length=0.0))
    generated = torch.tensor([*(count for _, _, count, _ in of_row), 99], dtype=torch.int32)
    times = torch.tensor([[times] for *_, times in of_row] + [[1.0]])
    lengths = torch.tensor([[5.0, 8.0, 18.0, 78.0]], dtype=torch.float64)  # the first ends the output: 0
    z, rows = logit_of(lengths * -math.log(0.99)).float(), len(params)
    result, _ = reweight(
        q.repeat(rows, 1), z.repeat(rows, 1), params, [{0}] * rows, device, backend, generated=generated
    )
    expected = q * torch.tensor([[1.0, 5.0, 10.0, 40.0]]) ** (-0.5 * times)
    torch.testing.assert_close(result, expected / expected.sum(1, keepdim=True), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", NEAR)
def test_near_by_hand_where_sentences_end(device, backend, mode):
    """Lengths of 0, 8, 98, 98, 28 and 28 tokens, 4 to come: the second and the fourth may lead to a length of 1."""
    factors = {  # with 2 added, of 6 tokens and what is nearest them of each, one token more among it
        Mode.NEAR: [6 / 2, 10 / 6, 100 / 6, 6 / 3, 30 / 6],
        Mode.LE_NEAR: [1.0, 1.0, 100 / 6, 1.0, 30 / 6],
        Mode.GE_NEAR: [6 / 2, 1.0, 1.0, 1.0, 1.0],
    }[mode]
    q = torch.tensor([[0.1, 0.2, 0.3, 0.25, 0.145, 0.005, 0, 0]])
    factors.append({Mode.NEAR: 30 / 6, Mode.LE_NEAR: 30 / 6, Mode.GE_NEAR: 1.0}[mode])  # too improbable to count
    expected = q * torch.tensor([[*factors, 1.0, 1.0]]) ** -2.0
    lengths = torch.tensor([[5.0, 8.0, 98.0, 98.0, 28.0, 28.0, 1, 1]], dtype=torch.float64)
    breaks = torch.tensor([2, 2, 1, 2, 0, 2], dtype=torch.int8)  # the first ends the output, which counts alone
    params, z = [GuidanceParams(mode, 2.0, 0.99, target_length=4.0)], logit_of(lengths * -math.log(0.99)).float()
    result, _ = reweight(q, z, params, [{0}], device, backend, text_breaks=breaks.to(device))
    torch.testing.assert_close(result, expected / expected.sum(), rtol=0, atol=2e-6)
    # Of a total the two that mind who is longer take off a tenth, at most 6 tokens.
    for total, early in ((20.0, 2.0), (120.0, 6.0)):
        early = 0.0 if mode == Mode.GE_NEAR else early
        totals = [replace(params[0], target_length=total, counts_down=True)]
        options = dict(text_breaks=breaks, generated=torch.tensor([total - early - 4], dtype=torch.int32))
        result, _ = reweight(q, z, totals, [{0}], device, backend, **options)
        torch.testing.assert_close(result, expected / expected.sum(), rtol=0, atol=2e-6)
    # A vocabulary that ends before the fourth: its value is all that is known.
    factors[3] = {Mode.NEAR: 100 / 6, Mode.LE_NEAR: 100 / 6, Mode.GE_NEAR: 1.0}[mode]
    expected = q * torch.tensor([[*factors, 1.0, 1.0]]) ** -2.0
    result, _ = reweight(q, z, params, [{0}], device, backend, text_breaks=breaks[:3].to(device))
    torch.testing.assert_close(result, expected / expected.sum(), rtol=0, atol=2e-6)


def test_near_at_the_ends_of_fp32(device, backend):
    """Lengths of 0 and 1e30 nats, targets that overflow in nats, strengths that overflow, and columns of padding."""

    def z_of(*lengths, gamma=0.997):
        return logit_of(torch.tensor(lengths, dtype=torch.float64) * -math.log(gamma)).tolist()

    largest = [1 + 1e30 / (-2 * math.log(gamma)) for gamma in (0.1, 0.99999)]
    of_row = [  # discount, target, strength, value logits, weights beside q
        (0.997, 500.0, FP32_MAX, z_of(0.01, 1e6), [1, 0]),
        (0.997, 5000.0, FP32_MAX, z_of(0.01, 1e6), [0, 1]),
        (0.997, 1e6, 0.5, z_of(0.01, 1e6), [(2.01 / 1_000_002) ** 0.5, 1]),
        (0.1, FP32_MAX, 0.1, [1e30, -1e30], [1, largest[0] ** -0.1]),
        (0.99999, 0.0, 0.1, [1e30, -1e30], [largest[1] ** -0.1, 1]),
        (0.99999, 1e6, FP32_MAX, z_of(999_000.0, 1_010_000.0, gamma=0.99999), [1, 0]),
    ]
    params = [GuidanceParams(Mode.NEAR, s, gamma, target_length=target) for gamma, target, s, _, _ in of_row]
    z = torch.tensor([[*z, 0.0, 0.0] for *_, z, _ in of_row])
    q = torch.tensor([[0.25, 0.75, 0.0, 0.0]])
    expected = q * torch.tensor([[*weights, 0.0, 0.0] for *_, weights in of_row])
    result, table = reweight(q.repeat(6, 1), z, params, [set()] * 6, device, backend)
    torch.testing.assert_close(result, expected / expected.sum(1, keepdim=True), rtol=0, atol=2e-6)
    assert table.faults.sum() == 0


def near_case(case, device, mode, strength):
    """Inputs of a case whose requests are all near a target: lengths of all sizes, many of them equal."""
    given, draws = generator.inputs(case, device), case.draws(device)
    rows, table = given.table_rows, given.table
    table.mode[:], table.scale[:] = int(mode), strength
    targets = [0.0, 0.01, 18.0, 500.0, 1e6, FP32_MAX]
    table.target_length[rows] = draws.choose("target", case.rows, values=targets).float()
    gamma = draws.choose("discount", case.rows, values=[0.9, 0.997, 0.99999])
    table.nats_per_token[rows] = -gamma.log().float()
    shape = given.value_logits.shape[1]
    nats = draws.choose("length", case.rows, shape, values=LENGTHS) * -gamma.log()[:, None]
    z = torch.where(draws.chance("far", case.rows, shape, of=0.1), 1e30, logit_of(nats))
    z = torch.where(draws.chance("nothing", case.rows, shape, of=0.1), -1e30, z)
    given.value_logits[:] = torch.where(given.value_logits.isfinite(), z.float(), given.value_logits)
    return given


def guided_by(given, backend):
    """Guided probabilities; those of the reference in fp64."""
    candidates, z = given.candidates, given.value_logits
    if backend == "reference":
        candidates, z = candidates._replace(probs=candidates.probs.double()), z.double()
    return reweight_scatter(candidates, z, given.table, backend=backend, **given.arguments)


def excess_of(given):
    """fp64 ``ln((l + 2) / (r + 2))``, NaN for padding."""
    two_tokens = 2 * given.table.nats_per_token[given.table_rows].double()[:, None]
    ratio = (generator.lengths_of(given)[0] + two_tokens) / (generator.target_of(given) + two_tokens)
    return ratio.log().where(given.candidates.probs > 0, math.nan)


both_backends = pytest.mark.parametrize("backend", ["triton", "reference"])
near_cases = partial(cases, "reweight_scatter", rows=["usual"], scatter=[False])
by_values = partial(near_cases, text_breaks=[0])  # alone: sentences are no shorter than these say
modes, strengths = st.sampled_from(NEAR), st.sampled_from([0.5, 5.0, 20.0, 1e4, FP32_MAX])


@given(case=near_cases(), mode=modes, strength=st.just(0.0) | strengths)
def test_near_matches_the_reference(device, case, mode, strength):
    """Targets of 0, of 1e6 tokens and out of reach, logits of +-1e30 and broken ones, answers, bounds of the value."""
    inputs = near_case(case, device, mode, strength)
    result = generator.run(inputs, partial(reweight_scatter, backend="triton"))
    assert result.guided.isfinite().all()
    for difference in generator.compare(inputs, result):
        assert not difference.wrong.any(), difference


@both_backends
@given(case=by_values(), mode=modes, strength=strengths)
def test_near_by_nothing_is_q(device, backend, case, mode, strength):
    """To the bit: strength 0, and any where nobody is on the wrong side."""
    inputs = near_case(case, device, Mode.UNGUIDED, 0.0)
    q, excess, padding = guided_by(inputs, backend), excess_of(inputs), inputs.candidates.probs == 0
    assert torch.equal(guided_by(near_case(case, device, mode, 0.0), backend), q)
    right = {Mode.NEAR: padding, Mode.GE_NEAR: excess > 1e-4, Mode.LE_NEAR: excess < -1e-4}[mode]
    alone = (right | padding).all(1)
    assert torch.equal(guided_by(near_case(case, device, mode, strength), backend)[alone], q[alone])


@both_backends
@given(case=by_values(), strength=strengths)
def test_one_sided_near_is_near_on_its_side(device, backend, case, strength):
    """To the bit, where all candidates are longer, or all shorter."""
    both, longer, shorter = (guided_by(near_case(case, device, mode, strength), backend) for mode in NEAR)
    excess = excess_of(near_case(case, device, Mode.NEAR, strength))
    all_longer, all_shorter = (excess.nan_to_num(1.0) > 1e-4).all(1), (excess.nan_to_num(-1.0) < -1e-4).all(1)
    assert torch.equal(both[all_longer], shorter[all_longer]) and torch.equal(both[all_shorter], longer[all_shorter])


@both_backends
@given(case=by_values(), mode=modes, strength=strengths)
def test_near_keeps_the_ratios_of_equal_lengths(device, backend, case, mode, strength):
    inputs = near_case(case, device, mode, strength)
    p, q, lengths = guided_by(inputs, backend).double(), inputs.candidates.probs.double(), excess_of(inputs)
    q = q / q.sum(1, keepdim=True)
    crosswise = p[:, :, None] * q[:, None] - p[:, None] * q[:, :, None]
    assert (crosswise[lengths[:, :, None] == lengths[:, None]].abs() <= 2e-5).all()


@both_backends
@given(case=near_cases(broken=[False]), mode=modes)
def test_near_of_any_strength_chooses_the_nearest(device, backend, case, mode):
    inputs = near_case(case, device, mode, FP32_MAX)
    inputs.table.value_min[:] = -math.inf
    distance = generator.near_distances(inputs).masked_fill(inputs.candidates.probs == 0, math.inf)
    farther = (distance > distance.amin(1, keepdim=True) + 1e-4) & (inputs.candidates.status == Status.GUIDE)[:, None]
    result = guided_by(inputs, backend)
    assert (result[farther] == 0).all()
    torch.testing.assert_close(result.sum(1), (inputs.candidates.probs > 0).any(1).to(result.dtype))


@both_backends
@given(case=near_cases(), mode=modes)
def test_near_is_monotone_in_the_strength(device, backend, case, mode):
    """The mass of all candidates up to any distance does not fall."""
    steps, error = ((0.0, 0.5, 2.0, 5.0, 20.0), 1e-4) if backend == "triton" else ((0.0, 0.5, 5.0, 100.0, 1e6), 1e-8)
    before = None
    for strength in steps:
        inputs = near_case(case, device, mode, strength)
        distance = generator.near_distances(inputs).masked_fill(inputs.candidates.probs == 0, math.inf)
        order = distance.argsort(dim=1, stable=True)
        mass = guided_by(inputs, backend).double().gather(1, order).cumsum(1)
        assert before is None or (mass >= before - error).all()
        before = mass


# --- spans, and the answers that follow them ---


def answered(params, answers, eos):
    """A table in which a token is a length of 1, -ln(1 - v), with the length of the answer in each row."""
    table = GuidanceTable.from_params(params, eos, "cpu")
    table.nats_per_token[:] = 1.0
    table.answer_length[:] = torch.tensor(answers)
    return table


@pytest.mark.parametrize("precise", [False, True])
def test_an_answer_is_taken_off_predicted_lengths(device, backend, precise):
    """In every mode but value_bias, where the lengths are those of more tokens, of which an answer takes some."""
    if precise and backend == "triton":
        pytest.skip("the kernels compute in fp32")
    dtype = torch.float64 if precise else torch.float32
    modes = [mode for mode in Mode if mode not in (Mode.UNGUIDED, Mode.VALUE_BIAS)]
    params = [GuidanceParams(mode, 1.25, target_length=1.5) for mode in modes for _ in range(4)]
    answers = torch.tensor([0.0, 0.125, 2.5, 10.0], dtype=torch.float64).repeat(len(modes))
    nats = torch.tensor([0.03, 0.5, 2.0, 9.0], dtype=torch.float64).repeat(len(params), 1)
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).repeat(len(params), 1)
    eos = [set()] * len(params)
    expected, _ = reweight(q, logit_of(nats), answered(params, [0.0] * len(params), eos), None, "cpu", "reference")
    table = answered(params, answers.tolist(), eos)
    z = logit_of(nats + answers[:, None])
    result, table = reweight(q.to(dtype), z.to(dtype), table, None, device, backend)
    assert result.dtype == dtype and table.faults.sum() == 0
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-11 if precise else 5e-5)
    values = -torch.expm1(-nats[0])
    tilted = torch.softmax(q[0].log() + 1.25 * values, 0)  # centered_exp, by hand
    first = 4 * modes.index(Mode.CENTERED_EXP)
    torch.testing.assert_close(result[first : first + 4].double(), tilted.expand(4, -1), rtol=0, atol=5e-6)


def test_an_answer_longer_than_what_is_predicted_leaves_value_0(device, backend):
    """Of candidates that have it the most probable is the shortest; together they are as one that ends the span."""
    q = [[0.1, 0.3, 0.2, 0.4]] * 5
    z = logit_of(torch.tensor([[1.0, 2.0, 2.9, 5.0]], dtype=torch.float64)).float().repeat(5, 1)
    z[1, 0] = -torch.finfo(torch.float32).max
    modes = [(Mode.LE, 9.0), (Mode.EQ, 0.0), (Mode.GE, 9.0), (Mode.EQ_SOFT, 0.0), (Mode.CENTERED_EXP, 0.0)]
    params = [GuidanceParams(mode, -3.0, target_length=target) for mode, target in modes]
    result, table = reweight(q, z, answered(params, [3.0] * 5, [set()] * 5), None, device, backend)
    shortest, longest = [0, 1, 0, 0], [0, 0, 0, 1]
    assert result[:4].tolist() == [shortest, shortest, longest, shortest] and table.faults.sum() == 0
    weights = torch.tensor([0.1, 0.3, 0.2, 0.4 * math.exp(-3 * (1 - math.exp(-2)))])
    torch.testing.assert_close(result[4], weights / weights.sum(), rtol=0, atol=2e-6)
    # All of them: nothing tells them apart.
    result, _ = reweight(q, z, answered(params, [1e30] * 5, [set()] * 5), None, device, backend)
    most_likely = [0, 0, 0, 1]
    assert result[:4].tolist() == [most_likely] * 4
    torch.testing.assert_close(result[4], torch.tensor(q[4]))


def test_value_bias_takes_no_answer_off(device, backend):
    """It takes the raw logits, to the bit."""
    params, z = [GuidanceParams(Mode.VALUE_BIAS, 0.7)] * 2, [[1.0, -3.0, 0.5, 2.0]] * 2
    result, _ = reweight([[0.4, 0.3, 0.2, 0.1]] * 2, z, answered(params, [0.0, 5.0], [{1}] * 2), None, device, backend)
    assert torch.equal(result[0], result[1])
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1]) * (0.7 * torch.tensor(z[0])).exp()
    torch.testing.assert_close(result[0], weights / weights.sum())


@pytest.mark.parametrize("answer", [0.0, 0.5])
def test_what_ends_the_span_has_value_0(device, backend, answer):
    """As what ends the sequence has; up to four tokens, whatever their logits are."""
    nan = math.nan
    z = [[-1.0, nan, 0.5, 2.0], [-1.0, nan, 0.5, 2.0], [nan] * 3 + [2.0], [nan] * 4]
    ends, eos = [(1,), (), (1, 0, 2), (9, 0, 8, 2)], [set(), {1}, set(), {1, 3}]
    params = [GuidanceParams(Mode.CENTERED_EXP, -5.0, end_token_ids=of_row) for of_row in ends]
    q = torch.tensor([[0.4, 0.1, 0.2, 0.3]] * 4)
    result, table = reweight(q, z, answered(params, [answer] * 4, eos), None, device, backend)
    assert table.faults.sum() == 0 and torch.equal(result[0], result[1])
    nats = (torch.nn.functional.softplus(torch.tensor(z)) - answer).clamp(min=0)
    values = -torch.expm1(-nats).nan_to_num(0.0)
    expected = torch.softmax(q.log() - 5 * values, 1)
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    # A candidate with a value that is not finite, and that ends nothing, is a fault still.
    _, table = reweight(q, [[0.0, 0.0, nan, 0.0]] * 4, answered(params, [answer] * 4, eos), None, device, backend)
    assert table.faults.tolist() == [1, 1, 0, 0]


def test_answers_are_those_of_the_table_row(device, backend):
    """Of rows out of order, of which one is nobody's."""
    params = [GuidanceParams(Mode.CENTERED_EXP, -5.0)] * 4
    q, z = [[0.4, 0.1, 0.2, 0.3]] * 3, logit_of(torch.tensor([[2.0, 2.5, 4.0, 7.0]] * 3))
    rows, answers = torch.tensor([3, 0, 2]), [1.0, 0.25, 0.0, 6.5]
    table = answered(params, answers, [set()] * 4)
    result, _ = reweight(q, z, table, None, device, backend, table_rows=rows)
    for found, answer in zip(result, [6.5, 1.0, 0.0], strict=True):
        alone, _ = reweight(q[:1], z[:1], answered(params[:1], [answer], [set()]), None, device, backend)
        assert torch.equal(found, alone[0])
    assert (result[0] - result[1]).abs().max() > 0.1 and (result[1] - result[2]).abs().max() > 0.01


def test_value_min_met_exactly_guides(device, backend):
    limit = torch.tensor(0.5)
    bounds = [limit.nextafter(limit + 1).item(), 0.5, None, 0.5]
    params = [GuidanceParams(Mode.LE, target_length=9.0, value_min=bound) for bound in bounds]
    z = torch.zeros(4, 4)
    z[3] = -1e-5
    result, table = reweight([[0.25, 0.25, 0.375, 0.125]] * 4, z, params, [set()] * 4, device, backend)
    one, q = [0, 0, 1, 0], [0.25, 0.25, 0.375, 0.125]
    assert result.tolist() == [q, one, one, q] and table.faults.sum() == 0


def test_targets_are_kept_inside_the_values(device, backend):
    """By 1e-6 of their range, and by 1e-12: two equally likely candidates show how far."""
    params = [GuidanceParams(Mode.LINEAR, scale) for scale in (100.0, -99.0, 100.0, -99.0)]
    z = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [0.0, 4e-7], [0.0, 4e-7]])
    result, _ = reweight(torch.full((4, 2), 0.5), z, params, [set()] * 4, device, backend)
    far_end = torch.stack([result[0, 0], result[1, 1], result[2, 0], result[3, 1]])
    torch.testing.assert_close(far_end, torch.tensor([1e-6, 1e-6, 1e-5, 1e-5]), rtol=0.1, atol=0)


def test_scales_that_leave_rows_alone(device, backend):
    modes = [Mode.MUL, Mode.MUL, Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL, Mode.CENTERED_EXP, Mode.VALUE_BIAS]
    scales = [0.0, -2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    params = [GuidanceParams(mode, scale) for mode, scale in zip(modes, scales, strict=True)]
    probs = torch.tensor([[0.2, 0.4, 0.1, 0.1]]).repeat(8, 1)
    z = torch.tensor([[1.0, -1.0, 0.5, 2.0]]).repeat(8, 1)
    result, _ = reweight(probs, z, params, [{3}] * 8, device, backend)
    torch.testing.assert_close(result, probs / 0.8)


def test_value_bias_takes_the_raw_logits(device, backend):
    """Those of the end of sequence, too, and the largest fp32 numbers."""
    huge = torch.finfo(torch.float32).max
    z = [[1.0, 2.0, 0.0, 9.0], [huge, -huge, 0.0, 9.0], [-huge, -huge, -1.0, 9.0]]
    params = [GuidanceParams(Mode.VALUE_BIAS, scale) for scale in (2.0, -20.0, 20.0)]
    result, table = reweight([[0.5, 0.25, 0.25, 0.0]] * 3, z, params, [{1}] * 3, device, backend)
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0]) * torch.tensor([2.0, 4.0, 0.0, 0.0]).exp()
    torch.testing.assert_close(result[0], weights / weights.sum())
    assert result[1:].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]] and table.faults.sum() == 0


def test_largest_logits_in_every_mode(device, backend):
    """A value of 1, a value of 0 and the end of sequence: finite results that agree with the fp64 reference."""
    huge = torch.finfo(torch.float32).max
    params = [GuidanceParams(mode, 1.5, target_length=30.0) for mode in Mode if mode != Mode.UNGUIDED]
    rows = len(params)
    z = torch.tensor([[huge, -huge, 0.0, 1.0]]).repeat(rows, 1)
    probs, eos = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(rows, 1), [{3}] * rows
    result, table = reweight(probs, z, params, eos, device, backend)
    expected, _ = reweight(probs.double(), z.double(), params, eos, "cpu", "reference")
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-5)
    assert (result.sum(1) - 1).abs().max() < 1e-5 and table.faults.sum() == 0


@pytest.mark.parametrize("scattered", [False, True])
def test_status_decides_faults_and_writes(device, backend, scattered, monkeypatch):
    """Broken logits count in guided rows only, a broken row of candidates always; once, however many slices it has."""
    monkeypatch.setattr(module, "SLICE", 4)
    status = torch.tensor([Status.GUIDE, Status.SKIP, Status.SINGLE, Status.UNGUIDED, Status.SINGLE, Status.GUIDE])
    probs = torch.tensor([[0.25, 0.25]] * 2 + [[0.5, 0.0]] + [[0.25, 0.25]] + [[0.5, 0.0]] + [[0.25, 0.25]])
    token_ids = torch.tensor([[9, 2], [9, 2], [8, -1], [9, 2], [0, -1], [5, 0]]).int()
    mul = parse_guidance({"scale": 0.5})
    table = GuidanceTable.from_params([None, mul, mul, mul], [{0}, set(), {0}, {2}], device)
    table_rows = torch.tensor([1, 1, 2, 3, 0, 2], device=device)
    candidates = move(make_candidates(token_ids, probs, status.to(torch.int8)), device)
    candidates.lost_mass[3] = math.nan
    options = {"probs": torch.full((6, 10), 0.1, device=device)} if scattered else {}
    z = torch.full((6, 2), math.nan, device=device)
    z[5, 0] = 1.0  # its other candidate ends the sequence
    result = reweight_scatter(candidates, z, table, table_rows=table_rows, backend=backend, **options).cpu()
    assert table.faults.tolist() == [0, 1, 0, 1]
    assert result[:5].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0], [0.5, 0.5], [1, 0]]
    torch.testing.assert_close(result[5], torch.tensor([0.25, 0.75]))
    if scattered:
        expected = torch.full((6, 10), 0.1)
        expected[[0, 2, 4, 5]] = 0
        expected[0, [9, 2]], expected[2, 8], expected[4, 0], expected[5, [5, 0]] = 0.5, 1.0, 1.0, result[5]
        assert torch.equal(options["probs"].cpu(), expected)


@pytest.mark.parametrize("which", [70, 80, 90])
def test_every_end_of_sequence_id_counts(device, backend, which):
    """Each row has three ids of its own, of which one is a candidate, among all ids of the other rows, and padding."""
    ids = (70, 80, 90)
    token_ids = torch.full((3, 8), -1, dtype=torch.int32)
    for row in range(3):
        tokens = [i + other for other in range(3) for i in ids if other != row]
        tokens.insert(2 + row, which + row)
        token_ids[row, :7] = torch.tensor(tokens)
    params = [parse_guidance({"target_length": 9, "op": "le"})] * 3
    eos = [{i + row for i in ids} for row in range(3)]
    probs, z = torch.where(token_ids >= 0, 0.1, 0.0), torch.arange(8.0).repeat(3, 1)
    result, _ = reweight(probs, z, params, eos, device, backend, token_ids=token_ids)
    assert result.argmax(1).tolist() == [2, 3, 4]


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16, 32, 64])
def test_every_number_of_slots(device, backend, slots, monkeypatch):
    """With a table of more rows than the batch has."""
    monkeypatch.setattr(module, "TILE", 64)  # as on a GPU
    params = [parse_guidance({"target_length": 9, "op": "ge"}), parse_guidance({"target_length": 9, "op": "le"}), None]
    z = torch.linspace(-1, 1, slots).repeat(2, 1)
    status = torch.full((2,), int(Status.GUIDE), dtype=torch.int8)
    result, _ = reweight(torch.full((2, slots), 0.01), z, params, [set()] * 3, device, backend, status=status)
    assert result.argmax(1).tolist() == [slots - 1, 0] and result.amax(1).tolist() == [1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel keeps the bound it was compiled with")
def test_root_search_is_bounded(device, monkeypatch):
    """It ends after MAX_STEPS whatever the rows are, with probabilities that sum to 1; half the steps are enough."""
    p, z, params = hard_rows(500, 8, seed=1)
    eos = [set()] * 500
    full, _ = reweight(p, z, params, eos, device, "triton")
    monkeypatch.setattr(module, "MAX_STEPS", tl.constexpr(32))
    assert torch.equal(reweight(p, z, params, eos, device, "triton")[0], full)
    monkeypatch.setattr(module, "MAX_STEPS", tl.constexpr(2))
    cut, _ = reweight(p, z, params, eos, device, "triton")
    assert ((cut - full).abs().amax(1) > 1e-3).sum() > 50
    assert (cut.sum(1) - 1).abs().max() < 1e-5


def test_fresh_memory_is_filled_and_nothing_beside_it(device, monkeypatch):
    """Rows of a tile that are beyond the batch are not stored; padding and rows without candidates are 0."""
    buffers = []

    def guarded_empty(*shape, dtype, device):
        buffers.append(torch.full((shape[0] + 64, *shape[1:]), 77.0, dtype=dtype, device=device))
        return buffers[-1][: shape[0]]

    params = [parse_guidance({"scale": 0.5})] * 3
    probs = torch.tensor([[0.5, 0.25, 0.0, 0.0], [0.0] * 4, [0.5, 0.0, 0.0, 0.0]])
    status = torch.tensor([Status.GUIDE, Status.UNGUIDED, Status.SINGLE]).to(torch.int8)
    monkeypatch.setattr(module.torch, "empty", guarded_empty)
    result, _ = reweight(probs, torch.zeros(3, 4), params, [{0}] * 3, device, "triton", status=status)
    (buffer,) = buffers
    assert (buffer[3:] == 77).all()
    assert (result[0, :2] > 0).all() and result[0, 2:].tolist() == [0, 0]
    assert result[1:].tolist() == [[0] * 4, [1, 0, 0, 0]]


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
            r"value_logits must be float32\|float64 .* got float16",
        ),
        ("value_logits", torch.zeros(4), ValueError, "value_logits must be float32"),
        *(
            (
                "value_logits",
                torch.zeros(2, n),
                ValueError,
                f"value_logits must have a power of two .* 64 columns, got {n}",
            )
            for n in (0, 3, 128)
        ),
        ("value_logits", torch.zeros(2, 8)[:, ::2], ValueError, "value_logits must be contiguous"),
        ("value_logits", torch.zeros(3, 4), ValueError, r"candidates.token_ids must be int32 \[3, 4\]"),
        ("candidates", None, TypeError, "candidates must be the Candidates of topk_candidates, got NoneType"),
        ("table", [], TypeError, "table must be a GuidanceTable, got list"),
        ("table_rows", torch.zeros(2), ValueError, r"table_rows must be int32\|int64 \[2\] on cpu, got float32"),
        ("generated", torch.zeros(2).long(), ValueError, r"generated must be int32 \[2\]"),
        ("probs", torch.zeros(3, 9), ValueError, r"probs must be float32\|bfloat16\|float16\|float64 \[2, \*\]"),
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
    with pytest.raises(ValueError, match="table must have a row for each of the 2 requests, got 1"):
        reweight_scatter(**arguments)
    candidates = arguments["candidates"]._replace(probs=torch.zeros(4, 2).T)
    with pytest.raises(ValueError, match=r"candidates.probs must be .*contiguous"):
        reweight_scatter(**good_arguments() | {"candidates": candidates})
