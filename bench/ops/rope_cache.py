"""Rotary embedding and cache write: time against the floor, and beside separate PyTorch operations.

    python -m bench.ops.rope_cache [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

One layer of a value model (Qwen3-1.7B has a norm of queries and keys) for T tokens. A decode step keeps one row in six,
one delta token and five candidates a request; a prompt keeps all. The peer gets the
indices of the rows that are kept.
"""

from collections.abc import Sequence
from functools import partial

import torch

from bench.harness.cases import FLOATS, Benchmark, Case
from bench.models import DIMENSIONS
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.reference.rope_cache import rms_norm, rotate

SLOTS = 65_536


def make_call(
    device: str,
    *,
    heads: tuple[int, int, int],
    T: int,
    slots: int = SLOTS,
    dtype: str,
    index: torch.dtype = torch.int64,
    given: Sequence[str] = (),
) -> partial:
    """A call with ``heads`` of queries, of keys and values, and their dimension; and some of the options."""
    num_heads, kv_heads, head_dim = heads
    random = partial(torch.randn, dtype=getattr(torch, dtype), device=device)
    k_cache, v_cache = (random(slots, kv_heads, head_dim) for _ in range(2))
    options = dict(
        qk_norm_weight=random(num_heads + kv_heads, head_dim),
        num_rows=torch.tensor([T], dtype=torch.int32, device=device),
    )
    angle = torch.rand(T, head_dim // 2, device=device)
    places = torch.randperm(slots, device=device)[:T].to(index)
    return partial(
        rope_cache,
        *(random(T, (num_heads + 2 * kv_heads) * head_dim), angle.cos(), angle.sin(), places, k_cache, v_cache),
        num_heads=num_heads,
        **{name: options[name] for name in given},
    )


def make_case(device: str, *, model: str, T: int, kept: str, dtype: str) -> Case:
    _, _, _, heads, kv_heads, head_dim, has_norm = DIMENSIONS[model]
    given = ["qk_norm_weight"] if has_norm else []
    call = make_call(device, heads=(heads, kv_heads, head_dim), T=T, dtype=dtype, given=given)
    qkv, cos, sin, slots, k_cache, v_cache = call.args
    weight = call.keywords.get("qk_norm_weight")
    is_kept = torch.arange(T, device=device) % int(kept.removeprefix("1 in ")) == 0
    slots.masked_fill_(~is_kept, -1)
    kept_rows = is_kept.nonzero()[:, 0]
    kept_slots = slots[kept_rows]
    kept_bytes = len(kept_rows) * 2 * kv_heads * head_dim * k_cache.itemsize

    def separate():
        qk, v = qkv.view(T, -1, head_dim).split((heads + kv_heads, kv_heads), dim=1)
        if weight is not None:
            qk = rms_norm(qk, weight, 1e-6)
        q, k = rotate(qk, cos[:, None], sin[:, None]).split((heads, kv_heads), dim=1)
        k_cache.index_copy_(0, kept_slots, k[kept_rows])
        v_cache.index_copy_(0, kept_slots, v[kept_rows])
        return q, k, v

    return Case(
        call,
        2 * qkv.nbytes + sum(x.nbytes for x in (cos, sin, slots)) + kept_bytes + (weight.nbytes if has_norm else 0),
        peers={"separate operators": lambda: separate},
    )


_EVERY = ("qk_norm_weight", "num_rows")
FORMS = {
    f"rope_cache {dtype} {heads[0]}/{heads[1]} D{heads[2]}{' with every option' * bool(given)}": dict(
        heads=heads, T=48, slots=4096, dtype=FLOATS[dtype], given=given
    )
    for dtype, heads, given in (
        ("bf16", (9, 3, 64), ()),
        ("bf16", (12, 2, 128), ()),
        ("bf16", (16, 8, 128), _EVERY),
        ("bf16", (28, 4, 128), ()),
        ("bf16", (32, 32, 96), _EVERY),
        ("bf16", (64, 8, 256), _EVERY),
        ("fp16", (16, 8, 128), _EVERY),
        ("fp32", (16, 8, 128), _EVERY),
    )
}
FORMS["rope_cache, every size 1"] = dict(
    heads=(1, 1, 2), T=1, slots=1, dtype="float32", index=torch.int32, given=_EVERY
)

BENCHMARK = Benchmark(
    "rope_cache",
    make_case,
    production=dict(model="Qwen2.5-1.5B", T=384, kept="1 in 6"),
    axes=dict(model=["Qwen3-1.7B", "Qwen2.5-0.5B", "Qwen2.5-3B"], T=[6, 48, 1536, 3072]),
    others=[
        dict(T=4096, kept="1 in 1"),
        dict(T=32_768, kept="1 in 1"),
        dict(model="Qwen3-1.7B", T=3072),
        dict(model="Qwen3-1.7B", T=4096, kept="1 in 1"),
    ],
    quick=(dict(model="Qwen2.5-0.5B", T=48), dict(model="Qwen3-1.7B")),
)

if __name__ == "__main__":
    BENCHMARK.main()
