"""``reweight_scatter``: cases computed by hand, pairs from the fork, roots, statuses and faults."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops import reweight_scatter as module
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.types import Candidates, Mode, Status
from tests.helpers.cases import arguments_of, small_case

GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "guidance.jsonl").open()]
GOLDEN_ATOL = 1e-3  # the fork's stopping rule, see golden/README.md
HUGE, NAN = torch.finfo(torch.float32).max, math.nan


@pytest.fixture(scope="module", autouse=True)
def large_tiles(device):
    """Large tiles, because the interpreter's time is per tile; the laws test both sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "TILE", 8192)
        yield


def reweight(probs, z, params, eos, device, backend, *, token_ids=None, status=None, **options):
    """(guided probabilities, faults) by request. A single row of ``probs``, ``z`` or ``eos`` is shared by all requests.

    The table's first row is unused, and the others are in reverse order; rows of ``z`` are strided. If ``status`` is
    None, requests with several candidates are guided. The scores of unguided requests are broken.
    """
    rows, eos = len(params), [eos] * len(params) if isinstance(eos, set) else eos
    probs, z = (torch.as_tensor(x).expand(rows, -1).contiguous() for x in (probs, z))
    if token_ids is None:
        token_ids = torch.where(probs > 0, torch.arange(probs.shape[1]), -1).int()
    counts = (token_ids >= 0).sum(1).int()
    if status is None:
        status = torch.where(counts == 1, int(Status.SINGLE), int(Status.GUIDE))
    lost_mass = torch.where(status == Status.UNGUIDED, NAN, probs[:, 0] * 0)
    unused = GuidanceParams(Mode.VALUE_BIAS, 3.0)
    table = GuidanceTable.from_params([unused, *reversed(params)], [set(), *reversed(eos)], device).columns
    options["table_rows"] = torch.arange(rows, 0, -1)
    options = {name: x.to(device) for name, x in options.items()}
    z = F.pad(z, (0, 3), value=NAN).to(device)[:, : z.shape[1]]
    candidates = Candidates(*(x.to(device) for x in (token_ids, probs, counts, status.to(torch.int8), lost_mass)))
    result = reweight_scatter(candidates, z, table, backend=backend, **options)
    assert table.faults[0] == 0
    return result.cpu(), table.faults[options["table_rows"]].tolist()


class HandCase(NamedTuple):
    """A request with up to eight candidates; token ids are their places.

    ``weights`` are proportional to the expected probabilities. A number is the place of the only candidate left.
    ``SAME`` is a row that stays bitwise unchanged, ``FAULT`` a row that stays unchanged and is counted.
    """

    params: GuidanceParams
    z: Sequence[float]
    weights: Sequence[float] | int
    q: Sequence[float]
    eos: Sequence[int]
    generated: int = 0
    status: Status = Status.GUIDE


SAME, FAULT = -1, -2
TENTHS, PAIR = (0.1, 0.2, 0.3, 0.4), (0.25, 0.75)
IN_NATS = {"gamma": math.exp(-1)}  # a length in tokens is -ln(1 - v)


def hand_cases(*rows, q=TENTHS, eos=(), **shared):
    """Requests from rows of mode, scale, target, value logits, weights, and optionally other parameters."""
    return [
        HandCase(GuidanceParams(mode, scale, target_length=target, **shared | more), z, weights, q, eos)
        for mode, scale, target, z, weights, more in (row if len(row) == 6 else (*row, {}) for row in rows)
    ]


def z_of(*lengths, gamma=0.997):
    """The value logits of lengths in tokens, at least -1e30."""
    nats = torch.tensor(lengths, dtype=torch.float64) * -math.log(gamma)
    return (nats + torch.log(-torch.expm1(-nats))).clamp(min=-1e30).tolist()


def biased(q, scale, logs):
    """``q`` times the exponentials of ``scale * logs``, normalised; ``logs`` are fp32."""
    return torch.softmax(torch.tensor(q).double().log() + scale * torch.tensor(logs).double(), 0).tolist()


def tilted(mode, tilt, z, q=TENTHS, gamma=0.997):
    """A case with probabilities ``~ q exp(tilt v)``, with the tilt as scale, or with their expected value as target."""
    q, v = torch.tensor(q).double() / sum(q), torch.sigmoid(torch.tensor(z).double())
    weights = q * torch.exp(tilt * v)
    low, high, before, after = v.min(), v.max(), q @ v, weights @ v / weights.sum()
    scales = {
        Mode.MUL: after / before,
        Mode.LINEAR: 1 + (after - before) / (high - before if tilt > 0 else before - low),
        Mode.EXP: ((high - after) / (high - low)).log() / ((high - before) / (high - low)).log(),
        Mode.LENGTH_MUL: (1 - after).log() / (1 - before).log(),
    }
    target = None if mode in scales else (1 - after).log().item() / math.log(gamma)
    params = GuidanceParams(mode, float(scales.get(mode, 1.0)), target_length=target, gamma=gamma)
    is_same = (mode == Mode.GE_SOFT and tilt < 0) or (mode == Mode.LE_SOFT and tilt > 0)
    return HandCase(params, z, SAME if is_same else weights.tolist(), q.tolist(), ())


