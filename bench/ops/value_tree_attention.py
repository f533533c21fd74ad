"""Time value-tree attention of one layer: decode steps, trees, and prompts.

    python -m bench.ops.value_tree_attention [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

B requests with L cached tokens in scattered slots, ``delta`` new ones and ``tree`` candidates: branches, or branches x
levels. Plan and counters are there already, as in the layers of a step. Floor: cached keys and
values once per key/value head, queries, new keys and values, slots, parents and output.
"""

from functools import partial

import torch

from bench.harness.cases import FLOATS, Benchmark, Case, peer
from bench.models import DIMENSIONS
from lenvm_kernels.ops.value_tree_attention import num_counters, plan_attention, value_tree_attention
from lenvm_kernels.reference import value_tree_attention as reference

PEERS = {
    "FlashInfer masked": ("flashinfer", "masked_attention"),
    "FlashInfer multi-item": ("flashinfer", "multi_item_attention"),
    "SGLang extend": ("sglang", "extend_attention"),
    "FlexAttention": ("pytorch", "flex_attention"),  # compiled for each shape, which takes long: along L only
}
MOST_SCORES = 2**29  # of the largest request's fp64 scores, that the result is compared with the reference


PRODUCTION = dict(model="Qwen2.5-1.5B", B=64, L=2048, delta=1, tree="5")


def make_call(
    device: str,
    *,
    heads: tuple[int, int, int],
    B: int,
    L: int,
    branches: int,
    dtype: str,
    delta: int = 1,
    levels: int = 1,
    is_tree: bool = False,
    page_size: int = 1,
    index: torch.dtype = torch.int64,
) -> partial:
    """A call with ``heads`` of queries, of keys and values, and their dimension. ``is_tree``: parents are given."""
    num_heads, kv_heads, head_dim = heads
    new = delta + branches * levels
    tokens, slots = B * new, B * L

    def random(rows: int, num_heads: int) -> torch.Tensor:
        return torch.randn(rows, num_heads, head_dim, dtype=getattr(torch, dtype), device=device)

    def int32(value: int) -> torch.Tensor:
        return torch.full((B,), value, dtype=torch.int32, device=device)

    q, k_new, v_new = random(tokens, num_heads), random(tokens, kv_heads), random(tokens, kv_heads)
    k_cache, v_cache = random(slots, kv_heads), random(slots, kv_heads)
    options = {}
    if is_tree:  # level after level: what is before a request's first candidate stands for no parent
        options["parents"] = torch.arange(tokens, dtype=torch.int32, device=device) - branches
    slot_table = torch.randperm(slots // page_size, dtype=torch.int32, device=device).view(B, -1)
    table_rows = torch.arange(B, dtype=index, device=device)
    q_offsets = torch.arange(0, tokens + 1, new, dtype=torch.int32, device=device)
    requests = (table_rows, int32(L), q_offsets, int32(branches * levels))
    new_and_cached = (q, k_new, v_new, k_cache, v_cache, slot_table)
    return partial(value_tree_attention, *new_and_cached, *requests, page_size=page_size, **options)


def make_case(device: str, *, model: str, B: int, L: int, delta: int, tree: str, dtype: str) -> Case:
    _, _, _, heads, kv_heads, head_dim, _ = DIMENSIONS[model]
    branches, levels = map(int, f"{tree}x1".split("x")[:2])
    sizes = dict(B=B, L=L, delta=delta, branches=branches, levels=levels, is_tree=levels > 1)
    call = make_call(device, heads=(heads, kv_heads, head_dim), dtype=dtype, **sizes)
    q, *arguments = call.args
    options = {name: x for name, x in call.keywords.items() if name != "page_size"}
    plan = plan_attention(*arguments[5:], total_tokens=len(q), max_len=L, group=heads // kv_heads)
    counters = torch.zeros(num_counters(B, kv_heads), dtype=torch.int32, device=device)
    out = torch.full_like(q, torch.nan)

    shape = dict(model=model, B=B, L=PRODUCTION["L"], delta=delta, tree=tree)
    compiles = device == "cpu" or shape == PRODUCTION
    peers = {label: peer(*names, q, *arguments) for label, names in PEERS.items() if compiles or names[0] != "pytorch"}

    # Query-key pairs of a request: cached, delta among themselves, candidates with the delta and along their branches.
    candidates = branches * levels
    new = delta + candidates
    pairs = new * L + delta * (delta + 1) // 2 + candidates * delta + branches * levels * (levels + 1) // 2
    tensors = (q, *arguments[:5], out, *([options["parents"]] if levels > 1 else []))
    return Case(
        partial(call, plan=plan, counters=counters, out=out),
        sum(tensor.nbytes for tensor in tensors),
        4 * head_dim * heads * B * pairs,
        peers={} if options else peers,  # no peer takes a tree's parents
        expected=(lambda: reference.value_tree_attention(q.double(), *arguments, **{"parents": None} | options))
        if heads * new * (L + new) <= MOST_SCORES
        else None,
    )


# Eight requests of a last token and five candidates, in 4,096 slots.
FORMS = {
    f"value_tree_attention {dtype} D{heads[2]} {heads[0]}/{heads[1]} page {page_size}{' with parents' * is_tree}": dict(
        heads=heads, B=8, L=512, branches=5, is_tree=is_tree, page_size=page_size, dtype=FLOATS[dtype]
    )
    for dtype, heads, page_size, is_tree in (
        ("bf16", (12, 2, 64), 1, False),
        ("bf16", (12, 2, 96), 1, False),
        ("bf16", (12, 2, 128), 1, False),
        ("bf16", (28, 4, 128), 16, False),
        ("bf16", (12, 2, 256), 1, False),
        ("fp16", (12, 2, 128), 1, False),
        ("fp32", (9, 3, 64), 1, False),
        ("fp32", (12, 2, 128), 1, False),
        ("bf16", (12, 2, 64), 1, True),
        ("bf16", (12, 2, 128), 1, True),
        ("bf16", (12, 2, 256), 1, True),
        ("fp32", (9, 3, 64), 1, True),
    )
}
_ONE = dict(heads=(1, 1, 1), B=1, L=1, branches=0, dtype="float32", index=torch.int32)
FORMS |= {
    "value_tree_attention, every size 1": _ONE,
    "value_tree_attention with parents, every size 1": _ONE | dict(is_tree=True),
}

BENCHMARK = Benchmark(
    "value_tree_attention",
    make_case,
    production=PRODUCTION,
    axes=dict(
        L=[512, 8192, 128, 32_768],
        B=[1, 8, 256, 512],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        tree=["2", "8", "16", "64", "32", "8x4"],
    ),
    others=[
        dict(B=1, L=32_768),
        dict(B=1, L=512),
        dict(B=512, L=512),
        dict(B=1, L=0, delta=2048),
        dict(B=4, L=8192, delta=512),
        dict(B=1, L=0, delta=32_768),
    ],
    quick=(dict(model="Qwen2.5-0.5B", B=2, L=512), dict(tree="8x4")),
)

if __name__ == "__main__":
    BENCHMARK.main()
