"""What is read of a batch of SGLang, in every version of it. Importable without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def last_tokens(batch: ForwardBatch, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last token of each sequence of a batch, the requests' table rows, and the sequences' lengths.

    All ``[requests]`` and as they are on the device: under the overlapping scheduler the host does not know the tokens.
    """
    last: Any = slice(0, requests)
    if not batch.forward_mode.is_decode():
        last = (batch.extend_start_loc + batch.extend_seq_lens - 1).long()
    return batch.input_ids[last], batch.req_pool_indices[:requests], batch.seq_lens[:requests].int()
