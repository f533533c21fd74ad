"""The steps that a warm-up runs so that no later step compiles a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.step.inputs import Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Drafts


def calls_of_every_kind(
    config: StepConfig,
    table_rows: torch.Tensor,
    scores_dtype: torch.dtype,
    probs_dtype: torch.dtype,
    states: tuple[int, torch.dtype] | None,
    *,
    is_logits: bool,
) -> Iterator[tuple[torch.Tensor, StepBatch, Drafts | None, dict[str, Any]]]:
    """Scores, batch, drafts and further arguments of :meth:`GuidedStep.step` for dummy requests, in all combinations.

    Args:
        config: configuration of the step.
        table_rows: int64 ``[B]``; rows of the requests.
        scores_dtype, is_logits: dtype of the scores, and whether they are logits.
        probs_dtype: dtype of ``probs``.
        states: :attr:`ValueSource.needs_states`.
    """
    size, device, vocab, max_drafts = len(table_rows), table_rows.device, config.vocab_size, config.max_drafts
    # Triton compiles a kernel variant for each absent argument, and for unaligned rows.
    yes_or_no = (False, True)
    strides = {vocab, 16 * ceil_div(vocab, 16)}
    # Drafts per request, and columns of ``tokens``.
    widths = {(0, 1), (0, 1 + max_drafts), (max_drafts, 1 + max_drafts)}

    def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    for (drafted, width), stride, has_temperature, has_mask, has_probs in itertools.product(
        sorted(widths), strides, {False, is_logits}, yes_or_no, yes_or_no
    ):
        rows = size * (1 + drafted)
        mask = full(0, torch.int32, rows, ceil_div(vocab, 32)) if has_mask else None
        scores, probs = (full(0, dtype, rows, stride)[:, :vocab] for dtype in (scores_dtype, probs_dtype))
        none, lens = full(-1, torch.int32, size, drafted), full(0, torch.int32, size)
        tokens = full(0, torch.int64, *((size, width) if width > 1 else (size,)))
        row_states = None if states is None else full(0, states[1], rows, states[0])
        batch = StepBatch(tokens, table_rows, lens, lens if width > 1 else None, states=row_states)
        drafts = Drafts(none.long(), none) if drafted else None
        temperature = 1.0 if has_temperature else None
        yield (
            scores,
            batch,
            drafts,
            dict(
                sampling=Sampling(0, 1.0, 0.0, temperature, is_logits, mask, sample=True),
                probs=probs if has_probs else None,
                verify="same_draws" if drafted else None,
            ),
        )
