"""vLLM's Triton kernel for top-k and top-p, Qrita (arXiv 2602.01518)."""

import torch

from bench.baselines import Run, load, require_cuda, require_dtype


def top_k_top_p_filter(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Run:
    """``apply_top_k_top_p_triton``; ``run`` returns the logits ``[B, V]``, those that top-k and top-p drop at -inf.

    It filters in place, and filtered logits are not what it is made for: every call filters a fresh copy, whose
    ``8 * B * V`` bytes of traffic are in the time. It neither draws nor lists what it keeps.

    Args:
        logits: fp32 ``[B, V]``.
        top_k: int32 ``[B]``, in 1 to V.
        top_p: fp32 ``[B]``, in (0, 1].

    Raises:
        Absent: vLLM's file is not there, no GPU, or logits in another dtype.
    """
    require_cuda(logits, or_interpreter=True)
    require_dtype(logits, torch.float32)
    apply = load("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton
    filtered = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return lambda: apply(filtered.copy_(logits), top_k, top_p)
