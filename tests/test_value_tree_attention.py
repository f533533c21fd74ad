"""Value-tree attention: the reference against dense masks, the kernels against the reference in fp64."""

import json
import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from lenvm_kernels.fuzz.ops.value_tree_attention import Inputs, int32, make_inputs, random_tree
from lenvm_kernels.ops import value_tree_attention as ops
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.value_tree_attention import (
    BLOCK_M,
    MAX_SPLITS,
    MAX_STRIDE,
    PLAN_BLOCK,
    SPLIT_LEN,
    SPLIT_SLACK,
    SPLIT_TILES,
    num_counters,
    plan_attention,
    plan_shape,
    value_tree_attention,
    workspace_shape,
)
from tests.helpers.matches import assert_matches, assert_same

SPLIT_LEN, MAX_SPLITS = SPLIT_LEN.value, MAX_SPLITS.value
ONE_SPLIT = SPLIT_LEN + SPLIT_SLACK.value  # cached tokens that are not split
SPLIT_ROWS = SPLIT_TILES.value * BLOCK_M.value  # (token, head) pairs of a request that can be split
GOLDEN = Path(__file__).parent / "golden" / "tree_mask.jsonl"


def plan_of(inputs: Inputs, backend: str = "triton") -> torch.Tensor:
    tokens, q_heads, _ = inputs.q.shape
    return plan_attention(
        inputs.table_rows,
        inputs.cached_lens,
        inputs.q_offsets,
        inputs.candidate_lens,
        total_tokens=tokens,
        max_len=inputs.slot_table.shape[1] * inputs.page_size,
        group=q_heads // inputs.k_new.shape[1],
        backend=backend,
    )


