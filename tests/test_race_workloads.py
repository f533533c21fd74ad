"""Every kernel of the package under the race checker: each operator, and whole guided steps.

``make races`` runs them; ``make test`` leaves them out (the marker ``races``). Rows, strides, lengths and slots differ
from each other everywhere: a kernel that mixes them up touches what belongs to another program.
"""

import os
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from bench.launches import kernels
from bench.models import make_model
from lenvm_kernels.fuzz.ops.value_head import square_sums_of
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops import ragged_layout as ragged_layout_module
from lenvm_kernels.ops import ragged_linear as linear_op
from lenvm_kernels.ops import value_head as value_head_op
from lenvm_kernels.ops import value_tree_attention as attention_op
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.catch_up import catch_up, empty_delta
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, expand_drafts
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.types import Candidates, CandidateTrees, DeltaTokens, ScoredCandidates, StepRequests
from lenvm_kernels.value_model import ValueModelConfig
from tests.helpers.drafts import random_drafts
from tests.helpers.engine import Engine
from tests.helpers.padded_step import PaddedStep
from tests.helpers.races import check_races

pytestmark = [
    pytest.mark.races,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="here the kernels are compiled"),
]

WORKLOADS = {}  # by name: the workload, and the kernels it is there for


def workload(*kernels, **cases):
    """Registers a function of a case, once for each of ``cases``, as what covers ``kernels``."""

    def register(function):
        for name, case in cases.items():
            WORKLOADS[f"{function.__name__}: {name}"] = lambda case=case: function(*case), set(kernels)
        return function

    return register


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def padded(tensor, columns):
    """The same values with more memory between the rows of the last dimension."""
    storage = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + columns, dtype=tensor.dtype)
    view = storage[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


@workload(
    "_scan_kernel",
    "_filter_kernel",
    logits=(5, 4, 5000, torch.float32, True),
    many_rows=(17, 2, 40_000, torch.bfloat16, True),
    probabilities=(3, 64, 9000, torch.float16, False),
    one_column=(2, 1, 1, torch.float32, True),
)
def topk(rows, k, vocab, dtype, is_logits):
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, vocab, generator=generator) * 4
    scores = scores if is_logits else torch.softmax(scores, 1)
    scores[0, vocab // 2] = torch.nan  # a broken row beside sound ones
    random = lambda: torch.rand(rows, generator=generator)  # noqa: E731
    found = topk_candidates(
        padded(scores.to(dtype), 3),
        top_k=torch.randint(0, 2 * k, (rows,), generator=generator, dtype=torch.int32),
        top_p=random() * 0.5 + 0.5,
        min_p=random() * 0.01,
        max_candidates=k,
        temperature=random() + 0.1 if is_logits else None,
        is_logits=is_logits,
        entropy_threshold=random(),
        guided=torch.arange(rows) % 4 != 2,
        vocab_mask=torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), generator=generator, dtype=torch.int32),
        end_token_ids=padded(torch.randint(-1, vocab, (rows + 2, 3), generator=generator, dtype=torch.int32), 2),
        min_end_prob=torch.rand(rows + 2, generator=generator) * 1e-3,
        least_share=torch.arange(rows + 2) * 0.01,
        due_length=torch.arange(rows + 2) * 4.0,
        generated=torch.arange(rows, dtype=torch.int32) * 5,
        text_breaks=(torch.arange(vocab) % 3).to(torch.int8),
        last_tokens=torch.arange(rows) - 1,
        table_rows=torch.arange(rows).flip(0) + 1,
        backend="triton",
    )
    return [found.token_ids, found.probs, found.counts, found.status, found.lost_mass]


def candidates_of(rows, k, vocab, generator):
    """Candidates with 0 to K tokens a row in no order, two of which are end-of-sequence ids, and every status."""
    counts = torch.randint(0, k + 1, (rows,), generator=generator, dtype=torch.int32)
    is_candidate = torch.arange(k) < counts[:, None]
    tokens = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)]).int()
    tokens[:, 0] = torch.arange(rows) % 5
    probs = torch.rand(rows, k, generator=generator).where(is_candidate, torch.tensor(0.0))
    return Candidates(
        token_ids=tokens.where(is_candidate, -1),
        probs=probs / probs.sum(1, keepdim=True).clamp(min=1),
        counts=counts,
        status=torch.arange(rows).remainder(4).to(torch.int8),
        lost_mass=torch.zeros(rows).index_fill(0, torch.tensor([rows - 1]), torch.nan),
    )


GUIDANCE = [
    {"scale": 0.6},
    {"target_length": 12},
    {"target_length": 12, "op": "soft"},
    None,
    {"target_length": 9, "op": "ge"},
    {"mode": "value_bias", "scale": 2.0},
    {"mode": "exp", "scale": 2.0},
]


