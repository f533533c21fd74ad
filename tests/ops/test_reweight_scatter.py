"""``reweight_scatter``: cases by hand, pairs from the fork, roots on hard rows, and properties of ``near``."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from hypothesis import given, settings
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


@pytest.fixture(scope="module", autouse=True)
def large_tiles(device):
    """The interpreter takes as long for a tile of 8,192 candidates as for one of 64; the laws have both."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "TILE", 8192)
        yield


def candidates_of(token_ids, probs, device, status=None):
    counts = (token_ids >= 0).sum(1).int()
    if status is None:
        status = torch.where(counts == 1, int(Status.SINGLE), int(Status.GUIDE)).to(torch.int8)
    return Candidates(*(x.to(device) for x in (token_ids, probs, counts, status, torch.zeros_like(probs[:, 0]))))


def reweight(probs, z, params, eos, device, backend, *, token_ids=None, status=None, **options):
    """(guided probabilities, faults) by request. A single row of ``probs``, ``z`` or ``eos`` is shared by all requests.

    The table's first row is unused, and the others are in reverse order; rows of ``z`` are strided.
    """
    rows, eos = len(params), [eos] * len(params) if isinstance(eos, set) else eos
    probs, z = (torch.as_tensor(x).expand(rows, -1).contiguous() for x in (probs, z))
    if token_ids is None:
        token_ids = torch.where(probs > 0, torch.arange(probs.shape[1]), -1).int()
    unused = GuidanceParams(Mode.VALUE_BIAS, 3.0)
    table = GuidanceTable.from_params([unused, *reversed(params)], [set(), *reversed(eos)], device).columns
    table_rows = torch.arange(rows, 0, -1, device=device)
    options = {name: x.to(device) for name, x in options.items()}
    z = F.pad(z, (0, 3), value=math.nan).to(device)[:, : z.shape[1]]
    candidates = candidates_of(token_ids, probs, device, status)
    result = reweight_scatter(candidates, z, table, table_rows=table_rows, backend=backend, **options)
    assert table.faults[0] == 0
    return result.cpu(), table.faults[table_rows].tolist()


# --- cases by hand ---


class HandCase(NamedTuple):
    """A request with up to eight candidates, whose token ids are their places.

    ``weights`` are proportional to the expected probabilities. A number is the place of the only candidate left.
    ``SAME`` is a row that stays bitwise unchanged, ``FAULT`` one that stays unchanged and is counted.
    """

    params: GuidanceParams
    z: Sequence[float]
    weights: Sequence[float] | int
    q: Sequence[float]
    eos: Sequence[int]
    generated: int


SAME, FAULT = -1, -2
TENTHS, EIGHTHS, PAIR = (0.1, 0.2, 0.3, 0.4), (0.25, 0.25, 0.375, 0.125), (0.25, 0.75)
IN_NATS = {"gamma": math.exp(-1)}  # a length in tokens is -ln(1 - v)


def hand_cases(*rows, q=TENTHS, eos=(), generated=0, **shared):
    """Requests from rows of mode, scale, target, value logits, weights, and optionally further parameters."""
    return [
        HandCase(GuidanceParams(mode, scale, target_length=target, **shared | more), z, weights, q, eos, generated)
        for mode, scale, target, z, weights, more in (row if len(row) == 6 else (*row, {}) for row in rows)
    ]


def logit_of(nats):
    """fp64; the logit of the value ``1 - exp(-nats)``."""
    nats = torch.as_tensor(nats, dtype=torch.float64)
    return nats + torch.log(-torch.expm1(-nats))


def z_of(*lengths, gamma=0.997):
    """The value logits of lengths in tokens."""
    return logit_of(torch.tensor(lengths, dtype=torch.float64) * -math.log(gamma)).tolist()


def biased(q, scale, logs):
    """``q`` times the exponentials of ``scale * logs``, normalised; ``logs`` are fp32."""
    return torch.softmax(torch.tensor(q).double().log() + scale * torch.tensor(logs).double(), 0).tolist()


