"""Time ``gather_requests`` at decode steps. Floor: every argument read once, every result written.

    python -m bench.ops.gather_requests [--device cpu] [--quick] [--json FILE]

The requests are in no order in a table of ``R`` rows, and all of them were in the step before. ``N`` rows are written,
for a graph of more requests. There are next to no bytes: the time is one launch and two dependent loads. Nothing is of
a float dtype but the thresholds, whatever ``--dtype`` is. The reference is some thirty launches.
"""

from functools import partial

import torch

from bench.harness.cases import Benchmark, Case
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_requests, gather_requests
from lenvm_kernels.reference import gather_requests as reference
from lenvm_kernels.types import StepHistory

BYTES = 8 + 8 + 4 + 8 + 1  # a request's token, table row, length, slot and whether it is active
TABLE_BYTES = 4 + 1 + 4 + 4 + 8  # what is read of its row
HISTORY_BYTES = 2 * (8 + 8)  # its place and step, read and written


def make_case(device: str, *, B: int, N: int, R: int, dtype: str) -> Case:
    guidance = parse_guidance({"target_length": 100})
    table = GuidanceTable.from_params([guidance] * R, [{0}] * R, device)
    rows = torch.randperm(R, device=device)[:B]
    tokens, slots = torch.randint(1000, (2, B), device=device).unbind()
    lengths = torch.full((B,), 1000, dtype=torch.int32, device=device)
    history = StepHistory(
        torch.arange(R, device=device),
        torch.zeros(R, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.int64, device=device),
    )
    out = empty_requests(N, torch.device(device))
    options = dict(active=torch.ones(B, dtype=torch.bool, device=device), history=history, padding_row=R - 1, out=out)
    moved = B * (BYTES + TABLE_BYTES + HISTORY_BYTES) + sum(x.nbytes for x in out)
    columns = (table.mode, table.return_values, table.entropy_threshold, table.prompt_len, table.seed)
    return Case(
        partial(gather_requests, table, tokens, rows, lengths, slots, **options),
        moved,
        reference=partial(reference.gather_requests, *columns, tokens, rows, lengths, slots, **options),
    )


BENCHMARK = Benchmark(
    "gather_requests",
    make_case,
    production=dict(B=64, N=64, R=257),
    axes=dict(B=[1, 8, 33], N=[128, 256], R=[65, 4097]),
    others=[dict(B=256, N=256), dict(B=200, N=256), dict(B=512, N=512, R=4097)],
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
