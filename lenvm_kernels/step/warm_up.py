"""The steps that a warm-up runs so that no later step compiles a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.step.inputs import Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Drafts


class DummyStep(NamedTuple):
    """Arguments of a step of dummy requests, which are not guided, so that no element of ``scores`` is read."""

    scores: torch.Tensor
    batch: StepBatch
    drafts: Drafts | None
    sampling: Sampling


def dummy_steps(
    config: StepConfig,
    table_rows: torch.Tensor,
    scores_dtype: torch.dtype,
    states: tuple[int, torch.dtype] | None,
    *,
    is_logits: bool,
    sample: bool,
    has_mask: bool,
) -> Iterator[DummyStep]:
    """Steps without drafts, with one and with several new tokens, and with drafts.

    Args:
        config: configuration of the step.
        table_rows: int64 ``[B]``; rows of the requests.
        scores_dtype, is_logits: dtype of the scores, and whether they are logits.
        states: :attr:`ValueSource.needs_states`.
        sample: whether tokens are drawn from the candidates.
        has_mask: whether there is a ``vocab_mask``.
    """
    size, device, vocab, max_drafts = len(table_rows), table_rows.device, config.vocab_size, config.max_drafts

    def rows_of(width: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        # One row in memory: the scores of a large batch would take gigabytes that an engine has reserved.
        return torch.zeros(1, width, dtype=dtype, device=device).expand(count, -1)

    lens = torch.zeros(size, dtype=torch.int32, device=device)
    for drafted, width in sorted({(0, 1), (0, 1 + max_drafts), (max_drafts, 1 + max_drafts)}):
        nodes = size * (1 + drafted)
        tokens = torch.zeros((size, width) if width > 1 else (size,), dtype=torch.int64, device=device)
        row_states = None if states is None else rows_of(states[0], states[1], nodes).contiguous()
        none = torch.full((size, drafted), -1, dtype=torch.int32, device=device)
        yield DummyStep(
            rows_of(vocab, scores_dtype, nodes),
            StepBatch(tokens, table_rows, lens, lens if width > 1 else None, states=row_states),
            Drafts(none.long(), none) if drafted else None,
            Sampling(
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                temperature=1.0 if is_logits else None,
                is_logits=is_logits,
                vocab_mask=rows_of(ceil_div(vocab, 32), torch.int32, nodes) if has_mask else None,
                sample=sample,
            ),
        )