def distant(q, ratios, strength=2.0):
    return [p * ratio**-strength for p, ratio in zip(q, ratios, strict=True)]


# The values 0.2 and 0.6 with an expected value of 0.5 move to a target.
PAIR_Z, HALF, UP = torch.tensor([0.2, 0.6]).double().logit().tolist(), (0.5, 0.5), (0.125, 0.875)
TO_0_4, TO_0_55 = (math.log1p(-value) / math.log(0.997) for value in (0.4, 0.55))
TILTS = hand_cases(
    (Mode.MUL, 0.8, None, PAIR_Z, HALF),  # to 0.4
    (Mode.LINEAR, 1.5, None, PAIR_Z, UP),  # to 0.55, half of the way to 0.6
    (Mode.LINEAR, 0.5, None, PAIR_Z, (0.625, 0.375)),  # to 0.35, half of the way to 0.2
    (Mode.EXP, 2.0, None, PAIR_Z, (0.0625, 0.9375)),  # the share of 0.75 becomes 1 - 0.25^2
    (Mode.LENGTH_MUL, 0.5, None, PAIR_Z, (0.5**0.5 - 0.4, 0.8 - 0.5**0.5)),  # to 1 - 0.5^0.5
    (Mode.CENTERED_EXP, -3.0, None, PAIR_Z, biased(PAIR, -3.0, (0.2, 0.6))),
    (Mode.EQ_SOFT, 1.0, TO_0_4, PAIR_Z, HALF),
    (Mode.LE_SOFT, 1.0, TO_0_4, PAIR_Z, HALF),
    (Mode.GE_SOFT, 1.0, TO_0_4, PAIR_Z, SAME),
    (Mode.EQ_SOFT, 1.0, TO_0_55, PAIR_Z, UP),
    (Mode.LE_SOFT, 1.0, TO_0_55, PAIR_Z, SAME),
    (Mode.GE_SOFT, 1.0, TO_0_55, PAIR_Z, UP),
    q=PAIR,
)
NEUTRAL = [(mode, 1.0) for mode in (Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL)]
NEUTRAL += [(mode, 0.0) for mode in (Mode.MUL, Mode.CENTERED_EXP, Mode.VALUE_BIAS)] + [(Mode.MUL, -2.0)]
UNCHANGED = hand_cases(*((*row, None, (1.0, -1.0, 0.5, 2.0), TENTHS) for row in NEUTRAL), eos=(3,))
# Targets below and above all values. The values of 100 and 300 nats are 1 in fp32, and the value of an end is 0.
OUTSIDE = [
    case
    for z, target, eos, eq, le, ge in (
        ((100.0, 100.0), 100.0, (), 1, SAME, SAME),
        ((100.0, 100.0), 99.0, (), 1, 1, SAME),
        ((3.0, 100.0), 100.0, (), 1, SAME, 1),
        ((-1.0, 9.0), 0.0, (0,), 0, 0, SAME),
        ((300.0, 100.0), 100.0, (), 1, 1, SAME),
        ((-1.0, 2.0), 0.1, (), 0, 0, SAME),
        ((-1.0, 2.0), 5.0, (), 1, SAME, 1),
    )
    for mode, weights in ((Mode.EQ_SOFT, eq), (Mode.LE_SOFT, le), (Mode.GE_SOFT, ge))
    for case in hand_cases((mode, 1.0, target, z, weights), q=PAIR, eos=eos, **IN_NATS)
]
# The expected value is 0.5, or a little less.
VALUE_MIN = hand_cases(
    (Mode.LE, 1.0, 9.0, [0.0] * 4, SAME, {"value_min": 0.5 + 2**-24}),
    (Mode.LE, 1.0, 9.0, [0.0] * 4, 2, {"value_min": 0.5}),
    (Mode.LE, 1.0, 9.0, [0.0] * 4, 2),
    (Mode.LE, 1.0, 9.0, [-1e-5] * 4, SAME, {"value_min": 0.5}),
    q=EIGHTHS,
)
# Ties are broken by probability, then by place; candidates that end the sequence have the value 0.
TIES = [
    case
    for q, z, eos, least, most in (
        ((0.1, 0.2, 0.4, 0.3), (1.0, 2.0, 1.0, 2.0), (), 2, 3),
        ((0.1, 0.4, 0.4, 0.1), (3.0, 3.0, 3.0, 3.0), (), 1, 1),
        ((0.2, 0.3, 0.4, 0.1), (1.0, 1.0, 5.0, -2.0), (0, 1), 1, 2),
        ((0.25, 0.25, 0.25, 0.25), (0.0, 0.5, 0.5, 0.0), (), 0, 1),
    )
    for mode, target, place in (
        *((Mode.LE, 99.0, least), (Mode.GE, 0.0, least), (Mode.EQ, 0.0, least), (Mode.EQ_SOFT, 0.0, least)),
        *((Mode.GE, 99.0, most), (Mode.GE, 0.25, most), (Mode.EQ, 9999.0, most), (Mode.EQ_SOFT, 9999.0, most)),
    )
    for case in hand_cases((mode, 1.0, target, z, place), q=q, eos=eos, gamma=0.9)
]
# Lengths of 20,000 and 32,000 tokens have equal values in fp32, but different logits.
LONG_Z = z_of(32_000.0, 20_000.0, 6_000.0, 100.0)
LONG = hand_cases(*((Mode.EQ, 1.0, x, LONG_Z, place) for place, x in enumerate((31_000.0, 21_000.0, 7_000.0, 0.0))))
# Raw logits count, also of candidates that end the sequence, where an infinite one is a fault, and with answers.
USUAL, HUNDREDS = (1.0, -3.0, 0.5, 2.0), (300.0, 299.93, 299.87, 299.75)
BIASES = hand_cases(
    (Mode.VALUE_BIAS, 0.7, None, USUAL, biased(TENTHS, 0.7, USUAL)),
    (Mode.VALUE_BIAS, 0.7, None, USUAL, biased(TENTHS, 0.7, USUAL), {"answer_length": 900.0}),
    (Mode.VALUE_BIAS, 15.0, None, HUNDREDS, biased(TENTHS, 15.0, HUNDREDS)),
    (Mode.VALUE_BIAS, -15.0, None, [-x for x in HUNDREDS], biased(TENTHS, 15.0, HUNDREDS)),
    (Mode.VALUE_BIAS, -20.0, None, (HUGE, 0.0, -HUGE, 9.0), 2),
    (Mode.VALUE_BIAS, 20.0, None, (-HUGE, -HUGE, -1.0, -HUGE), 2),
    (Mode.VALUE_BIAS, 1.0, None, (0.0, math.inf, 0.0, 9.0), FAULT),
    eos=(1,),
)
# Lengths of 0 (an end), 8, 18 and 78 tokens, 18 remaining. With 2 added, they are 10 and 2 times less, equal, 4 times
# more. A tolerance of 10 tokens admits lengths of 8 to 28, and one of 60 all lengths.
NEAR_Q, NEAR_LENGTHS = (0.125, 0.375, 0.25, 0.25), (5.0, 8.0, 18.0, 78.0)
NEAR_TOTALS = [
    case
    for gamma in (0.9, 0.997, 0.99999)
    for tolerance, below, above in ((0.0, (10.0, 2.0), 4.0), (10.0, (5.0, 1.0), 8 / 3), (60.0, (1.0, 1.0), 1.0))
    for strength in (0.0, 1.0, 2.5)
    for mode, ratios in zip(NEAR, ((*below, 1.0, above), (*below, 1.0, 1.0), (1.0, 1.0, 1.0, above)), strict=True)
    for row in [(mode, strength, 28.0, z_of(*NEAR_LENGTHS, gamma=gamma), distant(NEAR_Q, ratios, strength))]
    for case in hand_cases(row, q=NEAR_Q, eos=(0,), generated=10, gamma=gamma, tolerance=tolerance, counts_down=True)
]
# Past a total and its tolerance, the remaining length is 0, and further tokens change nothing.
NEAR_PAST = [
    case
    for mode, tolerance, generated in (
        (Mode.NEAR, 10, 38),
        (Mode.NEAR, 10, 50),
        (Mode.NEAR, 10, 400),
        (Mode.LE_NEAR, 0, 28),
    )
    for row in [(mode, 2.0, 28.0, z_of(*NEAR_LENGTHS), distant(NEAR_Q, (1.0, 5.0, 10.0, 40.0)))]
    for case in hand_cases(row, q=NEAR_Q, eos=(0,), generated=generated, tolerance=tolerance, counts_down=True)
]
# Lengths of 0 and 1e30 nats, targets that overflow in nats, and strengths that overflow.
FAR, FARTHEST = z_of(0.01, 1e6), [1 + 1e30 / (-2 * math.log(gamma)) for gamma in (0.1, 0.99999)]
NEAR_LIMITS = hand_cases(
    (Mode.NEAR, HUGE, 500.0, FAR, 0),
    (Mode.NEAR, HUGE, 5000.0, FAR, 1),
    (Mode.NEAR, 0.5, 1e6, FAR, distant(PAIR, (1_000_002 / 2.01, 1.0), 0.5)),
    (Mode.NEAR, 0.1, HUGE, (1e30, -1e30), distant(PAIR, (1.0, FARTHEST[0]), 0.1), {"gamma": 0.1}),
    (Mode.NEAR, 0.1, 0.0, (1e30, -1e30), distant(PAIR, (FARTHEST[1], 1.0), 0.1), {"gamma": 0.99999}),
    (Mode.NEAR, HUGE, 1e6, z_of(999_000.0, 1_010_000.0, gamma=0.99999), 0, {"gamma": 0.99999}),
    q=PAIR,
)
# Lengths of 0, 8, 98, 98, 28 and 28 tokens, 4 remaining; the last is improbable. After a sentence, a length of 1 is
# possible too. The first candidate ends the output, which takes precedence.
BREAKS, BREAK_Q, BREAK_Z = (2, 2, 1, 2, 0, 2), (0.1, 0.2, 0.3, 0.25, 0.145, 0.005), z_of(5, 8, 98, 98, 28, 28)


