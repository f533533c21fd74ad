"""Time of ``begin_step`` at decode steps. Two dependent loads.

The requests are rows of a table of ``R`` in random order. Each has grown by ``new`` tokens, of which the last 16 are
stored, and a chain of ``D`` drafts. ``N`` rows are written, as for a graph of N requests.
"""

from functools import partial

import torch

from bench.harness import Benchmark, TimedCase, nbytes
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.begin_step import begin_step, empty_history, empty_requests
from lenvm_kernels.types import Drafts

LENGTH = 1000
# Table row, length, activity; columns of the table; numbers of tokens; and per new token its id, read and stored.
REQUEST_BYTES, TABLE_BYTES, HISTORY_BYTES, TOKEN_BYTES = 8 + 4 + 1 + 16, 18, 12, 8 + 4
EVERY = ("active", "history", "out")


def chains(B, D, index=torch.int64):
    """A chain of ``D`` drafts per request, with token ids of dtype ``index``."""
    parents = torch.arange(D, dtype=torch.int32).expand(B, -1) - 1
    return Drafts(torch.randint(1000, (B, D), dtype=index), parents.contiguous())


def make_call(*, B=64, N=None, R=64, new=1, held=16, D=0, index=torch.int64, given=()):
    """A call with the options ``given``. ``N`` rows are written; if None, ``B``."""
    device = torch.get_default_device()
    table = GuidanceTable.from_params([parse_guidance({"target_length": 100})] * R, [{0}] * R, device).columns
    history = empty_history(R, held, device)
    history.passed_lens.fill_(LENGTH - new)
    history.cached_lens.fill_(LENGTH - 1)
    options = dict(
        active=torch.ones(B, dtype=torch.bool),
        history=history,
        padding_row=R - 1,
        out=empty_requests(B if N is None else N, device, D),
        new_lens=torch.full((B,), new, dtype=torch.int32),
    )
    if D:
        options["drafts"], given = chains(B, D, index), [*given, "drafts"]
    tokens, lengths = torch.randint(1000, (B,) if new == 1 else (B, new)), torch.full((B,), LENGTH, dtype=torch.int32)
    given = {name: options[name] for name in given}
    return partial(begin_step, table, tokens, torch.randperm(R)[:B], lengths, **given)


def make_case(*, B, N, R, new, D):
    call = make_call(B=B, N=N, R=R, new=new, D=D, given=[*EVERY, "padding_row", *(["new_lens"] if new > 1 else [])])
    read = B * (REQUEST_BYTES + TABLE_BYTES + HISTORY_BYTES + new * TOKEN_BYTES + D * TOKEN_BYTES)
    return TimedCase(call, read + nbytes(call.keywords["out"]))


FORMS = {"begin_step": {}, "begin_step with every option": dict(given=EVERY)}
FORMS["begin_step of several tokens"] = dict(new=4, given=(*EVERY, "new_lens"))
FORMS["begin_step, every size 1"] = dict(B=1, R=1, held=1, given=["history"])

FORMS |= {f"begin_step D{D}": dict(D=D, index=torch.int32 if D == 1 else torch.int64, given=EVERY) for D in (1, 4, 15)}

PRODUCTION = dict(B=64, N=64, R=257, new=1, D=0)
AXES = dict(B=[1, 8, 33], N=[128], R=[65, 4097], new=[4, 16], D=[1, 4, 15])
OTHERS = [dict(B=512, N=512, R=4097, D=4)]
BENCHMARK = Benchmark("begin_step", make_case, PRODUCTION, AXES, OTHERS, quick=[{}, dict(B=1)])
