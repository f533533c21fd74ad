"""``reweight_scatter``: pairs from the fork, cases by hand, properties of ``near``, and roots on hard rows."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops import reweight_scatter as generator
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops import reweight_scatter as module
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.types import Candidates, Mode, Status
from tests.helpers.cases import cases
from tests.helpers.targets import expectation, target_of

GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "guidance.jsonl").open()]
GOLDEN_ATOL = 1e-3  # the fork's stopping rule, see golden/README.md
HUGE = torch.finfo(torch.float32).max
NEAR = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)


def candidates_of(token_ids, probs, device, status=None):
    counts = (token_ids >= 0).sum(1).int()
    if status is None:
        status = torch.where(counts == 1, int(Status.SINGLE), int(Status.GUIDE)).to(torch.int8)
    return Candidates(*(x.to(device) for x in (token_ids, probs, counts, status, torch.zeros_like(probs[:, 0]))))


def reweight(probs, z, params, eos, device, backend, *, token_ids=None, status=None, answers=None, **options):
    """(guided probabilities, faults) by request. A single row of ``probs``, ``z`` or ``eos`` is shared by all requests.

    The table's first row is unused, and the others are in reverse order; rows of ``z`` are strided. With ``answers``,
    the lengths of answers, a length in tokens is -ln(1 - v).
    """
    rows, eos = len(params), [eos] * len(params) if isinstance(eos, set) else eos
    probs, z = (torch.as_tensor(x).expand(rows, -1).contiguous() for x in (probs, z))
    if token_ids is None:
        token_ids = torch.where(probs > 0, torch.arange(probs.shape[1]), -1).int()
    unused = GuidanceParams(Mode.VALUE_BIAS, 3.0)
    table = GuidanceTable.from_params([unused, *reversed(params)], [set(), *reversed(eos)], device).columns
    table_rows = torch.arange(rows, 0, -1, device=device)
    if answers is not None:
        table.nats_per_token[:] = 1.0
        table.answer_length[table_rows] = torch.as_tensor(answers, device=device).float()
    options = {name: x.to(device) for name, x in options.items()}
    z = F.pad(z, (0, 3), value=math.nan).to(device)[:, : z.shape[1]]
    candidates = candidates_of(token_ids, probs, device, status)
    result = reweight_scatter(candidates, z, table, table_rows=table_rows, backend=backend, **options)
    assert table.faults[0] == 0
    return result.cpu(), table.faults[table_rows].tolist()


def assert_weights(result, weights, atol=2e-6):
    """Assert that the probabilities are proportional to the weights."""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(result.double(), weights / weights.sum(1, keepdim=True), rtol=0, atol=atol)


def logit_of(nats):
    """fp64; the logit of the value ``1 - exp(-nats)``."""
    nats = torch.as_tensor(nats, dtype=torch.float64)
    return nats + torch.log(-torch.expm1(-nats))


@pytest.mark.parametrize("backend, dtype", [("reference", "float64"), ("reference", "float32"), ("triton", "float32")])
def test_golden_pairs_of_the_fork(backend, dtype, device):
    def column(name, dtype, pad, slots=32):
        return torch.tensor([pair[name] + [pad] * (slots - len(pair[name])) for pair in GOLDEN], dtype=dtype)

    dtype = getattr(torch, dtype)
    params, eos = [parse_guidance(pair["params"]) for pair in GOLDEN], [set(pair["eos"]) for pair in GOLDEN]
    z, probs = (column(name, dtype, 0.0) for name in ("value_logits", "probs"))
    generated = torch.tensor([pair["generated"] for pair in GOLDEN], dtype=torch.int32)
    options = dict(token_ids=column("token_ids", torch.int32, -1), generated=generated)
    result, faults = reweight(probs, z, params, eos, device, backend, **options)
    assert result.dtype == dtype and sum(faults) == 0
    error = (result.double() - column("expected", torch.float64, 0.0)).abs().amax(dim=1)
    assert error.max() <= GOLDEN_ATOL
    assert (error <= 1e-4).double().mean() >= 0.95


# --- tilting to a target ---


def hard_rows(rows, slots, seed):
    """(probabilities, value logits, parameters) of rows to tilt."""
    p, z, columns = generator.hard_rows(Draws(seed), rows, slots)
    params = [
        GuidanceParams(Mode(mode), scale, target_length=target if mode >= Mode.EQ_SOFT else None)
        for mode, scale, target in zip(*(columns[n].tolist() for n in ("mode", "scale", "target_length")), strict=True)
    ]
    return p, z, params


@pytest.mark.parametrize("backend, rows, slots", [("triton", 10_000, 8), ("triton", 500, 64), ("reference", 10_000, 8)])
def test_root_meets_the_target_on_hard_rows(backend, rows, slots, device):
    p, z, params = hard_rows(rows, slots, seed=0)
    assert p[p > 0].min() < 1e-27
    status = torch.full((rows,), int(Status.GUIDE), dtype=torch.int8)
    result, _ = reweight(p, z, params, set(), device, backend, status=status)
    q, table = (
        p.double() / p.double().sum(1, keepdim=True),
        GuidanceTable.from_params(params, [set()] * rows, "cpu").columns,
    )
    error = (expectation(result, z) - target_of(table, q, z.double())).abs()
    assert result.isfinite().all() and (result.sum(1) - 1).abs().max() < 1e-5
    assert error.max() <= 1e-5, f"row {error.argmax()}: off by {error.max():.2e}; {(error > 1e-5).sum()} rows"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel keeps the bound it was compiled with")
def test_root_search_is_bounded(device, monkeypatch):
    """It ends after MAX_STEPS for any rows, with probabilities that sum to 1; half of the steps are enough here."""
    results = []
    for steps in (64, 32, 2):
        monkeypatch.setattr(module, "MAX_STEPS", tl.constexpr(steps))
        results.append(reweight(*hard_rows(500, 8, seed=1), set(), device, "triton")[0])
    full, half, cut = results
    assert torch.equal(half, full)
    assert ((cut - full).abs().amax(1) > 1e-3).sum() > 50
    assert (cut.sum(1) - 1).abs().max() < 1e-5


def test_length_mul_of_tiny_values(device, backend):
    """Values near 1e-5: in fp32, 1 - E[v] would keep three of their digits and shift the result."""
    z, q, scales = torch.tensor([[-11.0, -11.7], [-12.1, -11.2]]), torch.tensor([[0.3, 0.7], [0.6, 0.4]]), [1.2, 0.8]
    params = [GuidanceParams(Mode.LENGTH_MUL, scale) for scale in scales]
    result, _ = reweight(q, z, params, set(), device, backend)
    v = torch.sigmoid(z.double())
    target = -torch.expm1(torch.tensor(scales) * torch.log1p(-(q.double() * v).sum(1)))
    first = (target - v[:, 1]) / (v[:, 0] - v[:, 1])
    assert ((first > 0.05) & (first < 0.95)).all()
    torch.testing.assert_close(result[:, 0].double(), first, rtol=0, atol=2e-5)


def test_targets_are_kept_inside_the_values(device, backend):
    """By 1e-6 of their range, and by at least 1e-12, as two equally likely candidates show."""
    params = [GuidanceParams(Mode.LINEAR, scale) for scale in (100.0, -99.0, 100.0, -99.0)]
    z = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [0.0, 4e-7], [0.0, 4e-7]])
    result, _ = reweight([[0.5, 0.5]], z, params, set(), device, backend)
    far_end = torch.stack([result[0, 0], result[1, 1], result[2, 0], result[3, 1]])
    torch.testing.assert_close(far_end, torch.tensor([1e-6, 1e-6, 1e-5, 1e-5]), rtol=0.1, atol=0)


def test_neutral_scales_leave_rows_unchanged(device, backend):
    modes = [Mode.MUL, Mode.MUL, Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL, Mode.CENTERED_EXP, Mode.VALUE_BIAS]
    params = list(map(GuidanceParams, modes, [0.0, -2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    q = [[0.2, 0.4, 0.1, 0.1]]
    result, _ = reweight(q, [[1.0, -1.0, 0.5, 2.0]], params, {3}, device, backend)
    assert_weights(result, q * 8)


def test_value_min_met_exactly_guides(device, backend):
    limit = torch.tensor(0.5)
    bounds = [limit.nextafter(limit + 1).item(), 0.5, None, 0.5]
    params = [GuidanceParams(Mode.LE, target_length=9.0, value_min=bound) for bound in bounds]
    one, q = [0, 0, 1, 0], [0.25, 0.25, 0.375, 0.125]
    result, faults = reweight([q], [[0.0] * 4] * 3 + [[-1e-5] * 4], params, set(), device, backend)
    assert result.tolist() == [q, one, one, q] and sum(faults) == 0


# --- constraints ---


def test_constraints_break_ties_by_probability_then_slot(device, backend):
    """Candidates in any order, several with equal values, some that end the sequence."""
    q = [[0.1, 0.2, 0.4, 0.3], [0.1, 0.4, 0.4, 0.1], [0.2, 0.3, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]]
    z = [[1.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 5.0, -2.0], [0.0, 0.5, 0.5, 0.0]]
    smallest, largest = [2, 1, 1, 0], [3, 1, 2, 1]
    for op, length, chosen in (
        ("le", 99, smallest),
        ("ge", 99, largest),
        ("ge", 1, largest),
        ("ge", 0.25, largest),
        ("ge", 0, smallest),
        ("eq", 0, smallest),
        ("eq", 9999, largest),
        ("soft", 0, smallest),
        ("soft", 9999, largest),
    ):
        params = [parse_guidance({"target_length": length, "op": op, "gamma": 0.9})] * 4
        result, _ = reweight(q, z, params, [set(), set(), {0, 1}, set()], device, backend)
        assert result.argmax(1).tolist() == chosen, (op, length)
        assert result.sum() == result.amax(1).sum() == 4


def test_one_sided_targets_move_rows_towards_them_only(device, backend):
    """Like eq_soft where the expected value is on the wrong side; otherwise bitwise q, also beyond all values."""
    z, q = [[-1.0, 0.5, 2.0, 1.0]], [[0.375, 0.25, 0.25, 0.125]]  # E[v] = 0.568

    def towards(mode):
        # -ln(1 - v): below every value, below E[v], above it, above every value
        params = [GuidanceParams(mode, target_length=length) for length in (0.2, 0.6, 1.5, 5.0)]
        return reweight(q, z, params, set(), device, backend, answers=0.0)[0]

    both = towards(Mode.EQ_SOFT)
    assert both[0].tolist() == [1, 0, 0, 0] and both[3].tolist() == [0, 0, 1, 0]
    assert ((both - torch.tensor(q)).abs().amax(1) > 0.05).all()
    for mode, moved in ((Mode.LE_SOFT, [True, True, False, False]), (Mode.GE_SOFT, [False, False, True, True])):
        assert torch.equal(towards(mode), torch.where(torch.tensor(moved)[:, None], both, torch.tensor(q)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Mode.EQ_SOFT, [[0, 1], [0, 1], [0, 1], [1, 0], [0, 1]]),
        (Mode.LE_SOFT, [[0.25, 0.75], [0, 1], [0.25, 0.75], [1, 0], [0, 1]]),
        (Mode.GE_SOFT, [[0.25, 0.75], [0.25, 0.75], [0, 1], [0.25, 0.75], [0.25, 0.75]]),
    ],
)
def test_targets_at_the_ends_of_the_values(device, backend, mode, expected):
    """One candidate is chosen there, as outside of the range; 1 - exp(-100) has the logit 100. Candidates that end the
    sequence have the value 0, which meets a target of 0."""
    z = [[100.0, 100.0], [100.0, 100.0], [3.0, 100.0], [-1.0, 9.0], [300.0, 100.0]]
    params = [GuidanceParams(mode, target_length=length) for length in (100.0, 99.0, 100.0, 0.0, 100.0)]
    eos = [set(), set(), set(), {0}, set()]
    result, _ = reweight([[0.25, 0.75]], z, params, eos, device, backend, answers=0.0)
    assert result.tolist() == expected


def test_target_above_every_value_is_not_reached_by_rounding(device, backend):
    """All candidates but one have the largest value; some sums of their probabilities are 1 + 2**-23."""
    q = torch.rand(256, 8, generator=torch.Generator().manual_seed(0))
    q[:, 3] = 1e-12
    params = [parse_guidance({"target_length": 999, "op": "ge_soft", "gamma": 0.9})] * 256
    z = [[2.0, 2.0, 2.0, -1.0, 2.0, 2.0, 2.0, 2.0]]
    result, _ = reweight(q / q.sum(1, keepdim=True), z, params, set(), device, backend)
    assert torch.equal(result.argmax(1), q.argmax(1)) and result.sum() == result.amax(1).sum() == 256


def test_long_horizons_stay_distinct(device, backend):
    """Lengths of 20,000 and 32,000 tokens have equal values in fp32, but different logits."""
    z = logit_of(torch.tensor([[32_000.0, 20_000.0, 6_000.0, 100.0]]) * -math.log(0.997)).float()
    assert torch.sigmoid(z)[0, 0] == torch.sigmoid(z)[0, 1] == 1
    params = [GuidanceParams(Mode.EQ, target_length=target) for target in (31_000, 21_000, 7_000, 0)]
    result, _ = reweight([[0.25] * 4], z, params, set(), device, backend)
    assert result.tolist() == torch.eye(4).tolist()


# --- value_bias, and the largest logits ---


def test_value_bias_uses_raw_logits(device, backend):
    """Also at the end of sequence, with answers, with the largest numbers, and with products that fp32 rounds by 1e-4.

    In this mode, an infinite logit at the end of sequence is a fault.
    """
    q, usual, hundreds = [0.1, 0.2, 0.3, 0.4], [1.0, -3.0, 0.5, 2.0], [300.0, 299.93, 299.87, 299.75]
    rows = [  # scale, answer, value logits, logarithms of the factors of q as multiples of the scale
        (0.7, 0.0, usual, usual),
        (0.7, 5.0, usual, usual),
        (15.0, 0.0, hundreds, hundreds),
        (-15.0, 0.0, [-x for x in hundreds], [-x for x in hundreds]),
        (-20.0, 0.0, [HUGE, 0.0, -HUGE, 9.0], [99.0, 99.0, 0.0, 99.0]),
        (20.0, 0.0, [-HUGE, -HUGE, -1.0, -HUGE], [-99.0, -99.0, 0.0, -99.0]),
        (1.0, 0.0, [0.0, math.inf, 0.0, 9.0], [0.0] * 4),
    ]
    scales, answers, z, multiples = zip(*rows, strict=True)
    params = [GuidanceParams(Mode.VALUE_BIAS, scale) for scale in scales]
    options = dict(token_ids=torch.tensor([[3, 1, 0, 2]] * 7).int(), answers=answers)
    result, faults = reweight([q], z, params, {1}, device, backend, **options)
    logits = torch.tensor(q).double().log() + torch.tensor(multiples).double() * torch.tensor(scales)[:, None]
    assert_weights(result, torch.softmax(logits, 1), atol=5e-6)
    assert torch.equal(result[0], result[1]) and faults == [0, 0, 0, 0, 0, 0, 1]


def test_largest_logits_in_every_mode(device, backend):
    """A value of 1, a value of 0 and the end of sequence: finite results that agree with the fp64 reference."""
    params = [GuidanceParams(mode, 1.5, target_length=30.0) for mode in Mode if mode != Mode.UNGUIDED]
    q, z = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.tensor([[HUGE, -HUGE, 0.0, 1.0]])
    result, faults = reweight(q, z, params, {3}, device, backend)
    expected, _ = reweight(q.double(), z.double(), params, {3}, "cpu", "reference")
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-5)
    assert (result.sum(1) - 1).abs().max() < 1e-5 and sum(faults) == 0


# --- near a target ---

# The first token ends the output, so its length is 0.
TOKENS = torch.tensor([[5.0, 8.0, 18.0, 78.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("tolerance", "shorter", "longer"),
    [(0.0, [10.0, 2, 1, 1], [1.0, 1, 1, 4]), (10.0, [5.0, 1, 1, 1], [1.0, 1, 1, 8 / 3]), (60.0, [1.0] * 4, [1.0] * 4)],
)
@pytest.mark.parametrize("gamma", [0.9, 0.997, 0.99999])
def test_near_by_hand(device, backend, gamma, tolerance, shorter, longer):
    """Lengths of 0, 8, 18 and 78 tokens, 18 remaining. With 2 added, they are 10 and 2 times less, equal, 4 times more.

    A tolerance of 10 tokens admits lengths of 8 to 28, and one of 60 all lengths."""
    shorter, longer = torch.tensor([shorter]), torch.tensor([longer])
    q = torch.tensor([[0.125, 0.375, 0.25, 0.25]])
    rules = [(mode, strength) for mode in NEAR for strength in (0.0, 1.0, 2.5)]
    total = dict(target_length=28.0, tolerance=tolerance, counts_down=True)
    params = [GuidanceParams(mode, s, gamma, **total) for mode, s in rules]
    z, generated = logit_of(TOKENS * -math.log(gamma)).float(), torch.full((9,), 10, dtype=torch.int32)
    result, _ = reweight(q, z, params, {0}, device, backend, generated=generated)
    factors = dict(zip(NEAR, (shorter * longer, shorter, longer), strict=True))
    assert_weights(result, torch.cat([q * factors[mode] ** -strength for mode, strength in rules]))
    assert torch.equal(result[::3], q.expand(3, -1))


def test_near_does_not_change_past_a_total(device, backend):
    """Past the total and its tolerance, the remaining length is 0, and further tokens change nothing."""
    q, z = torch.tensor([[0.125, 0.375, 0.25, 0.25]]), logit_of(TOKENS * -math.log(0.997)).float()
    late, generated = dict(counts_down=True), torch.tensor([38, 50, 400, 38], dtype=torch.int32)
    params = [GuidanceParams(Mode.NEAR, 2.0, target_length=28.0, tolerance=10.0, **late)] * 3
    params += [GuidanceParams(Mode.LE_NEAR, 2.0, target_length=38.0, **late)]
    result, _ = reweight(q, z, params, {0}, device, backend, generated=generated)
    assert_weights(result, (q * torch.tensor([[1.0, 5.0, 10.0, 40.0]]) ** -2.0).expand(4, -1))


@pytest.mark.parametrize(
    ("mode", "factors", "improbable", "unknown"),
    [  # between 6 tokens and each candidate's nearest length, all with 2 added; at breaks also 1
        (Mode.NEAR, [6 / 2, 10 / 6, 100 / 6, 6 / 3, 30 / 6], 30 / 6, 100 / 6),
        (Mode.LE_NEAR, [1.0, 1.0, 100 / 6, 1.0, 30 / 6], 30 / 6, 100 / 6),
        (Mode.GE_NEAR, [6 / 2, 1.0, 1.0, 1.0, 1.0], 1.0, 1.0),
    ],
)
def test_near_by_hand_at_ends_of_sentences(device, backend, mode, factors, improbable, unknown):
    """Lengths of 0, 8, 98, 98, 28 and 28 tokens, 4 remaining. The second and the fourth may lead to a length of 1.

    The last is too improbable for that."""
    q = torch.tensor([[0.1, 0.2, 0.3, 0.25, 0.145, 0.005, 0, 0]])
    z = logit_of(torch.tensor([[5.0, 8.0, 98.0, 98.0, 28.0, 28.0, 1, 1]]).double() * -math.log(0.99)).float()
    breaks = torch.tensor([2, 2, 1, 2, 0, 2], dtype=torch.int8)  # the first ends the output, which takes precedence
    near = GuidanceParams(mode, 2.0, 0.99, target_length=4.0)
    params, generated = [near, replace(near, target_length=120.0, counts_down=True)], torch.tensor([99, 116]).int()
    result, _ = reweight(q, z, params, {0}, device, backend, text_breaks=breaks, generated=generated)
    assert_weights(result, (q * torch.tensor([[*factors, improbable, 1.0, 1.0]]) ** -2.0).expand(2, -1))
    # ``text_breaks`` ends before the fourth token, so only its value counts.
    result, _ = reweight(q, z, [near], {0}, device, backend, text_breaks=breaks[:3])
    assert_weights(result, q * torch.tensor([[*factors[:3], unknown, factors[4], improbable, 1.0, 1.0]]) ** -2.0)


def test_near_at_the_ends_of_fp32(device, backend):
    """Lengths of 0 and 1e30 nats, targets that overflow in nats, strengths that overflow, and columns of padding."""

    def z_of(*lengths, gamma=0.997):
        return logit_of(torch.tensor(lengths, dtype=torch.float64) * -math.log(gamma)).tolist()

    largest = [1 + 1e30 / (-2 * math.log(gamma)) for gamma in (0.1, 0.99999)]
    rows = [  # discount, target, strength, value logits, factors of q
        (0.997, 500.0, HUGE, z_of(0.01, 1e6), [1, 0]),
        (0.997, 5000.0, HUGE, z_of(0.01, 1e6), [0, 1]),
        (0.997, 1e6, 0.5, z_of(0.01, 1e6), [(2.01 / 1_000_002) ** 0.5, 1]),
        (0.1, HUGE, 0.1, [1e30, -1e30], [1, largest[0] ** -0.1]),
        (0.99999, 0.0, 0.1, [1e30, -1e30], [largest[1] ** -0.1, 1]),
        (0.99999, 1e6, HUGE, z_of(999_000.0, 1_010_000.0, gamma=0.99999), [1, 0]),
    ]
    params = [GuidanceParams(Mode.NEAR, s, gamma, target_length=target) for gamma, target, s, _, _ in rows]
    z, q = [[*row[3], 0.0, 0.0] for row in rows], torch.tensor([[0.25, 0.75, 0.0, 0.0]])
    result, faults = reweight(q, z, params, set(), device, backend)
    assert_weights(result, q * torch.tensor([[*row[4], 0.0, 0.0] for row in rows]))
    assert sum(faults) == 0


# --- properties of near ---

LENGTHS = [0.01, 0.5, 3.0, 17.0, 18.0, 19.0, 250.0, 4000.0, 1e6]


def near_case(case, device, mode, strength):
    """Inputs of a case in which all requests have this mode; lengths of all sizes, many of them equal."""
    given, draws = generator.inputs(case, device), case.draws(device)
    rows, table = given.table_rows, given.table
    table.mode[:], table.scale[:] = int(mode), strength
    targets = [0.0, 0.01, 18.0, 500.0, 1e6, HUGE]
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
    """Guided probabilities; in fp64 for the reference."""
    candidates, z = given.candidates, given.value_logits
    if backend == "reference":
        candidates, z = candidates._replace(probs=candidates.probs.double()), z.double()
    return reweight_scatter(candidates, z, given.table, backend=backend, **given.arguments)


def excess_of(given):
    """fp64 ``ln((l + 2) / (r + 2))``, NaN for padding."""
    two_tokens = 2 * given.table.nats_per_token[given.table_rows].double()[:, None]
    ratio = (generator.lengths_of(given)[0] + two_tokens) / (generator.target_of(given) + two_tokens)
    return ratio.log().where(given.candidates.probs > 0, math.nan)


near_cases = partial(cases, "reweight_scatter", rows=["usual"], scatter=[False])
by_values = partial(near_cases, text_breaks=[0])  # without sentence ends, which admit shorter lengths
modes, strengths = st.sampled_from(NEAR), st.sampled_from([0.5, 5.0, 20.0, 1e4, HUGE])


@given(case=by_values(), strength=strengths)
def test_near_without_effect_is_q(device, backend, case, strength):
    """Bitwise: at strength 0, and where no candidate is on the wrong side. Where all are, the modes agree with near."""
    inputs = near_case(case, device, Mode.UNGUIDED, 0.0)
    q, excess, padding = guided_by(inputs, backend), excess_of(inputs), inputs.candidates.probs == 0
    is_longer, is_shorter = (((sign * excess > 1e-4) | padding).all(1) for sign in (1, -1))
    both = guided_by(near_case(case, device, Mode.NEAR, strength), backend)
    for mode, right, wrong in (
        (Mode.NEAR, padding.all(1), padding.all(1)),
        (Mode.GE_NEAR, is_longer, is_shorter),
        (Mode.LE_NEAR, is_shorter, is_longer),
    ):
        assert torch.equal(guided_by(near_case(case, device, mode, 0.0), backend), q)
        guided = guided_by(near_case(case, device, mode, strength), backend)
        assert torch.equal(guided[right], q[right]) and torch.equal(guided[wrong], both[wrong])


@given(case=by_values(), mode=modes, strength=strengths)
def test_near_keeps_the_ratios_of_equal_lengths(device, backend, case, mode, strength):
    inputs = near_case(case, device, mode, strength)
    p, q, lengths = guided_by(inputs, backend).double(), inputs.candidates.probs.double(), excess_of(inputs)
    q = q / q.sum(1, keepdim=True)
    crosswise = p[:, :, None] * q[:, None] - p[:, None] * q[:, :, None]
    assert (crosswise[lengths[:, :, None] == lengths[:, None]].abs() <= 2e-5).all()


@given(case=near_cases(broken=[False]), mode=modes)
def test_near_of_the_largest_strength_chooses_the_nearest(device, backend, case, mode):
    inputs = near_case(case, device, mode, HUGE)
    inputs.table.value_min[:] = -math.inf
    distance = generator.near_distances(inputs).masked_fill(inputs.candidates.probs == 0, math.inf)
    farther = (distance > distance.amin(1, keepdim=True) + 1e-4) & (inputs.candidates.status == Status.GUIDE)[:, None]
    result = guided_by(inputs, backend)
    assert (result[farther] == 0).all()
    torch.testing.assert_close(result.sum(1), (inputs.candidates.probs > 0).any(1).to(result.dtype))


@given(case=near_cases(), mode=modes)
def test_near_is_monotone_in_the_strength(device, backend, case, mode):
    """The probability mass up to any distance does not decrease."""
    steps, error = ((0.0, 0.5, 2.0, 5.0, 20.0), 1e-4) if backend == "triton" else ((0.0, 0.5, 5.0, 100.0, 1e6), 1e-8)
    before = None
    for strength in steps:
        inputs = near_case(case, device, mode, strength)
        distance = generator.near_distances(inputs).masked_fill(inputs.candidates.probs == 0, math.inf)
        order = distance.argsort(dim=1, stable=True)
        mass = guided_by(inputs, backend).double().gather(1, order).cumsum(1)
        assert before is None or (mass >= before - error).all()
        before = mass


@pytest.mark.parametrize("precise", [False, True])
def test_answer_is_subtracted_from_predicted_lengths(device, backend, precise):
    """In every mode but value_bias, lengths with an answer added guide like the lengths alone without an answer."""
    if precise and backend == "triton":
        pytest.skip("the kernels compute in fp32")
    dtype = torch.float64 if precise else torch.float32
    modes = [mode for mode in Mode if mode not in (Mode.UNGUIDED, Mode.VALUE_BIAS)]
    params = [GuidanceParams(mode, 1.25, target_length=1.5) for mode in modes for _ in range(4)]
    answers = torch.tensor([0.0, 0.125, 2.5, 10.0]).repeat(len(modes))
    nats, q = (torch.tensor([x], dtype=torch.float64) for x in ([0.03, 0.5, 2.0, 9.0], [0.4, 0.3, 0.2, 0.1]))
    expected, _ = reweight(q, logit_of(nats), params, set(), "cpu", "reference", answers=0.0)
    z = logit_of(nats + answers[:, None].double())
    result, faults = reweight(q.to(dtype), z.to(dtype), params, set(), device, backend, answers=answers)
    assert result.dtype == dtype and sum(faults) == 0
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-11 if precise else 5e-5)
    first = 4 * modes.index(Mode.CENTERED_EXP)
    by_hand = q * (1.25 * -torch.expm1(-nats)).exp()
    assert_weights(result[first : first + 4], by_hand.expand(4, -1), atol=5e-6)


def test_answer_longer_than_the_prediction_leaves_value_0(device, backend):
    """The most probable of the candidates with value 0 is the shortest; they act like candidates that end the span."""
    q = [0.1, 0.3, 0.2, 0.4]
    z = logit_of([[1.0, 2.0, 2.9, 5.0]]).float().repeat(5, 1)
    z[1, 0] = -HUGE
    modes = [(Mode.LE, 9.0), (Mode.EQ, 0.0), (Mode.GE, 9.0), (Mode.EQ_SOFT, 0.0), (Mode.CENTERED_EXP, 0.0)]
    params = [GuidanceParams(mode, -3.0, target_length=target) for mode, target in modes]
    result, faults = reweight([q], z, params, set(), device, backend, answers=3.0)
    shortest, longest = [0, 1, 0, 0], [0, 0, 0, 1]
    assert result[:4].tolist() == [shortest, shortest, longest, shortest] and sum(faults) == 0
    assert_weights(result[4:], [[0.1, 0.3, 0.2, 0.4 * math.exp(-3 * (1 - math.exp(-2)))]])
    # The answer exceeds all predictions: all values are 0, and the last candidate is the most probable.
    result, _ = reweight([q], z, params, set(), device, backend, answers=1e30)
    assert result[:4].tolist() == [longest] * 4
    torch.testing.assert_close(result[4], torch.tensor(q))


@pytest.mark.parametrize("answer", [0.0, 0.5])
def test_tokens_that_end_the_span_have_value_0(device, backend, answer):
    """Like tokens that end the sequence; up to four tokens, with any logits."""
    nan = math.nan
    z = [[-1.0, nan, 0.5, 2.0], [-1.0, nan, 0.5, 2.0], [nan] * 3 + [2.0], [nan] * 4]
    ends, eos = [(1,), (), (1, 0, 2), (9, 0, 8, 2)], [set(), {1}, set(), {1, 3}]
    params = [GuidanceParams(Mode.CENTERED_EXP, -5.0, end_token_ids=end_ids) for end_ids in ends]
    q = torch.tensor([[0.4, 0.1, 0.2, 0.3]])
    result, faults = reweight(q, z, params, eos, device, backend, answers=answer)
    assert sum(faults) == 0 and torch.equal(result[0], result[1])
    nats = (F.softplus(torch.tensor(z)) - answer).clamp(min=0)
    assert_weights(result, q * (-5 * -torch.expm1(-nats).nan_to_num(0.0)).exp())
    # A non-finite value of a candidate that ends nothing is still a fault.
    _, faults = reweight(q, [[0.0, 0.0, nan, 0.0]], params, eos, device, backend, answers=answer)
    assert faults == [1, 1, 0, 0]


# --- statuses, memory, arguments ---


@pytest.mark.parametrize("probs", [None, torch.float32, torch.bfloat16])
def test_status_determines_faults_and_writes(device, backend, probs, monkeypatch):
    """Non-finite logits are faults in guided rows only, broken candidates in any row; once per row for all slices."""
    monkeypatch.setattr(module, "SLICE", 4)
    guide, single = Status.GUIDE, Status.SINGLE
    status = torch.tensor([guide, Status.SKIP, single, Status.UNGUIDED, single, guide, guide, guide]).to(torch.int8)
    p = torch.full((8, 2), 0.25)
    p[[2, 4]] = torch.tensor([0.5, 0.0])
    token_ids = torch.tensor([[9, 2], [9, 2], [8, -1], [9, 2], [0, -1], [5, 0], [9, 2], [3, 7]]).int()
    mul = parse_guidance({"scale": 0.5})
    table = GuidanceTable.from_params([None, mul, mul, mul], [{0}, set(), {0}, {2}], device).columns
    table_rows = torch.tensor([1, 1, 2, 3, 0, 2, 0, 1], device=device)
    candidates = candidates_of(token_ids, p, device, status)
    candidates.lost_mass[3] = math.nan
    z = torch.full((8, 2), math.nan, device=device)
    z[5, 0] = 1.0  # its other candidate ends the sequence
    memory = torch.full((8, 13), 0.125, dtype=probs, device=device)
    options = {"probs": memory[:, :10]} if probs else {}
    result = reweight_scatter(candidates, z, table, table_rows=table_rows, backend=backend, **options).cpu()
    assert table.faults.tolist() == [0, 2, 0, 1]
    assert result[:5].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0], [0.5, 0.5], [1, 0]]
    torch.testing.assert_close(result[5], torch.tensor([0.25, 0.75]))
    assert result[6:].tolist() == [[0.5, 0.5]] * 2
    expected = torch.full((8, 13), 0.125)
    if probs:
        expected[[0, 2, 4, 5, 7], :10] = 0
        expected[0, [9, 2]], expected[2, 8], expected[4, 0], expected[5, [5, 0]] = 0.5, 1.0, 1.0, result[5]
        expected[7, [3, 7]] = 0.5
    assert torch.equal(memory.cpu(), expected.to(probs))


SMALL = GuidanceTable.from_params([None], [set()], "cpu").columns
COLUMNS = "value_logits must have a power of two up to 64 columns, got"
ERRORS = [
    *((f"{COLUMNS} {n}", {"value_logits": torch.zeros(2, n)}) for n in (0, 3, 128)),
    ("candidates must be the Candidates of topk_candidates, got NoneType", {"candidates": None}),
    ("table must be GuidanceColumns, got list", {"table": []}),
    (r"table must have a row for each of the 2 requests, got 1 \(or give table_rows\)", {"table": SMALL}),
]


@pytest.mark.parametrize(("message", "changed"), ERRORS)
def test_errors_name_the_argument(message, changed):
    table = GuidanceTable.from_params([None, None], [set(), set()], "cpu").columns
    candidates = candidates_of(torch.zeros(2, 4).int(), torch.full((2, 4), 0.25), "cpu")
    arguments = dict(candidates=candidates, value_logits=torch.zeros(2, 4), table=table)
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        reweight_scatter(**arguments | changed)
