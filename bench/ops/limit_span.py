"""Time of ``limit_span``. One launch and a few dependent loads.

Each request has an open span at its limit, a chain of ``D`` drafts (0: none), and two tokens that end the sequence: one
logit is raised and two are lowered at each node, the maximum work.
"""

from functools import partial

import torch

from bench.harness import FLOATS, Benchmark, TimedCase, nbytes
from bench.models import VOCAB
from bench.ops.begin_step import chains
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.guidance.spans import MAX_CLOSING_TOKENS, MAX_SPAN_TOKENS
from lenvm_kernels.ops.limit_span import limit_span

EOS = 2  # tokens that end the sequence of a request
# Token, table row, length; the tokens, bits, limits and state of a row of the table.
REQUEST_BYTES = 8 + 8 + 4 + 1 + 4 * (EOS + 1 + MAX_SPAN_TOKENS + MAX_CLOSING_TOKENS) + 4 * 3 + 4 * 3 + 1 + 2 * 25


def make_call(*, B=64, D=0, V=VOCAB, dtype="float32", new=None, index=torch.int64, breaks=True, room=None):
    """A call with logits of ``dtype``, and ``new`` tokens per request. If None, no logits; one token and no lengths.

    ``room``: numbers of end tokens and token temperatures in an engine's table without requests.
    """
    device = torch.get_default_device()
    if room is not None:
        table = GuidanceTable(B, device, max_eos=room[0], max_scaled_tokens=room[1])
    else:
        params = parse_guidance({"target_length": 100, "end_token_ids": [V - 3], "hard_limit": 1})
        table = GuidanceTable.from_params([params] * B, [{V - 1, V - 2}] * B, device)  # no drafts
    logits = None if dtype is None else torch.randn(B * (1 + D), V, dtype=getattr(torch, dtype))
    tokens, lengths = torch.zeros(B, new or 1, dtype=torch.int64), torch.full((B,), 1000, dtype=torch.int32)
    options = dict(drafts=chains(B, D, index)) if D else {}
    if new is not None:
        options["new_lens"] = torch.ones(B, dtype=torch.int32)
    if breaks:
        options["text_breaks"] = torch.zeros(V, dtype=torch.int8)
    return partial(limit_span, logits, table.columns, tokens, torch.randperm(B), lengths, **options)


def make_case(*, B, D, dtype):
    call = make_call(B=B, D=D, dtype=dtype)
    # Per node the results, and the changed logits read and written.
    node_bytes = 2 + 4 + 2 * call.args[0].itemsize * (EOS + 1)
    return TimedCase(call, B * (REQUEST_BYTES + (1 + D) * node_bytes) + nbytes(call.keywords.get("drafts")))


_TABLE = dict(room=(8, 32))
FORMS = {f"limit_span {dtype}": dict(_TABLE, dtype=dtype) for dtype in (None, *FLOATS)}
for _D, _index in ((1, torch.int32), (4, torch.int64), (15, torch.int64)):
    FORMS[f"limit_span float16 D{_D}"] = dict(_TABLE, D=_D, dtype="float16", new=5, index=_index)
FORMS["limit_span, every size 1"] = dict(B=1, V=1, room=(1, 1))
FORMS["limit_span without lines"] = dict(_TABLE, breaks=False)

PRODUCTION = dict(B=64, D=0, dtype="float32")
AXES = dict(B=[1, 8, 512], D=[1, 4, 15], dtype=["bfloat16"])
BENCHMARK = Benchmark("limit_span", make_case, PRODUCTION, AXES, quick=[{}, dict(B=1, D=4)])
