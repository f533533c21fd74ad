"""Operations on tensors that the plugins of several engines share. Importable without an engine."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from lenvm_kernels.ops._common import resolve_backend
from lenvm_kernels.ops._device import kernel
from lenvm_kernels.step import StepBatch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


BLOCK = 4096  # columns per program; not measured yet


@kernel()
def _leave_only_kernel(logits_ptr, stride_row, tokens_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.where(column == token, 0.0, -float("inf"))
    tl.store(logits_ptr + row * stride_row + column, x, mask=(column < V) & (token >= 0))


def leave_only(logits: torch.Tensor, tokens: torch.Tensor, backend: str = "auto") -> None:
    """Mask all tokens except ``tokens [N]`` in logits ``[N, V]``, in place, so that any sampler returns ``tokens``.

    Rows with a negative token are unchanged. ``backend`` is ``auto``, ``triton`` or ``reference``.
    """
    if resolve_backend(backend, "logits", logits) == "triton":
        grid = len(tokens), triton.cdiv(logits.shape[1], BLOCK)
        _leave_only_kernel[grid](logits, logits.stride(0), tokens, logits.shape[1], BLOCK=BLOCK)
        return
    is_drawn, token = tokens[:, None] >= 0, tokens[:, None].clamp(min=0).long()
    kept = logits.gather(1, token).masked_fill(is_drawn, 0.0)
    logits.masked_fill_(is_drawn, -math.inf).scatter_(1, token, kept)


def guided_logits(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, probs: torch.Tensor, temperature: Any = 1.0
) -> torch.Tensor:
    """A copy of logits ``[N, V]`` in which the softmax of ``rows``, bool ``[N]``, is the guided distribution.

    The candidates ``token_ids [N, K]`` have the guided probabilities ``probs [N, K]``. The caller divides the copy by
    ``temperature``, a number or ``[N, 1]``.
    """
    token_ids = token_ids.clamp(min=0).long()  # the probability of padding is 0
    weights = torch.zeros_like(logits, dtype=torch.float32).scatter_add_(1, token_ids, probs)
    return torch.where(rows[:, None], weights.log() * temperature, logits)


def warm_up(device: torch.device) -> None:
    """Compile the kernel of :func:`leave_only` for fp32 logits."""
    leave_only(torch.zeros(1, 1, device=device), torch.full((1,), -1, dtype=torch.int32, device=device))


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without a host-device sync."""
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def last_tokens(batch: "ForwardBatch", requests: int) -> StepBatch:
    """The sequences of a batch of SGLang or of its fork, with the last token of each.

    Reads tensors on the device, because the overlapping scheduler does not have the tokens on the host.
    """
    last: Any = slice(0, requests)
    if not batch.forward_mode.is_decode():
        last = (batch.extend_start_loc + batch.extend_seq_lens - 1).long()
    return StepBatch(
        batch.input_ids[last],
        batch.req_pool_indices[:requests],
        batch.seq_lens[:requests].int(),
        # Strides only count batches that decode.
        counts=batch.forward_mode.is_decode() or batch.forward_mode.is_mixed(),
    )


def whole_embedding(layer: Any, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The input embedding ``[V, H]`` of an engine's layer, without padding.

    ``all_gather`` concatenates the parts of the tensor-parallel ranks. Raises ValueError for tokens added for LoRA.
    """
    weight = layer.weight.detach()
    if getattr(layer, "tp_size", 1) > 1:
        if added := layer.num_added_embeddings:
            raise ValueError(f"the base model's embedding must have no tokens added for LoRA, got {added}")
        weight = all_gather(weight)
    return weight[: getattr(layer, "org_vocab_size", len(weight))]