def check_against_reference(inputs: Inputs, **keywords) -> None:
    expected = inputs.expected(**keywords)
    for actual, wanted in zip(inputs.rows(inputs.run(**keywords)), inputs.rows(expected), strict=True):
        assert not actual.isnan().any()
        assert_matches(actual, wanted, "value_tree_attention", inputs.q.dtype)


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines())
def test_reference_agrees_with_the_masks_of_the_fork(line):
    """Dense attention under the fork's own masks, written without anything of the reference."""
    golden = json.loads(line)
    prefix, cached, candidates = (golden[k] for k in ("prefix_lens", "cached_prefix_lens", "candidate_lens"))
    delta = [total - c for total, c in zip(prefix, cached, strict=True)]
    inputs = make_inputs(cached, delta, candidates, q_heads=6, kv_heads=2, head_dim=8, dtype=torch.float64, page_size=2)
    mask = torch.tensor([bit == "1" for bit in golden["mask"]])
    for i, result in enumerate(inputs.rows(inputs.run("reference"))):
        shape = (delta[i] + candidates[i], prefix[i] + candidates[i])
        allowed, mask = mask[: shape[0] * shape[1]].view(shape), mask[shape[0] * shape[1] :]
        pages = inputs.slot_table[inputs.table_rows[i]].tolist()
        slots = [pages[t // 2] * 2 + t % 2 for t in range(cached[i])]
        first = int(inputs.q_offsets[i])
        for token in range(shape[0]):
            for head in range(6):
                keys = torch.cat([inputs.k_cache[slots, head // 3], inputs.k_new[first : first + shape[0], head // 3]])
                values = torch.cat(
                    [inputs.v_cache[slots, head // 3], inputs.v_new[first : first + shape[0], head // 3]]
                )
                scores = (keys[allowed[token]] @ inputs.q[first + token, head]) / 8**0.5
                weights = scores.exp() / scores.exp().sum()
                torch.testing.assert_close(result[token, head], weights @ values[allowed[token]])
    assert mask.numel() == 0


def test_auto_takes_the_reference_on_a_cpu_and_keeps_fp64():
    inputs = make_inputs([5], [1], [2], head_dim=24, dtype=torch.float64)
    assert torch.equal(inputs.run("auto"), inputs.run("reference"))
    assert inputs.run("auto").dtype == torch.float64


# --- the kernels against the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_splits(device, dtype, e4m3):
    """One split, several, and rows past the split tiles, side by side; a table row of each."""
    inputs = make_inputs(
        [0, ONE_SPLIT, ONE_SPLIT + 1, ONE_SPLIT + 2 * SPLIT_LEN + 70, ONE_SPLIT + 8, ONE_SPLIT + 88],
        [2, 1, 0, 1, SPLIT_ROWS // 4 + 3, 1],
        [2, 3, 3, 2, 2, 0],
        device=device,
        q_heads=4,
        dtype=dtype,
        e4m3=e4m3,
        page_size=16,
        padding=2,
    )
    check_against_reference(inputs)


@pytest.mark.parametrize("splits", [2, 3, 5, MAX_SPLITS])
def test_the_edges_of_a_number_of_splits(device, splits):
    """The shortest and the longest request of so many splits; past the last, splits grow. With a tree."""
    shortest = ONE_SPLIT + (splits - 2) * SPLIT_LEN + 1
    longest = shortest + SPLIT_LEN - 1 if splits < MAX_SPLITS else 2 * MAX_SPLITS * SPLIT_LEN
    inputs = make_inputs(
        [shortest, longest], [1, 2], [3, 4], device=device, q_heads=3, head_dim=16, dtype=torch.float16, page_size=16
    ).with_trees([[-1, 0, 0], [-1, 0, 1, -1]])
    check_against_reference(inputs)
    plan = plan_of(inputs)
    assert plan[1 : 1 + int(plan[0, 0]), 7].tolist() == [*range(splits), *range(splits)]


def test_long_delta_over_many_tiles_and_key_blocks(device):
    inputs = make_inputs([30, 0], [150, 70], [3, 5], device=device, q_heads=2, dtype=torch.float16)
    check_against_reference(inputs)


def test_more_requests_than_are_planned_at_once(device):
    cached = [i % 3 for i in range(PLAN_BLOCK.value + 5)]
    inputs = make_inputs(cached, [i % 2 for i in cached], [1] * len(cached), device=device, q_heads=1, head_dim=16)
    check_against_reference(inputs)


def test_the_number_of_programs_changes_nothing(device, monkeypatch):
    """Programs that take several items each, and programs without any."""
    inputs = make_inputs(
        [ONE_SPLIT + 40, 20, 0], [1, 70, 3], [4, 2, 0], device=device, q_heads=4, kv_heads=2, dtype=torch.float16
    )
    expected = inputs.run()
    monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "MAX_PROGRAMS", 6)
    assert torch.equal(inputs.run(), expected)


def test_table_rows_of_both_dtypes_and_any_strides(device):
    inputs = make_inputs([40, 3], [2, 1], [3, 4], device=device, q_heads=6, kv_heads=2)
    expected = inputs.run()
    spread = torch.zeros(*inputs.q.shape[:2], 2 * inputs.q.shape[2], device=device)
    heads_first = replace(
        inputs,
        q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1),
        k_cache=inputs.k_cache.transpose(0, 1).contiguous().transpose(0, 1),
        v_new=inputs.v_new.contiguous(),
        slot_table=inputs.slot_table[:, :42],
        table_rows=inputs.table_rows.int(),
    )
    out = spread[..., : inputs.q.shape[2]]
    assert heads_first.run(out=out) is out
    assert torch.equal(out, expected)
    assert not spread[..., inputs.q.shape[2] :].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("cached", "delta", "candidates"),
    [([], [], []), ([5], [0], [0]), ([0, 3, 0, 0], [0, 0, 1, 0], [0, 0, 0, 2])],
)
def test_empty_requests_and_batches(device, backend, cached, delta, candidates):
    inputs = make_inputs(cached, delta, candidates, device=device, padding=2)
    out = torch.full_like(inputs.q, 7.0)
    inputs.run(backend, out=out)
    expected = inputs.expected()
    for actual, wanted in zip(inputs.rows(out), inputs.rows(expected), strict=True):
        assert_matches(actual, wanted, "value_tree_attention", torch.float32)
    assert (out[int(inputs.q_offsets[-1]) :] == 7.0).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_tokens_at_all(device, backend):
    assert make_inputs([5], [0], [0], device=device).run(backend).shape == (0, 2, 64)


@pytest.mark.parametrize("cached", [9, ONE_SPLIT + 9])
def test_rows_past_the_last_request_stay_as_they_are(device, cached):
    inputs = make_inputs([cached, 3], [1, 0], [3, 2], device=device, padding=30)
    out = torch.full_like(inputs.q, 7.0)
    inputs.run(out=out)
    assert (out[6:] == 7.0).all() and (out[:6] != 7.0).all()


# --- trees deeper than one level --------------------------------------------------------------------------------------


def dense_attention(inputs: Inputs, trees: list[list[int]]) -> list[torch.Tensor]:
    """Dense attention in fp64 under masks from the transitive closure of the trees, of each request."""
    results = []
    for i, tree in enumerate(trees):
        cached, candidates = int(inputs.cached_lens[i]), len(tree)
        start, end = inputs.q_offsets[i : i + 2].tolist()
        delta = end - start - candidates
        reaches = torch.eye(candidates, dtype=torch.float64)
        for child, parent in enumerate(tree):
            if parent >= 0:
                reaches[child, parent] = 1
        reaches = torch.linalg.matrix_power(reaches, candidates + 1) > 0
        new = torch.ones(end - start, end - start).tril().bool()
        new[delta:, delta:] = reaches
        mask = torch.cat([torch.ones(end - start, cached).bool(), new], dim=1)

        pages = inputs.slot_table[inputs.table_rows[i]].tolist()
        slots = [pages[t // inputs.page_size] * inputs.page_size + t % inputs.page_size for t in range(cached)]
        group = inputs.q.shape[1] // inputs.k_new.shape[1]
        q = inputs.q[start:end].double().cpu().transpose(0, 1)
        k, v = (
            torch.cat([cache[slots], x[start:end]]).double().cpu().transpose(0, 1).repeat_interleave(group, 0)
            for cache, x in ((inputs.k_cache, inputs.k_new), (inputs.v_cache, inputs.v_new))
        )
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return results


@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 9, 70]),
            st.sampled_from([0, 0, 1, 2, 11]),
            st.sampled_from([0, 1, 5, 16, 64]),
            st.sampled_from([1, 2, 4, 64]),
        ),
        min_size=1,
        max_size=2,
    ),
    group=st.sampled_from([1, 3]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 48]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 9),
)
def test_trees_agree_with_dense_attention(device, requests, group, kv_heads, head_dim, dtype, seed):
    cached, delta, candidates, reach = map(list, zip(*requests, strict=True))
    trees = [random_tree(n, r, seed + i) for i, (n, r) in enumerate(zip(candidates, reach, strict=True))]
    inputs = make_inputs(
        cached,
        delta,
        candidates,
        device=device,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        page_size=16,
        padding=seed % 2,
        seed=seed,
    ).with_trees(trees)
    actual, reference = inputs.rows(inputs.run()), inputs.rows(inputs.expected())
    for i, expected in enumerate(dense_attention(inputs, trees)):
        torch.testing.assert_close(reference[i].cpu(), expected)
        assert_matches(actual[i], expected, "value_tree_attention", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_chain_of_candidates_is_a_delta(device, dtype):
    tree = [-1, *range(15)]
    inputs = make_inputs([20], [3], [16], device=device, q_heads=4, kv_heads=2, dtype=dtype).with_trees([tree])
    as_delta = replace(inputs, candidate_lens=int32([0], device))
    assert_matches(inputs.run(), as_delta.run(), "value_tree_attention", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_without_parents_give_the_bits_of_no_parents(device, dtype):
    inputs = make_inputs([0, ONE_SPLIT + 9, 30], [2, 2, 17], [4, 9, 3], device=device, q_heads=3, dtype=dtype)
    inputs.q[0] = -100 * inputs.k_new[0]  # a delta token that sees itself only: exp2 of its score is 0 in fp32
    roots = inputs.with_trees([[-1] * n for n in inputs.candidate_lens.tolist()])
    assert torch.equal(roots.run(), inputs.run())


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("seed", range(6))
def test_malformed_parents_are_none(device, backend, seed):
    """Whatever stands where a parent cannot be changes nothing: at roots, at delta tokens, at padding."""
    trees = [random_tree(n, 4, seed + n) for n in (5, 0, 7, 3)]
    inputs = make_inputs([0, 5, 0, 3], [2, 1, 0, 3], [5, 0, 7, 3], device=device, head_dim=16, padding=3)
    inputs = inputs.with_trees(trees)
    offsets, parents = inputs.q_offsets.tolist(), inputs.parents.tolist()
    choice = random.Random(seed).choice
    for (start, end), candidates in zip(pairwise(offsets), inputs.candidate_lens.tolist(), strict=True):
        for row in range(start, end):
            if row < end - candidates:
                parents[row] = choice([start, row - 1, end - 1, -1, 2**31 - 1])
            elif parents[row] < 0:
                elsewhere = [*range(end - candidates), *range(row, len(parents))]
                parents[row] = choice([choice(elsewhere), -1, -2, -(2**31), len(parents), 2**31 - 1])
    parents[offsets[-1] :] = [offsets[-1] - 1, -(2**31), 2**31 - 1]
    malformed = replace(inputs, parents=int32(parents, device))
    for actual, expected in zip(inputs.rows(malformed.run(backend)), inputs.rows(inputs.run(backend)), strict=True):
        assert_same(actual, expected, "value_tree_attention", backend)


@pytest.mark.bits
@pytest.mark.parametrize("cached", [0, 45, ONE_SPLIT + 45])
def test_a_candidate_depends_on_its_ancestors_only(device, cached):
    """Alone with its ancestors, beside other candidates, or after another request: the same bits."""
    delta, tree = 2, [-1, 0, 1, -1, 0, 4, 1, 2, 5, -1, 7, 10]
    inputs = make_inputs([30, cached], [1, delta], [3, 12], device=device, q_heads=3, dtype=torch.float16)
    inputs = inputs.with_trees([[-1, 0, 1], tree])
    check_against_reference(inputs)
    result, first = inputs.run(), int(inputs.q_offsets[1])
    swapped = inputs.select([1, 0])
    assert torch.equal(torch.cat(swapped.rows(swapped.run())[::-1]), result)

    for candidate in (3, 6, 8, 11):
        path = [candidate]
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        rows = [*range(first, first + delta), *(first + delta + c for c in path)]
        alone = replace(
            inputs.select([1]),
            q=inputs.q[rows],
            k_new=inputs.k_new[rows],
            v_new=inputs.v_new[rows],
            q_offsets=int32([0, len(rows)], device),
            candidate_lens=int32([len(path)], device),
        ).with_trees([[-1, *range(len(path) - 1)]])
        assert torch.equal(alone.run(), result[rows])

        others = [row for row in range(first + len(tree) + delta) if row not in rows]
        changed = inputs.select([0, 1])
        for x in (changed.q, changed.k_new, changed.v_new):
            x[others] = 3.0 - x[others]
        changed.parents[others] = first + delta
        changed_result = changed.run()
        assert torch.equal(changed_result[rows], result[rows])
        assert not torch.isclose(changed_result[others], result[others]).all(-1).any()


def test_waiting_for_a_deeper_branch_keeps_the_sign_of_zero(device):
    inputs = make_inputs([0], [0], [3], device=device, head_dim=16)
    inputs.v_new[0] = -0.0
    alone, beside_a_branch = (inputs.with_trees([tree]).run()[0] for tree in ([-1, -1, -1], [-1, -1, 1]))
    assert torch.equal(alone.signbit(), beside_a_branch.signbit()) and alone.signbit().all()


# --- a cache in e4m3 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("cached", [70, ONE_SPLIT + 70])
def test_a_cache_in_e4m3_is_the_numbers_that_it_stands_for(device, backend, cached):
    """Beside the same numbers in fp32: nothing but the order of sums differs."""
    inputs = make_inputs([cached, 0, 3], [3, 1, 0], [4, 2, 5], device=device, q_heads=6, kv_heads=2, e4m3=True)
    numbers = {
        name: getattr(inputs, name).float() * scales[:, None]
        for name, scales in (("k_cache", inputs.key_scales), ("v_cache", inputs.value_scales))
    }
    assert inputs.key_scales.unique().numel() + inputs.value_scales.unique().numel() > 2
    wide = replace(inputs, **numbers, key_scales=None, value_scales=None).run("reference")
    torch.testing.assert_close(inputs.run(backend), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exponent", [-125, -60, 15, 60, 115])
def test_queries_of_any_size_meet_keys_in_e4m3(device, exponent):
    """bf16 reaches as far as fp32; fp16, in which a GPU multiplies them, ends at 2**16. Rows of a tile differ."""
    inputs = make_inputs([70], [2], [5], device=device, q_heads=3, dtype=torch.bfloat16, e4m3=True)
    q = inputs.q.clone()
    q[1::2] *= 2.0**exponent
    q[::2] *= 2.0 ** (exponent - 9)
    q[2, 1] = 0.0
    inputs = replace(inputs, q=q)
    check_against_reference(inputs, sm_scale=0.2 * 2.0**-exponent)
    check_against_reference(inputs, sm_scale=0.2 * 2.0 ** (9 - exponent) if exponent > -110 else 1.0)
    check_against_reference(inputs)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_in_a_cache_in_e4m3_is_nan(device, backend, name):
    inputs = make_inputs([70, 5], [1, 1], [2, 1], device=device, dtype=torch.float16, e4m3=True)
    healthy = inputs.run(backend)
    cache = getattr(inputs, name)
    slot = inputs.slot_table[inputs.table_rows[0], 66]
    cache[slot, 0] = float("nan")
    result = inputs.run(backend)
    assert result[:3].isnan().all()
    assert_same(result[3:], healthy[3:], "value_tree_attention", backend)


# --- relations between runs -----------------------------------------------------------------------------------------


@pytest.mark.bits
@pytest.mark.parametrize(
    ("dtype", "e4m3"), [(torch.float16, False), (torch.float16, True), (torch.bfloat16, True), (torch.float32, True)]
)
def test_a_request_gives_the_same_bits_in_any_batch(device, dtype, e4m3):
    """Alone, in another order, beside others, split or not: a row's bits are its own."""
    inputs = make_inputs(
        [20, 0, ONE_SPLIT + SPLIT_LEN + 40, ONE_SPLIT + 1],
        [1, 37, 1, 0],
        [5, 2, 3, 4],
        device=device,
        q_heads=4,
        kv_heads=2,
        dtype=dtype,
        e4m3=e4m3,
    )
    together = inputs.rows(inputs.run())
    for order in ([3, 1, 0, 2], [2], [1, 3], [0]):
        chosen = inputs.select(order)
        for i, rows in zip(order, chosen.rows(chosen.run()), strict=True):
            assert torch.equal(rows, together[i])


@pytest.mark.parametrize("cached", [45, ONE_SPLIT + 45])
def test_a_candidate_does_not_depend_on_the_others(device, cached):
    inputs = make_inputs([cached], [2], [6], device=device, q_heads=3, dtype=torch.float16)
    result = inputs.run()

    fewer = inputs.select([0])
    fewer = replace(
        fewer,
        q=fewer.q[:5],
        k_new=fewer.k_new[:5],
        v_new=fewer.v_new[:5],
        q_offsets=int32([0, 5], device),
        candidate_lens=int32([3], device),
    )
    assert torch.equal(fewer.run(), result[:5])

    others = inputs.select([0])
    for x in (others.q, others.k_new, others.v_new):
        x[[2, 3, 4, 6, 7]] = 3.0 - x[[2, 3, 4, 6, 7]]
    changed = others.run()
    assert torch.equal(changed[[0, 1, 5]], result[[0, 1, 5]])
    assert not torch.equal(changed[6], result[6])


@pytest.mark.bits
def test_candidates_in_another_order_give_the_same_bits(device):
    inputs = make_inputs([30], [1], [5], device=device, q_heads=3, dtype=torch.float16)
    order = [0, 4, 2, 5, 1, 3]
    moved = replace(inputs, q=inputs.q[order], k_new=inputs.k_new[order], v_new=inputs.v_new[order])
    assert torch.equal(moved.run(), inputs.run()[order])


def test_delta_at_once_equals_token_by_token(device):
    cached, delta, candidates = 13, 6, 3
    at_once = make_inputs([cached], [delta], [candidates], device=device, q_heads=4, kv_heads=2)
    expected = at_once.run()

    k_cache, v_cache = (torch.cat([x, x.new_zeros(delta, *x.shape[1:])]) for x in (at_once.k_cache, at_once.v_cache))
    new_slots = torch.arange(delta, dtype=torch.int32, device=device) + at_once.k_cache.shape[0]
    table = at_once.slot_table[at_once.table_rows]
    table = torch.cat([table[:, :cached], new_slots[None]], dim=1)
    for t in range(delta + 1):
        step = slice(t, t + 1) if t < delta else slice(delta, delta + candidates)
        result = value_tree_attention(
            at_once.q[step],
            at_once.k_new[step],
            at_once.v_new[step],
            k_cache,
            v_cache,
            table,
            int32([0], device),
            int32([cached + t], device),
            int32([0, step.stop - step.start], device),
            int32([0 if t < delta else candidates], device),
            backend="triton",
        )
        assert_matches(result, expected[step], "value_tree_attention", torch.float32)
        if t < delta:
            k_cache[new_slots[t]], v_cache[new_slots[t]] = at_once.k_new[t], at_once.v_new[t]


@pytest.mark.bits
def test_whoever_merges_the_splits_gives_the_same_bits(device, monkeypatch):
    """A program takes all items in turn, or each its own: another split is the last to arrive."""
    inputs = make_inputs(
        [ONE_SPLIT + 1, 40, ONE_SPLIT + 3 * SPLIT_LEN],
        [1, 1, 0],
        [4, 2, 5],
        device=device,
        q_heads=6,
        kv_heads=2,
        head_dim=24,
        dtype=torch.float16,
    )
    counters = torch.zeros(num_counters(3, 2) + 3, dtype=torch.int32, device=device)
    expected = inputs.run(counters=counters)
    assert not counters.any()
    plan = plan_of(inputs)
    turned = plan.clone()
    turned[1 : 1 + int(plan[0, 0])] = plan[1 : 1 + int(plan[0, 0])].flip(0)
    for programs in (2, 6, 1024):
        monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "MAX_PROGRAMS", programs)
        for other in (plan, turned):
            assert torch.equal(inputs.run(plan=other, counters=counters), expected)
            assert not counters.any()


# --- the plan -------------------------------------------------------------------------------------------------------


@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, ONE_SPLIT + MAX_SPLITS * SPLIT_LEN),
            st.sampled_from([0, 0, 1, 7, 64, 300]),
            st.integers(0, 9),
        ),
        max_size=9,
    ),
    group=st.sampled_from([1, 3, 6, 64]),
    spare_rows=st.integers(0, 3),
    wide=st.booleans(),
)
def test_plans_agree_with_the_reference(device, requests, group, spare_rows, wide):
    """The same items in the same order, and no more than the shapes have room for."""
    cached, delta, candidates = ([r[i] for r in requests] for i in range(3))
    lens = torch.tensor([0, *map(sum, zip(delta, candidates, strict=True))])
    arguments = (
        torch.arange(len(requests), device=device, dtype=torch.int64 if wide else torch.int32).flip(0) + 5,
        int32(cached, device),
        lens.cumsum(0).int().to(device),
        int32(candidates, device),
    )
    sizes = dict(total_tokens=int(lens.sum()) + spare_rows, max_len=max([0, *cached]), group=group)
    plan = plan_attention(*arguments, **sizes, backend="triton")
    expected = plan_attention(*arguments, **sizes, backend="reference")
    items = 1 + int(expected[0, 0])
    assert int(plan[0, 0]) == items - 1 <= len(plan) - 1
    assert torch.equal(plan[1:items], expected[1:items])


