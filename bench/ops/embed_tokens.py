"""Time ``embed_tokens``. Floor: each token's row of the embedding is read, every result written.

    python -m bench.ops.embed_tokens [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

T token rows of a value model, of which ``live`` in a hundred are there: the rest of a step's is padding. The tokens are
all different, so that no row of the embedding is in a cache. The peer is what a model in PyTorch does: it computes the
padding too, and no sums of squares.
"""

from functools import partial

import torch
import torch.nn.functional as F

from bench.harness.cases import Benchmark, Case
from bench.models import DIMENSIONS, VOCAB
from lenvm_kernels.ops.embed_tokens import embed_tokens
from lenvm_kernels.reference import embed_tokens as reference


def make_case(device: str, *, model: str, T: int, live: int, dtype: str) -> Case:
    size, _, _, _, _, head_dim, _ = DIMENSIONS[model]
    embedding = torch.randn(VOCAB, size, dtype=getattr(torch, dtype), device=device)
    token_ids = torch.randperm(VOCAB, device=device)[:T]
    positions = torch.randint(4096, (T,), device=device)
    inv_freq = 1e6 ** -(torch.arange(head_dim // 2, device=device) / (head_dim // 2))
    there = T * live // 100
    num_rows = torch.tensor([there], dtype=torch.int32, device=device)
    arguments = (token_ids, positions, embedding, inv_freq)

    def separate():
        angles = positions[:, None].float() * inv_freq
        return F.embedding(token_ids, embedding), angles.cos(), angles.sin()

    # Of a token: its id and position; its row, read and written; the sums; cosine and sine.
    of_token = 8 + 8 + 2 * size * embedding.itemsize + size // 64 * 4 + 2 * (head_dim // 2) * 4
    return Case(
        partial(embed_tokens, *arguments, num_rows=num_rows),
        there * of_token,
        peers={"(separate operators)": lambda: separate},
        reference=partial(reference.embed_tokens, *arguments),
    )


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
