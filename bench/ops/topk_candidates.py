"""Time ``topk_candidates``. Floor: the scores are read once (``B * V * itemsize`` bytes), at copy bandwidth.

    python -m bench.ops.topk_candidates [--device cpu] [--quick] [--json FILE]

Scores are random logits, fp32 or bf16 as a case says, whatever ``--dtype`` is. The 39 MB of B = 64 in fp32 stay in the
L2 cache of an H200 from call to call: the cold time is the one beside the floor. FlashInfer's sampling and vLLM's
filter do another part of an engine's work on the same scores: they choose from the vocabulary, but list no candidates.
"""

from functools import partial

import torch
import triton

from bench.harness.cases import Benchmark, Case, peer
from bench.models import VOCAB
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.reference import topk_candidates as reference


def make_case(device: str, *, B: int, k: int, V: int, dtype: str) -> Case:
    scores = torch.randn(B, V, device=device).to(getattr(torch, dtype))
    top_k = torch.full((B,), k, dtype=torch.int32, device=device)
    top_p = torch.full((B,), 0.95, device=device)
    arguments = dict(
        top_k=top_k,
        top_p=top_p,
        min_p=torch.full((B,), 0.01, device=device),
        temperature=torch.ones(B, device=device),
        max_candidates=triton.next_power_of_2(k),
        is_logits=True,
    )
    of_ends = ("end_token_ids", "min_end_prob", "least_share", "due_length", "generated")
    of_ends += ("text_breaks", "last_tokens", "table_rows")
    unused = dict.fromkeys(("entropy_threshold", "guided", "vocab_mask", *of_ends))
    return Case(
        partial(topk_candidates, scores, **arguments),
        scores.nbytes,
        peers={
            "FlashInfer top_k": peer("flashinfer", "topk_candidates", scores, k),
            "FlagGems topk": peer("flag_gems", "topk_candidates", scores, k),
            "torch.topk": peer("pytorch", "topk_candidates", scores, k),
            "FlashInfer sampling": peer("flashinfer", "top_k_top_p_sample", scores, top_k, top_p),
            "vLLM Qrita + copy": peer("vllm", "top_k_top_p_filter", scores, top_k, top_p),
        },
        reference=partial(reference.topk_candidates, scores, **arguments, **unused),
    )


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
