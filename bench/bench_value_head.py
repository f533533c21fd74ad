"""Value head: time against the floor, and beside cuBLAS + SiLU + GEMV on a GPU.

    python -m bench.bench_value_head [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

Every call takes the next of several copies of the weights, together larger than any L2: between two steps of a server
the layers of two models pass through the cache. The hidden states stay warm, as the model has just written them.
"""

import itertools

import torch
import torch.nn.functional as F

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.value_head import value_head

SIZES = (576, 896, 1536, 2048, 3584)  # SmolLM2-135M; Qwen2.5 0.5B, 1.5B, 3B, 7B
ROWS = (1, 8, 64, 384, 4096)
QUICK_CASES = 6
COLD_BYTES = 256 * 2**20


def cublas_head(hidden, fc_weight, fc_bias, summary_weight, summary_bias):
    """The unfused head: three launches, activations and logits in the weights' dtype."""
    return F.linear(F.silu(F.linear(hidden, fc_weight, fc_bias)), summary_weight, summary_bias).squeeze(-1)


def make_cases(device: str, dtype: torch.dtype) -> list[Case]:
    """One case a size, number of rows and implementation."""
    cases = []
    for size in SIZES:
        matrix_bytes = size * size * dtype.itemsize
        copies = 1 + COLD_BYTES // matrix_bytes if device == "cuda" else 1
        weights = [
            tuple(
                torch.randn(shape, dtype=dtype, device=device) * size**-0.5
                for shape in ((size, size), (size,), (1, size), (1,))
            )
            for _ in range(copies)
        ]
        norm_weight = torch.ones(size, dtype=dtype, device=device)
        for rows in ROWS:
            hidden = torch.randn(rows, size, dtype=dtype, device=device)
            token_rows = torch.randperm(rows, device=device)
            moved = matrix_bytes + (2 * size + 1 + rows * size) * dtype.itemsize + rows * 4
            norm_and_gather_moved = moved + size * dtype.itemsize + rows * token_rows.itemsize
            operations = 2 * rows * size * size + 2 * rows * size
            turn = itertools.cycle(weights)

            def plain(hidden=hidden, turn=turn):
                return value_head(hidden, *next(turn))

            def norm_and_gather(hidden=hidden, turn=turn, token_rows=token_rows, norm_weight=norm_weight):
                return value_head(hidden, *next(turn), token_rows=token_rows, norm_weight=norm_weight)

            def cublas(hidden=hidden, turn=turn):
                return cublas_head(hidden, *next(turn))

            name = f"H {size} M {rows}"
            cases.append(Case(name, plain, moved, operations))
            cases.append(Case(f"{name}, norm and gather", norm_and_gather, norm_and_gather_moved, operations))
            if device == "cuda":
                cases.append(Case(f"{name}, cuBLAS + SiLU + GEMV", cublas, moved, operations))
    return cases


if __name__ == "__main__":
    args = parse_args(__doc__)
    cases = make_cases(args.device, args.dtype)
    run_cases("value_head", cases[:QUICK_CASES] if args.quick else cases, args)