def at_breaks(near, le_near):
    """Cases of the near modes, with the ratio of the fourth candidate in the modes near and le_near."""
    ratios = (3.0, 10 / 6, 100 / 6, near, 5.0, 5.0), (3.0, *[1.0] * 5), (1.0, 1.0, 100 / 6, le_near, 5.0, 5.0)
    rows = ((mode, 2.0, 4.0, BREAK_Z, distant(BREAK_Q, x)) for mode, x in zip(NEAR, ratios, strict=True))
    return hand_cases(*rows, q=BREAK_Q, eos=(0,))


# An answer longer than the prediction leaves the value 0. Such candidates act like candidates that end the span.
ANSWER_Z, LONGEST = logit_of([1.0, 2.0, 2.9, 5.0]).tolist(), {"answer_length": 1e30}
ANSWER_Q, ANSWER_3 = (0.1, 0.3, 0.2, 0.4), {"answer_length": 3.0}
LESS_HALF = [1 - math.exp(-nats) for nats in (0.5, 1.5, 2.4, 4.5)]
ANSWERED = hand_cases(
    (Mode.CENTERED_EXP, -3.0, None, ANSWER_Z, biased(ANSWER_Q, -3.0, LESS_HALF), {"answer_length": 0.5}),
    (Mode.LE, 1.0, 9.0, ANSWER_Z, 1, ANSWER_3),
    (Mode.EQ, 1.0, 0.0, (-HUGE, *ANSWER_Z[1:]), 1, ANSWER_3),
    (Mode.GE, 1.0, 9.0, ANSWER_Z, 3, ANSWER_3),
    (Mode.EQ_SOFT, 1.0, 0.0, ANSWER_Z, 1, ANSWER_3),
    (Mode.CENTERED_EXP, -3.0, None, ANSWER_Z, biased(ANSWER_Q, -3.0, (0.0, 0.0, 0.0, 1 - math.exp(-2))), ANSWER_3),
    *((mode, 1.0, 9.0, ANSWER_Z, 3, LONGEST) for mode in (Mode.LE, Mode.EQ, Mode.GE, Mode.EQ_SOFT)),
    (Mode.CENTERED_EXP, -3.0, None, ANSWER_Z, ANSWER_Q, LONGEST),
    q=ANSWER_Q,
    **IN_NATS,
)
# Tokens that end the span, like token 3, which ends the sequence, have the value 0 with any logits. Other logits that
# are not finite are faults.
NAN, SIGMOIDS = math.nan, (0.2689414, 0.6224593, 0.0, 0.0)
EXP = (Mode.CENTERED_EXP, -5.0, None)
ENDS = hand_cases(
    (*EXP, (-1.0, 0.5, NAN, NAN), biased(TENTHS, -5.0, SIGMOIDS), {"end_token_ids": (2,)}),
    (*EXP, (NAN, 2.0, NAN, NAN), biased(TENTHS, -5.0, (0.0, 0.8807971, 0.0, 0.0)), {"end_token_ids": (2, 0)}),
    (*EXP, (NAN, NAN, NAN, NAN), TENTHS, {"end_token_ids": (9, 0, 2, 1)}),
    (*EXP, (0.0, NAN, 0.0, 0.0), FAULT, {"end_token_ids": (2,)}),
    (*EXP, (0.0, 0.0, NAN, 0.0), FAULT),
    eos=(3,),
)
# Cases, tolerance, and the text breaks after each token; the second table of breaks ends before the fourth token.
TABLES = {
    "tilts": (TILTS, 2e-6, ()),
    "unchanged": (UNCHANGED, 2e-6, ()),
    "outside": (OUTSIDE, 0, ()),
    "value_min": (VALUE_MIN, 0, ()),
    "ties": (TIES, 0, ()),
    "long": (LONG, 0, ()),
    "value_bias": (BIASES, 5e-6, ()),
    "near a total": (NEAR_TOTALS, 2e-6, ()),
    "near past a total": (NEAR_PAST, 2e-6, ()),
    "near limits": (NEAR_LIMITS, 2e-6, ()),
    "near breaks": (at_breaks(6 / 3, 1.0), 2e-6, BREAKS),
    "near unknown breaks": (at_breaks(100 / 6, 100 / 6), 2e-6, BREAKS[:3]),
    "answers": (ANSWERED, 2e-6, ()),
    "ends": (ENDS, 2e-6, ()),
}