@workload(
    "_reweight_kernel",
    one_tile=(5, 8, None),
    many_tiles=(70, 16, None),
    one_candidate=(3, 1, None),
)
@workload(
    "_reweight_scatter_kernel",
    one_slice=(7, 8, torch.float32),
    slices=(5, 64, torch.bfloat16),
    half=(4, 4, torch.float16),
)
def reweight(rows, k, dtype):
    generator = torch.Generator().manual_seed(rows)
    vocab = 40_000 if k == 64 else 5000
    candidates = candidates_of(rows, k, vocab, generator)
    params = [None if g is None else parse_guidance(g) for g in (GUIDANCE[i % 7] for i in range(rows + 2))]
    table = GuidanceTable.from_params(params, [{i % 5, 17} for i in range(rows + 2)], "cpu")
    value_logits = torch.randn(rows, k, generator=generator)
    value_logits[rows // 2, 0] = torch.nan
    dense = None if dtype is None else padded(torch.rand(rows, vocab, generator=generator).to(dtype), 9)
    out = reweight_scatter(
        candidates,
        padded(value_logits, 5),
        table,
        table_rows=torch.randperm(rows + 2, generator=generator)[:rows],
        generated=torch.randint(0, 20, (rows,), generator=generator, dtype=torch.int32),
        probs=dense,
        backend="triton",
    )
    return [out, table.faults] + ([] if dense is None else [dense])


@workload("_sample_candidates_kernel", one_program=(7, 8), programs=(70, 2), many_slots=(33, 64))
def sample(rows, k):
    generator = torch.Generator().manual_seed(rows)
    candidates = candidates_of(rows, k, 1000, generator)
    tokens = sample_candidates(
        candidates,
        padded(candidates.probs, 3),
        torch.randint(0, 2**40, (rows,), generator=generator),
        torch.randint(0, 999, (rows,), generator=generator, dtype=torch.int32),
        temperature=torch.rand(rows, generator=generator) - 0.1,
        backend="triton",
    )
    return [tokens]


@workload(
    "_ragged_layout_kernel",
    mixed=([1, 0, 3, 2], [8, 0, 5, 2], 9, 8),
    empty=([0, 0], [0, 0], 1, 8),
    prompt=([3, 210, 1], [0, 0, 0], 214, 0),
    broken=([-3, 200], [1, 99], 201, 4),
    several_tiles=([i % 3 * 9 for i in range(40)], [i % 2 for i in range(40)], 360, 1),
)
@mock.patch.object(ragged_layout_module, "TILE", 16)
def layout(lens, counts, deltas, k):
    requests = len(lens)
    starts = i32([sum(max(n, 0) for n in lens[:i]) for i in range(requests)])
    laid_out = ragged_layout(
        torch.arange(deltas, dtype=torch.int32),
        torch.arange(deltas).flip(0) + 50,
        starts,
        i32(lens),
        padded(torch.arange(requests * k, dtype=torch.int32).view(requests, k), 3),
        i32(counts),
        i32([7 * i for i in range(requests)]),
        backend="triton",
    )
    return [x for x in laid_out if x is not None]


@workload(
    "_square_sums_kernel",
    "_ragged_linear_kernel",
    norm=(150, 131, 400, 200, False, True, torch.float32),
    swiglu=(70, 7, 100, 90, True, True, torch.bfloat16),
    nothing=(9, 0, 64, 64, False, True, torch.float32),
)
@workload(
    "_ragged_linear_kernel",
    splits=(140, 131, 4096, 80, False, False, torch.bfloat16),
    few_rows=(5, 9, 4864, 66, False, False, torch.float16),
    e4m3=(140, 131, 4096, 80, False, False, torch.bfloat16, True),
    e4m3_swiglu=(70, 7, 150, 90, True, False, torch.float16, True),
    e4m3_few_rows=(5, 9, 4864, 66, False, False, torch.float16, True),
)
def linear(tokens, live, size, outputs, swiglu, norm, dtype, e4m3=False):
    generator = torch.Generator().manual_seed(tokens)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    columns = outputs * (2 if swiglu else 1)
    square_sums = padded(torch.zeros(-(-outputs // 64), tokens), 3)
    counters = torch.zeros(linear_op.num_counters(tokens, columns, size, swiglu) + 1, dtype=torch.int32)
    x, weight, scales = padded(random(tokens, size), 3), random(columns, size) / size**0.5, None
    if e4m3:
        weight, scales = quantize_weight(weight)
        wider = torch.zeros(columns, size + 16, dtype=weight.dtype)
        wider[:, :size] = weight
        weight = wider[:, :size]
    y = ragged_linear(
        x,
        weight if e4m3 else padded(weight, 16),
        random(columns),
        weight_scales=scales,
        num_rows=i32([live]),
        norm_eps=1e-6 if norm else None,
        swiglu=swiglu,
        residual=padded(random(tokens, outputs), 5),
        square_sums_out=square_sums,
        counters=counters,
        backend="triton",
    )
    again = ragged_linear(
        y, random(70, outputs), num_rows=i32([live]), norm_eps=1e-6, square_sums=square_sums, backend="triton"
    )
    live = min(live, tokens)  # the other rows are not computed
    return [y[:live], again[:live], square_sums, counters]


@workload(
    "_value_head_kernel",
    all_tokens=(90, 96, None, torch.float32, True),
    some=(40, 130, 150, torch.bfloat16, False),
    many=(40, 70, 300, torch.float16, False),
    only_padding=(5, 64, 0, torch.float16, True),
)
def head(tokens, size, outputs, dtype, norm):
    generator = torch.Generator().manual_seed(tokens)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    rows, targets = None, None
    if outputs is not None:  # in no order, with rows beyond either end, and a block of nothing else
        rows = torch.randint(-2, tokens + 2, (outputs,), generator=generator) if outputs else torch.tensor([-1, tokens])
        rows[64:192] = -1
        targets = torch.randperm(len(rows), generator=generator)
    hidden = random(tokens, size)
    counters = torch.zeros(value_head_op.num_counters(outputs or tokens) + 1, dtype=torch.int32)[1:]
    options = dict(norm_weight=random(size)) if norm else dict(square_sums=padded(square_sums_of(hidden), 3))
    logits = value_head(
        padded(hidden, 3),
        padded(random(size, size) / size**0.5, 8),
        random(size),
        random(1, size),
        random(1),
        token_rows=rows,
        targets=targets,
        counters=counters,
        **options,
        backend="triton",
    )
    return [logits, counters]


def scales_of(cache_dtype, *shape):
    """Arguments of a cache in e4m3: scales in a slice of longer rows."""
    if cache_dtype is None:
        return {}
    keys, values = (torch.arange(1.0, 10).exp2()[: shape[-1] + i].expand(*shape[:-1], -1) for i in (1, 2))
    return dict(key_scales=keys.clone()[..., 1:] / 64, value_scales=values.clone()[..., 2:] / 64)


@workload(
    "_rope_cache_kernel",
    norm=(12, 9, 3, 64, True, torch.float32, None),
    wide=(5, 12, 2, 128, False, torch.bfloat16, None),
    odd=(70, 3, 1, 6, True, torch.float16, None),
    e4m3=(11, 5, 3, 24, True, torch.bfloat16, E4M3),
)
def rope(tokens, heads, kv_heads, head_dim, norm, dtype, cache_dtype):
    generator = torch.Generator().manual_seed(tokens)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    slots = torch.randperm(2 * tokens, generator=generator)[:tokens]
    slots[1::3] = -1  # candidates are kept in no slot
    k_cache = padded(torch.zeros(2 * tokens, kv_heads, head_dim, dtype=cache_dtype or dtype), 4)
    v_cache = torch.zeros(kv_heads, 2 * tokens, head_dim, dtype=cache_dtype or dtype).transpose(0, 1)
    buffers = [torch.zeros(tokens + 3, kv_heads, head_dim, dtype=dtype)[3:] for _ in range(2)]
    live = tokens - 2
    results = rope_cache(
        padded(random(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype), 5),
        random(tokens, head_dim // 2),
        random(tokens, head_dim // 2),
        slots,
        k_cache,
        v_cache,
        num_heads=heads,
        qk_norm_weight=random(heads + kv_heads, head_dim).to(dtype) if norm else None,
        num_rows=i32([live]),
        k_out=buffers[0] if norm else None,
        v_out=buffers[1] if norm else None,
        **scales_of(cache_dtype, kv_heads),
        backend="triton",
    )
    return [*(result[:live] for result in results), k_cache, v_cache]


@workload(
    "_plan_attention_kernel",
    "_value_tree_attention_kernel",
    pages=(2, 2, 32, 4, False, torch.float32, None),
    group_of_seven=(7, 1, 24, 1, False, torch.bfloat16, None),
    trees=(3, 2, 64, 16, True, torch.float16, None),
    e4m3=(3, 2, 24, 4, True, torch.bfloat16, E4M3),
)
def attention(group, kv_heads, head_dim, page_size, has_parents, dtype, cache_dtype):
    generator = torch.Generator().manual_seed(group)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    deltas, counts, cached = [1, 0, 0, 37, 0, 2], [5, 0, 1, 3, 9, 0], [1670, 3, 641, 0, 660, 40]
    lens = torch.tensor(deltas) + torch.tensor(counts)
    tokens, pages = int(lens.sum()) + 5, -(-1680 // page_size)
    slot_table = torch.randperm(8 * pages, generator=generator, dtype=torch.int32).view(8, pages)
    slots = 8 * pages * page_size
    parents = None
    if has_parents:
        parents = torch.arange(tokens, dtype=torch.int32) - torch.randint(1, 4, (tokens,), generator=generator).int()
    counters = torch.zeros(attention_op.num_counters(len(cached), kv_heads) + 1, dtype=torch.int32)
    out = value_tree_attention(
        padded(random(tokens, kv_heads * group, head_dim), 2),
        random(tokens, kv_heads, head_dim),
        random(kv_heads, tokens, head_dim).transpose(0, 1),
        random(slots, kv_heads, head_dim).to(cache_dtype or dtype),
        padded(random(slots, kv_heads, head_dim).to(cache_dtype or dtype), 3),
        padded(slot_table, 1),
        torch.tensor([6, 1, 7, 0, 3, 2]),
        i32(cached),
        i32([0, *lens.cumsum(0).tolist()]),
        i32(counts),
        parents=parents,
        page_size=page_size,
        out=padded(torch.zeros(tokens, kv_heads * group, head_dim, dtype=dtype), 7),
        counters=counters,
        **scales_of(cache_dtype, kv_heads),
        backend="triton",
    )
    assert not counters.any()
    return [out]


@triton.jit
def _arrives_without_barrier(counter_ptr, arrivals):
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return is_last


@triton.jit
def _arrives_relaxed(counter_ptr, arrivals):
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="relaxed") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return is_last


@pytest.mark.parametrize("faulty", [_arrives_without_barrier, _arrives_relaxed])
def test_splits_merged_without_order_are_found(faulty, monkeypatch):
    monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "arrives_last", faulty)
    run, _ = WORKLOADS["attention: pages"]
    with pytest.raises(AssertionError, match=r"store in line .* and load in line .* touch the same bytes from two"):
        check_races(run)


@workload(
    "_commit_winner_kernel",
    layers=(3, 48, torch.float32, None, 1),
    wide=(2, 1100, torch.bfloat16, None, 1),
    e4m3=(5, 24, torch.bfloat16, E4M3, 1),
    tree=(4, 48, torch.float32, None, 3),
)
def commit(layers, head_dim, dtype, cache_dtype, new):
    generator = torch.Generator().manual_seed(layers)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    k_cache, k_last = random(layers, 80, 2, head_dim).to(cache_dtype or dtype), random(layers, 20, 2, head_dim)
    v_cache = random(80, layers, 2, head_dim).to(cache_dtype or dtype).transpose(0, 1)
    v_last = random(20, layers, 2, head_dim).transpose(0, 1)
    ids = torch.randint(0, 6, (4, 8), generator=generator, dtype=torch.int32)  # tokens twice in a row
    last_rows, tokens, new_lens = i32([2, 0, 3, 1, -1, 9]), i32([1, 2, 3, 4, 5, 1]), i32([1] * 6)
    options = {}
    if new > 1:  # paths down a tree, some of which end early
        tokens, new_lens = padded(ids[last_rows.clamp(0, 3)][:, [0, 1, 3]], 2), i32([3, 2, 3, 0, 3, 1])
        options = dict(new_lens=new_lens, candidate_parents=padded(i32([[-1, 0, 0, 1, 1, 2, 3, 4]] * 4), 2))
    committed = commit_winner(
        k_cache,
        v_cache,
        k_last,
        v_last,
        padded(ids, 3),
        padded(torch.randint(-1, 22, (4, 8), generator=generator), 1),
        i32([9, 9, 8, 9]),
        last_rows,
        tokens,
        i32([8, 9, 9, 9, 9, 9]) + new_lens - 1,
        padded(torch.randperm(48, generator=generator).int().view(8, 6) - 1, 3),  # a page of -1, and some beyond
        i32([4, 7, 0, 2, 5, 1]),
        page_size=2,
        **options,
        **scales_of(cache_dtype, layers, 2),
        backend="triton",
    )
    assert committed.max() == new
    return [committed, k_cache, v_cache]


@workload(
    "_gather_requests_kernel",
    first=(3, 3, 1, None, 1),
    padded=(45, 70, 1, 16, 1),
    all_there=(64, 64, 5, 3, 3),
    one_held=(40, 41, 3, 1, 5),
)
def gather(rows, out_rows, new, held, width):
    """Twice with history, the second time in another order. Some requests lack tokens, and lose their guidance."""
    generator = torch.Generator().manual_seed(rows)
    table = GuidanceTable(rows + 5, "cpu")
    for column in (table.mode, table.return_values, table.prompt_len, table.seed, table.value_stride):
        column.copy_(torch.randint(0, 2, (rows + 5,), generator=generator))
    history, device = None, torch.device("cpu")
    if held is not None:
        history = empty_history(rows + 5, held, device)
        history.step.fill_(5)
        for column in (history.places, history.steps):
            column.copy_(torch.randint(0, 9, (rows + 5,), generator=generator))
        history.told_lens.copy_(torch.randint(0, 999, (rows + 5,), generator=generator))
        history.cached_lens.copy_(history.told_lens - torch.arange(rows + 5) % (held + 2))
    results = []
    for _ in range(1 if history is None else 2):
        out = StepRequests(*(x[3:] for x in empty_requests(out_rows + 3, device, width)))
        table_rows = torch.randperm(rows + 5, generator=generator)[:rows]
        new_lens = torch.randint(0, new + 1, (rows,), generator=generator, dtype=torch.int32)
        lengths = torch.randint(1, 999, (rows,), generator=generator, dtype=torch.int32)
        if history is not None:  # the others have a gap
            is_told = torch.arange(rows) % 5 != 2
            lengths = torch.where(is_told, history.told_lens[table_rows] + new_lens, lengths)
        tokens = torch.randint(0, 999, (rows, new), generator=generator)
        results += gather_requests(
            table,
            tokens[:, 0].contiguous() if history is None else padded(tokens, 2),
            table_rows,
            lengths,
            new_lens=None if history is None else new_lens,
            active=None if history is None else torch.rand(rows, generator=generator) < 0.8,
            history=history,
            padding_row=2,
            out=out,
            backend="triton",
        )
        if history is None:  # these are not written
            results = [x for x in results if x is not out.places and x is not out.cached_lens]
        else:
            history.step.add_(1)
    if history is not None:
        results += history
        assert table.faults.any()
    return [*results, table.faults]


@workload(
    "_catch_up_kernel",
    one=(1, 1, 1, 1, False),
    some=(45, 5, 1, 4, True),
    padded=(33, 16, 40, 16, True),
)
def catch_up_requests(rows, held, padding, page_size, has_committed):
    """Requests with nothing, some and too many tokens missing, in no order in the tables; some do not exist."""
    generator = torch.Generator().manual_seed(rows)
    device, table_size, total = torch.device("cpu"), rows + 4, rows + padding
    draw = lambda low, high: torch.randint(low, high, (rows,), generator=generator, dtype=torch.int32)  # noqa: E731
    requests, history = empty_requests(total, device), empty_history(table_size, held, device)
    for x in requests:
        x.zero_()
    requests.positions.fill_(-1)
    requests.table_rows.fill_(table_size - 1)
    requests.positions[:rows] = draw(0, 70)
    requests.table_rows[:rows] = torch.randperm(table_size - 1, generator=generator)[:rows]
    requests.guided[:rows] = draw(0, 4) > 0
    requests.wants_length[:rows] = draw(0, 2) > 0
    missing = draw(-1, held + 1)
    requests.cached_lens[:rows] = (requests.positions[:rows] + 1 - missing).clamp(min=0)
    requests.new_lens[:rows] = torch.where(draw(0, 2) > 0, missing.clamp(min=0), 1)
    history.tokens.copy_(torch.randint(0, 999, history.tokens.shape, generator=generator))
    pages = torch.randint(0, 99, (table_size - 1, 70), generator=generator, dtype=torch.int32)
    counts, committed = i32([0] * total), i32([0] * total)
    counts[:rows], committed[:rows] = draw(0, 2), torch.minimum(draw(0, 3), requests.new_lens[:rows])
    out = empty_delta(total + 3, held, device)
    delta = catch_up(
        history,
        requests,
        counts,
        padded(pages, 5),
        committed=committed if has_committed else None,
        page_size=page_size,
        out=DeltaTokens(*(x[3:] for x in out)),
        backend="triton",
    )
    return [*delta, history.cached_lens]


@workload("_select_scored_kernel", one=(1, 1, 1, False), padded=(45, 70, 8, True), wide=(33, 33, 64, True))
def select(rows, out_rows, k, has_options):
    generator = torch.Generator().manual_seed(rows)
    requests = empty_requests(out_rows, torch.device("cpu"))
    for x in (requests.due, requests.wants_length):  # those of requests that do not exist are not written
        x[:rows] = torch.rand(rows, generator=generator) < 0.5
    requests.positions[:rows] = torch.arange(rows, dtype=torch.int32) * 3
    requests.table_rows[:rows] = torch.randperm(rows + 2, generator=generator)[:rows]
    eos_token_ids = padded(torch.randint(-2, 99, (rows + 2, 3), generator=generator, dtype=torch.int32), 2)
    step = torch.ones(1, dtype=torch.int64)
    out = empty_scored(out_rows + 3, k, torch.device("cpu"))
    options = dict(
        drawn=torch.randint(-2, 9, (rows,), generator=generator, dtype=torch.int32),
        sample=True,
        score_all=True,
        step=step,
        out=ScoredCandidates(*(x[3:] for x in out)),
    )
    candidates = candidates_of(rows, k, 99, generator)
    scored = select_scored(candidates, requests, eos_token_ids, **(options if has_options else {}), backend="triton")
    return [*scored, candidates.status, step]


@workload(
    "_embed_tokens_kernel",
    all_there=(5, 5, 64, 16, 3, torch.float32),
    some=(40, 33, 200, 5, 0, torch.bfloat16),
    several_blocks=(4, 3, 4200, 48, 16, torch.float16),
    nothing=(3, 0, 64, 1, 0, torch.float32),
)
def embed(tokens, live, size, half, row_padding, dtype):
    generator = torch.Generator().manual_seed(tokens)
    ids, positions = (torch.empty(tokens, dtype=torch.int64) for _ in range(2))  # only those that are there have any
    ids[:live] = torch.randint(-2, 22, (live,), generator=generator)
    positions[:live] = torch.randint(0, 999, (live,), generator=generator)
    embedding = padded(torch.randn(20, size, generator=generator).to(dtype), row_padding)
    embedded = embed_tokens(ids, positions, embedding, torch.ones(half), num_rows=i32([live]), backend="triton")
    return [x[:, :live] if x is embedded.square_sums else x[:live] for x in embedded]


@workload("_ragged_layout_kernel", branches=(7, 6, 2), long=(3, 64, 1), one=(1, 1, 4))
@mock.patch.object(ragged_layout_module, "TILE", 16)
def tree_layout(requests, k, delta_len):
    """Trees with parents that are none, some of them shorter than others."""
    generator = torch.Generator().manual_seed(k)
    parents = torch.randint(-2, k + 1, (requests, k), generator=generator, dtype=torch.int32)
    parents[0] = torch.arange(k) - 1
    deltas = requests * delta_len + 2
    laid_out = ragged_layout(
        torch.arange(deltas),
        torch.arange(deltas).flip(0) + 50,
        i32([delta_len * i for i in range(requests)]).flip(0),
        i32([delta_len - i % 2 for i in range(requests)]),
        padded(torch.arange(requests * k, dtype=torch.int32).view(requests, k), 3),
        i32([k - i % 3 for i in range(requests)]),
        i32([7 * i for i in range(requests)]),
        candidate_parents=padded(parents, 2),
        backend="triton",
    )
    return list(laid_out)


@workload("_expand_drafts_kernel", one=(1, 1, 1), padded=(19, 9, 5), no_drafts=(10, 0, 3), many=(17, 17, 9))
def expand(rows, with_drafts, width):
    """The rows of the drafts are apart; the results are in slices."""
    generator = torch.Generator().manual_seed(rows)
    requests = empty_requests(rows, torch.device("cpu"))
    for name in NODE_FIELDS:
        x = getattr(requests, name)
        x.copy_(torch.randint(0, 2 if x.dtype == torch.bool else 999, (rows,), generator=generator))
    out = {name: torch.empty(rows * (1 + width) + 3, dtype=dtype)[3:] for name, dtype in NODE_FIELDS.items()}
    drafts = random_drafts(with_drafts, width, seed=rows)
    nodes = expand_drafts(requests, drafts, out=requests._replace(**out), backend="triton")
    return [getattr(nodes, name) for name in NODE_FIELDS]


@workload("_pack_drafts_kernel", one=(1, 1, 1, 1), padded=(7, 5, 5, 8), no_drafts=(4, 0, 3, 2), many=(3, 3, 9, 64))
def pack(rows, with_drafts, width, k):
    """Candidates of some nodes that are there, among them drafts; nothing is scored of every third request."""
    generator = torch.Generator().manual_seed(rows)
    drafts, nodes = random_drafts(with_drafts, width, seed=rows, tokens=k + 2), 1 + width
    counts = torch.randint(0, k + 1, (rows, nodes), generator=generator, dtype=torch.int32)
    counts[2::3] = 0
    counts[:with_drafts, 1:] *= (drafts.token_ids >= 0).int().cumprod(dim=1)
    counts[with_drafts:, 1:] = 0
    ids = torch.stack([torch.randperm(k + 2, generator=generator)[:k] for _ in range(rows * nodes)]).int()
    positions = torch.empty(rows * nodes, dtype=torch.int32)
    positions[::nodes] = torch.arange(rows, dtype=torch.int32).flip(0)  # the others' are not read
    out = empty_trees(rows + 1, width, k, torch.device("cpu"))
    trees = pack_drafts(
        ScoredCandidates(ids, counts.flatten(), positions, counts.flatten() > 0),
        drafts,
        out=CandidateTrees(*(x[len(x) // (rows + 1) :] for x in out)),
        backend="triton",
    )
    return list(trees)


@workload("_verify_drafts_kernel", one=(1, 1), some=(19, 5), many=(9, 9))
def verify(requests, width):
    generator = torch.Generator().manual_seed(requests)
    drafts = random_drafts(requests, width, seed=requests, tokens=3)
    drawn = torch.randint(-1, 3, (requests * (1 + width) + 3,), generator=generator, dtype=torch.int32)
    return list(verify_drafts(drawn[3:], drafts, backend="triton"))


@workload(
    "_limit_span_kernel",
    one=(1, 0, 1, torch.float32),
    several=(19, 0, 3, torch.bfloat16),
    drafts=(21, 3, 4, torch.float16),
    many_drafts=(9, 9, 2, torch.float32),
    without_logits=(9, 3, 4, None),
)
def limit(requests, width, new, dtype):
    """Requests in no order: every fourth has no span, and of every fifth it has ended; some are at their limit."""
    generator = torch.Generator().manual_seed(requests)
    table = GuidanceTable(requests + 2, "cpu")
    for row in range(requests + 2):
        asked = {"end_token_ids": [2, 5, 30][: 1 + row % 3], "hard_limit": 1 + row % 7, "allow_eos": row % 3 == 2}
        params = parse_guidance({} if row % 4 == 3 else asked)
        table.add_request(row, params, {0, 1, 5, 31}, prompt_len=row % 6, span_ended=row % 5 == 4)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    logits, rows = None, requests * (1 + width)
    if dtype is not None:
        logits = padded(torch.randn(rows, 31, generator=generator).to(dtype), 3)
    ended = limit_span(
        logits,
        table,
        padded(draw(0, 20, requests, new), 2),
        torch.randperm(requests + 2, generator=generator)[:requests],
        draw(0, 9, requests).int(),
        new_lens=draw(-1, new + 2, requests).int(),
        drafts=random_drafts(requests, width, seed=requests, tokens=9) if width else None,
        backend="triton",
    )
    return [ended, table.span_ended, *([] if logits is None else [logits])]


# Of steps with drafts.
DRAFT_KERNELS = ("_expand_drafts_kernel", "_pack_drafts_kernel", "_verify_drafts_kernel")
STEP_KERNELS = (
    "_catch_up_kernel",
    "_commit_winner_kernel",
    "_embed_tokens_kernel",
    "_filter_kernel",
    "_gather_requests_kernel",
    "_limit_span_kernel",
    "_plan_attention_kernel",
    "_ragged_layout_kernel",
    "_ragged_linear_kernel",
    "_reweight_kernel",
    "_reweight_scatter_kernel",
    "_rope_cache_kernel",
    "_sample_candidates_kernel",
    "_scan_kernel",
    "_select_scored_kernel",
    "_value_head_kernel",
    "_value_tree_attention_kernel",
)
# So many intermediate columns that their sum is taken in parts.
CONFIG = ValueModelConfig(
    hidden_size=32,
    intermediate_size=4096,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    rms_norm_eps=1e-6,
    rope_inv_freq=tuple(1e6 ** (-i / 8) for i in range(8)),
    qkv_bias=True,
    qk_norm=True,
)
VOCAB, EOS = 300, {7, 8}
# By row of the slot table: what a request asks for, and the length of its prompt.
REQUESTS = [
    ({"target_length": 60, "end_token_ids": [9, 12]}, 650),
    ({"scale": 0.7, "return_values": True}, 3),
    (None, 40),
    ({"mode": "exp", "scale": 2.0}, 1),
    ({"return_values": True}, 17),
    ({"mode": "value_bias", "scale": 2.0, "return_values": True}, 33),
    ({"target_length": 9, "op": "ge"}, 5),
]


@workload(*STEP_KERNELS, eager=(GuidedStep, 8), padded=(PaddedStep, 4))
def guided_step(step_class, k):
    """Prompts in ragged chunks, a prediction, then steps of changing subsets of the rows in changing order."""
    generator = torch.Generator().manual_seed(k)
    rows = len(REQUESTS)
    torch.manual_seed(0)  # the model's weights
    slots = PagedSlots(rows, 660, page_size=4)
    step = step_class(
        make_model(CONFIG, torch.float32, "cpu"),
        slots.table,
        slots.num_slots,
        vocab_size=VOCAB,
        max_requests=rows,
        max_candidates=k,
        page_size=4,
        chunk_tokens=32,
        backend="triton",
    )
    for cache in (step.cache.keys, step.cache.values):
        cache.normal_(generator=generator)
    for row in torch.randperm(rows, generator=generator).tolist():
        guidance, prompt_len = REQUESTS[row]
        slots.extend(row, prompt_len + 5)
        params = None if guidance is None else parse_guidance(guidance)
        step.add_request(row, params, EOS, prompt_len=prompt_len, seed=row + 90)

    # Up to 12 tokens of each prompt, all but its last, are computed; those before them are in the cache.
    lengths = i32([prompt_len for _, prompt_len in REQUESTS])
    lens = (lengths - 1).clamp(max=12)
    order = torch.randperm(rows, generator=generator).int()
    starts = (lens[order].cumsum(0) - lens[order]).int()
    row_of = order.repeat_interleave(lens[order])
    cached = (lengths - 1 - lens)[order]
    position = torch.arange(len(row_of)) + (cached - starts).repeat_interleave(lens[order])
    prompt = torch.randint(VOCAB, (len(row_of),), generator=generator)
    step.extend(prompt, slots.slots(row_of, position), order, starts, lens[order], cached)
    last = torch.randint(VOCAB, (rows,), generator=generator, dtype=torch.int32)
    results = [step.predict(last[order], order, lengths[order])]

    for number, chosen in enumerate([[4, 0, 6, 2, 5, 1, 3], [5, 0, 1], [1, 3, 5, 0, 6]]):
        chosen, b = i32(chosen), len(chosen)
        logits = torch.randn(b, VOCAB, generator=generator) * 3
        logits[0, 5] = torch.nan if number == 2 else 0.0
        probs = torch.softmax(logits, 1) if number % 2 else None
        output = step.step(
            logits,
            last[chosen],
            chosen,
            lengths[chosen],
            top_k=i32([0, 5, k][number % 3 : number % 3 + 1] * b),
            top_p=torch.full((b,), 0.98),
            min_p=torch.full((b,), 1e-3),
            temperature=torch.full((b,), 0.9),
            is_logits=True,
            probs=probs,
            sample=True,
            drawn=torch.randint(VOCAB, (b,), generator=generator),
        )
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths] + ([] if probs is None else [probs])
        last[chosen.long()] = output.tokens.int()
        lengths[chosen.long()] += 1
    return [*results, step.cache.keys, step.cache.values, step.table.faults]


@workload(*DRAFT_KERNELS, "_ragged_layout_kernel", "_value_tree_attention_kernel", padded=(PaddedStep, 4))
def drafted_step(step_class, k):
    """Steps with trees of drafts, of which those that were drawn are taken."""
    generator, width, rows = torch.Generator().manual_seed(k), 3, 4
    torch.manual_seed(0)  # the model's weights
    slots = PagedSlots(rows, 80, page_size=4)
    step = step_class(
        make_model(replace(CONFIG, intermediate_size=64), torch.float32, "cpu"),
        slots.table,
        slots.num_slots,
        vocab_size=VOCAB,
        max_requests=rows,
        max_candidates=k,
        max_drafts=width,
        max_delta=5,
        page_size=4,
        chunk_tokens=32,
        backend="triton",
    )
    for cache in (step.cache.keys, step.cache.values):
        cache.normal_(generator=generator)
    lens = [9, 3, 12, 1]
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lens]
    order = [3, 0, 2, 1]
    guidance = [REQUESTS[row][0] for row in order]
    Engine(step, slots).start(order, [prompts[row] for row in order], guidance, room=20)
    lengths, results = i32(lens), []
    tokens = torch.tensor([[prompt[-1]] * (1 + width) for prompt in prompts])
    new_lens = torch.ones(rows, dtype=torch.int32)
    for number, chosen in enumerate([[2, 0, 3, 1], [1, 2, 0]]):
        chosen = torch.tensor(chosen)
        b, nodes = len(chosen), len(chosen) * (1 + width)
        logits = torch.randn(nodes, VOCAB, generator=generator) * 3
        drafts = random_drafts(b, width, seed=number, tokens=VOCAB)
        # Of every other request the likeliest token after its last one is a draft.
        drafts.token_ids[::2, 0] = logits[:: 1 + width].argmax(dim=1)[::2]
        output = step.step(
            logits,
            tokens[chosen],
            chosen.int(),
            lengths[chosen],
            new_lens=new_lens[chosen],
            top_k=i32([5, k][number : number + 1] * b),
            top_p=torch.full((b,), 0.98),
            min_p=torch.full((b,), 1e-3),
            temperature=torch.full((b,), 0.9),
            is_logits=True,
            sample=True,
            drawn=torch.randint(VOCAB, (nodes,), generator=generator),
            drafts=drafts,
            verify="same_draws",
        )
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths, *output.verified]
        tokens[chosen], new_lens[chosen] = output.verified.tokens.long(), output.verified.lens
        lengths[chosen] += output.verified.lens
    assert new_lens.max() > 1 and not step.table.faults.any()
    return [*results, step.cache.keys, step.cache.values, step.table.faults]


def test_every_kernel_has_a_workload():
    names = set(kernels())
    assert len(names) >= 15
    assert set().union(*(covered for _, covered in WORKLOADS.values())) == names
    # In a step whoever stores a row leaves the sums of its squares.
    assert names - {*STEP_KERNELS, *DRAFT_KERNELS} == {"_square_sums_kernel"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_races(name):
    run, covered = WORKLOADS[name]
    assert covered <= set(check_races(run))
