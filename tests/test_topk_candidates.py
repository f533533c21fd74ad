"""``topk_candidates``: the fork's pairs, the kernels against the fp64 reference, and what must not change a result."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given

from lenvm_kernels.fuzz.ops.topk_candidates import Inputs, compare, run
from lenvm_kernels.fuzz.tolerances import assert_matches
from lenvm_kernels.ops.topk_candidates import FEW_ROWS, TILE, Status, topk_candidates
from tests.cases import assert_right, cases

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "candidates.jsonl").open()]


def row_parameters(rows, top_k=0, top_p=1.0, min_p=0.0):
    return dict(
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
    )


def on(device, arguments):
    return {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}


def assert_same_bits(actual, expected):
    for field in fields(expected):
        a, e = getattr(actual, field.name), getattr(expected, field.name)
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=field.name: f"{n}: {m}")


@pytest.mark.parametrize("backend, dtype", [("reference", "float64"), ("reference", "float32"), ("triton", "float32")])
def test_golden_pairs_of_the_fork(backend, dtype, device):
    for pair in GOLDEN:
        expected = pair["expected"]
        found = topk_candidates(
            torch.tensor([pair["probs"]], dtype=getattr(torch, dtype), device=device),
            **on(device, row_parameters(1, pair["top_k"], pair["top_p"], pair["min_p"])),
            max_candidates=triton.next_power_of_2(pair["top_k"]),
            entropy_threshold=torch.tensor([pair["entropy_threshold"] or torch.nan], device=device),
            backend=backend,
        )
        count = found.counts.item()
        assert Status(found.status.item()).name.lower() == expected["kind"]
        if expected["kind"] != "skip":
            assert found.token_ids[0, :count].tolist() == expected["ids"]
        if expected["kind"] == "guide":
            ratio = found.probs[0, :count].double().cpu() / torch.tensor(expected["probs"], dtype=torch.float64)
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-5, atol=0)


@given(cases("topk_candidates"))
def test_triton_matches_fp64_reference(device, case):
    assert_right(case, device)


@given(cases("topk_candidates"))
def test_fp32_reference_matches_fp64_reference(case):
    assert_right(case, "cpu", partial(topk_candidates, backend="reference"))


@pytest.mark.parametrize(
    "x, options",
    [(torch.zeros(2, 1), {}), (torch.zeros(0, 7), {}), (torch.full((1, 5), -torch.inf), {"is_logits": True})],
)
def test_rows_of_nothing_and_no_rows(device, x, options):
    arguments = {"max_candidates": 8} | on(device, row_parameters(len(x))) | options
    given = Inputs(x.to(device), arguments)
    differences = compare(given, run(given, partial(topk_candidates, backend="triton")))
    assert not [difference.what for difference in differences if difference.wrong.any()]


@pytest.mark.parametrize("vocab, slots", [(262_144, 4), (2 * TILE + 9, 64)])
def test_largest_vocabulary_and_most_candidates(device, vocab, slots):
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()  # many ties
    x[0, vocab - 7] = 9.0
    arguments = dict(row_parameters(1), max_candidates=slots, is_logits=True)
    actual = topk_candidates(x.to(device), **on(device, arguments), backend="triton")
    expected = topk_candidates(x.double(), **arguments, backend="reference")
    assert torch.equal(actual.token_ids.cpu(), expected.token_ids) and expected.token_ids[0, 0] == vocab - 7
    assert_matches(actual.probs, expected.probs, "topk_candidates", x.dtype)
    assert_matches(actual.lost_mass, expected.lost_mass, "topk_candidates", x.dtype)
    assert expected.lost_mass > 0.2


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_do_not_see_each_other(device, backend):
    """Permuted rows, and more rows (past the number where a row is cut into fewer ranges): the same bits."""
    rng = torch.Generator().manual_seed(1)
    rows = FEW_ROWS + 3
    x = torch.randn(rows, 20 * TILE // 8, generator=rng)
    x[4, 3] = torch.nan
    arguments = dict(row_parameters(rows, 6, 0.9, 0.01), entropy_threshold=torch.full((rows,), 1.0))
    whole = topk_candidates(x.to(device), **on(device, arguments), is_logits=True, backend=backend)

    def taken(indices):
        picked = {name: a[indices] for name, a in arguments.items()}
        part = topk_candidates(x[indices].to(device), **on(device, picked), is_logits=True, backend=backend)
        expected = type(whole)(*(getattr(whole, f.name)[indices.to(device)] for f in fields(whole)))
        assert_same_bits(part, expected)

    taken(torch.randperm(rows, generator=rng))
    taken(torch.tensor([4, 7, 2]))
    assert whole.broken.sum() == 1 and whole.status[4] == Status.UNGUIDED


def test_rows_not_guided_are_not_read(device):
    x = torch.full((2, 9), torch.nan)
    x[1] = torch.arange(9.0)
    found = topk_candidates(
        x.to(device),
        **on(device, row_parameters(2)),
        is_logits=True,
        guided=torch.tensor([False, True], device=device),
        backend="triton",
    )
    assert found.counts.tolist() == [0, 8] and found.token_ids[0].tolist() == [-1] * 8
    assert not found.broken.any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_lost_mass_only_where_the_slots_end_the_list(device, backend):
    x = torch.full((3, 10), 0.1, device=device)
    parameters = row_parameters(3)
    parameters["top_k"] = torch.tensor([0, 4, 0]).int()
    parameters["top_p"] = torch.tensor([1.0, 1.0, 0.35])
    found = topk_candidates(x, **on(device, parameters), max_candidates=4, backend=backend)
    assert found.counts.tolist() == [4, 4, 4]
    torch.testing.assert_close(found.lost_mass.cpu(), torch.tensor([0.6, 0.0, 0.0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1])
def test_replays_in_a_cuda_graph(device, rows):
    scores = torch.randn(rows, 151_936, device=device)
    arguments = on(device, row_parameters(rows, 50, 0.9, 0.01)) | {"is_logits": True}
    topk_candidates(scores, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk_candidates(scores, **arguments)
    scores.normal_()
    graph.replay()
    assert_same_bits(found, topk_candidates(scores, **arguments))


GOOD = dict(row_parameters(2), scores=torch.zeros(2, 40), is_logits=True)


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "scores",
            torch.zeros(2, 40).int(),
            r"scores must be float32\|bfloat16\|float16 \[\*, \*\], got int32 \[2, 40\]",
        ),
        ("scores", torch.zeros(2, 40, dtype=torch.float64), "scores must be float32"),
        ("scores", torch.zeros(40), r"scores must be .* \[\*, \*\], got float32 \[40\]"),
        ("scores", torch.zeros(40, 2).T, "scores must be contiguous in its last dimension"),
        ("scores", torch.zeros(2, 0), "scores must have between 1 and 262144 columns, got 0"),
        ("scores", torch.zeros(2, 300_000), "scores must have between 1 and 262144 columns, got 300000"),
        ("top_k", torch.zeros(2).long(), r"top_k must be int32 \[2\] on cpu, got int64 \[2\] on cpu"),
        ("top_k", torch.zeros(3).int(), r"top_k must be int32 \[2\] on cpu, got int32 \[3\]"),
        ("top_k", torch.zeros(2, device="meta").int(), r"top_k must be int32 \[2\] on cpu, got .* on meta"),
        ("top_k", torch.zeros(4).int()[::2], "top_k must be contiguous"),
        ("top_p", torch.ones(2).double(), r"top_p must be float32 \[2\]"),
        ("min_p", torch.ones(1), r"min_p must be float32 \[2\]"),
        ("max_candidates", 12, "max_candidates must be a power of two up to 64, got 12"),
        ("max_candidates", 128, "max_candidates must be a power of two up to 64, got 128"),
        ("temperature", torch.ones(2, 1), r"temperature must be float32 \[2\]"),
        ("entropy_threshold", torch.ones(3), r"entropy_threshold must be float32 \[2\]"),
        ("guided", torch.ones(2).int(), r"guided must be bool \[2\]"),
        ("vocab_mask", torch.zeros(2, 1).int(), r"vocab_mask must be int32 \[2, 2\] on cpu, got int32 \[2, 1\]"),
        ("backend", "cuda", "backend must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_bad_arguments_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        topk_candidates(**{**GOOD, name: value})


def test_bad_argument_types_and_combinations():
    with pytest.raises(TypeError, match=r"top_k must be a tensor int32 .*, got int"):
        topk_candidates(**{**GOOD, "top_k": 5})
    with pytest.raises(ValueError, match="temperature must be None when scores are probabilities"):
        topk_candidates(**{**GOOD, "is_logits": False, "temperature": torch.ones(2)})
