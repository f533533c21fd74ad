"""Answers of the base model alone, in process.

``generate`` of transformers draws from the whole vocabulary, and carries rows that have ended to the end of the batch.
On a CPU both cost more than the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from lenvm_kernels.loading.models import Models

# Rows that have ended are dropped when they are this share of a batch.
DROPPED_SHARE = 0.125


@torch.no_grad()
def decode(
    models: Models,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    *,
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """Answer prompts as one batch; draws come from torch's generator.

    Args:
        models: the base model.
        prompts: tokens of each.
        sampling: ``temperature``, ``top_k`` (0: all), ``top_p`` and ``min_p``.
        max_new_tokens: the limit of an answer.
        streamer: gets the tokens of every step.

    Returns:
        The new tokens of each prompt, up to an end-of-sequence token, that one included.
    """
    inputs = models.padded(prompts)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    eos = torch.tensor(models.eos_token_ids, device=ids.device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt of each row of the batch
    ended = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
    cache = DynamicCache(config=models.model.config)
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = models.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        probs, candidates = filtered(output.logits[:, -1], sampling)
        ids = candidates.gather(1, torch.multinomial(probs, 1))
        for row, token, over in zip(rows, ids[:, 0].tolist(), ended.tolist(), strict=True):
            if not over:
                answers[row].append(token)
        if streamer is not None:
            streamer.put(ids[~ended, 0])
        ended |= torch.isin(ids[:, 0], eos)
        count = int(ended.sum())
        if count == len(rows):
            break
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
        if count > DROPPED_SHARE * len(rows):
            kept = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(kept)
            ids, mask, ended, rows = ids[kept], mask[kept], ended[kept], [rows[i] for i in kept.tolist()]
    return answers


def filtered(logits: torch.Tensor, sampling: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities fp32 ``[B, K]``, falling, and the tokens ``[B, K]`` that have them, after the sampling filters.

    They are filtered in the order of transformers: temperature, ``top_k``, ``top_p``, ``min_p``.

    Args:
        logits: ``[B, V]``.
        sampling: as :func:`decode` takes it.
    """
    count = min(sampling["top_k"] or logits.shape[1], logits.shape[1])
    logits, tokens = (logits.float() / sampling["temperature"]).topk(count, dim=1)
    probs = logits.softmax(dim=1)
    above = probs.cumsum(dim=1) - probs
    kept = (above < sampling["top_p"]) & (probs >= sampling["min_p"] * probs[:, :1])
    probs = probs * kept
    return probs / probs.sum(dim=1, keepdim=True), tokens
