"""``topk_candidates``: cases computed by hand, golden pairs of the fork, and the largest sizes."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB, TILE, CandidateColumns, topk_candidates
from lenvm_kernels.types import GUIDANCE_COLUMNS, Candidates, Status
from tests.helpers.cases import assert_matches

SLOTS = 4
GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "candidates.jsonl").open()]
INF, NAN = math.inf, math.nan


def choose(x, device, backend, **options):
    """Candidates of ``x``, one row of scores per request, moved to the CPU. Filters are off by default, and columns of
    the guidance table have the values of unguided requests."""
    options = dict(top_k=0, top_p=1.0, min_p=0.0, max_candidates=SLOTS) | options
    options = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    columns = {name: options.pop(name) for name in CandidateColumns._fields if name in options}
    if columns:
        options["table"] = GuidanceTable(len(x), device).columns._replace(**columns)
    return Candidates(*(y.cpu() for y in topk_candidates(x.to(device), **options, backend=backend)))


class HandCase(NamedTuple):
    """One request; ``ids`` are its candidates, ``lost`` is the mass of tokens cut off by the slots. A request without
    candidates has broken scores, unless it has a status."""

    scores: list[float]
    options: dict[str, Any]
    ids: list[int]
    lost: float = 0.0
    status: Status | None = None  # if None, derived from the number of candidates


def of_logits(scores, options, *expected):
    return HandCase(scores, {"is_logits": True} | options, *expected)


TENTH, ZEROS, SPLIT = [0.1] * 10, [0.0] * 4, [0.25, 0.5, 0.25]
LN_2 = torch.tensor(2.0).log()
FILTERS = [
    HandCase(TENTH, {}, [0, 1, 2, 3], 0.6),
    HandCase(TENTH, {"top_p": 0.35}, [0, 1, 2, 3]),
    # Exact boundaries.
    HandCase(SPLIT, {"top_p": 0.5}, [1, 0]),
    HandCase(SPLIT, {"top_p": 0.4999}, [1]),
    HandCase(SPLIT, {"min_p": 0.5}, [1, 0, 2]),
    HandCase(SPLIT, {"min_p": 0.5001}, [1]),
    of_logits(ZEROS, {"top_p": 0.5, "min_p": 1.0}, [0, 1, 2]),
    of_logits(ZEROS, {"top_p": 0.75, "min_p": 1.0}, [0, 1, 2, 3]),
    # An entropy equal to the threshold skips the row.
    HandCase([0.25, 0.25], {"entropy_threshold": float(LN_2.nextafter(LN_2 - 1))}, [0, 1]),
    HandCase([0.25, 0.25], {"entropy_threshold": float(LN_2)}, [0, 1], 0.0, Status.SKIP),
    HandCase([0.0, 0.25], {"entropy_threshold": float(LN_2)}, [1]),
    # Greedy below a temperature of 1e-6, with the probabilities of temperature 1.
    of_logits([1.0, 3.0, 3.0, 3.0], {"min_p": 0.01, "temperature": 1e-6}, [1, 2, 3]),
    of_logits([1.0, 3.0, 3.0, 3.0], {"min_p": 0.01, "temperature": 9.9e-7}, [1]),
    of_logits([1.0, 3.0, 3.0, 3.0], {"min_p": 0.01, "temperature": 2.0}, [1, 2, 3, 0]),
    *(of_logits(ZEROS, {"temperature": x}, []) for x in (NAN, INF, -INF)),
    # Negative scores and -inf are 0, the lower token id wins ties, -0 equals 0, and NaN breaks the row.
    HandCase([-1.0, 0.0, 0.5, -INF, 0.5], {}, [2, 4]),
    HandCase([0.0, -0.0, -1.0, 0.0, -INF], {}, []),
    HandCase([0.5, NAN, 0.2, 0.1, 0.2], {}, []),
    HandCase([0.5, 0.1, 0.0, 0.0, INF], {}, []),
    HandCase([-1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, -7.0], {}, [1, 2, 3, 4], 0.2),
    of_logits([-0.0, -20.0, 0.0, -0.0], {}, [0, 2, 3, 1]),
    of_logits([NAN] * 4, {"guided": False}, [], 0.0, Status.UNGUIDED),
    # Masks use all 32 bits of a word; the softmax is over the allowed tokens.
    of_logits(ZEROS * 17, {"vocab_mask": [-(2**31), -(2**31), 9]}, [31, 63, 64, 67]),
    of_logits(ZEROS * 17, {"vocab_mask": [1, 0, 0]}, [0]),
    of_logits(ZEROS * 17, {"vocab_mask": [0, 0, 0]}, []),
]
# End tokens are candidates despite filters: 7 (0.02), 4 (0.0005) and 1 (0.00002).
TAIL = [0.06, 0.00002, 0.3, 0.0, 0.0005, 0.4, 0.11, 0.02, 0.10948]
LOGITS = [-INF if p == 0 else math.log(p) / 2 + 3 for p in TAIL]  # at a temperature of 0.5


def tail(options, least, ids, lost=0.0):
    """A case of probabilities, and one of logits."""
    options = {"max_candidates": 8, "ending_token_ids": [[-2, 7, 4, 1, 7, 12]], "min_end_prob": least} | options
    return HandCase(TAIL, options, ids, lost), of_logits(LOGITS, {"temperature": 0.5} | options, ids, lost)


END_LISTS = [
    tail({"top_k": 2}, 1e-4, [5, 2, 7, 4]),
    tail({"min_p": 0.9}, 1e-4, [5, 7, 4]),
    tail({"top_k": 2}, 1e-2, [5, 2, 7]),
    tail({}, INF, [5, 2, 6, 8, 0, 7, 4, 1]),
    tail({}, 1e-4, [5, 2, 6, 8, 0, 7, 4]),  # the filters keep 1, but it is an improbable end
    tail({"ending_token_ids": [[5, 2]]}, 0.5, [6, 8, 0, 7, 4, 1]),
    tail({"ending_token_ids": [[5, 2]], "top_k": 1}, 0.5, [6]),
    tail({"max_candidates": 4}, 1e-4, [5, 2, 7, 4], 0.2795),  # 6 and 8 are replaced
    tail({"max_candidates": 2}, 0.0, [5, 7], 0.58),
]
# Past the due length, the minimum probability halves per tenth of it, and per hundredth from one half on.
LATE = [
    tail({"top_k": 1, "due_length": due, "generated": generated}, least, ids)
    for least, due, generated, ids in (
        (0.03, 40.0, 40, [5]),
        (0.03, 40.0, 44, [5, 7]),  # 0.015
        (0.01, 0.0, 11, [5, 7, 4, 1]),  # 2^-120
        (0.03, 100.0, 154, [5, 7, 4]),  # 0.03 / 2^9 = 0.000059
        (0.02, 40.0, 0, [5, 7]),  # equal to the minimum
    )
]
# 1/10,000 of the minimum probability after a sentence (token 2), a tenth after a line (0 and 3), 100 times it
# elsewhere, and lateness in addition. Token 4 is beyond the text breaks.
AFTER_BREAKS = [
    tail(
        {"top_k": 1, "due_length": 10.0, "generated": generated, "text_breaks": [1, 0, 2, 1], "last_tokens": last},
        least,
        ids,
    )
    for least, last, generated, ids in (
        (1.5, 2, 0, [5, 7, 4]),  # at least 0.00015
        (0.15, 2, 0, [5, 7, 4, 1]),
        (0.1, 3, 0, [5, 7]),  # 0.01
        (0.01, 0, 5, [5, 7]),  # 0.001
        (0.0003, 1, 10, [5]),  # 0.03
        (0.0003, 4, 0, [5]),
        (INF, 2, 99, [5]),
    )
]
IMPROBABLE = {"ending_token_ids": [[0, 1]], "min_end_prob": 0.5}
EQUAL = {"ending_token_ids": [[2, 1]], "min_end_prob": 0.1, "max_candidates": 2}
FEW = [HandCase(scores, IMPROBABLE, [], 0.0, Status.UNGUIDED) for scores in ([0.4, 0.3], [0.4, 0.3, 0.0])]
FEW += [HandCase([0.4, 0.2, 0.2], EQUAL, [0, 1], 0.2)]
HAND_CASES = [*FILTERS, *FEW, *(case for cases in (*END_LISTS, *LATE, *AFTER_BREAKS) for case in cases)]
DTYPES = {name: GUIDANCE_COLUMNS[name].dtype for name in CandidateColumns._fields}
DTYPES |= {"text_breaks": torch.int8, "generated": torch.int32}
DTYPES |= {"last_tokens": torch.int64, "guided": torch.bool, "vocab_mask": torch.int32}


@pytest.mark.parametrize("case", HAND_CASES)
def test_cases_by_hand(device, backend, case):
    """Filters are numbers. The laws cover tensors, strides and several programs."""
    options = {
        name: torch.tensor(x if name in ("ending_token_ids", "text_breaks") else [x], dtype=DTYPES[name])
        if name in DTYPES
        else x
        for name, x in case.options.items()
    }
    x, count = torch.tensor([case.scores]), len(case.ids)
    found = choose(x, device, backend, **options)
    padding = [-1] * (found.token_ids.shape[1] - count)
    assert found.token_ids.tolist() == [case.ids + padding] and found.counts.tolist() == [count]
    status = (Status.UNGUIDED, Status.SINGLE, Status.GUIDE)[min(count, 2)] if case.status is None else case.status
    assert found.status.tolist() == [status] and found.broken.tolist() == [not count and case.status is None]
    if options.get("is_logits"):
        words = torch.tensor(case.options.get("vocab_mask", [-1] * 9))
        allowed = words[torch.arange(x.shape[1]) // 32] >> torch.arange(x.shape[1]) % 32 & 1
        x = x.masked_fill(allowed == 0, -INF)
        temperature = options.get("temperature", 1.0)
        x = torch.softmax(x / (1.0 if temperature < 1e-6 else temperature), 1)
    torch.testing.assert_close(
        found.probs, torch.nn.functional.pad(x[:, case.ids], (0, len(padding))), rtol=1e-5, atol=0
    )
    assert not count or found.lost_mass.item() == pytest.approx(case.lost, abs=1e-6)


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


# Gemma 3 has 262,208 tokens, Gemma 3n 262,400.
@pytest.mark.parametrize("vocab, slots", [(262_208, 4), (262_400, 64), (MAX_VOCAB, 8), (70 * TILE + 9, 64)])
def test_largest_vocabulary_and_most_candidates(device, vocab, slots):
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()  # many ties
    x[0, vocab - 7] = 9.0
    actual = choose(x, device, "triton", max_candidates=slots, is_logits=True)
    expected = choose(x.double(), "cpu", "reference", max_candidates=slots, is_logits=True)
    assert torch.equal(actual.token_ids, expected.token_ids) and expected.token_ids[0, 0] == vocab - 7
    assert_matches(actual.probs, expected.probs, "topk_candidates", x.dtype)
    assert_matches(actual.lost_mass, expected.lost_mass, "topk_candidates", x.dtype)
    assert expected.lost_mass > 0.2


def test_equal_scores_are_ordered_by_token_within_and_across_tiles(device, backend):
    of_seed = dict(generator=torch.Generator().manual_seed(0))
    x = torch.full((4, 5 * TILE - 3), -INF)
    x.scatter_(1, torch.rand(x.shape, **of_seed).argsort(1)[:, :60], torch.randint(4, (4, 60), **of_seed).float())
    found = choose(x, device, backend, max_candidates=64, is_logits=True)
    assert torch.equal(found.token_ids[:, :60].long(), x.sort(descending=True, stable=True).indices[:, :60])
    assert found.counts.tolist() == [60] * 4