def test_plans_of_more_requests_than_are_added_up_at_once(device):
    cached = [7 * i for i in range(2 * PLAN_BLOCK.value + 5)]
    inputs = make_inputs(cached, [i % 3 for i in cached], [2] * len(cached), device=device, head_dim=1)
    items = 1 + int(plan_of(inputs)[0, 0])
    assert torch.equal(plan_of(inputs)[1:items], plan_of(inputs, "reference")[1:items])
    shape = plan_shape(len(inputs.q), len(cached), 2, inputs.slot_table.shape[1])
    assert plan_of(inputs).shape == shape and workspace_shape(*shape, 1, ONE_SPLIT)[1] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_follows_new_lengths_and_trees(device):
    """Shapes are those of the capture, lengths and trees those of the replay; nothing synchronises with the host."""
    before, after = (
        make_inputs(
            cached, [1, 3], [5, 5], device=device, q_heads=12, kv_heads=2, head_dim=128, dtype=torch.bfloat16
        ).with_trees([tree, tree[::-1]])
        for cached, tree in (([40, 1500], [-1] * 5), ([1500, 40], [-1, 0, 1, 2, -1]))
    )
    out = torch.empty_like(before.q)
    before.run(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before.run(out=out)
    for name, x in vars(before).items():
        if isinstance(x, torch.Tensor):
            x.copy_(getattr(after, name))
    graph.replay()
    assert torch.equal(out, after.run())


def spread(x: torch.Tensor, layout: int) -> torch.Tensor:
    """The values of ``x [tokens, heads, D]`` with other strides, among NaN."""
    tokens, heads, head_dim = x.shape
    nan = float("nan")
    y = {
        0: lambda: x.new_full((tokens, heads + 1, head_dim), nan)[:, 1:],
        1: lambda: x.new_full((heads, tokens, head_dim), nan).transpose(0, 1),
        2: lambda: x.new_full((tokens, heads, head_dim + 5), nan)[..., 2:-3],
        3: lambda: x.new_full((heads, tokens + 3, head_dim), nan).transpose(0, 1)[3:],
        4: lambda: x.new_full((tokens, heads + 3, head_dim + 1), nan)[:, :heads, :-1],
    }[layout]()
    return y.copy_(x)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("turn", "cached"), [(0, 9), (1, 9), (2, ONE_SPLIT + 9), (3, 9), (4, 9)])
