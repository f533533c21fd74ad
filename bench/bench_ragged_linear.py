"""Ragged linear: time against the floor, and beside cuBLAS on exactly the live rows on a GPU.

    python -m bench.bench_ragged_linear [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

The projections of Qwen2.5-1.5B, with T four times the live rows: a captured graph has room for more rows than a step
has. cuBLAS is told the number of rows, and computes the bare matmul: no norm, no SwiGLU, no residual. Every call takes
the next of several copies of the weight, together larger than any L2: between two steps all layers pass through the
cache. The rows stay warm, as the layer before has just written them.
"""

import itertools

import torch
import torch.nn.functional as F

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.ragged_linear import ragged_linear

# Columns of the result, columns of x, and which options.
LAYERS = {
    "qkv": (2048, 1536, ("bias", "norm_eps")),
    "o": (1536, 1536, ("residual",)),
    "gate_up": (8960, 1536, ("norm_eps", "swiglu")),
    "down": (1536, 8960, ("residual",)),
}
LIVE_ROWS = (8, 64, 384, 1024)
STATIC_ROWS = 4  # times the live rows
QUICK_CASES = 4
COLD_BYTES = 256 * 2**20


def make_cases(device: str, dtype: torch.dtype) -> list[Case]:
    """One case a layer, number of live rows and implementation."""
    cases = []
    for layer, (outputs, size, wanted) in LAYERS.items():
        columns = 2 * outputs if "swiglu" in wanted else outputs
        weight_bytes = columns * size * dtype.itemsize
        copies = 1 + COLD_BYTES // weight_bytes if device == "cuda" else 1
        weights = [torch.randn(columns, size, dtype=dtype, device=device) * size**-0.5 for _ in range(copies)]
        for rows in LIVE_ROWS:
            tokens = STATIC_ROWS * rows
            x = torch.randn(tokens, size, dtype=dtype, device=device)
            options = {
                "bias": torch.zeros(columns, dtype=dtype, device=device),
                "norm_eps": 1e-6,
                "residual": torch.randn(tokens, outputs, dtype=dtype, device=device),
                "swiglu": True,
            }
            options = {name: options[name] for name in wanted}
            num_rows = torch.tensor([rows], dtype=torch.int32, device=device)
            elements = rows * (size + outputs * (2 if "residual" in wanted else 1)) + columns * ("bias" in wanted)
            moved = weight_bytes + elements * dtype.itemsize
            operations = 2 * rows * columns * size
            turn = itertools.cycle(weights)

            def ragged(x=x, turn=turn, num_rows=num_rows, options=options):
                return ragged_linear(x, next(turn), num_rows=num_rows, **options)

            def cublas(x=x[:rows], turn=turn):
                return F.linear(x, next(turn))

            name = f"{layer} [{columns}, {size}] rows {rows} of {tokens}"
            cases.append(Case(name, ragged, moved, operations))
            if device == "cuda":
                cases.append(Case(f"{name}, cuBLAS", cublas, moved, operations))
    return cases


if __name__ == "__main__":
    args = parse_args(__doc__)
    cases = make_cases(args.device, args.dtype)
    run_cases("ragged_linear", cases[:QUICK_CASES] if args.quick else cases, args)
