"""Reads the sequences of a batch of SGLang or of its LenVM fork. Importable without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lenvm_kernels.step import StepBatch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def last_tokens(batch: ForwardBatch, requests: int) -> StepBatch:
    """The sequences of a batch with the last token of each, from tensors on the device.

    Under the overlapping scheduler, the tokens are not available on the host.
    """
    last: Any = slice(0, requests)
    if not batch.forward_mode.is_decode():
        last = (batch.extend_start_loc + batch.extend_seq_lens - 1).long()
    return StepBatch(
        batch.input_ids[last],
        batch.req_pool_indices[:requests],
        batch.seq_lens[:requests].int(),
        # A prefill batch runs between decode steps, or is mixed with one.
        counts=batch.forward_mode.is_decode() or batch.forward_mode.is_mixed(),
    )