def test_every_tensor_has_strides_of_its_own(device, backend, turn, cached, e4m3):
    """Keys and values, cached and new, queries and results laid out differently; with trees, in one split and two."""
    sizes = dict(q_heads=6, kv_heads=3, head_dim=24, page_size=4)
    inputs = make_inputs([cached, 3], [2, 1], [4, 3], device=device, **sizes, e4m3=e4m3)
    inputs = inputs.with_trees([[-1, 0, 1, 0], [-1, -1, 1]])
    if turn == 4:
        inputs = replace(inputs, parents=None)
    names = ("q", "k_new", "v_new", "k_cache", "v_cache")
    operands = {name: spread(getattr(inputs, name), (turn + i) % 5) for i, name in enumerate(names)}
    out = spread(torch.zeros_like(inputs.q), (turn + 3) % 5)
    result = replace(inputs, **operands).run(backend, out=out)
    assert result is out
    assert_matches(result, inputs.expected(), "value_tree_attention", torch.float32)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("sign", "cached"), [(-1, 0), (1, 0), (-1, 5), (1, 5), (-1, ONE_SPLIT + 5)])
def test_scores_far_from_0_with_trees(device, backend, sign, cached):
    """exp2 of every score is 0 or infinite in fp32. In eighths, so that the scores themselves are exact."""
    trees = [[-1, 0, 1, -1, 3], [-1, 0, 0]]
    inputs = make_inputs([cached, 2], [3, 2], [5, 3], device=device, head_dim=16).with_trees(trees)

    def near(x: torch.Tensor, centre: float) -> torch.Tensor:
        return centre + (x * 4).round().clamp(-4, 4) / 8

    inputs = replace(
        inputs,
        q=sign * near(inputs.q, 6.0),
        **{name: near(getattr(inputs, name), 8.0) for name in ("k_new", "k_cache")},
    )
    result = inputs.run(backend)
    for i, expected in enumerate(dense_attention(inputs, trees)):
        assert_matches(inputs.rows(result)[i], expected, "value_tree_attention", torch.float32)
    first = inputs.q[:1, 0].double() @ inputs.k_new[:1, 0].double().T / 4
    assert sign * first.item() > 150


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_64_query_heads_share_a_head(device, backend):
    """A tile is one token: delta, candidates and ancestors are all in tiles of their own."""
    inputs = make_inputs([5], [2], [3], device=device, q_heads=64, head_dim=16, page_size=3).with_trees([[-1, 0, 1]])
    assert_matches(inputs.run(backend), inputs.expected(), "value_tree_attention", torch.float32)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [1.0]}, r"q must be a tensor .*float32\|bfloat16\|float16.* \[\*, \*, \*\], got list"),
        ({"q": torch.zeros(3, 4, 8, dtype=torch.int32)}, r"q must be float32\|bfloat16.*got int32 \[3, 4, 8\] on cpu"),
        ({"q": torch.zeros(3, 32)}, r"q must be .*\[\*, \*, \*\], got float32 \[3, 32\]"),
        ({"q": torch.zeros(3, 4, 16)[..., ::2]}, "q must be contiguous in its last dimension"),
        (
            {"q": torch.zeros(3, 3, 8)},
            "q must have a multiple of the heads of k_new, got 3 query and 2 key/value heads",
        ),
        ({"q": torch.zeros(3, 0, 8)}, "q must have a multiple of the heads of k_new, got 0 query"),
        ({"k_new": torch.zeros(2, 2, 8)}, r"k_new must be float32 \[3, \*, 8\] on cpu, got float32 \[2, 2, 8\] on cpu"),
        ({"k_new": torch.zeros(3, 0, 8)}, "got 4 query and 0 key/value heads"),
        ({"v_new": torch.zeros(3, 2, 8).half()}, r"v_new must be float32 \[3, 2, 8\] on cpu, got float16"),
        ({"k_cache": torch.zeros(9, 1, 8)}, r"k_cache must be float32.* \[\*, 2, 8\] on cpu, got float32 \[9, 1, 8\]"),
        ({"v_cache": torch.zeros(8, 2, 8)}, r"v_cache must be float32 \[9, 2, 8\] on cpu, got float32 \[8, 2, 8\]"),
        ({"v_cache": torch.zeros(9, 2, 8, device="meta")}, r"v_cache must be .* on cpu, got .* on meta"),
        ({"slot_table": torch.zeros(2, 9).long()}, r"slot_table must be int32 \[\*, \*\] on cpu, got int64 \[2, 9\]"),
        ({"table_rows": torch.zeros(1)}, r"table_rows must be int32\|int64 \[\*\] on cpu, got float32 \[1\]"),
        ({"v_new": torch.zeros(3, 1, 8)}, r"v_new must be float32 \[3, 2, 8\] on cpu, got float32 \[3, 1, 8\]"),
        ({"v_new": torch.zeros(3, 2, 16)[..., ::2]}, "v_new must be contiguous in its last dimension"),
        (
            {"k_cache": torch.zeros(9, 2, 8).half()},
            r"k_cache must be float32\|float8_e4m3fn \[\*, 2, 8\] on cpu, got float16",
        ),
        ({"slot_table": torch.zeros(9).int()}, r"slot_table must be int32 \[\*, \*\] on cpu, got int32 \[9\]"),
        ({"table_rows": int32([[0]])}, r"table_rows must be int32\|int64 \[\*\] on cpu, got int32 \[1, 1\]"),
        ({"cached_lens": torch.tensor([5])}, r"cached_lens must be int32 \[1\] on cpu, got int64 \[1\]"),
        ({"q_offsets": torch.tensor([0, 3])}, r"q_offsets must be int32 \[2\] on cpu, got int64 \[2\]"),
        ({"candidate_lens": int32([1, 1])}, r"candidate_lens must be int32 \[1\] on cpu, got int32 \[2\]"),
        ({"out": torch.zeros(3, 4, 8).half()}, r"out must be float32 \[3, 4, 8\] on cpu, got float16"),
        ({"cached_lens": int32([1, 2])}, r"cached_lens must be int32 \[1\] on cpu, got int32 \[2\]"),
        ({"q_offsets": int32([3])}, r"q_offsets must be int32 \[2\] on cpu, got int32 \[1\]"),
        ({"candidate_lens": torch.tensor([2])}, r"candidate_lens must be int32 \[1\] on cpu, got int64 \[1\]"),
        ({"parents": torch.zeros(3).long()}, r"parents must be int32 \[3\] on cpu, got int64 \[3\] on cpu"),
        ({"parents": int32([-1, -1])}, r"parents must be int32 \[3\] on cpu, got int32 \[2\] on cpu"),
        ({"parents": int32([-1] * 3, "meta")}, r"parents must be int32 \[3\] on cpu, got int32 \[3\] on meta"),
        ({"parents": int32([-1] * 6)[::2]}, "parents must be contiguous in its last dimension"),
        ({"parents": [-1, -1, -1]}, r"parents must be a tensor int32 \[3\] on cpu, got list"),
        ({"out": torch.zeros(3, 4, 9)}, r"out must be float32 \[3, 4, 8\] on cpu, got float32 \[3, 4, 9\]"),
        ({"out": 1}, r"out must be a tensor float32 \[3, 4, 8\] on cpu, got int"),
        ({"plan": torch.zeros(3, 8)}, r"plan must be int32 \[2, 8\] on cpu, got float32 \[3, 8\]"),
        ({"plan": torch.zeros(3, 8).int()}, r"plan must be int32 \[2, 8\] on cpu, got int32 \[3, 8\]"),
        ({"counters": torch.zeros(9)}, r"counters must be int32 \[\*\] on cpu, got float32 \[9\]"),
        ({"counters": torch.zeros(3).int()}, r"counters must be int32 \[4 or more\], got int32 \[3\]"),
        ({"page_size": 0}, "page_size must be an int of at least 1, got 0"),
        ({"page_size": 1.0}, "page_size must be an int of at least 1, got float"),
        ({"page_size": True}, "page_size must be an int of at least 1, got bool"),
        ({"sm_scale": float("inf")}, "sm_scale must be a finite number or None, got inf"),
        ({"page_size": -1}, "page_size must be an int of at least 1, got -1"),
        ({"sm_scale": float("nan")}, "sm_scale must be a finite number or None, got nan"),
        ({"sm_scale": True}, "sm_scale must be a finite number or None, got bool"),
        ({"key_scales": torch.ones(2)}, "key_scales must be None unless k_cache is float8_e4m3fn, .* float32"),
        ({"value_scales": torch.ones(2)}, "value_scales must be None unless k_cache is float8_e4m3fn"),
        ({"k_cache": torch.zeros(9, 2, 8).to(E4M3)}, "v_cache must be float8_e4m3fn .*, got float32"),
        ({"v_cache": torch.zeros(9, 2, 8).to(E4M3)}, "v_cache must be float32 .*, got float8_e4m3fn"),
        ({"sm_scale": "1"}, "sm_scale must be a finite number or None, got str"),
        ({"backend": "cuda"}, "backend must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    arguments = vars(make_inputs([5], [1], [2], q_heads=4, kv_heads=2, head_dim=8))
    arguments |= {"k_cache": torch.zeros(9, 2, 8), "v_cache": torch.zeros(9, 2, 8)}
    with pytest.raises((ValueError, TypeError), match=message):
        value_tree_attention(**arguments | {"backend": "reference"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_scales": None}, r"key_scales must be a tensor float32 \[2\] on cpu, got NoneType"),
        ({"value_scales": None}, r"value_scales must be a tensor float32 \[2\] on cpu, got NoneType"),
        ({"key_scales": torch.ones(1)}, r"key_scales must be float32 \[2\] on cpu, got float32 \[1\]"),
        ({"value_scales": torch.ones(2).half()}, r"value_scales must be float32 \[2\] on cpu, got float16"),
    ],
)
def test_errors_of_scales_name_the_argument(changes, message):
    arguments = vars(make_inputs([5], [1], [2], q_heads=4, kv_heads=2, head_dim=8, e4m3=True))
    with pytest.raises((ValueError, TypeError), match=message):
        value_tree_attention(**arguments | {"backend": "reference"} | changes)


def test_the_kernels_refuse_strides_past_32_bits(device):
    inputs = make_inputs([5], [0], [1], device=device, head_dim=8)
    far = inputs.q.as_strided(inputs.q.shape, (MAX_STRIDE + 1, 8, 1))  # one token: no memory lies that far
    with pytest.raises(ValueError, match="q must have strides up to"):
        replace(inputs, q=far).run()
    with pytest.raises(ValueError, match="out must have strides up to"):
        inputs.run(out=far)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ({"head_dim": 8}, torch.float64, r"q must be float32\|bfloat16\|float16 .*, got float64"),
        ({"head_dim": 257}, torch.float32, "q must have a last dimension of 1 to 256 for backend 'triton', got 257"),
        ({"q_heads": 65, "head_dim": 8}, torch.float32, "at most 64 heads per head of k_new for backend 'triton'"),
        ({"head_dim": 0}, torch.float32, "q must have a last dimension of at least 1, got 0"),
    ],
)
def test_the_kernels_refuse_what_only_the_reference_takes(device, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        make_inputs([5], [1], [2], device=device, dtype=dtype, **shape).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_rows": torch.zeros(1)}, r"table_rows must be int32\|int64 \[\*\], got float32 \[1\]"),
        ({"cached_lens": int32([1, 2])}, r"cached_lens must be int32 \[1\] on cpu, got int32 \[2\]"),
        ({"q_offsets": int32([0])}, r"q_offsets must be int32 \[2\] on cpu, got int32 \[1\]"),
        ({"candidate_lens": torch.tensor([2])}, r"candidate_lens must be int32 \[1\] on cpu, got int64 \[1\]"),
        ({"total_tokens": -1}, "total_tokens must be an int from 0 to 2147483647, got -1"),
        ({"max_len": 2**31}, "max_len must be an int from 0 to 2147483647, got 2147483648"),
        ({"max_len": 1.0}, "max_len must be an int from 0 to 2147483647, got float"),
        ({"group": 65}, "group must be an int from 1 to 64, got 65"),
        ({"group": True}, "group must be an int from 1 to 64, got bool"),
        ({"backend": "cuda"}, "backend must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_errors_of_a_plan_name_the_argument(changes, message):
    tensors = dict(table_rows=int32([0]), cached_lens=int32([5]), q_offsets=int32([0, 3]), candidate_lens=int32([2]))
    sizes = dict(total_tokens=3, max_len=9, group=2)
    with pytest.raises((ValueError, TypeError), match=message):
        plan_attention(**tensors | sizes | changes)


@pytest.mark.parametrize(
    ("gpu", "version", "buffers", "refused"),
    [
        ("hip", "3.6.0", True, True),
        ("hip", "3.6.0", False, False),
        ("hip", "3.7.1", True, False),
        ("sm_90", "3.6.0", True, False),
    ],
)
def test_a_triton_that_cannot_compile_it_is_refused(monkeypatch, gpu, version, buffers, refused):
    monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", gpu)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", buffers)
    if refused:
        with pytest.raises(RuntimeError, match="set AMDGCN_USE_BUFFER_OPS=0, or take Triton"):
            ops._launch_config(64, torch.bfloat16)
    else:
        assert ops._launch_config(64, torch.bfloat16)["BLOCK_D"] == 64
