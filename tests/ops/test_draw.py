"""``draw``: known answers of the generator, draws at the ends of the unit interval, and the statistics of draws."""

import pytest
import torch

from lenvm_kernels.engines.tensors import leave_only
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops import draw as module
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.draw import draw
from lenvm_kernels.reference.draw import draw_tokens, philox4x32, uniform
from lenvm_kernels.types import Candidates, ScoredCandidates, Status

GUIDE = Status.GUIDE
LARGEST_U = 1 - 2.0**-24
AT_ZERO, AT_LARGEST = 14_883_995, 38_471_471  # positions at which seed 0 gives the smallest and the largest u


@pytest.fixture(scope="module", autouse=True)
def large_tiles(device):
    """Large tiles, because the interpreter's time is per tile; the laws test both sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "TILE", 2**16)
        yield


def drawn_of(probs, device, backend, *, seeds=0, positions=0):
    """Columns drawn with the candidates' ``probs`` without reweighting. Numbers apply to all requests."""
    rows, columns = probs.shape

    def of_requests(x, dtype):
        return torch.as_tensor(x, dtype=dtype).expand(rows).contiguous().to(device)

    counts, token_ids = of_requests(columns, torch.int32), torch.arange(columns).int().repeat(rows, 1).to(device)
    status, no_loss = of_requests(GUIDE, torch.int8), of_requests(0.0, torch.float32)
    candidates = Candidates(token_ids, probs.contiguous().to(device), counts, status, no_loss)
    alone, positions = of_requests(False, torch.bool), of_requests(positions, torch.int32)
    table = GuidanceTable.from_params([None] * rows, [{3}] * rows, device).columns
    table.seed.copy_(of_requests(seeds, torch.int64))
    requests = empty_requests(rows, device)
    for x in requests:
        x.zero_()
    requests.table_rows.copy_(torch.arange(rows))
    scored = ScoredCandidates(token_ids, counts, positions, alone)
    result = draw(candidates, None, table, requests, scored, backend=backend)
    return result._replace(tokens=result.tokens.cpu(), guided_probs=result.guided_probs.cpu())


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


@pytest.mark.parametrize("columns", [1, 2, 8, 64])
def test_equal_candidates_split_unit_interval_evenly(device, backend, columns):
    """All partial sums are exact, so the drawn column is the integer part of ``K u``."""
    seeds, positions = torch.arange(1000) // 50 - 10, torch.arange(1000)
    result = drawn_of(torch.full((1000, columns), 1 / columns), device, backend, seeds=seeds, positions=positions)
    assert torch.equal(result.tokens, (uniform(seeds, positions) * columns).int())


# Probabilities, and the columns drawn with the smallest and the largest u.
ENDS = [
    ([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0], 1, 4),
    ([0.1, 0.7, 0.2, 0.0], 0, 2),
    ([1.0] + [2.0**-26] * 7, 0, 0),  # summed in the order of the columns, each sum rounds to 1
    ([0.0, 0.0, 1e-30, 0.0], 2, 2),
    ([0.0, 0.0], -1, -1),
]


@pytest.mark.parametrize(("probs", "first", "last"), ENDS)
def test_smallest_and_largest_uniform_number_draw_a_candidate(device, backend, probs, first, last):
    assert uniform(torch.tensor([0, 0]), torch.tensor([AT_ZERO, AT_LARGEST])).tolist() == [0, LARGEST_U]
    positions = torch.tensor([AT_ZERO, AT_LARGEST])
    assert drawn_of(torch.tensor([probs] * 2), device, backend, positions=positions).tokens.tolist() == [first, last]


@pytest.mark.parametrize("varies", ["position", "seed", "high word of the seed"])
def test_draws_follow_the_probabilities_and_are_independent(device, varies):
    """Pairs of adjacent draws are independent. The probabilities do not sum to 1."""
    rows = 40_000
    p, order = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.arange(rows)
    seeds, positions = (99, order) if varies == "position" else (order, 99)
    if varies == "high word of the seed":
        seeds = seeds << 32
    drawn = drawn_of((0.7 * p).repeat(rows, 1), device, "triton", seeds=seeds, positions=positions).tokens
    pairs, expected = (drawn[0::2] * 4 + drawn[1::2]).bincount(minlength=16), torch.outer(p, p).flatten() * rows / 2
    chi_square = ((pairs - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor(15 / 2), chi_square / 2) > 0.001


def test_fp64_weights_keep_their_precision():
    p = torch.tensor([[2.0**-60, 1.0], [1.0, 2.0**-60]], dtype=torch.float64)
    status, ids = torch.full((2,), int(GUIDE)), torch.arange(2).repeat(2, 1)
    positions = torch.tensor([AT_ZERO, AT_LARGEST])
    drawn = draw_tokens(Candidates(ids, p, None, status, None), p, torch.zeros_like(positions), positions)
    assert drawn.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_drawn_token_is_left_to_an_engine(device, backend, dtype):
    """Rows that nothing is drawn in, and the padding of rows, keep every bit."""
    rows = torch.randn(4, 5005, device=device).to(dtype)
    rows[0, 7], rows[1] = -torch.inf, torch.nan
    expected, tokens = rows.clone(), [4999, -1, 0, -1]
    for row, token in ((0, 4999), (2, 0)):
        expected[row, :5000] = -torch.inf
        expected[row, token] = 0.0
    leave_only(rows[:, :5000], torch.tensor(tokens, dtype=torch.int32, device=device), backend)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
