"""Value-tree attention: masks of the fork, splits and plans, and dependencies of candidates."""

import json
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import triton

from bench.launches import intercept_launches
from lenvm_kernels.fuzz.ops.value_tree_attention import Inputs, int32, make_inputs
from lenvm_kernels.ops import value_tree_attention as ops
from lenvm_kernels.ops.value_tree_attention import make_plan, num_counters, plan_shape, value_tree_attention
from lenvm_kernels.ops.value_tree_attention import plan as plans
from lenvm_kernels.reference.lay_out import attention_plan
from lenvm_kernels.reference.value_tree_attention import tree_mask
from tests.helpers.cases import assert_matches, assert_same

SPLIT_LEN, MAX_SPLITS, PLAN_BLOCK = plans.SPLIT_LEN.value, plans.MAX_SPLITS.value, plans.PLAN_BLOCK.value
ONE_SPLIT = SPLIT_LEN + plans.SPLIT_SLACK.value  # largest number of cached tokens without a split
TILE = ops.BLOCK_M.value // 3  # tokens per tile if three query heads share a key head
GOLDEN = Path(__file__).parents[1] / "golden" / "tree_mask.jsonl"


def check_against_reference(inputs: Inputs, **keywords) -> None:
    rows = int(inputs.q_offsets[-1])  # without padding
    found, expected = inputs.run(**keywords), inputs.expected(**keywords)
    assert_matches(found[:rows], expected[:rows], "value_tree_attention", inputs.q.dtype)


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines())
def test_masks_equal_the_masks_of_the_fork(line):
    golden = json.loads(line)
    lens = (golden[name] for name in ("prefix_lens", "cached_prefix_lens", "candidate_lens"))
    bits = []
    for total, cached, candidates in zip(*lens, strict=True):
        bits += tree_mask(cached, total - cached, candidates, [], torch.device("cpu")).flatten().int().tolist()
    assert "".join(map(str, bits)) == golden["mask"]


def items_of(plan: torch.Tensor) -> list[list[int]]:
    return plan[1 : 1 + int(plan[0, 0])].tolist()


def plan_of(inputs: Inputs) -> torch.Tensor:
    group, max_len = inputs.q.shape[1] // inputs.k_new.shape[1], inputs.slot_table.shape[1] * inputs.page_size
    requests = (inputs.table_rows, inputs.cached_lens, inputs.q_offsets, inputs.candidate_lens)
    return make_plan(*requests, total_tokens=len(inputs.q), group=group, max_len=max_len)


@pytest.mark.parametrize("splits", [2, 3, MAX_SPLITS])
def test_shortest_and_longest_requests_per_number_of_splits(device, splits):
    """Beyond the maximum number, splits become longer. Only the first tiles of a request are split."""
    shortest = ONE_SPLIT + (splits - 2) * SPLIT_LEN + 1
    longest = shortest + SPLIT_LEN - 1 if splits < MAX_SPLITS else shortest + 3 * SPLIT_LEN
    sizes = dict(q_heads=3, head_dim=16, dtype=torch.float16, page_size=16)
    inputs = make_inputs([shortest, longest, ONE_SPLIT], [1, 2 * TILE, 0], [3, 4, 1], device=device, **sizes)
    inputs = inputs.with_trees([[-1, 0, 0], [-1, 0, 1, -1], [-1]])
    check_against_reference(inputs)
    places = [(request, tile, split) for request, tile in ((0, 0), (1, 0), (1, 1)) for split in range(splits)]
    assert [(item[0], *item[6:]) for item in items_of(plan_of(inputs))] == [*places, (1, 2, 0), (2, 0, 0)]


def test_result_does_not_depend_on_the_merging_program(device, monkeypatch):
    """A different split arrives last with different numbers of programs and orders of items."""
    sizes = dict(q_heads=6, kv_heads=2, head_dim=24, dtype=torch.float16)
    inputs = make_inputs([ONE_SPLIT + 1, 40, ONE_SPLIT + 3 * SPLIT_LEN], [1, 1, 0], [4, 2, 5], device=device, **sizes)
    counters = torch.zeros(num_counters(3, 2) + 3, dtype=torch.int32, device=device)
    expected, plan = inputs.run(counters=counters), plan_of(inputs)
    turned = plan.clone()
    turned[1 : 1 + int(plan[0, 0])] = plan[1 : 1 + int(plan[0, 0])].flip(0)
    for programs, other in ((2, plan), (2, turned), (6, turned)):
        monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "MAX_PROGRAMS", programs)
        assert torch.equal(inputs.run(plan=other, counters=counters), expected)
        assert not counters.any()


