"""Sampling of a batch of answers with ``model.generate``, for the commands that measure or collect answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

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
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> list[tuple[list[int], float | None]]:
    """Answer a batch of prompts. Draws come from torch's generator.

    Args:
        value_model: source of values. If None, guidance uses end tokens alone.
        inputs: see :meth:`Models.encode`.
        guidance: one for all prompts, or one per prompt. None means unguided.
        max_new_tokens: limit of all answers, or one per answer.
        streamer: receives the tokens of every step.
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
        streamer=streamer,
    )
    new = sequences[:, width:]
    ended = torch.isin(new, torch.tensor(models.eos_token_ids, device=device)).long()
    is_answer = (ended.cumsum(1) - ended == 0) & (width + torch.arange(new.shape[1], device=device) < last[:, None])
    answers = [ids[mask].tolist() for ids, mask in zip(new, is_answer, strict=True)]
    return list(zip(answers, processor.predicted_output_lengths(sequences), strict=True))


class AnswerBar(tqdm, BaseStreamer):
    """A progress bar of answers that also shows tokens and tokens/s while a batch is decoded.

    Args:
        total: number of answers.
        made: number of answers made before.
        models: the base model, whose first end-of-sequence token pads rows that have ended.
    """

    def __init__(self, total: int, made: int, models: Models) -> None:
        # smoothing=0: updates between batches count no answer, which would distort a smoothed rate.
        super().__init__(total=total, initial=made, unit="answer", miniters=0, mininterval=1, smoothing=0)
        self._padding, self._tokens = next(iter(models.eos_token_ids), None), 0

    def put(self, value: torch.Tensor) -> None:
        """Count the tokens ``[B]`` of a step, without ends; the prompts ``[B, N]``, which come first, are ignored."""
        if value.ndim == 1:
            self._tokens += len(value) if self._padding is None else int((value != self._padding).sum())
            rate = self._tokens / max(self.format_dict["elapsed"], 1e-9)
            self.set_postfix_str(f"{self._tokens} tokens, {rate:.1f} tokens/s", refresh=False)
            self.update(0)

    def end(self) -> None:
        """Required by the streamer interface; the bar stays open for the next batch."""
