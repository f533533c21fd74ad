"""Compile, for a GPU that is not there, what calls of the operators would launch on it.

``python -m tests.compile_kernels`` (without TRITON_INTERPRET: the two do not mix in one process) calls every operator
on CPU tensors as :mod:`bench.codegen` does, for an H200. Prints one JSON line a kernel.
"""

import json
from functools import partial

import torch

from bench.codegen import PARTS, compiling_for, describe
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.ops.ragged_linear import ragged_linear
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.types import Candidates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB = 151_936  # Qwen2.5


def main() -> None:
    part, seen = PARTS["sm_90"], set()
    with compiling_for(part.target) as compiled:
        for case, call in calls():
            call()
            for name, kernel in compiled:
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    print(json.dumps({"call": case, "kernel": name, **describe(kernel, part)}), flush=True)
            compiled.clear()


def calls():
    """Representative calls: (name, function of no arguments)."""
    yield from topk_candidates_calls()
    yield from value_tree_attention_calls()
    yield from value_head_calls()
    yield from reweight_scatter_calls()
    yield from ragged_layout_calls()
    yield from rope_cache_calls()
    yield from sample_candidates_calls()
    yield from commit_winner_calls()
    yield from ragged_linear_calls()
    yield from smallest_calls()


def topk_candidates_calls():
    for dtype_name, dtype in DTYPES.items():
        for rows, slots, is_logits in ((1, 8, True), (64, 64, True), (64, 8, False)):
            arguments = dict(
                top_k=torch.zeros(rows, dtype=torch.int32),
                top_p=torch.ones(rows),
                min_p=torch.zeros(rows),
                max_candidates=slots,
                is_logits=is_logits,
                backend="triton",
            )
            scores = torch.zeros(rows, VOCAB, dtype=dtype)
            name = f"topk_candidates {dtype_name} B{rows} K{slots} {'logits' if is_logits else 'probabilities'}"
            yield name, partial(topk_candidates, scores, **arguments)
    every_option = dict(
        temperature=torch.ones(rows),
        is_logits=True,
        entropy_threshold=torch.ones(rows),
        guided=torch.ones(rows, dtype=torch.bool),
        vocab_mask=torch.zeros(rows, VOCAB // 32, dtype=torch.int32),
    )
    yield "topk_candidates with every option", partial(topk_candidates, scores, **{**arguments, **every_option})


def value_tree_attention_calls():
    requests, tokens, slots = 8, 48, 4096
    for dtype_name, head_dim, heads, kv_heads, page_size, is_tree in (
        ("bf16", 64, 12, 2, 1, False),
        ("bf16", 96, 12, 2, 1, False),
        ("bf16", 128, 12, 2, 1, False),
        ("bf16", 128, 28, 4, 16, False),
        ("bf16", 256, 12, 2, 1, False),
        ("fp16", 128, 12, 2, 1, False),
        ("fp32", 64, 9, 3, 1, False),
        ("fp32", 128, 12, 2, 1, False),
        ("bf16", 64, 12, 2, 1, True),
        ("bf16", 128, 12, 2, 1, True),
        ("bf16", 256, 12, 2, 1, True),
        ("fp32", 64, 9, 3, 1, True),
    ):
        zeros = partial(torch.zeros, dtype=DTYPES[dtype_name])
        new = (zeros(tokens, kv_heads, head_dim) for _ in range(2))
        cache = (zeros(slots, kv_heads, head_dim) for _ in range(2))
        lengths = torch.zeros(requests, dtype=torch.int32)
        yield (
            f"value_tree_attention {dtype_name} D{head_dim} {heads}/{kv_heads} page {page_size}"
            + (" with parents" if is_tree else ""),
            partial(
                value_tree_attention,
                zeros(tokens, heads, head_dim),
                *new,
                *cache,
                slot_table=torch.zeros(requests, slots // page_size, dtype=torch.int32),
                table_rows=torch.zeros(requests, dtype=torch.int64),
                cached_lens=lengths,
                q_offsets=torch.zeros(requests + 1, dtype=torch.int32),
                candidate_lens=lengths,
                parents=torch.zeros(tokens, dtype=torch.int32) if is_tree else None,
                page_size=page_size,
                backend="triton",
            ),
        )


def value_head_calls():
    for dtype_name, dtype in DTYPES.items():
        for size in (1536, 3584):
            zeros = partial(torch.zeros, dtype=dtype)
            arguments = (zeros(64, size), zeros(size, size), zeros(size), zeros(1, size), zeros(1))
            call = partial(value_head, *arguments, backend="triton")
            yield f"value_head {dtype_name} H{size}", call
            fused = dict(token_rows=torch.zeros(40, dtype=torch.int64), norm_weight=zeros(size))
            yield f"value_head {dtype_name} H{size} with gather and norm", partial(call, **fused)


def reweight_scatter_calls():
    rows = 64
    table = GuidanceTable.from_params([parse_guidance({"mode": "mul", "scale": 0.5})] * rows, [{1}] * rows, "cpu")
    for slots in (8, 64):
        candidates = Candidates(
            token_ids=torch.zeros(rows, slots, dtype=torch.int32),
            probs=torch.zeros(rows, slots),
            counts=torch.zeros(rows, dtype=torch.int32),
            status=torch.zeros(rows, dtype=torch.int8),
            lost_mass=torch.zeros(rows),
        )
        call = partial(reweight_scatter, candidates, torch.zeros(rows, slots), table, backend="triton")
        yield f"reweight_scatter K{slots}", call
        for dtype_name, dtype in DTYPES.items():
            every_option = dict(
                table_rows=torch.zeros(rows, dtype=torch.int64),
                generated=torch.zeros(rows, dtype=torch.int32),
                probs=torch.zeros(rows, VOCAB, dtype=dtype),
            )
            yield f"reweight_scatter {dtype_name} K{slots} with every option", partial(call, **every_option)


def ragged_layout_calls():
    requests, tokens = 64, 96
    lengths = torch.zeros(requests, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        for columns in (0, 8, 64):
            delta = torch.zeros(tokens, dtype=dtype)
            candidate_ids = torch.zeros(requests, columns, dtype=torch.int32)
            arguments = (delta, delta, lengths, lengths, candidate_ids, lengths, lengths)
            yield f"ragged_layout {dtype} K{columns}", partial(ragged_layout, *arguments, backend="triton")


def rope_cache_calls():
    tokens, slots = 48, 4096
    for dtype_name, heads, kv_heads, head_dim, every_option in (
        ("bf16", 9, 3, 64, False),
        ("bf16", 12, 2, 128, False),
        ("bf16", 16, 8, 128, True),
        ("bf16", 28, 4, 128, False),
        ("bf16", 32, 32, 96, True),
        ("bf16", 64, 8, 256, True),
        ("fp16", 16, 8, 128, True),
        ("fp32", 16, 8, 128, True),
    ):
        zeros = partial(torch.zeros, dtype=DTYPES[dtype_name])
        angles = torch.zeros(tokens, head_dim // 2)
        cache = zeros(slots, kv_heads, head_dim)
        call = partial(
            rope_cache,
            zeros(tokens, (heads + 2 * kv_heads) * head_dim),
            angles,
            angles,
            torch.zeros(tokens, dtype=torch.int64),
            cache,
            cache,
            num_heads=heads,
            backend="triton",
        )
        options = {}
        if every_option:
            options = dict(
                qk_norm_weight=zeros(heads + kv_heads, head_dim),
                num_rows=torch.zeros(1, dtype=torch.int32),
                k_out=zeros(tokens, kv_heads, head_dim),
                v_out=zeros(tokens, kv_heads, head_dim),
            )
        name = f"rope_cache {dtype_name} {heads}/{kv_heads} D{head_dim}{' with every option' * every_option}"
        yield name, partial(call, **options)


def sample_candidates_calls():
    rows = 64
    for slots in (8, 64):
        candidates = Candidates(
            token_ids=torch.zeros(rows, slots, dtype=torch.int32),
            probs=torch.zeros(rows, slots),
            counts=torch.zeros(rows, dtype=torch.int32),
            status=torch.zeros(rows, dtype=torch.int8),
            lost_mass=torch.zeros(rows),
        )
        seeds = torch.zeros(rows, dtype=torch.int64)
        call = partial(sample_candidates, candidates, candidates.probs, seeds, backend="triton")
        yield f"sample_candidates K{slots}", partial(call, seeds)
        yield f"sample_candidates K{slots} with temperature", partial(call, seeds.int(), temperature=torch.zeros(rows))


def commit_winner_calls():
    rows, slots = 64, 512
    for dtype_name, layers, heads, head_dim, index_dtype in (
        ("bf16", 24, 2, 64, torch.int32),
        ("bf16", 28, 2, 128, torch.int32),
        ("bf16", 28, 2, 128, torch.int64),
        ("bf16", 30, 3, 64, torch.int64),
        ("bf16", 32, 32, 128, torch.int32),
        ("fp16", 28, 2, 128, torch.int32),
        ("fp32", 28, 2, 128, torch.int32),
        ("fp32", 32, 32, 128, torch.int64),
    ):
        tokens = [torch.zeros(layers, slots, heads, head_dim, dtype=DTYPES[dtype_name])] * 4
        ids, row = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        index = row.to(index_dtype)
        call = partial(commit_winner, *tokens, ids, ids.to(index_dtype), row, index, index, row, index)
        yield f"commit_winner {dtype_name} {layers} layers {heads} D{head_dim}", partial(call, backend="triton")


def ragged_linear_calls():
    tokens = 384
    for dtype_name, dtype in DTYPES.items():
        zeros = partial(torch.zeros, dtype=dtype)
        num_rows = torch.zeros(1, dtype=torch.int32)
        call = partial(ragged_linear, num_rows=num_rows, backend="triton")
        x, wide_x = zeros(tokens, 1536), zeros(tokens, 8960)
        for layer, arguments, options in (
            ("qkv", (x, zeros(2048, 1536), zeros(2048)), dict(norm_eps=1e-6)),
            ("o", (x, zeros(1536, 1536)), dict(residual=x)),
            ("gate_up", (x, zeros(17920, 1536)), dict(norm_eps=1e-6, swiglu=True)),
            ("down", (wide_x, zeros(1536, 8960)), dict(residual=x)),
        ):
            yield f"ragged_linear {dtype_name} {layer}", partial(call, *arguments, **options)


def smallest_calls():
    """Every size 1: Triton makes an argument of 1 a constant, which not every expression takes."""
    i32, one, zero = partial(torch.tensor, dtype=torch.int32), torch.ones(1), torch.zeros(1)
    row = dict(top_k=i32([0]), top_p=one, min_p=zero, max_candidates=1, backend="triton")
    yield "topk_candidates of one token", partial(topk_candidates, torch.zeros(1, 1), **row)
    x = torch.zeros(1, 1, 1)
    lengths = (i32([[0]]), i32([0]), i32([1]), i32([0, 1]), i32([0]))
    call = partial(value_tree_attention, *[x] * 5, *lengths, backend="triton")
    yield "value_tree_attention of one token", call
    yield "value_tree_attention of one token with parents", partial(call, parents=i32([0]))
    head = (torch.zeros(1, 1), zero, torch.zeros(1, 1), zero)
    yield "value_head of one token", partial(value_head, torch.zeros(1, 1), *head, backend="triton")
    table = GuidanceTable.from_params([None], [set()], "cpu")
    candidates = Candidates(i32([[0]]), torch.ones(1, 1), i32([1]), torch.ones(1, dtype=torch.int8), zero)
    call = partial(reweight_scatter, candidates, torch.zeros(1, 1), table, backend="triton")
    yield "reweight_scatter of one candidate", call
    yield "reweight_scatter of one token", partial(call, probs=torch.zeros(1, 1))
    pair, angle = torch.zeros(1, 1, 2), torch.zeros(1, 1)
    arguments = (torch.zeros(1, 6), angle, angle, i32([0]), pair, pair)
    options = dict(qk_norm_weight=torch.zeros(2, 2), num_rows=i32([1]), k_out=pair, v_out=pair)
    yield "rope_cache of one token", partial(rope_cache, *arguments, num_heads=1, **options, backend="triton")
    ragged = (*[i32([0])] * 4, i32([[0]]), i32([0]), i32([0]))
    yield "ragged_layout of one token", partial(ragged_layout, *ragged, backend="triton")
    call = partial(sample_candidates, candidates, torch.ones(1, 1), torch.tensor([0]), i32([0]), backend="triton")
    yield "sample_candidates of one candidate", call
    one_token = [torch.zeros(1, 1, 1, 1)] * 4
    winner = (i32([[0]]), i32([[0]]), *[i32([0])] * 5)
    yield "commit_winner of one token", partial(commit_winner, *one_token, *winner, backend="triton")
    one_number = torch.zeros(1, 1)
    call = partial(ragged_linear, one_number, norm_eps=1e-6, residual=one_number, num_rows=i32([1]), backend="triton")
    yield "ragged_linear of one number", partial(call, one_number, zero)
    yield "ragged_linear of one number with swiglu", partial(call, torch.zeros(2, 1), torch.zeros(2), swiglu=True)
    long_row = torch.zeros(1, 8960)
    yield "ragged_linear of one column", partial(ragged_linear, long_row, long_row, backend="triton")


if __name__ == "__main__":
    main()
