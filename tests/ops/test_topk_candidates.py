"""``topk_candidates``: golden pairs of the fork, kernels against the fp64 reference, and batch invariance."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given

from lenvm_kernels.ops import topk_candidates as module
from lenvm_kernels.ops.topk_candidates import TILE, topk_candidates
from lenvm_kernels.types import Candidates, Status, TextBreak
from tests.helpers.cases import assert_right, cases
from tests.helpers.matches import assert_matches

SLOTS = 4
GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "candidates.jsonl").open()]


def on(device, arguments):
    return {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}


def choose(x, device, backend, **options):
    """Candidates of ``x``, one row of scores per request, moved to the CPU. Filters are off by default."""
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x)
    options = dict(top_k=0, top_p=1.0, min_p=0.0, max_candidates=SLOTS) | options
    found = topk_candidates(x.to(device), **on(device, options), backend=backend)
    return Candidates(*(x.cpu() for x in found))


def assert_same_bits(actual, expected):
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend, dtype", [("reference", "float64"), ("reference", "float32"), ("triton", "float32")])
def test_golden_pairs_of_the_fork(backend, dtype, device):
    for pair in GOLDEN:
        expected = pair["expected"]
        scores, filters = torch.tensor([pair["probs"]], dtype=getattr(torch, dtype)), ("top_k", "top_p", "min_p")
        options = {name: pair[name] for name in filters} | {"max_candidates": triton.next_power_of_2(pair["top_k"])}
        threshold = torch.tensor([pair["entropy_threshold"] or torch.nan])
        found = choose(scores, device, backend, **options, entropy_threshold=threshold)
        count = found.counts.item()
        assert Status(found.status.item()).name.lower() == expected["kind"]
        if expected["kind"] != "skip":
            assert found.token_ids[0, :count].tolist() == expected["ids"]
        if expected["kind"] == "guide":
            ratio = found.probs[0, :count].double() / torch.tensor(expected["probs"], dtype=torch.float64)
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-5, atol=0)


@given(cases("topk_candidates"))
def test_fp32_reference_matches_fp64_reference(case):
    assert_right(case, "cpu", partial(topk_candidates, backend="reference"))


@pytest.mark.parametrize("vocab, slots", [(262_144, 4), (70 * TILE + 9, 64)])
def test_largest_vocabulary_and_most_candidates(device, vocab, slots):
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()  # many ties
    x[0, vocab - 7] = 9.0
    actual = choose(x, device, "triton", max_candidates=slots, is_logits=True)
    expected = choose(x.double(), "cpu", "reference", max_candidates=slots, is_logits=True)
    assert torch.equal(actual.token_ids, expected.token_ids) and expected.token_ids[0, 0] == vocab - 7
    assert_matches(actual.probs, expected.probs, "topk_candidates", x.dtype)
    assert_matches(actual.lost_mass, expected.lost_mass, "topk_candidates", x.dtype)
    assert expected.lost_mass > 0.2


def test_rows_of_large_vocabulary_have_the_same_bits_in_every_batch(device):
    """1,187 tiles; the last program has fewer than the others."""
    x = torch.randn(17, 151_936, generator=torch.Generator().manual_seed(2)).to(device)
    guided = torch.arange(17, device=device) == 11  # one guided row, because each costs interpreter time
    few, many = (
        choose(x[rows], device, "triton", top_k=6, max_candidates=64, is_logits=True, guided=guided[rows])
        for rows in (slice(11, 12), slice(None))
    )
    assert_same_bits(few, type(many)(*(x[11:12] for x in many)))
    assert many.counts.tolist() == [6 * is_guided for is_guided in guided.tolist()]


def test_lost_mass_is_zero_unless_slots_cut_the_list(device, backend):
    filters = dict(top_k=torch.tensor([0, 4, 0]).int(), top_p=torch.tensor([1.0, 1.0, 0.35]))
    found = choose(torch.full((3, 10), 0.1), device, backend, **filters)
    assert found.counts.tolist() == [4, 4, 4]
    torch.testing.assert_close(found.lost_mass, torch.tensor([0.6, 0.0, 0.0]))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32 tokens, four per program in fp32."""
    for name, value in dict(TILE=32, PROGRAM_BYTES=512).items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("is_logits", [True, False])