def near(mode, strength, target, lengths, q, *, tolerance=0.0, generated=0, gamma=0.997, sentences=(), eos=()):
    """A case of a near mode. ``lengths`` in tokens are 0 for places in ``eos``; lengths in ``sentences`` may also be 1.

    The probabilities fall with the power ``strength`` of the quotient of a length and the nearest accepted length, each
    plus 2. A row with equal quotients stays unchanged.
    """
    least, most = max(0.0, target - tolerance - generated) + 2, max(0.0, target + tolerance - generated) + 2

    def quotient(length):
        below, above = least / (length + 2), (length + 2) / most
        return max(1.0, below * (mode != Mode.LE_NEAR), above * (mode != Mode.GE_NEAR))

    quotients = [min(quotient(x), quotient(1.0) if i in sentences else math.inf) for i, x in enumerate(lengths)]
    smallest = min(quotients)
    weights = [p * (x / smallest) ** -strength for p, x in zip(q, quotients, strict=True)]
    z = z_of(*[5.0 if i in eos else x for i, x in enumerate(lengths)], gamma=gamma)
    params = GuidanceParams(
        mode, strength, target_length=target, tolerance=tolerance, gamma=gamma, counts_down=generated > 0
    )
    is_same = strength == 0 or max(quotients) == smallest
    return HandCase(params, z, SAME if is_same else weights, q, eos, generated)


def answered(case, answer):
    """The case with lengths that include an answer."""
    nats = F.softplus(torch.tensor(case.z).double()) - answer * math.log(case.params.gamma)
    z = (nats + torch.log(-torch.expm1(-nats))).tolist()
    return case._replace(params=replace(case.params, answer_length=answer), z=z)