@pytest.mark.parametrize("name", TABLES)
def test_cases_by_hand(device, backend, name):
    """All requests of a table in one batch."""
    rows, atol, breaks = TABLES[name]
    q, z = (
        torch.tensor([[*x, *[0.0] * (8 - len(x))] for x in xs]) for xs in ([c.q for c in rows], [c.z for c in rows])
    )
    options = {"generated": torch.tensor([case.generated for case in rows], dtype=torch.int32)}
    if breaks:
        options["text_breaks"] = torch.tensor(breaks, dtype=torch.int8)
    eos = [set(case.eos) for case in rows]
    result, faults = reweight(q, z, [case.params for case in rows], eos, device, backend, **options)
    for case, p, found in zip(rows, result, faults, strict=True):
        weights = case.weights
        if isinstance(weights, int):
            weights = case.q if weights < 0 else [float(place == weights) for place in range(len(case.q))]
        expected = F.pad(torch.tensor(weights).double() / sum(weights), (0, 8 - len(weights)))
        exact = isinstance(case.weights, int) and case.weights != FAULT
        assert found == (case.weights == FAULT), case
        assert (p.double() - expected).abs().max() <= (0 if exact else atol), (case, p)


# --- the fork, and roots ---


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


def test_targets_are_kept_inside_the_values(device, backend):
    """By 1e-6 of their range, and by at least 1e-12, as two equally likely candidates show."""
    params = [GuidanceParams(Mode.LINEAR, scale) for scale in (100.0, -99.0, 100.0, -99.0)]
    z = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [0.0, 4e-7], [0.0, 4e-7]])
    result, _ = reweight([[0.5, 0.5]], z, params, set(), device, backend)
    far_end = torch.stack([result[0, 0], result[1, 1], result[2, 0], result[3, 1]])
    torch.testing.assert_close(far_end, torch.tensor([1e-6, 1e-6, 1e-5, 1e-5]), rtol=0.1, atol=0)