def test_next_token_after_the_last_slot_is_found_in_any_tile(device, small_tiles, backend, is_logits):
    """The fifth token is in a tile with one of the first four tokens, with three of them, or with none."""
    p = torch.zeros(12, 7 * 32)
    p[:6, [3, 34, 35, 70]] = torch.tensor([0.3, 0.2, 0.25, 0.15])
    p[torch.arange(6), [5, 80, 120, 200, 120, 120]] = 0.1
    p[6:] = p[:6].flip(1)  # the candidates are in the last tiles
    min_p, top_p = torch.zeros(12), torch.ones(12)
    min_p[4], top_p[5] = 0.34, 0.89  # the fifth token is filtered out in these rows
    x = p.log() if is_logits else p
    found = choose(x, device, backend, min_p=min_p, top_p=top_p, is_logits=is_logits)
    assert found.token_ids.tolist() == [[3, 35, 34, 70]] * 6 + [[220, 188, 189, 153]] * 6
    torch.testing.assert_close(found.lost_mass, torch.tensor([0.1] * 4 + [0.0] * 2 + [0.1] * 6))


def test_top_p_and_min_p_at_exact_boundaries(device, backend):
    p = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    found = choose(p, device, backend, top_p=torch.tensor([0.5, 0.4999]))
    assert found.token_ids.tolist() == [[1, 0, -1, -1], [2, -1, -1, -1]]
    found = choose(p, device, backend, min_p=torch.tensor([0.5, 0.5001]))
    assert found.token_ids.tolist() == [[1, 0, 2, -1], [2, -1, -1, -1]]
    found = choose(torch.zeros(2, 4), device, backend, top_p=torch.tensor([0.5, 0.75]), min_p=1.0, is_logits=True)
    assert found.token_ids.tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]
    assert found.probs[1].tolist() == [0.25] * 4 and found.lost_mass.tolist() == [0, 0]


def test_greedy_below_a_temperature_of_1e_6(device, backend):
    limit = torch.tensor(1e-6)
    temperature = torch.stack([limit, limit.nextafter(limit - 1), torch.tensor(-1.0), torch.tensor(2.0)])
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(4, 1)
    found = choose(x, device, backend, min_p=0.01, temperature=temperature, is_logits=True)
    assert found.counts.tolist() == [3, 1, 1, 4]
    assert found.token_ids[:, 0].tolist() == [1] * 4
    assert found.status.tolist() == [Status.GUIDE, Status.SINGLE, Status.SINGLE, Status.GUIDE]
    torch.testing.assert_close(found.probs[0, :3], torch.full((3,), 1 / 3))
    # Probabilities of a greedy row are those of temperature 1.
    expected = torch.softmax(x[:3], dim=1)[1, 1]
    torch.testing.assert_close(found.probs[1:3, 0], expected.repeat(2))


def test_entropy_equal_to_threshold_skips_row(device, backend):
    p = torch.tensor([[0.25, 0.25], [0.25, 0.25], [0.25, 0.25], [0.0, 0.25], [0.25, 0.0]])
    limit = torch.tensor(2.0).log()
    threshold = torch.stack([limit.nextafter(limit - 1), limit, torch.tensor(torch.nan), limit, limit])
    found = choose(p, device, backend, entropy_threshold=threshold)
    assert found.status.tolist() == [Status.GUIDE, Status.SKIP, Status.GUIDE, Status.SINGLE, Status.SINGLE]
    assert found.token_ids[:, :2].tolist() == [[0, 1]] * 3 + [[1, -1], [0, -1]]


@pytest.mark.parametrize("is_logits", [True, False])
def test_vocab_masks_and_scores_with_row_strides(device, backend, is_logits):
    """Scores and mask have different row strides; each row has a different mask that uses all 32 bits."""
    rng = torch.Generator().manual_seed(2)
    rows, vocab = 5, 70
    x = torch.softmax(torch.randn(rows, vocab + 9, generator=rng), dim=1)[:, :vocab]
    x = x.log() if is_logits else x
    bits = torch.rand(rows, 96, generator=rng) < 0.3
    bits[:, [31, 32, 63, 64]] = torch.tensor([True, False, True, True])
    bits[3], bits[4] = False, torch.arange(96) == 0
    words = (bits.view(rows, 3, 32).long() << torch.arange(32)).sum(2)
    mask = torch.nn.functional.pad(words.int(), (0, 4), value=-1)[:, :3].to(device)
    found = choose(x, device, backend, is_logits=is_logits, vocab_mask=mask, max_candidates=64)
    for row in range(rows):
        allowed = bits[row, :vocab].nonzero()[:, 0]
        order = x[row, allowed].argsort(descending=True, stable=True)
        assert found.token_ids[row, : found.counts[row]].tolist() == allowed[order].tolist()
    assert found.broken.tolist() == [False, False, False, True, False]
    if is_logits:  # the softmax is over allowed tokens only
        torch.testing.assert_close(found.probs.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))
    assert found.status.tolist() == [Status.GUIDE] * 3 + [Status.UNGUIDED, Status.SINGLE]


