"""Time of ``topk_candidates``. The floor reads the scores once.

The 39 MB of B = 64 in fp32 fit the L2 cache of an H200, so compare the cold time with the floor. FlashInfer's sampler
and vLLM's filter do another part of an engine's work on the same scores.
"""

from functools import partial

import torch
import triton

from bench import peers
from bench.harness import FLOATS, Benchmark, TimedCase
from bench.models import VOCAB
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB, empty_scored, topk_candidates

TABLE_ROWS, ENDS = 9, 8  # rows of the requests' table, end-of-sequence tokens per row
OF_TABLE = ("table", "table_rows", "generated", "text_breaks", "last_tokens")
OF_STEP = ("requests", "scored", "drawn", "step", "sample")
OPTIONS = ("temperature", "guided", "vocab_mask", *OF_TABLE)
IN_GRAPH = ("temperature", "guided", *OF_TABLE, *OF_STEP, "addresses", "is_aligned")


def make_call(*, B, K, V=VOCAB, dtype="float32", k=5, is_logits=True, given=(), score_all=False):
    """A call with ``K`` slots for candidates and the options ``given``."""
    device = torch.get_default_device()

    def full(*shape, value=0.0, dtype=torch.float32):
        return torch.full(shape, value, dtype=dtype)

    requests = empty_requests(B, device)
    for x in requests:
        x.fill_(1)
    options = dict(
        temperature=full(B, value=1.0),
        guided=full(B, value=1, dtype=torch.bool),
        vocab_mask=full(B, -(-V // 32), value=-1, dtype=torch.int32),
        table=GuidanceTable(TABLE_ROWS, device, max_eos=ENDS).columns,
        table_rows=torch.randint(TABLE_ROWS, (B,)),
        generated=full(B, dtype=torch.int32),
        text_breaks=full(V, dtype=torch.int8),
        last_tokens=full(B, dtype=torch.int64),
        requests=requests,
        scored=empty_scored(B, K, device),
        drawn=full(B, value=-1, dtype=torch.int32),
        step=torch.ones(1, dtype=torch.int64),
        sample=True,
        addresses=torch.zeros(4, dtype=torch.int64),
        is_aligned=True,
    )
    options = {name: options[name] for name in given} | dict(max_candidates=K, is_logits=is_logits, score_all=score_all)
    options |= dict(top_k=full(B, value=k, dtype=torch.int32), top_p=full(B, value=0.95), min_p=full(B, value=0.01))
    return partial(topk_candidates, torch.randn(B, V, dtype=getattr(torch, dtype)), **options)


def make_case(*, B, k, V, dtype):
    call = make_call(B=B, K=triton.next_power_of_2(k), V=V, dtype=dtype, k=k, given=["temperature"])
    (scores,), filters = call.args, (call.keywords["top_k"], call.keywords["top_p"])
    rivals = {
        "FlashInfer top_k": partial(peers.flashinfer_topk, scores, k),
        "FlagGems topk": partial(peers.flag_gems_topk, scores, k),
        "torch.topk": partial(peers.torch_topk, scores, k),
    }
    if dtype == "float32":
        rivals["FlashInfer sampling"] = partial(peers.flashinfer_sample, scores, *filters)
        rivals["vLLM Qrita + copy"] = partial(peers.vllm_filter, scores, *filters)
    return TimedCase(call, scores.nbytes, peers=rivals)


FORMS = {
    f"topk_candidates {dtype} B{B} K{K}": dict(B=B, K=K, dtype=dtype) for dtype in FLOATS for B, K in ((1, 8), (64, 64))
}
FORMS |= {f"topk_candidates {x} of probabilities": dict(B=64, K=8, dtype=x, is_logits=False) for x in FLOATS}
FORMS["topk_candidates with every option"] = dict(B=64, K=8, dtype="float16", given=OPTIONS)
FORMS |= {
    f"topk_candidates K{K} V{V} in a step": dict(B=64, K=K, V=V, given=(*OPTIONS, *OF_STEP), score_all=K > 8)
    for K in (8, 64)
    for V in (VOCAB, MAX_VOCAB)
}
FORMS |= {
    f"topk_candidates {dtype} at addresses": dict(B=64, K=8, dtype=dtype, given=(*IN_GRAPH, "vocab_mask"))
    for dtype in FLOATS
}
FORMS["topk_candidates at addresses without a mask"] = dict(B=64, K=8, given=IN_GRAPH)
FORMS["topk_candidates, every size 1"] = dict(B=1, K=1, V=1, is_logits=False)
FORMS["topk_candidates in a step, every size 1"] = dict(B=1, K=1, V=1, given=(*OF_TABLE, *OF_STEP))

BENCHMARK = Benchmark(
    "topk_candidates",
    make_case,
    dict(B=64, k=5, V=VOCAB, dtype="float32"),
    axes=dict(dtype=["bfloat16"], B=[1, 8, 256, 512], k=[2, 16, 64], V=[32_000, 262_144]),
    others=[dict(B=512, k=64, V=262_144)],
    quick=[dict(B=4, V=32_000), dict(B=4, V=32_000, dtype="bfloat16")],
)
