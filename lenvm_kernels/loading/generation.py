"""Sampling of a batch of answers with ``model.generate``, for the commands that measure or collect answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList

from lenvm_kernels.engines.transformers.processor import Guidance, LenVMLogitsProcessor
from lenvm_kernels.loading.models import Models
from lenvm_kernels.values import LengthProbe, ValueModel


def sample(
    models: Models,
    value_model: ValueModel | LengthProbe | None,
    inputs: Mapping[str, torch.Tensor],
    guidance: Guidance | Sequence[Guidance],
    *,
    max_new_tokens: int | Sequence[int],
    **options: Any,
) -> list[tuple[list[int], float | None]]:
    """Answer a batch of prompts. Draws come from torch's generator.

    Args:
        value_model: source of values. If None, guidance uses end tokens alone.
        inputs: see :meth:`Models.encode`.
        guidance: one for all prompts, or one per prompt. None means unguided.
        max_new_tokens: limit of all answers, or one per answer.
        **options: sampling parameters and further arguments of :class:`LenVMLogitsProcessor`.

    Returns:
        Per prompt, the new tokens up to and including the first end-of-sequence token, or up to the limit; and the
        length that was predicted before the first of them, None without ``return_values``.

    Raises:
        ValueError: as :class:`LenVMLogitsProcessor`.
    """
    width, device = inputs["input_ids"].shape[1], inputs["input_ids"].device
    limits = [max_new_tokens] if isinstance(max_new_tokens, int) else max_new_tokens
    last = width + torch.tensor(limits, device=device)
    processor = LenVMLogitsProcessor(
        models.model,
        value_model,
        guidance,
        inputs["attention_mask"],
        max_new_tokens=max(limits),
        tokenizers=(models.tokenizer, models.value_tokenizer),
        **options,
    )
    sequences = models.model.generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel lacks
        **inputs,
        **processor.generation_kwargs,
        # A row past its limit counts as ended, so that no values are computed for it.
        pad_token_id=next(iter(models.eos_token_ids), models.tokenizer.pad_token_id),
        stopping_criteria=StoppingCriteriaList([lambda ids, scores: (ids.shape[1] >= last).expand(len(ids))]),
    )
    new = sequences[:, width:]
    ended = torch.isin(new, torch.tensor(models.eos_token_ids, device=device)).long()
    is_answer = (ended.cumsum(1) - ended == 0) & (width + torch.arange(new.shape[1], device=device) < last[:, None])
    answers = [ids[mask].tolist() for ids, mask in zip(new, is_answer, strict=True)]
    return list(zip(answers, processor.predicted_output_lengths(sequences), strict=True))