def test_scores_that_are_not_probabilities(device, backend):
    """Negative scores and -inf count as 0, ties go to the lower token id, -0 equals 0, and NaN breaks the row."""
    nan, inf = torch.nan, torch.inf
    p = [
        [-1.0, 0.0, 0.5, -inf, 0.5],
        [0.0, -0.0, -1.0, 0.0, -inf],
        [0.5, nan, 0.2, 0.1, 0.2],
        [0.5, 0.1, 0.0, 0.0, inf],
    ]
    found = choose(p, device, backend)
    assert found.token_ids.tolist() == [[2, 4, -1, -1]] + [[-1] * 4] * 3
    assert found.broken.tolist() == [False, True, True, True] and found.counts.tolist() == [2, 0, 0, 0]
    assert found.status.tolist() == [Status.GUIDE] + [Status.UNGUIDED] * 3 and (found.probs[1:] == 0).all()
    cut = choose([[-1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, -7.0]], device, backend)
    torch.testing.assert_close(cut.lost_mass, torch.tensor([0.2]))
    zeros = choose([[-0.0, -1.0, 0.0, -0.0, -2.0]], device, backend, is_logits=True)
    assert zeros.token_ids.tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("program_bytes", [64, 256, 1024])
def test_rows_of_every_kind(device, backend, small_tiles, monkeypatch, program_bytes):
    """Unguided, broken, fewer candidates than slots, and more. A program has one tile, two, or more than the row.

    Scores of unguided rows are not read."""
    monkeypatch.setattr(module, "PROGRAM_BYTES", program_bytes)
    x = torch.full((5, 3 * 32), -torch.inf)
    x[0, 7], x[1, 70], x[2, [1, 95]], x[4, 3:90] = torch.nan, torch.nan, torch.tensor([2.0, 3.0]), 1.0
    guided = torch.tensor([False, True, True, True, True])
    found = choose(x, device, backend, is_logits=True, guided=guided, entropy_threshold=0.1)
    torch.testing.assert_close(found.probs[2], torch.softmax(torch.tensor([3.0, 2.0, -1e9, -1e9]), dim=0))
    torch.testing.assert_close(found.probs[4], torch.full((4,), 1 / 87))
    assert (found.probs[[0, 1, 3]] == 0).all()
    assert found.token_ids.tolist() == [[-1] * 4, [-1] * 4, [95, 1, -1, -1], [-1] * 4, [3, 4, 5, 6]]
    assert found.counts.tolist() == [0, 0, 2, 0, 4]
    assert found.status.tolist() == [Status.UNGUIDED] * 2 + [Status.GUIDE, Status.UNGUIDED, Status.GUIDE]
    torch.testing.assert_close(found.lost_mass[[0, 2, 4]], torch.tensor([0, 0, 83 / 87]))
    assert found.broken.tolist() == [False, True, False, True, False]


def test_number_applies_to_all_requests(device, backend):
    scores = 3 * torch.randn(3, 40, generator=torch.Generator().manual_seed(2)).to(device)
    numbers = dict(top_k=6, top_p=0.9, min_p=0.05, temperature=0.7, entropy_threshold=1.2)
    tensors = {name: torch.full((3,), number, device=device) for name, number in numbers.items()}
    tensors["top_k"] = tensors["top_k"].int()
    expected = topk_candidates(scores, **tensors, is_logits=True, backend=backend)
    assert_same_bits(topk_candidates(scores, **numbers, is_logits=True, backend=backend), expected)
    assert len(expected.counts.unique()) > 1


# --- tokens that end the output ---