def test_target_above_every_value_is_not_reached_by_rounding(device, backend):
    """All candidates but one have the largest value; some sums of their probabilities are 1 + 2**-23."""
    q = torch.rand(256, 8, generator=torch.Generator().manual_seed(0))
    q[:, 3] = 1e-12
    params = [parse_guidance({"target_length": 999, "op": "ge_soft", "gamma": 0.9})] * 256
    z = [[2.0, 2.0, 2.0, -1.0, 2.0, 2.0, 2.0, 2.0]]
    result, _ = reweight(q / q.sum(1, keepdim=True), z, params, set(), device, backend)
    assert torch.equal(result.argmax(1), q.argmax(1)) and result.sum() == result.amax(1).sum() == 256


def test_largest_logits_in_every_mode(device, backend):
    """A value of 1, a value of 0 and the end of sequence: finite results that agree with the fp64 reference."""
    params = [GuidanceParams(mode, 1.5, target_length=30.0) for mode in Mode if mode != Mode.UNGUIDED]
    q, z = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.tensor([[HUGE, -HUGE, 0.0, 1.0]])
    result, faults = reweight(q, z, params, {3}, device, backend)
    expected, _ = reweight(q.double(), z.double(), params, {3}, "cpu", "reference")
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-5)
    assert (result.sum(1) - 1).abs().max() < 1e-5 and sum(faults) == 0


