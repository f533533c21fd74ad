"""Time ``commit_winner``. Floor: keys and values of every row that commits are read and written once.

Run it as ``python -m bench.bench_commit_winner``; ``--device cpu`` times the reference. Every row commits, the most
work there can be. On a GPU it stands beside PyTorch's gather and scatter, to which the rows to move are told.
"""

import itertools

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.commit_winner import commit_winner

MODELS = {"0.5B": (24, 2, 64), "1.5B": (28, 2, 128), "7B": (28, 4, 128)}  # Qwen2.5: layers, Hkv, D
CANDIDATES = 8


def make_cases(model: str, rows: int, dtype: torch.dtype, device: str) -> list[Case]:
    layers, heads, head_dim = MODELS[model]
    tokens = rows * CANDIDATES
    cache = torch.zeros(2, layers, 4 * tokens, heads, head_dim, dtype=dtype, device=device)
    last = torch.randn(2, layers, tokens, heads, head_dim, device=device).to(dtype)
    i32 = dict(dtype=torch.int32, device=device)
    ids = torch.arange(tokens, **i32).view(rows, CANDIDATES)
    order, zeros = torch.arange(rows, **i32), torch.zeros(rows, **i32)
    winner = torch.randint(CANDIDATES, (rows,), device=device)
    drawn = ids[order, winner]
    slots = torch.randperm(4 * tokens, device=device)[:rows]

    def commit():
        return commit_winner(*cache, *last, ids, ids, zeros, order, drawn, zeros, slots)

    # Beside keys and values a row's candidates, the winner's row and position; row, token, position, slot and result.
    moved = rows * (2 * 2 * layers * heads * head_dim * dtype.itemsize + CANDIDATES * 4 + 4 + 4 + 3 * 4 + 8 + 1)
    cases = [Case(f"{model} B={rows}", commit, moved)]
    if device == "cuda":

        def gather_and_scatter():
            return cache.index_copy_(2, slots, last.index_select(2, drawn))

        cases.append(Case(f"{model} B={rows}, gather and scatter", gather_and_scatter, moved))
    return cases


def main() -> None:
    args = parse_args(__doc__)
    models = ["0.5B"] if args.quick else list(MODELS)
    rows = [1, 8] if args.quick else [1, 8, 64, 256]
    cases = [case for m, b in itertools.product(models, rows) for case in make_cases(m, b, args.dtype, args.device)]
    run_cases("commit_winner", cases, args)


if __name__ == "__main__":
    main()
