"""``draw``: known answers of the generator, draws by hand and their statistics, and predicted lengths by hand."""

import math

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops import draw as module
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.draw import draw
from lenvm_kernels.reference.draw import draw_tokens, philox4x32, uniform
from lenvm_kernels.types import Candidates, ScoredCandidates, Status
from tests.helpers.statistics import p_value

GUIDE, SINGLE = Status.GUIDE, Status.SINGLE
LARGEST_U = 1 - 2.0**-24
AT_ZERO, AT_LARGEST = 14_883_995, 38_471_471  # positions at which seed 0 gives the smallest and the largest u


@pytest.fixture(scope="module", autouse=True)
def large_tiles(device):
    """The interpreter takes as long for a tile of 2**16 candidates as for one of 64; the laws have both."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "TILE", 2**16)
        yield


def drawn_of(probs, device, backend, *, token_ids=None, status=GUIDE, seeds=0, positions=0, guidance=None, **options):
    """Result of requests with the candidates' ``probs``, which are not reweighted.

    Numbers apply to all requests. If ``token_ids`` is None, the drawn tokens are the drawn columns. ``value_logits``,
    ``scored``, ``counts`` and ``wants_length`` are taken from the options; by default all candidates are scored.
    """
    rows, columns = probs.shape

    def of_requests(x, dtype):
        return torch.as_tensor(x, dtype=dtype).expand(rows).contiguous().to(device)

    if token_ids is None:
        token_ids = torch.arange(columns).expand(rows, -1)
    token_ids = torch.as_tensor(token_ids).int().contiguous().to(device)
    counts = of_requests(options.pop("counts", columns), torch.int32)
    candidates = Candidates(
        token_ids,
        probs.contiguous().to(device),
        counts,
        of_requests(status, torch.int8),
        of_requests(0.0, torch.float32),
    )
    scored_ids = torch.as_tensor(options.pop("scored", token_ids)).int().to(device)
    scored = ScoredCandidates(scored_ids, counts, of_requests(positions, torch.int32), of_requests(False, torch.bool))
    table = GuidanceTable.from_params([guidance] * rows, [{3}] * rows, device).columns
    table.seed.copy_(of_requests(seeds, torch.int64))
    requests = empty_requests(rows, device)
    requests.table_rows.copy_(torch.arange(rows))
    requests.generated.zero_()
    requests.wants_length.copy_(of_requests(options.pop("wants_length", True), torch.bool))
    value_logits = options.pop("value_logits", None)
    requests.greedy.copy_(of_requests(options.pop("greedy", False), torch.bool))
    options |= {"drawn": of_requests(options["drawn"], torch.int32)} if "drawn" in options else {}
    result = draw(candidates, value_logits, table, requests, scored, **options, backend=backend)
    assert result.tokens.dtype == torch.int32
    return type(result)(*(x.cpu() for x in result))


# --- the generator ---


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


# --- draws ---


@pytest.mark.parametrize("columns", [1, 2, 8, 64])
def test_equal_candidates_split_unit_interval_evenly(device, backend, columns):
    """All partial sums are exact, so that the drawn column is the integer part of ``K u``."""
    seeds, positions = torch.arange(1000) // 50 - 10, torch.arange(1000)
    result = drawn_of(torch.full((1000, columns), 1 / columns), device, backend, seeds=seeds, positions=positions)
    assert torch.equal(result.tokens, (uniform(seeds, positions) * columns).int())


# Probabilities, and the columns drawn with the smallest and the largest u.
ENDS = [
    ([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0], 1, 4),
    ([0.1, 0.7, 0.2, 0.0], 0, 2),
    ([1.0] + [2.0**-26] * 7, 0, 0),  # in the order of the columns, each sum is rounded to 1
    ([0.0, 0.0, 1e-30, 0.0], 2, 2),
    ([0.0, 0.0], -1, -1),
]


@pytest.mark.parametrize(("probs", "first", "last"), ENDS)
def test_ends_of_the_unit_interval_draw_candidates_only(device, backend, probs, first, last):
    assert uniform(torch.tensor([0, 0]), torch.tensor([AT_ZERO, AT_LARGEST])).tolist() == [0, LARGEST_U]
    positions = torch.tensor([AT_ZERO, AT_LARGEST])
    assert drawn_of(torch.tensor([probs] * 2), device, backend, positions=positions).tokens.tolist() == [first, last]


def test_order_of_the_additions_decides_between_improbable_candidates(device):
    """At the largest u, where the sum is rounded to less or more than 1: bitwise as the reference."""
    p = torch.rand(512, 64, generator=torch.Generator().manual_seed(0))
    p[:, 32:] *= 2.0**-20
    result = drawn_of(p, device, "triton", positions=AT_LARGEST)
    columns, status = torch.arange(64).expand(512, -1), torch.full((512,), int(GUIDE))
    at = torch.zeros(512, dtype=torch.int64), torch.full((512,), AT_LARGEST)
    expected = draw_tokens(Candidates(columns, p, None, status, None), result.guided_probs, *at)
    assert torch.equal(result.tokens.long(), expected)
    without_total = (result.guided_probs.cumsum(1) <= LARGEST_U).sum(1)
    assert (expected != without_total).sum() > 50


@pytest.mark.parametrize("varies", ["position", "seed", "high word of the seed"])
def test_draws_follow_the_probabilities_and_are_independent(device, varies):
    """Pairs of adjacent draws are independent. The probabilities do not sum to 1."""
    rows = 40_000
    p, order = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.arange(rows)
    seeds, positions = (99, order) if varies == "position" else (order, 99)
    if varies == "high word of the seed":
        seeds = seeds << 32
    drawn = drawn_of((0.7 * p).repeat(rows, 1), device, "triton", seeds=seeds, positions=positions).tokens
    pairs = (drawn[0::2] * 4 + drawn[1::2]).bincount(minlength=16)
    assert p_value(pairs, torch.outer(p, p).flatten() * rows / 2) > 0.001


def test_greedy_requests_draw_the_most_probable_candidate(device, backend):
    p, greedy = torch.tensor([[0.2, 0.3, 0.1, 0.3]]).repeat(64, 1), torch.arange(64) % 3 == 0
    options = dict(seeds=3, positions=torch.arange(64))
    sampled = drawn_of(p, device, backend, **options).tokens
    assert len(sampled.unique()) == 4
    drawn = drawn_of(p, device, backend, **options, greedy=greedy).tokens
    assert torch.equal(drawn, torch.where(greedy, 1, sampled))


@pytest.mark.parametrize("greedy", [False, True])
def test_status_and_sample_decide_between_candidates_and_passed_tokens(device, backend, greedy):
    """A request with zero probabilities has no candidate to draw."""
    status = torch.tensor([*Status, GUIDE, SINGLE])
    p = torch.tensor([[0.5, 0.5]] * len(Status) + [[0.0, 0.0], [0.0, 1.0]])
    token_ids = torch.tensor([[7, 7]] * (len(Status) + 1) + [[7, 9]])
    options = dict(token_ids=token_ids, status=status, seeds=1, positions=5, greedy=greedy)
    own = [7 if s in (GUIDE, SINGLE) else -1 for s in Status]
    passed = torch.arange(-2, len(status) - 2)
    for more, expected in (
        ({}, [*own, -1, 9]),
        ({"drawn": passed}, [token if token >= 0 else i - 2 for i, token in enumerate([*own, -1, 9])]),
        ({"drawn": passed, "sample": False}, passed.tolist()),
        ({"sample": False}, [-1] * len(status)),
    ):
        assert drawn_of(p, device, backend, **options, **more).tokens.tolist() == expected


def test_fp64_weights_keep_their_precision():
    p = torch.tensor([[2.0**-60, 1.0], [1.0, 2.0**-60]], dtype=torch.float64)
    status, ids = torch.full((2,), int(GUIDE)), torch.arange(2).repeat(2, 1)
    positions = torch.tensor([AT_ZERO, AT_LARGEST])
    assert draw_tokens(Candidates(ids, p, None, status, None), p, torch.zeros_like(positions), positions).tolist() == [
        0,
        0,
    ]


# --- predicted lengths ---

NAN = math.nan
# Four scored tokens, of which 3 ends the sequence and 4 ends the span; the passed token, changes, and the length after.
LENGTHS = [
    (1, {}, 20.0),
    (4, {}, 40.0),  # an end of the span does not end the output
    (3, {}, 0.0),
    (2, {}, NAN),  # a candidate that is not scored
    (9, {}, NAN),
    (-1, {}, NAN),
    (1, {"wants_length": False}, NAN),
    (1, {"predicted": None, "value_logits": None}, 60.0),  # the target and the answer
    (1, {"predicted": None}, NAN),
    (9, {"scored": [[9, 1, 3, 4]]}, 10.0),  # scored alone, not a candidate
    (1, {"counts": 1}, NAN),
]


@pytest.mark.parametrize(("token", "changes", "expected"), LENGTHS)
def test_length_after_the_passed_token(device, backend, token, changes, expected):
    """By the logits that predict, not by the logits that guide; ``gamma`` is 0.99."""
    nats = torch.tensor([[10.0, 20.0, 30.0, 40.0]]) * -math.log(0.99)
    options = dict(predicted=(nats.exp() - 1).log(), value_logits=torch.full((1, 4), NAN)) | changes
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    fields = {"target_length": 50, "answer_length": 10, "end_token_ids": [4], "gamma": 0.99, "return_values": True}
    guidance, ids = parse_guidance(fields), {"token_ids": [[0, 1, 3, 4]]} | {"status": Status.SKIP}
    length = drawn_of(torch.full((1, 4), 0.25), device, backend, guidance=guidance, drawn=token, **ids, **options)
    torch.testing.assert_close(length.remaining_lengths, torch.tensor([expected]), rtol=1e-5, atol=0, equal_nan=True)


def test_length_needs_return_values(device, backend):
    length = drawn_of(torch.full((1, 4), 0.25), device, backend, guidance=parse_guidance({"target_length": 9}))
    assert length.tokens >= 0 and length.remaining_lengths.isnan().all()
