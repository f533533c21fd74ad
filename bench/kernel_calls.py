"""Every kernel in every form in which it is launched: what :mod:`bench.codegen` compiles.

A new variant of a kernel belongs here. All is zeros on a CPU: compiling looks at dtypes, sizes and alignments only.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.models import VOCAB, make_config
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.catch_up import catch_up
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.ops.expand_drafts import expand_drafts
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.ragged_layout import ragged_layout
from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.select_scored import empty_scored, select_scored
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.value_head import num_counters, value_head
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Candidates, Drafts
from lenvm_kernels.value_model import ValueModel

VALUE_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-1.7B")
MAX_LEN, PAGE_SIZE, MAX_CANDIDATES = 4096, 1, 8  # k 5 and 8 take the same kernels

Call = tuple[str, Callable[[], object]]  # its name, and what makes it
fp32 = torch.zeros
bf16, fp16, i8, i32, i64 = (
    partial(torch.zeros, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64)
)
FLOATS = {"fp32": fp32, "bf16": bf16, "fp16": fp16}


def value_model_step(name: str, rows: int, kept: str | None = None) -> None:
    """A prompt and a step of one layer of a value model in bf16. The layers of a model are the same kernels.

    ``kept`` is ``fp8`` for weights and a cache in 8 bits.
    """
    config = make_config(name, vocab_size=VOCAB, num_layers=1)
    step = GuidedStep(
        ValueModel(config, {key: bf16(shape) for key, shape in config.tensor_shapes().items()}, weights=kept),
        EngineSlots(i32(rows, MAX_LEN // PAGE_SIZE), 4 * MAX_LEN, PAGE_SIZE),
        StepConfig(vocab_size=VOCAB, max_candidates=MAX_CANDIDATES, cache=kept, backend="triton"),
    )
    for row in range(rows):
        step.add_request(row, parse_guidance({"target_length": 100}), {0})
    numbers, ones, prompt, probs = i32(rows), torch.ones(rows), i64(16 * rows), fp32(rows, VOCAB)
    step.extend(prompt, prompt, numbers, numbers, numbers, numbers)
    sampling, batch = Sampling(numbers, ones, ones, sample=True), StepBatch(prompt[:rows], prompt[:rows], numbers)
    step.step(probs, batch, sampling, probs=probs)
    step.step(bf16(rows, VOCAB), batch, sampling._replace(temperature=ones, is_logits=True))


def operator_calls() -> Iterator[Call]:
    """Each operator with every dtype, option and kind of size, and with every size 1."""
    for of_operator in (
        _topk_candidates,
        _value_tree_attention,
        _value_head,
        _reweight_scatter,
        _ragged_layout,
        _rope_cache,
        _sample_candidates,
        _commit_winner,
        _limit_span,
        _gather_requests,
        _select_scored,
        _catch_up,
        _drafts,
        _embed_tokens,
        _ragged_linear,
        _smallest,
    ):
        yield from of_operator()


def _topk_candidates() -> Iterator[Call]:
    for dtype, zeros in FLOATS.items():
        for rows, slots, is_logits in ((1, 8, True), (64, 64, True), (64, 8, False)):
            filters = dict(top_k=i32(rows), top_p=fp32(rows), min_p=fp32(rows), max_candidates=slots)
            call = partial(topk_candidates, zeros(rows, VOCAB), **filters, backend="triton")
            kind = "logits" if is_logits else "probabilities"
            yield f"topk_candidates {dtype} B{rows} K{slots} {kind}", partial(call, is_logits=is_logits)
    every_option = dict(temperature=fp32(64), entropy_threshold=fp32(64), guided=i8(64).bool())
    every_option |= dict(vocab_mask=i32(64, VOCAB // 32), end_token_ids=i32(9, 12), min_end_prob=fp32(9))
    every_option |= dict(least_share=fp32(9), due_length=fp32(9), generated=i32(64), table_rows=i64(64))
    every_option |= dict(text_breaks=i8(VOCAB), last_tokens=i64(64))
    yield "topk_candidates with every option", partial(call, is_logits=True, **every_option)


def _value_tree_attention() -> Iterator[Call]:
    requests, tokens, slots = 8, 48, 4096
    for dtype, head_dim, heads, kv_heads, page_size, is_tree in (
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
        zeros = FLOATS[dtype]
        new, cache = zeros(tokens, kv_heads, head_dim), zeros(slots, kv_heads, head_dim)
        table = (i32(requests, slots // page_size), i64(requests), i32(requests), i32(requests + 1), i32(requests))
        call = partial(value_tree_attention, zeros(tokens, heads, head_dim), new, new, cache, cache, *table)
        options = dict(parents=i32(tokens) if is_tree else None, page_size=page_size, backend="triton")
        name = (
            f"value_tree_attention {dtype} D{head_dim} {heads}/{kv_heads} page {page_size}" + " with parents" * is_tree
        )
        yield name, partial(call, **options)
        if (dtype, head_dim) == ("fp32", 128):  # spills, see _launch_config there
            continue
        codes = [cache.to(E4M3)] * 2
        call = partial(value_tree_attention, zeros(tokens, heads, head_dim), new, new, *codes, *table, **options)
        yield f"{name}, cache in e4m3", partial(call, **_scales(kv_heads))


def _scales(*shape: int) -> dict[str, torch.Tensor]:
    """Of a cache in e4m3."""
    return {"key_scales": fp32(shape), "value_scales": fp32(shape)}


def _value_head() -> Iterator[Call]:
    for dtype, zeros in FLOATS.items():
        for size in (1536, 3584):
            for rows in (64, 512):  # either tile
                head = (zeros(size, size), zeros(size), zeros(1, size), zeros(1))
                call = partial(value_head, zeros(rows, size), *head, backend="triton")
                name, outputs = f"value_head {dtype} M{rows} H{size}", rows - 24
                yield name, call
                yield f"{name} with gather and norm", partial(call, token_rows=i64(outputs), norm_weight=zeros(size))
                of_model = dict(token_rows=i32(outputs), targets=i32(outputs), counters=i32(num_counters(outputs)))
                of_model |= dict(square_sums=fp32(size // 64, rows))
                yield f"{name} with gather, scatter and sums of squares", partial(call, **of_model)
                yield f"{name} with every option", partial(call, **of_model, norm_weight=zeros(size))


def _candidates(rows: int, slots: int) -> Candidates:
    return Candidates(i32(rows, slots), fp32(rows, slots), i32(rows), i8(rows), fp32(rows))


def _reweight_scatter() -> Iterator[Call]:
    rows = 64
    table = GuidanceTable.from_params([parse_guidance({"mode": "mul", "scale": 0.5})] * rows, [{1}] * rows, "cpu")
    for slots in (8, 64):
        call = partial(reweight_scatter, _candidates(rows, slots), fp32(rows, slots), table, backend="triton")
        yield f"reweight_scatter K{slots}", call
        for dtype, zeros in FLOATS.items():
            every_option = dict(table_rows=i64(rows), generated=i32(rows), probs=zeros(rows, VOCAB))
            yield f"reweight_scatter {dtype} K{slots} with every option", partial(call, **every_option)


def _ragged_layout() -> Iterator[Call]:
    requests, tokens = 64, 96
    lengths = i32(requests)
    for integers in (i32, i64):
        for columns in (0, 8, 64):
            delta = integers(tokens)
            arguments = (delta, delta, lengths, lengths, i32(requests, columns), lengths, lengths)
            yield f"ragged_layout {delta.dtype} K{columns}", partial(ragged_layout, *arguments, backend="triton")
    for columns in (8, 44):  # the latter of four drafts, and eight candidates at each node
        arguments = (delta, delta, lengths, lengths, i32(requests, columns), lengths, lengths)
        call = partial(ragged_layout, *arguments, candidate_parents=i32(requests, columns), backend="triton")
        yield f"ragged_layout {delta.dtype} K{columns}, trees", call


def _rope_cache() -> Iterator[Call]:
    tokens, slots = 48, 4096
    for dtype, heads, kv_heads, head_dim, has_options in (
        ("bf16", 9, 3, 64, False),
        ("bf16", 12, 2, 128, False),
        ("bf16", 16, 8, 128, True),
        ("bf16", 28, 4, 128, False),
        ("bf16", 32, 32, 96, True),
        ("bf16", 64, 8, 256, True),
        ("fp16", 16, 8, 128, True),
        ("fp32", 16, 8, 128, True),
    ):
        zeros = FLOATS[dtype]
        qkv, angles = zeros(tokens, (heads + 2 * kv_heads) * head_dim), fp32(tokens, head_dim // 2)
        cache, out = zeros(slots, kv_heads, head_dim), zeros(tokens, kv_heads, head_dim)
        call = partial(rope_cache, qkv, angles, angles, i64(tokens), cache, cache, num_heads=heads, backend="triton")
        if has_options:
            norm = zeros(heads + kv_heads, head_dim)
            call = partial(call, qk_norm_weight=norm, num_rows=i32(1), k_out=out, v_out=out.clone())
        name = f"rope_cache {dtype} {heads}/{kv_heads} D{head_dim}" + " with every option" * has_options
        yield name, call
        call = partial(call.func, *call.args[:4], *[cache.to(E4M3)] * 2, **call.keywords)
        yield f"{name}, cache in e4m3", partial(call, **_scales(kv_heads))


def _sample_candidates() -> Iterator[Call]:
    rows = 64
    for slots in (8, 64):
        call = partial(sample_candidates, _candidates(rows, slots), fp32(rows, slots), i64(rows), backend="triton")
        yield f"sample_candidates K{slots}", partial(call, i64(rows))
        yield f"sample_candidates K{slots} with temperature", partial(call, i32(rows), temperature=fp32(rows))


def _commit_winner() -> Iterator[Call]:
    rows, slots = 64, 512
    for dtype, layers, heads, head_dim, integers in (
        ("bf16", 24, 2, 64, i32),
        ("bf16", 28, 2, 128, i32),
        ("bf16", 28, 2, 128, i64),
        ("bf16", 30, 3, 64, i64),
        ("bf16", 32, 32, 128, i32),
        ("fp16", 28, 2, 128, i32),
        ("fp32", 28, 2, 128, i32),
        ("fp32", 32, 32, 128, i64),
    ):
        tokens, row, index = FLOATS[dtype](layers, slots, heads, head_dim), i32(rows), integers(rows)
        drawn = (i32(rows, 8), integers(rows, 8), row, index, index, row, i32(rows, MAX_LEN), index)
        name = f"commit_winner {dtype} {layers} layers {heads} D{head_dim}"
        yield name, partial(commit_winner, *[tokens] * 4, *drawn, backend="triton")
        call = partial(commit_winner, *[tokens.to(E4M3)] * 2, *[tokens] * 2, *drawn, backend="triton")
        yield f"{name}, cache in e4m3", partial(call, **_scales(layers, heads))
        several = (*drawn[:4], integers(rows, 4), *drawn[5:])
        tree = dict(new_lens=row, candidate_parents=i32(rows, 8), page_size=16, backend="triton")
        yield f"{name}, several tokens", partial(commit_winner, *[tokens] * 4, *several, **tree)


def _limit_span() -> Iterator[Call]:
    rows = 64
    table, numbers = GuidanceTable(rows, "cpu").columns, i64(rows)
    of_requests = (table, i64(rows, 1), numbers, i32(rows))
    yield "limit_span without logits", partial(limit_span, None, *of_requests, backend="triton")
    for dtype, zeros in FLOATS.items():
        yield f"limit_span {dtype}", partial(limit_span, zeros(rows, VOCAB), *of_requests, backend="triton")
    several = (table, i64(rows, 5), numbers, i32(rows))
    for drafts, integers in ((1, i32), (4, i64), (15, i64)):
        options = dict(new_lens=i32(rows), drafts=Drafts(integers(rows, drafts), i32(rows, drafts)))
        call = partial(limit_span, zeros(rows * (1 + drafts), VOCAB), *several, **options, backend="triton")
        yield f"limit_span {dtype} D{drafts}", call


def _gather_requests() -> Iterator[Call]:
    rows = 64
    table = GuidanceTable(rows, "cpu").columns
    numbers = i64(rows)
    call = partial(gather_requests, table, numbers, numbers, i32(rows), backend="triton")
    yield "gather_requests", call
    history = empty_history(rows, 16, numbers.device)
    every_option = dict(active=i8(rows).bool(), history=history, out=empty_requests(rows, numbers.device))
    yield "gather_requests with every option", partial(call, **every_option)
    several = partial(gather_requests, table, i64(rows, 4), numbers, i32(rows), backend="triton")
    for width in (1, 4):
        every_option |= dict(new_lens=i32(rows), out=empty_requests(rows, numbers.device, width))
        yield f"gather_requests of several tokens, with room for {width}", partial(several, **every_option)


def _select_scored() -> Iterator[Call]:
    rows = 64
    requests = empty_requests(rows, torch.device("cpu"))
    for slots in (8, 64):
        call = partial(select_scored, _candidates(rows, slots), requests, i32(rows, 8), backend="triton")
        yield f"select_scored K{slots}", call
        every_option = dict(drawn=i32(rows), sample=True, score_all=True, step=i64(1))
        yield f"select_scored K{slots} with every option", partial(call, **every_option)


def _catch_up() -> Iterator[Call]:
    rows = 64
    requests = empty_requests(rows, torch.device("cpu"))
    for held, page_size in ((1, 1), (5, 4), (16, 1), (16, 16), (64, 64)):
        history, pages = empty_history(rows, held, torch.device("cpu")), i32(rows, MAX_LEN // page_size)
        call = partial(catch_up, history, requests, i32(rows), pages, page_size=page_size, backend="triton")
        yield f"catch_up M{held}, pages of {page_size}", call
        yield f"catch_up M{held}, pages of {page_size}, with committed", partial(call, committed=i32(rows))


def _drafts() -> Iterator[Call]:
    rows = 64
    for drafts, slots, dtype in ((1, 8, torch.int32), (4, 8, torch.int64), (15, 64, torch.int64)):
        given = Drafts(i32(rows, drafts).to(dtype), i32(rows, drafts))
        requests = empty_requests(rows, torch.device("cpu"))
        yield f"expand_drafts D{drafts}", partial(expand_drafts, requests, given, backend="triton")
        scored = empty_scored(rows * (1 + drafts), slots, torch.device("cpu"))
        yield f"pack_drafts D{drafts} K{slots}", partial(pack_drafts, scored, given, backend="triton")
        drawn = i32(rows * (1 + drafts))
        yield f"verify_drafts D{drafts}", partial(verify_drafts, drawn, given, backend="triton")


def _embed_tokens() -> Iterator[Call]:
    tokens = 48
    for dtype, size, half in (
        ("bf16", 896, 32),
        ("bf16", 1536, 64),
        ("bf16", 3584, 48),
        ("fp16", 2048, 64),
        ("fp32", 2048, 64),
        ("fp32", 2050, 64),
    ):
        call = partial(embed_tokens, i64(tokens), i64(tokens), FLOATS[dtype](VOCAB, size), fp32(half))
        name = f"embed_tokens {dtype} H{size} D{2 * half}"
        yield name, partial(call, rope_scale=1.5, num_rows=i32(1), backend="triton")
    yield f"{name}, all tokens", partial(call, backend="triton")


def _ragged_linear() -> Iterator[Call]:
    # Every tile of 16-bit numbers, by the rows there is room for.
    for dtype, rows in (("fp32", 384), ("fp16", 384), *(("bf16", rows) for rows in (9, 72, 144, 288, 576, 1152, 2304))):
        zeros = FLOATS[dtype]
        x, wide_x, squares, wide_squares = zeros(rows, 1536), zeros(rows, 8960), fp32(24, rows), fp32(140, rows)
        norm, squared = dict(norm_eps=1e-6, square_sums=squares), dict(square_sums_out=squares)
        for layer, arguments, options in (
            ("qkv", (x, zeros(2048, 1536), zeros(2048)), norm),
            ("qkv alone", (x, zeros(2048, 1536), zeros(2048)), dict(norm_eps=1e-6)),
            ("o", (x, zeros(1536, 1536)), squared | dict(residual=x)),
            ("gate_up", (x, zeros(17920, 1536)), norm | dict(swiglu=True)),
            ("down", (wide_x, zeros(1536, 8960)), squared | dict(residual=x)),
            (
                "everything",
                (x, zeros(17920, 1536), zeros(17920)),
                norm | dict(swiglu=True, residual=wide_x, square_sums_out=wide_squares),
            ),
        ):
            room = dict(num_rows=i32(1), expected_rows=math.ceil(2 / 3 * rows))
            call = partial(ragged_linear, *arguments, **options, **room, backend="triton")
            yield f"ragged_linear {dtype} {layer}, {rows} rows", call
            if dtype != "fp32" and layer != "qkv alone":
                weight, scales = quantize_weight(arguments[1])
                call = partial(call.func, arguments[0], weight, *arguments[2:], **call.keywords, weight_scales=scales)
                yield f"ragged_linear {dtype} {layer}, {rows} rows, e4m3", call


def _smallest() -> Iterator[Call]:
    """Triton makes an argument of 1 a constant, which not every expression takes."""
    one, pair, head, index = fp32(1), fp32(1, 1, 2), fp32(1, 1, 1), i32(1)
    number, candidates = fp32(1, 1), _candidates(1, 1)
    table = GuidanceTable.from_params([None], [set()], "cpu")
    attention = partial(value_tree_attention, *[head] * 5, i32(1, 1), index, index, i32(2), index)
    reweight = partial(reweight_scatter, candidates, number, table)
    rope = dict(num_heads=1, qk_norm_weight=fp32(2, 2), num_rows=index, k_out=pair, v_out=pair)
    linear = partial(ragged_linear, number, norm_eps=1e-6, residual=number, num_rows=index)
    tokens, long_row = [fp32(1, 1, 1, 1)] * 4, fp32(1, 8960)
    codes, scale = head.to(E4M3), _scales(1)
    drawn = (i32(1, 1), i32(1, 1), *[index] * 4, i32(1, 1), index)
    calls = {
        "topk_candidates": partial(topk_candidates, number, top_k=index, top_p=one, min_p=one, max_candidates=1),
        "value_tree_attention": attention,
        "value_tree_attention with parents": partial(attention, parents=index),
        "value_tree_attention of a cache in e4m3": partial(
            value_tree_attention, *[head] * 3, codes, codes, i32(1, 1), index, index, i32(2), index, **scale
        ),
        "value_head": partial(value_head, number, number, one, number, one, square_sums=number, counters=index),
        "reweight_scatter": reweight,
        "reweight_scatter of one token": partial(reweight, probs=number),
        "rope_cache": partial(rope_cache, fp32(1, 6), number, number, index, pair, pair, **rope),
        "rope_cache to e4m3": partial(
            rope_cache, fp32(1, 6), number, number, index, pair.to(E4M3), pair.to(E4M3), **rope, **scale
        ),
        "ragged_layout": partial(ragged_layout, *[index] * 4, i32(1, 1), index, index),
        "ragged_layout of trees": partial(
            ragged_layout, *[index] * 4, i32(1, 1), index, index, candidate_parents=i32(1, 1)
        ),
        "sample_candidates": partial(sample_candidates, candidates, number, i64(1), index),
        "commit_winner": partial(commit_winner, *tokens, *drawn),
        "commit_winner of a tree": partial(
            commit_winner, *tokens, *drawn[:4], i32(1, 1), *drawn[5:], new_lens=index, candidate_parents=i32(1, 1)
        ),
        "commit_winner to e4m3": partial(
            commit_winner, *[tokens[0].to(E4M3)] * 2, *tokens[2:], *drawn, **_scales(1, 1)
        ),
        "ragged_linear": partial(linear, number, one),
        "ragged_linear with swiglu": partial(linear, fp32(2, 1), fp32(2), swiglu=True),
        "ragged_linear of one column": partial(ragged_linear, long_row, long_row),
        "ragged_linear of one column in e4m3": partial(
            ragged_linear, bf16(1, 8960), fp32(1, 8960).to(torch.float8_e4m3fn), weight_scales=one
        ),
    }
    long = i64(1)
    requests, history = empty_requests(1, long.device), empty_history(1, 1, long.device)
    calls |= {
        "limit_span": partial(limit_span, number, table.columns, i64(1, 1), long, index),
        "gather_requests": partial(gather_requests, table.columns, long, long, index, history=history),
        "select_scored": partial(select_scored, candidates, requests, i32(1, 1), drawn=index, step=long),
        "catch_up": partial(catch_up, history, requests, index, i32(1, 1), committed=index),
        "embed_tokens": partial(embed_tokens, long, long, number, one, num_rows=index),
        "expand_drafts": partial(expand_drafts, requests, Drafts(i32(1, 1), i32(1, 1))),
        "pack_drafts": partial(pack_drafts, empty_scored(2, 1, long.device), Drafts(i32(1, 1), i32(1, 1))),
        "verify_drafts": partial(verify_drafts, i32(2), Drafts(i32(1, 1), i32(1, 1))),
    }
    for name, call in calls.items():
        yield f"{name}, every size 1", partial(call, backend="triton")
