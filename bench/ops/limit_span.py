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

from bench.harness.cases import FLOATS, Benchmark, Case
from bench.models import VOCAB
from bench.ops.expand_drafts import chains
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.guidance.spans import MAX_CLOSING_TOKENS, MAX_SPAN_TOKENS
from lenvm_kernels.ops import limit_span as ops
from lenvm_kernels.reference import limit_span as reference

EOS = 2  # tokens of a request that end its sequence
BYTES = 8 + 8 + 4 + 1  # a request's token, table row and length, and whether the token ends a line
# Of a row of the table: the tokens that end the sequence and the span, and those of its patterns and its closing; three
# columns of bits, two limits and a switch; and where the span stands, read and written.
TABLE_BYTES = 4 * (EOS + 1 + MAX_SPAN_TOKENS + MAX_CLOSING_TOKENS) + 4 * 3 + 4 * 2 + 1 + 2 * (4 * 4 + 1)


def make_call(
    device: str,
    *,
    B: int,
    D: int = 0,
    V: int = VOCAB,
    dtype: str | None = "float32",
    new: int | None = None,
    index: torch.dtype = torch.int64,
    hard_limit: int = 1,
    breaks: bool = True,
    room: tuple[int, int] | None = None,
) -> partial:
    """A call with logits of ``dtype`` (None: without), and ``new`` tokens of a request (None: one, and no lengths).

    The requests have a chain of ``D`` drafts, whose tokens are ``index`` numbers. ``breaks``: it is known which tokens
    end lines. With ``room`` for so many end tokens and temperatures of tokens the table is an engine's, and has no
    request yet."""
    if room is not None:
        table = GuidanceTable(B, device, max_eos=room[0], max_scaled_tokens=room[1]).columns
    else:
        of_span = {"target_length": 100, "end_token_ids": [V - 3], "hard_limit": hard_limit}
        table = GuidanceTable.from_params([parse_guidance(of_span)] * B, [{V - 1, V - 2}] * B, device).columns
    logits = None
    if dtype is not None:
        logits = torch.randn(B * (1 + D), V, dtype=getattr(torch, dtype), device=device)
    tokens = torch.zeros(B, new or 1, dtype=torch.int64, device=device)
    options: dict[str, Any] = dict(drafts=chains(B, D, device, index)) if D else {}
    if new is not None:
        options["new_lens"] = torch.ones(B, dtype=torch.int32, device=device)
    if breaks:
        options["text_breaks"] = torch.zeros(V, dtype=torch.int8, device=device)
    lengths = torch.full((B,), 1000, dtype=torch.int32, device=device)
    return partial(ops.limit_span, logits, table, tokens, torch.randperm(B, device=device), lengths, **options)


def make_case(device: str, *, B: int, D: int, dtype: str) -> Case:
    call = make_call(device, B=B, D=D, dtype=dtype)
    logits, table, tokens, rows, lengths = call.args
    columns = [getattr(table, name) for name in ops._Table._fields]
    drafts = call.keywords.get("drafts")
    of_drafts: Any = drafts or (None, None)
    # Of a node the results, and its logits that are changed, read and written.
    of_nodes = B * (1 + D) * (1 + 4 + 2 * logits.itemsize * (EOS + 1))
    return Case(
        call,
        B * (BYTES + TABLE_BYTES) + of_nodes + sum(x.nbytes for x in drafts or ()),
        reference=partial(
            reference.limit_span,
            logits,
            *columns,
            tokens,
            None,
            rows,
            lengths,
            *of_drafts,
            call.keywords["text_breaks"],
        ),
    )


_TABLE = dict(B=64, room=(8, 32))
FORMS: dict[str, dict[str, Any]] = {"limit_span without logits": dict(_TABLE, dtype=None)}
FORMS |= {f"limit_span {dtype}": dict(_TABLE, dtype=FLOATS[dtype]) for dtype in FLOATS}
FORMS |= {
    f"limit_span fp16 D{D}": dict(_TABLE, D=D, dtype="float16", new=5, index=index)
    for D, index in ((1, torch.int32), (4, torch.int64), (15, torch.int64))
}
FORMS["limit_span, every size 1"] = dict(B=1, V=1, room=(1, 1))
FORMS["limit_span without lines"] = dict(_TABLE, breaks=False)

BENCHMARK = Benchmark(
    "limit_span",
    make_case,
    production=dict(B=64, D=0, dtype="float32"),
    axes=dict(B=[1, 8, 256, 512], D=[1, 4, 15], dtype=["bfloat16"]),
    quick=({}, dict(B=1, D=4)),
)

if __name__ == "__main__":
    BENCHMARK.main()
