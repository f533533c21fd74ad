"""One batch of answers by ``model.generate``, as the demo and ``lenvm evaluate`` sample them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from lenvm_kernels.adapters.transformers import Guidance, LenVMLogitsProcessor
from lenvm_kernels.demo.models import Models
from lenvm_kernels.value_model import ValueModel


@dataclass(frozen=True)
class Sampled:
    """What a batch of ``B`` prompts was answered with, in at most ``N`` tokens.

    Attributes:
        tokens: int64 ``[B, N]``; new tokens, and padding behind the end.
        counts: bool ``[B, N]``; tokens up to the first end-of-sequence token, that one included.
        logits: the base model's own at each step, in its dtype ``[B, V]``; none unless they were asked for.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    logits: tuple[torch.Tensor, ...]


def sample(
    models: Models,
    value_model: ValueModel | None,
    inputs: Mapping[str, torch.Tensor],
    guidance: Guidance | Sequence[Guidance],
    *,
    max_new_tokens: int,
    keep_logits: bool = False,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Sampled:
    """Answer a batch of prompts under one guidance; draws come from torch's generator.

    Args:
        models: the base model.
        value_model: what guides; None: the end of the text alone.
        inputs: of :meth:`Models.encode`.
        guidance: of all prompts, or of each; None: none.
        max_new_tokens: the limit of an answer.
        keep_logits: return the logits, too.
        streamer: told of every step.
        **options: sampling parameters and further arguments of :class:`LenVMLogitsProcessor`.

    Raises:
        ValueError: as :class:`LenVMLogitsProcessor`.
    """
    processor = LenVMLogitsProcessor(
        models.model,
        value_model,
        guidance,
        inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        tokenizers=(models.tokenizer, models.value_tokenizer),
        **options,
    )
    output = models.model.generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel lacks
        **inputs,
        **processor.generation_kwargs,
        pad_token_id=models.pad_token_id,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=keep_logits,
    )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    ended = torch.isin(new, torch.tensor(models.eos_token_ids, device=new.device)).long()
    return Sampled(new, ended.cumsum(1) - ended == 0, output.logits if keep_logits else ())