# Candidates by min_end_prob, filters and columns. End tokens are 7 (0.02), 4 (0.0005) and 1 (0.00002).
ENDS = torch.tensor([[-2, 7, 4, 1, 7, 12]], dtype=torch.int32)
TAIL = torch.tensor([[0.06, 0.00002, 0.3, 0.0, 0.0005, 0.4, 0.11, 0.02, 0.10948]])
LISTS = [
    (1e-4, dict(top_k=2), 8, [5, 2, 7, 4]),
    (1e-4, dict(top_p=0.5), 8, [5, 2, 7, 4]),
    (1e-4, dict(min_p=0.9), 8, [5, 7, 4]),
    (1e-2, dict(top_k=2), 8, [5, 2, 7]),
    (0.0, dict(top_k=1), 8, [5, 7, 4, 1]),
    (torch.inf, dict(top_k=2), 8, [5, 2]),
    (1e-4, {}, 8, [5, 2, 6, 8, 0, 7, 4, 1]),  # the filters keep all tokens, 1 included
    (1e-4, {}, 4, [5, 2, 7, 4]),  # 6 and 8 are replaced
    (0.0, {}, 4, [5, 7, 4, 1]),
    (0.0, {}, 2, [5, 7]),
    (0.0, {}, 1, [5]),
    (1e-4, dict(top_k=6), 4, [5, 2, 7, 4]),
]


def with_ends(device, backend, rows, *, scores=TAIL, **options):
    """(candidates of ``rows`` equal rows, their token ids); end tokens are 7 (0.02), 4 (0.0005) and 1 (0.00002)."""
    options = dict(top_k=1, end_token_ids=ENDS.repeat(rows, 1)) | options
    found = choose(scores.repeat(rows, 1), device, backend, **options)
    assert found.token_ids.shape == (rows, options.get("max_candidates", SLOTS))
    lists = [row[:count] for row, count in zip(found.token_ids.tolist(), found.counts.tolist(), strict=True)]
    assert (found.token_ids >= 0).sum() == found.counts.sum()
    return found, lists


@pytest.mark.parametrize("is_logits", [False, True])
@pytest.mark.parametrize(("least", "filters", "columns", "expected"), LISTS)
def test_end_tokens_are_candidates_despite_filters(device, backend, is_logits, least, filters, columns, expected):
    options = dict(scores=TAIL.log() / 2 + 3, temperature=0.5, is_logits=True) if is_logits else {}
    options |= {"top_k": 0} | filters | {"max_candidates": columns, "min_end_prob": torch.tensor([least])}
    found, lists = with_ends(device, backend, 1, **options)
    assert lists == [expected]
    torch.testing.assert_close(found.probs[0, : len(expected)], TAIL[0, expected], rtol=1e-5, atol=0)
    assert found.status == (Status.SINGLE if len(expected) == 1 else Status.GUIDE)
    cut = not filters or (columns, filters) == (4, dict(top_k=6))
    lost = 1 - TAIL[0, expected].sum().item() if cut and len(expected) < 8 else 0.0
    assert found.lost_mass.item() == pytest.approx(lost, abs=1e-6)


def test_late_requests_accept_less_probable_ends(device, backend):
    """The minimum probability halves per tenth of the due length past it, and per hundredth from one half on.

    Table rows are in another order."""
    least, due, generated, expected = zip(
        (0.03, 40.0, 40, [5]),
        (0.03, 40.0, 44, [5, 7]),  # 0.015
        (0.03, torch.inf, 9999, [5]),
        (0.01, 20.0, 30, [5, 7, 4]),  # 0.01 / 32 = 0.0003
        (0.01, 0.0, 11, [5, 7, 4, 1]),  # 2^-120
        (0.03, 100.0, 154, [5, 7, 4]),  # 0.03 / 2^9 = 0.000059
        (0.02, 40.0, 0, [5, 7]),  # met exactly
        strict=True,
    )
    order = torch.tensor([4, 0, 6, 2, 1, 3, 5])
    of_rows = torch.empty(7, 2)
    of_rows[order] = torch.tensor([least, due]).T
    options = dict(min_end_prob=of_rows[:, 0], due_length=of_rows[:, 1], table_rows=order)
    _, lists = with_ends(device, backend, 7, generated=torch.tensor(generated, dtype=torch.int32), **options)
    assert lists == list(expected)


