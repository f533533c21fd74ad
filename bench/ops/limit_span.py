"""Time ``limit_span``. Floor: what is read of the requests and of their nodes' logits, and written to these.

    python -m bench.ops.limit_span [--device cpu] [--quick] [--json FILE]

Every request has an open span that is at its limit, a chain of ``D`` drafts (0: none), and two tokens that end the
sequence: at each node one logit is raised and two are lowered, which is the most there is to do. There are next to no
bytes: the time is one launch and a few dependent loads. The dtype is that of the logits, as a case says, whatever
``--dtype`` is. The reference is some hundred launches.
"""

from functools import partial
from typing import Any

import torch

from bench.harness.cases import Benchmark, Case
from bench.models import VOCAB
from bench.ops.expand_drafts import chains
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.reference import limit_span as reference

EOS, ENDS = {VOCAB - 1, VOCAB - 2}, [VOCAB - 3]  # no drafts
BYTES = 8 + 8 + 4  # a request's token, table row and length
# What is read of a row of the table: the tokens that end something, the limit, the length of the prompt and a switch;
# and whether the span has ended, read and written.
TABLE_BYTES = 4 * (len(EOS) + len(ENDS)) + 4 + 4 + 1 + 2


def make_case(device: str, *, B: int, D: int, dtype: str) -> Case:
    guidance = parse_guidance({"target_length": 100, "end_token_ids": ENDS, "hard_limit": 1})
    table = GuidanceTable.from_params([guidance] * B, [EOS] * B, device)
    logits = torch.randn(B * (1 + D), VOCAB, device=device).to(getattr(torch, dtype))
    tokens, rows = torch.zeros(B, 1, dtype=torch.int64, device=device), torch.randperm(B, device=device)
    lengths = torch.full((B,), 1000, dtype=torch.int32, device=device)
    drafts = chains(B, D, device) if D else None
    columns = (table.eos_token_ids, table.span_end_token_ids, table.hard_limit, table.prompt_len, table.allows_eos)
    of_drafts: Any = drafts or (None, None)
    # Of a node the result, and its logits that are changed, read and written.
    of_nodes = B * (1 + D) * (1 + 2 * logits.itemsize * (len(EOS) + 1))
    return Case(
        partial(limit_span, logits, table, tokens, rows, lengths, drafts=drafts),
        B * (BYTES + TABLE_BYTES) + of_nodes + sum(x.nbytes for x in drafts or ()),
        reference=partial(
            reference.limit_span, logits, *columns, table.span_ended, tokens, None, rows, lengths, *of_drafts
        ),
    )


BENCHMARK = Benchmark(
    "limit_span",
    make_case,
    production=dict(B=64, D=0, dtype="float32"),
    axes=dict(B=[1, 8, 256, 512], D=[1, 4, 15], dtype=["bfloat16"]),
    quick=({}, dict(B=1, D=4)),
)

if __name__ == "__main__":
    BENCHMARK.main()
