"""Steps of every kind, which a warm-up runs so that no kernel is compiled later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.step.inputs import Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Drafts


class StepCall(NamedTuple):
    """Arguments of :meth:`GuidedStep.step`, by their names there."""

    scores: torch.Tensor
    batch: StepBatch
    sampling: Sampling
    drafts: Drafts | None
    probs: torch.Tensor | None
    verify: str | None


def calls_of_every_kind(
    config: StepConfig,
    table_rows: torch.Tensor,
    scores_dtype: torch.dtype,
    probs_dtype: torch.dtype,
    states: tuple[int, torch.dtype] | None,
    *,
    is_logits: bool,
) -> Iterator[StepCall]:
    """Steps with and without each optional argument, of requests that do not exist.

    Args:
        config: of the step.
        table_rows: int64 ``[B]``; what the requests are known by.
        scores_dtype, is_logits: of the scores.
        probs_dtype: of the ``probs``.
        states: as :class:`ValueSource` needs them.
    """
    size, device, vocab, max_drafts = len(table_rows), table_rows.device, config.vocab_size, config.max_drafts
    # A kernel is compiled anew for an argument that is absent, and for rows that are not aligned.
    yes_or_no = (False, True)
    strides = {vocab, 16 * ceil_div(vocab, 16)}
    # Drafts of a request, and tokens that it is told.
    told = {(0, 1), (0, 1 + max_drafts), (max_drafts, 1 + max_drafts)}

    def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    for (drafted, width), stride, has_temperature, has_mask, has_probs in itertools.product(
        sorted(told), strides, {False, is_logits}, yes_or_no, yes_or_no
    ):
        rows = size * (1 + drafted)
        mask = full(0, torch.int32, rows, ceil_div(vocab, 32)) if has_mask else None
        scores, probs = (full(0, dtype, rows, stride)[:, :vocab] for dtype in (scores_dtype, probs_dtype))
        none, lens = full(-1, torch.int32, size, drafted), full(0, torch.int32, size)
        tokens = full(0, torch.int64, *((size, width) if width > 1 else (size,)))
        yield StepCall(
            scores,
            StepBatch(
                tokens,
                table_rows,
                lens,
                lens if width > 1 else None,
                states=None if states is None else full(0, states[1], rows, states[0]),
            ),
            Sampling(0, 1.0, 0.0, 1.0 if has_temperature else None, is_logits, mask, sample=True),
            Drafts(none.long(), none) if drafted else None,
            probs if has_probs else None,
            "same_draws" if drafted else None,
        )
