"""Time of ``rope_cache``: one layer of a value model for T tokens.

A decode step keeps one row in six (a delta token and five candidates per request), a prompt keeps all rows. The peer
receives the kept rows.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from bench.models import DIMENSIONS
from lenvm_kernels.ops.rope_cache import rope_cache
from lenvm_kernels.reference.rope_cache import rms_norm, rotate


def make_call(*, heads, T=48, slots=4096, dtype="float32", index=torch.int64, given=()):
    """A call with the options ``given``; ``heads`` are query heads, key/value heads and their dimension."""
    num_heads, kv_heads, head_dim = heads
    random = partial(torch.randn, dtype=getattr(torch, dtype))
    norm = random(num_heads + kv_heads, head_dim)
    options = dict(qk_norm_weight=norm, num_rows=torch.tensor([T], dtype=torch.int32))
    angle, rows = torch.rand(T, head_dim // 2), torch.randperm(slots)[:T].to(index)
    caches = [random(slots, kv_heads, head_dim) for _ in range(2)]
    qkv, given = random(T, (num_heads + 2 * kv_heads) * head_dim), {name: options[name] for name in given}
    return partial(rope_cache, qkv, angle.cos(), angle.sin(), rows, *caches, num_heads=num_heads, **given)


def make_case(*, model, T, kept, dtype="bfloat16"):
    _, _, _, heads, kv_heads, head_dim, has_norm = DIMENSIONS[model]
    given = ["qk_norm_weight"] if has_norm else []
    call = make_call(heads=(heads, kv_heads, head_dim), T=T, slots=65_536, dtype=dtype, given=given)
    qkv, cos, sin, slots, k_cache, v_cache = call.args
    weight = call.keywords.get("qk_norm_weight")
    is_kept = torch.arange(T) % kept == 0
    slots.masked_fill_(~is_kept, -1)
    rows = is_kept.nonzero()[:, 0]

    def separate():
        qk, v = qkv.view(T, -1, head_dim).split((heads + kv_heads, kv_heads), dim=1)
        qk = qk if weight is None else rms_norm(qk, weight, 1e-6)
        q, k = rotate(qk, cos[:, None], sin[:, None]).split((heads, kv_heads), dim=1)
        k_cache.index_copy_(0, slots[rows], k[rows])
        v_cache.index_copy_(0, slots[rows], v[rows])
        return q, k, v

    moved = 2 * qkv.nbytes + nbytes(cos, sin, slots, weight) + len(rows) * (k_cache[0].nbytes + v_cache[0].nbytes)
    return TimedCase(call, moved, peers={"separate operators": lambda: separate})


_EVERY = ("qk_norm_weight", "num_rows")
_HEADS = ((16, 8, 128), (32, 32, 96), (64, 8, 256))
FORMS = {
    f"rope_cache {heads}": dict(heads=heads, dtype="bfloat16") for heads in ((9, 3, 64), (12, 2, 128), (28, 4, 128))
}
FORMS |= {f"rope_cache {h} with every option": dict(heads=h, dtype="bfloat16", given=_EVERY) for h in _HEADS}
FORMS |= {
    f"rope_cache {dtype}": dict(heads=(16, 8, 128), dtype=dtype, given=_EVERY) for dtype in ("float16", "float32")
}
FORMS["rope_cache, every size 1"] = dict(heads=(1, 1, 2), T=1, slots=1, index=torch.int32, given=_EVERY)

BENCHMARK = Benchmark(
    "rope_cache",
    make_case,
    dict(model="Qwen2.5-1.5B", T=384, kept=6),
    axes=dict(model=["Qwen3-1.7B", "Qwen2.5-0.5B"], T=[6, 48, 1536, 3072]),
    others=[dict(T=4096, kept=1), dict(T=32_768, kept=1), dict(model="Qwen3-1.7B", T=4096, kept=1)],
    quick=[dict(model="Qwen2.5-0.5B", T=48), dict(model="Qwen3-1.7B", T=48)],
)
