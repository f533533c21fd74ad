"""Time of ``topk_candidates``. The floor reads the scores once.

The 39 MB of B = 64 in fp32 fit the L2 cache of an H200: the cold time is the one to compare with the floor.
FlashInfer's sampler and vLLM's filter do another part of an engine's work on the same scores.
"""

from functools import partial

import torch
import triton

from bench import peers
from bench.harness import FLOATS, Benchmark, TimedCase
from bench.models import VOCAB
from lenvm_kernels.ops.topk_candidates import topk_candidates

OPTIONS = ("temperature", "entropy_threshold", "guided", "vocab_mask", "end_token_ids", "min_end_prob", "least_share")
OPTIONS += ("due_length", "generated", "table_rows", "text_breaks", "last_tokens")
TABLE_ROWS, ENDS = 9, 12  # rows of the requests' table, end tokens per row


def make_call(*, B, K, V=VOCAB, dtype="float32", k=5, is_logits=True, given=()):
    """A call with ``K`` slots for candidates and the options ``given``."""

    def full(*shape, value=0.0, dtype=torch.float32):
        return torch.full(shape, value, dtype=dtype)

    options = dict(
        temperature=full(B, value=1.0),
        entropy_threshold=full(B, value=torch.nan),
        guided=full(B, value=1, dtype=torch.bool),
        vocab_mask=full(B, V // 32, value=-1, dtype=torch.int32),
        end_token_ids=full(TABLE_ROWS, ENDS, value=-2, dtype=torch.int32),
        min_end_prob=full(TABLE_ROWS),
        least_share=full(TABLE_ROWS),
        due_length=full(TABLE_ROWS),
        generated=full(B, dtype=torch.int32),
        table_rows=torch.randint(TABLE_ROWS, (B,)),
        text_breaks=full(V, dtype=torch.int8),
        last_tokens=full(B, dtype=torch.int64),
    )
    options = {name: options[name] for name in given} | dict(max_candidates=K, is_logits=is_logits)
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
FORMS["topk_candidates, every size 1"] = dict(B=1, K=1, V=1, is_logits=False)

BENCHMARK = Benchmark(
    "topk_candidates",
    make_case,
    dict(B=64, k=5, V=VOCAB, dtype="float32"),
    axes=dict(dtype=["bfloat16"], B=[1, 8, 256, 512], k=[2, 16, 64], V=[32_000, 262_144]),
    others=[dict(B=512, k=64, V=262_144)],
    quick=[dict(B=4, V=32_000), dict(B=4, V=32_000, dtype="bfloat16")],
)
