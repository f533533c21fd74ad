"""Time of ``value_tree_attention``, one layer.

B requests with L cached tokens in scattered slots, ``delta`` new tokens and a ``tree`` of candidates: branches, or
branches x levels. Plan and counters are prepared, as in the layers of a step. The floor reads cached keys and values
once per key/value head, and moves queries, new keys and values, slots, parents and output.
"""

from functools import partial

import torch

from bench import peers
from bench.harness import Benchmark, TimedCase, nbytes
from bench.models import DIMENSIONS
from lenvm_kernels.ops.lay_out import lay_out
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.types import DeltaTokens

PEERS = {
    "FlashInfer masked": peers.flashinfer_attention,
    "SGLang extend": peers.sglang_attention,
    "FlexAttention": peers.flex_attention,
}
PRODUCTION = dict(model="Qwen2.5-1.5B", B=64, L=2048, delta=1, tree="5")


def make_call(
    *, heads, B=8, L=512, delta=1, tree=(5, 1), is_tree=False, page_size=1, dtype="float32", index=torch.int64
):
    """A call; ``heads`` are query heads, key/value heads and their dimension, ``tree`` is (branches, levels).

    ``is_tree``: parents are passed, level after level. A parent before a request's first candidate means none.
    """
    num_heads, kv_heads, head_dim = heads
    candidates = tree[0] * tree[1]
    new, slots = delta + candidates, B * L
    tokens = B * new
    random, i32 = partial(torch.randn, dtype=getattr(torch, dtype)), dict(dtype=torch.int32)
    tensors = [random(tokens, num_heads, head_dim)]
    tensors += [random(rows, kv_heads, head_dim) for rows in (tokens, tokens, slots, slots)]
    tensors += [torch.randperm(slots // page_size, **i32).view(B, -1), torch.arange(B, dtype=index)]
    tensors += [
        torch.full((B,), L, **i32),
        torch.arange(0, tokens + 1, new, **i32),
        torch.full((B,), candidates, **i32),
    ]
    parents = dict(parents=torch.arange(tokens, **i32) - tree[0]) if is_tree else {}
    return partial(value_tree_attention, *tensors, page_size=page_size, **parents)


def make_case(*, model, B, L, delta, tree, dtype="bfloat16"):
    _, _, _, heads, kv_heads, head_dim, _ = DIMENSIONS[model]
    branches, levels = map(int, f"{tree}x1".split("x")[:2])
    sizes = dict(B=B, L=L, delta=delta, tree=(branches, levels), is_tree=levels > 1)
    call = make_call(heads=(heads, kv_heads, head_dim), dtype=dtype, **sizes)
    q, *arguments = call.args
    slot_table, table_rows, cached_lens, _, candidate_lens = arguments[4:]
    i32, candidates = partial(torch.zeros, dtype=torch.int32), branches * levels
    deltas = DeltaTokens(i32(B * delta), i32(B), i32(B) + delta, cached_lens, table_rows)
    layout = lay_out(
        i32(B, candidates), candidate_lens, slot_table, num_heads=heads, num_kv_heads=kv_heads, delta=deltas
    )
    out = torch.empty_like(q)
    # Query-key pairs of a request: cached, delta among themselves, candidates with the delta and along their branches.
    pairs = (delta + candidates) * L + delta * (delta + 1) // 2
    pairs += candidates * delta + branches * levels * (levels + 1) // 2
    moved = nbytes(q, arguments[:5], out, call.keywords.get("parents"))
    # No peer supports parents. FlexAttention compiles slowly for each shape, so only for production and on a CPU.
    is_production = q.device.type == "cpu" or dict(model=model, B=B, L=L, delta=delta, tree=tree) == PRODUCTION
    rivals = {
        label: partial(prepare, *call.args)
        for label, prepare in PEERS.items()
        if levels == 1 and (is_production or label != "FlexAttention")
    }
    run = partial(call, plan=layout.plan, counters=layout.counters, out=out)
    return TimedCase(run, moved, 4 * head_dim * heads * B * pairs, peers=rivals)


_HEADS = {
    "bfloat16": ((12, 2, 64), (12, 2, 96), (12, 2, 128), (12, 2, 256)),
    "float16": ((12, 2, 128),),
    "float32": ((9, 3, 64), (12, 2, 128)),
}
FORMS = {
    f"value_tree_attention {dtype} {heads}{' with parents' * is_tree}": dict(heads=heads, is_tree=is_tree, dtype=dtype)
    for dtype, of_dtype in _HEADS.items()
    for heads in of_dtype
    for is_tree in (False, True)
    if not (is_tree and dtype == "float32" and heads[2] == 128)  # spills
}
FORMS["value_tree_attention, pages of 16"] = dict(heads=(28, 4, 128), page_size=16, dtype="bfloat16")
_ONE = dict(heads=(1, 1, 1), B=1, L=1, tree=(0, 1), index=torch.int32)
FORMS["value_tree_attention, every size 1"] = _ONE
FORMS["value_tree_attention with parents, every size 1"] = _ONE | dict(is_tree=True)

BENCHMARK = Benchmark(
    "value_tree_attention",
    make_case,
    PRODUCTION,
    axes=dict(
        L=[512, 8192, 128, 32_768],
        B=[1, 8, 256],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        tree=["2", "16", "64", "8x4"],
    ),
    others=[*(dict(B=B, L=512) for B in (1, 512)), dict(B=1, L=0, delta=2048), dict(B=4, L=8192, delta=512)],
    quick=[dict(model="Qwen2.5-0.5B", B=2, L=512), dict(model="Qwen2.5-0.5B", B=2, L=512, tree="8x4")],
)
