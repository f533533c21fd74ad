"""Rotary embedding and cache write: time against the floor, and beside separate PyTorch operations on a GPU.

    python -m bench.bench_rope_cache [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

One layer of Qwen2.5-1.5B and of Qwen3-1.7B (with its norm of queries and keys; without it the shape of Qwen2.5-3B).
Decode steps keep one row in six, one delta token and five candidates a request; a prompt of 4096 tokens keeps all. The
projection stays warm, as the model has just written it; every call writes to the cache of another layer.
"""

import itertools

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.reference.rope_cache import rms_norm, rotate

MODELS = (("Qwen2.5-1.5B", 12, 2, 128, False), ("Qwen3-1.7B", 16, 8, 128, True))
TOKENS = (8, 64, 384, 4096)
PROMPT = 4096
ROWS_OF_A_STEP = 6
QUICK_CASES = 4
SLOTS = 16384
LAYERS = {"cuda": 28, "cpu": 1}


def separate(qkv, cos, sin, slots, k_cache, v_cache, *, num_heads, qk_norm_weight, norm_eps=1e-6):
    """The same with one operation after the other; what is not kept goes to slot 0, as index_copy_ takes no less."""
    tokens, (kv_heads, head_dim) = qkv.shape[0], k_cache.shape[1:]
    qk, v = qkv.view(tokens, -1, head_dim).split((num_heads + kv_heads, kv_heads), dim=1)
    if qk_norm_weight is not None:
        qk = rms_norm(qk, qk_norm_weight, norm_eps)
    q, k = rotate(qk, cos[:, None], sin[:, None]).split((num_heads, kv_heads), dim=1)
    slots = slots.clamp(min=0)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
    return q, k, v


def make_cases(device: str, dtype: torch.dtype) -> list[Case]:
    """One case a model, number of tokens and implementation."""
    cases = []
    for model, heads, kv_heads, head_dim, norm in MODELS:
        layers = [torch.zeros(2, SLOTS, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(LAYERS[device])]
        weight = torch.ones(heads + kv_heads, head_dim, dtype=dtype, device=device) if norm else None
        for tokens in TOKENS:
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
            angle = torch.rand(tokens, head_dim // 2, device=device)
            cos, sin = angle.cos(), angle.sin()
            slots = 1 + torch.randperm(SLOTS - 1, device=device)[:tokens]
            is_kept = torch.arange(tokens, device=device) % (1 if tokens == PROMPT else ROWS_OF_A_STEP) == 0
            slots = torch.where(is_kept, slots, -1)
            kept_bytes = int(is_kept.sum()) * 2 * kv_heads * head_dim * dtype.itemsize
            moved = 2 * qkv.nbytes + sum(x.nbytes for x in (cos, sin, slots)) + kept_bytes
            moved += weight.nbytes if norm else 0
            turn = itertools.cycle(layers)
            arguments, options = (qkv, cos, sin, slots), dict(num_heads=heads, qk_norm_weight=weight)

            def fused(arguments=arguments, options=options, turn=turn):
                return rope_cache(*arguments, *next(turn), **options)

            def unfused(arguments=arguments, options=options, turn=turn):
                return separate(*arguments, *next(turn), **options)

            name = f"{model} {heads}/{kv_heads} D{head_dim} T {tokens}"
            cases.append(Case(name, fused, moved))
            if device == "cuda":
                cases.append(Case(f"{name}, separate", unfused, moved))
    return cases


if __name__ == "__main__":
    args = parse_args(__doc__)
    cases = make_cases(args.device, args.dtype)
    run_cases("rope_cache", cases[:QUICK_CASES] if args.quick else cases, args)
