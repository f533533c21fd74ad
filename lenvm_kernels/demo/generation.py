"""One batch of answers by ``model.generate``, as the demo and ``lenvm evaluate`` sample them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lenvm_kernels.adapters.transformers import Guidance, LenVMLogitsProcessor
from lenvm_kernels.demo.models import Models
from lenvm_kernels.value_model import Trunk, ValueModel


@dataclass(frozen=True)
class Sampled:
    """What a batch of ``B`` prompts was answered with, in at most ``N`` tokens.

    Attributes:
        tokens: int64 ``[B, N]``; new tokens, and padding behind the end.
        counts: bool ``[B, N]``; tokens up to the first end-of-sequence token, that one included, or to the limit.
        predicted: how long each answer was predicted to be before it began, where its guidance has ``return_values``.
        logits: the base model's own at each step, in its dtype ``[B, V]``; none unless they were asked for.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    predicted: list[float | None]
    logits: tuple[torch.Tensor, ...]


def sample(
    models: Models,
    value_model: ValueModel | Trunk | None,
    inputs: Mapping[str, torch.Tensor],
    guidance: Guidance | Sequence[Guidance],
    *,
    max_new_tokens: int | Sequence[int],
    keep_logits: bool = False,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Sampled:
    """Answer a batch of prompts under one guidance; draws come from torch's generator.

    Args:
        models: the base model.
        value_model: what guides, or a trunk; None: the end of the text alone.
        inputs: of :meth:`Models.encode`.
        guidance: of all prompts, or of each; None: none.
        max_new_tokens: the limit of an answer, or of each.
        keep_logits: return the logits, too.
        streamer: told of every step.
        **options: sampling parameters and further arguments of :class:`LenVMLogitsProcessor`.

    Raises:
        ValueError: as :class:`LenVMLogitsProcessor`.
    """
    limits = [max_new_tokens] if isinstance(max_new_tokens, int) else max_new_tokens
    last = inputs["input_ids"].shape[1] + torch.tensor(limits, device=inputs["input_ids"].device)
    processor = LenVMLogitsProcessor(
        models.model,
        value_model,
        guidance,
        inputs["attention_mask"],
        max_new_tokens=max(limits),
        tokenizers=(models.tokenizer, models.value_tokenizer),
        **options,
    )
    output = models.model.generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel lacks
        **inputs,
        **processor.generation_kwargs,
        # Behind its limit a row counts as ended: no values are computed for it any more.
        pad_token_id=next(iter(models.eos_token_ids), models.pad_token_id),
        stopping_criteria=StoppingCriteriaList([lambda ids, scores: (ids.shape[1] >= last).expand(len(ids))]),
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=keep_logits,
    )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    ended = torch.isin(new, torch.tensor(models.eos_token_ids, device=new.device)).long()
    place = inputs["input_ids"].shape[1] + torch.arange(new.shape[1], device=new.device)
    counts = (ended.cumsum(1) - ended == 0) & (place < last[:, None])
    logits = output.logits if keep_logits else ()
    return Sampled(new, counts, processor.predicted_output_lengths(output.sequences), logits)


class AnswerBar(tqdm, BaseStreamer):
    """A bar of answers that also shows tokens, and tokens/s, while a batch is decoded.

    Args:
        total: number of answers.
        made: number of answers made before.
        models: the base model, whose first end-of-sequence token pads rows that have ended.
    """

    def __init__(self, total: int, made: int, models: Models) -> None:
        # Updates by no answer would make a smoothed rate, and the time left, depend on the last token's duration.
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
        """Nothing is left to count after a batch."""
