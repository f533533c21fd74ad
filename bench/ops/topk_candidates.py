"""Time ``topk_candidates``. Floor: the scores are read once (``B * V * itemsize`` bytes), at copy bandwidth.

    python -m bench.ops.topk_candidates [--device cpu] [--quick] [--json FILE]

Scores are random logits, fp32 or bf16 as a case says, whatever ``--dtype`` is. The 39 MB of B = 64 in fp32 stay in the
L2 cache of an H200 from call to call: the cold time is the one beside the floor. FlashInfer's sampling and vLLM's
filter do another part of an engine's work on the same scores: they choose from the vocabulary, but list no candidates.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton

from bench.harness.cases import FLOATS, Benchmark, Case, peer
from bench.models import VOCAB
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.reference import topk_candidates as reference

OPTIONS = ("temperature", "entropy_threshold", "guided", "vocab_mask", "end_token_ids", "min_end_prob", "least_share")
OPTIONS += ("due_length", "generated", "table_rows", "text_breaks", "last_tokens")
TABLE_ROWS, ENDS = 9, 12  # of what a request asks, where it is in a table; end tokens of a row


def make_call(
    device: str, *, B: int, K: int, V: int, dtype: str, k: int = 5, is_logits: bool = True, given: Sequence[str] = ()
) -> partial:
    """A call with ``K`` slots for candidates and so many of ``OPTIONS``."""

    def full(*shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

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
        table_rows=torch.randint(TABLE_ROWS, (B,), device=device),
        text_breaks=full(V, dtype=torch.int8),
        last_tokens=full(B, dtype=torch.int64),
    )
    return partial(
        topk_candidates,
        torch.randn(B, V, dtype=getattr(torch, dtype), device=device),
        top_k=full(B, value=k, dtype=torch.int32),
        top_p=full(B, value=0.95),
        min_p=full(B, value=0.01),
        max_candidates=K,
        is_logits=is_logits,
        **{name: options[name] for name in given},
    )


def make_case(device: str, *, B: int, k: int, V: int, dtype: str) -> Case:
    call = make_call(device, B=B, K=triton.next_power_of_2(k), V=V, dtype=dtype, k=k, given=["temperature"])
    (scores,), top_k, top_p = call.args, call.keywords["top_k"], call.keywords["top_p"]
    return Case(
        call,
        scores.nbytes,
        peers={
            "FlashInfer top_k": peer("flashinfer", "topk_candidates", scores, k),
            "FlagGems topk": peer("flag_gems", "topk_candidates", scores, k),
            "torch.topk": peer("pytorch", "topk_candidates", scores, k),
            "FlashInfer sampling": peer("flashinfer", "top_k_top_p_sample", scores, top_k, top_p),
            "vLLM Qrita + copy": peer("vllm", "top_k_top_p_filter", scores, top_k, top_p),
        },
        reference=partial(reference.topk_candidates, scores, **dict.fromkeys(OPTIONS) | call.keywords),
    )


FORMS = {
    f"topk_candidates {dtype} B{B} K{K} {'logits' if is_logits else 'probabilities'}": dict(
        B=B, K=K, V=VOCAB, dtype=FLOATS[dtype], is_logits=is_logits
    )
    for dtype in FLOATS
    for B, K, is_logits in ((1, 8, True), (64, 64, True), (64, 8, False))
}
FORMS["topk_candidates with every option"] = dict(B=64, K=8, V=VOCAB, dtype="float16", given=OPTIONS)
FORMS["topk_candidates, every size 1"] = dict(B=1, K=1, V=1, dtype="float32", is_logits=False)

BENCHMARK = Benchmark(
    "topk_candidates",
    make_case,
    production=dict(B=64, k=5, V=VOCAB, dtype="float32"),
    axes=dict(dtype=["bfloat16"], B=[1, 8, 256, 512], k=[2, 16, 64, 8, 32], V=[32_000, 128_256, 262_144]),
    others=[
        dict(B=512, dtype="bfloat16"),
        dict(B=1, k=64),
        dict(B=512, k=64, V=262_144),
        dict(k=64, V=262_144, dtype="bfloat16"),
    ],
    quick=(dict(B=4, V=32_000), dict(dtype="bfloat16")),
)

if __name__ == "__main__":
    BENCHMARK.main()
