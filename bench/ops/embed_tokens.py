"""Time ``embed_tokens``. Floor: each token's row of the embedding is read, every result written.

    python -m bench.ops.embed_tokens [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

T token rows of a value model, of which ``live`` in a hundred are there: the rest of a step's is padding. The tokens are
all different, so that no row of the embedding is in a cache. The peer is what a model in PyTorch does: it computes the
padding too, and no sums of squares.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.cases import FLOATS, Benchmark, Case
from bench.models import DIMENSIONS, VOCAB
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.reference import embed_tokens as reference


def make_call(
    device: str, *, size: int, half: int, T: int, V: int = VOCAB, dtype: str, live: int | None = None, **options: Any
) -> partial:
    """A call with ``half`` as many frequencies as the head dimension, and ``live`` rows (None: all, and no number)."""
    embedding = torch.randn(V, size, dtype=getattr(torch, dtype), device=device)
    token_ids, positions = torch.randperm(V, device=device)[:T], torch.randint(4096, (T,), device=device)
    inv_freq = 1e6 ** -(torch.arange(half, device=device) / half)
    if live is not None:
        options["num_rows"] = torch.tensor([live], dtype=torch.int32, device=device)
    return partial(embed_tokens, token_ids, positions, embedding, inv_freq, **options)


def make_case(device: str, *, model: str, T: int, live: int, dtype: str) -> Case:
    size, _, _, _, _, head_dim, _ = DIMENSIONS[model]
    there = T * live // 100
    call = make_call(device, size=size, half=head_dim // 2, T=T, dtype=dtype, live=there)
    token_ids, positions, embedding, inv_freq = call.args

    def separate():
        angles = positions[:, None].float() * inv_freq
        return F.embedding(token_ids, embedding), angles.cos(), angles.sin()

    # Of a token: its id and position; its row, read and written; the sums; cosine and sine.
    of_token = 8 + 8 + 2 * size * embedding.itemsize + size // 64 * 4 + 2 * (head_dim // 2) * 4
    return Case(
        call,
        there * of_token,
        peers={"(separate operators)": lambda: separate},
        reference=partial(reference.embed_tokens, *call.args),
    )


FORMS: dict[str, dict[str, Any]] = {
    f"embed_tokens {dtype} H{size} D{2 * half}": dict(
        size=size, half=half, T=48, dtype=FLOATS[dtype], live=48, rope_scale=1.5
    )
    for dtype, size, half in (
        ("bf16", 896, 32),
        ("bf16", 1536, 64),
        ("bf16", 3584, 48),
        ("fp16", 2048, 64),
        ("fp32", 2048, 64),
        ("fp32", 2050, 64),
    )
}
FORMS["embed_tokens fp32 H2050 D128, all tokens"] = dict(size=2050, half=64, T=48, dtype="float32")
FORMS["embed_tokens, every size 1"] = dict(size=1, half=1, T=1, V=1, dtype="float32", live=1)

BENCHMARK = Benchmark(
    "embed_tokens",
    make_case,
    production=dict(model="Qwen2.5-1.5B", T=576, live=66),
    axes=dict(model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"], T=[9, 72, 2304, 4608], live=[10, 100]),
    others=[dict(T=4096, live=100), dict(model="Qwen3-1.7B", T=4608)],
    quick=(dict(model="Qwen2.5-0.5B", T=9), dict(model="Qwen2.5-0.5B", T=72)),
)

if __name__ == "__main__":
    BENCHMARK.main()
