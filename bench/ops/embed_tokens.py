"""Time of ``embed_tokens``.

T token rows of which ``live`` percent exist; the rest is padding. The tokens are distinct, so that no row of the
embedding is cached. The peer also computes padding, but no sums of squares.
"""

from functools import partial

import torch
import torch.nn.functional as F

from bench.harness import Benchmark, TimedCase
from bench.models import DIMENSIONS, VOCAB
from lenvm_kernels.ops.embed_tokens import embed_tokens


def make_call(*, size, half, T, V=VOCAB, dtype="float32", live=None, **options):
    """A call with ``half`` frequencies and ``live`` rows. If None, all rows are live and their number is not passed."""
    token_ids, positions = torch.randperm(V)[:T], torch.randint(4096, (T,))
    if live is not None:
        options["num_rows"] = torch.tensor([live], dtype=torch.int32)
    embedding = torch.randn(V, size, dtype=getattr(torch, dtype))
    return partial(embed_tokens, token_ids, positions, embedding, 1e6 ** -(torch.arange(half) / half), **options)


def make_case(*, model, T, live, dtype="bfloat16"):
    size, _, _, _, _, head_dim, _ = DIMENSIONS[model]
    call = make_call(size=size, half=head_dim // 2, T=T, dtype=dtype, live=T * live // 100)
    token_ids, positions, embedding, inv_freq = call.args

    def separate():
        angles = positions[:, None].float() * inv_freq
        return F.embedding(token_ids, embedding), angles.cos(), angles.sin()

    # Token, position, embedding read and written, sums of squares, cosines and sines.
    row_bytes = 8 + 8 + 2 * embedding[0].nbytes + size // 64 * 4 + 2 * (head_dim // 2) * 4
    return TimedCase(call, T * live // 100 * row_bytes, peers={"(separate operators)": lambda: separate})


_SIZES = [("bfloat16", 896, 32), ("bfloat16", 1536, 64), ("bfloat16", 3584, 48), ("float16", 2048, 64)]
FORMS = {
    f"embed_tokens {dtype} H{size} D{2 * half}": dict(size=size, half=half, T=48, dtype=dtype, live=48, rope_scale=1.5)
    for dtype, size, half in [*_SIZES, ("float32", 2048, 64), ("float32", 2050, 64)]
}
FORMS["embed_tokens without a number of rows"] = dict(size=2050, half=64, T=48)
FORMS["embed_tokens, every size 1"] = dict(size=1, half=1, T=1, V=1, live=1)

BENCHMARK = Benchmark(
    "embed_tokens",
    make_case,
    dict(model="Qwen2.5-1.5B", T=576, live=66),
    axes=dict(model=["Qwen2.5-0.5B", "Qwen2.5-7B"], T=[9, 72, 2304, 4608], live=[10, 100]),
    quick=[dict(model="Qwen2.5-0.5B", T=9), dict(model="Qwen2.5-0.5B", T=72)],
)
