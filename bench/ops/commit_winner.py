"""Time ``commit_winner``. Floor: keys and values of every token that commits are read and written once.

    python -m bench.ops.commit_winner [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

Each request has drawn ``new`` tokens, a path down its tree of ``K`` candidates (1: none has a parent). Every token
commits, the most work there can be. Beside it stands PyTorch's gather and scatter, to which the rows to move are told.
The cache is in the dtype of all else, or in fp8 (e4m3), which PyTorch's do not know.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.harness.cases import FLOATS, Benchmark, Case
from bench.models import DIMENSIONS
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.reference import commit_winner as reference


def make_call(
    device: str,
    *,
    layers: int,
    heads: int,
    head_dim: int,
    B: int,
    K: int,
    dtype: str,
    new: int | None = None,
    is_tree: bool = False,
    columns: int = 1,
    page_size: int = 1,
    cache: str = "dtype",
    index: torch.dtype = torch.int32,
) -> partial:
    """A call with ``index`` numbers as rows and tokens, ``new`` of a request (None: one, and no lengths).

    ``is_tree``: parents are given. A row of the table has so many ``columns``."""
    tokens, path_len = B * K, new or 1
    # As many slots as there are candidates: rows of the cache far from each other, as in a server.
    random = partial(torch.randn, layers, tokens, heads, head_dim, dtype=getattr(torch, dtype), device=device)
    slots_of, last = [random(), random()], [random(), random()]
    i32 = dict(dtype=torch.int32, device=device)
    ids = torch.arange(tokens, **i32).view(B, K)
    order, zeros = torch.arange(B, **i32), torch.zeros(B, **i32)
    path = torch.rand(B, K, device=device).argsort(1)[:, :path_len]  # columns, from the root down
    drawn, slots = ids.gather(1, path), torch.randperm(tokens // page_size, **i32)
    table = slots.repeat(-(-B * columns // len(slots)))[: B * columns].view(B, columns)
    options: dict[str, Any] = {} if new is None else dict(new_lens=zeros + new)
    if is_tree:
        options["candidate_parents"] = torch.full_like(ids, -1).scatter_(1, path[:, 1:], path[:, :-1].int())
    if cache == "fp8":
        slots_of = [torch.zeros_like(x, dtype=E4M3) for x in slots_of]
        options |= {name: torch.ones(layers, heads, device=device) for name in ("key_scales", "value_scales")}
    index_of = order.to(index)
    drawn = (drawn[:, 0] if new is None else drawn).to(index)
    of_requests = (index_of, drawn, zeros + path_len - 1, table, index_of)
    return partial(
        commit_winner, *slots_of, *last, ids, ids.to(index), zeros, *of_requests, page_size=page_size, **options
    )


def make_case(device: str, *, model: str, B: int, K: int, new: int, cache: str, dtype: str) -> Case:
    _, _, layers, _, heads, head_dim, _ = DIMENSIONS[model]
    sizes = dict(layers=layers, heads=heads, head_dim=head_dim, B=B, K=K, new=new, is_tree=new > 1, columns=new)
    call = make_call(device, **sizes, dtype=dtype, cache=cache)
    *pools, _, _, _, order, drawn, positions, slot_table, _ = call.args
    parents, new_lens = call.keywords.get("candidate_parents"), call.keywords["new_lens"]
    of_reference = (parents, order, drawn, new_lens, positions, order, slot_table, 1)
    token_bytes = 2 * layers * heads * head_dim * (pools[2].itemsize + pools[0].itemsize) + 3 * 4  # its id, row, slot

    def gather_and_scatter() -> Callable[[], object]:
        slots_of, last = torch.stack(pools[:2]), torch.stack(pools[2:])
        slots, rows = slot_table.flatten().long(), drawn.flatten()
        return lambda: slots_of.index_copy_(2, slots, last.index_select(2, rows))

    return Case(
        call,
        # Beside its tokens a request's candidates, their parents and position; place, tokens, position, row and result.
        B * (new * token_bytes + K * 4 * (2 if new > 1 else 1) + 4 + 5 * 4),
        peers={
            "gather and scatter": gather_and_scatter,
            "reference": lambda: partial(reference.commit_winner, *call.args[:7], *of_reference),
        }
        if cache != "fp8"
        else {},
    )


FORMS = {
    f"commit_winner {dtype} {layers} layers {heads} D{head_dim}{', int64' * (index is torch.int64)}{name}": dict(
        layers=layers, heads=heads, head_dim=head_dim, B=64, K=8, dtype=FLOATS[dtype], columns=4096, index=index
    )
    | form
    for dtype, layers, heads, head_dim, index in (
        ("bf16", 24, 2, 64, torch.int32),
        ("bf16", 28, 2, 128, torch.int32),
        ("bf16", 28, 2, 128, torch.int64),
        ("bf16", 30, 3, 64, torch.int64),
        ("bf16", 32, 32, 128, torch.int32),
        ("fp16", 28, 2, 128, torch.int32),
        ("fp32", 28, 2, 128, torch.int32),
        ("fp32", 32, 32, 128, torch.int64),
    )
    for name, form in {
        "": {},
        ", cache in e4m3": dict(cache="fp8"),
        ", several tokens": dict(new=4, is_tree=True, page_size=16),
    }.items()
}
_ONE = dict(layers=1, heads=1, head_dim=1, B=1, K=1, dtype="float32")
FORMS |= {
    "commit_winner, every size 1": _ONE,
    "commit_winner of a tree, every size 1": _ONE | dict(new=1, is_tree=True),
    "commit_winner to e4m3, every size 1": _ONE | dict(cache="fp8"),
}

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
