"""Time value-tree attention: ``python -m bench.bench_value_tree_attention``.

Attention of one layer for the value models of LenVM (Qwen2.5 shapes): decode steps of one delta token and five
candidates a request over scattered cache slots, trees of 8 branches and 4 levels, and prompts arriving as one delta.
Bytes count cached keys and values once per key/value head, plus q, new keys and values, slots, parents and the output.
As in a model, every call works on another layer's cache, so that the caches come from memory and not from L2.
"""

from itertools import cycle

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.value_tree_attention import value_tree_attention

# Larger than any L2 by a factor of two: what the layers of a case take together.
CACHE_BYTES = {"cuda": 2**27, "cpu": 0}
CANDIDATES = (5, 1)  # branches, levels
TREE = (8, 4)
QWEN_1_5B, QWEN_7B = (12, 2, 128), (28, 4, 128)  # query heads, key/value heads, head dimension

# name, heads, requests, cached tokens a request, delta tokens a request, candidates a request; smallest first
SHAPES = [
    ("1.5B tree", QWEN_1_5B, 1, 512, 1, TREE),
    *[("1.5B decode", QWEN_1_5B, b, length, 1, CANDIDATES) for length in (512, 2048, 8192) for b in (1, 16, 64)],
    *[("7B decode", QWEN_7B, b, length, 1, CANDIDATES) for length in (512, 2048, 8192) for b in (1, 16, 64)],
    *[("1.5B tree", QWEN_1_5B, b, 2048, 1, TREE) for b in (1, 16, 64)],
    ("1.5B prefill", QWEN_1_5B, 1, 0, 2048, CANDIDATES),
    ("1.5B prefill", QWEN_1_5B, 1, 0, 32768, CANDIDATES),
    ("1.5B prefill", QWEN_1_5B, 4, 8192, 512, CANDIDATES),
    ("7B prefill", QWEN_7B, 1, 0, 8192, CANDIDATES),
]
NUM_QUICK = 4


def make_case(
    name: str,
    heads: tuple[int, int, int],
    requests: int,
    cached: int,
    delta: int,
    tree: tuple[int, int],
    device: str,
    dtype: torch.dtype,
) -> Case:
    q_heads, kv_heads, head_dim = heads
    branches, levels = tree
    candidates = branches * levels
    new = delta + candidates
    tokens, slots = requests * new, requests * cached
    cache_bytes = 2 * slots * kv_heads * head_dim * dtype.itemsize
    num_layers = min(32, 1 + CACHE_BYTES[device] // max(1, cache_bytes))

    def random(rows: int, num_heads: int) -> torch.Tensor:
        return torch.randn(rows, num_heads, head_dim, dtype=dtype, device=device)

    def int32(value: int) -> torch.Tensor:
        return torch.full((requests,), value, dtype=torch.int32, device=device)

    q, k_new, v_new = random(tokens, q_heads), random(tokens, kv_heads), random(tokens, kv_heads)
    layers = cycle([(random(slots, kv_heads), random(slots, kv_heads)) for _ in range(num_layers)])
    slot_table = torch.randperm(slots, dtype=torch.int32, device=device).view(requests, cached)
    table_rows = torch.arange(requests, device=device)
    q_offsets = torch.arange(0, tokens + 1, new, dtype=torch.int32, device=device)
    cached_lens, candidate_lens, out = int32(cached), int32(candidates), torch.empty_like(q)
    # Level after level: what is before a request's first candidate stands for no parent.
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    parents = rows - branches if levels > 1 else None

    def run() -> torch.Tensor:
        k_cache, v_cache = next(layers)
        lengths = (table_rows, cached_lens, q_offsets, candidate_lens)
        return value_tree_attention(q, k_new, v_new, k_cache, v_cache, slot_table, *lengths, parents=parents, out=out)

    # Query-key pairs of a request: cached, delta among themselves, candidates with the delta and along their branches.
    pairs = new * cached + delta * (delta + 1) // 2 + candidates * delta + branches * levels * (levels + 1) // 2
    return Case(
        f"{name} {q_heads}/{kv_heads} B{requests} L{cached} d{delta}+{branches}" + (f"x{levels}" if levels > 1 else ""),
        run,
        bytes=cache_bytes + sum(x.nbytes for x in (q, k_new, v_new, slot_table, out, parents) if x is not None),
        operations=4 * head_dim * q_heads * requests * pairs,
    )


def main() -> None:
    args = parse_args(__doc__)
    shapes = SHAPES[:NUM_QUICK] if args.quick else SHAPES
    run_cases("value_tree_attention", [make_case(*shape, args.device, args.dtype) for shape in shapes], args)


if __name__ == "__main__":
    main()
