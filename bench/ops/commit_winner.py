"""Time ``commit_winner``. Floor: keys and values of every token that commits are read and written once.

    python -m bench.ops.commit_winner [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

Each request has drawn ``new`` tokens, a path down its tree of ``K`` candidates (1: none has a parent). Every token
commits, the most work there can be. Beside it stands PyTorch's gather and scatter, to which the rows to move are told.
The cache is in the dtype of all else, or in fp8 (e4m3), which PyTorch's do not know.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from bench.models import DIMENSIONS
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.reference import commit_winner as reference


def make_case(device: str, *, model: str, B: int, K: int, new: int, cache: str, dtype: str) -> Case:
    _, _, layers, _, heads, head_dim, _ = DIMENSIONS[model]
    tokens, dtype = B * K, getattr(torch, dtype)
    # As many slots as there are candidates: rows of the cache far from each other, as in a server.
    slots_of, last = (torch.randn(2, layers, tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(2))
    i32 = dict(dtype=torch.int32, device=device)
    ids = torch.arange(tokens, **i32).view(B, K)
    order, zeros = torch.arange(B, **i32), torch.zeros(B, **i32)
    path = torch.rand(B, K, device=device).argsort(1)[:, :new]  # columns, from the root down
    drawn, slots = ids.gather(1, path), torch.randperm(tokens, device=device)[: B * new]
    parents = torch.full_like(ids, -1).scatter_(1, path[:, 1:], path[:, :-1].int()) if new > 1 else None
    new_lens, slot_table = zeros + new, slots.view(B, new).int()
    scales = {}
    if cache == "fp8":
        slots_of = torch.zeros_like(slots_of, dtype=E4M3)
        scales = {name: torch.ones(layers, heads, device=device) for name in ("key_scales", "value_scales")}
    pools, of_candidates, positions = (*slots_of, *last), (ids, ids, zeros), zeros + new - 1
    of_reference = (parents, order, drawn, new_lens, positions, order, slot_table, 1)
    options = dict(new_lens=new_lens, candidate_parents=parents, **scales)
    token_bytes = 2 * layers * heads * head_dim * (last.itemsize + slots_of.itemsize) + 3 * 4  # its id, row and slot
    return Case(
        partial(commit_winner, *pools, *of_candidates, order, drawn, positions, slot_table, order, **options),
        # Beside its tokens a request's candidates, their parents and position; place, tokens, position, row and result.
        B * (new * token_bytes + K * 4 * (2 if new > 1 else 1) + 4 + 5 * 4),
        peers={
            "gather and scatter": lambda: lambda: slots_of.index_copy_(2, slots, last.index_select(2, drawn.flatten())),
            "reference": lambda: partial(reference.commit_winner, *pools, *of_candidates, *of_reference),
        }
        if not scales
        else {},
    )


BENCHMARK = Benchmark(
    "commit_winner",
    make_case,
    production=dict(model="Qwen2.5-1.5B", B=64, K=8, new=1, cache="dtype"),
    axes=dict(
        B=[1, 8, 256, 512], model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"], K=[2, 64], new=[4], cache=["fp8"]
    ),
    others=[dict(model="Qwen3-1.7B", B=512)],
    quick=(dict(model="Qwen2.5-0.5B", B=1), dict(B=8, cache="fp8")),
)

if __name__ == "__main__":
    BENCHMARK.main()