def test_least_share_is_a_lower_bound_of_min_p(device, backend):
    """The larger of both applies to all tokens except end tokens and the first. Shares: token 2 0.75, token 6 0.275."""
    shares = torch.tensor([[0.0, 0.7, 0.2, 0.5, 1.0, 0.01], [9.0] * 6])  # by table row
    filters = dict(top_k=0, min_p=torch.tensor([0.0, 0.9, 0.1, 0.27, 0.0]), max_candidates=8)
    ends = dict(end_token_ids=torch.full((6, 1), 7, dtype=torch.int32), min_end_prob=torch.full((6,), 0.01))
    of_rows = dict(least_share=shares.T[:, 0], table_rows=torch.tensor([5, 0, 1, 2, 4]))
    _, lists = with_ends(device, backend, 5, **filters, **ends, **of_rows)
    assert lists == [[5, 2, 6, 8, 0, 7], [5, 7], [5, 2, 7], [5, 2, 6, 8, 7], [5, 7]]


@pytest.mark.parametrize(
    ("ends", "filters", "columns", "expected"),
    [
        ([5, 1], dict(top_k=1), 8, [5, 2]),
        ([5, 2], dict(min_p=0.9), 8, [5, 2, 6]),
        ([5, 2], dict(top_p=0.1, temperature=0.0), 8, [5, 2, 6]),  # greedy
        ([2, 5, 6, 8], dict(top_k=1), 4, [5, 2, 6]),  # the four most probable tokens are end tokens
        ([2, 5, 6, 8], dict(top_k=1), 8, [5, 2, 6, 8, 0]),
        ([5, 1], dict(top_k=1), 1, [5]),
        ([5, 1], dict(top_k=1, least=torch.inf), 8, [5]),
        ([5, 1], dict(top_k=1, least=2.0), 8, [5, 2]),
        ([5, 0], dict(allowed=[5]), 8, [5]),
        ([5, 0], dict(allowed=[5, 8, 0], top_k=1), 8, [5, 8, 0]),
    ],
)
def test_a_token_that_is_no_end_is_always_a_candidate(device, backend, ends, filters, columns, expected):
    """If filters leave only end tokens, the most probable other token is added."""
    filters = {"top_k": 0, "temperature": 1.0, "least": 0.01, "allowed": range(9)} | filters
    mask, least = sum(1 << token for token in filters.pop("allowed")), filters.pop("least")
    ends = torch.tensor([[-2, *ends]] * 2, dtype=torch.int32)
    options = dict(scores=TAIL.log(), max_candidates=columns, is_logits=True, guided=torch.tensor([True, False]))
    options |= dict(end_token_ids=ends, min_end_prob=torch.full((2,), least))
    options |= dict(vocab_mask=torch.tensor([[mask]] * 2, dtype=torch.int32))
    found, lists = with_ends(device, backend, 2, **filters, **options)
    assert lists == [expected, []]
    assert found.status.tolist() == [Status.SINGLE if len(expected) == 1 else Status.GUIDE, Status.UNGUIDED]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_minimum_probability_of_ends_after_sentences_and_lines(device, backend, dtype):
    """1/10,000 of the minimum probability after a sentence, a tenth after a line, 100 times it elsewhere.

    Lateness applies in addition."""
    breaks = [TextBreak.LINE, TextBreak.NONE, TextBreak.SENTENCE, TextBreak.LINE]
    least, last, generated, expected = zip(  # minimum, last token, tokens generated of 10, candidate ends
        (1.5, 2, 0, [7, 4]),  # at least 0.00015
        (0.15, 2, 0, [7, 4, 1]),
        (0.1, 3, 0, [7]),  # 0.01
        (0.01, 0, 5, [7]),  # 0.001
        (0.0003, 1, 10, []),  # 0.03
        (0.0003, 1, 12, [7]),  # 0.03 / 4
        (0.0003, 4, 0, []),  # outside text_breaks: within a line
        (0.0003, -1, 0, []),
        (0.0, 1, 0, [7, 4, 1]),
        (torch.inf, 2, 99, []),
        strict=True,
    )
    breaks = torch.tensor([*breaks, TextBreak.SENTENCE], dtype=torch.int8, device=device)[:4]
    options = dict(min_end_prob=torch.tensor(least), due_length=torch.full((10,), 10.0), text_breaks=breaks)
    options |= dict(generated=torch.tensor(generated, dtype=torch.int32), last_tokens=torch.tensor(last, dtype=dtype))
    _, lists = with_ends(device, backend, 10, **options)
    assert lists == [[5, *ends] for ends in expected]