# --- properties of near and of answers ---

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


# Up to 12 rows an example, because a case of large tiles has less work.
near_cases = partial(cases, "reweight_scatter", rows=["usual"], scatter=[False], constants=list(generator.CONSTANTS))
few_examples = settings(max_examples=max(1, settings().max_examples // 5))
by_values = partial(near_cases, text_breaks=[0])  # without sentence ends, which admit shorter lengths
modes, strengths = st.sampled_from(NEAR), st.sampled_from([0.5, 5.0, 20.0, 1e4, HUGE])


@given(case=by_values(), strength=strengths)
@few_examples
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
@few_examples
def test_near_keeps_the_ratios_of_equal_lengths(device, backend, case, mode, strength):
    inputs = near_case(case, device, mode, strength)
    p, q, lengths = guided_by(inputs, backend).double(), inputs.candidates.probs.double(), excess_of(inputs)
    q = q / q.sum(1, keepdim=True)
    crosswise = p[:, :, None] * q[:, None] - p[:, None] * q[:, :, None]
    assert (crosswise[lengths[:, :, None] == lengths[:, None]].abs() <= 2e-5).all()


@given(case=near_cases(broken=[False]), mode=modes)
@few_examples
def test_near_of_the_largest_strength_chooses_the_nearest(device, backend, case, mode):
    inputs = near_case(case, device, mode, HUGE)
    inputs.table.value_min[:] = -math.inf
    distance = generator.near_distances(inputs).masked_fill(inputs.candidates.probs == 0, math.inf)
    farther = (distance > distance.amin(1, keepdim=True) + 1e-4) & (inputs.candidates.status == Status.GUIDE)[:, None]
    result = guided_by(inputs, backend)
    assert (result[farther] == 0).all()
    torch.testing.assert_close(result.sum(1), (inputs.candidates.probs > 0).any(1).to(result.dtype))


@given(case=near_cases(), mode=modes)
@few_examples
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


# --- statuses and memory ---


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