TILTED = [
    tilted(mode, tilt, z, q)
    for mode in (Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL, Mode.EQ_SOFT, Mode.GE_SOFT, Mode.LE_SOFT)
    for tilt in (0.7, 9.0, -0.7, -9.0)
    for z, q in (((0.0, 1.0, -2.0, 3.0), TENTHS), ((2.0, 2.0, -4.0, 1.9), (1e-4, 1e-6, 0.5, 0.4)))
]
# Neutral scales.
NEUTRAL = [(mode, 1.0) for mode in (Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL)]
NEUTRAL += [(mode, 0.0) for mode in (Mode.MUL, Mode.CENTERED_EXP, Mode.VALUE_BIAS)] + [(Mode.MUL, -2.0)]
UNCHANGED = hand_cases(*((*row, None, (1.0, -1.0, 0.5, 2.0), TENTHS) for row in NEUTRAL), eos=(3,))
# Targets below and above all values. The values of 100 and 300 nats are 1 in fp32, and the value of an end is 0.
OUTSIDE = [
    case
    for z, target, eos, eq, le, ge in (
        ((100.0, 100.0), 100.0, (), 1, SAME, SAME),
        ((100.0, 100.0), 99.0, (), 1, 1, SAME),
        ((-1.0, 9.0), 0.0, (0,), 0, 0, SAME),
        ((300.0, 100.0), 100.0, (), 1, 1, SAME),
        ((-1.0, 2.0), 0.1, (), 0, 0, SAME),
        ((-1.0, 2.0), 5.0, (), 1, SAME, 1),
    )
    for mode, weights in ((Mode.EQ_SOFT, eq), (Mode.LE_SOFT, le), (Mode.GE_SOFT, ge))
    for case in hand_cases((mode, 1.0, target, z, weights), q=PAIR, eos=eos, **IN_NATS)
]
# The expected value is 0.5 or slightly less.
VALUE_MIN = hand_cases(
    (Mode.LE, 1.0, 9.0, [0.0] * 4, SAME, {"value_min": 0.5 + 2**-24}),
    (Mode.LE, 1.0, 9.0, [0.0] * 4, 2, {"value_min": 0.5}),
    (Mode.LE, 1.0, 9.0, [0.0] * 4, 2),
    (Mode.LE, 1.0, 9.0, [-1e-5] * 4, SAME, {"value_min": 0.5}),
    q=(0.25, 0.25, 0.375, 0.125),
)
# Ties are broken by probability, then by place; candidates that end the sequence have the value 0.
TIES = [
    case
    for q, z, eos, least, most in (
        ((0.1, 0.2, 0.4, 0.3), (1.0, 2.0, 1.0, 2.0), (), 2, 3),
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
# Raw logits are used, also with answers and for ends of the sequence, where an infinite logit is a fault.
USUAL, HUNDREDS = (1.0, -3.0, 0.5, 2.0), (300.0, 299.93, 299.87, 299.75)
BIASES = hand_cases(
    (Mode.VALUE_BIAS, 0.7, None, USUAL, biased(TENTHS, 0.7, USUAL)),
    (Mode.VALUE_BIAS, 0.7, None, USUAL, biased(TENTHS, 0.7, USUAL), {"answer_length": 900.0}),
    (Mode.VALUE_BIAS, 15.0, None, HUNDREDS, biased(TENTHS, 15.0, HUNDREDS)),
    (Mode.VALUE_BIAS, -20.0, None, (HUGE, 0.0, -HUGE, 9.0), 2),
    (Mode.VALUE_BIAS, 20.0, None, (-HUGE, -HUGE, -1.0, -HUGE), 2),
    (Mode.VALUE_BIAS, 1.0, None, (0.0, math.inf, 0.0, 9.0), FAULT),
    eos=(1,),
)
# Lengths that are equal, below and above a target; exceeded totals; all strengths.
MODES, NEAR_Q = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR), (0.13, 0.37, 0.21, 0.29)
STRENGTHS, GAMMAS = (0.0, 0.5, 2.5, HUGE), (0.9, 0.997, 0.99999)
TOLERATED = ((0, 10), (12, 10), (70, 10), (10, 38), (10, 50), (10, 400), (0, 28), (9, 0))  # tolerance, generated
LENGTHS = (((0.0, 8.0, 19.0, 78.0), (0,)), ((17.0, 4000.0, 17.0, 250.0), ()), ((0.5, 0.0, 3.0, 0.0), (1, 3)))
NEARS = [
    near(mode, strength, 28.0, lengths, NEAR_Q, tolerance=tolerance, generated=generated, gamma=gamma, eos=eos)
    for mode, strength, gamma, (tolerance, generated), (lengths, eos) in product(
        MODES, STRENGTHS, GAMMAS, TOLERATED, LENGTHS
    )
]
# The first candidate ends the output, which takes precedence; the third ends a line, and the last is improbable.
BREAKS, BREAK_Q = (2, 2, 1, 2, 0, 2), (0.1, 0.2, 0.3, 0.25, 0.145, 0.005)
AT_BREAKS, AT_KNOWN_BREAKS = (
    [near(mode, 2.0, 4.0, (0, 8, 98, 98, 28, 28), BREAK_Q, sentences=sentences, eos=(0,)) for mode in MODES]
    for sentences in ((1, 3), (1,))
)
# With an answer longer than the prediction, the value is 0, as for candidates that end the span.
ANSWER_Z, LONGEST = z_of(1.0, 2.0, 2.9, 5.0, **IN_NATS), {"answer_length": 1e30}
ANSWER_Q, ANSWER_3 = (0.1, 0.3, 0.2, 0.4), {"answer_length": 3.0}
ANSWERED = hand_cases(
    (Mode.LE, 1.0, 9.0, ANSWER_Z, 1, ANSWER_3),
    (Mode.EQ, 1.0, 0.0, (-HUGE, *ANSWER_Z[1:]), 1, ANSWER_3),
    (Mode.GE, 1.0, 9.0, ANSWER_Z, 3, ANSWER_3),
    (Mode.CENTERED_EXP, -3.0, None, ANSWER_Z, biased(ANSWER_Q, -3.0, (0.0, 0.0, 0.0, 1 - math.exp(-2))), ANSWER_3),
    *((mode, 1.0, 9.0, ANSWER_Z, 3, LONGEST) for mode in (Mode.LE, Mode.EQ, Mode.GE, Mode.EQ_SOFT)),
    (Mode.CENTERED_EXP, -3.0, None, ANSWER_Z, ANSWER_Q, LONGEST),
    q=ANSWER_Q,
    **IN_NATS,
)
# Tokens that end the span, and token 3, which ends the sequence, have the value 0 for any logits. Other non-finite
# logits are faults.
EXP, SIGMOIDS = (Mode.CENTERED_EXP, -5.0, None), (0.2689414, 0.6224593, 0.0, 0.0)
ENDS = hand_cases(
    (*EXP, (-1.0, 0.5, NAN, NAN), biased(TENTHS, -5.0, SIGMOIDS), {"end_token_ids": ((2,),)}),
    (*EXP, (NAN, 2.0, NAN, NAN), biased(TENTHS, -5.0, (0.0, 0.8807971, 0.0, 0.0)), {"end_token_ids": ((2,), (0,))}),
    (*EXP, (0.0, NAN, 0.0, 0.0), FAULT, {"end_token_ids": ((2,),)}),
    (*EXP, (0.0, 0.0, NAN, 0.0), FAULT),
    eos=(3,),
)
# Non-finite logits are faults in guided rows only, broken scores in any row. Token 1 ends the last two.
MUL = GuidanceParams(Mode.MUL, 0.5), (NAN, NAN)
STATUSES = [
    HandCase(*MUL, FAULT, PAIR, (), status=Status.GUIDE),
    HandCase(*MUL, SAME, PAIR, (), status=Status.SKIP),
    HandCase(*MUL, FAULT, PAIR, (), status=Status.UNGUIDED),
    HandCase(*MUL, 0, (0.5,), (), status=Status.SINGLE),
    HandCase(GuidanceParams(), (NAN, NAN), SAME, PAIR, (1,)),
    HandCase(MUL[0], (1.0, NAN), (0.125, 0.875), PAIR, (1,)),
]
TABLES = {
    **dict(tilted=TILTED, unchanged=UNCHANGED, outside=OUTSIDE, value_min=VALUE_MIN, ties=TIES, long=LONG),
    **dict(biases=BIASES, near=NEARS, at_breaks=AT_BREAKS, at_known_breaks=AT_KNOWN_BREAKS, answered=ANSWERED),
    **dict(
        ends=ENDS, statuses=STATUSES, beyond_answers=[answered(case, 20.0) for case in (*TILTED[::2], *NEARS[24:300])]
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_cases_by_hand(device, backend, name):
    """All requests of a table are in one batch. The second table of breaks ends before the fourth token."""
    rows = TABLES[name]
    q, z = (
        torch.tensor([[*x, *[0.0] * (8 - len(x))] for x in xs]) for xs in ([c.q for c in rows], [c.z for c in rows])
    )
    options = {"generated": torch.tensor([case.generated for case in rows], dtype=torch.int32)}
    options["status"] = torch.tensor([int(case.status) for case in rows])
    if "breaks" in name:
        options["text_breaks"] = torch.tensor(BREAKS[: 3 if "known" in name else 6], dtype=torch.int8)
    eos = [set(case.eos) for case in rows]
    result, faults = reweight(q, z, [case.params for case in rows], eos, device, backend, **options)
    unguided, _ = reweight(q, z, [GuidanceParams()] * len(rows), eos, device, backend)
    for case, p, same, found in zip(rows, result, unguided, faults, strict=True):
        assert found == (case.weights == FAULT), case
        if isinstance(case.weights, int):
            assert torch.equal(p, same if case.weights < 0 else torch.eye(8)[case.weights]), (case, p)
            continue
        expected = F.pad(torch.tensor(case.weights).double() / sum(case.weights), (0, 8 - len(case.weights)))
        assert (p.double() - expected).abs().max() <= (5e-6 if name == "biases" else 2e-6), (case, p)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel keeps the bound it was compiled with")
def test_root_search_is_bounded(monkeypatch):
    """It ends after MAX_STEPS with probabilities that sum to 1; half of the steps are enough here."""
    case = small_case("reweight_scatter", rows="hard to tilt", values="of candidates", table_rows="none")
    rows = arguments_of(replace(case, rows=tuple(range(1000))), "cpu")
    results = []
    for steps in (64, 32, 2):
        monkeypatch.setattr(module, "MAX_STEPS", tl.constexpr(steps))
        results.append(reweight_scatter(**rows, backend="triton"))
    full, half, cut = results
    assert torch.equal(half, full)
    assert ((cut - full).abs().amax(1) > 1e-3).sum() > 50
    assert (cut.sum(1) - 1).abs().max() < 1e-5


def test_targets_are_kept_inside_the_values(device, backend):
    """By 1e-6 of their range, at least 1e-12, with two equally likely candidates."""
    params = [GuidanceParams(Mode.LINEAR, scale) for scale in (100.0, -99.0, 100.0, -99.0)]
    z = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [0.0, 4e-7], [0.0, 4e-7]])
    result, _ = reweight([[0.5, 0.5]], z, params, set(), device, backend)
    far_end = torch.stack([result[0, 0], result[1, 1], result[2, 0], result[3, 1]])
    torch.testing.assert_close(far_end, torch.tensor([1e-6, 1e-6, 1e-5, 1e-5]), rtol=0.1, atol=0)


def test_target_above_every_value_is_not_reached_by_rounding(device, backend):
    """All candidates except one have the largest value; some sums of their probabilities are 1 + 2**-23."""
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
