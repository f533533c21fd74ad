"""Time ``ragged_layout`` at decode steps and for a long prompt. Floor: every argument read once, every result written.

Run it as ``python -m bench.bench_ragged_layout``; ``--device cpu`` times the reference. A decode step has next to no
bytes: its time is one launch and a few dependent loads. On a GPU each case is also timed in plain PyTorch, some forty
launches.
"""

from functools import partial

import torch

from bench._common import Case, parse_args, run_cases
from lenvm_kernels.ops.ragged_layout import ragged_layout

COLUMNS = 8
PROMPT = 32_768


def make_cases(name: str, requests: int, tokens: int, device: str) -> list[Case]:
    """Requests with the same number of delta tokens, ``tokens`` in all, and all their candidates."""
    i32 = partial(torch.full, (requests,), dtype=torch.int32, device=device)
    delta_len = tokens // requests
    arguments = (
        torch.randint(0, 150_000, (tokens,), device=device),
        torch.randperm(tokens, device=device),
        torch.arange(0, tokens, delta_len, dtype=torch.int32, device=device),
        i32(delta_len),
        torch.randint(0, 150_000, (requests, COLUMNS), dtype=torch.int32, device=device),
        i32(COLUMNS),
        i32(1000),
    )
    layout = ragged_layout(*arguments)
    moved = sum(tensor.nbytes for tensor in (*arguments, *vars(layout).values()))
    cases = [Case(name, partial(ragged_layout, *arguments), moved)]
    if device == "cuda":
        cases.append(Case(f"{name}, PyTorch", partial(ragged_layout, *arguments, backend="reference"), moved))
    return cases


def main() -> None:
    args = parse_args(__doc__)
    cases = [
        case
        for requests in ([1, 64] if args.quick else [1, 64, 512])
        for case in make_cases(f"decode step B {requests} K {COLUMNS}", requests, requests, args.device)
    ]
    if not args.quick:
        cases += make_cases(f"prompt of {PROMPT} tokens, K {COLUMNS}", 1, PROMPT, args.device)
    run_cases("ragged_layout", cases, args)


if __name__ == "__main__":
    main()
