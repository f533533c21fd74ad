"""Time ``gather_requests`` at decode steps. Floor: every argument read once, every result written.

    python -m bench.ops.gather_requests [--device cpu] [--quick] [--json FILE]

The requests are in no order in a table of ``R`` rows. Each has grown by
``new`` tokens (1: they come as ``[B]``), of which the last 16 are held. ``N`` rows are written, for a graph of more
requests. There are next to no bytes: the time is one launch and two dependent loads.
Nothing is of a float dtype but the thresholds, whatever ``--dtype`` is. The reference is some sixty launches.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.harness.cases import Benchmark, Case
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.gather_requests import empty_history, empty_requests, gather_requests
from lenvm_kernels.reference import gather_requests as reference

LENGTH, HELD = 1000, 16
BYTES = 8 + 4 + 1  # a request's table row, length and whether it is active
TABLE_BYTES = 4 + 1 + 4 + 4 + 8 + 4 + 1 + 4  # what is read of its row
HISTORY_BYTES = 2 * 4 + 4  # the number of tokens told, read and written; and that of tokens cached, read
TOKEN_BYTES = 8 + 4  # a new one, read and held


def make_call(
    device: str,
    *,
    B: int,
    N: int | None = None,
    R: int,
    new: int = 1,
    held: int = HELD,
    given: Sequence[str] = (),
) -> partial:
    """A call with some of the options. ``N`` rows (None: ``B``) are written."""
    guidance = parse_guidance({"target_length": 100})
    table = GuidanceTable.from_params([guidance] * R, [{0}] * R, device).columns
    rows = torch.randperm(R, device=device)[:B]
    tokens = torch.randint(1000, (B,) if new == 1 else (B, new), device=device)
    lengths = torch.full((B,), LENGTH, dtype=torch.int32, device=device)
    history = empty_history(R, held, torch.device(device))
    history.told_lens.fill_(LENGTH - new)
    history.cached_lens.fill_(LENGTH - 1)
    options: dict[str, Any] = dict(
        active=torch.ones(B, dtype=torch.bool, device=device),
        history=history,
        padding_row=R - 1,
        out=empty_requests(B if N is None else N, torch.device(device)),
        new_lens=torch.full((B,), new, dtype=torch.int32, device=device),
    )
    return partial(gather_requests, table, tokens, rows, lengths, **{name: options[name] for name in given})


def make_case(device: str, *, B: int, N: int, R: int, new: int, dtype: str) -> Case:
    given = ["active", "history", "padding_row", "out", *(["new_lens"] if new > 1 else [])]
    call = make_call(device, B=B, N=N, R=R, new=new, given=given)
    table = call.args[0]
    written = sum(x.nbytes for x in call.keywords["out"])
    columns = (table.mode, table.return_values, table.entropy_threshold, table.prompt_len, table.seed)
    columns += (table.value_stride, table.span_ended, table.span_start_bits, table.faults)
    return Case(
        call,
        B * (BYTES + TABLE_BYTES + HISTORY_BYTES + new * TOKEN_BYTES) + written,
        reference=partial(reference.gather_requests, *columns, *call.args[1:], **call.keywords),
    )


_EVERY = ("active", "history", "out")
FORMS = {"gather_requests": dict(B=64, R=64), "gather_requests with every option": dict(B=64, R=64, given=_EVERY)}
FORMS["gather_requests of several tokens"] = dict(B=64, R=64, new=4, given=(*_EVERY, "new_lens"))
FORMS["gather_requests, every size 1"] = dict(B=1, R=1, held=1, given=["history"])

BENCHMARK = Benchmark(
    "gather_requests",
    make_case,
    production=dict(B=64, N=64, R=257, new=1),
    axes=dict(B=[1, 8, 33], N=[128, 256], R=[65, 4097], new=[4, 16]),
    others=[dict(B=256, N=256), dict(B=200, N=256), dict(B=512, N=512, R=4097)],
    quick=({}, dict(B=1)),
)

if __name__ == "__main__":
    BENCHMARK.main()
