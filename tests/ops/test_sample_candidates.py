"""``sample_candidates``: known answers of the generator, draws of kernel and reference, and their statistics."""

import math

import pytest
import torch

from lenvm_kernels.ops import sample_candidates as module
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.reference.sample_candidates import philox4x32, uniform
from lenvm_kernels.types import Candidates, Status
from tests.helpers.statistics import p_value

STATUSES = [int(Status.GUIDE), int(Status.SINGLE), int(Status.UNGUIDED), int(Status.SKIP)]
LARGEST_U = 1 - 2.0**-24


@pytest.fixture
def large_tiles(monkeypatch, device):
    """Use large tiles: the interpreter takes as long for one row as for 1,024, and rows are independent."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILE", 65_536)


def draw(guided_probs, seeds, positions, device, *, token_ids=None, status=None, temperature=None, backend="triton"):
    """Drawn tokens, or drawn slots if ``token_ids`` is None."""
    rows, slots = guided_probs.shape
    if token_ids is None:
        token_ids = torch.arange(slots, dtype=torch.int32).repeat(rows, 1)
    if status is None:
        status = torch.full((rows,), int(Status.GUIDE), dtype=torch.int8)
    counts, lost_mass = torch.full((rows,), slots, dtype=torch.int32), torch.zeros(rows)
    candidates = Candidates(*(x.to(device) for x in (token_ids, guided_probs, counts, status, lost_mass)))
    inputs = (x.to(device) for x in (guided_probs, seeds, positions))
    temperature = None if temperature is None else temperature.to(device)
    tokens = sample_candidates(candidates, *inputs, temperature=temperature, backend=backend)
    assert tokens.dtype == torch.int32
    return tokens.cpu()


def filled(rows, value):
    return torch.full((rows,), value, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # tests/kat_vectors of Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_generator_known_answers(counter, key, answer):
    counter, key = ([torch.tensor([word]) for word in words] for words in (counter, key))
    assert [word.item() for word in philox4x32(counter, key)] == answer


def test_seed_is_the_key_and_position_the_counter():
    zero = torch.tensor([0])
    assert uniform(zero, zero.int()).item() == (0x6627E8D5 >> 8) / 2**24
    low, high = torch.tensor([0x243F6A88]), torch.tensor([0x05A308D3])
    key = torch.tensor([0xA4093822]), torch.tensor([0x899F31D0])
    seed = torch.tensor([(0x899F31D0 << 32) + 0xA4093822 - (1 << 64)])  # negative
    first = philox4x32((low, high, zero, zero), key)[0].item()
    assert uniform(seed, (high << 32) + low).item() == (first >> 8) / 2**24


@pytest.mark.parametrize(("rows", "slots"), [(2000, 1), (2000, 2), (2000, 8), (2000, 64)])
def test_equal_candidates_split_unit_interval_evenly(device, large_tiles, backend, rows, slots):
    """All partial sums are exact for totals 1 and 3 * 2^20, so the drawn slot is the integer part of ``K u``."""
    seeds, positions = torch.arange(rows) // 50, torch.arange(rows)
    expected = (uniform(seeds, positions) * slots).int()
    for total in (1.0, 3 * 2.0**20):
        p = torch.full((rows, slots), total / slots)
        assert torch.equal(draw(p, seeds, positions, device, backend=backend), expected)


# Positions at which seed 0 gives the smallest and the largest u.
AT_ZERO, AT_LARGEST = 14_883_995, 38_471_471


def test_ends_of_the_unit_interval_draw_candidates_only(device, backend):
    ends = torch.tensor([AT_ZERO, AT_LARGEST])
    seeds = filled(2, 0)
    assert uniform(seeds, ends).tolist() == [0, LARGEST_U]
    for p, first, last in (
        ([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0], 1, 4),
        ([0.1, 0.7, 0.2, 0.0], 0, 2),
        ([1.0] + [2.0**-24] * 7, 0, 0),  # in slot order, each sum rounds back to 1
        ([0.0, 2.0**-149, 0.0, 0.0], 1, 1),  # u * total rounds up to total
        ([0.0, math.inf, 1.0, 0.0], 1, 2),
        ([-1.0, math.nan, 1.0, 0.0], 2, 2),
    ):
        drawn = draw(torch.tensor([p, p]), seeds, ends, device, backend=backend)
        assert drawn[1] == last
        assert drawn[0] == (last if math.inf in p else first)  # 0 * inf is NaN, not a threshold


@pytest.mark.parametrize("varies", ["position", "seed", "high word of the seed"])
def test_draws_follow_the_probabilities_and_are_independent(device, large_tiles, varies):
    """Pairs of adjacent draws are independent. The probabilities do not sum to 1."""
    rows = 40_000
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    order, fixed = torch.arange(rows), filled(rows, 99)
    seeds, positions = (fixed, order) if varies == "position" else (order, fixed)
    if varies == "high word of the seed":
        seeds = seeds << 32
    drawn = draw((0.7 * p).repeat(rows, 1), seeds, positions, device)
    pairs = (drawn[0::2] * 4 + drawn[1::2]).bincount(minlength=16)
    assert p_value(pairs, torch.outer(p, p).flatten() * rows / 2) > 0.001


def test_greedy_rows_draw_most_probable_candidate(device, backend):
    p = torch.tensor([[0.2, 0.3, 0.1, 0.3]]).repeat(64, 1)
    seeds, positions = filled(64, 3), torch.arange(64)
    sampled = draw(p, seeds, positions, device, backend=backend)
    assert len(sampled.unique()) == 4
    limit = torch.tensor(1e-6)
    for temperature, greedy in ((0.0, True), (limit.nextafter(limit - 1), True), (limit, False), (0.7, False)):
        t = torch.full((64,), float(temperature))
        drawn = draw(p, seeds, positions, device, temperature=t, backend=backend)
        assert torch.equal(drawn, torch.ones_like(drawn) if greedy else sampled)


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_rows_without_draw_return_minus_one(device, backend, temperature):
    p = torch.tensor([[0.5, 0.5]] * 4 + [[0.0, 0.0], [-1.0, math.nan], [0.0, 1.0]])
    status = torch.tensor([*STATUSES, *[int(Status.GUIDE)] * 3], dtype=torch.int8)
    token_ids = torch.tensor([[7, 7]] * 6 + [[7, 9]], dtype=torch.int32)
    t = None if temperature is None else torch.full((7,), temperature)
    drawn = draw(
        p, filled(7, 1), filled(7, 5), device, token_ids=token_ids, status=status, temperature=t, backend=backend
    )
    assert drawn.tolist() == [7, 7, -1, -1, -1, -1, 9]


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_negative_weights_count_as_zero(device, backend, temperature):
    """Negative weights before, between and after the others; rows have a stride larger than K."""
    rows = 64
    p = torch.tensor([-0.5, 0.25, -1.0, 0.5, -math.inf, 0.125, math.nan, -2.0]).repeat(rows, 1)
    p = torch.nn.functional.pad(p, (0, 5), value=9.0)[:, :8]
    seeds, positions = torch.arange(rows).flip(0) * 7, torch.arange(rows) * 3
    t = None if temperature is None else torch.full((rows,), temperature)
    drawn = draw(p, seeds, positions, device, temperature=t, backend=backend)
    beyond = torch.tensor([2, 6]) <= (uniform(seeds, positions) * 7)[:, None]
    expected = torch.tensor([1, 3, 5])[beyond.sum(1)].int() if temperature is None else torch.full((rows,), 3)
    assert len(expected.unique()) == (3 if temperature is None else 1)
    assert torch.equal(drawn, expected.int())


def test_reference_accepts_fp64():
    p = torch.tensor([[2.0**-60, 1.0], [1.0, 2.0**-60]], dtype=torch.float64)
    drawn = draw(p, filled(2, 0), torch.tensor([AT_ZERO, AT_LARGEST]), "cpu", backend="reference")
    assert drawn.tolist() == [0, 0]