def test_requests_use_the_end_tokens_of_their_table_row(device, backend):
    """Strided table columns. Masked end tokens and unguided rows get none; a greedy request has several candidates."""
    table = torch.tensor([[6, -2, 9, 9], [0, 8, 9, 9], [-2, -2, 9, 9], [2, 7, 9, 9]], dtype=torch.int32, device=device)
    allowed = torch.full((6, 1), -1, dtype=torch.int32)
    allowed[4] = ~(1 << 7)
    temperature, guided = torch.tensor([1.0] * 5 + [0.0]), torch.tensor([True, True, True, False, True, True])
    options = dict(scores=TAIL.log(), temperature=temperature, is_logits=True, vocab_mask=allowed, guided=guided)
    options |= dict(top_k=torch.tensor([1, 1, 1, 1, 1, 3], dtype=torch.int32), end_token_ids=table[:, :2])
    least = torch.tensor([[0.2, 1e-4, 0.0, 1e-3], [0.0] * 4], device=device).T[:, 0]
    rows = torch.tensor([3, 0, 1, 3, 3, 1])
    found, lists = with_ends(device, backend, 6, **options, min_end_prob=least, table_rows=rows)
    assert lists == [[5, 2, 7], [5], [5, 8, 0], [], [5, 2], [5, 8, 0]]
    status = [Status.GUIDE, Status.SINGLE, Status.GUIDE, Status.UNGUIDED, Status.GUIDE, Status.GUIDE]
    assert found.status.tolist() == status


def test_non_finite_temperatures_break_the_row(device, backend):
    temperature = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    found = choose(torch.zeros(4, 3), device, backend, temperature=temperature, is_logits=True)
    assert found.broken.tolist() == [True, True, True, False] and found.counts.tolist() == [0, 0, 0, 3]


GOOD = dict(scores=torch.zeros(2, 40), top_k=0, top_p=1.0, min_p=0.0, is_logits=True)
PER_REQUEST, NO_ENDS, OF_ONE = torch.zeros(2), torch.zeros(1, 0).int(), {"min_end_prob": torch.zeros(1)}
ERRORS = [
    ("scores must have 1 to 262144 columns, got 0", {"scores": torch.zeros(2, 0)}),
    ("scores must have 1 to 262144 columns, got 262145", {"scores": torch.zeros(2, 262_145)}),
    *((f"max_candidates must be a power of two up to 64, got {n}", {"max_candidates": n}) for n in (0, 12, 128)),
    *((f"top_k must be an int32, got {n}", {"top_k": n}) for n in (2**31, -(2**31) - 1)),
    ("due_length and generated must be given together, with end_token_ids", {"due_length": PER_REQUEST}),
    ("due_length and generated must be given together, with end_token_ids", {"generated": PER_REQUEST}),
    ("text_breaks and last_tokens must be given together, with end_token_ids", {"text_breaks": PER_REQUEST}),
    ("text_breaks and last_tokens must be given together, with end_token_ids", {"last_tokens": PER_REQUEST}),
    ("end_token_ids and min_end_prob must be given together", {"end_token_ids": ENDS}),
    ("end_token_ids and min_end_prob must be given together", {"min_end_prob": PER_REQUEST}),
    ("least_share must be given together with end_token_ids", {"least_share": PER_REQUEST}),
    ("end_token_ids must have a row for each of the 2 requests, got 1", {"end_token_ids": ENDS} | OF_ONE),
    ("end_token_ids must have at least one column, got none", {"end_token_ids": NO_ENDS} | OF_ONE),
    ("temperature must be None when scores are probabilities", {"is_logits": False, "temperature": torch.ones(2)}),
]


@pytest.mark.parametrize(("message", "changed"), ERRORS)
def test_bad_arguments_are_rejected_by_name(message, changed):
    with pytest.raises(ValueError, match=f"^{message}"):
        topk_candidates(**GOOD | changed)


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        *(("top_k", "an integer", value) for value in (5.0, True, None)),
        *(("top_p", "a number", value) for value in ("1", None)),
        ("min_p", "a number", False),
        ("min_p", "a number", None),
        ("temperature", "a number", [1.0]),
    ],
)
def test_other_types_are_rejected_by_name(name, number, value):
    with pytest.raises(TypeError, match=f"^{name} must be {number} or a tensor .*, got {type(value).__name__}$"):
        topk_candidates(**GOOD | {name: value})