def test_plan_of_more_requests_than_a_block_agrees_with_the_reference(device):
    """Equal items in equal order, within the plan's shape. The laws cover other plans."""
    count, group = PLAN_BLOCK + 5, 64
    cached, delta = ([7 * i % 2000 for i in range(count)], [i % 3 for i in range(count)])
    q_offsets = int32([0, *accumulate(n + 2 for n in delta)], device)
    table_rows = torch.arange(count, device=device).flip(0) + 5
    arguments = table_rows, int32(cached, device), q_offsets, int32([2] * count, device)
    total_tokens, max_len = int(q_offsets[-1]), max(cached)
    plan = make_plan(*arguments, total_tokens=total_tokens, group=group, max_len=max_len)
    assert plan.shape == plan_shape(total_tokens, count, group, max_len)
    expected = attention_plan(*arguments, ops.BLOCK_M.value // group, plans.SPLIT_TILES.value, plans.most_splits)
    assert items_of(plan) == items_of(expected)


def test_cached_tokens_beyond_the_slot_table_do_not_affect_other_requests(device):
    """The first request has more cached tokens than its table row, and would have more splits than the plan has room
    for. The results of the others and the counters are the same as without it, also in later calls."""
    sizes = dict(q_heads=3, head_dim=16, device=device)
    inputs = make_inputs([20, 700, 3], [1, 1, 1], [1, 2, 0], longest=698, **sizes)
    assert inputs.slot_table.shape[1] == 702
    inputs.slot_table[inputs.table_rows[0]] = inputs.slot_table[inputs.table_rows[1]].clamp(max=len(inputs.k_cache) - 1)
    counters = torch.zeros(num_counters(3, 1), dtype=torch.int32, device=device)
    expected = inputs.run(counters=counters)
    broken = replace(inputs, cached_lens=int32([1300, 700, 3], device))
    for run in (broken, broken, inputs):
        assert torch.equal(run.run(counters=counters)[2:], expected[2:])
        assert not counters.any()
    check_against_reference(broken)


def test_roots_and_no_parents_are_bitwise_identical(device):
    inputs = make_inputs([0, ONE_SPLIT + 9, 30], [2, 2, 17], [4, 9, 3], device=device, q_heads=3)
    inputs.q[0] = -100 * inputs.k_new[0]  # this delta token attends only to itself, and exp2 of its score is 0 in fp32
    roots = inputs.with_trees([[-1] * n for n in inputs.candidate_lens.tolist()])
    assert torch.equal(roots.run(), inputs.run())


@pytest.mark.parametrize("cached", [0, 45, ONE_SPLIT + 45])
def test_candidates_depend_only_on_their_ancestors(device, cached):
    """Results are bitwise identical alone with the ancestors, at another position, and with other candidates."""
    tree = [-1, 0, 1, -1, 0, 4, 1, 2, 5, -1, 7, 10]
    inputs = make_inputs([cached, 30], [2, 1], [12, 3], device=device, q_heads=3, dtype=torch.float16)
    inputs = inputs.with_trees([tree, [-1, 0, 1]])
    result = inputs.run()
    for path in ([3], [0, 1, 6], [0, 4, 5, 8], [0, 1, 2, 7, 10, 11]):
        rows = [0, 1, *(2 + candidate for candidate in path)]
        tensors = {name: getattr(inputs, name)[rows] for name in ("q", "k_new", "v_new")}
        tensors |= {name: getattr(inputs, name)[:1] for name in ("table_rows", "cached_lens")}
        tensors |= dict(q_offsets=int32([0, len(rows)], device), candidate_lens=int32([len(path)], device))
        alone = replace(inputs, **tensors).with_trees([[-1, *range(len(path) - 1)]])
        assert torch.equal(alone.run(), result[rows])

        others = [row for row in range(14) if row not in rows]
        changed = replace(inputs, **{x: getattr(inputs, x).clone() for x in ("q", "k_new", "v_new", "parents")})
        for x in (changed.q, changed.k_new, changed.v_new):
            x[others] = 3.0 - x[others]
        changed.parents[others] = 2
        changed_result = changed.run()
        assert torch.equal(changed_result[rows], result[rows])
        assert not torch.isclose(changed_result[others], result[others]).all(-1).any()


def test_deeper_branch_of_another_tree_keeps_the_sign_of_zero(device):
    inputs = make_inputs([0], [0], [3], device=device, head_dim=16)
    inputs.v_new[0] = -0.0
    alone, beside_a_branch = (inputs.with_trees([tree]).run()[0] for tree in ([-1, -1, -1], [-1, -1, 1]))
    assert torch.equal(alone.signbit(), beside_a_branch.signbit()) and alone.signbit().all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_in_cache_gives_nan(device, backend, name):
    inputs = make_inputs([70, 5], [1, 1], [2, 1], device=device, dtype=torch.float16)
    healthy = inputs.run(backend)
    getattr(inputs, name)[inputs.slot_table[inputs.table_rows[0], 66], 0] = float("nan")
    result = inputs.run(backend)
    assert result[:3].isnan().all()
    assert_same(result[3:], healthy[3:], "value_tree_attention", backend)


@pytest.mark.parametrize(("sign", "cached"), [(-1, 0), (1, 0), (-1, 5), (1, 5), (-1, ONE_SPLIT + 5)])
def test_large_scores_with_trees(device, sign, cached):
    """exp2 of every score is 0 or infinite in fp32. Inputs are multiples of 1/8, so scores are exact."""
    inputs = make_inputs([cached, 2], [3, 2], [5, 3], device=device, head_dim=16)
    inputs = inputs.with_trees([[-1, 0, 1, -1, 3], [-1, 0, 0]])
    centres = {"q": 6.0, "k_new": 8.0, "k_cache": 8.0}
    near = {name: x + (getattr(inputs, name) * 4).round().clamp(-4, 4) / 8 for name, x in centres.items()}
    inputs = replace(inputs, **near | {"q": sign * near["q"]})
    assert sign * float(inputs.q[0, 0] @ inputs.k_new[0, 0]) / 4 > 150
    check_against_reference(inputs)


def test_triton_3_6_is_rejected_on_amd_gpus(device, monkeypatch):
    """Triton 3.6 cannot compile buffer operations. It is accepted if they are disabled."""
    inputs = make_inputs([5], [1], [2], device=device)
    for gpu, version, buffers in (("hip", "3.6.0", False), ("hip", "3.7.1", True), ("sm_90", "3.6.0", True)):
        monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", gpu)
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", buffers)
        with intercept_launches(lambda kernel, launch: None):
            inputs.run()
    monkeypatch.setattr("lenvm_kernels.ops._common.ARCHITECTURE", "hip")
    with pytest.raises(RuntimeError, match="set AMDGCN_USE_BUFFER_OPS=0, or install Triton"):
        inputs.run()
